"""The two factors of CA18's Algorithm 1, and its objective."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.ascent import (
    Algorithm,
    History,
    PassState,
    Summary,
    rounding_error,
)
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    broadcast_prior,
    translate,
)
from numpyro_tempered.mixtures.prepare import MixtureData, Settings
from numpyro_tempered.mixtures.sweep import (
    Blocks,
    Coefficients,
    Sums,
    accumulate,
    base_sum,
    block_sums,
)


class Factors(NamedTuple):
    """rho = the factor of the weights ⊗ the posteriors of the components.

    Attributes:
        concentration: ``(K,)`` of a Dirichlet, or ``(K, 2)`` of the Betas of sticks, whose last is Beta(a, 0); 0
            for a component that fills up to a size that is compiled.
        posterior: Hyperparameters with leading axis K.
    """

    concentration: Array
    posterior: Hyperparameters


class MixtureProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component.
        concentration: Of the prior of the weights, as in :class:`Factors`; 0 for components that fill up.
        alpha: Power on the likelihood.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    concentration: Array
    alpha: Array
    base: Array


class Outcome(NamedTuple):
    """Where a search ended.

    Attributes:
        factors: The best.
        history: Of the search.
        num_moves: Moves that were accepted.
        tolerance: Rise of the objective at which a restart has converged, in nats.
        fall: The largest fall of the objective beyond rounding.
        fallen: The number of the restart that fell so, and its last state.
    """

    factors: Factors
    history: History
    num_moves: int = 0
    tolerance: float = 0.0
    fall: float = 0.0
    fallen: tuple[int, PassState[Factors]] | None = None


def problem_of(data: MixtureData, settings: Settings, capacity: int) -> MixtureProblem:
    """The problem that data and priors pose, without what it needs of all rows.

    Args:
        data: The data.
        settings: The priors.
        capacity: Components of the arrays: those beyond K fill up.

    Raises:
        FloatingPointError: If the precision of the data does not hold the prior of the weights.
    """
    prior, dtype = settings.concentration, data.rows.dtype
    weights.check_rounding(prior, dtype)
    filling = [(0, capacity - len(prior)), *[(0, 0)] * (prior.ndim - 1)]
    numbers: Any = (
        np.asarray(each, dtype)
        for each in (np.pad(prior, filling), settings.alpha, 0.0)
    )
    return MixtureProblem(data.prior, *numbers)


def centres_of(component: Component, factors: Factors) -> Array | None:
    """Where the components are, ``(K, d)``: what sums are taken about; None where the data may not be moved."""
    if component.location is None:
        return None
    # Where the prior of a component that is none is far away, nothing may overflow.
    return jnp.where(
        weights.active(factors.concentration)[:, None],
        component.location.of(factors.posterior),
        0.0,
    )


def about(component: Component, factors: Factors, centres: Array | None) -> Factors:
    """The factors of data less the centres of the components."""
    if centres is None:
        return factors
    return factors._replace(posterior=translate(component, factors.posterior, -centres))


def coefficients(
    component: Component, factors: Factors, centres: Array | None = None
) -> Coefficients:
    """E log p_j and E log q_j, linear in statistics about centres, which are those of the factors by default."""
    centres = centres_of(component, factors) if centres is None else centres
    log_weights = weights.expected_log(factors.concentration)
    return Coefficients(
        log_weights,
        *derived.coefficients(component, about(component, factors, centres).posterior),
        centres,
    )


def update(
    component: Component,
    problem: MixtureProblem,
    sums: Sums,
    centres: Array | None = None,
) -> Factors:
    """The factors given responsibilities: each prior plus alpha times its sums about the centres."""
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    prior = problem.prior
    if centres is not None:
        prior = translate(component, broadcast_prior(prior, counts.shape[0]), -centres)
    posterior = translate(
        component, component.update(prior, counts, statistics), centres
    )
    return Factors(weights.update(problem.concentration, counts), posterior)


def in_order(
    problem: MixtureProblem, sums: Sums, centres: Array | None
) -> tuple[Sums, Array | None]:
    """Sums and their centres in the best order of the components, where the weights have one."""
    order = weights.best_order(problem.concentration, problem.alpha * sums.counts)
    if order is None:
        return sums, centres
    sums = sums._replace(counts=sums.counts[order], statistics=sums.statistics[order])
    return sums, None if centres is None else centres[order]


def update_in_order(
    component: Component,
    problem: MixtureProblem,
    sums: Sums,
    centres: Array | None = None,
) -> Factors:
    """The factors given responsibilities, in the best order of the components."""
    return update(component, problem, *in_order(problem, sums, centres))


def first_sums(
    component: Component,
    problem: MixtureProblem,
    responsibilities: Array,
    blocks: Blocks,
) -> tuple[Array | None, Sums]:
    """Centres and sums about them under responsibilities ``(P, B, K, b)``: a pass each."""
    sums, centres = accumulate(component, responsibilities, blocks), None
    if component.location is not None:
        centres = centres_of(component, update(component, problem, sums))
        sums = accumulate(component, responsibilities, blocks, centres)
    sums, centres = in_order(problem, sums, centres)
    return centres, sums


def first_factors(
    component: Component,
    problem: MixtureProblem,
    responsibilities: Array,
    blocks: Blocks,
) -> Factors:
    """The factors given responsibilities ``(P, B, K, b)``."""
    centres, sums = first_sums(component, problem, responsibilities, blocks)
    return update(component, problem, sums, centres)


def penalty(component: Component, problem: MixtureProblem, factors: Factors) -> Array:
    """KL(rho, prior)."""
    of_weights = weights.kl(factors.concentration, problem.concentration)
    return of_weights + derived.kl(component, factors.posterior, problem.prior)


def distance(component: Component, factors: Factors, after: Factors) -> Array:
    """KL(rho, rho after its step): what the step raises F by. A precision that is shared counts K times."""

    def of_one(q: Hyperparameters, p: Hyperparameters) -> Array:
        return derived.kl(component, broadcast_prior(q, 1), p)

    of_weights = weights.kl(factors.concentration, after.concentration)
    return of_weights + jnp.sum(jax.vmap(of_one)(factors.posterior, after.posterior))


def objective(
    component: Component, problem: MixtureProblem, factors: Factors, sums: Sums
) -> Array:
    """F after the step of the responsibilities, alpha Σ_i logsumexp_j l_ij - KL(rho, prior)."""
    return problem.alpha * (sums.log_sum + problem.base) - penalty(
        component, problem, factors
    )


def objective_and_rounding(
    component: Component,
    problem: MixtureProblem,
    factors: Factors,
    sums: Sums,
    total: Array,
) -> tuple[Array, Array]:
    """F, and its rounding error."""
    divergence = penalty(component, problem, factors)
    terms = problem.alpha * sums.log_sum, problem.alpha * problem.base, -divergence
    # The log-gammas of the weights are those of their prior's data too.
    size = total + jnp.sum(problem.concentration)
    return terms[0] + terms[1] + terms[2], rounding_error(
        size, *terms, alpha=problem.alpha
    )


def complete_likelihood(mixture: Coefficients, sums: Sums) -> Array:
    """The weighted sum of omega_ij l_ij, without log h, of sums about the centres of the mixture."""
    constant = mixture.log_weights + mixture.constant
    # A component that is none has weight 0, whose log is -inf.
    by_count = jnp.sum(jnp.where(sums.counts > 0, sums.counts * constant, 0.0))
    return by_count + jnp.sum(sums.statistics * mixture.weights)


# The problem with the sum of log h.
POSE = Summary(
    read=lambda component, problem: None,
    sums=lambda component, blocks, read: base_sum(component, blocks),
    finish=lambda component, base, read, problem: problem._replace(base=base),
)


def follow(
    component: Component,
    problem: MixtureProblem,
    factors: Factors,
    sums: Sums,
    total: Array,
) -> tuple[Array, Array, Factors]:
    """F, its rounding error, and the next factors."""
    value, rounding = objective_and_rounding(component, problem, factors, sums, total)
    return (
        value,
        rounding,
        update_in_order(component, problem, sums, centres_of(component, factors)),
    )


# CA18, Algorithm 1.
TEMPERED_CAVI = Algorithm(
    pose=POSE,
    begin=first_factors,
    read=lambda component, problem, factors: coefficients(component, factors),
    terms=lambda component, problem, mixture, columns, weight: block_sums(
        component, mixture, columns, weight
    ),
    follow=follow,
)


def common_coefficients(component: Component, factors: Factors) -> Coefficients:
    """The same mixture with statistics about 0, the mean of the data."""
    log_weights = weights.expected_log(factors.concentration)
    return Coefficients(
        log_weights, *derived.coefficients(component, factors.posterior)
    )


def follow_common(
    component: Component,
    problem: MixtureProblem,
    factors: Factors,
    sums: Sums,
    total: Array,
) -> tuple[Array, Array, Factors]:
    """The same of sums about 0."""
    value, rounding = objective_and_rounding(component, problem, factors, sums, total)
    return value, rounding, update_in_order(component, problem, sums)


# With statistics that all components share, a pass over many columns takes half of the time. It serves where
# components are not too narrow for their distance from the mean of the data; see common_sizes.
COMMON_CAVI = TEMPERED_CAVI._replace(
    read=lambda component, problem, factors: common_coefficients(component, factors),
    follow=follow_common,
)


def common_sizes(
    component: Component, problem: MixtureProblem, factors: Factors
) -> Array:
    """How large the terms of the log density about 0 are at each component that holds data, ``(K,)``."""
    mixture = common_coefficients(component, factors)
    terms = mixture.weights * component.statistics(centres_of(component, factors).T).T  # type: ignore[union-attr]
    sizes = jnp.abs(mixture.constant) + jnp.sum(jnp.abs(terms), axis=1)
    counts = weights.counts_of(factors.concentration, problem.concentration)
    return jnp.where(counts >= problem.alpha, sizes, 0.0)
