"""Coordinate ascent as one compiled loop over the restarts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.sweep import Coefficients, Sums


class Steps(NamedTuple):
    """An algorithm that alternates between responsibilities and factors.

    Attributes:
        coefficients: Factors to what a pass over the data reads.
        sweep: That to the sums of a pass.
        objective: ``(factors, sums)`` to the objective at the factors, their best responsibilities in place.
        update: ``sums`` to the factors.
    """

    coefficients: Callable[[Any], Coefficients]
    sweep: Callable[[Coefficients], Sums]
    objective: Callable[[Any, Sums], Array]
    update: Callable[[Sums], Any]


class Ascent(NamedTuple):
    """The state of R restarts; every leaf but ``num_steps`` has R first, or last in the trace.

    Attributes:
        factors: The factors at which ``objective`` was taken.
        following: Their update, which is evaluated next.
        objective: -inf before the first step.
        trace: Objectives ``(max_iter, R)``; NaN after a restart's end.
        num_iter: Passes over the data.
        active: Whether the restart goes on.
        converged: Whether it ended by the tolerance.
        fall: The largest fall of the objective beyond rounding; 0 where it never fell.
        num_steps: Passes of the loop, shape ().
    """

    factors: Any
    following: Any
    objective: Array
    trace: Array
    num_iter: Array
    active: Array
    converged: Array
    fall: Array
    num_steps: Array


def begin(factors: Any, max_iter: int) -> Ascent:
    """The state before the first pass, of factors with leading axis R."""
    leaf = jax.tree.leaves(factors)[0]
    restarts, dtype = leaf.shape[0], leaf.dtype
    zeros = jnp.zeros(restarts, dtype)
    return Ascent(
        factors,
        factors,
        zeros - jnp.inf,
        jnp.full((max_iter, restarts), jnp.nan, dtype),
        jnp.zeros(restarts, jnp.int32),
        jnp.ones(restarts, bool),
        jnp.zeros(restarts, bool),
        zeros,
        jnp.zeros((), jnp.int32),
    )


def advance(steps: Steps, state: Ascent, until: Array, tolerance: Array, rounding: Array) -> Ascent:
    """Steps until all restarts have ended, or ``until`` passes are done.

    Args:
        steps: The algorithm.
        state: From :func:`begin`, or from here.
        until: Number of passes, at most the length of the trace.
        tolerance: A restart has converged when a pass raises its objective by no more than this.
        rounding: A fall by no more than this is rounding.
    """

    def one(factors: Any) -> tuple[Array, Any]:
        sums = steps.sweep(steps.coefficients(factors))
        return steps.objective(factors, sums), steps.update(sums)

    def body(state: Ascent) -> Ascent:
        objective, following = jax.vmap(one)(state.following)
        return record(state, objective, following, tolerance, rounding)

    return jax.lax.while_loop(lambda s: jnp.any(s.active) & (s.num_steps < until), body, state)


def record(state: Ascent, objective: Array, following: Any, tolerance: Array, rounding: Array) -> Ascent:
    """The state after a pass over the data.

    Args:
        state: Before the pass.
        objective: At ``state.following``, ``(R,)``.
        following: The update of ``state.following``.
        tolerance: As in :func:`advance`.
        rounding: As in :func:`advance`.
    """
    gain = objective - state.objective
    # The first objective has none before it.
    first = state.num_iter == 0
    finite = jnp.isfinite(objective)
    converged = state.active & ~first & finite & (gain <= tolerance)
    fall = jnp.where(state.active & ~first & (gain < -rounding), jnp.maximum(state.fall, -gain), state.fall)

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(jnp.reshape(state.active, (-1,) + (1,) * (new.ndim - 1)), new, old)

    return Ascent(
        jax.tree.map(keep, state.following, state.factors),
        jax.tree.map(keep, following, state.following),
        keep(objective, state.objective),
        state.trace.at[state.num_steps].set(jnp.where(state.active, objective, jnp.nan)),
        state.num_iter + state.active,
        state.active & ~converged & finite,
        state.converged | converged,
        fall,
        state.num_steps + 1,
    )


def rounding_error(base: Array, total: Array, alpha: Array | float = 1.0) -> Array:
    """The rounding of an objective: a sum of n terms whose coefficients are rounded, and log-gammas of n.

    Args:
        base: The sum of log h.
        total: The sum of the weights n.
        alpha: Power on the likelihood; below 1 the log-gammas of n are left.
    """
    size = jnp.abs(base) + total * (1.0 + jnp.log1p(total))
    return 32.0 * jnp.finfo(total.dtype).eps * jnp.maximum(1.0, alpha) * size
