"""Calibration by simulation against closed forms, and what cannot simulate itself."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import NUTS, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoMultivariateNormal,
    AutoNormal,
)
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.settle import DATA_SETS
from numpyro_tempered.select.alpha import data_sets
from numpyro_tempered.select.alpha.guides import GuideOptions, build_fitter
from numpyro_tempered.select.alpha.model_data import CountsRuns
from numpyro_tempered.select.check import posteriors
from numpyro_tempered.select.check.simulate import (
    check_model,
    simulate,
    tempered_with_data,
)
from numpyro_tempered.select.check.uniformity import (
    estimate,
    exit_probability,
    holm,
    judge,
    random_pit,
)

matplotlib.use("agg")

KEY = jax.random.key(11)
PRIOR_MEAN, PRIOR_SD, NOISE, NUM = 1.0, 2.0, 3.0, 10
Y = np.zeros(NUM)
CORRELATION = 0.9
ROOT = np.linalg.cholesky(np.array([[1.0, CORRELATION], [CORRELATION, 1.0]]))


def normal_mean(y=None, prior=None, distribution=None):
    theta = numpyro.sample(
        "theta", dist.Normal(PRIOR_MEAN, PRIOR_SD) if prior is None else prior
    )
    with numpyro.plate("n", NUM if y is None else len(y)):
        numpyro.sample(
            "y",
            dist.Normal(theta, NOISE) if distribution is None else distribution(theta),
            obs=y,
        )


def correlated(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 30.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.MultivariateNormal(theta, scale_tril=ROOT), obs=y)


def error_variance(alpha):
    """Of theta less the mean of its exact tempered posterior, over the posterior variance."""
    prior, data = 1.0 / PRIOR_SD**2, NUM / NOISE**2
    precision = prior + alpha * data
    # theta - m = (prior * (theta - mean) - alpha * data * noise) / precision, of two independent parts.
    return (prior + alpha**2 * data) / precision**2 * precision


def rank_variance(variance, num_draws):
    """Of the number of draws below the truth, whose share is p = Phi(z) with z normal of this variance."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    p = stats.norm.cdf(np.sqrt(variance) * nodes)
    weights = weights / weights.sum()
    mean = weights @ p
    return num_draws * (weights @ (p * (1.0 - p))) + num_draws**2 * (
        weights @ (p - mean) ** 2
    )


# What ranks say.


def exact_pit(rng, num, columns, spread=1.0, bias=0.0):
    scores = bias + spread * rng.standard_normal((num, columns))
    return np.clip(stats.norm.cdf(scores), 1e-9, 1.0 - 1e-9)


@pytest.mark.full
def test_the_tests_reject_as_often_as_they_say():
    rng, columns = np.random.default_rng(0), 200
    judgement = judge(exact_pit(rng, 100, columns), 10**6, 1.0, np.full(columns, True))
    for name in ("p_bias", "p_spread", "p_uniform"):
        assert stats.kstest(getattr(judgement, name), "uniform").pvalue > 1e-3, name
    # Its limit is of many simulations, and its steps are of 1 / N.
    assert abs(np.mean(judgement.p_symmetric < 0.1) - 0.1) < 0.06


def test_the_exit_probability_is_that_of_brownian_motion():
    # Tabulated quantiles of sup |W| on [0, 1].
    np.testing.assert_allclose(
        exit_probability(np.array([1.96, 2.2414, 2.8070])), [0.1, 0.05, 0.01], atol=1e-4
    )
    np.testing.assert_allclose(
        exit_probability(np.array([0.0, 40.0])), [1.0, 0.0], atol=1e-12
    )


def test_bias_and_spread_are_estimated_beyond_the_last_rank():
    scores = np.random.default_rng(1).normal(0.7, 2.5, size=(20_000, 1))
    limit = 1.5
    mean, sd = estimate(
        np.where(np.abs(scores) > limit, 9.0 * np.sign(scores), scores), limit
    )
    np.testing.assert_allclose([mean[0], sd[0]], [0.7, 2.5], atol=0.1)
    alone = estimate(scores, np.inf)
    np.testing.assert_allclose(
        [alone[0][0], alone[1][0]], [scores.mean(), scores.std()], rtol=1e-12
    )


def test_p_values_are_adjusted_by_holm():
    np.testing.assert_allclose(
        holm(np.array([0.04, 0.01, 0.03, 0.5])), [0.09, 0.04, 0.09, 0.5]
    )


@pytest.mark.parametrize(
    ("bias", "spread", "alpha", "verdict"),
    [
        (0.0, 1.0, 1.0, "no sign of error"),
        (0.0, 2.0, 1.0, "too narrow"),
        (0.0, 0.5, 1.0, "too wide"),
        (0.8, 1.0, 1.0, "too low"),
        (-0.8, 1.0, 1.0, "too high"),
        (0.0, 0.85, 0.5, "no sign of error"),
        (0.0, 1.4, 0.5, "too narrow"),
        (0.0, 0.4, 0.5, "too wide"),
        (0.0, 1.2, 2.0, "no sign of error"),
        (0.0, 0.7, 2.0, "too wide"),
    ],
)
def test_the_verdict_says_what_is_wrong(bias, spread, alpha, verdict):
    pit = exact_pit(np.random.default_rng(2), 400, 1, spread, bias)
    assert judge(pit, 10**6, alpha, np.array([True])).verdict.item() == verdict


def test_what_no_closed_form_is_known_of_has_no_verdict():
    pit = exact_pit(np.random.default_rng(3), 100, 2, 3.0)
    judgement = judge(pit, 99, 0.5, np.array([True, False]))
    assert list(judgement.verdict) == ["too narrow", "not judged"]
    assert np.isnan(judgement.p_value[1])


def test_ties_are_broken_at_random():
    less, equal = np.full(5000, 2), np.full(5000, 3)
    ranks, pit = random_pit(np.random.default_rng(4), less, equal, 9)
    np.testing.assert_allclose(np.bincount(ranks)[2:] / 5000, 0.25, atol=0.03)
    np.testing.assert_array_equal(np.floor(pit * 10), ranks)


def test_an_untempered_posterior_of_a_normal_mean_has_uniform_ranks():
    np.testing.assert_allclose(
        rank_variance(error_variance(1.0), 199), (200**2 - 1) / 12.0, rtol=1e-6
    )


def test_r_hat_is_that_of_numpyro():
    chain = np.random.default_rng(5).normal(size=(1, 100, 3)).cumsum(axis=1)
    expected = split_gelman_rubin(chain).max()
    values = {"walk": jnp.asarray(chain), "constant": jnp.ones((1, 100))}
    np.testing.assert_allclose(
        jax.jit(posteriors.split_r_hat)(values), expected, rtol=1e-5
    )


# What is simulated.


def test_simulations_are_of_prior_and_likelihood(x64):
    data = Target(CountsRuns(normal_mean), (Y,), {}, KEY)
    simulations = simulate(KEY, data, 4000)
    theta, y = (
        np.asarray(simulations.truths["theta"]),
        np.asarray(simulations.data["y"]),
    )
    assert y.shape == (4000, NUM)
    assert stats.kstest((theta - PRIOR_MEAN) / PRIOR_SD, "norm").pvalue > 1e-3
    noise = (y - theta[:, None]) / NOISE
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    np.testing.assert_allclose(
        simulations.log_lik,
        stats.norm.logpdf(y, theta[:, None], NOISE).sum(1),
        rtol=1e-10,
    )


def test_sites_that_follow_observed_ones_see_the_simulated_values():
    def model(y, z):
        v = numpyro.sample(
            "y", dist.Normal(numpyro.sample("theta", dist.Normal(0.0, 1.0)), 1.0), obs=y
        )
        numpyro.sample("z", dist.Normal(100.0 * v, 0.1), obs=z)

    simulations = simulate(KEY, Target(CountsRuns(model), (0.0, 0.0), {}, KEY), 20)
    np.testing.assert_allclose(
        simulations.data["z"], 100.0 * simulations.data["y"], atol=1.0
    )


def imputed(y):
    missing = numpyro.sample("missing", dist.Normal(0.0, 1.0))
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample(
        "y",
        dist.Normal(theta, 1.0).expand([NUM]),
        obs=jnp.asarray(y).at[0].set(missing),
    )


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", NUM, subsample_size=3) as rows:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[rows])


def of_a_scan(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))

    def step(carry, row):
        value = numpyro.sample("y", dist.Normal(theta * carry, 1.0), obs=row)
        return value, value

    scan(step, 0.0, jnp.asarray(y))


def beside(function):
    def model(y):
        normal_mean(y)
        function()

    return model


def with_likelihood(distribution):
    return lambda y: normal_mean(y, distribution=distribution)


REFUSED = {
    "improper": (
        lambda y: normal_mean(y, dist.ImproperUniform(dist.constraints.real, (), ())),
        r"^the prior of.*'theta' is improper.*it a proper prior",
    ),
    "discrete": (
        beside(lambda: numpyro.sample("k", dist.Bernoulli(0.5))),
        r"^latent sites \['k'\] are discrete.*marginalize",
    ),
    "masked": (
        with_likelihood(lambda t: dist.Normal(t, 1.0).mask(np.arange(NUM) > 2)),
        "site 'y' is masked",
    ),
    "masked prior": (
        lambda y: normal_mean(y, dist.Normal(0.0, 1.0).mask(False)),
        "prior of 'theta' is scaled",
    ),
    "robust": (
        nt.robust(normal_mean, beta=0.5, unit=1.0),
        r"divergences at \['y'\].*the model without it",
    ),
    "tempered": (
        nt.temper(normal_mean, alpha=0.5),
        r"'y' has the power or scale 0.5.*model without it, and",
    ),
    "scaled": (
        lambda y: handlers.scale(normal_mean, scale=2.0)(y),
        r"prior of 'theta' is scaled.*that out",
    ),
    "factor": (
        beside(lambda: numpyro.factor("penalty", -1.0)),
        r"'penalty' of the model is a factor.*a distribution",
    ),
    "prior factor": (
        nt.temper(beside(lambda: numpyro.factor("penalty", -1.0)), factors=False),
        r"\['penalty'\] are prior terms.*simulation-based calibration draws all",
    ),
    "dimension": (
        beside(lambda: numpyro.sample("draw", dist.Normal(0.0, 1.0))),
        "'draw' has the name",
    ),
    "param": (
        beside(lambda: numpyro.param("w", 1.0)),
        r"params \['w'\].*give them a prior",
    ),
    "subsampled": (
        subsampled,
        "^plate 'n' subsamples 3 of .*, and simulation-based calibration draws all .*: leave",
    ),
    "imputed": (
        imputed,
        r"^the values of the.*\['y'\] depend on latents.*data that are there",
    ),
    "scan": (of_a_scan, r"'y' is in a scan.*it as one site"),
    "no data": (
        lambda y: numpyro.sample("theta", dist.Normal(0.0, 1.0)),
        r"no observed site.*be simulated",
    ),
    "no latent": (
        lambda y: numpyro.sample("y", dist.Normal(0.0, 1.0).expand([NUM]), obs=y),
        "no latent site",
    ),
    "no sampler": (
        with_likelihood(lambda t: dist.ImproperUniform(dist.constraints.real, (), ())),
        r"^site 'y' is ImproperUniform, which has no sampler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_simulate_itself_is_refused_by_name(name):
    model, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        check_model(Target(CountsRuns(model), (Y,), {}, KEY))


@pytest.mark.parametrize(
    "location", [50.0, pytest.param(200.0, marks=pytest.mark.full)]
)
def test_a_prior_that_simulates_no_data_is_refused(location):
    # Counts at exp(50) are beyond integers of 64 bits, and their log-probability is finite.
    def model(y):
        normal_mean(
            y, dist.Normal(location, 1.0), lambda theta: dist.Poisson(jnp.exp(theta))
        )

    with pytest.raises(
        ValueError,
        match=r"in 100 of 100 simulations from the prior .* the prior reaches",
    ):
        simulate(KEY, Target(CountsRuns(model), (Y.astype(int),), {}, KEY), 100)


# The call.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_simulations": 10}, "num_simulations must be an integer of at least 20"),
        ({"num_draws": 5}, "num_draws must be an integer of at least 20"),
        ({"alpha": 0.0}, r"alpha must be positive.*and finite, got"),
        ({"thinning": 0}, r"thinning must be.*integer of at least"),
        (
            {"quantities": {"theta": lambda latents: latents["theta"] ** 2}},
            r"\['theta'\] are names of two quantities.*sites or the quantities",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nt.check_calibration(KEY, normal_mean, AutoNormal, Y, **options)


@pytest.fixture(scope="module")
def brief():
    """A check at alpha = 1/2, of few simulations."""
    return nt.check_calibration(
        KEY,
        normal_mean,
        AutoNormal,
        Y,
        alpha=0.5,
        num_simulations=20,
        num_draws=20,
        quantities={
            "square": lambda latents: latents["theta"] ** 2,
            "small": lambda latents: 1e-3 * latents["theta"],
        },
    )


def test_the_result_is_a_table_of_one_screen(brief):
    rows = nt.table(brief)
    assert (
        list(rows.index) == ["theta", "small", "square", "log_lik"] == list(brief.ranks)
    )
    assert list(rows["verdict"][1:]) == ["not judged"] * 3
    assert {ranks.shape for ranks in brief.ranks.values()} == {(20,)}
    assert all(np.all((ranks >= 0) & (ranks <= 20)) for ranks in brief.ranks.values())
    # In any unit.
    np.testing.assert_array_equal(brief.ranks["small"], brief.ranks["theta"])
    np.testing.assert_allclose(
        brief.truths["square"], brief.truths["theta"] ** 2, rtol=1e-5
    )
    assert "between 1 and 0.707" in brief.advice
    assert "of 1 scalars in 20 simulations" in brief.advice
    assert len(repr(brief).splitlines()) < 24
    for group in ("calibration", "calibration_pit"):
        assert brief.data[group].attrs["alpha"] == 0.5
        assert brief.data[group].attrs["advice"] == brief.advice


def test_the_plot_has_a_line_for_each_scalar_within_a_band(brief):
    ax = nt.plots.plot_calibration(brief)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert {"theta", "square", "log_lik", "exact, many data, alpha = 0.5"} < set(lines)
    x, height = lines["theta"].get_data()
    pit = np.ravel(brief.data["prior_sbc"]["theta"])
    np.testing.assert_allclose(height, [np.mean(pit <= u) - u for u in x], atol=1e-12)
    exact = lines["exact, many data, alpha = 0.5"].get_ydata()
    np.testing.assert_allclose(
        exact, stats.norm(scale=np.sqrt(0.5)).cdf(stats.norm.ppf(x)) - x, atol=1e-12
    )
    matplotlib.pyplot.close("all")


# The truth.

NUM_SIMULATIONS = 400


def check(model, method, *args, **options):
    return nt.check_calibration(
        KEY, model, method, *args, num_simulations=NUM_SIMULATIONS, **options
    )


@pytest.fixture(scope="module")
def exact_family():
    return check(normal_mean, AutoNormal, Y)


@pytest.mark.full
def test_ranks_of_an_exact_family_are_uniform(exact_family):
    rows = nt.table(exact_family)
    assert list(rows["verdict"]) == ["no sign of error"] * 2
    assert np.all(exact_family.converged)
    for ranks in exact_family.ranks.values():
        counts = np.bincount(ranks // 20, minlength=10)
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.full
def test_ranks_of_a_full_covariance_are_uniform_and_those_of_a_mean_field_too_narrow():
    full = nt.table(check(correlated, AutoMultivariateNormal, np.zeros(2)))
    assert list(full["verdict"]) == ["no sign of error"] * 3
    mean_field = nt.table(check(correlated, AutoNormal, np.zeros(2)))
    assert list(mean_field["verdict"][:2]) == ["too narrow"] * 2
    # The standard deviations of the mean field are sqrt(1 - rho^2) of the posterior's.
    spread = 1.0 / np.sqrt(1.0 - CORRELATION**2)
    np.testing.assert_allclose(
        mean_field["spread"][:2], spread, atol=4.0 * spread / np.sqrt(NUM_SIMULATIONS)
    )


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_ranks_of_an_exact_tempered_posterior_have_the_variance_of_the_closed_form(
    alpha,
):
    result = check(normal_mean, AutoNormal, Y, alpha=alpha)
    row, variance = nt.table(result).loc["theta"], error_variance(alpha)
    assert row["verdict"] == "no sign of error"
    pit = np.ravel(result.data["prior_sbc"]["theta"])
    assert stats.kstest(stats.norm.ppf(pit) / np.sqrt(variance), "norm").pvalue > 1e-3
    np.testing.assert_allclose(
        row["spread"] ** 2, variance, rtol=4.0 * np.sqrt(2.0 / NUM_SIMULATIONS)
    )
    ranks = result.ranks["theta"]
    expected = rank_variance(variance, result.num_draws)
    fourth = np.mean((ranks - ranks.mean()) ** 4)
    error = np.sqrt((fourth - expected**2) / NUM_SIMULATIONS)
    assert abs(np.var(ranks) - expected) < 4.0 * error


@pytest.mark.full
@pytest.mark.parametrize(("shift", "verdict"), [(-0.5, "too low"), (0.5, "too high")])
def test_a_shifted_fit_is_biased(shift, verdict, monkeypatch):
    draw = posteriors.draw

    def shifted(rng_key, data, guide, params):
        values, log_q = draw(rng_key, data, guide, params)
        return {"theta": values["theta"] + shift * params["theta_auto_scale"]}, log_q

    monkeypatch.setattr(posteriors, "draw", shifted)
    row = nt.table(check(normal_mean, AutoNormal, Y)).loc["theta"]
    assert row["verdict"] == verdict
    assert abs(row["bias"] + shift) < 4.0 / np.sqrt(NUM_SIMULATIONS)


@pytest.mark.full
def test_a_posterior_that_ignores_the_data_is_seen_by_the_log_likelihood_alone():
    def prior(y):
        numpyro.sample(
            "theta",
            dist.Normal(PRIOR_MEAN + 0.0 * numpyro.param("unused", 0.0), PRIOR_SD),
        )

    rows = nt.table(check(normal_mean, lambda model: prior, Y))
    assert rows.loc["theta", "verdict"] == "no sign of error"
    assert rows.loc["log_lik", "verdict"] != "no sign of error"
    assert rows.loc["log_lik", "bias"] > 0.5


@pytest.mark.full
def test_vsbc_agrees_with_that_of_numpyro(exact_family):
    calibration = pytest.importorskip("numpyro.infer.calibration")
    theirs = calibration.vsbc_diagnostic(
        # It takes no typed keys.
        jax.random.PRNGKey(0),
        normal_mean,
        AutoNormal(normal_mean),
        numpyro.optim.Adam(0.02),
        Trace_ELBO(10),
        observed_sites=["y"],
        num_simulations=200,
        num_svi_steps=1500,
        num_samples=199,
        chain_method="vectorized",
    )
    ours = exact_family.ranks["theta"] / exact_family.num_draws
    assert stats.ks_2samp(ours, theirs.probabilities["theta"]).pvalue > 1e-3
    assert theirs.ks_stats["theta"] < 2.8 / np.sqrt(200)
    # The distance is theirs, of the same numbers, but for the places within ranks.
    distance = stats.ks_2samp(ours, 1.0 - ours).statistic
    assert abs(nt.table(exact_family).loc["theta", "vsbc"] - distance) < 0.02


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(NUTS, marks=pytest.mark.full),
        lambda m: nt.OnlineVI(m, nt.guides.AutoOnlineDiagonalNormal),
    ],
)
def test_ranks_of_chains_and_of_exact_streams_are_uniform(method):
    result = check(normal_mean, method, Y, num_warmup=200, num_draws=49)
    assert list(nt.table(result)["verdict"]) == ["no sign of error"] * 2
    assert np.mean(result.converged) > 0.95


@pytest.mark.full
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_noise_of_the_fits_is_not_common_to_data_sets(guide):
    def model(y):
        log_rate = numpyro.sample(
            "log_rate", dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        )
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)

    y = jnp.array([1, 4])
    data = Target(CountsRuns(model), (y,), {}, KEY)

    def scales(numbers):
        inputs = (jnp.array(numbers), jnp.stack([y] * len(numbers)))
        options = GuideOptions(500, 0.05, None, None)

        def model_of(_, y):
            return tempered_with_data(data, {"y": y}, 1.0)

        fitter = build_fitter(
            KEY,
            data,
            guide(nt.temper(data.model)),
            model_of,
            inputs,
            options,
            batch=DATA_SETS,
        )
        (scale,) = [
            leaf
            for name, leaf in fitter.fit(KEY, inputs).params.items()
            if "scale" in name
        ]
        return np.asarray(scale)

    one, two, three = scales([0, 1, 1])
    assert np.any(one != two)
    np.testing.assert_array_equal(two, three)


@pytest.mark.full
def test_fits_that_do_not_fit_side_by_side_are_fitted_in_parts(monkeypatch, brief):
    monkeypatch.setattr(data_sets, "MOST_NUMBERS", 8 * (NUM + 1))
    parts = nt.check_calibration(
        KEY, normal_mean, AutoNormal, Y, alpha=0.5, num_simulations=20, num_draws=20
    )
    np.testing.assert_array_equal(parts.truths["theta"], brief.truths["theta"])
    assert np.corrcoef(parts.ranks["theta"], brief.ranks["theta"])[0, 1] > 0.95


@pytest.mark.full
def test_fits_that_do_not_converge_are_counted_and_left_in():
    result = nt.check_calibration(
        KEY, normal_mean, AutoNormal, Y, num_simulations=20, num_steps=2
    )
    assert not np.any(result.converged)
    assert (
        "20 of the 20 fits did not converge, and are among the ranks" in result.advice
    )
    assert result.ranks["theta"].shape == (20,)


@pytest.mark.full
@pytest.mark.parametrize(
    ("guide", "message"),
    [(AutoDelta, "point mass"), (AutoDAIS, "fit it data set by data set")],
)
def test_guides_without_posteriors_of_their_own_are_refused(guide, message):
    with pytest.raises(ValueError, match=message):
        nt.check_calibration(KEY, normal_mean, guide, Y)


@pytest.mark.full
def test_hierarchies_show_what_a_mean_field_misses():
    scale = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def schools(y):
        mu, tau = (
            numpyro.sample("mu", dist.Normal(0.0, 5.0)),
            numpyro.sample("tau", dist.HalfCauchy(5.0)),
        )
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, scale), obs=y)

    result = nt.check_calibration(
        KEY, schools, AutoNormal, np.zeros(8), num_simulations=100, num_steps=4000
    )
    # The funnel: the fit stays away from small tau.
    assert nt.table(result).loc["tau", "verdict"] == "too high and too narrow"
