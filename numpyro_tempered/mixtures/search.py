"""The search for a fit: ascend from several starts, move, and assemble the result."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent
from numpyro_tempered.mixtures.ascent import History, Limits, Visit, for_keys, restart
from numpyro_tempered.mixtures.components.base import Component, as_dtype, broadcast_prior, translate_on_host
from numpyro_tempered.mixtures.evidence import evaluate, step_error
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, first_factors
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.prepare import MixtureData, Settings
from numpyro_tempered.mixtures.result import MixtureFit, check_fit
from numpyro_tempered.mixtures.source import ArraySource, Beginning, Source, problem_of
from numpyro_tempered.mixtures.starts import Start, start_or_default

WarmStart: TypeAlias = MixtureFit | Sequence[MixtureFit]
# Nats a datum, times an alpha above 1, that one more step may raise the objective of a fit that has converged.
RISE = 1e-4


def run(
    keys: Array,
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
        keys: Three keys, of the starts, of the moves and of the draws for E1.
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
    start_key, move_key, draw_key = keys
    data, problem = source.data, problem_of(source, settings.concentration, settings.alpha)
    warm = warm_factors(data, problem, warm_start)
    beginning = Beginning(settings.num_components, start_or_default(start), limits.num_restarts, warm.parent)
    factors = with_warm(source.begin(start_key, first_factors, problem, beginning), warm)
    state = source.ascend(problem, factors, limits)
    objectives = ascent.finite_or_least(state.objective)
    check_finite(state, objectives, data.component)
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
    history = History.of(state, best, objectives, limits.num_restarts)
    if not history.converged:
        warnings.warn(
            f"the best restart has not converged in max_iter={limits.max_iter} passes: raise max_iter or the "
            "tolerance.",
            stacklevel=4,
        )
    factors = restart(state.point.factors, best)
    fit, rise = assemble(
        draw_key, source, problem, settings.alpha, factors, history=history, num_samples=num_samples
    )
    limit = max(RISE * max(1.0, settings.alpha), limits.tolerance_at(data.rows.dtype)) * data.total
    check_fall(source, problem, state, limit)
    if history.converged and rise > limit:
        warnings.warn(
            f"the best restart has not converged: a step in double precision raises its objective by {rise:.2g} "
            f"nats, which {data.rows.dtype} does not resolve. The prior may be too far from the data, or columns "
            "too close to one another: standardise them, or let jax have 64 bits.",
            stacklevel=4,
        )
        fit = fit._replace(converged=False)
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
) -> tuple[MixtureFit, float]:
    """A fit from its factors, whose F, counts and E1 are evaluated in double precision; and F's next rise."""
    value, rise, counts, bound = evaluate(rng_key, source, problem, factors, num_samples)
    fit = MixtureFit(
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
    return fit, rise


def check_fall(source: Source, problem: MixtureProblem, state: Ascent[Visit[Factors]], limit: float) -> None:
    """Refuse an ascent whose objective fell, unless its steps are not those of double precision.

    Raises:
        RuntimeError: If F fell by more than rounding.
    """
    fall, component = np.asarray(state.fall), source.data.component
    worst = int(np.argmax(fall))
    # Falls of less than what counts as converged are those of ill-conditioned priors.
    if fall[worst] > limit and step_error(source, problem, restart(state.point, worst)) <= limit:
        raise RuntimeError(
            f"the objective of restart {worst} fell by {fall[worst]:.3g} nats, which coordinate ascent cannot "
            f"do: update, coefficients and kl of the component {component.name!r} do not belong together."
        )


def check_finite(state: Ascent[Visit[Factors]], objectives: np.ndarray, component: Component) -> None:
    """Refuse an ascent of which nothing is finite; warn of restarts that failed.

    Raises:
        FloatingPointError: If no restart has a finite objective.
    """
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


class Warm(NamedTuple):
    """Factors that restarts start from, for the data of this fit.

    Attributes:
        whole: Those of other fits with as many components.
        padded: A fit's with fewer components, and as many empty ones, at their prior, as are missing; or nothing.
        parent: That fit's own, whose components are split; or None.
    """

    whole: list[Factors]
    padded: list[Factors]
    parent: Factors | None


def warm_factors(data: MixtureData, problem: MixtureProblem, warm_start: WarmStart | None) -> Warm:
    """The factors of other fits. Of those with fewer components the largest is taken.

    Raises:
        TypeError: If one is not a fit.
        ValueError: If one is of another family, or has more components.
    """
    fits = [] if warm_start is None else [warm_start] if isinstance(warm_start, MixtureFit) else list(warm_start)
    num_components = problem.concentration.shape[0]
    factors = [as_dtype(factors_for(data, fit, num_components), data.rows.dtype) for fit in fits]
    whole = [each for fit, each in zip(fits, factors, strict=True) if fit.num_components == num_components]
    smaller = [
        (fit, each) for fit, each in zip(fits, factors, strict=True) if fit.num_components < num_components
    ]
    if not smaller:
        return Warm(whole, [], None)
    fit, parent = max(smaller, key=lambda pair: pair[0].num_components)
    return Warm(whole, [pad(problem, parent, fit.problem.concentration)], parent)


def pad(problem: MixtureProblem, factors: Factors, concentration: Array) -> Factors:
    """Factors with components added that are empty, at their prior.

    Args:
        problem: Of all components.
        factors: Of the first components.
        concentration: Their Dirichlet prior, whose weights they were updated from.
    """
    size = concentration.shape[0]
    whole = np.asarray(problem.concentration)
    counts = np.asarray(factors.concentration) - np.asarray(concentration)
    empty = broadcast_prior(problem.prior, len(whole) - size)
    posterior = jax.tree.map(lambda *leaves: np.concatenate(leaves), factors.posterior, empty)
    return Factors(np.concatenate([whole[:size] + counts, whole[size:]]), posterior)  # type: ignore[arg-type]


def with_warm(factors: Factors, warm: Warm) -> Factors:
    """Factors with leading axis R, whole ones in the place of the first and padded ones at the end."""

    def joined(leaf: Array, *others: Array) -> np.ndarray:
        rows = [np.asarray(other)[None] for other in others]
        return np.concatenate([*rows[:size], leaf[size:], *rows[size:]])

    size = len(warm.whole)
    return jax.tree.map(joined, factors, *warm.whole, *warm.padded) if warm.whole or warm.padded else factors


def factors_for(data: MixtureData, warm_start: MixtureFit, num_components: int) -> Factors:
    """The factors of another fit, for data less this fit's centre.

    Raises:
        TypeError: If ``warm_start`` is not a fit.
        ValueError: If it is of another family, or has more components.
    """
    check_fit(warm_start, "warm_start")
    if warm_start.component != data.component or warm_start.num_components > num_components:
        raise ValueError(
            f"warm_start has {warm_start.num_components} components of {warm_start.component.name}; expected at "
            f"most {num_components} of {data.component.name}, both with missing entries or both without."
        )
    factors = warm_start.factors
    if warm_start.centre is None or data.centre is None:
        return factors
    shift = warm_start.centre - data.centre
    return factors._replace(posterior=translate_on_host(data.component, factors.posterior, shift))
