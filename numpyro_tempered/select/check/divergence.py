"""Divergences of a posterior from what it was drawn from, by importance weights, smoothed by PSIS."""

import math
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import doubles


class Divergences(NamedTuple):
    r"""How far a posterior p is from the q of the draws.

    .. math:: \mathrm{ELBO} = E_q \log w, \quad \mathrm{CUBO}_2 = \tfrac12 \log E_q w^2, \quad
              \mathrm{ELBO} \le \log Z \le \mathrm{CUBO}_2, \quad
              D_2(p \| q) = 2 (\mathrm{CUBO}_2 - \log Z), \quad \chi^2 = e^{D_2} - 1

    Attributes:
        elbo: ELBO, in nats.
        elbo_se: Its Monte Carlo standard error.
        cubo: CUBO_2, in nats.
        cubo_se: Its Monte Carlo standard error, of little worth where ``pareto_k`` exceeds 1/4.
        d2_bound: 2 (CUBO_2 - ELBO), which D_2 does not exceed.
        d2: An estimate of D_2, with log Z by the smoothed weights.
        log_evidence: That log Z.
        pareto_k: Shape of the tail of the weights: E w² is infinite above 1/2.
    """

    elbo: float
    elbo_se: float
    cubo: float
    cubo_se: float
    d2_bound: float
    d2: float
    log_evidence: float
    pareto_k: float

    @property
    def chi(self) -> float:
        """The root of χ², of the bound on D_2."""
        return math.sqrt(math.expm1(min(max(self.d2_bound, 0.0), 700.0)))


def divergences(log_ratios: np.ndarray) -> tuple[Divergences, np.ndarray]:
    """The divergences of importance ratios, and their smoothed weights.

    Args:
        log_ratios: log w = log joint - log q at S draws of q, shape ``(S,)``, in nats.

    Returns:
        Divergences, and weights ``(S,)`` that sum to 1.

    References:
        Dieng, Tran, Ranganath, Paisley, Blei, *Variational inference via χ upper bound minimization*, 2017 (of
        CUBO); Huggins, Kasprzak, Campbell, Broderick, *Validated variational inference via practical posterior
        error bounds*, AISTATS 2020.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.select.check.divergence import divergences
        >>> x = 0.1 + 0.9 * np.random.default_rng(0).normal(size=4000)
        >>> log_ratios = -0.5 * x**2 + 0.5 * ((x - 0.1) / 0.9) ** 2 + np.log(0.9)
        >>> result, weights = divergences(log_ratios)
        >>> print(f"{result.d2:.2f} of .0444, at most {result.d2_bound:.2f}")
        0.04 of .0444, at most 0.08
    """
    log_ratios = doubles(log_ratios)
    peak = log_ratios.max()
    squares = np.exp(2.0 * (log_ratios - peak))
    mean_square = float(squares.mean())
    cubo = 0.5 * math.log(mean_square) + float(peak)
    root = math.sqrt(log_ratios.size)
    elbo = float(log_ratios.mean())
    with np.errstate(invalid="ignore"):  # of an infinite ratio
        elbo_se = float(log_ratios.std(ddof=1)) / root
    log_weights, pareto_k = smooth(log_ratios)
    # The smoothed tail in the place of the largest ratios, on the scale of those below it.
    middle = int(np.argsort(log_ratios)[log_ratios.size // 2])
    log_evidence = float(
        log_ratios[middle] - log_weights[middle] - math.log(log_ratios.size)
    )
    return (
        Divergences(
            elbo=elbo,
            elbo_se=elbo_se,
            cubo=cubo,
            cubo_se=float(squares.std(ddof=1)) / (2.0 * root * mean_square),
            d2_bound=2.0 * (cubo - elbo),
            d2=max(0.0, math.log(np.sum(np.exp(2.0 * log_weights)) * log_ratios.size)),
            log_evidence=log_evidence,
            pareto_k=pareto_k,
        ),
        np.exp(log_weights),
    )


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
        >>> from numpyro_tempered.select.check.divergence import smooth
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
