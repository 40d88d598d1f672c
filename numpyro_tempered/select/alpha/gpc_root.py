"""The power at which a coverage has its level."""

import math
from collections.abc import Callable

import numpy as np

# Of log alpha.
TOLERANCE = 1e-6
# Factors of e to go, in search of a bracket, from the power that the curvature asks for.
REACH = 9.0


def interpolated(alphas: np.ndarray, ratios: np.ndarray) -> Callable[[float], np.ndarray]:
    """The ratios ``(B,)`` at any alpha between those of the grid, from ``(B, A)``, in logarithms."""
    logs, tiny = np.log(alphas), np.finfo(float).tiny

    def at(alpha: float) -> np.ndarray:
        k = int(np.clip(np.searchsorted(logs, math.log(alpha)), 1, max(len(logs) - 1, 1)))
        if len(logs) == 1:
            return ratios[:, 0]
        share = (math.log(alpha) - logs[k - 1]) / (logs[k] - logs[k - 1])
        low, high = np.log(np.maximum(ratios[:, k - 1 : k + 1], tiny)).T
        return np.exp((1.0 - share) * low + share * high)

    return at


def solve(
    ratios: Callable[[float], np.ndarray], level: float, guess: float, bounds: tuple[float, float]
) -> tuple[float, float, list[tuple[float, float]]]:
    """The alpha at which the level quantile of the ratios is 1, its standard error, and the coverage on the way.

    Raises:
        ValueError: If there is none within the bounds, or none near ``guess`` without bounds.
    """
    from scipy.optimize import brentq

    curve: dict[float, float] = {}

    def excess(log_alpha: float) -> float:
        values = ratios(math.exp(log_alpha))
        curve[math.exp(log_alpha)] = float(np.mean(values <= 1.0))
        return math.log(max(float(np.quantile(values, level)), np.finfo(float).tiny))

    least, largest = (math.log(b) if b > 0 else -math.inf for b in bounds)
    start = min(max(math.log(guess), least), largest)
    least, largest = max(least, start - REACH), min(largest, start + REACH)
    low = high = start
    at_low = at_high = excess(start)
    while at_low > 0 and low > least:
        low = max(low - 1.0, least)
        at_low = excess(low)
    while at_high <= 0 and high < largest:
        high = min(high + 1.0, largest)
        at_high = excess(high)
    if at_low > 0 or at_high <= 0:
        for end in bounds:
            if 0.0 < end < math.inf:
                excess(math.log(end))
        alphas = sorted(curve)
        raise ValueError(
            f"no power has coverage {level:g}: it is {curve[alphas[0]]:.3f} at alpha = {alphas[0]:.3g} and "
            f"{curve[alphas[-1]]:.3f} at {alphas[-1]:.3g}. Where it is above the level at the largest, extend "
            "the alphas upwards; below it at the smallest, downwards. If they are small already, the prior "
            "forbids the minimiser: look at the prior."
        )
    root = brentq(excess, low, high, xtol=TOLERANCE)
    values = ratios(math.exp(root))
    apart = math.sqrt(level * (1.0 - level) / len(values))
    either = np.quantile(values, [max(level - apart, 0.0), min(level + apart, 1.0)])
    side = 0.1 if root + 0.1 <= largest else -0.1
    slope = (excess(root + side) - excess(root)) / side
    spread = math.log(either[1] / max(either[0], np.finfo(float).tiny)) / (2.0 * max(slope, 1e-3))
    return math.exp(root), math.exp(root) * spread, sorted(curve.items())
