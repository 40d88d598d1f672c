"""The sparse regressions: their priors, factors and results, and their model in NumPyro."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core import result
from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.processes import automatic_mesh
from numpyro_tempered.core.rows import as_array
from numpyro_tempered.core.typing import Array, ArrayLike, Numbers
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab, spike_slab
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.distributions import SpikeAndSlab


class Prior(NamedTuple):
    r"""Independent coefficients, :math:`\lambda_j N(0, s_j^2) + (1 - \lambda_j)\delta_0`, and an intercept.

    Attributes:
        inclusion_prob: λ, a number or shape ``(d,)``; 1 keeps a variable in.
        slab_scale: s, in units of y (of the log-odds) per unit of x, a number or shape ``(d,)``.
        intercept_scale: Standard deviation of the intercept about 0 at the means of the columns; None for no
            intercept.
        noise: Shape and rate of the Gamma prior of the precision of the noise; None without one.
    """

    inclusion_prob: ArrayLike
    slab_scale: ArrayLike
    intercept_scale: ArrayLike | None
    noise: tuple[ArrayLike, ArrayLike] | None = None


class NoisePosterior(NamedTuple):
    """The Gamma posterior of the precision 1/v of the noise.

    Attributes:
        shape: Its shape.
        rate: Its rate, in squared units of y.
    """

    shape: Array
    rate: Array


class Factors(NamedTuple):
    """The variational posterior of a regression: of coefficients, intercept and the noise, where it has them."""

    coefficients: SpikeSlab
    intercept: MeanField | None
    noise: NoisePosterior | None


class Draws(NamedTuple):
    """Draws of a posterior.

    Attributes:
        coefficients: Shape ``(S, d)``; exactly 0 where a draw leaves a variable out.
        intercept: Intercepts at x = 0, ``(S,)``; 0 where the model has none.
    """

    coefficients: Array
    intercept: Array


@add_repr
class LinearFit(NamedTuple):
    """A sparse linear regression, by :func:`fit_linear`.

    Attributes:
        posterior: Spike and slab of each coefficient: ``probs`` are the inclusion probabilities, ``mean`` the
            posterior means.
        intercept: Gaussian of the intercept at ``centre``; None without one.
        centre: Means of the columns, shape ``(d,)``; 0 without an intercept.
        noise_scale: Standard deviation of the noise in units of y: as given, as estimated, or 1 / sqrt(E[1/v]).
        noise_posterior: Gamma of 1/v under a ``noise_prior``; else None.
        elbo: The tempered ELBO, every constant in it.
        trace: ELBO after each sweep of the best start, shape ``(num_iter,)``; under ``jit`` or ``vmap`` as long
            as the sweeps allowed, NaN after the last.
        converged: Whether the best start met the tolerance.
        num_iter: Its sweeps.
        restart_elbos: ELBO of every start, shape ``(num_restarts,)``.
        order: The best start's order of the coefficients, shape ``(d,)``.
        prior: The prior of the coefficients.
        alpha: Power on the likelihood.
        target_moments: Number, mean and root mean square of y, shape ``(3,)``.
    """

    posterior: SpikeSlab
    intercept: MeanField | None
    centre: Numbers
    noise_scale: Array
    noise_posterior: NoisePosterior | None
    elbo: Array
    trace: Array
    converged: Array
    num_iter: Array
    restart_elbos: Array
    order: Array
    prior: Prior
    alpha: ArrayLike
    target_moments: Array

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs

    def as_elbo(self) -> result.TemperedELBO:
        """The ELBO, for :func:`compare`."""
        return elbo_of(self.elbo, self.alpha, self.factors(), self.prior)

    def summarise_data(self) -> result.DataSummary:
        """Number, mean and root mean square of the target, for :func:`compare`."""
        return summarise_target(self.target_moments)

    def as_run(
        self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None
    ) -> result.Run:
        """Draws with the regression as a NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If x, y or the key are missing.
        """
        key = result.check_run_arguments(self, data, rng_key, "x", "y")
        progress = {"elbo_trace": self.trace, "elbo_by_restart": self.restart_elbos}
        return draw_run(key, self, data, num_samples, progress)

    def factors(self) -> Factors:
        """The factors of q."""
        return Factors(self.posterior, self.intercept, self.noise_posterior)


@add_repr
class LogisticFit(NamedTuple):
    """A sparse logistic regression, by :func:`fit_logistic`.

    Attributes:
        posterior: Spike and slab of each coefficient: ``probs`` are the inclusion probabilities, ``mean`` the
            posterior means.
        intercept: Gaussian of the intercept at ``centre``; None without one.
        centre: Means of the columns, shape ``(d,)``; 0 without an intercept.
        objective: The quadratic bound, below the tempered ELBO; every constant is in it.
        trace: Objective after each sweep of the best start, as for :class:`LinearFit`.
        converged: Whether the best start met the tolerance.
        num_iter: Its sweeps.
        restart_objectives: Objective of every start, shape ``(num_restarts,)``.
        order: The best start's order of the coefficients, shape ``(d,)``.
        prior: The prior of the coefficients.
        alpha: Power on the likelihood.
        target_moments: Number, mean and root mean square of y, shape ``(3,)``.
    """

    posterior: SpikeSlab
    intercept: MeanField | None
    centre: Numbers
    objective: Array
    trace: Array
    converged: Array
    num_iter: Array
    restart_objectives: Array
    order: Array
    prior: Prior
    alpha: ArrayLike
    target_moments: Array

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs

    def as_elbo(self) -> result.TemperedELBO:
        """The objective, which is below the ELBO, for :func:`compare`."""
        return elbo_of(self.objective, self.alpha, self.factors(), self.prior)

    def summarise_data(self) -> result.DataSummary:
        """Number, mean and root mean square of the target, for :func:`compare`."""
        return summarise_target(self.target_moments)

    def as_run(
        self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None
    ) -> result.Run:
        """Draws with the regression as a NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If x, y or the key are missing.
        """
        key = result.check_run_arguments(self, data, rng_key, "x", "y")
        progress = {
            "objective_trace": self.trace,
            "objective_by_restart": self.restart_objectives,
        }
        return draw_run(key, self, data, num_samples, progress)

    def factors(self) -> Factors:
        """The factors of q."""
        return Factors(self.posterior, self.intercept, None)


SparseFit: TypeAlias = LinearFit | LogisticFit


def selected(fit: SparseFit, threshold: float = 0.5) -> np.ndarray:
    """Columns whose inclusion probability is above a threshold, the most probable first.

    Args:
        fit: The fit.
        threshold: From 0 to 1; 1/2 gives the median probability model.

    Returns:
        Their columns, integers.

    Raises:
        ValueError: If the threshold is outside of [0, 1].

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2.0 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5
        ... )
        >>> nt.sparse.selected(fit)
        array([1])
    """
    check_number(threshold, "threshold", "[0, 1]")
    probs = np.asarray(fit.posterior.probs)
    order = np.argsort(-probs, kind="stable")
    return order[probs[order] > threshold]


def draw_factors(
    rng_key: Array, factors: Factors, num_samples: int
) -> dict[str, Array]:
    """Draws by site: ``coef``, and ``intercept`` and ``noise_precision`` where the model has them."""
    q = factors.coefficients
    gate_key, slab_key, intercept_key = jax.random.split(rng_key, 3)
    shape = (num_samples, *q.loc.shape)
    draws = {"coef": spike_slab.draw(q, gate_key, slab_key, shape)}
    if factors.intercept is not None:
        loc, scale = factors.intercept
        draws["intercept"] = loc + scale * jax.random.normal(
            intercept_key, (num_samples,), q.loc.dtype
        )
    if factors.noise is not None:
        noise_key = jax.random.fold_in(rng_key, 1)
        draws["noise_precision"] = dist.Gamma(*factors.noise).sample(
            noise_key, (num_samples,)
        )
    return draws


def elbo_of(
    objective: ArrayLike, alpha: ArrayLike, factors: Factors, prior: Prior
) -> result.TemperedELBO:
    """The ELBO or the bound on it, with its two parts.

    Raises:
        ValueError: If the fit is a batch, by ``vmap``.
    """
    if np.ndim(objective):
        one = "jax.tree.map(lambda leaf: leaf[0], fits)"
        raise ValueError(
            f"this is a batch of fits, by vmap: take one of them, such as {one}."
        )
    divergence = jnp.sum(spike_slab.kl(factors.coefficients, SpikeSlab(*_slab(prior))))
    if factors.intercept is not None:
        intercept_prior = dist.Normal(0.0, prior.intercept_scale)
        divergence += dist.kl_divergence(
            dist.Normal(*factors.intercept), intercept_prior
        )
    if factors.noise is not None and prior.noise is not None:
        divergence += dist.kl_divergence(
            dist.Gamma(*factors.noise), dist.Gamma(*prior.noise)
        )
    value, power = float(np.asarray(objective)), float(np.asarray(alpha))
    return result.TemperedELBO(
        value, 0.0, (value + float(divergence)) / power, float(divergence)
    )


def target_moments(y: ArrayLike) -> Array:
    """Number, mean and root mean square of a target, ``(3,)``."""
    values = jnp.asarray(y, jnp.result_type(float))
    return jnp.array(
        [values.size, jnp.mean(values), jnp.sqrt(jnp.mean(jnp.square(values)))]
    )


def summarise_target(moments: Array) -> result.DataSummary:
    """What :func:`target_moments` know of the data."""
    return result.DataSummary(
        numbers={result.VALUES: moments[0], result.MOMENTS: moments[1:]}
    )


def tempered_model(fit: SparseFit) -> temper:
    """A fitted regression as a tempered NumPyro model ``model(x, y=None)``.

    The noise of a linear regression is that of the fit, unless it has a prior.
    """
    prior, scale = fit.prior, fit.noise_scale if isinstance(fit, LinearFit) else None
    slab = SpikeAndSlab(*_slab(prior))

    def model(x: Array, y: Array | None = None) -> None:
        eta = (x - fit.centre) @ numpyro.sample(
            "coef", slab.expand([x.shape[1]]).to_event(1)
        )
        if prior.intercept_scale is not None:
            eta = eta + numpyro.sample(
                "intercept", dist.Normal(0.0, prior.intercept_scale)
            )
        eta = numpyro.deterministic("eta", eta)
        noise_scale = scale
        if prior.noise is not None:
            noise_scale = (
                numpyro.sample("noise_precision", dist.Gamma(*prior.noise)) ** -0.5
            )
        with numpyro.plate("n", x.shape[0]):
            outcome = (
                dist.Bernoulli(logits=eta)
                if noise_scale is None
                else dist.Normal(eta, noise_scale)
            )
            numpyro.sample("y", outcome, obs=y)

    return temper(model, alpha=float(np.asarray(fit.alpha)))


def draw_run(
    rng_key: Array,
    fit: SparseFit,
    data: tuple[ArrayLike, ...],
    num_samples: int,
    progress: dict[str, Array],
) -> result.Run:
    """Draws of a fitted regression with its tempered model, and the progress of the ascent."""
    q = fit.posterior
    x, y = (
        automatic_mesh(as_array(part, name))
        for part, name in zip(data, "xy", strict=True)
    )
    samples = draw_factors(rng_key, fit.factors(), num_samples)
    dims = {"coef": ["feature"], "y": ["row"], "inclusion_probs": ["feature"]}
    regression = "linear" if isinstance(fit, LinearFit) else "logistic"
    attrs = {"algorithm": "cavi", "regression": regression, "num_iter": len(fit.trace)}
    return result.Run(
        # Columns far from 0 keep their digits.
        model=tempered_model(fit._replace(centre=np.zeros_like(fit.centre))),
        samples={name: value[None] for name, value in samples.items()},
        args=tuple(jnp.asarray(part, q.loc.dtype) for part in (x - fit.centre, y)),
        rng_key=rng_key,
        groups={"variational": {**progress, "inclusion_probs": q.probs}},
        attrs=attrs | result.fit_attrs(fit),
        dims=dims
        | {
            name: ["iteration" if name.endswith("trace") else "restart"]
            for name in progress
        },
    )


def _slab(prior: Prior) -> tuple[Array, ...]:
    return tuple(map(jnp.asarray, (prior.inclusion_prob, 0.0, prior.slab_scale)))
