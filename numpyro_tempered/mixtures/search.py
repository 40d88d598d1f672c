"""The search for a fit, phase by phase: pose the problem, begin, ascend, evaluate."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from numpyro_tempered.core.typing import Array
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
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.warm import WarmStart, with_warm

# From where all starts begin to the best factors: by coordinate ascent, or by stochastic steps.
Optimiser: TypeAlias = Callable[[Array, Source, MixtureProblem, Any, Limits], Outcome]


def run(
    rng_key: Array,
    source: Source,
    settings: Settings,
    limits: Limits,
    start: Start | None,
    warm_start: WarmStart | None,
    *,
    optimise: Optimiser,
    num_samples: int,
    algorithm: Algorithm = TEMPERED_CAVI,
) -> MixtureFit:
    """Begin from the starts, ascend, and evaluate the outcome, with a warning where it has not converged.

    Args:
        rng_key: Key of the starts, of the ascent and of the draws for E1.
        source: The rows.
        settings: Alpha and the prior of the weights.
        limits: The number of restarts, and when the ascent ends.
        start: First responsibilities.
        warm_start: Fits whose factors restarts start from.
        optimise: From the states of all starts to the best factors.
        num_samples: Draws for E1.
        algorithm: What the states of the starts are of.

    Raises:
        TypeError: If ``start`` is not a start, or ``warm_start`` not a fit.
        ValueError: If one of them does not fit the data.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.
    """
    problem = problem_of(
        source.data, settings, source.capacity(settings.num_components)
    )
    starts = Starts(
        settings.num_components, start_or_default(start), limits.num_restarts
    )
    starts = with_warm(starts, source.data, problem, warm_start)
    next_steps = partial(following, rng_key, source.data, problem, limits, num_samples)
    problem, states = source.begin(rng_key, algorithm, problem, starts, next_steps)
    outcome = optimise(rng_key, source, problem, states, limits)
    return evaluate(rng_key, source, problem, settings, outcome, num_samples)
