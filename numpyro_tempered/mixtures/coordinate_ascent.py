"""Coordinate ascent: all starts to their ends, moves out of local optima, and the best of them."""

import jax
import numpy as np

from numpyro_tempered.core import Array, Ascent, warn_caller
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.ascent import (
    History,
    Limits,
    PassState,
    check_finite,
    for_keys,
    for_restarts,
    restart,
)
from numpyro_tempered.mixtures.factors import (
    COMMON_CAVI,
    TEMPERED_CAVI,
    Factors,
    MixtureProblem,
    Outcome,
    common_sizes,
)
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.source import Source

# Nats that rounding may take from the log density of a datum where components share their statistics.
COMMON_ROUNDING = 1e-4
# The keys of moves, behind those of the starts.
MOVES = 2**20


def coordinate_ascent(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    factors: Factors,
    limits: Limits,
    *,
    num_moves: int = 0,
) -> Outcome:
    """All starts to their ends, and rounds of moves from the best; with a warning where it has not converged.

    Raises:
        FloatingPointError: If no restart has a finite objective.
    """
    data = source.data
    state = ascend(source, problem, factors, limits)
    objectives = np.asarray(state.objective)
    check_finite(state, data.component)
    best, num_accepted = int(np.argmax(objectives)), 0
    tolerance = limits.tolerance_at(data.rows.dtype) * data.total
    if isinstance(source, ArraySource):
        for number in range(num_moves):
            keys = jax.random.split(
                jax.random.fold_in(rng_key, MOVES + number), limits.num_restarts
            )
            parent = restart(state.point.factors, best)
            proposals = for_keys(
                propose, data.component, keys, problem, parent, source.blocks
            )
            after = ascend(source, problem, proposals, limits)
            if np.max(after.objective) > state.objective[best] + tolerance:
                state, best, num_accepted = (
                    after,
                    int(np.argmax(after.objective)),
                    num_accepted + 1,
                )
    history = History.of(state, best, objectives, limits.num_restarts)
    if not history.converged:
        warn_caller(
            f"the best restart has not converged in max_iter={limits.max_iter} passes: raise max_iter or the "
            "tolerance."
        )
    worst = int(np.argmax(state.fall))
    factors, fallen = (
        restart(state.point.factors, best),
        (worst, restart(state.point, worst)),
    )
    return Outcome(
        factors, history, num_accepted, tolerance, float(state.fall[worst]), fallen
    )


def ascend(
    source: Source, problem: MixtureProblem, factors: Factors, limits: Limits
) -> Ascent[PassState[Factors]]:
    """All starts to their ends; with sums about 0 where rows are many and these keep their digits."""
    location, component = source.data.component.location, source.data.component
    # Where missing entries depend on others, no statistics are common: each component completes rows in its way.
    if location is not None and location.completed is None and source.is_large:
        state = source.ascend(COMMON_CAVI, problem, factors, limits)
        sizes = np.asarray(
            for_restarts(common_sizes, component, problem, state.point.update)
        )
        rounding = 0.5 * float(np.finfo(sizes.dtype).eps) * sizes.max()
        # What is not finite compares as False.
        if (
            np.isfinite(state.objective).all()
            and rounding <= COMMON_ROUNDING
            and not np.any(state.fall > 0)
        ):
            return state
    return source.ascend(TEMPERED_CAVI, problem, factors, limits)
