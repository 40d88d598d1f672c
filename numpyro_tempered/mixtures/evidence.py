"""What models are compared by: E1, a bound on the log evidence, by Monte Carlo."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, double_precision
from numpyro_tempered.mixtures.ascent import Limits, PassState, Summary
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import Component, broadcast_prior
from numpyro_tempered.mixtures.draws import Noises, draw_noise, parameters_at
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    Outcome,
    about,
    centres_of,
    coefficients,
    complete_likelihood,
    distance,
    penalty,
    update,
    update_in_order,
)
from numpyro_tempered.mixtures.prepare import MixtureData, Settings
from numpyro_tempered.mixtures.result import BoundEstimate, MixtureFit
from numpyro_tempered.mixtures.rounding import (
    check_resolution,
    check_rounding,
    has_converged,
    losses_of,
    sizes_of,
)
from numpyro_tempered.mixtures.source import NextSteps, Source
from numpyro_tempered.mixtures.sweep import (
    Blocks,
    Coefficients,
    Sums,
    base_sum,
    in_double,
    sweep,
)

# Nats a datum, times an alpha above 1, that one more step may raise the objective of a fit that has converged.
RISE = 1e-4


class Draws(NamedTuple):
    """S draws from the factors, as random numbers of the host; see :mod:`numpyro_tempered.mixtures.draws`.

    Attributes:
        log_weights: ``(S, K)``.
        noises: By site, S first.
    """

    log_weights: Any
    noises: Noises


class FinalSums(NamedTuple):
    """What the last pass over the data leaves, in double precision.

    Attributes:
        sums: At the factors.
        base: The weighted sum of log h.
        log_likelihoods: log L of S draws, without log h.
    """

    sums: Sums
    base: Array
    log_likelihoods: Array


class FinalValues(NamedTuple):
    """What follows from them; see :class:`MixtureFit`, and of rounding :func:`check_resolution`."""

    objective: Array
    rise: Array
    counts: Array
    base: Array
    kl: Array
    gaps: Array
    spacing: Array
    losses: Array
    sizes: Array


def evaluate(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    settings: Settings,
    outcome: Outcome,
    num_draws: int,
) -> MixtureFit:
    """The outcome as a fit: F, counts and E1 at its factors, in double precision.

    A warning says where a step in double precision raises F further.

    Raises:
        FloatingPointError: If a component is narrower than the spacing of its data, or its log densities are
            rounding.
        RuntimeError: If F fell by more than rounding.
    """
    data, size, dtype = (
        source.data,
        settings.num_components,
        outcome.factors.concentration.dtype,
    )
    arguments = final_arguments(rng_key, data, problem, outcome.factors, num_draws)
    with double_precision():
        values = jax.tree.map(np.asarray, source.reduce(FINAL, *arguments))
    check_resolution(data.component, values.spacing, values.losses, values.counts)
    check_rounding(data.component, values.sizes, values.counts, dtype)
    limit = max(RISE * max(1.0, settings.alpha) * data.total, outcome.tolerance)
    value, rise = float(values.objective), float(values.rise)
    converged = has_converged(
        data, outcome, rise, limit, partial(step_error, source, problem)
    )
    return MixtureFit(
        component=data.component,
        alpha=settings.alpha,
        # Without what fills up.
        factors=jax.tree.map(lambda leaf: leaf[:size], outcome.factors),
        problem=problem._replace(
            concentration=problem.concentration[:size], base=values.base.astype(dtype)
        ),
        centre=data.centre,
        objective=value,
        kl=float(values.kl),
        bound=BoundEstimate.of(value, values.gaps) if num_draws else None,
        counts=values.counts[:size],
        num_moves=outcome.num_moves,
        total=data.total,
        column_names=data.column_names,
        **outcome.history._replace(converged=converged)._asdict(),
    )


def following(
    rng_key: Array,
    data: MixtureData,
    problem: MixtureProblem,
    limits: Limits,
    num_draws: int,
    *_: object,
) -> NextSteps:
    """What follows the first states of a fit; see :class:`NextSteps`."""
    at_prior = Factors(
        problem.concentration,
        broadcast_prior(problem.prior, len(problem.concentration)),
    )
    return NextSteps(
        limits, FINAL, final_arguments(rng_key, data, problem, at_prior, num_draws)
    )


def final_arguments(
    rng_key: Array,
    data: MixtureData,
    problem: MixtureProblem,
    factors: Factors,
    num_draws: int,
) -> tuple[Factors, Draws | None, tuple[np.ndarray | None, np.ndarray, MixtureProblem]]:
    """The arguments of ``FINAL``, on the host."""
    problem, factors = jax.tree.map(
        partial(np.asarray, dtype=np.float64), (problem, factors)
    )
    draws = None
    if num_draws:
        with double_precision():
            draws = Draws(*draw_noise(rng_key, data.component, factors, num_draws))
    return factors, draws, (data.centre, np.asarray(data.spacings), problem)


def final_coefficients(
    component: Component, factors: Factors, draws: Draws | None, extra: object
) -> tuple[Coefficients, Coefficients | None]:
    """The factors and the draws as what a pass reads."""
    return coefficients(component, factors), None if draws is None else coefficients_of(
        component, factors, draws
    )


def final_sums(
    component: Component, blocks: Blocks, read: tuple[Coefficients, Coefficients | None]
) -> FinalSums:
    """The last pass over the data, and one more for each draw."""
    blocks, log_likelihoods, (mixture, draws) = in_double(blocks), jnp.zeros(0), read
    if draws is not None:
        log_likelihoods = jax.lax.map(
            lambda draw: sweep(component, draw, blocks).log_sum, draws
        )
    return FinalSums(
        sweep(component, mixture, blocks), base_sum(component, blocks), log_likelihoods
    )


def final_values(
    component: Component,
    final: FinalSums,
    read: tuple[Coefficients, Coefficients | None],
    factors: Factors,
    draws: object,
    extra: tuple[np.ndarray | None, Array, MixtureProblem],
) -> FinalValues:
    """F, the rise of its next step, E1 - F at each of S draws, and what rounding takes.

    Args:
        component: The family.
        final: The sums.
        read: Of the factors and the draws.
        factors: Where the sums were taken.
        draws: The random numbers; they were read.
        extra: The centre of the data, or None; their spacings as given and as held; the problem.
    """
    (sums, base, gaps), (mixture, read_draws) = final, read
    centre, spacings, problem = extra
    spacing, losses = losses_of(component, mixture, centre, spacings)
    kl = penalty(component, problem, factors)
    value = problem.alpha * (sums.log_sum + base) - kl
    if read_draws is not None:
        gap = partial(
            bound_gap, problem, sums, sums.log_sum - complete_likelihood(mixture, sums)
        )
        gaps = jax.vmap(gap)(read_draws, final.log_likelihoods)
    rise = distance(
        component, factors, update(component, problem, sums, mixture.centres)
    )
    sizes = sizes_of(mixture, sums)
    return FinalValues(value, rise, sums.counts, base, kl, gaps, spacing, losses, sizes)


FINAL = Summary(final_coefficients, final_sums, final_values)


def coefficients_of(
    component: Component, factors: Factors, draws: Draws
) -> Coefficients:
    """The draws as what a pass over the data reads, about the centres of the factors, S first."""
    centres = centres_of(component, factors)
    posterior = about(component, factors, centres).posterior

    def of_one(log_weights: Array, noises: Noises) -> Coefficients:
        parameters = parameters_at(component, posterior, noises)
        return Coefficients(
            log_weights,
            *derived.coefficients_at(component, posterior, parameters),
            centres,
        )

    return jax.vmap(of_one)(*draws)


def step_error(
    source: Source, problem: MixtureProblem, point: PassState[Factors]
) -> float:
    """What F loses by a step of the factors that is not taken in double precision."""
    problem, (factors, following) = jax.tree.map(
        partial(np.asarray, dtype=np.float64), (problem, point)
    )
    with double_precision():
        return float(source.reduce(STEP_ERROR, factors, None, (problem, following)))


def _step_error(
    component: Component,
    final: FinalSums,
    read: tuple[Coefficients, None],
    factors: Factors,
    draws: None,
    extra: tuple[MixtureProblem, Factors],
) -> Array:
    problem, following = extra
    return distance(
        component,
        following,
        update_in_order(component, problem, final.sums, read[0].centres),
    )


STEP_ERROR = Summary(final_coefficients, final_sums, _step_error)


def bound_gap(
    problem: MixtureProblem,
    sums: Sums,
    label_entropy: Array,
    draw: Coefficients,
    log_likelihood: Array,
) -> Array:
    r"""E1 - F at one draw from rho.

    :math:`\alpha \{\log L - \sum_{ij} \omega_{ij} [\log p_j q_{\theta_j}(x_i) - \log \omega_{ij}]\}`: the second
    term has F's expectation in closed form and follows most of log L, so that little noise is left, and by
    Jensen's inequality no draw is negative.

    Args:
        problem: The problem.
        sums: Counts and statistics under the responsibilities.
        label_entropy: The weighted sum of the responsibilities' entropies.
        draw: The parameters, drawn from rho.
        log_likelihood: log L of the draw, without log h.
    """
    return problem.alpha * (
        log_likelihood - complete_likelihood(draw, sums) - label_entropy
    )
