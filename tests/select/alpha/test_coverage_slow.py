"""Coverage at the chosen alpha, and the criteria through ``select_alpha``: minutes."""

import math
import sys
from pathlib import Path

import alpha_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import enable_x64
from numpyro.infer import NUTS
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from scipy.stats import chi2, norm
from test_known_answers import (
    KEY,
    PRIOR_SD,
    heteroskedastic,
    location,
    normal_data,
    regression,
)

import numpyro_tempered as nt
from numpyro_tempered.select.alpha.base import Draws, Task
from numpyro_tempered.select.alpha.data_weights import resamples
from numpyro_tempered.select.alpha.gpc import solve

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from alpha_known_answers import study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table():
    return study(
        (0.25, 1.0, 4.0), num_data=100, num_seeds=200, num_bootstrap=500
    ).set_index(["tau2", "criterion"])


@pytest.mark.parametrize("criterion", ["lyddon", "bootstrap Fisher", "GPC (Laplace)"])
@pytest.mark.parametrize("tau2", [0.25, 1.0, 4.0])
def test_intervals_at_the_chosen_alpha_cover(table, tau2, criterion):
    row = table.loc[tau2, criterion]
    assert abs(row["coverage"] - 0.95) <= 3.0 * math.sqrt(0.95 * 0.05 / 200)
    # 1 / var of 100 data has the mean 100 / 97 / tau², and its own scatter.
    assert abs(row["mean"] * tau2 - 1.0) < 0.03 + 4.0 * row["sd"] * tau2 / math.sqrt(
        200
    )
    assert row["reported_se"] == pytest.approx(row["sd"], rel=0.2)


def test_untempered_intervals_do_not(table):
    for tau2, right in ((0.25, 1.0), (4.0, 2.0 * 0.8365 - 1.0)):
        coverage = table.loc[(tau2, "alpha = 1"), "coverage"]
        # At tau² = 4 they hold |N(0, 1)| < 1.96 / 2, at 1/4 nearly all.
        assert abs(coverage - right) < 4.0 * math.sqrt(0.25 / 200)
        assert abs(coverage - 0.95) > 3.0 * math.sqrt(0.95 * 0.05 / 200)


def test_safe_bayes_stays_at_one(table):
    assert np.all(table.xs("SafeBayes R-log", level="criterion")["mean"] == 1.0)


def test_fisher_of_a_regression(x64):
    x, y = heteroskedastic()
    counts = np.asarray(resamples(KEY, 200, len(y)))
    verdict = nt.alpha.bootstrap_fisher(num_bootstrap=200).decide(
        KEY, Task(regression, KEY, (x, y), {}), GRID, None
    )
    want, resampling = oracle.fisher(x, y, 0.5, PRIOR_SD, counts)
    np.testing.assert_allclose(verdict.alpha, want, rtol=1e-10)
    np.testing.assert_allclose(
        verdict.attrs["alpha_se_resampling"], resampling, rtol=1e-8
    )
    relative = oracle.jackknife_se(
        oracle.fisher_limit, x, y, 0.5
    ) / oracle.fisher_limit(x, y, 0.5)
    np.testing.assert_allclose(
        verdict.attrs["alpha_se"], math.hypot(want * relative, resampling), rtol=1e-6
    )


def test_gpc_of_all_latents_together(x64):
    x, y = heteroskedastic()
    counts = np.asarray(resamples(KEY, 200, len(y)))
    verdict = nt.alpha.gpc(0.9, num_bootstrap=200).decide(
        KEY, Task(regression, KEY, (x, y), {}), GRID, None
    )
    found = oracle.distances(verdict.alpha, x, y, 0.5, PRIOR_SD, counts)
    np.testing.assert_allclose(np.quantile(found, 0.9), chi2.ppf(0.9, 2), rtol=1e-5)


def test_gpc_of_one_latent(x64):
    x, y = heteroskedastic()
    task = Task(regression, KEY, (x, y), {})
    counts = np.asarray(resamples(KEY, 200, len(y)))
    # Of the slope, whose noise is three times that of the intercept.
    rows = np.array([[0.0, 1.0]])
    criterion = nt.alpha.gpc(
        0.95, num_bootstrap=200, of=lambda values: values["beta"][1]
    )
    verdict = criterion.decide(KEY, task, np.ones(1), None)
    threshold = chi2.ppf(0.95, 1)
    found = oracle.distances(verdict.alpha, x, y, 0.5, PRIOR_SD, counts, rows)
    np.testing.assert_allclose(np.quantile(found, 0.95), threshold, rtol=1e-5)
    curve = zip(
        verdict.attrs["coverage_alphas"], verdict.attrs["coverage"], strict=True
    )
    apart = [(a, share) for a, share in curve if abs(a / verdict.alpha - 1.0) > 1e-4]
    assert apart
    for a, share in apart:
        assert share == np.mean(
            oracle.distances(a, x, y, 0.5, PRIOR_SD, counts, rows) <= threshold
        )
    rows = np.array([[1.0, 0.0]])
    of_intercept, _, _ = solve(
        lambda a: oracle.distances(a, x, y, 0.5, PRIOR_SD, counts, rows) / threshold,
        0.95,
        0.2,
        (0.0, math.inf),
    )
    assert verdict.alpha < 0.8 * of_intercept


Y = np.random.default_rng(4).normal(0.5, 2.0, 60)
GRID = np.geomspace(0.02, 1.0, 9)


def exact_alpha(counts, level):
    """GPC on the exact posteriors, whose credible sets are those of Laplace's method."""
    means = counts @ Y / len(Y)
    threshold = chi2.ppf(level, 1)
    return solve(
        lambda a: oracle.location_distances(a, Y, 1.0, 10.0, means) / threshold,
        level,
        0.3,
        (0.0, math.inf),
    )[0]


@pytest.mark.parametrize("of", [None, lambda values: values["theta"]])
def test_gpc_by_the_draws_of_each_resample(x64, of):
    """With quantiles of each posterior for draws."""
    criterion = nt.alpha.gpc(0.9, posterior="method", of=of, num_bootstrap=60)
    task = Task(location, KEY, (Y,), {})
    plan = criterion.plan(KEY, task)
    counts = np.asarray(resamples(KEY, 60, len(Y)))
    np.testing.assert_array_equal(plan.weights, counts)
    normal = norm.ppf((np.arange(2000) + 0.5) / 2000)

    @jax.jit
    @jax.vmap
    def reduce(mean, sd):
        flat = mean + sd * normal[:, None]
        return plan.reduce(Draws({"theta": flat[:, 0]}, None, None, flat))

    precision = GRID * len(Y) + PRIOR_SD**-2
    means = GRID * (counts @ Y)[:, None] / precision
    reduced = reduce(means.ravel(), np.tile(precision**-0.5, 60))
    reduced = jax.tree.map(lambda leaf: leaf.reshape(60, 9, *leaf.shape[1:]), reduced)
    verdict = criterion.decide(KEY, task, GRID, reduced)
    # Quantiles of a posterior in 2000 parts, and ratios interpolated in log alpha.
    assert verdict.alpha == pytest.approx(exact_alpha(counts, 0.9), rel=0.01)
    assert verdict.columns["coverage"].shape == GRID.shape
    assert np.all(np.diff(verdict.columns["coverage"]) <= 0.0)
    assert (
        np.argmin(verdict.columns["criterion"])
        in np.argsort(np.abs(np.log(GRID / verdict.alpha)))[:2]
    )
    assert "the method's own 90% sets" in verdict.advice


# Through select_alpha.


def counts_model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)


def overdispersed(num_data=200):
    rng = np.random.default_rng(8)
    x = np.column_stack([np.ones(num_data), rng.normal(size=num_data)])
    return x, rng.poisson(np.exp(1.0 + 0.5 * x[:, 1]) * rng.gamma(2.0, 0.5, num_data))


def test_the_method_makes_no_difference_to_lyddon():
    x, y = overdispersed()
    options = {"alphas": [0.5, 1.0], "criterion": nt.alpha.lyddon(), "num_samples": 500}
    by_guide = nt.select_alpha(
        KEY, counts_model, AutoMultivariateNormal, x, y, **options
    )
    by_nuts = nt.select_alpha(KEY, counts_model, NUTS, x, y, num_warmup=500, **options)
    want = oracle.poisson_lyddon(x, y)
    assert by_guide.alpha == by_nuts.alpha == pytest.approx(want, rel=1e-4)
    assert by_guide.alpha < 0.7
    assert "so temper" in by_guide.advice
    for choice in (by_guide, by_nuts):
        table = nt.table(choice.data)
        assert table.index[table["selected"]].tolist() == [choice.alpha]
    # Both posteriors at that alpha have d effective parameters each; Var[log L] of 500 draws is known to a tenth.
    effective = [
        nt.table(c.data).loc[c.alpha, "effective_parameters"]
        for c in (by_guide, by_nuts)
    ]
    np.testing.assert_allclose(effective, 2.0, rtol=0.5)
    with enable_x64():
        # Other objects: jax keeps what it has made of these in single precision.
        again = x.copy(), y.copy()
        exact = nt.select_alpha(
            KEY, counts_model, AutoMultivariateNormal, *again, **options
        )
    assert exact.alpha == pytest.approx(want, rel=1e-9)


def test_data_frames():
    x, y = overdispersed()
    frame = pd.DataFrame({"one": x[:, 0], "x": x[:, 1], "y": y})
    by_frame = nt.select_alpha(
        KEY,
        counts_model,
        AutoNormal,
        frame[["one", "x"]],
        frame["y"],
        alphas=[1.0],
        criterion=nt.alpha.bootstrap_fisher(num_bootstrap=100),
    )
    task = Task(counts_model, KEY, (x, y), {})
    assert 0.2 < by_frame.alpha < 0.8
    alone = nt.alpha.bootstrap_fisher(num_bootstrap=100).decide(
        KEY, task, np.ones(1), None
    )
    # Other resamples of the same data.
    assert (
        abs(by_frame.alpha - alone.alpha)
        < 5.0 * math.sqrt(2.0) * alone.attrs["alpha_se_resampling"]
    )


def test_gpc_calibrates_the_method():
    """A mean-field guide's sets of two correlated latents are too narrow even if the model is right."""
    rng = np.random.default_rng(9)
    x = rng.multivariate_normal([0.0, 0.0], [[1.0, 0.9], [0.9, 1.0]], 150)
    y = x.sum(axis=1) + 0.5 * rng.normal(size=150)
    criterion = nt.alpha.gpc(
        0.9, posterior="method", of=lambda values: values["beta"][0], num_bootstrap=100
    )
    found = {
        guide: nt.select_alpha(
            KEY,
            regression,
            guide,
            x,
            y,
            criterion=criterion,
            alphas=np.geomspace(0.05, 2.0, 8),
        )
        for guide in (AutoDiagonalNormal, AutoMultivariateNormal)
    }
    counts = np.random.default_rng(0).multinomial(150, np.full(150, 1 / 150), 2000)
    off = (
        np.array([oracle.weighted_fit(x, y, c)[0] for c in counts])
        - oracle.weighted_fit(x, y, np.ones(150))[0]
    )
    # Of one slope, given the other and whatever it is, without the prior.
    given = np.einsum("bn,n->b", counts, x[:, 0] ** 2) / 0.5**2
    whatever = 1.0 / np.array(
        [0.5**2 * np.linalg.inv((c[:, None] * x).T @ x)[0, 0] for c in counts]
    )
    for guide, precision in (
        (AutoDiagonalNormal, given),
        (AutoMultivariateNormal, whatever),
    ):
        exact = chi2.ppf(0.9, 1) / np.quantile(off**2 * precision, 0.9)
        # Of a hundred resamples and 200 draws each; the relative standard error of the first alone is known.
        resampling = found[guide].data.attrs["alpha_se_resampling"]
        assert abs(found[guide].alpha - exact) < 4.0 * resampling + 0.05 * exact
    assert found[AutoDiagonalNormal].alpha < 0.4 * found[AutoMultivariateNormal].alpha
    assert {"criterion", "coverage"} <= set(
        nt.table(found[AutoDiagonalNormal].data).columns
    )


def hierarchical(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", 4):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta[jnp.arange(len(y)) % 4], 1.0), obs=y)


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@pytest.mark.parametrize(
    "make",
    [
        nt.alpha.lyddon,
        nt.alpha.bootstrap_fisher,
        nt.alpha.gpc,
        lambda: nt.alpha.gpc(posterior="method"),
    ],
)
def test_what_has_no_minimiser_is_refused_before_any_fit(make):
    y = np.random.default_rng(0).normal(size=80).astype(np.float32)
    with pytest.raises(ValueError, match="does not identify the latents"):
        nt.select_alpha(KEY, hierarchical, NUTS, y, criterion=make())
    x = np.column_stack([np.ones(80), np.linspace(-1.0, 1.0, 80)])
    with pytest.raises(ValueError, match="separable classes"):
        nt.select_alpha(
            KEY, logistic, NUTS, x, (x[:, 1] > 0).astype(int), criterion=make()
        )


def test_a_prior_that_forbids_the_minimiser_has_no_gpc():
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 0.01))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    y = normal_data(1.0).astype(np.float32) + 3.0
    with pytest.raises(ValueError, match="no power has coverage"):
        nt.select_alpha(KEY, model, NUTS, y, criterion=nt.alpha.gpc())
