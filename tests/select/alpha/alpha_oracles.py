"""Closed forms for the criteria on linear models with Gaussian noise: numpy and scipy, nothing of the package.

y = X θ + N(0, sd²) with prior θ ~ N(0, prior_sd² I): everything is quadratic. The normal location model is X = 1.
"""

import numpy as np
from scipy.stats import chi2

# Curvature and variance of the scores.


def weighted_fit(x, y, counts):
    """Least squares with counts."""
    return np.linalg.solve((counts[:, None] * x).T @ x, (counts[:, None] * x).T @ y)


def moments(x, y, sd, counts):
    """J and I at the least-squares fit, of data with counts."""
    n = len(y)
    residual = y - x @ weighted_fit(x, y, counts)
    curvature = (counts[:, None] * x).T @ x / (n * sd**2)
    variance = ((counts * residual**2)[:, None] * x).T @ x / (n * sd**4)
    return curvature, variance


def lyddon(x, y, sd, counts=None):
    j, i = moments(x, y, sd, np.ones(len(y)) if counts is None else counts)
    return np.trace(j @ np.linalg.inv(i) @ j) / np.trace(j)


def fisher_limit(x, y, sd, counts=None):
    j, i = moments(x, y, sd, np.ones(len(y)) if counts is None else counts)
    return np.trace(j) / np.trace(i)


def joint_limit(x, y, sd, counts=None):
    j, i = moments(x, y, sd, np.ones(len(y)) if counts is None else counts)
    return len(j) / np.trace(np.linalg.inv(j) @ i)


def jackknife_se(functional, x, y, sd, step=1e-5):
    """The infinitesimal jackknife, by differences in the count of each datum."""
    derivative = []
    for k in range(len(y)):
        up, down = np.ones(len(y)), np.ones(len(y))
        up[k] += step
        down[k] -= step
        derivative.append(
            (functional(x, y, sd, up) - functional(x, y, sd, down)) / (2 * step)
        )
    return np.linalg.norm(derivative)


# The bootstrap, given the counts of the resamples.


def fisher(x, y, sd, prior_sd, resamples):
    """The minimum of the score-matching objective, and the standard error of the ratio of the sums."""
    hessian, best = x.T @ x / sd**2, weighted_fit(x, y, np.ones(len(y)))
    above, below = [], []
    for counts in resamples:
        theta = weighted_fit(x, y, counts)
        slope = hessian @ (theta - best)
        above.append(-theta @ slope / prior_sd**2 + np.trace(hessian))
        below.append(slope @ slope)
    above, below = np.array(above), np.array(below)
    alpha = above.sum() / below.sum()
    return alpha, np.sqrt(np.sum((above - alpha * below) ** 2)) / below.sum()


def score_matching(alpha, x, y, sd, prior_sd, resamples):
    """The objective by its definition: sum_b |s|²/2 + div s, s the score of prior times likelihood^alpha."""
    total = 0.0
    for counts in resamples:
        theta = weighted_fit(x, y, counts)
        score = -theta / prior_sd**2 + alpha * x.T @ (y - x @ theta) / sd**2
        divergence = -len(theta) / prior_sd**2 - alpha * np.trace(x.T @ x) / sd**2
        total += 0.5 * score @ score + divergence
    return total


def distances(alpha, x, y, sd, prior_sd, resamples, rows=None):
    """Squared Mahalanobis distances of the fit from the posteriors of the resamples at a power.

    ``rows`` is a matrix of linear quantities.
    """
    best = weighted_fit(x, y, np.ones(len(y)))
    rows = np.eye(x.shape[1]) if rows is None else rows
    found = []
    for counts in resamples:
        weighted = counts[:, None] * x
        precision = alpha * weighted.T @ x / sd**2 + np.eye(x.shape[1]) / prior_sd**2
        mean = np.linalg.solve(precision, alpha * weighted.T @ y / sd**2)
        off = rows @ (best - mean)
        found.append(
            off @ np.linalg.solve(rows @ np.linalg.inv(precision) @ rows.T, off)
        )
    return np.array(found)


def location_distances(alpha, y, sd, prior_sd, means):
    """The same for the location model, from the means of the resamples."""
    precision = alpha * len(y) / sd**2 + prior_sd**-2
    return precision * (y.mean() - alpha * len(y) * means / sd**2 / precision) ** 2


def coverage(distance, level, dim):
    return np.mean(distance <= chi2.ppf(level, dim))


def published_recursion(coverage_at, level, start, num_steps):
    """w += (s + 1)^-.51 (coverage - level), SM19; all iterates."""
    w, path = start, []
    for s in range(1, num_steps + 1):
        w = max(w + (s + 1) ** -0.51 * (coverage_at(w) - level), 1e-6)
        path.append(w)
    return np.array(path)


# Curvature of Poisson regression with log link.


def poisson_fit(x, y):
    theta = np.zeros(x.shape[1])
    theta[0] = np.log(y.mean())
    for _ in range(50):
        mean = np.exp(x @ theta)
        theta = theta + np.linalg.solve((mean[:, None] * x).T @ x, x.T @ (y - mean))
    return theta


def poisson_lyddon(x, y):
    mean = np.exp(x @ poisson_fit(x, y))
    j = (mean[:, None] * x).T @ x / len(y)
    i = (((y - mean) ** 2)[:, None] * x).T @ x / len(y)
    return np.trace(j @ np.linalg.inv(i) @ j) / np.trace(j)


# SafeBayes for contrast: R-log of the location model in closed form, each datum predicted from those before it.


def safe_bayes_location(y, sd, prior_sd, alphas):
    """Cumulative losses E[-log p(y_i | θ)] under the tempered posteriors of the data before i, ``(n, A)``."""
    alphas = np.asarray(alphas)
    counts = np.arange(len(y))[:, None]
    sums = np.concatenate([[0.0], np.cumsum(y)[:-1]])[:, None]
    precision = prior_sd**-2 + alphas * counts / sd**2
    mean = alphas * sums / sd**2 / precision
    return (
        0.5 * np.log(2 * np.pi * sd**2)
        + 0.5 * ((y[:, None] - mean) ** 2 + 1.0 / precision) / sd**2
    )
