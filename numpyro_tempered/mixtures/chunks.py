"""Rows in chunks: data larger than memory, read anew in each pass."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Ascent,
    CompensatedSum,
    PyTree,
    blocks,
    check_count,
    record,
    spans_processes,
    to_host,
)
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.array import array_source
from numpyro_tempered.mixtures.ascent import (
    Algorithm,
    Limits,
    PassState,
    Summary,
    after_pass,
)
from numpyro_tempered.mixtures.components.base import (
    Component,
    check_is_component,
    missing_form,
)
from numpyro_tempered.mixtures.draws import generator_of
from numpyro_tempered.mixtures.prepare import (
    MixtureData,
    centre_data,
    prepare,
    spacing_of,
    weight_of,
)
from numpyro_tempered.mixtures.source import Source, Starts, pass_of

Chunk: TypeAlias = ArrayLike | tuple[ArrayLike, ArrayLike]
Chunks: TypeAlias = Iterable[Chunk] | Callable[[], Iterable[Chunk]]
Block: TypeAlias = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")
P = TypeVar("P")
# The number of the use of a key that draws the sample; that of the order of rows is the next.
SAMPLE = 2**20


class ChunkSource(NamedTuple):
    """Rows in chunks.

    Attributes:
        data: Of all rows; its ``rows`` are a sample without replacement, in order, or all where they are few.
        chunks: The chunks.
        num_rows: Of all chunks.
        size: Rows in a block, the unit that is compiled and moved to the device.
        inner: Rows in the smaller blocks within it, which fit the cache.
    """

    data: MixtureData
    chunks: Chunks
    num_rows: int
    size: int
    inner: int

    def read(self) -> Iterator[Block]:
        """Blocks of exactly ``size`` rows less the centre, and their weights, 0 for padding.

        Raises:
            ValueError: If the pass has another number of rows than the first.
        """
        centre, dtype = self.data.centre, self.data.rows.dtype
        count = 0

        def centre_blocks() -> Iterator[Block]:
            for rows, weight in read_checked(self.chunks, self.data.component):
                yield (
                    (rows if centre is None else rows - centre).astype(dtype),
                    weight.astype(dtype),
                )

        for (rows, weight), num_rows in blocks(centre_blocks(), self.size):
            count += num_rows
            yield rows, np.where(np.arange(self.size) < num_rows, weight, 0)
        if count != self.num_rows:
            raise ValueError(
                f"a pass over the chunks gave {count} rows, the first pass {self.num_rows}: each pass must give "
                "the same rows. Give a function that makes new chunks for each pass."
            )

    @property
    def is_large(self) -> bool:
        """Whether a pass takes longer than what is compiled for it may cost."""
        return self.num_rows > sweep.FEW_ROWS

    def capacity(self, num_components: int) -> int:
        """K: a pass over chunks takes longer than a program of another size."""
        return num_components

    def reduce(self, summary: Summary, *arguments: PyTree) -> PyTree:
        """What a summary makes of all rows, whose sums are compensated from block to block."""
        component, running = self.data.component, None
        read = _read(summary, component, arguments)
        for rows, weight in self.read():
            # A reader that is faster than the sums would fill the memory with blocks that wait.
            jax.block_until_ready(running)
            block = jnp.asarray(rows), jnp.asarray(weight)
            running = add_block(
                summary, running, *block, read, component=component, size=self.inner
            )
        return _finish(summary, component, running, read, arguments)

    def begin(
        self,
        rng_key: Array,
        algorithm: Algorithm,
        problem: P,
        starts: Starts,
        next_steps: object = None,
    ) -> tuple[P, PyTree]:
        """The problem, and states from responsibilities of the sample, weighted as all data."""
        problem = jax.tree.map(np.asarray, self.reduce(algorithm.pose, problem))
        scale = self.data.total / float(np.sum(self.data.weight, dtype=np.float64))
        data = self.data._replace(
            weight=(scale * self.data.weight).astype(self.data.weight.dtype)
        )
        sample = array_source(
            data, starts.num_components, starts.num_restarts, fill=False
        )
        _, states = sample.begin(rng_key, algorithm, problem, starts)
        return problem, states

    def ascend(
        self, algorithm: Algorithm, problem: PyTree, states: T, limits: Limits
    ) -> Ascent[PassState[T]]:
        """All restarts to their ends, a pass over the chunks for each iteration."""
        component, dtype = self.data.component, self.data.rows.dtype
        tolerance, total = (
            np.asarray(each, dtype)
            for each in (limits.tolerance_at(dtype), self.data.total)
        )

        def advance(state: Ascent[PassState[T]], until: int) -> Ascent[PassState[T]]:
            sums = self.reduce(pass_of(algorithm), problem, state.point.update)
            return _after_pass(
                state,
                problem,
                sums,
                tolerance,
                total,
                component=component,
                algorithm=algorithm,
            )

        state = ascent.begin(states, limits.max_iter)
        return ascent.ended(ascent.ascend(advance, state, limits, stride=1))


def is_chunks(x: object) -> TypeGuard[Chunks]:
    """Whether data are chunks rather than one array: a function, a list of arrays ``(n, d)``, or an iterable."""
    if isinstance(x, list | tuple):
        first: Any = x[0] if x else None
        return np.ndim(first[0] if isinstance(first, tuple) else first) == 2
    return callable(x) or (isinstance(x, Iterable) and not hasattr(x, "shape"))


def source_of(
    rng_key: Array,
    x: ArrayLike | Chunks,
    component: Component,
    sample_weight: ArrayLike | None,
    num_components: int,
    limits: Limits,
    **options: int,
) -> Source:
    """The rows of an array, or of chunks, for a mixture of K.

    Raises:
        TypeError: If they are of the wrong kind.
        ValueError: If they are not of the family, or weights come beside chunks.
    """
    if not is_chunks(x):
        rows = prepare(x, component, sample_weight)  # type: ignore[arg-type]
        return array_source(rows, num_components, limits.num_restarts)
    if sample_weight is not None:
        raise ValueError(
            "chunks bring their weights: give tuples (rows, sample_weight), not sample_weight."
        )
    together = num_components * limits.num_restarts
    return chunk_source(rng_key, x, component, num_together=together, **options)


def open_chunks(chunks: Chunks) -> Iterator[Chunk]:
    """The chunks from the first on.

    Raises:
        TypeError: If they cannot be read more than once.
    """
    if isinstance(chunks, Iterator) or hasattr(chunks, "shape"):
        kind = (
            "an iterator, which is used up by one pass"
            if isinstance(chunks, Iterator)
            else "one array"
        )
        raise TypeError(
            f"chunks is {kind}; expected a list of arrays, or a function that makes a new iterable of arrays "
            "for each pass."
        )
    iterable = chunks() if callable(chunks) else chunks
    if not isinstance(iterable, Iterable) or hasattr(iterable, "shape"):
        raise TypeError(
            f"chunks gave a {type(iterable).__name__}; expected an iterable of arrays."
        )
    return iter(iterable)


def read_checked(chunks: Chunks, component: Component) -> Iterator[Block]:
    """Rows and weights of each chunk that has rows.

    Raises:
        TypeError: If the data of a chunk are not numbers.
        ValueError: If they are not of the family, or a chunk is neither an array nor ``(x, sample_weight)``.
    """
    for number, chunk in enumerate(open_chunks(chunks)):
        parts = chunk if isinstance(chunk, tuple) else (chunk,)
        if len(parts) not in (1, 2):
            raise ValueError(
                f"chunk {number} is a tuple of {len(parts)}; expected an array of rows, or (rows, sample_weight)."
            )
        if np.ndim(parts[0]) == 0:
            raise TypeError(
                f"chunk {number} is {parts[0]!r}; expected an array of rows, or (rows, sample_weight)."
            )
        if np.shape(parts[0])[0] == 0:
            continue
        try:
            on_host = [
                to_host(part) if spans_processes(part) else part for part in parts
            ]
            rows = np.asarray(component.check(on_host[0]))
            weight = np.asarray(
                weight_of(on_host[1] if len(on_host) == 2 else None, rows)
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"chunk {number}: {error}") from error
        yield rows, np.where(np.all(np.isnan(rows), axis=1), 0.0, weight)


def chunk_source(
    rng_key: Array,
    chunks: Chunks,
    component: Component,
    *,
    num_start_rows: int,
    size: int,
    num_together: int,
    multiple_of: int = 1,
) -> ChunkSource:
    """Check all chunks, and find their mean, their missing entries and a sample.

    Args:
        rng_key: Key of the sample, which depends on the order of the rows but not on how they are cut.
        chunks: The chunks.
        component: The family with its prior.
        num_start_rows: Upper limit of the rows of the sample.
        size: Rows in a block, rounded up to a multiple of ``multiple_of``.
        num_together: Components of all restarts, whose arrays share the cache.
        multiple_of: Rows that stay in one block.

    Raises:
        TypeError: If the chunks or their data are of the wrong kind.
        ValueError: If there is no row, or a row is not of the family.
    """
    check_is_component(component)
    num_start_rows, size = (
        check_count(num_start_rows, "num_start_rows"),
        check_count(size, "size", 2),
    )
    generator = generator_of(rng_key, SAMPLE)
    form = component
    num_rows, total, spacing = 0, 0.0, 0.0
    mass = moment = np.zeros(())
    sample: list[np.ndarray] = []
    for rows, weight in read_checked(chunks, component):
        if np.isnan(rows).any():
            form = missing_form(component, rows)
        observed = np.where(np.isnan(rows), 0.0, weight[:, None].astype(np.float64))
        mass = mass + observed.sum(axis=0)
        moment = moment + np.nansum(
            np.where(observed > 0, rows, 0.0) * observed, axis=0
        )
        new = [
            rows,
            weight,
            num_rows + np.arange(len(rows)),
            generator.random(len(rows)),
        ]
        sample = (
            [np.concatenate(pair) for pair in zip(sample, new, strict=True)]
            if sample
            else new
        )
        if len(sample[0]) > num_start_rows:
            # The rows whose random numbers are least: a sample without replacement.
            least = np.argpartition(sample[3], num_start_rows)[:num_start_rows]
            sample = [each[least] for each in sample]
        num_rows, total = (
            num_rows + len(rows),
            total + float(weight.sum(dtype=np.float64)),
        )
        spacing = max(spacing, spacing_of(rows))
    if num_rows == 0:
        raise ValueError("the chunks hold no row.")
    rows, weight = (each[np.argsort(sample[2])] for each in sample[:2])
    sample_weight = np.asarray(weight, jax.dtypes.canonicalize_dtype(rows.dtype))
    centre = (
        None if component.location is None else moment / np.where(mass > 0, mass, 1.0)
    )
    data = centre_data(
        component, rows, sample_weight, centre, total=total, spacing=spacing, form=form
    )
    multiple_of = min(multiple_of, num_rows)
    size = max(-(-min(size, num_rows) // multiple_of) * multiple_of, 2)
    return ChunkSource(
        data, chunks, num_rows, size, sweep.block_size(size, num_together)
    )


@partial(jax.jit, static_argnames=("summary", "component"))
def _read(
    summary: Summary, component: Component, arguments: tuple[PyTree, ...]
) -> PyTree:
    return summary.read(component, *arguments)


@partial(jax.jit, static_argnames=("summary", "component", "size"))
def add_block(
    summary: Summary,
    running: T | None,
    rows: Array,
    weight: Array,
    read: PyTree,
    *,
    component: Component,
    size: int,
) -> T:
    """The running sums, None before the first block, with those of one more."""
    terms = summary.sums(component, sweep.make_blocks(rows, weight, size), read)
    return (
        jax.tree.map(CompensatedSum.start, terms)
        if running is None
        else sweep.add_terms(running, terms)
    )


@partial(jax.jit, static_argnames=("summary", "component"))
def _finish(
    summary: Summary,
    component: Component,
    running: PyTree,
    read: PyTree,
    arguments: tuple[PyTree, ...],
) -> PyTree:
    return summary.finish(component, sweep.total_of(running), read, *arguments)


@partial(jax.jit, static_argnames=("component", "algorithm"))
def _after_pass(
    state: Ascent[PassState[T]],
    problem: PyTree,
    sums: PyTree,
    tolerance: Array,
    total: Array,
    *,
    component: Component,
    algorithm: Algorithm,
) -> Ascent[PassState[T]]:
    """The state of the ascent after a pass over the data with these sums, leading axis R."""
    after = after_pass(algorithm, component, problem, state.point, sums, total)
    return record(state, after, tolerance * total)
