"""Gaussian components of known variance."""

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
from numpyro_tempered.mixtures.components.columnwise import Arrays, columnwise
from numpyro_tempered.mixtures.components.diagonal_gaussian import (
    COLUMN as DIAGONAL_GAUSSIAN,
)
from numpyro_tempered.mixtures.components.special import LOG_TWO_PI


class NormalMean(NamedTuple):
    """Means ~ N(loc, scale²), and the data's standard deviations: arrays ``(d,)``, ``(K, d)`` for a posterior."""

    loc: Array
    scale: Array
    noise: Array


def known_variance(
    dim: int,
    *,
    prior_loc: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
    scale: ArrayLike = 1.0,
) -> Component:
    r"""Components N(theta, diag(scale²)) with theta ~ N(prior_loc, diag(prior_scale²)).

    Args:
        dim: Number of columns d.
        prior_loc: Prior means, ``(d,)`` or one for all.
        prior_scale: Prior standard deviations V, ``(d,)`` or one for all.
        scale: Known standard deviations of the data, ``(d,)`` or one for all.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a scale is not positive.

    References:
        CA18, section 3 (Gaussian mixtures of known variance).

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.known_variance(2, prior_scale=10.0).prior.scale.shape
        (2,)
    """
    name = "known_variance"
    prior = NormalMean(
        per_column(prior_loc, dim, name, "prior_loc", "(-inf, inf)"),
        per_column(prior_scale, dim, name, "prior_scale"),
        per_column(scale, dim, name, "scale"),
    )
    return columnwise(name, prior, COLUMN)


def update(prior: NormalMean, count: Array, sums: Arrays) -> NormalMean:
    """The normal posterior of the mean."""
    precision0, data_precision = (
        1.0 / jnp.square(prior.scale),
        1.0 / jnp.square(prior.noise),
    )
    precision = precision0 + count * data_precision
    loc = (precision0 * prior.loc + data_precision * sums[0]) / precision
    return NormalMean(
        loc, 1.0 / jnp.sqrt(precision), jnp.broadcast_to(prior.noise, loc.shape)
    )


def coefficients(q: NormalMean) -> tuple[Array, Arrays]:
    """E log density, as a quadratic form of x."""
    precision = 1.0 / jnp.square(q.noise)
    constant = precision * (jnp.square(q.loc) + jnp.square(q.scale)) + jnp.log(
        jnp.square(q.noise)
    )
    return -0.5 * constant, (precision * q.loc, -0.5 * precision)


def kl(q: NormalMean, p: NormalMean) -> Array:
    """KL of the means."""
    ratio = jnp.square(q.scale / p.scale)
    return 0.5 * (ratio + jnp.square((q.loc - p.loc) / p.scale) - 1.0 - jnp.log(ratio))


def log_evidence(prior: NormalMean, count: Array, sums: Arrays) -> Array:
    """A Gaussian integral over the mean."""
    total, squares = sums
    precision = 1.0 / jnp.square(prior.noise)
    inflation = 1.0 + count * precision * jnp.square(prior.scale)
    mean = total / jnp.where(count > 0, count, 1.0)
    scatter = jnp.maximum(squares - total * mean, 0.0)
    each = precision * jnp.square(mean - prior.loc) / inflation - jnp.log(precision)
    return -0.5 * (precision * scatter + count * each + jnp.log(inflation))


def log_predictive(q: NormalMean, x: Array) -> Array:
    """A Gaussian whose variance is the sum of those of the mean and of the data."""
    total = jnp.hypot(q.scale, q.noise)
    return -0.5 * (jnp.square((x - q.loc) / total) + LOG_TWO_PI) - jnp.log(total)


def draw(sample: Sample, q: NormalMean) -> Parameters:
    """Means."""
    return {"loc": sample("loc", dist.Normal(q.loc, q.scale)), "scale": q.noise}


def coefficients_at(parameters: Parameters) -> tuple[Array, Arrays]:
    """The Gaussian's natural parameters."""
    loc, precision = parameters["loc"], 1.0 / jnp.square(parameters["scale"])
    return -0.5 * (precision * jnp.square(loc) - jnp.log(precision)), (
        precision * loc,
        -0.5 * precision,
    )


def maximum_likelihood(prior: NormalMean, count: Array, sums: Arrays) -> Parameters:
    """Weighted means."""
    loc = sums[0] / jnp.where(count > 0, count, 1.0)
    return {"loc": loc, "scale": jnp.broadcast_to(prior.noise, loc.shape)}


# Statistics and base measure are those of any Gaussian column.
COLUMN = DIAGONAL_GAUSSIAN._replace(
    update=update,
    coefficients=coefficients,
    kl=kl,
    log_evidence=log_evidence,
    log_predictive=log_predictive,
    draw=draw,
    distribution=lambda parameters: dist.Normal(parameters["loc"], parameters["scale"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_parameters=1,
)
