"""The programs of stochastic descents, of several problems side by side."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries.optimizers import adam

from numpyro_tempered.core import Array, PyTree, at_index, compile_once, map_batches

# Averages of iterates that a stage compares.
NUM_BATCHES = 4
# Steps of one compiled loop.
CHUNK = 50
# About how many loops a fit takes, and how many stages.
NUM_RUNS, NUM_STAGES = 100, 5
# Draws for values of the objective.
NUM_VALUES = 256
# Problems of at most this many parameters run side by side; the factors of larger ones, one for each, cost more.
SIDE_BY_SIDE = 2000
# Adam's memory of squared gradients: far shorter than a stage, so that a far start is forgotten.
DECAY = 0.99

# (z, rng_key, inputs) -> a scalar, unbiased for the objective of one of several problems, which differ in inputs.
ObjectiveOf = Callable[[PyTree, Array, PyTree], Array]


class Descent(NamedTuple):
    """The compiled parts of K runs side by side.

    Attributes:
        chunk: ``(state, rng_key, step_size, inputs) -> (state, mean, losses)`` over a few steps.
        values: ``(points (K, P, ...), rng_key, inputs) -> (K, P, NUM_VALUES)``, the objective with draws.
        length: Steps of a chunk.
    """

    chunk: Callable[..., tuple]
    values: Callable[..., Array]
    length: int


def compile_descent(
    objective: ObjectiveOf,
    starts: PyTree,
    inputs: PyTree,
    rng_key: Array,
    num_steps: int,
) -> Descent:
    """The programs of K objectives, for runs of at most ``num_steps``."""
    length = max(1, min(CHUNK, num_steps // (NUM_BATCHES + 1)))

    def chunk(state: PyTree, rng_key: Array, step_size: Array, inputs: PyTree) -> tuple:
        _, update, get = adam(step_size, b2=DECAY)

        def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
            number, state, total = carry
            loss, grads = jax.value_and_grad(objective)(get(state), key, inputs)
            finite = jnp.isfinite(loss)
            for leaf in jax.tree.leaves(grads):
                finite &= jnp.all(jnp.isfinite(leaf))
            proposal = update(number, grads, state)
            state = jax.tree.map(
                lambda new, old: jnp.where(finite, new.astype(old.dtype), old),
                proposal,
                state,
            )
            total = jax.tree.map(jnp.add, total, get(state))
            return (number + finite, state, total), jnp.where(finite, loss, jnp.nan)

        number, state = state
        zeros = jax.tree.map(jnp.zeros_like, get(state))
        carry, each = jax.lax.scan(
            step, (number, state, zeros), jax.random.split(rng_key, length)
        )
        return carry[:2], jax.tree.map(lambda leaf: leaf / length, carry[2]), each

    def values(points: PyTree, rng_key: Array, inputs: PyTree) -> Array:
        keys = jax.random.split(rng_key, NUM_VALUES)
        # Point by point: a triangular factor for each draw costs far more than one for all.
        return jax.lax.map(
            lambda z: map_batches(lambda key: objective(z, key, inputs), keys, 32),
            points,
        )

    def chunks(
        state: PyTree, rng_key: Array, step_size: Array, inputs: PyTree
    ) -> tuple:
        return _over_problems(
            lambda state, inputs: chunk(state, rng_key, step_size, inputs),
            state,
            inputs,
        )

    def all_values(points: PyTree, rng_key: Array, inputs: PyTree) -> Array:
        return _over_problems(
            lambda points, inputs: values(points, rng_key, inputs), points, inputs
        )

    num_problems = len(jax.tree.leaves(starts)[0])
    state = (np.zeros(num_problems, np.int32), jax.eval_shape(adam(1.0)[0], starts))
    shapes = [
        (leaf.shape[0], NUM_BATCHES + 2, *leaf.shape[1:])
        for leaf in jax.tree.leaves(starts)
    ]
    points = jax.tree.unflatten(
        jax.tree.structure(starts),
        [
            jax.ShapeDtypeStruct(s, leaf.dtype)
            for s, leaf in zip(shapes, jax.tree.leaves(starts), strict=True)
        ],
    )
    return Descent(
        compile_once(
            chunks, state, rng_key, as_float(1.0), inputs, ahead=True, num_runs=NUM_RUNS
        ),
        compile_once(
            all_values, points, rng_key, inputs, ahead=True, num_runs=NUM_STAGES
        ),
        length,
    )


def _over_problems(function: Callable[..., PyTree], *parts: PyTree) -> PyTree:
    """A function of one problem, over the leading axis of its parts."""
    leaves = jax.tree.leaves(parts[0])
    num_problems = len(leaves[0])
    if num_problems == 1:
        one = function(*at_index(parts, 0))
        return jax.tree.map(lambda leaf: leaf[None], one)
    if sum(leaf.size for leaf in leaves) <= SIDE_BY_SIDE * num_problems:
        return jax.vmap(function)(*parts)
    return jax.lax.map(lambda part: function(*part), parts)


def as_float(number: float) -> np.ndarray:
    """A number in the precision that jax has for them."""
    return np.asarray(number, jax.dtypes.canonicalize_dtype(float))
