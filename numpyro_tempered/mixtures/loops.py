"""What a fit compiles: its starts, its ascent and its moves."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Ascent, advance, begin, rounding_error
from numpyro_tempered.mixtures.blocks import Blocks, in_blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import Factors, Problem, tempered_cavi, update
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.prepare import Prepared
from numpyro_tempered.mixtures.starts import Start
from numpyro_tempered.mixtures.sweep import Sums, accumulate

# Passes between two looks at the progress bar.
GLANCE = 20


def starts(
    rng_key: Array,
    data: Prepared,
    blocks: Blocks,
    problem: Problem,
    start: Start,
    num_restarts: int,
    shards: int,
    size: int,
) -> Factors:
    """The factors that first responsibilities give, with leading axis R.

    Raises:
        TypeError: If ``start`` is not a start.
        ValueError: If it does not fit the data.
    """
    num_components = problem.concentration.shape[0]
    sums = first_sums(rng_key, data, blocks, num_components, start, num_restarts, shards, size)
    return updates(data.component, problem, sums)


def first_sums(
    rng_key: Array,
    data: Prepared,
    blocks: Blocks,
    num_components: int,
    start: Start,
    num_restarts: int,
    shards: int,
    size: int,
) -> Sums:
    """The sums under first responsibilities, with leading axis R.

    Raises:
        TypeError: If ``start`` is not a start.
        ValueError: If it does not fit the data.
    """
    if not isinstance(start, Start):
        raise TypeError(
            f"start is a {type(start).__name__}; expected a value such as nt.mixtures.kmeans_plus_plus()."
        )
    if not start.random:
        # Outside of what is compiled, where labels can be checked.
        start.assign(rng_key, start.data, data.rows, data.weight, num_components)
    keys = jax.random.split(rng_key, num_restarts)
    return _first_sums(
        keys,
        data.component,
        start.assign,
        start.data,
        data.rows,
        data.weight,
        blocks,
        num_components,
        shards,
        size,
    )


@partial(jax.jit, static_argnames="component")
def updates(component: Component, problem: Problem, sums: Sums) -> Factors:
    """The factors of sums with leading axis R."""
    return jax.vmap(lambda each: update(component, problem, each))(sums)


@partial(jax.jit, static_argnames=("component", "assign", "num_components", "shards", "size"))
def _first_sums(
    keys: Array,
    component: Component,
    assign: Any,
    start_data: Any,
    rows: Array,
    weight: Array,
    blocks: Blocks,
    num_components: int,
    shards: int,
    size: int,
) -> Sums:
    points = component.coordinates(rows)

    def one(key: Array) -> Sums:
        assigned = assign(key, start_data, points, weight, num_components)
        in_place = in_blocks(assigned, size, shards)
        if assigned.ndim == 1:
            numbers = jnp.arange(num_components, dtype=assigned.dtype)[:, None]
            in_place = (in_place[..., None, :] == numbers).astype(rows.dtype)
        return accumulate(component, in_place.astype(rows.dtype), blocks)

    # One after the other: side by side their distances would take R times the memory of the data.
    return jax.lax.map(one, keys)


def ascend(
    data: Prepared,
    blocks: Blocks,
    problem: Problem,
    factors: Factors,
    tolerance: float,
    max_iter: int,
    progress_bar: bool,
) -> Ascent:
    """All restarts to their ends, in one compiled call or, to show progress, in several."""
    dtype = blocks.columns.dtype
    allowed = jnp.asarray(tolerance, dtype)
    total = jnp.asarray(data.total, dtype)

    def further(state: Ascent, until: int) -> Ascent:
        return _advance(data.component, problem, blocks, state, jnp.int32(until), allowed, total)

    state = begin(factors, max_iter)
    if not progress_bar:
        return further(state, max_iter)
    from tqdm.auto import tqdm

    with tqdm(total=max_iter, unit=" passes") as bar:
        for until in range(GLANCE, max_iter + GLANCE, GLANCE):
            state = further(state, min(until, max_iter))
            bar.update(int(state.num_steps) - bar.n)
            bar.set_postfix(objective=f"{float(jnp.max(state.objective)):.6g}", active=int(jnp.sum(state.active)))
            if not bool(jnp.any(state.active)):
                break
    return state


def objectives_of(state: Ascent) -> np.ndarray:
    """F of each restart; -inf where it is not finite."""
    values = np.asarray(state.objective, np.float64)
    return np.where(np.isfinite(values), values, -np.inf)


def check_ascent(state: Ascent, objectives: np.ndarray, component: Component) -> None:
    """Raise where the ascent is wrong."""
    fall = np.asarray(state.fall)
    if np.any(fall > 0):
        worst = int(np.argmax(fall))
        raise RuntimeError(
            f"the objective of restart {worst} fell by {fall[worst]:.3g} nats, which coordinate ascent cannot "
            f"do: update, coefficients and kl of the component {component.name!r} do not belong together."
        )
    failed = int(np.sum(~np.isfinite(objectives)))
    if failed == len(objectives):
        raise FloatingPointError(
            f"no restart of {component.name!r} kept a finite objective in {state.objective.dtype}: components "
            "may be too narrow for their distance. Standardise the columns, widen the prior, or let jax have 64 "
            "bits."
        )
    if failed:
        warnings.warn(f"{failed} of {len(objectives)} restarts did not keep a finite objective.", stacklevel=3)


@partial(jax.jit, static_argnames="component")
def proposals(
    keys: Array,
    component: Component,
    problem: Problem,
    factors: Factors,
    rows: Array,
    weight: Array,
    blocks: Blocks,
) -> Factors:
    """One move a key, with leading axis R."""
    return jax.lax.map(lambda key: propose(key, component, problem, factors, rows, weight, blocks), keys)


def default_tolerance(tolerance: float | None, dtype: Any) -> float:
    """The tolerance per datum.

    Raises:
        ValueError: If it is negative or not finite.
    """
    if tolerance is None:
        return 1e-8 if dtype == jnp.float64 else 1e-6
    value = float(tolerance)
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"tolerance must be finite and not negative, got {tolerance}.")
    return value


@partial(jax.jit, static_argnames="component")
def _advance(
    component: Component,
    problem: Problem,
    blocks: Blocks,
    state: Ascent,
    until: Array,
    tolerance: Array,
    total: Array,
) -> Ascent:
    steps = tempered_cavi(component, problem, blocks)
    return advance(steps, state, until, tolerance * total, rounding_error(problem.base, total, problem.alpha))
