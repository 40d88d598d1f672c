"""Passes over data in chunks: their sums, and the objectives of a fit."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import CompensatedSum, double_precision
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Ascent, record, rounding_error
from numpyro_tempered.mixtures.blocks import make_blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.evidence import Bound, draw_coefficients, gap_at
from numpyro_tempered.mixtures.factors import Factors, Problem, coefficients, entropy, objective, update
from numpyro_tempered.mixtures.prepare import as_dtype
from numpyro_tempered.mixtures.sweep import Coefficients, Sums, base_sum, sweep

Pass = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]


def sum_over(add: Callable[..., Any], blocks: Iterable[tuple[np.ndarray, np.ndarray]], *arguments: Any) -> Any:
    """The sums that ``add`` makes of each block, compensated from block to block.

    Args:
        add: Compiled; ``(*arguments, running, rows, weight)`` to the running sums, None before the first.
        blocks: Rows and weights, all of one shape.
        *arguments: For ``add``.
    """
    running: Any = None
    for rows, weight in blocks:
        # A reader that is faster than the sums would fill the memory with blocks that wait.
        jax.block_until_ready(running)
        running = add(*arguments, running, jnp.asarray(rows), jnp.asarray(weight))
    return _value(running)


def include(running: Any, terms: Any) -> Any:
    """Running sums with one more term each."""
    if running is None:
        return jax.tree.map(CompensatedSum.start, terms)
    return jax.tree.map(CompensatedSum.add, running, terms, is_leaf=_is_sum)


@jax.jit
def _value(running: Any) -> Any:
    return jax.tree.map(lambda total: total.value + total.error, running, is_leaf=_is_sum)


def _is_sum(value: Any) -> bool:
    return isinstance(value, CompensatedSum)


@partial(jax.jit, static_argnames=("component", "size"))
def add_sums(
    component: Component, size: int, mixtures: Coefficients, running: Any, rows: Array, weight: Array
) -> Any:
    """The sums of a block for each of R mixtures."""
    blocks = make_blocks(rows, weight, size)
    return include(running, jax.vmap(lambda mixture: sweep(component, mixture, blocks))(mixtures))


@partial(jax.jit, static_argnames=("component", "size"))
def add_base(component: Component, size: int, running: Any, rows: Array, weight: Array) -> Any:
    """The weighted sum of log h of a block."""
    return include(running, base_sum(component, make_blocks(rows, weight, size)))


@partial(jax.jit, static_argnames=("component", "size"))
def add_final(
    component: Component,
    size: int,
    mixture: Coefficients,
    draws: Coefficients,
    running: Any,
    rows: Array,
    weight: Array,
) -> Any:
    """The sums of a block, those of log h, and log L of S draws without log h, in double precision."""
    blocks = make_blocks(rows.astype(jnp.float64), weight.astype(jnp.float64), size)
    log_likelihoods = jax.lax.map(lambda draw: sweep(component, draw, blocks).log_sum, draws)
    return include(running, (sweep(component, mixture, blocks), base_sum(component, blocks), log_likelihoods))


@partial(jax.jit, static_argnames="component")
def all_coefficients(component: Component, factors: Factors) -> Coefficients:
    """Of factors with leading axis R."""
    return jax.vmap(lambda each: coefficients(component, each))(factors)


@partial(jax.jit, static_argnames="component")
def all_objectives(component: Component, problem: Problem, factors: Factors, sums: Sums) -> Array:
    """Of factors and sums with leading axis R."""
    return jax.vmap(lambda q, s: objective(component, problem, q, s))(factors, sums)


@partial(jax.jit, static_argnames="component")
def after_pass(
    component: Component, problem: Problem, state: Ascent, sums: Sums, tolerance: Array, total: Array
) -> Ascent:
    """The state of the ascent after a pass over the data with these sums, leading axis R."""
    value = all_objectives(component, problem, state.following, sums)
    following = jax.vmap(lambda each: update(component, problem, each))(sums)
    return record(state, value, following, tolerance * total, rounding_error(problem.base, total, problem.alpha))


def evaluate_chunks(
    rng_key: Array,
    component: Component,
    problem: Problem,
    factors: Factors,
    read: Pass,
    size: int,
    num_samples: int,
) -> tuple[float, np.ndarray, Bound]:
    """F, the counts and E1 at given factors, in double precision, in one pass."""
    with double_precision():
        problem, factors = as_dtype((problem, factors), jnp.float64)
        mixture, draws = _draws(rng_key, component, factors, num_samples)
        sums, base, log_likelihoods = sum_over(add_final, read(), component, size, mixture, draws)
        value, gaps = _objective_and_gaps(
            component, problem._replace(base=base), factors, sums, draws, log_likelihoods
        )
        return float(value), np.asarray(sums.counts), Bound.of(float(value), np.asarray(gaps))


@partial(jax.jit, static_argnames=("component", "num_samples"))
def _draws(
    rng_key: Array, component: Component, factors: Factors, num_samples: int
) -> tuple[Coefficients, Coefficients]:
    keys = jax.random.split(rng_key, num_samples)
    return coefficients(component, factors), jax.lax.map(
        lambda key: draw_coefficients(key, component, factors), keys
    )


@partial(jax.jit, static_argnames="component")
def _objective_and_gaps(
    component: Component,
    problem: Problem,
    factors: Factors,
    sums: Sums,
    draws: Coefficients,
    log_likelihoods: Array,
) -> tuple[Array, Array]:
    spread = entropy(component, factors, sums)
    gaps = jax.vmap(lambda draw, value: gap_at(problem, draw, sums, spread, value))(draws, log_likelihoods)
    return objective(component, problem, factors, sums), gaps
