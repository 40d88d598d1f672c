"""The rate of probabilistic PCA: its divergences from two sides, its limits, and a posterior that has them."""

import jax
import numpy as np
import pytest
import rate_oracles as oracles
from conftest import enable_x64
from scipy.stats import multivariate_normal

import numpyro_tempered as nt

KNOWN = nt.ppca.prior()._replace(mean_scale=1e-4, noise_shape=1e8, noise_rate=1e8)


def fitted_covariances(rng, d, num_factors, count):
    loadings = rng.normal(size=(count, d, num_factors))
    noise = rng.uniform(0.5, 2.0, size=count)
    return loadings @ np.swapaxes(loadings, 1, 2) + noise[:, None, None] * np.eye(d)


@pytest.mark.parametrize("order", [0.3, 0.5])
def test_the_divergence_is_that_of_the_package(order):
    rng = np.random.default_rng(0)
    truth = oracles.make_truth(rng, 6, 2, 3.0)
    mean, cov = rng.normal(size=(5, 6)), fitted_covariances(rng, 6, 2, 5)
    found = nt.bounds.renyi_gaussian(order, mean, cov, np.zeros(6), truth.cov)
    np.testing.assert_allclose(
        found, oracles.renyi(order, mean, cov, truth.cov), rtol=1e-10
    )


def test_the_divergence_is_the_integral():
    rng = np.random.default_rng(1)
    truth = oracles.make_truth(rng, 2, 1, 2.0)
    mean, (cov,) = np.array([0.3, -0.2]), fitted_covariances(rng, 2, 1, 1)
    p, p0 = multivariate_normal(mean, cov), multivariate_normal(np.zeros(2), truth.cov)

    # The trapezoidal rule of a smooth density that vanishes at the ends.
    line = np.linspace(-20.0, 20.0, 401)
    grid = np.stack(np.meshgrid(line, line), axis=-1)
    integral = 0.01 * np.sqrt(p.pdf(grid) * p0.pdf(grid)).sum()
    np.testing.assert_allclose(
        oracles.renyi(0.5, mean, cov, truth.cov), -2 * np.log(integral), rtol=1e-10
    )


def test_the_divergence_is_an_average_over_the_truth():
    """exp(-D/2) is the mean of sqrt(p/p0) under p0, here of rows that are drawn factor by factor."""
    rng = np.random.default_rng(2)
    truth = oracles.make_truth(rng, 5, 2, 4.0)
    cov = oracles.make_truth(rng, 5, 2, 3.0).cov
    x = oracles.draw_rows(rng, truth, 40_000)
    root = np.exp(
        0.5 * (oracles.log_density(x, cov) - oracles.log_density(x, truth.cov))
    )
    error = root.std() / np.sqrt(len(root))
    assert (
        abs(
            root.mean() - np.exp(-0.5 * oracles.renyi(0.5, np.zeros(5), cov, truth.cov))
        )
        < 4 * error
    )
    np.testing.assert_allclose(
        oracles.log_density(x[:3], cov),
        multivariate_normal(np.zeros(5), cov).logpdf(x[:3]),
        rtol=1e-12,
    )


def test_kullback_leibler_is_the_limit_of_the_orders():
    rng = np.random.default_rng(3)
    truth = oracles.make_truth(rng, 4, 2, 3.0)
    loadings = truth.loadings + 0.3 * rng.normal(size=(3, 4, 2))
    cov = loadings @ np.swapaxes(loadings, 1, 2) + np.eye(4)
    # Of order 1 - a from the other side it is KL times a, in the limit of small a.
    near = oracles.renyi(1e-6, np.zeros(4), cov, truth.cov) / 1e-6
    np.testing.assert_allclose(oracles.kl_from_truth(truth, loadings), near, rtol=1e-4)


@pytest.mark.parametrize(("d", "num_factors"), [(5, 1), (5, 4), (7, 3)])
def test_the_trace_of_information_is_the_curvature_of_kl(d, num_factors):
    truth = oracles.make_truth(np.random.default_rng(4), d, num_factors, 2.5)
    step = 1e-3 * np.eye(d * num_factors).reshape(-1, d, num_factors)
    both = oracles.kl_from_truth(truth, truth.loadings + step) + oracles.kl_from_truth(
        truth, truth.loadings - step
    )
    trace = oracles.trace_of_information(d, num_factors, 2.5)
    np.testing.assert_allclose(both.sum() / 1e-6, trace, rtol=1e-4)


def test_parameters_are_the_rank_of_the_information():
    rng = np.random.default_rng(5)
    d, num_factors = 5, 3
    truth = oracles.make_truth(rng, d, num_factors, 2.0)
    steps = np.eye(d * num_factors).reshape(-1, d, num_factors)
    changes = steps @ truth.loadings.T
    changes = (changes + np.swapaxes(changes, 1, 2)).reshape(len(steps), -1)
    assert np.linalg.matrix_rank(changes) == oracles.count_parameters(d, num_factors)


@pytest.mark.parametrize("loadings_alone", [True, False])
def test_maximum_likelihood_is_a_maximum(loadings_alone):
    rng = np.random.default_rng(6)
    truth = oracles.make_truth(rng, 4, 2, 3.0)
    x = oracles.draw_rows(rng, truth, 50)
    mean, cov = oracles.maximum_likelihood(x, 2, loadings_alone)
    values, vectors = np.linalg.eigh(cov)
    np.testing.assert_allclose(values[:2], values[0])
    assert not loadings_alone or values[0] == pytest.approx(1.0)
    loadings = vectors[:, 2:] * np.sqrt(values[2:] - values[0])
    best = oracles.log_density(x - mean, cov).sum()
    for _ in range(20):
        other = loadings + 0.01 * rng.normal(size=loadings.shape)
        noise, centre = values[0], mean
        if not loadings_alone:
            noise, centre = (
                noise * np.exp(0.01 * rng.normal()),
                mean + 0.01 * rng.normal(size=4),
            )
        assert (
            oracles.log_density(x - centre, other @ other.T + noise * np.eye(4)).sum()
            < best
        )


def test_the_bound_is_that_of_second_order():
    truth = oracles.make_truth(np.random.default_rng(7), 5, 2, 5.0)
    found = oracles.bound(0.5, np.random.default_rng(8), truth, 400, -3 * np.log(2.0))
    # To second order in s² = 1/(α n), with E KL = s² trace/2.
    variance = 1 / 200
    price = 0.5 * (
        10 * (variance - 1 - np.log(variance)) + np.sum(truth.loadings**2)
    ) + 3 * np.log(2.0)
    second_order = (
        0.5 * variance * oracles.trace_of_information(5, 2, 5.0) + price / 200
    )
    assert 0.9 * second_order < found < 1.02 * second_order


@pytest.mark.parametrize(
    ("d", "num_factors", "n"), [(5, 1, 50), (5, 4, 50), (20, 3, 2000)]
)
def test_the_two_parts_of_the_rate(d, num_factors, n):
    """Both conditions on rho = N(W0, I/(d n)): KL of the truth by draws, KL to the prior in closed form."""
    rng = np.random.default_rng(9)
    truth = oracles.make_truth(rng, d, num_factors, float(d))
    largest = np.abs(truth.loadings).max() ** 2
    loadings = truth.loadings + rng.normal(size=(400, d, num_factors)) / np.sqrt(d * n)
    assert oracles.kl_from_truth(truth, loadings).mean() < d * num_factors / n * (
        4 * largest + 3 / (d * n)
    )
    variance = 1 / (d * n)
    entries = d * num_factors * (variance - 1 - np.log(variance)) + np.sum(
        truth.loadings**2
    )
    assert 0.5 * entries < 0.5 * d * num_factors * (np.log(d * n) + largest)


@pytest.mark.full
@pytest.mark.parametrize(("prior", "ard"), [(KNOWN, False), (None, True)])
@pytest.mark.filterwarnings("ignore:the means of columns")
def test_the_posterior_has_the_limit_and_keeps_its_certificate(prior, ard):
    """Forty data sets; the integral is over draws of the posterior that are made here, from its parameters."""
    d, true, size, n, alpha = 5, 2, 5.0, 2000, 0.5
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        truth = oracles.make_truth(rng, d, true, size)
        x = oracles.draw_rows(rng, truth, n)
        with enable_x64():
            key = jax.random.key(seed)
            choice = nt.ppca.select_num_factors(
                key,
                x,
                num_factors=range(4),
                log_prior=nt.dyadic,
                alpha=alpha,
                prior=prior,
                ard=ard,
            )
        assert choice.selected == true
        q, fit = choice.fits[true].posterior, choice.fits[true]
        root = np.linalg.cholesky(np.asarray(q.cov))[0]
        draws = np.asarray(q.loc) + rng.normal(size=(200, d, true + 1)) @ root.T
        noise = np.asarray(q.noise_precision) * rng.gamma(
            fit.noise_shape, 1 / fit.noise_shape, size=200
        )
        loadings, mean = draws[..., :true], fit.origin + draws[..., true]
        cov = loadings @ np.swapaxes(loadings, 1, 2) + np.eye(d) / noise[:, None, None]
        found.append(oracles.renyi(alpha, mean, cov, truth.cov).mean())
        log_p0 = nt.bounds.known_density(oracles.log_density(x, truth.cov).sum())
        certificate = nt.bounds.selection_certificate(
            choice.elbo, choice.log_prior, log_p0, n, alpha=alpha
        )
        assert found[-1] < certificate.value
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    expected = oracles.limit(alpha, d, true, size, not ard) / n
    assert abs(np.mean(found) - expected) < 4 * error
