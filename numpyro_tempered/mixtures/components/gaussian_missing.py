r"""Gaussian components of full covariance for rows with missing entries.

The missing entries :math:`x_M` of a row are latent beside its label: the factor is :math:`q(z = j, x_M) \rho`.
With P the expected precision of component j, b the expected slope of its log density at a centre, O the observed
entries and :math:`r = b_M - P_{MO} x_O`,

.. math:: q(x_M \mid j) = N(P_{MM}^{-1} r, P_{MM}^{-1}), \qquad
          l_{ij} = E c_j + b_O' x_O - \tfrac{1}{2} x_O' P_{OO} x_O
                   + \log \int \exp(r' x_M - \tfrac{1}{2} x_M' P_{MM} x_M) \, dx_M ,

and the statistics of a row are their expectations under :math:`q(x_M \mid j)`. At given parameters this is the
exact log density of the observed entries, and the step of EM. Under a factor it is a lower bound on its
expectation, and counts are those of rows, not of entries: where :math:`n_o` of n rows observe a column that
depends on no other, its mean has :math:`\sqrt{n_o / n}` times the exact standard deviation. A row without an
observed entry does not count.

References:
    Beal, Ghahramani, *The variational Bayesian EM algorithm for incomplete data*, Bayesian Statistics 7, 2003;
    Little, Rubin, *Statistical Analysis with Missing Data*, chapters 7 and 11, with the sweep operator;
    Ghahramani, Jordan, *Supervised learning from incomplete data via an EM approach*, NIPS 1994, for mixtures.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.base import (
    RESOLUTION,
    Component,
    Hyperparameters,
    Location,
    Parameters,
)
from numpyro_tempered.mixtures.components.matrices import (
    cholesky,
    inverse_root,
    log_det,
    outer_product,
    symmetric,
)

# With more columns a call of LAPACK for each row takes less time than sweeps of all rows at once.
MANY_COLUMNS = 12
# Numbers of the matrices of all rows that are held at a time.
AT_A_TIME = 2**22


@lru_cache(maxsize=64)
def with_missing_entries(
    component: Component,
    dim: int,
    view: Callable[[Hyperparameters], Hyperparameters] = lambda q: q,
) -> Component:
    """The form of a Gaussian component for missing entries.

    Its statistics are sums over pairs of columns of what both observe. Completed statistics are sums where all is
    observed; see :func:`weights_in_pairs` for how they are laid out.

    Args:
        component: Without its prior. Its statistics are the entries of x, and the products of all pairs.
        dim: Number of columns d.
        view: Hyperparameters to those of components that share nothing.
    """
    located: Any = component.location
    places = places_of(dim)

    def complete_sums(
        prior: Hyperparameters, sums: Array, spread: bool
    ) -> tuple[Array, Array]:
        return filled(sums, dim, prior if spread else None)

    def join(coefficients: tuple[Array, Array]) -> tuple[Array, Array]:
        return weights_in_pairs(*coefficients, dim)

    def linear(weights: Array, deviations: Array) -> Array:
        """The log density of the observed entries, up to powers of 2π."""
        quadratic, constant = weights[..., places], weights[..., -1:]

        def of_rows(deviations: Array) -> Array:
            complete, _, log_dets = complete_by(quadratic, deviations)
            values = located.linear(quadratic, complete) - 0.5 * log_dets + constant
            return jnp.where(jnp.all(jnp.isnan(deviations), axis=-2), 0.0, values)

        values = in_pieces(of_rows, dim, deviations)
        return jnp.reshape(jnp.moveaxis(values, 0, -2), (*values.shape[1:-1], -1))[
            ..., : deviations.shape[-1]
        ]

    def sums_of_pairs(omega: Array, deviations: Array) -> Array:
        observed = ~jnp.isnan(deviations)
        both = jnp.concatenate(
            [jnp.where(observed, deviations, 0.0), observed.astype(deviations.dtype)],
            axis=-2,
        )
        # Behind the sums of the entries.
        pairs = located.sums(omega, both)[..., 2 * dim :]
        return jnp.concatenate(
            [pairs, jnp.sum(counted(omega, deviations), axis=-1, keepdims=True)],
            axis=-1,
        )

    def completed(weights: Array, omega: Array, deviations: Array) -> Array:
        def of_rows(omega: Array, deviations: Array) -> Array:
            omega = counted(omega, deviations)
            complete, covariance, _ = complete_by(weights[..., places], deviations)
            # What has no weight may be anything, also what is not finite.
            complete = jnp.where(omega[..., None, :] > 0, complete, 0.0)
            covariance = jnp.where(omega[..., None, None, :] > 0, covariance, 0.0)
            i, j = np.triu_indices(dim)
            spread = jnp.sum(omega[..., None, None, :] * covariance, axis=-1)[..., i, j]
            sums = located.sums(omega, complete)
            total, products = sums[..., :dim], sums[..., dim:] + spread
            return sums_in_pairs(
                jnp.sum(omega, axis=-1), total, symmetric(products, dim)
            )

        return jnp.sum(in_pieces(of_rows, dim, omega, deviations), axis=0)

    best: Any = component.maximum_likelihood
    expected: Any = component.coefficients
    at: Any = component.coefficients_at

    def maximum_likelihood(
        prior: Hyperparameters, counts: Array, sums: Array
    ) -> Parameters:
        count, complete = complete_sums(prior, sums, False)
        return where_resolved(best(prior, count, complete), count, complete, dim)

    return component._replace(
        statistics=statistics,
        log_base=lambda columns: (
            -0.5
            * special.LOG_TWO_PI
            * jnp.sum(~jnp.isnan(columns), 0).astype(columns.dtype)
        ),
        update=lambda prior, counts, sums: component.update(
            prior, *complete_sums(prior, sums, True)
        ),
        coefficients=lambda q: join(expected(q)),
        log_evidence=lambda prior, counts, sums: component.log_evidence(
            prior, *complete_sums(prior, sums, True)
        ),
        log_predictive=lambda q, columns: log_predictive(view(q), columns),
        coefficients_at=lambda parameters: join(at(parameters)),
        maximum_likelihood=maximum_likelihood,
        location=Location(located.of, linear, sums_of_pairs, completed=completed),
    )


def counted(omega: Array, deviations: Array) -> Array:
    """Responsibilities ``(K, n)`` of rows with an observed entry; 0 of the others."""
    return jnp.where(jnp.all(jnp.isnan(deviations), axis=-2), 0.0, omega)


def places_of(dim: int) -> np.ndarray:
    """Where coefficients of entries and of products of pairs stand among all pairs of 2 d numbers."""
    index = np.zeros((2 * dim, 2 * dim), np.int32)
    i, j = np.triu_indices(2 * dim)
    index[i, j] = np.arange(len(i))
    rows, columns = np.triu_indices(dim)
    entries = np.arange(dim)
    return np.concatenate([index[entries, dim + entries], index[rows, columns]])


def statistics(columns: Array) -> Array:
    """Products of all pairs of the entries, 0 where missing, and of whether they are observed; and if any is."""
    observed = ~jnp.isnan(columns)
    both = jnp.concatenate(
        [jnp.where(observed, columns, 0.0), observed.astype(columns.dtype)]
    )
    i, j = np.triu_indices(len(both))
    return jnp.concatenate(
        [both[i] * both[j], jnp.any(observed, axis=0)[None].astype(columns.dtype)]
    )


def weights_in_pairs(constant: Array, weights: Array, dim: int) -> tuple[Array, Array]:
    """Coefficients of :func:`statistics`; the constant multiplies whether any entry is observed."""
    size = dim * (2 * dim + 1)
    coefficients = (
        jnp.zeros((*weights.shape[:-1], size), weights.dtype)
        .at[..., places_of(dim)]
        .set(weights)
    )
    return jnp.zeros_like(constant), jnp.concatenate(
        [coefficients, constant[..., None]], axis=-1
    )


def sums_in_pairs(count: Array, total: Array, products: Array) -> Array:
    """Sums of :func:`statistics` of complete rows, of their entries ``(K, d)`` and products ``(K, d, d)``."""
    dim = total.shape[-1]
    by_entry = jnp.broadcast_to(total[..., None], products.shape)
    counts = jnp.broadcast_to(count[..., None, None], products.shape)
    upper = jnp.concatenate([products, by_entry], axis=-1)
    lower = jnp.concatenate([jnp.swapaxes(by_entry, -1, -2), counts], axis=-1)
    i, j = np.triu_indices(2 * dim)
    pairs = jnp.concatenate([upper, lower], axis=-2)[..., i, j]
    return jnp.concatenate([pairs, count[..., None]], axis=-1)


def filled(sums: Array, dim: int, prior: Hyperparameters | None) -> tuple[Array, Array]:
    """Counts, and sums of complete rows: missing entries have mean and variance of their column in the component.

    With a prior they are those of the posterior of the column by itself: the prior's where a column has no entry.
    Completed sums stay as they are.
    """
    both = symmetric(sums[..., :-1], 2 * dim)
    products, by_entry, number = (
        both[..., :dim, :dim],
        both[..., :dim, dim:],
        both[..., dim:, dim:],
    )
    count, i = sums[..., -1], np.arange(dim)
    total, observed, squares = (
        by_entry[..., i, i],
        number[..., i, i],
        products[..., i, i],
    )
    if prior is None:
        safe = jnp.where(observed > 0, observed, 1.0)
        mean = total / safe
        variance = jnp.maximum(squares - observed * jnp.square(mean), 0.0) / safe
    else:
        kappa, df = prior.mean_precision[..., None], prior.df[..., None]
        mean = (kappa * prior.loc + total) / (kappa + observed)
        scatter = squares - 2.0 * mean * total + observed * jnp.square(mean)
        variance = (prior.scale[..., i, i] + jnp.maximum(scatter, 0.0)) / (
            df + observed
        )
    missing = count[..., None] - observed
    # Of pairs of which the first is observed and the second is missing, and of pairs of which both are missing.
    first_alone = (total[..., None] - by_entry) * mean[..., None, :]
    both_missing = (
        count[..., None, None] - observed[..., None] - observed[..., None, :] + number
    )
    spread = (missing * variance)[..., None] * jnp.eye(dim, dtype=sums.dtype)
    products = (
        products
        + first_alone
        + jnp.swapaxes(first_alone, -1, -2)
        + both_missing * outer_product(mean)
        + spread
    )
    rows, columns = np.triu_indices(dim)
    return count, jnp.concatenate(
        [total + missing * mean, products[..., rows, columns]], axis=-1
    )


def where_resolved(
    parameters: Parameters, counts: Array, sums: Array, dim: int
) -> Parameters:
    """The parameters, NaN for components in which others determine a column up to rounding.

    With missing entries a component closes in on a plane over many passes, until its log density is rounding. A
    column's variance times its precision is how many times its variance given the others goes into it.
    """
    number = jnp.where(counts > 0, counts, 1.0)[..., None]
    i, j = np.triu_indices(dim)
    variance = sums[..., dim:][..., i == j] / number - jnp.square(
        sums[..., :dim] / number
    )
    entries = np.arange(dim)
    inflation = jnp.max(
        variance * parameters["precision"][..., entries, entries], axis=-1
    )
    resolved = jnp.finfo(sums.dtype).eps * inflation <= RESOLUTION

    def keep(leaf: Array) -> Array:
        return jnp.where(
            jnp.reshape(resolved, resolved.shape + (1,) * (leaf.ndim - resolved.ndim)),
            leaf,
            jnp.nan,
        )

    return jax.tree.map(keep, parameters)


def complete_by(weights: Array, deviations: Array) -> tuple[Array, Array, Array]:
    """Rows with their missing entries at the conditional means.

    Args:
        weights: Coefficients of entries and products ``(K, F)``.
        deviations: ``(K, d, n)``, NaN where missing.

    Returns:
        The rows ``(K, d, n)``, the conditional covariances of their entries ``(K, d, d, n)``, 0 for what is
        observed, and the log determinants of their inverses ``(K, n)``.
    """
    dim = deviations.shape[-2]
    i, j = np.triu_indices(dim)
    factors = jnp.where(i == j, -2.0, -1.0).astype(weights.dtype)
    precision = symmetric(factors * weights[..., dim:], dim)
    missing = jnp.isnan(deviations)
    observed = jnp.where(missing, 0.0, deviations)
    slope = weights[..., :dim, None] - jnp.einsum(
        "...ij,...jn->...in", precision, observed, precision="highest"
    )
    inverse = inverse_by_sweeps if dim <= MANY_COLUMNS else inverse_by_roots
    covariance, log_dets = inverse(precision, missing)
    mean = jnp.sum(
        covariance * jnp.where(missing, slope, 0.0)[..., None, :, :], axis=-2
    )
    return observed + mean, covariance, log_dets


def inverse_by_sweeps(matrix: Array, subset: Array) -> tuple[Array, Array]:
    """Inverses of submatrices, for all of n subsets of rows and columns at once.

    Args:
        matrix: Positive definite, ``(K, d, d)``.
        subset: Which rows and columns, ``(K, d, n)``.

    Returns:
        The inverses in their places, 0 elsewhere ``(K, d, d, n)``, and the log determinants ``(K, n)``.
    """
    dim, log_dets = matrix.shape[-1], jnp.zeros(())
    table = jnp.broadcast_to(matrix[..., None], (*matrix.shape, subset.shape[-1]))
    for k in range(dim):
        active, is_k = subset[..., k, :], np.arange(dim) == k
        pivot = jnp.where(active, table[..., k, k, :], 1.0)
        log_dets = log_dets + jnp.log(pivot)
        row = jnp.where(active[..., None, :], table[..., k, :, :], 0.0)
        scaled = row / pivot[..., None, :]
        reduced = table - row[..., None, :] * scaled[..., None, :, :]
        border = jnp.where(is_k[:, None], -1.0 / pivot[..., None, :], scaled)
        border = jnp.where(
            is_k[:, None, None], border[..., None, :, :], border[..., None, :]
        )
        is_border = (is_k[:, None] | is_k)[..., None] & active[..., None, None, :]
        table = jnp.where(is_border, border, reduced)
    return jnp.where(
        subset[..., None, :] & subset[..., None, :, :], -table, 0.0
    ), log_dets


def inverse_by_roots(matrix: Array, subset: Array) -> tuple[Array, Array]:
    """The same as :func:`inverse_by_sweeps`, by a Cholesky factor for each subset."""
    rows = jnp.swapaxes(subset, -1, -2)
    both = rows[..., None] & rows[..., None, :]
    root = cholesky(
        jnp.where(
            both, matrix[..., None, :, :], jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
        )
    )
    inverse = jnp.where(both, inverse_root(root), 0.0)
    covariance = jnp.einsum("...ki,...kj->...ij", inverse, inverse, precision="highest")
    return jnp.moveaxis(covariance, -3, -1), log_det(root)


def in_pieces(function: Callable[..., Array], dim: int, *arrays: Array) -> Array:
    """The values of a function of arrays ``(K, ..., n)``, piece by piece of their rows: a leading axis.

    Rows that fill up the last piece are 0.
    """
    n, size = arrays[0].shape[-1], max(AT_A_TIME // (dim**2 * arrays[0].shape[0]), 1)
    if n <= size:
        return function(*arrays)[None]
    number = -(-n // size)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, number * size - n)])
        return jnp.moveaxis(
            jnp.reshape(padded, (*array.shape[:-1], number, size)), -2, 0
        )

    return jax.lax.map(lambda piece: function(*piece), tuple(map(split, arrays)))


def log_predictive(q: Hyperparameters, columns: Array) -> Array:
    """The marginal of a Student's t with df - d + 1 degrees of freedom, which keeps them."""
    dim = q.loc.shape[-1]
    freedom = q.df - dim + 1.0
    scale = q.scale * (1.0 + 1.0 / q.mean_precision)[..., None, None]
    steps = special.log_gamma_half_step(
        0.5 * (freedom[..., None] + jnp.arange(dim, dtype=scale.dtype))
    )
    constants = jnp.cumsum(steps - 0.5 * jnp.log(jnp.pi), axis=-1)
    constants = jnp.concatenate(
        [jnp.zeros_like(constants[..., :1]), constants], axis=-1
    )

    def of_rows(deviations: Array) -> Array:
        observed = ~jnp.isnan(deviations)
        rows = jnp.swapaxes(observed, -1, -2)
        both = rows[..., None] & rows[..., None, :]
        root = cholesky(
            jnp.where(both, scale[..., None, :, :], jnp.eye(dim, dtype=scale.dtype))
        )
        entries = jnp.swapaxes(jnp.where(observed, deviations, 0.0), -1, -2)
        whitened = jnp.einsum(
            "...ij,...j->...i", inverse_root(root), entries, precision="highest"
        )
        number = jnp.sum(rows, axis=-1)
        power = (
            0.5
            * (freedom[..., None] + number)
            * jnp.log1p(jnp.sum(jnp.square(whitened), axis=-1))
        )
        return (
            jnp.take_along_axis(constants, number, axis=-1)
            - 0.5 * log_det(root)
            - power
        )

    values = in_pieces(of_rows, dim, columns - q.loc[..., None])
    return jnp.reshape(jnp.moveaxis(values, 0, -2), (*values.shape[1:-1], -1))[
        ..., : columns.shape[-1]
    ]
