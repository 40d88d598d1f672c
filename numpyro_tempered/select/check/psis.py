"""Pareto-smoothed importance weights, by ArviZ in either generation."""

from importlib.metadata import version

import numpy as np

from numpyro_tempered.core import doubles

# In nats: ratios that agree so far have no tail but that of rounding.
FLAT = 1e-4


def smooth(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Normalised log weights with a smoothed tail, and the Pareto k of that tail.

    Args:
        log_ratios: Logarithms of the ratios of two densities, up to a constant, shape ``(S,)``; minus infinity
            where the first is 0.

    Returns:
        The log weights, whose exponentials sum to 1, and k: the moments of the ratios that exist are those below
        1 / k. Ratios that are all the same have no tail, and k is minus infinity.

    References:
        Vehtari, Simpson, Gelman, Yao, Gabry, *Pareto smoothed importance sampling*, JMLR 2024.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.select.check.psis import smooth
        >>> x = np.random.default_rng(0).normal(size=4000)  # of N(0, 1), for N(0, 1.1^2)
        >>> log_weights, k = smooth(0.5 * x**2 - 0.5 * (x / 1.1) ** 2)
        >>> bool(k < 0.4), round(float(np.exp(log_weights).sum()), 6)
        (True, 1.0)
    """
    log_ratios = doubles(log_ratios)
    peak = log_ratios.max()
    plain = log_ratios - peak - np.log(np.sum(np.exp(log_ratios - peak)))
    tail = np.sort(log_ratios)[-_tail_length(log_ratios.size) :]
    if np.ptp(tail) <= FLAT:
        return plain, -np.inf
    with np.errstate(over="ignore"):  # of shapes that the fit of the tail tries
        if int(version("arviz").split(".")[0]) >= 1:
            from arviz_stats.base import array_stats  # type: ignore[import-not-found,unused-ignore]

            # It takes the logarithms of the inverse ratios.
            log_weights, k = array_stats.psislw(-log_ratios)
        else:
            from arviz import psislw

            log_weights, k = psislw(log_ratios)
    return np.asarray(log_weights), float(k)


def _tail_length(num_draws: int) -> int:
    """How many of the largest ratios ArviZ takes for the tail."""
    return max(5, int(min(0.2 * num_draws, 3.0 * np.sqrt(num_draws))))
