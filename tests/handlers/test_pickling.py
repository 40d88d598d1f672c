"""Tempered models travel as NumPyro's own do."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from tempered_models import Y, density, normal, normal_density, trace_of

import numpyro_tempered as nt
from numpyro_tempered.handlers.powers import as_operands


def plain(y):
    normal(y)


by_function = nt.temper(plain, alpha=0.3)
by_factory = nt.temper(alpha=0.3)(plain)
by_mapping = nt.temper(plain, {"y": 0.3})
by_handlers = handlers.scale(
    nt.temper(handlers.mask(plain, mask=True), alpha=0.3), scale=1.0
)


@nt.temper(alpha=0.3)
def by_decorator(y):
    """A docstring."""
    normal(y)


@nt.temper(alpha=0.6, strict=True)
@nt.temper(alpha=0.5)
def by_two_decorators(y):
    normal(y)


MODELS = [
    by_function,
    by_factory,
    by_mapping,
    by_handlers,
    by_decorator,
    by_two_decorators,
]
NAMES = ["function", "factory", "mapping", "handlers", "decorator", "two decorators"]


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
@pytest.mark.parametrize(
    "travel",
    [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
def test_a_model_of_a_module_travels(model, travel, x64):
    got = travel(model)
    assert density(got, {"theta": 0.7}, Y) == pytest.approx(
        normal_density(0.7, 0.3), rel=1e-12
    )
    assert (got.__name__, got.__doc__) == (model.__name__, model.__doc__)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol(protocol):
    assert pickle.loads(pickle.dumps(by_decorator, protocol=protocol)) is by_decorator
    assert pickle.loads(pickle.dumps(by_function, protocol=protocol)).alpha == 0.3


def test_what_was_asked_for_travels():
    model = nt.temper(
        plain, alpha=0.3, factors=["bonus"], strict=True, local_plates=["n"]
    )
    got = pickle.loads(pickle.dumps(model))
    assert (got.alpha, got.factors, got.strict, got.local_plates) == (
        0.3,
        frozenset(["bonus"]),
        True,
        frozenset(["n"]),
    )
    assert got.fn is plain
    factory = pickle.loads(pickle.dumps(nt.temper(alpha=0.3)))
    assert trace_of(factory(plain), Y)["y"]["scale"] == 0.3


def pickles_own_error():
    with pytest.raises(Exception) as raised:  # noqa: PT011
        pickle.dumps(lambda: None)
    return raised.type


def test_what_pickle_refuses_is_refused_by_pickle():
    def local(y):
        normal(y)

    error = pickles_own_error()
    for model in (
        nt.temper(lambda y: normal(y), alpha=0.3),
        nt.temper(local, alpha=0.3),
    ):
        with pytest.raises(
            (error, AttributeError, pickle.PicklingError), match=r"lambda|local"
        ):
            pickle.dumps(model)
        # A copy shares the function, as Python's does.
        assert copy.deepcopy(model).fn is model.fn


def test_a_partial_travels(x64):
    partial = functools.partial(by_decorator, Y)
    got = pickle.loads(pickle.dumps(partial))
    assert density(got, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3), rel=1e-12
    )


@pytest.mark.parametrize(
    "model", [by_decorator, by_function], ids=["decorator", "function"]
)
def test_a_kernel_and_a_guide_travel(model, x64):
    mcmc = pickle.loads(
        pickle.dumps(MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False))
    )
    guide = pickle.loads(pickle.dumps(AutoNormal(model)))
    for got in (mcmc.sampler.model, guide.model):
        assert density(got, {"theta": 0.7}, Y) == pytest.approx(
            normal_density(0.7, 0.3), rel=1e-12
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [by_decorator, pytest.param(by_function, marks=pytest.mark.slow)],
    ids=["decorator", "function"],
)
def test_mcmc_travels(model):
    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), jnp.asarray(Y))
    got = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(
        got.get_samples()["theta"], mcmc.get_samples()["theta"]
    )
    potential = (
        got.sampler.get_potential_fn((jnp.asarray(Y),))
        if hasattr(got.sampler, "get_potential_fn")
        else None
    )
    if potential is not None:
        assert potential({"theta": 0.7}) == pytest.approx(
            -normal_density(0.7, 0.3), rel=1e-5
        )
    draws = Predictive(got.sampler.model, got.get_samples())(
        jax.random.key(1), jnp.asarray(Y)
    )
    assert draws["y"].shape == (5, 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        by_decorator,
        pytest.param(plain, marks=pytest.mark.slow),
        pytest.param(by_function, marks=pytest.mark.slow),
    ],
    ids=["decorator", "plain", "function"],
)
def test_a_fit_travels(model, key):
    fit = nt.fit_svi(
        key,
        model,
        AutoNormal,
        jnp.asarray(Y),
        alpha=0.5,
        num_steps=10,
        num_particles=2,
        optim=Adam(0.05),
    )
    got = pickle.loads(pickle.dumps(fit))
    assert got.alpha == pytest.approx(0.5 if model is plain else 0.15)
    np.testing.assert_array_equal(got.losses, fit.losses)
    drawn, again = (
        f.guide.sample_posterior(key, f.params, sample_shape=(3,)) for f in (fit, got)
    )
    np.testing.assert_array_equal(drawn["theta"], again["theta"])
    assert density(got.model, {"theta": 0.7}, Y) == pytest.approx(
        normal_density(0.7, got.alpha), rel=1e-5
    )


def test_an_operand_travels():
    (power,) = pickle.loads(pickle.dumps([as_operands(0.3)]))
    assert (power, float(power.array)) == (0.3, pytest.approx(0.3))
    assert [type(each) for each in (as_operands(0.0), as_operands(1))] == [float, float]
