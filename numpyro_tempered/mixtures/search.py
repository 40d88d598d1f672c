"""The search for a fit, phase by phase: pose the problem, begin, climb, evaluate."""

from functools import partial

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Limits
from numpyro_tempered.mixtures.climb import climb
from numpyro_tempered.mixtures.evidence import evaluate, following
from numpyro_tempered.mixtures.factors import TEMPERED_CAVI, problem_of
from numpyro_tempered.mixtures.prepare import Settings
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.source import Beginning, Source
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.warm import WarmStart, with_warm


def run(
    rng_key: Array,
    source: Source,
    settings: Settings,
    limits: Limits,
    start: Start | None,
    warm_start: WarmStart | None,
    *,
    num_samples: int,
    num_moves: int = 0,
) -> MixtureFit:
    """Ascend from the starts, move, and return the best restart, with a warning where it has not converged.

    Args:
        rng_key: Key of the starts, of the moves and of the draws for E1.
        source: The rows.
        settings: Alpha and the prior of the weights.
        limits: When the ascent ends.
        start: First responsibilities.
        warm_start: Fits whose factors restarts start from.
        num_samples: Draws for E1.
        num_moves: Rounds of moves, for rows in memory.

    Raises:
        TypeError: If ``start`` is not a start, or ``warm_start`` not a fit.
        ValueError: If one of them does not fit the data.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.
    """
    problem = problem_of(source.data, settings, source.capacity(settings.num_components))
    beginning = Beginning(settings.num_components, start_or_default(start), limits.num_restarts)
    beginning = with_warm(beginning, source.data, problem, warm_start)
    rest = partial(following, rng_key, source.data, problem, limits, num_samples)
    problem, factors = source.begin(rng_key, TEMPERED_CAVI, problem, beginning, rest)
    num_moves = num_moves if settings.num_components > 1 else 0
    found = climb(rng_key, source, problem, factors, limits, num_moves)
    return evaluate(rng_key, source, problem, settings, found, num_samples)
