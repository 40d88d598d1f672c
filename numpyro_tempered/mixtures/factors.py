"""The two factors of CA18's Algorithm 1, and its objective."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Steps
from numpyro_tempered.mixtures.blocks import Blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.components.special import (
    dirichlet_expected_log,
    dirichlet_kl,
    dirichlet_log_normaliser,
)
from numpyro_tempered.mixtures.sweep import Coefficients, Sums, sweep


class Factors(NamedTuple):
    """rho = Dirichlet(concentration) ⊗ the posteriors of the components.

    Attributes:
        concentration: ``(K,)``.
        posterior: Hyperparameters with leading axis K.
    """

    concentration: Array
    posterior: Any


class Problem(NamedTuple):
    """What the objective depends on beside the data; all arrays.

    Attributes:
        prior: Of one component.
        concentration: Of the Dirichlet prior of the weights, ``(K,)``.
        alpha: Power on the likelihood.
        base: The weighted sum of log h(x_i).
    """

    prior: Any
    concentration: Array
    alpha: Array
    base: Array


def coefficients(component: Component, factors: Factors) -> Coefficients:
    """E log p_j and E log q_j, as a function linear in the statistics."""
    log_weights = dirichlet_expected_log(factors.concentration)
    return Coefficients(log_weights, *component.coefficients(factors.posterior))


def update(component: Component, problem: Problem, sums: Sums) -> Factors:
    """The factors given responsibilities: each prior plus alpha times its weighted statistics."""
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    return Factors(problem.concentration + counts, component.update(problem.prior, counts, statistics))


def penalty(component: Component, problem: Problem, factors: Factors) -> Array:
    """KL(rho, prior)."""
    weights = dirichlet_kl(factors.concentration, problem.concentration)
    return weights + component.kl(factors.posterior, problem.prior)


def objective(component: Component, problem: Problem, factors: Factors, sums: Sums) -> Array:
    """F after the step of the responsibilities, alpha Σ_i logsumexp_j l_ij - KL(rho, prior)."""
    return problem.alpha * (sums.log_sum + problem.base) - penalty(component, problem, factors)


def objective_after_update(component: Component, problem: Problem, entropy: Array, sums: Sums) -> Array:
    """F after the step of the factors: alpha H(omega) + the log evidence of the weighted statistics.

    Args:
        component: The component.
        problem: The problem.
        entropy: The weighted sum of the entropies of the responsibilities.
        sums: Counts and statistics under the responsibilities.
    """
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    a = problem.concentration
    weights = dirichlet_log_normaliser(a + counts) - dirichlet_log_normaliser(a)
    evidence = component.log_evidence(problem.prior, counts, statistics)
    return problem.alpha * (entropy + problem.base) + weights + evidence


def entropy(component: Component, factors: Factors, sums: Sums) -> Array:
    """The weighted sum of the entropies of the responsibilities that a sweep at these factors made."""
    mixture = coefficients(component, factors)
    expected = jnp.sum(sums.counts * (mixture.log_weights + mixture.constant))
    return sums.log_sum - expected - jnp.sum(sums.statistics * mixture.weights)


def tempered_cavi(component: Component, problem: Problem, blocks: Blocks) -> Steps:
    """Algorithm 1 of CA18 for :func:`numpyro_tempered.mixtures.ascent.advance`."""
    return Steps(
        coefficients=lambda factors: coefficients(component, factors),
        sweep=lambda mixture: sweep(component, mixture, blocks),
        objective=lambda factors, sums: objective(component, problem, factors, sums),
        update=lambda sums: update(component, problem, sums),
    )
