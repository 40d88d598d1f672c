"""Gaussian components with diagonal covariance and normal-inverse-gamma priors."""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.columnwise import (
    Arrays,
    Column,
    columnwise,
    evidence_by,
)


class NormalGamma(NamedTuple):
    """precision ~ Gamma(concentration, rate), mean ~ N(loc, 1 / (mean_precision × precision)).

    Arrays ``(d,)``, or ``(K, d)`` for a posterior. Where all columns share one precision, its ``concentration``
    and ``rate`` are ``()``, or ``(K,)``.
    """

    loc: Array
    mean_precision: Array
    concentration: Array
    rate: Array


def diagonal_gaussian(
    dim: int,
    *,
    loc: ArrayLike = 0.0,
    mean_precision: ArrayLike = 1.0,
    concentration: ArrayLike = 1.0,
    rate: ArrayLike | None = None,
    variance: ArrayLike | None = None,
) -> components.Component:
    r"""Components N(mean, diag(1 / precision)), each column normal-inverse-gamma.

    Args:
        dim: Number of columns d.
        loc: Prior means m0, ``(d,)`` or one for all.
        mean_precision: kappa0, the number of data that the prior of the mean is worth.
        concentration: a0 of the Gamma prior of the precision; twice this is the number of data it is worth.
        rate: b0, in the data's units squared; ``concentration`` × ``variance`` by default.
        variance: The variance that the prior expects, instead of ``rate``; 1 by default.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a hyperparameter is out of its range, or both ``rate`` and ``variance`` are given.

    References:
        Murphy, *Conjugate Bayesian analysis of the Gaussian distribution*, 2007, section 3;
        the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.diagonal_gaussian(3, rate=2.0).prior.rate.shape
        (3,)
    """
    name = "diagonal_gaussian"
    prior = NormalGamma(
        components.per_column(loc, dim, name, "loc", "(-inf, inf)"),
        components.per_column(mean_precision, dim, name, "mean_precision"),
        components.per_column(concentration, dim, name, "concentration"),
        components.per_column(
            rate_of(rate, variance, concentration, name), dim, name, "rate"
        ),
    )
    return columnwise(name, prior, COLUMN)


def rate_of(
    rate: ArrayLike | None,
    variance: ArrayLike | None,
    concentration: ArrayLike,
    name: str,
) -> ArrayLike:
    """The rate of a Gamma prior of a precision, from itself or the variance that the prior expects.

    Raises:
        ValueError: If both are given, or the variance is not positive.
    """
    if rate is not None and variance is not None:
        raise ValueError(
            f"{name}: give rate or variance, not both; rate = concentration * variance."
        )
    if rate is not None:
        return rate
    strength = components.hyperparameter(concentration, name, "concentration")
    return strength * components.hyperparameter(
        1.0 if variance is None else variance, name, "variance"
    )


def update(prior: NormalGamma, count: Array, sums: Arrays) -> NormalGamma:
    """The normal-gamma posterior, written so that the rate never falls below the prior's by rounding."""
    total, squares = sums
    mean = total / jnp.where(count > 0, count, 1.0)
    scatter = jnp.maximum(squares - total * mean, 0.0)
    kappa = prior.mean_precision + count
    between = prior.mean_precision * count / kappa * jnp.square(mean - prior.loc)
    loc = (prior.mean_precision * prior.loc + total) / kappa
    return NormalGamma(
        loc,
        kappa,
        prior.concentration + 0.5 * count,
        prior.rate + 0.5 * (scatter + between),
    )


def coefficients(q: NormalGamma) -> tuple[Array, Arrays]:
    """E[log precision - precision mean²] / 2 and the coefficients of x and x²."""
    precision = q.concentration / q.rate
    constant = (
        special.digamma(q.concentration)
        - jnp.log(q.rate)
        - precision * jnp.square(q.loc)
        - 1.0 / q.mean_precision
    )
    return 0.5 * constant, (precision * q.loc, -0.5 * precision)


def kl(q: NormalGamma, p: NormalGamma) -> Array:
    """KL of the mean given the precision, in expectation, and KL of the precision."""
    ratio = p.mean_precision / q.mean_precision
    distance = p.mean_precision * jnp.square(q.loc - p.loc) * q.concentration / q.rate
    of_mean = 0.5 * (ratio - 1.0 - jnp.log(ratio) + distance)
    return of_mean + special.gamma_kl(q, p)


def log_normaliser(q: NormalGamma) -> Array:
    """With respect to the mean and the precision, without 2π."""
    return special.gamma_log_normaliser(q) - 0.5 * jnp.log(q.mean_precision)


def log_predictive(q: NormalGamma, x: Array) -> Array:
    """Student's t with 2a degrees of freedom."""
    width = 2.0 * q.rate * (1.0 + 1.0 / q.mean_precision)
    power = (q.concentration + 0.5) * jnp.log1p(jnp.square(x - q.loc) / width)
    constant = special.log_gamma_half_step(q.concentration) - 0.5 * (
        jnp.log(0.5 * width) + special.LOG_TWO_PI
    )
    return constant - power


def draw(sample: components.Sample, q: NormalGamma) -> components.Parameters:
    """Precisions, and means given them."""
    precision = sample("precision", dist.Gamma(q.concentration, q.rate))
    loc = sample(
        "loc", dist.Normal(q.loc, 1.0 / jnp.sqrt(q.mean_precision * precision))
    )
    return {"loc": loc, "precision": precision}


def coefficients_at(parameters: components.Parameters) -> tuple[Array, Arrays]:
    """The Gaussian's natural parameters."""
    loc, precision = parameters["loc"], parameters["precision"]
    return 0.5 * (jnp.log(precision) - precision * jnp.square(loc)), (
        precision * loc,
        -0.5 * precision,
    )


def maximum_likelihood(
    prior: NormalGamma, count: Array, sums: Arrays
) -> components.Parameters:
    """Weighted mean and one over the weighted variance."""
    total, squares = sums
    safe = jnp.where(count > 0, count, 1.0)
    loc = total / safe
    variance = jnp.maximum(squares / safe - jnp.square(loc), 0.0)
    return {"loc": loc, "precision": 1.0 / variance}


COLUMN = Column(
    statistics=lambda x: (x, jnp.square(x)),
    log_base=lambda x: jnp.full_like(x, -0.5 * special.LOG_TWO_PI),
    update=update,
    coefficients=coefficients,
    kl=kl,
    log_evidence=evidence_by(update, log_normaliser),
    log_predictive=log_predictive,
    draw=draw,
    distribution=lambda parameters: dist.Normal(
        parameters["loc"], 1.0 / jnp.sqrt(parameters["precision"])
    ),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_statistics=2,
    num_parameters=2,
    location=components.get_loc,
)
