"""Sparse linear regression against all models, one by one, and formulas written out coordinate by coordinate."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_oracles as oracle
from conftest import enable_x64, tiered
from hypothesis import given, settings
from numpyro import handlers
from scipy.optimize import minimize
from scipy.special import expit

import numpyro_tempered as nt
from numpyro_tempered import sparse
from numpyro_tempered.core.ascent import begin
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.sparse import sweep
from numpyro_tempered.sparse.arguments import Regression
from numpyro_tempered.sparse.ascent import (
    PENALTIES,
    Path,
    Start,
    best_of,
    check_end,
    lasso_path,
    make_starts,
    unblock,
)
from numpyro_tempered.sparse.base import tempered_model

ALPHAS = (0.25, 0.5, 1.0)
LAMBDA, SLAB = 0.3, 1.2
KEY = jax.random.key(7)


@pytest.fixture(params=["double", pytest.param("single", marks=pytest.mark.full)])
def precision(request):
    if request.param == "double":
        request.getfixturevalue("x64")


def fit(x, y, **options):
    settings = {
        "inclusion_prob": LAMBDA,
        "slab_scale": SLAB,
        "noise_scale": 0.8,
        "tolerance": 0.0,
    }
    settings = settings | {"max_iter": 3000} | options
    return sparse.fit_linear(KEY, x, y, **settings)


def factors(fitted):
    """The factors as numpy, an intercept as the last coordinate, which is always in."""
    q = [np.asarray(part) for part in fitted.posterior]
    if fitted.intercept is not None:
        last = (1.0, fitted.intercept.loc, fitted.intercept.scale)
        q = [np.append(part, float(end)) for part, end in zip(q, last, strict=True)]
    return tuple(q)


def problem_of(fitted, x):
    """Columns and prior (probabilities, scales) as the oracle takes them."""
    lam = np.broadcast_to(fitted.prior.inclusion_prob, x.shape[1])
    s = np.broadcast_to(fitted.prior.slab_scale, x.shape[1])
    if fitted.intercept is None:
        return x, (lam, s)
    columns = np.column_stack([x - x.mean(axis=0), np.ones(len(x))])
    return columns, (np.append(lam, 1.0), np.append(s, fitted.prior.intercept_scale))


NOISES = {
    "known": {},
    "estimated": {"noise_scale": None},
    "gamma": {"noise_scale": None, "noise_prior": (1.5, 0.7)},
}
SHAPES = [((20, 6), None), ((20, 6), 3.0), ((6, 19), 3.0), ((1, 1), None)]
ELBOS = [(*shape, noise) for shape, noise in itertools.product(SHAPES, NOISES)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "intercept_scale", "noise"),
    tiered(ELBOS, unit=[((20, 6), None, "gamma")]),
    ids=str,
)
def test_elbo_is_that_of_its_factors_and_never_falls(shape, intercept_scale, noise):
    x, y = oracle.linear_data(1, *shape, rho=0.9)
    noise = NOISES[noise]
    for alpha in ALPHAS:
        found = fit(x, y, alpha=alpha, intercept_scale=intercept_scale, **noise)
        columns, prior = problem_of(found, x)
        q = factors(found)
        v = float(found.noise_scale) ** 2
        if found.noise_posterior is None:
            expected = oracle.linear_elbo(columns, y, alpha, q, prior, v)
        else:
            gamma = [float(part) for part in found.noise_posterior]
            expected = oracle.linear_elbo_gamma(
                columns, y, alpha, q, prior, gamma, (1.5, 0.7)
            )
            assert v == pytest.approx(gamma[1] / gamma[0], rel=1e-12)
        assert float(found.objective) == pytest.approx(expected, rel=1e-10, abs=1e-10)
        parts = found.elbo
        assert parts.value == float(found.objective)
        if found.noise_posterior is None:
            log_lik = oracle.linear_log_lik(columns, y, q, v)
            assert parts.expected_log_lik == pytest.approx(log_lik, rel=1e-10)
            assert parts.kl == pytest.approx(oracle.kl(q, prior), rel=1e-10)
        if noise == {"noise_scale": None}:
            assert v == pytest.approx(
                oracle.squared_error(columns, y, q) / len(y), rel=1e-12
            )
        trace = np.asarray(found.trace)
        assert found.converged
        assert len(trace) == found.num_iter >= 2
        assert np.all(np.diff(trace) >= -1e-10 * np.abs(trace[1:]))
        assert found.objective == trace[-1] == found.restart_objectives[0]


@pytest.mark.usefixtures("x64")
def test_as_a_tempered_fit_it_has_the_parts_of_its_elbo():
    x, y = oracle.linear_data(1, 20, 6, rho=0.9)
    found = fit(x, y, alpha=0.5)
    tempered = found.on(x, y)
    assert tempered.alpha == 0.5
    assert tempered.elbo[:4] == pytest.approx(found.elbo[:4], rel=1e-10)
    # With an intercept, coefficients are of the columns less their means.
    centre = x.mean(axis=0) + 1.0
    shifted = found._replace(
        centre=centre, prior=found.prior._replace(intercept_scale=1.0)
    )
    values = {"coef": np.arange(6.0), "intercept": 2.0}
    seeded = handlers.seed(handlers.substitute(tempered_model(shifted), values), KEY)
    trace = handlers.trace(seeded).get_trace(*shifted.model_arguments(x, y))
    np.testing.assert_allclose(
        trace["eta"]["value"], 2.0 + (x - centre) @ np.arange(6.0), rtol=1e-10
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_orthogonal_columns_are_exact(alpha):
    rng = np.random.default_rng(3)
    x = np.linalg.qr(rng.normal(size=(20, 6)))[0] * np.array(
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    )
    y = x[:, 0] - 0.5 * x[:, 2] + rng.normal(size=20)
    found = fit(x, y, alpha=alpha)
    evidence, probs, means = oracle.enumerate_linear(
        x, y, alpha, problem_of(found, x)[1], 0.8**2
    )
    assert float(found.objective) == pytest.approx(evidence, abs=1e-8)
    np.testing.assert_allclose(found.inclusion_probs, probs, atol=1e-8)
    np.testing.assert_allclose(found.posterior.mean, means, atol=1e-8)
    assert np.ptp(probs) > 0.5


@functools.cache
def gaps(rho):
    """Evidence less ELBO, and the largest error of an inclusion probability, by data set and alpha."""
    rows = []
    with enable_x64():
        for seed in range(4):
            x, y = oracle.linear_data(10 + seed, 25, 8, rho, noise=0.8)
            for alpha in ALPHAS:
                found = fit(x, y, alpha=alpha, num_restarts=10, tolerance=1e-12)
                evidence, probs, _ = oracle.enumerate_linear(
                    x, y, alpha, problem_of(found, x)[1], 0.8**2
                )
                error = np.max(np.abs(np.asarray(found.inclusion_probs) - probs))
                rows.append((evidence - float(found.objective), error))
    return np.array(rows).T


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_elbo_of_one_start_is_below_the_evidence(rho):
    for alpha in ALPHAS:
        x, y = oracle.linear_data(10, 20, 6, rho, noise=0.8)
        found = fit(x, y, alpha=alpha, tolerance=1e-12)
        evidence, probs, _ = oracle.enumerate_linear(
            x, y, alpha, problem_of(found, x)[1], 0.8**2
        )
        assert 0.0 < evidence - float(found.objective) < 2.0
        if rho == 0.0:
            np.testing.assert_allclose(found.inclusion_probs, probs, atol=0.2)


@pytest.mark.full
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_elbo_is_below_the_enumerated_evidence(rho):
    assert np.all(gaps(rho)[0] > 0.0)


@pytest.mark.full
def test_the_gap_grows_with_the_correlation():
    """Known answers of the order of .07, .23 and .67."""
    mean = [gaps(rho)[0].mean() for rho in (0.0, 0.5, 0.9)]
    assert mean == sorted(mean)
    for value, reported in zip(mean, (0.07, 0.23, 0.67), strict=True):
        assert reported / 3 < value < 3 * reported
    # Without correlation the inclusion probabilities are nearly right, with much of it they are not.
    assert gaps(0.0)[1].mean() < 0.1 < gaps(0.9)[1].max()


@pytest.mark.usefixtures("x64")
def test_prior_of_the_noise_bounds_the_evidence_without_it():
    x, y = oracle.linear_data(20, 20, 6, 0.3)
    for alpha in (0.5, 1.0):
        found = fit(x, y, noise_scale=None, noise_prior=(1.5, 0.7), alpha=alpha)
        prior = problem_of(found, x)[1]
        coarse, fine = (
            oracle.log_evidence_gamma(x, y, alpha, prior, (1.5, 0.7), num)
            for num in (60, 120)
        )
        assert coarse == pytest.approx(fine, abs=1e-8)
        assert 0.0 < fine - float(found.objective) < 0.5


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("intercept_scale", tiered([3.0, None], unit=[3.0]))
def test_estimated_noise_is_the_best_known_one(intercept_scale):
    x, y = oracle.linear_data(21, 20, 6, 0.5)
    options = {"alpha": 0.5, "intercept_scale": intercept_scale}
    found = fit(x, y, noise_scale=None, tolerance=1e-14, **options)
    scale = float(found.noise_scale)
    at, *beside = (
        float(
            fit(
                x, y, noise_scale=scale * c, init=found.posterior.mean, **options
            ).restart_objectives[0]
        )
        for c in (1.0, 0.97, 1.03)
    )
    assert at == pytest.approx(float(found.objective), abs=1e-9)
    assert max(beside) < at - 1e-4
    columns, prior = problem_of(found, x)
    assert (
        found.objective < oracle.enumerate_linear(columns, y, 0.5, prior, scale**2)[0]
    )


@pytest.mark.usefixtures("x64")
def test_intercept_is_integrated_out_exactly():
    """Centred columns are orthogonal to it: what is left is one Gaussian integral over the mean of y."""
    x, y = oracle.linear_data(22, 20, 6, 0.4)
    y = y + 3.0
    alpha, v, s = 0.6, 0.8**2, 4.0
    whole = fit(x, y, alpha=alpha, intercept_scale=s)
    centred = fit(x - x.mean(axis=0), y - y.mean(), alpha=alpha)
    np.testing.assert_allclose(
        whole.inclusion_probs, centred.inclusion_probs, atol=1e-10
    )
    precision = alpha * len(y) / v
    # The integral of exp(-precision (mean - b)^2 / 2) N(b; 0, s^2).
    variance = 1.0 / precision + s**2
    integral = (
        0.5 * np.log(2 * np.pi / precision)
        - 0.5 * np.log(2 * np.pi * variance)
        - 0.5 * y.mean() ** 2 / variance
    )
    assert float(whole.objective) == pytest.approx(
        float(centred.objective) + integral, abs=1e-9
    )
    assert float(whole.intercept.loc) == pytest.approx(
        s**2 * y.mean() / variance, rel=1e-9
    )
    assert float(whole.intercept.scale) == pytest.approx(
        (precision + s**-2) ** -0.5, rel=1e-9
    )


@pytest.mark.usefixtures("x64")
def test_variables_that_are_always_in_make_a_ridge_regression():
    """The mean of the mean-field Gaussian is that of the exact one; its scales are those given the others."""
    x, y = oracle.linear_data(23, 20, 6, 0.6)
    found = fit(x, y, inclusion_prob=1.0, alpha=0.7)
    precision = 0.7 / 0.8**2 * x.T @ x + np.eye(6) / SLAB**2
    np.testing.assert_allclose(
        found.posterior.mean,
        np.linalg.solve(precision, 0.7 / 0.8**2 * x.T @ y),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        found.posterior.scale, np.diag(precision) ** -0.5, rtol=1e-10
    )
    assert np.all(found.inclusion_probs == 1.0)
    # KL between the exact Gaussian and its mean field.
    evidence = oracle.log_evidence_of_model(x, y, 0.7, np.full(6, SLAB), 0.8**2)
    _, log_det = np.linalg.slogdet(precision)
    expected = evidence - 0.5 * (np.sum(np.log(np.diag(precision))) - log_det)
    assert float(found.objective) == pytest.approx(expected, abs=1e-8)


@pytest.mark.usefixtures("x64", "strict")
@pytest.mark.parametrize("d", tiered([3, 8, 19], unit=[19]))
def test_a_sweep_is_the_loop_over_coordinates(d):
    x, y = oracle.linear_data(30, 10, d, 0.7)
    rng = np.random.default_rng(30)
    lam, s, mean, order = (
        rng.uniform(0.1, 0.9, d),
        rng.uniform(0.5, 2.0, d),
        rng.normal(size=d),
        rng.permutation(d),
    )
    expected = oracle.linear_sweep(x, y, 0.6, (lam, s), 0.5, mean, order)

    @jax.jit
    def ours(columns, prior, precision, residual, mean):
        design = sweep.block_design(sweep.blocks(columns))
        return sweep.sweep(
            design, sweep.block_prior(prior), precision, residual, sweep.blocks(mean)
        )

    prior = SpikeSlab(lam[order], np.zeros(d), s[order])
    q = ours(x.T[order], prior, np.float64(0.6 / 0.5), y - x @ mean, mean[order])
    for part, wanted in zip(q, expected, strict=True):
        np.testing.assert_allclose(
            np.ravel(part)[:d], wanted[order], rtol=1e-9, atol=1e-12
        )
    for part, wanted in zip(jax.jit(unblock)(q, order), expected, strict=True):
        np.testing.assert_allclose(part, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_numerical_optimisation_finds_no_better_coordinate():
    x, y = oracle.linear_data(31, 20, 6, 0.5)
    found = fit(x, y, alpha=0.5, tolerance=1e-15)
    prior = problem_of(found, x)[1]
    q = factors(found)

    def loss(free, j):
        moved = [part.copy() for part in q]
        moved[0][j], moved[1][j], moved[2][j] = expit(free[0]), free[1], np.exp(free[2])
        return -oracle.linear_elbo(x, y, 0.5, moved, prior, 0.8**2)

    for j in range(3):
        best = minimize(
            loss,
            [0.3, q[1][j] + 0.5, -1.0],
            args=(j,),
            method="BFGS",
            options={"gtol": 1e-8},
        )
        assert -best.fun <= float(found.objective) + 1e-9
        np.testing.assert_allclose(
            [expit(best.x[0]), best.x[1], np.exp(best.x[2])],
            [part[j] for part in q],
            atol=1e-5,
        )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_alpha_counts_rows(alpha):
    """Every row twice at half the power is the same target, but for the noise, which is known."""
    x, y = oracle.linear_data(32, 10, 6, 0.5)
    # Rows of 0 say nothing, add a constant, and keep the shape that is compiled.
    empty = np.zeros((10, 6))
    whole = fit(
        np.concatenate([x, empty]), np.concatenate([y, empty[:, 0]]), alpha=alpha
    )
    twice = np.repeat(np.arange(10), 2)
    halved = fit(x[twice], y[twice], alpha=0.5 * alpha)
    of_empty = -0.5 * alpha * 10 * np.log(2 * np.pi * 0.8**2)
    assert float(whole.objective) - of_empty == pytest.approx(
        float(halved.objective), abs=1e-9
    )
    np.testing.assert_allclose(whole.inclusion_probs, halved.inclusion_probs, atol=1e-8)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_alpha_counts_rows_of_any_table(alpha):
    x, y = oracle.linear_data(32, 20, 6, 0.5)
    twice = np.repeat(np.arange(20), 2)
    whole, halved = fit(x, y, alpha=alpha), fit(x[twice], y[twice], alpha=0.5 * alpha)
    assert float(whole.objective) == pytest.approx(float(halved.objective), abs=1e-9)
    np.testing.assert_allclose(whole.inclusion_probs, halved.inclusion_probs, atol=1e-8)


@pytest.mark.full
def test_more_restarts_are_never_worse():
    x, y = oracle.linear_data(44, 20, 6, 0.95)
    one, three = fit(x, y, tolerance=1e-6), fit(x, y, tolerance=1e-6, num_restarts=3)
    assert three.restart_objectives[0] == pytest.approx(float(one.objective), abs=1e-4)
    assert three.objective == np.max(three.restart_objectives)


def test_alpha_cancels_in_the_estimate_of_the_noise():
    model = sparse.linear.Estimated(np.float32(0.0))
    update = jax.jit(sparse.linear.update_noise)
    low, high = (update(model, np.float32(6.0), 3, np.float32(a)) for a in (0.1, 1.0))
    assert low[0] == high[0] == 0.5


@pytest.mark.usefixtures("x64")
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
    st.floats(0.1, 10.0),
)
def test_units_and_signs_go_along(scales, signs, unit):
    x, y = oracle.linear_data(33, 20, 6, 0.5)
    c = np.array(scales) * signs
    base = fit(x, y, alpha=0.5, tolerance=1e-15)
    options = {"slab_scale": unit * SLAB / np.abs(c), "noise_scale": 0.8 * unit}
    moved = fit(x * c, unit * y, alpha=0.5, tolerance=1e-15, **options)
    np.testing.assert_allclose(moved.inclusion_probs, base.inclusion_probs, atol=1e-6)
    np.testing.assert_allclose(
        moved.posterior.mean * c / unit, base.posterior.mean, atol=1e-6
    )
    assert float(moved.objective) == pytest.approx(
        float(base.objective) - 0.5 * 20 * np.log(unit), abs=1e-8
    )


@pytest.mark.usefixtures("x64")
def test_the_order_of_columns_does_not_matter():
    x, y = oracle.linear_data(33, 20, 6, 0.5)
    order = np.array([3, 1, 5, 0, 4, 2])
    base, moved = (
        fit(columns, y, alpha=0.5, tolerance=1e-15) for columns in (x, x[:, order])
    )
    np.testing.assert_allclose(
        moved.inclusion_probs, np.asarray(base.inclusion_probs)[order], atol=1e-6
    )
    np.testing.assert_allclose(
        moved.posterior.mean, np.asarray(base.posterior.mean)[order], atol=1e-6
    )
    assert float(moved.objective) == pytest.approx(float(base.objective), abs=1e-8)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
@settings(max_examples=15, deadline=None)
@given(
    st.permutations(range(6)),
    st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6),
    st.lists(st.sampled_from([-1.0, 1.0]), min_size=6, max_size=6),
    st.floats(0.1, 10.0),
)
def test_equivariance(permutation, scales, signs, unit):
    x, y = oracle.linear_data(33, 20, 6, 0.5)
    base = fit(x, y, alpha=0.5, num_restarts=3, tolerance=1e-15)
    c = np.array(scales) * signs
    moved = fit(
        (x * c)[:, permutation],
        unit * y,
        alpha=0.5,
        num_restarts=3,
        tolerance=1e-15,
        slab_scale=(unit * SLAB / np.abs(c))[list(permutation)],
        noise_scale=0.8 * unit,
    )
    np.testing.assert_allclose(
        moved.inclusion_probs, np.asarray(base.inclusion_probs)[permutation], atol=1e-6
    )
    expected = (np.asarray(base.posterior.mean) * unit / c)[permutation]
    np.testing.assert_allclose(
        moved.posterior.mean * c[permutation] / unit,
        expected * c[permutation] / unit,
        atol=1e-6,
    )
    assert float(moved.objective) == pytest.approx(
        float(base.objective) - 0.5 * 20 * np.log(unit), abs=1e-8
    )


@pytest.mark.full
def test_restarts_are_a_fixed_sequence_and_never_worse():
    x, y = oracle.linear_data(34, 30, 60, 0.9, noise=0.5)
    options = {"noise_scale": None, "inclusion_prob": 0.05, "tolerance": 1e-6}
    few, many = (
        fit(x, y, num_restarts=2, **options),
        fit(x, y, num_restarts=12, **options),
    )
    np.testing.assert_allclose(
        many.restart_objectives[:2], few.restart_objectives, atol=1e-3
    )
    assert many.objective >= few.objective - 1e-3
    assert np.ptp(many.restart_objectives) > 0.1, "the starts are not different"
    assert many.objective == np.max(many.restart_objectives)
    assert sorted(many.order.tolist()) == list(range(60))
    other = sparse.fit_linear(
        jax.random.key(8), x, y, slab_scale=SLAB, inclusion_prob=0.05, num_restarts=12
    )
    np.testing.assert_array_equal(
        many.restart_objectives[:9], other.restart_objectives[:9]
    )
    assert np.any(many.restart_objectives[9:] != other.restart_objectives[9:])


@pytest.mark.usefixtures("x64")
def test_the_first_starts_are_points_of_a_lasso_path_by_the_sizes_of_coefficients():
    """After one sweep from each, against scikit-learn's path and the loop over coordinates."""
    from sklearn.linear_model import lasso_path as reference

    # Columns so little correlated that the sweeps of the path end at its points.
    rng = np.random.default_rng(47)
    x = np.linalg.qr(rng.normal(size=(20, 6)))[0] @ (np.eye(6) + 0.03)
    y = x @ np.array([0.3, -2.0, 1.5, -0.8, 2.5, 1.1]) + 0.1 * rng.normal(size=20)
    x = x * np.array([1.0, 2.0, 0.5, 3.0, 1.5, 0.7])
    with pytest.warns(
        UserWarning,
        match=r"^the best.*did not converge within 1 sweeps.*low for these data",
    ):
        found = fit(x, y, num_restarts=9, max_iter=1)
    norms, prior = np.linalg.norm(x, axis=0), problem_of(found, x)[1]
    unit = x / norms
    # The first has many variables in, and each next is far from those before.
    shares = np.array([0.05, 0.35, 0.18, 0.03, 0.7, 0.12, 0.25, 0.08, 0.5])
    for share, elbo in zip(shares, found.restart_objectives, strict=True):
        penalty = share * np.max(np.abs(unit.T @ y))
        scaled = reference(
            unit, y, alphas=[penalty / len(y)], tol=1e-14, max_iter=10_000
        )[1][:, 0]
        sizes = np.abs(scaled + unit.T @ (y - unit @ scaled))
        q = oracle.linear_sweep(
            x, y, 1.0, prior, 0.8**2, scaled / norms, np.argsort(-sizes)
        )
        assert float(elbo) == pytest.approx(
            oracle.linear_elbo(x, y, 1.0, q, prior, 0.8**2), abs=1e-8
        )
    assert np.min(np.abs(np.diff(np.sort(found.restart_objectives)))) > 1e-6, (
        "the starts are not told apart"
    )


@pytest.mark.usefixtures("x64")
def test_a_variable_that_is_always_in_comes_first():
    x, y = oracle.linear_data(35, 20, 6, 0.5)
    for j in range(6):
        found = fit(
            x,
            y,
            tolerance=1e-6,
            inclusion_prob=np.where(np.arange(6) == j, 1.0, LAMBDA),
        )
        assert found.order[0] == j


@pytest.mark.usefixtures("precision")
def test_a_warm_start_stays():
    x, y = oracle.linear_data(35, 20, 6, 0.5)
    first = fit(x, y, tolerance=1e-6)
    alone = fit(x, y, tolerance=1e-6, init=first.posterior.mean)
    assert alone.objective == pytest.approx(float(first.objective), abs=1e-3)
    assert alone.num_iter <= 3
    sizes = np.abs(np.asarray(first.posterior.mean)) * np.linalg.norm(x, axis=0)
    assert np.all(np.diff(sizes[np.asarray(alone.order)]) <= 1e-6)
    with_intercept = fit(
        x, y, tolerance=1e-6, init=first.posterior.mean, intercept_scale=2.0
    )
    assert sorted(with_intercept.order.tolist()) == list(range(6))


@pytest.mark.full
@pytest.mark.usefixtures("precision")
def test_a_warm_start_comes_before_the_others():
    x, y = oracle.linear_data(35, 20, 6, 0.5)
    first = fit(x, y, tolerance=1e-6, num_restarts=3)
    again = fit(x, y, num_restarts=3, tolerance=1e-6, init=first.posterior.mean)
    assert again.restart_objectives[0] == pytest.approx(
        float(first.objective), abs=1e-3
    )
    np.testing.assert_allclose(
        again.restart_objectives[1:], first.restart_objectives[:2], atol=1e-5
    )


def test_the_best_start_is_the_one_of_the_largest_objective():
    starts = Start(
        np.float32([[1.0, 0.0], [np.nan, 1.0], [3.0, 2.0], [2.0, 3.0]]),
        np.int32([[0], [1], [2], [3]]),
    )
    single = begin(starts.mean[0], 1, batched=False)
    ascents = jax.vmap(
        lambda start: single._replace(point=start.mean, objective=start.mean[0])
    )(starts)
    best = jax.jit(best_of)(ascents, starts)
    np.testing.assert_array_equal(best.ascent.point, [3.0, 2.0])
    np.testing.assert_array_equal(best.order, [2])
    np.testing.assert_array_equal(best.objectives, starts.mean[:, 0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("num_rows", "d"), tiered([(20, 6), (40, 10)], unit=[(20, 6)]))
def test_starts_are_near_a_lasso_path(num_rows, d):
    from sklearn.linear_model import lasso_path as reference

    x, y = oracle.linear_data(36, num_rows, d, 0.5)
    x = x / np.linalg.norm(x, axis=0)
    path = lasso_path(x, y, np.zeros(d, bool))
    penalties = np.max(np.abs(x.T @ y)) * np.array(PENALTIES)
    _, expected, _ = reference(x, y, alphas=penalties / num_rows)
    np.testing.assert_allclose(
        path.mean, expected.T, atol=0.02 * np.max(np.abs(expected))
    )
    beyond = np.asarray(path.size) > penalties[:, None]
    np.testing.assert_array_equal(beyond, np.asarray(path.mean) != 0.0)


@pytest.mark.full
def test_float32_agrees_with_float64():
    x, y = oracle.linear_data(37, 20, 6, 0.5)
    options = {"noise_scale": None, "intercept_scale": 20.0, "tolerance": 1e-7}
    single = fit(1e3 + x, 5.0 + y, **options)
    with enable_x64():
        double = fit(1e3 + x, 5.0 + y, **options)
    assert single.posterior.loc.dtype == np.float32
    assert double.posterior.loc.dtype == np.float64
    assert float(single.objective) == pytest.approx(float(double.objective), abs=2e-3)
    np.testing.assert_allclose(
        single.inclusion_probs, double.inclusion_probs, atol=5e-3
    )
    np.testing.assert_allclose(single.posterior.mean, double.posterior.mean, atol=5e-3)


def test_a_fit_can_be_traced():
    """Without compiling: what depends on values would complain."""
    x, y = oracle.linear_data(38, 20, 6, 0.5)

    def fits(x, y, alphas):
        return jax.vmap(
            lambda alpha: fit(x, y, alpha=alpha, noise_scale=None, intercept_scale=1.0)
        )(alphas)

    found = jax.eval_shape(fits, x, y, np.array(ALPHAS))
    assert found.posterior.probs.dtype == np.float32
    assert found.posterior.probs.shape == found.order.shape == (3, 6)
    assert found.trace.shape == (3, 3000)
    assert found.objective.shape == found.intercept.loc.shape == (3,)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_vmap_over_alpha_is_the_loop():
    x, y = oracle.linear_data(38, 20, 6, 0.5)
    alphas = np.array(ALPHAS)

    @jax.jit
    @jax.vmap
    def each(alpha):
        return fit(x, y, alpha=alpha, noise_scale=None, intercept_scale=1.0)

    found = each(alphas)
    for i, alpha in enumerate(ALPHAS):
        alone = fit(x, y, alpha=alpha, noise_scale=None, intercept_scale=1.0)
        assert float(found.objective[i]) == pytest.approx(
            float(alone.objective), abs=1e-9
        )
        np.testing.assert_allclose(
            found.posterior.probs[i], alone.posterior.probs, atol=1e-6
        )
        np.testing.assert_array_equal(found.order[i], alone.order)
        trace = found.trace[i]
        assert np.isnan(trace[-1])
        assert trace[found.num_iter[i] - 1] == found.objective[i]


@pytest.mark.full
def test_data_may_be_traced():
    x, y = oracle.linear_data(39, 20, 6)
    compiled = jax.jit(
        lambda x, y: fit(x, y, noise_scale=None, intercept_scale=1.0, tolerance=1e-6)
    )
    found, alone = (
        compiled(x, y),
        fit(x, y, noise_scale=None, intercept_scale=1.0, tolerance=1e-6),
    )
    np.testing.assert_allclose(found.posterior.mean, alone.posterior.mean, atol=1e-4)
    assert found.objective == pytest.approx(float(alone.objective), abs=1e-3)


@pytest.mark.usefixtures("precision")
def test_constant_columns():
    x, y = oracle.linear_data(40, 20, 6)
    x[:, 2] = 7.3
    with_intercept = fit(x, 4.0 + y, intercept_scale=10.0, tolerance=1e-6)
    assert with_intercept.inclusion_probs[2] == pytest.approx(LAMBDA, abs=1e-6)
    assert with_intercept.posterior.scale[2] == pytest.approx(SLAB, rel=1e-5)
    # Without one it stands for it.
    without = fit(x, 4.0 + y, tolerance=1e-6)
    assert without.inclusion_probs[2] > 0.99
    nothing = fit(np.zeros((20, 6)), np.ones(20), tolerance=1e-6)
    np.testing.assert_allclose(nothing.inclusion_probs, LAMBDA, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("num_rows", [5, 50])
def test_an_exact_fit_is_finite(num_rows):
    x = oracle.design(41, num_rows, 20)
    found = fit(x, 2.0 * x[:, 3], noise_scale=None, tolerance=1e-6, num_restarts=9)
    assert np.isfinite(found.objective)
    assert found.noise_scale > 0.0
    if num_rows == 50:
        assert sparse.selected(found).tolist() == [3]


@pytest.mark.usefixtures("precision")
def test_selected_orders_by_probability():
    x, y = oracle.linear_data(42, 20, 6)
    found = fit(x, y, tolerance=1e-6)
    everything = sparse.selected(found, 0.0)
    assert np.all(np.diff(np.asarray(found.inclusion_probs)[everything]) <= 0.0)
    assert len(everything) == 6
    assert set(sparse.selected(found)) == set(
        np.flatnonzero(np.asarray(found.inclusion_probs) > 0.5)
    )
    with pytest.raises(ValueError, match=r"threshold must be in \[0, 1\], got 2"):
        sparse.selected(found, 2.0)


X, Y = oracle.linear_data(43, 10, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"x must have shape \(n, d\)"),
        ({"x": X[:, :0]}, ValueError, r"^x must have shape.*got \(10, 0\)"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, r"^x must have shape.*got \(0, 3\)"),
        (
            {"x": np.where(np.arange(30).reshape(10, 3) == 4, np.nan, X)},
            ValueError,
            r"x must be finite, got nan at index \(1, 1\).*or fill them in",
        ),
        ({"x": X.astype(str)}, TypeError, r"x must be real numbers.*\.cat\.codes, or"),
        ({"y": Y[:9]}, ValueError, r"y must have shape \(10,\).*row of x, got"),
        (
            {"y": np.append(Y[:9], np.inf)},
            ValueError,
            r"y must be finite, got inf at index 9.*fill them in",
        ),
        ({"y": 1e39 * Y}, ValueError, r"y must be in .*, got .*e\+3\d at index"),
        (
            {"alpha": 0.0},
            ValueError,
            r"alpha must be positive and finite, got 0.0.*jax\.vmap for several",
        ),
        (
            {"alpha": np.nan},
            ValueError,
            r"alpha must be positive and finite.*Use jax\.vmap for several",
        ),
        (
            {"alpha": "1"},
            TypeError,
            r"alpha must be a number.*Use jax\.vmap for several",
        ),
        (
            {"alpha": [0.5, 1.0]},
            ValueError,
            r"alpha must be one number.*vmap.*for several",
        ),
        (
            {"inclusion_prob": 0.0},
            ValueError,
            r"inclusion_prob must be in \(0, 1\], got 0.0\. At 1",
        ),
        ({"inclusion_prob": [0.1, 0.2, 1.2]}, ValueError, r"got 1.2.*in out of x"),
        (
            {"inclusion_prob": [0.1, 0.2]},
            ValueError,
            r"inclusion_prob must be a number or have shape \(3,\)",
        ),
        (
            {"slab_scale": 0.0},
            ValueError,
            r"slab_scale must be positive and finite, got 0",
        ),
        (
            {"slab_scale": np.ones((3, 1))},
            ValueError,
            r"slab_scale must be a number or have shape",
        ),
        (
            {"intercept_scale": -1.0},
            ValueError,
            r"intercept_scale must be positive.*and finite, got",
        ),
        (
            {"noise_scale": 0.0},
            ValueError,
            r"noise_scale must be positive.*and finite, got",
        ),
        (
            {"noise_prior": (1.0, 1.0)},
            ValueError,
            r"noise_scale and noise_prior are both given.*no prior",
        ),
        (
            {"noise_scale": None, "noise_prior": 1.0},
            ValueError,
            r"noise_prior must be a pair",
        ),
        (
            {"noise_scale": None, "noise_prior": (1.0, 0.0)},
            ValueError,
            r"noise_prior rate must be positive",
        ),
        (
            {"noise_scale": None, "y": np.zeros(10)},
            ValueError,
            r"y is 0.0 in all rows.*noise_scale",
        ),
        (
            {"noise_scale": None, "intercept_scale": 1.0, "y": np.ones(10)},
            ValueError,
            r"y is 1.0 in all rows",
        ),
        (
            {"num_restarts": 0},
            ValueError,
            r"num_restarts must be an integer of at least 1",
        ),
        ({"max_iter": 2.5}, ValueError, r"max_iter must be an integer.*of at least"),
        (
            {"tolerance": -1.0},
            ValueError,
            r"tolerance must be at least 0.*and finite, got",
        ),
        (
            {"init": np.ones(2)},
            ValueError,
            r"init must be a number or have shape \(3,\).*column of x, got",
        ),
        pytest.param(
            {"x": 1e30 * X},
            ValueError,
            r"the ELBO is .*Rescale",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_is_refused(change, error, message):
    arguments = {"x": X, "y": Y} | change
    with pytest.raises(error, match=message):
        fit(**arguments)


@pytest.mark.usefixtures("x64")
def test_data_beyond_the_range_are_refused():
    x, y = oracle.linear_data(45, 20, 6)
    with pytest.raises(
        ValueError, match=r"the ELBO is .*float64. Rescale.*to about unit deviation"
    ):
        fit(1e200 * x, y)


def test_an_end_without_convergence_is_warned_of():
    end = begin(jnp.zeros(1), 7, batched=False)._replace(objective=np.float32(-1.0))
    check_end(end._replace(converged=True), 7)
    with pytest.warns(
        UserWarning,
        match=r"did not converge within 7 sweeps: take a larger max_iter.*these data",
    ):
        check_end(end, 7)
    with pytest.raises(
        ValueError, match=r"the ELBO is nan: .* float32.*to about unit deviation"
    ):
        check_end(end._replace(objective=np.float32(np.nan)), 7)


@pytest.mark.usefixtures("x64")
def test_a_fall_of_the_objective_is_no_convergence():
    x, _ = oracle.linear_data(47, 20, 6)
    # Residuals are rounding, as large as the noise, and no sweep can do better.
    y = 1e15 * (x @ np.arange(1.0, 7.0))
    with pytest.warns(
        UserWarning,
        match="if its trace falls at the end, the precision of float64 is too low",
    ):
        found = fit(x, y, slab_scale=1e15, tolerance=1e-6)
    before, end = np.asarray(found.trace)[-2:]
    assert end < before - 1e-6 * len(y)
    assert found.num_iter < 3000
    assert not found.converged


@pytest.mark.full
@pytest.mark.usefixtures("precision")
def test_too_few_sweeps_are_warned_of():
    x, y = oracle.linear_data(46, 20, 6)
    with pytest.warns(
        UserWarning, match="did not converge within 1 sweeps: take a larger max_iter"
    ):
        fit(x, y, max_iter=1)


def test_the_package_exports_it():
    assert nt.sparse is sparse


def test_a_mean_that_no_column_explains_is_told():
    x, y = X, Y
    with pytest.warns(
        UserWarning,
        match=r"1e\+03 away from 0 on average.*intercept_scale=.*columns of x",
    ):
        fit(x, y + 1000.0, noise_scale=None)


def test_more_starts_than_points_have_the_points_again_in_other_orders():
    rng = np.random.default_rng(0)
    number, d = len(PENALTIES), 6
    path = Path(
        jnp.asarray(rng.normal(size=(number, d))),
        jnp.asarray(rng.uniform(size=(number, d))),
    )
    regression = Regression(
        jnp.ones((4, d)),
        jnp.ones(4),
        SpikeSlab(jnp.full(d, 0.5), None, None),
        np.zeros(d),
        None,
    )
    starts = make_starts(jax.random.key(0), regression, path, 2 * number + 3)
    mean, order = np.asarray(starts.mean), np.asarray(starts.order)
    assert len(np.unique(mean[:number], axis=0)) == number
    np.testing.assert_array_equal(
        mean[number:], np.resize(mean[:number], (number + 3, d))
    )
    np.testing.assert_array_equal(
        np.sort(order, axis=1), np.tile(np.arange(d), (len(order), 1))
    )
    assert not np.array_equal(order[number : 2 * number], order[:number])
