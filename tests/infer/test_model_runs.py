"""How often one call runs the model's Python code, which takes longest where a model is large."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
Y = X @ np.array([1.0, -0.5]) + RNG.normal(size=60)
ETA = nt.expectations.gauss_hermite(predictor="eta")
RUNS = []


def model(x, y):
    RUNS.append(1)
    b = numpyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(numpyro.deterministic("eta", x @ b), s), obs=y)


def respond():
    fit = nt.fit_gaussian(KEY, model, AutoNormal, X, Y, alpha=0.5, expectation=ETA)
    RUNS.clear()
    nt.linear_response(KEY, fit)


def fitted():
    fit = nt.fit_svi(KEY, model, AutoMultivariateNormal, X, Y, alpha=0.5)
    RUNS.clear()
    return fit


def learn():
    online = nt.OnlineVI(
        regression, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi(), ETA
    )
    online.run(online.init(KEY, X[:1], Y[:1]), X[:, None], Y[:, None])


def regression(x, y):
    RUNS.append(1)
    b = numpyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(y)):
        eta = numpyro.deterministic("eta", x @ b)
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


# The call, and the most runs that it may take.
CALLS = {
    "fit_svi": (lambda: nt.fit_svi(KEY, model, AutoNormal, X, Y, alpha=0.5), 8),
    "fit_gaussian, draws": (
        lambda: nt.fit_gaussian(KEY, model, AutoMultivariateNormal, X, Y),
        11,
    ),
    "fit_gaussian, quadrature": (
        lambda: nt.fit_gaussian(
            KEY, model, AutoMultivariateNormal, X, Y, expectation=ETA
        ),
        17,
    ),
    "linear_response": (respond, 14),
    "sandwich": (lambda: nt.sandwich(KEY, fitted()), 4),
    "check_fit": (lambda: nt.check_fit(KEY, fitted()), 9),
    "select_alpha": (
        lambda: nt.select_alpha(
            KEY,
            model,
            AutoNormal,
            X,
            Y,
            alphas=[0.25, 0.5, 1.0],
            criterion=nt.alpha.magnitude(),
        ),
        19,
    ),
    "OnlineVI.run, quadrature": (learn, 24),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_the_model_a_few_times(name):
    call, most = CALLS[name]
    RUNS.clear()
    call()
    assert 0 < len(RUNS) <= most
