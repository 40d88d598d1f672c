"""Bernoulli components with beta priors: latent classes of yes and no."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import digamma

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
from numpyro_tempered.mixtures.components.special import dirichlet_kl, dirichlet_log_normaliser


class BetaProbability(NamedTuple):
    """Probabilities of a 1 ~ Beta(ones, zeros): arrays ``(d,)``, or ``(K, d)`` for a posterior."""

    ones: Array
    zeros: Array


def bernoulli(dim: int, *, ones: ArrayLike = 1.0, zeros: ArrayLike = 1.0) -> Component:
    """Components of d independent columns of 0 and 1.

    Args:
        dim: Number of columns d.
        ones: Of the Beta prior, the number of ones it is worth, ``(d,)`` or one for all.
        zeros: The number of zeros it is worth.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a hyperparameter is not positive.

    References:
        Gelman et al., *Bayesian data analysis*, section 2.4; the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.bernoulli(4, ones=0.5, zeros=0.5).prior.ones.shape
        (4,)
    """
    name = "bernoulli"
    dim = check_dim(dim, name)
    prior = BetaProbability(
        spread(positive(ones, name, "ones"), dim, name, "ones"),
        spread(positive(zeros, name, "zeros"), dim, name, "zeros"),
    )
    return columnwise(name, prior, COLUMN, check=_check(dim))


@lru_cache(maxsize=64)
def _check(dim: int) -> Any:
    def check(x: Any) -> Array:
        rows = floating_rows(x, "bernoulli", dim)
        check_values(rows, "bernoulli", lambda values: (values == 0) | (values == 1), "0 or 1")
        return rows

    return check


def both(q: BetaProbability) -> Array:
    """The Beta as a Dirichlet of two."""
    return jnp.stack(jnp.broadcast_arrays(q.ones, q.zeros), axis=-1)


def update(prior: BetaProbability, count: Array, sums: tuple[Array, ...]) -> BetaProbability:
    """Ones and zeros are counted apart: a difference from the count would leave rounding for a rare value."""
    return BetaProbability(prior.ones + sums[0], prior.zeros + sums[1])


def coefficients(q: BetaProbability) -> tuple[Array, tuple[Array, ...]]:
    """E log p and E log(1 - p)."""
    total = digamma(q.ones + q.zeros)
    return jnp.zeros_like(total), (digamma(q.ones) - total, digamma(q.zeros) - total)


def log_evidence(prior: BetaProbability, count: Array, sums: tuple[Array, ...]) -> Array:
    """The log ratio of two beta functions."""
    return dirichlet_log_normaliser(both(update(prior, count, sums))) - dirichlet_log_normaliser(both(prior))


def log_predictive(q: BetaProbability, x: Array) -> Array:
    """The mean probability of x."""
    return jnp.log(jnp.where(x > 0, q.ones, q.zeros)) - jnp.log(q.ones + q.zeros)


def coefficients_at(parameters: dict[str, Array]) -> tuple[Array, tuple[Array, ...]]:
    """Logarithms of p and of 1 - p."""
    p = parameters["probs"]
    return jnp.zeros_like(p), (jnp.log(p), jnp.log1p(-p))


def maximum_likelihood(prior: BetaProbability, count: Array, sums: tuple[Array, ...]) -> dict[str, Array]:
    """Weighted shares of ones."""
    total = sums[0] + sums[1]
    return {"probs": jnp.where(total > 0, sums[0] / jnp.where(total > 0, total, 1.0), 0.5)}


COLUMN = Column(
    statistics=lambda x: (x, 1.0 - x),
    log_base=jnp.zeros_like,
    update=update,
    coefficients=coefficients,
    kl=lambda q, p: dirichlet_kl(both(q), both(p)),
    log_evidence=log_evidence,
    log_predictive=log_predictive,
    draw=lambda sample, q: {"probs": sample("probs", dist.Beta(q.ones, q.zeros))},
    distribution=lambda parameters: dist.BernoulliProbs(parameters["probs"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_statistics=2,
    num_parameters=1,
)
