"""Networks whose weights all have priors: latents, which every verb takes as those of a model of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.requirements import free_params

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
KEY = jax.random.key(0)
X = np.linspace(-1.0, 1.0, 30, dtype=np.float32)[:, None]
Y = np.sin(3.0 * X[:, 0]) + np.tile(np.float32([0.3, -0.3, 0.1]), 10)
NORMAL = dist.Normal(0.0, 1.0)
# One unit, y = x kernel + bias.
LAYER = linen.Dense(1)


class Outer(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(x)


def observed(output, x, y):
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(output[:, 0], 0.5), obs=y)


def of_linen(prior):
    return lambda x, y: observed(
        random_flax_module("net", LAYER, prior, input_shape=(1, 1))(x), x, y
    )


def of_nnx(prior):
    return lambda x, y: observed(random_nnx_module("net", Outer(), prior)(x), x, y)


def by_hand(x, y):
    """The same model without a module."""
    bias = numpyro.sample("net/bias", NORMAL.expand([1]).to_event())
    kernel = numpyro.sample("net/kernel", NORMAL.expand([1, 1]).to_event())
    observed(x @ kernel + bias, x, y)


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "some", "free"),
    [(of_linen, "bias", "['kernel']"), (of_nnx, "inner.bias", "['inner']['kernel']")],
)
def test_params_are_those_without_a_prior(make, some, free):
    def params_of(prior):
        return free_params(get_trace(handlers.seed(make(prior), 0), (X, Y), {}))

    assert params_of(NORMAL) == []
    assert params_of({some: NORMAL}) == [f"net$params{free}"]


@pytest.mark.full
def test_every_verb_takes_a_network_with_priors_as_the_same_model_by_hand():
    model = of_linen(NORMAL)
    fit, plain = (nt.fit_gaussian(KEY, m, AutoNormal, X, Y) for m in (model, by_hand))
    assert fit.elbo.value == pytest.approx(plain.elbo.value, abs=1e-4)

    def both(verb, *args, **options):
        return verb(KEY, fit, *args, **options), verb(KEY, plain, *args, **options)

    of_net, of_hand = both(nt.linear_response)
    assert of_net.elbo.value == pytest.approx(of_hand.elbo.value, abs=1e-4)
    of_net, of_hand = (nt.table(errors) for errors in both(nt.sandwich))
    np.testing.assert_allclose(of_net["sandwich_sd"], of_hand["sandwich_sd"], rtol=1e-3)
    of_net, of_hand = both(
        nt.certify_risk, lambda latents, x, y: jnp.clip(jnp.abs(y), 0, 1), num_draws=10
    )
    assert of_net.value == pytest.approx(of_hand.value, rel=1e-4)


@pytest.mark.full
def test_select_alpha_and_the_path_take_a_network_with_priors():
    model = of_linen(NORMAL)
    choices = [
        nt.select_alpha(KEY, m, AutoNormal, X, Y, criterion=nt.alpha.magnitude())
        for m in (model, by_hand)
    ]
    assert choices[0].alpha == pytest.approx(choices[1].alpha, rel=1e-3)
    path = nt.temper_path(KEY, model, AutoNormal, X, Y, alphas=[0.0, 1.0])
    assert {"net.bias", "net.kernel"} <= set(path["posterior"].data_vars)


@pytest.mark.full
def test_a_network_with_some_priors_is_refused_by_the_names_of_the_others():
    model = of_linen({"bias": NORMAL})
    fit = nt.fit_svi(
        KEY, model, AutoNormal, X, Y, num_steps=50, optim=numpyro.optim.Adam(0.01)
    )
    for call in (
        lambda: nt.fit_gaussian(KEY, model, AutoNormal, X, Y),
        lambda: nt.linear_response(KEY, fit),
        lambda: nt.sandwich(KEY, fit),
        lambda: nt.certify_risk(KEY, fit, "y"),
        lambda: nt.temper_path(KEY, model, AutoNormal, X, Y),
        lambda: nt.select_alpha(
            KEY, model, AutoNormal, X, Y, criterion=nt.alpha.magnitude()
        ),
    ):
        with pytest.raises(ValueError, match=r"params .*net\$params\['kernel'\]"):
            call()


@pytest.mark.full
def test_draws_of_a_network_with_priors_need_no_params():
    draws = {"net/bias": np.zeros((4, 1)), "net/kernel": np.ones((4, 1, 1))}
    data = nt.to_inference_data(draws, of_linen(NORMAL), X, Y)
    want = dist.Normal(X[:, 0], 0.5).log_prob(Y)
    np.testing.assert_allclose(
        data["log_likelihood"]["y"].values[0, 1], want, rtol=1e-4
    )
    with pytest.raises(ValueError, match=r"net\$params\['kernel'\].*substitute"):
        nt.to_inference_data(
            {"net/bias": np.zeros((4, 1))}, of_linen({"bias": NORMAL}), X, Y
        )
