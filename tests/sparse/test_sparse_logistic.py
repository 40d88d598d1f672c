"""Sparse logistic regression against quadrature, and predictions of both regressions."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_oracles as oracle
from conftest import enable_x64, tiered
from scipy.optimize import minimize
from scipy.special import expit

from numpyro_tempered import sparse
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab
from numpyro_tempered.sparse.base import NoisePosterior, RegressionFit
from numpyro_tempered.sparse.logistic import log_two_cosh_half, quadratic_weight

ALPHAS = (0.25, 0.5, 1.0)
LAMBDA, SLAB = 0.3, 1.5
KEY = jax.random.key(9)


@pytest.fixture(
    scope="module", params=["double", pytest.param("single", marks=pytest.mark.full)]
)
def context(request):
    return enable_x64 if request.param == "double" else contextlib.nullcontext


@pytest.fixture
def precision(context):
    with context():
        yield


def fit(x, y, **options):
    settings = {
        "inclusion_prob": LAMBDA,
        "slab_scale": SLAB,
        "intercept_scale": None,
        "tolerance": 0.0,
    } | options
    return sparse.fit_logistic(KEY, x, y, **settings)


def factors(fitted):
    q = [np.asarray(part) for part in fitted.posterior]
    if fitted.intercept is not None:
        last = (1.0, fitted.intercept.loc, fitted.intercept.scale)
        q = [np.append(part, float(end)) for part, end in zip(q, last, strict=True)]
    return tuple(q)


def problem_of(fitted, x):
    d = x.shape[1]
    if fitted.intercept is None:
        return x, (np.full(d, LAMBDA), np.full(d, SLAB))
    columns = np.column_stack([x - x.mean(axis=0), np.ones(len(x))])
    return columns, (
        np.append(np.full(d, LAMBDA), 1.0),
        np.append(np.full(d, SLAB), fitted.prior.intercept_scale),
    )


OBJECTIVES = list(itertools.product([(20, 5), (7, 19)], [None, 3.0]))


@pytest.mark.full
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("shape", "intercept_scale"), OBJECTIVES, ids=str)
def test_objective_is_that_of_its_factors_and_never_falls(shape, intercept_scale):
    x, y = oracle.logistic_data(1, *shape, rho=0.7)
    for alpha in ALPHAS:
        found = fit(x, y, alpha=alpha, intercept_scale=intercept_scale)
        columns, prior = problem_of(found, x)
        expected = oracle.logistic_objective(columns, y, alpha, factors(found), prior)
        assert float(found.objective) == pytest.approx(expected, rel=1e-10)
        trace = np.asarray(found.trace)
        assert len(trace) > 3
        assert found.converged
        assert np.all(np.diff(trace) >= -1e-10 * np.abs(trace[1:]))
        # No other xi is better for the same factors.
        xi = oracle.best_xi(columns, factors(found))
        for factor in (0.9, 1.1):
            assert (
                oracle.logistic_objective(
                    columns, y, alpha, factors(found), prior, factor * xi
                )
                < expected
            )


ORDERS = list(itertools.product([0.0, 0.9], [None, 2.0], range(3)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("rho", "intercept_scale", "seed"),
    tiered(ORDERS, unit=[(0.9, 2.0, 0), (0.0, 2.0, 1)]),
)
def test_objective_elbo_and_evidence_in_order(rho, intercept_scale, seed):
    """The evidence of at most three Gaussian coordinates by a product rule."""
    num_varying = 3 if intercept_scale is None else 2
    x, y = oracle.logistic_data(10 + seed, 20, num_varying, rho)
    # Columns of 0 say nothing, and give the shape that is compiled.
    x = np.column_stack([x, np.zeros((20, 5 - num_varying))])
    for alpha in ALPHAS:
        found = fit(x, y, alpha=alpha, intercept_scale=intercept_scale)
        columns, prior = problem_of(found, x)
        varying = np.any(columns != 0.0, axis=0)
        part, prior_of_part = (
            columns[:, varying],
            tuple(each[varying] for each in prior),
        )
        coarse, evidence = (
            oracle.logistic_log_evidence(part, y, alpha, prior_of_part, nodes)
            for nodes in (16, 24)
        )
        assert coarse == pytest.approx(evidence, abs=1e-5)
        elbo = oracle.logistic_elbo(columns, y, alpha, factors(found), prior)
        assert float(found.objective) < elbo < evidence
        # The bound is linear in u^2 where log 2cosh(sqrt(u^2)/2) is concave, its curvature at most 1/96.
        most = alpha * np.sum(oracle.variance_of_square(columns, factors(found))) / 192
        assert elbo - float(found.objective) < most


@pytest.mark.full
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("intercept_scale", [None, 2.0])
def test_three_starts_end_below_the_elbo_and_the_evidence(rho, intercept_scale):
    for seed in range(3):
        x, y = oracle.logistic_data(
            10 + seed, 15, 3 if intercept_scale is None else 2, rho
        )
        for alpha in ALPHAS:
            found = fit(
                x, y, alpha=alpha, intercept_scale=intercept_scale, num_restarts=3
            )
            columns, prior = problem_of(found, x)
            coarse, evidence = (
                oracle.logistic_log_evidence(columns, y, alpha, prior, nodes)
                for nodes in (16, 24)
            )
            assert coarse == pytest.approx(evidence, abs=1e-5)
            elbo = oracle.logistic_elbo(columns, y, alpha, factors(found), prior)
            assert float(found.objective) < elbo < evidence
            most = (
                alpha * np.sum(oracle.variance_of_square(columns, factors(found))) / 192
            )
            assert elbo - float(found.objective) < most


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("intercept_scale", tiered([None, 3.0], unit=[3.0]))
def test_numerical_optimisation_finds_no_better_coordinate(intercept_scale):
    x, y = oracle.logistic_data(2, 20, 5, 0.5)
    found = fit(x, y, alpha=0.5, tolerance=1e-15, intercept_scale=intercept_scale)
    columns, prior = problem_of(found, x)
    q = factors(found)

    def loss(free, j):
        moved = [part.copy() for part in q]
        moved[0][j], moved[1][j], moved[2][j] = expit(free[0]), free[1], np.exp(free[2])
        return -oracle.logistic_objective(columns, y, 0.5, moved, prior)

    for j in range(3):
        best = minimize(
            loss,
            [0.3, q[1][j] + 0.3, -0.5],
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


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_alpha_counts_rows():
    x, y = oracle.logistic_data(3, 10, 5, 0.5)
    # Rows of 0 say nothing, add a constant, and keep the shape that is compiled.
    empty = np.zeros((10, 5))
    whole = fit(np.concatenate([x, empty]), np.concatenate([y, empty[:, 0]]), alpha=1.0)
    twice = np.repeat(np.arange(10), 2)
    halved = fit(x[twice], y[twice], alpha=0.5)
    assert float(whole.objective) - 10 * np.log(0.5) == pytest.approx(
        float(halved.objective), abs=1e-8
    )
    np.testing.assert_allclose(whole.inclusion_probs, halved.inclusion_probs, atol=1e-6)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_alpha_counts_rows_of_any_table():
    x, y = oracle.logistic_data(3, 20, 5, 0.5)
    twice = np.repeat(np.arange(20), 2)
    whole, halved = fit(x, y, alpha=1.0), fit(x[twice], y[twice], alpha=0.5)
    assert float(whole.objective) == pytest.approx(float(halved.objective), abs=1e-8)
    np.testing.assert_allclose(whole.inclusion_probs, halved.inclusion_probs, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_restarts", tiered([1, 3], unit=[1]))
def test_symmetries(num_restarts):
    x, y = oracle.logistic_data(4, 20, 5, 0.5)
    options = {
        "alpha": 0.5,
        "intercept_scale": 3.0,
        "tolerance": 1e-15,
        "num_restarts": num_restarts,
    }
    base = fit(x, y, **options)
    flipped = fit(x, 1.0 - y, **options)
    np.testing.assert_allclose(flipped.posterior.loc, -base.posterior.loc, atol=1e-6)
    assert float(flipped.intercept.loc) == pytest.approx(
        -float(base.intercept.loc), abs=1e-6
    )
    permutation, c = np.array([3, 1, 4, 0, 2]), np.array([0.1, -2.0, 1.0, 30.0, 4.0])
    moved = fit(
        (5.0 + x * c)[:, permutation],
        y == 1.0,
        slab_scale=(SLAB / np.abs(c))[permutation],
        **options,
    )
    np.testing.assert_allclose(
        moved.inclusion_probs, np.asarray(base.inclusion_probs)[permutation], atol=1e-6
    )
    mean = np.asarray(moved.posterior.mean) * c[permutation]
    np.testing.assert_allclose(
        mean, np.asarray(base.posterior.mean)[permutation], atol=1e-6
    )
    assert float(moved.objective) == pytest.approx(float(base.objective), abs=1e-9)


def test_the_bound_touches_the_likelihood():
    xi = np.array([-40.0, -3.0, -1e-2, -1e-5, 0.0, 1e-3, 0.5, 60.0])
    with enable_x64():
        weight, height = map(
            np.asarray,
            jax.jit(lambda xi: (quadratic_weight(xi), log_two_cosh_half(xi)))(xi),
        )
    assert weight[4] == 0.25
    away = np.abs(xi) > 1e-4
    np.testing.assert_allclose(
        weight[away], np.tanh(xi[away] / 2) / (2 * xi[away]), rtol=1e-9
    )
    u = np.linspace(-50.0, 50.0, 201)[:, None]
    bound = 0.5 * u - height - 0.5 * weight * (u**2 - xi**2)
    exact = oracle.log_lik_of(u, 1.0)
    assert np.all(bound <= exact + 1e-9)
    np.testing.assert_allclose(
        0.5 * xi - height, oracle.log_lik_of(xi, 1.0), atol=1e-12
    )


@pytest.mark.usefixtures("precision")
def test_separable_classes_stay_finite():
    x = oracle.design(5, 20, 5)
    found = fit(x, x[:, 0] > 0.0, intercept_scale=3.0, tolerance=1e-6)
    assert found.converged
    assert sparse.selected(found).tolist() == [0]
    assert 1.0 < found.posterior.loc[0] < 5.0
    only = fit(x, np.ones(20), intercept_scale=3.0, tolerance=1e-6)
    assert np.isfinite(only.objective)
    assert only.intercept.loc > 1.0


@pytest.mark.full
def test_more_columns_than_rows_and_restarts():
    x, _ = oracle.logistic_data(6, 60, 150, 0.5)
    y = np.random.default_rng(6).random(60) < expit(3.0 * x[:, 3] - 3.0 * x[:, 70])
    few, many = (
        sparse.fit_logistic(
            KEY, x, y, inclusion_prob=0.02, slab_scale=3.0, num_restarts=r
        )
        for r in (2, 11)
    )
    np.testing.assert_allclose(
        many.restart_objectives[:2], few.restart_objectives, atol=1e-3
    )
    assert many.objective == np.max(many.restart_objectives) >= few.objective - 1e-3
    assert set(sparse.selected(many)) <= {3, 70}
    assert sorted(many.order.tolist()) == list(range(150))


@pytest.mark.full
@pytest.mark.parametrize("intercept_scale", [None, 3.0])
def test_float32_agrees_with_float64(intercept_scale):
    x, y = oracle.logistic_data(7, 20, 5, 0.5)
    single = fit(x, y, tolerance=1e-7, intercept_scale=intercept_scale)
    with enable_x64():
        double = fit(x, y, tolerance=1e-7, intercept_scale=intercept_scale)
    assert single.posterior.loc.dtype == np.float32
    assert float(single.objective) == pytest.approx(float(double.objective), abs=1e-4)
    np.testing.assert_allclose(single.posterior.mean, double.posterior.mean, atol=1e-3)


def test_a_fit_can_be_traced():
    """Without compiling: what depends on values would complain."""
    x, y = oracle.logistic_data(8, 20, 5, 0.5)

    def fits(x, y, alphas):
        return jax.vmap(lambda alpha: fit(x, y, alpha=alpha, intercept_scale=1.0))(
            alphas
        )

    found = jax.eval_shape(fits, x, y, np.array(ALPHAS))
    assert found.posterior.probs.dtype == np.float32
    assert found.posterior.probs.shape == found.order.shape == (3, 5)
    assert found.objective.shape == found.intercept.loc.shape == (3,)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_vmap_over_alpha_is_the_loop():
    x, y = oracle.logistic_data(8, 20, 5, 0.5)
    each = jax.jit(jax.vmap(lambda alpha: fit(x, y, alpha=alpha, intercept_scale=1.0)))(
        np.array(ALPHAS)
    )
    for i, alpha in enumerate(ALPHAS):
        alone = fit(x, y, alpha=alpha, intercept_scale=1.0)
        assert float(each.objective[i]) == pytest.approx(
            float(alone.objective), abs=1e-9
        )
        np.testing.assert_allclose(
            each.posterior.probs[i], alone.posterior.probs, atol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"y": 2.0 * np.arange(20) % 3},
            ValueError,
            r"y must be 0 or 1, got 2: pass booleans",
        ),
        (
            {"y": np.where(np.arange(20) < 3, -1, 1)},
            ValueError,
            r"y must be 0 or 1, got -1.*such as y",
        ),
        (
            {"y": np.array(["a", "b"] * 10)},
            TypeError,
            r"y must be real numbers.*\.cat\.codes, or",
        ),
        (
            {"alpha": -1.0},
            ValueError,
            r"alpha must be positive.*Use jax\.vmap for several",
        ),
        (
            {"inclusion_prob": 1.5},
            ValueError,
            r"inclusion_prob must be in \(0, 1\], got 1.5.*in out of x",
        ),
        (
            {"num_restarts": True},
            ValueError,
            r"num_restarts must be an integer.*of at least",
        ),
    ],
)
def test_what_is_refused(change, error, message):
    x, y = oracle.logistic_data(9, 20, 5)
    with pytest.raises(error, match=message):
        fit(**({"x": x, "y": y} | change))


DRAWS = 40_000


@pytest.fixture(scope="module")
def made_up(context):
    """A linear fit of given factors."""
    x = oracle.linear_data(50, 20, 5, 0.5)[0] + 2.0
    with context():
        dtype = jnp.result_type(float)
        q = SpikeSlab(
            np.array([0.02, 0.9, 0.4, 1.0, 0.6]),
            np.array([0.1, -1.0, 0.6, 1.5, -0.3]),
            np.array([0.9, 0.2, 0.3, 0.25, 0.4]),
        )
        found = RegressionFit(
            q,
            MeanField(np.array(0.7), np.array(0.2)),
            x.mean(axis=0),
            np.array(0.8),
            NoisePosterior(np.array(11.0), np.array(7.0)),
            *[None] * (len(RegressionFit._fields) - 5),
        )
        return x, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), found)


@pytest.fixture(scope="module")
def linear(context):
    x, y = oracle.linear_data(50, 20, 5, 0.5)
    options = {
        "inclusion_prob": 0.3,
        "slab_scale": 1.0,
        "noise_prior": (1.0, 1.0),
        "intercept_scale": 5.0,
    }
    with context():
        return x + 2.0, sparse.fit_linear(KEY, x + 2.0, y + 1.0, **options)


@pytest.fixture(scope="module")
def logistic(context):
    x, y = oracle.logistic_data(51, 20, 5, 0.5)
    with context():
        return x + 2.0, sparse.fit_logistic(
            KEY, x + 2.0, y, inclusion_prob=0.3, slab_scale=1.0, alpha=0.5
        )


@pytest.mark.full
@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize(
    "which", tiered(["made_up", "linear", "logistic"], unit=["made_up", "logistic"])
)
def test_moments_of_the_predictor_are_those_of_draws(which, request):
    x, found = request.getfixturevalue(which)
    draws = sparse.sample_posterior(jax.random.key(1), found, DRAWS)
    coefficients = np.asarray(draws.coefficients, np.float64)
    u = np.asarray(draws.intercept)[:, None] + coefficients @ x.T
    moments = sparse.linear_predictor(found, x)
    columns = np.column_stack([x - x.mean(axis=0), np.ones(len(x))])
    mean, variance = oracle.moments(columns, factors(found))
    np.testing.assert_allclose(moments.mean, mean, atol=1e-5)
    np.testing.assert_allclose(moments.scale, np.sqrt(variance), rtol=1e-4)
    assert np.all(np.abs(u.mean(axis=0) - mean) < 5.0 * np.sqrt(variance / DRAWS))
    included, probs = (
        np.mean(coefficients != 0.0, axis=0),
        np.asarray(found.inclusion_probs, np.float64),
    )
    assert np.all(
        np.abs(included - probs) <= 5.0 * np.sqrt(probs * (1.0 - probs) / DRAWS) + 1e-6
    )
    # The variance of a variance, from the draws.
    fourth = np.mean((u - u.mean(axis=0)) ** 4, axis=0)
    assert np.all(
        np.abs(u.var(axis=0) - variance) < 5.0 * np.sqrt((fourth - variance**2) / DRAWS)
    )


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("which", tiered(["made_up", "linear"], unit=["made_up"]))
def test_prediction_adds_the_noise(which, request):
    x, found = request.getfixturevalue(which)
    moments, whole = sparse.linear_predictor(found, x), sparse.predict(found, x)
    np.testing.assert_array_equal(whole.mean, moments.mean)
    shape, rate = found.noise_posterior
    np.testing.assert_allclose(
        whole.scale**2 - moments.scale**2, rate / (shape - 1.0), rtol=1e-4
    )
    flat = found._replace(
        noise_posterior=found.noise_posterior._replace(shape=np.ones_like(shape))
    )
    assert np.all(np.isinf(sparse.predict(flat, x).scale))
    known = found._replace(noise_posterior=None)
    expected = np.sqrt(moments.scale**2 + found.noise_scale**2)
    np.testing.assert_allclose(sparse.predict(known, x).scale, expected, rtol=1e-6)


@pytest.mark.usefixtures("precision")
def test_probabilities_against_quadrature(logistic):
    x, found = logistic
    moments = sparse.predict_proba(jax.random.key(2), found, x, DRAWS)
    columns = np.column_stack([x - x.mean(axis=0), np.ones(len(x))])
    phi, m, sigma = factors(found)
    z, w = np.polynomial.hermite_e.hermegauss(40)
    exact = np.zeros(len(x))
    for gates in oracle.models(6):
        weight = np.prod(np.where(gates, phi, 1 - phi))
        deviation = np.sqrt((columns[:, gates] ** 2) @ sigma[gates] ** 2)
        exact += (
            weight
            * expit((columns[:, gates] @ m[gates])[:, None] + deviation[:, None] * z)
            @ w
            / w.sum()
        )
    assert np.all(
        np.abs(moments.mean - exact) < 5.0 * np.asarray(moments.scale) / np.sqrt(DRAWS)
    )


def test_predictions_refuse_the_other_kind_and_other_columns(made_up, logistic):
    with pytest.raises(
        TypeError, match=r"^predict takes a linear.*use predict_proba.*for classes"
    ):
        sparse.predict(logistic[1], logistic[0])
    with pytest.raises(TypeError, match="got a linear one: use predict"):
        sparse.predict_proba(KEY, made_up[1], made_up[0])
    with pytest.raises(
        ValueError, match=r"x must have shape \(n, 5\).*of the fit, got"
    ):
        sparse.linear_predictor(made_up[1], np.zeros((2, 4)))
    with pytest.raises(
        ValueError, match=r"num_samples must be an integer.*of at least"
    ):
        sparse.sample_posterior(KEY, made_up[1], 0)
