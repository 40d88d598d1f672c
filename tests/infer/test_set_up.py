"""The first call of a guide by few programs: NumPyro's own start, and NumPyro's own errors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import init_to_median, init_to_value
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt
from numpyro_tempered.infer.flat_gaussian import read_guide
from numpyro_tempered.infer.set_up import first_call, starts_validly

Y = np.array([0.3, 1.2, -0.5, 2.0], np.float32)


def model(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("n", len(y)):
        numpyro.sample(
            "y",
            dist.Normal(numpyro.deterministic("mean", loc + shares[0]), scale),
            obs=y,
        )


def rarely_finite(y):
    """A likelihood of 0 in most of the box that starts are drawn from."""
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.factor("y", jnp.where(loc > 1.5, -jnp.sum((y - loc) ** 2), -jnp.inf))


def never_finite(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.factor("y", jnp.where(loc > 1e9, -jnp.sum((y - loc) ** 2), -jnp.inf))


def stochastic(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    with numpyro.plate("n", len(y), subsample_size=2):
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=numpyro.subsample(y, 0))


def trace_of(guide, key, light):
    run = handlers.trace(handlers.seed(guide, key)).get_trace
    return first_call(lambda: run(Y), guide) if light else run(Y)


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
    "AutoIAFNormal": lambda model: AutoIAFNormal(model, hidden_dims=[4]),
    "AutoOnlineDiagonalNormal": nt.guides.AutoOnlineDiagonalNormal,
    "at the median": lambda model: AutoNormal(
        model, init_loc_fn=init_to_median(num_samples=5)
    ),
    "at a value": lambda model: AutoNormal(
        model, init_loc_fn=init_to_value(values={"loc": 0.25})
    ),
}
UNIT = ("AutoDiagonalNormal",)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the priors of")
@pytest.mark.parametrize("name", GUIDES)
def test_the_start_is_that_of_numpyro(name):
    tempered, key = nt.temper(model, alpha=0.5), jax.random.key(3)
    light, plain = (GUIDES[name](tempered) for _ in range(2))
    found, expected = trace_of(light, key, True), trace_of(plain, key, False)
    assert light.model is tempered
    assert set(found) == set(expected)
    for site, message in expected.items():
        if message["type"] in ("param", "sample"):
            values = (found[site]["value"], message["value"])
            jax.tree.map(np.testing.assert_array_equal, *values)
    assert set(light.prototype_trace) == set(plain.prototype_trace)
    for site, message in plain.prototype_trace.items():
        assert type(light.prototype_trace[site].get("fn")) is type(message.get("fn"))
    # What the guide keeps of the model is the model.
    start = {
        name: jnp.zeros(jnp.shape(value)) for name, value in light._init_locs.items()
    }
    assert light._potential_fn(start) == plain._potential_fn(start) != 0.0


@pytest.mark.parametrize(
    "guide_class",
    [AutoNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.full)],
)
def test_where_the_first_start_is_none_numpyro_looks_for_another(guide_class):
    key = jax.random.key(0)
    guide, plain = guide_class(rarely_finite), guide_class(rarely_finite)
    read_guide(key, guide, (Y,), {})
    trace_of(plain, key, False)
    assert starts_validly(guide)
    np.testing.assert_array_equal(guide._init_locs["loc"], plain._init_locs["loc"])
    assert plain._init_locs["loc"] > 1.5


def test_a_model_without_a_start_raises_as_by_numpyro():
    guide = AutoNormal(never_finite)
    with pytest.raises(
        ValueError,
        match=r"^the guide.*cannot be set up .*Cannot find valid initial parameters.*the guide an",
    ):
        read_guide(jax.random.key(0), guide, (Y,), {})
    assert guide.model is never_finite
    with pytest.raises(RuntimeError, match="Cannot find valid initial parameters"):
        trace_of(AutoNormal(never_finite), jax.random.key(0), True)


@pytest.mark.full
def test_a_plate_of_a_part_of_the_data_is_set_up_by_numpyro():
    guide, plain = AutoNormal(stochastic), AutoNormal(stochastic)
    trace_of(guide, jax.random.key(0), True)
    trace_of(plain, jax.random.key(0), False)
    np.testing.assert_array_equal(guide._init_locs["loc"], plain._init_locs["loc"])


def test_an_error_leaves_the_guide_its_model():
    guide = AutoNormal(model)
    with pytest.raises(TypeError, match="missing"):
        first_call(lambda: handlers.seed(guide, jax.random.key(0))(), guide)
    assert guide.model is model
