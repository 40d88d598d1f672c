"""Calls that go wrong at the first try: each is refused in one sentence that says what came and what to do."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from test_package import PUBLIC

import numpyro_tempered as nt

KEY = jax.random.PRNGKey(0)
X = np.random.default_rng(0).normal(size=(12, 2))
Y = X @ np.array([1.0, -1.0]) + np.linspace(-1.0, 1.0, 12)
Y_HOLES, X_HOLES, X_INF = Y.copy(), X.copy(), X.copy()
Y_HOLES[[3, 7]], X_HOLES[2, 1], X_INF[2, 1] = np.nan, np.nan, np.inf
GROUP = pd.Series(list("abc") * 4, dtype="category")
MIXED = pd.DataFrame(X, columns=["one", "two"]).assign(group=GROUP)
DATES = pd.Series(pd.date_range("2020-01-01", periods=12))
ONLINE_GUIDE = nt.guides.AutoOnlineDiagonalNormal
COMPONENT = nt.mixtures.components.known_variance(2, prior_scale=10.0)
SPIKES = {"inclusion_prob": 0.5, "slab_scale": 1.0}


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(x @ theta, 1.0), obs=y)


def of_groups(group, y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(theta[group], 1.0), obs=y)


def of_times(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def run_stream(*args, rule=None, loss=None, state=None):
    rule = nt.online.ngvi() if rule is None else rule
    loss = nt.expectations.squared() if loss is None else loss
    start = (
        nt.online.ngvi().init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        if state is None
        else state
    )
    return nt.online.run(rule, loss, start, *args)


def fit_of_lists():
    return nt.results.TemperedFit(model, None, {}, 1.0, None, None, {}, (), {}, KEY)


# The call, and words that its refusal has.
CALLS = {
    # The key is left out, or is its seed.
    "fit_svi without key": (
        lambda: nt.fit_svi(model, AutoNormal, X, Y),
        "rng_key the function model fit_svi(",
    ),
    "fit_svi with a seed": (
        lambda: nt.fit_svi(0, model, AutoNormal, X, Y),
        "rng_key jax.random.key(0) got 0",
    ),
    "fit_svi with keys": (
        lambda: nt.fit_svi(
            jax.random.split(jax.random.key(0)), model, AutoNormal, X, Y
        ),
        "rng_key shape (2,) rng_key[0]",
    ),
    "fit_gaussian without key": (
        lambda: nt.fit_gaussian(model, AutoMultivariateNormal, X, Y),
        "rng_key the function model fit_gaussian(rng_key, model, guide, *args, ...)",
    ),
    "temper_path without key": (
        lambda: nt.temper_path(model, AutoNormal, X, Y),
        "rng_key temper_path(rng_key",
    ),
    "select_alpha without key": (
        lambda: nt.select_alpha(model, AutoNormal, X, Y),
        "rng_key select_alpha(rng_key",
    ),
    "check_coverage without key": (
        lambda: nt.alpha.check_coverage(model, AutoNormal, X, Y),
        "rng_key check_coverage(rng_key",
    ),
    "sandwich without key": (
        lambda: nt.sandwich(fit_of_lists()),
        "rng_key TemperedFit sandwich(rng_key, fit",
    ),
    "OnlineVI without key": (
        lambda: nt.OnlineVI(model, ONLINE_GUIDE).run(X, Y),
        "rng_key an array of shape (12, 2) OnlineVI.run(rng_key, *args)",
    ),
    "mixtures without key": (
        lambda: nt.mixtures.fit(X, COMPONENT, num_components=2),
        "rng_key an array of shape (12, 2) fit(rng_key, x, component, ...)",
    ),
    "components without key": (
        lambda: nt.mixtures.select_num_components(X, COMPONENT),
        "rng_key select_num_components(rng_key, x, component, ...)",
    ),
    "ppca without key": (
        lambda: nt.ppca.fit(X, num_factors=1),
        "rng_key array fit(rng_key, x, ...)",
    ),
    "sparse without key": (
        lambda: nt.sparse.fit_linear(X, Y, **SPIKES),
        "rng_key array fit_linear(rng_key, x, y",
    ),
    # The guide or the method is left out, or another thing.
    "fit_svi without guide": (
        lambda: nt.fit_svi(KEY, model, X, Y),
        "guide AutoNormal an array of shape (12, 2) fit_svi(rng_key, model, guide, *args, ...)",
    ),
    "fit_gaussian without guide": (
        lambda: nt.fit_gaussian(KEY, model, MIXED, Y),
        "guide a DataFrame fit_gaussian(",
    ),
    "temper_path without method": (
        lambda: nt.temper_path(KEY, model, X, Y),
        "method AutoNormal array of shape",
    ),
    "select_alpha without method": (
        lambda: nt.select_alpha(KEY, model, X, Y),
        "method AutoNormal array of shape",
    ),
    "guide before model": (
        lambda: nt.fit_svi(KEY, AutoNormal, model, X, Y),
        "model the class AutoNormal guide",
    ),
    "guide by name": (
        lambda: nt.fit_svi(KEY, model, "AutoNormal", X, Y),
        "guide callable 'AutoNormal'",
    ),
    "a batch guide online": (
        lambda: nt.OnlineVI(model, AutoNormal),
        "AutoOnlineDiagonalNormal got AutoNormal",
    ),
    "a rule by name": (
        lambda: nt.OnlineVI(model, ONLINE_GUIDE, "ngvi"),
        "rule nt.online.ngvi() got 'ngvi'",
    ),
    "a rule not called": (
        lambda: run_stream(X, Y, rule=nt.online.ngvi),
        "rule nt.online.ngvi() the function ngvi",
    ),
    "a loss not called": (
        lambda: run_stream(X, Y, loss=nt.expectations.squared),
        "expectation nt.expectations.squared() the function squared",
    ),
    "a stream without state": (
        lambda: run_stream(Y, state=X),
        "state rule.init(prior) an array of shape (12, 2)",
    ),
    "a criterion by name": (
        lambda: nt.select_alpha(KEY, model, AutoNormal, X, Y, criterion="lyddon"),
        "criterion 'lyddon' call the function",
    ),
    "a component by name": (
        lambda: nt.mixtures.fit(KEY, X, "gaussian", num_components=2),
        "component gaussian(dim)",
    ),
    # Options.
    "num_step": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, X, Y, num_step=5),
        "fit_svi( model no argument 'num_step' did you mean 'num_steps'?",
    ),
    "aplha": (
        lambda: nt.fit_gaussian(KEY, model, AutoNormal, X, Y, aplha=0.5),
        "'aplha' did you mean 'alpha'?",
    ),
    "alpha of a grid": (
        lambda: nt.select_alpha(KEY, model, AutoNormal, X, Y, alpha=[0.5, 1.0]),
        "'alpha' did you mean 'alphas'?",
    ),
    "num_sample": (
        lambda: nt.temper_path(KEY, model, AutoNormal, X, Y, num_sample=9),
        "mean 'num_samples'?",
    ),
    "an option of the model's": (
        lambda: nt.OnlineVI(model, ONLINE_GUIDE).run(KEY, X, Y, batch=5),
        "OnlineVI.run( no argument 'batch' only ['x', 'y']",
    ),
    "no data": (
        lambda: nt.fit_svi(KEY, model, AutoNormal),
        "fit_svi( missing 'x' (x, y=None)",
    ),
    "too many data": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, X, Y, Y),
        "too many positional arguments (x, y=None)",
    ),
    "factors' max_iters": (
        lambda: nt.ppca.select_num_factors(KEY, X, num_factors=[1], max_iters=9),
        "select_num_factors 'max_iters' did you mean 'max_iter'?",
    ),
    # Data that are not finite.
    "NaN in y": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, X, Y_HOLES),
        "site 'y' 2 of 12 NaN index 3 mask",
    ),
    "NaN in x": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, x=X_HOLES, y=Y),
        "'x' 1 of 24 NaN index (2, 1) site 'y' Leave",
    ),
    "infinity in x": (
        lambda: nt.fit_gaussian(KEY, model, AutoNormal, X_INF, Y),
        "'x' 1 of 24 infinite (2, 1)",
    ),
    "NaN in fit_gaussian": (
        lambda: nt.fit_gaussian(KEY, model, AutoNormal, X, Y_HOLES),
        "site 'y' 2 of 12 NaN",
    ),
    "NaN in temper_path": (
        lambda: nt.temper_path(KEY, model, AutoNormal, X, Y_HOLES),
        "site 'y' 2 of 12 NaN",
    ),
    "NaN in select_alpha": (
        lambda: nt.select_alpha(KEY, model, AutoNormal, X, Y_HOLES),
        "site 'y' 2 of 12 NaN",
    ),
    "nullable": (
        lambda: nt.fit_svi(
            KEY, of_times, AutoNormal, pd.Series([1, None], dtype="Int64")
        ),
        "site 'y' 1 of 2 NaN",
    ),
    "infinity in a mixture": (
        lambda: nt.mixtures.fit(KEY, X_INF, COMPONENT, num_components=2),
        "known_variance row 2, column 1 is inf. Of 24 entries 1",
    ),
    "infinity in ppca": (
        lambda: nt.ppca.fit(KEY, X_INF, num_factors=1),
        "x row 2, column 1 1 of 24 pass NaN",
    ),
    "NaN in sparse": (
        lambda: nt.sparse.fit_linear(KEY, X, Y_HOLES, **SPIKES),
        "y nan index 3 2 of 12 leave",
    ),
    "a stream of NaN": (
        lambda: run_stream(X, Y * np.nan),
        "data array 1 no finite value",
    ),
    # Data that are no numbers.
    "categories": (
        lambda: nt.fit_svi(KEY, of_groups, AutoNormal, GROUP, Y),
        "'group' category 'a' .cat.codes",
    ),
    "text": (
        lambda: nt.fit_svi(KEY, of_groups, AutoNormal, list(GROUP), Y),
        "'group' 'a' return_inverse=True",
    ),
    "categories in fit_gaussian": (
        lambda: nt.fit_gaussian(
            KEY, of_groups, AutoMultivariateNormal, pd.Categorical(GROUP), Y
        ),
        "'group' category codes",
    ),
    "a mixed data frame": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, MIXED, Y),
        "'x' columns ['group'] codes",
    ),
    "dates": (
        lambda: nt.fit_svi(KEY, of_times, AutoNormal, DATES),
        "'y' datetime64 days since",
    ),
    "lists of two lengths": (
        lambda: nt.fit_svi(KEY, model, AutoNormal, [[1.0, 2.0], [3.0]], Y[:2]),
        "'x' lists of different lengths",
    ),
    "categories online": (
        lambda: nt.OnlineVI(of_groups, ONLINE_GUIDE).run(KEY, GROUP, Y),
        "'group' category codes",
    ),
    "categories in a stream": (lambda: run_stream(X, GROUP), "stream category codes"),
    "a mixed mixture": (
        lambda: nt.mixtures.fit(KEY, MIXED, COMPONENT, num_components=2),
        "columns ['group'] codes",
    ),
    "a mixed ppca": (
        lambda: nt.ppca.fit(KEY, MIXED, num_factors=1),
        "x columns ['group'] codes",
    ),
    "classes in sparse": (
        lambda: nt.sparse.fit_logistic(KEY, X, GROUP, **SPIKES),
        "y category codes",
    ),
    # Results.
    "a fit with its data": (
        lambda: nt.to_inference_data(fit_of_lists(), X, Y),
        "TemperedFit holds its data got 2",
    ),
    "a misspelt option": (
        lambda: nt.to_inference_data(fit_of_lists(), num_sample=9),
        "TemperedFit got 'num_sample'",
    ),
    "a list of fits": (
        lambda: nt.compare([fit_of_lists()]),
        "mapping of names to fits got list",
    ),
    "draws without model": (
        lambda: nt.to_inference_data({"theta": np.ones((5, 2))}),
        "samples, model model missing",
    ),
}


# Of these the values are wrong, and of all others the kinds.
WRONG_VALUES = {name for name in CALLS if "NaN" in name or "infinity" in name} | {
    "nullable",
    "a fit with its data",
    "a misspelt option",
}


@pytest.fixture(autouse=True)
def no_fit(monkeypatch):
    def run(*args, **kwargs):
        pytest.fail("the refusal comes after the fit")

    monkeypatch.setattr(SVI, "run", run)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_a_sentence(name):
    call, words = CALLS[name]
    with pytest.raises(ValueError if name in WRONG_VALUES else TypeError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 320
    missing = [word for word in words.split() if word not in text]
    assert not missing, text


KEYED = {
    name: function
    for name, function in PUBLIC.items()
    if inspect.isfunction(function)
    and next(iter(inspect.signature(function).parameters), "") == "rng_key"
}


@pytest.mark.parametrize("name", KEYED)
def test_every_function_that_takes_a_key_asks_for_it(name):
    parameters = list(inspect.signature(KEYED[name]).parameters.values())
    required = [
        p
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]
    options = {
        p.name: 1
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    }
    takes_data = len(required) < 2 or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )
    call = rf"the call is {name.rpartition('.')[2]}\(rng_key, "
    with pytest.raises(
        TypeError,
        match=r"^rng_key must be a key, .* got an array of shape \(12, 2\): " + call,
    ):
        # As where the key is forgotten: all others move up, data too.
        KEYED[name](*[X] * (len(required) - 1 + takes_data), **options)
