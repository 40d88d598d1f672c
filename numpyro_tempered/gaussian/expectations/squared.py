"""Squared loss of a linear predictor, in closed form."""

import math

import jax.numpy as jnp

from numpyro_tempered.core import Array, check_number
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Moments,
    Options,
    linear,
)


def squared(noise_scale: float | None = None) -> Expectation:
    r"""Expected squared loss :math:`E_q[(y - x^\top\theta)^2] = (y - m\cdot x)^2 + s^2`.

    s² is the variance of the predictor. It is the negative log-likelihood of Gaussian noise of variance 1/2,
    up to a constant; with a ``noise_scale`` τ it is that of :math:`y \sim N(x^\top\theta, \tau^2)`, the
    constant included: :math:`(y - x^\top\theta)^2/(2\tau^2) + \log\tau + \tfrac12\log 2\pi`. The curvature is
    2 x², with noise x²/τ²; Fisher curvature is 4 E[(y - u)²] x², with noise E[(y - u)²] x²/τ⁴.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``; the losses of a
    batch are summed.

    Args:
        noise_scale: Standard deviation τ of the noise; None for the plain square.

    Returns:
        An :class:`Expectation`.

    Raises:
        ValueError: If the noise scale is not positive and finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.squared().evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> float(value.at_mean), float(value.expected)
        (1.0, 26.0)
    """
    factor, constant = 1.0, 0.0
    if noise_scale is not None:
        check_number(noise_scale, "noise_scale", "(0, inf)")
        factor, constant = (
            0.5 / noise_scale**2,
            math.log(noise_scale) + 0.5 * math.log(2.0 * math.pi),
        )

    def loss(u: Array, y: Array) -> Array:
        return factor * jnp.square(y - u) + constant

    def moments(mean: Array, variance: Array, y: Array, options: Options) -> Moments:
        residual = y - mean
        square = jnp.square(residual) + variance
        second = (
            4.0 * factor**2 * square
            if options.curvature == "fisher"
            else jnp.full_like(mean, 2.0 * factor)
        )
        return Moments(
            loss(mean, y), factor * square + constant, -2.0 * factor * residual, second
        )

    return linear(moments, loss, quadratic=True)
