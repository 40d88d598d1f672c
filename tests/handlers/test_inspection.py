"""What NumPyro says about a model is the same with and without its power."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.inspect import (
    generate_graph_specification,
    get_dependencies,
    get_model_relations,
)
from numpyro.infer.util import constrain_fn, unconstrain_fn
from tempered_models import Y, normal, positive

import numpyro_tempered as nt
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.report.draws import evaluate_draws

GROUP = np.array([0, 0, 1, 1])


def everything(y=None):
    w = numpyro.param("w", 1.0, constraint=dist.constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0.0, w))
    with numpyro.plate("groups", 2):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("bonus", -(mu**2))
    with numpyro.plate("n", 4):
        eta = numpyro.deterministic("eta", mu + s[GROUP])
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def scanned(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(x, y):
        x = numpyro.sample("x", dist.Normal(x, s))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
        return x, None

    scan(body, 0.0, y)


POWERS = [
    lambda model: nt.temper(model, alpha=0.3),
    lambda model: nt.temper(model, alpha=0.3, factors=False),
    lambda model: nt.temper(model, alpha=1.0),
    lambda model: nt.temper(nt.temper(model, alpha=0.3), alpha=2.0),
]


@pytest.mark.parametrize("wrap", POWERS)
def test_relations_are_those_of_the_undecorated_model(wrap):
    plain, tempered = (
        get_model_relations(m, model_args=(Y,)) for m in (everything, wrap(everything))
    )
    assert tempered == plain
    # Of the factor too, which is observed and depends on its latent.
    assert tempered["observed"] == ["bonus", "y"]
    assert tempered["sample_sample"]["bonus"] == ["mu"]
    assert (
        tempered["sample_dist"] | {"y": "Normal", "bonus": "Unit"}
        == tempered["sample_dist"]
    )
    assert generate_graph_specification(tempered) == generate_graph_specification(plain)


def test_relations_of_the_prior_alone():
    """At alpha = 0 the data hang on nothing; sites, plates and what is observed stay."""
    plain, prior = (
        get_model_relations(m, model_args=(Y,))
        for m in (everything, nt.temper(everything, alpha=0))
    )
    for key in ("sample_dist", "plate_sample", "observed", "param_constraint"):
        assert prior[key] == plain[key]
    assert prior["sample_sample"]["s"] == plain["sample_sample"]["s"]


@pytest.mark.parametrize("model", [normal, positive])
def test_dependencies_are_those_of_the_undecorated_model(model):
    plain, tempered = (
        get_dependencies(m, model_args=(Y,))
        for m in (model, nt.temper(model, alpha=0.3))
    )
    assert tempered == plain
    assert plain["posterior_dependencies"]


def test_relations_of_a_model_without_its_data():
    plain, tempered = (
        get_model_relations(m) for m in (everything, nt.temper(everything, alpha=0.3))
    )
    assert tempered == plain
    assert tempered["observed"] == ["bonus"]


def test_render_model():
    pytest.importorskip("graphviz")
    plain, tempered = (
        numpyro.render_model(
            m, model_args=(Y,), render_distributions=True, render_params=True
        )
        for m in (everything, nt.temper(everything, alpha=0.3))
    )
    assert tempered.source == plain.source


@pytest.mark.parametrize("alpha", [0.3, 2.0])
@pytest.mark.parametrize("model", [normal, scanned])
def test_log_likelihood_is_untempered(model, alpha):
    draws = (
        {"theta": jnp.array([0.1, 0.7])}
        if model is normal
        else {"s": jnp.ones(2), "x": jnp.ones((2, 4))}
    )
    y = jnp.asarray(Y)
    plain, tempered = (
        log_likelihood(m, draws, y)["y"] for m in (model, nt.temper(model, alpha=alpha))
    )
    np.testing.assert_array_equal(tempered, plain)


def test_log_likelihood_of_the_prior_alone():
    """NumPyro's sees no data at a concrete 0; what the reports read is untempered at every power."""
    draws, y = {"theta": jnp.array([0.1, 0.7])}, jnp.asarray(Y)
    prior = nt.temper(normal, alpha=0.0)
    assert not log_likelihood(prior, draws, y)["y"].any()
    at = {"theta": draws["theta"][0]}
    read = evaluate_draws(Target(prior, (y,), {}, values=at), draws, True, ())[0]["y"]
    np.testing.assert_allclose(read, log_likelihood(normal, draws, y)["y"], rtol=1e-6)


@pytest.mark.parametrize(
    "model_args",
    [(), pytest.param((Y,), marks=pytest.mark.full)],
    ids=["without data", "with data"],
)
@pytest.mark.parametrize("alpha", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_predictions_do_not_know_of_the_power(alpha, model_args, key):
    tempered = nt.temper(everything, alpha=alpha)
    samples = {"mu": jnp.array([0.1, 0.7, -0.2]), "s": jnp.ones((3, 2))}

    @jax.jit
    def run(key):
        return [
            [predictive(m)(key, *model_args) for m in (everything, tempered)]
            for predictive in (
                lambda m: Predictive(m, num_samples=3),
                lambda m: Predictive(m, samples),
            )
        ]

    for plain, other in run(key):
        assert plain.keys() == other.keys()
        for name in plain:
            np.testing.assert_array_equal(plain[name], other[name])


def test_predictions_through_a_scan(key):
    def model(y=None):
        def body(x, _):
            x = numpyro.sample("x", dist.Normal(x, 1.0))
            return x, numpyro.sample("y", dist.Normal(x, 0.1))

        scan(body, 0.0, None, length=4)

    samples = {"x": jnp.arange(12.0).reshape(3, 4)}
    plain, tempered = (
        Predictive(m, samples)(key) for m in (model, nt.temper(model, alpha=0.3))
    )
    np.testing.assert_array_equal(plain["y"], tempered["y"])


def test_the_way_between_constrained_and_unconstrained(x64):
    params = {"s": jnp.array(1.3)}
    for model in (positive, nt.temper(positive, alpha=0.3)):
        there = unconstrain_fn(model, (Y,), {}, params)
        assert there["s"] == pytest.approx(np.log(1.3), rel=1e-12)
        assert constrain_fn(model, (Y,), {}, there)["s"] == pytest.approx(
            1.3, rel=1e-12
        )


def test_the_result_of_the_model_is_handed_on():
    def model(y):
        theta = numpyro.sample("theta", dist.Normal())
        return theta, numpyro.sample("y", dist.Normal(theta), obs=y)

    with numpyro.handlers.seed(rng_seed=0):
        plain = model(1.0)
    with numpyro.handlers.seed(rng_seed=0):
        tempered = nt.temper(model, alpha=0.3)(1.0)
    assert plain == tempered
    # Without any handler around, a model is a sampler of its own.
    assert jax.numpy.isfinite(
        nt.temper(lambda: numpyro.sample("y", dist.Normal(), obs=0.5), alpha=0.3)()
    )
