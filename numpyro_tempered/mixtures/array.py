"""Rows in memory as a source of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, Ascent, advance, double_precision, programs
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.ascent import (
    Algorithm,
    Limits,
    PassState,
    Summary,
    step_of,
)
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import coefficients
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.source import NextSteps, Setting, Starts
from numpyro_tempered.mixtures.starts import Assign, split_components, start_data

T = TypeVar("T")
P = TypeVar("P")
# Passes between two updates of the progress bar.
STRIDE = 20
# Starts that one program ascends side by side; it ends when the last of them does.
NUM_TOGETHER = 8


class ArraySource(NamedTuple):
    """Rows in memory, on one device or in shards over several.

    Attributes:
        data: The rows.
        blocks: The same rows in blocks.
        fill: Whether components and starts are filled up to numbers that many problems share.
    """

    data: MixtureData
    blocks: sweep.Blocks
    fill: bool

    @property
    def is_large(self) -> bool:
        """Whether a pass takes longer than what is compiled for it may cost."""
        return len(self.data.rows) > sweep.FEW_ROWS

    def capacity(self, num_components: int) -> int:
        """Components of the arrays of a mixture of K: those beyond K fill up."""
        return (
            sweep.next_power(num_components, NUM_TOGETHER)
            if self.fill
            else num_components
        )

    def groups(self, num_starts: int) -> list[np.ndarray]:
        """The numbers of the starts that are ascended side by side, all groups of one size; -1 fills up."""
        number = -(-num_starts // NUM_TOGETHER)
        size = (
            min(sweep.next_power(num_starts), NUM_TOGETHER)
            if self.fill
            else -(-num_starts // number)
        )
        numbers = np.full(number * size, -1, np.int32)
        numbers[:num_starts] = np.arange(num_starts)
        return list(numbers.reshape(number, size))

    def reduce(self, summary: Summary, *arguments: Any) -> Any:
        """What a summary makes of all rows."""
        programs.wait_for(_reduce)
        return _reduce(
            self.blocks, arguments, summary=summary, component=self.data.component
        )

    def begin(
        self,
        rng_key: Array,
        algorithm: Algorithm,
        problem: P,
        starts: Starts,
        next_steps: Callable[[P, Any], NextSteps] | None = None,
    ) -> tuple[P, Any]:
        """The problem, and the states of all starts.

        Args:
            rng_key: Key of the starts.
            algorithm: The algorithm.
            problem: Without what it needs of all rows.
            starts: The starts.
            next_steps: A problem and states of the right shapes, before these are there, to what else to compile.

        Raises:
            ValueError: If the start does not fit the data, or the component gives coordinates that are NaN.
        """
        data, (num_components, start, num_restarts, splits, *_) = self.data, starts
        capacity, (shards, number, size) = (
            self.capacity(num_components),
            self.blocks.weight.shape,
        )
        layout = {"capacity": capacity, "shards": shards, "size": number * size}
        stored = start_data(start, len(data.rows), num_components, **layout)
        setting = Setting(problem, stored, np.arange(capacity) < num_components, splits)
        static = {
            "component": data.component,
            "algorithm": algorithm,
            "assign": start.assign,
        }
        groups = self.groups(starts.num_starts)
        if self.fill and next_steps is not None:
            # What few data take is most of all compiling.
            first = rng_key, groups[0], groups[0] < 0, setting, self.blocks
            if programs.compile_ahead(_begin, *first, **static):
                posed, states, _ = _begin.eval_shape(*first, **static)
                posed, states = jax.tree.map(
                    lambda leaf: np.ones(leaf.shape, leaf.dtype), (posed, states)
                )
                first_group = self.groups(starts.num_starts + len(starts.padded))[0]
                group = jax.tree.map(
                    lambda leaf: np.zeros(
                        (len(first_group), *leaf.shape[1:]), leaf.dtype
                    ),
                    states,
                )
                self.compile_ahead(algorithm, posed, group, next_steps(posed, states))
        programs.wait_for(_begin)
        parts = []
        for numbers in groups:
            posed, states, has_coordinates = _begin(
                rng_key,
                np.maximum(numbers, 0),
                numbers >= num_restarts,
                setting,
                self.blocks,
                **static,
            )
            parts.append(jax.tree.map(np.asarray, states))
        if not has_coordinates:
            raise ValueError(
                f"{data.component.name}: coordinates gives NaN. Rows of NaN stand for none: leave "
                "them out of means over the rows."
            )
        return jax.tree.map(np.asarray, posed), starts.with_given(
            _joined(parts, starts.num_starts)
        )

    def ascent_arguments(self, problem: Any, limits: Limits) -> tuple[Any, ...]:
        """The arguments of a compiled ascent behind its state."""
        dtype = self.blocks.columns.dtype
        numbers = limits.max_iter, limits.tolerance_at(dtype), self.data.total
        until, tolerance, total = numbers
        return (
            problem,
            self.blocks,
            np.int32(until),
            np.asarray(tolerance, dtype),
            np.asarray(total, dtype),
        )

    def ascend(
        self, algorithm: Algorithm, problem: Any, states: T, limits: Limits
    ) -> Ascent[PassState[T]]:
        """All starts to their ends, one group after the other; with a progress bar in several calls each."""
        problem, blocks, _, *numbers = self.ascent_arguments(problem, limits)
        static = {"component": self.data.component, "algorithm": algorithm}

        def advance_to(state: Ascent[PassState[T]], until: int) -> Ascent[PassState[T]]:
            return compiled_ascent(
                state, problem, blocks, np.int32(until), *numbers, **static
            )

        programs.wait_for(compiled_ascent)
        # Of few rows all passes are one call.
        is_shown = self.is_large if limits.progress_bar is None else limits.progress_bar
        stride = STRIDE if is_shown else limits.max_iter
        num_starts = len(jax.tree.leaves(states)[0])
        parts = []
        for some in self.groups(num_starts):
            group = jax.tree.map(lambda leaf, some=some: np.asarray(leaf)[some], states)
            state = ascent.begin(group, limits.max_iter, int(np.sum(some >= 0)))
            ended: Any = ascent.ended(ascent.ascend(advance_to, state, limits, stride))
            # Starts come last in a trace, which has no other leading axis.
            parts.append(
                ended._replace(
                    trace=ended.trace.T, num_steps=np.full(len(some), ended.num_steps)
                )
            )
        joined = _joined(parts, num_starts)
        return joined._replace(trace=joined.trace.T, num_steps=joined.num_steps.max())

    def compile_ahead(
        self, algorithm: Algorithm, problem: Any, group: Any, next_steps: NextSteps
    ) -> None:
        """Compile the ascent, and the summary in double precision, in other threads; see :class:`NextSteps`."""
        state, component = (
            ascent.begin(group, next_steps.limits.max_iter),
            self.data.component,
        )
        shared = self.ascent_arguments(problem, next_steps.limits)
        programs.compile_ahead(
            compiled_ascent, state, *shared, component=component, algorithm=algorithm
        )
        with double_precision():
            programs.compile_ahead(
                _reduce,
                self.blocks,
                next_steps.arguments,
                summary=next_steps.summary,
                component=component,
            )


def _joined(parts: list[T], size: int) -> T:
    """Trees of arrays, one after the other; the first rows of them."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:size], *parts)


def array_source(
    data: MixtureData, num_components: int, num_starts: int, *, fill: bool = True
) -> ArraySource:
    """Rows in blocks that fit the cache with the components of the starts that are ascended side by side.

    Args:
        data: The rows.
        num_components: K.
        num_starts: R.
        fill: Whether components and starts may be filled up, where the rows are few.
    """
    shards = sweep.num_shards(data.rows)
    together = num_components * min(num_starts, NUM_TOGETHER)
    if not isinstance(data.rows, np.ndarray):
        size = sweep.block_size(data.rows.shape[0] // shards, together)
        return ArraySource(
            data,
            sweep.make_blocks(data.rows, jnp.asarray(data.weight), size, shards),
            False,
        )
    fill = fill and len(data.rows) <= sweep.FEW_ROWS
    if fill:
        together = sweep.next_power(num_components, NUM_TOGETHER) * NUM_TOGETHER
    size = sweep.block_size(max(len(data.rows), sweep.LARGEST_BLOCK), together)
    return ArraySource(
        data, sweep.blocks_on_host(data.rows, np.asarray(data.weight), size), fill
    )


@partial(programs.fast_jit, static_argnames=("summary", "component"))
def _reduce(
    blocks: sweep.Blocks,
    arguments: tuple[Any, ...],
    *,
    summary: Summary,
    component: Component,
) -> Any:
    return _reduced(blocks, arguments, summary, component)


def _reduced(
    blocks: sweep.Blocks,
    arguments: tuple[Any, ...],
    summary: Summary,
    component: Component,
) -> Any:
    read = summary.read(component, *arguments)
    return summary.finish(
        component, summary.sums(component, blocks, read), read, *arguments
    )


@partial(programs.fast_jit, static_argnames=("component", "algorithm", "assign"))
def _begin(
    rng_key: Array,
    numbers: Array,
    is_split: Array,
    setting: Setting,
    blocks: sweep.Blocks,
    *,
    component: Component,
    algorithm: Algorithm,
    assign: Assign,
) -> tuple[Any, Any, Array]:
    """The problem, the states of the starts with these numbers, and whether all coordinates are numbers."""
    problem = _reduced(blocks, (setting.problem,), algorithm.pose, component)
    active, splits = setting.active, setting.splits
    points, weight = (
        sweep.points_of(component, blocks),
        sweep.out_of_blocks(blocks.weight),
    )

    def from_start(key: Array) -> Array:
        labels = assign(key, setting.start, points, weight, active)  # type: ignore[arg-type]
        in_place = sweep.into_blocks(labels, blocks)
        if labels.ndim == 1:
            order = jnp.arange(active.shape[0], dtype=labels.dtype)[:, None]
            in_place = in_place[..., None, :] == order
        return in_place.astype(blocks.columns.dtype)

    def from_parent(key: Array) -> Array:
        parent, first = splits  # type: ignore[misc]
        omega = sweep.responsibilities(
            component, coefficients(component, parent), blocks
        )
        omega = sweep.out_of_blocks(omega).T
        return sweep.into_blocks(
            split_components(key, omega, points, weight, first, jnp.sum(active)).T,
            blocks,
        )

    def one(number: Array, is_split: Array) -> Any:
        key = jax.random.fold_in(rng_key, number)
        if splits is None:
            return algorithm.begin(component, problem, from_start(key), blocks)
        omega = jax.lax.cond(is_split, from_parent, from_start, key)
        return algorithm.begin(component, problem, omega, blocks)

    # One after the other: side by side their distances would take R times the memory of the data.
    states = jax.lax.map(lambda each: one(*each), (numbers, is_split))
    return problem, states, jnp.all(jnp.isfinite(points))


@partial(programs.fast_jit, static_argnames=("component", "algorithm"))
def compiled_ascent(
    state: Ascent[PassState[T]],
    problem: P,
    blocks: sweep.Blocks,
    until: Array,
    tolerance: Array,
    total: Array,
    *,
    component: Component,
    algorithm: Algorithm,
) -> Ascent[PassState[T]]:
    """All restarts until they have ended, or ``until`` passes are done; ``tolerance`` is that of one datum."""
    return advance(
        step_of(algorithm, component, problem, blocks, total),
        state,
        until,
        tolerance * total,
    )
