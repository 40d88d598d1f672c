"""What models are compared by: E1, a bound on the log evidence, by Monte Carlo."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Summary, Visit
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import RESOLUTION, Component, as_dtype
from numpyro_tempered.mixtures.draws import Noises, draw_noise, parameters_at
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    about,
    centres_of,
    coefficients,
    complete_likelihood,
    distance,
    penalty,
    update,
    update_in_order,
)
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.source import Source
from numpyro_tempered.mixtures.sweep import (
    Blocks,
    Coefficients,
    Sums,
    base_sum,
    in_double,
    rounding_losses,
    sweep,
)

# A component of less than one datum is empty.
OCCUPIED = 1.0
# Nats of rounding of a log density from which on responsibilities are rounding, and F is off by itself.
LARGEST_ROUNDING = 1.0


class BoundEstimate(NamedTuple):
    """A Monte Carlo estimate of E1 = alpha E[log L] - KL(rho, prior).

    Attributes:
        value: The estimate, F plus the mean of gaps that are never negative.
        se: Its standard error.
    """

    value: float
    se: float

    @classmethod
    def of(cls, objective: float, gaps: np.ndarray) -> "BoundEstimate":
        """From F and the gaps of independent draws."""
        # One draw has no standard error.
        se = float(np.std(gaps, ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else float("inf")
        return cls(objective + float(np.mean(gaps)), se)


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
    """What follows from them; see :class:`Evaluation`, and for the rest :func:`check_resolution`."""

    objective: Array
    rise: Array
    counts: Array
    base: Array
    kl: Array
    gaps: Array
    spacing: Array
    losses: Array
    sizes: Array


class Evaluation(NamedTuple):
    """What is evaluated in double precision.

    Attributes:
        objective: F.
        rise: What the next step of the factors would raise it by, in double precision.
        counts: N_j, ``(K,)``.
        base: The weighted sum of log h.
        kl: KL(rho, prior).
        bound: E1; None without draws.
    """

    objective: float
    rise: float
    counts: np.ndarray
    base: float
    kl: float
    bound: BoundEstimate | None


def evaluate(
    rng_key: Array, source: Source, problem: MixtureProblem, factors: Factors, num_samples: int
) -> Evaluation:
    """F, counts and E1 at given factors, in double precision.

    Raises:
        FloatingPointError: If a component is narrower than the spacing of its data, or its log densities are
            rounding.
    """
    data, dtype = source.data, factors.concentration.dtype
    arguments = final_arguments(rng_key, data, problem, factors, num_samples)
    with double_precision():
        values = jax.tree.map(np.asarray, source.reduce(FINAL, *arguments))
    check_resolution(data.component, values.spacing, values.losses, values.counts)
    check_rounding(data.component, values.sizes, values.counts, dtype)
    bound = BoundEstimate.of(float(values.objective), values.gaps) if num_samples else None
    value, rise, base, kl = (float(each) for each in (values.objective, values.rise, values.base, values.kl))
    return Evaluation(value, rise, values.counts, base, kl, bound)


def final_arguments(
    rng_key: Array, data: MixtureData, problem: MixtureProblem, factors: Factors, num_samples: int
) -> tuple[Factors, Draws | None, tuple[np.ndarray | None, np.ndarray, MixtureProblem]]:
    """The arguments of ``FINAL``, on the host."""
    problem, factors = as_dtype((problem, factors), jnp.float64)
    draws = None
    if num_samples:
        with double_precision():
            draws = Draws(*draw_noise(rng_key, data.component, factors, num_samples))
    return factors, draws, (data.centre, np.asarray(data.spacings), problem)


def final_coefficients(
    component: Component, factors: Factors, draws: Draws | None, extra: object
) -> tuple[Coefficients, Coefficients | None]:
    """The factors and the draws as what a pass reads."""
    return coefficients(component, factors), None if draws is None else coefficients_of(component, factors, draws)


def final_sums(component: Component, blocks: Blocks, read: tuple[Coefficients, Coefficients | None]) -> FinalSums:
    """The last pass over the data, and one more for each draw."""
    blocks, log_likelihoods, (mixture, draws) = in_double(blocks), jnp.zeros(0), read
    if draws is not None:
        log_likelihoods = jax.lax.map(lambda draw: sweep(component, draw, blocks).log_sum, draws)
    return FinalSums(sweep(component, mixture, blocks), base_sum(component, blocks), log_likelihoods)


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
        gap = partial(bound_gap, problem, sums, sums.log_sum - complete_likelihood(mixture, sums))
        gaps = jax.vmap(gap)(read_draws, final.log_likelihoods)
    rise = distance(component, factors, update(component, problem, sums, mixture.centres))
    sizes = sizes_of(mixture, sums)
    return FinalValues(value, rise, sums.counts, base, kl, gaps, spacing, losses, sizes)


FINAL = Summary(final_coefficients, final_sums, final_values)


def coefficients_of(component: Component, factors: Factors, draws: Draws) -> Coefficients:
    """The draws as what a pass over the data reads, about the centres of the factors, S first."""
    centres = centres_of(component, factors)
    posterior = about(component, factors, centres).posterior

    def of_one(log_weights: Array, noises: Noises) -> Coefficients:
        parameters = parameters_at(component, posterior, noises)
        return Coefficients(log_weights, *derived.coefficients_at(component, posterior, parameters), centres)

    return jax.vmap(of_one)(*draws)


def losses_of(
    component: Component, mixture: Coefficients, centre: np.ndarray | None, spacings: Array
) -> tuple[Array, Array]:
    """The spacing of the data at each component, and what it takes from a log density.

    Args:
        component: The family.
        mixture: Its coefficients.
        centre: What is subtracted from the data, or None.
        spacings: Of the numbers near 1 that the data came as, and are held as.

    Returns:
        The spacing ``(K, d)``, and nats ``(K,)``.
    """
    if mixture.centres is None or centre is None:
        nothing = jnp.zeros_like(mixture.log_weights)
        return nothing[:, None], nothing
    as_given, as_rows = spacings
    spacing = jnp.maximum(as_given * jnp.abs(mixture.centres + centre), as_rows * jnp.abs(mixture.centres))
    return spacing, rounding_losses(component, mixture, spacing)


def sizes_of(mixture: Coefficients, sums: Sums) -> Array:
    """How large the terms of the log density of a mean datum are, ``(K,)``."""
    terms = jnp.sum(jnp.abs(mixture.weights * sums.statistics), axis=1)
    return jnp.abs(mixture.constant) + terms / jnp.maximum(sums.counts, OCCUPIED)


def check_resolution(component: Component, spacing: Array, losses: Array, counts: np.ndarray) -> None:
    """Refuse a mixture whose log densities are rounding, in one of the components that hold data.

    Raises:
        FloatingPointError: If the spacing of the data takes more than ``RESOLUTION`` from a log density.
    """
    of_data = np.where(counts >= OCCUPIED, np.asarray(losses), 0.0)
    if of_data.max() > RESOLUTION:
        j = int(np.argmax(of_data))
        raise FloatingPointError(
            f"component {j} of {component.name!r} is too narrow for its place: numbers there are held to "
            f"{np.max(spacing[j]):.2g}, which takes {of_data[j]:.2g} nats from the log density of a datum. Give "
            "the data in float64 as a NumPy array, whose mean is subtracted before they are rounded, widen the "
            "prior, or let jax have 64 bits."
        )


def check_rounding(component: Component, sizes: np.ndarray, counts: np.ndarray, dtype: np.dtype) -> None:
    """Refuse a mixture whose log densities are differences of numbers that are too large for the precision.

    Such are those of counts: x log λ - λ of a million.

    Args:
        component: The family.
        sizes: Of the terms of the log density of a mean datum, ``(K,)``.
        counts: N_j, ``(K,)``.
        dtype: Of the passes over the data.

    Raises:
        FloatingPointError: If rounding takes more than ``LARGEST_ROUNDING`` from the log density of a mean datum.
    """
    of_data = np.where(counts >= OCCUPIED, sizes, 0.0)
    j = int(np.argmax(of_data))
    rounding = 0.5 * float(jnp.finfo(dtype).eps) * of_data[j]
    if rounding > LARGEST_ROUNDING:
        raise FloatingPointError(
            f"the log densities of component {j} of {component.name!r} are differences of numbers of size "
            f"{of_data[j]:.2g}, which {dtype} holds to {rounding:.2g} nats: let jax have 64 bits."
        )


def step_error(source: Source, problem: MixtureProblem, visit: Visit[Factors]) -> float:
    """What F loses by a step of the factors that is not taken in double precision."""
    with double_precision():
        problem, (factors, following) = as_dtype((problem, visit), jnp.float64)
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
    return distance(component, following, update_in_order(component, problem, final.sums, read[0].centres))


STEP_ERROR = Summary(final_coefficients, final_sums, _step_error)


def bound_gap(
    problem: MixtureProblem, sums: Sums, label_entropy: Array, draw: Coefficients, log_likelihood: Array
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
    return problem.alpha * (log_likelihood - complete_likelihood(draw, sums) - label_entropy)
