"""Coordinate ascent of a sparse regression, start after start."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent, Iterate, advance, begin
from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab
from numpyro_tempered.sparse.arguments import Regression
from numpyro_tempered.sparse.starts import Start

# An objective is a sum of many terms: a fall by this many units in the last place is rounding.
ROUNDING = 64.0

T = TypeVar("T")
# A state to the next state and its objective.
Update: TypeAlias = Callable[[T], tuple[T, Array]]


def ascend(update: Update[T], start: T, num_sweeps: int, tolerance: Array) -> Ascent[T]:
    """Repeat an update that raises its objective until it gains no more than the tolerance.

    Args:
        update: One sweep.
        start: The first state.
        num_sweeps: Limit of the sweeps.
        tolerance: In nats a sweep.
    """
    unit = ROUNDING * jnp.finfo(tolerance.dtype).eps

    def step(state: T) -> Iterate[T]:
        state, objective = update(state)
        return Iterate(state, objective, unit * (1.0 + jnp.abs(objective)))

    ascent = advance(step, begin(start, num_sweeps, batched=False), num_sweeps, tolerance)
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


@partial(jax.jit, static_argnames=("make_ascent", "num_sweeps"))
def best_start(
    make_ascent: Callable[..., tuple[Update[T], T]],
    regression: Regression,
    starts: Start,
    numbers: tuple[object, ...],
    tolerance: Array,
    *,
    num_sweeps: int,
) -> Best[T]:
    """The ascents from all starts, one after another: each stops when it has converged.

    Args:
        make_ascent: Regression, start and ``numbers`` to the update of an ascent and its first state.
        regression: Data and prior.
        starts: All starts.
        numbers: What else the model needs, such as alpha.
        tolerance: As for :func:`ascend`.
        num_sweeps: As for :func:`ascend`.
    """
    return best_of(
        jax.lax.map(
            lambda start: ascend(*make_ascent(regression, start, *numbers), num_sweeps, tolerance), starts
        ),
        starts,
    )


def best_of(ascents: Ascent[T], starts: Start) -> Best[T]:
    """The ascent with the largest objective; NaN is no maximum."""
    best = jnp.argmax(jnp.where(jnp.isnan(ascents.objective), -jnp.inf, ascents.objective))
    return Best(jax.tree.map(lambda leaf: leaf[best], ascents), starts.order[best], ascents.objective)


class Outcome(NamedTuple):
    """What a linear and a logistic fit have in common; the fields are theirs."""

    posterior: SpikeSlab
    intercept: MeanField | None
    trace: Array
    converged: Array
    num_sweeps: Array
    order: Array


def outcome(q: SpikeSlab, best: Best[T], num_columns: int, num_sweeps: int) -> Outcome:
    """The factors ``q`` of the best ascent, by columns, and how it ended.

    Raises:
        ValueError: If the objective is not finite.
    """
    ascent, order = best.ascent, best.order
    check_end(ascent, num_sweeps)
    posterior, intercept = unblock(q, order), None
    if len(order) > num_columns:
        intercept = MeanField(posterior.loc[-1], posterior.scale[-1])
        posterior = SpikeSlab(*(part[:-1] for part in posterior))
    trace = ascent.trace if is_traced(ascent.trace) else ascent.trace[: int(ascent.num_iter)]
    order = _without_intercept(order, num_columns)
    return Outcome(posterior, intercept, trace, ascent.converged, ascent.num_iter, order)


def check_end(ascent: Ascent[T], num_sweeps: int) -> None:
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
        warnings.warn(
            f"the best start did not converge within {num_sweeps} sweeps: take a larger num_sweeps; or, if its "
            f"trace falls at the end, the precision of {dtype} is too low for these data.",
            stacklevel=4,
        )


@jax.jit
def unblock(q: SpikeSlab, order: Array) -> SpikeSlab:
    """Factors in blocks as factors of the coefficients in the order of the columns."""
    back = jnp.argsort(order)
    return SpikeSlab(*(jnp.reshape(part, -1)[: order.shape[0]][back] for part in q))


@partial(jax.jit, static_argnums=1)
def _without_intercept(order: Array, d: int) -> Array:
    """The order of the first d columns."""
    return order[jnp.nonzero(order < d, size=d)[0]]
