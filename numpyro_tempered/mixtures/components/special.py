"""Special functions that keep their digits in float32."""

import math

import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Hyperparameters

LOG_TWO_PI = math.log(2.0 * math.pi)


def log_gamma_half_step(a: Array) -> Array:
    """The log of Γ(a + 1/2) / Γ(a), for a > 0.

    The difference of two log-gammas loses all digits of float32 at a = 10^6; the asymptotic series
    log(a)/2 - 1/(8a) + 1/(192 a³) - 1/(640 a⁵) + 17/(14336 a⁷) does not.
    """
    safe = jnp.where(a > 16.0, a, 16.0)
    r = 1.0 / jnp.square(safe)
    series = 0.5 * jnp.log(safe) - (1 / 8 - r * (1 / 192 - r * (1 / 640 - r * (17 / 14336)))) / safe
    return jnp.where(a > 16.0, series, gammaln(a + 0.5) - gammaln(a))


def stirling_error(a: Array) -> Array:
    """The difference of log Γ(a) and Stirling's (a - 1/2) log a - a + log(2π)/2, for a > 0."""
    safe = jnp.where(a > 16.0, a, 16.0)
    r = 1.0 / jnp.square(safe)
    series = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680)))) / safe
    small = jnp.where(a > 16.0, 1.0, a)
    direct = gammaln(small) - (small - 0.5) * jnp.log(small) + small - 0.5 * LOG_TWO_PI
    return jnp.where(a > 16.0, series, direct)


def log_choose(a: Array, x: Array) -> Array:
    """The log of Γ(a + x) / (Γ(a) x!), for a > 0 and x >= 0; no two large terms are subtracted."""
    safe = jnp.where(x > 0, x, 1.0)
    total = a + safe
    bulk = a * jnp.log1p(safe / a) + safe * jnp.log1p(a / safe)
    root = 0.5 * (jnp.log(a) - jnp.log(total) - jnp.log(safe) - LOG_TWO_PI)
    value = bulk + root + stirling_error(total) - stirling_error(a) - stirling_error(safe)
    return jnp.where(x > 0, value, 0.0)


def log_gamma_slack(a: Array) -> Array:
    """The slack a ψ(a) - log Γ(a) - a, for a > 0. It is of order log a, its terms are of order a log a."""
    safe = jnp.where(a > 16.0, a, 16.0)
    r = 1.0 / jnp.square(safe)
    tail = (1 / 6 - r * (1 / 90 - r * (1 / 210 - r * (1 / 210)))) / safe
    series = 0.5 * (jnp.log(safe) - LOG_TWO_PI - 1.0) - tail
    small = jnp.where(a > 16.0, 1.0, a)
    return jnp.where(a > 16.0, series, small * (digamma(small) - 1.0) - gammaln(small))


def gamma_kl(q: Hyperparameters, p: Hyperparameters) -> Array:
    """KL(Gamma(a, b), Gamma(a0, b0)), elementwise, with a and b the ``concentration`` and ``rate`` of each."""
    a, b, a0, b0 = q.concentration, q.rate, p.concentration, p.rate
    return log_gamma_slack(a) + gammaln(a0) + a0 * (jnp.log(b / b0) - digamma(a)) + a * (b0 / b)


def gamma_log_normaliser(q: Hyperparameters) -> Array:
    """The log of ∫ t^(a-1) exp(-b t) dt, elementwise."""
    return gammaln(q.concentration) - q.concentration * jnp.log(q.rate)


def dirichlet_kl(concentration: Array, concentration0: Array) -> Array:
    """KL(Dirichlet(a), Dirichlet(a0)) over the last axis."""
    slack = log_gamma_slack(with_total(concentration))
    expected = dirichlet_expected_log(concentration)
    between = jnp.sum(slack[..., :-1], axis=-1) - slack[..., -1] - jnp.sum(concentration0 * expected, axis=-1)
    return between + dirichlet_log_normaliser(concentration0)


def dirichlet_expected_log(concentration: Array) -> Array:
    """E log p of a Dirichlet, over the last axis."""
    each = digamma(with_total(concentration))
    return each[..., :-1] - each[..., -1:]


def dirichlet_log_normaliser(concentration: Array) -> Array:
    """The log of the multivariate beta function, over the last axis."""
    each = gammaln(with_total(concentration))
    return jnp.sum(each[..., :-1], axis=-1) - each[..., -1]


def with_total(concentration: Array) -> Array:
    """The entries and their sum, so that a special function of both is compiled once: that takes long."""
    return jnp.concatenate([concentration, jnp.sum(concentration, axis=-1, keepdims=True)], axis=-1)


def multigammaln(a: Array, dim: int) -> Array:
    """The log of Γ_d(a) without its factor π^(d(d-1)/4): the sum of log Γ(a - i/2), i < d."""
    return jnp.sum(gammaln(a[..., None] - 0.5 * jnp.arange(dim, dtype=a.dtype)), axis=-1)
