"""The two factors of CA18's Algorithm 1, and its objective."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Algorithm, Summary, rounding_error
from numpyro_tempered.mixtures.components import derived, special
from numpyro_tempered.mixtures.components.base import Component, Hyperparameters, broadcast_prior, translate
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums, accumulate, base_sum, block_sums


class Factors(NamedTuple):
    """rho = Dirichlet(concentration) ⊗ the posteriors of the components.

    Attributes:
        concentration: ``(K,)``; 0 for a component that fills up to a size that is compiled.
        posterior: Hyperparameters with leading axis K.
    """

    concentration: Array
    posterior: Hyperparameters


class MixtureProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component.
        concentration: Of the Dirichlet prior of the weights, ``(K,)``; 0 for components that fill up.
        alpha: Power on the likelihood.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    concentration: Array
    alpha: Array
    base: Array


def centres_of(component: Component, factors: Factors) -> Array | None:
    """Where the components are, ``(K, d)``: what sums are taken about; None where the data may not be moved."""
    if component.location is None:
        return None
    # Where the prior of a component that is none is far away, nothing may overflow.
    return jnp.where(factors.concentration[:, None] > 0, component.location.of(factors.posterior), 0.0)


def about(component: Component, factors: Factors, centres: Array | None) -> Factors:
    """The factors of data less the centres of the components."""
    if centres is None:
        return factors
    return factors._replace(posterior=translate(component, factors.posterior, -centres))


def coefficients(component: Component, factors: Factors, centres: Array | None = None) -> Coefficients:
    """E log p_j and E log q_j, linear in statistics about centres, which are those of the factors by default."""
    centres = centres_of(component, factors) if centres is None else centres
    log_weights = special.dirichlet_expected_log(factors.concentration)
    return Coefficients(
        log_weights, *derived.coefficients(component, about(component, factors, centres).posterior), centres
    )


def update(component: Component, problem: MixtureProblem, sums: Sums, centres: Array | None = None) -> Factors:
    """The factors given responsibilities: each prior plus alpha times its sums about the centres."""
    counts, statistics = problem.alpha * sums.counts, problem.alpha * sums.statistics
    prior = problem.prior
    if centres is not None:
        prior = translate(component, broadcast_prior(prior, counts.shape[0]), -centres)
    posterior = translate(component, component.update(prior, counts, statistics), centres)
    return Factors(problem.concentration + counts, posterior)


def first_sums(
    component: Component, problem: MixtureProblem, responsibilities: Array, blocks: Blocks
) -> tuple[Array | None, Sums]:
    """Centres and sums about them under responsibilities ``(P, B, K, b)``: a pass each."""
    sums = accumulate(component, responsibilities, blocks)
    if component.location is None:
        return None, sums
    centres = centres_of(component, update(component, problem, sums))
    return centres, accumulate(component, responsibilities, blocks, centres)


def first_factors(
    component: Component, problem: MixtureProblem, responsibilities: Array, blocks: Blocks
) -> Factors:
    """The factors given responsibilities ``(P, B, K, b)``."""
    centres, sums = first_sums(component, problem, responsibilities, blocks)
    return update(component, problem, sums, centres)


def penalty(component: Component, problem: MixtureProblem, factors: Factors) -> Array:
    """KL(rho, prior)."""
    weights = special.dirichlet_kl(factors.concentration, problem.concentration)
    return weights + derived.kl(component, factors.posterior, problem.prior)


def distance(component: Component, factors: Factors, after: Factors) -> Array:
    """KL(rho, rho after its step): what the step raises F by. A precision that is shared counts K times."""

    def of_one(q: Hyperparameters, p: Hyperparameters) -> Array:
        return derived.kl(component, broadcast_prior(q, 1), p)

    weights = special.dirichlet_kl(factors.concentration, after.concentration)
    return weights + jnp.sum(jax.vmap(of_one)(factors.posterior, after.posterior))


def objective(component: Component, problem: MixtureProblem, factors: Factors, sums: Sums) -> Array:
    """F after the step of the responsibilities, alpha Σ_i logsumexp_j l_ij - KL(rho, prior)."""
    return problem.alpha * (sums.log_sum + problem.base) - penalty(component, problem, factors)


def objective_and_rounding(
    component: Component, problem: MixtureProblem, factors: Factors, sums: Sums, total: Array
) -> tuple[Array, Array]:
    """F, and its rounding error."""
    divergence = penalty(component, problem, factors)
    terms = problem.alpha * sums.log_sum, problem.alpha * problem.base, -divergence
    return terms[0] + terms[1] + terms[2], rounding_error(total, *terms, alpha=problem.alpha)


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
    component: Component, problem: MixtureProblem, factors: Factors, sums: Sums, total: Array
) -> tuple[Array, Array, Factors]:
    """F, its rounding error, and the next factors."""
    value, rounding = objective_and_rounding(component, problem, factors, sums, total)
    return value, rounding, update(component, problem, sums, centres_of(component, factors))


# CA18, Algorithm 1.
TEMPERED_CAVI = Algorithm(
    pose=POSE,
    begin=first_factors,
    read=lambda component, problem, factors: coefficients(component, factors),
    terms=lambda component, problem, mixture, columns, weight: block_sums(component, mixture, columns, weight),
    follow=follow,
)


def common_coefficients(component: Component, factors: Factors) -> Coefficients:
    """The same mixture with statistics about 0, the mean of the data."""
    log_weights = special.dirichlet_expected_log(factors.concentration)
    return Coefficients(log_weights, *derived.coefficients(component, factors.posterior))


def follow_common(
    component: Component, problem: MixtureProblem, factors: Factors, sums: Sums, total: Array
) -> tuple[Array, Array, Factors]:
    """The same of sums about 0."""
    value, rounding = objective_and_rounding(component, problem, factors, sums, total)
    return value, rounding, update(component, problem, sums)


# With statistics that all components share, a pass over many columns takes half of the time. It serves where
# components are not too narrow for their distance from the mean of the data; see common_sizes.
COMMON_CAVI = TEMPERED_CAVI._replace(
    read=lambda component, problem, factors: common_coefficients(component, factors), follow=follow_common
)


def common_sizes(component: Component, problem: MixtureProblem, factors: Factors) -> Array:
    """How large the terms of the log density about 0 are at each component that holds data, ``(K,)``."""
    mixture = common_coefficients(component, factors)
    terms = mixture.weights * component.statistics(centres_of(component, factors).T).T  # type: ignore[union-attr]
    sizes = jnp.abs(mixture.constant) + jnp.sum(jnp.abs(terms), axis=1)
    return jnp.where(factors.concentration - problem.concentration >= problem.alpha, sizes, 0.0)
