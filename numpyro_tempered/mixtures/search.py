"""The search for a fit: ascend from several starts, move, and assemble the result."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent, weights
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.ascent import History, Limits, Visit, for_keys, restart
from numpyro_tempered.mixtures.components.base import Component, as_dtype, broadcast_prior, translate_on_host
from numpyro_tempered.mixtures.evidence import FINAL, evaluate, final_arguments, step_error
from numpyro_tempered.mixtures.factors import COMMON_CAVI, TEMPERED_CAVI, Factors, MixtureProblem, common_sizes
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.prepare import MixtureData, Settings
from numpyro_tempered.mixtures.result import MixtureFit, check_fit
from numpyro_tempered.mixtures.source import Beginning, Growth, Rest, Source
from numpyro_tempered.mixtures.starts import Start, start_or_default

WarmStart: TypeAlias = MixtureFit | Sequence[MixtureFit]
# Nats a datum, times an alpha above 1, that one more step may raise the objective of a fit that has converged.
RISE = 1e-4
# Nats that rounding may take from the log density of a datum where components share their statistics.
COMMON_ROUNDING = 1e-4
# The keys of moves, behind those of the starts.
MOVES = 2**20


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
    data, num_components = source.data, settings.num_components
    problem = problem_of(source, settings)
    warm = warm_factors(source, problem, num_components, warm_start)
    beginning = Beginning(num_components, start_or_default(start), limits.num_restarts, warm.growth)

    def rest(posed: MixtureProblem, factors: Factors) -> Rest:
        at_prior = Factors(problem.concentration, broadcast_prior(problem.prior, len(problem.concentration)))
        last = final_arguments(rng_key, data, problem, at_prior, num_samples)
        return Rest(beginning.num_starts + len(warm.padded), limits, FINAL, last)

    problem, factors = source.begin(rng_key, TEMPERED_CAVI, problem, beginning, rest)
    state = ascend(source, problem, with_warm(factors, warm), limits)
    objectives = ascent.finite_or_least(state.objective)
    check_finite(state, objectives, data.component)
    best, num_accepted = int(np.argmax(objectives)), 0
    if isinstance(source, ArraySource) and num_components > 1:
        threshold = limits.tolerance_at(data.rows.dtype) * data.total
        for number in range(num_moves):
            keys = jax.random.split(jax.random.fold_in(rng_key, MOVES + number), limits.num_restarts)
            proposals = for_keys(
                propose, data.component, keys, problem, restart(state.point.factors, best), source.blocks
            )
            after = ascend(source, problem, proposals, limits)
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
    fit, rise = assemble(rng_key, source, problem, settings, factors, history=history, num_samples=num_samples)
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


def ascend(source: Source, problem: MixtureProblem, factors: Factors, limits: Limits) -> Ascent[Visit[Factors]]:
    """All starts to their ends; with sums about 0 where rows are many and these keep their digits."""
    location, component = source.data.component.location, source.data.component
    # Where missing entries depend on others, no statistics are common: each component completes rows in its way.
    if location is not None and location.completed is None and source.is_large:
        state = source.ascend(COMMON_CAVI, problem, factors, limits)
        sizes = np.asarray(ascent.for_restarts(common_sizes, component, problem, state.point.update))
        rounding = 0.5 * float(np.finfo(sizes.dtype).eps) * sizes.max()
        # What is not finite compares as False.
        if np.isfinite(state.objective).all() and rounding <= COMMON_ROUNDING and not np.any(state.fall > 0):
            return state
    return source.ascend(TEMPERED_CAVI, problem, factors, limits)


def assemble(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    settings: Settings,
    factors: Factors,
    *,
    history: History,
    num_samples: int,
) -> tuple[MixtureFit, float]:
    """A fit from its factors, whose F, counts and E1 are evaluated in double precision; and F's next rise."""
    value, rise, counts, base, kl, bound = evaluate(rng_key, source, problem, factors, num_samples)
    size = settings.num_components
    fit = MixtureFit(
        component=source.data.component,
        alpha=settings.alpha,
        # Without what fills up.
        factors=jax.tree.map(lambda leaf: leaf[:size], factors),
        problem=problem._replace(
            concentration=problem.concentration[:size], base=as_dtype(base, problem.alpha.dtype)
        ),
        centre=source.data.centre,
        objective=value,
        kl=kl,
        bound=bound,
        counts=counts[:size],
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


def problem_of(source: Source, settings: Settings) -> MixtureProblem:
    """The problem that a source and the priors pose, without what it needs of all rows."""
    data, size = source.data, settings.num_components
    prior = settings.concentration
    weights.check_rounding(prior, data.rows.dtype)
    concentration = np.pad(prior, [(0, source.capacity(size) - size), *[(0, 0)] * (prior.ndim - 1)])
    numbers = as_dtype((concentration, settings.alpha, 0.0), data.rows.dtype)
    return MixtureProblem(as_dtype(data.prior, data.rows.dtype), *numbers)


class Warm(NamedTuple):
    """Factors that restarts start from, for the data of this fit.

    Attributes:
        whole: Those of other fits with as many components.
        padded: A fit's with fewer components, and as many empty ones, at their prior, as are missing; or nothing.
        growth: That fit's own, whose components are split; None without a warm start.
    """

    whole: list[Factors]
    padded: list[Factors]
    growth: Growth | None


def warm_factors(
    source: Source, problem: MixtureProblem, num_components: int, warm_start: WarmStart | None
) -> Warm:
    """The factors of other fits. Of those with fewer components the largest is taken.

    Raises:
        TypeError: If one is not a fit.
        ValueError: If one is of another family, or has more components.
    """
    if warm_start is None:
        return Warm([], [], None)
    fits = [warm_start] if isinstance(warm_start, MixtureFit) else list(warm_start)
    for fit in fits:
        check_warm(source.data, fit, num_components)
    fits = [with_weights_of(problem, fit) for fit in fits]
    factors = [as_dtype(factors_for(source.data, fit), problem.alpha.dtype) for fit in fits]
    nothing: Any = np.zeros_like(problem.concentration)
    whole = [
        fill_up(problem, nothing, each)
        for fit, each in zip(fits, factors, strict=True)
        if fit.num_components == num_components
    ]
    smaller = [
        (fit, each) for fit, each in zip(fits, factors, strict=True) if fit.num_components < num_components
    ]
    if not smaller:
        # One program for mixtures with and without a smaller one.
        nobody = Factors(nothing, broadcast_prior(problem.prior, len(nothing)))
        return Warm(whole, [], Growth(nobody, np.int32(0)))
    fit, parent = max(smaller, key=lambda pair: pair[0].num_components)
    padded = pad(problem, parent, fit.problem.concentration)
    return Warm(whole, [padded], Growth(fill_up(problem, nothing, parent), np.int32(fit.num_components)))


def pad(problem: MixtureProblem, factors: Factors, concentration: Array) -> Factors:
    """Factors with components added that are empty, at their prior.

    Args:
        problem: Of all components.
        factors: Of the first components.
        concentration: The prior that their weights were updated from.
    """
    counts = weights.counts_of(np.asarray(factors.concentration), np.asarray(concentration))  # type: ignore[arg-type]
    first = weights.update(np.asarray(problem.concentration)[: len(counts)], counts)  # type: ignore[arg-type]
    return fill_up(problem, problem.concentration, factors._replace(concentration=first))


def fill_up(problem: MixtureProblem, concentration: Array, factors: Factors) -> Factors:
    """Factors with components at their prior behind them, whose weights have this factor, leading axis K."""
    size = len(factors.concentration)
    others = broadcast_prior(problem.prior, len(concentration) - size)
    posterior = jax.tree.map(lambda *leaves: np.concatenate(leaves), factors.posterior, others)
    whole: Any = np.concatenate([factors.concentration, concentration[size:]])
    return Factors(whole, posterior)


def with_warm(factors: Factors, warm: Warm) -> Factors:
    """Factors with leading axis R, whole ones in the place of the first and padded ones at the end."""

    def joined(leaf: Array, *others: Array) -> np.ndarray:
        rows = [np.asarray(other)[None] for other in others]
        return np.concatenate([*rows[:size], leaf[size:], *rows[size:]])

    size = len(warm.whole)
    return jax.tree.map(joined, factors, *warm.whole, *warm.padded) if warm.whole or warm.padded else factors


def with_weights_of(problem: MixtureProblem, fit: MixtureFit) -> MixtureFit:
    """The fit with weights of the problem's form; where it had a Dirichlet or sticks, from its counts."""
    target, concentration, prior = (
        np.asarray(each) for each in (problem.concentration, fit.factors.concentration, fit.problem.concentration)
    )
    if concentration.ndim == target.ndim:
        return fit
    first: Any = weights.first(target, fit.num_components)
    updated = weights.update(first, weights.counts_of(concentration, prior))  # type: ignore[arg-type]
    return fit._replace(
        factors=fit.factors._replace(concentration=updated), problem=fit.problem._replace(concentration=first)
    )


def check_warm(data: MixtureData, warm_start: MixtureFit, num_components: int) -> None:
    """Refuse what this fit cannot start from.

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


def factors_for(data: MixtureData, warm_start: MixtureFit) -> Factors:
    """The factors of another fit, for data less this fit's centre."""
    factors = warm_start.factors
    if warm_start.centre is None or data.centre is None:
        return factors
    shift = warm_start.centre - data.centre
    return factors._replace(posterior=translate_on_host(data.component, factors.posterior, shift))
