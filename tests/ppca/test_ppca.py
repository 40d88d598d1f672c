"""Probabilistic PCA against formulas written out entry by entry, quadrature and importance sampling."""

import contextlib
import functools
import re
import warnings

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from conftest import enable_x64, tiered
from hypothesis import given, settings
from numpyro.infer.util import log_density
from scipy.integrate import quad
from scipy.special import digamma, gammaln, logsumexp
from scipy.stats import gamma, multivariate_normal, norm

import numpyro_tempered as nt
from numpyro_tempered import ppca
from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.ppca import base, bound, driver, updates
from numpyro_tempered.ppca.base import Target, as_rows, in_double
from numpyro_tempered.ppca.model import Draws, Row, exact_log_density, numpyro_model
from numpyro_tempered.ppca.predict import _average

ALPHAS = (0.1, 0.5, 1.0)
N, D, K = 8, 3, 2
DRAWS = 20_000


@pytest.fixture(params=["double", pytest.param("single", marks=pytest.mark.full)])
def precision(request):
    if request.param == "double":
        request.getfixturevalue("x64")


# The oracle: every entry, row and column by itself, every factor a Gaussian or a Gamma with its own parameters.


def gaussian_entropy(cov):
    return 0.5 * len(cov) * (1 + np.log(2 * np.pi)) + 0.5 * np.linalg.slogdet(cov)[1]


def gamma_kl(shape, rate, shape0, rate0):
    """E log of the ratio of two Gamma densities under the first."""
    log_mean, mean = digamma(shape) - np.log(rate), shape / rate
    log_density = (
        shape * np.log(rate) - gammaln(shape) + (shape - 1) * log_mean - rate * mean
    )
    return log_density - (
        shape0 * np.log(rate0)
        - gammaln(shape0)
        + (shape0 - 1) * log_mean
        - rate0 * mean
    )


def oracle(x, factors, prior, alpha, ard=True):
    """alpha (E log p(x, z) - E log q(z)) - KL(q(W, m, tau, lambda), prior); NaN in x for missing."""
    z, s, w, v, (a, b), (c, e) = factors
    n, k = z.shape
    d = len(w)
    log_tau, tau = digamma(a) - np.log(b), a / b
    likelihood = local = weights = 0.0
    for i in range(n):
        zz = np.zeros((k + 1, k + 1))
        zz[:k, :k] = s[i]
        zi = np.append(z[i], 1.0)
        zz += np.outer(zi, zi)
        for j in range(d):
            if not np.isnan(x[i, j]):
                square = (
                    x[i, j] ** 2
                    - 2 * x[i, j] * zi @ w[j]
                    + np.trace(zz @ (v[j] + np.outer(w[j], w[j])))
                )
                likelihood += 0.5 * (log_tau - np.log(2 * np.pi) - tau * square)
        local += -0.5 * (
            k * np.log(2 * np.pi) + np.trace(s[i]) + z[i] @ z[i]
        ) + gaussian_entropy(s[i])
    log_lam = (
        digamma(c) - np.log(e) if ard else np.full(k, np.log(prior.loading_precision))
    )
    lam = c / e if ard else np.full(k, prior.loading_precision)
    for j in range(d):
        second = np.diag(v[j]) + w[j] ** 2
        for m in range(k):
            weights += 0.5 * (log_lam[m] - np.log(2 * np.pi) - lam[m] * second[m])
        off = (w[j, k] - np.broadcast_to(prior.mean, d)[j]) ** 2 + v[j][k, k]
        weights += (
            -0.5 * np.log(2 * np.pi * prior.mean_scale**2)
            - 0.5 * off / prior.mean_scale**2
        )
        weights += gaussian_entropy(v[j])
    total = (
        alpha * (likelihood + local)
        + weights
        - gamma_kl(a, b, prior.noise_shape, prior.noise_rate)
    )
    if ard:
        total -= np.sum(gamma_kl(c, e, prior.ard_shape, prior.ard_rate))
    return total


def factors_of(q, z, x, prior, alpha, ard=True):
    """The package's factors as the oracle takes them."""
    q, z = in_double(q), in_double(z)
    n, d, k = len(x), len(q.loc), z.loc.shape[1]
    a = prior.noise_shape + 0.5 * alpha * np.sum(~np.isnan(x))
    c = np.full(k, prior.ard_shape + 0.5 * d)
    cov_z = np.broadcast_to(z.cov, (n, k, k))
    cov_w = np.broadcast_to(q.cov, (d, k + 1, k + 1))
    return (
        z.loc,
        cov_z,
        q.loc,
        cov_w,
        (a, a / q.noise_precision),
        (c, c / q.loading_precision),
    )


@functools.partial(jax.jit, static_argnames="ard")
def one_sweep(q, rows, prior, alpha, ard):
    """The factors after every half-step."""
    target = Target(rows, prior, alpha, ard)
    z = updates.update_scores(q, rows)
    states = [(q, z)]
    q = updates.update_loadings(q, z, target)
    states.append((q, z))
    q, z = updates.translate(q, z, target)
    states.append((q, z))
    if ard:
        q = updates.update_loading_precision(q, prior)
        states.append((q, z))
    q, z = updates.rotate(q, z, target)
    states.append((q, z))
    q = updates.update_noise(q, z, target)
    return [*states, (q, z)]


def half_steps(start, rows, prior, alpha, ard):
    """Two sweeps."""
    loc, tau, lam = start
    count = 1 if rows.mask is None else len(loc)
    root = np.random.default_rng(0).normal(size=2 * loc.shape[1:])
    cov = jnp.broadcast_to(
        root @ root.T + 0.1 * np.eye(len(root)), (count, *root.shape)
    )
    q = ppca.Posterior(loc, cov, tau, lam)
    first = one_sweep(q, rows, prior, alpha, ard)
    return first + one_sweep(first[-1][0], rows, prior, alpha, ard)


def weak(mean=0.3, d=D):
    """A prior with a different number in each place."""
    return ppca.Prior(np.full(d, mean), 2.0, 1.3, 0.7, 0.8, 0.4, 1.7)


def start_at(seed, k=K, d=D):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(d, k + 1))), jnp.asarray(0.8), jnp.full(k, 1.7)


def signal(seed, n, scales, d, noise=1.0):
    """Rows with orthogonal factors of given standard deviations."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0][:, : len(scales)]
    return rng.normal(
        size=(n, len(scales))
    ) * scales @ directions.T + noise * rng.normal(size=(n, d))


TABLE = hnp.arrays(float, (N, D), elements=st.integers(-12, 12).map(lambda v: v / 4))
HOLES = hnp.arrays(bool, (N, D), elements=st.booleans())


@pytest.mark.parametrize(
    ("ard", "missing"),
    tiered([(True, False), (True, True), (False, False)], unit=[(True, True)]),
    ids=["complete", "missing", "fixed"],
)
def test_bound_at_every_half_step(ard, missing):
    @settings(max_examples=8, deadline=None)
    @given(TABLE, HOLES, st.sampled_from(ALPHAS), st.integers(0, 99))
    def check(x, holes, alpha, seed):
        x = np.where(holes & missing, np.nan, x)
        x[0] = [0.5, -1.0, 2.0]
        if missing:
            x[1, 0] = np.nan
        prior = weak()
        rows = as_rows(x, np.zeros(D), None)
        values = []
        for q, z in half_steps(start_at(seed), rows, prior, alpha, ard):
            values.append(
                oracle(x, factors_of(q, z, x, prior, alpha, ard), prior, alpha, ard)
            )
            assert bound.elbo(q, z, Target(rows, prior, alpha, ard)) == pytest.approx(
                values[-1], rel=1e-9
            )
        assert np.min(np.diff(values)) >= -1e-9 * np.max(np.abs(values))

    with enable_x64():
        check()


@pytest.mark.parametrize(
    "missing", tiered([False, True], unit=[True]), ids=["complete", "missing"]
)
def test_every_update_is_the_best_for_its_factor(x64, missing):
    x, prior, alpha = signal(23, N, [2.0], D), weak(), 0.5
    if missing:
        x[[1, 2, 5], [0, 2, 2]] = np.nan
    rng = np.random.default_rng(24)
    z, loadings, _, precision, _, noise = half_steps(
        start_at(25), as_rows(x, np.zeros(D), None), prior, alpha, True
    )[:6]
    updated = {
        "z": (z, (0, 1)),
        "W": (loadings, (2, 3)),
        "tau": (noise, (4,)),
        "lambda": (precision, (5,)),
    }
    for name, (state, blocks) in updated.items():
        factors = factors_of(*state, x, prior, alpha)
        best = oracle(x, factors, prior, alpha)
        for block in blocks:
            for _ in range(10):
                # Positive parameters and covariances keep their kind under a change of this form.
                scale = 1e-4 * rng.normal(
                    size=jax.tree.leaves(factors[block])[-1].shape
                )
                for sign in (-1, 1):
                    changed = list(factors)
                    if block in (4, 5):
                        changed[block] = (
                            factors[block][0],
                            factors[block][1] * np.exp(sign * scale),
                        )
                    elif block in (1, 3):
                        step = np.eye(scale.shape[-1]) + sign * scale
                        changed[block] = step @ factors[block] @ np.swapaxes(step, 1, 2)
                    else:
                        changed[block] = factors[block] + sign * scale
                    assert oracle(x, changed, prior, alpha) < best, (name, block)


@pytest.mark.full
def test_a_mask_of_ones_is_no_mask(x64):
    rows = as_rows(signal(0, N, [2.0], D), np.zeros(D), None)
    one = half_steps(start_at(1), rows, weak(), 0.5, True)[-1]
    other = half_steps(
        start_at(1), rows._replace(mask=np.ones((N, D))), weak(), 0.5, True
    )[-1]
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(
            *np.broadcast_arrays(left, right), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize(
    ("ard", "missing"),
    tiered([(True, False), (True, True), (False, False)], unit=[(True, True)]),
    ids=["complete", "missing", "fixed"],
)
def test_rotation_and_translation_are_the_best_of_their_kind(x64, ard, missing):
    x, prior, alpha = signal(2, N, [2.0, 1.0], D), weak(), 0.5
    if missing:
        x[[1, 2, 5], [0, 2, 2]] = np.nan
    states = half_steps(start_at(3), as_rows(x, np.zeros(D), None), prior, alpha, ard)
    rng = np.random.default_rng(0)

    def moved(q, z, r):
        """z to r z, with what undoes it in W."""
        q, z = in_double(q), in_double(z)
        step = np.eye(K + 1)
        step[:K, :K] = np.linalg.inv(r).T
        q = q._replace(loc=q.loc @ step.T, cov=step @ q.cov @ step.T)
        z = z._replace(loc=z.loc @ r.T, cov=r @ z.cov @ r.T)
        if ard:
            q = updates.update_loading_precision(q, prior)
        return oracle(x, factors_of(q, z, x, prior, alpha, ard), prior, alpha, ard)

    def shifted(q, z, c):
        """z to z + c, with what undoes it in m."""
        q, z = in_double(q), in_double(z)
        step = np.eye(K + 1)
        step[K, :K] = -c
        q = q._replace(loc=q.loc @ step.T, cov=step @ q.cov @ step.T)
        z = z._replace(loc=z.loc + c)
        return oracle(x, factors_of(q, z, x, prior, alpha, ard), prior, alpha, ard)

    translated, rotated = states[2], states[-2]
    for size in (1e-3, 0.3):
        for _ in range(10):
            c = size * rng.normal(size=K)
            assert shifted(*translated, c) < shifted(*translated, np.zeros(K))
            r = np.eye(K) + size * rng.normal(size=(K, K))
            assert moved(*rotated, r) <= moved(*rotated, np.eye(K)) + 1e-10
    every = np.ones((1, D)) if missing else None
    energy = np.asarray(
        bound.second_moments(every, rotated[0].loc[:, :K], rotated[0].cov[:, :K, :K])
    )[0]
    assert abs(energy[0, 1]) < 1e-9 * energy[1, 1]
    assert energy[0, 0] > energy[1, 1]


@pytest.mark.full
def test_the_optimum_is_stationary_in_every_parameter(x64, key):
    x, prior, alpha = signal(4, N, [2.0], D), weak(), 0.5
    x[2, 1] = np.nan
    fit = ppca.fit(key, x, num_factors=K, alpha=alpha, prior=prior, tolerance=0.0)
    # The oracle's means are absolute.
    loc = np.asarray(fit.posterior.loc).copy()
    loc[:, K] += fit.origin
    factors = factors_of(
        fit.posterior._replace(loc=loc), ppca.transform(fit, x), x, prior, alpha
    )
    assert fit.objective == pytest.approx(oracle(x, factors, prior, alpha), rel=1e-9)
    flat, tree = jax.tree.flatten(factors)
    flat = [np.array(part, float) for part in flat]
    for number, part in enumerate(flat):
        for index in np.ndindex(part.shape):
            ends = []
            for step in (-1e-5, 1e-5):
                changed = [p.copy() for p in flat]
                changed[number][index] += step
                if part.ndim == 3 and index[1] != index[2]:
                    changed[number][index[0], index[2], index[1]] += step
                ends.append(oracle(x, jax.tree.unflatten(tree, changed), prior, alpha))
            scale = 1.0 + np.abs(part[index])
            assert abs(ends[1] - ends[0]) / 2e-5 < 2e-5 * scale**2, (number, index)


@pytest.mark.parametrize("alpha", tiered(ALPHAS, unit=[0.5]))
def test_without_factors_the_gap_is_that_of_quadrature(x64, key, alpha):
    rng = np.random.default_rng(5)
    x, prior = 0.5 + rng.normal(size=(N, D)), weak()
    fit = ppca.fit(key, x, num_factors=0, alpha=alpha, prior=prior, tolerance=0.0)
    assert fit.loadings.shape == (D, 0)

    def log_joint(tau):
        """log of p(tau) times the tempered evidence of the means given tau."""
        k = alpha * N * tau
        total = gamma.logpdf(tau, prior.noise_shape, scale=1 / prior.noise_rate)
        total += -0.5 * alpha * N * D * np.log(2 * np.pi / tau)
        for column in x.T:
            total += -0.5 * alpha * tau * np.sum((column - column.mean()) ** 2)
            inflation = 1 + k * prior.mean_scale**2
            total += (
                -0.5 * np.log(inflation)
                - 0.5 * k * (column.mean() - 0.3) ** 2 / inflation
            )
        return total

    exact = np.log(
        quad(
            lambda t: np.exp(log_joint(t) - fit.objective),
            0,
            60,
            points=[0.5, 1, 2, 5],
            epsabs=1e-12,
        )[0]
    )
    # Mean field leaves out how the means widen with the noise.
    assert 0 < exact < 0.25 * D / (alpha * N)

    q = in_double(fit.posterior)
    shape, rate = fit.noise_shape, fit.noise_shape / q.noise_precision
    variance = q.cov[:, 0, 0] * np.ones(D)

    def integrand(tau):
        off = np.square(x - fit.location).sum() + N * variance.sum()
        value = alpha * (0.5 * N * D * np.log(tau / (2 * np.pi)) - 0.5 * tau * off)
        value += gamma.logpdf(
            tau, prior.noise_shape, scale=1 / prior.noise_rate
        ) - gamma.logpdf(tau, shape, scale=1 / rate)
        for m, v in zip(fit.location, variance, strict=True):
            spread = (
                np.log(prior.mean_scale**2 / v)
                + (v + (m - 0.3) ** 2) / prior.mean_scale**2
                - 1
            )
            value -= 0.5 * spread
        return value * gamma.pdf(tau, shape, scale=1 / rate)

    mode = shape / rate
    points = np.array([0.2, 0.5, 1, 2, 4]) * mode
    assert fit.objective == pytest.approx(
        quad(integrand, 1e-9, 30 * mode, points=points, epsabs=1e-11, limit=200)[0],
        rel=1e-8,
    )


def log_evidence(x, prior, alpha, k, num_samples, seed):
    """Log of the tempered evidence and its standard error, from draws of the prior."""
    rng = np.random.default_rng(seed)
    d = x.shape[1]
    tau = rng.gamma(prior.noise_shape, 1 / prior.noise_rate, num_samples)
    lam = rng.gamma(prior.ard_shape, 1 / prior.ard_rate, (num_samples, 1, k))
    w = rng.normal(size=(num_samples, d, k)) / np.sqrt(lam)
    m = prior.mean + prior.mean_scale * rng.normal(size=(num_samples, d))
    cov = w @ np.swapaxes(w, 1, 2) + np.eye(d) / tau[:, None, None]
    off = x[None] - m[:, None]
    quadratic = np.einsum("sij,sjk,sik->s", off, np.linalg.inv(cov), off)
    log_lik = -0.5 * (
        quadratic + len(x) * (np.linalg.slogdet(cov)[1] + d * np.log(2 * np.pi))
    )
    value = logsumexp(alpha * log_lik) - np.log(num_samples)
    weights = np.exp(alpha * log_lik - value)
    return value, weights.std() / np.sqrt(num_samples)


def fit_alone(key, x, **options):
    return ppca.fit(key, x, num_factors=K, **options)


def fit_complete(key, x, **options):
    """The fit with K factors, by the program that compares numbers of factors: only that is compiled."""
    return ppca.select_num_factors(key, x, num_factors=[0, K], **options).fits[K]


@pytest.mark.parametrize("alpha", tiered([0.5, 1.0], unit=[0.5]))
def test_the_elbo_is_below_the_tempered_evidence(x64, key, alpha):
    x = signal(6, N, [1.5], D)
    prior = ppca.Prior(np.zeros(D), 1.0, 2.0, 2.0, 2.0, 2.0, 1.0)
    fit = fit_complete(key, x, alpha=alpha, prior=prior)
    loc = np.asarray(fit.posterior.loc).copy()
    loc[:, K] += fit.origin
    factors = factors_of(
        fit.posterior._replace(loc=loc), ppca.transform(fit, x), x, prior, alpha
    )
    assert fit.objective == pytest.approx(oracle(x, factors, prior, alpha), rel=1e-9)
    # At alpha = 0 the KL is left.
    elbo = fit.elbo
    assert (elbo.value, elbo.se) == (fit.objective, 0.0)
    assert elbo.kl == pytest.approx(-oracle(x, factors, prior, 0.0), rel=1e-9)
    value, se = log_evidence(x, prior, alpha, K, 100_000, 7)
    assert se < 0.1
    assert value - 6.0 < fit.objective < value + 4 * se


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_elbo_in_single_precision_is_below_the_tempered_evidence(key, alpha):
    x = signal(6, N, [1.5], D)
    prior = ppca.Prior(np.zeros(D), 1.0, 2.0, 2.0, 2.0, 2.0, 1.0)
    fit = ppca.fit(key, x, num_factors=K, alpha=alpha, prior=prior)
    value, se = log_evidence(x, prior, alpha, K, 100_000, 7)
    assert se < 0.1
    assert value - 6.0 < fit.objective < value + 4 * se


def test_without_ard_the_elbo_is_the_best_over_units_of_the_factors(x64, key):
    """Under the given precision of the loadings, which is not learned."""
    x, prior, alpha = signal(31, N, [2.0, 1.0], D), weak(), 0.5
    fit = ppca.fit(
        key, x, num_factors=K, alpha=alpha, prior=prior, ard=False, tolerance=0.0
    )
    assert np.all(fit.posterior.loading_precision == prior.loading_precision)
    assert fit.ard_shape is None
    loc, z = np.asarray(fit.posterior.loc).copy(), ppca.transform(fit, x)
    loc[:, K] += fit.origin

    def elbo_at(scale):
        """Of factors in other units, with what undoes it in the loadings."""
        units = np.append(1.0 / scale, 1.0)
        q = fit.posterior._replace(
            loc=loc * units, cov=units[:, None] * fit.posterior.cov * units
        )
        scores = z._replace(loc=z.loc * scale, cov=scale[:, None] * z.cov * scale)
        return oracle(
            x,
            factors_of(q, scores, x, prior, alpha, ard=False),
            prior,
            alpha,
            ard=False,
        )

    assert fit.objective == pytest.approx(elbo_at(np.ones(K)), rel=1e-9)
    for scale in (np.array([1.01, 1.0]), np.array([1.0, 1.01])):
        assert max(elbo_at(scale), elbo_at(1.0 / scale)) < fit.objective


@pytest.mark.full
def test_half_of_the_data_twice_is_the_data(x64, key):
    x = signal(8, N, [2.0, 1.0], D)
    x[3, 0] = x[5, 2] = np.nan
    once = ppca.fit(key, x, num_factors=K, prior=weak(), tolerance=0.0)
    twice = ppca.fit(
        key,
        np.concatenate([x, x]),
        num_factors=K,
        prior=weak(),
        alpha=0.5,
        tolerance=0.0,
    )
    assert twice.objective == pytest.approx(once.objective, rel=1e-10)
    # The optimum is flat to second order: parameters agree to the root of what the ELBO does.
    for left, right in zip(
        jax.tree.leaves(once.posterior), jax.tree.leaves(twice.posterior), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_units_and_origin_change_the_elbo_by_a_constant(x64, key):
    x, alpha = signal(9, N, [2.0, 1.0], D), 0.5
    x[4, 1] = np.nan
    unit = ppca.fit(
        key, x, num_factors=K, alpha=alpha, prior=ppca.prior(), tolerance=0.0
    )
    other = ppca.fit(
        key,
        7.0 + 40.0 * x,
        num_factors=K,
        alpha=alpha,
        prior=ppca.prior(40.0, 7.0),
        tolerance=0.0,
    )
    assert other.objective == pytest.approx(
        unit.objective - alpha * (x.size - 1) * np.log(40.0), rel=1e-10
    )
    np.testing.assert_allclose(other.loadings, 40.0 * unit.loadings, atol=1e-4)


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3, 1e6])
def test_by_default_data_in_any_units_give_one_answer(precision, key, unit):
    """With noise of a hundredth of the data's deviation, about means far from 0."""
    x, alpha = signal(9, N, [4.0], D, noise=0.01), 0.5
    # In single precision the ascents end in other sweeps, within the tolerance of N rows.
    close = 1e-8 if jax.config.jax_enable_x64 else 1e-3
    one = ppca.select_num_factors(key, x, num_factors=[0, K], alpha=alpha)
    other = ppca.select_num_factors(
        key, unit * (x + 50.0), num_factors=[0, K], alpha=alpha
    )
    assert one.selected == other.selected == K
    constant = -alpha * x.size * np.log(unit)
    np.testing.assert_allclose(other.elbo, one.elbo + constant, rtol=0, atol=close)
    products = [fit.loadings @ fit.loadings.T for fit in (one.fits[K], other.fits[K])]
    np.testing.assert_allclose(
        products[1] / unit**2, products[0], rtol=close, atol=1e-3
    )
    # The ELBO is flat to second order, with the shape of τ as its curvature in log τ.
    rel = np.sqrt(2 * close / one.fits[K].noise_shape)
    assert other.fits[K].noise_variance == pytest.approx(
        unit**2 * one.fits[K].noise_variance, rel=rel
    )


def test_by_default_small_noise_is_found(precision, key):
    """A hundred-thousandth of the variance, where a prior of the data's scale would hold it up."""
    x = 0.01 * signal(28, N, [4.0], D, noise=0.01)
    fit = fit_complete(key, x)
    residual = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)[1:] ** 2
    # Of N D entries each factor and the mean take a part.
    assert 0.5 < fit.noise_variance / (residual.sum() / ((N - 1) * (D - 1))) < 3.0
    assert fit.num_occupied == 1


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_factors_beside_small_noise_are_counted(precision, key, alpha, unit):
    x = unit * signal(29, 100, [2.0, 1.0, 0.1], 6, noise=0.02)
    chosen = ppca.select_num_factors(key, x, num_factors=range(6), alpha=alpha)
    assert chosen.selected == 3
    assert chosen.fits[3].noise_variance == pytest.approx((0.02 * unit) ** 2, rel=0.25)


def test_the_default_prior_is_that_of_the_formula():
    x = signal(30, N, [2.0], D)
    x[0, 0] = np.nan
    variance = np.mean([np.var(column[~np.isnan(column)]) for column in x.T])
    prior = base.prior_of(x)
    np.testing.assert_allclose(
        prior.mean, [column[~np.isnan(column)].mean() for column in x.T]
    )
    found = (
        prior.mean_scale**2,
        prior.noise_shape,
        prior.noise_rate,
        prior.ard_shape,
        prior.ard_rate,
    )
    assert found == pytest.approx(
        (100 * variance, 0.5, 1e-9 * variance * (N * D - 1), 0.5, 1e-3 * variance)
    )
    assert prior.loading_precision == pytest.approx(1 / variance)
    with pytest.raises(
        ValueError, match=r"no column has two different values.*have no scale: pass"
    ):
        base.prior_of(np.full((3, 2), 0.1))


def test_a_noise_that_is_not_the_data_s_is_named(x64, key):
    x = signal(9, N, [2.0], D)
    with pytest.warns(
        UserWarning,
        match=r"noise variance .* is mostly prior.noise_rate 1, as the data show less.*a smaller",
    ):
        fit_complete(key, 0.03 * x, alpha=0.5, prior=ppca.prior())
    far = (signal(9, N, [200.0], D, noise=0.01) + 1e8).astype(np.float32)
    with pytest.warns(
        UserWarning,
        match=r"^the noise.*below the resolution of x, whose type .* to 12: give the data",
    ):
        fit_complete(key, far)
    # Whole numbers are what they are.
    assert base.spacing_of(np.full((2, 2), 10**8), np.full((2, 2), 1e8)) == 0.0


def test_masked_entries_are_missing(x64, key):
    x = np.round(4.0 * signal(12, N, [2.0], D))
    hidden = np.zeros((N, D), bool)
    hidden[1, 2] = True
    filled = np.where(hidden, np.nan, x)
    for kind in (float, int):
        masked = np.ma.array(np.where(hidden, -999, x).astype(kind), mask=hidden)
        fit = ppca.fit(key, masked, num_factors=K, alpha=0.5)
        assert fit.num_observed == N * D - 1
        assert (
            fit.objective == ppca.fit(key, filled, num_factors=K, alpha=0.5).objective
        )
        np.testing.assert_array_equal(
            ppca.transform(fit, masked).loc, ppca.transform(fit, filled).loc
        )
        np.testing.assert_array_equal(
            ppca.impute(fit, masked).x, ppca.impute(fit, filled).x
        )
        np.testing.assert_array_equal(
            ppca.reconstruct(fit, masked), ppca.reconstruct(fit, filled)
        )


def test_names_of_columns_are_kept_and_compared(x64, key):
    table = pd.DataFrame(signal(21, N, [1.0], D), columns=list("abc"))
    fit = ppca.select_num_factors(key, table, num_factors=[0, K], alpha=0.5).fits[K]
    assert fit.column_names == ("a", "b", "c")
    np.testing.assert_array_equal(
        ppca.transform(fit, table).loc, ppca.transform(fit, table.to_numpy()).loc
    )
    for call in (ppca.transform, ppca.impute, ppca.reconstruct):
        with pytest.raises(
            ValueError,
            match=r"x has columns \['c', 'b', 'a'\], that of the fit \['a', 'b', 'c'\]: pass",
        ):
            call(fit, table[list("cba")])


@pytest.mark.full
def test_rows_without_entries_change_nothing(x64, key):
    x = signal(10, N, [2.0], D)
    x[0, 0] = np.nan
    # As many as were fitted, a shape that is compiled.
    empty = np.full((N, D), np.nan)
    kept, more = (
        ppca.fit(key, rows, num_factors=K)
        for rows in (x, np.concatenate([x[:3], empty, x[3:]]))
    )
    assert kept.objective == more.objective
    np.testing.assert_array_equal(kept.trace, more.trace)
    scores = ppca.transform(kept, empty)
    np.testing.assert_allclose(scores.loc, np.zeros((N, K)), atol=1e-6)
    np.testing.assert_allclose(
        scores.cov, np.broadcast_to(np.eye(K), (N, K, K)), atol=1e-6
    )
    # As many sums as there are draws.
    density = ppca.log_predictive(key, kept, empty, DRAWS)
    np.testing.assert_allclose(
        density.value, 0.0, atol=DRAWS * np.finfo(density.value.dtype).eps
    )


@pytest.mark.full
def test_a_row_without_entries_changes_nothing_in_single_precision(key):
    x = signal(10, N, [2.0], D)
    x[0, 0] = np.nan
    empty = np.full((1, D), np.nan)
    kept, more = (
        ppca.fit(key, rows, num_factors=K)
        for rows in (x, np.concatenate([x[:3], empty, x[3:]]))
    )
    assert kept.objective == more.objective
    np.testing.assert_array_equal(kept.trace, more.trace)
    scores = ppca.transform(kept, empty)
    np.testing.assert_allclose(scores.loc, np.zeros((1, K)), atol=1e-6)
    np.testing.assert_allclose(scores.cov[0], np.eye(K), atol=1e-6)
    # As many float32 sums as there are draws.
    density = ppca.log_predictive(key, kept, empty, DRAWS)
    assert float(density.value[0]) == pytest.approx(
        0.0, abs=DRAWS * float(np.finfo(np.float32).eps)
    )


@pytest.mark.full
def test_single_precision_reports_the_same_elbo(key):
    x = 1e4 + signal(11, 4000, [3.0, 1.0], D)
    prior = ppca.prior(1.0, 1e4)
    single = ppca.fit(key, x, num_factors=K, alpha=0.5, prior=prior, num_restarts=3)
    with enable_x64():
        double = ppca.fit(
            key,
            x,
            num_factors=K,
            alpha=0.5,
            prior=prior,
            tolerance=1e-13,
            num_restarts=3,
        )
    assert single.posterior.loc.dtype == jnp.float32
    assert double.posterior.loc.dtype == jnp.float64
    # Both are bounds in float64: what remains is where the ascent stopped.
    assert -0.05 < single.objective - double.objective <= 1e-9 * abs(double.objective)
    assert single.trace[-1] == pytest.approx(single.objective, abs=0.5)
    np.testing.assert_allclose(single.location, double.location, atol=1e-2)


def fit_weak():
    x = signal(12, N, [2.0], D)
    x[1, 2] = np.nan
    return x, ppca.fit(jax.random.key(0), x, num_factors=K, alpha=0.5, prior=weak())


@pytest.fixture(scope="module")
def fitted():
    with enable_x64():
        return fit_weak()


@pytest.fixture(scope="module")
def fitted_in_single():
    return fit_weak()


@pytest.fixture(
    params=["fitted", pytest.param("fitted_in_single", marks=pytest.mark.full)]
)
def either(request):
    """A fit and the precision that it was made in."""
    with enable_x64() if request.param == "fitted" else contextlib.nullcontext():
        yield request.getfixturevalue(request.param)


def test_scores_are_those_of_the_formula(either):
    x, fit = either
    q = in_double(fit.posterior)
    loc = q.loc.copy()
    loc[:, K] += fit.origin
    scores = ppca.transform(fit, x)
    for i, row in enumerate(x):
        precision, linear = np.eye(K), np.zeros(K)
        for j in np.flatnonzero(~np.isnan(row)):
            second = q.cov[j] + np.outer(q.loc[j], q.loc[j])
            precision += q.noise_precision * second[:K, :K]
            with_mean = q.cov[j][:K, K] + loc[j, :K] * loc[j, K]
            linear += q.noise_precision * (row[j] * loc[j, :K] - with_mean)
        np.testing.assert_allclose(scores.cov[i], np.linalg.inv(precision), atol=1e-5)
        np.testing.assert_allclose(
            scores.loc[i], np.linalg.solve(precision, linear), atol=1e-5
        )
    np.testing.assert_allclose(
        ppca.reconstruct(fit, x), scores.loc @ loc[:, :K].T + loc[:, K], atol=1e-5
    )


@pytest.mark.full
def test_a_fit_of_64_bits_predicts_where_there_are_32(fitted, key):
    x, fit = fitted
    with enable_x64():
        scores = np.asarray(ppca.transform(fit, x).loc)
    np.testing.assert_allclose(ppca.transform(fit, x).loc, scores, atol=1e-4)
    density = ppca.log_predictive(key, fit, x, DRAWS).value
    for values in (
        density,
        ppca.sample(key, fit, 3),
        ppca.sample_posterior(key, fit, 3).loadings,
    ):
        assert np.isfinite(values).all()


def test_densities_are_those_of_a_gaussian(either, key):
    x, fit = either
    draws = jax.tree.map(
        lambda part: np.asarray(part)[:3], ppca.sample_posterior(key, fit, DRAWS)
    )
    rows = as_rows(x, np.zeros(D), fit.posterior.loc.dtype)
    values = jax.jit(jax.vmap(exact_log_density, (0, None)))(draws, rows)
    for value, mean, loadings, tau in zip(np.asarray(values), *draws, strict=True):
        cov = loadings @ loadings.T + np.eye(D) / tau
        for i, row in enumerate(x):
            seen = ~np.isnan(row)
            expected = multivariate_normal.logpdf(
                row[seen], mean[seen], cov[np.ix_(seen, seen)]
            )
            assert float(value[i]) == pytest.approx(expected, abs=1e-4)
    # The average of densities, and the standard error of its logarithm.
    found, densities = (
        _average(Draws(*draws), rows),
        np.exp(np.asarray(values, np.float64)),
    )
    mean = densities.mean(axis=0)
    np.testing.assert_allclose(found.value, np.log(mean), atol=1e-4)
    np.testing.assert_allclose(
        found.se,
        densities.std(axis=0, ddof=1) / mean / np.sqrt(3),
        rtol=1e-2,
        atol=1e-3,
    )


@pytest.mark.full
def test_predictions_without_factors_against_quadrature(precision, key):
    x = signal(13, N, [], D)
    fit = ppca.fit(key, x, num_factors=0, prior=weak())
    row = np.array([[0.5, -2.0, np.nan]])
    found = ppca.log_predictive(key, fit, row, DRAWS)
    q = in_double(fit.posterior)

    def posterior(tau):
        return gamma.pdf(
            tau, fit.noise_shape, scale=q.noise_precision / fit.noise_shape
        )

    def density(tau):
        scale = np.sqrt(1 / tau + q.cov[0, 0, 0])
        terms = (
            -0.5 * ((row[0, :2] - fit.location[:2]) / scale) ** 2
            - np.log(scale)
            - 0.5 * np.log(2 * np.pi)
        )
        return np.exp(terms.sum()) * posterior(tau)

    expected = np.log(quad(density, 1e-9, 40, points=[0.5, 1, 2])[0])
    assert 0 < float(found.se[0]) < 0.01
    assert float(found.value[0]) == pytest.approx(expected, abs=5 * float(found.se[0]))
    filled = ppca.impute(fit, row)
    np.testing.assert_array_equal(filled.x[0, :2], row[0, :2])
    np.testing.assert_array_equal(filled.scale[0, :2], 0.0)
    variance = quad(
        lambda tau: (1 / tau + q.cov[0, 0, 0]) * posterior(tau),
        1e-9,
        40,
        points=[0.5, 1, 2],
    )[0]
    assert filled.x[0, 2] == pytest.approx(fit.location[2], rel=1e-6)
    assert filled.scale[0, 2] == pytest.approx(np.sqrt(variance), rel=1e-5)


def test_imputation_by_draws_of_the_factors(either, key):
    """Means and standard deviations of what is filled in, against draws of W, m, τ and z from their factors."""
    x, fit = either
    filled, scores, draws = (
        ppca.impute(fit, x),
        ppca.transform(fit, x),
        ppca.sample_posterior(key, fit, DRAWS),
    )
    rng = np.random.default_rng(14)
    z = rng.multivariate_normal(scores.loc[1], scores.cov[1], DRAWS)
    mean = np.asarray(draws.mean)[:, 2] + np.sum(
        np.asarray(draws.loadings)[:, 2] * z, axis=1
    )
    values = mean + rng.normal(size=DRAWS) / np.sqrt(np.asarray(draws.noise_precision))
    assert filled.x[1, 2] == pytest.approx(
        values.mean(), abs=5 * values.std() / np.sqrt(DRAWS)
    )
    spread = 5 * np.sqrt(np.var((values - values.mean()) ** 2) / DRAWS)
    assert filled.scale[1, 2] ** 2 == pytest.approx(values.var(), abs=spread)
    assert np.count_nonzero(filled.scale) == 1


def test_new_rows_have_the_moments_of_the_posterior(either, key):
    _, fit = either
    rows = ppca.sample(key, fit, DRAWS)
    q = in_double(fit.posterior)
    second = q.cov[:, :K, :K] + q.loc[:, :K, None] * q.loc[:, None, :K]
    noise = fit.noise_variance * fit.noise_shape / (fit.noise_shape - 1)
    variance = np.trace(second, axis1=1, axis2=2) + q.cov[:, K, K] + noise
    np.testing.assert_allclose(
        rows.mean(axis=0), fit.location, atol=5 * np.sqrt(variance.max() / DRAWS)
    )
    spread = np.sqrt(np.var((rows - fit.location) ** 2, axis=0) / DRAWS)
    assert np.all(np.abs(rows.var(axis=0) - variance) < 5 * spread)


def test_axes_are_the_singular_vectors_of_the_loadings(fitted):
    axes, loadings = ppca.principal_axes(fitted[1]), fitted[1].loadings
    np.testing.assert_allclose(
        axes.directions.T @ axes.directions, np.eye(K), atol=1e-12
    )
    sizes = np.diag(axes.variances - fitted[1].noise_variance)
    np.testing.assert_allclose(
        axes.directions @ sizes @ axes.directions.T, loadings @ loadings.T, atol=1e-10
    )
    assert np.all(np.diff(axes.variances) <= 0.0)
    assert axes.noise_variance == fitted[1].noise_variance
    assert np.all(
        np.max(axes.directions, axis=0) == np.max(np.abs(axes.directions), axis=0)
    )


@pytest.mark.full
def test_axes_of_a_strong_signal(key):
    x = signal(15, 4000, [5.0, 3.0], D, noise=0.5)
    axes = ppca.principal_axes(ppca.fit(key, x, num_factors=K, num_restarts=3))
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    np.testing.assert_allclose(
        axes.directions.T @ axes.directions, np.eye(K), atol=1e-6
    )
    # The prior's pull is of order 1/n, relative.
    np.testing.assert_allclose(
        np.abs(np.sum(axes.directions * vectors[:, [2, 1]], axis=0)), 1.0, atol=1e-4
    )
    np.testing.assert_allclose(axes.variances, values[[2, 1]], rtol=5e-3)
    assert axes.noise_variance == pytest.approx(values[0], rel=5e-3)
    assert np.all(
        np.max(axes.directions, axis=0) == np.max(np.abs(axes.directions), axis=0)
    )


def test_the_axes_of_many_columns_are_those_of_their_covariance():
    x = np.random.default_rng(5).normal(size=(6, 9))
    values, vectors = (part[..., ::-1] for part in np.linalg.eigh(x.T @ x / 6))
    for k in (0, 2, 5):
        start = driver.from_axes(x, k, ppca.prior())
        np.testing.assert_allclose(1.0 / start.noise_precision, values[k:].mean())
        axes = vectors[:, :k]
        expected = axes @ np.diag(values[:k] - values[k:].mean()) @ axes.T
        np.testing.assert_allclose(
            start.loadings @ start.loadings.T, expected, atol=1e-12
        )


def test_starts_are_axes_smaller_axes_and_random(x64, key):
    x = signal(27, N, [2.0, 1.0], D)
    origin = x.mean(axis=0)
    target = Target(as_rows(x, origin, None), weak(), 1.0, True)
    first, smaller, random = driver.make_starts(
        key, target, K, K, origin, driver.Options(num_restarts=3)
    ).loadings
    np.testing.assert_allclose(smaller, first * [1.0, 1e-3])
    # One with no large column, and none with fewer.
    every = driver.make_starts(
        key, target, K, K, origin, driver.Options(num_restarts=6)
    ).loadings
    np.testing.assert_allclose(every[3], first * 1e-3)
    assert np.abs(every[5]).min() > 0.05 * np.abs(every[5]).max()
    assert np.abs(first.T @ first)[0, 1] < 1e-9
    assert np.abs(random).min() > 0.0
    assert np.linalg.matrix_rank(np.column_stack([first, random])) == D


def test_a_warm_start_stays(x64, key, fitted):
    x, cold = fitted
    options = {"num_factors": K, "alpha": 0.5, "prior": weak()}
    assert len(cold.trace) == cold.num_iter
    assert cold.trace[-1] == cold.restart_elbos.max()
    assert cold.converged
    warm = ppca.fit(key, x, **options, init=cold)
    # A start has no covariances: these take some sweeps.
    assert warm.num_iter < cold.num_iter / 2
    assert warm.objective == pytest.approx(cold.objective, abs=1e-4)
    for k in (0, 1):
        smaller = cold._replace(
            posterior=cold.posterior._replace(loc=cold.posterior.loc[:, [*range(k), K]])
        )
        more = ppca.fit(key, x, **options, init=smaller)
        assert more.objective == pytest.approx(cold.objective, abs=0.05)
    with pytest.raises(
        ValueError, match=r"init has 3 columns, x has 2.*starts need the same"
    ):
        ppca.fit(key, x[:, :2], num_factors=1, init=cold)
    units = (
        "^init is a fit of columns that deviate by about .* from their means, "
        "those of x by .*in the same units"
    )
    for unit in (1e-3, 1e3):
        with pytest.raises(ValueError, match=units):
            ppca.fit(key, unit * x, num_factors=K, init=cold)


@pytest.mark.full
def test_starts_and_warm_starts(key):
    x = signal(16, 4000, [2.0, 0.2], D)
    options = {"num_factors": K, "num_restarts": 3, "prior": weak(0.0)}
    cold = ppca.fit(key, x, **options)
    assert cold.restart_elbos.shape == (3,)
    assert cold.trace[-1] == cold.restart_elbos.max()
    assert len(cold.trace) == cold.num_iter
    assert cold.converged
    warm = ppca.fit(key, x, **options, init=cold)
    assert warm.num_iter <= 3
    assert warm.objective == pytest.approx(cold.objective, abs=0.05)
    for k in (0, 1):
        smaller = cold._replace(
            posterior=cold.posterior._replace(loc=cold.posterior.loc[:, [*range(k), K]])
        )
        more = ppca.fit(key, x, **options, init=smaller)
        assert more.objective == pytest.approx(cold.objective, abs=0.05)
    with pytest.raises(
        ValueError, match=r"init has 3 columns, x has 2.*starts need the same"
    ):
        ppca.fit(key, x[:, :2], num_factors=1, init=cold)


def finish(**changes):
    """A made-up end of one ascent without factors, of two sweeps."""
    x = signal(17, N, [1.0], D)
    origin = x.mean(axis=0)
    centred = weak()._replace(mean=0.3 - origin)
    target = Target(as_rows(x, origin, None), centred, 1.0, True)
    end = Ascent(
        point=ppca.Posterior(
            np.zeros((1, D, 1)), np.full((1, 1, 1, 1), 0.1), np.ones(1), np.ones((1, 0))
        ),
        objective=np.array([-4.0]),
        trace=np.array([[-5.0], [-4.0]]),
        num_iter=np.array([2]),
        active=np.array([False]),
        converged=np.array([True]),
        fall=np.zeros(1),
        num_steps=np.array(2),
    )
    return driver._finish(end._replace(**changes), 0, target, weak(), origin, 1e-6)


def test_what_went_wrong_is_said():
    assert finish().converged
    with pytest.warns(
        UserWarning,
        match=r"^the fit with.*take a larger max_iter.*before comparing its ELBO",
    ):
        fit = finish(converged=np.array([False]))
    assert not fit.converged
    assert fit.trace.shape == (2,)
    with pytest.raises(
        RuntimeError, match=r"the ELBO fell from .* in sweep 2.*unit deviation, or use"
    ):
        finish(fall=np.ones(1))
    with pytest.raises(
        ValueError, match="the ELBO of a start is nan: the data or the prior exceed"
    ):
        finish(objective=np.array([np.nan]))


@pytest.mark.full
def test_what_has_not_converged_says_so(key):
    with pytest.warns(
        UserWarning,
        match=r"^the fit with.*take a larger max_iter.*before comparing its ELBO",
    ):
        fit = ppca.fit(key, signal(17, N, [1.0], D), num_factors=0, max_iter=1)
    assert not fit.converged
    assert fit.trace.shape == (1,)


@pytest.mark.full
def test_a_fall_of_the_elbo_raises(key, monkeypatch):
    monkeypatch.setattr(
        updates,
        "update_noise",
        lambda q, *_: q._replace(noise_precision=0.5 * q.noise_precision),
    )
    with pytest.raises(
        RuntimeError, match=r"the ELBO fell from .* in sweep 2.*unit deviation, or use"
    ):
        ppca.fit(key, signal(18, N + 1, [1.0], D), num_factors=0)


def constant(column):
    x = signal(19, N, [1.0], D)
    x[:, column] = 2.0
    return x


ODD = {
    "constant column": constant(1),
    "constant table": np.full((N, D), 2.0),
    "duplicates": np.repeat(signal(20, 1, [1.0], D), N, axis=0),
    "copied column": signal(19, N, [1.0], D)[:, [0, 1, 0]],
    "integers": np.arange(N * D).reshape(N, D) % 5,
    "one row": np.array([[1.0, 2.0, 0.5]]),
}


@contextlib.contextmanager
def catch(name):
    """All warnings of a table: of columns that say nothing of noise, and of a prior of another scale."""
    flat = {
        r"columns \[0, 1, 2\] of x are constant",
        "the prior is made for 1",
        "is mostly prior.noise_rate",
    }
    expected = {
        "constant column": {r"columns \[1\] of x are constant"},
        "constant table": flat,
        "duplicates": flat,
        "copied column": {r"columns \[2\] of x are copies of earlier ones"},
    }.get(name, set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(expected)
    assert all(
        any(re.search(pattern, message) for message in messages) for pattern in expected
    )


# A single row is compiled by itself.
@pytest.mark.parametrize(
    "name", tiered(ODD, unit=[name for name in ODD if name != "one row"])
)
def test_numbers_of_factors_of_degenerate_tables_are_compared(x64, key, name):
    x = ODD[name]
    with catch(name):
        found = ppca.select_num_factors(key, x, num_factors=[0, K], prior=ppca.prior())
    assert found.converged.all()
    for fit in found.fits.values():
        assert all(
            np.all(np.isfinite(leaf))
            for leaf in jax.tree.leaves((fit.posterior, fit.trace, fit.objective))
        )


@pytest.mark.full
@pytest.mark.parametrize("name", ODD)
def test_degenerate_tables_are_fitted(key, name):
    x = ODD[name]
    with catch(name):
        fit = ppca.fit(key, x, num_factors=K, prior=ppca.prior())
    assert fit.converged
    assert all(
        np.all(np.isfinite(leaf))
        for leaf in jax.tree.leaves((fit.posterior, fit.trace, fit.objective))
    )


GOOD = signal(21, N, [1.0], D)
BAD = {
    "vector": (GOOD[0], {}, ValueError, r"^x must have.*shape \(n, d\)"),
    "no columns": (GOOD[:, :0], {}, ValueError, r"^x must have shape.*d > 0"),
    "no rows": (GOOD[:0], {}, ValueError, "no row with an observed entry"),
    "all missing": (
        np.full((N, D), np.nan),
        {},
        ValueError,
        "no row with an observed entry",
    ),
    "empty column": (
        np.where(np.arange(D) == 1, np.nan, GOOD),
        {},
        ValueError,
        r"^x has.*in columns \[1\]",
    ),
    "infinite": (
        np.where(GOOD[4, 2] == GOOD, np.inf, GOOD),
        {},
        ValueError,
        r"row 4, column 2.*is missing",
    ),
    "complex": (GOOD + 1j, {}, TypeError, r"^x must be.*real numbers"),
    "text": (GOOD.astype(str), {}, TypeError, r"^x must be.*real numbers"),
    "many factors": (
        GOOD,
        {"num_factors": 4},
        ValueError,
        r"from 0 to 3, got 4\. x has 3 columns",
    ),
    "negative": (GOOD, {"num_factors": -1}, ValueError, "from 0 to 3, got -1"),
    "fractional": (
        GOOD,
        {"num_factors": 1.0},
        ValueError,
        "num_factors must be an integer",
    ),
    "alpha 0": (
        GOOD,
        {"alpha": 0.0},
        ValueError,
        r"alpha must be positive.*and finite, got",
    ),
    "alpha NaN": (
        GOOD,
        {"alpha": np.nan},
        ValueError,
        r"alpha must be positive.*and finite, got",
    ),
    "tolerance": (
        GOOD,
        {"tolerance": -1.0},
        ValueError,
        r"tolerance must be at least 0.*and finite, got",
    ),
    "max_iter": (
        GOOD,
        {"max_iter": 0},
        ValueError,
        "max_iter must be an integer of at least 1",
    ),
    "restarts": (
        GOOD,
        {"num_restarts": 0},
        ValueError,
        "num_restarts must be an integer of at least 1",
    ),
    "infinite mean": (
        GOOD,
        {"prior": ppca.prior(mean=np.inf)},
        ValueError,
        "prior.mean must be finite, got inf",
    ),
    "rate": (
        GOOD,
        {"prior": ppca.prior()._replace(noise_rate=0.0)},
        ValueError,
        "prior.noise_rate must be",
    ),
    "mean": (
        GOOD,
        {"prior": ppca.prior(mean=np.zeros(2))},
        ValueError,
        r"prior.mean must .* have shape \(3,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(key, name):
    x, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        ppca.fit(key, x, **{"num_factors": 1, **options})


@pytest.mark.parametrize(
    "fit", [fit_complete, pytest.param(fit_alone, marks=pytest.mark.full)]
)
def test_a_prior_of_another_scale_is_named(precision, key, fit):
    x = signal(22, N, [1.0], D)
    with pytest.warns(
        UserWarning, match=r"means of columns \[0, 1, 2\].*the columns, or pass"
    ):
        fit(key, x + 1000.0, prior=ppca.prior())
    with pytest.warns(
        UserWarning,
        match=r"^the columns.*the prior is made for 1.*the columns, or pass",
    ):
        fit(key, 1000.0 * (x - x.mean(axis=0)), prior=ppca.prior())
    with pytest.raises(ValueError, match=r"scale must be positive.*and finite, got"):
        ppca.prior(0.0)


@pytest.mark.parametrize("num_factors", tiered([0, 1], unit=[0]))
def test_columns_of_zeros_change_nothing(x64, key, num_factors):
    """One program fits all numbers of factors, in arrays of the largest."""
    x = signal(26, N, [2.0], D)
    options = {"prior": weak(), "alpha": 0.5}
    small = ppca.select_num_factors(
        key, x, num_factors=[num_factors, 2], **options
    ).fits[num_factors]
    alone = ppca.fit(key, x, num_factors=num_factors, **options)
    np.testing.assert_allclose(small.trace, alone.trace, rtol=1e-10)
    for left, right in zip(
        jax.tree.leaves(small.posterior), jax.tree.leaves(alone.posterior), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-8, atol=1e-10)


def test_the_number_of_factors(x64, key):
    x = signal(16, N, [20.0], D)
    weights = {0: np.log(0.5), 2: np.log(0.25)}
    chosen = ppca.select_num_factors(
        key, x, num_factors=[0, 2], log_prior=weights, alpha=0.5, prior=weak()
    )
    assert chosen.selected == 2
    assert chosen.fit is chosen.fits[2]
    table = nt.table(chosen)
    assert table.index.tolist() == [0, 2]
    np.testing.assert_array_equal(table["criterion"], chosen.criterion)
    assert chosen.data.attrs["selected"] == 2
    np.testing.assert_allclose(chosen.criterion, chosen.elbo + np.log([0.5, 0.25]))
    assert chosen.margin == pytest.approx(chosen.criterion[1] - chosen.criterion[0])
    assert chosen.weight.sum() == pytest.approx(1.0)
    assert chosen.fits[2].num_factors == 2
    assert chosen.fits[2].num_occupied == 1
    assert chosen.fits[0].num_occupied == 0
    uniform = ppca.select_num_factors(key, x, num_factors=(0,), alpha=0.5, prior=weak())
    assert uniform.log_prior == pytest.approx(0.0)
    assert uniform.margin == np.inf


@pytest.mark.full
def test_the_number_of_factors_of_many_rows(key):
    x = signal(16, 4000, [2.0], D)
    weights = {0: np.log(0.5), 2: np.log(0.25)}
    chosen = ppca.select_num_factors(
        key, x, num_factors=[0, 2], log_prior=weights, alpha=0.5, num_restarts=3
    )
    assert chosen.selected == 2
    np.testing.assert_allclose(chosen.criterion, chosen.elbo + np.log([0.5, 0.25]))
    assert chosen.margin == pytest.approx(chosen.criterion[1] - chosen.criterion[0])
    assert chosen.weight.sum() == pytest.approx(1.0)
    assert chosen.fits[2].num_factors == 2
    assert chosen.fits[2].num_occupied == 1
    assert chosen.fits[0].num_occupied == 0
    uniform = ppca.select_num_factors(key, x, num_factors=(0,), alpha=0.5)
    assert uniform.log_prior == pytest.approx(0.0)
    assert uniform.margin == np.inf


@pytest.mark.parametrize(
    ("orders", "weights", "message"),
    [
        ([], None, "at least one"),
        ([1, 1], None, r"different numbers.*at least one, got"),
        ([0], {1: 0.0}, r"log_prior has models.*the fits are"),
        (
            [0],
            {0: 1.0},
            r"^the prior weights.*sum to 2.71828, more than 1.*pass logarithms",
        ),
        ([0], {0: -np.inf}, "positive weights"),
    ],
)
def test_numbers_that_cannot_be_compared_are_refused(key, orders, weights, message):
    with pytest.raises(ValueError, match=message):
        ppca.select_num_factors(key, GOOD, num_factors=orders, log_prior=weights)


def test_predictions_refuse_other_columns_and_too_few_draws(key, fitted):
    with pytest.raises(ValueError, match="x has 2 columns, the fit 3"):
        ppca.transform(fitted[1], GOOD[:, :2])
    with pytest.raises(ValueError, match="num_draws must be an integer of at least 2"):
        ppca.log_predictive(key, fitted[1], GOOD, 1)
    for draw in (ppca.sample, ppca.sample_posterior):
        for count in (-1, 2.0):
            with pytest.raises(
                ValueError,
                match=f"num_samples must be an integer of at least 0, got {count}",
            ):
                draw(key, fitted[1], count)


def test_selections_tracers_and_one_number_are_refused(key, fitted):
    selection = ppca.FactorSelection(*[None] * 9, {K: fitted[1]})
    refused = r"fit must be a PPCAFit, by nt.ppca.fit, got FactorSelection: take its \.fit, or one of its \.fits"
    for call in (ppca.transform, ppca.impute, ppca.reconstruct):
        with pytest.raises(TypeError, match=refused):
            call(selection, GOOD)
    for call in (ppca.principal_axes, lambda fit: ppca.sample(key, fit)):
        with pytest.raises(TypeError, match=refused):
            call(selection)
    with pytest.raises(TypeError, match=r"init must be a PPCAFit.*one of its"):
        ppca.fit(key, GOOD, num_factors=K, init=selection)
    with pytest.raises(
        TypeError,
        match=r"num_factors must be several numbers, such as range\(5\), got 4",
    ):
        ppca.select_num_factors(key, GOOD, num_factors=4)
    with pytest.raises(
        TypeError,
        match=r"x is traced, and nt\.ppca reads it on the host.*vmap and grad",
    ):
        jax.jit(lambda x: ppca.fit(key, x, num_factors=1).objective)(GOOD)


@pytest.mark.parametrize("ard", [True, False])
def test_the_numpyro_model_is_the_one_of_the_formulas(ard, x64):
    """Its joint density at some values, by scipy, with entries missing."""
    rng = np.random.default_rng(0)
    prior = ppca.prior(scale=3.0)._replace(
        mean=np.array([1.0, -2.0, 0.5]), loading_precision=0.3
    )
    x = rng.normal(size=(4, D))
    x[0, 1] = x[2, 0] = np.nan
    values = {
        "noise_precision": 0.7,
        "loadings": rng.normal(size=(D, K)),
        "mean": rng.normal(size=D),
    }
    precision = np.full(K, 0.3)
    expected = gamma.logpdf(0.7, prior.noise_shape, scale=1 / prior.noise_rate)
    if ard:
        values["loading_precision"] = precision = np.array([0.4, 2.0])
        expected += gamma.logpdf(
            precision, prior.ard_shape, scale=1 / prior.ard_rate
        ).sum()
    expected += norm.logpdf(values["loadings"], 0.0, precision**-0.5).sum()
    expected += norm.logpdf(values["mean"], prior.mean, prior.mean_scale).sum()
    covariance = values["loadings"] @ values["loadings"].T + np.eye(D) / 0.7
    for row in x:
        o = ~np.isnan(row)
        expected += multivariate_normal.logpdf(
            row[o], values["mean"][o], covariance[np.ix_(o, o)]
        )
    found, _ = log_density(
        numpyro_model(prior, K, ard, missing=True), (jnp.asarray(x),), {}, values
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_rows_that_the_model_draws_have_its_mean_and_covariance(key):
    loadings = np.array([[1.0, 0.5], [-2.0, 0.3], [0.2, -1.0]], np.float32)
    draw = Draws(np.array([5.0, -1.0, 0.0], np.float32), loadings, np.float32(4.0))
    rows = np.asarray(Row(draw, 5000, False).sample(key, (4,))).reshape(-1, 3)
    assert rows.shape == (20_000, 3)
    covariance = loadings @ loadings.T + np.eye(3) / 4.0
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(
        (rows.mean(axis=0) - draw.mean) / sd, 0.0, atol=5 / np.sqrt(20_000)
    )
    found = np.cov(rows.T) / np.outer(sd, sd)
    np.testing.assert_allclose(
        found, covariance / np.outer(sd, sd), atol=5 * np.sqrt(2 / 20_000)
    )
    # Rows share nothing.
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 5 / np.sqrt(20_000)


def test_a_selection_holds_the_selected_fit():
    selection = ppca.FactorSelection(*[None] * 7, 2, 1.0, {1: None, 2: "two"})
    assert selection.fit == "two"
