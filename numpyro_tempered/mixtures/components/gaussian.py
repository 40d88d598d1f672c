"""Gaussian components with full covariance and normal-inverse-Wishart priors."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, ArrayLike, doubles, is_traced, matmul
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.gaussian_missing import with_missing_entries
from numpyro_tempered.mixtures.components.matrices import (
    cholesky,
    inverse_root,
    log_det,
    outer_product,
    precision_of,
    square,
    symmetric,
)


class NormalWishart(NamedTuple):
    """precision ~ Wishart(df, scale^-1), mean ~ N(loc, (mean_precision × precision)^-1).

    Arrays ``(d,)``, ``()``, ``()`` and ``(d, d)``, with a leading K for a posterior.
    """

    loc: Array
    mean_precision: Array
    df: Array
    scale: Array


def gaussian(
    dim: int,
    *,
    loc: ArrayLike = 0.0,
    mean_precision: ArrayLike = 1.0,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    variance: ArrayLike | None = None,
) -> components.Component:
    r"""Components N(mean, precision^-1) with full covariance, normal-inverse-Wishart.

    Args:
        dim: Number of columns d.
        loc: Prior mean m0, ``(d,)`` or one for all.
        mean_precision: kappa0, the number of data that the prior of the mean is worth.
        df: nu0 > d - 1, degrees of freedom, the number of data that the prior of the precision is worth; d + 2
            by default. At d itself the draws of the precision are nearly singular, one in thousands so much
            that float32 cannot factor them.
        scale: Psi0, ``(d, d)`` positive definite, in the data's units squared; a vector or number is its
            diagonal. 1 by default.
        variance: The variance that the prior expects, instead of ``scale``, which is then ``df`` times this;
            ``(d, d)``, ``(d,)`` or one for all.

    Returns:
        The component. Missing entries are allowed. They are latent beside the labels and count as data, so that
        the posterior is narrower than the exact one: the page on the theory of mixtures says by how much.

    Raises:
        ValueError: If a hyperparameter is out of its range, or both ``scale`` and ``variance`` are given.

    References:
        CA18, Algorithm 1; Murphy, *Conjugate Bayesian analysis of the Gaussian distribution*, 2007, section 8.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.gaussian(2).prior.scale.shape
        (2, 2)
    """
    prior = wishart_prior(
        "gaussian", dim, loc, mean_precision, df, scale=scale, variance=variance
    )
    return gaussian_of(dim)._replace(prior=prior)


@lru_cache(maxsize=64)
def gaussian_of(dim: int) -> components.Component:
    """The component without its prior."""
    return components.Component(
        name="gaussian",
        prior=None,
        check=lambda x: components.floating_rows(x, "gaussian", dim),
        statistics=statistics,
        log_base=log_base,
        update=update,
        coefficients=coefficients,
        kl=kl,
        log_evidence=lambda p, n, s: jnp.sum(
            log_normaliser(update(p, n, s)) - log_normaliser(p)
        ),
        log_predictive=log_predictive,
        draw=draw,
        distribution=lambda p: dist.MultivariateNormal(
            p["loc"], precision_matrix=p["precision"]
        ),
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: (
            num_components * (dim + dim * (dim + 1) // 2)
        ),
        coordinates=components.standardised,
        location=components.Location(components.get_loc, linear, weighted_sums),
        with_missing=lambda: with_missing_entries(gaussian_of(dim), dim),
    )


def wishart_prior(
    name: str,
    dim: int,
    loc: ArrayLike,
    mean_precision: ArrayLike,
    df: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    variance: ArrayLike | None,
) -> NormalWishart:
    """The prior from its arguments.

    Raises:
        ValueError: If a hyperparameter is out of its range, or scale and variance are both given.
    """
    if scale is not None and variance is not None:
        raise ValueError(
            f"{name}: give scale or variance, not both; scale = df * variance."
        )
    mean = components.per_column(loc, dim, name, "loc", "(-inf, inf)")
    degrees = components.one_number(
        dim + 2.0 if df is None else df, name, "df", f"({dim - 1}, inf)"
    )
    argument, value = ("scale", scale) if variance is None else ("variance", variance)
    matrix = components.hyperparameter(
        1.0 if value is None else value, name, argument, "(-inf, inf)"
    )
    if matrix.ndim < 2:
        diagonal = components.per_column(matrix, dim, name, argument)
        matrix = components.namespace(diagonal).diag(diagonal)
    if matrix.shape != (dim, dim):
        raise ValueError(
            f"{name}: {argument} has shape {matrix.shape}; expected {(dim, dim)}, ({dim},) or ()."
        )
    if not is_traced(matrix):
        host = doubles(matrix)
        if (
            not np.allclose(host, host.T, rtol=1e-5, atol=0.0)
            or np.linalg.eigvalsh(host).min() <= 0
        ):
            raise ValueError(
                f"{name}: {argument} must be symmetric and positive definite."
            )
    matrix = 0.5 * (matrix + matrix.T)
    kappa = components.one_number(mean_precision, name, "mean_precision")
    return NormalWishart(
        mean, kappa, degrees, matrix if variance is None else degrees * matrix
    )


def statistics(columns: Array) -> Array:
    """The entries of x, and the products of all pairs."""
    i, j = np.triu_indices(columns.shape[0])
    return jnp.concatenate([columns, columns[i] * columns[j]])


def log_base(columns: Array) -> Array:
    """The constant of the Gaussian density."""
    return jnp.full(
        columns.shape[1:], -0.5 * columns.shape[0] * special.LOG_TWO_PI, columns.dtype
    )


def linear(weights: Array, deviations: Array) -> Array:
    """The quadratic form of weights that :func:`quadratic_coefficients` gives, by the root of its matrix."""
    dim = deviations.shape[-2]
    i, j = np.triu_indices(dim)
    factors = jnp.where(i == j, -2.0, -1.0).astype(weights.dtype)
    root = cholesky(symmetric(factors * weights[..., dim:], dim))
    offset = jax.lax.linalg.triangular_solve(
        root, weights[..., :dim, None], left_side=True, lower=True
    )
    whitened = (
        jnp.einsum("...ij,...in->...jn", root, deviations, precision="highest") - offset
    )
    return 0.5 * (
        jnp.sum(jnp.square(offset), axis=-2) - jnp.sum(jnp.square(whitened), axis=-2)
    )


def weighted_sums(omega: Array, deviations: Array) -> Array:
    """The sums of the statistics, as products of matrices."""
    i, j = np.triu_indices(deviations.shape[-2])
    total = jnp.einsum("...n,...in->...i", omega, deviations, precision="highest")
    weighted = omega[..., None, :] * deviations
    outer = jnp.einsum("...in,...jn->...ij", weighted, deviations, precision="highest")
    return jnp.concatenate([total, outer[..., i, j]], axis=-1)


def moments(counts: Array, sums: Array) -> tuple[Array, Array, Array]:
    """Sums of x and means ``(K, d)``, and scatters about them ``(K, d, d)``; 0 where a component is empty."""
    # F = d + d (d + 1) / 2.
    dim = int((np.sqrt(9 + 8 * sums.shape[-1]) - 3) / 2 + 0.5)
    total = sums[..., :dim]
    mean = total / jnp.where(counts > 0, counts, 1.0)[..., None]
    between = counts[..., None, None] * outer_product(mean)
    # About a point far from the mean the difference is rounding, which must not make a matrix indefinite.
    rounding = 4 * dim * jnp.finfo(sums.dtype).eps * jnp.eye(dim, dtype=sums.dtype)
    return total, mean, symmetric(sums[..., dim:], dim) - between * (1.0 - rounding)


def update(prior: NormalWishart, counts: Array, sums: Array) -> NormalWishart:
    """The normal-Wishart posterior."""
    loc, kappa, scatter = mean_and_scatter(prior, counts, sums)
    return NormalWishart(loc, kappa, prior.df + counts, prior.scale + scatter)


def mean_and_scatter(
    prior: NormalWishart, counts: Array, sums: Array
) -> tuple[Array, Array, Array]:
    """Posterior means and their precisions, and the scatters within components and about the prior mean."""
    total, mean, scatter = moments(counts, sums)
    kappa = prior.mean_precision + counts
    between = (prior.mean_precision * counts / kappa)[..., None, None] * outer_product(
        mean - prior.loc
    )
    prior_total = prior.mean_precision[..., None] * prior.loc
    return (prior_total + total) / kappa[..., None], kappa, scatter + between


def expected_precision(q: NormalWishart) -> tuple[Array, Array]:
    """E[precision] = df scale^-1 and E[log det precision]."""
    dim = q.loc.shape[-1]
    terms = special.digamma(
        0.5 * (q.df[..., None] - jnp.arange(dim, dtype=q.loc.dtype))
    )
    root = cholesky(q.scale)
    expected_log_det = jnp.sum(terms, axis=-1) + dim * jnp.log(2.0) - log_det(root)
    return q.df[..., None, None] * square(inverse_root(root)), expected_log_det


def quadratic_coefficients(precision: Array, loc: Array) -> tuple[Array, Array]:
    """The constant and the coefficients of x and of products of -(x - loc)' precision (x - loc) / 2."""
    dim = loc.shape[-1]
    i, j = np.triu_indices(dim)
    slope = jnp.einsum("...ij,...j->...i", precision, loc, precision="highest")
    products = jnp.where(i == j, -0.5, -1.0).astype(loc.dtype) * precision[..., i, j]
    return -0.5 * jnp.sum(slope * loc, axis=-1), jnp.concatenate(
        [slope, products], axis=-1
    )


def coefficients(q: NormalWishart) -> tuple[Array, Array]:
    """E log density, as a quadratic form of x."""
    precision, expected_log_det = expected_precision(q)
    constant, weights = quadratic_coefficients(precision, q.loc)
    return constant + 0.5 * (
        expected_log_det - q.loc.shape[-1] / q.mean_precision
    ), weights


def kl(q: NormalWishart, p: NormalWishart) -> Array:
    """KL of the means given the precisions, in expectation, and of the precisions."""
    root = cholesky(q.scale)
    inverse = inverse_root(root)
    return jnp.sum(kl_of_mean(q, p, inverse) + wishart_kl(q, p, root, inverse))


def kl_of_mean(q: NormalWishart, p: NormalWishart, inverse: Array) -> Array:
    """KL of the means in expectation, for each component; with the inverse root of the scale of the precision."""
    ratio = p.mean_precision / q.mean_precision
    whitened = matmul(inverse, (q.loc - p.loc)[..., None])
    distance = q.df * jnp.sum(jnp.square(whitened), axis=(-2, -1))
    return 0.5 * (
        q.loc.shape[-1] * (ratio - 1.0 - jnp.log(ratio)) + p.mean_precision * distance
    )


def wishart_kl(
    q: NormalWishart, p: NormalWishart, root: Array, inverse: Array
) -> Array:
    """KL of the precisions, for each component; with the root of the scale and its inverse."""
    dim = q.loc.shape[-1]
    root_of_prior = cholesky(p.scale)
    i = jnp.arange(dim, dtype=q.loc.dtype)
    slack, slope = special.log_gamma_slack(0.5 * (q.df[..., None] - i))
    # Terms of the size of df cancel in the slack: d df / 2 with the sum of the arguments.
    gammas = jnp.sum(slack - 0.5 * (p.df[..., None] - i) * slope, axis=-1)
    widths = 0.5 * p.df * (log_det(root) - log_det(root_of_prior))
    whitened = matmul(inverse, root_of_prior)
    trace = 0.5 * q.df * jnp.sum(jnp.square(whitened), axis=(-2, -1))
    return (
        widths
        + trace
        + gammas
        - 0.25 * dim * (dim - 1)
        + special.multigammaln(0.5 * p.df, dim)
    )


def wishart_log_normaliser(q: NormalWishart) -> Array:
    """The log of ∫ |L|^((df - d - 1)/2) exp(-tr(scale L)/2) dL, without the factor π^(d(d-1)/4)."""
    dim = q.loc.shape[-1]
    root = cholesky(q.scale)
    return 0.5 * q.df * (dim * jnp.log(2.0) - log_det(root)) + special.multigammaln(
        0.5 * q.df, dim
    )


def log_normaliser(q: NormalWishart) -> Array:
    """With respect to the mean and the precision, without powers of π, for each component."""
    return wishart_log_normaliser(q) - 0.5 * q.loc.shape[-1] * jnp.log(q.mean_precision)


def log_predictive(q: NormalWishart, columns: Array) -> Array:
    """Student's t with df - d + 1 degrees of freedom."""
    dim = q.loc.shape[-1]
    freedom = q.df - dim + 1.0
    root = cholesky(q.scale * (1.0 + 1.0 / q.mean_precision)[..., None, None])
    whitened = solve_triangular(root, columns - q.loc[..., None], lower=True)
    power = (
        0.5
        * (freedom + dim)[..., None]
        * jnp.log1p(jnp.sum(jnp.square(whitened), axis=-2))
    )
    steps = special.log_gamma_half_step(
        0.5 * (freedom[..., None] + jnp.arange(dim, dtype=root.dtype))
    )
    constant = jnp.sum(steps, axis=-1) - 0.5 * (dim * jnp.log(jnp.pi) + log_det(root))
    return constant[..., None] - power


def draw(sample: components.Sample, q: NormalWishart) -> components.Parameters:
    """Precision matrices, and means given them."""
    precision = sample("precision", dist.Wishart(q.df, rate_matrix=q.scale))
    scaled = q.mean_precision[..., None, None] * precision
    loc = sample("loc", dist.MultivariateNormal(q.loc, precision_matrix=scaled))
    return {"loc": loc, "precision": precision}


def coefficients_at(parameters: components.Parameters) -> tuple[Array, Array]:
    """The Gaussian's natural parameters."""
    constant, weights = quadratic_coefficients(
        parameters["precision"], parameters["loc"]
    )
    return constant + 0.5 * log_det(cholesky(parameters["precision"])), weights


def maximum_likelihood(
    prior: NormalWishart, counts: Array, sums: Array
) -> components.Parameters:
    """Weighted means, and inverses of the weighted covariances."""
    _, mean, scatter = moments(counts, sums)
    covariance = scatter / jnp.where(counts > 0, counts, 1.0)[..., None, None]
    return {"loc": mean, "precision": precision_of(covariance)}
