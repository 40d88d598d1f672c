"""Special functions that keep their digits in float32."""

import math
from collections.abc import Callable
from functools import reduce

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures.components.base import Hyperparameters

LOG_TWO_PI = math.log(2.0 * math.pi)
# B_2k / (2k (2k - 1)) and B_2k / 2k of the series of Stirling for log Γ and its derivative, k = 1 ... 7.
SERIES = np.array(
    [
        [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156],
        [1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12],
    ]
)


def num_steps(dtype: jnp.dtype) -> int:
    """Where the series have all digits: smaller arguments are moved by as much, with Γ(a + 1) = a Γ(a)."""
    return 8 if dtype == jnp.float64 else 3


def gamma_functions(a: Array) -> tuple[Array, Array]:
    """Log Γ(a) and its derivative, for a > 0. JAX's, for all real a, take many times as long to compile."""
    steps = num_steps(a.dtype)
    small = a < steps
    b = jnp.where(small, a + steps, a)
    factors = jnp.where(small, a, 1.0)[..., None] + jnp.arange(steps, dtype=a.dtype)
    log_b, r = jnp.log(b), 1.0 / jnp.square(b)
    # Both polynomials side by side, by Horner's rule.
    series = reduce(
        lambda total, each: total * r[..., None] + each, SERIES.T[::-1].astype(a.dtype)
    )
    log_factor = jnp.where(small, jnp.log(jnp.prod(factors, axis=-1)), 0.0)
    log_gamma = (
        (b - 0.5) * log_b - b + 0.5 * LOG_TWO_PI + series[..., 0] / b - log_factor
    )
    slope = (
        log_b
        - 0.5 / b
        - r * series[..., 1]
        - jnp.where(small, jnp.sum(1.0 / factors, axis=-1), 0.0)
    )
    return log_gamma, slope


def gammaln(a: Array) -> Array:
    """Log Γ(a) for a > 0."""
    return gamma_functions(a)[0]


def digamma(a: Array) -> Array:
    """The derivative of log Γ at a > 0."""
    return gamma_functions(a)[1]


def log_gamma_half_step(a: Array) -> Array:
    """The log of Γ(a + 1/2) / Γ(a), for a > 0.

    The difference of two log-gammas loses all digits of float32 at a = 10^6; the asymptotic series
    log(a)/2 - 1/(8a) + 1/(192 a³) - 1/(640 a⁵) + 17/(14336 a⁷) does not.
    """
    safe = jnp.where(a > 16.0, a, 16.0)
    r = 1.0 / jnp.square(safe)
    series = (
        0.5 * jnp.log(safe)
        - (1 / 8 - r * (1 / 192 - r * (1 / 640 - r * (17 / 14336)))) / safe
    )
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
    value = (
        bulk + root + stirling_error(total) - stirling_error(a) - stirling_error(safe)
    )
    return jnp.where(x > 0, value, 0.0)


def log_gamma_slack(a: Array) -> tuple[Array, Array]:
    """The slack a ψ(a) - log Γ(a) - a and ψ(a), for a > 0.

    The slack is of order log a, its terms are of order a log a.
    """
    log_gamma, slope = gamma_functions(a)
    safe = jnp.where(a > 16.0, a, 16.0)
    r = 1.0 / jnp.square(safe)
    tail = (1 / 6 - r * (1 / 90 - r * (1 / 210 - r * (1 / 210)))) / safe
    series = 0.5 * (jnp.log(safe) - LOG_TWO_PI - 1.0) - tail
    return jnp.where(a > 16.0, series, a * (slope - 1.0) - log_gamma), slope


def gamma_kl(q: Hyperparameters, p: Hyperparameters) -> Array:
    """KL(Gamma(a, b), Gamma(a0, b0)), elementwise, with a and b the ``concentration`` and ``rate`` of each."""
    a, b, a0, b0 = q.concentration, q.rate, p.concentration, p.rate
    slack, slope = log_gamma_slack(a)
    return slack + gammaln(a0) + a0 * (jnp.log(b / b0) - slope) + a * (b0 / b)


def gamma_log_normaliser(q: Hyperparameters) -> Array:
    """The log of ∫ t^(a-1) exp(-b t) dt, elementwise."""
    return gammaln(q.concentration) - q.concentration * jnp.log(q.rate)


def dirichlet_kl(concentration: Array, concentration0: Array) -> Array:
    """KL(Dirichlet(a), Dirichlet(a0)) over the last axis, of the entries that have a positive ``a0``."""
    a = with_total(concentration)
    slack, slope = (
        jnp.where(a > 0, each, 0.0)
        for each in log_gamma_slack(jnp.where(a > 0, a, 1.0))
    )
    expected = slope[..., :-1] - slope[..., -1:]
    between = (
        jnp.sum(slack[..., :-1], axis=-1)
        - slack[..., -1]
        - jnp.sum(concentration0 * expected, axis=-1)
    )
    return between + dirichlet_log_normaliser(concentration0)


def dirichlet_expected_log(concentration: Array) -> Array:
    """E log p of a Dirichlet, over the last axis; -inf at entries of 0, whose p is 0."""
    each = where_positive(digamma, with_total(concentration), -jnp.inf)
    return each[..., :-1] - each[..., -1:]


def dirichlet_log_normaliser(concentration: Array) -> Array:
    """The log of the multivariate beta function of the positive entries, over the last axis."""
    each = where_positive(gammaln, with_total(concentration))
    return jnp.sum(each[..., :-1], axis=-1) - each[..., -1]


def where_positive(
    function: Callable[[Array], Array], a: Array, other: float = 0.0
) -> Array:
    """The function where its argument is positive, which may have entries that stand for nothing."""
    return jnp.where(a > 0, function(jnp.where(a > 0, a, 1.0)), other)


def with_total(concentration: Array) -> Array:
    """The entries and their sum, so that a special function of both is compiled once: that takes long."""
    return jnp.concatenate(
        [concentration, jnp.sum(concentration, axis=-1, keepdims=True)], axis=-1
    )


def multigammaln(a: Array, dim: int) -> Array:
    """The log of Γ_d(a) without its factor π^(d(d-1)/4): the sum of log Γ(a - i/2), i < d."""
    return jnp.sum(
        gammaln(a[..., None] - 0.5 * jnp.arange(dim, dtype=a.dtype)), axis=-1
    )
