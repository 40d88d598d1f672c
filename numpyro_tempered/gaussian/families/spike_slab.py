r"""Spike and slab family, q_j = φ_j N(m_j, σ_j²) + (1 - φ_j) δ_0 with independent coordinates."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_tempered.core.typing import Array


class SpikeSlab(NamedTuple):
    """A coordinate that is Gaussian with probability ``probs`` and 0 otherwise.

    Attributes:
        probs: Probabilities that a coordinate is not 0, in [0, 1], shape ``(d,)``.
        loc: Means of the slab, shape ``(d,)``.
        scale: Standard deviations of the slab, shape ``(d,)``, positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families import SpikeSlab
        >>> q = SpikeSlab(probs=jnp.array([0.5]), loc=jnp.array([2.0]), scale=jnp.array([1.0]))
        >>> q.mean, q.variance
        (Array([1.], dtype=float32), Array([1.5], dtype=float32))
    """

    probs: Array
    loc: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """Means of the coordinates, φ m."""
        return self.probs * self.loc

    @property
    def variance(self) -> Array:
        """Variances of the coordinates, φ σ² + φ (1 - φ) m²."""
        return self.probs * (
            jnp.square(self.scale) + (1.0 - self.probs) * jnp.square(self.loc)
        )


def kl(q: SpikeSlab, p: SpikeSlab) -> Array:
    r"""Kullback-Leibler divergence KL(q, p) in nats, for each coordinate.

    .. math:: \mathrm{KL}(\mathrm{Ber}(\varphi), \mathrm{Ber}(\lambda))
              + \varphi\, \mathrm{KL}(N(m, \sigma^2), N(m_0, s^2))

    Args:
        q: First argument; probabilities of exactly 0 and 1 are right.
        p: Second argument; shapes broadcast.

    Returns:
        Shape of the broadcast coordinates; infinite where ``p`` excludes what ``q`` does not.

    References:
        CA-DNN; Bai20.
    """
    ratio, shift = q.scale / p.scale, (q.loc - p.loc) / p.scale
    slab = 0.5 * (jnp.square(ratio) + jnp.square(shift) - 1.0) - jnp.log(ratio)
    gate = _cross(q.probs, p.probs) + _cross(1.0 - q.probs, 1.0 - p.probs)
    return gate + q.probs * slab


def _cross(a: Array, b: Array) -> Array:
    """The product a log(a / b), 0 where a is, with a finite derivative there."""
    # At a = 0 the derivative is minus infinity, and NaN once multiplied by that of a saturated sigmoid.
    positive = jnp.greater(a, 0.0)
    inside = jnp.where(positive, a, 1.0)
    return jnp.where(
        positive, a * jnp.log(inside) - xlogy(inside, jnp.where(positive, b, 1.0)), 0.0
    )
