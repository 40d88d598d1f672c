"""Threads that fit at once: NumPyro keeps one stack of handlers for all of them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(24, 2))
ETA = nt.expectations.gauss_hermite(predictor="eta")


def of(likelihood):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        eta = numpyro.deterministic("eta", x @ w)
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", likelihood(eta), obs=y)

    return model


MODELS = [
    (of(lambda eta: dist.Normal(eta, 1.0)), X @ np.array([1.0, -1.0])),
    (of(lambda eta: dist.Bernoulli(logits=eta)), (X[:, 0] > 0.0).astype(int)),
    (of(lambda eta: dist.Poisson(jnp.exp(eta))), np.round(np.exp(X[:, 1]))),
]


def fit(model, y):
    result = nt.fit_svi(KEY, model, AutoNormal, X, y, alpha=0.5)
    return result.params, result.losses, tuple(result.elbo)


def learn(model, y):
    online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, expectation=ETA)
    state, losses = online.run(KEY, X, y)
    state, _ = online.update(state, X[:3], y[:3])
    return state.posterior, losses, online.sample_posterior(KEY, state, 5)


@pytest.mark.parametrize("call", [pytest.param(fit, marks=pytest.mark.full), learn])
def test_threads_have_the_answers_of_one_after_the_other(call):
    begin = threading.Barrier(len(MODELS))

    def at_once(task):
        begin.wait()
        return call(*task)

    with ThreadPoolExecutor(len(MODELS)) as pool:
        together = list(pool.map(at_once, MODELS))
    alone = [call(*task) for task in MODELS]
    jax.tree.map(np.testing.assert_array_equal, together, alone)
