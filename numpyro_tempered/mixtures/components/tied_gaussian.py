"""Gaussian components that share one full covariance, with a normal-inverse-Wishart prior."""

from functools import lru_cache

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike, at_index
from numpyro_tempered.mixtures.components import gaussian_missing
from numpyro_tempered.mixtures.components.base import (
    Component,
    Parameters,
    Sample,
    floating_rows,
)
from numpyro_tempered.mixtures.components.gaussian import (
    NormalWishart,
    coefficients,
    gaussian_of,
    kl_of_mean,
    log_predictive,
    mean_and_scatter,
    moments,
    wishart_kl,
    wishart_log_normaliser,
    wishart_prior,
)
from numpyro_tempered.mixtures.components.matrices import (
    cholesky,
    inverse_root,
    precision_of,
)


def tied_gaussian(
    dim: int,
    *,
    loc: ArrayLike = 0.0,
    mean_precision: ArrayLike = 1.0,
    df: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    variance: ArrayLike | None = None,
) -> Component:
    r"""Components N(mean_j, precision^-1): one precision, Wishart, for all K components.

    With precision Λ ~ Wishart(df, scale^-1) and :math:`m_j \mid \Lambda \sim N(loc, (\kappa_0 \Lambda)^{-1})`,
    the posterior has the same form: :math:`\nu = \nu_0 + \alpha \sum_j N_j` and one matrix, the prior's plus the
    scatters of all components. Both are repeated K times, so that every array of the posterior has K first.

    Args:
        dim: Number of columns d.
        loc: Prior mean m0, ``(d,)`` or one for all.
        mean_precision: kappa0, the number of data that the prior of each mean is worth.
        df: nu0 > d - 1, degrees of freedom, the number of data that the prior of the precision is worth; d + 2
            by default, see :func:`gaussian`.
        scale: Psi0, ``(d, d)`` positive definite; a vector or number is its diagonal. 1 by default.
        variance: The variance that the prior expects, instead of ``scale``, which is then ``df`` times this.

    Returns:
        The component. Missing entries are allowed, as by :func:`gaussian`.

    Raises:
        ValueError: If a hyperparameter is out of its range, or both ``scale`` and ``variance`` are given.

    References:
        CA18, Algorithm 1; Murphy, *Conjugate Bayesian analysis of the Gaussian distribution*, 2007, section 8.
        scikit-learn's ``covariance_type="tied"`` counts n / K data in place of n, and is another fixed point.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.tied_gaussian(2).num_parameters(3)
        9
    """
    name = "tied_gaussian"
    prior = wishart_prior(
        name, dim, loc, mean_precision, df, scale=scale, variance=variance
    )
    return _tied(dim)._replace(prior=prior)


@lru_cache(maxsize=64)
def _tied(dim: int) -> Component:
    return gaussian_of(dim)._replace(
        name="tied_gaussian",
        check=lambda x: floating_rows(x, "tied_gaussian", dim),
        update=update,
        coefficients=lambda q: coefficients(shared(q)),
        kl=kl,
        log_evidence=log_evidence,
        log_predictive=lambda q, columns: log_predictive(shared(q), columns),
        draw=draw,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: (
            num_components * dim + dim * (dim + 1) // 2
        ),
        with_missing=lambda: gaussian_missing.with_missing_entries(
            _tied(dim), dim, shared
        ),
    )


def shared(q: NormalWishart) -> NormalWishart:
    """The same with the first component's precision in the place of the others'."""
    one = of_precision(q)
    return q._replace(
        df=jnp.broadcast_to(one.df, q.df.shape),
        scale=jnp.broadcast_to(one.scale, q.scale.shape),
    )


def of_precision(q: NormalWishart) -> NormalWishart:
    """The hyperparameters of the shared precision: those of the first of K components, or the prior itself."""
    return q if q.df.ndim == 0 else at_index(q, 0)


def update(prior: NormalWishart, counts: Array, sums: Array) -> NormalWishart:
    """The joint posterior of the means and the precision."""
    loc, kappa, scatter = mean_and_scatter(prior, counts, sums)
    precision = of_precision(prior)
    df = jnp.broadcast_to(precision.df + jnp.sum(counts), counts.shape)
    matrix = precision.scale + jnp.sum(scatter, axis=0)
    return NormalWishart(loc, kappa, df, jnp.broadcast_to(matrix, scatter.shape))


def kl(q: NormalWishart, p: NormalWishart) -> Array:
    """KL of the K means given the precision, in expectation, and KL of the shared precision."""
    one = of_precision(q)
    root = cholesky(one.scale)
    inverse = inverse_root(root)
    return jnp.sum(kl_of_mean(shared(q), p, inverse)) + wishart_kl(
        one, p, root, inverse
    )


def log_evidence(prior: NormalWishart, counts: Array, sums: Array) -> Array:
    """The log ratio of the normalisers, in which the precision counts once."""
    q = update(prior, counts, sums)
    means = (
        0.5
        * prior.loc.shape[-1]
        * jnp.sum(jnp.log(prior.mean_precision / q.mean_precision))
    )
    return (
        means + wishart_log_normaliser(of_precision(q)) - wishart_log_normaliser(prior)
    )


def draw(sample: Sample, q: NormalWishart) -> Parameters:
    """One precision matrix, and means given it."""
    one = of_precision(q)
    precision = sample("precision", dist.Wishart(one.df, rate_matrix=one.scale))
    scaled = q.mean_precision[..., None, None] * precision
    loc = sample("loc", dist.MultivariateNormal(q.loc, precision_matrix=scaled))
    return {"loc": loc, "precision": jnp.broadcast_to(precision, scaled.shape)}


def maximum_likelihood(prior: NormalWishart, counts: Array, sums: Array) -> Parameters:
    """Weighted means, and the inverse of the pooled covariance."""
    _, mean, scatter = moments(counts, sums)
    precision = precision_of(jnp.sum(scatter, axis=0) / jnp.sum(counts))
    return {"loc": mean, "precision": jnp.broadcast_to(precision, scatter.shape)}
