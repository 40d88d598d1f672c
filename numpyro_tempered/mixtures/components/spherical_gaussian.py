"""Gaussian components with one precision for all columns, and normal-inverse-gamma priors."""

from functools import lru_cache

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike, matmul
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.columnwise import Arrays, join, location_by
from numpyro_tempered.mixtures.components.diagonal_gaussian import NormalGamma, rate_of


def spherical_gaussian(
    dim: int,
    *,
    loc: ArrayLike = 0.0,
    mean_precision: ArrayLike = 1.0,
    concentration: ArrayLike = 1.0,
    rate: ArrayLike | None = None,
    variance: ArrayLike | None = None,
) -> components.Component:
    r"""Components N(mean, I / precision), normal-inverse-gamma with one precision for all columns.

    Args:
        dim: Number of columns d. They should be of one unit.
        loc: Prior means m0, ``(d,)`` or one for all.
        mean_precision: kappa0, the number of data that the prior of the means is worth, ``(d,)`` or one for all.
        concentration: a0 of the Gamma prior of the precision; 2 a0 / d is the number of data it is worth.
        rate: b0, in the data's units squared; ``concentration`` × ``variance`` by default.
        variance: The variance that the prior expects, instead of ``rate``; 1 by default. Of one for each column,
            the prior takes the mean.

    Returns:
        The component. Missing entries are allowed.

    Raises:
        ValueError: If a hyperparameter is out of its range, or both ``rate`` and ``variance`` are given.

    References:
        Murphy, *Conjugate Bayesian analysis of the Gaussian distribution*, 2007, section 3;
        the tempered update: CA18, Algorithm 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.components.spherical_gaussian(3, variance=2.0).prior.rate.shape
        ()
    """
    name = "spherical_gaussian"
    if variance is not None:
        variance = jnp.mean(components.per_column(variance, dim, name, "variance"))
    prior = NormalGamma(
        components.per_column(loc, dim, name, "loc", "(-inf, inf)"),
        components.per_column(mean_precision, dim, name, "mean_precision"),
        components.one_number(concentration, name, "concentration"),
        components.one_number(
            rate_of(rate, variance, concentration, name), name, "rate"
        ),
    )
    return _spherical(dim, False)._replace(prior=prior)


@lru_cache(maxsize=64)
def _spherical(dim: int, missing: bool) -> components.Component:
    """The functions; with missing entries, the statistics count the observed ones of each column."""

    def parts_of(columns: Array) -> Arrays:
        observed = ~jnp.isnan(columns)
        filled = jnp.where(observed, columns, 0.0) if missing else columns
        parts = filled, matmul(jnp.ones((1, dim), columns.dtype), jnp.square(filled))
        return (*parts, observed.astype(columns.dtype)) if missing else parts

    def moments(counts: Array, sums: Array) -> tuple[Array, Array, Array]:
        """Observed entries and means ``(K, d)``, and the sum of squares about the means ``(K,)``."""
        total, squares = sums[..., :dim], sums[..., dim]
        count = (
            sums[..., dim + 1 :]
            if missing
            else jnp.broadcast_to(counts[..., None], total.shape)
        )
        mean = total / jnp.where(count > 0, count, 1.0)
        return count, mean, jnp.maximum(squares - jnp.sum(total * mean, axis=-1), 0.0)

    def update(prior: NormalGamma, counts: Array, sums: Array) -> NormalGamma:
        count, mean, scatter = moments(counts, sums)
        kappa = prior.mean_precision + count
        between = jnp.sum(
            prior.mean_precision * count / kappa * jnp.square(mean - prior.loc), axis=-1
        )
        loc = (prior.mean_precision * prior.loc + sums[..., :dim]) / kappa
        concentration = prior.concentration + 0.5 * jnp.sum(count, axis=-1)
        return NormalGamma(
            loc, kappa, concentration, prior.rate + 0.5 * (scatter + between)
        )

    def coefficients(q: NormalGamma) -> tuple[Array, Array]:
        precision = (q.concentration / q.rate)[..., None]
        expected_log = (special.digamma(q.concentration) - jnp.log(q.rate))[..., None]
        constant = 0.5 * (
            expected_log - precision * q.loc * q.loc - 1.0 / q.mean_precision
        )
        return join(constant, (precision * q.loc, -0.5 * precision), missing)

    def coefficients_at(parameters: components.Parameters) -> tuple[Array, Array]:
        loc, precision = parameters["loc"], parameters["precision"][..., None]
        constant = 0.5 * (jnp.log(precision) - precision * loc * loc)
        return join(constant, (precision * loc, -0.5 * precision), missing)

    def log_evidence(prior: NormalGamma, counts: Array, sums: Array) -> Array:
        return jnp.sum(
            log_normaliser(update(prior, counts, sums)) - log_normaliser(prior)
        )

    def maximum_likelihood(
        prior: NormalGamma, counts: Array, sums: Array
    ) -> components.Parameters:
        count, mean, scatter = moments(counts, sums)
        return {"loc": mean, "precision": jnp.sum(count, axis=-1) / scatter}

    return components.Component(
        name="spherical_gaussian",
        prior=None,
        check=lambda x: components.floating_rows(x, "spherical_gaussian", dim),
        statistics=lambda columns: jnp.concatenate(parts_of(columns)),
        log_base=log_base,
        update=update,
        coefficients=coefficients,
        kl=kl,
        log_evidence=log_evidence,
        log_predictive=log_predictive,
        draw=draw,
        distribution=lambda p: dist.Normal(
            p["loc"], 1.0 / jnp.sqrt(p["precision"])[..., None]
        ).to_event(1),
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood,
        num_parameters=lambda num_components: num_components * (dim + 1),
        coordinates=coordinates,
        location=location_by(parts_of, components.get_loc),
        with_missing=lambda: _spherical(dim, True),
    )


def log_base(columns: Array) -> Array:
    """The constant of the Gaussian density of the observed entries."""
    return (
        -0.5
        * special.LOG_TWO_PI
        * jnp.sum(~jnp.isnan(columns), axis=0).astype(columns.dtype)
    )


def kl(q: NormalGamma, p: NormalGamma) -> Array:
    """KL of the means given the precisions, in expectation, and KL of the precisions."""
    ratio = p.mean_precision / q.mean_precision
    distance = (
        p.mean_precision
        * jnp.square(q.loc - p.loc)
        * (q.concentration / q.rate)[..., None]
    )
    of_means = 0.5 * jnp.sum(ratio - 1.0 - jnp.log(ratio) + distance)
    return of_means + jnp.sum(special.gamma_kl(q, p))


def log_normaliser(q: NormalGamma) -> Array:
    """With respect to the means and the precision, without 2π, for each component."""
    return special.gamma_log_normaliser(q) - 0.5 * jnp.sum(
        jnp.log(q.mean_precision), axis=-1
    )


def log_predictive(q: NormalGamma, columns: Array) -> Array:
    """Student's t with 2a degrees of freedom, of as many dimensions as are observed."""
    observed = ~jnp.isnan(columns)
    width = 2.0 * q.rate[..., None] * (1.0 + 1.0 / q.mean_precision)
    difference = jnp.where(observed, columns - q.loc[..., None], 0.0)
    distance = jnp.sum(jnp.square(difference) / width[..., None], axis=-2)
    log_width = matmul(jnp.log(width) + jnp.log(jnp.pi), observed.astype(columns.dtype))
    # Γ(a + p/2) / Γ(a) for p = 0 ... d observed entries, in half steps.
    halves = 0.5 * jnp.arange(columns.shape[0], dtype=width.dtype)
    steps = jnp.cumsum(
        special.log_gamma_half_step(q.concentration[..., None] + halves), axis=-1
    )
    steps = jnp.concatenate([jnp.zeros_like(steps[..., :1]), steps], axis=-1)
    count = jnp.sum(observed, axis=0)
    power = q.concentration[..., None] + 0.5 * count.astype(width.dtype)
    return steps[..., count] - 0.5 * log_width - power * jnp.log1p(distance)


def draw(sample: components.Sample, q: NormalGamma) -> components.Parameters:
    """Precisions, and means given them."""
    precision = sample("precision", dist.Gamma(q.concentration, q.rate))
    loc = sample(
        "loc",
        dist.Normal(q.loc, 1.0 / jnp.sqrt(q.mean_precision * precision[..., None])),
    )
    return {"loc": loc, "precision": precision}


def coordinates(rows: Array) -> Array:
    """Rows about their mean, all columns in one unit; missing entries at 0."""
    deviations, _ = components.centre_rows(rows)
    scale = jnp.sqrt(
        jnp.sum(jnp.square(deviations)) / jnp.maximum(jnp.sum(~jnp.isnan(rows)), 1)
    )
    return deviations / jnp.where(scale > 0, scale, 1.0)
