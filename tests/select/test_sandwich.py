"""Sandwich standard deviations: NumPy's formulas for regressions, counts, clusters and series, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import enable_x64, tiered
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDelta,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_value
from numpyro.optim import Adam
from scipy.optimize import brentq, minimize

import numpyro_tempered as nt
from numpyro_tempered.select.sandwich import _root
from numpyro_tempered.select.sandwich_report import advise

KEY = jax.random.key(0)
ETA = nt.expectations.gauss_hermite(predictor="eta")
NOISE = 1.5
RNG = np.random.default_rng(0)
# Noise that grows with a covariate, and raw units.
X = np.column_stack(
    [np.ones(120), RNG.normal(size=120), 1000.0 * RNG.gamma(1.0, 1.0, 120)]
)
Y = X @ np.array([1.0, 2.0, -0.001]) + RNG.normal(size=120) * (0.3 + np.abs(X[:, 1]))
GROUPS = np.repeat(np.arange(40), [1, 5] * 20)
SCALES = np.array([3.0, 3.0, 0.01])


def regression(x, y, scales=SCALES):
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(3), scales).to_event(1))
    eta = numpyro.deterministic("eta", x @ beta)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


def parts(x, y, scales, alpha):
    """The inverse Hessian and the scores of each row at the mode."""
    hessian = alpha * x.T @ x / NOISE**2 + np.diag(np.asarray(scales) ** -2.0)
    mode = np.linalg.solve(hessian, alpha * x.T @ y / NOISE**2)
    return np.linalg.inv(hessian), alpha * x * (y - x @ mode)[:, None] / NOISE**2


def ridge_sandwich(x, y, scales, alpha):
    inverse, scores = parts(x, y, scales, alpha)
    scores = scores - scores.mean(axis=0)
    return inverse @ scores.T @ scores @ inverse


def least_squares(x, y):
    inverse = np.linalg.inv(x.T @ x)
    return inverse, (y - x @ inverse @ x.T @ y)[:, None] * x


def white(x, y):
    """HC0."""
    inverse, scores = least_squares(x, y)
    return inverse @ scores.T @ scores @ inverse


def cluster_robust(x, y, groups):
    """CR0."""
    inverse, scores = least_squares(x, y)
    sums = np.array(
        [scores[groups == group].sum(axis=0) for group in np.unique(groups)]
    )
    return inverse @ sums.T @ sums @ inverse


def newey_west(x, y, lags):
    inverse, scores = least_squares(x, y)
    middle = scores.T @ scores
    for lag in range(1, lags + 1):
        product = scores[lag:].T @ scores[:-lag]
        middle = middle + (1.0 - lag / (lags + 1)) * (product + product.T)
    return inverse @ middle @ inverse


def fit_regression(alpha=1.0, guide=AutoMultivariateNormal, scales=SCALES):
    return nt.fit_gaussian(
        KEY, regression, guide, X, Y, scales=scales, alpha=alpha, expectation=ETA
    )


@pytest.fixture(scope="module")
def fit():
    return fit_regression(0.5)


@pytest.fixture(scope="module")
def errors(fit):
    return nt.sandwich(jax.random.key(1), fit)


def unfitted(model, *args, alpha=1.0, guide=AutoNormal):
    """A fit that stays where it starts."""
    tempered = model if isinstance(model, nt.temper) else nt.temper(model, alpha)
    instance = guide(tempered)
    svi = SVI(tempered, tempered.guide(instance), Adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, *args))
    return nt.results.TemperedFit(
        tempered, instance, params, alpha, None, None, {}, args, {}, KEY
    )


def test_of_a_linear_regression_it_is_the_formula_in_single_precision(errors):
    want = ridge_sandwich(X, Y, SCALES, 0.5)
    sd = np.sqrt(np.diag(want))
    np.testing.assert_allclose(
        errors.covariance / np.outer(sd, sd), want / np.outer(sd, sd), atol=1e-4
    )
    table = nt.table(errors)
    assert table.index.tolist() == ["beta[0]", "beta[1]", "beta[2]"]
    np.testing.assert_allclose(table["sandwich_sd"], np.sqrt(np.diag(want)), rtol=1e-4)
    for name in ("sd", "curvature_sd"):
        np.testing.assert_allclose(
            table[name], np.sqrt(np.diag(parts(X, Y, SCALES, 0.5)[0])), rtol=1e-3
        )
    np.testing.assert_allclose(table["ratio"], table["sandwich_sd"] / table["sd"])
    assert errors.alpha == 0.5
    assert errors.num_independent == 120
    assert errors.ratios == (table["ratio"].min(), table["ratio"].max())


@pytest.mark.full
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_of_a_linear_regression_it_is_the_formula(alpha, guide, x64):
    errors = nt.sandwich(KEY, fit_regression(alpha, guide))
    np.testing.assert_allclose(
        errors.covariance, ridge_sandwich(X, Y, SCALES, alpha), rtol=1e-8
    )


@pytest.mark.full
def test_without_a_prior_it_is_that_of_white_at_every_power(x64):
    wide = 1e7 * np.ones(3)
    for alpha in (0.1, 1.0):
        errors = nt.sandwich(KEY, fit_regression(alpha, scales=wide))
        np.testing.assert_allclose(errors.covariance, white(X, Y), rtol=1e-8)


@pytest.mark.full
def test_scores_are_summed_within_groups(x64):
    errors = nt.sandwich(
        KEY, fit_regression(0.3, scales=1e7 * np.ones(3)), groups=GROUPS.astype(str)
    )
    np.testing.assert_allclose(
        errors.covariance, cluster_robust(X, Y, GROUPS), rtol=1e-8
    )
    assert errors.num_independent == 40


@pytest.mark.full
def test_of_a_series_it_is_that_of_newey_and_west(x64):
    errors = nt.sandwich(KEY, fit_regression(scales=1e7 * np.ones(3)), block=4)
    np.testing.assert_allclose(errors.covariance, newey_west(X, Y, 3), rtol=1e-8)
    assert errors.num_independent == 30


@pytest.mark.full
def test_the_share_of_the_prior(x64):
    table = nt.table(
        nt.sandwich(KEY, fit_regression(0.5, scales=np.array([0.3, 3.0, 0.01])))
    )
    inverse = parts(X, Y, [0.3, 3.0, 0.01], 0.5)[0]
    want = np.diag(
        inverse @ np.diag(np.array([0.3, 3.0, 0.01]) ** -2.0) @ inverse
    ) / np.diag(inverse)
    np.testing.assert_allclose(table["prior_share"], want, rtol=1e-8)


def jackknife_by_differences(alpha):
    """Standard errors of the logarithm of sandwich over inverse curvature, by the count of each row."""

    def log_ratio(counts):
        hessian = alpha * (counts[:, None] * X).T @ X / NOISE**2 + np.diag(SCALES**-2.0)
        mode = np.linalg.solve(hessian, alpha * (counts[:, None] * X).T @ Y / NOISE**2)
        scores = alpha * X * (Y - X @ mode)[:, None] / NOISE**2
        scores = scores - counts @ scores / counts.sum()
        inverse = np.linalg.inv(hessian)
        sandwich = inverse @ (counts[:, None] * scores).T @ scores @ inverse
        return 0.5 * np.log(np.diag(sandwich) / np.diag(inverse))

    steps = 1e-5 * np.eye(len(Y))
    slopes = [(log_ratio(1.0 + step) - log_ratio(1.0 - step)) / 2e-5 for step in steps]
    return np.linalg.norm(slopes, axis=0)


def test_the_standard_error_in_single_precision_is_the_jackknife_by_differences(errors):
    table = nt.table(errors)
    np.testing.assert_allclose(
        table["ratio_se"] / table["ratio"], jackknife_by_differences(0.5), rtol=1e-3
    )


@pytest.mark.full
def test_the_standard_error_is_the_jackknife_by_differences(x64):
    table = nt.table(nt.sandwich(KEY, fit_regression(0.5)))
    np.testing.assert_allclose(
        table["ratio_se"] / table["ratio"], jackknife_by_differences(0.5), rtol=1e-5
    )


@pytest.mark.full
def test_raw_units_and_collinear_columns_in_single_precision():
    """The Hessian scaled to a unit diagonal has the condition number 2e5; 2.9e3 leave half of the digits."""
    rng = np.random.default_rng(11)
    dose = 90.0 + 5.0 * rng.normal(size=300)
    x = np.column_stack([np.ones(300), dose, 2.0 * dose + rng.normal(size=300)])
    y = x @ np.array([1.0, 0.2, -0.1]) + rng.normal(size=300) * (0.5 + (dose > 90.0))
    scales = np.array([1e3, 10.0, 10.0])
    fit = nt.fit_gaussian(
        KEY, regression, AutoMultivariateNormal, x, y, scales=scales, expectation=ETA
    )
    sd = np.sqrt(np.diag(ridge_sandwich(x, y, scales, 1.0)))
    np.testing.assert_allclose(
        nt.table(nt.sandwich(KEY, fit))["sandwich_sd"], sd, rtol=0.02
    )


def counts_model(y):
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 50.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_of_counts_the_ratio_is_the_root_of_power_and_dispersion(alpha):
    y = np.random.default_rng(1).negative_binomial(2.0, 0.2, 400)
    errors = nt.sandwich(
        KEY, nt.fit_svi(KEY, counts_model, AutoMultivariateNormal, y, alpha=alpha)
    )
    flat = nt.table(errors, "sandwich_unconstrained")
    assert flat.index.tolist() == ["rate"]
    # Of the logarithm of the rate: the sum of squares over the square of the sum.
    np.testing.assert_allclose(
        flat["sandwich_sd"], np.sqrt(400.0 * np.var(y)) / np.sum(y), rtol=1e-3
    )
    np.testing.assert_allclose(flat["sd"], 1.0 / np.sqrt(alpha * np.sum(y)), rtol=0.05)
    # The rate itself, a lognormal.
    sd = flat["sandwich_sd"].item()
    want = np.exp(flat["mean"].item() + sd**2 / 2) * np.sqrt(np.expm1(sd**2))
    np.testing.assert_allclose(nt.table(errors)["sandwich_sd"], want, rtol=1e-3)
    assert ("too narrow" in errors.advice) == (alpha == 1.0)


def thinned(y):
    """Counts at a rate of two less theta, without a likelihood where that is negative."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Poisson(2.0 - theta), obs=y)


@pytest.mark.full
def test_a_likelihood_that_ends_within_two_standard_deviations_of_its_mode_has_a_sandwich():
    y = np.zeros(20)
    y[[3, 8]] = 1.0, 2.0

    def slope(theta):
        return -np.sum(1.0 - y / (2.0 - theta)) + theta / 100.0

    mode = brentq(slope, 1.0, 2.0 - 1e-9, xtol=1e-14)
    hessian = np.sum(y) / (2.0 - mode) ** 2 + 0.01
    assert mode + 2.0 / np.sqrt(hessian) > 2.0
    fit = unfitted(
        thinned,
        y,
        guide=lambda model: AutoNormal(
            model, init_loc_fn=init_to_value(values={"theta": mode})
        ),
    )
    errors = nt.sandwich(KEY, fit)
    np.testing.assert_allclose(
        errors.covariance, 20.0 * np.var(y / (2.0 - mode)) / hessian**2, rtol=1e-3
    )


def location_scale(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    sd = numpyro.sample("sd", dist.LogNormal(0.0, 2.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(mean, sd), obs=y)


@pytest.mark.full
def test_skewed_data_under_a_normal_model():
    """Mean and log scale by hand, at a mode of SciPy's: their scores are correlated by the third moment."""
    y, alpha = np.random.default_rng(2).gamma(1.0, 1.0, 300), 0.5

    def loss(theta):
        fit = theta[1] + 0.5 * (y - theta[0]) ** 2 * np.exp(-2.0 * theta[1])
        return alpha * np.sum(fit) + theta[0] ** 2 / 200.0 + theta[1] ** 2 / 8.0

    mean, log_sd = minimize(loss, [1.0, 0.0], tol=1e-12).x
    z = (y - mean) * np.exp(-log_sd)
    scores = -alpha * np.column_stack([z * np.exp(-log_sd), z**2 - 1.0])
    cross = 2.0 * alpha * np.sum(z) * np.exp(-log_sd)
    hessian = np.array(
        [
            [alpha * 300.0 * np.exp(-2.0 * log_sd) + 0.01, cross],
            [cross, 2.0 * alpha * np.sum(z**2) + 0.25],
        ]
    )
    scores = scores - scores.mean(axis=0)
    inverse = np.linalg.inv(hessian)
    want = inverse @ scores.T @ scores @ inverse
    errors = nt.sandwich(
        KEY, nt.fit_svi(KEY, location_scale, AutoMultivariateNormal, y, alpha=alpha)
    )
    np.testing.assert_allclose(errors.covariance, want, rtol=1e-3)
    assert abs(want[0, 1]) > 0.3 * np.sqrt(want[0, 0] * want[1, 1])


@pytest.mark.full
def test_where_the_model_is_right_the_ratio_is_one_within_its_error(x64):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3000, 3))
    y = x @ np.array([1.0, -1.0, 0.0]) + NOISE * rng.normal(size=3000)
    fit = nt.fit_gaussian(
        KEY,
        regression,
        AutoMultivariateNormal,
        x,
        y,
        scales=np.ones(3),
        expectation=ETA,
    )
    errors = nt.sandwich(KEY, fit)
    table = nt.table(errors)
    assert np.all(np.abs(table["ratio"] - 1.0) < 4.0 * table["ratio_se"])
    assert np.all(table["ratio_se"] < 0.03)
    assert "none of it is more than sampling error" in errors.advice


@pytest.mark.full
def test_a_guide_that_is_too_narrow_is_told_from_a_wrong_model():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 1)) + 0.3 * rng.normal(size=(400, 3))
    y = x.sum(axis=1) + NOISE * rng.normal(size=400)
    fit = nt.fit_gaussian(
        KEY, regression, AutoNormal, x, y, scales=np.ones(3), expectation=ETA
    )
    errors = nt.sandwich(KEY, fit)
    table = nt.table(errors)
    np.testing.assert_allclose(
        table["curvature_sd"],
        np.sqrt(np.diag(parts(x, y, np.ones(3), 1.0)[0])),
        rtol=1e-3,
    )
    assert np.all(table["curvature_sd"] > 2.0 * table["sd"])
    assert (
        "that is the guide, narrower than the posterior: take nt.linear_response"
        in errors.advice
    )
    assert (
        "that is the guide"
        not in nt.sandwich(KEY, nt.linear_response(KEY, fit, expectation=ETA)).advice
    )


def test_the_advice_allows_for_the_number_of_comparisons():
    of_three = {"ratio": np.array([1.11, 1.0, 0.9]), "ratio_se": np.full(3, 0.05)}
    columns = of_three | {"sd": np.ones(3), "curvature_sd": np.ones(3)}
    advice = functools.partial(advise, ["a", "b", "c"], units=1000, num_latents=3)
    # Of three numbers, two standard errors are no finding; of one number they are.
    of_three = advice(columns, decided=[])
    assert (
        "varies 0.90 +- 0.05 (c) to 1.11 +- 0.05 (a) times as much as its sd says"
        in of_three
    )
    assert of_three.endswith("says; none of it is more than sampling error.")
    assert "its intervals of a are too narrow" in advice(columns, decided=["b", "c"])


def test_the_advice_says_what_is_wrong_and_where_it_comes_from():
    columns = {"ratio": np.array([2.0, 1.0, 0.5]), "ratio_se": np.full(3, 0.05)}
    columns |= {"sd": np.ones(3), "curvature_sd": np.array([1.9, 1.0, 1.0])}
    names = ["a", "b", "c"]
    text = advise(names, columns, units=1000, num_latents=3, decided=[])
    assert (
        "; its intervals of a are too narrow; its intervals of c are too wide; for a that is the guide"
        in text
    )
    assert "are independent" not in text
    right = columns | {"curvature_sd": np.ones(3)}
    assert "the guide" not in advise(
        names, right, units=1000, num_latents=3, decided=[]
    )
    assert "; only 5 units are independent, so this is rough" in advise(
        names, right, 5, 3, []
    )
    # What is not known, and what the prior decides on, is not looked at.
    unknown = right | {"ratio": np.array([2.0, np.nan, 0.5])}
    assert "varies 0.50 +- 0.05 (c) times as much" in advise(
        names, unknown, 1000, 3, ["a"]
    )
    assert advise(names, unknown, 1000, 3, ["a", "c"]).startswith(
        "The prior decides on all numbers: "
    )


def hand_written(x, y, scales=SCALES):
    loc = numpyro.param("loc", jnp.zeros(3))
    tril = numpyro.param(
        "tril",
        jnp.diag(jnp.asarray(scales)),
        constraint=dist.constraints.lower_cholesky,
    )
    numpyro.sample("beta", dist.MultivariateNormal(loc, scale_tril=tril))


@pytest.mark.full
@pytest.mark.parametrize(
    "guide",
    [
        AutoNormal,
        AutoLowRankMultivariateNormal,
        AutoLaplaceApproximation,
        pytest.param(AutoBNAFNormal, marks=pytest.mark.slow),
        lambda _: hand_written,
    ],
    ids=["AutoNormal", "AutoLowRank", "AutoLaplace", "AutoBNAF", "hand-written"],
)
def test_it_is_the_same_for_all_guides(guide):
    """What differs is the fit's own standard deviation."""
    x = X / np.array([1.0, 1.0, 1000.0])
    scales = np.array([3.0, 3.0, 10.0])
    fit = nt.fit_svi(KEY, regression, guide, x, Y, scales=scales)
    table = nt.table(nt.sandwich(KEY, fit))
    np.testing.assert_allclose(
        table["sandwich_sd"],
        np.sqrt(np.diag(ridge_sandwich(x, Y, scales, 1.0))),
        rtol=0.05,
    )
    # Within the tolerance of the fit.
    inverse = parts(x, Y, scales, 1.0)[0]
    own = (
        1.0 / np.sqrt(np.diag(np.linalg.inv(inverse)))
        if guide is AutoNormal
        else np.sqrt(np.diag(inverse))
    )
    np.testing.assert_allclose(table["sd"], own, rtol=0.2)


@pytest.mark.full
def test_it_takes_linear_responses_and_choices_of_alpha(fit):
    want = nt.table(nt.sandwich(KEY, fit_regression(0.5, AutoNormal)))["sandwich_sd"]
    response = nt.table(
        nt.sandwich(
            KEY,
            nt.linear_response(KEY, fit_regression(0.5, AutoNormal), expectation=ETA),
        )
    )
    np.testing.assert_allclose(response["sandwich_sd"], want, rtol=1e-3)
    choice = nt.select_alpha(
        KEY,
        regression,
        AutoMultivariateNormal,
        X,
        Y,
        alphas=[0.5],
        criterion=nt.alpha.safe_bayes(blocks=2),
        expectation=ETA,
        num_samples=100,
    )
    np.testing.assert_allclose(
        nt.table(nt.sandwich(KEY, choice))["sandwich_sd"], want, rtol=1e-3
    )


@pytest.mark.full
def test_names_are_those_of_the_data_frame():
    def model(x, y):
        with numpyro.plate("feature", x.shape[1]):
            beta = numpyro.sample("beta", dist.Normal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(jnp.asarray(x) @ beta, 1.0), obs=y)

    frame = pd.DataFrame(X[:, :2], columns=["one", "dose"]).rename_axis(
        columns="feature"
    )
    table = nt.table(
        nt.sandwich(KEY, nt.fit_svi(KEY, model, AutoNormal, frame, pd.Series(Y)))
    )
    assert table.index.tolist() == ["beta[one]", "beta[dose]"]
    with pytest.raises(ValueError, match="which are not among the latent sites"):
        nt.sandwich(KEY, unfitted(model, X[:, :2], Y), dims={"y": ["row"]})


def proportions(y):
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Categorical(share), obs=y)


@pytest.mark.full
def test_proportions_have_coordinates_of_their_own():
    y = np.random.default_rng(4).choice(3, size=400, p=[0.2, 0.3, 0.5])
    errors = nt.sandwich(KEY, nt.fit_svi(KEY, proportions, AutoMultivariateNormal, y))
    shares = (np.bincount(y) + 1.0) / 403.0
    # Multinomial; by 4,000 draws.
    np.testing.assert_allclose(
        nt.table(errors)["sandwich_sd"],
        np.sqrt(shares * (1.0 - shares) / 400.0),
        rtol=0.05,
    )
    assert nt.table(errors, "sandwich_unconstrained").index.tolist() == [
        "share[0]",
        "share[1]",
    ]


@pytest.mark.full
def test_a_prior_that_decides_is_told():
    with pytest.warns(
        UserWarning,
        match=r"most of what is known about beta\[0\]: the sandwich leaves its bias out",
    ):
        errors = nt.sandwich(KEY, fit_regression(scales=np.array([0.01, 3.0, 0.01])))
    assert "beta[0]" not in errors.advice
    with pytest.warns(UserWarning, match="most of what is known"):
        errors = nt.sandwich(KEY, fit_regression(1e-6))
    assert "says nothing" in errors.advice


@pytest.mark.full
def test_dependent_rows_are_noticed(fit):
    rows = np.repeat(np.arange(60), 2)
    copies = nt.fit_gaussian(
        KEY,
        regression,
        AutoMultivariateNormal,
        X[rows],
        Y[rows],
        scales=SCALES,
        expectation=ETA,
    )
    with pytest.warns(
        nt.alpha.DependenceWarning,
        match="60 of 120 rows repeat.*The sandwich takes the rows",
    ):
        nt.sandwich(KEY, copies)
    single = nt.fit_gaussian(
        KEY,
        regression,
        AutoMultivariateNormal,
        X[:60],
        Y[:60],
        scales=SCALES,
        alpha=2.0,
        expectation=ETA,
    )
    together, alone = nt.sandwich(KEY, copies, groups=rows), nt.sandwich(KEY, single)
    np.testing.assert_allclose(
        together.covariance, alone.covariance, rtol=1e-3, atol=1e-6
    )


# What is refused.


def normal(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y), subsample_size=5) as rows:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=jnp.asarray(y)[rows])


def local(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Normal(theta, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def weighted(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)), numpyro.handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def as_many_as_rows(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def kinked(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Laplace(theta, 1.0), obs=y)


def with_param(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Normal(theta, numpyro.param("scale", 1.0)), obs=y)


def of_one_number(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    numpyro.factor("total", -jnp.sum((y - theta) ** 2))


def funnel(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0.0, scale))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(level[jnp.arange(len(y)) % 4], 1.0), obs=y)


SOME = RNG.normal(size=20)
REFUSALS = {
    "subsample": (
        lambda: unfitted(subsampled, SOME),
        "subsamples .* and weights need all data: leave subsample_size out",
    ),
    "local": (
        lambda: unfitted(local, SOME),
        "'z'.* have a value for each row of plate 'n'.*integrate them out",
    ),
    "local plates": (
        lambda: unfitted(nt.temper(local, 0.5, local_plates=["n"]), SOME),
        "latent site 'z' is in a local plate",
    ),
    "weights": (
        lambda: unfitted(weighted, SOME),
        r"^the model has a scale beside alpha.*know whether such weights count copies.*pass rows without weights",
    ),
    "as many latents": (
        lambda: unfitted(as_many_as_rows, SOME),
        "20 rows do not tell how 20 latent",
    ),
    "kink": (
        lambda: unfitted(kinked, SOME),
        r"^site 'y' is Laplace.*has a kink.*check_coverage",
    ),
    "param": (
        lambda: unfitted(with_param, SOME),
        r"^the model has.*params .'scale'.*give them priors",
    ),
    "no rows": (lambda: unfitted(of_one_number, SOME), "put all in one plate of rows"),
    "no mode": (
        lambda: unfitted(funnel, 0.01 * SOME),
        "has no mode that Newton's method finds",
    ),
    "powers of the prior": (
        lambda: unfitted(nt.temper(normal, {"y": 0.0}), SOME),
        r"^at alpha.*no sample of data moves",
    ),
    "the prior": (
        lambda: unfitted(normal, SOME, alpha=0.0),
        r"^at alpha.*no sample of data moves",
    ),
    "not at the mode": (
        lambda: unfitted(normal, SOME + 9.0),
        "standard deviations from the least loss.*Fit again",
    ),
    "draws off the mode": (
        lambda: nt.results.SampledPosterior(
            {"theta": jnp.linspace(8.0, 9.0, 100)[None]},
            nt.results.Target(normal, (SOME,), {}, KEY),
        ),
        "the mean of the draws is .* is skewed or has several modes",
    ),
    "a point": (
        lambda: unfitted(normal, SOME, guide=AutoDelta),
        r"^the guide.*a latent that is a point",
    ),
}


AT_A_GLANCE = ["param", "the prior", "local plates", "weights", "kink", "a point"]


@pytest.mark.parametrize("name", tiered(REFUSALS, unit=AT_A_GLANCE))
def test_what_has_no_sandwich_is_refused(name):
    fit, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        nt.sandwich(KEY, fit())


POWERS = np.linspace(0.0, 1.0, 20)


def by_factor(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.factor("y", dist.Normal(theta, 1.0).log_prob(y))


WEIGHED = {
    "array": nt.temper(normal, POWERS),
    "mapping": nt.temper(normal, {"y": POWERS}),
    "factor": nt.temper(by_factor, POWERS),
}


@pytest.mark.parametrize("name", tiered(WEIGHED, unit=["mapping"]))
def test_powers_weigh_the_losses(name):
    """Both matrices of a normal location in closed form; the datum of weight 0 is none."""
    hessian, weight, y = POWERS.sum() + 0.01, POWERS[1:], SOME[1:]
    mode = (weight * y).sum() / hessian
    scores = weight * (mode - y)
    expected = np.sqrt(np.square(scores - scores.mean()).sum()) / hessian
    fit = unfitted(WEIGHED[name], SOME)
    params = {**fit.params, "theta_auto_loc": jnp.asarray(mode, jnp.float32)}
    errors = nt.sandwich(KEY, fit._replace(params=params))
    table = nt.table(errors)
    assert table["sandwich_sd"].item() == pytest.approx(expected, rel=1e-4)
    assert table["curvature_sd"].item() == pytest.approx(hessian**-0.5, rel=1e-4)
    assert errors.num_independent == 19
    assert set(errors.alpha) == {"y"}


NUM_SLOPES = 4


def regression_with_scale(x, y):
    slopes = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([NUM_SLOPES]).to_event(1))
    scale = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(x @ slopes, scale), obs=y)


@pytest.mark.full
def test_of_a_skewed_posterior_losses_are_averaged_over_the_fit(x64):
    """With log s Gaussian too, exp(-2 log s) tilts the mean of the slopes, and all averages have closed forms."""
    x, alpha, d = RNG.normal(size=(60, NUM_SLOPES)), 0.08, NUM_SLOPES + 1
    y = x.sum(axis=1) + RNG.normal(size=60)

    def losses(theta, cov):
        precision = jnp.exp(-2.0 * theta[-1] + 2.0 * cov[-1, -1])
        residual = y - x @ (theta[:-1] - 2.0 * cov[:-1, -1])
        squares = residual**2 + jnp.sum(x @ cov[:-1, :-1] * x, axis=1)
        return alpha * (theta[-1] + 0.5 * precision * squares)

    def total(theta, cov):
        of_scale = 0.5 * jnp.exp(2.0 * theta[-1] + 2.0 * cov[-1, -1]) - theta[-1]
        of_slopes = 0.5 * (theta[:-1] @ theta[:-1] + jnp.trace(cov[:-1, :-1]))
        return losses(theta, cov).sum() + of_slopes + of_scale

    def unpack(flat):
        root = jnp.zeros((d, d)).at[jnp.tril_indices(d)].set(flat[d:])
        return flat[:d], root

    @jax.jit
    @jax.value_and_grad
    def negative_elbo(flat):
        theta, root = unpack(flat)
        entropy = jnp.sum(jnp.log(jnp.abs(jnp.diag(root))))
        return total(theta, root @ root.T) - entropy

    start = np.concatenate([np.zeros(d), 0.5 * np.eye(d)[np.tril_indices(d)]])
    theta, root = unpack(minimize(negative_elbo, start, jac=True, method="BFGS").x)
    cov = root @ root.T
    hessian = jax.hessian(total)(theta, cov)
    np.testing.assert_allclose(jnp.linalg.inv(hessian), cov, atol=1e-3)
    scores = jax.jacobian(losses)(theta, cov)
    scores = scores - scores.mean(axis=0)
    expected = cov @ scores.T @ scores @ cov
    fit = unfitted(
        regression_with_scale, x, y, alpha=alpha, guide=AutoMultivariateNormal
    )
    params = {"auto_loc": theta, "auto_scale_tril": jnp.linalg.cholesky(cov)}
    errors = nt.sandwich(KEY, fit._replace(params=params))
    table = nt.table(errors, "sandwich_unconstrained")
    np.testing.assert_allclose(table["curvature_sd"], table["sd"], rtol=0.03)
    np.testing.assert_allclose(
        table["sandwich_sd"], np.sqrt(np.diag(expected)), rtol=0.05
    )


def test_wrong_calls(fit):
    with pytest.raises(TypeError, match=r"^got int, which is no tempered posterior"):
        nt.sandwich(KEY, 1)
    with pytest.raises(TypeError, match=r"rng_key.*the call is"):
        nt.sandwich(fit, KEY)
    with pytest.raises(
        ValueError, match="num_draws must be an integer of at least 100"
    ):
        nt.sandwich(KEY, fit, num_draws=3)
    with pytest.raises(
        ValueError, match="groups must be a label for each of the 120 data"
    ):
        nt.sandwich(KEY, fit, groups=[0, 1])
    with pytest.raises(
        ValueError,
        match=r"4 groups do not tell how 3 latent dimensions.*be integrated out",
    ):
        nt.sandwich(KEY, fit, groups=np.arange(120) % 4)
    with pytest.raises(ValueError, match=r"plate 'rows' does not hold.*plates that do"):
        nt.sandwich(KEY, fit, plate="rows")


@pytest.mark.full
def test_single_precision_that_does_not_suffice_is_told():
    x = np.column_stack(
        [
            np.ones(50),
            np.linspace(0.0, 1.0, 50),
            np.linspace(0.0, 1.0, 50) + 1e-5 * RNG.normal(size=50),
        ]
    )
    fit = unfitted(regression, x, x[:, 1], guide=AutoNormal)._replace(
        kwargs={"scales": 1e4 * np.ones(3)}
    )
    with pytest.raises(ValueError, match=r"condition number|no mode"):
        nt.sandwich(KEY, fit)


@pytest.mark.full
def test_double_precision_agrees(errors):
    with enable_x64():
        double = nt.sandwich(jax.random.key(1), fit_regression(0.5))
    np.testing.assert_allclose(nt.table(double), nt.table(errors), rtol=1e-3, atol=1e-6)


def test_the_coordinates_of_a_hessian_in_raw_units_make_it_the_identity():
    units = np.array([1e-8, 1.0, 1e7])
    hessian = (np.eye(3) + 0.4) * np.outer(units, units)
    root = _root(hessian, float(np.finfo(np.float32).eps))
    np.testing.assert_allclose(root.T @ hessian @ root, np.eye(3), atol=1e-10)
    # Of one that is not definite they have one size.
    np.testing.assert_allclose(
        _root(np.diag([4.0, -9.0, 0.0]), 1e-7), np.diag([0.5, 1.0 / 3.0, 1.0])
    )
