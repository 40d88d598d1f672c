"""Exponential components with gamma priors."""

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component, Parameters
from numpyro_tempered.mixtures.components.columnwise import (
    Arrays,
    columnwise,
    evidence_by,
)
from numpyro_tempered.mixtures.components.poisson import COLUMN as POISSON
from numpyro_tempered.mixtures.components.poisson import GammaRate, gamma_prior
from numpyro_tempered.mixtures.components.special import digamma, gamma_log_normaliser


def exponential(
    dim: int, *, concentration: ArrayLike = 1.0, rate: ArrayLike = 1.0
) -> Component:
    """Components of d independent columns, exponential with rates ~ Gamma(concentration, rate).

    Args:
        dim: Number of columns d.
        concentration: Of the Gamma prior, the number of data it is worth, ``(d,)`` or one for all.
        rate: In the data's units; rate / concentration is the mean that the prior expects of the data, roughly.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a hyperparameter is not positive.

    References:
        Gelman et al., *Bayesian data analysis*, section 2.6; the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.exponential(1, rate=10.0).prior.rate.shape
        (1,)
    """
    name = "exponential"
    return columnwise(name, gamma_prior(name, dim, concentration, rate), COLUMN)


def update(prior: GammaRate, count: Array, sums: Arrays) -> GammaRate:
    """The gamma posterior."""
    return GammaRate(prior.concentration + count, prior.rate + sums[0])


def coefficients(q: GammaRate) -> tuple[Array, Arrays]:
    """E log rate and -E[rate]."""
    return digamma(q.concentration) - jnp.log(q.rate), (-q.concentration / q.rate,)


def log_predictive(q: GammaRate, x: Array) -> Array:
    """Pareto of the second kind (Lomax)."""
    return jnp.log(q.concentration / q.rate) - (q.concentration + 1.0) * jnp.log1p(
        x / q.rate
    )


def coefficients_at(parameters: Parameters) -> tuple[Array, Arrays]:
    """The log of the rate, and minus the rate."""
    return jnp.log(parameters["rate"]), (-parameters["rate"],)


def maximum_likelihood(prior: GammaRate, count: Array, sums: Arrays) -> Parameters:
    """One over the weighted means."""
    return {
        "rate": jnp.where(count > 0, count, 1.0) / jnp.where(count > 0, sums[0], 1.0)
    }


# Statistics, prior and draws are those of Poisson's rates.
COLUMN = POISSON._replace(
    log_base=jnp.zeros_like,
    update=update,
    coefficients=coefficients,
    log_evidence=evidence_by(update, gamma_log_normaliser),
    log_predictive=log_predictive,
    distribution=lambda parameters: dist.Exponential(parameters["rate"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    # Nearly normal on this scale (Wilson and Hilferty), which unlike the logarithm has a value at 0.
    coordinate=jnp.cbrt,
    valid=lambda values: values >= 0,
    expected="a number that is not negative",
)
