"""Absolute and pinball loss of a linear predictor, for medians and other quantiles, in closed form."""

import math

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, check_number
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Moments,
    Options,
    linear,
    standard_deviation,
)

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def absolute() -> Expectation:
    r"""Expected absolute loss :math:`E_q|y - x^\top\theta|`.

    With k = y - m·x, s² the variance of the predictor and z = k/s: the expectation is
    k erf(z/√2) + 2 s φ(z), its gradients are -erf(z/√2) x in the means and φ(z) x²/s in the variances (a
    curvature of 2 φ(z)/s); Fisher curvature is x². At s = 0 it is the loss at the mean, with curvature 0, and
    at its kink the mean of the two one-sided derivatives, 0.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``; the losses of a
    batch are summed.

    Returns:
        An :class:`Expectation`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.absolute().evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.000 4.069
    """
    return linear(absolute_moments, _absolute_loss)


def _absolute_loss(u: Array, y: Array) -> Array:
    return jnp.abs(y - u)


def absolute_moments(
    mean: Array, variance: Array, y: Array, options: Options
) -> Moments:
    """The moments of |u - y|, u ~ N(mean, variance), shape ``(n,)`` each."""
    s, spread = standard_deviation(variance)
    k = y - mean
    z = k / s
    sign = jnp.where(spread, jax.scipy.special.erf(_SQRT_HALF * z), jnp.sign(k))
    density = _SQRT_2_OVER_PI * jnp.exp(-0.5 * jnp.square(z))
    at_mean = jnp.abs(k)
    # Jensen's inequality restores what rounding takes in the tails.
    expected = jnp.where(spread, jnp.maximum(k * sign + s * density, at_mean), at_mean)
    second = (
        jnp.ones_like(k)
        if options.curvature == "fisher"
        else jnp.where(spread, density / s, 0.0)
    )
    return Moments(at_mean, expected, -sign, second)


def pinball(level: float) -> Expectation:
    r"""Expected pinball loss :math:`E_q[\tau (y - x^\top\theta)_+ + (1 - \tau)(x^\top\theta - y)_+]`.

    Its minimiser is the quantile of that level. With k = y - m·x, s² the variance of the predictor and
    z = k/s: the expectation is k (τ - Φ(-z)) + s φ(z), its gradients are (Φ(-z) - τ) x in the means and
    φ(z) x²/(2s) in the variances (a curvature of φ(z)/s); Fisher curvature is [τ² Φ(z) + (1-τ)² Φ(-z)] x².
    At s = 0 it is the loss at the mean, with curvature 0, and at its kink the mean of the two one-sided
    derivatives, 1/2 - τ.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``; the losses of a
    batch are summed.

    Args:
        level: τ, between 0 and 1.

    Returns:
        An :class:`Expectation`.

    Raises:
        ValueError: If the level is not between 0 and 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.pinball(0.9).evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.900 2.434
    """
    check_number(level, "level", "(0, 1)", hint="It is the quantile that is estimated.")

    def loss(u: Array, y: Array) -> Array:
        return jnp.maximum(level * (y - u), (level - 1.0) * (y - u))

    def moments(mean: Array, variance: Array, y: Array, options: Options) -> Moments:
        s, spread = standard_deviation(variance)
        k = y - mean
        z = k / s
        above = jnp.where(
            spread,
            0.5 * jax.scipy.special.erfc(-_SQRT_HALF * z),
            0.5 + 0.5 * jnp.sign(k),
        )
        below = jnp.where(
            spread,
            0.5 * jax.scipy.special.erfc(_SQRT_HALF * z),
            0.5 - 0.5 * jnp.sign(k),
        )
        density = _INVERSE_SQRT_2PI * jnp.exp(-0.5 * jnp.square(z))
        # Weights of both sides, rather than level - below, keep the digits of a level near 0 or 1.
        slope = (1.0 - level) * below - level * above
        at_mean = loss(mean, y)
        # Jensen's inequality restores what rounding takes in the tails.
        expected = jnp.where(
            spread, jnp.maximum(s * density - k * slope, at_mean), at_mean
        )
        if options.curvature == "fisher":
            second = level**2 * above + (1.0 - level) ** 2 * below
        else:
            second = jnp.where(spread, density / s, 0.0)
        return Moments(at_mean, expected, slope, second)

    return linear(moments, loss)
