"""Euclidean balls as bounds on a posterior, and the projections on them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, Scalar
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of
from numpyro_tempered.gaussian.families.mean_field import shrink

# Halvings of an interval, down to rounding.
NUM_HALVINGS = 60


class Ball(NamedTuple):
    """Euclidean bounds on a posterior, for the rules that take a :class:`Box`; infinite ones do not bind.

    The regret of :func:`svb`, :func:`oga` and :func:`oga_el` in a ball does not depend on the dimension
    (CA19, section 4.2).

    The warnings of :func:`diagnose` do not look at balls.

    Attributes:
        loc: Largest norm ‖m‖ of the means.
        scale: Largest norm ‖σ‖ of the standard deviations; of a full covariance, Frobenius norm of the factor.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.diameter(nt.online.Ball(loc=1.0, scale=2.0), d=100)
        3.4641016151377544
    """

    loc: float = math.inf
    scale: float = math.inf


def check_prior(prior: Gaussian, box: object, name: str) -> None:
    """Refuse a ball for rules that measure their steps by the covariance, on a family that has one.

    Raises:
        TypeError: If ``box`` is a ball and the prior not of independent coordinates.
    """
    if isinstance(box, Ball) and not family_of(prior).diagonal_only:
        raise TypeError(
            f"{name} in a Ball is for MeanField, as its theorem is, got {type(prior).__name__}: a step that the "
            "covariance measures does not end at the orthogonal projection. Leave the Ball out, or take oga_el."
        )


def project(q: Q, ball: Ball) -> Q:
    """The nearest point of a ball, in the Euclidean norms of mean and root of the covariance."""
    family = family_of(q)
    return family.with_root(
        _shorten(q.loc, ball.loc), _shorten(family.root(q), ball.scale)
    )


def _shorten(vector: Array, radius: float) -> Array:
    """The vector, or matrix, at the length of the radius where it is longer."""
    # In units of the largest entry, whose square may overflow.
    unit = jnp.max(jnp.abs(vector))
    unit = jnp.where(unit > 0, unit, 1.0)
    length = unit * jnp.linalg.norm(vector / unit)
    return jnp.where(length > radius, vector * (radius / length), vector)


def kl_prox(
    anchor: Q, grad_loc: Array, grad_scale: Array, rate: Scalar, ball: Ball
) -> Q:
    r"""The minimiser of :math:`\langle g, \mu\rangle + \mathrm{KL}(q_\mu, anchor)/\eta` over a ball.

    It is no projection of the free minimiser. With a multiplier k ≥ 0 for each of the two constraints it is the
    minimiser for an anchor of precision 1/s² + k: m = m_free / (1 + k s²), and σ that of the free formula with
    s²/(1 + k s²) for s². Both norms fall in k, and bisection finds where they meet the radius.

    Args:
        anchor: The Gaussian from which the step measures KL, with independent coordinates of scales s.
        grad_loc: Gradient with respect to the means, ``(d,)``.
        grad_scale: With respect to the standard deviations.
        rate: η, a scalar.
        ball: The bounds.

    Returns:
        The minimiser.
    """
    family = family_of(anchor)
    variance = jnp.square(family.root(anchor))
    free, slope = anchor.loc - rate * variance * grad_loc, rate * grad_scale

    def loc(k: Array) -> Array:
        return free / (1.0 + k * variance)

    def scale(k: Array) -> Array:
        narrow = variance / (1.0 + k * variance)
        return shrink(jnp.sqrt(narrow), 0.5 * slope * narrow)

    d = free.shape[0]
    # σ is at most |slope|/k + 1/√k.
    longest_loc = jnp.linalg.norm(free) / (ball.loc * jnp.min(variance))
    longest_scale = jnp.maximum(
        2.0 * jnp.linalg.norm(slope) / ball.scale, 4.0 * d / ball.scale**2
    )
    return family.with_root(
        _meet(loc, ball.loc, longest_loc), _meet(scale, ball.scale, longest_scale)
    )


def _meet(at: Callable[[Array], Array], radius: float, last: Array) -> Array:
    """``at(k)`` at the least k ≥ 0, of those up to ``last``, where its norm is at most the radius."""
    free = at(jnp.zeros_like(last))
    if math.isinf(radius):
        return free

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        outside = jnp.linalg.norm(at(middle)) > radius
        return jnp.where(outside, middle, low), jnp.where(outside, high, middle)

    _, k = jax.lax.fori_loop(0, NUM_HALVINGS, halve, (jnp.zeros_like(last), last))
    return jnp.where(jnp.linalg.norm(free) > radius, at(k), free)
