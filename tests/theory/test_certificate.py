"""Certificates: their formula, their level in simulation, and their invalid uses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from certificate_oracles import (
    beta_bernoulli_log_evidence,
    divergence_of_discrete,
    gamma_poisson_log_evidence,
    location_divergence,
    location_expectations,
    location_log_evidence,
    location_posterior,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions import constraints
from numpyro.distributions.transforms import SigmoidTransform
from numpyro.infer.autoguide import AutoNormal
from scipy.special import digamma, polygamma
from scipy.stats import beta, binom, chi2, gamma, norm, poisson

import numpyro_tempered as nt
from numpyro_tempered import bounds
from numpyro_tempered.infer.svi import finish
from numpyro_tempered.report.arviz import group

PRIOR_SD, MEAN = 1.0, 0.5
NUM_SEEDS = [100, pytest.param(1000, marks=pytest.mark.slow)]


# The formula.


def test_the_value_is_the_formula_and_the_sum_of_its_terms():
    certificate = bounds.tempered_certificate(
        -170.0, bounds.known_density(-300.0), 200, alpha=0.4, delta=0.1
    )
    np.testing.assert_allclose(
        certificate.value,
        (-0.4 * 300.0 + 170.0 + math.log(10.0)) / (200 * 0.6),
        rtol=1e-14,
    )
    np.testing.assert_allclose(certificate.fit, 50.0 / 120.0, rtol=1e-14)
    np.testing.assert_allclose(
        certificate.confidence, math.log(10.0) / 120.0, rtol=1e-14
    )
    assert certificate.selection == certificate.monte_carlo == certificate.se == 0.0
    assert (certificate.alpha, certificate.delta, certificate.selected) == (
        0.4,
        0.1,
        None,
    )


def test_monte_carlo_errors_and_weights_are_paid_for():
    exact = bounds.tempered_certificate(
        -170.0, bounds.known_density(-300.0), 200, alpha=0.5
    )
    noisy = bounds.tempered_certificate(
        -170.0,
        bounds.known_density(-300.0),
        200,
        alpha=0.5,
        elbo_se=0.2,
        log_prior=-1.5,
    )
    np.testing.assert_allclose(noisy.se, 0.2 / 100.0)
    np.testing.assert_allclose(noisy.monte_carlo, 0.6 / 100.0)
    np.testing.assert_allclose(noisy.selection, 1.5 / 100.0)
    np.testing.assert_allclose(noisy.value, exact.value + 2.1 / 100.0)
    extra = set(noisy.assumptions) - set(exact.assumptions)
    assert any("3 standard errors" in text for text in extra)
    assert any("weights b_K were fixed" in text for text in extra)
    unmoved = bounds.tempered_certificate(
        -170.0, bounds.known_density(-300.0), 200, alpha=0.5, elbo_se=0.2, num_se=0.0
    )
    assert unmoved.value == exact.value


def test_a_grid_of_alphas_costs_the_log_of_its_size():
    alphas, elbos = np.array([0.25, 0.5, 0.75]), np.array([-90.0, -165.0, -240.0])
    grid = bounds.tempered_certificate(
        elbos, bounds.known_density(-300.0), 200, alpha=alphas, delta=0.05
    )
    exact = (alphas * -300.0 - elbos + math.log(3 / 0.05)) / (200 * (1 - alphas))
    np.testing.assert_allclose(grid.value, exact, rtol=1e-13)
    one = bounds.tempered_certificate(
        -165.0, bounds.known_density(-300.0), 200, alpha=0.5, grid_size=3
    )
    np.testing.assert_allclose(one.value, grid.value[1], rtol=1e-14)
    assert any("alpha is one of 3 values" in text for text in grid.assumptions)
    assert not any(
        "alpha is one of" in text for text in one._replace(assumptions=()).assumptions
    )


def test_selection_is_the_certificate_of_the_largest_penalised_elbo():
    elbos, log_prior = np.array([-170.0, -160.0, -159.5]), np.log([0.5, 0.25, 0.125])
    chosen = bounds.selection_certificate(
        elbos,
        log_prior,
        bounds.known_density(-300.0),
        200,
        alpha=0.5,
        delta=0.05,
        elbo_se=[0.0, 0.1, 0.2],
    )
    assert chosen.selected == 1
    exact = (-150.0 + 160.0 + math.log(4.0) + math.log(20.0) + 0.3) / 100.0
    np.testing.assert_allclose(chosen.value, exact, rtol=1e-13)
    np.testing.assert_allclose(
        chosen.value,
        chosen.fit + chosen.selection + chosen.confidence + chosen.monte_carlo,
    )
    alone = bounds.selection_certificate(
        [-160.0], [0.0], bounds.known_density(-300.0), 200, alpha=0.5
    )
    assert (
        alone.value
        == bounds.tempered_certificate(
            -160.0, bounds.known_density(-300.0), 200, alpha=0.5
        ).value
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"alpha": 1.0},
            r"^a certificate.*needs alpha in \(0, 1\), got 1.0.*nothing at 1.*alpha below 1",
        ),
        ({"alpha": 0.0}, r"^a certificate.*needs alpha in.*Fit with alpha below"),
        (
            {"alpha": [0.5, 1.0]},
            r"^a certificate.*needs alpha in.*Fit with alpha below",
        ),
        ({"alpha": math.nan}, r"^a certificate.*needs alpha in.*Fit with alpha below"),
        ({"alpha": []}, r"^a certificate.*needs alpha in.*Fit with alpha below"),
        (
            {"delta": 0.0},
            r"delta must be in \(0, 1\), got 0.0. It is a probability of failure",
        ),
        ({"delta": 1.0}, "delta"),
        ({"num_data": 0}, "num_data must be an integer of at least 1"),
        ({"num_data": 2.5}, "num_data"),
        ({"num_data": True}, "num_data"),
        ({"elbo": math.nan}, r"elbo must be finite.*has an ELBO of"),
        (
            {"elbo": -math.inf},
            r"^elbo must be finite,.*A guide that is a point.*has an ELBO of",
        ),
        ({"elbo_se": -0.1}, r"elbo_se must be at least 0.*and finite, got"),
        ({"elbo_se": math.nan}, r"elbo_se must be at least 0.*and finite, got"),
        ({"num_se": -1.0}, r"num_se must be at least 0.*and finite, got"),
        ({"log_prior": 0.5}, r"weights in \(0, 1\]"),
        ({"log_prior": -math.inf}, r"weights in \(0, 1\]"),
        (
            {"grid_size": 0},
            r"grid_size must be an integer of at least 1.*alphas that were tried",
        ),
        (
            {"alpha": [0.2, 0.5], "grid_size": 1},
            "grid_size must be an integer of at least 2.*counts the alphas",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {
        "elbo": -100.0,
        "log_p0": bounds.known_density(-150.0),
        "num_data": 100,
        "alpha": 0.5,
    } | change
    with pytest.raises(ValueError, match=message):
        bounds.tempered_certificate(**arguments)


def test_a_bare_log_density_is_refused():
    with pytest.raises(
        TypeError,
        match=r"say where it comes from, got float: pass known_density\(value\)",
    ):
        bounds.tempered_certificate(-100.0, -150.0, 100, alpha=0.5)


@pytest.mark.parametrize(
    ("elbos", "log_prior", "alpha", "message"),
    [
        ([-1.0, -2.0], [-1.0], 0.5, r"^elbos and.*one entry for each model"),
        ([], [], 0.5, r"^elbos and.*one entry for each model"),
        (-1.0, 0.0, 0.5, r"^elbos and.*one entry for each model"),
        (
            [-1.0, -2.0],
            [0.0, 0.0],
            0.5,
            r"^the prior weights.*sum to 2, more than 1.*sum to at most",
        ),
        (
            [-1.0, -2.0],
            [0.5, 0.5],
            0.5,
            r"^the prior weights.*sum to 3.29744, more than 1.*sum to at most",
        ),
        (
            [-1.0, -2.0],
            [math.nan, -1.0],
            0.5,
            r"^the prior weights.*more than 1.*sum to at most",
        ),
        (
            [-1.0, -2.0],
            [-1.0, -1.0],
            [0.5, 0.6],
            r"^all models share.*one alpha.*a grid, with its",
        ),
    ],
)
def test_bad_models_are_refused(elbos, log_prior, alpha, message):
    with pytest.raises(ValueError, match=message):
        bounds.selection_certificate(
            elbos, log_prior, bounds.known_density(-5.0), 10, alpha=alpha
        )


# The sources of log p0(X).


def test_sources_and_conditions_reach_the_certificate():
    for log_p0, words, only in (
        (bounds.known_density(-3.0), "the value given", False),
        (
            bounds.empirical_entropy([0, 1, 1]),
            "discrete, independent and identically",
            False,
        ),
        (bounds.maximum_likelihood(-3.0), "the model is well specified", True),
    ):
        certificate = bounds.tempered_certificate(-5.0, log_p0, 3, alpha=0.5)
        assert certificate.source == log_p0.source
        assert words in certificate.valid_only_if
        assert certificate.well_specified_only is only
        assert set(log_p0.assumptions) < set(certificate.assumptions)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=6).filter(
        lambda counts: sum(counts) > 0
    ),
    st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
)
def test_empirical_entropy_is_above_every_log_density(counts, weights):
    counts, p0 = np.array(counts), np.array(weights[: len(counts)])
    found = bounds.empirical_entropy(counts=counts).value
    assert found >= np.sum(counts * np.log(p0 / p0.sum())) - 1e-10
    seen = counts[counts > 0]
    np.testing.assert_allclose(
        found, np.sum(seen * np.log(seen / seen.sum())), rtol=1e-12, atol=1e-12
    )
    data = np.repeat(np.arange(len(counts)), counts)
    np.testing.assert_allclose(
        bounds.empirical_entropy(data).value, found, rtol=1e-12, atol=1e-12
    )


def test_empirical_entropy_of_rows_words_and_whole_floats():
    rows = np.array([[0, 1], [1, 0], [0, 1], [1, 1]])
    exact = 2 * math.log(0.5) + 2 * math.log(0.25)
    for data in (
        rows,
        rows.astype(float),
        np.array(["b", "a", "b", "c"]),
        jnp.array([3, 1, 3, 2]),
    ):
        np.testing.assert_allclose(
            bounds.empirical_entropy(data).value, exact, rtol=1e-14
        )


def test_empirical_entropy_costs_half_a_nat_for_each_free_probability():
    # Twice the excess over log p0(X) is asymptotically chi-squared with k - 1 degrees of freedom.
    rng, p0, number = np.random.default_rng(0), np.array([0.4, 0.3, 0.2, 0.1]), 4000
    counts = rng.multinomial(2000, p0, size=number)
    found = np.array([bounds.empirical_entropy(counts=row).value for row in counts])
    excess = found - counts @ np.log(p0)
    assert abs(excess.mean() - 1.5) < 5 * excess.std() / math.sqrt(number)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bounds.empirical_entropy(), TypeError, "one of the two"),
        (
            lambda: bounds.empirical_entropy([1], counts=[1]),
            TypeError,
            "one of the two",
        ),
        (
            lambda: bounds.empirical_entropy([0.5, 1.0]),
            ValueError,
            r"not whole numbers.*all the same",
        ),
        (
            lambda: bounds.empirical_entropy([math.nan, 1.0]),
            ValueError,
            r"not whole numbers.*all the same",
        ),
        (
            lambda: bounds.empirical_entropy([]),
            ValueError,
            r"^the data must have.*not be empty",
        ),
        (
            lambda: bounds.empirical_entropy(3),
            ValueError,
            r"shape \(n,\) or \(n, d\).*not be empty, got",
        ),
        (
            lambda: bounds.empirical_entropy(counts=[-1, 2]),
            ValueError,
            r"none negative.*and not all",
        ),
        (
            lambda: bounds.empirical_entropy(counts=[0, 0]),
            ValueError,
            r"^counts must be whole.*not all 0",
        ),
        (
            lambda: bounds.empirical_entropy(counts=[0.5, 1]),
            ValueError,
            r"whole numbers.*and not all",
        ),
        (
            lambda: bounds.known_density(math.nan),
            ValueError,
            "value must be finite, got nan",
        ),
        (
            lambda: bounds.maximum_likelihood(math.inf),
            ValueError,
            "value must be finite, got inf",
        ),
    ],
)
def test_sources_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# The level, exactly.


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_level_by_enumeration_for_the_worst_posterior(alpha, delta):
    """Bernoulli data, a prior on nine points: every data set, and the rho that the bound is sharpest for."""
    n, truth = 12, 0.35
    theta, prior = np.linspace(0.1, 0.9, 9), np.full(9, 1 / 9)
    ones = np.arange(n + 1)
    p0 = binom.pmf(ones, n, truth)
    log_truth = ones * np.log(truth) + (n - ones) * np.log(1 - truth)
    log_lik = ones[:, None] * np.log(theta) + (n - ones[:, None]) * np.log(1 - theta)
    divergence = divergence_of_discrete(
        alpha, np.stack([theta, 1 - theta], axis=-1), np.array([truth, 1 - truth])
    )
    exponent = alpha * (log_lik - log_truth[:, None]) + n * (1 - alpha) * divergence
    evidence = np.exp(exponent) @ prior
    # The theorem's identity; Markov's inequality is all that is lost.
    np.testing.assert_allclose(p0 @ evidence, 1.0, rtol=1e-12)
    worst = np.exp(exponent) * prior / evidence[:, None]
    elbo = np.sum(worst * (alpha * log_lik - np.log(worst / prior)), axis=-1)
    bound = [
        bounds.tempered_certificate(
            e, bounds.known_density(value), n, alpha=alpha, delta=delta
        ).value
        for e, value in zip(elbo, log_truth, strict=True)
    ]
    failed = worst @ divergence > np.array(bound)
    np.testing.assert_array_equal(failed, evidence > 1 / delta)
    assert p0 @ failed <= delta
    assert failed.any() or delta < 0.1


def cells(h):
    """P0 with three events of probability h, and two densities on them; the middle one is common to both."""
    p0 = np.array([h, h, h, 1 - 3 * h])
    faint = math.exp(-12.0)
    p = np.array([[1.0, faint, 0.0, 0.0], [0.0, faint, 1.0, 0.0]])
    return p0, p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("union", [True, False])
def test_a_grid_of_alphas_without_the_union_bound_fails(union):
    """An alpha near 0 finds the common event, one near 1 the two others: one datum, all in closed form."""
    delta, alphas, (p0, p) = 0.05, np.array([0.001, 0.9]), cells(0.024)
    failed = []
    for alpha in alphas:
        divergence = bounds.renyi_discrete(alpha, p, p0)
        for point in range(3):
            with np.errstate(divide="ignore"):
                exponent = (
                    alpha * np.log(p[:, point] / p0[point]) + (1 - alpha) * divergence
                )
            rho = 0.5 * np.exp(exponent)
            rho = rho / rho.sum()
            held = rho > 0
            elbo = np.sum(
                rho[held] * (alpha * np.log(p[held, point]) - np.log(rho[held] / 0.5))
            )
            certificate = bounds.tempered_certificate(
                elbo,
                bounds.known_density(np.log(p0[point])),
                1,
                alpha=alpha,
                delta=delta,
                grid_size=2 if union else 1,
            )
            failed.append(rho @ divergence > certificate.value)
    failed = np.array(failed).reshape(2, 3)
    each, together = failed @ p0[:3], failed.any(axis=0) @ p0[:3]
    assert np.all(each <= delta)
    if union:
        assert together <= delta
    else:
        np.testing.assert_allclose(together, 0.072, rtol=1e-12)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_best_of_many_certificates_without_the_weights_fails(weighted):
    """Twelve models of one distribution each, concentrated on disjoint events of probability just below delta."""
    delta, number, alpha = 0.05, 12, 0.5
    h = 0.999 * delta
    p0 = np.append(np.full(number, h), 1 - number * h)
    p = np.eye(number, number + 1)
    divergence = bounds.renyi_discrete(alpha, p, p0)
    np.testing.assert_allclose(divergence, -math.log(h), rtol=1e-12)
    log_prior = np.full(number, -math.log(number) if weighted else 0.0)
    failed = []
    for point in range(number):
        # A model that excludes the datum has an ELBO of -inf; the largest one decides.
        elbos = np.where(p[:, point] > 0, 0.0, -1e6)
        log_p0 = bounds.known_density(math.log(h))
        if weighted:
            certificate = bounds.selection_certificate(
                elbos, log_prior, log_p0, 1, alpha=alpha, delta=delta
            )
            best = certificate.selected
        else:
            best = int(np.argmax(elbos))
            certificate = bounds.tempered_certificate(
                elbos[best], log_p0, 1, alpha=alpha, delta=delta
            )
        assert best == point
        failed.append(divergence[best] > certificate.value)
    failure = np.array(failed) @ p0[:number]
    if weighted:
        assert failure <= delta
    else:
        np.testing.assert_allclose(failure, number * h)


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("delta", [0.5, 0.9])
def test_the_worst_posterior_fails_as_often_as_computed(num_seeds, delta):
    """Normal location: the rho that the bound is sharpest for is normal, its chance of failure closed form."""
    n, alpha, prior_sd = 8, 0.5, 1.0
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40 * num_seeds, n))
    total, squares = x.sum(axis=1), np.square(x).sum(axis=1)
    precision = prior_sd**-2 + n * alpha**2
    m, v = alpha * total / precision, 1.0 / precision
    expected_log_lik = -0.5 * (
        n * np.log(2 * np.pi) + squares - 2 * m * total + n * (m**2 + v)
    )
    kl = 0.5 * (np.log(prior_sd**2 / v) + (v + m**2) / prior_sd**2 - 1)
    elbo, log_truth = alpha * expected_log_lik - kl, norm.logpdf(x).sum(axis=1)
    # The certificate is linear in log p0(X): one call for all data sets.
    bound = bounds.tempered_certificate(
        elbo - alpha * log_truth, bounds.known_density(0.0), n, alpha=alpha, delta=delta
    )
    failed = location_divergence(m, v, alpha, 0.0, 1.0) > bound.value
    threshold = (
        (2 * math.log(1 / delta) + math.log(precision * prior_sd**2))
        * precision
        / (n * alpha**2)
    )
    exact = chi2.sf(threshold, 1)
    assert 0.01 < exact < delta
    assert abs(failed.mean() - exact) < 4 * math.sqrt(exact * (1 - exact) / failed.size)


# The level in simulation, by source.


def location_runs(rng, num_seeds, n, alpha, mean, sd):
    """Divergences, log evidences, log p0(X) and maximum log-likelihoods of normal location models."""
    x = mean + sd * rng.normal(size=(num_seeds, n))
    total, squares = x.sum(axis=1), np.square(x).sum(axis=1)
    m, v = location_posterior(total, n, alpha, PRIOR_SD)
    return (
        location_divergence(m, v, alpha, mean, sd),
        location_log_evidence(total, squares, n, alpha, PRIOR_SD),
        norm.logpdf(x, mean, sd).sum(axis=1),
        norm.logpdf(x, x.mean(axis=1, keepdims=True)).sum(axis=1),
    )


def certified(elbos, sources, n, alpha):
    return np.array(
        [
            bounds.tempered_certificate(elbo, source, n, alpha=alpha).value
            for elbo, source in zip(elbos, sources, strict=True)
        ]
    )


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize(("n", "alpha"), [(20, 0.5), (500, 0.5), (500, 0.9)])
@pytest.mark.parametrize("sd", [1.0, 2.0], ids=["well specified", "misspecified"])
def test_certificates_from_log_p0_hold(num_seeds, n, alpha, sd):
    divergence, elbo, log_truth, _ = location_runs(
        np.random.default_rng(2), num_seeds, n, alpha, MEAN, sd
    )
    bound = certified(elbo, map(bounds.known_density, log_truth), n, alpha)
    assert np.mean(divergence > bound) <= 0.05
    # Not by a bound that is always far above: on average it stays within a factor that theory knows of.
    floor = location_divergence(MEAN, 0.0, alpha, MEAN, sd)
    excess_kl = 0.5 * (sd**2 - 1 - math.log(sd**2))
    price = (0.5 * math.log1p(alpha * n) + 0.5 * MEAN**2 + math.log(20.0)) / (
        n * (1 - alpha)
    )
    assert (
        floor
        < bound.mean()
        < alpha / (1 - alpha) * excess_kl
        + price
        + 5 * bound.std() / math.sqrt(num_seeds)
    )


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("n", [20, 500])
def test_certificates_from_maximum_likelihood_hold_if_well_specified(num_seeds, n):
    divergence, elbo, log_truth, most = location_runs(
        np.random.default_rng(3), num_seeds, n, 0.5, MEAN, 1.0
    )
    assert np.all(most >= log_truth)
    bound = certified(elbo, map(bounds.maximum_likelihood, most), n, 0.5)
    assert np.mean(divergence > bound) <= 0.05


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("n", [500, 5000])
def test_certificates_from_maximum_likelihood_always_fail_if_misspecified(num_seeds, n):
    divergence, elbo, log_truth, most = location_runs(
        np.random.default_rng(4), num_seeds, n, 0.5, MEAN, 2.0
    )
    assert np.all(most < log_truth)
    bound = certified(elbo, map(bounds.maximum_likelihood, most), n, 0.5)
    assert np.all(divergence > 5 * bound)


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("n", [20, 500])
def test_certificates_from_the_empirical_entropy_hold_if_well_specified(num_seeds, n):
    alpha, truth, rng = 0.5, 0.3, np.random.default_rng(5)
    ones = rng.binomial(n, truth, size=num_seeds)
    elbo = beta_bernoulli_log_evidence(ones, n, alpha)
    sources = [bounds.empirical_entropy(counts=[k, n - k]) for k in ones]
    bound = certified(elbo, sources, n, alpha)
    levels = (np.arange(400) + 0.5) / 400
    theta = beta.ppf(levels, 1 + alpha * ones[:, None], 1 + alpha * (n - ones[:, None]))
    pairs = np.stack([theta, 1 - theta], axis=-1)
    divergence = divergence_of_discrete(
        alpha, pairs, np.array([truth, 1 - truth])
    ).mean(axis=1)
    assert np.mean(divergence > bound) <= 0.05


@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
@pytest.mark.parametrize("n", [50, 2000])
def test_certificates_from_the_empirical_entropy_hold_if_misspecified(num_seeds, n):
    """A Poisson model of counts with too many zeros: no rate is right."""
    alpha, truth, rng = (
        0.5,
        np.array([0.6, 0.05, 0.05, 0.1, 0.2]),
        np.random.default_rng(6),
    )
    counts = rng.multinomial(n, truth, size=num_seeds)
    total = counts @ np.arange(5)
    factorials = counts @ np.log([1.0, 1.0, 2.0, 6.0, 24.0])
    elbo = gamma_poisson_log_evidence(total, factorials, n, alpha)
    bound = certified(
        elbo, [bounds.empirical_entropy(counts=row) for row in counts], n, alpha
    )
    levels = (np.arange(200) + 0.5) / 200
    rates = gamma.ppf(levels, 1 + alpha * total[:, None], scale=1 / (1 + alpha * n))
    # P0 has no mass above 4: the sum ends there.
    affinity = np.sum(
        np.sqrt(poisson.pmf(np.arange(5), rates[..., None]) * truth), axis=-1
    )
    divergence = (-2 * np.log(affinity)).mean(axis=1)
    assert np.mean(divergence > bound) <= 0.05
    # No theta avoids the floor, and the bound stays above it.
    assert divergence.min() > 0.3
    most = poisson.logpmf(np.arange(5), (total / n)[:, None])
    invalid = certified(
        elbo,
        [
            bounds.maximum_likelihood(row @ logs)
            for row, logs in zip(counts, most, strict=True)
        ],
        n,
        alpha,
    )
    if n >= 500:
        assert np.all(invalid < divergence)


# Tightness.


@pytest.mark.parametrize(
    ("n", "alpha"),
    [
        (50, 0.5),
        (100, 0.5),
        (100, 0.9),
        pytest.param(10_000, 0.5, marks=pytest.mark.full),
    ],
)
def test_certificates_are_as_loose_as_computed(n, alpha):
    """Both sides' expectations are closed form for the normal location model."""
    num_seeds = 400
    divergence, elbo, log_truth, _ = location_runs(
        np.random.default_rng(7), num_seeds, n, alpha, MEAN, 1.0
    )
    bound = certified(elbo, map(bounds.known_density, log_truth), n, alpha)
    expected, slack = location_expectations(n, alpha, PRIOR_SD, MEAN)
    right = (slack + math.log(20.0)) / (n * (1 - alpha))
    for found, exact in ((divergence, expected), (bound, right)):
        assert abs(found.mean() - exact) < 4 * found.std(ddof=1) / math.sqrt(num_seeds)
    # To leading order 2 [log(1 + alpha n V²)/2 - alpha/2 + log(1/delta)] / ((1 + alpha)(1 - alpha)).
    leading = (
        2
        * (0.5 * math.log1p(alpha * n) - 0.5 * alpha + math.log(20.0))
        / (1 - alpha**2)
    )
    np.testing.assert_allclose(right / expected, leading, rtol=0.1)


# In the comparison of models.


def coin(y):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(p), obs=y)


def normal_on_the_logit(y):
    # The mean and variance of the logit under the exact posterior, Beta(7, 15).
    loc, scale = (
        digamma(7.0) - digamma(15.0),
        math.sqrt(polygamma(1, 7.0) + polygamma(1, 15.0)),
    )
    numpyro.sample(
        "p", dist.TransformedDistribution(dist.Normal(loc, scale), SigmoidTransform())
    )


@pytest.fixture(
    scope="module", params=["parameters", pytest.param("svi", marks=pytest.mark.full)]
)
def coins(request):
    y = jnp.asarray(np.array([1, 0, 0, 1, 0, 0, 0, 1, 0, 0] * 4))
    key, options = jax.random.key(0), {"num_particles": 1024}
    if request.param == "svi":
        flat = nt.fit_svi(key, coin, AutoNormal, y, alpha=0.5, **options)
    else:
        tempered = nt.temper(coin, alpha=0.5)
        flat = finish(
            (key, key),
            tempered,
            normal_on_the_logit,
            {},
            np.zeros(1),
            (y,),
            kwargs={},
            **options,
        )
    # Another model's ELBO, for what is computed from it.
    return y, {
        "flat": flat,
        "other": flat._replace(
            elbo=flat.elbo._replace(value=flat.elbo.value - 2.0, se=0.1)
        ),
    }


@pytest.mark.full
def test_compare_reports_each_models_certificate(coins):
    y, fits = coins
    log_p0 = bounds.empirical_entropy(y)
    data = nt.compare(fits, log_p0=log_p0, num_samples=5)
    found = np.asarray(data["model_comparison"]["certificate"])
    assert data["model_comparison"]["certificate"].dims == ("model",)
    for fit, value in zip(fits.values(), found, strict=True):
        right = (
            0.5 * log_p0.value
            - fit.elbo.value
            + math.log(2.0)
            + math.log(20.0)
            + 3 * fit.elbo.se
        )
        np.testing.assert_allclose(value, right / (40 * 0.5), rtol=1e-12)
    best = list(fits).index(data.attrs["selected"])
    assert data.attrs["certificate"] == found[best]
    for attrs in (data.attrs, data["model_comparison"].attrs):
        assert attrs["certificate_delta"] == 0.05
        assert attrs["certificate_log_p0"] == "empirical entropy"
        assert "identically distributed" in attrs["certificate_valid_only_if"]
    assert "certificate" in nt.table(data)
    # Of the exact posterior's evidence it is smaller.
    exact = (
        0.5 * log_p0.value
        - beta_bernoulli_log_evidence(12, 40, 0.5)
        + math.log(2.0)
        + math.log(20.0)
    )
    assert 0 < found[0] - exact / 20 < 0.02


@pytest.mark.full
def test_compare_takes_weights_delta_and_the_number_of_data(coins):
    fits = coins[1]
    weights = {"flat": math.log(0.9), "other": math.log(0.1)}
    data = nt.compare(
        fits,
        weights,
        log_p0=bounds.known_density(-30.0),
        num_data=20,
        delta=0.2,
        num_samples=5,
    )
    fit = fits["other"].elbo
    right = -15.0 - fit.value + math.log(10.0) + math.log(5.0) + 3 * fit.se
    np.testing.assert_allclose(
        np.asarray(data["model_comparison"]["certificate"])[1], right / 10, rtol=1e-12
    )


@pytest.mark.full
def test_compare_invents_no_certificate(coins):
    data = nt.compare(coins[1], num_samples=5)
    assert "certificate" not in data["model_comparison"]
    assert not any(name.startswith("certificate") for name in data.attrs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"alpha": 1.0},
            ValueError,
            r"needs alpha in \(0, 1\), got 1.0.*Fit with alpha below",
        ),
        (
            {"alpha": {"y": 0.5}},
            ValueError,
            r"one alpha in \(0, 1\) for all data, got {'y': 0.5}",
        ),
        (
            {"observed": {"y": jnp.zeros((20, 2))}},
            ValueError,
            r"shapes {'y': \(20, 2\)}.*pass num_data",
        ),
        (
            {"observed": {"y": jnp.zeros(3), "z": jnp.zeros(3)}},
            ValueError,
            r"^the number of.*pass num_data",
        ),
        (
            {"observed": {"y": jnp.array([0.0, jnp.nan])}},
            ValueError,
            "missing values.*pass num_data",
        ),
    ],
)
def test_compare_refuses_certificates_without_ground(coins, change, error, message):
    fits = {name: fit._replace(**change) for name, fit in coins[1].items()}
    with pytest.raises(error, match=message):
        nt.compare(fits, log_p0=bounds.known_density(-30.0))


def test_compare_refuses_a_bare_log_density(coins):
    with pytest.raises(TypeError, match=r"say where it comes from.*of nt.bounds"):
        nt.compare(coins[1], log_p0=-30.0)


def _observes(site):
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        site(theta, y)

    return model


def _with_a_param(theta, y):
    numpyro.sample(
        "y",
        dist.Normal(
            theta, numpyro.param("scale", 1.0, constraint=constraints.positive)
        ),
        obs=y,
    )


def _with_a_factor(theta, y):
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
    numpyro.factor("f", 100.0)


def _with_a_scale(theta, y):
    with numpyro.handlers.scale(scale=3.0):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def _masked(theta, y):
    numpyro.sample("y", dist.Normal(theta, 1.0).mask(jnp.arange(len(y)) < 10), obs=y)


def _dependent(theta, y):
    numpyro.sample(
        "y", dist.MultivariateNormal(theta * jnp.ones(len(y)), jnp.eye(len(y))), obs=y
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("site", "match"),
    [
        (_with_a_param, "chosen by the data"),
        (_with_a_factor, "is a factor, and certificates are for densities"),
        (_with_a_scale, "has a scale beside alpha at"),
        (_dependent, r"^the number of independent.*pass num_data"),
    ],
)
def test_compare_certifies_no_more_than_the_theorem(site, match):
    with pytest.raises(ValueError, match=match):
        nt.compare({"one": _short_fit(site)}, log_p0=nt.bounds.known_density(-40.0))


def _short_fit(site):
    return nt.fit_svi(
        jax.random.key(0),
        _observes(site),
        AutoNormal,
        jnp.ones(40),
        alpha=0.5,
        num_steps=200,
        num_particles=50,
        optim=numpyro.optim.Adam(0.05),
    )


@pytest.mark.full
def test_masked_data_are_not_counted():
    fits, log_p0 = {"one": _short_fit(_masked)}, nt.bounds.known_density(-12.0)
    left, right = (
        group(nt.compare(fits, log_p0=log_p0, **options), "model_comparison")
        for options in ({}, {"num_data": 10})
    )
    np.testing.assert_array_equal(left["certificate"], right["certificate"])


@pytest.mark.parametrize("num_data", [np.nan, np.inf, None, "a", [3, 4], 0, 2.5, True])
def test_numbers_of_data_that_are_none(num_data):
    with pytest.raises(ValueError, match=r"num_data.*integer of at least"):
        nt.bounds.tempered_certificate(
            -1.0, nt.bounds.known_density(-1.0), num_data, alpha=0.5
        )


def test_weights_of_all_models_sum_to_one_at_most():
    with pytest.raises(
        ValueError, match=r"^the prior weights.*sum to 2, more than 1.*sum to at most"
    ):
        nt.bounds.tempered_certificate(
            [-1.0, -2.0],
            nt.bounds.known_density(-1.0),
            5,
            alpha=0.5,
            log_prior=[0.0, 0.0],
        )
    with pytest.raises(
        ValueError, match=r"^the data are a.*masked array.*that are not masked"
    ):
        nt.bounds.empirical_entropy(
            np.ma.masked_array([0, 1, 1], mask=[False, True, False])
        )
