"""Bounds on the risk: their formulas, their level, and their wrong uses."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import gammaln, rel_entr
from scipy.stats import binom, norm

from numpyro_tempered import bounds
from numpyro_tempered.theory.bounds.pac_bayes import invert_kl


def binary_kl(p, q):
    return rel_entr(p, q) + rel_entr(1 - p, 1 - q)


def inverse(p, budget):
    """By Brent's method on (p, 1)."""
    edge = 1.0 - 1e-15
    if binary_kl(p, edge) <= budget:
        return 1.0
    return (
        brentq(lambda q: binary_kl(p, q) - budget, p, edge, xtol=1e-14)
        if budget > 0
        else p
    )


# The formulas.


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.03, 0.4, 0.999, 1.0])
@pytest.mark.parametrize("budget", [0.0, 1e-9, 1e-3, 0.2, 3.0])
def test_the_inverse_is_that_of_brent_and_from_above(p, budget):
    q = float(invert_kl(p, budget))
    np.testing.assert_allclose(q, inverse(p, budget), rtol=1e-9, atol=2e-8)
    # No smaller than what kl says, to the rounding of kl itself.
    assert q >= 1.0 - 1e-15 or binary_kl(p, q) >= budget - 1e-15


def test_without_errors_the_inverse_has_a_closed_form():
    np.testing.assert_allclose(invert_kl(0.0, 0.3), -math.expm1(-0.3), rtol=1e-13)


def test_the_value_is_the_inverse_of_the_theorem():
    certificate = bounds.pac_bayes(0.05, 12.0, 569, delta=0.1)
    budget = (12.0 + math.log(2.0 * math.sqrt(569) / 0.1)) / 569
    np.testing.assert_allclose(certificate.value, inverse(0.05, budget), rtol=1e-12)
    np.testing.assert_allclose(certificate.complexity, budget, rtol=1e-14)
    assert (
        certificate.delta,
        certificate.estimate,
        certificate.inverse_temperature,
    ) == (0.1, False, None)
    assert certificate.empirical_bound == certificate.empirical_risk == 0.05


def test_the_constant_of_the_theorem_bounds_the_moment_for_few_data_too():
    """E exp(n kl(mean, p)) of n coins is sum_k C(n,k) (k/n)^k (1-k/n)^(n-k) for every p: at most 2 sqrt(n)."""
    for n in range(1, 200):
        k = np.arange(n + 1)
        choose = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        total = np.exp(
            choose + n * (rel_entr(k / n, 1.0) + rel_entr(1 - k / n, 1.0))
        ).sum()
        assert total <= 2.0 * math.sqrt(n) * (1 + 1e-12), n


def test_draws_are_paid_for_first():
    certificate = bounds.pac_bayes(
        0.05, 12.0, 569, num_draws=1000, delta_draws=0.02, grid_size=4
    )
    expected = inverse(0.05, math.log(2 * 4 / 0.02) / 1000)
    np.testing.assert_allclose(certificate.empirical_bound, expected, rtol=1e-12)
    np.testing.assert_allclose(
        certificate.value, bounds.pac_bayes(expected, 12.0, 569).value, rtol=1e-12
    )
    np.testing.assert_allclose(certificate.delta, 0.07)
    assert any("1000 draws" in text for text in certificate.assumptions)
    assert any("4 posteriors" in text for text in certificate.assumptions)


def test_catoni_is_the_formula_at_its_best_inverse_temperature():
    lambdas = np.array([50.0, 300.0, 2000.0])
    certificate = bounds.pac_bayes(
        0.05, 12.0, 569, method="catoni", inverse_temperature=lambdas
    )
    spent = (12.0 + math.log(3 / 0.05)) / 569
    each = (1 - np.exp(-lambdas * 0.05 / 569 - spent)) / (1 - np.exp(-lambdas / 569))
    np.testing.assert_allclose(certificate.value, each.min(), rtol=1e-12)
    assert certificate.inverse_temperature == lambdas[each.argmin()]
    coupled = bounds.pac_bayes(
        0.05, 12.0, 569, method="catoni", inverse_temperature=300.0, grid_size=3
    )
    np.testing.assert_allclose(coupled.value, each[1], rtol=1e-12)


def test_catoni_at_most_costs_what_hoeffding_does():
    """Its linear form, risk + (KL + log 1/delta)/lambda + lambda/(8n), is larger at each lambda."""
    lambdas = np.geomspace(1.0, 5000.0, 40)
    for value in lambdas:
        certificate = bounds.pac_bayes(
            0.2, 3.0, 500, method="catoni", inverse_temperature=value
        )
        assert (
            certificate.value
            <= min(0.2 + (3.0 + math.log(20)) / value + value / 4000, 1.0) + 1e-12
        )


@settings(deadline=None, max_examples=30)
@given(
    risk=st.floats(0.0, 1.0),
    kl=st.floats(0.0, 50.0),
    low=st.floats(-5.0, 5.0),
    width=st.floats(0.1, 10.0),
)
def test_losses_are_scaled_to_the_unit_interval(risk, kl, low, width):
    one = bounds.pac_bayes(risk, kl, 200)
    inside = min(max(low + width * risk, low), low + width)
    other = bounds.pac_bayes(inside, kl, 200, lower=low, upper=low + width)
    np.testing.assert_allclose((other.value - low) / width, one.value, atol=1e-6)
    assert other.value >= inside - 1e-12
    assert other.is_vacuous == (other.value >= low + width)


def test_arrays_broadcast_and_priors_are_weighted():
    certificate = bounds.pac_bayes(
        [0.05, 0.1], [12.0, 3.0], 569, log_prior=np.log([0.5, 0.25])
    )
    single = [
        bounds.pac_bayes(r, k - w, 569).value
        for r, k, w in zip([0.05, 0.1], [12.0, 3.0], np.log([0.5, 0.25]), strict=True)
    ]
    np.testing.assert_allclose(certificate.value, single, rtol=1e-13)
    grid = bounds.pac_bayes(
        [0.05, 0.1], 3.0, 569, method="catoni", inverse_temperature=[100.0, 500.0]
    )
    assert grid.value.shape == grid.inverse_temperature.shape == (2,)


def test_a_bound_that_says_nothing_says_so():
    certificate = bounds.pac_bayes(0.3, 5000.0, 100)
    assert certificate.is_vacuous
    assert certificate.value <= 1.0
    assert (
        bounds.pac_bayes(
            0.9, 5000.0, 100, method="catoni", inverse_temperature=10.0
        ).value
        == 1.0
    )
    assert not bounds.pac_bayes(0.3, 5.0, 100).is_vacuous


def test_an_estimate_is_called_one():
    certificate = bounds.pac_bayes(0.05, 12.0, 569, estimate=True)
    assert certificate.estimate
    assert any("certifies nothing" in text for text in certificate.assumptions)


# Their level.


def test_draws_fail_as_seldom_as_they_should():
    """Exactly: the worst losses are coins, and the average of m of them is binomial."""
    for m in (5, 60, 400):
        k = np.arange(m + 1)
        for grid_size in (1, 5):
            bound = bounds.pac_bayes(
                k / m, 0.0, 10, num_draws=m, delta_draws=0.1, grid_size=grid_size
            )
            for p in np.linspace(0.01, 0.99, 23):
                failure = binom.pmf(k, m, p)[bound.empirical_bound < p].sum()
                assert 1 - (1 - failure) ** grid_size <= 0.1


def test_the_best_of_many_predictors_is_covered_and_not_without_its_kl():
    """A million predictors that all guess: the best on the data has KL log(10^6) and risk 1/2."""
    number = 1e6
    uniform = np.random.default_rng(0).uniform(size=800)
    best = binom.ppf(-np.expm1(np.log1p(-uniform) / number), 100, 0.5) / 100
    certified = bounds.pac_bayes(best, math.log(number), 100).value
    free = bounds.pac_bayes(best, 0.0, 100).value
    assert np.mean(certified < 0.5) <= 0.05
    assert np.mean(free < 0.5) > 0.5
    lambdas = bounds.pac_bayes(
        best,
        math.log(number),
        100,
        method="catoni",
        inverse_temperature=[50.0, 100.0, 200.0],
    )
    assert np.mean(lambdas.value < 0.5) <= 0.05


def location_risks(rng, num_data, alpha, repetitions):
    """Loss 1{|x - theta| > 1}, x ~ N(.5, 1), theta ~ N(0, 1) tempered: risk of the data, risk, KL."""
    x = rng.normal(0.5, 1.0, size=(repetitions, num_data))
    v = 1 / (1 + alpha * num_data)
    m = v * alpha * x.sum(axis=1)

    def outside(gap, sd):
        return 1 - norm.cdf((1 - gap) / sd) + norm.cdf((-1 - gap) / sd)

    empirical = outside(x - m[:, None], math.sqrt(v)).mean(axis=1)
    risk = outside(0.5 - m, math.sqrt(1 + v))
    return empirical, risk, 0.5 * (v + m**2 - 1 - math.log(v))


@pytest.mark.parametrize("alpha", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("num_data", [20, 200])
def test_the_true_risk_of_a_location_model_is_covered(num_data, alpha):
    empirical, risk, kl = location_risks(np.random.default_rng(1), num_data, alpha, 500)
    for delta in (0.05, 0.5):
        value = bounds.pac_bayes(empirical, kl, num_data, delta=delta).value
        assert np.mean(value < risk) <= delta
        catoni = bounds.pac_bayes(
            empirical,
            kl,
            num_data,
            delta=delta,
            method="catoni",
            inverse_temperature=num_data,
        ).value
        assert np.mean(catoni < risk) <= delta
    # The data are no bound by themselves.
    assert np.mean(empirical < risk) > 0.3


def test_the_tempered_posterior_has_the_smallest_bound_at_its_inverse_temperature():
    rng = np.random.default_rng(2)
    prior, losses, n, alpha = rng.dirichlet(np.ones(30)), rng.uniform(size=30), 200, 0.3
    tempered = prior * np.exp(-alpha * n * losses)
    tempered /= tempered.sum()

    def bound(q):
        return bounds.pac_bayes(
            q @ losses,
            rel_entr(q, prior).sum(),
            n,
            method="catoni",
            inverse_temperature=alpha * n,
        ).value

    least = bound(tempered)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(50):
            other = tempered * np.exp(size * rng.normal(size=30))
            assert bound(other / other.sum()) > least
    for other_alpha in (0.2, 0.4):
        other = prior * np.exp(-other_alpha * n * losses)
        assert bound(other / other.sum()) > least


# Wrong uses.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"empirical_risk": 1.2}, "empirical_risk must be in"),
        ({"empirical_risk": math.nan}, "empirical_risk"),
        ({"kl": -1.0}, r"kl must be.*guide with a scale"),
        ({"kl": math.inf}, r"^kl must be at.*fit a guide with a scale"),
        ({"num_data": 0}, "num_data"),
        ({"upper": 0.0}, r"^upper must be in.*bounded losses"),
        ({"upper": math.inf}, "upper"),
        ({"delta": 1.0}, "delta"),
        ({"num_draws": 0}, "num_draws"),
        ({"num_draws": 10, "delta_draws": 0.0}, "delta_draws"),
        ({"num_draws": 10, "delta_draws": 0.6, "delta": 0.5}, "either fails"),
        ({"grid_size": 0}, "grid_size"),
        ({"log_prior": 0.5}, "log_prior"),
        ({"method": "hoeffding"}, "method"),
        ({"method": "catoni"}, r"needs it.*has none. Got"),
        ({"inverse_temperature": 10.0}, "has none"),
        (
            {"method": "catoni", "inverse_temperature": 0.0},
            r"inverse_temperature.*positive and finite, got",
        ),
        ({"method": "catoni", "inverse_temperature": [[1.0]]}, "shape"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    arguments = {"empirical_risk": 0.1, "kl": 3.0, "num_data": 100} | options
    with pytest.raises(ValueError, match=words):
        bounds.pac_bayes(**arguments)
