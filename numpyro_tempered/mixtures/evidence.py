"""E1, the bound on the log evidence that model selection is about, by Monte Carlo."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.blocks import Blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import Factors, Problem, entropy
from numpyro_tempered.mixtures.sweep import Coefficients, Sums, sweep


class Bound(NamedTuple):
    """A Monte Carlo estimate of E1 = alpha E[log L] - KL(rho, prior).

    Attributes:
        value: The estimate, F plus the mean of gaps that are never negative.
        se: Its standard error.
    """

    value: float
    se: float

    @classmethod
    def of(cls, objective: float, gaps: np.ndarray) -> "Bound":
        """From F and the gaps of independent draws."""
        # One draw tells nothing of its error.
        se = float(np.std(gaps, ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else float("inf")
        return cls(objective + float(np.mean(gaps)), se)


def bound_gap(
    component: Component,
    problem: Problem,
    factors: Factors,
    draws: Coefficients,
    sums: Sums,
    blocks: Blocks,
) -> Array:
    r"""Draws of E1 - F, ``(S,)``.

    With parameters drawn from rho (``draws``, with leading axis S),
    :math:`\alpha \{\log L - \sum_{ij} \omega_{ij} [\log p_j q_{\theta_j}(x_i) - \log \omega_{ij}]\}`:
    the second term has F's expectation in closed form and follows most of log L, so
    that little noise is left, and by Jensen's inequality no draw is negative.
    """
    spread = entropy(component, factors, sums)

    def gap(mixture: Coefficients) -> Array:
        return gap_at(problem, mixture, sums, spread, sweep(component, mixture, blocks).log_sum)

    return jax.lax.map(gap, draws)


def gap_at(problem: Problem, mixture: Coefficients, sums: Sums, spread: Array, log_likelihood: Array) -> Array:
    """E1 - F at one draw.

    Args:
        problem: The problem.
        mixture: The draw.
        sums: Counts and statistics under the responsibilities.
        spread: The weighted sum of the responsibilities' entropies.
        log_likelihood: log L of the draw, without log h.
    """
    complete = jnp.sum(sums.counts * (mixture.log_weights + mixture.constant))
    complete = complete + jnp.sum(sums.statistics * mixture.weights) + spread
    return problem.alpha * (log_likelihood - complete)


def draw_parameters(rng_key: Array, component: Component, factors: Factors) -> tuple[Array, dict[str, Array]]:
    """One draw from rho: log weights ``(K,)``, and the components' parameters by name, K first."""
    key, *rest = jax.random.split(rng_key, 17)
    keys = iter(rest)
    # The gammas of a Dirichlet underflow for small concentrations, their logarithms do not.
    log_weights = jax.nn.log_softmax(jax.random.loggamma(key, factors.concentration))
    return log_weights, component.draw(lambda name, fn: fn.sample(next(keys)), factors.posterior)


@partial(jax.jit, static_argnames=("component", "num_samples"))
def draw_many(rng_key: Array, component: Component, factors: Factors, num_samples: int) -> Coefficients:
    """Draws from rho, with leading axis S.

    Compiled by itself: samplers of gammas take longer to compile than all else, and depend on no data.
    """
    keys = jax.random.split(rng_key, num_samples)
    return jax.lax.map(lambda key: draw_coefficients(key, component, factors), keys)


def draw_coefficients(rng_key: Array, component: Component, factors: Factors) -> Coefficients:
    """One draw from rho as what a pass over the data reads."""
    log_weights, parameters = draw_parameters(rng_key, component, factors)
    return Coefficients(log_weights, *component.coefficients_at(parameters))
