"""Absolute loss of a linear predictor, in closed form."""

import math

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Expectation, Moments, linear, standard_deviation

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


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
        >>> q = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.absolute().evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.000 4.069
    """
    return linear(_moments, _loss)


def _loss(u: Array, y: Array) -> Array:
    return jnp.abs(y - u)


def _moments(mean: Array, variance: Array, y: Array, curvature: str) -> Moments:
    s, spread = standard_deviation(variance)
    k = y - mean
    z = k / s
    sign = jnp.where(spread, jax.scipy.special.erf(_SQRT_HALF * z), jnp.sign(k))
    density = _SQRT_2_OVER_PI * jnp.exp(-0.5 * jnp.square(z))
    at_mean = jnp.abs(k)
    # Jensen's inequality restores what rounding takes in the tails.
    expected = jnp.where(spread, jnp.maximum(k * sign + s * density, at_mean), at_mean)
    second = jnp.ones_like(k) if curvature == "fisher" else jnp.where(spread, density / s, 0.0)
    return Moments(at_mean, expected, -sign, second)
