"""Alternating updates of a mixture as steps of :mod:`numpyro_tempered.core.ascent`, and the loop over them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import ascent
from numpyro_tempered.core.ascent import Ascent, Iterate, Step
from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.prepare import check_counts

T = TypeVar("T")


# Nats below the best objective at which a start has reached it.
NEAR = 0.1


class Visit(NamedTuple, Generic[T]):
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
    progress_bar: bool

    def tolerance_at(self, dtype: np.dtype) -> float:
        """The tolerance for data of a precision."""
        default = 1e-8 if dtype == jnp.float64 else 1e-6
        return default if self.tolerance is None else self.tolerance


def check_limits(num_restarts: int, max_iter: int, tolerance: float | None, progress_bar: bool = False) -> Limits:
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
    objectives: np.ndarray
    num_best: int
    spread: float
    converged: bool
    num_iter: int

    @classmethod
    def of(cls, state: Ascent[Visit[T]], best: int, objectives: np.ndarray, num_restarts: int) -> "History":
        """The history of the best start, with the objectives of all, restarts first."""
        num_iter = int(state.num_iter[best])
        # On the host: a slice of another length is another program.
        trace = np.asarray(state.trace)[:num_iter, best]
        value = float(trace[-1])
        num_best = count_best(objectives, num_restarts, value)
        spread = max(float(objectives.max()), value) - float(np.median(objectives[:num_restarts]))
        return cls(trace, objectives, num_best, spread, bool(state.converged[best]), num_iter)


def count_best(objectives: np.ndarray, num_restarts: int, value: float = -np.inf) -> int:
    """Starts within ``NEAR`` of the best objective, or of a better value; those behind the restarts are one."""
    is_near = objectives >= max(float(objectives.max()), value) - NEAR
    return int(is_near[:num_restarts].sum()) + int(is_near[num_restarts:].any())


def begin(factors: T, max_iter: int) -> Ascent[Visit[T]]:
    """The ascent before the first pass, of factors with leading axis R."""
    return ascent.begin(Visit(factors, factors), max_iter)


def step_of(visit: Callable[[T], tuple[Array, Array, T]]) -> Step[Visit[T]]:
    """The step of R restarts, from the pass of one: factors to their objective, its rounding and their update."""

    def step(point: Visit[T]) -> Iterate[Visit[T]]:
        objective, rounding, update = jax.vmap(visit)(point.update)
        return Iterate(Visit(point.update, update), objective, rounding)

    return step


def rounding_error(total: Array, *terms: Array, alpha: Array | float = 1.0) -> Array:
    """The rounding of an objective: a sum of n terms whose coefficients are rounded, and log-gammas of n.

    Args:
        total: The sum of the weights n.
        *terms: What the objective is the sum of.
        alpha: Power on the likelihood; below 1 the log-gammas of n are left.
    """
    size = sum(map(jnp.abs, terms)) + jnp.maximum(1.0, alpha) * total * (1.0 + jnp.log1p(total))
    return 32.0 * jnp.finfo(total.dtype).eps * size


def ascend(
    advance: Callable[[Ascent[Visit[T]], int], Ascent[Visit[T]]], factors: T, limits: Limits, stride: int
) -> Ascent[Visit[T]]:
    """All restarts to their ends, and a progress bar.

    Args:
        advance: A state and a number of passes to the state when so many are done.
        factors: Where the restarts start, with leading axis R.
        limits: When the ascent ends.
        stride: Passes of one call of ``advance``.
    """
    state, max_iter = begin(factors, limits.max_iter), limits.max_iter
    with progress(max_iter, "passes", limits.progress_bar) as bar:
        for until in range(stride, max_iter + stride, stride):
            state = advance(state, min(until, max_iter))
            if limits.progress_bar:
                bar.update(int(state.num_steps) - bar.n)
                best, num_active = float(jnp.max(state.objective)), int(jnp.sum(state.active))
                bar.set_postfix(objective=f"{best:.6g}", active=num_active)
            if not np.any(state.active):
                break
    return state


def progress(total: int, unit: str, show: bool) -> Any:
    """A bar of tqdm, which does nothing unless it is to be shown."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=f" {unit}", disable=not show)


@partial(jax.jit, static_argnames=("function", "component"))
def for_restarts(function: Callable[..., T], component: Component, problem: object, *trees: object) -> T:
    """``function(component, problem, ...)`` for each restart: the leading axis R of ``trees``."""
    return jax.vmap(partial(function, component, problem))(*trees)


@partial(jax.jit, static_argnames=("function", "component"))
def for_keys(function: Callable[..., T], component: Component, keys: Array, *arguments: object) -> T:
    """``function(key, component, ...)`` for each key, one after the other, with the keys' leading axis."""
    return jax.lax.map(lambda key: function(key, component, *arguments), keys)


def restart(tree: T, index: int) -> T:
    """The leaves of one restart."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def finite_or_least(objectives: Array) -> np.ndarray:
    """The objectives of the restarts in double precision; -inf where one is not finite."""
    values = np.asarray(objectives, np.float64)
    return np.where(np.isfinite(values), values, -np.inf)
