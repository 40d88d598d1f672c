"""Second calls with other data of the same shapes compile nothing."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt

ETA = nt.expectations.gauss_hermite(predictor="eta")
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if "backend_compile" in event else None
    )
)


def data(number):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(60, 2))
    return x, x @ np.array([1.0, -0.5]) + rng.normal(size=60)


def model(x, y, scale=3.0):
    b = numpyro.sample("b", dist.Normal(0.0, scale).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(numpyro.deterministic("eta", x @ b), s), obs=y)


def compare(key, number):
    fits = {
        scale: nt.fit_svi(key, model, AutoNormal, *data(number), scale)
        for scale in (1.0, 3.0)
    }
    return nt.compare(fits)


def linear(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample(
            "y", dist.Normal(numpyro.deterministic("eta", x @ b), 1.0), obs=y
        )


def update(key, number):
    """A round on a batch, of an OnlineVI made for it."""
    online = nt.OnlineVI(linear, nt.guides.AutoOnlineDiagonalNormal)
    return online.update(online.init(key, *data(number)), *data(number))


def mean_field(key, number):
    return nt.fit_gaussian(key, model, AutoNormal, *data(number), expectation=ETA)


CALLS = {
    "fit_svi": lambda key, k: nt.fit_svi(key, model, AutoNormal, *data(k)),
    "fit_gaussian, draws": lambda key, k: nt.fit_gaussian(
        key, model, AutoMultivariateNormal, *data(k)
    ),
    "fit_gaussian, quadrature": lambda key, k: nt.fit_gaussian(
        key, model, AutoMultivariateNormal, *data(k), expectation=ETA
    ),
    "linear_response": lambda key, k: nt.linear_response(key, mean_field(key, k)),
    "select_alpha": lambda key, k: nt.select_alpha(
        key,
        model,
        AutoNormal,
        *data(k),
        alphas=[0.5, 1.0],
        criterion=nt.alpha.safe_bayes(blocks=2),
    ),
    "temper_path": lambda key, k: nt.temper_path(
        key, model, AutoNormal, *data(k), alphas=[0.5, 1.0]
    ),
    "sandwich": lambda key, k: nt.sandwich(key, mean_field(key, k)),
    "check_coverage": lambda key, k: nt.alpha.check_coverage(
        key,
        model,
        AutoMultivariateNormal,
        *data(k),
        expectation=ETA,
        alpha=1.0 / (1.0 + k),
        num_bootstrap=20,
    ),
    "calibrated_powers": lambda key, k: nt.alpha.calibrated_powers(
        key, model, *data(k)
    ),
    "compare": compare,
    "OnlineVI.update": update,
    "OnlineVI.run": lambda key, k: nt.OnlineVI(
        linear, nt.guides.AutoOnlineMultivariateNormal, nt.online.ngvi(), ETA
    ).run(key, *data(k)),
    "OnlineVI.run_chunks": lambda key, k: nt.OnlineVI(
        linear, nt.guides.AutoOnlineDiagonalNormal, expectation=ETA
    ).run_chunks(key, [data(k)], size=20),
    "to_inference_data": lambda key, k: nt.to_inference_data(
        nt.fit_svi(key, model, AutoNormal, *data(k))
    ),
    "check_fit": lambda key, k: nt.check_fit(
        key, nt.fit_gaussian(key, linear, AutoNormal, *data(k))
    ),
    "mixtures.fit": lambda key, k: nt.mixtures.fit(
        key,
        data(k)[0],
        nt.mixtures.components.gaussian(2),
        num_components=2,
        num_draws=10,
    ),
    "mixtures.em": lambda key, k: nt.mixtures.em(
        key,
        data(k)[0],
        nt.mixtures.components.diagonal_gaussian(2),
        num_components=2,
        pseudo_data=1.0,
    ),
    "ppca": lambda key, k: nt.ppca.fit(
        key,
        np.concatenate([data(k)[0], data(k + 9)[0]], axis=1) @ (np.eye(4) + 1.0),
        num_factors=1,
    ),
    "sparse.fit_linear": lambda key, k: nt.sparse.fit_linear(
        key, *data(k), inclusion_prob=0.5, slab_scale=1.0
    ),
    "sparse.fit_logistic": lambda key, k: nt.sparse.fit_logistic(
        key,
        data(k)[0],
        (data(k)[1] > 0).astype(int),
        inclusion_prob=0.5,
        slab_scale=1.0,
    ),
}


@pytest.mark.parametrize("name", tiered(CALLS, unit=["OnlineVI.run"]))
def test_a_second_call_compiles_nothing(name):
    call = CALLS[name]
    # The first three: a loop of another number of rounds may meet a program that the first did not.
    for number in range(3):
        COMPILED.clear()
        call(jax.random.key(number), number)
    assert not COMPILED


def with_power(key, name, alpha, model=model):
    if name == "fit_svi":
        return nt.fit_svi(key, model, AutoNormal, *data(0), alpha=alpha)
    options = {"alpha": alpha, "expectation": ETA}
    return nt.linear_response(
        key, nt.fit_gaussian(key, model, AutoNormal, *data(0), **options)
    )


NAMES = ["fit_svi", "fit_gaussian and linear_response"]
POWERS = {
    "number": (0.5, 0.7),
    "mapping": ({"y": 0.3}, {"y": 0.7}),
    "array": (np.linspace(0.1, 1.0, 60), np.linspace(0.2, 0.9, 60)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", POWERS)
def test_another_power_compiles_nothing(name, kind):
    one, other = POWERS[kind]
    first = with_power(jax.random.key(0), name, one)
    COMPILED.clear()
    second = with_power(jax.random.key(0), name, other)
    assert not COMPILED
    assert first.elbo.value != second.elbo.value


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_power_is_that_of_a_model_tempered_by_hand(name):
    fit = with_power(jax.random.key(0), name, 0.3)
    by_hand = with_power(jax.random.key(0), name, 1.0, nt.temper(model, 0.3))
    assert fit.alpha == by_hand.alpha == 0.3
    for one, other in zip(fit.elbo[:4], by_hand.elbo[:4], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
