"""Divergences of a posterior from what it was drawn from, by importance weights."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import doubles
from numpyro_tempered.select.check.psis import smooth


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
