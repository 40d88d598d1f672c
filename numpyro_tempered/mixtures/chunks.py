"""Rows in chunks: data that do not fit the memory, which every pass reads again."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent, Iterate, record
from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.chunks import blocks
from numpyro_tempered.core.precision import CompensatedSum, double_precision
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.ascent import Visit, begin, rounding_error
from numpyro_tempered.mixtures.components.base import Component, as_dtype, check_is_component, missing_form
from numpyro_tempered.mixtures.evidence import BoundEstimate, draw_coefficients, final_sums, objective_and_gaps
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, coefficients, objective, update
from numpyro_tempered.mixtures.prepare import MixtureData, centre_data, weight_of
from numpyro_tempered.mixtures.source import Limits, array_source, progress
from numpyro_tempered.mixtures.starts import Start
from numpyro_tempered.mixtures.sweep import (
    Coefficients,
    Sums,
    add_terms,
    base_sum,
    block_size,
    make_blocks,
    sweep,
    total_of,
)

Chunk: TypeAlias = ArrayLike | tuple[ArrayLike, ArrayLike]
Chunks: TypeAlias = Iterable[Chunk] | Callable[[], Iterable[Chunk]]
Block: TypeAlias = tuple[np.ndarray, np.ndarray]
T = TypeVar("T")


class ChunkSource(NamedTuple):
    """Rows in chunks.

    Attributes:
        data: Of all rows, with ``rows`` drawn at random without replacement, or all of them where they are few,
            in their order.
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
        """Blocks of exactly ``size`` rows with the centre taken off, and their weights, 0 where a row is padding.

        Raises:
            ValueError: If the pass has other rows than the first.
        """
        centre, dtype = self.data.centre, self.data.rows.dtype
        count = 0

        def centre_blocks() -> Iterator[Block]:
            for rows, weight in read_checked(self.chunks, self.data.component):
                yield (rows if centre is None else rows - centre).astype(dtype), weight.astype(dtype)

        for (rows, weight), num_rows in blocks(centre_blocks(), self.size):
            count += num_rows
            yield rows, np.where(np.arange(self.size) < num_rows, weight, 0)
        if count != self.num_rows:
            raise ValueError(
                f"a pass over the chunks gave {count} rows, the first pass {self.num_rows}: each pass must give "
                "the same rows. Give a function that makes new chunks for each pass."
            )

    def base(self) -> Array:
        """The weighted sum of log h."""
        return sum_over(partial(add_base, component=self.data.component, size=self.inner), self.read())

    def sums(self, factors: Factors) -> Sums:
        """The sums of a pass at factors with leading axis R."""
        mixtures = _coefficients(self.data.component, factors)
        add = partial(add_sums, mixtures, component=self.data.component, size=self.inner)
        return sum_over(add, self.read())

    def first_sums(self, rng_key: Array, num_components: int, start: Start, num_restarts: int) -> Sums:
        """The sums under first responsibilities of the sample, scaled to all data, with leading axis R."""
        sample = array_source(self.data, num_components * num_restarts)
        sums = sample.first_sums(rng_key, num_components, start, num_restarts)
        scale = self.data.total / float(np.sum(np.asarray(self.data.weight), dtype=np.float64))
        return jax.tree.map(lambda leaf: scale * leaf, sums)

    def ascend(self, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
        """All restarts to their ends, a pass over the chunks for each iteration."""
        dtype = self.data.rows.dtype
        tolerance, total = jnp.asarray(limits.tolerance_at(dtype), dtype), jnp.asarray(self.data.total, dtype)
        state = begin(factors, limits.max_iter)
        with progress(limits.max_iter, "passes", limits.progress_bar) as bar:
            for _ in range(limits.max_iter):
                sums = self.sums(state.point.update)
                state = _after_pass(state, problem, sums, tolerance, total, component=self.data.component)
                bar.update()
                if not np.any(state.active):
                    break
        return state

    def evaluate(
        self, rng_key: Array, problem: MixtureProblem, factors: Factors, num_samples: int
    ) -> tuple[float, np.ndarray, BoundEstimate | None]:
        """F, the counts and E1 at given factors, in double precision, in one pass."""
        component = self.data.component
        with double_precision():
            problem, factors = as_dtype((problem, factors), jnp.float64)
            mixture, draws = _mixture_and_draws(rng_key, component, factors, num_samples)
            add = partial(add_final, mixture, draws, component=component, size=self.inner)
            sums, base, log_likelihoods = sum_over(add, self.read())
            problem = problem._replace(base=base)
            value, gaps = _objective_and_gaps(component, problem, factors, sums, draws, log_likelihoods)
            bound = BoundEstimate.of(float(value), np.asarray(gaps))
            return float(value), np.asarray(sums.counts), bound


def open_chunks(chunks: Chunks) -> Iterator[Chunk]:
    """The chunks from the first on.

    Raises:
        TypeError: If they cannot be read more than once.
    """
    if isinstance(chunks, Iterator) or hasattr(chunks, "shape"):
        kind = "an iterator, which is used up by one pass" if isinstance(chunks, Iterator) else "one array"
        raise TypeError(
            f"chunks is {kind}; expected a list of arrays, or a function that makes a new iterable of arrays "
            "for each pass."
        )
    iterable = chunks() if callable(chunks) else chunks
    if not isinstance(iterable, Iterable) or hasattr(iterable, "shape"):
        raise TypeError(f"chunks gave a {type(iterable).__name__}; expected an iterable of arrays.")
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
            rows = np.asarray(component.check(parts[0]))
            weight = np.asarray(weight_of(parts[1] if len(parts) == 2 else None, rows))
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
    num_start_rows, size = check_count(num_start_rows, "num_start_rows"), check_count(size, "size", 2)
    generator = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (4,), jnp.uint32)))
    form = component
    num_rows, total = 0, 0.0
    mass = moment = np.zeros(())
    sample: list[np.ndarray] = []
    for rows, weight in read_checked(chunks, component):
        if np.isnan(rows).any():
            form = missing_form(component, rows)
        observed = np.where(np.isnan(rows), 0.0, weight[:, None].astype(np.float64))
        mass = mass + observed.sum(axis=0)
        moment = moment + np.nansum(np.where(observed > 0, rows, 0.0) * observed, axis=0)
        new = [rows, weight, num_rows + np.arange(len(rows)), generator.random(len(rows))]
        sample = [np.concatenate(pair) for pair in zip(sample, new, strict=True)] if sample else new
        if len(sample[0]) > num_start_rows:
            # The rows whose random numbers are least: a sample without replacement.
            least = np.argpartition(sample[3], num_start_rows)[:num_start_rows]
            sample = [each[least] for each in sample]
        num_rows, total = num_rows + len(rows), total + float(weight.sum(dtype=np.float64))
    if num_rows == 0:
        raise ValueError("the chunks hold no row.")
    rows, weight = (each[np.argsort(sample[2])] for each in sample[:2])
    sample_weight = jnp.asarray(weight, jax.dtypes.canonicalize_dtype(rows.dtype))
    centre = None if component.translate is None else moment / np.where(mass > 0, mass, 1.0)
    data = centre_data(component, form, rows, sample_weight, centre, total)
    multiple_of = min(multiple_of, num_rows)
    size = max(-(-min(size, num_rows) // multiple_of) * multiple_of, 2)
    return ChunkSource(data, chunks, num_rows, size, block_size(size, num_together))


def sum_over(add: Callable[[T | None, Array, Array], T], row_blocks: Iterable[Block]) -> T:
    """The sums that ``add`` makes of each block, compensated from block to block.

    Args:
        add: Compiled; ``(running, rows, weight)`` to the running sums, None before the first.
        row_blocks: Rows and weights, all of one shape.
    """
    running = None
    for rows, weight in row_blocks:
        # A reader that is faster than the sums would fill the memory with blocks that wait.
        jax.block_until_ready(running)
        running = add(running, jnp.asarray(rows), jnp.asarray(weight))
    return _total(running)


_total = jax.jit(total_of)


def _include(running: T | None, terms: T) -> T:
    """Running sums with one more term each."""
    return jax.tree.map(CompensatedSum.start, terms) if running is None else add_terms(running, terms)


@partial(jax.jit, static_argnames=("component", "size"))
def add_sums(
    mixtures: Coefficients, running: Sums | None, rows: Array, weight: Array, *, component: Component, size: int
) -> Sums:
    """The sums of a block for each of R mixtures."""
    row_blocks = make_blocks(rows, weight, size)
    return _include(running, jax.vmap(lambda mixture: sweep(component, mixture, row_blocks))(mixtures))


@partial(jax.jit, static_argnames=("component", "size"))
def add_base(running: Array | None, rows: Array, weight: Array, *, component: Component, size: int) -> Array:
    """The weighted sum of log h of a block."""
    return _include(running, base_sum(component, make_blocks(rows, weight, size)))


@partial(jax.jit, static_argnames=("component", "size"))
def add_final(
    mixture: Coefficients,
    draws: Coefficients,
    running: tuple[Sums, Array, Array] | None,
    rows: Array,
    weight: Array,
    *,
    component: Component,
    size: int,
) -> tuple[Sums, Array, Array]:
    """The sums of a block, that of log h, and log L of S draws without log h, in double precision."""
    row_blocks = make_blocks(rows.astype(jnp.float64), weight.astype(jnp.float64), size)
    return _include(running, final_sums(component, mixture, draws, row_blocks))


@partial(jax.jit, static_argnames="component")
def _coefficients(component: Component, factors: Factors) -> Coefficients:
    return jax.vmap(lambda each: coefficients(component, each))(factors)


@partial(jax.jit, static_argnames="component")
def all_objectives(component: Component, problem: MixtureProblem, factors: Factors, sums: Sums) -> Array:
    """F of factors and sums with leading axis R."""
    return jax.vmap(lambda q, s: objective(component, problem, q, s))(factors, sums)


@partial(jax.jit, static_argnames="component")
def _after_pass(
    state: Ascent[Visit[Factors]],
    problem: MixtureProblem,
    sums: Sums,
    tolerance: Array,
    total: Array,
    *,
    component: Component,
) -> Ascent[Visit[Factors]]:
    """The state of the ascent after a pass over the data with these sums, leading axis R."""
    value = all_objectives(component, problem, state.point.update, sums)
    following = jax.vmap(lambda each: update(component, problem, each))(sums)
    rounding = rounding_error(problem.base, total, problem.alpha)
    return record(state, Iterate(Visit(state.point.update, following), value, rounding), tolerance * total)


@partial(jax.jit, static_argnames=("component", "num_samples"))
def _mixture_and_draws(
    rng_key: Array, component: Component, factors: Factors, num_samples: int
) -> tuple[Coefficients, Coefficients]:
    keys = jax.random.split(rng_key, num_samples)
    draws = jax.lax.map(lambda key: draw_coefficients(key, component, factors), keys)
    return coefficients(component, factors), draws


_objective_and_gaps = jax.jit(objective_and_gaps, static_argnames="component")
