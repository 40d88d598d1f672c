"""Coordinate ascents of a sparse regression, from points of a lasso path."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Ascent,
    Iterate,
    advance,
    at_index,
    begin,
    check_count,
    check_number,
    is_traced,
    warn_caller,
)
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab
from numpyro_tempered.sparse.arguments import Regression
from numpyro_tempered.sparse.sweep import (
    block_design,
    blocks,
    combine,
    gauss_seidel,
    products,
)

# An objective is a sum of many terms: a fall by this many units in the last place is rounding.
ROUNDING = 64.0
# Penalties of the path, in units of the smallest one that keeps all coefficients at 0.
PENALTIES = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03)
# Points of the path by start. The first has many variables in and little noise: superfluous variables leave more
# easily than missing ones come in. Each next point is far from those before.
SEQUENCE = (7, 2, 4, 8, 0, 5, 3, 6, 1)
# A start need not solve the lasso to many digits.
SWEEPS = 5

T = TypeVar("T")
# A state to the next state and its objective.
Update: TypeAlias = Callable[[T], tuple[T, Array]]


class Start(NamedTuple):
    """Starts on a leading axis.

    Attributes:
        mean: Means of the coefficients, ``(R, d)``.
        order: The coefficients in the order of the sweeps, ``(R, d)``.
    """

    mean: Array
    order: Array


class Path(NamedTuple):
    """Points of a lasso path on a leading axis.

    Attributes:
        mean: Coefficients, ``(P, d)``.
        size: The value before the threshold, in units of y, ``(P, d)``: above the penalty it grows with the
            coefficient, below it says which coefficient would come in next.
    """

    mean: Array
    size: Array


@jax.jit
def lasso_path(x: Array, y: Array, always: Array) -> Path:
    """Approximate solutions of the lasso on unit columns, each from the one before.

    Args:
        x: Columns, shape ``(n, d)``.
        y: Target, ``(n,)``.
        always: Which coefficients are not penalised, ``(d,)``.
    """
    d = x.shape[1]
    design = block_design(blocks(x.T))
    square = design.norms
    penalised = blocks(jnp.where(always, 0.0, 1.0).astype(x.dtype))
    # A column of 0 keeps a coefficient of 0.
    norm = jnp.sqrt(jnp.where(square > 0.0, square, 1.0))

    def soft(parameters: tuple[Array, Array], product: Array) -> Array:
        norm, threshold = parameters
        size = product / norm
        return jnp.sign(size) * jnp.maximum(jnp.abs(size) - threshold, 0.0) / norm

    def at(
        state: tuple[Array, Array], fraction: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        mean, largest = state

        def body(_index: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            mean, _sizes = state
            residual = y - combine(design.columns, mean)
            mean, partial = gauss_seidel(
                design, residual, mean, soft, (norm, fraction * largest * penalised)
            )
            return mean, partial / norm

        mean, size = jax.lax.fori_loop(0, SWEEPS, body, (mean, jnp.zeros_like(mean)))
        # At the first point only the unpenalised coefficients are in; its residual gives the largest penalty.
        rest = products(design.columns, y - combine(design.columns, mean))
        penalty = jnp.max(penalised * jnp.abs(rest) / norm)
        return (mean, jnp.where(fraction > 1.0, penalty, largest)), (mean, size)

    huge = jnp.full((), jnp.finfo(x.dtype).max, x.dtype)
    fractions = jnp.concatenate([huge[None], jnp.asarray(PENALTIES, x.dtype)])
    _, points = jax.lax.scan(
        at, (jnp.zeros_like(square), jnp.ones_like(huge)), fractions
    )
    means, sizes = (part[1:] for part in points)
    flat = (len(PENALTIES), -1)
    return Path(
        jnp.reshape(means, flat)[:, :d], jnp.abs(jnp.reshape(sizes, flat)[:, :d])
    )


@partial(jax.jit, static_argnames="num_restarts")
def make_starts(
    rng_key: Array, regression: Regression, path: Path, num_restarts: int
) -> Start:
    """The first starts of a fixed sequence.

    First ``init``, if there is one, then the points of the path, with the coefficients by decreasing size; then
    the same points with the coefficients in random orders. Variables that are always in come first.
    """
    init, always = regression.init, regression.prior.probs == 1.0
    mean, size = (part[jnp.asarray(SEQUENCE)] for part in path)
    if init is not None:
        mean = jnp.concatenate([init[None], mean])
        size = jnp.concatenate(
            [(jnp.abs(init) * jnp.linalg.norm(regression.x, axis=0))[None], size]
        )
    point = jnp.arange(num_restarts) % mean.shape[0]

    def priority(start: Array, point: Array) -> Array:
        random = jax.random.uniform(
            jax.random.fold_in(rng_key, start), size.shape[1:], size.dtype
        )
        value = jnp.where(start < mean.shape[0], size[point], random)
        return jnp.where(always, jnp.inf, value)

    priorities = jax.vmap(priority)(jnp.arange(num_restarts), point)
    return Start(mean[point], jnp.argsort(-priorities, axis=1))


def ascend(update: Update[T], start: T, max_iter: int, tolerance: Array) -> Ascent[T]:
    """Repeat an update that raises its objective until it gains no more than the tolerance.

    Args:
        update: One sweep.
        start: The first state.
        max_iter: Limit of the sweeps.
        tolerance: In nats a sweep.
    """
    unit = ROUNDING * jnp.finfo(tolerance.dtype).eps

    def step(state: T) -> Iterate[T]:
        state, objective = update(state)
        return Iterate(state, objective, unit * (1.0 + jnp.abs(objective)))

    ascent = advance(step, begin(start, max_iter, batched=False), max_iter, tolerance)
    # A larger fall is the end of the precision, not an optimum.
    return ascent._replace(converged=ascent.converged & (ascent.fall <= tolerance))


class Best(NamedTuple, Generic[T]):
    """The best of several ascents.

    Attributes:
        ascent: The best ascent.
        order: The order of its coefficients.
        objectives: Objective of every ascent.
    """

    ascent: Ascent[T]
    order: Array
    objectives: Array


class Search(NamedTuple):
    """The arguments of both regressions that say how long to search.

    Attributes:
        num_restarts: Number of starts.
        max_iter: Limit of the sweeps of a start.
        tolerance: Gain of a sweep at which a start has converged, in nats per row.
    """

    num_restarts: int
    max_iter: int
    tolerance: float


def find_best(
    rng_key: Array,
    regression: Regression,
    squared_loss: tuple[Array, Array],
    make_ascent: Callable[..., tuple[Update[T], T]],
    numbers: tuple[object, ...],
    search: Search,
) -> Best[T]:
    """The best of the ascents from several starts.

    Args:
        rng_key: Key of the starts.
        regression: Data and prior.
        squared_loss: Columns and target whose lasso path gives the starts.
        make_ascent: Regression, start and ``numbers`` to the update of an ascent and its first state.
        numbers: What else the model needs, such as alpha.
        search: The starts and their limits.

    Raises:
        ValueError: If a number of the search is out of range.
    """
    num_restarts = check_count(search.num_restarts, "num_restarts")
    max_iter = check_count(search.max_iter, "max_iter")
    tolerance = check_number(search.tolerance, "tolerance", "[0, inf)") * len(
        regression.y
    )
    with jax.default_matmul_precision("highest"):
        path = lasso_path(*squared_loss, regression.prior.probs == 1.0)
        starts = make_starts(rng_key, regression, path, num_restarts)
        data, gain = (
            regression._replace(init=None),
            jnp.asarray(tolerance, regression.x.dtype),
        )
        return best_start(make_ascent, data, starts, numbers, gain, max_iter=max_iter)


@partial(jax.jit, static_argnames=("make_ascent", "max_iter"))
def best_start(
    make_ascent: Callable[..., tuple[Update[T], T]],
    regression: Regression,
    starts: Start,
    numbers: tuple[object, ...],
    tolerance: Array,
    *,
    max_iter: int,
) -> Best[T]:
    """The ascents from all starts, one after another: each stops when it has converged."""
    ascents = jax.lax.map(
        lambda start: ascend(
            *make_ascent(regression, start, *numbers), max_iter, tolerance
        ),
        starts,
    )
    return best_of(ascents, starts)


def best_of(ascents: Ascent[T], starts: Start) -> Best[T]:
    """The ascent with the largest objective; NaN is no maximum."""
    best = jnp.argmax(
        jnp.where(jnp.isnan(ascents.objective), -jnp.inf, ascents.objective)
    )
    return Best(at_index(ascents, best), starts.order[best], ascents.objective)


def outcome(
    q: SpikeSlab,
    best: Best[T],
    regression: Regression,
    max_iter: int,
    names: tuple[str, ...] | None,
) -> dict[str, Any]:
    """The fields that both fits have: the factors ``q`` of the best ascent, by columns, and how it ended.

    Raises:
        ValueError: If the objective is not finite.
    """
    ascent, order, d = best.ascent, best.order, len(regression.centre)
    check_end(ascent, max_iter)
    posterior, intercept = unblock(q, order), None
    if len(order) > d:
        intercept = MeanField(posterior.loc[-1], posterior.scale[-1])
        posterior = SpikeSlab(*(part[:-1] for part in posterior))
        order = order[jnp.nonzero(order < d, size=d)[0]]
    return {
        "posterior": posterior,
        "intercept": intercept,
        "centre": regression.centre,
        "trace": ascent.trace
        if is_traced(ascent.trace)
        else ascent.trace[: int(ascent.num_iter)],
        "converged": ascent.converged,
        "num_iter": ascent.num_iter,
        "order": order,
        "objective": ascent.objective,
        "restart_objectives": best.objectives,
        # Text is no output of a transformation.
        "column_names": None if is_traced(ascent.trace) else names,
    }


def check_end(ascent: Ascent[T], max_iter: int) -> None:
    """Complain of an ascent that ended badly, unless its end is traced.

    Raises:
        ValueError: If the objective is not finite.
    """
    if is_traced(ascent):
        return
    dtype = ascent.objective.dtype
    if not np.isfinite(ascent.objective):
        raise ValueError(
            f"the ELBO is {float(ascent.objective)}: x, y or the prior exceed the range of {dtype}. "
            "Rescale the columns to about unit deviation."
        )
    if not ascent.converged:
        warn_caller(
            f"the best start did not converge within {max_iter} sweeps: take a larger max_iter; or, if its "
            f"trace falls at the end, the precision of {dtype} is too low for these data."
        )


@jax.jit
def unblock(q: SpikeSlab, order: Array) -> SpikeSlab:
    """Factors in blocks as factors of the coefficients in the order of the columns."""
    back = jnp.argsort(order)
    return SpikeSlab(*(jnp.reshape(part, -1)[: order.shape[0]][back] for part in q))
