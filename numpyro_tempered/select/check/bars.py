"""Means and standard deviations of a fit with what is known of their errors."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import Columns
from numpyro_tempered.select.check import moments
from numpyro_tempered.select.check.reference import Reference
from numpyro_tempered.select.check.target import Draws

# Monte Carlo standard errors that a bound has room for, where a moment of the fit is by draws.
NUM_ERRORS = 4.0


class ErrorBars(NamedTuple):
    """The numbers of all latents, shape ``(k,)`` each: the columns of the table."""

    mean: np.ndarray
    sd: np.ndarray
    mean_bound: np.ndarray
    sd_bound: np.ndarray
    corrected_mean: np.ndarray
    corrected_mean_se: np.ndarray
    corrected_sd: np.ndarray
    corrected_sd_se: np.ndarray


def error_bars(draws: Draws, base: Reference, status: str) -> ErrorBars:
    """The error bars of the fit with these draws, by those of the base."""
    q, r, chi = draws.moments, base.draws.moments, base.divergences.chi
    nothing = np.full(len(q.mean), math.nan)
    mean_bound = sd_bound = nothing
    if status == "bounded":
        mean_bound = moments.bound_mean(r, chi, q)
        sd_bound = moments.bound_sd(q.variance, moments.bound_variance(r, chi, q))
        # What is known by draws alone is itself off by as much.
        root = np.sqrt(len(draws.values))
        with np.errstate(invalid="ignore", divide="ignore"):  # of what is constant
            sd_se = np.where(q.sd > 0, np.sqrt(q.spread) / (2.0 * q.sd * root), 0.0)
        mean_bound = mean_bound + np.where(q.exact, 0.0, NUM_ERRORS * q.sd / root)
        sd_bound = sd_bound + np.where(q.exact, 0.0, NUM_ERRORS * sd_se)
        # An exponential of Student's t has no moments, and the t itself no fourth up to 4 degrees of freedom.
        mean_bound, sd_bound = _finite(mean_bound), _finite(sd_bound)
    corrected = moments.Corrected(*[nothing] * 4)
    if status != "unreliable":
        corrected = moments.corrected(base.draws.values, base.weights, r)
    return ErrorBars(q.mean, q.sd, mean_bound, sd_bound, *corrected)


def covariances(draws: Draws, base: Reference, status: str) -> Columns:
    """Covariances of the fit, bounds on their errors, and corrected ones, ``(k, k)`` each."""
    r = base.draws.moments
    cov, se = moments.covariance(draws.values, draws.moments, draws.law)
    bound = corrected = np.full(cov.shape, math.nan)
    if status != "unreliable":
        of_base, base_se = moments.covariance(base.draws.values, r, base.draws.law)
        corrected = moments.corrected_covariance(
            base.draws.values, base.weights, r, of_base
        )
        if status == "bounded":
            bound = moments.bound_covariance(
                base.draws.values, r, base.divergences.chi, base.draws.law
            )
            bound = _finite(
                bound + np.abs(of_base - cov) + NUM_ERRORS * np.hypot(se, base_se)
            )
            if base.is_mixture:
                bound = np.where(np.outer(r.tame, r.tame), bound, math.nan)
    return {
        "covariance": cov,
        "covariance_bound": bound,
        "corrected_covariance": corrected,
    }


def wasserstein_bounds(draws: Draws, base: Reference) -> tuple[float, float]:
    """Bounds on W_1 and W_2 of the fit and its posterior, in unconstrained coordinates; NaN of none."""
    chi, q, r = base.divergences.chi, draws.law, base.draws.law
    w1, w2 = moments.bound_wasserstein(*moments.norms(base.draws.flat, r), chi)
    if base.name != "fit":
        if q is None or r is None or q.is_heavy or r.is_heavy:
            return math.nan, math.nan
        between = moments.wasserstein(q.loc, q.cov, r.loc, r.cov)
        w1, w2 = w1 + between, w2 + between
    return w1, w2 if math.isfinite(w2) else math.nan


def _finite(bounds: np.ndarray) -> np.ndarray:
    """NaN in the place of what bounds nothing."""
    return np.where(np.isfinite(bounds), bounds, math.nan)
