"""Sparse regression written out in numpy: every model, every coordinate, every integral by itself."""

import itertools

import numpy as np
from scipy.special import digamma, expit, gammaln, logsumexp, roots_hermitenorm


def design(seed, n, d, rho=0.0):
    """Gaussian rows whose neighbouring columns have correlation rho."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(n, d))
    x = noise.copy()
    for j in range(1, d):
        x[:, j] = rho * x[:, j - 1] + np.sqrt(1 - rho**2) * noise[:, j]
    return x


def linear_data(seed, n, d, rho=0.0, noise=1.0):
    rng = np.random.default_rng([seed, 1])
    theta = np.zeros(d)
    theta[rng.choice(d, size=max(1, d // 4), replace=False)] = rng.normal(
        size=max(1, d // 4)
    )
    x = design(seed, n, d, rho)
    return x, x @ theta + noise * rng.normal(size=n)


def logistic_data(seed, n, d, rho=0.0):
    rng = np.random.default_rng([seed, 2])
    x = design(seed, n, d, rho)
    return x, (rng.random(n) < expit(0.5 + 1.5 * x[:, 0])).astype(float)


def kl(q, prior):
    """KL of spike and slab factors; q is (probs, loc, scale), the prior (probs, scale), each of length d."""
    total = 0.0
    for phi, m, sigma, lam, s in zip(*q, *prior, strict=True):
        if phi > 0:
            slab = np.log(s / sigma) + (sigma**2 + m**2) / (2 * s**2) - 0.5
            total += phi * (np.log(phi / lam) + slab)
        if phi < 1:
            total += (1 - phi) * np.log((1 - phi) / (1 - lam))
    return total


def moments(x, q):
    """Mean and variance of the linear predictor of each row."""
    phi, m, sigma = q
    second = phi * (sigma**2 + m**2)
    return x @ (phi * m), (x**2) @ (second - (phi * m) ** 2)


def squared_error(x, y, q):
    """E|y - X theta|^2."""
    mean, variance = moments(x, q)
    return np.sum((y - mean) ** 2 + variance)


def linear_log_lik(x, y, q, v):
    """E log N(y; X theta, v)."""
    return -0.5 * (len(y) * np.log(2 * np.pi * v) + squared_error(x, y, q) / v)


def linear_elbo(x, y, alpha, q, prior, v):
    """alpha E log N(y; X theta, v) - KL."""
    return alpha * linear_log_lik(x, y, q, v) - kl(q, prior)


def linear_elbo_gamma(x, y, alpha, q, prior, gamma, gamma_prior):
    """The same with a Gamma factor (shape, rate) of 1/v."""
    (a, b), (a0, b0) = gamma, gamma_prior
    log_tau = digamma(a) - np.log(b)
    log_lik = 0.5 * len(y) * (
        log_tau - np.log(2 * np.pi)
    ) - 0.5 * a / b * squared_error(x, y, q)
    of_gamma = (
        (a - a0) * digamma(a)
        - gammaln(a)
        + gammaln(a0)
        + a0 * np.log(b / b0)
        + a * (b0 - b) / b
    )
    return alpha * log_lik - kl(q, prior) - of_gamma


def models(d):
    return [
        np.array(gates, bool) for gates in itertools.product([False, True], repeat=d)
    ]


def log_model_prior(gates, lam):
    with np.errstate(divide="ignore"):
        return np.sum(np.where(gates, np.log(lam), np.log1p(-lam)))


def log_evidence_of_model(x, y, alpha, s, v):
    """log of the integral of N(y; X theta, v)^alpha over theta ~ N(0, diag(s^2)), all columns in; of each v."""
    n = len(y)
    cov = np.multiply.outer(v / alpha, np.eye(n)) + (x * s**2) @ x.T
    _, log_det = np.linalg.slogdet(cov)
    square = (
        np.linalg.solve(cov, np.broadcast_to(y[:, None], (*cov.shape[:-1], 1)))[..., 0]
        @ y
    )
    gaussian = -0.5 * (n * np.log(2 * np.pi) + log_det + square)
    return (
        gaussian
        - 0.5 * alpha * n * np.log(2 * np.pi * v)
        + 0.5 * n * np.log(2 * np.pi * v / alpha)
    )


def enumerate_linear(x, y, alpha, prior, v):
    """Log evidence, inclusion probabilities and posterior means over all 2^d models."""
    lam, s = prior
    logs, means = [], []
    for gates in models(x.shape[1]):
        part = x[:, gates]
        logs.append(
            log_model_prior(gates, lam)
            + log_evidence_of_model(part, y, alpha, s[gates], v)
        )
        mean = np.zeros(len(gates))
        if gates.any():
            precision = alpha / v * part.T @ part + np.diag(1 / s[gates] ** 2)
            mean[gates] = np.linalg.solve(precision, alpha / v * part.T @ y)
        means.append(mean)
    total = logsumexp(logs)
    weights = np.exp(np.array(logs) - total)
    return (
        total,
        weights @ np.array(models(x.shape[1]), float),
        weights @ np.array(means),
    )


def log_evidence_gamma(x, y, alpha, prior, gamma_prior, num=400):
    """The log evidence with 1/v ~ Gamma integrated out, by the trapezoidal rule on log(1/v)."""
    a0, b0 = gamma_prior
    lam, s = prior
    grid = np.linspace(-6.0, 6.0, num)
    evidence = logsumexp(
        [
            log_model_prior(gates, lam)
            + log_evidence_of_model(x[:, gates], y, alpha, s[gates], np.exp(-grid))
            for gates in models(x.shape[1])
        ],
        axis=0,
    )
    # The density of log(1/v).
    logs = evidence + a0 * np.log(b0) - gammaln(a0) + a0 * grid - b0 * np.exp(grid)
    return logsumexp(logs) + np.log(grid[1] - grid[0])


def linear_sweep(x, y, alpha, prior, v, mean, order):
    """One sweep, coordinate by coordinate, every residual from scratch."""
    lam, s = prior
    mean = mean.copy()
    phi, m, sigma = np.zeros((3, len(mean)))
    for j in order:
        others = np.arange(len(mean)) != j
        residual = y - x[:, others] @ mean[others]
        sigma[j] = (alpha * x[:, j] @ x[:, j] / v + 1 / s[j] ** 2) ** -0.5
        m[j] = sigma[j] ** 2 * alpha * x[:, j] @ residual / v
        log_odds = (
            np.log(lam[j] / (1 - lam[j]))
            + np.log(sigma[j] / s[j])
            + m[j] ** 2 / (2 * sigma[j] ** 2)
        )
        phi[j] = expit(log_odds)
        mean[j] = phi[j] * m[j]
    return phi, m, sigma


def best_xi(x, q):
    mean, variance = moments(x, q)
    return np.sqrt(mean**2 + variance)


def logistic_objective(x, y, alpha, q, prior, xi=None):
    """The quadratic bound in the form of Jaakkola and Jordan, for labels -1 and 1."""
    mean, variance = moments(x, q)
    xi = np.sqrt(mean**2 + variance) if xi is None else xi
    lam = np.tanh(xi / 2) / (4 * xi)
    sign = 2 * y - 1
    bound = (
        np.log(expit(xi)) + (sign * mean - xi) / 2 - lam * (mean**2 + variance - xi**2)
    )
    return alpha * np.sum(bound) - kl(q, prior)


def variance_of_square(x, q):
    """Variance of u^2 in each row, over all gates."""
    phi, m, sigma = q
    second, fourth = np.zeros((2, len(x)))
    for gates in models(len(phi)):
        weight = np.prod(np.where(gates, phi, 1 - phi))
        a, b = x[:, gates] @ m[gates], (x[:, gates] ** 2) @ sigma[gates] ** 2
        second += weight * (a**2 + b)
        fourth += weight * (a**4 + 6 * a**2 * b + 3 * b**2)
    return fourth - second**2


def log_lik_of(u, y):
    """Log-likelihood of log-odds."""
    return y * u - np.logaddexp(0.0, u)


def logistic_elbo(x, y, alpha, q, prior, nodes=60):
    """alpha E log L - KL: for given gates the predictor is Gaussian, one integral a row."""
    phi, m, sigma = q
    z, w = roots_hermitenorm(nodes)
    w = w / w.sum()
    total = 0.0
    for gates in models(len(phi)):
        weight = np.prod(np.where(gates, phi, 1 - phi))
        if weight > 0:
            u = x[:, gates] @ m[gates]
            deviation = np.sqrt((x[:, gates] ** 2) @ sigma[gates] ** 2)
            total += weight * np.sum(
                log_lik_of(u[:, None] + deviation[:, None] * z, y[:, None]) @ w
            )
    return alpha * total - kl(q, prior)


def logistic_log_evidence(x, y, alpha, prior, nodes):
    """Over all models, each by a product rule about its mode."""
    lam, s = prior
    z, w = roots_hermitenorm(nodes)
    log_w = np.log(w / w.sum())
    logs = []
    for gates in models(x.shape[1]):
        if not np.isfinite(log_model_prior(gates, lam)):
            continue
        k, part = int(gates.sum()), x[:, gates]
        mode = np.zeros(k)
        for _ in range(100):
            p = expit(part @ mode)
            hessian = alpha * part.T @ (part * (p * (1 - p))[:, None]) + np.diag(
                s[gates] ** -2
            )
            mode = mode + 0.5 * np.linalg.solve(
                hessian, alpha * part.T @ (y - p) - mode / s[gates] ** 2
            )
        factor = np.linalg.inv(np.linalg.cholesky(hessian)).T
        standard = np.array(list(itertools.product(z, repeat=k))).reshape(nodes**k, k)
        points = mode + standard @ factor.T
        log_weights = (
            np.array(list(itertools.product(log_w, repeat=k)))
            .reshape(nodes**k, k)
            .sum(axis=1)
        )
        log_lik = sum(
            log_lik_of(points @ row, label) for row, label in zip(part, y, strict=True)
        )
        # Prior density over that of the Gaussian about the mode.
        log_ratio = -0.5 * np.sum(
            (points / s[gates]) ** 2 - standard**2, axis=1
        ) - np.sum(np.log(s[gates]))
        log_ratio = log_ratio + np.linalg.slogdet(factor)[1]
        logs.append(
            log_model_prior(gates, lam)
            + logsumexp(alpha * log_lik + log_ratio + log_weights)
        )
    return logsumexp(logs)
