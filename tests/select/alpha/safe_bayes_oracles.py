"""Closed forms of the experiment of GvO: tempered linear regression, and SafeBayes on it.

Numpy and scipy only, nothing of the package; written from the printed formulas. The model is
y | x ~ N(x'beta, s2) with beta | s2 ~ N(0, s2 I) and s2 ~ IG(1, 1/40), the intercept is the first column of x.
Nested models have the first 1 ... d columns.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, log_softmax, logsumexp, psi, softmax

SHAPE, RATE = 1.0, 1 / 40
NUM_COVARIATES = 50
COEF = np.r_[0.0, np.full(4, 0.1), np.zeros(NUM_COVARIATES - 4)]
NOISE = 1 / 40  # E (y - x'COEF)², in both kinds of data
LOG_2PI = np.log(2 * np.pi)
LOSSES = ("gibbs", "plugin", "plugin_log", "predictive")


def draw(rng, num_data, wrong):
    """Rows and outcomes ``(n, 51)``, ``(n,)``: on wrong data half of them are x = 0, y = 0."""
    x = np.c_[np.ones(num_data), rng.normal(size=(num_data, NUM_COVARIATES))]
    noise = rng.normal(size=num_data)
    if not wrong:
        return x, x @ COEF + np.sqrt(NOISE) * noise
    heads = rng.random(num_data) < 0.5
    x[heads, 1:] = 0.0
    # The other half is twice as noisy, so that both kinds of data have the same best variance.
    return x, np.where(heads, 0.0, x @ COEF + np.sqrt(2 * NOISE) * noise)


def excess_risk(coef, wrong):
    """E (x'(coef - COEF))² over the x of the data, coins included."""
    error = (coef - COEF) ** 2
    return error[..., 0] + (0.5 if wrong else 1.0) * error[..., 1:].sum(-1)


# One model.


class Ridge(NamedTuple):
    """beta | s2 ~ N(mean, s2 cov), s2 ~ IG(shape, rate)."""

    mean: np.ndarray
    cov: np.ndarray
    shape: float
    rate: float


def prior(dim):
    return Ridge(np.zeros(dim), np.eye(dim), SHAPE, RATE)


def update(q, x, y, alpha):
    """One datum more, by the rank-one recursion."""
    h, e = x @ q.cov @ x, y - x @ q.mean
    cov = q.cov - alpha * np.outer(q.cov @ x, x @ q.cov) / (1 + alpha * h)
    return Ridge(
        q.mean + alpha * cov @ x * e,
        cov,
        q.shape + alpha / 2,
        q.rate + alpha / 2 * e**2 / (1 + alpha * h),
    )


def posterior(x, y, alpha):
    """All data at once, from the normal equations."""
    precision = np.eye(x.shape[1]) + alpha * x.T @ x
    mean = np.linalg.solve(precision, alpha * x.T @ y)
    rate = RATE + 0.5 * (alpha * np.sum((y - x @ mean) ** 2) + mean @ mean)
    return Ridge(mean, np.linalg.inv(precision), SHAPE + alpha * len(y) / 2, rate)


# All nested models at once.


class Nested(NamedTuple):
    """Posteriors of the d nested models from one factor of the precision of the largest.

    With I + alpha X'X = L L', model p has the leading block of L, so that sums over its coordinates are the
    first entries of cumulative sums: x'Sx of |L^-1 x|², the prediction x'm of L^-1 x times ``z``. Batches of
    posteriors have leading axes.

    Attributes:
        factor: L, ``(..., d, d)``.
        z: L^-1 alpha X'y, ``(..., d)``.
        shape, rate: Of the posterior of s2, ``(...)`` and ``(..., d)``.
        log_evidence: log of the integral of likelihood^alpha times prior, of each model, ``(..., d)``.
    """

    factor: np.ndarray
    z: np.ndarray
    shape: np.ndarray
    rate: np.ndarray
    log_evidence: np.ndarray


def nested(gram, xy, yy, num_data, alpha):
    """The posteriors from X'X, X'y, y'y and n, with leading axes if need be."""
    factor = np.linalg.cholesky(np.eye(gram.shape[-1]) + alpha * gram)
    z = np.linalg.solve(factor, alpha * xy[..., None])[..., 0]
    n = np.asarray(num_data, float)
    shape = SHAPE + alpha * n / 2
    rate = RATE + 0.5 * (alpha * np.asarray(yy)[..., None] - np.cumsum(z**2, -1))
    log_det = 2 * np.cumsum(np.log(np.diagonal(factor, axis1=-2, axis2=-1)), -1)
    log_evidence = (
        -0.5 * log_det
        + SHAPE * np.log(RATE)
        - gammaln(SHAPE)
        + (gammaln(shape) - alpha * n / 2 * LOG_2PI)[..., None]
        - shape[..., None] * np.log(rate)
    )
    return Nested(factor, z, shape, rate, log_evidence)


def of_data(x, y, alpha):
    return nested(x.T @ x, x.T @ y, y @ y, len(y), alpha)


def coefficients(q, averaged):
    """The posterior mean of beta, ``(..., d)``: of all models by their weight, or of the largest."""
    weights = softmax(q.log_evidence, -1)
    # A coordinate of z counts in every model that is large enough to have it.
    share = np.cumsum(weights[..., ::-1], -1)[..., ::-1] if averaged else 1.0
    return np.linalg.solve(np.swapaxes(q.factor, -1, -2), (share * q.z)[..., None])[
        ..., 0
    ]


def expected_size(q):
    """E p, the number of covariates in the average over models."""
    return softmax(q.log_evidence, -1) @ np.arange(q.z.shape[-1])


def log_student(y, loc, shape, scale2):
    """Density of Student's t with 2 ``shape`` degrees of freedom."""
    return (
        gammaln(shape + 0.5)
        - gammaln(shape)
        - 0.5 * np.log(2 * np.pi * shape * scale2)
        - (shape + 0.5) * np.log1p((y - loc) ** 2 / (2 * shape * scale2))
    )


def losses(q, x, y):
    """Losses of rows ``(..., d)`` under the posteriors ``q``: of the average over models, and of the largest.

    * ``gibbs`` (R-log of GvO): E -log p(y | x, beta, s2).
    * ``plugin`` (I-log of GvO): -log p at E beta and E s2, infinite where s2 has no mean.
    * ``plugin_log``: the same at exp(E log s2), which is the mean on the scale of log s2.
    * ``predictive``: -log E p(y | x, beta, s2).

    Returns:
        Dictionary of pairs of arrays ``(...)``.
    """
    # Rows that share a posterior are the columns of one solve.
    shared = q.factor.ndim == 2
    v = (
        np.linalg.solve(q.factor, x.T).T
        if shared
        else np.linalg.solve(q.factor, x[..., None])[..., 0]
    )
    h, loc = np.cumsum(v**2, -1), np.cumsum(v * q.z, -1)
    shape, y = np.asarray(q.shape)[..., None], y[..., None]
    gibbs = 0.5 * (
        LOG_2PI + np.log(q.rate) - psi(shape) + (y - loc) ** 2 * shape / q.rate + h
    )
    log_density = log_student(y, loc, shape, q.rate / shape * (1 + h))
    with np.errstate(divide="ignore"):
        variance = q.rate / (shape - 1)
    log_variance = np.log(q.rate) - psi(shape)
    weights, log_weights = softmax(q.log_evidence, -1), log_softmax(q.log_evidence, -1)

    def plug_in(loc, variance):
        return 0.5 * (LOG_2PI + np.log(variance) + (y[..., 0] - loc) ** 2 / variance)

    def pair(at, *values):
        return at(*(np.sum(weights * v, -1) for v in values)), at(
            *(v[..., -1] for v in values)
        )

    return {
        "gibbs": pair(lambda loss: loss, gibbs),
        "plugin": pair(plug_in, loc, variance),
        "plugin_log": pair(lambda m, v: plug_in(m, np.exp(v)), loc, log_variance),
        "predictive": (
            -logsumexp(log_weights + log_density, axis=-1),
            -log_density[..., -1],
        ),
    }


# Prequential losses.


def prefixes(x, y, ends):
    """X'X, X'y, y'y and n of the first ``ends`` rows."""
    end = np.asarray(ends)

    def sums(terms):
        return np.concatenate([np.zeros_like(terms[:1]), np.cumsum(terms, 0)])[end]

    return sums(x[:, :, None] * x[:, None, :]), sums(x * y[:, None]), sums(y**2), end


def prequential(x, y, alphas, edges=None):
    """The losses of each row under the posterior of the rows before it, or before its block.

    Args:
        x: Rows ``(n, d)``.
        y: Outcomes ``(n,)``.
        alphas: Powers.
        edges: Increasing, from 0 to n: block k has the rows from ``edges[k]`` to ``edges[k + 1]``. None refits
            at every row.

    Returns:
        Array ``(losses, 2, alphas, n)``, in the order of ``LOSSES`` and (average, largest model).
    """
    past = prefixes(
        x, y, np.arange(len(y)) if edges is None else np.asarray(edges[:-1])
    )
    found = []
    for alpha in alphas:
        q = nested(*past, alpha)
        if edges is None:
            parts = [losses(q, x, y)]
        else:
            blocks = [slice(*ends) for ends in pairwise(edges)]
            parts = [
                losses(Nested(*(p[k] for p in q)), x[b], y[b])
                for k, b in enumerate(blocks)
            ]
        found.append(
            [np.concatenate([part[name] for part in parts], -1) for name in LOSSES]
        )
    return np.moveaxis(np.array(found), 0, 2)


def choose(alphas, each, rule):
    """SafeBayes' choice from prequential losses ``(alphas, rows)``; rows with infinite losses are left out.

    ``rule`` is ``min``, or ``one_se``: the largest alpha whose total is within one paired standard error of the
    least.
    """
    each = each[:, np.isfinite(each).all(0)]
    total = each.sum(1)
    best = int(np.argmin(total))
    if rule == "min":
        return alphas[best]
    excess = each - each[best]
    margin = np.sqrt(each.shape[1]) * excess.std(1, ddof=1)
    return max(
        a for a, t, m in zip(alphas, excess.sum(1), margin, strict=True) if t <= m
    )


# Leave-one-out.


def leave_one_out(x, y, alpha):
    """log p(y_i | the other rows) under the tempered posterior, ``(2, n)``: of the average, of the largest model.

    Taking datum i out of a posterior is the rank-one update with -alpha.
    """
    q = of_data(x, y, alpha)
    v = np.linalg.solve(q.factor, x.T).T
    h, e = np.cumsum(v**2, -1), y[:, None] - np.cumsum(v * q.z, -1)
    left = 1 - alpha * h
    shape, rate = q.shape - alpha / 2, q.rate - alpha / 2 * e**2 / left
    log_density = log_student(e / left, 0.0, shape, rate / shape * (1 + h / left))
    # Its evidence, up to a constant of the rows and models.
    log_weights = (
        -shape * np.log(rate)
        + q.log_evidence
        + q.shape * np.log(q.rate)
        - 0.5 * np.log(left)
    )
    averaged = logsumexp(log_weights + log_density, axis=-1) - logsumexp(
        log_weights, axis=-1
    )
    return np.stack([averaged, log_density[:, -1]])


# A Gaussian guide.


def guide_losses(x, y, alpha, rows, outcomes):
    """R-log and I-log of the largest model under the best Gaussian q(beta, log s2), ``(2, m)``.

    With u = log s2 ~ N(m, v) and Cov(beta, u) = c, E |y - X beta|² / s2 is exp(v/2 - m) times a function of
    E beta - c and Cov beta, so that c costs entropy and gains nothing: c = 0. The stationary point then has
    E 1/s2 = shape/rate and Cov beta = rate/shape (I + alpha X'X)^-1, as the posterior has it, and
    v = 1/(shape + d/2) with E u = log(rate/shape) + v/2.
    """
    q = posterior(x, y, alpha)
    precision, v = q.shape / q.rate, 1 / (q.shape + 0.5 * x.shape[1])
    mean_log_s2 = -np.log(precision) + 0.5 * v
    error2 = (outcomes - rows @ q.mean) ** 2
    h = np.einsum("ij,jk,ik->i", rows, q.cov, rows)
    gibbs = 0.5 * (LOG_2PI + mean_log_s2 + error2 * precision + h)
    plug_in = 0.5 * (LOG_2PI + mean_log_s2 + error2 / np.exp(mean_log_s2))
    return np.stack([gibbs, plug_in])
