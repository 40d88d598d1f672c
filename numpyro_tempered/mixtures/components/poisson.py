"""Poisson components with gamma priors."""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import (
    Component,
    Parameters,
    Sample,
    per_column,
)
from numpyro_tempered.mixtures.components.columnwise import (
    Arrays,
    Column,
    columnwise,
    evidence_by,
)
from numpyro_tempered.mixtures.components.special import (
    digamma,
    gamma_kl,
    gamma_log_normaliser,
    gammaln,
    log_choose,
)


class GammaRate(NamedTuple):
    """Rates ~ Gamma(concentration, rate): arrays ``(d,)``, or ``(K, d)`` for a posterior."""

    concentration: Array
    rate: Array


def poisson(
    dim: int, *, concentration: ArrayLike = 1.0, rate: ArrayLike = 1.0
) -> Component:
    """Components of d independent columns of counts, Poisson with rates ~ Gamma(concentration, rate).

    Args:
        dim: Number of columns d.
        concentration: Of the Gamma prior, ``(d,)`` or one for all; the prior expects a mean count of
            concentration / rate.
        rate: The number of data that the prior is worth, ``(d,)`` or one for all.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a hyperparameter is not positive.

    References:
        Gelman et al., *Bayesian data analysis*, section 2.6; the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.poisson(2, rate=0.1).prior.rate.shape
        (2,)
    """
    name = "poisson"
    return columnwise(name, gamma_prior(name, dim, concentration, rate), COLUMN)


def gamma_prior(
    name: str, dim: int, concentration: ArrayLike, rate: ArrayLike
) -> GammaRate:
    """The prior from its arguments.

    Raises:
        ValueError: If a hyperparameter is not positive.
    """
    return GammaRate(
        per_column(concentration, dim, name, "concentration"),
        per_column(rate, dim, name, "rate"),
    )


def is_count(values: Array) -> Array:
    """Which numbers are whole and not negative."""
    return (values >= 0) & (values == values.round())


def update(prior: GammaRate, count: Array, sums: Arrays) -> GammaRate:
    """The gamma posterior."""
    return GammaRate(prior.concentration + sums[0], prior.rate + count)


def coefficients(q: GammaRate) -> tuple[Array, Arrays]:
    """-E[rate] and E log rate."""
    return -q.concentration / q.rate, (digamma(q.concentration) - jnp.log(q.rate),)


def log_predictive(q: GammaRate, x: Array) -> Array:
    """Negative binomial."""
    a = q.concentration
    return log_choose(a, x) - a * jnp.log1p(1.0 / q.rate) - x * jnp.log1p(q.rate)


def draw(sample: Sample, q: GammaRate) -> Parameters:
    """Rates."""
    return {"rate": sample("rate", dist.Gamma(q.concentration, q.rate))}


def coefficients_at(parameters: Parameters) -> tuple[Array, Arrays]:
    """-rate and log rate."""
    return -parameters["rate"], (jnp.log(parameters["rate"]),)


def maximum_likelihood(prior: GammaRate, count: Array, sums: Arrays) -> Parameters:
    """Weighted means."""
    return {"rate": sums[0] / jnp.where(count > 0, count, 1.0)}


COLUMN = Column(
    statistics=lambda x: (x,),
    log_base=lambda x: -gammaln(x + 1.0),
    update=update,
    coefficients=coefficients,
    kl=gamma_kl,
    log_evidence=evidence_by(update, gamma_log_normaliser),
    log_predictive=log_predictive,
    draw=draw,
    distribution=lambda parameters: dist.Poisson(parameters["rate"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_statistics=1,
    num_parameters=1,
    # Counts have a spread of about 1/2 on this scale, whatever their mean.
    coordinate=jnp.sqrt,
    valid=is_count,
    expected="a count",
)
