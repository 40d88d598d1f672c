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

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    CompensatedSum,
    Scalar,
    Shape,
    check_numbers,
    matmul,
)
from numpyro_tempered.gaussian.families.base import (
    Family,
    Gain,
    Sample,
    as_floating,
    log_density,
    register,
    sampler,
)


class MeanField(NamedTuple):
    """A Gaussian with independent coordinates, N(loc, diag(scale²)).

    The same two fields also carry a gradient with respect to ``(loc, scale)``.

    Attributes:
        loc: Means, shape ``(d,)``.
        scale: Standard deviations, shape ``(d,)``, at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families import MeanField
        >>> q = MeanField(loc=jnp.zeros(2), scale=jnp.ones(2))
        >>> q.scale.shape
        (2,)
    """

    loc: Array
    scale: Array

    @property
    def mean(self) -> Array:
        """Means of the coordinates, ``(d,)``."""
        return self.loc

    @property
    def sd(self) -> Array:
        """Standard deviations of the coordinates, ``(d,)``."""
        return self.scale

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)``."""
        return jnp.diag(jnp.square(self.scale))

    def log_prob(self, theta: Array) -> Array:
        """The log-density at ``theta``, ``(..., d)``; gives ``(...)``."""
        return log_density(self.loc, self.scale, theta)

    def sample(self, rng_key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""
        return sample(rng_key, self, sample_shape)


class Natural(NamedTuple):
    """Natural parameters, the coefficients of θ and θ² in log q."""

    linear: Array
    quadratic: Array


def to_natural(q: MeanField) -> Natural:
    """Natural parameters of ``q``; ``scale`` must be positive."""
    precision = 1.0 / jnp.square(q.scale)
    return Natural(q.loc * precision, -0.5 * precision)


def from_natural(natural: Natural) -> MeanField:
    """The Gaussian with these natural parameters; ``quadratic`` must be negative."""
    variance = -0.5 / natural.quadratic
    return MeanField(natural.linear * variance, jnp.sqrt(variance))


sample: Sample[MeanField] = sampler(
    lambda q, noise: q.scale[(None,) * (noise.ndim - 1)] * noise
)


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
        >>> from numpyro_tempered.gaussian.families.mean_field import MeanField, kl
        >>> p = MeanField(jnp.zeros(3), jnp.ones(3))
        >>> float(kl(p, p))
        0.0
    """
    ratio = q.scale / p.scale
    shift = (q.loc - p.loc) / p.scale
    return 0.5 * jnp.sum(
        jnp.square(ratio) + jnp.square(shift) - 1.0 - 2.0 * jnp.log(ratio), axis=-1
    )


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


def kl_prox(anchor: MeanField, grads: MeanField, rate: Scalar) -> MeanField:
    r"""One proximal step in KL, the primitive of SVA and SVB.

    .. math:: \arg\min_\mu \langle g, \mu\rangle + \mathrm{KL}(q_\mu, \mathrm{anchor})/\eta,
              \qquad \mu = (m, \sigma)

    which is m = m_a - η s_a² g_m and σ = s_a h(η s_a g_σ / 2) with h(x) = √(1+x²) - x
    (CA19, section 4).

    Args:
        anchor: The Gaussian ``(m_a, s_a)`` from which the step measures KL.
        grads: Gradient g with respect to ``(loc, scale)``.
        rate: η, a scalar or an array of shape ``(d,)``, one for each coordinate.

    Returns:
        The minimiser, a :class:`MeanField`.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families.mean_field import MeanField, kl_prox
        >>> anchor = MeanField(jnp.zeros(1), jnp.ones(1))
        >>> step = kl_prox(anchor, MeanField(jnp.ones(1), jnp.zeros(1)), 0.5)
        >>> float(step.loc[0]), float(step.scale[0])
        (-0.5, 1.0)
    """
    return kl_prox_scaled(anchor, grads, rate * jnp.square(anchor.scale))


def kl_prox_scaled(anchor: MeanField, grads: MeanField, rate: Scalar) -> MeanField:
    """:func:`kl_prox` in terms of ``rate`` = step size × anchor variance.

    A step size proportional to 1/σ² overflows in float32 as σ shrinks, and is 0/0 at σ = 0; its
    product with the variance does neither.
    """
    return MeanField(
        anchor.loc - rate * grads.loc, shrink(anchor.scale, 0.5 * rate * grads.scale)
    )


class Memory(NamedTuple):
    """Mean and precision; both move by less than their rounding error on long streams."""

    loc: CompensatedSum
    precision: CompensatedSum


def init(q: MeanField) -> Memory:
    """Mean and precision of ``q`` as sums that natural-gradient steps add to."""
    return Memory(
        CompensatedSum.start(q.loc), CompensatedSum.start(1.0 / jnp.square(q.scale))
    )


def natural_step(
    memory: Memory,
    q: MeanField,
    prior: MeanField,
    grad_loc: Array,
    grad_var: Array,
    gain: Gain,
) -> tuple[MeanField, Memory]:
    """A natural-gradient step, with the new precision in the step of the mean (KL17)."""
    force, added = gain.step * grad_loc, 2.0 * gain.step * grad_var
    if not gain.keeps_all:
        added = added + (gain.keep - 1.0) * memory.precision.value
    if gain.pulls:
        prior_precision = 1.0 / jnp.square(prior.scale)
        force = force + gain.pull * prior_precision * (q.loc - prior.loc)
        added = added + gain.pull * prior_precision
    precision = memory.precision.add(added)
    tau = precision.value
    loc = memory.loc.add(-force / tau)
    # NaN tells the driver to reject the round.
    scale = jnp.where(tau > 0, jax.lax.rsqrt(tau), jnp.nan)
    return MeanField(loc.value, scale), Memory(loc, precision)


def clip_memory(memory: Memory, q: MeanField, scale: ArrayLike) -> Memory:
    """The sums set to where q was clipped; others keep their rounding error."""
    least = 1.0 / jnp.square(jnp.asarray(scale, q.scale.dtype))
    loc = memory.loc.restart_where(q.loc != memory.loc.value, q.loc)
    return Memory(
        loc, memory.precision.restart_where(memory.precision.value < least, least)
    )


def floor(q: MeanField, grad_var: Array) -> tuple[Array, Array]:
    """Curvature with its negative coordinates at 0, and whether there were any."""
    return jnp.maximum(grad_var, 0.0), jnp.any(grad_var < 0.0)


def merge(a: MeanField, b: MeanField, prior: MeanField) -> MeanField:
    """The Gaussian of natural parameters λ_a + λ_b - λ_0; NaN where its precision is not positive."""
    precisions = [1.0 / jnp.square(q.scale) for q in (a, b, prior)]
    tau = precisions[0] + precisions[1] - precisions[2]
    # Around a.loc, so that large means do not cancel.
    force = precisions[1] * (b.loc - a.loc) - precisions[2] * (prior.loc - a.loc)
    return MeanField(
        a.loc + force / tau, jnp.where(tau > 0, jax.lax.rsqrt(tau), jnp.nan)
    )


def check(prior: MeanField) -> MeanField:
    """The prior as ``(d,)`` floating arrays of one dtype.

    Raises:
        ValueError: If the shapes disagree, d is 0, or (outside of transformations) a scale is
            not positive or a value not finite.
    """
    loc, scale = as_floating(*prior)
    if loc.ndim != 1 or loc.size == 0 or scale.shape not in ((), loc.shape):
        raise ValueError(
            f"prior needs loc of shape (d,), d >= 1, and scale of (d,) or (), got {loc.shape} and {scale.shape}."
        )
    scale = jnp.broadcast_to(scale, loc.shape)
    return MeanField(
        check_numbers(loc, "prior.loc"), check_numbers(scale, "prior.scale", "(0, inf)")
    )


def predictor_variance(q: MeanField, x: Array) -> Array:
    """Variances of the rows of ``x @ theta``, shape ``(n,)``."""
    return matmul(jnp.square(x), jnp.square(q.scale))


def descend(q: MeanField, grads: MeanField, rate: Scalar) -> MeanField:
    """A gradient step in ``(loc, scale)``, the scale at least 0."""
    return MeanField(
        q.loc - rate * grads.loc, jnp.maximum(q.scale - rate * grads.scale, 0.0)
    )


FAMILY = Family(
    name="MeanField",
    check=check,
    sample=sample,
    kl=kl,
    root=lambda q: q.scale,
    predictor_variance=predictor_variance,
    curvature_form="diagonal",
    witness=lambda q: q.loc + q.scale,
    marginal_scale=lambda q: q.scale,
    init=init,
    natural_step=natural_step,
    floor=floor,
    merge=merge,
    from_root=MeanField,
    gradient=lambda q, grad_loc, grad_var: MeanField(
        grad_loc, 2.0 * q.scale * grad_var
    ),
    kl_prox=kl_prox,
    kl_prox_scaled=kl_prox_scaled,
    descend=descend,
    clip_memory=clip_memory,
)
register(MeanField, FAMILY)
