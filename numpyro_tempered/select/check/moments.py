"""Means, standard deviations and covariances of a posterior, from those of what it was drawn from."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.infer.moments import LocationScale, Moments, of_draws
from numpyro_tempered.select.check.divergence import smooth

# Pareto k of weighted squares: above them these have no variance, and no mean that draws could tell.
UNCERTAIN, HEAVY = 0.5, 0.7


class Corrected(NamedTuple):
    """Moments of a posterior by weighted draws, with Monte Carlo standard errors, shape ``(k,)`` each."""

    mean: np.ndarray
    mean_se: np.ndarray
    sd: np.ndarray
    sd_se: np.ndarray


def corrected(values: np.ndarray, weights: np.ndarray, r: Moments) -> Corrected:
    r"""Moments of the posterior p by weighted draws of r.

    .. math:: E_p f \approx E_r f + \sum_s (w_s - 1/S) f_s

    Where moments of r are exact the draws say only how p differs from it. Of other numbers, and of those that are
    not tame, this is the weighted mean. A standard deviation is NaN where the weighted squares have too heavy a
    tail for one.

    Args:
        values: The numbers at S draws, ``(S, k)``.
        weights: Smoothed weights ``(S,)`` that sum to 1.
        r: Moments under r.
    """
    by_rule = r.exact & r.tame
    plain = of_draws(values)
    centre, width = (
        np.where(by_rule, r.mean, plain.mean),
        np.where(by_rule, r.variance, plain.variance),
    )
    off, squares = values - centre, np.square(values - centre)
    excess = weights - 1.0 / len(weights)
    mean = centre + excess @ off
    variance = np.maximum(width + excess @ squares - np.square(mean - centre), 0.0)
    # What is exact leaves the error of the excess alone.
    each = np.where(by_rule, excess[:, None], weights[:, None])
    of_mean, of_square = (
        np.where(by_rule, centre, mean),
        np.where(by_rule, width, variance),
    )
    mean_se = np.sqrt(np.sum(np.square(each * (values - of_mean)), axis=0))
    variance_se = np.sqrt(np.sum(np.square(each * (squares - of_square)), axis=0))
    sd = np.sqrt(variance)
    with np.errstate(invalid="ignore", divide="ignore"):  # of what is constant
        sd_se = np.where(sd > 0, variance_se / (2.0 * sd), 0.0)
        terms = np.log(weights)[:, None] + np.log(squares)
    k = np.array(
        [
            smooth(column)[1] if np.isfinite(column).any() else -np.inf
            for column in terms.T
        ]
    )
    return Corrected(
        mean,
        mean_se,
        np.where(k > HEAVY, math.nan, sd),
        np.where(k > UNCERTAIN, math.nan, sd_se),
    )


def bound_mean(reference: Moments, chi: float, q: Moments) -> np.ndarray:
    r"""A bound on the error of each mean of q.

    .. math:: |E_p f - E_q f| \le \mathrm{sd}_r(f)\, \chi + |E_r f - E_q f|

    by the inequality of Cauchy and Schwarz, and that of the triangle where the draws are of another r.

    Args:
        reference: Moments under r.
        chi: The root of χ²(p, r), or more.
        q: Moments under q; ``reference`` itself where the draws are of q.
    """
    return reference.sd * chi + np.abs(reference.mean - q.mean)


def bound_variance(reference: Moments, chi: float, q: Moments) -> np.ndarray:
    r"""A bound on the error of each variance of q, likewise.

    .. math:: |\mathrm{Var}_p f - \mathrm{Var}_r f| \le \mathrm{sd}_r\big((f - E_r f)^2\big)\, \chi
              + (\mathrm{sd}_r(f)\, \chi)^2
    """
    of_reference = np.sqrt(reference.spread) * chi + reference.variance * chi**2
    return of_reference + np.abs(reference.variance - q.variance)


def bound_sd(variance: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """A bound on the error of a standard deviation, of one on that of its variance."""
    sd = np.sqrt(variance)
    return np.maximum(
        np.sqrt(variance + bound) - sd, sd - np.sqrt(np.maximum(variance - bound, 0.0))
    )


def covariance(
    values: np.ndarray, q: Moments, law: LocationScale | None
) -> tuple[np.ndarray, np.ndarray]:
    """The covariances of the numbers under q, ``(k, k)``, and the Monte Carlo standard error of each.

    Those of numbers that are coordinates are exact where the law of these is known.
    """
    centred = values - values.mean(axis=0)
    by_draws = centred.T @ centred / len(values)
    squares = np.square(centred)
    se = np.sqrt(
        np.maximum(squares.T @ squares / len(values) - np.square(by_draws), 0.0)
        / len(values)
    )
    if law is not None:
        pairs, at = _coordinate_pairs(q)
        by_draws[pairs], se[pairs] = law.cov[at], 0.0
    # The variances are those of the moments.
    np.fill_diagonal(by_draws, q.variance)
    np.fill_diagonal(se, np.where(q.exact, 0.0, np.diag(se)))
    return by_draws, se


def corrected_covariance(
    values: np.ndarray, weights: np.ndarray, r: Moments, cov: np.ndarray
) -> np.ndarray:
    """Covariances under the posterior, as :func:`corrected`; ``cov`` are those under r."""
    by_rule = r.exact & r.tame
    off = values - np.where(by_rule, r.mean, values.mean(axis=0))
    excess = weights - 1.0 / len(weights)
    shift = excess @ off
    plain = off.T @ off / len(values)
    width = np.where(np.outer(by_rule, by_rule), cov, plain)
    return width + off.T @ (excess[:, None] * off) - np.outer(shift, shift)


def bound_covariance(
    values: np.ndarray, reference: Moments, chi: float, law: LocationScale | None = None
) -> np.ndarray:
    """A bound on the error of each covariance of r, ``(k, k)``, from its draws ``(S, k)``.

    As :func:`bound_variance`, whose numbers stand on the diagonal up to the error of draws. Of heavy tails there
    are bounds for coordinates alone, and infinite ones where these have no fourth moments.
    """
    centred = values - reference.mean
    squares = np.square(centred)
    spread = squares.T @ squares / len(values) - np.square(
        centred.T @ centred / len(values)
    )
    if law is not None and law.is_heavy:
        pairs, at = _coordinate_pairs(reference)
        spread = np.full(spread.shape, math.nan)
        spread[pairs] = law.spread[at]
    return (
        np.sqrt(np.maximum(spread, 0.0)) * chi
        + np.outer(reference.sd, reference.sd) * chi**2
    )


def _coordinate_pairs(
    q: Moments,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Where pairs of numbers that are coordinates stand, and where these do among the coordinates."""
    places = np.flatnonzero(q.coordinate >= 0)
    at = q.coordinate[places]
    return np.ix_(places, places), np.ix_(at, at)


def norms(flat: np.ndarray, law: LocationScale | None) -> tuple[float, float]:
    """Second and fourth moment of the distance from the mean: of a known law exact, else by draws."""
    if law is not None:
        return law.second, law.fourth
    squares = np.sum(np.square(flat - flat.mean(axis=0)), axis=1)
    return float(squares.mean()), float(np.mean(np.square(squares)))


def bound_wasserstein(second: float, fourth: float, chi: float) -> tuple[float, float]:
    r"""Bounds on W_1 and W_2 between a posterior and q.

    .. math:: W_1 \le \big(E_q \|x - m\|^2\big)^{1/2} \chi, \qquad
              W_2 \le \sqrt 2\, \big(E_q \|x - m\|^4\big)^{1/4} \chi^{1/2}

    Args:
        second: The second moment of the distance from the mean under q.
        fourth: The fourth.
        chi: The root of χ²(p, q), or more.

    References:
        Villani, *Optimal Transport*, 2009, Theorem 6.15.
    """
    return math.sqrt(second) * chi, math.sqrt(2.0 * chi) * fourth**0.25


def wasserstein(
    loc: np.ndarray, cov: np.ndarray, other_loc: np.ndarray, other_cov: np.ndarray
) -> float:
    """W_2 of two Gaussians, in double precision on the host, where nothing is compiled.

    For families on the device see :func:`.descent.wasserstein`.
    """
    root, target = np.linalg.cholesky(cov), np.linalg.cholesky(other_cov)
    # The nearest square roots of both covariances: an orthogonal Procrustes problem, without cancellation.
    left, _, right = np.linalg.svd(target.T @ root)
    return math.hypot(
        float(np.linalg.norm(loc - other_loc)),
        float(np.linalg.norm(root - target @ left @ right)),
    )
