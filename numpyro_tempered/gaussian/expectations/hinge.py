"""Hinge loss of a linear classifier, in closed form (CA19, section 5)."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.base import linear

_SQRT_HALF = math.sqrt(0.5)
_INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_check = partial(base.check_labels, name="hinge")


def hinge() -> base.Expectation:
    r"""Expected hinge loss :math:`E_q[(1 - y\, x^\top\theta)_+]`.

    With k = 1 - y m·x, s² = Σ σ_j² x_j² and z = k/s: the expectation is k Φ(z) + s φ(z), its
    gradients are -y Φ(z) x in the means and φ(z) x²/(2s) in the variances; Fisher curvature is
    x² Φ(z). At σ = 0 it is the hinge at the mean, with curvature 0.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and labels ``y`` in {-1, 1}, scalar or ``(n,)``;
    the losses of a batch are summed.

    Returns:
        An :class:`Expectation`. It raises ValueError on other labels; where labels are traced and
        cannot be read, another label makes the loss NaN and the round rejected.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.hinge().evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.000 2.534
    """
    return linear(_moments, _loss, check=_check)


def _loss(u: Array, y: Array) -> Array:
    return jnp.maximum(_slack(u, y), 0.0)


def _slack(u: Array, y: Array) -> Array:
    # A label other than -1 or 1 has no hinge loss.
    return jnp.where(jnp.abs(y) == 1.0, 1.0 - y * u, jnp.nan)


def _moments(
    mean: Array, variance: Array, y: Array, options: base.Options
) -> base.Moments:
    s, spread = base.standard_deviation(variance)
    k = _slack(mean, y)
    z = k / s
    cdf = jnp.where(
        spread, 0.5 * jax.scipy.special.erfc(-_SQRT_HALF * z), (k > 0).astype(k.dtype)
    )
    pdf = _INVERSE_SQRT_2PI * jnp.exp(-0.5 * jnp.square(z))
    at_mean = jnp.maximum(k, 0.0)
    # Jensen's inequality restores what the two terms lose to cancellation far in the tail.
    expected = jnp.where(spread, jnp.maximum(k * cdf + s * pdf, at_mean), at_mean)
    second = cdf if options.curvature == "fisher" else jnp.where(spread, pdf / s, 0.0)
    return base.Moments(at_mean, expected, -y * cdf, second)
