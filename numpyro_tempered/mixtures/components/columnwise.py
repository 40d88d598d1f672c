r"""Components whose columns are independent given the parameters: one exponential family a column."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Component, floating_rows, standardised


class Column(NamedTuple):
    """An exponential family of scalars with its conjugate prior; elementwise in every array.

    Attributes:
        statistics: ``x`` to the r arrays T_1(x) ... T_r(x).
        log_base: ``x`` to log h(x).
        update: ``(prior, count, sums)`` to the posterior; ``sums`` are the r weighted sums.
        coefficients: A posterior to E[c] and the r arrays E[w_1] ... E[w_r].
        kl: ``(posterior, prior)`` to the KL divergence.
        log_evidence: ``(prior, count, sums)`` to the log of ∫ exp(count × c + Σ_k sums_k w_k) dprior.
        log_predictive: ``(posterior, x)`` to the log density of x, the parameter integrated out.
        draw: ``(sample, hyperparameters)`` to parameters by name; see :class:`Component`.
        distribution: Parameters to a NumPyro distribution of scalars.
        coefficients_at: Parameters to c and the r arrays w_1 ... w_r.
        maximum_likelihood: ``(prior, count, sums)`` to parameters, of the prior only what is known; None where
            there is none.
        num_statistics: r.
        num_parameters: Of one column of one component.
        coordinate: ``x`` to a value in which a distance of 1 means as much everywhere; before standardisation.
        translate: ``(hyperparameters, shift)``; None where data may not be moved.
    """

    statistics: Callable[[Array], tuple[Array, ...]]
    log_base: Callable[[Array], Array]
    update: Callable[[Any, Array, tuple[Array, ...]], Any]
    coefficients: Callable[[Any], tuple[Array, tuple[Array, ...]]]
    kl: Callable[[Any, Any], Array]
    log_evidence: Callable[[Any, Array, tuple[Array, ...]], Array]
    log_predictive: Callable[[Any, Array], Array]
    draw: Callable[[Callable[[str, Any], Array], Any], dict[str, Array]]
    distribution: Callable[[dict[str, Array]], Any]
    coefficients_at: Callable[[dict[str, Array]], tuple[Array, tuple[Array, ...]]]
    maximum_likelihood: Callable[[Any, Array, tuple[Array, ...]], dict[str, Array]] | None
    num_statistics: int
    num_parameters: int
    coordinate: Callable[[Array], Array] = lambda x: x
    translate: Callable[[Any, Array], Any] | None = None


def columnwise(
    name: str,
    prior: Any,
    column: Column,
    *,
    check: Callable[[Any], Array] | None = None,
    missing: bool = False,
) -> Component:
    """A component of d independent columns of one family.

    Args:
        name: For messages and results.
        prior: Hyperparameters, a NamedTuple of arrays ``(d,)``.
        column: The family of a column.
        check: Rows as given to floating rows; by default any finite numbers pass.
        missing: Whether the statistics count each column's observed entries.

    Returns:
        The component. Its events are vectors of d entries.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> from numpyro_tempered.mixtures.components import poisson
        >>> prior = poisson.GammaRate(jnp.ones(2), jnp.ones(2))
        >>> nt.mixtures.columnwise("two_counts", prior, poisson.COLUMN).num_parameters(3)
        6
    """
    (dim,) = jnp.shape(jax.tree.leaves(prior)[0])
    return _columnwise(name, column, dim, check, missing)._replace(prior=prior)


@lru_cache(maxsize=256)
def _columnwise(
    name: str, column: Column, dim: int, check: Callable[[Any], Array] | None, missing: bool
) -> Component:
    """The functions, the same objects for the same arguments: what is compiled for them is found again."""
    r = column.num_statistics

    def statistics(columns: Array) -> Array:
        if not missing:
            return jnp.concatenate(column.statistics(columns))
        observed = ~jnp.isnan(columns)
        # A family may have no value at 0; one that is not counted must still be finite.
        filled = jnp.where(observed, columns, 1.0)
        parts = [jnp.where(observed, part, 0.0) for part in column.statistics(filled)]
        return jnp.concatenate([*parts, observed.astype(columns.dtype)])

    def log_base(columns: Array) -> Array:
        observed = ~jnp.isnan(columns)
        filled = jnp.where(observed, columns, 1.0)
        return jnp.sum(jnp.where(observed, column.log_base(filled), 0.0), axis=0)

    def unpack(counts: Array, sums: Array) -> tuple[Array, tuple[Array, ...]]:
        parts = jnp.split(sums, r + missing, axis=-1)
        count = parts.pop() if missing else jnp.broadcast_to(counts[..., None], parts[0].shape)
        return count, tuple(parts)

    def pack(constant: Array, weights: tuple[Array, ...]) -> tuple[Array, Array]:
        if missing:
            return jnp.zeros_like(constant[..., 0]), jnp.concatenate([*weights, constant], axis=-1)
        return jnp.sum(constant, axis=-1), jnp.concatenate(weights, axis=-1)

    def log_predictive(posterior: Any, columns: Array) -> Array:
        observed = ~jnp.isnan(columns)
        filled = jnp.where(observed, columns, 1.0)
        along = jax.tree.map(lambda leaf: leaf[..., None], posterior)
        return jnp.sum(jnp.where(observed, column.log_predictive(along, filled), 0.0), axis=-2)

    best = column.maximum_likelihood
    return Component(
        name=name,
        prior=None,
        check=check or (lambda x: floating_rows(x, name, dim)),
        statistics=statistics,
        log_base=log_base,
        update=lambda prior, counts, sums: column.update(prior, *unpack(counts, sums)),
        coefficients=lambda posterior: pack(*column.coefficients(posterior)),
        kl=lambda posterior, prior: jnp.sum(column.kl(posterior, prior)),
        log_evidence=lambda prior, counts, sums: jnp.sum(column.log_evidence(prior, *unpack(counts, sums))),
        log_predictive=log_predictive,
        draw=column.draw,
        distribution=lambda parameters: column.distribution(parameters).to_event(1),
        coefficients_at=lambda parameters: pack(*column.coefficients_at(parameters)),
        maximum_likelihood=None
        if best is None
        else lambda prior, counts, sums: best(prior, *unpack(counts, sums)),
        num_parameters=lambda num_components: num_components * dim * column.num_parameters,
        coordinates=lambda rows: standardised(column.coordinate(rows)),
        translate=column.translate,
        with_missing=lambda: _columnwise(name, column, dim, check, True),
    )
