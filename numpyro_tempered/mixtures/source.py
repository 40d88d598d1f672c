"""Where rows come from: what the drivers ask of an array, and of chunks that each pass reads again."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent, Step, advance
from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import sweep
from numpyro_tempered.mixtures.ascent import Visit, begin, rounding_error
from numpyro_tempered.mixtures.components.base import Component, as_dtype
from numpyro_tempered.mixtures.em_steps import EMProblem
from numpyro_tempered.mixtures.evidence import BoundEstimate, evaluate
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, tempered_cavi
from numpyro_tempered.mixtures.prepare import MixtureData, check_counts
from numpyro_tempered.mixtures.starts import Assign, Start

T = TypeVar("T")
P = TypeVar("P", MixtureProblem, EMProblem)
# Component, problem, blocks and rounding error to the step of an ascent.
Algorithm: TypeAlias = Callable[[Component, P, sweep.Blocks, Array], Step[Visit[T]]]
# Passes between two updates of the progress bar.
STRIDE = 20


class Limits(NamedTuple):
    """When an ascent ends.

    Attributes:
        num_restarts: Starts, ascended side by side.
        max_iter: Upper limit of passes over the data.
        tolerance: Rise of the objective per datum at which a restart has converged; None for the default.
        progress_bar: Whether to show the passes.
    """

    num_restarts: int
    max_iter: int
    tolerance: float | None
    progress_bar: bool

    def tolerance_at(self, dtype: np.dtype) -> float:
        """The tolerance for data of a precision."""
        default = 1e-8 if dtype == jnp.float64 else 1e-6
        return default if self.tolerance is None else self.tolerance


def check_limits(num_restarts: int, max_iter: int, tolerance: float | None, progress_bar: bool = False) -> Limits:
    """The limits of an ascent.

    Raises:
        ValueError: If one is out of its range.
    """
    num_restarts, max_iter = check_counts(num_restarts=num_restarts, max_iter=max_iter)
    if tolerance is not None:
        tolerance = float(check_number(tolerance, "tolerance", "[0, inf)"))
    return Limits(num_restarts, max_iter, tolerance, progress_bar)


class Source(Protocol):
    """Rows, as the drivers read them: an array on one or several devices, or chunks."""

    @property
    def data(self) -> MixtureData:
        """Component, prior and centre, and the rows that starts see."""

    def base(self) -> Array:
        """The weighted sum of log h."""

    def first_sums(self, rng_key: Array, num_components: int, start: Start, num_restarts: int) -> sweep.Sums:
        """The sums under first responsibilities, with leading axis R."""

    def ascend(self, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
        """All restarts to their ends, from factors with leading axis R."""

    def evaluate(
        self, rng_key: Array, problem: MixtureProblem, factors: Factors, num_samples: int
    ) -> tuple[float, np.ndarray, BoundEstimate | None]:
        """F, the counts and E1 at given factors, in double precision."""


class ArraySource(NamedTuple):
    """Rows in memory, on one device or in shards over several.

    Attributes:
        data: The rows.
        blocks: The same rows in blocks.
    """

    data: MixtureData
    blocks: sweep.Blocks

    def base(self) -> Array:
        """The weighted sum of log h."""
        return _base_sum(self.data.component, self.blocks)

    def first_sums(self, rng_key: Array, num_components: int, start: Start, num_restarts: int) -> sweep.Sums:
        """The sums under first responsibilities, with leading axis R.

        Raises:
            ValueError: If the start does not fit the data.
        """
        data = self.data
        if not start.random:
            # Outside of what is compiled, where labels can be checked.
            start.assign(rng_key, start.data, data.rows, data.weight, num_components)
        return _first_sums(
            jax.random.split(rng_key, num_restarts),
            start.data,
            data.rows,
            data.weight,
            self.blocks,
            component=data.component,
            assign=start.assign,
            num_components=num_components,
        )

    def ascend(self, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
        """All restarts to their ends."""
        return ascend(self, problem, factors, limits, tempered_cavi)

    def evaluate(
        self, rng_key: Array, problem: MixtureProblem, factors: Factors, num_samples: int
    ) -> tuple[float, np.ndarray, BoundEstimate | None]:
        """F, the counts and E1 at given factors, in double precision; without draws no E1."""
        return evaluate(rng_key, self.data.component, problem, factors, self.blocks, num_samples)


def array_source(data: MixtureData, num_together: int) -> ArraySource:
    """Rows in blocks that fit the cache with ``num_together`` components, of all restarts."""
    shards = sweep.num_shards(data.rows)
    size = sweep.block_size(data.rows.shape[0] // shards, num_together)
    return ArraySource(data, sweep.make_blocks(data.rows, data.weight, size, shards))


def ascend(
    source: ArraySource, problem: P, factors: T, limits: Limits, algorithm: Algorithm[P, T]
) -> Ascent[Visit[T]]:
    """All restarts to their ends, in one compiled call or, to show progress, in several."""
    component, dtype, max_iter = source.data.component, source.blocks.columns.dtype, limits.max_iter
    tolerance, total = (jnp.asarray(each, dtype) for each in (limits.tolerance_at(dtype), source.data.total))
    state = begin(factors, max_iter)
    stride = STRIDE if limits.progress_bar else max_iter
    with progress(max_iter, "passes", limits.progress_bar) as bar:
        for until in range(stride, max_iter + stride, stride):
            last = jnp.int32(min(until, max_iter))
            state = compiled_ascent(
                state, problem, source.blocks, last, tolerance, total, component=component, algorithm=algorithm
            )
            if limits.progress_bar:
                bar.update(int(state.num_steps) - bar.n)
                bar.set_postfix(
                    objective=f"{float(jnp.max(state.objective)):.6g}", active=int(jnp.sum(state.active))
                )
            if not np.any(state.active):
                break
    return state


def problem_of(source: Source, concentration: np.ndarray, alpha: float) -> MixtureProblem:
    """The problem that a source and the priors pose."""
    data = source.data
    dtype = data.rows.dtype
    prior, weights = as_dtype(data.prior, dtype), jnp.asarray(concentration, dtype)
    return MixtureProblem(prior, weights, jnp.asarray(alpha, dtype), source.base())


def progress(total: int, unit: str, show: bool) -> Any:
    """A bar of tqdm, which does nothing unless it is to be shown."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=f" {unit}", disable=not show)


def restart(tree: T, index: int) -> T:
    """The leaves of one restart."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def finite_or_least(objectives: Array) -> np.ndarray:
    """The objectives of the restarts in double precision; -inf where one is not finite."""
    values = np.asarray(objectives, np.float64)
    return np.where(np.isfinite(values), values, -np.inf)


@partial(jax.jit, static_argnames="component")
def _base_sum(component: Component, blocks: sweep.Blocks) -> Array:
    return sweep.base_sum(component, blocks)


@partial(jax.jit, static_argnames=("component", "assign", "num_components"))
def _first_sums(
    keys: Array,
    start_data: object,
    rows: Array,
    weight: Array,
    blocks: sweep.Blocks,
    *,
    component: Component,
    assign: Assign,
    num_components: int,
) -> sweep.Sums:
    points = component.coordinates(rows)
    shards, _, size = blocks.weight.shape

    def one(key: Array) -> sweep.Sums:
        labels = assign(key, start_data, points, weight, num_components)
        in_place = sweep.in_blocks(labels, size, shards)
        if labels.ndim == 1:
            numbers = jnp.arange(num_components, dtype=labels.dtype)[:, None]
            in_place = in_place[..., None, :] == numbers
        return sweep.accumulate(component, in_place.astype(rows.dtype), blocks)

    # One after the other: side by side their distances would take R times the memory of the data.
    return jax.lax.map(one, keys)


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
    step = algorithm(component, problem, blocks, rounding_error(problem.base, total, problem.alpha))
    return advance(step, state, until, tolerance * total)
