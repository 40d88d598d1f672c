"""The error bars of fits, on posteriors that are known."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt

KEY = jax.random.key(0)
ALPHAS = (0.25, 0.5, 1.0)


def linear_data(num_rows=30, rho=0.8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 2)) @ np.linalg.cholesky([[1.0, rho], [rho, 1.0]]).T
    return x, x @ [1.0, -0.5] + 0.7 * rng.normal(size=num_rows)


def linear(x, y):
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 2.0).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("row", len(y)):
        numpyro.sample(
            "y", dist.Normal(jnp.asarray(x) @ weights, 0.7), obs=jnp.asarray(y)
        )


def linear_posterior(x, y, alpha):
    """Mean and covariance of the weights, from the normal equations."""
    precision = alpha * x.T @ x / 0.7**2 + np.eye(2) / 4.0
    return np.linalg.solve(precision, alpha * x.T @ y / 0.7**2), np.linalg.inv(
        precision
    )


@functools.cache
def correlated(rho):
    precision = jnp.asarray(np.linalg.inv([[1.0, rho], [rho, 1.0]]), jnp.float32)

    def model():
        z = numpyro.sample(
            "z", dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
        )
        numpyro.sample(
            "y",
            dist.MultivariateNormal(z, precision_matrix=precision),
            obs=jnp.zeros(2),
        )

    return model


@functools.cache
def mean_field(model):
    return nt.fit_gaussian(KEY, model, AutoDiagonalNormal)


def errors(check, mean, sd):
    """Errors of the fit less their bounds, and of the corrected values in standard errors."""
    table = nt.table(check)
    excess = np.r_[
        np.abs(table["mean"] - mean) - table["mean_bound"],
        np.abs(table["sd"] - sd) - table["sd_bound"],
    ]
    misses = np.r_[
        (table["corrected_mean"] - mean) / table["corrected_mean_se"],
        (table["corrected_sd"] - sd) / table["corrected_sd_se"],
    ]
    return excess, misses


@pytest.mark.parametrize(
    "guide", [AutoNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "alpha", [0.5, *(pytest.param(a, marks=pytest.mark.full) for a in (0.25, 1.0))]
)
def test_bounds_and_corrections_of_a_regression(guide, alpha):
    x, y = linear_data()
    mean, cov = linear_posterior(x, y, alpha)
    check = nt.check_fit(KEY, nt.fit_gaussian(KEY, linear, guide, x, y, alpha=alpha))
    assert (check.status, check.alpha) == ("bounded", alpha)
    excess, misses = errors(check, mean, np.sqrt(np.diag(cov)))
    assert np.all(excess <= 1e-5)
    assert np.all(np.abs(misses) < 4.5) or guide is AutoMultivariateNormal
    # A correlation of -.8 is beyond what draws of a mean-field fit can weigh.
    assert check.reference == ("gaussian" if guide is AutoNormal else "fit")
    pairs = check.data["check_covariance"]
    off = np.abs(pairs["covariance"].values - cov)
    assert np.all(
        off <= pairs["covariance_bound"].values + 4.0 * np.sqrt(2.0 / 4000) * cov.max()
    )
    np.testing.assert_allclose(
        pairs["corrected_covariance"].values, cov, atol=0.1 * cov.max()
    )


@pytest.mark.full
@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
def test_where_the_fit_has_no_second_moment_there_is_no_bound_without_a_reference(rho):
    fit = mean_field(correlated(rho))
    check = nt.check_fit(KEY, fit, reference=None)
    table = nt.table(check)
    if rho < 0.5:
        assert check.status == "bounded"
        assert np.all(errors(check, 0.0, 1.0)[0] <= 0.0)
        return
    assert check.status in ("estimated", "unreliable")
    assert table[["mean_bound", "sd_bound"]].isna().all(axis=None)
    assert np.isnan([check.w1_bound, check.w2_bound]).all()
    assert (
        "No bound that says anything" in check.advice
        if check.status == "estimated"
        else "do not cover" in check.advice
    )
    assert table["corrected_mean"].isna().all() == (check.status == "unreliable")


def test_a_reference_covers_what_the_fit_does_not():
    fit = mean_field(correlated(0.9))
    check = nt.check_fit(KEY, fit)
    assert (check.status, check.reference) == ("bounded", "gaussian")
    excess, misses = errors(check, 0.0, 1.0)
    assert np.all(excess <= 0.0)
    assert np.all(np.abs(misses) < 4.5)
    # Half a standard deviation is what is missing: the sds are .44 of the posterior's.
    assert np.all(nt.table(check)["sd_bound"] < 0.9)


@pytest.mark.full
def test_a_given_reference_covers_what_the_fit_does_not():
    fit = mean_field(correlated(0.9))
    full = nt.fit_gaussian(KEY, correlated(0.9), AutoMultivariateNormal)
    check = nt.check_fit(KEY, fit, reference=full)
    assert (check.status, check.reference) == ("bounded", "reference")
    excess, _ = errors(check, 0.0, 1.0)
    assert np.all(excess <= 1e-5)
    # W_2 of the two is exact: 1 - .44 in both directions of a square root.
    assert 0.7 < check.w2_bound < 1.2


def positive(y):
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_constrained_numbers_are_in_their_units(alpha):
    y = 2.0 * np.random.default_rng(1).normal(size=40).astype(np.float32)
    grid = np.linspace(0.3, 8.0, 40_001)
    log_density = -0.5 * (grid / 3.0) ** 2 - alpha * (
        len(y) * np.log(grid) + 0.5 * np.sum(y**2) / grid**2
    )
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    mean = density @ grid
    sd = np.sqrt(density @ (grid - mean) ** 2)
    check = nt.check_fit(KEY, nt.fit_svi(KEY, positive, AutoNormal, y, alpha=alpha))
    assert check.status == "bounded"
    excess, misses = errors(check, mean, sd)
    assert np.all(excess <= 0.0)
    assert np.all(np.abs(misses) < 4.5)
    # A log-normal's moments are exact.
    params = nt.fit_svi(KEY, positive, AutoNormal, y, alpha=alpha).params
    loc, scale = (float(params[f"scale_auto_{part}"]) for part in ("loc", "scale"))
    row = nt.table(check).loc["scale"]
    assert row["mean"] == pytest.approx(np.exp(loc + scale**2 / 2.0), rel=1e-5)
    assert row["sd"] == pytest.approx(
        row["mean"] * np.sqrt(np.expm1(scale**2)), rel=1e-4
    )


GUIDES = [
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    nt.guides.AutoOnlineDiagonalNormal,
    lambda model: by_hand,
]


def by_hand(x, y):
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param(
        "scale", 0.3 * jnp.ones(2), constraint=dist.constraints.positive
    )
    numpyro.sample("weights", dist.Normal(loc, scale).to_event(1))


@pytest.mark.full
@pytest.mark.parametrize("guide", [*GUIDES, AutoIAFNormal])
def test_any_guide(guide):
    x, y = linear_data()
    mean, cov = linear_posterior(x, y, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
        fit = nt.fit_svi(KEY, linear, guide, x, y, alpha=0.5)
    check = nt.check_fit(KEY, fit)
    assert check.status == "bounded"
    excess, misses = errors(check, mean, np.sqrt(np.diag(cov)))
    # Of a guide whose moments are those of its draws the mean has the error of 4,000 draws.
    assert np.all(excess <= 4.0 * np.sqrt(np.diag(cov)).max() / np.sqrt(4000))
    assert np.all(np.abs(misses) < 4.5) or check.divergences.d2_bound < 1e-6


@pytest.mark.full
def test_an_online_state_with_its_data():
    x, y = linear_data()
    online = nt.OnlineVI(
        nt.temper(linear, alpha=0.5), nt.guides.AutoOnlineMultivariateNormal
    )
    state = online.init(KEY, x, y)
    for rows in np.split(np.arange(30), 3):
        state, _ = online.update(state, x[rows], y[rows])
    mean, cov = linear_posterior(x, y, 0.5)
    check = nt.check_fit(KEY, online.posterior(state), x, y)
    assert np.all(errors(check, mean, np.sqrt(np.diag(cov)))[0] <= 1e-3)
    with pytest.raises(ValueError, match="does not hold its data: pass them after it"):
        nt.check_fit(KEY, online.posterior(state))


def test_plain_draws_with_their_density():
    x, y = linear_data()
    mean, cov = linear_posterior(x, y, 0.5)
    rng = np.random.default_rng(2)
    root = np.linalg.cholesky(1.2 * cov)
    noise = rng.normal(size=(4000, 2))
    draws = {"weights": (mean + noise @ root.T).astype(np.float32)}
    log_density = (
        -0.5 * (noise**2).sum(1) - np.log(np.diag(root)).sum() - np.log(2 * np.pi)
    )
    check = nt.check_fit(
        KEY, draws, nt.temper(linear, alpha=0.5), x, y, log_density=log_density
    )
    assert (check.status, check.alpha, check.num_draws) == ("bounded", 0.5, 4000)
    assert np.all(np.abs(errors(check, mean, np.sqrt(np.diag(cov)))[1]) < 4.5)
    # The evidence of a Gaussian model with the power 1/2 on its likelihood.
    residual = y @ y * 0.5 / 0.49 - mean @ np.linalg.solve(cov, mean)
    log_lik = -0.5 * 30 * 0.5 * np.log(2 * np.pi * 0.49)
    log_evidence = (
        log_lik - 0.5 * residual + 0.5 * np.linalg.slogdet(cov)[1] - np.log(4.0)
    )
    assert check.divergences.log_evidence == pytest.approx(log_evidence, abs=0.02)
    for bad in (None, log_density[:-1], log_density[:, None]):
        with pytest.raises(ValueError, match=r"draws need log_density.*and draws of"):
            nt.check_fit(KEY, draws, linear, x, y, log_density=bad)
    with pytest.raises(TypeError, match=r"^draws are.*the tempered model is missing"):
        nt.check_fit(KEY, draws, log_density=log_density)
    with pytest.raises(
        ValueError, match=r"latent sites of the model are.*got draws of"
    ):
        nt.check_fit(
            KEY, {"w": draws["weights"]}, linear, x, y, log_density=log_density
        )


@pytest.mark.full
def test_a_mixture_through_its_bridge():
    rng = np.random.default_rng(3)
    x = np.r_[rng.normal(-4.0, 1.0, 40), rng.normal(4.0, 1.0, 60)][:, None].astype(
        np.float32
    )
    component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
    fit = nt.mixtures.fit(KEY, x, component, num_components=2)
    check = nt.check_fit(KEY, fit, x)
    assert check.status == "bounded"
    table = nt.table(check)
    # Clusters that overlap little leave a product of conjugate posteriors.
    means = np.sort(table["mean"][table.index.str.startswith("loc")])
    np.testing.assert_allclose(
        means, [x[:40].mean() * 40 / 40.01, x[40:].mean() * 60 / 60.01], atol=0.02
    )
    with pytest.raises(ValueError, match="the data that it was fitted to"):
        nt.check_fit(KEY, fit)


def test_rows_have_names_and_columns_of_frames():
    x, y = linear_data()
    frame = pd.DataFrame(x, columns=["age", "dose"]).rename_axis(columns="covariate")

    def model(x, y):
        with numpyro.plate("covariate", x.shape[1]):
            weights = numpyro.sample("weights", dist.Normal(0.0, 2.0))
        with numpyro.plate("row", len(y)):
            numpyro.sample(
                "y", dist.Normal(jnp.asarray(x) @ weights, 0.7), obs=jnp.asarray(y)
            )

    noise = np.random.default_rng(1).normal(size=(200, 2)).astype(np.float32)
    options = {
        "log_density": -0.5 * np.sum(noise**2, axis=1) - np.log(2.0 * np.pi),
        "reference": None,
    }

    def check(**names):
        return nt.check_fit(
            KEY, {"weights": noise}, model, frame, y, **options, **names
        )

    assert nt.table(check()).index.tolist() == ["weights[age]", "weights[dose]"]
    assert nt.table(check(coords={"covariate": ["a", "b"]})).index.tolist() == [
        "weights[a]",
        "weights[b]",
    ]
    with pytest.raises(ValueError, match=r"^dims names.*not among the latent sites"):
        check(dims={"w": ["row"]})


@pytest.mark.full
def test_one_screen_and_attributes():
    check = nt.check_fit(
        KEY, mean_field(correlated(0.3)), num_draws=500, reference=None
    )
    assert len(repr(check).splitlines()) < 25
    assert {"alpha", "pareto_k", "elbo", "cubo", "d2_bound", "status"} <= set(
        check.data["check"].attrs
    )


def test_a_reference_is_weighed_by_the_posterior_of_the_fit():
    x, y = linear_data()
    fit = nt.fit_gaussian(KEY, linear, AutoMultivariateNormal, x, y, alpha=0.5)
    mean, cov = linear_posterior(x, y, 0.5)
    # Of other data, and of another power: wider, and elsewhere.
    other = nt.fit_gaussian(KEY, linear, AutoMultivariateNormal, x, y + 0.3, alpha=0.25)
    check = nt.check_fit(KEY, fit, reference=other)
    assert np.all(np.abs(errors(check, mean, np.sqrt(np.diag(cov)))[1]) < 4.5)
    assert np.all(errors(check, mean, np.sqrt(np.diag(cov)))[0] <= 1e-4)
    with pytest.raises(
        ValueError, match=r"the reference has latents of.*fit the same model"
    ):
        nt.check_fit(KEY, fit, reference=mean_field(correlated(0.9)))


@pytest.mark.full
def test_the_covariance_of_an_exact_fit_is_exact():
    x, y = linear_data()
    check = nt.check_fit(
        KEY, nt.fit_gaussian(KEY, linear, AutoMultivariateNormal, x, y)
    )
    _, cov = linear_posterior(x, y, 1.0)
    pairs = check.data["check_covariance"]
    for name in ("covariance", "corrected_covariance"):
        # To the tolerance of the fit, far below the error of 4,000 draws.
        np.testing.assert_allclose(pairs[name].values, cov, rtol=2e-3)
    assert np.all(
        np.abs(pairs["covariance"].values - cov)
        <= pairs["covariance_bound"].values + 1e-6
    )
    np.testing.assert_allclose(
        np.sqrt(np.diag(pairs["covariance"].values)), nt.table(check)["sd"], rtol=1e-6
    )


def with_scale(model, scale):
    """A mean-field fit of one log-normal latent with this scale and the location 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
        fit = nt.fit_svi(KEY, model, AutoNormal, num_steps=20)
    return fit._replace(
        params={"x_auto_loc": jnp.array(0.0), "x_auto_scale": jnp.array(scale)}
    )


@pytest.mark.full
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_corrected_values_of_positive_numbers_do_not_rest_on_tails_that_no_draw_has_seen(
    scale,
):
    def log_normal():
        numpyro.sample("x", dist.LogNormal(0.0, scale))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    wide = with_scale(log_normal, 1.15 * scale)
    sd = np.exp(scale**2 / 2) * np.sqrt(np.expm1(scale**2))
    rows = [
        nt.table(nt.check_fit(jax.random.key(seed), wide)).loc["x"]
        for seed in range(10)
    ]
    off = [
        np.log(row["corrected_sd"] / sd)
        for row in rows
        if np.isfinite(row["corrected_sd"])
    ]
    assert np.sqrt(np.mean(np.square(off or [0.0]))) < 0.15


@pytest.mark.full
def test_what_nothing_integrates_has_no_moments():
    def wild():
        numpyro.sample("x", dist.LogNormal(0.0, 7.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    row = nt.table(nt.check_fit(KEY, with_scale(wild, 7.0))).loc["x"]
    assert row[["mean", "sd", "mean_bound", "sd_bound"]].isna().all()


def test_draws_of_another_shape_are_refused():
    x, y = linear_data()
    draws = np.zeros((100, 2, 1), np.float32)
    with pytest.raises(
        ValueError,
        match=r"^a draw.*'weights' has shape \(2,\) in the model, got draws of \(2, 1\)",
    ):
        nt.check_fit(KEY, {"weights": draws}, linear, x, y, log_density=np.zeros(100))


@pytest.mark.full
def test_means_by_draws_have_room_for_their_error():
    rng = np.random.default_rng(0)
    y = jnp.ones(3)
    for _ in range(20):
        z = rng.normal(size=500)
        draws = {"theta": jnp.asarray(0.75 + 0.5 * z)}
        density = -0.5 * z**2 - 0.5 * np.log(2 * np.pi * 0.25)
        check = nt.check_fit(KEY, draws, plain, y, log_density=density, reference=None)
        assert np.all(errors(check, 0.75, 0.5)[0] <= 0.0)


@pytest.mark.full
def test_latents_that_single_precision_rounds_are_refused():
    def far(y):
        theta = numpyro.sample(
            "theta", dist.ImproperUniform(dist.constraints.real, (), ())
        )
        numpyro.sample("y", dist.Normal(theta, 1e-3), obs=y)

    params = {"auto_loc": jnp.array([2000.0]), "auto_scale": jnp.array([1e-3])}
    fit = nt.fit_gaussian(KEY, plain, AutoDiagonalNormal, jnp.ones(3))
    other = nt.fit_gaussian(KEY, far, AutoDiagonalNormal, jnp.array(0.0))
    assert set(params) == set(other.params) == set(fit.params)
    with pytest.raises(ValueError, match="draws would be rounded"):
        nt.check_fit(KEY, other._replace(params=params, args=(jnp.array(2000.0),)))


def test_traced_keys_are_refused():
    fit = mean_field(correlated(0.9))
    with pytest.raises(TypeError, match="outside of jit, vmap and grad"):
        jax.jit(lambda key: nt.check_fit(key, fit).w1_bound)(KEY)


@pytest.mark.full
def test_a_bound_of_many_sds_is_none():
    # Of a funnel the Gaussian fit has weights with a light tail and a vast second moment, or none.
    def funnel():
        v = numpyro.sample("v", dist.Normal(0.0, 3.0))
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2.0)))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
        fit = nt.fit_svi(KEY, funnel, AutoNormal)
    check = nt.check_fit(KEY, fit)
    assert check.status in ("estimated", "unreliable")


def local(y):
    with numpyro.plate("row", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y), subsample_size=2) as rows:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[rows])


def plain(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


@pytest.mark.full
def test_what_has_no_density_is_refused():
    y = jnp.array([0.3, 1.2, -0.4, 0.8])
    few = {"num_steps": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
        delta = nt.fit_svi(KEY, plain, AutoDelta, y, **few)
        by_rows = nt.fit_svi(
            KEY, local, AutoNormal, y, alpha=0.5, local_plates=["row"], **few
        )
        part = nt.fit_svi(KEY, subsampled, AutoNormal, y, **few)
        good = nt.fit_svi(KEY, plain, AutoNormal, y, **few)
    with pytest.raises(ValueError, match="AutoDelta has a latent that is a point"):
        nt.check_fit(KEY, delta)
    with pytest.raises(ValueError, match="'z' is in a local plate"):
        nt.check_fit(KEY, by_rows)
    with pytest.raises(ValueError, match="subsamples 2 of 4"):
        nt.check_fit(KEY, part)
    with pytest.raises(ValueError, match="num_draws must be"):
        nt.check_fit(KEY, good, num_draws=50)
    with pytest.raises(ValueError, match='reference is "auto", None or a TemperedFit'):
        nt.check_fit(KEY, good, reference="full")
    with pytest.raises(ValueError, match="holds its data"):
        nt.check_fit(KEY, good, y)
    with pytest.raises(ValueError, match="log_density is of plain draws"):
        nt.check_fit(KEY, good, log_density=np.zeros(100))
    with pytest.raises(TypeError, match="is no tempered posterior"):
        nt.check_fit(KEY, good.elbo)
    with pytest.raises(ValueError, match="NaN, infinite or 0"):
        nt.check_fit(KEY, good._replace(args=(y.at[0].set(jnp.nan),)))
