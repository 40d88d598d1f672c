"""Discrete latents: the power belongs outside of the sum over local ones, and after it for global ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import config_enumerate
from numpyro.infer import MCMC, NUTS, SVI, TraceEnum_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import initialize_model
from scipy import stats
from scipy.special import logsumexp
from tempered_models import Y, potential

import numpyro_tempered as nt

pytest.importorskip("funsor")

WEIGHTS = np.array([0.4, 0.6])


def weights():
    """A copy: jax mixes up the precisions of an array that it has seen."""
    return jnp.asarray(WEIGHTS.copy())


def parallel():
    """A dict of its own for each site: NumPyro writes into it."""
    return {"enumerate": "parallel"}


def mixture(y, marked=True):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample(
            "z", dist.Categorical(weights()), infer=parallel() if marked else None
        )
        numpyro.sample("y", dist.Normal(mu * z, 1.0), obs=y)


def marginal_mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    parts = dist.Normal(jnp.stack([0.0 * mu, mu]), 1.0)
    with numpyro.plate("n", len(y)):
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(weights()), parts), obs=y
        )


def global_switch(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    k = numpyro.sample("k", dist.Categorical(weights()), infer=parallel())
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(2.0 * k, s), obs=y)


def chain(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def transition(state, y_t):
        probs = jnp.array([[0.9, 0.1], [0.2, 0.8]])
        state = numpyro.sample(
            "state", dist.Categorical(probs[state]), infer=parallel()
        )
        numpyro.sample("y", dist.Normal(2.0 * state, scale), obs=y_t)
        return state, None

    scan(transition, 0, y)


REFUSED = r"enumerated local latent '{}'.*temper\(marginalize\(model\), alpha\)"


def trace_nuts(model, y=Y):
    """Abstractly: what is refused is not computed."""
    jax.eval_shape(
        lambda: (
            NUTS(model).init(jax.random.key(0), 1, None, (jnp.asarray(y),), {}) and None
        )
    )


def run_nuts(model, y=Y):
    MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False).run(
        jax.random.key(0), jnp.asarray(y)
    )


@pytest.fixture(params=[trace_nuts, pytest.param(run_nuts, marks=pytest.mark.full)])
def set_up(request):
    return request.param


@pytest.fixture(params=["abstract", pytest.param("computed", marks=pytest.mark.full)])
def call(request):
    """By default what a function does is traced and not computed."""
    return (
        (lambda f: jax.eval_shape(lambda: (f(), None)[1]))
        if request.param == "abstract"
        else lambda f: f()
    )


@pytest.mark.filterwarnings(
    "ignore:Some algorithms will automatically enumerate:FutureWarning"
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda alpha: nt.temper(mixture, alpha=alpha),
        # NUTS and TraceEnum_ELBO configure what the model does not.
        lambda alpha: nt.temper(lambda y: mixture(y, marked=False), alpha=alpha),
        lambda alpha: nt.temper(
            config_enumerate(lambda y: mixture(y, marked=False)), alpha=alpha
        ),
        lambda alpha: config_enumerate(
            nt.temper(lambda y: mixture(y, marked=False), alpha=alpha)
        ),
        lambda alpha: handlers.scope(
            nt.temper(mixture, alpha=alpha), prefix="a", divider="."
        ),
        lambda alpha: nt.temper(mixture, {"y": alpha}),
    ],
    ids=[
        "marked",
        "unmarked",
        "configured inside",
        "configured outside",
        "scoped",
        "mapping",
    ],
)
def test_an_enumerated_local_latent_is_refused(set_up, wrap):
    for alpha in (0.3, 0.0):
        with pytest.raises(ValueError, match=REFUSED.format(r"(a\.)?z")):
            set_up(wrap(alpha))


def test_an_enumerated_local_latent_without_a_power_is_not_refused(call):
    for model in (nt.temper(mixture, alpha=1.0), nt.temper(mixture, {"y": 1.0})):
        call(
            lambda model=model: initialize_model(
                jax.random.key(0), model, model_args=(Y,)
            )
        )


def test_an_enumerated_local_latent_in_a_plate_around_the_handler_is_refused(set_up):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))

        def one():
            z = numpyro.sample("z", dist.Categorical(weights()), infer=parallel())
            numpyro.sample("y", dist.Normal(mu * z, 1.0), obs=y)

        with numpyro.plate("n", len(y)):
            nt.temper(one, alpha=0.3)()

    with pytest.raises(ValueError, match=REFUSED.format("z")):
        set_up(model)


def test_an_enumerated_local_latent_is_refused_under_svi(call):
    model = nt.temper(mixture, alpha=0.3)
    guide = AutoDelta(handlers.block(model, hide=["z"]))
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), TraceEnum_ELBO())
    with pytest.raises(ValueError, match=REFUSED.format("z")):
        call(lambda: svi.evaluate(svi.init(jax.random.key(0), Y), Y))


def test_an_enumerated_chain_in_a_scan_is_refused(set_up):
    with pytest.raises(
        ValueError,
        match=r"^temper met the.*enumerated local latent.*its own, declare it",
    ):
        set_up(nt.temper(chain, alpha=0.5), [0.1, 1.9, 2.2])


def test_summed_out_local_latent_is_tempered_outside_of_the_sum(x64):
    mu = 0.8
    parts = np.log(WEIGHTS) + np.stack(
        [stats.norm.logpdf(Y), stats.norm.logpdf(Y, mu)], axis=-1
    )
    want = stats.norm.logpdf(mu) + 0.3 * logsumexp(parts, axis=-1).sum()
    got = jax.jit(
        lambda mu: potential(nt.temper(marginal_mixture, alpha=0.3), {"mu": mu}, Y)
    )(mu)
    assert got == pytest.approx(-want, rel=1e-12)


@pytest.mark.parametrize("alpha", tiered([0.0, 0.3], unit=[0.3]))
def test_global_discrete_latent_is_summed_after_the_power(alpha, x64):
    @jax.jit
    def run(u):
        info = initialize_model(
            jax.random.key(0), nt.temper(global_switch, alpha=alpha), model_args=(Y,)
        )
        return info.potential_fn({"s": u})

    u = 0.4
    s = np.exp(u)
    log_lik = np.array([stats.norm.logpdf(Y, 2.0 * k, s).sum() for k in (0, 1)])
    want = stats.halfnorm.logpdf(s) + u + logsumexp(np.log(WEIGHTS) + alpha * log_lik)
    assert float(run(u)) == pytest.approx(-want, rel=1e-12)


def test_strict_does_not_meet_what_enumeration_replays(call, x64):
    model = nt.temper(global_switch, alpha=0.3, strict=True)
    call(lambda: initialize_model(jax.random.key(0), model, model_args=(Y,)))
