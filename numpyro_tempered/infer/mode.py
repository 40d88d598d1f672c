"""The mode of a posterior density on the unconstrained scale, by Newton's method."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, hessian_product, map_batches, matmul

# Newton's decrement, an estimate of the nats to the mode.
TOLERANCE = 1e-8
# From here on a decrement that does not fall to a quarter is rounding.
SMALL = 1e-3
# What rounding may leave of it: a start needs no more.
NEAR = 1.0
MAX_ITERATIONS = 100
# Eigenvalues of the Hessian, scaled to unit diagonal, are at least this in a step.
FLOOR = 1e-4
# The shortest step: where a likelihood is saturated, curvature says little of the way.
_MIN_SIZE = 1e-12


class Mode(NamedTuple):
    """A mode of exp(-f).

    Attributes:
        loc: The mode, shape ``(d,)``.
        root: R with R Rᵀ the inverse of the Hessian of f at it, shape ``(d, d)``; in no particular form.
        scale: The diagonal of the Hessian to the power -1/2, shape ``(d,)``.
        is_mode: Whether it is one: a stationary point of f, with a Hessian that is positive definite.
        num_iterations: Newton steps taken.
    """

    loc: Array
    root: Array
    scale: Array
    is_mode: Array
    num_iterations: Array


class _Point(NamedTuple):
    theta: Array
    value: Array
    direction: Array
    decrement: Array
    scale: Array
    values: Array
    vectors: Array


def find_mode(f: Callable[[Array], Array], start: Array) -> Mode:
    """Minimise f by damped Newton steps, with absolute eigenvalues where f is not convex.

    Args:
        f: A negative log-density, twice differentiable.
        start: Where to start, shape ``(d,)``.

    Returns:
        A :class:`Mode`. Densities without a mode, such as those of centred hierarchies, have ``is_mode`` False.
    """

    def at(theta: Array) -> _Point:
        value, grad = jax.value_and_grad(f)(theta)
        basis = jnp.eye(theta.shape[0], dtype=theta.dtype)
        hessian = map_batches(
            lambda v: hessian_product(jax.grad(f), theta, v), basis, 32
        )
        hessian = 0.5 * (hessian + hessian.T)
        scale = jnp.sqrt(
            jnp.maximum(jnp.abs(jnp.diagonal(hessian)), jnp.finfo(theta.dtype).tiny)
        )
        values, vectors = jnp.linalg.eigh(hessian / scale / scale[:, None])
        in_basis = matmul(vectors.T, grad / scale)
        direction = (
            matmul(vectors, in_basis / jnp.maximum(jnp.abs(values), FLOOR)) / scale
        )
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(direction))
        decrement = jnp.where(finite, 0.5 * jnp.sum(grad * direction), jnp.inf)
        return _Point(
            theta,
            jnp.where(finite, value, jnp.inf),
            direction,
            decrement,
            1.0 / scale,
            values,
            vectors,
        )

    def advance(carry: tuple[_Point, Array, Array]) -> tuple[_Point, Array, Array]:
        point, number, _ = carry

        def fails(search: tuple[Array, Array]) -> Array:
            size, value = search
            rounding = 8.0 * jnp.finfo(value.dtype).eps * jnp.abs(point.value)
            enough = value <= point.value - 0.1 * size * point.decrement + rounding
            return ~enough & (size > _MIN_SIZE)

        def halve(search: tuple[Array, Array]) -> tuple[Array, Array]:
            size = 0.5 * search[0]
            return size, f(point.theta - size * point.direction)

        # NaN fails, so that the first size tried is one.
        begin = (jnp.full_like(point.value, 2.0), jnp.full_like(point.value, jnp.nan))
        size, value = jax.lax.while_loop(fails, halve, begin)
        lost = ~jnp.isfinite(value) | (size <= _MIN_SIZE)
        new = at(jnp.where(lost, point.theta, point.theta - size * point.direction))
        is_rounding = (point.decrement <= SMALL) & ~(
            new.decrement <= 0.25 * point.decrement
        )
        return new, number + 1, lost | ~jnp.isfinite(new.value) | is_rounding

    def running(carry: tuple[_Point, Array, Array]) -> Array:
        point, number, lost = carry
        return (point.decrement > TOLERANCE) & (number < MAX_ITERATIONS) & ~lost

    # The loop's first round evaluates the start, after a step of length zero: f is compiled once, not twice.
    zeros, eye = jnp.zeros_like(start), jnp.eye(start.shape[0], dtype=start.dtype)
    inf, largest = (
        jnp.array(jnp.inf, start.dtype),
        jnp.array(jnp.finfo(start.dtype).max),
    )
    before = _Point(start, inf, zeros, largest, zeros, zeros, eye)
    carry = (before, jnp.array(-1, jnp.int32), jnp.zeros((), bool))
    point, number, _ = jax.lax.while_loop(running, advance, carry)
    least = 10.0 * point.theta.shape[0] * jnp.finfo(point.theta.dtype).eps
    root = (
        point.scale[:, None]
        * point.vectors
        / jnp.sqrt(jnp.maximum(point.values, least))
    )
    is_mode = (point.values[0] > 0.0) & (point.decrement <= NEAR)
    return Mode(point.theta, root, point.scale, is_mode, number)
