"""Linear models with noise N(0, 1) and prior θ ~ N(0, prior_var I): posteriors and criteria in closed form."""

from functools import partial

import numpy as np
from scipy.stats import chi2, norm

from numpyro_tempered.select.alpha.gpc import solve
from numpyro_tempered.select.alpha.safe_bayes import block_edges

LEVEL = 0.95
LOG_TWO_PI = np.log(2.0 * np.pi)


def posterior(x, y, prior_var, alphas):
    """Means ``(A, d)`` and covariances ``(A, d, d)``."""
    values, axes = np.linalg.eigh(x.T @ x)
    precision = np.asarray(alphas)[:, None] * values + 1.0 / prior_var
    mean = (alphas[:, None] * (axes.T @ (x.T @ y)) / precision) @ axes.T
    return mean, np.einsum("ij,aj,kj->aik", axes, 1.0 / precision, axes)


def log_evidence(x, y, prior_var, alphas):
    """log of the integral of likelihood^alpha against the prior."""
    values, axes = np.linalg.eigh(x.T @ x)
    precision = alphas[:, None] * values + 1.0 / prior_var
    fitted = np.sum((alphas[:, None] * (axes.T @ (x.T @ y))) ** 2 / precision, axis=1)
    volume = np.sum(np.log(precision * prior_var), axis=1)
    return -0.5 * alphas * (len(y) * LOG_TWO_PI + y @ y) + 0.5 * (fitted - volume)


def safe_bayes_losses(x, y, prior_var, alphas, blocks=8):
    """R-log and I-log of each datum, refitted at the starts of equal blocks, in the order of the data."""
    gibbs, plugin = np.zeros((len(alphas), len(y))), np.zeros((len(alphas), len(y)))
    edges = block_edges(blocks, len(y))
    for start, end in zip(edges, np.append(edges[1:], len(y)), strict=True):
        mean, covariance = posterior(x[:start], y[:start], prior_var, alphas)
        plugin[:, start:end] = (
            0.5 * (y[start:end] - mean @ x[start:end].T) ** 2 + 0.5 * LOG_TWO_PI
        )
        spread = np.einsum("ni,aij,nj->an", x[start:end], covariance, x[start:end])
        gibbs[:, start:end] = plugin[:, start:end] + 0.5 * spread
    return {"gibbs": gibbs, "plugin": plugin}


def loo(x, y, prior_var, alphas):
    """Exact leave-one-out log density of the tempered predictive."""
    mean, covariance = posterior(x, y, prior_var, alphas)
    spread = np.einsum("ni,aij,nj->an", x, covariance, x)
    left = 1.0 - alphas[:, None] * spread
    return norm.logpdf((y - mean @ x.T) / left, 0.0, np.sqrt(1.0 + spread / left)).sum(
        axis=1
    )


def held_out(x, y, prior_var, alphas, num_folds=5):
    """Log density of the folds under the tempered predictive of the rest."""
    total = np.zeros(len(alphas))
    for fold in range(num_folds):
        out = np.arange(len(y)) % num_folds == fold
        mean, covariance = posterior(x[~out], y[~out], prior_var, alphas)
        spread = np.einsum("ni,aij,nj->an", x[out], covariance, x[out])
        total += norm.logpdf(y[out], mean @ x[out].T, np.sqrt(1.0 + spread)).sum(axis=1)
    return total


def by_curvature(x, y, prior_var, counts):
    """Lyddon, bootstrap Fisher, and GPC of all coefficients and of the first."""
    gram, best = x.T @ x, np.linalg.solve(x.T @ x, x.T @ y)
    weighted = (y - x @ best)[:, None] * x
    half = np.linalg.solve(weighted.T @ weighted, gram)
    grams = np.einsum("bn,ni,nj->bij", counts, x, x, optimize=True)
    sums = counts @ (y[:, None] * x)
    fits = np.linalg.solve(grams, sums[..., None])[..., 0]
    slopes = (fits - best) @ gram
    fisher = np.sum(
        np.trace(gram) - np.sum(fits / prior_var * slopes, axis=1)
    ) / np.sum(slopes**2)
    values, axes = np.linalg.eigh(grams)
    moved = np.einsum("bji,bj->bi", axes, sums)
    at = np.einsum("bji,j->bi", axes, best)

    def ratios(alpha, joint):
        precision = alpha * values + 1.0 / prior_var
        off = at - alpha * moved / precision
        if joint:
            return np.sum(off**2 * precision, axis=1) / chi2.ppf(LEVEL, len(best))
        first = axes[:, 0]
        return (
            np.sum(first * off, axis=1) ** 2
            / np.sum(first**2 / precision, axis=1)
            / chi2.ppf(LEVEL, 1)
        )

    found = {
        "lyddon": np.trace(gram @ half) / np.trace(gram),
        "bootstrap_fisher": fisher,
    }
    for name, joint in (("gpc", True), ("gpc, first coefficient", False)):
        try:
            found[name] = solve(
                partial(ratios, joint=joint), LEVEL, found["lyddon"], (0.0, np.inf)
            )[0]
        except (
            ValueError
        ):  # No power has the coverage: the prior is too narrow for the fit.
            found[name] = np.nan
    return found
