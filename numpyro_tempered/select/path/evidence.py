"""The evidence from draws along a path of tempered posteriors."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin


class Integral(NamedTuple):
    """An integral from the start of a grid to each of its points, by draws of the integrand.

    Attributes:
        value: By the trapezoidal rule, corrected where asked for.
        se: Its Monte Carlo standard error.
        left: Riemann sums at the left ends.
        right: Riemann sums at the right ends.
        trapezoid: By the trapezoidal rule, not corrected.
    """

    value: np.ndarray
    se: np.ndarray
    left: np.ndarray
    right: np.ndarray
    trapezoid: np.ndarray


def mean_se(draws: np.ndarray, independent: bool) -> tuple[float, float]:
    """Effective sample size and standard error of the mean, of draws ``(chains, draws)``."""
    if not np.all(np.isfinite(draws)):
        return float(draws.size), math.inf
    variance = float(np.var(draws, ddof=1))
    if independent or variance == 0.0:
        size = float(draws.size)
    else:
        with np.errstate(all="ignore"):
            size = float(effective_sample_size(draws))
        # Chains that each stand still have no autocovariance to go by.
        size = size if math.isfinite(size) and size >= 1.0 else 1.0
    return size, math.sqrt(variance / size)


def moments(log_lik: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance at each alpha; minus and plus infinity where a draw has no likelihood."""
    finite = np.all(np.isfinite(log_lik), axis=(0, 1))
    kept = np.where(finite, log_lik, 0.0)
    mean = np.where(finite, np.mean(kept, axis=(0, 1)), -np.inf)
    return mean, np.where(finite, np.var(kept, axis=(0, 1), ddof=1), np.inf)


def integrate(
    grid: np.ndarray, log_lik: np.ndarray, corrected: bool, se: Callable[[np.ndarray, int], float]
) -> Integral:
    """The integral of E[log L] over alpha by the trapezoidal rule, and its Riemann sums.

    The corrected rule adds -h²/12 (Var_right - Var_left) to an interval of width h: the variance of log L is the
    derivative of its mean. Both are linear in the means and variances of draws that are independent from
    alpha to alpha, so the standard error is that of the means of their influence functions.

    Args:
        grid: Alphas, ``(A,)``.
        log_lik: Draws of log L, ``(chains, draws, A)``.
        corrected: Whether to correct.
        se: Standard error of the mean of draws ``(chains, draws)`` at the k-th alpha.
    """
    step = np.diff(grid)
    mean, var = moments(log_lik)
    deviation = log_lik - mean
    trapezoid = 0.5 * step * (mean[1:] + mean[:-1])
    increments = trapezoid - step**2 / 12.0 * np.diff(var) if corrected else trapezoid
    # The integrand increases: outside of its Riemann sums an increment is wrong, as where the variance falls
    # by orders of magnitude in one interval.
    sums = step * mean[:-1], step * mean[1:]
    increments = np.clip(increments, np.minimum(*sums), np.maximum(*sums))
    before, after = np.append(0.0, step), np.append(step, 0.0)
    second = (deviation**2 - var) / 12.0 if corrected else np.zeros_like(deviation)
    inner = 0.5 * (before + after) * deviation + (after**2 - before**2) * second
    end = 0.5 * before * deviation - before**2 * second
    # Of the alphas below, and of the last one itself.
    inner_var = np.array([se(inner[..., k], k) ** 2 for k in range(len(grid))])
    end_var = np.array([se(end[..., k], k) ** 2 if k else 0.0 for k in range(len(grid))])
    return Integral(
        value=cumulative(increments),
        se=np.sqrt(cumulative(inner_var[:-1]) + end_var),
        left=cumulative(sums[0]),
        right=cumulative(sums[1]),
        trapezoid=cumulative(trapezoid),
    )


def stepping_stones(
    grid: np.ndarray, log_lik: np.ndarray, se: Callable[[np.ndarray, int], float]
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of log Z_right - log Z_left = log E_left[L^h] for each interval, and their variances."""
    exponent = np.diff(grid) * log_lik[..., :-1]
    top = np.max(exponent, axis=(0, 1))
    ratio = np.exp(exponent - top)
    average = np.mean(ratio, axis=(0, 1))
    variance = [(se(ratio[..., k], k) / average[k]) ** 2 for k in range(len(grid) - 1)]
    return top + np.log(average), np.asarray(variance)


def log_evidence(grid: np.ndarray, log_lik: np.ndarray, exact_prior: bool) -> dict[str, np.ndarray]:
    """The columns of log Z: by integration, its bracket, and by stepping stones.

    The integral takes its first interval, from 0, by a stepping stone: E_0[log L] can be minus infinity where
    Z is not, for instance where the prior of a standard deviation reaches 0.
    """

    def se(draws: np.ndarray, k: int) -> float:
        return mean_se(draws, exact_prior and k == 0)[1]

    def se_above(draws: np.ndarray, k: int) -> float:
        return mean_se(draws, False)[1]

    stones, stones_var = stepping_stones(grid, log_lik, se)
    above = integrate(grid[1:], log_lik[..., 1:], True, se_above)
    below, over = grid[1] * moments(log_lik)[0][:2]

    def from_zero(first: float, rest: np.ndarray) -> np.ndarray:
        return np.append(0.0, first + rest)

    return {
        "log_z": from_zero(stones[0], above.value),
        "log_z_se": np.append(0.0, np.sqrt(stones_var[0] + above.se**2)),
        "log_z_left": from_zero(below, above.left),
        "log_z_right": from_zero(over, above.right),
        "log_z_trapezoid": from_zero(0.5 * (below + over), above.trapezoid),
        "log_z_stones": cumulative(stones),
        "log_z_stones_se": np.sqrt(cumulative(stones_var)),
    }


def cumulative(increments: np.ndarray) -> np.ndarray:
    """Sums from 0."""
    return np.append(0.0, np.cumsum(increments))


def largest_r_hat(arrays: list[np.ndarray]) -> np.ndarray:
    """The largest split R-hat of all coordinates by alpha, of arrays ``(chains, draws, A, ...)``.

    Coordinates that are constant or not finite have none; 1 where no coordinate has.
    """
    found = []
    for array in arrays:
        flat = np.reshape(np.asarray(array, dtype=np.float64), (*array.shape[:3], -1))
        with np.errstate(all="ignore"):
            r_hat = split_gelman_rubin(flat)
        found.append(np.where(np.isfinite(r_hat), r_hat, 1.0))
    return np.max(np.concatenate(found, axis=1), axis=1)
