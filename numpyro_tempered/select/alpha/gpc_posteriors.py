"""How far the minimiser lies from the posteriors of bootstrap data sets, in units of their credible sets."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Draws
from numpyro_tempered.select.alpha.data_weights import over_resamples
from numpyro_tempered.select.alpha.minimise import minimise
from numpyro_tempered.select.alpha.sandwich import Flat

# Effective sample size that the weights of a resample must have, and the share of resamples that may miss it.
LEAST_ESS, SHARE_BELOW = 40.0, 0.01

Quantity = Callable[[Array], Array]
# From alpha to the ratio of squared distance and squared radius of each resample, (B,).
Ratios: TypeAlias = Callable[[float], np.ndarray]


def laplace_ratios(
    flat: Flat, quantity: Quantity | None, point: Array, counts: Array, threshold: float, alpha: Array
) -> tuple[Array, Array]:
    """Squared Mahalanobis distance of the minimiser over ``threshold``, by Laplace's method at the power alpha.

    Returns:
        The ratios and whether a mode exists, ``(B,)`` each. At a ratio of at most 1 the set covers.
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
        return jnp.sum(jnp.square(scaled)) / threshold, mode.converged

    return over_resamples(of_resample, counts.astype(point.dtype), len(point))


def laplace_ratios_at(flat: Flat, quantity: Quantity | None, point: Array, counts: Array, level: float) -> Ratios:
    """:func:`laplace_ratios` as a function of alpha, by one compiled program.

    Raises:
        ValueError: In that function, if a resample has no mode.
    """
    from scipy.stats import chi2

    dim = len(point) if quantity is None else jax.eval_shape(quantity, point).size
    threshold = float(chi2.ppf(level, dim))
    program = jax.jit(lambda alpha, counts: laplace_ratios(flat, quantity, point, counts, threshold, alpha))

    def ratios(alpha: float) -> np.ndarray:
        values, modes = jax.device_get(program(jnp.asarray(alpha, point.dtype), counts))
        good = modes & np.isfinite(values)
        if not np.all(good):
            raise ValueError(
                f"at alpha = {alpha:.3g} the posteriors of {np.sum(~good)} of {len(good)} resamples have no mode "
                "that Newton's method finds, or a constant quantity: look at the prior, or take "
                'posterior="method".'
            )
        return values.astype(np.float64)

    return ratios


def credible_set(quantity: Callable[[Draws], Array], level: float) -> Callable[[Draws], dict[str, Array]]:
    """From draws to the ellipsoid around their mean that holds the share ``level`` of them."""

    def reduce(draws: Draws) -> dict[str, Array]:
        values = quantity(draws)
        mean = jnp.mean(values, axis=0)
        centred = values - mean
        factor = jnp.linalg.cholesky(centred.T @ centred / (len(values) - 1))
        scaled = solve_triangular(factor, centred.T, lower=True)
        radius = jnp.quantile(jnp.sum(jnp.square(scaled), axis=0), level)
        return {"mean": mean, "factor": factor, "radius": radius}

    return reduce


def ellipsoid_ratios(sets: dict[str, np.ndarray], at: np.ndarray) -> np.ndarray:
    """Ratios of the point ``at``, with the leading axes of the sets."""
    off = (at - sets["mean"]).astype(np.float64)
    scaled = np.linalg.solve(sets["factor"].astype(np.float64), off[..., None])[..., 0]
    return np.sum(np.square(scaled), axis=-1) / sets["radius"]


def reweighted_ratios(
    draws: dict[str, np.ndarray], alphas: np.ndarray, counts: np.ndarray, at: np.ndarray, level: float
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    r"""Ratios at each alpha from draws of the posteriors of all data, weighted towards those of the resamples.

    A draw at the power a has weight :math:`L_b^\alpha / L^a` in the posterior of resample b at α. Each α takes
    the power a of the grid whose weights have the largest effective sample size; it is usually below α, where
    draws spread further.

    Args:
        draws: ``values`` of the quantity ``(1, A, S, k)``, and ``log_lik`` of each datum ``(1, A, S, n)``.
        alphas: The grid, ``(A,)``.
        counts: Of the resamples, ``(B, n)``.
        at: The quantity at the minimiser, ``(k,)``.
        level: Of the credible sets.

    Returns:
        Ratios ``(B, A)``, which alphas have enough draws ``(A,)``, and the columns ``ess``, the effective sample
        size that all but a hundredth of the resamples reach, and ``draws_from``, the a.

    Raises:
        ValueError: If no alpha has enough draws.
    """
    counts, num = np.asarray(counts), len(alphas)
    values, log_lik = (np.asarray(draws[name][0], np.float64) for name in ("values", "log_lik"))
    # Relative to the mean over draws, which leaves the weights as they are and keeps the digits of the sums.
    log_lik = log_lik - log_lik.mean(axis=1, keepdims=True)
    totals = [counts @ each.T for each in log_lik]
    total = log_lik.sum(axis=-1)
    ratios, ess, sources = np.empty((len(counts), num)), np.empty(num), np.empty(num)
    for i, alpha in enumerate(alphas):
        for j, source in enumerate(alphas):
            candidate = alpha * totals[j] - source * total[j]
            candidate = np.exp(candidate - candidate.max(axis=1, keepdims=True))
            candidate /= candidate.sum(axis=1, keepdims=True)
            size = float(np.quantile(1.0 / np.sum(np.square(candidate), axis=1), SHARE_BELOW))
            if j == 0 or size > ess[i]:
                ess[i], sources[i], best, weights = size, source, j, candidate
        ratios[:, i] = [_weighted_ratio(values[best], row, at, level) for row in weights]
    usable = (np.asarray(alphas) > 0) & (ess >= LEAST_ESS)
    if not np.any(usable):
        raise ValueError(
            f"the weights of the draws have an effective sample size of at most {ess.max():.1f} in all but a "
            f"hundredth of the resamples, and need {LEAST_ESS:g}: take more draws or alphas, "
            'posterior="laplace" or "method".'
        )
    return ratios, usable, {"ess": ess, "draws_from": sources}


def _weighted_ratio(values: np.ndarray, weights: np.ndarray, at: np.ndarray, level: float) -> float:
    mean = weights @ values
    centred = values - mean
    covariance = (weights[:, None] * centred).T @ centred
    # One draw with all the weight has no ellipsoid; its resample is below LEAST_ESS.
    if np.linalg.matrix_rank(covariance, hermitian=True) < len(mean):
        return np.inf
    factor = np.linalg.cholesky(covariance)
    distances = np.sum(np.square(np.linalg.solve(factor, centred.T)), axis=0)
    order = np.argsort(distances)
    radius = distances[order[min(int(np.searchsorted(np.cumsum(weights[order]), level)), len(order) - 1)]]
    return float(np.sum(np.square(np.linalg.solve(factor, at - mean))) / radius)
