"""Coverage of tempered intervals in resamples: closed forms, the report of select_alpha, and wrong calls."""

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
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from scipy.stats import norm

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import group, group_names

KEY = jax.random.key(0)
ETA = nt.expectations.gauss_hermite(predictor="eta")
LEVELS = np.array([0.5, 0.8, 0.9, 0.95])
Y = 3.0 + 2.0 * np.random.default_rng(5).standard_normal(100)


def location(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    eta = numpyro.deterministic("eta", jnp.broadcast_to(theta, jnp.shape(y)))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def check_location(alpha, y=Y, guide=AutoMultivariateNormal, **options):
    return nt.alpha.check_coverage(
        KEY, location, guide, y, alpha=alpha, **{"expectation": ETA, **options}
    )


def normal_coverage(ratio, levels=LEVELS):
    """Of intervals whose standard deviation is a part 1 / ratio of the right one."""
    return 2.0 * norm.cdf(norm.ppf(0.5 + levels / 2.0) / ratio) - 1.0


def within(coverage, expected, num, others=0.0):
    return np.all(
        np.abs(coverage - expected)
        < 4.0 * np.sqrt(expected * (1.0 - expected) / num) + others
    )


@pytest.fixture(scope="module")
def checks():
    return {alpha: check_location(alpha) for alpha in (1.0, 0.25)}


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_of_a_normal_mean_it_is_the_closed_form(checks, alpha):
    table = nt.table(checks[alpha])
    assert table.index.tolist() == [("theta", level) for level in LEVELS]
    sd = 1.0 / np.sqrt(alpha * 100.0 + 0.01)
    ratio = np.std(Y) / 10.0 / sd
    assert within(table["coverage"], normal_coverage(ratio), 200)
    np.testing.assert_allclose(table["sd"], sd, rtol=0.01)
    np.testing.assert_allclose(
        table["width"], 2.0 * norm.ppf(0.5 + LEVELS / 2.0) * sd, rtol=0.02
    )
    # Within half a thousandth of a nat, at which fits aim: a mean is off by less than .04 standard deviations.
    np.testing.assert_allclose(
        table["centre"], sd**2 * alpha * Y.sum(), rtol=0.0, atol=0.04 * sd
    )
    # A standard deviation of 200 has a relative error of 1/20.
    np.testing.assert_allclose(table["ratio"], ratio, rtol=0.2)
    np.testing.assert_allclose(table["power"], alpha / table["ratio"] ** 2)
    share = (200.0 * table["coverage"] + 0.5) / 201.0
    np.testing.assert_allclose(
        table["coverage_se"], np.sqrt(share * (1.0 - share) / 200.0)
    )


def test_the_shares_are_those_of_the_centres(checks):
    """Counted from the centres of the resamples and exact intervals, up to draws at the edge of an interval."""
    centres = group(checks[1.0].data, "resamples")["centre"].values[:, 0]
    centre = nt.table(checks[1.0])["centre"].iloc[0]
    half = norm.ppf(0.5 + LEVELS / 2.0) / np.sqrt(100.01)
    shares = np.mean(np.abs(centres[:, None] - centre) <= half, axis=0)
    np.testing.assert_allclose(nt.table(checks[1.0])["coverage"], shares, atol=0.03)


def test_the_advice_says_what_is_wrong(checks):
    wrong, right = checks[1.0].advice, checks[0.25].advice
    share, se = nt.table(checks[1.0])[["coverage", "coverage_se"]].iloc[2]
    assert (
        f"90% intervals at alpha = 1 cover {share:.0%} +- {100.0 * se:.1f}%:" in wrong
    )
    assert "too narrow" in wrong
    assert (
        f"alpha = {nt.table(checks[1.0])['power'].iloc[0]:.2g} would equal the two"
        in wrong
    )
    assert right.endswith("no more from 90% than resampling explains.")
    assert wrong.split()[0] in repr(checks[1.0])
    assert checks[1.0].converged.shape == (200,)
    assert checks[1.0].converged.all()


@pytest.mark.full
def test_double_precision_agrees(checks):
    with enable_x64():
        double = check_location(1.0, Y.copy())
    np.testing.assert_allclose(
        nt.table(double)["coverage"],
        normal_coverage(np.std(Y) / 10.0 * np.sqrt(100.01)),
        atol=0.15,
    )
    assert double.data["resamples"]["centre"].dtype == np.float64


@pytest.mark.full
@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_other_guides_by_stochastic_steps(guide):
    table = nt.table(
        check_location(0.25, guide=guide, expectation=None, num_bootstrap=60)
    )
    # Fits are within their tolerance.
    np.testing.assert_allclose(table["ratio"], np.std(Y) / 2.0, rtol=0.4)
    assert within(table["coverage"], LEVELS, 60, others=0.06)


def hand_written(y):
    loc = numpyro.param("loc", 0.0)
    numpyro.sample(
        "theta",
        dist.Normal(
            loc, numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        ),
    )


@pytest.mark.full
def test_a_guide_that_does_not_know_its_median():
    table = nt.table(
        check_location(
            0.25, guide=lambda _: hand_written, expectation=None, num_bootstrap=60
        )
    )
    assert within(table["coverage"], LEVELS, 60, others=0.06)


@pytest.mark.full
def test_chains():
    options = {
        "num_bootstrap": 60,
        "num_draws": 400,
        "num_warmup": 200,
        "expectation": None,
    }
    check = check_location(1.0, guide=NUTS, **options)
    assert within(
        nt.table(check)["coverage"],
        normal_coverage(np.std(Y) / 10.0 * np.sqrt(100.01)),
        60,
        others=0.03,
    )


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ beta)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


@pytest.mark.full
def test_of_a_regression_with_unequal_noise_each_coefficient_has_its_own():
    rng = np.random.default_rng(6)
    x = np.column_stack([np.ones(400), rng.normal(size=400)])
    y = x @ np.array([1.0, 2.0]) + rng.normal(size=400) * np.sqrt(
        0.25 + 0.75 * x[:, 1] ** 2
    )
    check = nt.alpha.check_coverage(
        KEY, regression, AutoMultivariateNormal, x, y, expectation=ETA
    )
    inverse = np.linalg.inv(x.T @ x)
    scores = (y - x @ inverse @ x.T @ y)[:, None] * x
    ratio = np.sqrt(np.diag(inverse @ scores.T @ scores @ inverse) / np.diag(inverse))
    coverage = nt.table(check)["coverage"].unstack("level").to_numpy()
    for shares, each in zip(coverage, ratio, strict=True):
        assert within(shares, normal_coverage(each), 200, others=0.02)
    assert "too narrow for beta[1]" in check.advice
    assert "no one power" in check.advice


def counts_model(y):
    log_rate = numpyro.sample("log_rate", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)


@pytest.mark.full
def test_of_counts_the_right_power_is_the_inverse_dispersion():
    y = np.random.default_rng(7).negative_binomial(3.0, 0.3, 300)
    dispersion = np.var(y) / np.mean(y)
    for alpha in (1.0, 1.0 / dispersion):
        check = nt.alpha.check_coverage(
            KEY, counts_model, AutoMultivariateNormal, y, alpha=alpha
        )
        ratio = np.sqrt(alpha * dispersion)
        assert within(
            nt.table(check)["coverage"], normal_coverage(ratio), 200, others=0.02
        )
        np.testing.assert_allclose(nt.table(check)["power"], 1.0 / dispersion, rtol=0.4)


@pytest.mark.full
def test_whole_groups_are_resampled():
    """Five copies of each row count as one: sqrt(5) in standard deviations."""
    y, groups = np.repeat(Y[:40] / 2.0, 5), np.repeat(np.arange(40), 5)
    with pytest.warns(
        nt.alpha.DependenceWarning, match="Resamples take the rows for independent"
    ):
        alone = check_location(1.0, y)
    together = check_location(1.0, y, groups=groups)
    sd = np.std(Y[:40] / 2.0)
    np.testing.assert_allclose(nt.table(alone)["ratio"], sd, rtol=0.2)
    np.testing.assert_allclose(nt.table(together)["ratio"], np.sqrt(5.0) * sd, rtol=0.2)
    assert together.num_independent == 40


@pytest.mark.full
def test_blocks_of_a_series_are_resampled():
    rng = np.random.default_rng(8)
    noise = rng.normal(size=404)
    y = sum(noise[k : k + 400] for k in range(5))
    check = check_location(1.0, y, block=20)
    # The circular block bootstrap has the variance of Bartlett's weights: sums of blocks around the end.
    sums = np.array([np.sum(np.roll(y, -k)[:20]) for k in range(400)])
    np.testing.assert_allclose(
        nt.table(check)["bootstrap_sd"], np.std(sums) / np.sqrt(20 * 400), rtol=0.2
    )
    assert check.num_independent == 20
    assert "Only 20 units are independent" in check.advice
    assert check_location(1.0, y, block="auto").num_independent < 100


@pytest.mark.full
def test_names_are_those_of_the_data_frame():
    def model(x, y):
        with numpyro.plate("feature", 2):
            beta = numpyro.sample("beta", dist.Normal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(jnp.asarray(x) @ beta, 1.0), obs=y)

    x = np.random.default_rng(9).normal(size=(50, 2))
    frame = pd.DataFrame(x, columns=["age", "dose"]).rename_axis(columns="feature")
    check = nt.alpha.check_coverage(
        KEY,
        model,
        AutoMultivariateNormal,
        frame,
        pd.Series(x.sum(axis=1)),
        num_bootstrap=20,
        levels=[0.9],
    )
    assert [name for name, _ in nt.table(check).index] == ["beta[age]", "beta[dose]"]


@pytest.mark.full
def test_constants_have_no_intervals():
    def correlated(y):
        factor = numpyro.sample("factor", dist.LKJCholesky(2))
        with numpyro.plate("n", len(y)):
            numpyro.sample(
                "y", dist.MultivariateNormal(jnp.zeros(2), scale_tril=factor), obs=y
            )

    y = np.random.default_rng(10).normal(size=(80, 2))
    check = nt.alpha.check_coverage(
        KEY, correlated, AutoMultivariateNormal, y, num_bootstrap=20
    )
    assert nt.table(check).index.get_level_values("number").unique().tolist() == [
        "factor[1, 0]",
        "factor[1, 1]",
    ]


@pytest.mark.full
def test_fits_that_have_not_converged_are_told():
    check = check_location(
        1.0, guide=AutoNormal, expectation=None, num_steps=2, num_bootstrap=20
    )
    assert not check.converged.any()
    assert "of the fits have not converged" in check.advice


# Through select_alpha.


@pytest.mark.full
def test_select_alpha_has_the_check_in_its_report():
    options = {
        "criterion": nt.alpha.magnitude(),
        "expectation": ETA,
        "num_samples": 200,
    }
    choice = nt.select_alpha(
        KEY, location, AutoMultivariateNormal, Y, coverage=True, **options
    )
    assert isinstance(choice.coverage, nt.alpha.CoverageCheck)
    assert choice.coverage.alpha == choice.alpha
    assert choice.coverage.advice in choice.advice
    assert choice.advice in choice.data.attrs["advice"]
    assert "CoverageCheck" in repr(choice)
    assert {"coverage", "alpha_selection", "calibrated_powers"} <= set(
        group_names(choice.data)
    )
    pd.testing.assert_frame_equal(
        nt.table(choice, "coverage"), nt.table(choice.coverage)
    )
    # The selected power is that of the resamples.
    assert within(nt.table(choice, "coverage")["coverage"], LEVELS, 200)
    without = nt.select_alpha(KEY, location, AutoMultivariateNormal, Y, **options)
    assert without.coverage is None
    assert without.alpha == choice.alpha
    assert "coverage" not in group_names(without.data)


# What is refused.


def powered(y):
    return nt.temper(location, 0.5)(y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [0.9, 0.5]}, "levels must be a list of increasing probabilities"),
        ({"levels": 0.9}, "levels must be a list of increasing probabilities"),
        ({"levels": [90.0]}, r"levels must be in \(0, 1\)"),
        ({"alpha": 0.0}, r"alpha must be.*positive and finite, got"),
        ({"num_bootstrap": 5}, "num_bootstrap must be an integer of at least 20"),
        ({"num_draws": 5}, "num_draws must be an integer of at least 100"),
        ({"num_warmup": -1}, "num_warmup must be an integer of at least 0"),
        (
            {"groups": np.zeros(100)},
            r"groups has one label for all data.*which nothing is independent",
        ),
        ({"plate": "rows"}, r"plate 'rows' does not hold.*plates that do"),
        ({"dims": {"eta": ["row"]}}, r"^dims names.*not among the latent sites"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_location(**{"alpha": 1.0, **options})


@pytest.mark.full
def test_what_cannot_be_resampled_is_refused():
    online = lambda model: nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)  # noqa: E731
    with pytest.raises(
        ValueError, match="resamples weigh the data, which a stream cannot"
    ):
        nt.alpha.check_coverage(KEY, location, online, Y)
    with pytest.raises(ValueError, match=r"has the power or scale 0\.5 already"):
        nt.alpha.check_coverage(KEY, powered, AutoNormal, Y)
    with pytest.raises(ValueError, match="has a point mass"):
        nt.alpha.check_coverage(KEY, location, AutoDelta, Y)
    with pytest.raises(TypeError, match="is built already"):
        nt.alpha.check_coverage(KEY, location, AutoNormal(location), Y)
    with pytest.raises(TypeError, match="rng_key"):
        nt.alpha.check_coverage(location, AutoNormal, Y)
    with pytest.raises(ValueError, match="coverage=True: resamples weigh the data"):
        nt.select_alpha(
            KEY, location, online, Y, criterion=nt.alpha.magnitude(), coverage=True
        )
