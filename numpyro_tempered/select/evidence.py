"""The evidence from draws along a path of tempered posteriors."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_tempered.core import Columns, doubles


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
        # Chains that do not move have no autocovariance.
        size = size if math.isfinite(size) and size >= 1.0 else 1.0
    return size, math.sqrt(variance / size)


def moments(log_lik: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance at each alpha; minus and plus infinity where a draw has no likelihood."""
    finite = np.all(np.isfinite(log_lik), axis=(0, 1))
    values = np.where(finite, log_lik, 0.0)
    mean = np.where(finite, np.mean(values, axis=(0, 1)), -np.inf)
    return mean, np.where(finite, np.var(values, axis=(0, 1), ddof=1), np.inf)


def check_finite(grid: np.ndarray, log_lik: np.ndarray, at_zero: bool) -> None:
    """Refuse a log-likelihood that is not finite; draws of likelihood 0 at alpha = 0 are allowed ``at_zero``."""
    exempt = np.isneginf(log_lik) & (grid == 0) & at_zero
    bad = np.mean(~np.isfinite(log_lik) & ~exempt, axis=(0, 1))
    if np.any(bad):
        first = int(np.argmax(bad > 0))
        raise ValueError(
            f"the log-likelihood is not finite at {bad[first]:.2%} of the draws at alpha = {grid[first]:.3g}: "
            "look for NaN in the data, an overflow, or parameters of likelihood 0. Try float64."
        )
    if np.any(np.all(np.isneginf(log_lik[..., 0]), axis=1)):
        raise ValueError(
            "the likelihood is 0 at every draw from the prior: look for NaN in the data, or for an overflow "
            "under a prior that is too wide."
        )


def integrate(
    grid: np.ndarray,
    log_lik: np.ndarray,
    corrected: bool,
    se: Callable[[np.ndarray, int], float],
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
    end_var = np.array(
        [se(end[..., k], k) ** 2 if k else 0.0 for k in range(len(grid))]
    )
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


def log_evidence(grid: np.ndarray, log_lik: np.ndarray, exact_prior: bool) -> Columns:
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
        "log_z_integral": from_zero(stones[0], above.value),
        "log_z_integral_se": np.append(0.0, np.sqrt(stones_var[0] + above.se**2)),
        "log_z_left": from_zero(below, above.left),
        "log_z_right": from_zero(over, above.right),
        "log_z_trapezoid": from_zero(0.5 * (below + over), above.trapezoid),
        "log_z": cumulative(stones),
        "log_z_se": np.sqrt(cumulative(stones_var)),
    }


def cumulative(increments: np.ndarray) -> np.ndarray:
    """Sums from 0."""
    return np.append(0.0, np.cumsum(increments))


def largest_r_hat(arrays: list[np.ndarray]) -> np.ndarray:
    """The largest split R-hat of all coordinates by alpha, of arrays ``(chains, draws, A, ...)``.

    Coordinates that are constant or not finite have none, and chains that are stuck apart an infinite one; 1
    where no coordinate has.
    """
    largest = []
    for array in arrays:
        flat = np.reshape(doubles(array), (*array.shape[:3], -1))
        with np.errstate(all="ignore"):
            r_hat = split_gelman_rubin(flat)
        largest.append(np.where(np.isnan(r_hat), 1.0, r_hat))
    return np.max(np.concatenate(largest, axis=1), axis=1)


def svi_columns(
    grid: np.ndarray, log_lik: np.ndarray, log_ratio: np.ndarray
) -> Columns:
    """The table of a path from independent draws of log L and of log prior - log q, ``(1, draw, alpha)``."""

    def se(draws: np.ndarray, k: int) -> float:
        # The integral starts at the ELBO of alpha = 0.
        at_start = log_ratio[..., 0] if k == 0 else 0.0
        return mean_se(draws + at_start, True)[1]

    def standard_error(draws: np.ndarray) -> np.ndarray:
        return np.std(draws, axis=(0, 1), ddof=1) / math.sqrt(draws.shape[1])

    integral = integrate(grid, log_lik, False, se)
    elbos = grid * log_lik + log_ratio
    start = np.mean(log_ratio[..., 0])
    return {
        "elbo": np.mean(elbos, axis=(0, 1)),
        "elbo_se": standard_error(elbos),
        "elbo_integral": start + integral.value,
        "elbo_integral_se": np.append(
            standard_error(log_ratio[..., 0]), integral.se[1:]
        ),
        "elbo_left": start + integral.left,
        "elbo_right": start + integral.right,
        "expected_log_lik": np.mean(log_lik, axis=(0, 1)),
        "expected_log_lik_se": standard_error(log_lik),
        "var_log_lik": np.var(log_lik, axis=(0, 1), ddof=1),
        "kl": -np.mean(log_ratio, axis=(0, 1)),
    }


def mcmc_columns(
    grid: np.ndarray, values: Columns, stats: Columns, exact_prior: bool
) -> Columns:
    """The table of a path from draws by MCMC, axes ``(chain, draw, alpha, ...)``."""
    log_lik = stats["log_lik"]
    ess, se = np.transpose(
        [mean_se(log_lik[..., k], exact_prior and k == 0) for k in range(len(grid))]
    )
    mean, var = moments(log_lik)
    log_z = log_evidence(grid, log_lik, exact_prior)
    return {
        **log_z,
        "expected_log_lik": mean,
        "expected_log_lik_se": se,
        "var_log_lik": var,
        "kl": np.append(0.0, grid[1:] * mean[1:] - log_z["log_z"][1:]),
        "ess": ess,
        "r_hat": largest_r_hat([log_lik, *values.values()]),
        **(
            {"divergences": np.sum(stats["diverging"], axis=(0, 1))}
            if "diverging" in stats
            else {}
        ),
    }
