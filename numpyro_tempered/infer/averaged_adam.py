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
import numpy as np
from jax.example_libraries.optimizers import adam

from numpyro_tempered.core import Array, PyTree, at_index, doubles, run_program
from numpyro_tempered.infer.descent_programs import (
    NUM_BATCHES,
    Descent,
    as_float,
    compile_descent,
)

# Loops of a batch in the first stage.
FIRST_BATCH = 2
# The share of the steps of a stage that may be rejected: to leave draws out is to select among them.
MOST_REJECTED = 0.05
# The largest standard error of a value, in roots of the number of coordinates: of a start that is worth its
# steps, and of an end. A Gaussian near its optimum has log-ratios that scatter by about one such root.
WORST_START, WORST_END = 100.0, 5.0

# (z, rng_key) -> a scalar, unbiased for the objective.
Objective = Callable[[PyTree, Array], Array]


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
    descent = compile_descent(
        lambda z, key, _: objective(z, key), starts, (), rng_key, num_steps
    )
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
    return at_index(settled, k)


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
    quorum: float = 1.0,
    report: Report | None = None,
) -> Settled:
    """Minimise K objectives side by side, until all have settled, or a share of them.

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
        quorum: The share of the runs that must have settled for the next step size, and converged for the end:
            of hundreds, some look unsettled at every stage by chance. Those that have not are told by
            ``converged``.
        report: What is told of the steps.

    Returns:
        A :class:`Settled` with a leading axis of K.
    """
    length, left, batch = descent.length, num_steps // descent.length, FIRST_BATCH
    # On the host, where nothing is compiled, is all that is done between the programs.
    starts = jax.device_get(starts)
    num_problems = len(jax.tree.leaves(starts)[0])
    state = (np.zeros(num_problems, np.int32), run_program(adam(1.0)[0], starts))
    losses: list[Array] = []

    def advance(loops: int) -> PyTree:
        """The average of the iterates over some loops."""
        nonlocal state, rng_key, left
        averages = []
        for _ in range(loops):
            rng_key, key = jax.random.split(rng_key)
            state, average, chunk_losses = descent.chunk(
                state, key, as_float(step_size), inputs
            )
            averages.append(average)
            losses.append(chunk_losses)
            if report is not None:
                report(length)
        left -= loops
        return _mean(jax.device_get(averages))

    unknown = np.full(num_problems, np.inf)
    stages: list[_Stage] = []
    settled, bias, size, first = None, unknown, step_size, unknown
    while not (settled and np.mean(settled.noise + bias <= tolerance) >= quorum):
        # What is left of the steps may not do for a whole stage, but half a stage is worth having.
        loops = min(batch, left // (NUM_BATCHES + 1))
        if loops == 0 or (stages and 2 * loops < batch):
            break
        advance(loops)
        batches = [advance(loops) for _ in range(NUM_BATCHES)]
        stage, first = _judge(descent, batches, starts, inputs, value_key, tolerance)
        rejected = np.mean(
            np.isnan(np.concatenate(losses[-NUM_BATCHES * loops :], axis=1)), axis=1
        )
        stage = stage._replace(is_falling=stage.is_falling | (rejected > MOST_REJECTED))
        stages.append(stage)
        size, batch = step_size, 2 * batch
        if np.mean(~stage.is_falling) < quorum:
            settled = None
            continue
        bias = unknown if settled is None else np.abs(settled.value - stage.value) / 3.0
        bias = np.where(
            stage.is_falling | (settled is not None and settled.is_falling),
            np.inf,
            bias,
        )
        settled, step_size = stage, 0.5 * step_size
    if not stages:
        nothing = np.full(num_problems, np.nan)
        stages = [_Stage(advance(max(left, 1)), nothing, unknown, unknown, unknown > 0)]
    last = stages[-1]
    converged = (
        (last.noise + bias <= tolerance)
        if settled is not None
        else np.zeros(num_problems, bool)
    )
    z, value = _best(stages, starts, first)
    history = np.concatenate(jax.device_get(losses), axis=1).astype(np.float64)
    sizes = np.full(num_problems, size)
    bias = bias if settled is not None else unknown
    return Settled(z, value, history, converged, last.noise, bias, last.fall, sizes)


def _best(
    stages: list[_Stage], starts: PyTree, first: np.ndarray
) -> tuple[PyTree, np.ndarray]:
    """Of each run the average of the stage with the lowest value, or the start."""
    values = np.stack(
        [np.where(np.isnan(stage.value), np.inf, stage.value) for stage in stages]
    )
    best = np.argmin(values, axis=0)
    # Where nothing has a value, the steps are all there is.
    is_start = first < values.min(axis=0)
    runs = np.arange(len(best))
    averages = jax.tree.map(
        lambda *leaves: np.stack(leaves)[best, runs],
        *[stage.average for stage in stages],
    )

    def pick(start: np.ndarray, average: np.ndarray) -> np.ndarray:
        return np.where(is_start.reshape(-1, *(1,) * (start.ndim - 1)), start, average)

    value = np.stack([stage.value for stage in stages])[best, runs]
    return jax.tree.map(pick, starts, averages), np.where(is_start, first, value)


def _judge(
    descent: Descent,
    batches: list[PyTree],
    starts: PyTree,
    inputs: PyTree,
    rng_key: Array,
    tolerance: float,
) -> tuple[_Stage, np.ndarray]:
    """What the batches of a stage say of each run, and the values at the starts."""
    average = _mean(batches)
    points = jax.tree.map(
        lambda *leaves: np.stack(leaves, axis=1), *batches, average, starts
    )
    draws = doubles(descent.values(points, rng_key, inputs))
    *each, value, first = np.mean(draws, axis=2).T
    noise = np.maximum(np.mean(each, axis=0) - value, 0.0) / (NUM_BATCHES - 1)
    falls = draws[:, 0] - draws[:, NUM_BATCHES - 1]
    fall, error = (
        np.mean(falls, axis=1),
        np.std(falls, axis=1) / math.sqrt(falls.shape[1]),
    )
    # Batches scatter by NUM_BATCHES times the noise of their average. What is NaN counts as falling.
    is_settled = fall <= tolerance + NUM_BATCHES * noise + 2.0 * error
    is_falling = ~(is_settled & _is_known(draws[:, NUM_BATCHES], starts, WORST_END))
    return _Stage(average, value, noise, fall, is_falling), first


def is_worth_its_steps(
    descent: Descent, starts: PyTree, inputs: PyTree, rng_key: Array
) -> np.ndarray:
    """Of each run whether its start has a value at all, as none that is a plateau of the density has."""
    points = jax.tree.map(
        lambda leaf: np.stack([leaf] * (NUM_BATCHES + 2), axis=1),
        jax.device_get(starts),
    )
    draws = doubles(descent.values(points, rng_key, inputs))
    return _is_known(draws[:, 0], starts, WORST_START)


def _mean(trees: list[PyTree]) -> PyTree:
    """The mean of trees of arrays on the host."""
    return jax.tree.map(
        lambda *leaves: np.mean(leaves, axis=0, dtype=leaves[0].dtype), *trees
    )


def _is_known(draws: np.ndarray, starts: PyTree, worst: float) -> np.ndarray:
    """Whether the mean of draws ``(K, N)`` is finite, and its standard error no larger than it may be."""
    num_coordinates = sum(leaf.size // len(leaf) for leaf in jax.tree.leaves(starts))
    with np.errstate(all="ignore"):
        error = np.std(draws, axis=1) / math.sqrt(draws.shape[1])
    return error <= worst * math.sqrt(1.0 + num_coordinates)
