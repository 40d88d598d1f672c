"""Gates of a fit, rounded to 0 and 1."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.elbo import ELBO
from numpyro.optim import Adam

from numpyro_tempered.core import Array, Params, check_count, check_number, key_first
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guide_laws import has_gates
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.support_prior import given_size
from numpyro_tempered.infer.svi import Optim, TemperedFit, finish


@key_first
def round_and_refit(
    rng_key: Array,
    fit: TemperedFit,
    *,
    threshold: float = 0.5,
    num_weights: int | None = None,
    num_steps: int = 1000,
    optim: Optim = None,
    loss: ELBO | None = None,
    num_particles: int = 1000,
) -> TemperedFit:
    r"""Round the gates of an ``AutoSpikeAndSlab`` fit to {0, 1}, and fit its slabs to those.

    .. math:: q = \prod_{j \in S} N(m_j, \sigma_j^2) \prod_{j \notin S} \delta_0,
              \qquad S = \{j : \varphi_j \ge \mathrm{threshold}\},

    which the variational family contains. With these gates nothing is relaxed: the loss of the refit is the
    negative ELBO itself.

    Rounding gains where gates that count may drop, since with φ = .99 on ten of them one draw in ten is of a
    broken model. It loses where the posterior is undecided about gates, or where they do not matter: a gate at
    its prior λ costs nothing, and one at 0 the log of 1/(1 - λ). Both fits have a valid ``elbo``: take the
    greater one.

    Args:
        rng_key: Key of the refit.
        fit: Result of :func:`fit_svi` with an ``AutoSpikeAndSlab`` guide. Its means and scales are the start.
        threshold: Probability φ at and above which a gate becomes 1, in (0, 1).
        num_weights: S, for the S gates of the greatest φ in place of a threshold; of gates that are equal, those
            with the greatest ratio of mean to scale. The ELBO is then that under the prior given that S weights
            are on, which is uniform over the supports of size S:
            :math:`\log \binom{T}{S} + \sum_{j \in S} \mathrm{KL}(N(m_j, \sigma_j^2), \mathrm{slab})` is its KL.
            The ``model`` of the fit still has independent gates.
        num_steps: Steps of the optimiser; 0 only rounds and evaluates.
        optim: NumPyro or optax optimiser; by default Adam, with a step size that falls from 0.02 to 0.0002.
        loss: ``TraceMeanField_ELBO()`` by default, which may be given with more particles.
        num_particles: Draws for the ELBO.

    Returns:
        A :class:`.TemperedFit` whose ``probs`` are 0 and 1. Its ``losses`` are of the refit, and negative ELBOs.

    Raises:
        TypeError: If ``fit`` is not such a result.
        ValueError: If an option is out of range, the refit ends in NaN, or ``num_weights`` is given and the prior
            has not one fixed probability for all weights.

    References:
        CA-DNN, whose family has gates of 0 and 1.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     prior = nt.sparse.SpikeAndSlab(0.25, 0.0, 2.0)
        ...     w = numpyro.sample("w", prior.expand([x.shape[1]]).to_event(1))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        >>> x = jax.random.normal(jax.random.key(0), (50, 4))
        >>> guide, y = nt.guides.AutoSpikeAndSlab, 2.0 * x[:, 0]
        >>> fit = nt.fit_svi(jax.random.key(1), model, guide, x, y, num_steps=1000)
        >>> rounded = nt.sparse.round_and_refit(jax.random.key(2), fit)
        >>> print(rounded.params["w_auto_probs"], rounded.elbo.value > fit.elbo.value)
        [1. 0. 0. 0.] True
    """
    guide = fit.guide if isinstance(fit, TemperedFit) else None
    if not has_gates(guide):
        name = type(fit if guide is None else guide).__name__
        raise TypeError(f"round_and_refit takes a fit by AutoSpikeAndSlab, got {name}.")
    check_number(threshold, "threshold", "(0, 1)")
    fit_key, elbo_key, later_key = jax.random.split(rng_key, 3)
    params, gates, rounded = dict(fit.params), {}, {}
    sizes = {
        name: fit.params[f"{name}_{guide.prefix}_probs"].size
        for name in guide.sparse_sites
    }
    if num_weights is not None:
        check_count(num_weights, "num_weights", 1, sum(sizes.values()))
        gates = _most_probable(fit.params, guide, num_weights)
    for name in guide.sparse_sites:
        param = f"{name}_{guide.prefix}_probs"
        probs = params.pop(param)
        if num_weights is None:
            gates[name] = jnp.greater_equal(probs, threshold).astype(probs.dtype)
        rounded[param] = gates[name]
    model: temper = fit.model  # type: ignore[assignment]
    args, kwargs, losses = fit.args, fit.kwargs, jnp.zeros(0)
    if num_steps:
        optim = (
            Adam(lambda step: 0.02 * 0.01 ** (step / num_steps))
            if optim is None
            else optim
        )
        loss = TraceMeanField_ELBO() if loss is None else loss
        svi = SVI(model, model.guide(guide.with_gates(gates)), optim, loss)
        result = svi.run(
            fit_key, num_steps, *args, progress_bar=False, init_params=params, **kwargs
        )
        params, losses = result.params, result.losses
    keys, params = (elbo_key, later_key), params | rounded
    result = finish(
        keys,
        model,
        guide,
        params,
        losses,
        args,
        kwargs=kwargs,
        num_particles=num_particles,
    )
    result = result._replace(coords=fit.coords, columns=fit.columns)
    return result if num_weights is None else given_size(result)


def _most_probable(params: Params, guide: AutoSpikeAndSlab, num_weights: int) -> Params:
    """Gates of 1 for so many weights, over all sites."""

    def flat(field: str) -> tuple[Array, Callable[[Array], Params]]:
        return ravel_pytree(
            {
                name: params[f"{name}_{guide.prefix}_{field}"]
                for name in guide.sparse_sites
            }
        )

    probs, unravel = flat("probs")
    ratio = jnp.abs(flat("loc")[0]) / flat("scale")[0]
    order = jnp.lexsort((ratio, probs))
    return unravel(jnp.zeros_like(probs).at[order[-num_weights:]].set(1.0))
