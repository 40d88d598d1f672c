"""Bernoulli components with beta priors: latent classes of yes and no."""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component, Parameters, per_column
from numpyro_tempered.mixtures.components.columnwise import (
    Arrays,
    Column,
    columnwise,
    evidence_by,
)
from numpyro_tempered.mixtures.components.special import (
    digamma,
    dirichlet_kl,
    dirichlet_log_normaliser,
)


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
        >>> nt.mixtures.components.bernoulli(4, ones=0.5, zeros=0.5).prior.ones.shape
        (4,)
    """
    name = "bernoulli"
    prior = BetaProbability(
        per_column(ones, dim, name, "ones"), per_column(zeros, dim, name, "zeros")
    )
    return columnwise(name, prior, COLUMN)


def as_dirichlet(q: BetaProbability) -> Array:
    """The Beta as a Dirichlet of two."""
    return jnp.stack(jnp.broadcast_arrays(q.ones, q.zeros), axis=-1)


def update(prior: BetaProbability, count: Array, sums: Arrays) -> BetaProbability:
    """The beta posterior. Zeros are counted too: the count minus the ones would lose the digits of a rare 0."""
    return BetaProbability(prior.ones + sums[0], prior.zeros + sums[1])


def coefficients(q: BetaProbability) -> tuple[Array, Arrays]:
    """E log p and E log(1 - p)."""
    total = digamma(q.ones + q.zeros)
    return jnp.zeros_like(total), (digamma(q.ones) - total, digamma(q.zeros) - total)


def log_predictive(q: BetaProbability, x: Array) -> Array:
    """The mean probability of x."""
    return jnp.log(jnp.where(x > 0, q.ones, q.zeros)) - jnp.log(q.ones + q.zeros)


def coefficients_at(parameters: Parameters) -> tuple[Array, Arrays]:
    """Logarithms of p and of 1 - p."""
    p = parameters["probs"]
    return jnp.zeros_like(p), (jnp.log(p), jnp.log1p(-p))


def maximum_likelihood(
    prior: BetaProbability, count: Array, sums: Arrays
) -> Parameters:
    """Weighted shares of ones."""
    total = sums[0] + sums[1]
    return {
        "probs": jnp.where(total > 0, sums[0] / jnp.where(total > 0, total, 1.0), 0.5)
    }


COLUMN = Column(
    statistics=lambda x: (x, 1.0 - x),
    log_base=jnp.zeros_like,
    update=update,
    coefficients=coefficients,
    kl=lambda q, p: dirichlet_kl(as_dirichlet(q), as_dirichlet(p)),
    log_evidence=evidence_by(
        update, lambda q: dirichlet_log_normaliser(as_dirichlet(q))
    ),
    log_predictive=log_predictive,
    draw=lambda sample, q: {"probs": sample("probs", dist.Beta(q.ones, q.zeros))},
    distribution=lambda parameters: dist.BernoulliProbs(parameters["probs"]),
    coefficients_at=coefficients_at,
    maximum_likelihood=maximum_likelihood,
    num_statistics=2,
    num_parameters=1,
    valid=lambda values: (values == 0) | (values == 1),
    expected="0 or 1",
)
