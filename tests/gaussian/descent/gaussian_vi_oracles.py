"""Independent references in numpy and scipy, float64; nothing here imports the package."""

import numpy as np
from scipy.linalg import sqrtm
from scipy.optimize import minimize
from scipy.special import expit

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def softplus(u):
    return np.logaddexp(0.0, u)


def logistic_elbo(x, y, alpha, prior_scale, loc, covariance):
    """ELBO of a logistic regression (y in {-1, 1}) under N(0, prior_scale²), by quadrature on the predictor."""
    d = x.shape[1]
    mean, sd = x @ loc, np.sqrt(np.einsum("ni,ij,nj->n", x, covariance, x))
    u = mean[:, None] + sd[:, None] * NODES
    log_lik = -np.sum(softplus(-y[:, None] * u) @ WEIGHTS)
    v = prior_scale**2
    log_det = np.linalg.slogdet(covariance)[1]
    kl = 0.5 * (np.trace(covariance) / v + loc @ loc / v - d + d * np.log(v) - log_det)
    return alpha * log_lik - kl


def logistic_optimum(x, y, alpha, prior_scale, diagonal=False):
    """Mean, covariance and ELBO of the best Gaussian, by L-BFGS on the mean and a Cholesky factor."""
    d = x.shape[1]
    rows, columns = (np.arange(d), np.arange(d)) if diagonal else np.tril_indices(d)
    on = rows == columns

    def unpack(z):
        root = np.zeros((d, d))
        root[rows, columns] = np.where(on, np.exp(np.where(on, z[d:], 0.0)), z[d:])
        return z[:d], root

    def negative(z):
        loc, root = unpack(z)
        spread = x @ root
        sd = np.sqrt(np.sum(spread**2, axis=1))
        u = (x @ loc)[:, None] + sd[:, None] * NODES
        slope = -y[:, None] * expit(-y[:, None] * u)
        first, in_sd = slope @ WEIGHTS, (slope * NODES) @ WEIGHTS
        loss = np.sum(softplus(-y[:, None] * u) @ WEIGHTS)
        v = prior_scale**2
        kl = 0.5 * (np.sum(root**2) / v + loc @ loc / v - d + d * np.log(v)) - np.sum(
            np.log(np.diag(root))
        )
        in_loc = alpha * x.T @ first + loc / v
        in_root = alpha * x.T @ (spread * (in_sd / sd)[:, None]) + root / v
        in_root[np.arange(d), np.arange(d)] -= 1.0 / np.diag(root)
        flat = in_root[rows, columns] * np.where(on, root[rows, columns], 1.0)
        return alpha * loss + kl, np.concatenate([in_loc, flat])

    start = np.zeros(d + len(rows))
    options = {
        "maxiter": 20_000,
        "maxfun": 40_000,
        "ftol": 1e-15,
        "gtol": 1e-9,
        "maxcor": 50,
    }
    found = minimize(negative, start, jac=True, method="L-BFGS-B", options=options)
    loc, root = unpack(found.x)
    return loc, root @ root.T, -found.fun


def wasserstein(m, v, k, w):
    """W_2 of two Gaussians by matrix square roots."""
    root = sqrtm(v)
    cross = sqrtm(root @ w @ root)
    return np.sqrt(np.sum((m - k) ** 2) + np.trace(v + w - 2.0 * np.real(cross)))


def kl(m, v, k, w):
    """KL(N(m, v), N(k, w))."""
    shift = k - m
    inverse = np.linalg.inv(w)
    logs = np.linalg.slogdet(w)[1] - np.linalg.slogdet(v)[1]
    return 0.5 * (np.trace(inverse @ v) + shift @ inverse @ shift - len(m) + logs)


def posterior(x, y, alpha, prior_scale, noise):
    """Mean and covariance of a tempered Gaussian linear regression."""
    precision = alpha * x.T @ x / noise**2 + np.eye(x.shape[1]) / prior_scale**2
    covariance = np.linalg.inv(precision)
    return covariance @ (alpha * x.T @ y / noise**2), covariance


def best_normal_1d(log_density, grid, weights):
    """Mean and sd of the N(m, s²) nearest in KL to a density on a line known on a grid, and the ELBO."""
    values = log_density(grid)

    def negative(z):
        m, s = z[0], np.exp(z[1])
        at = np.interp(m + s * NODES, grid, values)
        return -(at @ WEIGHTS) - np.log(s) - 0.5 * np.log(2.0 * np.pi * np.e)

    found = minimize(
        negative,
        np.array([grid[np.argmax(values)], -1.0]),
        method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-13, "maxiter": 10_000},
    )
    return found.x[0], np.exp(found.x[1]), -found.fun
