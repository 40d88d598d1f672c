"""The power on the likelihood: how temper is applied, and the powers that it takes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import initialize_model
from numpyro.primitives import _PYRO_STACK
from scipy import stats
from tempered_models import (
    Y,
    density,
    normal,
    normal_density,
    positive,
    positive_density,
    potential,
    trace_of,
)

import numpyro_tempered as nt
from numpyro_tempered.handlers.effects import ALPHA


def test_function_decorator_and_context_scale_observed_sites_only():
    half = nt.temper(alpha=0.5)
    decorated, again = half(normal), half(lambda: normal(Y[:2]))

    def with_context():
        with nt.temper(alpha=0.5):
            normal()

    for model in (
        nt.temper(normal, alpha=0.5),
        nt.temper(normal, 0.5),
        decorated,
        again,
        with_context,
    ):
        trace = trace_of(model)
        assert trace["y"]["scale"] == 0.5
        assert trace["theta"]["scale"] is None
    assert trace_of(normal)["y"]["scale"] is None
    assert trace_of(again)["y"]["value"].shape == (2,)


def test_context_ends_where_it_ends():
    def model():
        with nt.temper(alpha=0.5):
            numpyro.sample("inside", dist.Normal(), obs=0.0)
        numpyro.sample("outside", dist.Normal(), obs=0.0)

    trace = trace_of(model)
    assert (trace["inside"]["scale"], trace["outside"]["scale"]) == (0.5, None)


def test_an_error_in_the_model_leaves_no_handler_behind():
    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        nt.temper(broken, alpha=0.5)()
    with pytest.raises(KeyError, match="broken"), nt.temper(alpha=0.5):
        broken()
    assert _PYRO_STACK == []


def test_a_part_of_a_model_is_tempered_inside_a_tempered_whole(x64):
    def part(theta, y):
        numpyro.sample("part", dist.Normal(theta, 1.0), obs=y)

    def whole(y):
        theta = numpyro.sample("theta", dist.Normal())
        nt.temper(part, alpha=0.3)(theta, y)
        numpyro.sample("rest", dist.Normal(theta, 2.0), obs=y)

    got = density(nt.temper(whole, alpha=0.5), {"theta": 0.7}, 1.3)
    part_log_lik, rest_log_lik = (
        stats.norm.logpdf(1.3, 0.7, 1.0),
        stats.norm.logpdf(1.3, 0.7, 2.0),
    )
    want = stats.norm.logpdf(0.7) + 0.15 * part_log_lik + 0.5 * rest_log_lik
    assert got == pytest.approx(want, rel=1e-13)


def test_one_tempered_model_twice_under_scopes(x64):
    tempered = nt.temper(normal, alpha=0.3)

    def pair():
        with handlers.scope(prefix="a"):
            tempered(Y[:2])
        with handlers.scope(prefix="b"):
            tempered(Y[2:])

    got = density(pair, {"a/theta": 0.7, "b/theta": -0.2})
    assert got == pytest.approx(
        normal_density(0.7, 0.3, Y[:2]) + normal_density(-0.2, 0.3, Y[2:]), rel=1e-13
    )


def test_name_doc_and_signature_survive():
    def named(x, y=None, *, flag=True):
        """What it says."""

    tempered = nt.temper(alpha=0.5)(named)
    assert (tempered.__name__, tempered.__qualname__) == (
        named.__name__,
        named.__qualname__,
    )
    assert (tempered.__doc__, tempered.__module__) == (named.__doc__, named.__module__)
    assert inspect.signature(tempered) == inspect.signature(named)
    assert inspect.unwrap(tempered) is named


def test_methods_partials_and_callables_are_models(x64):
    class Model:
        def __call__(self):
            return normal()

        def method(self):
            return normal()

    for model in (
        Model(),
        Model().method,
        functools.partial(normal, Y),
        nt.temper(alpha=1.0)(normal),
    ):
        got = density(nt.temper(model, alpha=0.3), {"theta": 0.7})
        assert got == pytest.approx(normal_density(0.7, 0.3), rel=1e-13)


@pytest.mark.parametrize(
    "alpha",
    [
        -1.0,
        -1e-9,
        np.nan,
        np.inf,
        "a",
        None,
        np.array([0.5, -1.0]),
        jnp.full((1, 1), jnp.nan),
        1j,
        ["a"],
        [-0.5],
        {},
    ],
    ids=repr,
)
def test_alpha_must_be_finite_real_numbers_at_least_zero(alpha):
    with pytest.raises(ValueError, match="alpha"):
        nt.temper(normal, alpha=alpha)
    with pytest.raises(ValueError, match="alpha"):
        nt.temper(alpha=alpha)


@pytest.mark.parametrize(
    "alpha", [0, 1, 3.0, np.float32(0.25), np.array(0.25), jnp.array(0.25)], ids=repr
)
def test_alpha_may_be_any_real_scalar_and_exceed_one(alpha, x64):
    got = density(nt.temper(normal, alpha=alpha), {"theta": 0.7})
    assert got == pytest.approx(normal_density(0.7, float(alpha)), rel=1e-13)


def test_a_factory_decorates_one_callable():
    with pytest.raises(TypeError, match=r"decorates.*one callable"):
        nt.temper(alpha=0.5)(1.0)
    with pytest.raises(TypeError, match=r"factors.*collection of names, got"):
        nt.temper(normal, alpha=0.5, factors="bonus")
    with pytest.raises(
        TypeError, match=r"local_plates must be a collection of names, got"
    ):
        nt.temper(normal, alpha=0.5, local_plates="n")


def test_nested_powers_multiply(x64):
    nested = nt.temper(nt.temper(normal, alpha=0.5), alpha=0.3)
    assert trace_of(nested)["y"]["scale"] == pytest.approx(0.15, rel=1e-15)
    assert density(nested, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.15), rel=1e-13
    )
    # And so say those who read the power without applying it.
    read = nt.to_inference_data({"theta": np.array([0.7])}, nested, log_lik=False)
    assert read.attrs["alpha"] == pytest.approx(0.15, rel=1e-15)
    # An inner 0 is not undone, nor an outer one.
    for pair in ((0.0, 0.5), (0.5, 0.0)):
        model = nt.temper(nt.temper(normal, alpha=pair[0]), alpha=pair[1])
        assert density(model, {"theta": 0.7}) == pytest.approx(
            normal_density(0.7, 0.0), rel=1e-13
        )


def test_one_handler_nested_in_itself_multiplies_too():
    half = nt.temper(alpha=0.5)

    def model():
        with half:
            numpyro.sample("once", dist.Normal(), obs=0.0)
            with half:
                numpyro.sample("twice", dist.Normal(), obs=0.0)

    trace = trace_of(model)
    assert (trace["once"]["scale"], trace["twice"]["scale"]) == (0.5, 0.25)


# alpha = 0, the prior.


def infinite_value():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample(
        "y", dist.Normal(theta, 1.5), obs=jnp.array(1e200)
    )  # its square overflows


def infinite_factor():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.factor("impossible", jnp.where(theta > 1.0, 0.0, -jnp.inf))


def infinite_parameter():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Poisson(jnp.maximum(theta - 1.0, 0.0)), obs=3)


@pytest.mark.parametrize("model", [infinite_value, infinite_factor, infinite_parameter])
def test_alpha_zero_is_the_prior_where_the_likelihood_is_zero(model, x64):
    theta = 0.7
    assert density(model, {"theta": theta}) == -np.inf
    value, slope = jax.jit(
        jax.value_and_grad(lambda t: density(nt.temper(model, alpha=0), {"theta": t}))
    )(theta)
    assert value == pytest.approx(stats.norm.logpdf(theta, 0.5, 2.0), rel=1e-13)
    assert slope == pytest.approx(-(theta - 0.5) / 4.0, rel=1e-12)


@pytest.mark.parametrize("model", [infinite_value, infinite_factor, infinite_parameter])
def test_traced_alpha_zero_is_the_prior_where_the_likelihood_is_zero(model, x64):
    theta = 0.7

    @jax.jit
    def value_and_slope(alpha, t):
        return jax.value_and_grad(
            lambda t: density(nt.temper(model, alpha=alpha), {"theta": t})
        )(t)

    value, slope = value_and_slope(0.0, theta)
    assert value == pytest.approx(stats.norm.logpdf(theta, 0.5, 2.0), rel=1e-13)
    # A mask guards the value observed; where the parameters are to blame, as in this one, NumPyro's own
    # gradient is NaN at every power, and a power known only at run time cannot take the site out.
    if model is not infinite_parameter:
        assert slope == pytest.approx(-(theta - 0.5) / 4.0, rel=1e-12)
    assert value_and_slope(0.5, theta)[0] == -np.inf


# A traced alpha.


def test_traced_alpha_compiles_once_and_equals_concrete(x64):
    calls = []

    def counted():
        calls.append(1)
        normal()

    grid = np.array([0.0, 0.3, 1.0, 2.0])
    batched = jax.jit(
        jax.vmap(
            lambda alpha: density(
                nt.temper(counted, alpha=alpha), {"theta": jnp.array(0.7)}
            )
        )
    )
    want = [density(nt.temper(normal, alpha=alpha), {"theta": 0.7}) for alpha in grid]
    np.testing.assert_allclose(batched(grid), want, rtol=1e-13)
    batched(grid[::-1] + 0.1)
    assert len(calls) == 1

    one = jax.jit(
        lambda alpha: density(
            nt.temper(counted, alpha=alpha), {"theta": jnp.array(0.7)}
        )
    )
    np.testing.assert_allclose([one(alpha) for alpha in grid], want, rtol=1e-13)
    assert len(calls) == 2


def test_alpha_may_be_an_argument_of_the_model(x64):
    def model(alpha):
        with nt.temper(alpha=alpha):
            normal()

    grid = np.array([0.0, 0.3, 2.0])
    got = jax.jit(jax.vmap(lambda alpha: density(model, {"theta": 0.7}, alpha)))(grid)
    np.testing.assert_allclose(
        got, [normal_density(0.7, alpha) for alpha in grid], rtol=1e-13
    )


def test_slope_in_alpha_is_the_log_likelihood(x64):
    slope = jax.jit(
        jax.vmap(
            jax.grad(
                lambda alpha: density(nt.temper(normal, alpha=alpha), {"theta": 0.7})
            )
        )
    )
    got = slope(np.array([0.0, 0.3, 2.0]))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(
        got[1:], stats.norm.logpdf(Y, 0.7, 1.5).sum(), rtol=1e-12
    )
    impossible = jax.jit(
        jax.grad(
            lambda alpha: density(
                nt.temper(infinite_value, alpha=alpha), {"theta": 0.7}
            )
        )
    )
    assert np.isfinite(impossible(0.0))


def test_traced_alpha_that_is_not_a_number_stays_visible():
    traced = jax.jit(
        lambda alpha: density(nt.temper(normal, alpha=alpha), {"theta": 0.7})
    )
    assert np.isnan(traced(np.nan))


# The two faces of a model in NumPyro: the density of its parameters and the potential of the unconstrained.


def test_svi_optimises_the_tempered_joint(x64):
    model = nt.temper(normal, alpha=0.3)
    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    # The guide keeps what it was set up with, so that this is not for jit.
    state = svi.init(jax.random.key(0))
    theta = float(svi.get_params(state)["theta_auto_loc"])
    assert float(svi.evaluate(state)) == pytest.approx(
        -normal_density(theta, 0.3), rel=1e-12
    )


def test_nuts_potential_is_the_tempered_joint(x64):
    @jax.jit
    def run(theta):
        info = initialize_model(jax.random.key(0), nt.temper(normal, alpha=0.3))
        return info.potential_fn({"theta": theta})

    assert float(run(0.7)) == pytest.approx(-normal_density(0.7, 0.3), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0, 3.0])
def test_potential_is_minus_density_minus_log_jacobian(alpha, x64):
    model, u = nt.temper(positive, alpha=alpha), 0.4
    constrained = float(density(model, {"s": np.exp(u)}, Y))
    assert constrained == pytest.approx(
        positive_density(np.exp(u), Y, alpha), rel=1e-12
    )
    assert potential(model, {"s": u}, Y) == pytest.approx(-(constrained + u), rel=1e-12)


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="jax then finds programs of other tests by the array in them, whatever the precision",
)
def test_single_precision_is_double_precision_rounded():
    got = [
        density(nt.temper(normal, alpha=alpha), {"theta": jnp.float32(0.7)})
        for alpha in (0.0, 0.1, 1.0)
    ]
    assert all(value.dtype == jnp.result_type(float) for value in got)
    np.testing.assert_allclose(
        got, [normal_density(0.7, alpha) for alpha in (0.0, 0.1, 1.0)], rtol=2e-6
    )


def with_power(power):
    def model(y):
        a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
        with nt.temper(alpha=power(a)), numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    return model


def fit_by_svi(model):
    nt.fit_svi(jax.random.key(0), model, AutoNormal, Y)


def start_nuts(model):
    initialize_model(jax.random.key(0), model, model_args=(Y,))


def start_stream(model):
    online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal)
    online.init(jax.random.key(0), Y)


@pytest.mark.parametrize(
    ("power", "start", "what"),
    [
        (lambda a: a, start_nuts, "latent 'a'"),
        (lambda a: a, fit_by_svi, "latent 'a'"),
        (lambda a: {"y": a}, start_stream, "latent 'a'"),
        # NUTS alone gives no place to see these.
        (lambda a: 0.5 * a, fit_by_svi, "latents or params"),
        (lambda a: {"y": 0.5 * a}, start_stream, "latents or params"),
    ],
)
def test_a_power_that_the_model_draws_is_refused(power, start, what):
    message = f"power of the likelihood depends on {what}.*normalising constant"
    with pytest.raises(ValueError, match=message):
        start(with_power(power))


@pytest.mark.filterwarnings("ignore:the priors of")
@pytest.mark.parametrize("power", [0.5, jnp.array(0.5), {"y": 0.5}])
def test_a_power_that_is_made_inside_may_be_any_number(power):
    target = nt.results.Target(with_power(lambda _: power), (Y,), {}, jax.random.key(0))
    start_stream(with_power(lambda _: power))
    assert target.trace["y"][ALPHA] == 0.5
