"""Neural networks with priors on their weights, and with params: only the data are tempered."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.example_libraries import stax
from numpyro.contrib.module import (
    eqx_module,
    flax_module,
    nnx_module,
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import stats
from tempered_models import trace_of

import numpyro_tempered as nt

ALPHA = 0.3
X = np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(5, 3)
T = np.array([0.1, -0.4, 0.8, 1.2, -1.0], dtype=np.float32)


def linen_net():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(jnp.tanh(linen.Dense(2)(x)))[:, 0]

    return Net()


def nnx_net():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 2, rngs=rngs)
            self.outer = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            return self.outer(jnp.tanh(self.inner(x)))[:, 0]

    return Net(nnx.Rngs(0))


def eqx_net():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.MLP(3, "scalar", 2, 1, activation=jnp.tanh, key=jax.random.key(0))


def observe(output):
    with numpyro.plate("n", len(T)):
        numpyro.sample("y", dist.Normal(output, 0.5), obs=T)


def random_linen(prior):
    module = linen_net()
    return lambda: observe(
        random_flax_module("net", module, prior, input_shape=(1, 3))(X)
    )


def random_nnx(prior):
    module = nnx_net()
    return lambda: observe(random_nnx_module("net", module, prior)(X))


def random_eqx(prior):
    module = eqx_net()
    return lambda: observe(jax.vmap(random_eqx_module("net", module, prior))(X))


def drawn(model):
    """The names of the sites, a draw of the weights, and the log-likelihood at them."""
    names = []

    # As one program: a network is set up by many small operations.
    @jax.jit
    def run():
        trace = trace_of(model)
        names.extend(trace)
        sites = {
            n: s
            for n, s in trace.items()
            if s["type"] == "sample" and not s["is_observed"]
        }
        return {n: s["value"] for n, s in sites.items()}, trace["y"]["fn"].loc

    weights, mean = jax.device_get(run())
    assert len(weights) == 4
    assert sum(np.size(w) for w in weights.values()) == 3 * 2 + 2 + 2 + 1
    return names, weights, stats.norm.logpdf(T, np.asarray(mean, float), 0.5).sum()


@pytest.mark.full
@pytest.mark.parametrize("make", [random_linen, random_nnx, random_eqx])
@pytest.mark.parametrize("alpha", [ALPHA, 0.0])
def test_priors_on_weights_are_not_tempered(make, alpha):
    model = make(dist.Normal(0.0, 1.0))
    tempered = nt.temper(model, alpha=alpha)
    names, weights, log_lik = drawn(model)
    log_prior = sum(stats.norm.logpdf(w).sum() for w in weights.values())
    seeded = numpyro.handlers.seed(tempered, 0)
    got, tempered_trace = numpyro.infer.util.log_density(seeded, (), {}, weights)
    assert got == pytest.approx(log_prior + alpha * log_lik, rel=1e-5)
    assert names == list(tempered_trace)
    assert all(tempered_trace[name]["scale"] is None for name in weights)


@pytest.mark.full
@pytest.mark.parametrize("make", [random_linen, random_nnx, random_eqx])
def test_positive_weights_keep_their_jacobians(make):
    model = make(dist.HalfNormal(1.0))
    _, weights, log_lik = drawn(model)
    u = {name: np.log(value) for name, value in weights.items()}
    log_prior = sum(
        (stats.halfnorm.logpdf(w) + np.log(w)).sum() for w in weights.values()
    )
    seeded = numpyro.handlers.seed(nt.temper(model, alpha=ALPHA), 0)
    got = jax.jit(lambda u: numpyro.infer.util.potential_energy(seeded, (), {}, u))(u)
    assert got == pytest.approx(-(log_prior + ALPHA * log_lik), rel=1e-5)


def test_priors_on_a_part_of_the_weights():
    module = linen_net()
    prior = {"Dense_1.kernel": dist.Normal(0.0, 1.0)}

    def model():
        observe(random_flax_module("net", module, prior, input_shape=(1, 3))(X))

    trace = {}
    jax.eval_shape(lambda: trace.update(trace_of(nt.temper(model, alpha=ALPHA))))
    assert trace["net/Dense_1.kernel"]["scale"] is None
    assert (trace["net$params"]["scale"], trace["y"]["scale"]) == (None, ALPHA)


def with_flax(module):
    return lambda: observe(flax_module("net", module, input_shape=(1, 3))(X))


def with_nnx(module):
    return lambda: observe(nnx_module("net", module)(X))


def with_eqx(module):
    return lambda: observe(jax.vmap(eqx_module("net", module))(X))


def with_stax(module):
    return lambda: observe(numpyro.module("net", module, (1, 3))(X)[:, 0])


def stax_net():
    return stax.serial(stax.Dense(2), stax.Tanh, stax.Dense(1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "net"),
    [
        (with_flax, linen_net),
        (with_nnx, nnx_net),
        (with_eqx, eqx_net),
        (with_stax, stax_net),
    ],
)
def test_a_network_of_params_is_fitted_to_the_tempered_likelihood(make, net):
    model = make(net())
    tempered = nt.temper(model, alpha=ALPHA)
    svi = SVI(tempered, lambda: None, numpyro.optim.Adam(0.1), Trace_ELBO())
    bayes = SVI(model, lambda: None, numpyro.optim.Adam(0.1), Trace_ELBO())

    @jax.jit
    def run():
        assert trace_of(tempered)["net$params"]["scale"] is None
        state, other = svi.init(jax.random.key(0)), bayes.init(jax.random.key(0))
        fitted = numpyro.handlers.substitute(model, data=bayes.get_params(other))
        mean = numpyro.handlers.trace(fitted).get_trace()["y"]["fn"].loc
        return mean, bayes.evaluate(other), svi.evaluate(state)

    mean, untempered, loss = map(np.asarray, run())
    log_lik = stats.norm.logpdf(T, mean.astype(float), 0.5).sum()
    assert float(untempered) == pytest.approx(-log_lik, rel=1e-5)
    assert float(loss) == pytest.approx(-ALPHA * log_lik, rel=1e-5)


@pytest.mark.slow
def test_mutable_state_is_updated_as_without_a_power():
    linen = pytest.importorskip("flax.linen")

    class Normalised(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False, momentum=0.9)(x)
            return linen.Dense(1)(x)[:, 0]

    module = Normalised()

    def model():
        net = flax_module("net", module, mutable=["batch_stats"], input_shape=(1, 3))
        observe(net(X))

    states = []
    for target in (model, nt.temper(model, alpha=ALPHA)):
        svi = SVI(target, lambda: None, numpyro.optim.Adam(0.1), Trace_ELBO())
        state, _ = svi.update(svi.init(jax.random.key(0)))
        states.append(jax.tree.leaves(state.mutable_state))
    assert states[0]
    for plain, tempered in zip(*states, strict=True):
        np.testing.assert_array_equal(plain, tempered)


def test_a_network_under_scope_and_site_powers():
    model = random_linen(dist.Normal(0.0, 1.0))
    scoped = numpyro.handlers.scope(model, prefix="a")
    trace = {}
    jax.eval_shape(lambda: trace.update(trace_of(nt.temper(scoped, {"a/y": ALPHA}))))
    assert trace["a/y"]["scale"] == ALPHA
    assert all(
        site["scale"] is None
        for name, site in trace.items()
        if site["type"] == "sample" and name != "a/y"
    )


@pytest.mark.slow
def test_a_guide_for_weights():
    tempered = nt.temper(random_linen(dist.Normal(0.0, 1.0)), alpha=ALPHA)
    guide = AutoDelta(tempered)
    svi = SVI(tempered, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
    losses = svi.run(jax.random.key(0), 20, progress_bar=False).losses
    assert losses[-1] < losses[0]
