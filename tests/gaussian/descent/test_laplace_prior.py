"""Laplace priors in closed form, in fit_gaussian, and the kinks that are refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import integrate, optimize, stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.descent.laplace_prior import (
    LaplaceTerm,
    derivatives_of_laplace,
)

KEY = jax.random.key(0)
rng = np.random.default_rng(4)
X = rng.normal(size=(40, 3))
# One coefficient is large and two are next to nothing, where the kink is.
Y = X @ np.array([1.0, 0.02, 0.0]) + 0.5 * rng.normal(size=40)
LOC, B, NOISE = np.array([0.0, 0.0, 0.1]), np.array([0.1, 0.02, 0.02]), 0.5


def lasso(x, y):
    theta = numpyro.sample(
        "theta", dist.Laplace(jnp.asarray(LOC), jnp.asarray(B)).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


def absolute_mean(m, s, loc):
    z = (m - loc) / s
    return (m - loc) * (2.0 * stats.norm.cdf(z) - 1.0) + 2.0 * s * stats.norm.pdf(z)


def elbo(m, root):
    """The ELBO of a Gaussian on the lasso, by hand."""
    covariance = root @ root.T
    error = np.sum((Y - X @ m) ** 2) + np.trace(X @ covariance @ X.T)
    log_lik = -0.5 * error / NOISE**2 - 40 * np.log(NOISE * np.sqrt(2 * np.pi))
    prior = -np.sum(
        absolute_mean(m, np.sqrt(np.diag(covariance)), LOC) / B + np.log(2.0 * B)
    )
    return (
        log_lik
        + prior
        + np.sum(np.log(np.diag(root)))
        + 1.5 * np.log(2.0 * np.pi * np.e)
    )


LOWER = np.tril_indices(3, -1)


def unpack(z):
    root = np.diag(np.exp(z[3:6]))
    root[LOWER] = z[6:]
    return z[:3], root


@pytest.mark.parametrize("diagonal", [True, False])
def test_expectation_and_derivatives_are_those_of_quadrature(diagonal, x64):
    m, s = np.array([0.05, -1.0, 0.1]), np.array([0.3, 0.2, 1e-3])
    term = LaplaceTerm(
        *(jnp.asarray(leaf) for leaf in (LOC, 1.0 / B, np.sum(np.log(2.0 * B))))
    )
    q = nt.gaussian.families.MeanField(jnp.asarray(m), jnp.asarray(s))
    if not diagonal:
        q = nt.gaussian.families.FullRank(q.loc, jnp.diag(q.scale))
    at = derivatives_of_laplace(term, q)

    def of(j, loc):
        def integrand(t):
            return -stats.laplace.logpdf(loc + s[j] * t, LOC[j], B[j]) * stats.norm.pdf(
                t
            )

        kink = (LOC[j] - loc) / s[j]
        pieces = [-12.0, *([kink] if abs(kink) < 12.0 else []), 12.0]
        return sum(
            integrate.quad(integrand, a, b, epsabs=1e-13)[0]
            for a, b in itertools.pairwise(pieces)
        )

    assert float(at.value) == pytest.approx(
        sum(of(j, m[j]) for j in range(3)), rel=1e-9
    )
    for j in range(2):
        step = 1e-3 * s[j]
        up, mid, down = (of(j, m[j] + d) for d in (step, 0.0, -step))
        assert float(at.grad[j]) == pytest.approx((up - down) / (2 * step), rel=1e-5)
        hessian = at.hessian if diagonal else jnp.diagonal(at.hessian)
        assert float(hessian[j]) == pytest.approx(
            (up - 2 * mid + down) / step**2, rel=1e-4, abs=1e-4
        )


@pytest.mark.parametrize(
    ("guide", "named"),
    [
        pytest.param(AutoMultivariateNormal, True, marks=pytest.mark.full),
        pytest.param(AutoMultivariateNormal, False, marks=pytest.mark.full),
        pytest.param(AutoNormal, True, marks=pytest.mark.full),
    ],
)
def test_a_lasso_ends_at_the_optimum(guide, named, x64):
    expectation = nt.expectations.gauss_hermite(predictor="eta") if named else None
    fit = nt.fit_gaussian(
        KEY, lasso, guide, jnp.asarray(X), jnp.asarray(Y), expectation=expectation
    )
    size = 6 if guide is AutoNormal else 9
    start = np.zeros(9)
    start[3:6] = -2.0
    best = optimize.minimize(
        lambda z: -elbo(*unpack(np.append(z, np.zeros(9 - size)))),
        start[:size],
        tol=1e-12,
    )
    assert fit.converged
    assert not np.isfinite(
        float(fit.convergence.gap_bound)
    )  # which is for Gaussian priors
    if named:
        assert float(fit.convergence.elbo) == pytest.approx(-best.fun, abs=1e-5)
    else:
        assert abs(fit.elbo.value + best.fun) < 4.0 * fit.elbo.se + 0.05
    want, root = unpack(np.append(best.x, np.zeros(9 - size)))
    names = (
        ("theta_auto_loc", "theta_auto_scale")
        if guide is AutoNormal
        else ("auto_loc", "auto_scale_tril")
    )
    if named:
        np.testing.assert_allclose(fit.params[names[0]], want, atol=1e-4)
        spread = np.asarray(fit.params[names[1]])
        covariance = spread @ spread.T if spread.ndim == 2 else np.diag(spread**2)
        np.testing.assert_allclose(covariance, root @ root.T, atol=1e-5)
    # Without the curvature of the kink the small coefficients would have the sds of least squares.
    least_squares = NOISE / np.sqrt(np.sum(X**2, axis=0))
    assert np.all(np.sqrt(np.diag(root @ root.T))[1:] < 0.9 * least_squares[1:])


@pytest.mark.full
def test_other_kinks_are_refused_by_draws():
    def hierarchy(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Laplace(0.0, tau))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    def medians(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample(
            "y",
            dist.Laplace(numpyro.deterministic("eta", theta + jnp.zeros(len(y))), 1.0),
            obs=y,
        )

    y = jnp.asarray(Y[:5])
    with pytest.raises(
        ValueError,
        match=r"site 'theta' is Laplace, whose log-density has a kink.* fixed",
    ):
        nt.fit_gaussian(KEY, hierarchy, AutoNormal, y)
    with pytest.raises(ValueError, match=r"site 'y' is Laplace.*name its predictor"):
        nt.fit_gaussian(KEY, medians, AutoNormal, y)
