"""How far the minimiser lies from the posteriors of bootstrap data sets, in units of their credible sets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Draws
from numpyro_tempered.select.alpha.minimise import minimise
from numpyro_tempered.select.alpha.resampling import over_resamples
from numpyro_tempered.select.alpha.sandwich import Flat

# Draws that the weights of a resample must leave, and the share of resamples that may miss them.
LEAST_ESS, SHARE_BELOW = 40.0, 0.01

Quantity = Callable[[Array], Array]


def laplace_ratios(
    flat: Flat,
    quantity: Quantity | None,
    point: Array,
    counts: Array,
    threshold: float,
    alpha: Array,
) -> tuple[Array, Array]:
    """Squared Mahalanobis distance of the minimiser over ``threshold``, by Laplace's method at the power alpha.

    Returns:
        The ratios and whether a mode was found, ``(B,)`` each. At a ratio of at most 1 the set covers.
    """

    def of_resample(counts: Array) -> tuple[Array, Array]:
        def terms(theta: Array) -> Array:
            return jnp.append(alpha * counts * flat.losses(theta), -flat.log_prior(theta))

        mode = minimise(terms, point)
        factor = jnp.linalg.cholesky(mode.hessian)
        if quantity is None:
            scaled = factor.T @ (point - mode.point)
        else:
            off = quantity(point) - quantity(mode.point)
            half = solve_triangular(factor, jax.jacfwd(quantity)(mode.point).T, lower=True)
            scaled = solve_triangular(jnp.linalg.cholesky(half.T @ half), off, lower=True)
        return jnp.sum(jnp.square(scaled)) / threshold, mode.found

    return over_resamples(of_resample, counts.astype(point.dtype), len(point))


def credible_set(quantity: Callable[[Draws], Array], level: float) -> Callable[[Draws], dict[str, Array]]:
    """From draws to the ellipsoid around their mean that holds the share ``level`` of them."""

    def reduce(draws: Draws) -> dict[str, Array]:
        values = quantity(draws)
        mean = jnp.mean(values, axis=0)
        centred = values - mean
        factor = jnp.linalg.cholesky(centred.T @ centred / (len(values) - 1))
        scaled = solve_triangular(factor, centred.T, lower=True)
        return {
            "mean": mean,
            "factor": factor,
            "radius": jnp.quantile(jnp.sum(jnp.square(scaled), axis=0), level),
        }

    return reduce


def ellipsoid_ratios(sets: dict[str, np.ndarray], at: np.ndarray) -> np.ndarray:
    """Ratios of the point ``at``, with the leading axes of the sets."""
    off = (at - sets["mean"]).astype(np.float64)
    scaled = np.linalg.solve(sets["factor"].astype(np.float64), off[..., None])[..., 0]
    return np.sum(np.square(scaled), axis=-1) / sets["radius"]


def reweighted_ratios(
    values: np.ndarray, log_lik: np.ndarray, alphas: np.ndarray, counts: np.ndarray, at: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Ratios at each alpha from draws of the posteriors of all data, weighted towards those of the resamples.

    A draw at the power a has weight :math:`L_b^\alpha / L^a` in the posterior of resample b at α. Of the powers a
    of the grid that one is taken whose weights leave most draws; it is below α as a rule, where draws are wider.

    Args:
        values: The quantity at the draws, ``(A, S, k)``.
        log_lik: Log-likelihood of each datum, ``(A, S, n)``.
        alphas: The grid, ``(A,)``.
        counts: Of the resamples, ``(B, n)``.
        at: The quantity at the minimiser, ``(k,)``.
        level: Of the credible sets.

    Returns:
        Ratios ``(B, A)``, effective numbers of draws that all but a hundredth of the resamples have ``(A,)``, and
        the powers that the draws are from ``(A,)``.
    """
    num = len(alphas)
    values, log_lik = np.asarray(values, np.float64), np.asarray(log_lik, np.float64)
    # Relative to the mean over draws, which leaves the weights as they are and the digits in the sums.
    log_lik = log_lik - log_lik.mean(axis=1, keepdims=True)
    resampled = [counts @ each.T for each in log_lik]
    total = log_lik.sum(axis=-1)
    ratios, ess, sources = np.empty((len(counts), num)), np.empty(num), np.empty(num)
    for i, alpha in enumerate(alphas):
        best: Any = None
        for j, source in enumerate(alphas):
            weights = alpha * resampled[j] - source * total[j]
            weights = np.exp(weights - weights.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            left = float(np.quantile(1.0 / np.sum(np.square(weights), axis=1), SHARE_BELOW))
            if best is None or left > best[0]:
                best = left, j, weights
        ess[i], j, weights = best
        sources[i] = alphas[j]
        ratios[:, i] = [_weighted_ratio(values[j], row, at, level) for row in weights]
    return ratios, ess, sources


def _weighted_ratio(values: np.ndarray, weights: np.ndarray, at: np.ndarray, level: float) -> float:
    mean = weights @ values
    centred = values - mean
    covariance = (weights[:, None] * centred).T @ centred
    # One draw with all the weight has no ellipsoid; its resample is counted among those below LEAST_ESS.
    if np.linalg.matrix_rank(covariance, hermitian=True) < len(mean):
        return np.inf
    factor = np.linalg.cholesky(covariance)
    distances = np.sum(np.square(np.linalg.solve(factor, centred.T)), axis=0)
    order = np.argsort(distances)
    reached = min(int(np.searchsorted(np.cumsum(weights[order]), level)), len(order) - 1)
    return float(np.sum(np.square(np.linalg.solve(factor, at - mean))) / distances[order[reached]])
