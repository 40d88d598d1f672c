"""Divergences and distances of Gaussians from their formulas, and bounds as Huggins et al. print them."""

import importlib.util
from pathlib import Path

import numpy as np
from scipy import linalg


def chi_square(p_mean, p_cov, q_mean, q_cov):
    """Chi-square of N(p) from N(q), the integral of p^2 / q less 1; infinite where that diverges."""
    p_mean, q_mean = np.atleast_1d(p_mean), np.atleast_1d(q_mean)
    p_prec, q_prec = (
        np.linalg.inv(np.atleast_2d(p_cov)),
        np.linalg.inv(np.atleast_2d(q_cov)),
    )
    both = 2.0 * p_prec - q_prec
    if np.linalg.eigvalsh(both)[0] <= 0:
        return np.inf
    pull = 2.0 * p_prec @ p_mean - q_prec @ q_mean
    exponent = (
        pull @ np.linalg.solve(both, pull)
        - 2.0 * p_mean @ p_prec @ p_mean
        + q_mean @ q_prec @ q_mean
    )
    log_dets = (
        2.0 * np.linalg.slogdet(p_prec)[1]
        - np.linalg.slogdet(q_prec)[1]
        - np.linalg.slogdet(both)[1]
    )
    return np.expm1(0.5 * (exponent + log_dets))


def wasserstein(p_mean, p_cov, q_mean, q_cov):
    """W_2 of two Gaussians, by square roots of matrices."""
    root = linalg.sqrtm(p_cov).real
    cross = linalg.sqrtm(root @ q_cov @ root).real
    return np.sqrt(
        np.sum((p_mean - q_mean) ** 2) + np.trace(p_cov + q_cov - 2.0 * cross)
    )


def divergence_bound(log_weights):
    """2 (CUBO_2 - ELBO) of the mean of the weights' squares and the mean of their logarithms."""
    peak = np.max(log_weights)
    cubo = 0.5 * np.log(np.mean(np.exp(log_weights - peak) ** 2)) + peak
    return 2.0 * (cubo - np.mean(log_weights))


def viabel_diagnostics():
    """viabel's module of diagnostics, which needs NumPy alone, where the package is installed; else None."""
    spec = importlib.util.find_spec("viabel")
    if spec is None:
        return None
    # The package itself imports pystan 2.
    path = Path(spec.submodule_search_locations[0]) / "diagnostics.py"
    spec = importlib.util.spec_from_file_location("viabel_diagnostics", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
