r"""Stochastic optimisation that knows when it has arrived: Adam with a step size that halves, and averages.

At a constant step size the iterates of Adam wander around the optimum. Their average is off by its noise, which
falls with the number of steps, and by a bias that falls with the step size. Both are estimated in nats, from
values of the objective with common random numbers. With a_1, ..., a_B the averages of B batches of iterates, and
a their average,

.. math:: \text{noise} = \frac{1}{B - 1} \Big(\frac1B \sum_b F(a_b) - F(a)\Big)

is the expected gap F(a) - min F where batches are independent and F is quadratic, as linear terms cancel. The
bias is in proportion to the step size, and its price to the square: halving the step size leaves a third of what
it changed. While F still falls from the first batch of a stage to the last, the step size stays, and the next
stage is longer. This is the scheme of Dhaka20 and Welandawe22, averages of iterates and halved steps, with
criteria in nats instead of R-hats of single parameters.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries.optimizers import adam

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.programs import compile_once
from numpyro_tempered.core.typing import Array, PyTree

NUM_BATCHES = 4
# Steps of one compiled loop, and loops of a batch in the first stage.
CHUNK = 50
FIRST_BATCH = 2
# Draws for values of the objective.
NUM_VALUES = 256
# Problems of at most this many parameters run side by side; the factors of larger ones, one for each, cost more.
SIDE_BY_SIDE = 2000
# The share of the steps of a stage that may be rejected: to leave draws out is to select among them.
MOST_REJECTED = 0.05
# The largest standard error of a value, in roots of the number of coordinates: of a start that is worth its
# steps, and of an end. A Gaussian near its optimum has log-ratios that scatter by about one such root.
WORST_START, WORST_END = 100.0, 5.0
# Adam's memory of squared gradients: far shorter than a stage, so that a far start is forgotten.
DECAY = 0.99

# (z, rng_key) -> a scalar, unbiased for the objective.
Objective = Callable[[PyTree, Array], Array]
# The same of one of several problems, which have inputs.
ObjectiveOf = Callable[[PyTree, Array, PyTree], Array]


class Report(Protocol):
    """What is told of steps."""

    def __call__(self, num_steps: int, /) -> object:
        """Take note of this number of steps more."""


class Settled(NamedTuple):
    """Where a run ended, and how near it came to the optimum; of K runs side by side with a leading axis.

    Attributes:
        z: The averaged iterate of the lowest value, or the start.
        value: The objective there; comparable between runs of one ``value_key``.
        losses: Of all steps, shape ``(num_steps,)``; NaN where a gradient was not finite, which moves nothing.
        converged: Whether ``noise + bias`` is at most the tolerance.
        noise: By how much the noise of the averaged iterate lets it miss the optimum.
        bias: By how much the step size does; infinite where two stages did not settle.
        fall: By how much the objective fell between the first and the last batch of the last stage.
        step_size: That of the last stage.
    """

    z: PyTree
    value: np.ndarray
    losses: np.ndarray
    converged: np.ndarray
    noise: np.ndarray
    bias: np.ndarray
    fall: np.ndarray
    step_size: np.ndarray


class _Stage(NamedTuple):
    """One step size: its averaged iterates, the values there, and how batches scatter; of K runs."""

    average: PyTree
    value: np.ndarray
    noise: np.ndarray
    fall: np.ndarray
    is_falling: np.ndarray


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


def minimise(
    objective: Objective,
    start: PyTree,
    rng_key: Array,
    *,
    value_key: Array,
    step_size: float,
    num_steps: int,
    tolerance: float,
    report: Report | None = None,
) -> Settled:
    """Minimise the expectation of a random objective.

    Args:
        objective: The objective.
        start: A pytree of arrays.
        rng_key: Key of the steps.
        value_key: Key of the values.
        step_size: The first step size, in the units of ``start``.
        num_steps: The most steps.
        tolerance: On the estimated gap to the optimum, in the units of the objective.
        report: What is told of the steps.

    Returns:
        Where the run ended, as :class:`Settled`.
    """
    starts = jax.tree.map(lambda leaf: leaf[None], start)
    descent = compile_descent(lambda z, key, _: objective(z, key), starts, (), rng_key, num_steps)
    settled = descend(
        descent,
        starts,
        (),
        rng_key,
        value_key=value_key,
        step_size=step_size,
        num_steps=num_steps,
        tolerance=tolerance,
        report=report,
    )
    return select(settled, 0)


def select(settled: Settled, k: int) -> Settled:
    """The k-th of several runs."""
    return jax.tree.map(lambda leaf: leaf[k], settled)


def descend(
    descent: Descent,
    starts: PyTree,
    inputs: PyTree,
    rng_key: Array,
    *,
    value_key: Array,
    step_size: float,
    num_steps: int,
    tolerance: float,
    report: Report | None = None,
) -> Settled:
    """Minimise K objectives side by side, until all have settled.

    All take the same number of steps of the same sizes, with the same draws, so that what is compared along a
    grid shares its noise.

    Args:
        descent: From :func:`compile_descent`.
        starts: A pytree of arrays ``(K, ...)``.
        inputs: What the problems differ in, likewise.
        rng_key: Key of the steps.
        value_key: Key of the values.
        step_size: The first step size, in the units of ``starts``.
        num_steps: The most steps.
        tolerance: On the estimated gaps to the optima, in the units of the objective.
        report: What is told of the steps.

    Returns:
        A :class:`Settled` with a leading axis of K.
    """
    length, left, batch = descent.length, num_steps // descent.length, FIRST_BATCH
    num_problems = len(jax.tree.leaves(starts)[0])
    state = (jnp.zeros(num_problems, jnp.int32), adam(step_size)[0](starts))
    losses: list[Array] = []

    def advance(loops: int) -> PyTree:
        """The average of the iterates over some loops."""
        nonlocal state, rng_key, left
        averages = []
        for _ in range(loops):
            rng_key, key = jax.random.split(rng_key)
            state, average, chunk_losses = descent.chunk(state, key, jnp.asarray(step_size, float), inputs)
            averages.append(average)
            losses.append(chunk_losses)
            if report is not None:
                report(length)
        left -= loops
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / loops, *averages)

    unknown = np.full(num_problems, np.inf)
    stages: list[_Stage] = []
    settled, bias, size, first = None, unknown, step_size, unknown
    while not (settled and np.all(settled.noise + bias <= tolerance)):
        # What is left of the steps may not do for a whole stage, but half a stage is worth having.
        loops = min(batch, left // (NUM_BATCHES + 1))
        if loops == 0 or (stages and 2 * loops < batch):
            break
        advance(loops)
        batches = [advance(loops) for _ in range(NUM_BATCHES)]
        stage, first = _judge(descent, batches, starts, inputs, value_key, tolerance)
        rejected = np.mean(np.isnan(np.concatenate(losses[-NUM_BATCHES * loops :], axis=1)), axis=1)
        stage = stage._replace(is_falling=stage.is_falling | (rejected > MOST_REJECTED))
        stages.append(stage)
        size, batch = step_size, 2 * batch
        if np.any(stage.is_falling):
            settled = None
            continue
        bias = unknown if settled is None else np.abs(settled.value - stage.value) / 3.0
        settled, step_size = stage, 0.5 * step_size
    if not stages:
        nothing = np.full(num_problems, np.nan)
        stages = [_Stage(advance(max(left, 1)), nothing, unknown, unknown, unknown > 0)]
    last = stages[-1]
    converged = (last.noise + bias <= tolerance) if settled is not None else np.zeros(num_problems, bool)
    z, value = _best(stages, starts, first)
    history = np.concatenate(jax.device_get(losses), axis=1).astype(np.float64)
    sizes = np.full(num_problems, size)
    bias = bias if settled is not None else unknown
    return Settled(z, value, history, converged, last.noise, bias, last.fall, sizes)


def _best(stages: list[_Stage], starts: PyTree, first: np.ndarray) -> tuple[PyTree, np.ndarray]:
    """Of each run the average of the stage with the lowest value, or the start."""
    values = np.stack([np.where(np.isnan(stage.value), np.inf, stage.value) for stage in stages])
    best = np.argmin(values, axis=0)
    # Where nothing has a value, the steps are all there is.
    is_start = first < values.min(axis=0)
    runs = np.arange(len(best))
    averages = jax.tree.map(lambda *leaves: jnp.stack(leaves)[best, runs], *[stage.average for stage in stages])

    def pick(start: Array, average: Array) -> Array:
        return jnp.where(is_start.reshape(-1, *(1,) * (start.ndim - 1)), start, average)

    value = np.stack([stage.value for stage in stages])[best, runs]
    return jax.tree.map(pick, starts, averages), np.where(is_start, first, value)


def _judge(
    descent: Descent, batches: list[PyTree], starts: PyTree, inputs: PyTree, rng_key: Array, tolerance: float
) -> tuple[_Stage, np.ndarray]:
    """What the batches of a stage say of each run, and the values at the starts."""
    average = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / NUM_BATCHES, *batches)
    points = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *batches, average, starts)
    draws = np.asarray(descent.values(points, rng_key, inputs), np.float64)
    *each, value, first = np.mean(draws, axis=2).T
    noise = np.maximum(np.mean(each, axis=0) - value, 0.0) / (NUM_BATCHES - 1)
    falls = draws[:, 0] - draws[:, NUM_BATCHES - 1]
    fall, error = np.mean(falls, axis=1), np.std(falls, axis=1) / math.sqrt(falls.shape[1])
    # Batches scatter by NUM_BATCHES times the noise of their average. What is NaN counts as falling.
    is_settled = fall <= tolerance + NUM_BATCHES * noise + 2.0 * error
    is_falling = ~(is_settled & _is_known(draws[:, NUM_BATCHES], starts, WORST_END))
    return _Stage(average, value, noise, fall, is_falling), first


def is_worth_its_steps(descent: Descent, starts: PyTree, inputs: PyTree, rng_key: Array) -> np.ndarray:
    """Of each run whether its start has a value at all, as none that is a plateau of the density has."""
    points = jax.tree.map(lambda leaf: jnp.stack([leaf] * (NUM_BATCHES + 2), axis=1), starts)
    draws = np.asarray(descent.values(points, rng_key, inputs), np.float64)
    return _is_known(draws[:, 0], starts, WORST_START)


def _is_known(draws: np.ndarray, starts: PyTree, worst: float) -> np.ndarray:
    """Whether the mean of draws ``(K, N)`` is finite, and its standard error no larger than it may be."""
    num_coordinates = sum(leaf[0].size for leaf in jax.tree.leaves(starts))
    with np.errstate(all="ignore"):
        error = np.std(draws, axis=1) / math.sqrt(draws.shape[1])
    return error <= worst * math.sqrt(1.0 + num_coordinates)


def compile_descent(
    objective: ObjectiveOf, starts: PyTree, inputs: PyTree, rng_key: Array, num_steps: int
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
            state = jax.tree.map(lambda new, old: jnp.where(finite, new.astype(old.dtype), old), proposal, state)
            total = jax.tree.map(jnp.add, total, get(state))
            return (number + finite, state, total), jnp.where(finite, loss, jnp.nan)

        number, state = state
        zeros = jax.tree.map(jnp.zeros_like, get(state))
        carry, each = jax.lax.scan(step, (number, state, zeros), jax.random.split(rng_key, length))
        return carry[:2], jax.tree.map(lambda leaf: leaf / length, carry[2]), each

    def values(points: PyTree, rng_key: Array, inputs: PyTree) -> Array:
        keys = jax.random.split(rng_key, NUM_VALUES)
        # Point by point: a triangular factor for each draw costs far more than one for all.
        return jax.lax.map(lambda z: map_batches(lambda key: objective(z, key, inputs), keys, 32), points)

    def chunks(state: PyTree, rng_key: Array, step_size: Array, inputs: PyTree) -> tuple:
        return _over_problems(lambda state, inputs: chunk(state, rng_key, step_size, inputs), state, inputs)

    def all_values(points: PyTree, rng_key: Array, inputs: PyTree) -> Array:
        return _over_problems(lambda points, inputs: values(points, rng_key, inputs), points, inputs)

    num_problems = len(jax.tree.leaves(starts)[0])
    state = (jnp.zeros(num_problems, jnp.int32), adam(1.0)[0](starts))
    points = jax.tree.map(lambda leaf: jnp.stack([leaf] * (NUM_BATCHES + 2), axis=1), starts)
    return Descent(
        compile_once(chunks, state, rng_key, jnp.ones(()), inputs),
        compile_once(all_values, points, rng_key, inputs),
        length,
    )


def _over_problems(function: Callable[..., PyTree], *parts: PyTree) -> PyTree:
    """A function of one problem, over the leading axis of its parts."""
    leaves = jax.tree.leaves(parts[0])
    num_problems = len(leaves[0])
    if num_problems == 1:
        one = function(*jax.tree.map(lambda leaf: leaf[0], parts))
        return jax.tree.map(lambda leaf: leaf[None], one)
    if sum(leaf.size for leaf in leaves) <= SIDE_BY_SIDE * num_problems:
        return jax.vmap(function)(*parts)
    return jax.lax.map(lambda part: function(*part), parts)
