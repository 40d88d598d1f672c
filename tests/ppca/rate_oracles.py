"""Probabilistic PCA of known truth: x ~ N(0, W0 W0' + I), its divergences, limits and maximum likelihood.

The d columns of the data have K0 factors with orthogonal loadings, all of the length sqrt(size), and unit noise.
"""

from typing import NamedTuple

import numpy as np


class Truth(NamedTuple):
    """W0, of shape ``(d, K0)``, and the covariance W0 W0' + I."""

    loadings: np.ndarray
    cov: np.ndarray


def make_truth(rng, d, num_factors, size):
    """Random orthogonal directions; ``size`` is the variance along each factor, without noise."""
    loadings = np.sqrt(size) * np.linalg.qr(rng.normal(size=(d, num_factors)))[0]
    return Truth(loadings, loadings @ loadings.T + np.eye(d))


def draw_rows(rng, truth, num_data):
    """Data ``(num_data, d)``: factors and noise, drawn one after the other."""
    d, num_factors = truth.loadings.shape
    return rng.normal(size=(num_data, num_factors)) @ truth.loadings.T + rng.normal(
        size=(num_data, d)
    )


def log_density(x, cov):
    """Log densities of rows under N(0, cov)."""
    root = np.linalg.cholesky(cov)
    white = np.linalg.solve(root, x.T)
    return (
        -0.5 * np.sum(white**2, axis=0)
        - np.log(np.diag(root)).sum()
        - 0.5 * len(cov) * np.log(2 * np.pi)
    )


def renyi(order, mean, cov, cov0):
    """D_a of N(mean, cov) from N(0, cov0) for 0 < a < 1, by determinants; leading axes are free."""
    mixed = (1 - order) * cov + order * cov0
    logdets = [np.linalg.slogdet(s)[1] for s in (mixed, cov, cov0)]
    distance = np.einsum(
        "...i,...i->...", mean, np.linalg.solve(mixed, mean[..., None])[..., 0]
    )
    spread = logdets[0] - (1 - order) * logdets[1] - order * logdets[2]
    return 0.5 * order * distance + spread / (2 * (1 - order))


def kl_from_truth(truth, loadings):
    """KL of N(0, W0 W0' + I) from N(0, W W' + I); leading axes of W are free."""
    d = len(truth.cov)
    cov = loadings @ np.swapaxes(loadings, -1, -2) + np.eye(d)
    trace = np.trace(
        np.linalg.solve(cov, np.broadcast_to(truth.cov, cov.shape)), axis1=-2, axis2=-1
    )
    return 0.5 * (
        trace - d + np.linalg.slogdet(cov)[1] - np.linalg.slogdet(truth.cov)[1]
    )


def count_parameters(d, num_factors):
    """Dimension of the covariances W W' + I: rotations of the factors change none."""
    return d * num_factors - num_factors * (num_factors - 1) / 2


def trace_of_information(d, num_factors, size):
    """Trace of the Fisher information of one row about the entries of W, at W0.

    A step out of the span of W0 has size/(1 + size), one within it half of its square change of W W'.
    """
    outside = num_factors * (d - num_factors) * size / (1 + size)
    return outside + num_factors * (num_factors + 1) * size / (1 + size) ** 2


def limit(order, d, num_factors, size, loadings_alone):
    """The limit of n times the expected divergence, for the true number of factors.

    An estimate with the error of maximum likelihood has order/2 for each parameter. Around it the factors of the
    variational posterior have the covariances (order n)^-1, as if the z were known: half the trace of the Fisher
    information, where the exact posterior had 1/2 for each parameter. With ``loadings_alone`` false, mean and
    noise are learnt too.
    """
    parameters, trace = (
        count_parameters(d, num_factors),
        trace_of_information(d, num_factors, size),
    )
    if not loadings_alone:
        parameters += d + 1
        trace += d - num_factors + num_factors / (1 + size)
        # The information about the log variance of the noise, and d/2 that there were if the z were known.
        trace += (d - num_factors + num_factors / (1 + size) ** 2) / d
    return 0.5 * (order * parameters + trace)


def bound(order, rng, truth, num_data, log_weight, num_draws=400):
    """The right side of the theorem for entries of W with prior N(0, 1), at its best rho = N(W0, s² I).

    inf over s of a/(1-a) E_rho KL(P0, P_W) + KL(rho, prior)/(n(1-a)) + log(1/b)/(n(1-a)); draws are common to all
    s, so that the infimum is of a smooth function.
    """
    d, num_factors = truth.loadings.shape
    normal = rng.normal(size=(num_draws, d, num_factors))
    values = []
    for variance in np.geomspace(0.2, 5.0, 9) / (order * num_data):
        risk = kl_from_truth(truth, truth.loadings + np.sqrt(variance) * normal).mean()
        price = 0.5 * (
            d * num_factors * (variance - 1 - np.log(variance))
            + np.sum(truth.loadings**2)
        )
        values.append(
            order / (1 - order) * risk + (price - log_weight) / (num_data * (1 - order))
        )
    return min(values)


def maximum_likelihood(x, num_factors, loadings_alone):
    """Mean and covariance of Tipping and Bishop's solution; ``loadings_alone``: of mean 0 and noise 1."""
    d = x.shape[1]
    mean = np.zeros(d) if loadings_alone else x.mean(axis=0)
    values, vectors = np.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    values, vectors = values[::-1], vectors[:, ::-1]
    noise = 1.0 if loadings_alone else values[min(num_factors, d - 1) :].mean()
    excess = np.maximum(values[:num_factors] - noise, 0.0)
    directions = vectors[:, :num_factors]
    return mean, (directions * excess) @ directions.T + noise * np.eye(d)
