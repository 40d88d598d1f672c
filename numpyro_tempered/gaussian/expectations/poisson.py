"""Poisson log-likelihood with a logarithmic link, in closed form."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Moments,
    Options,
    check_outcomes,
    linear,
)


def poisson() -> Expectation:
    r"""Expected negative log-likelihood of a count, :math:`E_q[e^u - y u + \log y!]`, u = x·θ.

    With λ = exp(m·x + s²/2), s² the variance of the predictor: the expectation is λ - y m·x + log y!, its
    gradients are (λ - y) x in the means and λ x²/2 in the variances (a curvature of λ); Fisher curvature is
    [(λ - y)² + λ² (exp(s²) - 1)] x². It is the full likelihood, the term log y! included, so that losses
    compare with those of other models of the same counts.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and counts ``y`` in {0, 1, ...}, scalar or ``(n,)``; the
    losses of a batch are summed. A rate that overflows is infinite, and its round rejected: a wide prior
    does it, at s² > 177 in float32.

    Returns:
        An :class:`Expectation`. It raises ValueError on outcomes that are no counts; where they are traced and
        cannot be read, such an outcome makes the loss NaN and the round rejected.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.full(2, 0.2))
        >>> value = nt.expectations.poisson().evaluate(q, jnp.array([3.0, 4.0]), 2.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.693 2.342
    """
    return linear(_moments, _loss, check=_check)


def _count(y: Array) -> Array:
    # Another outcome has no Poisson loss.
    return jnp.where((y >= 0) & (y == jnp.floor(y)), y, jnp.nan)


def _loss(u: Array, y: Array) -> Array:
    y = _count(y)
    return jnp.exp(u) - y * u + jax.scipy.special.gammaln(y + 1.0)


def _moments(mean: Array, variance: Array, y: Array, options: Options) -> Moments:
    y = _count(y)
    at_mean = _loss(mean, y)
    rate = jnp.exp(mean + 0.5 * variance)
    expected = at_mean + jnp.exp(mean) * jnp.expm1(0.5 * variance)
    # A sum of squares, where E[e^2u] - 2 y λ + y² would cancel.
    square = jnp.square(rate - y) + jnp.square(rate) * jnp.expm1(variance)
    second = square if options.curvature == "fisher" else rate
    return Moments(at_mean, expected, rate - y, second)


def _check(x: ArrayLike, y: ArrayLike) -> None:
    check_outcomes(
        y,
        lambda n: (n >= 0) & (n == np.floor(n)),
        "poisson needs counts y in {0, 1, 2, ...}",
    )
