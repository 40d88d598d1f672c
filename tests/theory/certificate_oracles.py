"""Independent references for divergences and certificates: numpy and scipy only, nothing of the package."""

from itertools import pairwise

import numpy as np
from scipy.integrate import quad
from scipy.special import gammaln
from scipy.stats import multivariate_normal

# Divergences, by their definition as integrals and sums.


def divergence_by_quadrature(order, density_p, density_r, breaks):
    """D_a of two densities on the line by adaptive quadrature between breaks."""

    def integrand(x):
        p, r = density_p(x), density_r(x)
        if order == 1.0:
            return p * np.log(p / r) if p > 0 else 0.0
        return (
            np.exp(order * np.log(p) + (1 - order) * np.log(r))
            if p > 0 and r > 0
            else 0.0
        )

    total = sum(
        quad(integrand, left, right, epsabs=1e-14, epsrel=1e-13, limit=200)[0]
        for left, right in pairwise(breaks)
    )
    return total if order == 1.0 else np.log(total) / (order - 1.0)


def divergence_of_gaussians_on_a_grid(order, m0, s0, m1, s1, width=14.0, number=701):
    """D_a of two Gaussians in the plane by the trapezoidal rule, which is exact to rounding for them."""
    centre, size = 0.5 * (m0 + m1), width
    axis = np.linspace(-size, size, number)
    points = np.stack(
        np.meshgrid(centre[0] + axis, centre[1] + axis, indexing="ij"), axis=-1
    )
    log_p, log_r = (
        multivariate_normal(m0, s0).logpdf(points),
        multivariate_normal(m1, s1).logpdf(points),
    )
    cell = (axis[1] - axis[0]) ** 2
    if order == 1.0:
        return np.sum(np.exp(log_p) * (log_p - log_r)) * cell
    return np.log(np.sum(np.exp(order * log_p + (1 - order) * log_r)) * cell) / (
        order - 1.0
    )


def divergence_of_discrete(order, p, r):
    """D_a of two probability vectors without zeros."""
    if order == 1.0:
        return np.sum(p * np.log(p / r), axis=-1)
    return np.log(np.sum(p**order * r ** (1 - order), axis=-1)) / (order - 1.0)


def squared_hellinger(p, r):
    return np.sum((np.sqrt(p) - np.sqrt(r)) ** 2, axis=-1)


def total_variation(p, r):
    return 0.5 * np.sum(np.abs(p - r), axis=-1)


# Certificate of the normal location model: x_i ~ N(theta, 1) with theta ~ N(0, V²), and P0 = N(mean, sd²).


def location_posterior(total, n, alpha, prior_sd):
    """Mean and variance of the tempered posterior from the sum of n data."""
    precision = prior_sd**-2 + alpha * n
    return alpha * total / precision, 1.0 / precision


def location_log_evidence(total, squares, n, alpha, prior_sd):
    """The log of the integral of L^alpha against the prior; alpha multiplies the precision of the data."""
    inflation = 1.0 + alpha * n * prior_sd**2
    quadratic = squares - alpha * prior_sd**2 * total**2 / inflation
    return -0.5 * (
        alpha * n * np.log(2 * np.pi) + np.log(inflation) + alpha * quadratic
    )


def location_divergence(m, v, alpha, mean, sd):
    """The integral of D_alpha(N(theta, 1), N(mean, sd²)) against N(m, v)."""
    mixed = (1 - alpha) + alpha * sd**2
    constant = (np.log(mixed) - alpha * np.log(sd**2)) / (2 * (1 - alpha))
    return 0.5 * alpha * ((m - mean) ** 2 + v) / mixed + constant


def location_expectations(n, alpha, prior_sd, mean):
    """Expectations, of a well-specified model, of its divergence and of alpha log p0(X) less the log evidence.

    The sum of the data is N(n mean, n), and both are quadratic in it.
    """
    precision = prior_sd**-2 + alpha * n
    shrink = alpha * n / precision
    divergence = (
        0.5 * alpha * ((shrink - 1) ** 2 * mean**2 + shrink**2 / n + 1 / precision)
    )
    inflation = 1 + alpha * n * prior_sd**2
    squared_sum = (n * mean) ** 2 + n
    slack = 0.5 * np.log(inflation) + 0.5 * alpha * n * mean**2
    return divergence, slack - 0.5 * alpha**2 * prior_sd**2 * squared_sum / inflation


# Certificate of a Beta-Bernoulli model and of a wrong one for counts.


def beta_bernoulli_log_evidence(ones, n, alpha, a=1.0, b=1.0):
    """The log of the integral of (p^ones (1-p)^(n-ones))^alpha against Beta(a, b)."""
    up, down = a + alpha * ones, b + alpha * (n - ones)
    return (
        gammaln(up)
        + gammaln(down)
        - gammaln(up + down)
        - gammaln(a)
        - gammaln(b)
        + gammaln(a + b)
    )


def gamma_poisson_log_evidence(total, log_factorials, n, alpha, shape=1.0, rate=1.0):
    """The log of the integral of the Poisson likelihood^alpha against Gamma(shape, rate)."""
    up = shape + alpha * total
    return (
        gammaln(up)
        - gammaln(shape)
        + shape * np.log(rate)
        - up * np.log(rate + alpha * n)
        - alpha * log_factorials
    )
