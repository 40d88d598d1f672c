"""Ranks of true parameters among draws: what they say of bias, spread and shape."""

import math
from typing import NamedTuple

import numpy as np

LEVEL = 0.05


class Judgement(NamedTuple):
    """What the ranks of P scalars say, ``(P,)`` each.

    Attributes:
        mean_pit: The mean share of draws below the truth; above 1/2 the posteriors are too low.
        bias: The mean of the normal scores: errors in posterior standard deviations.
        spread: Their standard deviation: 1 calibrated, above 1 too narrow.
        vsbc: The Kolmogorov-Smirnov distance between the ranks and their mirror images.
        p_bias: Of ``bias`` being 0, by the t test.
        p_spread: Of ``spread`` being 1, or between 1 and the square root of alpha, by the chi-squared test.
        p_uniform: Of uniform ranks, by the Kolmogorov-Smirnov test.
        p_symmetric: Of ``vsbc`` where ranks are symmetric about 1/2.
        p_value: Of all of these that alpha lets one judge, adjusted for their number and that of the scalars.
        verdict: In words.
    """

    mean_pit: np.ndarray
    bias: np.ndarray
    spread: np.ndarray
    vsbc: np.ndarray
    p_bias: np.ndarray
    p_spread: np.ndarray
    p_uniform: np.ndarray
    p_symmetric: np.ndarray
    p_value: np.ndarray
    verdict: np.ndarray


def random_pit(
    rng: np.random.Generator, less: np.ndarray, equal: np.ndarray, num_draws: int
) -> tuple:
    """Ranks with ties broken at random, and uniform places within them, which make them a continuous variable.

    Args:
        rng: Generator.
        less: Number of draws below the truth.
        equal: Number of draws that equal it.
        num_draws: L.

    Returns:
        Ranks in 0, ..., L, and (rank + U) / (L + 1) in (0, 1), uniform where the truth is one more draw.
    """
    ranks = less + rng.integers(0, equal + 1)
    places = rng.uniform(1e-6, 1.0 - 1e-6, np.shape(ranks))
    return ranks, (ranks + places) / (num_draws + 1)


def judge(
    pit: np.ndarray, num_draws: int, alpha: float, is_judged: np.ndarray
) -> Judgement:
    """Test the ranks of P scalars.

    The normal scores z of a calibrated posterior are standard normal, whatever its form: their mean and spread
    have exact tests. An exact tempered posterior of a normal mean has a variance of z between 1 and alpha, see
    :func:`numpyro_tempered.check_calibration`, which is what ``p_spread`` allows; its ranks are not uniform, and
    ``p_uniform`` is then no part of the verdict.

    Args:
        pit: Of :func:`random_pit`, ``(N, P)``.
        num_draws: L.
        alpha: Power of the likelihood.
        is_judged: Which scalars have a verdict, ``(P,)``: those of which something is known at this alpha.
    """
    from scipy import stats

    num, scores = len(pit), stats.norm.ppf(pit)
    mean, sd = np.mean(scores, axis=0), np.std(scores, axis=0, ddof=1)
    p_bias = 2.0 * stats.t.sf(np.abs(mean) / sd * math.sqrt(num), num - 1)
    total = (num - 1) * sd**2
    wide = stats.chi2.cdf(total / min(alpha, 1.0), num - 1)
    narrow = stats.chi2.sf(total / max(alpha, 1.0), num - 1)
    p_spread = np.minimum(1.0, 2.0 * np.minimum(wide, narrow))
    p_uniform = np.array([stats.kstest(column, "uniform").pvalue for column in pit.T])
    vsbc = np.array(
        [
            stats.ks_2samp(column, 1.0 - column, method="asymp").statistic
            for column in pit.T
        ]
    )
    p_symmetric = exit_probability(math.sqrt(num) * vsbc)
    tests = np.stack([p_bias, p_spread] + [p_uniform] * (alpha == 1.0))
    p_value = np.full(len(is_judged), np.nan)
    p_value[is_judged] = holm(
        np.minimum(1.0, len(tests) * np.min(tests[:, is_judged], axis=0))
    )
    is_bad = tests * len(tests) * np.sum(is_judged) <= LEVEL
    verdict = np.array(
        [
            _words(*column)
            for column in zip(p_value, mean, narrow < wide, is_bad.T, strict=True)
        ]
    )
    bias, spread = estimate(scores, float(stats.norm.ppf(num_draws / (num_draws + 1))))
    return Judgement(
        np.mean(pit, axis=0),
        bias,
        spread,
        vsbc,
        p_bias,
        p_spread,
        p_uniform,
        p_symmetric,
        p_value,
        verdict,
    )


def estimate(
    scores: np.ndarray, limit: float, num_iter: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of normal scores that are known up to a limit, by maximum likelihood.

    A truth beyond all draws has a score beyond the limit, and no more is known of it: as in a Tobit model, by EM.

    Args:
        scores: ``(N, P)``.
        limit: The score of the last rank.
        num_iter: Iterations.
    """
    from scipy import stats

    signs = np.where(np.abs(scores) > limit, np.sign(scores), 0.0)
    mean, sd = np.mean(scores, axis=0), np.std(scores, axis=0)
    for _ in range(num_iter if np.any(signs) else 0):
        # Moments of the part of the normal beyond the limit, on either side.
        start = (limit - signs * mean) / sd
        ratio = np.exp(stats.norm.logpdf(start) - stats.norm.logsf(start))
        first = np.where(signs == 0.0, scores, mean + signs * sd * ratio)
        variance = np.where(signs == 0.0, 0.0, sd**2 * (1.0 + start * ratio - ratio**2))
        before = mean, sd
        mean = np.mean(first, axis=0)
        sd = np.maximum(np.sqrt(np.mean(variance + (first - mean) ** 2, axis=0)), 1e-6)
        if np.allclose(before, (mean, sd), rtol=0.0, atol=1e-6):
            break
    return mean, sd


def _words(p_value: float, bias: float, is_narrow: bool, is_bad: np.ndarray) -> str:
    if np.isnan(p_value):
        return "not judged"
    if p_value > LEVEL:
        return "no sign of error"
    words = ["too low" if bias > 0 else "too high"] * bool(is_bad[0])
    words += ["too narrow" if is_narrow else "too wide"] * bool(is_bad[1])
    return " and ".join(words) or "not uniform"


def exit_probability(bound: np.ndarray) -> np.ndarray:
    """The probability that a Brownian motion on [0, 1] leaves ``[-bound, bound]``.

    The distance of ranks from their mirror images, times the square root of their number, has this limit: the
    two samples mirror each other, and the two-sample test, which takes them for independent, rejects too often.
    """
    bound = np.maximum(bound, 1e-3)[..., None]
    odd = 2 * np.arange(1000) + 1
    stays = (
        4.0
        / np.pi
        * np.sum(
            np.resize([1.0, -1.0], 1000)
            / odd
            * np.exp(-((np.pi * odd / bound) ** 2) / 8.0),
            -1,
        )
    )
    return np.clip(1.0 - stays, 0.0, 1.0)


def holm(p_values: np.ndarray) -> np.ndarray:
    """P values adjusted for their number, by the method of Holm."""
    order = np.argsort(p_values)
    factors = len(p_values) - np.arange(len(p_values))
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * p_values[order]))
    return adjusted
