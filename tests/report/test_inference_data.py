"""Results as ArviZ data."""

import copy
import inspect
import json
import warnings
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import (
    AIES,
    ESS,
    HMC,
    MCMC,
    NUTS,
    SA,
    BarkerMH,
    DiscreteHMCGibbs,
    HMCGibbs,
    MixedHMC,
    autoguide,
)
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.mcmc import MCMCKernel
from oracles import log_normal_density

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import replicate
from numpyro_tempered.infer.svi import finish
from numpyro_tempered.report.arviz import group, group_names

matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")

NUM_DATA, NOISE_SD = 8, 0.7
X = np.random.default_rng(1).normal(size=(NUM_DATA, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0]) + np.linspace(-1.0, 1.0, NUM_DATA)).astype(np.float32)
VERSIONS = {
    "inference_library",
    "inference_library_version",
    "numpyro_version",
    "jax_version",
}


def model(x, y=None, penalty=False):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    if penalty:
        numpyro.factor("penalty", -jnp.sum(theta**2))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, NOISE_SD), obs=y)


def two_outcomes(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with nt.temper(alpha=0.5):
        numpyro.sample("y", dist.Normal(theta, 1.0).expand([NUM_DATA]), obs=y)
    with nt.temper(alpha=0.25):
        numpyro.sample("mean", dist.Normal(theta, 1.0), obs=jnp.mean(y))


def fit(of, alpha=1.0, **kwargs):
    return nt.fit_svi(
        jax.random.key(3),
        of,
        AutoNormal,
        X,
        Y,
        alpha=alpha,
        num_steps=200,
        num_particles=20,
        optim=numpyro.optim.Adam(0.05),
        **kwargs,
    )


@pytest.fixture(
    scope="module", params=["quick", pytest.param("whole", marks=pytest.mark.full)]
)
def run(request):
    return request.param


def normal_guide(x, y=None, penalty=False):
    """With the parameters of AutoNormal, whose own set-up is many small programs."""
    loc, scale = numpyro.param("theta_auto_loc"), numpyro.param("theta_auto_scale")
    numpyro.sample("theta", dist.Normal(loc, scale).to_event(1))


@pytest.fixture(scope="module")
def tempered(run):
    """What fit_svi returns, or would of a run that ended at these parameters; its loop takes long to compile."""
    if run == "whole":
        return fit(model, 0.5, penalty=True)
    params = {
        "theta_auto_loc": jnp.asarray(np.array([0.8, -0.9], np.float32)),
        "theta_auto_scale": jnp.asarray(np.array([0.3, 0.2], np.float32)),
    }
    losses = np.linspace(30.0, 20.0, 200, dtype=np.float32)
    keys, args, kwargs = (
        jax.random.split(jax.random.key(3)),
        (jnp.asarray(X), jnp.asarray(Y)),
        {"penalty": True},
    )
    return finish(
        keys,
        nt.temper(model, alpha=0.5),
        normal_guide,
        params,
        losses,
        args,
        kwargs=kwargs,
        num_particles=2,
    )


@pytest.fixture(scope="module")
def online():
    runner = nt.OnlineVI(
        nt.temper(model, alpha=0.5),
        nt.guides.AutoOnlineDiagonalNormal,
        nt.online.ngvi(),
        nt.expectations.gauss_hermite(predictor="eta"),
    )
    state, losses = runner.run(jax.random.key(4), X, Y)
    return runner, state, losses


class DrawsState(NamedTuple):
    z: dict
    diverging: jax.Array
    rng_key: jax.Array


class Draws(MCMCKernel):
    """Independent draws of a Gaussian near the posterior, where those of HMC are many programs to compile."""

    sample_field = "z"
    default_fields = ("z", "diverging")

    def __init__(self, model):
        self._model = model

    @property
    def model(self):
        return self._model

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return DrawsState({"theta": np.zeros(2, np.float32)}, np.array(False), rng_key)

    def sample(self, state, model_args, model_kwargs):
        key, later = jax.random.split(state.rng_key)
        theta = np.array([0.8, -0.9], np.float32) + 0.3 * jax.random.normal(key, (2,))
        return DrawsState({"theta": theta}, state.diverging, later)

    def postprocess_fn(self, args, kwargs):
        return lambda z: {**z, "eta": args[0] @ z["theta"]}


@pytest.fixture(scope="module")
def mcmc(run):
    target = nt.temper(model, alpha=0.5)
    sampler = MCMC(
        NUTS(target) if run == "whole" else Draws(target),
        num_warmup=50,
        num_samples=60,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    sampler.run(jax.random.key(5), X, Y, penalty=True)
    return sampler


@pytest.fixture(scope="module")
def results(tempered, online, mcmc):
    runner, state, _ = online
    return {
        "svi": nt.to_inference_data(tempered, num_samples=120),
        "online": nt.to_inference_data(runner.posterior(state), X, Y, num_samples=120),
        "mcmc": nt.to_inference_data(mcmc),
    }


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def log_prob_by_hand(data):
    theta = np.asarray(data["posterior"]["theta"], np.float64)
    residual = (Y - theta @ X.T.astype(np.float64)) / NOISE_SD
    return -0.5 * residual**2 - np.log(NOISE_SD) - 0.5 * np.log(2.0 * np.pi)


KINDS = pytest.mark.parametrize("kind", ["svi", "online", "mcmc"])


@KINDS
def test_result_is_of_the_installed_generation(results, kind):
    if hasattr(az, "from_datatree"):
        assert isinstance(results[kind], az.InferenceData)
    else:
        assert isinstance(results[kind], xr.DataTree)


@pytest.mark.parametrize(
    ("kind", "own"),
    [("svi", "variational"), ("online", "variational"), ("mcmc", "sample_stats")],
)
def test_groups(results, kind, own):
    assert set(group_names(results[kind])) == {
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
        own,
    }


@KINDS
def test_dims_are_chain_and_draw_first(results, kind):
    chains, draws = (2, 60) if kind == "mcmc" else (1, 120)
    posterior, log_lik = (
        results[kind]["posterior"],
        results[kind]["untempered_log_likelihood"],
    )
    assert posterior["theta"].dims == ("chain", "draw", "theta_dim_0")
    assert posterior["theta"].shape == (chains, draws, 2)
    assert log_lik["y"].dims == ("chain", "draw", "n")
    assert log_lik["y"].shape == (chains, draws, NUM_DATA)
    np.testing.assert_array_equal(posterior["chain"], np.arange(chains))
    np.testing.assert_array_equal(posterior["draw"], np.arange(draws))


@KINDS
def test_posterior_holds_the_sites(results, kind):
    posterior = results[kind]["posterior"]
    assert set(posterior.data_vars) == {"theta", "eta"}
    assert posterior["eta"].dims == ("chain", "draw", "eta_dim_0")
    np.testing.assert_allclose(
        posterior["eta"], posterior["theta"].values @ X.T, rtol=1e-4, atol=1e-5
    )


@KINDS
def test_log_likelihood_is_untempered_and_leaves_factors_out(results, kind):
    log_lik = results[kind]["untempered_log_likelihood"]
    assert set(log_lik.data_vars) == {"y"}
    np.testing.assert_allclose(
        log_lik["y"], log_prob_by_hand(results[kind]), rtol=1e-4, atol=1e-4
    )


SCALES = pytest.mark.parametrize(
    ("alpha", "scale"), tiered([(0.0, None), (0.5, 3.0), (0.0, 3.0)], unit=[(0.0, 3.0)])
)


@SCALES
def test_log_likelihood_at_draws_is_unscaled_and_survives_alpha_zero(alpha, scale):
    scaled = model if scale is None else handlers.scale(model, scale)
    data = nt.to_inference_data(
        {"theta": draws_of()["theta"][:20]}, nt.temper(scaled, alpha=alpha), X, Y
    )
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"],
        log_prob_by_hand(data),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.full
@SCALES
def test_log_likelihood_is_unscaled_and_survives_alpha_zero(alpha, scale):
    scaled = model if scale is None else handlers.scale(model, scale)
    data = nt.to_inference_data(fit(scaled, alpha), num_samples=20)
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"],
        log_prob_by_hand(data),
        rtol=1e-4,
        atol=1e-4,
    )


@KINDS
def test_observed_data_are_the_data(results, kind):
    observed = results[kind]["observed_data"]
    assert set(observed.data_vars) == {"y"}
    assert observed["y"].dims == ("n",)
    np.testing.assert_array_equal(observed["y"], Y)


def test_variational_group_of_a_fit(results, tempered):
    found = results["svi"]["variational"]
    assert found["loss"].dims == ("step",)
    np.testing.assert_array_equal(found["loss"], tempered.losses)
    assert set(found.data_vars) == {"loss", *tempered.params}
    for name, value in tempered.params.items():
        np.testing.assert_array_equal(found[name], value)


def test_variational_group_of_an_online_run(results, online):
    found = results["online"]["variational"]
    _, state, losses = online
    np.testing.assert_array_equal(found["auto_loc"], state.posterior.loc)
    np.testing.assert_array_equal(found["auto_scale"], state.posterior.scale)
    assert int(found["count"]) == NUM_DATA
    assert int(found["rejected"]) == 0
    np.testing.assert_allclose(
        found["cumulative_loss_at_mean"], losses.at_mean.sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
        found["cumulative_loss_expected"], losses.expected.sum(), rtol=1e-5
    )


def test_draws_are_those_of_the_fitted_gaussian(results, tempered, online):
    _, state, _ = online
    for kind, loc, scale in [
        ("svi", tempered.params["theta_auto_loc"], tempered.params["theta_auto_scale"]),
        ("online", state.posterior.loc, state.posterior.scale),
    ]:
        draws = np.asarray(results[kind]["posterior"]["theta"])[0]
        np.testing.assert_array_less(
            np.abs(draws.mean(0) - loc) * np.sqrt(120) / scale, 4.0
        )
        # The relative standard error of a standard deviation from 120 draws is 0.065.
        np.testing.assert_allclose(draws.std(0), scale, rtol=0.26)


def test_mcmc_keeps_chains_apart(results, mcmc):
    np.testing.assert_array_equal(
        results["mcmc"]["posterior"]["theta"],
        mcmc.get_samples(group_by_chain=True)["theta"],
    )
    assert results["mcmc"]["sample_stats"]["diverging"].shape == (2, 60)


def test_attributes(results, run):
    expected = {
        "svi": {
            "algorithm": "svi",
            "guide": "AutoNormal" if run == "whole" else "normal_guide",
        },
        "online": {
            "algorithm": "online",
            "guide": "AutoOnlineDiagonalNormal",
            "rule": "ngvi",
        },
        "mcmc": {"algorithm": "nuts" if run == "whole" else "draws"},
    }
    for kind, entries in expected.items():
        attrs = results[kind].attrs
        assert (
            attrs.items()
            >= {**entries, "alpha": 0.5, "jax_version": jax.__version__}.items()
        )
        assert set(attrs) >= VERSIONS
        assert results[kind]["posterior"].attrs["alpha"] == 0.5


@pytest.mark.parametrize(
    "args",
    [
        lambda: ({"theta": np.zeros(5)}, two_outcomes, X, Y),
        pytest.param(lambda: (fit(two_outcomes),), marks=pytest.mark.full),
    ],
    ids=["draws", "fit"],
)
def test_powers_that_differ_by_site_are_an_attribute_in_json(args):
    data = nt.to_inference_data(*args(), num_samples=5)
    assert json.loads(data.attrs["alpha"]) == {"y": 0.5, "mean": 0.25}
    assert data["untempered_log_likelihood"]["mean"].shape == (1, 5)


def test_key_decides_the_draws(tempered, online):
    runner, state, _ = online
    for args in [(tempered,), (runner.posterior(state), X, Y)]:
        kept, again, other = (
            np.asarray(
                nt.to_inference_data(*args, num_samples=5, rng_key=key)["posterior"][
                    "theta"
                ]
            )
            for key in (None, None, jax.random.key(99))
        )
        np.testing.assert_array_equal(kept, again)
        assert not np.any(kept == other)


def test_log_likelihood_can_be_left_out(tempered):
    data = nt.to_inference_data(tempered, num_samples=5, log_lik=False)
    assert set(group_names(data)) == {"posterior", "observed_data", "variational"}


def test_named_dims_and_coords(tempered):
    units = [f"unit{i}" for i in range(NUM_DATA)]
    data = nt.to_inference_data(
        tempered,
        num_samples=5,
        dims={"theta": ["feature"], "y": ["unit"]},
        coords={"feature": ["size", "age"], "unit": units},
    )
    assert data["posterior"]["theta"].dims == ("chain", "draw", "feature")
    assert data["untempered_log_likelihood"]["y"].dims == ("chain", "draw", "unit")
    assert data["observed_data"]["y"].dims == ("unit",)
    assert list(data["posterior"]["feature"].values) == ["size", "age"]
    assert list(data["observed_data"]["unit"].values) == units
    # A coordinate belongs to the groups that have its dimension, and to no other.
    assert "feature" not in data["observed_data"].coords


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dims": {"theta": ["row", "column"]}},
            r"dims names \['row', 'column'\] for 'theta'",
        ),
        ({"dims": {"theta": ["feature"]}, "coords": {"feature": [0, 1, 2]}}, "feature"),
    ],
)
def test_dims_and_coords_must_fit(tempered, options, message):
    with pytest.raises(ValueError, match=message):
        nt.to_inference_data(tempered, num_samples=5, **options)


def test_wrong_results_are_refused(tempered, online):
    runner, state, _ = online
    with pytest.raises(TypeError, match="got list"):
        nt.to_inference_data([tempered])
    with pytest.raises(TypeError, match=r"^draws are.*the model is missing"):
        nt.to_inference_data(tempered.params)
    with pytest.raises(ValueError, match=r"holds its data.*got 2 further values"):
        nt.to_inference_data(tempered, X, Y)
    with pytest.raises(ValueError, match=r"holds its data.*'x'.* neither data nor"):
        nt.to_inference_data(tempered, x=X)
    with pytest.raises(ValueError, match=r"^the posterior of a stream does not hold"):
        nt.to_inference_data(runner.posterior(state))
    for other in (runner, state):
        with pytest.raises(TypeError, match=r"of a stream online.posterior\(state\)"):
            nt.to_inference_data(other, X, Y)


def test_mcmc_must_have_run_and_have_a_model(mcmc):
    with pytest.raises(ValueError, match=r"^the MCMC has not.*call mcmc\.run first"):
        nt.to_inference_data(
            MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
        )
    no_model = copy.copy(mcmc)
    no_model.sampler = HMC(
        potential_fn=lambda z: z**2, num_steps=1, trajectory_length=None
    )
    with pytest.raises(
        ValueError,
        match=r"^the kernel.*HMC has no model, only a potential.*draws and the model",
    ):
        nt.to_inference_data(no_model)


@pytest.mark.full
def test_mcmc_must_have_run():
    with pytest.raises(ValueError, match=r"^the MCMC has not.*call mcmc\.run first"):
        nt.to_inference_data(
            MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
        )
    kernel = HMC(potential_fn=lambda z: z**2, num_steps=1, trajectory_length=None)
    no_model = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    no_model.run(jax.random.key(0), init_params=jnp.array(0.0))
    with pytest.raises(
        ValueError,
        match=r"^the kernel.*HMC has no model, only a potential.*draws and the model",
    ):
        nt.to_inference_data(no_model)


@KINDS
def test_summary(results, kind):
    summary = az.summary(results[kind], var_names=["theta"])
    assert list(summary.index) == ["theta[0]", "theta[1]"]
    mean = np.asarray(results[kind]["posterior"]["theta"]).mean((0, 1))
    # ArviZ rounds what it prints.
    np.testing.assert_allclose(np.asarray(summary["mean"], float), mean, atol=0.06)


# ArviZ 0.23 calls Matplotlib 3.11 in a way that is deprecated there.
@pytest.mark.filterwarnings(
    "ignore:Passing a dict or None as alias_mapping:DeprecationWarning"
)
@KINDS
def test_arviz_plots(results, kind):
    trace = getattr(az, "plot_trace_dist", az.plot_trace)
    for plot in (az.plot_forest, trace):
        assert plot(results[kind], var_names=["theta"]) is not None
        assert plt.get_fignums()
        plt.close("all")


@KINDS
def test_loo_runs(results, kind):
    with warnings.catch_warnings():
        # ArviZ warns of large Pareto k; with eight data some are, and that is not the subject.
        warnings.filterwarnings(
            "ignore", "Estimated shape parameter of Pareto", UserWarning
        )
        result = nt.loo(results[kind], pointwise=True, var_name="y")
    elpd = result.elpd if hasattr(result, "elpd") else result.elpd_loo
    assert result.n_data_points == NUM_DATA
    # Leaving a datum out costs: the in-sample log predictive density is larger.
    log_lik = np.asarray(
        results[kind]["untempered_log_likelihood"]["y"], np.float64
    ).reshape(-1, NUM_DATA)
    in_sample = np.log(np.exp(log_lik).mean(0)).sum()
    assert in_sample - 10.0 < elpd < in_sample


def test_arviz_is_imported_when_data_are_made():
    module = inspect.getmodule(nt.to_inference_data)
    assert not hasattr(module, "az")
    assert not hasattr(module, "xr")


def test_the_losses_of_a_run_are_its_trace(online):
    runner, state, losses = online
    data = nt.to_inference_data(
        runner.posterior(state, losses), X, Y, log_lik=False, num_samples=120
    )
    variational = group(data, "variational")
    assert variational["loss_expected"].dims == ("round",)
    np.testing.assert_array_equal(variational["loss_at_mean"], losses.at_mean)


@pytest.mark.full
def test_the_losses_of_an_online_run_are_its_trace():
    def model(x, y=None):
        numpyro.sample(
            "y",
            dist.Normal(numpyro.sample("theta", dist.Normal()) * x, 1.0).to_event(1),
            obs=y,
        )

    online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())
    x, y = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
    state, losses = online.run(jax.random.key(0), x, y)
    variational = group(
        nt.to_inference_data(online.posterior(state, losses), x, y), "variational"
    )
    assert variational["loss_expected"].dims == ("round",)
    np.testing.assert_array_equal(variational["loss_at_mean"], losses.at_mean)


def test_dims_of_no_variable_are_refused(tempered):
    with pytest.raises(ValueError, match=r"^dims names.*not among the variables"):
        nt.to_inference_data(tempered, num_samples=5, dims={"nothing": ["here"]})


def with_noise(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 0.1))
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, noise), obs=y)


def guide_of_theta(y):
    numpyro.sample("theta", dist.Normal(numpyro.param("loc", 0.0), 0.1))


def test_the_likelihood_group_has_the_params_of_the_fit(tempered):
    params = {"loc": jnp.array(0.02), "noise": jnp.array(4.8)}
    fit = tempered._replace(
        model=nt.temper(with_noise, alpha=0.5),
        guide=guide_of_theta,
        params=params,
        args=(jnp.asarray(Y),),
        kwargs={},
    )
    data = nt.to_inference_data(fit, num_samples=5)
    theta = np.asarray(data["posterior"]["theta"], np.float64)[..., None]
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"],
        log_normal_density(Y, theta, 4.8),
        rtol=1e-5,
    )


@pytest.mark.full
def test_the_likelihood_group_uses_the_fitted_params():
    y = 5.0 * jax.random.normal(jax.random.key(1), (50,))
    fit = nt.fit_svi(jax.random.key(0), with_noise, AutoNormal, y)
    assert fit.params["noise"] > 4.0
    total = group(nt.to_inference_data(fit), "log_likelihood")["y"].sum("n").mean()
    np.testing.assert_allclose(total, fit.elbo.expected_log_lik, rtol=1e-2)


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y), subsample_size=4) as rows:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[rows])


@pytest.mark.parametrize("fitted", tiered([False, True], unit=[False]))
def test_a_subsampling_plate_leaves_the_likelihood_group_out(fitted):
    # To draw the rows is a program of its own.
    given = handlers.substitute(subsampled, data={"n": jnp.asarray(np.arange(4))})
    args, kwargs = (
        ({"theta": np.zeros(5)}, given, np.ones(10)),
        {"rng_key": jax.random.key(0)},
    )
    if fitted:
        fit = nt.fit_svi(
            jax.random.key(0),
            subsampled,
            AutoNormal,
            jnp.ones(10),
            num_steps=2,
            num_particles=2,
            optim=numpyro.optim.Adam(0.05),
        )
        args, kwargs = (fit,), {}
    with pytest.warns(
        UserWarning, match=r"^a plate of the.*subsamples.*data, is left out"
    ):
        data = nt.to_inference_data(*args, **kwargs)
    assert "log_likelihood" not in group_names(data)
    with pytest.raises(ValueError, match="no posterior_predictive group"):
        nt.to_inference_data(*args, posterior_predictive=True, **kwargs)


# Every kernel and every guide, on a model with a scale, a deterministic site and, for some, a discrete latent.

TARGETS = jnp.array([0.5, 1.0, 2.0, -1.0])


def shifted(y, discrete=False):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    shift = (
        numpyro.sample("shift", dist.Categorical(probs=jnp.array([0.3, 0.4, 0.3])))
        if discrete
        else 0
    )
    loc = numpyro.deterministic("loc", theta + shift)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(loc, sd), obs=y)


def theta_from_its_prior(rng_key, gibbs_sites, hmc_sites):
    return {"theta": jax.random.normal(rng_key)}


half = nt.temper(shifted, alpha=0.5)
# (the kernel, number of chains, whether the discrete latent is in)
KERNELS = {
    "nuts": (lambda: NUTS(half), 2, False),
    "hmc": (lambda: HMC(half), 2, False),
    "barkermh": (lambda: BarkerMH(half), 1, False),
    "sa": (lambda: SA(half), 1, False),
    "aies": (lambda: AIES(half), 4, False),
    "ess": (lambda: ESS(half), 4, False),
    "hmcgibbs": (
        lambda: HMCGibbs(NUTS(half), theta_from_its_prior, ["theta"]),
        1,
        False,
    ),
    "mixedhmc": (lambda: MixedHMC(HMC(half, trajectory_length=1.0)), 2, True),
    "discretehmcgibbs": (lambda: DiscreteHMCGibbs(NUTS(half), modified=True), 2, True),
}
FAST_KERNELS = {"nuts", "mixedhmc"}


def shifted_log_prob(posterior):
    loc, sd = (
        np.asarray(posterior[name], np.float64)[..., None] for name in ("loc", "sd")
    )
    return (
        -0.5 * ((np.asarray(TARGETS) - loc) / sd) ** 2
        - np.log(sd)
        - 0.5 * np.log(2.0 * np.pi)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        k if k in FAST_KERNELS else pytest.param(k, marks=pytest.mark.slow)
        for k in KERNELS
    ],
)
def test_every_kernel(name):
    kernel, num_chains, discrete = KERNELS[name]
    mcmc = MCMC(
        kernel(),
        num_warmup=20,
        num_samples=20,
        thinning=2,
        num_chains=num_chains,
        chain_method="vectorized" if name in ("aies", "ess") else "sequential",
        progress_bar=False,
    )
    with warnings.catch_warnings():
        # Kernels have advice on the number of chains, on the initial values and the like.
        warnings.simplefilter("ignore")
        mcmc.run(jax.random.key(0), TARGETS, discrete=discrete)
    data = nt.to_inference_data(mcmc, posterior_predictive=True)
    assert set(data["posterior"].data_vars) == {
        "theta",
        "sd",
        "loc",
        *(["shift"] if discrete else []),
    }
    assert data["posterior"]["theta"].shape == (num_chains, 10)
    by_hand = shifted_log_prob(data["posterior"])
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"], by_hand, rtol=1e-4, atol=1e-4
    )
    assert data["posterior_predictive"]["y"].shape == (num_chains, 10, 4)
    assert data.attrs.items() >= {"alpha": 0.5, "algorithm": name}.items()


def test_a_sampler_may_keep_no_draws_of_a_latent(mcmc):
    kept = copy.copy(mcmc)
    field = kept._sample_field
    kept._states = {**kept._states, field: {"eta": kept._states[field]["eta"]}}
    with pytest.warns(
        UserWarning,
        match=r"^the draws.*no values of the latent sites \['theta'\].*them, is left out",
    ):
        data = nt.to_inference_data(kept)
    assert set(group_names(data)) == {"posterior", "observed_data", "sample_stats"}
    with pytest.raises(ValueError, match="no posterior_predictive group"):
        nt.to_inference_data(kept, posterior_predictive=True)


@pytest.mark.full
def test_a_sampler_that_enumerates_keeps_no_draws_of_the_latent():
    mcmc = MCMC(NUTS(half), num_warmup=10, num_samples=10, progress_bar=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Some algorithms will automatically enumerate", FutureWarning
        )
        warnings.filterwarnings(
            "ignore", "Some algorithms will automatically enumerate", UserWarning
        )
        mcmc.run(jax.random.key(0), TARGETS, discrete=True)
    with pytest.warns(UserWarning, match=r"no values of the latent sites \['shift'\]"):
        data = nt.to_inference_data(mcmc)
    assert set(group_names(data)) == {"posterior", "observed_data", "sample_stats"}
    with pytest.raises(ValueError, match="no posterior_predictive group"):
        nt.to_inference_data(mcmc, posterior_predictive=True)


def list_of_guides(model):
    guides = autoguide.AutoGuideList(model)
    guides.append(AutoNormal(handlers.block(model, hide=["sd", "loc"])))
    guides.append(autoguide.AutoDelta(handlers.block(model, hide=["theta", "loc"])))
    return guides


def by_hand(model):
    def guide(y):
        numpyro.sample("sd", dist.LogNormal(numpyro.param("log_sd", 0.0), 0.3))
        numpyro.sample("theta", dist.Normal(numpyro.param("location", 0.0), 0.5))

    return guide


GUIDES = {
    "AutoGuideList": list_of_guides,
    "guide": by_hand,
    **{
        name: getattr(autoguide, name)
        for name in (
            "AutoBNAFNormal",
            "AutoDAIS",
            "AutoDelta",
            "AutoDiagonalNormal",
            "AutoIAFNormal",
            "AutoLaplaceApproximation",
            "AutoLowRankMultivariateNormal",
            "AutoMultivariateNormal",
            "AutoNormal",
        )
    },
}
FAST_GUIDES = {"AutoGuideList"}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        k if k in FAST_GUIDES else pytest.param(k, marks=pytest.mark.slow)
        for k in GUIDES
    ],
)
def test_every_guide(name):
    with warnings.catch_warnings():
        # Ten steps do not converge, and some guides order their sites differently.
        warnings.simplefilter("ignore")
        fit = nt.fit_svi(
            jax.random.key(0),
            shifted,
            GUIDES[name],
            TARGETS,
            alpha=0.5,
            num_steps=10,
            num_particles=10,
            optim=numpyro.optim.Adam(0.05),
        )
    data = nt.to_inference_data(fit, num_samples=20, posterior_predictive=True)
    posterior = group(data, "posterior")
    assert set(posterior.data_vars) == {"theta", "sd", "loc"}
    assert np.all(np.asarray(posterior["sd"]) > 0.0)
    expected = shifted_log_prob(posterior)
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"], expected, rtol=1e-4, atol=1e-4
    )
    assert data["posterior_predictive"]["y"].shape == (1, 20, 4)
    assert (
        data.attrs.items() >= {"alpha": 0.5, "algorithm": "svi", "guide": name}.items()
    )


# Draws of any other algorithm.

NUM_DRAWS = 4000


def draws_of(num_chains=None):
    shape = (
        (NUM_DRAWS,) if num_chains is None else (num_chains, NUM_DRAWS // num_chains)
    )
    return {
        "theta": np.random.default_rng(0).normal(size=(*shape, 2)).astype(np.float32)
    }


@pytest.mark.parametrize("num_chains", tiered([None, 4], unit=[4]))
def test_plain_draws(num_chains):
    draws = draws_of(num_chains)
    data = nt.to_inference_data(
        draws,
        nt.temper(model, alpha=0.5),
        X,
        y=Y,
        penalty=True,
        group_by_chain=num_chains is not None,
    )
    assert set(group_names(data)) == {
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
    }
    np.testing.assert_array_equal(
        data["posterior"]["theta"],
        draws["theta"] if num_chains else draws["theta"][None],
    )
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"],
        log_prob_by_hand(data),
        rtol=1e-3,
        atol=1e-3,
    )
    assert data.attrs.items() >= {"alpha": 0.5, "algorithm": "draws"}.items()


def test_plain_draws_of_discrete_and_deterministic_sites():
    draws = {
        "theta": np.zeros(6),
        "sd": np.ones(6),
        "shift": np.array([0, 1, 2] * 2),
        "loc": np.arange(6.0),
    }
    data = nt.to_inference_data(draws, half, TARGETS, discrete=True)
    assert data["posterior"]["shift"].dtype.kind == "i"
    # What is given is shown, but the likelihood is that of the latents.
    np.testing.assert_array_equal(data["posterior"]["loc"][0], np.arange(6.0))
    at = {"loc": draws["shift"][None], "sd": draws["sd"][None]}
    np.testing.assert_allclose(
        data["untempered_log_likelihood"]["y"], shifted_log_prob(at), rtol=1e-5
    )


def with_param(x):
    numpyro.sample(
        "y",
        dist.Normal(numpyro.sample("theta", dist.Normal()), numpyro.param("sd", 1.0)),
        obs=x,
    )


@pytest.mark.parametrize(
    ("draws", "of", "options", "message"),
    [
        ({}, model, {}, r"draws must be arrays \(draws, ...\).*of draws, got shapes"),
        (
            {"theta": np.ones((5, 2)), "b": np.ones(4)},
            model,
            {},
            r"^the draws.*one number of draws.*\(4,\)",
        ),
        (
            {"theta": np.ones(5)},
            model,
            {"group_by_chain": True},
            r"arrays \(chains, draws, ...\)",
        ),
        (
            {"b": np.ones(5)},
            model,
            {},
            r"^the draws.*no values of the latent site 'theta'.*of the model",
        ),
        (
            {"b": np.ones(5)},
            model,
            {"rng_key": jax.random.key(0)},
            "no values of the latent site 'theta'",
        ),
        (
            {"theta": np.ones((5, 2)), "b": np.ones(5)},
            model,
            {},
            r"hold \['b'\], which are not latent",
        ),
        (
            {"theta": np.ones((5, 2)), "y": np.ones((5, 8))},
            model,
            {},
            r"hold \['y'\], which are not latent",
        ),
        (
            {"theta": np.ones((5, 2))},
            model,
            {"posterior_predictive": True},
            "pass an rng_key",
        ),
        (
            {"theta": np.ones(5)},
            with_param,
            {},
            r"^the model has params \['sd'\], without fitted values",
        ),
    ],
)
def test_draws_must_fit_their_model(draws, of, options, message):
    with pytest.raises(ValueError, match=message):
        nt.to_inference_data(
            draws, of, X, **({} if of is with_param else {"y": Y}), **options
        )


def test_params_of_the_model_can_be_fixed():
    fixed = handlers.substitute(with_param, data={"sd": 2.0})
    data = nt.to_inference_data({"theta": np.zeros(3)}, fixed, 1.0)
    np.testing.assert_allclose(
        data["log_likelihood"]["y"], log_normal_density(1.0, 0.0, 2.0), rtol=1e-5
    )


# Replicates.


def replicates(draws, of, *args, seed=1, **kwargs):
    data = nt.to_inference_data(
        draws,
        of,
        *args,
        rng_key=jax.random.key(seed),
        posterior_predictive=True,
        log_lik=False,
        **kwargs,
    )
    return np.asarray(data["posterior_predictive"]["y"], np.float64)[0]


def assert_standard_normal(z):
    """Means, variances and correlations of columns at five standard errors."""
    n, d = z.shape
    assert np.all(np.abs(z.mean(0)) < 5.0 / np.sqrt(n))
    assert np.all(np.abs((z**2).mean(0) - 1.0) < 5.0 * np.sqrt(2.0 / n))
    assert np.all(np.abs(np.corrcoef(z.T) - np.eye(d)) < 5.0 / np.sqrt(n))


@pytest.mark.parametrize("alpha", tiered([0.0, 0.25], unit=[0.25]))
def test_replicates_are_untempered_and_independent(alpha):
    draws = draws_of()
    drawn = replicates(
        draws, nt.temper(handlers.scale(model, 3.0), alpha=alpha), X, Y, penalty=True
    )
    residual = (drawn - draws["theta"] @ X.T) / NOISE_SD
    assert_standard_normal(np.hstack([residual, draws["theta"]]))


@pytest.mark.full
def test_replicates_share_nothing_with_the_draws_of_a_fit(tempered):
    # Both come from the key of the fit.
    data = nt.to_inference_data(
        tempered, num_samples=NUM_DRAWS, posterior_predictive=True, log_lik=False
    )
    theta = np.asarray(data["posterior"]["theta"], np.float64)[0]
    drawn = np.asarray(data["posterior_predictive"]["y"], np.float64)[0]
    loc, scale = (
        np.asarray(tempered.params[f"theta_auto_{k}"], np.float64)
        for k in ("loc", "scale")
    )
    assert_standard_normal(
        np.hstack([(drawn - theta @ X.T) / NOISE_SD, (theta - loc) / scale])
    )


@pytest.mark.parametrize("kind", tiered(["svi", "online", "mcmc"], unit=["mcmc"]))
def test_replicates_of_every_result(tempered, online, mcmc, kind):
    runner, state, _ = online
    args = {
        "svi": (tempered,),
        "online": (runner.posterior(state), X, Y),
        "mcmc": (mcmc,),
    }[kind]
    kept, again, other = (
        nt.to_inference_data(
            *args,
            num_samples=20,
            log_lik=False,
            posterior_predictive=True,
            rng_key=key,
            dims={"y": ["row"]},
        )["posterior_predictive"]["y"]
        for key in (None, None, jax.random.key(99))
    )
    assert kept.dims == ("chain", "draw", "row")
    np.testing.assert_array_equal(kept, again)
    assert not np.any(np.asarray(kept) == np.asarray(other))


def broadcast(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)


def vectors(y):
    loc = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("n", 3):
        numpyro.sample(
            "y",
            dist.MultivariateNormal(
                loc, scale_tril=jnp.array([[1.0, 0.0], [2.0, 1.0]])
            ),
            obs=y,
        )


@pytest.mark.parametrize(
    ("of", "latent", "shape"),
    [(broadcast, (), (3,)), (vectors, (2,), (3, 2))],
    ids=["no plate", "vectors"],
)
def test_replicates_have_the_shape_of_the_data(of, latent, shape):
    draws = {"theta": np.zeros((5, *latent), np.float32)}
    drawn = jax.eval_shape(
        lambda: replicate(jax.random.key(0), of, draws, (jnp.zeros(shape),), {})
    )
    assert drawn["y"].shape == (5, *shape)


@pytest.mark.full
def test_replicates_of_data_without_a_plate_are_independent():
    draws = np.random.default_rng(0).normal(size=NUM_DRAWS)
    drawn = replicates({"theta": draws}, broadcast, jnp.zeros(3))
    assert_standard_normal(drawn - draws[:, None])


def test_replicates_of_two_sites_are_independent():
    def twice(y, z):
        theta = numpyro.sample("theta", dist.Normal())
        for name, value in (("y", y), ("z", z)):
            numpyro.sample(name, dist.Normal(theta, 1.0), obs=value)

    draws = {"theta": np.random.default_rng(0).normal(size=NUM_DRAWS)}
    data = nt.to_inference_data(
        draws,
        twice,
        0.0,
        0.0,
        rng_key=jax.random.key(1),
        posterior_predictive=True,
        log_lik=False,
    )
    drawn = [
        np.asarray(data["posterior_predictive"][name], np.float64)[0]
        for name in ("y", "z")
    ]
    assert_standard_normal(np.stack(drawn, axis=1) - draws["theta"][:, None])


@pytest.mark.full
def test_replicates_of_vectors():
    draws = draws_of()
    drawn = replicates(draws, vectors, jnp.zeros((3, 2))) - draws["theta"][:, None]
    assert drawn.shape == (NUM_DRAWS, 3, 2)
    assert_standard_normal(
        np.hstack([drawn[..., 0], drawn[..., 1] - 2.0 * drawn[..., 0]])
    )


def test_replicates_in_a_chain_are_one_step_ahead():
    def chain(y):
        a = numpyro.sample("theta", dist.Normal(0.0, 1.0))

        def step(previous, now):
            now = numpyro.sample("y", dist.Normal(a * previous, 1.0), obs=now)
            return now, None

        scan(step, jnp.array(1.0), y)

    y = jnp.array([3.0, -2.0, 5.0])
    draws = np.random.default_rng(0).normal(size=NUM_DRAWS)
    drawn = replicates({"theta": draws}, nt.temper(chain, alpha=0.5), y)
    assert_standard_normal(drawn - draws[:, None] * np.array([1.0, 3.0, -2.0]))


def test_what_has_no_sampler_is_named():
    class Unsampled(dist.Normal):
        def sample(self, key, sample_shape=()):
            raise NotImplementedError("try another")

    def unsampled(y):
        numpyro.sample(
            "y", Unsampled(numpyro.sample("theta", dist.Normal()), 1.0), obs=y
        )

    with pytest.raises(
        ValueError, match="site 'y', Unsampled, which cannot be done: try another"
    ):
        replicates({"theta": np.zeros(3)}, unsampled, 1.0)


# Names and scales.


def test_slashes_in_names_become_dots():
    def named(y):
        theta = numpyro.sample("theta", dist.Normal())
        with nt.temper(alpha=0.5):
            numpyro.sample("y", dist.Normal(theta, 1.0).expand([2]), obs=y)
        numpyro.sample("z", dist.Normal(theta, 1.0), obs=y[0])

    draws = {"a/theta": np.zeros(30)}
    data = nt.to_inference_data(
        draws,
        handlers.scope(named, prefix="a"),
        jnp.ones(2),
        dims={"a/y": ["row"], "a.theta": []},
    )
    assert list(data["posterior"].data_vars) == ["a.theta"]
    assert data["untempered_log_likelihood"]["a.y"].dims == ("chain", "draw", "row")
    assert json.loads(data.attrs["alpha"]) == {"a.y": 0.5, "a.z": 1.0}


def test_scales_beside_alpha_are_an_attribute():
    draws = {"theta": np.zeros((3, 2))}
    assert (
        "likelihood_scale"
        not in nt.to_inference_data(draws, nt.temper(model, alpha=0.5), X, Y).attrs
    )
    scaled = nt.temper(handlers.scale(model, 3.0), alpha=0.5)
    data = nt.to_inference_data(draws, scaled, X, Y)
    assert (data.attrs["alpha"], json.loads(data.attrs["likelihood_scale"])) == (
        0.5,
        {"y": 3.0},
    )
