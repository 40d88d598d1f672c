"""The search for a fit: ascend from several starts, move, and assemble the result."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent
from numpyro_tempered.mixtures.ascent import History, Limits, Visit, for_keys, for_restarts, restart
from numpyro_tempered.mixtures.components.base import Component, as_dtype, translate_by
from numpyro_tempered.mixtures.evidence import evaluate
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, update
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.prepare import MixtureData, Settings
from numpyro_tempered.mixtures.result import MixtureFit, check_fit
from numpyro_tempered.mixtures.source import ArraySource, Source, problem_of
from numpyro_tempered.mixtures.starts import Start, start_or_default


def run(
    keys: Array,
    source: Source,
    settings: Settings,
    limits: Limits,
    start: Start | None,
    warm_start: MixtureFit | None,
    *,
    num_samples: int,
    num_moves: int = 0,
) -> MixtureFit:
    """Ascend from the starts, move, and return the best restart, with a warning where it has not converged.

    Args:
        keys: Three keys, of the starts, of the moves and of the draws for E1.
        source: The rows.
        settings: Alpha and the prior of the weights.
        limits: When the ascent ends.
        start: First responsibilities.
        warm_start: A fit whose factors the first restart starts from.
        num_samples: Draws for E1.
        num_moves: Rounds of moves, for rows in memory.

    Raises:
        TypeError: If ``start`` is not a start, or ``warm_start`` not a fit.
        ValueError: If one of them does not fit the data.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.
    """
    start_key, move_key, draw_key = keys
    data, problem = source.data, problem_of(source, settings.concentration, settings.alpha)
    sums = source.first_sums(start_key, settings.num_components, start_or_default(start), limits.num_restarts)
    factors = for_restarts(update, data.component, problem, sums)
    if warm_start is not None:
        warm = as_dtype(factors_for(data, warm_start, settings.num_components), data.rows.dtype)
        factors = jax.tree.map(lambda leaf, one: leaf.at[0].set(one), factors, warm)
    state = source.ascend(problem, factors, limits)
    objectives = ascent.finite_or_least(state.objective)
    check_ascent(state, objectives, data.component)
    best, num_accepted = int(np.argmax(objectives)), 0
    if isinstance(source, ArraySource) and settings.num_components > 1:
        threshold = limits.tolerance_at(data.rows.dtype) * data.total
        for key in jax.random.split(move_key, num_moves):
            move_keys, factors = jax.random.split(key, limits.num_restarts), restart(state.point.factors, best)
            factors = for_keys(propose, data.component, move_keys, problem, factors, data.rows, source.blocks)
            after = source.ascend(problem, factors, limits)
            values = ascent.finite_or_least(after.objective)
            if values.max() > float(state.objective[best]) + threshold:
                state, best, num_accepted = after, int(np.argmax(values)), num_accepted + 1
    history = History.of(state, best, objectives)
    if not history.converged:
        warnings.warn(
            f"the best restart has not converged in max_iter={limits.max_iter} passes: raise max_iter or the "
            "tolerance.",
            stacklevel=4,
        )
    factors = restart(state.point.factors, best)
    fit = assemble(draw_key, source, problem, settings.alpha, factors, history=history, num_samples=num_samples)
    return fit._replace(num_moves=num_accepted)


def assemble(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    alpha: float,
    factors: Factors,
    *,
    history: History,
    num_samples: int,
) -> MixtureFit:
    """A fit from its factors, whose F, counts and E1 are evaluated in double precision."""
    value, counts, bound = evaluate(rng_key, source, problem, factors, num_samples)
    return MixtureFit(
        component=source.data.component,
        alpha=alpha,
        factors=factors,
        problem=problem,
        centre=source.data.centre,
        objective=value,
        bound=bound,
        counts=counts,
        num_moves=0,
        total=source.data.total,
        **history._asdict(),
    )


def check_ascent(state: Ascent[Visit[Factors]], objectives: np.ndarray, component: Component) -> None:
    """Refuse an ascent whose objective fell, or of which nothing is finite; warn of restarts that failed.

    Raises:
        FloatingPointError: If no restart has a finite objective.
        RuntimeError: If F fell by more than rounding.
    """
    fall = np.asarray(state.fall)
    if np.any(fall > 0):
        worst = int(np.argmax(fall))
        raise RuntimeError(
            f"the objective of restart {worst} fell by {fall[worst]:.3g} nats, which coordinate ascent cannot "
            f"do: update, coefficients and kl of the component {component.name!r} do not belong together."
        )
    num_failed = int(np.sum(~np.isfinite(objectives)))
    if num_failed == len(objectives):
        raise FloatingPointError(
            f"no restart of {component.name!r} kept a finite objective in {state.objective.dtype}: components "
            "may be too narrow for their distance. Standardise the columns, widen the prior, or let jax have 64 "
            "bits."
        )
    if num_failed:
        warnings.warn(
            f"{num_failed} of {len(objectives)} restarts did not keep a finite objective.", stacklevel=5
        )


def factors_for(data: MixtureData, warm_start: MixtureFit, num_components: int) -> Factors:
    """The factors of another fit, for data less this fit's centre.

    Raises:
        TypeError: If ``warm_start`` is not a fit.
        ValueError: If it is of another family or another K.
    """
    check_fit(warm_start, "warm_start")
    if warm_start.component != data.component or warm_start.num_components != num_components:
        raise ValueError(
            f"warm_start has {warm_start.num_components} components of {warm_start.component.name}; expected "
            f"{num_components} of {data.component.name}, both with missing entries or both without."
        )
    factors = warm_start.factors
    if warm_start.centre is None or data.centre is None:
        return factors
    shift = jnp.asarray(warm_start.centre - data.centre, factors.concentration.dtype)
    return factors._replace(posterior=translate_by(data.component, factors.posterior, shift))
