"""The search for a fit: ascend from several starts, move, and assemble the result."""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Visit
from numpyro_tempered.mixtures.components.base import Component, as_dtype, translate_by
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, update
from numpyro_tempered.mixtures.moves import proposals
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.source import ArraySource, Limits, Source, finite_or_least, problem_of, restart
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.sweep import Sums


class History(NamedTuple):
    """How a fit came about; see :class:`MixtureFit`."""

    trace: np.ndarray
    objectives: np.ndarray
    converged: bool
    num_iter: int
    num_moves: int = 0


def run(
    keys: Array,
    source: Source,
    concentration: np.ndarray,
    alpha: float,
    limits: Limits,
    *,
    start: Start | None,
    warm_start: MixtureFit | None,
    num_samples: int,
    num_moves: int = 0,
) -> MixtureFit:
    """Ascend from the starts, move, and return the best restart, with a warning where it has not converged.

    Args:
        keys: Three keys, of the starts, of the moves and of the draws for E1.
        source: The rows.
        concentration: Dirichlet prior of the weights, ``(K,)``.
        alpha: Power on the likelihood.
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
    data, problem = source.data, problem_of(source, concentration, alpha)
    factors = first_factors(start_key, source, problem, start, warm_start, num_restarts=limits.num_restarts)
    state = source.ascend(problem, factors, limits)
    objectives = finite_or_least(state.objective)
    check_ascent(state, objectives, data.component)
    best, num_accepted = int(np.argmax(objectives)), 0
    if isinstance(source, ArraySource) and len(concentration) > 1:
        threshold = limits.tolerance_at(data.rows.dtype) * data.total
        for key in jax.random.split(move_key, num_moves):
            move_keys, factors = jax.random.split(key, limits.num_restarts), restart(state.point.factors, best)
            factors = proposals(
                move_keys, data.component, problem, factors, data.rows, data.weight, blocks=source.blocks
            )
            after = source.ascend(problem, factors, limits)
            values = finite_or_least(after.objective)
            if values.max() > float(state.objective[best]) + threshold:
                state, best, num_accepted = after, int(np.argmax(values)), num_accepted + 1
    num_iter, converged = int(state.num_iter[best]), bool(state.converged[best])
    if not converged:
        warnings.warn(
            f"the best restart has not converged in max_iter={limits.max_iter} passes: raise max_iter or the "
            "tolerance.",
            stacklevel=3,
        )
    history = History(np.asarray(state.trace[:num_iter, best]), objectives, converged, num_iter, num_accepted)
    factors = restart(state.point.factors, best)
    return assemble(draw_key, source, problem, alpha, factors, history=history, num_samples=num_samples)


def first_factors(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    start: Start | None,
    warm_start: MixtureFit | None,
    *,
    num_restarts: int,
) -> Factors:
    """The factors that the restarts start from, with leading axis R."""
    num_components = problem.concentration.shape[0]
    sums = source.first_sums(rng_key, num_components, start_or_default(start), num_restarts)
    factors = update_all(source.data.component, problem, sums)
    if warm_start is None:
        return factors
    warm = as_dtype(factors_for(source.data, warm_start, num_components), source.data.rows.dtype)
    return jax.tree.map(lambda leaf, one: leaf.at[0].set(one), factors, warm)


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
    value, counts, bound = source.evaluate(rng_key, problem, factors, num_samples)
    return MixtureFit(
        component=source.data.component,
        alpha=alpha,
        factors=factors,
        problem=problem,
        centre=source.data.centre,
        objective=value,
        bound=bound,
        counts=counts,
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
            f"{num_failed} of {len(objectives)} restarts did not keep a finite objective.", stacklevel=4
        )


def factors_for(data: MixtureData, warm_start: MixtureFit, num_components: int) -> Factors:
    """The factors of another fit, of data with this fit's centre taken off.

    Raises:
        TypeError: If ``warm_start`` is not a fit.
        ValueError: If it is of another family or another K.
    """
    if not isinstance(warm_start, MixtureFit):
        raise TypeError(f"warm_start is a {type(warm_start).__name__}; expected the result of fit.")
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


@partial(jax.jit, static_argnames="component")
def update_all(component: Component, problem: MixtureProblem, sums: Sums) -> Factors:
    """The factors of sums with leading axis R."""
    return jax.vmap(lambda each: update(component, problem, each))(sums)
