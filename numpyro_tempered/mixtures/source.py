"""Sources of rows: the protocol that the drivers use, and rows in memory."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent, Step, advance
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.ascent import Limits, Visit
from numpyro_tempered.mixtures.components.base import Component, as_dtype
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, coefficients, tempered_cavi
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.starts import Assign, Start, split_components

T = TypeVar("T")
P = TypeVar("P")
# Component, problem, responsibilities ``(P, B, K, b)`` and blocks to the state of an algorithm.
Init: TypeAlias = Callable[[Component, P, Array, sweep.Blocks], T]
# Component, problem, blocks and the sum of the weights to the step of an ascent.
Algorithm: TypeAlias = Callable[[Component, P, sweep.Blocks, Array], Step[Visit[T]]]
# Splits of the components of a smaller mixture that a larger one starts from.
NUM_SPLITS = 4
# Passes between two updates of the progress bar.
STRIDE = 20


class Beginning(NamedTuple):
    """Which starts an ascent has.

    Attributes:
        num_components: K.
        start: First responsibilities.
        num_restarts: How many of them.
        parent: Factors with fewer components, of which ``NUM_SPLITS`` splits follow; or None.
    """

    num_components: int
    start: Start
    num_restarts: int
    parent: Factors | None = None


class Source(Protocol):
    """Rows as the drivers use them: an array on one or several devices, or chunks."""

    @property
    def data(self) -> MixtureData:
        """Component, prior and centre, and the rows that starts see."""

    def sum_over(self, block_sums: Callable[..., T], *arguments: Any) -> T:
        """The sums ``block_sums(component, blocks, *arguments)`` of all rows, compiled."""

    def begin(self, rng_key: Array, init: Init[P, T], problem: P, beginning: Beginning) -> T:
        """``init(component, problem, responsibilities, blocks)`` of each start, with leading axis R."""

    def ascend(self, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
        """All restarts to their ends, from factors with leading axis R."""


class ArraySource(NamedTuple):
    """Rows in memory, on one device or in shards over several.

    Attributes:
        data: The rows.
        blocks: The same rows in blocks.
    """

    data: MixtureData
    blocks: sweep.Blocks

    def sum_over(self, block_sums: Callable[..., T], *arguments: Any) -> T:
        """The sums ``block_sums(component, blocks, *arguments)`` of all rows."""
        return _sum_over(block_sums, self.data.component, self.blocks, *arguments)

    def begin(self, rng_key: Array, init: Init[P, T], problem: P, beginning: Beginning) -> T:
        """``init`` of first responsibilities, with leading axis R.

        Raises:
            ValueError: If the start does not fit the data.
        """
        data, (num_components, start, num_restarts, parent) = self.data, beginning
        if not start.random:
            # Outside of what is compiled, where labels can be checked.
            start.assign(rng_key, start.data, data.rows, data.weight, num_components)
        keys = jax.random.split(rng_key, num_restarts)
        if parent is not None:
            keys = jnp.concatenate([keys, jax.random.split(jax.random.fold_in(rng_key, 1), NUM_SPLITS)])
        return _begin(
            keys,
            problem,
            start.data,
            data.rows,
            data.weight,
            self.blocks,
            parent=parent,
            component=data.component,
            init=init,
            assign=start.assign,
            num_components=num_components,
        )

    def ascend(self, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
        """All restarts to their ends."""
        return ascend(self, problem, factors, limits, tempered_cavi)


def array_source(data: MixtureData, num_together: int) -> ArraySource:
    """Rows in blocks that fit the cache with ``num_together`` components, of all restarts."""
    shards = sweep.num_shards(data.rows)
    size = sweep.block_size(data.rows.shape[0] // shards, num_together)
    return ArraySource(data, sweep.make_blocks(data.rows, data.weight, size, shards))


def ascend(
    source: ArraySource, problem: P, factors: T, limits: Limits, algorithm: Algorithm[P, T]
) -> Ascent[Visit[T]]:
    """All restarts to their ends, in one compiled call or, to show progress, in several."""
    component, dtype = source.data.component, source.blocks.columns.dtype
    tolerance, total = (jnp.asarray(each, dtype) for each in (limits.tolerance_at(dtype), source.data.total))

    def advance_to(state: Ascent[Visit[T]], until: int) -> Ascent[Visit[T]]:
        options = {"component": component, "algorithm": algorithm}
        return compiled_ascent(state, problem, source.blocks, jnp.int32(until), tolerance, total, **options)

    return ascent.ascend(advance_to, factors, limits, STRIDE if limits.progress_bar else limits.max_iter)


def problem_of(source: Source, concentration: np.ndarray, alpha: float) -> MixtureProblem:
    """The problem that a source and the priors pose."""
    data = source.data
    dtype = data.rows.dtype
    prior, weights = as_dtype(data.prior, dtype), jnp.asarray(concentration, dtype)
    return MixtureProblem(prior, weights, jnp.asarray(alpha, dtype), source.sum_over(sweep.base_sum))


@partial(jax.jit, static_argnames=("block_sums", "component"))
def _sum_over(block_sums: Callable[..., T], component: Component, blocks: sweep.Blocks, *arguments: object) -> T:
    return block_sums(component, blocks, *arguments)


@partial(jax.jit, static_argnames=("component", "init", "assign", "num_components"))
def _begin(
    keys: Array,
    problem: P,
    start_data: object,
    rows: Array,
    weight: Array,
    blocks: sweep.Blocks,
    *,
    parent: Factors | None,
    component: Component,
    init: Init[P, T],
    assign: Assign,
    num_components: int,
) -> T:
    points = component.coordinates(rows)
    shards, _, size = blocks.weight.shape

    def from_start(key: Array) -> Array:
        labels = assign(key, start_data, points, weight, num_components)
        in_place = sweep.in_blocks(labels, size, shards)
        if labels.ndim == 1:
            numbers = jnp.arange(num_components, dtype=labels.dtype)[:, None]
            in_place = in_place[..., None, :] == numbers
        return in_place.astype(rows.dtype)

    def from_parent(key: Array) -> Array:
        omega = sweep.responsibilities(component, coefficients(component, parent), blocks)  # type: ignore[arg-type]
        omega = sweep.out_of_blocks(omega, rows.shape[0]).T
        first = omega.shape[0]
        omega = jnp.pad(omega, [(0, num_components - first), (0, 0)])
        return sweep.in_blocks(split_components(key, omega, points, weight, first).T, size, shards)

    def one(key: Array, is_split: Array) -> T:
        if parent is None:
            return init(component, problem, from_start(key), blocks)
        return init(component, problem, jax.lax.cond(is_split, from_parent, from_start, key), blocks)

    num_starts = keys.shape[0] - (0 if parent is None else NUM_SPLITS)
    # One after the other: side by side their distances would take R times the memory of the data.
    return jax.lax.map(lambda each: one(*each), (keys, jnp.arange(keys.shape[0]) >= num_starts))


@partial(jax.jit, static_argnames=("component", "algorithm"))
def compiled_ascent(
    state: Ascent[Visit[T]],
    problem: P,
    blocks: sweep.Blocks,
    until: Array,
    tolerance: Array,
    total: Array,
    *,
    component: Component,
    algorithm: Algorithm[P, T],
) -> Ascent[Visit[T]]:
    """All restarts until they have ended, or ``until`` passes are done; ``tolerance`` is that of one datum."""
    return advance(algorithm(component, problem, blocks, total), state, until, tolerance * total)
