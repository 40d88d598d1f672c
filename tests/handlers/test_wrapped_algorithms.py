"""Guards under profilers, decorators and subclasses: a wrapped algorithm neither silences nor triggers one."""

import functools
import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers, primitives
from numpyro.infer import (
    HMC,
    HMCECS,
    MCMC,
    NUTS,
    SVI,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal
from numpyro.infer.util import initialize_model, potential_energy
from numpyro.primitives import Messenger
from tempered_models import Y, positive, positive_density, potential, trace_of

import numpyro_tempered as nt
from numpyro_tempered.handlers import effects

KEY = jax.random.key(0)
ALPHA = 0.1


def profiled(function):
    """One wrapper for all, as profilers and type checkers have: the wrappers share their code."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def anonymous(function):
    """A wrapper that says nothing of what it wraps."""
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


@pytest.fixture(params=[profiled, anonymous])
def wrapped(request, monkeypatch):
    """NumPyro's methods, each in the same wrapper."""
    for kind, names in (
        (SVI, ["init", "run", "update"]),
        (HMC, ["init", "sample"]),
        (HMCECS, ["init", "sample"]),
        (MCMC, ["run", "warmup"]),
        (Predictive, ["__call__"]),
        (handlers.collapse, ["__enter__", "__exit__"]),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, request.param(getattr(kind, name)))


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    with numpyro.plate("n", len(y), subsample_size=2):
        numpyro.sample(
            "y", dist.Normal(theta, 1.0), obs=numpyro.subsample(y, event_dim=0)
        )


def simple(y):
    numpyro.sample(
        "y", dist.Normal(numpyro.sample("theta", dist.Normal(0.0, 2.0)), 1.0), obs=y
    )


class MySVI(SVI):
    """A subclass, whose method calls that of its base."""

    def init(self, rng_key, *args, **kwargs):
        return super().init(rng_key, *args, **kwargs)


class MyECS(HMCECS):
    """Likewise."""

    def init(self, *args, **kwargs):
        return super().init(*args, **kwargs)


def start(target, guide, kind=SVI):
    svi = kind(target, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    jax.eval_shape(lambda: svi.init(KEY, jnp.asarray(Y)) and None)


@pytest.mark.parametrize("kind", [SVI, MySVI])
@pytest.mark.usefixtures("wrapped")
def test_a_wrapped_svi_refuses_a_guide_on_the_untempered_model(kind):
    tempered = nt.temper(simple, alpha=ALPHA)
    with pytest.raises(
        ValueError,
        match=r"AutoLaplaceApproximation keeps a model without alpha.*SVI is given",
    ):
        start(tempered, AutoLaplaceApproximation(simple), kind)
    start(tempered, AutoLaplaceApproximation(tempered), kind)
    start(tempered, AutoNormal(simple), kind)
    # A guard has no memory of other guides.
    with pytest.raises(
        ValueError, match=r"keeps a model without alpha.*that SVI is given"
    ):
        start(tempered, AutoLaplaceApproximation(simple), kind)


def run(kernel, *args):
    MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(KEY, *args)


@pytest.mark.full
@pytest.mark.parametrize("kind", [HMCECS, MyECS])
@pytest.mark.parametrize("proxy", [False, True])
@pytest.mark.usefixtures("wrapped")
def test_a_wrapped_hmcecs_is_refused(kind, proxy):
    tempered = nt.temper(model, alpha=ALPHA)
    proxy = HMCECS.taylor_proxy({"theta": jnp.array(0.0)}) if proxy else None
    with pytest.raises(ValueError, match="HMCECS ignores the scale of site 'y'"):
        run(kind(NUTS(tempered), num_blocks=2, proxy=proxy), jnp.asarray(Y))


@pytest.mark.usefixtures("wrapped")
def test_a_wrapped_nuts_is_not_taken_for_hmcecs():
    jax.eval_shape(
        lambda: (
            NUTS(nt.temper(simple, alpha=ALPHA))
            .init(KEY, 1, None, (jnp.asarray(Y),), {})
            .potential_energy
        )
    )


def local(y):
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


@pytest.mark.usefixtures("wrapped")
def test_local_latents_warn_where_their_potential_is_the_target():
    tempered = nt.temper(local, alpha=ALPHA, local_plates=["n"])
    y = jnp.asarray(Y)
    with pytest.warns(
        UserWarning, match=r"MCMC samples the local latent 'z'.*fit it by SVI"
    ):
        jax.eval_shape(lambda: potential_energy(tempered, (y,), {}, {"z": y}))
    with pytest.warns(
        UserWarning, match=r"MCMC samples the local latent 'z'.*fit it by SVI"
    ):
        jax.eval_shape(
            lambda: initialize_model(KEY, tempered, model_args=(y,)).param_info
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(tempered, tempered.guide(AutoNormal(tempered)))
        jax.eval_shape(lambda: trace_of(tempered, y) and None)


def mixture(y):
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Categorical(probs=jnp.array([0.4, 0.6])))
        numpyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)


@pytest.mark.usefixtures("wrapped")
def test_a_wrapped_predictive_refuses_to_draw_what_is_summed_out():
    pytest.importorskip("funsor")
    marginal = nt.marginalize(mixture)
    with pytest.raises(
        ValueError,
        match=r"^the local discrete.*draw them by the model without marginalize",
    ):
        Predictive(marginal, num_samples=2, infer_discrete=True)(KEY, jnp.asarray(Y))
    # Neither a mask nor a condition alone draws them.
    for harmless in (
        handlers.mask(marginal, mask=True),
        handlers.condition(marginal, data={}),
    ):
        jax.eval_shape(
            lambda harmless=harmless: trace_of(harmless, jnp.asarray(Y)) and None
        )
    jax.eval_shape(lambda: Predictive(marginal, num_samples=2)(KEY, jnp.asarray(Y)))


def collapsed(y):
    numpyro.factor("bonus", 1.0)
    with handlers.collapse():
        p = numpyro.sample("p", dist.Beta(2.0, 2.0))
        numpyro.sample("y", dist.Binomial(10, p), obs=y)


@pytest.mark.usefixtures("wrapped")
def test_a_wrapped_collapse_is_refused():
    pytest.importorskip("funsor")
    scoped = handlers.scope(collapsed, prefix="a")
    for target, name in ((collapsed, "p"), (scoped, "a/p")):
        with pytest.raises(ValueError, match=rf"factor '{name}' of handlers\.collapse"):
            jax.eval_shape(
                lambda target=target: trace_of(nt.temper(target, alpha=0.5), 7) and None
            )
    # Around a tempered part, or beside one, it is no concern of this handler.
    before = len(dist.distribution.COERCIONS)

    def beside(y):
        with nt.temper(alpha=0.5):
            numpyro.factor("bonus", 1.0)
        collapsed_alone()

    def collapsed_alone():
        with handlers.collapse():
            p = numpyro.sample("p", dist.Beta(2.0, 2.0))
            numpyro.sample("y", dist.Binomial(10, p), obs=7)

    assert trace_of(beside, 7)["bonus"]["scale"] == 0.5
    assert len(dist.distribution.COERCIONS) == before


def test_wrapped_primitives_tell_jacobians_from_factors(monkeypatch, x64):
    """The walk over the call stack finds NumPyro's functions under any wrapper."""
    for name in ("apply_stack", "default_process_message"):
        monkeypatch.setattr(primitives, name, profiled(getattr(primitives, name)))

    def with_bonus(y):
        numpyro.factor("bonus", 2.0)
        positive(y)

    y = np.array([1.3])
    want = -(positive_density(np.exp(0.4), y, ALPHA) + 0.4 + 2.0 * ALPHA)
    assert potential(
        nt.temper(with_bonus, alpha=ALPHA), {"s": 0.4}, y
    ) == pytest.approx(want, rel=1e-12)


def test_a_call_stack_without_numpyro_is_refused():
    with pytest.raises(
        RuntimeError,
        match=r"^the call stack.*shows no apply_stack.*compiled, or newer than",
    ):
        effects.is_inside_a_handler()


@pytest.mark.parametrize("kind", [Trace_ELBO, TraceMeanField_ELBO])
def test_a_guide_on_the_untempered_model_is_refused_by_a_loss_alone(kind):
    """No SVI is needed: the trace of the guide says whose it is."""
    tempered = nt.temper(simple, alpha=ALPHA)
    params, y = {"auto_loc": jnp.zeros(1)}, jnp.asarray(Y)
    for keeper, refused in (
        (AutoLaplaceApproximation(tempered), False),
        (AutoLaplaceApproximation(simple), True),
    ):

        def loss(keeper=keeper):
            return kind().loss(KEY, params, tempered, keeper, y)

        with (
            pytest.raises(ValueError, match=r"keeps a model without alpha.*is given")
            if refused
            else nullcontext()
        ):
            jax.eval_shape(loss)


def test_the_messages_of_two_models_do_not_say_whose_a_factor_is():
    """The same messages under the same handlers, in the same order: only the call stack tells them apart."""
    normal = dist.Normal()

    class penalise(Messenger):
        def process_message(self, msg):
            if msg["name"] == "s":
                numpyro.factor("penalty", -1.0)

    class rename(Messenger):
        def process_message(self, msg):
            if msg["name"] == "t":
                msg["name"] = "s"

    def by_the_handler():
        with rename(), penalise():
            numpyro.sample("s", normal)

    def by_the_model():
        with rename(), penalise():
            numpyro.factor("penalty", -1.0)
            numpyro.sample("t", normal)

    traces = [
        trace_of(nt.temper(model, alpha=ALPHA))
        for model in (by_the_handler, by_the_model)
    ]
    assert list(traces[0]) == list(traces[1]) == ["penalty", "s"]
    assert [trace["penalty"]["scale"] for trace in traces] == [None, ALPHA]
