"""Mixtures from the printed formulas, row by row: numpy and scipy only, nothing of the package.

A family has, for one component with weights w of the rows (alpha times responsibilities):

- ``posterior(x, w)``: hyperparameters, an update of ``prior``;
- ``expected(q, row)``: E_q log density of a row;
- ``kl(q)``: KL to the prior;
- ``log_density(theta, row)``, ``log_prior(theta, q)``: density of a row, and of parameters under hyperparameters;
- ``some_parameters()``: a few values of the parameters;
- ``predictive(q, row)``: log density of a row, the parameters integrated out, by scipy's distributions.

NaN are left out where columns are independent.
"""

from itertools import pairwise

import numpy as np
from scipy import stats
from scipy.integrate import quad
from scipy.special import digamma, gammaln


def density_kl(q, p):
    """KL of two scipy distributions of a scalar, as the integral it is."""
    low, high = q.ppf(1e-14), q.isf(1e-14)
    # Densities of small shapes are steep at the ends.
    inside = [*q.ppf([1e-9, 1e-6, 1e-3, 0.01, 0.5]), *q.isf([0.01, 1e-3, 1e-6, 1e-9])]
    edges = np.array([low, *inside, high])
    pieces = [
        quad(
            lambda t: np.exp(q.logpdf(t)) * (q.logpdf(t) - p.logpdf(t)),
            a,
            b,
            epsabs=1e-13,
            epsrel=1e-12,
        )[0]
        for a, b in pairwise(edges)
    ]
    return sum(pieces)


def normal_kl(m, v, m0, v0):
    """KL(N(m, v), N(m0, v0))."""
    return 0.5 * (np.log(v0 / v) + (v + (m - m0) ** 2) / v0 - 1)


class Columns:
    """Columns that are independent, each with a posterior of its own."""

    def posterior(self, x, w):
        every = []
        for c in range(x.shape[1]):
            seen = ~np.isnan(x[:, c])
            every.append(self.column_posterior(x[seen, c], w[seen]))
        return every

    def expected(self, q, row):
        return sum(
            self.column_expected(qc, xc)
            for qc, xc in zip(q, row, strict=True)
            if not np.isnan(xc)
        )

    def kl(self, q):
        return sum(self.column_kl(qc) for qc in q)

    def log_density(self, theta, row):
        return sum(self.column_log_density(theta, xc) for xc in row if not np.isnan(xc))

    def log_prior(self, theta, q):
        return sum(self.column_log_prior(theta, qc) for qc in q)

    def predictive(self, q, row):
        return sum(
            self.column_predictive(qc, xc)
            for qc, xc in zip(q, row, strict=True)
            if not np.isnan(xc)
        )

    def prior(self, dim):
        return self.posterior(np.zeros((0, dim)), np.zeros(0))


class KnownVariance(Columns):
    def __init__(self, m0, v0, noise):
        self.m0, self.v0, self.noise = m0, v0, noise

    def column_posterior(self, x, w):
        precision = 1 / self.v0**2 + w.sum() / self.noise**2
        return (
            self.m0 / self.v0**2 + (w * x).sum() / self.noise**2
        ) / precision, precision**-0.5

    def column_expected(self, q, x):
        m, s = q
        return -0.5 * (
            np.log(2 * np.pi * self.noise**2) + ((x - m) ** 2 + s**2) / self.noise**2
        )

    def column_kl(self, q):
        return normal_kl(q[0], q[1] ** 2, self.m0, self.v0**2)

    def some_parameters(self):
        return [0.3, -1.1]

    def column_log_density(self, theta, x):
        return stats.norm.logpdf(x, theta, self.noise)

    def column_log_prior(self, theta, q):
        return stats.norm.logpdf(theta, *q)

    def column_predictive(self, q, x):
        return stats.norm.logpdf(x, q[0], np.sqrt(q[1] ** 2 + self.noise**2))


class NormalInverseGamma(Columns):
    """mean | precision ~ N(m0, 1 / (kappa0 precision)), precision ~ Gamma(a0, b0)."""

    def __init__(self, m0, kappa0, a0, b0):
        self.m0, self.kappa0, self.a0, self.b0 = m0, kappa0, a0, b0

    def column_posterior(self, x, w):
        kappa = self.kappa0 + w.sum()
        m = (self.kappa0 * self.m0 + (w * x).sum()) / kappa
        b = self.b0 + 0.5 * ((w * x**2).sum() + self.kappa0 * self.m0**2 - kappa * m**2)
        return m, kappa, self.a0 + 0.5 * w.sum(), b

    def column_expected(self, q, x):
        m, kappa, a, b = q
        return 0.5 * (
            digamma(a)
            - np.log(b)
            - np.log(2 * np.pi)
            - a / b * (x - m) ** 2
            - 1 / kappa
        )

    def column_kl(self, q):
        m, kappa, a, b = q
        of_precision = density_kl(
            stats.gamma(a, scale=1 / b), stats.gamma(self.a0, scale=1 / self.b0)
        )
        # Linear in the precision, whose mean is a/b.
        of_mean = 0.5 * (
            np.log(kappa / self.kappa0)
            + self.kappa0 / kappa
            - 1
            + self.kappa0 * (m - self.m0) ** 2 * a / b
        )
        return of_precision + of_mean

    def some_parameters(self):
        return [(0.3, 1.2), (-1.0, 0.4)]

    def column_log_density(self, theta, x):
        return stats.norm.logpdf(x, theta[0], theta[1] ** -0.5)

    def column_log_prior(self, theta, q):
        m, kappa, a, b = q
        mean, precision = theta
        return stats.norm.logpdf(
            mean, m, (kappa * precision) ** -0.5
        ) + stats.gamma.logpdf(precision, a, scale=1 / b)

    def column_predictive(self, q, x):
        m, kappa, a, b = q
        return stats.t.logpdf(x, 2 * a, m, np.sqrt(b / a * (1 + 1 / kappa)))


class Spherical:
    """As above, one precision for all columns."""

    def __init__(self, m0, kappa0, a0, b0):
        self.m0, self.kappa0, self.a0, self.b0 = m0, kappa0, a0, b0

    def posterior(self, x, w):
        columns = NormalInverseGamma(self.m0, self.kappa0, 0.0, 0.0).posterior(x, w)
        a = self.a0 + sum(q[2] for q in columns)
        b = self.b0 + sum(q[3] for q in columns)
        return (
            np.array([q[0] for q in columns]),
            np.array([q[1] for q in columns]),
            a,
            b,
        )

    def expected(self, q, row):
        m, kappa, a, b = q
        each = NormalInverseGamma(self.m0, self.kappa0, self.a0, self.b0)
        return sum(
            each.column_expected((m[c], kappa[c], a, b), x)
            for c, x in enumerate(row)
            if not np.isnan(x)
        )

    def kl(self, q):
        m, kappa, a, b = q
        of_precision = density_kl(
            stats.gamma(a, scale=1 / b), stats.gamma(self.a0, scale=1 / self.b0)
        )
        terms = (
            np.log(kappa / self.kappa0)
            + self.kappa0 / kappa
            - 1
            + self.kappa0 * (m - self.m0) ** 2 * a / b
        )
        return of_precision + 0.5 * terms.sum()

    def some_parameters(self):
        return [(np.array([0.3, -0.2]), 1.2), (np.array([-1.0, 0.4]), 0.4)]

    def log_density(self, theta, row):
        seen = ~np.isnan(row)
        return stats.norm.logpdf(row[seen], theta[0][seen], theta[1] ** -0.5).sum()

    def log_prior(self, theta, q):
        m, kappa, a, b = q
        mean, precision = theta
        of_mean = stats.norm.logpdf(mean, m, (kappa * precision) ** -0.5).sum()
        return of_mean + stats.gamma.logpdf(precision, a, scale=1 / b)

    def predictive(self, q, row):
        m, kappa, a, b = q
        seen = ~np.isnan(row)
        if not seen.any():
            return 0.0
        shape = np.diag(b / a * (1 + 1 / kappa[seen]))
        return stats.multivariate_t.logpdf(row[seen], m[seen], shape, df=2 * a)

    def prior(self, dim):
        return self.posterior(np.zeros((0, dim)), np.zeros(0))


def wishart(q):
    """The distribution of the precision."""
    return stats.wishart(q[2], np.linalg.inv(q[3]))


class NormalInverseWishart:
    """mean | precision ~ N(m0, (kappa0 precision)^-1), precision ~ Wishart(nu0, Psi0^-1)."""

    def __init__(self, m0, kappa0, nu0, psi0):
        self.m0, self.kappa0, self.nu0, self.psi0 = (
            np.asarray(m0),
            kappa0,
            nu0,
            np.asarray(psi0),
        )

    def posterior(self, x, w):
        kappa = self.kappa0 + w.sum()
        m = (self.kappa0 * self.m0 + w @ x) / kappa
        psi = self.psi0 + self.kappa0 * np.outer(m - self.m0, m - self.m0)
        for wi, row in zip(w, x, strict=True):
            psi = psi + wi * np.outer(row - m, row - m)
        return m, kappa, self.nu0 + w.sum(), psi

    def expected(self, q, row):
        m, kappa, nu, psi = q
        d = len(m)
        terms = (
            sum(digamma((nu - i) / 2) for i in range(d))
            + d * np.log(2)
            - np.linalg.slogdet(psi)[1]
        )
        distance = nu * (row - m) @ np.linalg.solve(psi, row - m)
        return 0.5 * (terms - d * np.log(2 * np.pi) - distance - d / kappa)

    def mean_kl(self, q):
        m, kappa, nu, psi = q
        distance = nu * (m - self.m0) @ np.linalg.solve(psi, m - self.m0)
        return 0.5 * (
            len(m) * (np.log(kappa / self.kappa0) + self.kappa0 / kappa - 1)
            + self.kappa0 * distance
        )

    def precision_kl(self, q):
        nu, psi = q[2:]
        d = len(psi)
        prior = wishart((None, None, self.nu0, self.psi0))
        # E log prior differs from log prior at a point by what is linear in precision and its log determinant.
        point, mean = np.eye(d), nu * np.linalg.inv(psi)
        log_det = (
            sum(digamma((nu - i) / 2) for i in range(d))
            + d * np.log(2)
            - np.linalg.slogdet(psi)[1]
        )
        linear = 0.5 * (self.nu0 - d - 1) * log_det - 0.5 * np.trace(
            self.psi0 @ (mean - point)
        )
        return -wishart(q).entropy() - prior.logpdf(point) - linear

    def kl(self, q):
        return self.mean_kl(q) + self.precision_kl(q)

    def some_parameters(self):
        return [
            (np.array([0.3, -0.2]), np.array([[1.0, 0.2], [0.2, 0.7]])),
            (np.array([-1.0, 0.4]), np.array([[0.5, -0.3], [-0.3, 2.0]])),
        ]

    def log_density(self, theta, row):
        o = ~np.isnan(row)
        covariance = np.linalg.inv(theta[1])[np.ix_(o, o)]
        return (
            stats.multivariate_normal.logpdf(row[o], theta[0][o], covariance)
            if o.any()
            else 0.0
        )

    def log_prior(self, theta, q):
        of_mean = stats.multivariate_normal.logpdf(
            theta[0], q[0], np.linalg.inv(q[1] * theta[1])
        )
        return of_mean + wishart(q).logpdf(theta[1])

    def predictive(self, q, row):
        m, kappa, nu, psi = q
        freedom, o = nu - len(m) + 1, ~np.isnan(row)
        shape = (psi * (1 + 1 / kappa) / freedom)[np.ix_(o, o)]
        return (
            stats.multivariate_t.logpdf(row[o], m[o], shape, df=freedom)
            if o.any()
            else 0.0
        )

    def prior(self, dim):
        return self.posterior(np.zeros((0, dim)), np.zeros(0))


class Bernoulli(Columns):
    def __init__(self, ones, zeros):
        self.ones, self.zeros = ones, zeros

    def column_posterior(self, x, w):
        return self.ones + w[x == 1].sum(), self.zeros + w[x == 0].sum()

    def column_expected(self, q, x):
        return digamma(q[0] if x == 1 else q[1]) - digamma(q[0] + q[1])

    def column_kl(self, q):
        return density_kl(stats.beta(*q), stats.beta(self.ones, self.zeros))

    def some_parameters(self):
        return [0.3, 0.9]

    def column_log_density(self, theta, x):
        return stats.bernoulli.logpmf(int(x), theta)

    def column_log_prior(self, theta, q):
        return stats.beta.logpdf(theta, *q)

    def column_predictive(self, q, x):
        return stats.betabinom.logpmf(int(x), 1, *q)


class Poisson(Columns):
    def __init__(self, a0, b0):
        self.a0, self.b0 = a0, b0

    def column_posterior(self, x, w):
        return self.a0 + (w * x).sum(), self.b0 + w.sum()

    def column_expected(self, q, x):
        a, b = q
        return x * (digamma(a) - np.log(b)) - a / b - gammaln(x + 1)

    def column_kl(self, q):
        return density_kl(
            stats.gamma(q[0], scale=1 / q[1]), stats.gamma(self.a0, scale=1 / self.b0)
        )

    def some_parameters(self):
        return [0.7, 2.5]

    def column_log_density(self, theta, x):
        return stats.poisson.logpmf(x, theta)

    def column_log_prior(self, theta, q):
        return stats.gamma.logpdf(theta, q[0], scale=1 / q[1])

    def column_predictive(self, q, x):
        return stats.nbinom.logpmf(x, q[0], q[1] / (q[1] + 1))


class Exponential(Poisson):
    def column_posterior(self, x, w):
        return self.a0 + w.sum(), self.b0 + (w * x).sum()

    def column_expected(self, q, x):
        a, b = q
        return digamma(a) - np.log(b) - x * a / b

    def column_log_density(self, theta, x):
        return stats.expon.logpdf(x, scale=1 / theta)

    def column_predictive(self, q, x):
        return stats.lomax.logpdf(x, q[0], scale=q[1])


def dirichlet_kl(a, a0):
    """From scipy's entropy and density."""
    point = np.full(len(a), 1 / len(a))
    expected_log = digamma(a) - digamma(a.sum())
    expected_log_prior = stats.dirichlet(a0).logpdf(point) + (a0 - 1) @ (
        expected_log - np.log(point)
    )
    return -stats.dirichlet(a).entropy() - expected_log_prior


class Categorical:
    """Columns of codes; a column of one level holds no parameter."""

    def __init__(self, levels, a0):
        self.levels, self.a0 = levels, a0

    def posterior(self, x, w):
        return [
            np.array([self.a0 + w[x[:, c] == code].sum() for code in range(size)])
            for c, size in enumerate(self.levels)
        ]

    def expected(self, q, row):
        return sum(
            digamma(a[int(x)]) - digamma(a.sum())
            for a, x in zip(q, row, strict=True)
            if not np.isnan(x)
        )

    def kl(self, q):
        return sum(dirichlet_kl(a, np.full(len(a), self.a0)) for a in q if len(a) > 1)

    def some_parameters(self):
        rising = [np.arange(1, s + 1) / np.arange(1, s + 1).sum() for s in self.levels]
        return [rising, [np.full(s, 1 / s) for s in self.levels]]

    def log_density(self, theta, row):
        return sum(
            np.log(p[int(x)])
            for p, x in zip(theta, row, strict=True)
            if not np.isnan(x)
        )

    def log_prior(self, theta, q):
        return sum(
            stats.dirichlet.logpdf(p, a)
            for p, a in zip(theta, q, strict=True)
            if len(a) > 1
        )

    def predictive(self, q, row):
        return sum(
            np.log(a[int(x)] / a.sum())
            for a, x in zip(q, row, strict=True)
            if not np.isnan(x)
        )

    def prior(self, dim):
        return self.posterior(np.zeros((0, dim)), np.zeros(0))


class Multinomial:
    def __init__(self, a0):
        self.a0 = a0

    def posterior(self, x, w):
        return self.a0 + w @ x

    def expected(self, q, row):
        coefficient = gammaln(row.sum() + 1) - gammaln(row + 1).sum()
        return coefficient + row @ (digamma(q) - digamma(q.sum()))

    def kl(self, q):
        return dirichlet_kl(q, np.full(len(q), self.a0))

    def some_parameters(self):
        return [np.array([0.3, 0.7]), np.array([0.8, 0.2])]

    def log_density(self, theta, row):
        return stats.multinomial.logpmf(row, int(row.sum()), theta)

    def log_prior(self, theta, q):
        return stats.dirichlet.logpdf(theta, q)

    def predictive(self, q, row):
        return stats.dirichlet_multinomial.logpmf(row.astype(int), q, int(row.sum()))

    def prior(self, dim):
        return self.posterior(np.zeros((0, dim)), np.zeros(0))


class Tied:
    """One Wishart precision for all components: elsewhere each component has its own."""

    joint = True

    def __init__(self, m0, kappa0, nu0, psi0):
        self.one = NormalInverseWishart(m0, kappa0, nu0, psi0)

    def posteriors(self, x, w):
        alone = [self.one.posterior(x, w[:, j]) for j in range(w.shape[1])]
        nu = self.one.nu0 + w.sum()
        psi = self.one.psi0 + sum(q[3] - self.one.psi0 for q in alone)
        return [(m, kappa, nu, psi) for m, kappa, _, _ in alone]

    def expected(self, q, row):
        return self.one.expected(q, row)

    def total_kl(self, qs):
        return sum(self.one.mean_kl(q) for q in qs) + self.one.precision_kl(qs[0])

    def predictive(self, q, row):
        return self.one.predictive(q, row)


class Product:
    """Families of some columns each."""

    def __init__(self, parts):
        self.parts = parts  # (family, columns)

    def posterior(self, x, w):
        return [family.posterior(x[:, where], w) for family, where in self.parts]

    def expected(self, q, row):
        return sum(
            family.expected(part, row[where])
            for part, (family, where) in zip(q, self.parts, strict=True)
        )

    def kl(self, q):
        return sum(
            family.kl(part) for part, (family, _) in zip(q, self.parts, strict=True)
        )

    def some_parameters(self):
        return list(
            zip(*(family.some_parameters() for family, _ in self.parts), strict=True)
        )

    def log_density(self, theta, row):
        return sum(
            f.log_density(t, row[where])
            for t, (f, where) in zip(theta, self.parts, strict=True)
        )

    def log_prior(self, theta, q):
        return sum(
            f.log_prior(t, part)
            for t, part, (f, _) in zip(theta, q, self.parts, strict=True)
        )

    def predictive(self, q, row):
        return sum(
            f.predictive(part, row[where])
            for part, (f, where) in zip(q, self.parts, strict=True)
        )

    def prior(self, dim):
        return [family.prior(len(where)) for family, where in self.parts]


# A mixture: weights Dirichlet(a).


def posteriors(family, x, w):
    """Of all components, for weights of the rows ``(n, K)``."""
    if hasattr(family, "joint"):
        return family.posteriors(x, w)
    return [family.posterior(x, w[:, j]) for j in range(w.shape[1])]


def objective(family, x, weight, omega, alpha, concentration):
    """F at responsibilities ``(n, K)`` and the factors that are best for them, term by term."""
    w = alpha * weight[:, None] * omega
    qs = posteriors(family, x, w)
    a = concentration + w.sum(axis=0)
    total = 0.0
    for i, row in enumerate(x):
        for j, q in enumerate(qs):
            if omega[i, j] > 0 and weight[i] > 0:
                expected_log_weight = digamma(a[j]) - digamma(a.sum())
                log_joint = expected_log_weight + family.expected(q, row)
                total += weight[i] * omega[i, j] * (log_joint - np.log(omega[i, j]))
    components = (
        family.total_kl(qs)
        if hasattr(family, "joint")
        else sum(family.kl(q) for q in qs)
    )
    return alpha * total - dirichlet_kl(a, concentration) - components


def best_responsibilities(family, x, weight, omega, alpha, concentration):
    """omega_ij proportional to exp(l_ij) at the factors that are best for the given ones."""
    w = alpha * weight[:, None] * omega
    qs = posteriors(family, x, w)
    a = concentration + w.sum(axis=0)
    log_joint = np.array(
        [
            [digamma(aj) + family.expected(q, row) for aj, q in zip(a, qs, strict=True)]
            for row in x
        ]
    )
    values = np.exp(log_joint - log_joint.max(axis=1, keepdims=True))
    return values / values.sum(axis=1, keepdims=True)


def log_evidences(family, x, w):
    """The log of ∫ Π_i q_theta(x_i)^w_i dprior, as likelihood × prior / posterior at several parameters."""
    q, prior = family.posterior(x, w), family.prior(x.shape[1])
    return [
        sum(
            wi * family.log_density(theta, row)
            for wi, row in zip(w, x, strict=True)
            if wi > 0
        )
        + family.log_prior(theta, prior)
        - family.log_prior(theta, q)
        for theta in family.some_parameters()
    ]
