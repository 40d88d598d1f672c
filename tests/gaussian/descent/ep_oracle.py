"""Expectation propagation for generalised linear models, in numpy and double precision, as an oracle of tests.

The target is the tempered posterior of a GLM with a normal prior, L(theta)^alpha N(theta; m_0, S_0), whose
likelihood has one factor a datum that depends on u_i = x_i'theta alone. Integrals over u_i are dense
quadratures of its normal density times the factor; none uses derivatives of the likelihood but Laplace's.
Imports nothing from numpyro_tempered.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, gammaln, logsumexp


class Likelihood(NamedTuple):
    """log p(y | u), elementwise, and its first two derivatives in u."""

    value: Callable
    slope: Callable
    curvature: Callable


LOGISTIC = Likelihood(
    lambda u, y: y * u - np.logaddexp(0.0, u),
    lambda u, y: y - expit(u),
    lambda u, y: -expit(u) * expit(-u),
)
POISSON = Likelihood(
    lambda u, y: y * u - np.exp(u) - gammaln(y + 1.0),
    lambda u, y: y - np.exp(u),
    lambda u, y: -np.exp(u),
)
# Not log-concave: sites of negative precision, several fixed points.
CAUCHY = Likelihood(
    lambda u, y: -np.log1p((y - u) ** 2) - np.log(np.pi),
    lambda u, y: 2 * (y - u) / (1 + (y - u) ** 2),
    lambda u, y: 2 * ((y - u) ** 2 - 1) / (1 + (y - u) ** 2) ** 2,
)
# With unit variance: the conjugate case.
NORMAL = Likelihood(
    lambda u, y: -0.5 * (y - u) ** 2 - 0.5 * np.log(2 * np.pi),
    lambda u, y: y - u,
    lambda u, y: -np.ones_like(u),
)


class Problem(NamedTuple):
    """A tempered GLM: covariates (n, d), outcomes (n,), likelihood, prior mean and covariance, power."""

    x: np.ndarray
    y: np.ndarray
    likelihood: Likelihood
    prior_mean: np.ndarray
    prior_cov: np.ndarray
    alpha: float


class Gaussian(NamedTuple):
    """An approximation: mean, covariance, its value of log evidence, and how far from stationary it ended.

    ``sites`` are EP's: precisions k and shifts r of the factors of u_i, shape (n, 2).
    """

    mean: np.ndarray
    cov: np.ndarray
    log_evidence: float
    residual: float
    sites: np.ndarray | None = None

    @property
    def sd(self):
        return np.sqrt(np.diag(self.cov))


def standard_nodes(width=12.0, panels=48, order=20):
    """Nodes and log-weights of Gauss-Legendre panels against N(0, 1)."""
    x, w = np.polynomial.legendre.leggauss(order)
    edges = np.linspace(-width, width, panels + 1)
    half = 0.5 * np.diff(edges)[:, None]
    nodes = (0.5 * (edges[:-1] + edges[1:])[:, None] + half * x).ravel()
    return nodes, np.log((half * w).ravel()) - 0.5 * nodes**2 - 0.5 * np.log(2 * np.pi)


NODES, LOG_WEIGHTS = standard_nodes()


def tilted_moments(log_factor, mean, variance):
    """Log mass, mean and variance of N(u; mean, variance) exp(log_factor(u))."""
    u = mean + np.sqrt(variance) * NODES
    log_terms = LOG_WEIGHTS + log_factor(u)
    log_mass = logsumexp(log_terms)
    weights = np.exp(log_terms - log_mass)
    centre = weights @ u
    return log_mass, centre, weights @ (u - centre) ** 2


def log_normaliser(precision, shift):
    """log of the integral of exp(shift't - t'precision t / 2), in any dimension."""
    precision, shift = np.atleast_2d(precision), np.atleast_1d(shift)
    quadratic = shift @ np.linalg.solve(precision, shift)
    return 0.5 * (
        quadratic + len(shift) * np.log(2 * np.pi) - np.linalg.slogdet(precision)[1]
    )


def power_ep(problem, power=1.0, *, damping=1.0, max_sweeps=2000, tolerance=1e-11):
    r"""Power expectation propagation, site by site; ``power`` 1 is EP, towards 0 it is variational Bayes.

    Site i is exp(r_i u_i - k_i u_i² / 2). Take the ``power`` of it out of q (the cavity), put the same power of
    the tempered factor in (the tilted distribution), match mean and variance of u_i, and divide the
    natural parameters that were added by ``power``. Only ``power`` is of the divergence; ``alpha`` belongs to
    the factor.

    The log evidence is that of power EP, sum of log c_i over sites plus the change of the log-normaliser,
    where c_i makes the masses of the tilted distribution and of its match equal; it bounds nothing, and tends to
    the ELBO as ``power`` falls to 0.

    Raises:
        FloatingPointError: If a cavity has no variance, or the sweeps end above the tolerance.
    """
    x, y, likelihood, prior_mean, prior_cov, alpha = problem
    prior_precision = np.linalg.inv(prior_cov)
    prior_shift = prior_precision @ prior_mean
    r, k = np.zeros(len(y)), np.zeros(len(y))

    def posterior():
        precision = prior_precision + (x.T * k) @ x
        shift = prior_shift + x.T @ r
        cov = np.linalg.inv(precision)
        return precision, shift, cov, cov @ shift

    def visit(i, cov, mean):
        """Natural parameters of q in u_i and of its cavity, and the tilted moments."""
        variance, centre = x[i] @ cov @ x[i], x[i] @ mean
        marginal = np.array([1 / variance, centre / variance])
        cavity = marginal - power * np.array([k[i], r[i]])
        if cavity[0] <= 0:
            raise FloatingPointError(
                f"the cavity of site {i} has precision {cavity[0]:.2g}."
            )
        factor = tilted_moments(
            lambda u: power * alpha * likelihood.value(u, y[i]),
            cavity[1] / cavity[0],
            1 / cavity[0],
        )
        return marginal, cavity, factor

    for _ in range(max_sweeps):
        change = 0.0
        for i in range(len(y)):
            _, _, cov, mean = posterior()
            _, cavity, (_, centre, variance) = visit(i, cov, mean)
            k_new, r_new = (
                np.array([1 / variance, centre / variance]) - cavity
            ) / power
            step = damping * np.array([k_new - k[i], r_new - r[i]])
            k[i], r[i] = k[i] + step[0], r[i] + step[1]
            change = max(change, np.abs(step).max() / (1 + abs(k[i]) + abs(r[i])))
        if change < tolerance:
            break
    else:
        raise FloatingPointError(
            f"{max_sweeps} sweeps end with a change of {change:.2g}."
        )
    precision, shift, cov, mean = posterior()
    evidence = log_normaliser(precision, shift) - log_normaliser(
        prior_precision, prior_shift
    )
    residual = 0.0
    for i in range(len(y)):
        marginal, cavity, (log_mass, centre, variance) = visit(i, cov, mean)
        evidence += (
            log_mass + log_normaliser(*cavity) - log_normaliser(*marginal)
        ) / power
        residual = max(
            residual,
            abs(centre - marginal[1] / marginal[0]),
            abs(variance * marginal[0] - 1),
        )
    return Gaussian(mean, cov, evidence, residual, np.column_stack([k, r]))


def gaussian_vi(problem):
    """The Gaussian of largest ELBO, by quasi-Newton steps on its mean and Cholesky factor.

    Expectations over u_i are quadratures, and so are their derivatives, which are those of the density.
    """
    x, y, likelihood, prior_mean, prior_cov, alpha = problem
    d = x.shape[1]
    lower = np.tril_indices(d)
    prior_precision, weights = np.linalg.inv(prior_cov), np.exp(LOG_WEIGHTS)

    def unpack(flat):
        factor = np.zeros((d, d))
        factor[lower] = flat[d:]
        factor[np.diag_indices(d)] = np.exp(np.diag(factor))
        return flat[:d], factor

    def negative_elbo(flat):
        mean, factor = unpack(flat)
        sd = np.linalg.norm(x @ factor, axis=1)
        values = alpha * likelihood.value(
            (x @ mean)[:, None] + sd[:, None] * NODES, y[:, None]
        )
        in_mean = values @ (weights * NODES) / sd
        in_variance = values @ (weights * (NODES**2 - 1)) / (2 * sd**2)
        offset = mean - prior_mean
        kl = 0.5 * (
            np.trace(prior_precision @ factor @ factor.T)
            + offset @ prior_precision @ offset
            - d
        )
        kl += 0.5 * np.linalg.slogdet(prior_cov)[1] - np.log(np.diag(factor)).sum()
        gradient_mean = prior_precision @ offset - x.T @ in_mean
        # Of the likelihood and the trace; the entropy adds -1 for each log of the diagonal.
        gradient = (prior_precision - 2 * (x.T * in_variance) @ x) @ factor
        gradient[np.diag_indices(d)] = np.diag(gradient) * np.diag(factor) - 1
        return kl - (values @ weights).sum(), np.concatenate(
            [gradient_mean, gradient[lower]]
        )

    start = laplace(problem)
    factor = np.linalg.cholesky(start.cov)
    factor[np.diag_indices(d)] = np.log(np.diag(factor))
    found = minimize(
        negative_elbo,
        np.concatenate([start.mean, factor[lower]]),
        jac=True,
        method="BFGS",
        options={"gtol": 1e-9, "maxiter": 2000},
    )
    mean, factor = unpack(found.x)
    return Gaussian(mean, factor @ factor.T, -found.fun, np.abs(found.jac).max())


def laplace(problem, steps=200):
    """The mode and the inverse curvature there, by Newton's method with halving."""
    x, y, likelihood, prior_mean, prior_cov, alpha = problem
    precision = np.linalg.inv(prior_cov)

    def log_joint(theta):
        offset = theta - prior_mean
        return (
            alpha * likelihood.value(x @ theta, y).sum()
            - 0.5 * offset @ precision @ offset
        )

    theta = np.array(prior_mean, float)
    for _ in range(steps):
        u = x @ theta
        gradient = alpha * x.T @ likelihood.slope(u, y) - precision @ (
            theta - prior_mean
        )
        curvature = precision - alpha * (x.T * likelihood.curvature(u, y)) @ x
        step = np.linalg.solve(curvature, gradient)
        while log_joint(theta + step) < log_joint(theta) and np.abs(step).max() > 1e-12:
            step = step / 2
        theta = theta + step
    cov = np.linalg.inv(curvature)
    sign = np.linalg.slogdet(cov)[1] - np.linalg.slogdet(prior_cov)[1]
    return Gaussian(theta, cov, log_joint(theta) + 0.5 * sign, np.abs(gradient).max())


def exact_moments(problem, points=401, width=14.0):
    """Mean, covariance and log evidence of a target of two parameters, by a sum over an even grid.

    The grid's axes are those of Laplace's approximation, widened by half; its sums converge faster than any
    power of the spacing, so two grids that agree are both right.
    """
    x, y, likelihood, prior_mean, prior_cov, alpha = problem
    about = laplace(problem)
    z = np.linspace(-width, width, points)
    axes = 1.5 * np.linalg.cholesky(about.cov)
    theta = (
        about.mean
        + np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2) @ axes.T
    )
    offset = theta - prior_mean
    log_joint = -0.5 * np.einsum(
        "ij,jk,ik->i", offset, np.linalg.inv(prior_cov), offset
    )
    log_joint -= np.log(2 * np.pi) + 0.5 * np.linalg.slogdet(prior_cov)[1]
    for row, outcome in zip(x, y, strict=True):
        log_joint += alpha * likelihood.value(theta @ row, outcome)
    log_mass = logsumexp(log_joint)
    weights = np.exp(log_joint - log_mass)
    mean = weights @ theta
    cov = (theta - mean).T @ ((theta - mean) * weights[:, None])
    return Gaussian(
        mean, cov, log_mass + np.log((z[1] - z[0]) ** 2 * np.linalg.det(axes)), 0.0
    )
