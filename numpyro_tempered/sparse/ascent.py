"""Coordinate ascent as one compiled loop, start after start."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.sparse.starts import Start

# An objective is a sum of many terms: a fall within so many units in its last place is rounding.
ROUNDING = 64.0


class Ascent(NamedTuple):
    """Where an ascent is.

    Attributes:
        state: Of the algorithm.
        objective: At that state; -inf before the first sweep.
        trace: Objectives by sweep; NaN after the last.
        num_sweeps: Sweeps so far.
        active: Whether it goes on.
        converged: Whether it ended by the tolerance.
    """

    state: Any
    objective: Array
    trace: Array
    num_sweeps: Array
    active: Array
    converged: Array


def ascend(step: Callable[[Any], tuple[Any, Array]], state: Any, num_sweeps: int, tolerance: Array) -> Ascent:
    """Repeat a step that raises its objective until it gains no more than the tolerance.

    Args:
        step: State to the next state and its objective.
        state: The start.
        num_sweeps: Most steps.
        tolerance: In nats a sweep.
    """
    eps = jnp.finfo(tolerance.dtype).eps

    def body(at: Ascent) -> Ascent:
        state, objective = step(at.state)
        gain = objective - at.objective
        rounding = ROUNDING * eps * (1.0 + jnp.abs(objective))
        done = ~jnp.isfinite(objective) | (gain <= tolerance)
        # What falls further has met the end of its precision, not its optimum.
        converged = done & (gain >= -jnp.maximum(tolerance, rounding))
        trace = at.trace.at[at.num_sweeps].set(objective)
        count = at.num_sweeps + 1
        return Ascent(state, objective, trace, count, ~done & (count < num_sweeps), converged)

    begin = Ascent(
        state,
        jnp.full_like(tolerance, -jnp.inf),
        jnp.full_like(tolerance, jnp.nan, shape=(num_sweeps,)),
        jnp.zeros((), jnp.int32),
        jnp.ones((), bool),
        jnp.zeros((), bool),
    )
    return jax.lax.while_loop(lambda at: at.active, body, begin)


class Best(NamedTuple):
    """The best of several ascents.

    Attributes:
        ascent: It.
        order: The order of its coefficients.
        objectives: Objective of every ascent.
    """

    ascent: Ascent
    order: Array
    objectives: Array


def best_start(ascend_from: Callable[[Start], Ascent], starts: Start) -> Best:
    """The ascents from all starts, one after another: each stops when it is done."""
    ascents = jax.lax.map(ascend_from, starts)
    # NaN is no maximum.
    best = jnp.argmax(jnp.where(jnp.isnan(ascents.objective), -jnp.inf, ascents.objective))
    return Best(jax.tree.map(lambda leaf: leaf[best], ascents), starts.order[best], ascents.objective)


@jax.jit
def unblock(q: SpikeSlab, order: Array) -> SpikeSlab:
    """Factors in blocks as factors of the coefficients in the order of the columns."""
    back = jnp.argsort(order)
    return SpikeSlab(*(jnp.reshape(part, -1)[: order.shape[0]][back] for part in q))


@partial(jax.jit, static_argnums=1)
def without_intercept(order: Array, d: int) -> Array:
    """The order of the first d columns."""
    return order[jnp.nonzero(order < d, size=d)[0]]
