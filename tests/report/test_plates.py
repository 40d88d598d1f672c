"""Plates as named dimensions, and deterministic sites beside the latent ones."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.report.draws import plate_dims

SIGMA = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
Y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
NAMES = list("ABCDEFGH")
KEY = jax.random.PRNGKey(0)


def schools(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    log_tau = numpyro.sample("log_tau", dist.Normal(0.0, 1.0))
    tau = numpyro.deterministic("tau", jnp.exp(log_tau))
    with numpyro.plate("school", 8):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(0)
    return {
        "mu": rng.normal(size=6),
        "log_tau": rng.normal(size=6),
        "z": rng.normal(size=(6, 8)),
    }


@pytest.fixture(scope="module")
def data(draws):
    return nt.to_inference_data(
        draws,
        schools,
        SIGMA,
        Y,
        rng_key=KEY,
        posterior_predictive=True,
        coords={"school": NAMES},
    )


def test_deterministic_sites_follow_from_the_draws(data, draws):
    posterior = data["posterior"]
    assert set(posterior.data_vars) == {"mu", "log_tau", "z", "tau", "theta"}
    np.testing.assert_allclose(posterior["tau"][0], np.exp(draws["log_tau"]), rtol=1e-5)
    theta = draws["mu"][:, None] + np.exp(draws["log_tau"])[:, None] * draws["z"]
    np.testing.assert_allclose(posterior["theta"][0], theta, rtol=1e-4, atol=1e-5)


def test_plates_are_dims(data):
    for group in (
        "posterior",
        "log_likelihood",
        "posterior_predictive",
        "observed_data",
    ):
        variables = {"posterior": ("z", "theta")}.get(group, ("y",))
        for name in variables:
            assert data[group][name].dims[-1] == "school"
            assert list(data[group][name]["school"].values) == NAMES
    assert data["posterior"]["mu"].dims == ("chain", "draw")
    assert data["posterior"]["theta"].sel(school="C").shape == (1, 6)


def test_dims_of_the_user_win(draws):
    dims = {"y": ["datum"], "theta": ["unit"]}
    data = nt.to_inference_data(
        draws, schools, SIGMA, Y, dims=dims, coords={"datum": NAMES}
    )
    assert data["posterior"]["theta"].dims == ("chain", "draw", "unit")
    assert data["posterior"]["z"].dims == ("chain", "draw", "school")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "datum")
    assert list(data["observed_data"]["datum"].values) == NAMES


def test_without_the_likelihood_group_the_deterministic_sites_stay(draws):
    data = nt.to_inference_data(draws, schools, SIGMA, Y, log_lik=False)
    assert "theta" in data["posterior"].data_vars
    assert "y" not in data["posterior"].data_vars


def two_plates(y):
    rows, columns = numpyro.plate("row", 3, dim=-2), numpyro.plate("column", 2, dim=-1)
    with rows:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with columns:
        b = numpyro.sample("b", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    with rows, columns:
        numpyro.deterministic("both", a + b.sum(-1))
        numpyro.deterministic("curve", (a + b.sum(-1))[..., None] * jnp.arange(5))
        numpyro.deterministic("total", jnp.sum(a))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)
    # A result has draws already.
    with numpyro.plate("draw", 7), numpyro.plate("alpha", 3):
        numpyro.sample("c", dist.Normal(0.0, 1.0), infer={"event_dims": []})
    numpyro.sample("d", dist.Dirichlet(jnp.ones(4)), infer={"event_dims": ["level"]})


def named(dims, **shapes):
    with numpyro.handlers.seed(rng_seed=0):
        trace = get_trace(two_plates, (np.zeros((3, 2)),), {})
    return plate_dims(
        trace,
        {k: np.shape(trace[k]["value"]) for k in trace if trace[k]["type"] != "plate"}
        | shapes,
        dims,
    )


@pytest.mark.full
def test_dims_are_where_the_plates_are():
    assert named({}) == {
        "a": ["row", "a_dim_1"],
        "b": ["column", "b_dim_1"],
        "both": ["row", "column"],
        "curve": ["row", "column", "curve_dim_2"],
        "y": ["row", "column"],
        "d": ["level"],
    }


def test_a_name_belongs_to_one_size():
    # The user's row has another size than the plate.
    assert named({"d": ["row"]})["both"] == ["both_dim_0", "column"]
    # A site broadcast along its plate, as the value of one chain of several.
    assert named({}, y=(1, 2))["y"] == ["y_dim_0", "column"]


def test_names_with_slashes_become_dots(draws):
    def scoped(y):
        with numpyro.handlers.scope(prefix="all"):
            schools(SIGMA, y)

    of_scope = {f"all/{name}": value for name, value in draws.items()}
    posterior = nt.to_inference_data(of_scope, scoped, Y)["posterior"]
    assert posterior["all.theta"].dims == ("chain", "draw", "all.school")


def test_a_subsample_has_no_deterministic_sites_of_its_rows():
    def half(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.deterministic("double", 2.0 * theta)
        with numpyro.plate("n", 8, subsample_size=4) as rows:
            numpyro.deterministic("row", theta + rows)
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[rows])

    draws = {"theta": np.linspace(0.0, 1.0, 5)}
    data = nt.to_inference_data(
        draws, numpyro.handlers.seed(half, KEY), jnp.asarray(Y), log_lik=False
    )
    assert set(data["posterior"].data_vars) == {"theta", "double"}


def fit_quickly(model, *args, **kwargs):
    return nt.fit_svi(
        KEY,
        model,
        AutoNormal,
        *args,
        num_steps=20,
        num_particles=2,
        optim=numpyro.optim.Adam(0.05),
        **kwargs,
    )


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:the fit ended after", "ignore:the ELBO that was maximised"
)
@pytest.mark.parametrize("kind", ["svi", "gaussian", "online", "mcmc"])
def test_every_algorithm_has_the_same_posterior_group(kind):
    if kind == "svi":
        data = nt.to_inference_data(fit_quickly(schools, SIGMA, Y), num_samples=5)
    elif kind == "gaussian":
        fit = nt.fit_gaussian(
            KEY,
            schools,
            AutoMultivariateNormal,
            SIGMA,
            Y,
            max_evaluations=5,
            num_particles=2,
        )
        data = nt.to_inference_data(fit, num_samples=5)
    elif kind == "online":
        online = nt.OnlineVI(schools, nt.guides.AutoOnlineDiagonalNormal)
        state, _ = online.update(online.init(KEY, SIGMA, Y), SIGMA, Y)
        data = nt.to_inference_data(online.posterior(state), SIGMA, Y, num_samples=5)
    else:
        mcmc = MCMC(NUTS(schools), num_warmup=5, num_samples=5, progress_bar=False)
        mcmc.run(KEY, SIGMA, Y)
        data = nt.to_inference_data(mcmc)
    posterior = data["posterior"]
    assert {name: posterior[name].dims[2:] for name in posterior.data_vars} == {
        "mu": (),
        "log_tau": (),
        "tau": (),
        "z": ("school",),
        "theta": ("school",),
    }
    np.testing.assert_allclose(
        posterior["theta"].transpose(..., "school"),
        (posterior["mu"] + posterior["tau"] * posterior["z"]).transpose(..., "school"),
        rtol=1e-4,
        atol=1e-5,
    )
    assert az.summary(data, var_names=["theta"]).shape[0] == 8


@pytest.mark.full
def test_compare_names_dims_of_any_model():
    def one_mean(sigma, y=None):
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(1), 5.0).to_event(1))
        with numpyro.plate("school", 8):
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    fits = {
        "one": fit_quickly(one_mean, SIGMA, Y),
        "eight": fit_quickly(schools, SIGMA, Y),
    }
    dims = {"theta": ["unit"], "mu": [], "y": ["unit"]}
    for winner in fits:
        order = {name: -0.1 if name == winner else -500.0 for name in fits}
        given = dims if winner == "eight" else {**dims, "mu": ["all"]}
        result = nt.compare(
            fits, order, num_samples=5, dims=given, coords={"unit": NAMES}
        )
        assert result.attrs["selected"] == winner
        assert list(result["observed_data"]["unit"].values) == NAMES
    with pytest.raises(
        ValueError,
        match=r"dims names \['thta'\], which are not among the variables of any fit",
    ):
        nt.compare(fits, num_samples=5, dims={"thta": ["unit"]})


@pytest.mark.full
def test_a_path_has_the_plates():
    path = nt.temper_path(
        KEY, schools, AutoNormal, SIGMA, Y, alphas=[0.5, 1.0], num_samples=4
    )
    assert path["posterior"]["z"].dims == ("chain", "draw", "alpha", "school")
    assert path["observed_data"]["y"].dims == ("school",)


def test_the_time_of_a_scan_is_no_plate():
    def model(y):
        def step(carry, y):
            with numpyro.plate("group", 2):
                z = numpyro.sample("z", dist.Normal(carry, 1.0))
                numpyro.deterministic("twice", 2 * z)
                numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
            return z, None

        scan(step, jnp.zeros(2), y)

    # As many steps as the plate is large.
    data = nt.to_inference_data(
        {"z": jnp.zeros((1, 2, 2))}, model, jnp.zeros((2, 2)), log_lik=False
    )
    assert data["posterior"]["z"].dims[2:] == ("z_dim_0", "group")
    assert data["posterior"]["twice"].dims[2:] == ("twice_dim_0", "twice_dim_1")


def test_a_reduction_over_one_of_two_equal_plates_has_no_name():
    def model(y):
        with numpyro.plate("a", 2, dim=-2), numpyro.plate("b", 2, dim=-1):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0))
            numpyro.deterministic("mean", v.mean(0))
            numpyro.deterministic("nothing", jnp.zeros(0))
            numpyro.deterministic("pair", (v, v))
            numpyro.sample("y", dist.Normal(v, 1.0), obs=y)

    data = nt.to_inference_data(
        {"v": jnp.zeros((1, 2, 2))}, model, jnp.zeros((2, 2)), log_lik=False
    )
    assert data["posterior"]["mean"].dims[2:] == ("mean_dim_0",)
    assert set(data["posterior"].data_vars) == {"v", "mean"}
