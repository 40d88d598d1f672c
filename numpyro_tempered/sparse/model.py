"""The model of the sparse regressions: priors and factors, draws of them, and the likelihood in NumPyro."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core.result import MOMENTS, VALUES, DataSummary, Run, TemperedELBO
from numpyro_tempered.core.typing import Array, ArrayLike, Model
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab
from numpyro_tempered.gaussian.families.spike_slab import kl
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


def draw_factors(rng_key: Array, factors: Factors, num_samples: int) -> dict[str, Array]:
    """Draws by site: ``coef``, and ``intercept`` and ``noise_precision`` where the model has them."""
    q = factors.coefficients
    gate_key, slab_key, intercept_key = jax.random.split(rng_key, 3)
    shape, dtype = (num_samples, *q.loc.shape), q.loc.dtype
    slab = q.loc + q.scale * jax.random.normal(slab_key, shape, dtype)
    # A uniform draw is below 1: a column of probability 1 is always in.
    draws = {"coef": jnp.where(jax.random.uniform(gate_key, shape, dtype) < q.probs, slab, 0.0)}
    if factors.intercept is not None:
        loc, scale = factors.intercept
        draws["intercept"] = loc + scale * jax.random.normal(intercept_key, (num_samples,), dtype)
    if factors.noise is not None:
        noise_key = jax.random.fold_in(rng_key, 1)
        draws["noise_precision"] = dist.Gamma(*factors.noise).sample(noise_key, (num_samples,))
    return draws


def elbo_of(objective: ArrayLike, alpha: ArrayLike, factors: Factors, prior: Prior) -> TemperedELBO:
    """The ELBO or the bound on it, with its two parts.

    Raises:
        ValueError: If the fit is a batch, by ``vmap``.
    """
    if np.ndim(objective):
        raise ValueError(
            "this is a batch of fits, by vmap: take one of them, such as jax.tree.map(lambda leaf: leaf[0], "
            "fits)."
        )
    divergence = jnp.sum(kl(factors.coefficients, SpikeSlab(*map(jnp.asarray, _slab(prior)))))
    if factors.intercept is not None:
        intercept_prior = dist.Normal(0.0, prior.intercept_scale)
        divergence += dist.kl_divergence(dist.Normal(*factors.intercept), intercept_prior)
    if factors.noise is not None and prior.noise is not None:
        divergence += dist.kl_divergence(dist.Gamma(*factors.noise), dist.Gamma(*prior.noise))
    value, power = float(np.asarray(objective)), float(np.asarray(alpha))
    return TemperedELBO(value, 0.0, (value + float(divergence)) / power, float(divergence))


def target_moments(y: ArrayLike) -> Array:
    """Number, mean and root mean square of a target, ``(3,)``."""
    values = jnp.asarray(y, jnp.result_type(float))
    return jnp.array([values.size, jnp.mean(values), jnp.sqrt(jnp.mean(jnp.square(values)))])


def summarise_target(moments: Array) -> DataSummary:
    """What :func:`target_moments` know of the data."""
    return DataSummary(numbers={VALUES: moments[0], MOMENTS: moments[1:]})


def regression_model(prior: Prior, centre: Array, noise_scale: Array | None) -> Model:
    """The regression as a NumPyro model ``model(x, y=None)``, untempered.

    Args:
        prior: Its prior.
        centre: What is taken off the columns of x.
        noise_scale: Of a linear regression, unless the noise has a prior; None for a logistic one.
    """
    slab = SpikeAndSlab(*map(jnp.asarray, _slab(prior)))

    def model(x: Array, y: Array | None = None) -> None:
        eta = (x - centre) @ numpyro.sample("coef", slab.expand([x.shape[1]]).to_event(1))
        if prior.intercept_scale is not None:
            eta = eta + numpyro.sample("intercept", dist.Normal(0.0, prior.intercept_scale))
        eta = numpyro.deterministic("eta", eta)
        scale = noise_scale
        if prior.noise is not None:
            scale = numpyro.sample("noise_precision", dist.Gamma(*prior.noise)) ** -0.5
        with numpyro.plate("n", x.shape[0]):
            outcome = dist.Bernoulli(logits=eta) if scale is None else dist.Normal(eta, scale)
            numpyro.sample("y", outcome, obs=y)

    return model


def regression_run(
    rng_key: Array,
    model: Model,
    factors: Factors,
    data: tuple[ArrayLike, ...],
    num_samples: int,
    progress: dict[str, Array],
) -> Run:
    """Draws of a fitted regression with its tempered model, and the progress of the ascent."""
    q = factors.coefficients
    x, y = (jnp.asarray(part, q.loc.dtype) for part in data)
    dims = {"coef": ["feature"], "y": ["row"], "inclusion_probs": ["feature"]}
    return Run(
        model=model,
        samples={name: value[None] for name, value in draw_factors(rng_key, factors, num_samples).items()},
        args=(x, y),
        rng_key=rng_key,
        groups={"variational": {**progress, "inclusion_probs": q.probs}},
        dims=dims | {name: ["iteration" if name.endswith("trace") else "restart"] for name in progress},
    )


def _slab(prior: Prior) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
    return prior.inclusion_prob, 0.0, prior.slab_scale
