"""The tempered path against closed forms: evidence, expected log-likelihood, and what is refused."""

import math

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64, tiered
from numpyro import handlers
from numpyro.infer import AIES, HMC, NUTS, DiscreteHMCGibbs
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from oracles import gaussian_kl, tempered_normal_log_evidence, tempered_normal_posterior
from scipy import special, stats

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import assemble, dataset, group, group_names
from numpyro_tempered.select.alpha.mcmc import warn_if_not_mixed
from numpyro_tempered.select.evidence import (
    check_finite,
    integrate,
    log_evidence,
    mean_se,
    stepping_stones,
    svi_columns,
)
from numpyro_tempered.select.path import temper_path

KEY = jax.random.key(5)
Y = np.array([1.2, -0.3, 2.4, 0.9, 1.7, 0.1])
PRIOR_MEAN, PRIOR_SD, NOISE = 0.5, 2.0, 1.5
ALPHAS = [0.05, 0.2, 0.5, 1.0]
GRID = np.array([0.0, *ALPHAS])
# Short runs whose numbers are of no interest.
BRIEF = {"alphas": [0.5, 1.0], "num_samples": 4, "num_warmup": 0, "num_steps": 2}


# One for each run of the model.
RUNS = []


def model(y=None):
    RUNS.append(None)
    theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
    with numpyro.plate("n", len(Y)):
        numpyro.sample("y", dist.Normal(theta, NOISE), obs=y)


def hmc(model):
    # A number of steps, as a trajectory of fixed length has no end where the step size falls to 0.
    return HMC(model, num_steps=6, trajectory_length=None)


def short_hmc(model):
    # Two steps are about half a period of a Gaussian; six can be a whole one, from which no chain moves.
    return HMC(model, num_steps=2, trajectory_length=None)


def exact_log_z(alpha, y=Y, prior_mean=PRIOR_MEAN, prior_sd=PRIOR_SD):
    return tempered_normal_log_evidence(y, alpha, prior_mean, prior_sd, NOISE)


def exact_moments(alpha):
    """Mean and variance of log L under the tempered posterior: log L = c - k (theta - mean of y)²."""
    m, s = tempered_normal_posterior(Y, alpha, PRIOR_MEAN, PRIOR_SD, NOISE)
    k, off = len(Y) / (2 * NOISE**2), m - Y.mean()
    at_best = stats.norm.logpdf(Y, Y.mean(), NOISE).sum()
    return at_best - k * (s**2 + off**2), k**2 * (2 * s**4 + 4 * s**2 * off**2)


def draws_of(grid):
    """Four draws at each alpha whose mean and variance are the exact ones."""
    mean, var = np.transpose([exact_moments(a) for a in grid])
    pattern = np.sqrt(0.75) * np.array([-1.0, 1.0, -1.0, 1.0])
    return mean + pattern[None, :, None] * np.sqrt(var)


def no_se(draws, k):
    return 0.0


def assert_within(found, want, se, factor=5.0):
    assert np.all(
        np.abs(np.asarray(found) - want)
        <= factor * np.asarray(se) + 1e-5 * np.abs(want)
    ), (found, want, se)


# The closed forms themselves.


@pytest.mark.parametrize("alpha", [0.05, 0.4, 1.0, 2.5])
def test_the_oracles_know_the_derivatives(alpha):
    h = 1e-4
    mean, var = exact_moments(alpha)
    assert (exact_log_z(alpha + h) - exact_log_z(alpha - h)) / (2 * h) == pytest.approx(
        mean, rel=1e-6
    )
    slope = (exact_moments(alpha + h)[0] - exact_moments(alpha - h)[0]) / (2 * h)
    assert slope == pytest.approx(var, rel=1e-6)


# From draws to evidence.


@pytest.mark.parametrize(("corrected", "order"), [(True, 4), (False, 2)])
def test_the_rules_have_their_orders(corrected, order):
    exact = exact_log_z(1.2) - exact_log_z(0.2)
    errors = []
    for intervals in (40, 80):
        grid = np.linspace(0.2, 1.2, intervals + 1)
        errors.append(
            integrate(grid, draws_of(grid), corrected, no_se).value[-1] - exact
        )
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


def test_the_riemann_sums_hold_the_integral_between_them():
    grid = np.linspace(0.0, 1.0, 6)
    found = integrate(grid, draws_of(grid), True, no_se)
    exact = exact_log_z(grid)
    assert np.all(found.left[1:] < exact[1:])
    assert np.all(exact[1:] < found.right[1:])
    np.testing.assert_allclose(
        found.trapezoid, 0.5 * (found.left + found.right), rtol=1e-12
    )
    assert found.value[0] == found.trapezoid[0] == 0.0


def test_a_coarse_grid_does_not_leave_the_riemann_sums():
    grid = np.array([1e-4, 1.0])
    draws = draws_of(grid)
    mean, var = draws.mean((0, 1)), draws.var((0, 1), ddof=1)
    assert mean.mean() - np.diff(var)[0] / 12 > mean[1]  # the correction overshoots
    found = integrate(grid, draws, True, no_se)
    assert found.value[1] == found.right[1]


def test_stepping_stones_are_means_of_powers():
    log_lik = np.random.default_rng(0).normal(-700.0, 30.0, (2, 50, 3))
    grid = np.array([0.0, 0.3, 1.0])
    found, variance = stepping_stones(
        grid, log_lik, lambda draws, k: mean_se(draws, True)[1]
    )
    for k, h in enumerate([0.3, 0.7]):
        flat = h * log_lik[..., k].ravel()
        assert found[k] == pytest.approx(
            special.logsumexp(flat) - math.log(100), abs=1e-12
        )
        ratios = np.exp(flat - flat.max())
        assert variance[k] == pytest.approx(
            ratios.var(ddof=1) / 100 / ratios.mean() ** 2, rel=1e-10
        )


@pytest.mark.parametrize("runs", tiered([100, 300], unit=[100]))
def test_standard_errors_are_those_of_repeated_runs(runs):
    """AR(1) draws with exact moments: the spread of estimates over runs is what each run reports."""
    rng, rho = np.random.default_rng(1), 0.5
    grid = np.array([0.0, 0.3, 0.6, 1.0])
    mean, sd = np.array([-9.0, -6.0, -5.0, -4.5]), np.array([1.5, 1.0, 0.8, 0.6])
    noise = rng.normal(size=(runs, 2, 500, len(grid)))
    chain = np.empty_like(noise)
    chain[:, :, 0] = noise[:, :, 0]
    for t in range(1, noise.shape[2]):
        chain[:, :, t] = (
            rho * chain[:, :, t - 1] + math.sqrt(1 - rho**2) * noise[:, :, t]
        )
    columns = [
        log_evidence(grid, mean + sd * draws, exact_prior=False) for draws in chain
    ]
    for name in ("log_z_integral", "log_z"):
        values = np.array([c[name] for c in columns])
        reported = np.sqrt(np.mean([c[f"{name}_se"] ** 2 for c in columns], axis=0))
        # A standard deviation from 100 runs has a relative error of 7%, from 300 of 4%.
        np.testing.assert_allclose(
            reported[1:], values.std(axis=0, ddof=1)[1:], rtol=0.2
        )
    # Counting the draws as independent would miss a factor of sqrt(3).
    iid = np.mean([mean_se(draws[..., 0], True)[1] for draws in chain])
    assert np.mean([mean_se(draws[..., 0], False)[1] for draws in chain]) > 1.5 * iid


def test_constant_and_infinite_draws_have_plain_standard_errors():
    assert mean_se(np.full((1, 10), 3.0), False) == (10.0, 0.0)
    assert mean_se(np.array([[0.0, -np.inf, 1.0, 2.0]]), True) == (4.0, math.inf)


# MCMC.


def expected_corrected(grid):
    """What the corrected rule gives with exact moments, its first interval exact."""
    return (
        exact_log_z(grid[1])
        + integrate(grid[1:], draws_of(grid[1:]), True, no_se).value
    )


LONG = {"num_samples": 800, "num_warmup": 300, "num_chains": 2}


@pytest.fixture(
    scope="module", params=["HMC", pytest.param("NUTS", marks=pytest.mark.full)]
)
def kernel(request):
    return {"HMC": short_hmc, "NUTS": NUTS}[request.param]


@pytest.fixture(scope="module")
def path_and_runs(kernel):
    before = len(RUNS)
    path = temper_path(KEY, model, kernel, Y, alphas=ALPHAS, **LONG)
    return path, len(RUNS) - before


@pytest.fixture(scope="module")
def normal_path(path_and_runs):
    return path_and_runs[0]


def test_evidence_and_log_likelihood_are_those_of_the_closed_form(normal_path):
    table = nt.table(normal_path)
    assert list(table.index) == list(GRID)
    mean, var = np.transpose([exact_moments(a) for a in GRID])
    assert_within(table["expected_log_lik"], mean, table["expected_log_lik_se"])
    assert_within(table["log_z"], exact_log_z(GRID), table["log_z_se"])
    assert_within(
        table["log_z_integral"].iloc[1:],
        expected_corrected(GRID),
        table["log_z_integral_se"].iloc[1:],
    )
    assert (
        table["log_z_integral"][0.0] == table["log_z"][0.0] == table["kl"][0.0] == 0.0
    )
    kl = [
        gaussian_kl(
            *tempered_normal_posterior(Y, a, PRIOR_MEAN, PRIOR_SD, NOISE),
            PRIOR_MEAN,
            PRIOR_SD,
        )
        for a in GRID
    ]
    kl_se = GRID * table["expected_log_lik_se"] + table["log_z_se"]
    assert_within(table["kl"], kl, kl_se)
    # log L is a constant minus a chi square variable, whose variance estimate has a kurtosis of at most 15.
    assert_within(table["var_log_lik"], var, var * np.sqrt(14.0 / table["ess"]))
    assert table["ess"][0.0] == 1600
    assert table["r_hat"].between(0.99, 1.05).all()
    assert (table["divergences"] == 0).all()


def test_draws_are_those_of_each_posterior(normal_path):
    posterior = group(normal_path, "posterior")["theta"]
    assert posterior.dims == ("chain", "draw", "alpha")
    assert posterior.dtype == np.float32
    for alpha in GRID:
        mean, sd = tempered_normal_posterior(Y, alpha, PRIOR_MEAN, PRIOR_SD, NOISE)
        draws = posterior.sel(alpha=alpha).values
        assert_within(draws.mean(), mean, mean_se(draws.astype(float), False)[1])
        squares = (draws.astype(float) - mean) ** 2
        assert_within(squares.mean(), sd**2, mean_se(squares, False)[1])


def test_the_result_is_arviz_data(normal_path, kernel):
    assert set(group_names(normal_path)) == {
        "tempered_path",
        "posterior",
        "sample_stats",
        "observed_data",
    }
    np.testing.assert_allclose(group(normal_path, "observed_data")["y"], Y)
    log_lik = group(normal_path, "sample_stats")["log_lik"]
    theta = group(normal_path, "posterior")["theta"].values.astype(float)
    want = stats.norm.logpdf(Y, theta[..., None], NOISE).sum(-1)
    np.testing.assert_allclose(log_lik, want, rtol=1e-5)
    assert normal_path.attrs["algorithm"] == "mcmc"
    assert normal_path.attrs["method"] == ("NUTS" if kernel is NUTS else "HMC")
    assert len(az.summary(normal_path)) == len(GRID)


@pytest.mark.slow
def test_gamma_poisson(x64):
    # An exponential prior, the Gamma distribution of shape 1, is quick to compile.
    y, shape, rate = np.array([2, 0, 5, 3]), 1.0, 0.7

    def counts(y):
        rate_of = numpyro.sample("rate", dist.Exponential(rate))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Poisson(rate_of), obs=y)

    def log_z(a):
        s, r = shape + a * y.sum(), rate + a * len(y)
        prior = shape * np.log(rate) - special.gammaln(shape)
        return (
            prior
            + special.gammaln(s)
            - s * np.log(r)
            - a * special.gammaln(y + 1).sum()
        )

    def mean(a):
        s, r = shape + a * y.sum(), rate + a * len(y)
        return (
            y.sum() * (special.digamma(s) - np.log(r))
            - len(y) * s / r
            - special.gammaln(y + 1).sum()
        )

    path = temper_path(
        KEY, counts, hmc, y, alphas=ALPHAS, num_samples=800, num_warmup=300
    )
    table = nt.table(path)
    assert group(path, "posterior")["rate"].dtype == np.float64
    assert_within(table["log_z"], log_z(GRID), table["log_z_se"])
    assert_within(table["expected_log_lik"], mean(GRID), table["expected_log_lik_se"])


X = np.array([[1.0, 0.5], [0.2, -1.0], [-0.7, 0.4], [1.5, 1.1], [-0.3, 0.8]])
Z = np.array([0.9, -0.6, 0.1, 2.2, 0.4])


def regression(x, z):
    w = numpyro.sample("w", dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("z", dist.Normal(x @ w, NOISE), obs=z)


def regression_log_z(alpha):
    """By the marginal density of the data, whose noise variance tempering divides by alpha."""
    if alpha == 0:
        return 0.0
    n, variance = len(Z), NOISE**2
    scaled = stats.multivariate_normal.logpdf(
        Z, np.zeros(n), PRIOR_SD**2 * X @ X.T + variance / alpha * np.eye(n)
    )
    constant = (
        -0.5
        * n
        * (alpha * np.log(2 * np.pi * variance) - np.log(2 * np.pi * variance / alpha))
    )
    return scaled + constant


@pytest.mark.slow
def test_two_dimensions_and_their_names():
    path = temper_path(
        KEY,
        regression,
        hmc,
        X,
        z=Z,
        alphas=ALPHAS,
        num_samples=800,
        num_warmup=300,
        coords={"feature": ["a", "b"]},
        dims={"w": ["feature"], "z": ["row"]},
    )
    table = nt.table(path)
    want = [regression_log_z(a) for a in GRID]
    assert_within(table["log_z"], want, table["log_z_se"])
    slope = [
        (regression_log_z(a + 1e-4) - regression_log_z(a - 1e-4)) / 2e-4 for a in ALPHAS
    ]
    assert_within(
        table["expected_log_lik"].iloc[1:], slope, table["expected_log_lik_se"].iloc[1:]
    )
    assert group(path, "posterior")["w"].dims == ("chain", "draw", "alpha", "feature")
    assert group(path, "observed_data")["z"].dims == ("row",)


@pytest.mark.slow
def test_powers_multiply_and_a_prior_factor_stays():
    """A prior times a factor is not sampled but run as a chain; log Z is relative to their product."""

    def with_factor(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        numpyro.factor("shrink", -0.5 * theta**2)
        with numpyro.plate("n", len(Y)):
            numpyro.sample("y", dist.Normal(theta, NOISE), obs=y)

    half = nt.temper(with_factor, alpha=0.5, factors=False)
    table = nt.table(
        temper_path(
            KEY, half, hmc, Y, alphas=[0.1, 1.0], num_samples=800, num_warmup=300
        )
    )
    prior_sd = (PRIOR_SD**-2 + 1.0) ** -0.5
    want = exact_log_z(0.5 * table.index.to_numpy(), prior_mean=0.0, prior_sd=prior_sd)
    assert_within(table["log_z"], want, table["log_z_se"])
    assert table["ess"][0.0] != 800


def test_a_coarse_grid_leaves_its_error_to_the_integral():
    grid, rng = np.array([0.0, 0.02, 0.3, 1.0]), np.random.default_rng(0)
    moments = [
        tempered_normal_posterior(Y, a, PRIOR_MEAN, PRIOR_SD, NOISE) for a in grid
    ]
    log_lik = np.empty((1, 20000, len(grid)))
    for k, (mean, sd) in enumerate(moments):
        theta = rng.normal(mean, sd, 20000)
        log_lik[0, :, k] = stats.norm.logpdf(Y, theta[:, None], NOISE).sum(axis=1)
    found, want = log_evidence(grid, log_lik, exact_prior=True), exact_log_z(1.0)
    assert abs(found["log_z"][-1] - want) < 5.0 * found["log_z_se"][-1] < 0.15
    wrong = abs(found["log_z_integral"][-1] - want)
    assert wrong > 5.0 * found["log_z_integral_se"][-1]


def test_draws_of_the_prior_with_a_likelihood_of_0():
    """y_i uniform on theta ± 1, whose likelihood is a constant where it is not 0."""
    grid, log_lik = np.array([0.0, 0.2, 1.0]), np.full((2, 200, 3), -3 * math.log(2.0))
    theta = np.random.default_rng(0).normal(size=(2, 200))
    possible = (theta > -0.1) & (theta < 0.9)
    log_lik[..., 0] = np.where(possible, log_lik[..., 0], -np.inf)
    check_finite(grid, log_lik, at_zero=True)
    found = log_evidence(grid, log_lik, exact_prior=True)
    want = math.log(possible.mean()) - 3 * math.log(2.0) * grid[1:]
    np.testing.assert_allclose(found["log_z_integral"][1:], want, rtol=1e-12)
    np.testing.assert_allclose(found["log_z"][1:], want, rtol=1e-12)
    mass = np.log(stats.norm.cdf(0.9) - stats.norm.cdf(-0.1))
    assert_within(
        want[0] - mass, -3 * math.log(2.0) * 0.2, found["log_z_integral_se"][1]
    )
    assert found["log_z_left"][2] == -np.inf
    with pytest.raises(
        ValueError,
        match=r"not finite at .*% of the draws at alpha = 0.*parameters of likelihood",
    ):
        check_finite(grid, log_lik, at_zero=False)


@pytest.mark.full
def test_a_likelihood_of_0_on_part_of_the_prior():
    """y_i uniform on theta ± 1: Z is the prior mass where all data are possible, times a constant."""
    y = jnp.array([0.3, 0.9, -0.1])

    def box(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Uniform(theta - 1.0, theta + 1.0), obs=y)

    table = nt.table(
        temper_path(
            KEY, box, NUTS, y, alphas=[0.2, 1.0], num_samples=400, num_warmup=100
        )
    )
    mass = np.log(stats.norm.cdf(0.9) - stats.norm.cdf(-0.1))
    want = mass - 3 * math.log(2.0) * np.array([0.2, 1.0])
    assert_within(
        table["log_z_integral"].iloc[1:], want, table["log_z_integral_se"].iloc[1:]
    )
    assert_within(table["log_z"].iloc[1:], want, table["log_z_se"].iloc[1:])
    assert table["log_z_left"][1.0] == table["expected_log_lik"][0.0] == -np.inf


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Some algorithms will automatically enumerate:FutureWarning"
)
def test_a_global_discrete_latent_by_gibbs():
    def shifted(y):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
        with numpyro.plate("n", len(Y)):
            numpyro.sample("y", dist.Normal(theta + z, NOISE), obs=y)

    def gibbs(model):
        return DiscreteHMCGibbs(NUTS(model))

    table = nt.table(
        temper_path(
            KEY, shifted, gibbs, Y, alphas=ALPHAS, num_samples=2000, num_chains=2
        )
    )
    want = np.logaddexp(
        np.log(0.6) + exact_log_z(GRID), np.log(0.4) + exact_log_z(GRID, y=Y - 1.0)
    )
    assert_within(table["log_z"], want, table["log_z_se"])


# SVI.


# Nearer to the optimum than the default, for posteriors that are compared with exact ones.
NEAR = {"tolerance": 0.005}


# The set-up of AutoNormal is many small programs.
@pytest.fixture(
    scope="module", params=["by hand", pytest.param("auto", marks=pytest.mark.full)]
)
def fitted_path(request):
    guide = AutoNormal if request.param == "auto" else lambda model: normal_guide
    with enable_x64():
        # An array of its own: jax mixes up the precisions of one that it has seen.
        return temper_path(KEY, model, guide, Y.copy(), alphas=ALPHAS, **NEAR)


def assert_elbo_is_log_z(table, want):
    """ELBO = log Z - KL(q, posterior), and the draws of it have variance 2 KL for a small KL."""
    kl = 1000 * table["elbo_se"] ** 2 / 2
    assert np.all(kl < 5e-3)
    assert np.all(np.abs(table["elbo"] - want) < 5 * table["elbo_se"] + 2 * kl)


def test_the_elbo_is_the_evidence_of_a_conjugate_model(fitted_path):
    table = nt.table(fitted_path)
    # A grid that starts above 0 has a 0 before it.
    np.testing.assert_allclose(table.index, GRID)
    assert_elbo_is_log_z(table, exact_log_z(GRID))
    mean = [exact_moments(a)[0] for a in GRID]
    assert_within(table["expected_log_lik"], mean, table["expected_log_lik_se"])
    np.testing.assert_allclose(
        table["elbo"], GRID * table["expected_log_lik"] - table["kl"], rtol=1e-10
    )
    trapezoid = integrate(GRID, draws_of(GRID), False, no_se).value
    assert_within(
        table["elbo_integral"], trapezoid, table["elbo_integral_se"] + table["elbo_se"]
    )
    assert (table["elbo_left"] <= table["elbo_integral"]).all()
    assert (table["elbo_integral"] <= table["elbo_right"]).all()
    assert not {"log_z_integral", "ess"} & set(table)


def test_fitted_draws_and_losses(fitted_path):
    posterior = group(fitted_path, "posterior")["theta"]
    assert posterior.dims == ("chain", "draw", "alpha")
    assert posterior.shape == (1, 1000, len(GRID))
    assert posterior.dtype == np.float64
    for alpha in GRID:
        mean, sd = tempered_normal_posterior(Y, alpha, PRIOR_MEAN, PRIOR_SD, NOISE)
        draws = posterior.sel(alpha=alpha).values
        assert abs(draws.mean() - mean) < 5 * sd / math.sqrt(1000) + 0.05 * sd
        assert abs(draws.std() / sd - 1.0) < 5 / math.sqrt(2000) + 0.05
    losses = group(fitted_path, "variational")["loss"]
    assert losses.dims == ("alpha", "step")
    assert losses.shape[0] == len(GRID)
    assert np.isfinite(losses).all()
    assert fitted_path.attrs["algorithm"] == "svi"
    assert len(az.summary(fitted_path)) == len(GRID)


@pytest.mark.slow
def test_a_hand_written_guide_in_float32():
    path = temper_path(KEY, model, lambda model: normal_guide, Y, alphas=ALPHAS, **NEAR)
    assert_elbo_is_log_z(nt.table(path), exact_log_z(GRID))
    assert group(path, "posterior")["theta"].dtype == np.float32


@pytest.mark.slow
def test_a_full_covariance_guide_is_exact_in_a_regression():
    path = temper_path(
        KEY, regression, AutoMultivariateNormal, X, Z, alphas=ALPHAS, **NEAR
    )
    assert_elbo_is_log_z(nt.table(path), [regression_log_z(a) for a in GRID])


@pytest.mark.slow
@pytest.mark.parametrize("method", [NUTS, AutoMultivariateNormal], ids=["nuts", "svi"])
def test_the_default_grid_leaves_no_discretisation_error(method):
    table = nt.table(temper_path(KEY, regression, method, X, Z, num_samples=4000))
    assert len(table) == 21
    value, se = (
        ("log_z_integral", "log_z_integral_se")
        if method is NUTS
        else ("elbo_integral", "elbo_integral_se")
    )
    want = regression_log_z(1.0)
    assert abs(table[value][1.0] - want) < 5 * table[se][1.0]
    assert table[se][1.0] < 0.1


# Compilation.


@pytest.mark.parametrize("first", [[], [0.0]], ids=["0 is put before", "0 is there"])
def test_a_shorter_grid_runs_the_model_as_often(path_and_runs, kernel, first):
    """Once compiled, the model is not run at any alpha."""
    before = len(RUNS)
    path = temper_path(KEY, model, kernel, Y, alphas=[*first, *ALPHAS[2:]], **LONG)
    assert len(RUNS) - before == path_and_runs[1] > 0
    np.testing.assert_allclose(nt.table(path).index, [0.0, *ALPHAS[2:]])


@pytest.mark.full
@pytest.mark.parametrize("method", [hmc, AutoNormal], ids=["hmc", "svi"])
def test_a_longer_grid_compiles_nothing_more(method):
    runs = []

    def counted(y):
        runs.append(None)
        model(y)

    counts = []
    for grid in ([0.5, 1.0], np.linspace(0.1, 1.0, 12)):
        before = len(runs)
        with pytest.warns(
            UserWarning, match="mixed" if method is hmc else "not converged"
        ):
            temper_path(KEY, counted, method, Y, **{**BRIEF, "alphas": grid})
        counts.append(len(runs) - before)
    assert counts[0] == counts[1] > 0


# What is refused.


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([1.0], r"^alphas must be.*a list of powers, 2 or more"),
        (0.5, r"^alphas must be.*a list of powers, 2 or more"),
        ([[0.0, 1.0]], r"^alphas must be.*a list of powers, 2 or more"),
        ([0.5, 0.5], r"must increase.*to the next, got"),
        ([1.0, 0.5], r"must increase.*to the next, got"),
        ([-0.1, 1.0], r"^alphas must be.*at least 0.*and finite, got"),
        ([0.0, np.inf], "finite"),
        ([0.0, np.nan], "finite"),
    ],
)
def test_bad_grids(alphas, message):
    with pytest.raises(ValueError, match=message):
        temper_path(KEY, model, NUTS, Y, alphas=alphas)


def observing_nothing(y):
    numpyro.sample("theta", dist.Normal())


def without_latents(y):
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y[0])


def with_params(y):
    numpyro.sample(
        "y",
        dist.Normal(numpyro.sample("theta", dist.Normal()), numpyro.param("s", 1.0)),
        obs=y[0],
    )


def improper(y):
    theta = numpyro.sample("theta", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[0])


def subsampling(y):
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("n", len(y), subsample_size=2) as index:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[index])


def named_alpha(y):
    numpyro.sample(
        "y", dist.Normal(numpyro.sample("alpha", dist.Normal()), 1.0), obs=y[0]
    )


def local_discrete(y):
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(theta + z, 1.0), obs=y)


def local_continuous(y):
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal()), 1.0), obs=y)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (observing_nothing, r"^the model has.*no observed site.*that it conditions on"),
        (without_latents, r"^the model has.*no latent site.*no posterior to follow"),
        (with_params, r"^the model has.*params \['s'\].*give them a prior"),
        (improper, r"prior of 'theta' is improper.*no posterior: change it"),
        pytest.param(subsampling, "subsamples", marks=pytest.mark.full),
        # To draw the rows is a program of its own.
        (
            handlers.substitute(subsampling, data={"n": jnp.asarray(np.arange(2))}),
            "subsamples",
        ),
        (
            named_alpha,
            r"^latent site.*'alpha' has the name of a dimension.*the result: rename it",
        ),
        (
            local_discrete,
            r"^latent sites .'z'. are discrete, and HMC and NUTS.*marginalize.*take DiscreteHMCGibbs for others",
        ),
        (nt.temper(local_continuous, local_plates=["n"]), "local_plates"),
    ],
)
def test_bad_models(bad, message):
    with pytest.raises(ValueError, match=message):
        temper_path(KEY, bad, NUTS, jnp.array(Y), **BRIEF)


@pytest.mark.filterwarnings("ignore:Out-of-support values:UserWarning")
def test_data_that_are_not_finite():
    with pytest.raises(
        ValueError, match="observed site 'y' has 1 of 6 values that are NaN or infinite"
    ):
        temper_path(KEY, model, NUTS, np.append(Y[:-1], np.nan), **BRIEF)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"not finite at 12\.50% of the draws at alpha = 0"),
        (-np.inf, "0 at every draw from the prior"),
    ],
)
def test_draws_without_a_likelihood(value, message):
    log_lik = np.zeros((2, 4, 3))
    # Of one draw NaN is bad, and 0 is where it is that of all.
    log_lik[:1, : 1 if np.isnan(value) else None, 0] = value
    with pytest.raises(ValueError, match=message):
        check_finite(np.array([0.0, 0.5, 1.0]), log_lik, at_zero=True)


@pytest.mark.full
def test_a_log_likelihood_of_nan():
    def half(y):
        theta = numpyro.sample("theta", dist.Normal())
        numpyro.factor("root", jnp.sqrt(theta))

    with pytest.raises(
        ValueError,
        match=r"not finite at .*% of the draws at alpha = 0.*parameters of likelihood",
    ):
        temper_path(KEY, half, NUTS, Y, **{**BRIEF, "num_samples": 64})


@pytest.mark.full
def test_data_impossible_under_the_prior():
    def far(y):
        theta = numpyro.sample("theta", dist.Uniform(0.0, 1.0))
        numpyro.factor("inside", jnp.where(theta > 2.0, 0.0, -jnp.inf))

    with pytest.raises(
        ValueError, match=r"0 at every draw from the prior.*that is too wide"
    ):
        temper_path(KEY, far, NUTS, Y, **BRIEF)


def normal_guide(y=None):
    loc = numpyro.param("loc", 0.0)
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("theta", dist.Normal(loc, scale))


def point(model):
    return lambda y: numpyro.sample("theta", dist.Delta(numpyro.param("at", 0.0)))


class RunsNoModel(AutoGuide):
    """As an AutoGuide on another model, of the tempered one's point of view."""

    def __call__(self, *args, **kwargs):
        return {"theta": numpyro.sample("theta", dist.Normal())}

    def sample_posterior(self, rng_key, params, *args, **kwargs):
        raise NotImplementedError


def empty_guide(model):
    return lambda y: numpyro.sample(
        "other", dist.Normal(), infer={"is_auxiliary": True}
    )


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        pytest.param(
            AutoDelta, ValueError, "AutoDelta has a point mass", marks=pytest.mark.full
        ),
        (point, ValueError, r"has a point mass at.*take AutoNormal"),
        pytest.param(
            AutoLaplaceApproximation,
            ValueError,
            "Approximation has a point mass",
            marks=pytest.mark.full,
        ),
        pytest.param(
            AutoDAIS,
            ValueError,
            "AutoDAIS runs the model it was built on",
            marks=pytest.mark.full,
        ),
        (
            lambda model: model,
            ValueError,
            r"runs the model it was built on.*or take AutoNormal",
        ),
        (
            empty_guide,
            ValueError,
            r"^the guide has.*no sites \['theta'\].*latent in the model",
        ),
        pytest.param(
            lambda tempered: AutoNormal(model),
            ValueError,
            "another model",
            marks=pytest.mark.full,
        ),
        (
            lambda tempered: RunsNoModel(model),
            ValueError,
            r"another model.*one that it gets",
        ),
        (lambda tempered: NUTS(model), ValueError, r"another model.*one that it gets"),
        (AutoNormal(model), TypeError, r"built already.*such as `lambda model"),
        (NUTS(model), TypeError, r"built already.*such as `lambda model"),
        (lambda tempered: 3.0, TypeError, r"returned float.*such as `lambda model"),
        (lambda: None, TypeError, r"failed on the model.*such as `lambda model"),
        ("nuts", TypeError, "callable"),
        (lambda model: AIES(model, moves={AIES.DEMove(): 1.0}), TypeError, "AIES"),
    ],
)
def test_bad_methods(method, error, message):
    with pytest.raises(error, match=message):
        temper_path(KEY, model, method, Y, **BRIEF)


def test_too_few_draws_and_unknown_dims():
    with pytest.raises(ValueError, match=r"num_samples.*integer of at least"):
        temper_path(KEY, model, NUTS, Y, num_samples=3)
    with pytest.raises(ValueError, match=r"dims names \['thta'\].*not among the sites"):
        temper_path(KEY, model, NUTS, Y, dims={"thta": ["k"]})
    with pytest.raises(
        ValueError,
        match=r"^the data have.*no group .*tempered_path.*sandwich, sandwich",
    ):
        nt.table(
            assemble(
                {"posterior": dataset({"theta": np.zeros((1, 4))}, ("chain", "draw"))},
                {},
            )
        )


@pytest.mark.parametrize(
    "guide",
    [lambda model: normal_guide, pytest.param(AutoNormal, marks=pytest.mark.full)],
    ids=["by hand", "auto"],
)
def test_fits_that_have_not_converged_are_named(guide):
    with pytest.warns(
        nt.warnings.ConvergenceWarning,
        match=r"at alpha = 0, 0.5, 1 have not converged \(2 steps, too few",
    ):
        temper_path(KEY, model, guide, Y, **BRIEF)


def test_chains_that_did_not_mix_are_named():
    grid, se = np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.1, 0.1])
    ones = np.ones(3)
    with pytest.warns(
        UserWarning,
        match=r"falls from -3 at alpha = 0.5 to -4 at 1.*more warm-up and draws",
    ):
        warn_if_not_mixed(grid, np.array([-5.0, -3.0, -4.0]), se, ones)
    with pytest.warns(
        UserWarning, match=r"R-hat is 1.40 at alpha = 0.5.*more warm-up and draws"
    ):
        warn_if_not_mixed(
            grid, np.array([-5.0, -4.0, -3.0]), se, np.array([1.0, 1.4, 1.2])
        )
    # 5 standard errors of the difference are 0.71.
    warn_if_not_mixed(grid, np.array([-5.0, -3.0, -3.7]), se, ones)


def test_the_error_of_an_integral_of_elbos_is_that_of_its_start_too():
    start = np.random.default_rng(0).normal(size=(1, 50, 1))
    columns = svi_columns(
        np.array([0.0, 0.5, 1.0]),
        np.zeros((1, 50, 3)),
        start + np.array([0.0, 1.0, 2.0]),
    )
    np.testing.assert_allclose(columns["elbo_integral"], start.mean())
    np.testing.assert_allclose(
        columns["elbo_integral_se"], start.std(ddof=1) / np.sqrt(50)
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_the_error_of_an_integral_is_that_of_its_influence_functions(corrected):
    """Of the weights of means and variances on a grid of unequal steps, found by moving one of them."""
    grid, rng = np.array([0.0, 0.1, 0.4, 1.0]), np.random.default_rng(1)
    # Means so far apart that the Riemann sums do not bind.
    draws = rng.normal(size=(1, 400, 4)) * np.array([1.5, 1.2, 1.0, 0.8]) + np.array(
        [0.0, 9.0, 20.0, 40.0]
    )
    n, size = draws.shape[1], 1e-5

    def value(draws):
        return integrate(grid, draws, corrected, no_se).value[-1]

    variance = 0.0
    for k in range(4):
        # A draw more, of little weight, moves the mean and the variance by its influence.
        influence = np.empty(n)
        mean, var = draws[0, :, k].mean(), draws[0, :, k].var()
        for i, draw in enumerate(draws[0, :, k]):
            moved = draws.copy()
            new_mean, new_var = (
                mean + size * (draw - mean),
                var + size * ((draw - mean) ** 2 - var),
            )
            moved[0, :, k] = new_mean + (draws[0, :, k] - mean) * np.sqrt(new_var / var)
            influence[i] = (value(moved) - value(draws)) / size
        variance += influence.var() / n
    found = integrate(
        grid, draws, corrected, lambda inner, k: float(inner.std() / np.sqrt(n))
    ).se[-1]
    np.testing.assert_allclose(found, np.sqrt(variance), rtol=1e-3)


def test_every_estimate_of_a_constant_likelihood_is_exact():
    grid = np.array([0.0, 0.1, 0.4, 1.0])
    columns = log_evidence(grid, np.full((2, 30, 4), -3.0), True)
    for name, values in columns.items():
        np.testing.assert_allclose(
            values, 0.0 * grid if name.endswith("_se") else -3.0 * grid, err_msg=name
        )
