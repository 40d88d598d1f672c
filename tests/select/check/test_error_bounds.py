"""Divergences and bounds by the printed formulas, and by viabel."""

import math

import numpy as np
import pytest
from check_oracles import chi_square, divergence_bound, viabel_diagnostics, wasserstein
from scipy import stats

from numpyro_tempered.infer.moments import LocationScale
from numpyro_tempered.select.check import moments
from numpyro_tempered.select.check.divergence import divergences, smooth


def gaussian_moments(mean, variance):
    return coordinates(np.array([mean]), np.array([variance]))


def coordinates(mean, variance):
    """Moments of coordinates of a Gaussian."""
    every = np.ones(len(mean), bool)
    return moments.Moments(
        mean, variance, 2.0 * variance**2, every, np.arange(len(mean)), every
    )


def log_ratios(x, mean=0.1, variance=0.81):
    """Of N(0, 1) and N(mean, variance)."""
    return -0.5 * x**2 + 0.5 * (x - mean) ** 2 / variance + 0.5 * math.log(variance)


def test_the_known_answer_of_two_normals():
    # Posterior N(0, 1), q = N(.1, .81): the numbers of Huggins et al.'s bounds without their factor of 2.
    chi2 = chi_square(0.0, 1.0, 0.1, 0.81)
    assert chi2 == pytest.approx(0.0454, abs=5e-5)
    assert math.log1p(chi2) == pytest.approx(0.0444, abs=5e-5)
    chi, q = math.sqrt(chi2), gaussian_moments(0.1, 0.81)
    assert moments.bound_mean(q, chi, q)[0] == pytest.approx(0.1918, abs=5e-5)
    assert moments.bound_variance(q, chi, q)[0] == pytest.approx(0.2809, abs=5e-5)
    assert moments.bound_wasserstein(0.81, 3 * 0.81**2, chi)[0] == pytest.approx(
        0.1918, abs=5e-5
    )


def test_divergences_by_quadrature_of_the_weights():
    # A rule of equal weights: the quantiles of q.
    x = stats.norm(0.1, 0.9).ppf((np.arange(1_000_000) + 0.5) / 1_000_000)
    result, weights = divergences(log_ratios(x))
    chi2 = chi_square(0.0, 1.0, 0.1, 0.81)
    assert 2.0 * result.cubo == pytest.approx(math.log1p(chi2), abs=1e-4)
    kl = 0.5 * (0.81 + 0.01 - 1.0 - math.log(0.81))
    assert result.elbo == pytest.approx(-kl, abs=1e-4)
    assert result.log_evidence == pytest.approx(0.0, abs=1e-3)
    assert result.d2 == pytest.approx(math.log1p(chi2), abs=2e-3)
    assert result.d2_bound == pytest.approx(divergence_bound(log_ratios(x)), abs=1e-12)
    assert weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("shift", [0.0, 1e5, -1e5])
def test_a_constant_of_the_joint_density_changes_no_distance(shift):
    x = np.random.default_rng(0).normal(0.1, 0.9, 4000)
    plain, shifted = (
        divergences(log_ratios(x))[0],
        divergences(log_ratios(x) + shift)[0],
    )
    assert shifted.elbo - shift == pytest.approx(plain.elbo, abs=1e-9)
    assert shifted.d2_bound == pytest.approx(plain.d2_bound, abs=1e-9)
    assert shifted.d2 == pytest.approx(plain.d2, abs=1e-9)


def test_bounds_beside_viabel_on_the_same_draws():
    viabel = viabel_diagnostics()
    if viabel is None:
        pytest.skip("viabel is not installed")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 3)) @ np.diag([1.0, 0.9, 0.8]) + 0.05
    ratios = (-0.5 * x**2 + 0.5 * ((x - 0.05) / [1.0, 0.9, 0.8]) ** 2).sum(1)
    result, _ = divergences(ratios)
    theirs = viabel.all_diagnostics(ratios, samples=x)
    assert result.d2_bound == pytest.approx(theirs["d2"], abs=1e-6)
    w1, w2 = moments.bound_wasserstein(*moments.norms(x, None), result.chi)
    assert w1 == pytest.approx(theirs["W1"] / 2.0, rel=1e-9)
    # Theirs has the constant 2 for sqrt(2), and a sum of fourth powers for the power of a sum.
    assert w2 != pytest.approx(theirs["W2"], rel=0.01)


def test_w2_holds_where_a_sum_of_fourth_powers_does_not():
    # Of many equal coordinates E |x - m|^4 grows as d^2, and the sum of fourth powers as d.
    dim, scale = 50, 0.98
    cov = scale**2 * np.eye(dim)
    chi = math.sqrt(chi_square(np.zeros(dim), np.eye(dim), np.zeros(dim), cov))
    distance = wasserstein(np.zeros(dim), np.eye(dim), np.zeros(dim), cov)
    assert distance == pytest.approx(math.sqrt(dim) * (1.0 - scale))
    assert (
        distance
        <= moments.bound_wasserstein(
            *moments.norms(None, LocationScale(np.zeros(len(cov)), cov)), chi
        )[1]
    )
    # With less chi, as of a posterior that differs in one direction, theirs is below what the theorem says.
    assert (
        2.0 * (3.0 * dim * scale**4) ** 0.25
        < math.sqrt(2.0)
        * moments.norms(None, LocationScale(np.zeros(len(cov)), cov))[1] ** 0.25
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_below_the_error_of_a_gaussian(seed):
    rng = np.random.default_rng(seed)
    dim = rng.integers(1, 5)
    root = np.linalg.cholesky(
        np.cov(rng.normal(size=(dim, 3 * dim + 3))).reshape(dim, dim)
        + 0.3 * np.eye(dim)
    )
    q_cov = root @ root.T
    p_mean = 0.3 * root @ rng.normal(size=dim)
    p_cov = root @ np.diag(rng.uniform(0.6, 1.3, dim)) @ root.T
    chi = math.sqrt(chi_square(p_mean, p_cov, np.zeros(dim), q_cov))
    variance = np.diag(q_cov)
    q = coordinates(np.zeros(dim), variance)
    assert np.all(np.abs(p_mean) <= moments.bound_mean(q, chi, q) + 1e-12)
    bound = moments.bound_variance(q, chi, q)
    assert np.all(np.abs(np.diag(p_cov) - variance) <= bound + 1e-12)
    sd_error = np.abs(np.sqrt(np.diag(p_cov)) - np.sqrt(variance))
    assert np.all(sd_error <= moments.bound_sd(variance, bound) + 1e-12)
    assert wasserstein(p_mean, p_cov, np.zeros(dim), q_cov) <= (
        moments.bound_wasserstein(
            *moments.norms(None, LocationScale(np.zeros(len(q_cov)), q_cov)), chi
        )[1]
        + 1e-9
    )
    draws = rng.normal(size=(20_000, dim)) @ root.T
    error = np.abs(p_cov - q_cov)
    assert np.all(error <= 1.1 * moments.bound_covariance(draws, q, chi) + 1e-12)
    # Through another one the bound is wider, and holds.
    r_cov = 1.2 * p_cov
    chi = math.sqrt(chi_square(p_mean, p_cov, p_mean, r_cov))
    r = coordinates(p_mean, np.diag(r_cov))
    assert np.all(np.abs(p_mean) <= moments.bound_mean(r, chi, q) + 1e-12)
    assert np.all(
        np.abs(np.diag(p_cov) - variance) <= moments.bound_variance(r, chi, q) + 1e-12
    )


def test_w2_of_gaussians():
    rng = np.random.default_rng(3)
    one, two = (np.cov(rng.normal(size=(3, 9))) for _ in range(2))
    here = moments.wasserstein(np.zeros(3), one, np.ones(3), two)
    assert here == pytest.approx(
        wasserstein(np.zeros(3), one, np.ones(3), two), rel=1e-9
    )


def test_corrected_moments_are_those_of_the_posterior():
    rng = np.random.default_rng(4)
    x = rng.normal(0.1, 0.9, (20_000, 1))
    _, weights = divergences(log_ratios(x[:, 0]))
    for q in (moments.of_draws(x), gaussian_moments(0.1, 0.81)):
        corrected = moments.corrected(x, weights, q)
        assert abs(corrected.mean[0]) < 4.0 * corrected.mean_se[0] < 0.05
        assert abs(corrected.sd[0] - 1.0) < 4.0 * corrected.sd_se[0] < 0.05
    # Of draws alone it is the weighted mean; where q is known, what is known has no error.
    plain = moments.corrected(x, weights, moments.of_draws(x))
    assert plain.mean[0] == pytest.approx(weights @ x[:, 0])
    assert plain.mean_se[0] == pytest.approx(
        np.sqrt(weights**2 @ (x[:, 0] - plain.mean[0]) ** 2)
    )
    assert corrected.mean_se[0] < 0.5 * plain.mean_se[0]
    same = moments.corrected(
        x, np.full(len(x), 1.0 / len(x)), gaussian_moments(0.1, 0.81)
    )
    assert (same.mean[0], same.mean_se[0]) == pytest.approx((0.1, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    ("variance", "low", "high"),
    [(0.3, 0.5, 0.9), (0.81, 0.05, 0.4), (1.5, -np.inf, 0.0)],
)
def test_pareto_k_of_normals(variance, low, high):
    # E w^r is finite for r < 1 / (1 - variance): the shape of the tail is 1 - variance.
    x = np.random.default_rng(5).normal(0.0, math.sqrt(variance), 4000)
    log_weights, k = smooth(log_ratios(x, 0.0, variance))
    assert low < k < high
    assert np.exp(log_weights).sum() == pytest.approx(1.0)


def test_equal_weights_have_no_tail():
    rounding = 1e-6 * np.random.default_rng(6).normal(size=1000)
    for ratios in (
        np.zeros(1000),
        np.full(1000, -3e4),
        rounding,
        np.r_[np.full(10, -np.inf), np.zeros(990)],
    ):
        log_weights, k = smooth(ratios)
        assert k == -np.inf
        assert np.exp(log_weights).sum() == pytest.approx(1.0)
