"""Coordinate ascent as one compiled loop: of one start, or of several side by side."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array

T = TypeVar("T")


class Iterate(NamedTuple, Generic[T]):
    """The result of one pass of an algorithm.

    Attributes:
        point: The state after the pass.
        objective: Its value at ``point``, shape ``(R,)``, or () of a single start.
        rounding: A fall of the objective by no more than this is rounding; () or ``(R,)``.
    """

    point: T
    objective: Array
    rounding: Array


# An algorithm: one pass from a state.
Step: TypeAlias = Callable[[T], Iterate[T]]


class Ascent(NamedTuple, Generic[T]):
    """An ascent of R starts, on the first axis of each leaf but ``num_steps``; a single start has no such axis.

    Attributes:
        point: The state of the algorithm.
        objective: Its value at ``point``; -inf before the first pass.
        trace: Objectives ``(max_iter, R)``; NaN after a start has ended.
        num_iter: Passes of each start.
        active: Whether the start goes on.
        converged: Whether it ended by the tolerance.
        fall: The largest fall of the objective beyond rounding; 0 if it never fell.
        num_steps: Passes of the loop, shape ().
    """

    point: T
    objective: Array
    trace: Array
    num_iter: Array
    active: Array
    converged: Array
    fall: Array
    num_steps: Array


def begin(point: T, max_iter: int, *, batched: bool = True) -> Ascent[T]:
    """The ascent before its first pass.

    Args:
        point: Where it starts.
        max_iter: Length of the trace.
        batched: Whether the leaves of ``point`` have a leading axis of starts.
    """
    leaf = jax.tree.leaves(point)[0]
    starts, dtype = leaf.shape[: int(batched)], leaf.dtype
    # On the host, where each of them would be a program otherwise.
    arrays: Any = (
        np.full(starts, -np.inf, dtype),
        np.full((max_iter, *starts), np.nan, dtype),
        np.zeros(starts, np.int32),
        np.ones(starts, bool),
        np.zeros(starts, bool),
        np.zeros(starts, dtype),
        np.zeros((), np.int32),
    )
    return Ascent(point, *arrays)


def advance(
    step: Step[T], ascent: Ascent[T], until: Array | int, tolerance: Array
) -> Ascent[T]:
    """Passes until all starts have ended, or ``until`` passes are done.

    Args:
        step: The algorithm.
        ascent: From :func:`begin`, or from here.
        until: Number of passes, at most the length of the trace.
        tolerance: A start has converged when a pass raises its objective by no more than this.
    """
    return jax.lax.while_loop(
        lambda ascent: jnp.any(ascent.active) & (ascent.num_steps < until),
        lambda ascent: record(ascent, step(ascent.point), tolerance),
        ascent,
    )


def record(ascent: Ascent[T], after: Iterate[T], tolerance: Array) -> Ascent[T]:
    """The ascent with one more pass; a start that has ended stays where it is."""
    active, objective = ascent.active, after.objective
    gain = objective - ascent.objective
    # The first pass gains without bound: it ends nothing.
    converged = active & jnp.isfinite(gain) & (gain <= tolerance)
    fall = jnp.where(
        active & (gain < -after.rounding), jnp.maximum(ascent.fall, -gain), ascent.fall
    )

    def replace_active(new: Array, old: Array) -> Array:
        # The loop has ended when a single start has.
        return (
            jnp.where(jnp.reshape(active, (-1,) + (1,) * (new.ndim - 1)), new, old)
            if active.ndim
            else new
        )

    return Ascent(
        jax.tree.map(replace_active, after.point, ascent.point),
        replace_active(objective, ascent.objective),
        jnp.asarray(ascent.trace)
        .at[ascent.num_steps]
        .set(jnp.where(active, objective, jnp.nan)),
        ascent.num_iter + active,
        active & ~converged & jnp.isfinite(objective),
        ascent.converged | converged,
        fall,
        ascent.num_steps + 1,
    )
