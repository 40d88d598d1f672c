"""Predictions at other arguments of a model, by every kind of posterior."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.handlers.arguments import argument_columns
from numpyro_tempered.report.arviz import group

KEY, N, S, NOISE = jax.random.key(0), 40, 4000, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = X @ np.array([1.0, -2.0]) + NOISE * RNG.normal(size=N)
NEW = np.array([[1.0, 0.0], [0.0, 3.0], [-2.0, 1.0]])
COV = np.linalg.inv(np.eye(2) / 4.0 + 0.5 * X.T @ X / NOISE**2)
MEAN = COV @ (0.5 * X.T @ Y / NOISE**2)


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


@pytest.fixture(scope="module")
def fit():
    at_eta = nt.expectations.gauss_hermite(predictor="eta")
    options = {"alpha": 0.5, "expectation": at_eta}
    return nt.fit_gaussian(KEY, model, AutoMultivariateNormal, X, Y, **options)


def close(draws, rows):
    """Moments of draws of y and its predictor are those of the exact predictive."""
    mean = rows @ MEAN
    spread = np.einsum("ij,jk,ik->i", rows, COV, rows)
    for name, variance in (("eta", spread), ("y", spread + NOISE**2)):
        values = np.asarray(draws[name], float).reshape(-1, len(rows))
        sd = np.sqrt(variance)
        error = 5.0 * sd / np.sqrt(len(values))
        assert np.all(np.abs(values.mean(axis=0) - mean) < error), name
        np.testing.assert_allclose(values.std(axis=0), sd, rtol=0.1)


def test_a_fit_predicts_by_the_exact_predictive(fit):
    draws = fit.predict(jax.random.key(1), NEW, num_samples=S)
    assert {name: v.shape for name, v in draws.items()} == {"eta": (S, 3), "y": (S, 3)}
    close(draws, NEW)
    # What is observed is not drawn.
    assert set(fit.predict(jax.random.key(1), NEW, jnp.zeros(3))) == {"eta"}


def test_predictions_are_groups_of_arviz_data(fit):
    data = nt.to_inference_data(
        fit, num_samples=S, predictions=(NEW,), coords={"n": np.arange(N) + 100}
    )
    found, constant = (
        group(data, "predictions"),
        group(data, "predictions_constant_data"),
    )
    assert found["y"].dims == ("chain", "draw", "n")
    close({name: found[name].values[0] for name in found.data_vars}, NEW)
    np.testing.assert_array_equal(constant["x"], NEW)
    by_name = nt.to_inference_data(fit, num_samples=5, predictions={"x": NEW})
    assert group(by_name, "predictions")["y"].shape == (1, 5, 3)
    with pytest.raises(TypeError, match=r"as a tuple .x_new,. or a mapping by name"):
        nt.to_inference_data(fit, num_samples=5, predictions=NEW)


def test_the_columns_of_a_frame_are_those_of_the_fit():
    frame = pd.DataFrame(X, columns=["age", "dose"])
    fit = nt.fit_gaussian(KEY, model, AutoNormal, frame, Y)
    new = pd.DataFrame(NEW, columns=["age", "dose"])
    assert fit.predict(KEY, new, num_samples=2)["y"].shape == (2, 3)
    for wrong in (new[["dose", "age"]], new.rename(columns={"age": "years"})):
        with pytest.raises(ValueError, match=r"has columns \['.*that of the fit"):
            fit.predict(KEY, wrong)


FRAME = pd.DataFrame(X, columns=["u", "v"])
SWAPPED = FRAME[["v", "u"]]
CHANGED = {
    "by name": lambda fit: fit.predict(KEY, x=SWAPPED),
    "a group": lambda fit: nt.to_inference_data(fit, predictions=(SWAPPED,)),
    "a group by name": lambda fit: nt.to_inference_data(
        fit, predictions={"x": SWAPPED}
    ),
}


@pytest.fixture(scope="module")
def of_frame():
    at_eta = nt.expectations.gauss_hermite(predictor="eta")
    options = {"alpha": 0.5, "expectation": at_eta}
    return nt.fit_gaussian(KEY, model, AutoMultivariateNormal, FRAME, Y, **options)


@pytest.mark.parametrize("name", CHANGED)
def test_other_columns_are_refused_however_they_come(name, of_frame):
    match = r"^argument x has columns \['v', 'u'\], that of the fit"
    with pytest.raises(ValueError, match=match):
        CHANGED[name](of_frame)


def test_columns_of_tables_within_arguments_are_seen():
    arrow = pytest.importorskip("pyarrow").Table.from_pandas(FRAME)
    found = argument_columns(model, lambda data, y: None, ({"x": arrow},), {"y": FRAME})
    assert found == {"data['x']": ("u", "v"), "y": ("u", "v")}


def test_a_stream_keeps_its_power_and_the_columns_of_its_data():
    run, state = learned()
    stream = run.posterior(state)
    assert stream.alpha == stream.on(FRAME, Y).alpha == 0.5
    with pytest.raises(ValueError, match=r"^argument x has columns"):
        stream.on(FRAME, Y).predict(KEY, SWAPPED)


def regression(**options):
    options = {
        "inclusion_prob": 0.9,
        "slab_scale": 2.0,
        "noise_scale": NOISE,
        **options,
    }
    return nt.sparse.fit_linear(KEY, FRAME + 3.0, Y, **options)


@cache
def mixture():
    component = nt.mixtures.components.gaussian(2)
    return nt.mixtures.fit(KEY, FRAME, component, num_components=1, num_restarts=1)


def online():
    exact = nt.expectations.gauss_hermite(predictor="eta")
    guide = nt.guides.AutoOnlineMultivariateNormal
    return nt.OnlineVI(nt.temper(model, 0.5), guide, expectation=exact)


@cache
def learned():
    run = online()
    return run, run.init(KEY, FRAME, Y)


# What makes a result of the frame, and what takes rows after it.
TAKEN = {
    "regression, predict": (regression, lambda fit: fit.predict(KEY, SWAPPED)),
    "regression, moments": (regression, lambda fit: nt.sparse.predict(fit, SWAPPED)),
    "regression, on": (regression, lambda fit: fit.on(SWAPPED, Y)),
    "regression, predictions": (
        regression,
        lambda fit: nt.to_inference_data(
            fit, FRAME + 3.0, Y, rng_key=KEY, num_samples=2, predictions=(SWAPPED,)
        ),
    ),
    "mixture, on": (mixture, lambda fit: fit.on(SWAPPED)),
    "mixture, predictive": (
        mixture,
        lambda fit: nt.mixtures.log_predictive(fit, SWAPPED),
    ),
    "PCA, on": (
        lambda: nt.ppca.fit(KEY, FRAME, num_factors=1),
        lambda fit: fit.on(SWAPPED),
    ),
    "stream, update": (learned, lambda run: run[0].update(run[1], SWAPPED, Y)),
    "stream, run": (learned, lambda run: run[0].run(run[1], SWAPPED, Y)),
    "stream, by name": (learned, lambda run: run[0].update(run[1], x=SWAPPED, y=Y)),
    "stream, predict": (
        learned,
        lambda run: run[0].posterior(run[1]).predict(KEY, SWAPPED),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_have_the_columns_of_the_fit(name):
    make, take = TAKEN[name]
    fit = make()
    with pytest.raises(ValueError, match=r"has columns \['v', 'u'\], that of the fit"):
        take(fit)


def test_numbers_that_count_columns_are_no_names():
    fit = regression()
    close = partial(np.testing.assert_array_equal, nt.sparse.predict(fit, FRAME).mean)
    close(nt.sparse.predict(fit, X).mean)
    close(nt.sparse.predict(fit, pd.DataFrame(X)).mean)
    assert regression(slab_scale=1.0).column_names == ("u", "v")
    many = jax.vmap(lambda alpha: regression(alpha=alpha))(jnp.array([0.5, 1.0]))
    assert many.column_names is None


def test_a_new_stream_may_have_other_columns():
    run = online()
    run.init(KEY, FRAME, Y)
    run.init(KEY, SWAPPED, Y)
    assert run.columns == {"x": ("v", "u")}


def test_predictions_of_a_regression_are_of_rows_as_the_fit_took_them():
    fit, rows = regression(intercept_scale=10.0), pd.DataFrame(NEW, columns=["u", "v"])
    data = nt.to_inference_data(
        fit, FRAME + 3.0, Y, rng_key=KEY, num_samples=S, predictions=(rows,)
    )
    expected = nt.sparse.predict(fit, rows)
    found = group(data, "predictions")["y"].values[0]
    error = 5.0 * np.asarray(expected.scale) / np.sqrt(S)
    assert np.all(np.abs(found.mean(axis=0) - expected.mean) < error)


def test_rows_of_a_mixture_depend_on_no_arguments():
    with pytest.raises(ValueError, match=r"fit.predict.rng_key, num_rows. draws them"):
        nt.to_inference_data(
            mixture(), FRAME, rng_key=KEY, num_samples=2, predictions=(X[:3],)
        )


def test_predictions_have_the_labels_of_their_own_rows():
    def rows(word):
        index = pd.Index([f"{word}{i}" for i in range(N)], name="n")
        return FRAME.set_axis(index, axis=0)

    fit = nt.fit_svi(
        KEY, model, AutoNormal, rows("old"), Y, optim=optax.adam(0.01), num_steps=2
    )
    for new, first in ((rows("new"), "new0"), (rows("new")[1:3], "new1"), (X, 0)):
        data = nt.to_inference_data(fit, num_samples=3, predictions=(new,))
        assert group(data, "predictions")["n"].values[0] == first
        assert group(data, "observed_data")["n"].values[0] == "old0"


@pytest.mark.full
def test_streams_and_samplers_predict():
    tempered = nt.temper(model, alpha=0.5)
    online = nt.OnlineVI(
        tempered,
        nt.guides.AutoOnlineMultivariateNormal,
        expectation=nt.expectations.gauss_hermite(predictor="eta"),
    )
    state, _ = online.run(KEY, X, Y)
    close(online.posterior(state).predict(KEY, NEW, num_samples=S), NEW)
    mcmc = MCMC(NUTS(tempered), num_warmup=300, num_samples=S, progress_bar=False)
    mcmc.run(KEY, X, Y)
    data = nt.to_inference_data(mcmc, predictions=(NEW,))
    found = group(data, "predictions")
    draws = {name: found[name].values[0] for name in found.data_vars}
    np.testing.assert_allclose(draws["eta"].mean(axis=0), NEW @ MEAN, atol=0.05)


def test_a_regression_predicts_in_the_units_of_its_rows():
    far = X + 1e3
    prior = {"inclusion_prob": 0.9, "slab_scale": 2.0, "intercept_scale": 1.0}
    fit = nt.sparse.fit_linear(KEY, far, Y, noise_scale=NOISE, **prior)
    exact = nt.sparse.predict(fit, NEW + 1e3)
    for posterior in (fit, fit.on(far, Y)):
        draws = posterior.predict(KEY, NEW + 1e3, num_samples=S)["y"]
        np.testing.assert_allclose(draws.mean(axis=0), exact.mean, atol=0.1)
        np.testing.assert_allclose(draws.std(axis=0), exact.scale, rtol=0.1)


def test_mixtures_and_pca_predict_new_rows():
    rows = np.outer(RNG.normal(size=60), [2.0, -1.0]) + 0.5 * RNG.normal(size=(60, 2))
    component = nt.mixtures.components.gaussian(2)
    # Rows of one draw share its parameters, so their mean varies by 1/50 + 1/60 of a row's variance, not by 1/50
    # alone; q of PCA takes the location given the scores, whose part of the variance it leaves out.
    fits = (
        (nt.mixtures.fit(KEY, rows, component, num_components=1), 1.3, 2.4),
        (nt.ppca.fit(KEY, rows, num_factors=1), 0.9, 1.3),
    )
    for fit, least, most in fits:
        draws = np.asarray(fit.predict(KEY, 50, num_samples=1000)["x"])
        assert draws.shape == (1000, 50, 2)
        cov = np.cov(draws.reshape(-1, 2).T)
        np.testing.assert_allclose(cov, np.cov(rows.T), rtol=0.35, atol=0.15)
        ratio = draws[..., 0].mean(axis=1).var() / (cov[0, 0] / 50)
        assert least < ratio < most


def groups(school, size, y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    with numpyro.plate("school", size):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
    with numpyro.plate("n", len(school)):
        numpyro.sample("y", dist.Normal(theta[school], 0.1), obs=y)


def test_new_groups_are_drawn_from_their_prior():
    school = np.repeat(np.arange(4), 10)
    y = np.array([3.0, 4.0, 5.0, 6.0])[school] + 0.1 * RNG.normal(size=40)
    fit = nt.fit_gaussian(KEY, groups, AutoMultivariateNormal, school, 4, y)
    old = fit.predict(KEY, np.arange(4), 4, num_samples=S)
    np.testing.assert_allclose(old["y"].mean(axis=0), [3, 4, 5, 6], atol=0.1)
    with pytest.raises(
        ValueError, match=r"'theta' has shape \(4,\).*new_groups=\['school'\]"
    ):
        fit.predict(KEY, np.arange(6), 6)
    new = fit.predict(KEY, np.arange(6), 6, num_samples=S, new_groups=["school"])
    assert set(new) == {"theta", "y"}
    # The parent has a posterior about the mean of the groups, of variance 1/4; a new group adds its own 1.
    np.testing.assert_allclose(new["y"].mean(axis=0), 4.5, atol=0.15)
    np.testing.assert_allclose(new["y"].std(axis=0), np.sqrt(1.26), rtol=0.1)
    data = nt.to_inference_data(
        fit, num_samples=3, predictions=(np.arange(6), 6), new_groups="school"
    )
    assert group(data, "predictions")["theta"].shape == (1, 3, 6)
    with pytest.raises(ValueError, match=r"names \['schools'\].*among the plates"):
        fit.predict(KEY, np.arange(6), 6, new_groups=["schools"])


def test_a_model_that_draws_nothing_says_so(fit):
    def all_given(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ theta, NOISE), obs=y)

    other = nt.fit_gaussian(KEY, all_given, AutoNormal, X, Y)
    refusal = r"^TemperedFit.predict.*missing a required argument: 'y'"
    with pytest.raises(TypeError, match=refusal):
        other.predict(KEY, NEW)
    with pytest.raises(ValueError, match="leave out the outcome, or pass None"):
        other.predict(KEY, NEW, jnp.zeros(3))
    assert other.predict(KEY, NEW, None, num_samples=2)["y"].shape == (2, 3)
