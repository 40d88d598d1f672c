"""Components whose columns are independent given the parameters, each of one exponential family of scalars."""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike, matmul
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components.base import (
    Hyperparameters,
    Parameters,
    Sample,
)

Arrays: TypeAlias = tuple[Array, ...]
Update: TypeAlias = Callable[[Hyperparameters, Array, Arrays], Hyperparameters]
Evidence: TypeAlias = Callable[[Hyperparameters, Array, Arrays], Array]


class Column(NamedTuple):
    """An exponential family of scalars with its conjugate prior; elementwise in every array.

    Attributes:
        statistics: ``x`` to the r arrays T_1(x) ... T_r(x).
        log_base: ``x`` to log h(x).
        update: ``(prior, count, sums)`` to the posterior; ``sums`` are the r weighted sums.
        log_evidence: ``(prior, count, sums)`` to the log of ∫ exp(count × c + Σ_k sums_k w_k) dprior.
        draw: ``(sample, hyperparameters)`` to parameters by name; see :class:`Component`.
        distribution: Parameters to a NumPyro distribution of scalars.
        num_statistics: r.
        coefficients: A posterior to E[c] and the r arrays E[w_1] ... E[w_r]; this and what follows is derived
            where it is None, see :class:`Component`.
        kl: ``(posterior, prior)`` to the KL divergence.
        log_predictive: ``(posterior, x)`` to the log density of x, the parameter integrated out.
        coefficients_at: Parameters to c and the r arrays w_1 ... w_r.
        maximum_likelihood: ``(prior, count, sums)`` to parameters, with only known constants read from the
            prior; None where there is no maximum.
        num_parameters: Of one column of one component.
        coordinate: ``x`` to a scale on which a distance of 1 means as much everywhere; standardised afterwards.
        location: Hyperparameters to what of them moves as the data do; see :class:`Location`.
        valid: ``x`` to whether each entry is a datum of the family; by default any finite number is.
        expected: What a datum is, for the message, such as "a count".
    """

    statistics: Callable[[Array], Arrays]
    log_base: Callable[[Array], Array]
    update: Update
    log_evidence: Evidence
    draw: Callable[[Sample, Hyperparameters], Parameters]
    distribution: Callable[[Parameters], dist.Distribution]
    num_statistics: int
    coefficients: Callable[[Hyperparameters], tuple[Array, Arrays]] | None = None
    kl: Callable[[Hyperparameters, Hyperparameters], Array] | None = None
    log_predictive: Callable[[Hyperparameters, Array], Array] | None = None
    coefficients_at: Callable[[Parameters], tuple[Array, Arrays]] | None = None
    maximum_likelihood: (
        Callable[[Hyperparameters, Array, Arrays], Parameters] | None
    ) = None
    num_parameters: int | None = None
    coordinate: Callable[[Array], Array] = lambda x: x
    location: Callable[[Hyperparameters], Array] | None = None
    valid: Callable[[Array], Array] | None = None
    expected: str = ""


def evidence_by(
    update: Update, log_normaliser: Callable[[Hyperparameters], Array]
) -> Evidence:
    """The log evidence as the log ratio of the normalisers of posterior and prior."""

    def log_evidence(prior: Hyperparameters, count: Array, sums: Arrays) -> Array:
        return log_normaliser(update(prior, count, sums)) - log_normaliser(prior)

    return log_evidence


def columnwise(
    name: str,
    prior: Hyperparameters,
    column: Column,
    *,
    check: Callable[[ArrayLike], Array] | None = None,
    missing: bool = False,
) -> components.Component:
    """A component of d independent columns of one family.

    Args:
        name: For messages and results.
        prior: Hyperparameters, a NamedTuple of arrays ``(d,)``.
        column: The family of a column.
        check: Rows as given to floating rows; by default of any finite numbers that the column holds valid.
        missing: Whether the statistics count each column's observed entries.

    Returns:
        The component. Its events are vectors of d entries.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> from numpyro_tempered.mixtures.components.poisson import COLUMN, GammaRate
        >>> prior = GammaRate(jnp.ones(2), jnp.ones(2))
        >>> nt.mixtures.components.columnwise("two_counts", prior, COLUMN).num_parameters(3)
        6
    """
    (dim,) = jnp.shape(jax.tree.leaves(prior)[0])
    return _columnwise(name, column, dim, check, missing)._replace(prior=prior)


@lru_cache(maxsize=256)
def _columnwise(
    name: str,
    column: Column,
    dim: int,
    check: Callable[[ArrayLike], Array] | None,
    missing: bool,
) -> components.Component:
    """The functions, the same objects for the same arguments, so that JAX finds what it compiled for them."""
    r = column.num_statistics

    def where_observed(function: Callable[[Array], Array], columns: Array) -> Array:
        observed = ~jnp.isnan(columns)
        # A family may have no value at 0; one that is not counted must still be finite.
        return jnp.where(observed, function(jnp.where(observed, columns, 1.0)), 0.0)

    def parts_of(columns: Array) -> Arrays:
        """Statistics ``(..., d, n)``, one after the other, and what they are counted by."""
        if not missing:
            return column.statistics(columns)
        observed = ~jnp.isnan(columns)
        parts = column.statistics(jnp.where(observed, columns, 1.0))
        return (
            *(jnp.where(observed, part, 0.0) for part in parts),
            observed.astype(columns.dtype),
        )

    def unpack(counts: Array, sums: Array) -> tuple[Array, Arrays]:
        parts = jnp.split(sums, r + missing, axis=-1)
        count = (
            parts.pop()
            if missing
            else jnp.broadcast_to(counts[..., None], parts[0].shape)
        )
        return count, tuple(parts)

    # What a column leaves out is left out of the component, which derives it.
    of_posterior, of_parameters, divergence = (
        column.coefficients,
        column.coefficients_at,
        column.kl,
    )
    predictive, best, number = (
        column.log_predictive,
        column.maximum_likelihood,
        column.num_parameters,
    )

    def log_predictive(posterior: Hyperparameters, columns: Array) -> Array:
        q = jax.tree.map(lambda leaf: leaf[..., None], posterior)
        return jnp.sum(where_observed(lambda x: predictive(q, x), columns), axis=-2)  # type: ignore[misc]

    return components.Component(
        name=name,
        prior=None,
        check=check
        or (
            lambda x: components.floating_rows(
                x, name, dim, column.valid, column.expected
            )
        ),
        statistics=lambda columns: jnp.concatenate(parts_of(columns)),
        log_base=lambda columns: jnp.sum(
            where_observed(column.log_base, columns), axis=0
        ),
        update=lambda prior, counts, sums: column.update(prior, *unpack(counts, sums)),
        log_evidence=lambda prior, counts, sums: jnp.sum(
            column.log_evidence(prior, *unpack(counts, sums))
        ),
        draw=column.draw,
        distribution=lambda parameters: column.distribution(parameters).to_event(1),
        coefficients=of_posterior
        and (lambda posterior: join(*of_posterior(posterior), missing)),
        kl=divergence
        and (lambda posterior, prior: jnp.sum(divergence(posterior, prior))),
        log_predictive=predictive and log_predictive,
        coefficients_at=of_parameters
        and (lambda parameters: join(*of_parameters(parameters), missing)),
        maximum_likelihood=best
        and (lambda prior, counts, sums: best(prior, *unpack(counts, sums))),
        num_parameters=None
        if number is None
        else lambda num_components: num_components * dim * number,
        coordinates=lambda rows: components.standardised(column.coordinate(rows)),
        location=None
        if column.location is None
        else location_by(parts_of, column.location),
        with_missing=lambda: _columnwise(name, column, dim, check, True),
    )


def location_by(
    parts_of: Callable[[Array], Arrays], of: Callable[[Hyperparameters], Array]
) -> components.Location:
    """The location of a family whose statistics are arrays ``(..., f, n)``, one after the other."""

    def linear(weights: Array, deviations: Array) -> Array:
        parts = parts_of(deviations)
        ends = np.cumsum([part.shape[-2] for part in parts])[:-1]
        # Products of each part: all in one array, or sums over an axis that is not the last, take times as long.
        pairs = zip(jnp.split(weights[..., None, :], ends, axis=-1), parts, strict=True)
        return reduce(jnp.add, (matmul(weight, part) for weight, part in pairs))[
            ..., 0, :
        ]

    def sums(omega: Array, deviations: Array) -> Array:
        return jnp.concatenate(
            [matmul(part, omega[..., None])[..., 0] for part in parts_of(deviations)],
            axis=-1,
        )

    return components.Location(of, linear, sums)


def join(constant: Array, weights: Arrays, missing: bool) -> tuple[Array, Array]:
    """Coefficients of all columns; with missing entries, the constants multiply the numbers of observed ones."""
    if missing:
        return jnp.zeros_like(constant[..., 0]), jnp.concatenate(
            [*weights, constant], axis=-1
        )
    return jnp.sum(constant, axis=-1), jnp.concatenate(weights, axis=-1)
