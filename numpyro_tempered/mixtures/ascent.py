"""Alternating algorithms as values, and the loop over their passes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Ascent,
    Iterate,
    ProgressBar,
    PyTree,
    Step,
    ascent,
    check_number,
    doubles,
    progress,
    warn_caller,
)
from numpyro_tempered.mixtures import sweep
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.prepare import check_counts

T = TypeVar("T")
# Nats below the best objective at which a start has reached it.
NEAR = 0.1


class Summary(NamedTuple):
    """What is computed from all rows in one pass over them.

    Attributes:
        read: ``(component, *arguments)`` to what the blocks of rows need of the arguments.
        sums: ``(component, blocks, what was read)`` to a tree of arrays, of which those of all rows are the sum.
        finish: ``(component, sums, what was read, *arguments)`` to the result.
    """

    read: Callable[..., Any]
    sums: Callable[..., Any]
    finish: Callable[..., Any]


class Algorithm(NamedTuple):
    """Responsibilities, and what follows from the sums under them, in turn.

    A problem P, a state T, what a pass reads of it M and sums S are trees of arrays.

    Attributes:
        pose: Of P, the problem with what it needs of all rows.
        begin: ``(component, P, responsibilities (P, B, K, b), blocks)`` to a first T.
        read: ``(component, P, T)`` to M.
        terms: ``(component, P, M, columns (d, b), weight (b,))`` to the S of a block; those of all blocks add.
        follow: ``(component, P, T, S, total)`` to the objective at T, its rounding error, and the next T.
    """

    pose: Summary
    begin: Callable[..., Any]
    read: Callable[..., Any]
    terms: Callable[..., Any]
    follow: Callable[..., tuple[Array, Array, Any]]


class PassState(NamedTuple, Generic[T]):
    """The state of an algorithm whose passes over the data evaluate the objective where they start.

    Attributes:
        factors: Where the objective was taken.
        update: Where the next pass starts.
    """

    factors: T
    update: T


class Limits(NamedTuple):
    """When an ascent ends.

    Attributes:
        num_restarts: Starts, ascended side by side.
        max_iter: Upper limit of passes over the data.
        tolerance: Rise of the objective per datum at which a restart has converged; None for the default.
        progress_bar: Whether to show the passes.
    """

    num_restarts: int
    max_iter: int
    tolerance: float | None
    progress_bar: ProgressBar

    def tolerance_at(self, dtype: np.dtype) -> float:
        """The tolerance for data of a precision."""
        default = 1e-8 if dtype == jnp.float64 else 1e-6
        return default if self.tolerance is None else self.tolerance


def check_limits(
    num_restarts: int,
    max_iter: int,
    tolerance: float | None,
    progress_bar: ProgressBar = False,
) -> Limits:
    """The limits of an ascent.

    Raises:
        ValueError: If one is out of its range.
    """
    num_restarts, max_iter = check_counts(num_restarts=num_restarts, max_iter=max_iter)
    if tolerance is not None:
        tolerance = float(check_number(tolerance, "tolerance", "[0, inf)"))
    return Limits(num_restarts, max_iter, tolerance, progress_bar)


class History(NamedTuple):
    """The history of an ascent; see :class:`MixtureFit`."""

    trace: np.ndarray
    restart_objectives: np.ndarray
    num_best: int
    spread: float
    converged: bool
    num_iter: int

    @classmethod
    def of(
        cls,
        state: Ascent[PassState[T]],
        best: int,
        objectives: np.ndarray,
        num_restarts: int,
    ) -> "History":
        """The history of the best start, with the objectives of all, restarts first."""
        num_iter = int(state.num_iter[best])
        # On the host: a slice of another length is another program.
        trace = np.asarray(state.trace)[:num_iter, best]
        return cls.at(
            trace, objectives, num_restarts, bool(state.converged[best]), num_iter
        )

    @classmethod
    def at(
        cls,
        trace: np.ndarray,
        objectives: np.ndarray,
        num_restarts: int,
        converged: bool,
        num_iter: int,
    ) -> "History":
        """The history of a start with this trace."""
        value = float(trace[-1])
        num_best = count_best(objectives, num_restarts, value)
        spread = max(float(objectives.max()), value) - float(
            np.median(objectives[:num_restarts])
        )
        return cls(trace, objectives, num_best, spread, converged, num_iter)


def count_best(
    objectives: np.ndarray, num_restarts: int, value: float = -np.inf
) -> int:
    """Starts within ``NEAR`` of the best objective, or of a better value; those behind the restarts are one."""
    is_near = objectives >= max(float(objectives.max()), value) - NEAR
    return int(is_near[:num_restarts].sum()) + int(is_near[num_restarts:].any())


def begin(
    factors: T, max_iter: int, num_starts: int | None = None
) -> Ascent[PassState[T]]:
    """The ascent before the first pass, of factors with leading axis R; from ``num_starts`` on they are none."""
    # The trace has a length that other limits share: it is part of what is compiled.
    state = ascent.begin(PassState(factors, factors), sweep.next_power(max_iter, 1024))
    size = len(state.objective)
    active: Any = np.arange(size) < (size if num_starts is None else num_starts)
    return state._replace(active=active)


def read_all(
    algorithm: Algorithm, component: Component, problem: PyTree, states: PyTree
) -> PyTree:
    """What a pass reads of states with leading axis R."""
    return jax.vmap(lambda state: algorithm.read(component, problem, state))(states)


def pass_sums(
    algorithm: Algorithm,
    component: Component,
    problem: PyTree,
    blocks: sweep.Blocks,
    read: PyTree,
) -> PyTree:
    """The sums of a pass, leading axis R."""

    def of_one(mixture: PyTree) -> PyTree:
        return sweep.over_blocks(
            partial(algorithm.terms, component, problem, mixture), blocks
        )

    return jax.vmap(of_one)(read)


def after_pass(
    algorithm: Algorithm,
    component: Component,
    problem: PyTree,
    point: PassState[T],
    sums: PyTree,
    total: Array,
) -> Iterate[PassState[T]]:
    """The states after a pass with these sums, leading axis R."""

    def of_one(state: T, sums: PyTree) -> tuple[Array, Array, T]:
        return algorithm.follow(component, problem, state, sums, total)

    objective, rounding, following = jax.vmap(of_one)(point.update, sums)
    return Iterate(PassState(point.update, following), objective, rounding)


def step_of(
    algorithm: Algorithm,
    component: Component,
    problem: PyTree,
    blocks: sweep.Blocks,
    total: Array,
) -> Step[PassState[T]]:
    """An algorithm for :func:`numpyro_tempered.core.ascent.advance`; ``total`` is the sum of the weights."""

    def step(point: PassState[T]) -> Iterate[PassState[T]]:
        read = read_all(algorithm, component, problem, point.update)
        sums = pass_sums(algorithm, component, problem, blocks, read)
        return after_pass(algorithm, component, problem, point, sums, total)

    return step


def rounding_error(total: Array, *terms: Array, alpha: Array | float = 1.0) -> Array:
    """The rounding of an objective: a sum of n terms whose coefficients are rounded, and log-gammas of n.

    Args:
        total: The sum of the weights n.
        *terms: What the objective is the sum of.
        alpha: Power on the likelihood; below 1 the log-gammas of n are left.
    """
    size = sum(map(jnp.abs, terms)) + jnp.maximum(1.0, alpha) * total * (
        1.0 + jnp.log1p(total)
    )
    return 32.0 * jnp.finfo(total.dtype).eps * size


def ascend(
    advance: Callable[[Ascent[PassState[T]], int], Ascent[PassState[T]]],
    state: Ascent[PassState[T]],
    limits: Limits,
    stride: int,
) -> Ascent[PassState[T]]:
    """All restarts to their ends, and a progress bar.

    Args:
        advance: A state and a number of passes to the state when so many are done.
        state: From :func:`begin`.
        limits: When the ascent ends.
        stride: Passes of one call of ``advance``.
    """
    max_iter = limits.max_iter
    with progress(max_iter, "passes", limits.progress_bar) as bar:
        for until in range(stride, max_iter + stride, stride):
            state = advance(state, min(until, max_iter))
            if limits.progress_bar is not False:
                best, num_active = (
                    float(np.asarray(state.objective).max()),
                    int(np.asarray(state.active).sum()),
                )
                # A refresh would show the bar before its time.
                bar.set_postfix(
                    objective=f"{best:.6g}", active=num_active, refresh=False
                )
                bar.update(int(state.num_steps) - bar.n)
            if not np.asarray(state.active).any():
                break
    return state


@partial(jax.jit, static_argnames=("function", "component"))
def for_restarts(
    function: Callable[..., T], component: Component, problem: object, *trees: object
) -> T:
    """``function(component, problem, ...)`` for each restart: the leading axis R of ``trees``."""
    return jax.vmap(partial(function, component, problem))(*trees)


@partial(jax.jit, static_argnames=("function", "component"))
def for_keys(
    function: Callable[..., T], component: Component, keys: Array, *arguments: object
) -> T:
    """``function(key, component, ...)`` for each key, one after the other, with the keys' leading axis."""
    return jax.lax.map(lambda key: function(key, component, *arguments), keys)


def ended(state: Ascent[PassState[T]]) -> Ascent[PassState[T]]:
    """An ascent on the host, with objectives in double precision: -inf where one is not finite."""
    objective: Any = finite_or_least(state.objective)
    on_host = jax.tree.map(np.asarray, state)
    return on_host._replace(objective=objective)


def finite_or_least(objectives: Array) -> np.ndarray:
    """Objectives in double precision; -inf where one is not finite."""
    values = doubles(objectives)
    return np.where(np.isfinite(values), values, -np.inf)


def check_finite(state: Ascent[PassState[T]], component: Component) -> None:
    """Refuse an ascent of which nothing is finite; warn of restarts that failed.

    Raises:
        FloatingPointError: If no restart has a finite objective.
    """
    objectives = state.objective
    num_failed = int(np.sum(~np.isfinite(objectives)))
    if num_failed == len(objectives):
        raise FloatingPointError(
            f"no restart of {component.name!r} kept a finite objective in {state.trace.dtype}: components "
            "may be too narrow for their distance. Standardise the columns, widen the prior, or let jax have 64 "
            "bits."
        )
    if num_failed:
        warn_caller(
            f"{num_failed} of {len(objectives)} restarts did not keep a finite objective."
        )
