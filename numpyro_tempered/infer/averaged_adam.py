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
# Adam's memory of squared gradients: far shorter than a stage, so that a far start is forgotten.
DECAY = 0.99

# (z, rng_key) -> a scalar, unbiased for the objective.
Objective = Callable[[PyTree, Array], Array]


class Report(Protocol):
    """What is told of steps."""

    def __call__(self, num_steps: int, /) -> object:
        """Take note of this number of steps more."""


class Settled(NamedTuple):
    """Where a run ended, and how near it came to the optimum.

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
    value: float
    losses: np.ndarray
    converged: bool
    noise: float
    bias: float
    fall: float
    step_size: float


class _Stage(NamedTuple):
    """One step size: its averaged iterate, the value there, and how its batches scatter."""

    average: PyTree
    value: float
    noise: float
    fall: float
    is_falling: bool


class _Programs(NamedTuple):
    """The compiled parts of a run.

    Attributes:
        chunk: ``(state, rng_key, step_size) -> (state, mean, losses)`` over a few steps.
        values: ``(points with a leading axis P, rng_key) -> (P, NUM_VALUES)``, the objective with draws.
    """

    chunk: Callable[..., tuple]
    values: Callable[..., Array]


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
    length = max(1, min(CHUNK, num_steps // (NUM_BATCHES + 1)))
    run, left, batch = _compile(objective, start, rng_key, length), num_steps // length, FIRST_BATCH
    state = (jnp.zeros((), jnp.int32), adam(step_size)[0](start))
    losses: list[Array] = []

    def advance(loops: int) -> PyTree:
        """The average of the iterates over some loops."""
        nonlocal state, rng_key, left
        averages = []
        for _ in range(loops):
            rng_key, key = jax.random.split(rng_key)
            state, average, chunk_losses = run.chunk(state, key, jnp.asarray(step_size, float))
            averages.append(average)
            losses.append(chunk_losses)
            if report is not None:
                report(length)
        left -= loops
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / loops, *averages)

    stages: list[_Stage] = []
    settled, bias, size = None, math.inf, step_size
    while not (settled and settled.noise + bias <= tolerance):
        # What is left of the steps may not do for a whole stage, but half a stage is worth having.
        loops = min(batch, left // (NUM_BATCHES + 1))
        if loops == 0 or (stages and 2 * loops < batch):
            break
        advance(loops)
        stage, first = _judge(run, [advance(loops) for _ in range(NUM_BATCHES)], start, value_key, tolerance)
        stages.append(stage)
        size, batch = step_size, 2 * batch
        if stage.is_falling:
            settled = None
            continue
        bias = math.inf if settled is None else abs(settled.value - stage.value) / 3.0
        settled, step_size = stage, 0.5 * step_size
    if not stages:
        stages, first = [_Stage(advance(max(left, 1)), math.nan, math.inf, math.inf, True)], math.inf
    best = min(stages, key=lambda stage: math.inf if math.isnan(stage.value) else stage.value)
    z, value = (best.average, best.value) if not best.value > first else (start, first)
    noise, fall = stages[-1].noise, stages[-1].fall
    converged = settled is not None and noise + bias <= tolerance
    history = np.concatenate(jax.device_get(losses)).astype(np.float64)
    return Settled(z, value, history, converged, noise, bias, fall, size)


def _judge(
    run: _Programs, batches: list[PyTree], start: PyTree, rng_key: Array, tolerance: float
) -> tuple[_Stage, float]:
    """What the batches of a stage say, and the value at the start."""
    average = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / NUM_BATCHES, *batches)
    points = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches, average, start)
    draws = np.asarray(run.values(points, rng_key), np.float64)
    *each, value, first = np.mean(draws, axis=1)
    noise = max(float(np.mean(each) - value), 0.0) / (NUM_BATCHES - 1)
    falls = draws[0] - draws[NUM_BATCHES - 1]
    fall, error = float(np.mean(falls)), float(np.std(falls)) / math.sqrt(len(falls))
    # Batches scatter by NUM_BATCHES times the noise of their average. What is NaN counts as falling.
    is_falling = not fall <= tolerance + NUM_BATCHES * noise + 2.0 * error
    return _Stage(average, float(value), noise, fall, is_falling), float(first)


def _compile(objective: Objective, start: PyTree, rng_key: Array, length: int) -> _Programs:
    """The programs of an objective; one loop takes ``length`` steps."""

    def chunk(state: PyTree, rng_key: Array, step_size: Array) -> tuple:
        _, update, get = adam(step_size, b2=DECAY)

        def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
            number, state, total = carry
            loss, grads = jax.value_and_grad(objective)(get(state), key)
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

    def values(points: PyTree, rng_key: Array) -> Array:
        keys = jax.random.split(rng_key, NUM_VALUES)
        # Point by point: a triangular factor for each draw costs far more than one for all.
        return jax.lax.map(lambda z: map_batches(lambda key: objective(z, key), keys, 32), points)

    state = (jnp.zeros((), jnp.int32), adam(1.0)[0](start))
    points = jax.tree.map(lambda leaf: jnp.stack([leaf] * (NUM_BATCHES + 2)), start)
    return _Programs(compile_once(chunk, state, rng_key, jnp.ones(())), compile_once(values, points, rng_key))
