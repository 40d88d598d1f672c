"""What models are compared by: E1, a bound on the log evidence, by Monte Carlo; and information criteria."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import for_keys
from numpyro_tempered.mixtures.components.base import Component, Parameters, as_dtype
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem, coefficients, entropy, objective
from numpyro_tempered.mixtures.source import Source
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums, base_sum, sweep


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


def evaluate(
    rng_key: Array, source: Source, problem: MixtureProblem, factors: Factors, num_samples: int
) -> tuple[float, np.ndarray, BoundEstimate | None]:
    """F, the counts and E1 at given factors, in double precision; without draws no E1."""
    component, draws = source.data.component, None
    with double_precision():
        problem, factors = as_dtype((problem, factors), jnp.float64)
        if num_samples:
            # Compiled by itself: samplers of gammas take longer to compile than the rest, and depend on no data.
            keys = jax.random.split(rng_key, num_samples)
            draws = for_keys(draw_coefficients, component, keys, factors)
        final = source.sum_over(final_sums, _coefficients(component, factors), draws)
        value, gaps = _objective_and_gaps(component, problem, factors, draws, final)
        bound = BoundEstimate.of(float(value), np.asarray(gaps)) if num_samples else None
        return float(value), np.asarray(final.sums.counts), bound


def final_sums(
    component: Component, blocks: Blocks, mixture: Coefficients, draws: Coefficients | None
) -> FinalSums:
    """The last pass over the data, and one more for each draw."""
    blocks, log_likelihoods = as_dtype(blocks, jnp.float64), jnp.zeros(0)
    if draws is not None:
        log_likelihoods = jax.lax.map(lambda draw: sweep(component, draw, blocks).log_sum, draws)
    return FinalSums(sweep(component, mixture, blocks), base_sum(component, blocks), log_likelihoods)


_coefficients = jax.jit(coefficients, static_argnames="component")


@partial(jax.jit, static_argnames="component")
def _objective_and_gaps(
    component: Component, problem: MixtureProblem, factors: Factors, draws: Coefficients | None, final: FinalSums
) -> tuple[Array, Array]:
    """F, and E1 - F at each of S draws."""
    sums, base, gaps = final
    value = objective(component, problem._replace(base=base), factors, sums)
    if draws is not None:
        gap = partial(bound_gap, problem, sums, entropy(component, factors, sums))
        gaps = jax.vmap(gap)(draws, final.log_likelihoods)
    return value, gaps


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
    """One draw from rho as what a pass over the data reads."""
    log_weights, parameters = draw_parameters(rng_key, component, factors)
    return Coefficients(log_weights, *component.coefficients_at(parameters))


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
