"""Criteria of coverage on few rows, by the closed forms of a regression whose noise depends on a covariate."""

import math
from types import SimpleNamespace

import alpha_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import chi2, norm
from test_known_answers import KEY, PRIOR_SD, regression

import numpyro_tempered as nt
from numpyro_tempered.select.alpha.base import Draws, Task
from numpyro_tempered.select.alpha.coverage import _median, summarise
from numpyro_tempered.select.alpha.coverage_report import _share, advise
from numpyro_tempered.select.alpha.data_weights import resamples
from numpyro_tempered.select.alpha.powers import Powers, advise_on_coverage

NOISE, NUM_DATA, NUM_BOOTSTRAP = 0.5, 20, 40
X = np.column_stack([np.ones(NUM_DATA), np.linspace(-1.0, 1.0, NUM_DATA)])
Y = X @ [1.0, 2.0] + (0.3 + np.abs(X[:, 1])) * np.random.default_rng(3).normal(
    size=NUM_DATA
)


@pytest.fixture(scope="module")
def task():
    """One for all, whose minimiser is found once."""
    with enable_x64():
        return Task(regression, KEY, (X, Y), {})


@pytest.fixture(scope="module")
def counts():
    with enable_x64():
        return np.asarray(resamples(KEY, NUM_BOOTSTRAP, NUM_DATA))


def distances(alpha, counts, rows=None):
    return oracle.distances(alpha, X, Y, NOISE, PRIOR_SD, counts, rows)


def check_errors(verdict, limit):
    """The standard error over samples is relative to that of the limit of many data."""
    relative = oracle.jackknife_se(limit, X, Y, NOISE) / limit(X, Y, NOISE)
    expected = math.hypot(
        verdict.alpha * relative, verdict.attrs["alpha_se_resampling"]
    )
    np.testing.assert_allclose(verdict.attrs["alpha_se"], expected, rtol=1e-5)


def test_fisher_of_a_regression(task, counts, x64):
    verdict = nt.alpha.bootstrap_fisher(num_bootstrap=NUM_BOOTSTRAP).decide(
        KEY, task, np.ones(1), None
    )
    alpha, resampling = oracle.fisher(X, Y, NOISE, PRIOR_SD, counts)
    np.testing.assert_allclose(verdict.alpha, alpha, rtol=1e-9)
    np.testing.assert_allclose(
        verdict.attrs["alpha_se_resampling"], resampling, rtol=1e-7
    )
    check_errors(verdict, oracle.fisher_limit)


def test_gpc_of_all_latents_together(task, counts, x64):
    verdict = nt.alpha.gpc(0.8, num_bootstrap=NUM_BOOTSTRAP).decide(
        KEY, task, np.ones(1), None
    )
    threshold = chi2.ppf(0.8, 2)
    np.testing.assert_allclose(
        np.quantile(distances(verdict.alpha, counts), 0.8), threshold, rtol=1e-5
    )
    check_errors(verdict, oracle.joint_limit)
    assert (verdict.attrs["level"], verdict.attrs["posterior"]) == (0.8, "laplace")
    assert "the Laplace approximation's 80% sets" in verdict.advice


def test_gpc_of_one_latent(task, counts, x64):
    criterion = nt.alpha.gpc(
        0.8, num_bootstrap=NUM_BOOTSTRAP, of=lambda values: values["beta"][0]
    )
    verdict = criterion.decide(KEY, task, np.ones(1), None)
    rows, threshold = np.array([[1.0, 0.0]]), chi2.ppf(0.8, 1)
    np.testing.assert_allclose(
        np.quantile(distances(verdict.alpha, counts, rows), 0.8), threshold, rtol=1e-5
    )
    curve = list(
        zip(verdict.attrs["coverage_alphas"], verdict.attrs["coverage"], strict=True)
    )
    assert len(curve) > 3
    for alpha, share in curve:
        if abs(alpha / verdict.alpha - 1.0) > 1e-4:
            assert share == np.mean(distances(alpha, counts, rows) <= threshold)

    def limit(*data):
        j, i = oracle.moments(
            *data[:3], np.ones(NUM_DATA) if len(data) < 4 else data[3]
        )
        inverse = np.linalg.inv(j)
        return inverse[0, 0] / (inverse @ i @ inverse)[0, 0]

    check_errors(verdict, limit)


def test_gpc_by_the_draws_of_each_resample(task, counts, x64):
    """With quantiles of each posterior for draws, of a quantity whose posterior is normal."""
    grid = np.geomspace(0.05, 1.0, 5)
    criterion = nt.alpha.gpc(
        0.8,
        posterior="method",
        of=lambda values: values["beta"][1],
        num_bootstrap=NUM_BOOTSTRAP,
    )
    plan = criterion.plan(KEY, task)
    np.testing.assert_array_equal(plan.weights, counts)
    quantiles = norm.ppf((np.arange(1000) + 0.5) / 1000)

    @jax.jit
    @jax.vmap
    def reduce(mean, sd):
        slopes = mean + sd * quantiles
        return plan.reduce(
            Draws({"beta": slopes[:, None] * np.array([0.0, 1.0])}, None, None, None)
        )

    weighted = counts[:, None, :, None] * grid[:, None, None] * X / NOISE**2
    precision = np.swapaxes(weighted, -1, -2) @ X + np.eye(2) / PRIOR_SD**2
    cov = np.linalg.inv(precision)
    mean = (cov @ (np.swapaxes(weighted, -1, -2) @ Y)[..., None])[..., 1, 0]
    reduced = reduce(mean.ravel(), np.sqrt(cov[..., 1, 1]).ravel())
    reduced = jax.tree.map(
        lambda leaf: leaf.reshape(*mean.shape, *leaf.shape[1:]), reduced
    )
    verdict = criterion.decide(KEY, task, grid, reduced)
    # The ratios of the grid, interpolated in logarithms.
    rows, threshold = np.array([[0.0, 1.0]]), chi2.ppf(0.8, 1)
    of_grid = np.stack(
        [distances(alpha, counts, rows) / threshold for alpha in grid], axis=1
    )
    np.testing.assert_array_equal(
        verdict.columns["coverage"], np.mean(of_grid <= 1.0, axis=0)
    )
    np.testing.assert_array_equal(
        verdict.columns["criterion"], np.abs(verdict.columns["coverage"] - 0.8)
    )
    at_alpha = [
        np.exp(np.interp(np.log(verdict.alpha), np.log(grid), np.log(each)))
        for each in of_grid
    ]
    # Quantiles of a posterior in 1000 parts.
    np.testing.assert_allclose(np.quantile(at_alpha, 0.8), 1.0, rtol=0.02)
    assert "the method's own 80% sets" in verdict.advice


def test_draws_that_do_not_vary_have_no_coverage(task, x64):
    criterion = nt.alpha.gpc(0.8, posterior="method", num_bootstrap=NUM_BOOTSTRAP)
    shape = (NUM_BOOTSTRAP, 2)
    sets = {
        "mean": np.zeros((*shape, 2)),
        "factor": np.full((*shape, 2, 2), np.nan),
        "radius": np.zeros(shape),
    }
    with pytest.raises(
        ValueError,
        match=r"the draws of a fit to a resample do not vary.*or another method",
    ):
        criterion.decide(KEY, task, np.array([0.5, 1.0]), sets)


def test_advice_on_coverage_names_the_parameter_that_is_covered_least():
    powers = Powers(
        ["a", "b"],
        np.zeros(2),
        np.ones(2),
        np.array([0.5, 0.1]),
        np.zeros(2),
        (0.3, 0.01),
    )
    covers = 2.0 * norm.cdf(norm.ppf(0.975) * np.sqrt([1.0, 0.2])) - 1.0
    advice = advise_on_coverage(0.5, powers)
    assert (
        f"cover about {covers.mean():.2f}, those of b {covers[1]:.2f}: for coverage take alpha = 0.3 "
        in advice
    )
    assert advise_on_coverage(0.31, powers).endswith(
        "there is no better power for coverage."
    )
    alone = Powers(*(part[:1] for part in powers[:5]), powers.joint)
    assert "those of" not in advise_on_coverage(0.5, alone).split(":")[0]


def test_the_sd_of_a_fit_is_that_of_a_sample():
    draws = {"theta": jnp.array([[1.0], [2.0], [6.0], [3.0]])}
    refits = summarise(draws, None, np.array([0.5]))
    np.testing.assert_allclose(
        refits.sd, [np.std([1.0, 2.0, 6.0, 3.0], ddof=1)], rtol=1e-6
    )
    assert _share(np.array([0.9]), np.array([0.3]), 0) == "90% +- 30.0%"


def test_the_centre_of_a_guide_is_in_the_order_of_the_numbers():
    def two_sites(y):
        numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    guide = AutoNormal(two_sites)
    handlers.seed(guide, KEY)(0.5)
    params = {
        "a_auto_loc": 1.0,
        "b_auto_loc": jnp.array([2.0, 3.0]),
        "a_auto_scale": 1.0,
        "b_auto_scale": 1.0,
    }
    np.testing.assert_array_equal(
        _median(SimpleNamespace(latents=["b", "a"]), guide, params), [1.0, 2.0, 3.0]
    )
    assert _median(None, lambda y: None, params) is None


ADVICE = {
    # Of 200 resamples 95% intervals of one number cover 92 to 98% by chance; of two 91.5 to 98.5%.
    "by chance": (
        ["a"],
        [0.93],
        [1.1],
        "cover 93% +- 1.0%: no more from 95% than resampling explains.",
    ),
    "one too narrow": (
        ["a"],
        [0.8],
        [2.0],
        "cover 80% +- 1.0%: too narrow. The centre varies 2 times as much as its sd says; where widths go as "
        "1/sqrt(alpha), alpha = 0.12 would equal the two.",
    ),
    "one too wide": (
        ["a"],
        [1.0],
        [0.5],
        "cover 100% +- 1.0%: too wide. The centre varies 0.5 times as much",
    ),
    "two that agree": (
        ["a", "b"],
        [0.8, 0.85],
        [1.9, 1.8],
        "cover 80% +- 1.0% (a) to 85% +- 1.0% (b): too narrow for a, b. The centre of a varies 1.9 times as much "
        "as its sd says; where widths go as 1/sqrt(alpha), alpha = 0.15 would equal the two.",
    ),
    # Ratios differ by chance by e^(4/20) at most.
    "two that do not": (
        ["a", "b"],
        [0.8, 0.93],
        [1.9, 1.3],
        "too narrow for a. The centre of a varies 1.9 times as much as its sd says; no one power would equal "
        "the two for all numbers: see nt.sandwich.",
    ),
    "both ways": (
        ["a", "b"],
        [1.0, 0.8],
        [0.6, 1.9],
        "too narrow for b, and too wide for a. The centre of b varies 1.9",
    ),
    "no ratio": (
        ["a"],
        [0.8],
        [0.0],
        "varies 0 times as much as its sd says; no one power would equal the two",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_on_the_coverage_of_intervals(case):
    names, covers, ratio, expected = ADVICE[case]
    levels, other = np.array([0.5, 0.95]), np.full(len(names), 0.5)
    coverage = np.stack([other, covers], axis=1)
    text = advise(
        names,
        coverage,
        np.full(coverage.shape, 0.01),
        np.array(ratio),
        levels,
        0.5,
        num=200,
    )
    assert text.startswith("In 200 resamples 95% intervals at alpha = 0.5 cover ")
    assert expected in text
