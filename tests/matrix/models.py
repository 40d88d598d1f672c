"""The models of the matrix, with the moments of their tempered posteriors from the printed formulas.

Raising the likelihood to a power multiplies the sufficient statistics and the count of a conjugate update
by it. Every formula below has ``alpha`` in front of ``n`` and of the sums over data and nowhere else. Priors
are narrow enough that four moments exist at every power, so that a second moment has a standard error.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from oracles import tempered_normal_log_evidence, tempered_normal_posterior
from scipy import integrate

ALPHAS = (0.1, 0.5, 1.0)


class Conjugate(NamedTuple):
    """A model and what is known of it.

    Attributes:
        prior: Runs the latent sites and returns their values.
        likelihood: From these values to the distribution of the data, one row each.
        y: Data.
        moments: From ``alpha`` to the mean and the mean square of each parameter.
        num_latents: Dimension of the continuous part of the posterior.
        x: Covariates, passed to ``likelihood`` after the latent values, or None.
        discrete: Name of the global discrete site, or None.
    """

    prior: Callable[[], tuple]
    likelihood: Callable[..., Any]
    y: np.ndarray
    moments: Callable[[float], dict[str, tuple[np.ndarray, np.ndarray]]]
    num_latents: int
    x: np.ndarray | None = None
    discrete: str | None = None


def by_variance(mean, variance):
    return np.asarray(mean, float), np.asarray(mean, float) ** 2 + variance


def draws(seed):
    return np.random.default_rng(seed)


# Normal with known variance.

NORMAL_Y = draws(1).normal(1.5, 2.0, 12)


def normal():
    def moments(alpha):
        mean, sd = tempered_normal_posterior(NORMAL_Y, alpha, 0.5, 2.0, 1.5)
        return {"mu": by_variance(mean, sd**2)}

    return Conjugate(
        lambda: (numpyro.sample("mu", dist.Normal(0.5, 2.0)),),
        lambda mu: dist.Normal(mu, 1.5),
        NORMAL_Y,
        moments,
        1,
    )


# Normal-inverse-gamma: s2 ~ InverseGamma(a, b), mu ~ N(m, s2 / kappa), y ~ N(mu, s2).


def inverse_gamma_moments(a, b):
    return b / (a - 1), b**2 / ((a - 1) * (a - 2))


def normal_inverse_gamma():
    m0, kappa0, a0, b0 = 0.5, 2.0, 8.0, 14.0
    y = draws(2).normal(1.0, 1.5, 14)

    def prior():
        s2 = numpyro.sample("s2", dist.InverseGamma(a0, b0))
        return numpyro.sample("mu", dist.Normal(m0, jnp.sqrt(s2 / kappa0))), s2

    def moments(alpha):
        n = alpha * y.size
        kappa = kappa0 + n
        m = (kappa0 * m0 + n * y.mean()) / kappa
        a = a0 + n / 2
        b = b0 + (alpha * (y**2).sum() + kappa0 * m0**2 - kappa * m**2) / 2
        s2 = inverse_gamma_moments(a, b)
        return {"s2": s2, "mu": by_variance(m, s2[0] / kappa)}

    return Conjugate(prior, lambda mu, s2: dist.Normal(mu, jnp.sqrt(s2)), y, moments, 2)


# Beta and Dirichlet.


def dirichlet_moments(concentration):
    total = concentration.sum()
    mean = concentration / total
    return mean, mean * (concentration + 1) / (total + 1)


def beta_moments(a, b):
    mean, square = dirichlet_moments(np.array([a, b]))
    return mean[0], square[0]


def beta_bernoulli():
    a, b = 2.0, 3.0
    y = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1])
    return Conjugate(
        lambda: (numpyro.sample("p", dist.Beta(a, b)),),
        lambda p: dist.Bernoulli(p),
        y,
        lambda alpha: {
            "p": beta_moments(a + alpha * y.sum(), b + alpha * (1 - y).sum())
        },
        1,
    )


def dirichlet_categorical():
    concentration = np.array([2.0, 1.5, 3.0])
    y = np.array([0, 2, 2, 1, 0, 0, 0, 2, 0, 1, 0, 0])
    return Conjugate(
        lambda: (numpyro.sample("p", dist.Dirichlet(concentration)),),
        lambda p: dist.Categorical(p),
        y,
        lambda alpha: {
            "p": dirichlet_moments(concentration + alpha * np.bincount(y, minlength=3))
        },
        2,
    )


def beta_negative_binomial():
    # The mass at y is proportional to p^y (1 - p)^r.
    a, b, r = 3.0, 4.0, 2.5
    y = np.array([3, 0, 5, 2, 1, 4, 7, 2, 0, 3])
    return Conjugate(
        lambda: (numpyro.sample("p", dist.Beta(a, b)),),
        lambda p: dist.NegativeBinomialProbs(r, p),
        y,
        lambda alpha: {"p": beta_moments(a + alpha * y.sum(), b + alpha * r * y.size)},
        1,
    )


# Gamma.


def gamma_moments(a, b):
    return by_variance(a / b, a / b**2)


def gamma_poisson():
    a, b = 3.0, 1.0
    y = np.array([5, 2, 7, 4, 3, 6, 5, 8])
    return Conjugate(
        lambda: (numpyro.sample("rate", dist.Gamma(a, b)),),
        lambda rate: dist.Poisson(rate),
        y,
        lambda alpha: {"rate": gamma_moments(a + alpha * y.sum(), b + alpha * y.size)},
        1,
    )


def gamma_exponential():
    a, b = 4.0, 2.0
    y = draws(3).exponential(1.0, 10)
    return Conjugate(
        lambda: (numpyro.sample("rate", dist.Gamma(a, b)),),
        lambda rate: dist.Exponential(rate),
        y,
        lambda alpha: {"rate": gamma_moments(a + alpha * y.size, b + alpha * y.sum())},
        1,
    )


# Linear regression.

X = np.stack([np.ones(12), np.linspace(-1.5, 2.0, 12)], axis=-1)
LINEAR_Y = X @ np.array([0.7, -1.2]) + draws(4).normal(0.0, 0.8, 12)
LINEAR_PRECISION = np.array([0.5, 2.0])
LINEAR_PRIOR_MEAN = np.array([0.3, 0.0])


def linear_update(alpha, noise_variance):
    """Posterior mean of the weights, and their precision where they have prior ``LINEAR_PRECISION``."""
    precision = np.diag(LINEAR_PRECISION) + alpha * X.T @ X / noise_variance
    right = (
        LINEAR_PRECISION * LINEAR_PRIOR_MEAN + alpha * X.T @ LINEAR_Y / noise_variance
    )
    return np.linalg.solve(precision, right), precision


def linear():
    sd = 0.8

    def prior():
        return (
            numpyro.sample(
                "w", dist.Normal(LINEAR_PRIOR_MEAN, LINEAR_PRECISION**-0.5).to_event(1)
            ),
        )

    def moments(alpha):
        mean, precision = linear_update(alpha, sd**2)
        return {"w": by_variance(mean, np.diag(np.linalg.inv(precision)))}

    return Conjugate(
        prior, lambda w, x: dist.Normal(x @ w, sd), LINEAR_Y, moments, 2, X
    )


def linear_unknown_variance():
    a0, b0 = 8.0, 6.0

    def prior():
        s2 = numpyro.sample("s2", dist.InverseGamma(a0, b0))
        scale = jnp.sqrt(s2) * LINEAR_PRECISION**-0.5
        return numpyro.sample(
            "w", dist.Normal(LINEAR_PRIOR_MEAN, scale).to_event(1)
        ), s2

    def moments(alpha):
        mean, precision = linear_update(alpha, 1.0)
        squares = (
            alpha * (LINEAR_Y**2).sum()
            + (LINEAR_PRECISION * LINEAR_PRIOR_MEAN**2).sum()
        )
        a, b = (
            a0 + alpha * LINEAR_Y.size / 2,
            b0 + (squares - mean @ precision @ mean) / 2,
        )
        s2 = inverse_gamma_moments(a, b)
        return {
            "s2": s2,
            "w": by_variance(mean, np.diag(np.linalg.inv(precision)) * s2[0]),
        }

    return Conjugate(
        prior,
        lambda w, s2, x: dist.Normal(x @ w, jnp.sqrt(s2)),
        LINEAR_Y,
        moments,
        3,
        X,
    )


# Normal-inverse-Wishart in two dimensions: S ~ InverseWishart(nu, Psi), mu ~ N(m, S / kappa), y ~ N(mu, S).


def inverse_wishart_moments(nu, psi):
    p = len(psi)
    variance = (
        (nu - p + 1) * psi**2 + (nu - p - 1) * np.outer(np.diag(psi), np.diag(psi))
    ) / ((nu - p) * (nu - p - 1) ** 2 * (nu - p - 3))
    return by_variance(psi / (nu - p - 1), variance)


def normal_inverse_wishart():
    m0, kappa0, nu0 = np.array([0.0, 0.5]), 2.0, 16.0
    psi0 = np.array([[14.0, 4.0], [4.0, 18.0]])
    y = draws(5).multivariate_normal([1.0, -0.5], [[1.0, -0.4], [-0.4, 1.5]], 12)

    def prior():
        # The site is the Cholesky factor: a nearly singular matrix has none in floating point.
        tril = numpyro.sample(
            "s_tril", dist.InverseWishartCholesky(nu0, scale_matrix=psi0)
        )
        numpyro.deterministic("covariance", tril @ jnp.swapaxes(tril, -1, -2))
        return numpyro.sample(
            "mu", dist.MultivariateNormal(m0, scale_tril=tril / kappa0**0.5)
        ), tril

    def moments(alpha):
        n = alpha * len(y)
        mean = y.mean(0)
        kappa, nu = kappa0 + n, nu0 + n
        psi = (
            psi0
            + alpha * (y - mean).T @ (y - mean)
            + kappa0 * n / kappa * np.outer(mean - m0, mean - m0)
        )
        s = inverse_wishart_moments(nu, psi)
        return {
            "covariance": s,
            "mu": by_variance((kappa0 * m0 + n * mean) / kappa, np.diag(s[0]) / kappa),
        }

    return Conjugate(
        prior,
        lambda mu, tril: dist.MultivariateNormal(mu, scale_tril=tril),
        y,
        moments,
        5,
    )


# A positive scale, by quadrature over the scale itself: no Jacobian anywhere.


def half_normal_scale():
    y = np.array([1.3, -0.4, 0.9])

    def moments(alpha):
        def density(s, k):
            return s ** (k - alpha * y.size) * np.exp(
                -(s**2) / 2 - alpha * (y**2).sum() / (2 * s**2)
            )

        mass, first, second = (
            integrate.quad(density, 0.0, 12.0, args=(k,))[0] for k in range(3)
        )
        return {"s": (first / mass, second / mass)}

    return Conjugate(
        lambda: (numpyro.sample("s", dist.HalfNormal(1.0)),),
        lambda s: dist.Normal(0.0, s),
        y,
        moments,
        1,
    )


# A global discrete parameter, by summation over its values.


def mix(log_weights, moments):
    """Moments of a mixture with these log-weights, and of the index of its component."""
    weights = np.exp(log_weights - np.max(log_weights))
    weights /= weights.sum()
    k = np.arange(len(weights))
    index = weights @ k, weights @ k**2
    return index, tuple(weights @ np.array([m[i] for m in moments]) for i in range(2))


def which_shift():
    probs, shifts = np.array([0.2, 0.5, 0.3]), np.array([-1.0, 0.0, 1.5])
    y = draws(6).normal(1.2, 1.0, 8)

    def prior():
        k = numpyro.sample("k", dist.Categorical(probs))
        return k, numpyro.sample("theta", dist.Normal(0.0, 1.0))

    def moments(alpha):
        evidence = [
            tempered_normal_log_evidence(y - shift, alpha, 0.0, 1.0, 1.0)
            for shift in shifts
        ]
        posteriors = [
            tempered_normal_posterior(y - shift, alpha, 0.0, 1.0, 1.0)
            for shift in shifts
        ]
        k, theta = mix(
            np.log(probs) + evidence, [by_variance(m, sd**2) for m, sd in posteriors]
        )
        return {"k": k, "theta": theta}

    return Conjugate(
        prior,
        lambda k, theta: dist.Normal(theta + jnp.array(shifts)[k], 1.0),
        y,
        moments,
        1,
        discrete="k",
    )


def how_many_sources():
    # k + 1 sources of one rate: the posterior of the rate is a Gamma for each k.
    a, b = 4.0, 2.0
    y = np.array([5, 3, 6, 4, 2, 5])
    sources = np.array([1.0, 2.0, 3.0])

    def prior():
        k = numpyro.sample("k", dist.DiscreteUniform(0, 2))
        return k, numpyro.sample("rate", dist.Gamma(a, b))

    def moments(alpha):
        shape, rates = a + alpha * y.sum(), b + alpha * y.size * sources
        log_weights = alpha * y.sum() * np.log(sources) - shape * np.log(rates)
        k, rate = mix(log_weights, [gamma_moments(shape, rate) for rate in rates])
        return {"k": k, "rate": rate}

    return Conjugate(
        prior,
        lambda k, rate: dist.Poisson((k + 1.0) * rate),
        y,
        moments,
        1,
        discrete="k",
    )


MODELS = {
    make.__name__: make()
    for make in (
        normal,
        normal_inverse_gamma,
        beta_bernoulli,
        gamma_poisson,
        gamma_exponential,
        dirichlet_categorical,
        linear,
        linear_unknown_variance,
        normal_inverse_wishart,
        beta_negative_binomial,
        half_normal_scale,
        which_shift,
        how_many_sources,
    )
}
