"""The search for a fit, phase by phase: pose the problem, begin, ascend, evaluate."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures.ascent import Algorithm, Limits
from numpyro_tempered.mixtures.evidence import evaluate, following
from numpyro_tempered.mixtures.factors import (
    TEMPERED_CAVI,
    MixtureProblem,
    Outcome,
    problem_of,
)
from numpyro_tempered.mixtures.prepare import Settings
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.source import Source, Starts
from numpyro_tempered.mixtures.warm import Init, read_init, with_fits

# From where all starts begin to the best factors: by coordinate ascent, or by stochastic steps.
Optimiser: TypeAlias = Callable[[Array, Source, MixtureProblem, Any, Limits], Outcome]


def run(
    rng_key: Array,
    source: Source,
    settings: Settings,
    limits: Limits,
    init: Init | None,
    *,
    optimise: Optimiser,
    num_draws: int,
    algorithm: Algorithm = TEMPERED_CAVI,
) -> MixtureFit:
    """Begin from the starts, ascend, and evaluate the outcome, with a warning where it has not converged.

    Args:
        rng_key: Key of the starts, of the ascent and of the draws for E1.
        source: The rows.
        settings: Alpha and the prior of the weights.
        limits: The number of restarts, and when the ascent ends.
        init: First responsibilities, and fits whose factors restarts start from.
        optimise: From the states of all starts to the best factors.
        num_draws: Draws for E1.
        algorithm: What the states of the starts are of.

    Raises:
        TypeError: If ``init`` is neither.
        ValueError: If one of them does not fit the data.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.
    """
    problem = problem_of(
        source.data, settings, source.capacity(settings.num_components)
    )
    start, fits = read_init(init)
    starts = Starts(settings.num_components, start, limits.num_restarts)
    starts = with_fits(starts, source.data, problem, fits)
    next_steps = partial(following, rng_key, source.data, problem, limits, num_draws)
    problem, states = source.begin(rng_key, algorithm, problem, starts, next_steps)
    outcome = optimise(rng_key, source, problem, states, limits)
    return evaluate(rng_key, source, problem, settings, outcome, num_draws)
