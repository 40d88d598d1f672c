r"""Spike and slab family, q_j = φ_j N(m_j, σ_j²) + (1 - φ_j) δ_0 with independent coordinates."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_tempered.core import Array, Shape


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

    @property
    def sd(self) -> Array:
        """Standard deviations of the coordinates, ``(d,)``."""
        return jnp.sqrt(self.variance)

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)``."""
        return jnp.diag(self.variance)

    def log_prob(self, theta: Array) -> Array:
        """The log-density at ``theta``, ``(..., d)``, over point masses at 0 plus Lebesgue measure; ``(...)``."""
        return jnp.sum(log_density(self, theta), axis=-1)

    def sample(self, rng_key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""
        gate_key, slab_key = jax.random.split(rng_key)
        return draw(self, gate_key, slab_key, sample_shape + self.loc.shape)


def log_density(q: SpikeSlab, theta: Array) -> Array:
    """The log-density of each coordinate, with respect to the point mass at 0 plus Lebesgue measure."""
    off = jnp.equal(theta, 0.0)
    z = (theta - q.loc) / q.scale
    slab = -0.5 * z**2 - jnp.log(math.sqrt(2.0 * math.pi) * q.scale)
    # Each branch is kept away from the other's log 0, whose gradient would be NaN.
    return jnp.where(
        off,
        jnp.log1p(-jnp.where(off, q.probs, 0.5)),
        jnp.log(jnp.where(off, 0.5, q.probs)) + slab,
    )


def draw(q: SpikeSlab, gate_key: Array, slab_key: Array, shape: Shape) -> Array:
    """Draws, of gates and of slabs."""
    slab = q.loc + q.scale * jax.random.normal(slab_key, shape, q.loc.dtype)
    # A uniform draw is below 1: a coordinate of probability 1 is always in.
    gate = jax.random.uniform(gate_key, shape, q.loc.dtype) < q.probs
    return jnp.where(gate, slab, 0.0)


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
