"""What models are compared by: E1, a bound on the log evidence, by Monte Carlo; and information criteria."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Visit, for_keys
from numpyro_tempered.mixtures.components.base import Component, Parameters, as_dtype
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    about,
    centres_of,
    coefficients,
    distance,
    entropy,
    objective,
    update,
)
from numpyro_tempered.mixtures.source import Source
from numpyro_tempered.mixtures.sweep import (
    RESOLUTION,
    Blocks,
    Coefficients,
    Sums,
    base_sum,
    rounding_losses,
    sweep,
)

T = TypeVar("T")
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


class Evaluation(NamedTuple):
    """What is evaluated in double precision.

    Attributes:
        objective: F.
        rise: What the next step of the factors would raise it by, in double precision.
        counts: N_j, ``(K,)``.
        bound: E1; None without draws.
    """

    objective: float
    rise: float
    counts: np.ndarray
    bound: BoundEstimate | None


def evaluate(
    rng_key: Array, source: Source, problem: MixtureProblem, factors: Factors, num_samples: int
) -> Evaluation:
    """F, counts and E1 at given factors, in double precision.

    Raises:
        FloatingPointError: If a component is narrower than the spacing of its data, or its log densities are
            rounding.
    """
    component, draws, dtype = source.data.component, None, factors.concentration.dtype
    with double_precision():
        problem, factors = as_dtype((problem, factors), jnp.float64)
        if num_samples:
            # Compiled by itself: samplers of gammas take longer to compile than the rest, and depend on no data.
            keys = jax.random.split(rng_key, num_samples)
            draws = for_keys(draw_coefficients, component, keys, factors)
        data = source.data
        mixture, spacing, losses = with_losses(coefficients, component, factors, data.centre, data.spacings)
        final = source.sum_over(final_sums, mixture, draws)
        value, rise, gaps = _values(component, problem, factors, draws, final)
        counts = np.asarray(final.sums.counts)
        check_resolution(component, spacing, losses, counts)
        check_rounding(component, mixture, final.sums, dtype)
        bound = BoundEstimate.of(float(value), np.asarray(gaps)) if num_samples else None
        return Evaluation(float(value), float(rise), counts, bound)


def final_sums(
    component: Component, blocks: Blocks, mixture: Coefficients, draws: Coefficients | None
) -> FinalSums:
    """The last pass over the data, and one more for each draw."""
    blocks, log_likelihoods = as_dtype(blocks, jnp.float64), jnp.zeros(0)
    if draws is not None:
        log_likelihoods = jax.lax.map(lambda draw: sweep(component, draw, blocks).log_sum, draws)
    return FinalSums(sweep(component, mixture, blocks), base_sum(component, blocks), log_likelihoods)


@partial(jax.jit, static_argnames=("coefficients", "component"))
def with_losses(
    coefficients: Callable[[Component, T], Coefficients],
    component: Component,
    state: T,
    centre: np.ndarray | None,
    spacings: tuple[float, float],
) -> tuple[Coefficients, Array, Array]:
    """Coefficients, the spacing of the data at each component, and what it takes from a log density.

    Args:
        coefficients: The state of an algorithm to those.
        component: The family.
        state: The state.
        centre: What is subtracted from the data, or None.
        spacings: Of the numbers near 1 that the data came as, and are held as.

    Returns:
        The coefficients, the spacing ``(K, d)``, and nats ``(K,)``.
    """
    mixture = coefficients(component, state)
    if mixture.centres is None or centre is None:
        nothing = jnp.zeros_like(mixture.log_weights)
        return mixture, nothing[:, None], nothing
    as_given, as_rows = spacings
    spacing = jnp.maximum(as_given * jnp.abs(mixture.centres + centre), as_rows * jnp.abs(mixture.centres))
    return mixture, spacing, rounding_losses(component, mixture, spacing)


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


def check_rounding(component: Component, mixture: Coefficients, sums: Sums, dtype: np.dtype) -> None:
    """Refuse a mixture whose log densities are differences of numbers that are too large for the precision.

    Such are those of counts: x log λ - λ of a million.

    Args:
        component: The family.
        mixture: Its coefficients.
        sums: At these.
        dtype: Of the passes over the data.

    Raises:
        FloatingPointError: If rounding takes more than ``LARGEST_ROUNDING`` from the log density of a mean datum.
    """
    counts = np.asarray(sums.counts)
    terms = np.abs(np.asarray(mixture.weights * sums.statistics)).sum(axis=1)
    size = np.abs(np.asarray(mixture.constant)) + terms / np.maximum(counts, OCCUPIED)
    of_data = np.where(counts >= OCCUPIED, size, 0.0)
    j = int(np.argmax(of_data))
    rounding = 0.5 * float(jnp.finfo(dtype).eps) * of_data[j]
    if rounding > LARGEST_ROUNDING:
        raise FloatingPointError(
            f"the log densities of component {j} of {component.name!r} are differences of numbers of size "
            f"{of_data[j]:.2g}, which {dtype} holds to {rounding:.2g} nats: let jax have 64 bits."
        )


def step_error(source: Source, problem: MixtureProblem, visit: Visit[Factors]) -> float:
    """What F loses by a step of the factors that is not taken in double precision."""
    component = source.data.component
    with double_precision():
        problem, (factors, following) = as_dtype((problem, visit), jnp.float64)
        mixture = coefficients(component, factors)
        sums = source.sum_over(final_sums, mixture, None).sums
        return float(distance(component, following, update(component, problem, sums, mixture.centres)))


@partial(jax.jit, static_argnames="component")
def _values(
    component: Component, problem: MixtureProblem, factors: Factors, draws: Coefficients | None, final: FinalSums
) -> tuple[Array, Array, Array]:
    """F, the rise of its next step, and E1 - F at each of S draws."""
    sums, base, gaps = final
    value = objective(component, problem._replace(base=base), factors, sums)
    if draws is not None:
        gap = partial(bound_gap, problem, sums, entropy(component, factors, sums))
        gaps = jax.vmap(gap)(draws, final.log_likelihoods)
    after = update(component, problem, sums, centres_of(component, factors))
    return value, distance(component, factors, after), gaps


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
    complete = jnp.sum(sums.counts * (draw.log_weights + draw.constant))
    complete = complete + jnp.sum(sums.statistics * draw.weights) + label_entropy
    return problem.alpha * (log_likelihood - complete)


def draw_parameters(rng_key: Array, component: Component, factors: Factors) -> tuple[Array, Parameters]:
    """One draw from rho: log weights ``(K,)``, and the components' parameters by name, K first."""
    key, *rest = jax.random.split(rng_key, 17)
    keys = iter(rest)
    # The gammas of a Dirichlet underflow for small concentrations, their logarithms do not.
    log_weights = jax.nn.log_softmax(jax.random.loggamma(key, factors.concentration))
    return log_weights, component.draw(lambda name, fn: fn.sample(next(keys)), factors.posterior)


def draw_coefficients(rng_key: Array, component: Component, factors: Factors) -> Coefficients:
    """One draw from rho as what a pass over the data reads, about the centres of the factors."""
    centres = centres_of(component, factors)
    log_weights, parameters = draw_parameters(rng_key, component, about(component, factors, centres))
    return Coefficients(log_weights, *component.coefficients_at(parameters), centres)


def aic(log_likelihood: float, num_parameters: int) -> float:
    """Akaike's criterion, -2 log L + 2 p.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.

    References:
        Akaike, *A new look at the statistical model identification*, IEEE TAC 1974.

    Example:
        >>> from numpyro_tempered.mixtures.evidence import aic
        >>> aic(-10.0, 3)
        26.0
    """
    return -2.0 * log_likelihood + 2.0 * num_parameters


def bic(log_likelihood: float, num_parameters: int, num_data: float) -> float:
    """Schwarz's criterion, -2 log L + p log n.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.
        num_data: n, the sum of the weights.

    References:
        Schwarz, *Estimating the dimension of a model*, AoS 1978.

    Example:
        >>> from numpyro_tempered.mixtures.evidence import bic
        >>> bic(-10.0, 3, 1.0)
        20.0
    """
    return -2.0 * log_likelihood + num_parameters * math.log(num_data)


def icl(log_likelihood: float, num_parameters: int, num_data: float, entropy: float) -> float:
    r"""The integrated complete-data likelihood, BIC + 2 H.

    :math:`H = -\sum_{ij} \omega_{ij} \log \omega_{ij}` is the entropy of the responsibilities. Clusters that
    overlap raise it, so that it counts clusters where BIC counts components.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.
        num_data: n, the sum of the weights.
        entropy: H, the weighted sum of the entropies of the responsibilities, in nats.

    References:
        Biernacki, Celeux, Govaert, *Assessing a mixture model for clustering with the integrated completed
        likelihood*, IEEE PAMI 2000, with responsibilities in place of labels.

    Example:
        >>> from numpyro_tempered.mixtures.evidence import icl
        >>> icl(-10.0, 3, 1.0, 0.5)
        21.0
    """
    return bic(log_likelihood, num_parameters, num_data) + 2.0 * entropy
