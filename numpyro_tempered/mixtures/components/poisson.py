"""Poisson components with gamma priors."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import (
    Component,
    check_dim,
    check_values,
    floating_rows,
    positive,
    spread,
)
from numpyro_tempered.mixtures.components.columnwise import Column, columnwise
from numpyro_tempered.mixtures.components.special import gamma_kl, gamma_log_normaliser, log_choose


class GammaRate(NamedTuple):
    """Rates ~ Gamma(concentration, rate): arrays ``(d,)``, or ``(K, d)`` for a posterior."""

    concentration: Array
    rate: Array


def poisson(dim: int, *, concentration: ArrayLike = 1.0, rate: ArrayLike = 1.0) -> Component:
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
        >>> nt.mixtures.poisson(2, rate=0.1).prior.rate.shape
        (2,)
    """
    name = "poisson"
    dim = check_dim(dim, name)
    return columnwise(name, gamma_prior(name, dim, concentration, rate), COLUMN, check=_check(dim))


def gamma_prior(name: str, dim: int, concentration: ArrayLike, rate: ArrayLike) -> GammaRate:
    """The prior from its arguments.

    Raises:
        ValueError: If a hyperparameter is not positive.
    """
    return GammaRate(
        spread(positive(concentration, name, "concentration"), dim, name, "concentration"),
        spread(positive(rate, name, "rate"), dim, name, "rate"),
    )


@lru_cache(maxsize=64)
def _check(dim: int) -> Any:
    def check(x: Any) -> Array:
        rows = floating_rows(x, "poisson", dim)
        check_values(rows, "poisson", lambda values: (values >= 0) & (values == values.round()), "a count")
        return rows

    return check


def update(prior: GammaRate, count: Array, sums: tuple[Array, ...]) -> GammaRate:
    """The gamma posterior."""
    return GammaRate(prior.concentration + sums[0], prior.rate + count)


def coefficients(q: GammaRate) -> tuple[Array, tuple[Array, ...]]:
    """-E[rate] and E log rate."""
    return -q.concentration / q.rate, (digamma(q.concentration) - jnp.log(q.rate),)


def kl(q: GammaRate, p: GammaRate) -> Array:
    """KL of the rates."""
    return gamma_kl(q.concentration, q.rate, p.concentration, p.rate)


def log_evidence(prior: GammaRate, count: Array, sums: tuple[Array, ...]) -> Array:
    """The log ratio of the normalisers."""
    q = update(prior, count, sums)
    return gamma_log_normaliser(q.concentration, q.rate) - gamma_log_normaliser(prior.concentration, prior.rate)


def log_predictive(q: GammaRate, x: Array) -> Array:
    """Negative binomial."""
    a = q.concentration
    return log_choose(a, x) - a * jnp.log1p(1.0 / q.rate) - x * jnp.log1p(q.rate)


def draw(sample: Any, q: GammaRate) -> dict[str, Array]:
    """Rates."""
    return {"rate": sample("rate", dist.Gamma(q.concentration, q.rate))}


def coefficients_at(parameters: dict[str, Array]) -> tuple[Array, tuple[Array, ...]]:
    """-rate and log rate."""
    return -parameters["rate"], (jnp.log(parameters["rate"]),)


def maximum_likelihood(prior: GammaRate, count: Array, sums: tuple[Array, ...]) -> dict[str, Array]:
    """Weighted means."""
    return {"rate": sums[0] / jnp.where(count > 0, count, 1.0)}


COLUMN = Column(
    statistics=lambda x: (x,),
    log_base=lambda x: -gammaln(x + 1.0),
    update=update,
    coefficients=coefficients,
    kl=kl,
    log_evidence=log_evidence,
    log_predictive=log_predictive,
    draw=draw,
    distribution=lambda parameters: dist.Poisson(parameters["rate"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_statistics=1,
    num_parameters=1,
    # Counts have a spread of about 1/2 on this scale, whatever their mean.
    coordinate=jnp.sqrt,
)
