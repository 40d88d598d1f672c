"""Categorical components with Dirichlet priors: latent classes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln

from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import (
    Component,
    Parameters,
    Sample,
    check_values,
    floating_rows,
    namespace,
    per_column,
    standardised,
)
from numpyro_tempered.mixtures.components.special import log_gamma_slack


class DirichletColumns(NamedTuple):
    """Probabilities of each column's levels ~ Dirichlet.

    ``(d, L)`` with L the largest number of levels, ``(K, d, L)`` for a posterior; 0 beyond a column's levels.
    """

    concentration: Array


def categorical(levels: Sequence[int], *, concentration: ArrayLike = 1.0) -> Component:
    """Components of independent columns of codes: the latent class model.

    Args:
        levels: The number of levels of each column; column j holds codes 0 ... levels[j] - 1. NaN is a missing
            entry, and so is -1, as in the codes of pandas.
        concentration: Of the Dirichlet priors, the number of data that each level is worth, one number or one for
            each column.

    Returns:
        The component. Missing entries are allowed. Its parameter ``probs`` is ``(K, d, L)``, 0 beyond a column's
        levels.

    Raises:
        ValueError: If ``levels`` are not integers of at least 1, or the concentration is not positive.

    References:
        Lazarsfeld, Henry, *Latent structure analysis*, 1968; the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.categorical([2, 3]).prior.concentration.tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    name = "categorical"
    counts = tuple(check_count(count, f"{name}: each of the levels") for count in levels)
    if not counts:
        raise ValueError(f"{name}: levels is empty; expected the number of levels of each column.")
    concentrations = per_column(concentration, len(counts), name, "concentration")
    exists = np.arange(max(counts)) < np.asarray(counts)[:, None]
    return _categorical(counts)._replace(prior=DirichletColumns(jnp.where(exists, concentrations[:, None], 0.0)))


@lru_cache(maxsize=64)
def _categorical(levels: tuple[int, ...]) -> Component:
    name, dim, most = "categorical", len(levels), max(levels)
    column, code = (np.concatenate(part) for part in _layout(levels))

    def check(x: ArrayLike) -> Array:
        rows = floating_rows(x, name, dim)
        rows = namespace(rows).where(rows == -1, np.asarray(np.nan, rows.dtype), rows)
        sizes = np.asarray(levels, rows.dtype)
        expected = f"a code from 0 below the column's levels {levels}, or NaN or -1 for a missing entry"
        check_values(rows, name, lambda v: (v >= 0) & (v < sizes) & (v == v.round()), expected)
        return rows

    def statistics(columns: Array) -> Array:
        """Indicators of all levels, column by column; none where the entry is missing."""
        return (columns[column] == code[:, None].astype(columns.dtype)).astype(columns.dtype)

    def flat(padded: Array) -> Array:
        return padded[..., column, code]

    def padded(values: Array) -> Array:
        return jnp.zeros((*values.shape[:-1], dim, most), values.dtype).at[..., column, code].set(values)

    def totals(q: DirichletColumns) -> Array:
        return jnp.sum(q.concentration, axis=-1)

    def coefficients(q: DirichletColumns) -> tuple[Array, Array]:
        weights = digamma(flat(q.concentration)) - digamma(totals(q))[..., column]
        return jnp.zeros_like(weights[..., 0]), weights

    def kl(q: DirichletColumns, p: DirichletColumns) -> Array:
        _, expected = coefficients(q)
        slack = jnp.sum(log_gamma_slack(flat(q.concentration))) - jnp.sum(log_gamma_slack(totals(q)))
        components = totals(q).size // dim
        return slack - jnp.sum(flat(p.concentration) * expected) + components * log_normaliser(p)

    def log_normaliser(q: DirichletColumns) -> Array:
        return jnp.sum(gammaln(flat(q.concentration))) - jnp.sum(gammaln(totals(q)))

    def update(prior: DirichletColumns, counts: Array, sums: Array) -> DirichletColumns:
        return DirichletColumns(prior.concentration + padded(sums))

    def log_evidence(prior: DirichletColumns, counts: Array, sums: Array) -> Array:
        return log_normaliser(update(prior, counts, sums)) - counts.shape[0] * log_normaliser(prior)

    def log_predictive(q: DirichletColumns, columns: Array) -> Array:
        log_mean = jnp.log(flat(q.concentration)) - jnp.log(totals(q))[..., column]
        return jnp.matmul(log_mean, statistics(columns), precision=jax.lax.Precision.HIGHEST)

    def draw(sample: Sample, q: DirichletColumns) -> Parameters:
        """One site for the columns of each number of levels."""
        probs = jnp.zeros_like(q.concentration)
        for size in sorted(set(levels)):
            columns = np.flatnonzero(np.asarray(levels) == size).astype(np.int32)
            site = "probs" if min(levels) == most else f"probs_of_{size}"
            # A column of one level has nothing to be drawn.
            concentration = q.concentration[..., columns, :size]
            values = jnp.ones_like(concentration) if size == 1 else sample(site, dist.Dirichlet(concentration))
            probs = probs.at[..., columns, :size].set(values)
        return {"probs": probs}

    def coefficients_at(parameters: Parameters) -> tuple[Array, Array]:
        log_probs = jnp.log(flat(parameters["probs"]))
        return jnp.zeros_like(log_probs[..., 0]), log_probs

    def maximum_likelihood(prior: DirichletColumns, counts: Array, sums: Array) -> Parameters:
        shares = padded(sums)
        observed = jnp.sum(shares, axis=-1, keepdims=True)
        # Nothing was observed: all levels have the same share.
        equal = padded(jnp.broadcast_to(1.0 / np.asarray(levels, sums.dtype)[column], sums.shape))
        return {"probs": jnp.where(observed > 0, shares / jnp.where(observed > 0, observed, 1.0), equal)}

    def coordinates(rows: Array) -> Array:
        indicators = statistics(rows.T).T
        return standardised(jnp.where(jnp.isnan(rows)[:, column], jnp.nan, indicators))

    return Component(
        name=name,
        prior=None,
        check=check,
        statistics=statistics,
        log_base=lambda columns: jnp.zeros_like(columns[0]),
        update=update,
        coefficients=coefficients,
        kl=kl,
        log_evidence=log_evidence,
        log_predictive=log_predictive,
        draw=draw,
        distribution=lambda parameters: CodedCategorical(parameters["probs"]).to_event(1),
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: num_components * (sum(levels) - dim),
        coordinates=coordinates,
        with_missing=lambda: _categorical(levels),
    )


def _layout(levels: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Column and code of each statistic."""
    # Indices of one width, whatever jax's default is when they are used.
    return [np.full(c, j, np.int32) for j, c in enumerate(levels)], [np.arange(c, dtype=np.int32) for c in levels]


class CodedCategorical(dist.CategoricalProbs):
    """A categorical distribution whose codes may be floating, as rows of data are."""

    def log_prob(self, value: ArrayLike) -> Array:
        """The log mass of codes."""
        return super().log_prob(jnp.asarray(value).astype(jnp.int32))
