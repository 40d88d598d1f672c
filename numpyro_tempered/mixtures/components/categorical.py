"""Categorical components with Dirichlet priors: latent classes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike, Shape, check_count
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components.special import (
    digamma,
    gammaln,
    log_gamma_slack,
)


class DirichletColumns(NamedTuple):
    """Probabilities of each column's levels ~ Dirichlet.

    ``(d, L)`` with L the largest number of levels, ``(K, d, L)`` for a posterior; 0 beyond a column's levels.
    """

    concentration: Array


def categorical(
    levels: Sequence[int], *, concentration: ArrayLike = 1.0
) -> components.Component:
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
        >>> nt.mixtures.components.categorical([2, 3]).prior.concentration.tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    name = "categorical"
    counts = tuple(
        check_count(count, f"{name}: each of the levels") for count in levels
    )
    if not counts:
        raise ValueError(
            f"{name}: levels is empty; expected the number of levels of each column."
        )
    concentrations = components.per_column(
        concentration, len(counts), name, "concentration"
    )
    exists = np.arange(max(counts)) < np.asarray(counts)[:, None]
    return _categorical(counts)._replace(
        prior=DirichletColumns(
            components.namespace(concentrations).where(
                exists, concentrations[:, None], 0.0
            )
        )
    )


@lru_cache(maxsize=64)
def _categorical(levels: Shape) -> components.Component:
    name, dim, most = "categorical", len(levels), max(levels)
    # The column and the code of each statistic, as indices of one width whatever JAX's default is.
    column = np.repeat(np.arange(dim, dtype=np.int32), levels)
    code = np.concatenate([np.arange(size, dtype=np.int32) for size in levels])
    expected = f"a code from 0 below the column's levels {levels}, or NaN or -1 for a missing entry"

    def is_code(values: Array) -> Array:
        return (
            (values >= -1)
            & (values < np.asarray(levels, values.dtype))
            & (values == values.round())
        )

    def check(x: ArrayLike) -> Array:
        rows = components.floating_rows(x, name, dim, is_code, expected)
        return components.namespace(rows).where(
            rows == -1, np.asarray(np.nan, rows.dtype), rows
        )

    def statistics(columns: Array) -> Array:
        """Indicators of all levels, column by column; none where the entry is missing."""
        return (columns[column] == code[:, None].astype(columns.dtype)).astype(
            columns.dtype
        )

    def flat(padded: Array) -> Array:
        return padded[..., column, code]

    def padded(values: Array) -> Array:
        return (
            jnp.zeros((*values.shape[:-1], dim, most), values.dtype)
            .at[..., column, code]
            .set(values)
        )

    def totals(q: DirichletColumns) -> Array:
        return jnp.sum(q.concentration, axis=-1)

    def coefficients(q: DirichletColumns) -> tuple[Array, Array]:
        weights = digamma(flat(q.concentration)) - digamma(totals(q))[..., column]
        return jnp.zeros_like(weights[..., 0]), weights

    def kl(q: DirichletColumns, p: DirichletColumns) -> Array:
        slack, slope = log_gamma_slack(flat(q.concentration))
        slack_of_total, slope_of_total = log_gamma_slack(totals(q))
        expected = slope - slope_of_total[..., column]
        slack = jnp.sum(slack) - jnp.sum(slack_of_total)
        num_components = totals(q).size // dim
        return (
            slack
            - jnp.sum(flat(p.concentration) * expected)
            + num_components * log_normaliser(p)
        )

    def log_normaliser(q: DirichletColumns) -> Array:
        return jnp.sum(gammaln(flat(q.concentration))) - jnp.sum(gammaln(totals(q)))

    def update(prior: DirichletColumns, counts: Array, sums: Array) -> DirichletColumns:
        return DirichletColumns(prior.concentration + padded(sums))

    def log_evidence(prior: DirichletColumns, counts: Array, sums: Array) -> Array:
        return log_normaliser(update(prior, counts, sums)) - counts.shape[
            0
        ] * log_normaliser(prior)

    def log_predictive(q: DirichletColumns, columns: Array) -> Array:
        log_mean = jnp.log(flat(q.concentration)) - jnp.log(totals(q))[..., column]
        return jnp.matmul(
            log_mean, statistics(columns), precision=jax.lax.Precision.HIGHEST
        )

    def draw(sample: components.Sample, q: DirichletColumns) -> components.Parameters:
        """A site for all columns with the same number of levels."""
        probs = jnp.zeros_like(q.concentration)
        for size in sorted(set(levels)):
            columns = np.flatnonzero(np.asarray(levels) == size).astype(np.int32)
            site = "probs" if min(levels) == most else f"probs_of_{size}"
            # A column of one level has nothing to draw.
            concentration = q.concentration[..., columns, :size]
            values = (
                jnp.ones_like(concentration)
                if size == 1
                else sample(site, dist.Dirichlet(concentration))
            )
            probs = probs.at[..., columns, :size].set(values)
        return {"probs": probs}

    def coefficients_at(parameters: components.Parameters) -> tuple[Array, Array]:
        log_probs = jnp.log(flat(parameters["probs"]))
        return jnp.zeros_like(log_probs[..., 0]), log_probs

    def maximum_likelihood(
        prior: DirichletColumns, counts: Array, sums: Array
    ) -> components.Parameters:
        shares = padded(sums)
        observed = jnp.sum(shares, axis=-1, keepdims=True)
        # Where nothing was observed, all levels have the same share.
        equal = padded(
            jnp.broadcast_to(1.0 / np.asarray(levels, sums.dtype)[column], sums.shape)
        )
        return {
            "probs": jnp.where(
                observed > 0, shares / jnp.where(observed > 0, observed, 1.0), equal
            )
        }

    def coordinates(rows: Array) -> Array:
        indicators = statistics(rows.T).T
        return components.standardised(
            jnp.where(jnp.isnan(rows)[:, column], jnp.nan, indicators)
        )

    return components.Component(
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
        distribution=lambda parameters: CodedCategorical(parameters["probs"]).to_event(
            1
        ),
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: num_components * (sum(levels) - dim),
        coordinates=coordinates,
        with_missing=lambda: _categorical(levels),
    )


class CodedCategorical(dist.CategoricalProbs):
    """A categorical distribution whose codes may be floating, as rows of data are."""

    def log_prob(self, value: ArrayLike) -> Array:
        """The log mass of codes."""
        return super().log_prob(jnp.asarray(value).astype(jnp.int32))
