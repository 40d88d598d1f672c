"""The minimiser of a sum, by Newton's method."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

from numpyro_tempered.core import Array, forward_else_reverse

MAX_ITER = 100
# The sum must rise by this much two standard deviations from the minimiser, where a parabola has risen by 2.
LEAST_RISE = 0.1
# Longest step, in standard deviations, that rounding errors of the gradient may cause.
COARSEST_STEP = 0.1


class Minimum(NamedTuple):
    """A local minimiser.

    Attributes:
        point: The minimiser, ``(d,)``.
        hessian: Second derivative of the sum there, ``(d, d)``.
        step: Length of the last Newton step in standard deviations, which the inverse Hessian has for variances.
        condition: Condition number of the Hessian scaled to a unit diagonal; infinite where it is not positive
            definite.
        converged: Whether the steps converged, the Hessian is positive definite, and the sum rises on both sides
            of the point along each of its axes.
    """

    point: Array
    hessian: Array
    step: Array
    condition: Array
    converged: Array


class _State(NamedTuple):
    point: Array
    terms: Array
    gradient: Array
    hessian: Array
    damping: Array
    step: Array
    num_iter: Array
    converged: Array


def minimise(terms: Callable[[Array], Array], start: Array) -> Minimum:
    r"""A local minimiser of :math:`\sum_i f_i(\theta)` by Newton's method with Levenberg's damping.

    The method converges at a full step p whose length :math:`(p^\top H p)^{1/2}`, in standard deviations, is at
    most the square root of the dtype's resolution, or below a tenth and no longer halved, which is rounding. The
    steps also shrink for a sum without minimum, such as the loss of a logistic regression on separable data. So
    the sum must be larger at the points two standard deviations from the minimiser, along the axes of H, on both
    sides. The function is pure: it may be jitted, and mapped over data weights.

    Args:
        terms: From θ ``(d,)`` to the f_i ``(m,)``: their changes are summed one by one, because
            the sum of many terms has no digits left for them in single precision.
        start: θ to start from, ``(d,)``, where the terms are finite.

    Returns:
        A :class:`Minimum`; read ``converged``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def losses(theta):
        ...     return jnp.square(theta - jnp.array([1.0, 2.0]))
        >>> minimum = jax.jit(lambda start: minimise(losses, start))(jnp.zeros(2))
        >>> minimum.point.tolist(), bool(minimum.converged)
        ([1.0, 2.0], True)
    """
    start = jnp.asarray(start)
    eps = jnp.finfo(start.dtype).eps

    def gradient(theta: Array) -> tuple[Array, tuple[Array, Array]]:
        values, pull = jax.vjp(terms, theta)
        slope = pull(jnp.ones_like(values))[0]
        return slope, (values, slope)

    def evaluate(theta: Array) -> tuple[Array, Array, Array]:
        curvature, (values, slope) = forward_else_reverse(
            lambda: jax.jacfwd(gradient, has_aux=True)(theta),
            lambda: jax.jacrev(gradient, has_aux=True)(theta),
        )
        return values, slope, curvature

    def proceed(state: _State) -> Array:
        return ~state.converged & (state.num_iter < MAX_ITER)

    def iterate(state: _State) -> _State:
        scale, scaled = _unit_diagonal(state.hessian)
        factor = jnp.linalg.cholesky(
            scaled + state.damping * jnp.eye(len(start), dtype=start.dtype)
        )
        shift = -cho_solve((factor, True), state.gradient / scale) / scale
        point = state.point + shift
        values, new_gradient, new_hessian = evaluate(point)
        # What rounding may do to the sum of the differences; what terms share is rounded the same way in all.
        noise = 2.0 * eps * jnp.sum(jnp.abs(state.terms))
        slope = state.gradient @ shift
        lower = jnp.sum(values - state.terms) <= 1e-4 * slope + noise
        # Terms may round by more than their size says, where they are differences of larger numbers: a short step
        # is also taken if it does not double the length of the next.
        residual = new_gradient / scale
        shorter = (-slope <= COARSEST_STEP**2) & (
            residual @ cho_solve((factor, True), residual) <= -4.0 * slope
        )
        acceptable = (
            (lower | shorter)
            & jnp.all(jnp.isfinite(values))
            & jnp.all(jnp.isfinite(new_gradient))
            & jnp.all(jnp.isfinite(new_hessian))
        )
        step = jnp.sqrt(jnp.abs(slope))
        undamped = state.damping == 0.0
        # Rounding decides whether the sum is lower or the next step shorter there: neither matters.
        short = step <= jnp.sqrt(eps)
        # So near the minimum, steps that stop shrinking are rounding errors.
        stalled = (step <= COARSEST_STEP) & (step > 0.5 * state.step)
        easier = jnp.where(state.damping > 1e-4, 0.1 * state.damping, 0.0)
        harder = jnp.maximum(10.0 * state.damping, 1e-3)

        def accept(new: Array, old: Array) -> Array:
            return jnp.where(acceptable, new, old)

        return _State(
            accept(point, state.point),
            accept(values, state.terms),
            accept(new_gradient, state.gradient),
            accept(new_hessian, state.hessian),
            jnp.where(acceptable, easier, harder),
            jnp.where(undamped & (acceptable | short), step, state.step),
            state.num_iter + 1,
            undamped & (short | (acceptable & stalled)),
        )

    # A first step of length 0, damped so as not to count, evaluates the start inside the loop.
    num_terms = jax.eval_shape(terms, start).shape
    first = _State(
        point=start,
        terms=jnp.full(num_terms, jnp.inf, start.dtype),
        gradient=jnp.zeros_like(start),
        hessian=jnp.eye(len(start), dtype=start.dtype),
        damping=jnp.full((), 1e-4, start.dtype),
        step=jnp.full((), jnp.inf, start.dtype),
        num_iter=jnp.array(0),
        converged=jnp.array(False),
    )
    last = jax.lax.while_loop(proceed, iterate, first)
    scale, scaled = _unit_diagonal(last.hessian)
    values, axes = jnp.linalg.eigh(scaled)
    definite = values[0] > len(start) * eps * values[-1]
    # Columns of two standard deviations, to both sides.
    offsets = 2.0 * axes / (scale[:, None] * jnp.sqrt(jnp.where(definite, values, 1.0)))
    points = last.point + jnp.concatenate([offsets, -offsets], axis=1).T
    rises = jax.vmap(lambda point: jnp.sum(terms(point) - last.terms))(points)
    # Where it overflows it has risen.
    rising = jnp.all(~jnp.isfinite(rises) | (rises >= LEAST_RISE))
    condition = jnp.where(
        definite, values[-1] / jnp.where(definite, values[0], 1.0), jnp.inf
    )
    return Minimum(
        last.point,
        last.hessian,
        last.step,
        condition,
        last.converged & definite & rising,
    )


def _unit_diagonal(hessian: Array) -> tuple[Array, Array]:
    """Scales of the coordinates ``(d,)``, and the Hessian in them, whose diagonal has entries of size 1."""
    size = jnp.abs(jnp.diagonal(hessian))
    info = jnp.finfo(hessian.dtype)
    scale = jnp.sqrt(
        jnp.maximum(jnp.maximum(size, info.eps * jnp.max(size)), info.tiny)
    )
    return scale, hessian / scale / scale[:, None]
