r"""Mean-field Gaussian family, q = N(loc, diag(scale²)).

Three coordinate systems, each with a named map there and back:

- source: ``(loc, scale)``, the fields of :class:`MeanField`;
- natural: ``(loc / scale², -1 / (2 scale²))``;
- expectation: ``(loc, loc² + scale²)``, the moments E[θ] and E[θ²].

Every function works elementwise on ``(d,)`` arrays; sums run over the last axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered._typing import Array


class MeanField(NamedTuple):
    """A Gaussian with independent coordinates, N(loc, diag(scale²)).

    The same two fields also carry a gradient with respect to ``(loc, scale)``.

    Attributes:
        loc: Means, shape ``(d,)``.
        scale: Standard deviations, shape ``(d,)``, at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.families import MeanField
        >>> q = MeanField(loc=jnp.zeros(2), scale=jnp.ones(2))
        >>> q.scale.shape
        (2,)
    """

    loc: Array
    scale: Array


class Natural(NamedTuple):
    """Natural parameters, the coefficients of θ and θ² in log q."""

    linear: Array
    quadratic: Array


class Expectation(NamedTuple):
    """Expectation parameters, the moments E[θ] and E[θ²]."""

    first: Array
    second: Array


def to_natural(q: MeanField) -> Natural:
    """Natural parameters of ``q``; ``scale`` must be positive."""
    precision = 1.0 / jnp.square(q.scale)
    return Natural(q.loc * precision, -0.5 * precision)


def from_natural(natural: Natural) -> MeanField:
    """The Gaussian with these natural parameters; ``quadratic`` must be negative."""
    variance = -0.5 / natural.quadratic
    return MeanField(natural.linear * variance, jnp.sqrt(variance))


def to_expectation(q: MeanField) -> Expectation:
    """First and second moments of ``q``."""
    return Expectation(q.loc, jnp.square(q.loc) + jnp.square(q.scale))


def from_expectation(moments: Expectation) -> MeanField:
    """The Gaussian with these moments; ``second`` must exceed ``first²``."""
    return MeanField(moments.first, jnp.sqrt(moments.second - jnp.square(moments.first)))


def sample(rng_key: Array, q: MeanField, sample_shape: tuple[int, ...] = ()) -> Array:
    """Draws from ``q``, shape ``sample_shape + (d,)``."""
    noise = jax.random.normal(rng_key, sample_shape + q.loc.shape, q.loc.dtype)
    expand = (None,) * len(sample_shape)
    return q.loc[expand] + q.scale[expand] * noise


def kl(q: MeanField, p: MeanField) -> Array:
    r"""Kullback-Leibler divergence KL(q, p), summed over coordinates.

    .. math:: \tfrac12 \sum_j \big[(\sigma_j/s_j)^2 + ((m_j - m_{0j})/s_j)^2 - 1
              - 2\log(\sigma_j/s_j)\big]

    Args:
        q: First argument, ``(m, sigma)``.
        p: Second argument, ``(m0, s)``, with positive scales.

    Returns:
        A scalar in nats; infinite where ``q.scale`` is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.families.mean_field import MeanField, kl
        >>> p = MeanField(jnp.zeros(3), jnp.ones(3))
        >>> float(kl(p, p))
        0.0
    """
    ratio = q.scale / p.scale
    shift = (q.loc - p.loc) / p.scale
    return 0.5 * jnp.sum(jnp.square(ratio) + jnp.square(shift) - 1.0 - 2.0 * jnp.log(ratio), axis=-1)


def shrink(scale: Array, slope: Array) -> Array:
    r"""Stable :math:`\sigma h(a/\sigma) = \sqrt{\sigma^2 + a^2} - a`, where h(x) = √(1+x²) - x.

    Args:
        scale: σ, at least 0.
        slope: a, half the step times σ² times the gradient in σ.

    Returns:
        The minimiser over σ' ≥ 0, without cancellation for a > 0 and without 0/0 at σ = 0.
    """
    hypotenuse = jnp.hypot(scale, slope)
    denominator = hypotenuse + slope
    ratio = scale / jnp.where(denominator > 0, denominator, 1.0)
    return jnp.where(slope > 0, scale * ratio, hypotenuse - slope)


def kl_prox(anchor: MeanField, grads: MeanField, step_size: Array | float) -> MeanField:
    r"""One proximal step in KL, the primitive of SVA and SVB.

    .. math:: \arg\min_\mu \langle g, \mu\rangle + \mathrm{KL}(q_\mu, \mathrm{anchor})/\eta,
              \qquad \mu = (m, \sigma)

    which is m = m_a - η s_a² g_m and σ = s_a h(η s_a g_σ / 2) with h(x) = √(1+x²) - x
    (CA19, section 4).

    Args:
        anchor: The Gaussian ``(m_a, s_a)`` that the step is held to.
        grads: Gradient g with respect to ``(loc, scale)``.
        step_size: η, a scalar or an array of shape ``(d,)``, one rate a coordinate.

    Returns:
        The minimiser, a :class:`MeanField`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.families.mean_field import MeanField, kl_prox
        >>> anchor = MeanField(jnp.zeros(1), jnp.ones(1))
        >>> step = kl_prox(anchor, MeanField(jnp.ones(1), jnp.zeros(1)), 0.5)
        >>> float(step.loc[0]), float(step.scale[0])
        (-0.5, 1.0)
    """
    return kl_prox_scaled(anchor, grads, step_size * jnp.square(anchor.scale))


def kl_prox_scaled(anchor: MeanField, grads: MeanField, rate: Array) -> MeanField:
    """:func:`kl_prox` in terms of ``rate`` = step size × anchor variance.

    A step size proportional to 1/σ² overflows in float32 as σ shrinks, and is 0/0 at σ = 0; its
    product with the variance does neither.
    """
    return MeanField(anchor.loc - rate * grads.loc, shrink(anchor.scale, 0.5 * rate * grads.scale))
