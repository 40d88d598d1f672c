"""Means and standard deviations of a fit with what is known of their errors."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.select.check import moments
from numpyro_tempered.select.check.reference import Reference
from numpyro_tempered.select.check.target import Draws, Target, has_polynomial_growth


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


def error_bars(draws: Draws, base: Reference, target: Target, status: str) -> ErrorBars:
    """The error bars of the fit with these draws, by those of the base."""
    q, r, chi = draws.moments, base.draws.moments, base.divergences.chi
    nothing = np.full(len(q.mean), math.nan)
    mean_bound = sd_bound = nothing
    if status == "bounded":
        mean_bound = moments.bound_mean(r, chi, q)
        sd_bound = moments.bound_sd(q.variance, moments.bound_variance(r, chi, q))
        if base.is_heavy:
            # An exponential of Student's t has no moments, whatever its draws say.
            exist = has_polynomial_growth(target)
            mean_bound, sd_bound = (np.where(exist, each, math.nan) for each in (mean_bound, sd_bound))
    corrected = moments.Corrected(*[nothing] * 4)
    if status != "unreliable":
        corrected = moments.corrected(base.draws.values, base.weights, r)
    return ErrorBars(q.mean, q.sd, mean_bound, sd_bound, *corrected)


def covariances(draws: Draws, base: Reference, status: str) -> dict[str, np.ndarray]:
    """Covariances of the fit by its draws, bounds on their errors, and corrected ones, ``(k, k)`` each."""
    values = np.cov(draws.values, rowvar=False, ddof=0).reshape(draws.values.shape[1], -1)
    nothing = np.full(values.shape, math.nan)
    bound = corrected = nothing
    if status != "unreliable":
        corrected = np.cov(base.draws.values, rowvar=False, ddof=0, aweights=base.weights).reshape(values.shape)
    if status == "bounded" and not base.is_heavy:
        of_base = np.cov(base.draws.values, rowvar=False, ddof=0).reshape(values.shape)
        bound = moments.bound_covariance(base.draws.values, base.draws.moments, base.divergences.chi)
        bound += np.abs(of_base - values)
    return {"covariance": values, "covariance_bound": bound, "corrected_covariance": corrected}


def wasserstein_bounds(draws: Draws, base: Reference) -> tuple[float, float]:
    """Bounds on W_1 and W_2 of the fit and its posterior, in unconstrained coordinates."""
    chi, r = base.divergences.chi, base.draws.gaussian
    w1, w2 = moments.bound_wasserstein(*moments.norms(base.draws.flat, None if r is None else r.cov), chi)
    if base.name == "fit":
        return w1, w2
    if draws.gaussian is None or r is None:
        return math.nan, math.nan
    between = moments.wasserstein(*draws.gaussian, *r)
    return w1 + between, w2 + between
