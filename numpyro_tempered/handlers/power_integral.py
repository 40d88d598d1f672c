r"""The integral of a power of a density, :math:`\log \int f(y)^{1+\beta}\,dy`, by distribution.

Closed forms where there are; for counts a sum over a window of standard deviations, for other densities of a real
number a quadrature of :math:`\int_0^1 f(Q(u))^\beta\,du` with the quantiles Q.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import betaln, gammaln, logsumexp

from numpyro_tempered.core import Array
from numpyro_tempered.handlers.likelihood import has_kink
from numpyro_tempered.handlers.numpyro_private import mask_of

LOG_2PI = math.log(2.0 * math.pi)
# Counts on either side of the mean, a third of a standard deviation apart, or 1 where that is less than 2: in
# such strides the sum of a smooth function has an error below 1e-16, and they reach 8 standard deviations.
_NUM_COUNTS = 48
# Standard deviations of counts from which on their log-probabilities are taken for those of a normal density: the
# integral is off by less than a thousandth of their inverse square, a sum in single precision by more.
_LARGE = {4: 20.0, 8: 1e4}
# Of a double exponential quadrature.
_NUM_QUANTILES, _END = 121, 3.2


class NoIntegral(ValueError):
    """There is neither a closed form nor a quadrature for the powers of this distribution."""


def log_power_integral(fn: dist.Distribution, beta: float) -> Array:
    r""":math:`\log \int f^{1+\beta}` for each element of the batch; 0 of what is masked.

    Raises:
        NoIntegral: If there is neither a closed form nor a quadrature.
    """
    return by_layer(fn, lambda base: _of_base(base, beta))


def num_measured(fn: dist.Distribution) -> Array:
    """How many real numbers a datum has that are measured in a unit, for each element of the batch."""
    return by_layer(
        fn,
        lambda base: jnp.full(
            base.batch_shape, 0.0 if base.is_discrete else math.prod(base.event_shape)
        ),
    )


def by_layer(
    fn: dist.Distribution, of_base: Callable[[dist.Distribution], Array]
) -> Array:
    """A sum over the independent elements of a datum that are not masked."""
    if isinstance(fn, dist.MaskedDistribution):
        return jnp.where(jnp.asarray(mask_of(fn)), by_layer(fn.base_dist, of_base), 0.0)
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(by_layer(fn.base_dist, of_base), fn.batch_shape)
    if isinstance(fn, dist.Independent):
        axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
        return jnp.sum(by_layer(fn.base_dist, of_base), axis=axes)
    return of_base(fn)


def _of_base(fn: Any, beta: float) -> Array:
    # By the type alone: a subclass may have another density.
    if (closed := _CLOSED.get(type(fn))) is not None:
        return jnp.broadcast_to(closed(fn, beta), fn.batch_shape)
    if (window := _WINDOWS.get(type(fn))) is not None:
        return _by_window(fn, *window(fn), beta)
    if type(fn) in _ENUMERATED:
        return logsumexp(
            (1.0 + beta) * fn.log_prob(fn.enumerate_support(expand=False)), axis=0
        )
    # Nodes do not see where a kink is.
    if not (
        fn.is_discrete
        or fn.event_shape
        or isinstance(fn, _WITHOUT_QUANTILES)
        or has_kink(fn)
    ):
        return _by_quantiles(fn, beta)
    raise NoIntegral(type(fn).__name__)


def log_prob_of_counts(fn: dist.Distribution, value: Array) -> Array:
    """``fn.log_prob(value)``, with the digits that large Poisson counts lose there.

    The terms of a Poisson log-probability are as large as the counts, their sum is a deviance and the logarithm
    of a standard deviation: C. Loader, *Fast and accurate computation of binomial probabilities*, 2000.
    """
    if type(fn) is not dist.Poisson:
        return fn.log_prob(value)
    count = jnp.asarray(value, jnp.result_type(float))
    large = (count > 100.0) & (fn.rate > 100.0)
    safe_count, rate = jnp.where(large, count, 100.0), jnp.where(large, fn.rate, 100.0)
    # With y = rate (1 + t) the deviance is rate ((1 + t) log(1 + t) - t).
    t = (safe_count - rate) / rate
    series = sum((-t) ** k / (k * (k - 1)) for k in range(9, 1, -1))
    near = jnp.abs(t) < 0.1
    far = jnp.where(near, 1.0, t)
    deviance = rate * jnp.where(
        near, series, (1.0 + far) * jnp.log1p(jnp.maximum(far, -0.99)) - far
    )
    by_deviance = (
        -deviance - 0.5 * (LOG_2PI + jnp.log(safe_count)) - 1.0 / (12.0 * safe_count)
    )
    return jnp.where(large, by_deviance, fn.log_prob(jnp.where(large, 100.0, value)))


def _by_window(
    fn: Any, mean: Array, sd: Array, most: Array | float, beta: float
) -> Array:
    """The sum over counts around the mean, with longer strides where the standard deviation is large."""
    large = sd > _LARGE[jnp.dtype(jnp.result_type(float)).itemsize]
    by_density = -beta * (
        jnp.log(jnp.where(large, sd, 1.0)) + 0.5 * LOG_2PI
    ) - 0.5 * jnp.log1p(beta)
    mean, sd = jax.lax.stop_gradient((mean, sd))
    stride = jnp.maximum(1.0, jnp.floor(sd / 3.0))
    offsets = jnp.arange(-_NUM_COUNTS, _NUM_COUNTS + 1).reshape(
        (-1,) + (1,) * len(fn.batch_shape)
    )
    counts = jnp.round(mean) + stride * offsets
    is_count = (counts >= 0) & (counts <= most)
    # Gradients at what is no count must be finite too.
    log_probs = fn.log_prob(jnp.where(is_count, counts, jnp.round(mean)))
    log_probs = jnp.where(large, 0.0, log_probs)
    by_sum = logsumexp(
        jnp.where(is_count, (1.0 + beta) * log_probs, -jnp.inf), axis=0
    ) + jnp.log(stride)
    return jnp.where(large, by_density, by_sum)


def _by_quantiles(fn: Any, beta: float) -> Array:
    """The mean of f^beta, with nodes that crowd at the ends, where f or its derivatives may be infinite."""
    t = np.linspace(-_END, _END, _NUM_QUANTILES)
    u = 0.5 * (1.0 + np.tanh(0.5 * np.pi * np.sinh(t)))
    weights = (
        0.25
        * np.pi
        * np.cosh(t)
        / np.cosh(0.5 * np.pi * np.sinh(t)) ** 2
        * (t[1] - t[0])
    )
    dtype = jnp.result_type(float)
    eps = float(jnp.finfo(dtype).eps)
    keep = (u > eps) & (u < 1.0 - eps)
    shape = (-1,) + (1,) * len(fn.batch_shape)
    nodes = jnp.asarray(u[keep], dtype).reshape(shape)
    log_weights = jnp.asarray(
        np.log(weights[keep] / weights[keep].sum()), dtype
    ).reshape(shape)
    try:
        quantiles = fn.icdf(jnp.broadcast_to(nodes, (nodes.shape[0], *fn.batch_shape)))
    except (NotImplementedError, ImportError):  # NumPyro's own icdf may need a package
        raise NoIntegral(type(fn).__name__) from None
    return logsumexp(log_weights + beta * fn.log_prob(quantiles), axis=0)


def _normal(fn: Any, beta: float) -> Array:
    return -beta * (jnp.log(fn.scale) + 0.5 * LOG_2PI) - 0.5 * jnp.log1p(beta)


def _multivariate_normal(fn: Any, beta: float) -> Array:
    log_det = jnp.sum(jnp.log(jnp.diagonal(fn.scale_tril, axis1=-2, axis2=-1)), axis=-1)
    return -beta * log_det - 0.5 * fn.event_shape[0] * (
        beta * LOG_2PI + jnp.log1p(beta)
    )


def _student_t(df: Any, scale: Array, beta: float) -> Array:
    # The density is c (1 + t²/df)^-(df + 1)/2 / scale with 1/c = sqrt(df) B(1/2, df/2).
    power = 0.5 * (1.0 + beta) * (df + 1.0)
    constant = -0.5 * jnp.log(df) - betaln(0.5, 0.5 * df)
    return (
        beta * (constant - jnp.log(scale))
        + constant
        + 0.5 * jnp.log(df)
        + betaln(0.5, power - 0.5)
    )


def _log_normal(fn: Any, beta: float) -> Array:
    return (
        _normal(fn, beta)
        - beta * fn.loc
        + 0.5 * jnp.square(beta * fn.scale) / (1.0 + beta)
    )


def _gamma(concentration: Array, rate: Array, beta: float) -> Array:
    power = 1.0 + beta
    # At most 0 where the density has a pole whose power has no integral.
    shape = power * (concentration - 1.0) + 1.0
    inside = jnp.where(shape > 0.0, shape, 1.0)
    value = (
        gammaln(inside)
        - power * gammaln(concentration)
        - inside * jnp.log(power)
        + beta * jnp.log(rate)
    )
    return jnp.where(shape > 0.0, value, jnp.inf)


def _beta(fn: Any, beta: float) -> Array:
    power = 1.0 + beta
    a, b = (
        power * (fn.concentration1 - 1.0) + 1.0,
        power * (fn.concentration0 - 1.0) + 1.0,
    )
    is_finite = (a > 0.0) & (b > 0.0)
    a, b = jnp.where(is_finite, a, 1.0), jnp.where(is_finite, b, 1.0)
    value = betaln(a, b) - power * betaln(fn.concentration1, fn.concentration0)
    return jnp.where(is_finite, value, jnp.inf)


def _peaked(fn: Any, beta: float) -> Array:
    """Of exponentials on either side of ``loc``."""
    return beta * fn.log_prob(fn.loc) - jnp.log1p(beta)


def _inverse_gamma(fn: Any, beta: float) -> Array:
    power = 1.0 + beta
    shape = power * (fn.concentration + 1.0) - 1.0
    return (
        gammaln(shape)
        - power * gammaln(fn.concentration)
        - shape * jnp.log(power)
        - beta * jnp.log(fn.rate)
    )


def _weibull(fn: Any, beta: float) -> Array:
    shape = 1.0 + beta * (1.0 - 1.0 / fn.concentration)
    inside = jnp.where(shape > 0.0, shape, 1.0)
    value = (
        gammaln(inside)
        - inside * jnp.log1p(beta)
        + beta * jnp.log(fn.concentration / fn.scale)
    )
    return jnp.where(shape > 0.0, value, jnp.inf)


_CLOSED: dict[type, Callable[[Any, float], Array]] = {
    dist.Normal: _normal,
    dist.MultivariateNormal: _multivariate_normal,
    dist.LogNormal: _log_normal,
    dist.HalfNormal: lambda fn, beta: _normal(fn, beta) + beta * math.log(2.0),
    dist.StudentT: lambda fn, beta: _student_t(fn.df, fn.scale, beta),
    dist.Cauchy: lambda fn, beta: _student_t(jnp.ones(()), fn.scale, beta),
    dist.Laplace: _peaked,
    dist.AsymmetricLaplace: _peaked,
    dist.AsymmetricLaplaceQuantile: _peaked,
    dist.Logistic: lambda fn, beta: (
        betaln(1.0 + beta, 1.0 + beta) - beta * jnp.log(fn.scale)
    ),
    dist.Exponential: lambda fn, beta: beta * jnp.log(fn.rate) - jnp.log1p(beta),
    dist.Gamma: lambda fn, beta: _gamma(fn.concentration, fn.rate, beta),
    dist.Chi2: lambda fn, beta: _gamma(fn.concentration, fn.rate, beta),
    dist.InverseGamma: _inverse_gamma,
    dist.Weibull: _weibull,
    dist.Beta: _beta,
    dist.Uniform: lambda fn, beta: -beta * jnp.log(fn.high - fn.low),
}


def _binomial(fn: Any) -> tuple[Array, Array, Array]:
    return fn.mean, jnp.sqrt(fn.variance), fn.total_count


_WINDOWS: dict[type, Callable[[Any], tuple[Array, Array, Array | float]]] = {
    dist.Poisson: lambda fn: (fn.rate, jnp.sqrt(fn.rate), jnp.inf),
    dist.BinomialProbs: _binomial,
    dist.BinomialLogits: _binomial,
}
_ENUMERATED = {
    dist.BernoulliProbs,
    dist.BernoulliLogits,
    dist.CategoricalProbs,
    dist.CategoricalLogits,
}
# Their quantiles, where NumPyro has any, are none of the distribution itself.
_WITHOUT_QUANTILES = (
    dist.TransformedDistribution | dist.Delta | dist.Unit | dist.ImproperUniform
)
