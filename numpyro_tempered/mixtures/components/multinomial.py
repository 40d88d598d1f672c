"""Multinomial components with Dirichlet priors: rows of counts."""

from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import xlogy
from numpyro.distributions import constraints

from numpyro_tempered.core import Array, ArrayLike, Shape, check_count
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components.poisson import is_count
from numpyro_tempered.mixtures.components.special import (
    digamma,
    dirichlet_kl,
    dirichlet_log_normaliser,
    gammaln,
    log_choose,
)


class DirichletProbabilities(NamedTuple):
    """Probabilities ~ Dirichlet(concentration): ``(d,)``, or ``(K, d)`` for a posterior."""

    concentration: Array


def multinomial(
    dim: int, *, concentration: ArrayLike = 1.0, total_count: int = 1
) -> components.Component:
    """Components of rows of counts, multinomial given each row's total.

    Args:
        dim: Number of columns d, the categories.
        concentration: Of the Dirichlet prior, the number of counts (not rows) that each category is worth,
            ``(d,)`` or one for all.
        total_count: The total of each simulated row. Rows of data may have any total, 0 included.

    Returns:
        The component. Missing entries are refused: a row without its total has no probability.

    Raises:
        ValueError: If the concentration is not positive, or ``total_count`` is not an integer of at least 1.

    References:
        Gelman et al., *Bayesian data analysis*, section 3.4; the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.multinomial(3, concentration=0.5).prior.concentration.tolist()
        [0.5, 0.5, 0.5]
    """
    name = "multinomial"
    total_count = check_count(total_count, f"{name}: total_count")
    prior = DirichletProbabilities(
        components.per_column(concentration, dim, name, "concentration")
    )
    return _multinomial(dim, total_count)._replace(prior=prior)


@lru_cache(maxsize=64)
def _multinomial(dim: int, total_count: int) -> components.Component:
    return components.Component(
        name="multinomial",
        prior=None,
        check=lambda x: components.floating_rows(
            x, "multinomial", dim, is_count, "a count"
        ),
        statistics=lambda columns: columns,
        log_base=log_base,
        update=lambda prior, counts, sums: DirichletProbabilities(
            prior.concentration + sums
        ),
        coefficients=coefficients,
        kl=lambda q, p: jnp.sum(dirichlet_kl(q.concentration, p.concentration)),
        log_evidence=log_evidence,
        log_predictive=log_predictive,
        draw=lambda sample, q: {
            "probs": sample("probs", dist.Dirichlet(q.concentration))
        },
        distribution=lambda parameters: CountsGivenTotal(
            parameters["probs"], total_count
        ),
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: num_components * (dim - 1),
        coordinates=coordinates,
    )


def log_base(columns: Array) -> Array:
    """The log of the multinomial coefficient."""
    return gammaln(jnp.sum(columns, axis=0) + 1.0) - jnp.sum(
        gammaln(columns + 1.0), axis=0
    )


def coefficients(q: DirichletProbabilities) -> tuple[Array, Array]:
    """E log probabilities."""
    weights = digamma(q.concentration) - digamma(
        jnp.sum(q.concentration, axis=-1, keepdims=True)
    )
    return jnp.zeros_like(weights[..., 0]), weights


def log_evidence(prior: DirichletProbabilities, counts: Array, sums: Array) -> Array:
    """The log ratio of the normalisers."""
    ratio = dirichlet_log_normaliser(
        prior.concentration + sums
    ) - dirichlet_log_normaliser(prior.concentration)
    return jnp.sum(ratio)


def log_predictive(q: DirichletProbabilities, columns: Array) -> Array:
    """Dirichlet-multinomial."""
    parts = jnp.sum(log_choose(q.concentration[..., None], columns), axis=-2)
    return parts - log_choose(
        jnp.sum(q.concentration, axis=-1)[..., None], jnp.sum(columns, axis=0)
    )


def coefficients_at(parameters: components.Parameters) -> tuple[Array, Array]:
    """Log probabilities."""
    log_probs = jnp.log(parameters["probs"])
    return jnp.zeros_like(log_probs[..., 0]), log_probs


def maximum_likelihood(
    prior: DirichletProbabilities, counts: Array, sums: Array
) -> components.Parameters:
    """Weighted shares; equal ones where nothing was counted."""
    total = jnp.sum(sums, axis=-1, keepdims=True)
    return {
        "probs": jnp.where(
            total > 0, sums / jnp.where(total > 0, total, 1.0), 1.0 / sums.shape[-1]
        )
    }


def coordinates(rows: Array) -> Array:
    """Roots of shares, between which the Euclidean distance is Hellinger's."""
    total = jnp.sum(rows, axis=1, keepdims=True)
    return components.standardised(jnp.sqrt(rows / jnp.where(total > 0, total, 1.0)))


class CountsGivenTotal(dist.Distribution):
    """A multinomial distribution whose density takes each row's own total.

    Args:
        probs: Probabilities, ``(..., d)``.
        total_count: The total of rows that are drawn.
    """

    arg_constraints = {"probs": constraints.simplex}  # noqa: RUF012
    support = constraints.independent(constraints.nonnegative_integer, 1)
    pytree_data_fields = ("probs",)
    pytree_aux_fields = ("total_count",)

    def __init__(self, probs: Array, total_count: int) -> None:
        self.probs, self.total_count = probs, total_count
        super().__init__(jnp.shape(probs)[:-1], jnp.shape(probs)[-1:])

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Rows of ``total_count``."""
        fixed = dist.MultinomialProbs(
            self.probs, self.total_count, total_count_max=self.total_count
        )
        return fixed.sample(key, sample_shape)

    def log_prob(self, value: Array) -> Array:
        """The log mass of rows, given their totals."""
        value = jnp.asarray(value, self.probs.dtype)
        coefficient = gammaln(jnp.sum(value, axis=-1) + 1.0) - jnp.sum(
            gammaln(value + 1.0), axis=-1
        )
        return coefficient + jnp.sum(xlogy(value, self.probs), axis=-1)
