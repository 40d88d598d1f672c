"""Batch tempered variational inference by NumPyro's SVI."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.optim import Adam

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.result import (
    DataSummary,
    Run,
    TemperedELBO,
    fit_attrs,
    refuse_data,
    summarise_observed,
)
from numpyro_tempered.core.typing import Array, Guide, Model, Params, PyTree
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.handlers.temper import check_alpha, temper
from numpyro_tempered.infer.build_guide import build_guide
from numpyro_tempered.infer.elbo import evaluate_elbo, gaussian_of_laplace, trace_guide, trace_model
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab, exact_gates
from numpyro_tempered.report.draws import name_of, one_chain, plain_params

# None, an optimiser of NumPyro's or optax's gradient transformation, a pair of functions.
Optim: TypeAlias = NumPyroOptim | tuple[Callable[..., PyTree], Callable[..., PyTree]] | None

# Share of the steps that the default optimiser takes at its full step size.
CONSTANT = 0.6


class TemperedFit(NamedTuple):
    """A guide fitted to a tempered model by :func:`fit_svi`.

    Attributes:
        model: The tempered model.
        guide: The fitted guide, built on ``model``.
        params: Its parameters.
        alpha: Power on the likelihood; by site where sites differ.
        losses: Negative ELBO at every step, shape ``(num_steps,)``; for ``AutoSpikeAndSlab`` the negative
            relaxed objective, which is no bound.
        elbo: The ELBO at the end, with its standard error and its two parts.
        observed: Observed values by site.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.
        rng_key: Key for what is drawn from the fit afterwards.
        convergence: The run of :func:`fit_gaussian` and how near it came to the optimum; None of other fits.
        late_fall: By how many nats the loss of :func:`fit_svi` still fell over the last tenth of its steps at
            full step size; 0 where that may be noise.
    """

    model: Model
    guide: Guide
    params: dict[str, Array]
    alpha: float | dict[str, float]
    losses: Array
    elbo: TemperedELBO
    observed: dict[str, Array]
    args: tuple
    kwargs: dict[str, object]
    rng_key: Array
    convergence: Result | None = None
    late_fall: float = 0.0

    @property
    def converged(self) -> bool | None:
        """Whether :func:`fit_gaussian` reached its tolerance; of :func:`fit_svi` False where the loss still fell.

        None where it did not, which does not prove that the fit has found its optimum.
        """
        if self.convergence is None:
            return False if self.late_fall > 0.0 else None
        return bool(self.convergence.converged)

    def as_elbo(self) -> TemperedELBO:
        """The ELBO at the end, ``elbo``."""
        return self.elbo

    def summarise_data(self) -> DataSummary:
        """The observed values, for :func:`compare`."""
        return summarise_observed(self.observed)

    def as_run(
        self, *data: object, num_samples: int = 1000, rng_key: Array | None = None, **kwargs: object
    ) -> Run:
        """Draws of the guide, for :func:`to_inference_data`.

        Raises:
            ValueError: If data are passed: a fit holds its own.
        """
        refuse_data(self, data, kwargs)
        key = self.rng_key if rng_key is None else rng_key
        attrs = {"algorithm": "svi", "guide": name_of(self.guide), **fit_attrs(self)}
        if self.convergence is not None:
            attrs |= {
                "algorithm": "gaussian_vi",
                "stationarity": float(self.convergence.stationarity),
                "num_evaluations": int(self.convergence.num_evaluations),
            }
        return Run(
            # The fitted params of the model, such as the weights of a network, belong to its likelihood.
            model=handlers.substitute(self.model, data=self.params),
            samples=one_chain(sample_posterior(self, key, num_samples)),
            args=self.args,
            kwargs=self.kwargs,
            rng_key=key,
            groups={"variational": {"loss": self.losses, **plain_params(self.params)}},
            attrs=attrs,
        )


def fit_svi(
    rng_key: Array,
    model: Model,
    guide: Callable[[Model], Guide] | Guide,
    *args: object,
    alpha: float | Mapping[str, float] = 1.0,
    local_plates: Collection[str] = (),
    num_steps: int = 3000,
    optim: Optim = None,
    loss: ELBO | None = None,
    num_particles: int = 1000,
    progress_bar: bool = False,
    **kwargs: object,
) -> TemperedFit:
    r"""Fit a guide to a tempered model, and evaluate its ELBO with every constant.

    Maximises :math:`\alpha E_q[\log L] - \mathrm{KL}(q, \pi)` by stochastic gradients.

    Args:
        rng_key: Key of the fit.
        model: NumPyro model; one that is tempered already is tempered again, and powers multiply.
        guide: A guide factory, from tempered model to guide: an AutoGuide class such as ``AutoNormal``, or
            any callable. For a hand-written guide ``lambda model: my_guide``.
        *args: Arguments of the model.
        alpha: Power on the likelihood, at least 0, or powers by site; see :class:`temper`.
        local_plates: Names of the plates whose continuous latents are local, scaled in model and guide. The
            ``kl`` of the ELBO then counts theirs times ``alpha``.
        num_steps: Steps of the optimiser.
        optim: NumPyro or optax optimiser; by default Adam, with step size 0.05 for three fifths of the steps
            and falling to 0.0005 over the rest.
        loss: ELBO of NumPyro to optimise; ``Trace_ELBO()`` by default, ``TraceMeanField_ELBO()`` for
            ``AutoSpikeAndSlab``.
        num_particles: Draws for the ELBO reported at the end.
        progress_bar: Show NumPyro's progress bar.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`TemperedFit`. Where the loss still falls at the end, a warning says so, because such an
        ELBO says little about its model.

    Raises:
        ValueError: If ``alpha`` is out of range, the model observes nothing, the guide is built on another
            model than the tempered one while ``alpha`` is not 1, or the fit ends in NaN.
        TypeError: If the factory does not return a guide.

    References:
        AR; YPB.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> print(f"{fit.params['theta_auto_scale']:.1f}")  # 1 / sqrt(1 + 6 / 2)
        0.5
    """
    alpha = check_alpha(alpha)
    args, kwargs = check_call(fit_svi, rng_key, model, guide, args, kwargs)
    fit_key, elbo_key, later_key = jax.random.split(rng_key, 3)
    tempered = temper(model, alpha=alpha, local_plates=local_plates)
    instance = build_guide(guide, model, tempered, alpha)
    check_count(num_particles, "num_particles", 2)
    optimiser = default_optim(num_steps) if optim is None else optim
    svi = SVI(tempered, tempered.guide(instance), optimiser, _loss_for(instance, loss))
    result = svi.run(fit_key, num_steps, *args, progress_bar=progress_bar, **kwargs)
    keys, params, losses = (elbo_key, later_key), result.params, result.losses
    fit = finish(keys, tempered, instance, params, losses, args, kwargs=kwargs, num_particles=num_particles)
    full_size = full_size_steps(np.asarray(losses), optim)
    if fall := late_fall(full_size):
        warnings.warn(
            f"the loss still fell by {fall:.2g} nats over the last tenth of its {len(full_size)} steps at full "
            "step size: take a larger num_steps or another optimiser before comparing its ELBO.",
            stacklevel=2,
        )
    return fit._replace(late_fall=fall)


def finish(
    rng_keys: tuple[Array, Array],
    tempered: temper,
    guide: Guide,
    params: Params,
    losses: Array,
    args: tuple,
    *,
    kwargs: dict,
    num_particles: int,
) -> TemperedFit:
    """The fit of a guide with these parameters: checked, and its ELBO evaluated.

    Raises:
        ValueError: If a parameter is not finite, the model observes nothing, or values and distribution of a site
            broadcast against each other.
    """
    elbo_key, later_key = rng_keys
    guide = exact_gates(guide)
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "the fit ended in parameters that are not finite: check the data for NaN, or take a smaller "
            "step size."
        )
    draw = trace_guide(elbo_key, guide, params, args, kwargs)
    trace = trace_model(elbo_key, tempered, draw, params, args, kwargs)
    if not likelihood.likelihood_sites(trace):
        raise ValueError("the model has no observed site: pass the data that it conditions on.")
    for site in likelihood.likelihood_sites(trace).values():
        likelihood.log_prob_of_each(site)
    alpha, observed = likelihood.common_alpha(trace), likelihood.observed_values(trace)
    gaussian, evaluated = gaussian_of_laplace(guide, tempered, params, elbo_key, args, kwargs)
    gaussian = tempered.guide(gaussian)
    elbo = evaluate_elbo(elbo_key, tempered, gaussian, evaluated, args, kwargs, num_particles=num_particles)
    return TemperedFit(tempered, guide, params, alpha, losses, elbo, observed, args, kwargs, later_key)


def default_optim(num_steps: int | Array) -> Adam:
    """Adam with a constant step size that finds the optimum, and a falling one that settles in it."""

    def step_size(step: Array) -> Array:
        falling = jnp.maximum(step / num_steps - CONSTANT, 0.0) / (1.0 - CONSTANT)
        return 0.05 * 0.01**falling

    return Adam(step_size)


def full_size_steps(losses: np.ndarray, optim: object) -> np.ndarray:
    """The losses at the full step size; ``optim`` is None for the default optimiser.

    The default step size falls to nothing, which stops any descent: convergence is judged before.
    """
    return losses[: int(CONSTANT * len(losses)) if optim is None else None].astype(np.float64)


def late_fall(losses: np.ndarray) -> float:
    """By how many nats the last tenth of the losses lies below the tenth before it; 0 where it may be noise."""
    tenth = len(losses) // 10
    if tenth < 2:
        return 0.0
    before, after = losses[-2 * tenth : -tenth], losses[-tenth:]
    fall = before.mean() - after.mean()
    noise = np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / tenth)
    return float(fall) if fall > 5.0 * noise and fall > 0.5 else 0.0


def _loss_for(guide: Guide, loss: ELBO | None) -> ELBO:
    """The loss given, or the default for this guide.

    Raises:
        ValueError: If it would leave the gates of an AutoSpikeAndSlab, or their temperature, where they are.
    """
    if not isinstance(guide, AutoSpikeAndSlab):
        return Trace_ELBO() if loss is None else loss
    if guide.temperature is None and not isinstance(loss, TraceGraph_ELBO):
        raise ValueError(
            "this AutoSpikeAndSlab has exact gates, which have no derivative: give it a temperature to fit it, "
            "or loss=TraceGraph_ELBO()."
        )
    if callable(guide.temperature) and loss is not None and loss.num_particles != 1:
        raise ValueError(
            f"loss has num_particles = {loss.num_particles}, for which NumPyro does not count the steps of a "
            "temperature schedule: give AutoSpikeAndSlab a number for its temperature, or take one particle."
        )
    return TraceMeanField_ELBO() if loss is None else loss


def sample_posterior(fit: TemperedFit, rng_key: Array, num_samples: int) -> dict[str, Array]:
    """Draws of the latent sites from a fit, ``(num_samples, ...)`` each."""
    guide, params, args, kwargs = fit.guide, fit.params, fit.args, fit.kwargs
    draw = trace_guide(rng_key, guide, params, args, kwargs)
    names = likelihood.latent_sites(trace_model(rng_key, fit.model, draw, params, args, kwargs))
    if isinstance(guide, AutoGuide):
        draws = guide.sample_posterior(rng_key, params, *args, sample_shape=(num_samples,), **kwargs)
    else:

        def one(key: Array) -> Params:
            sites = trace_guide(key, guide, params, args, kwargs)
            return {name: sites[name]["value"] for name in names}

        draws = map_batches(one, jax.random.split(rng_key, num_samples), 64)
    return {name: draws[name] for name in names}
