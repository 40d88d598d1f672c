"""The two factors of CA18's Algorithm 1, and its objective."""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core.ascent import Step
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Visit, rounding_error, step_of
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.base import Component, Hyperparameters
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums, sweep


class Factors(NamedTuple):
    """rho = Dirichlet(concentration) ⊗ the posteriors of the components.

    Attributes:
        concentration: ``(K,)``.
        posterior: Hyperparameters with leading axis K.
    """

    concentration: Array
    posterior: Hyperparameters


class MixtureProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component.
        concentration: Of the Dirichlet prior of the weights, ``(K,)``.
        alpha: Power on the likelihood.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    concentration: Array
    alpha: Array
    base: Array


def coefficients(component: Component, factors: Factors) -> Coefficients:
    """E log p_j and E log q_j, as a function linear in the statistics."""
    log_weights = special.dirichlet_expected_log(factors.concentration)
    return Coefficients(log_weights, *component.coefficients(factors.posterior))


def update(component: Component, problem: MixtureProblem, sums: Sums) -> Factors:
    """The factors given responsibilities: each prior plus alpha times its weighted statistics."""
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    return Factors(problem.concentration + counts, component.update(problem.prior, counts, statistics))


def penalty(component: Component, problem: MixtureProblem, factors: Factors) -> Array:
    """KL(rho, prior)."""
    weights = special.dirichlet_kl(factors.concentration, problem.concentration)
    return weights + component.kl(factors.posterior, problem.prior)


def objective(component: Component, problem: MixtureProblem, factors: Factors, sums: Sums) -> Array:
    """F after the step of the responsibilities, alpha Σ_i logsumexp_j l_ij - KL(rho, prior)."""
    return problem.alpha * (sums.log_sum + problem.base) - penalty(component, problem, factors)


def entropy(component: Component, factors: Factors, sums: Sums) -> Array:
    """The weighted sum of the entropies of the responsibilities that a sweep at these factors made."""
    mixture = coefficients(component, factors)
    expected = jnp.sum(sums.counts * (mixture.log_weights + mixture.constant))
    return sums.log_sum - expected - jnp.sum(sums.statistics * mixture.weights)


def tempered_cavi(
    component: Component, problem: MixtureProblem, blocks: Blocks, total: Array
) -> Step[Visit[Factors]]:
    """CA18, Algorithm 1 for :func:`numpyro_tempered.core.ascent.advance`; ``total`` is the sum of the weights."""

    def visit(factors: Factors) -> tuple[Array, Factors]:
        sums = sweep(component, coefficients(component, factors), blocks)
        return objective(component, problem, factors, sums), update(component, problem, sums)

    return step_of(visit, rounding_error(problem.base, total, problem.alpha))
