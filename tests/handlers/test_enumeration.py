"""Discrete latents: the power belongs outside of the sum over local ones, and after it for global ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
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


def parallel():
    """A dict of its own for each site: NumPyro writes into it."""
    return {"enumerate": "parallel"}


def mixture(y, marked=True):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.asarray(WEIGHTS)), infer=parallel() if marked else None)
        numpyro.sample("y", dist.Normal(mu * z, 1.0), obs=y)


def marginal_mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    parts = dist.Normal(jnp.stack([0.0 * mu, mu]), 1.0)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.asarray(WEIGHTS)), parts), obs=y)


def global_switch(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(WEIGHTS)), infer=parallel())
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(2.0 * k, s), obs=y)


def chain(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def transition(state, y_t):
        probs = jnp.array([[0.9, 0.1], [0.2, 0.8]])
        state = numpyro.sample("state", dist.Categorical(probs[state]), infer=parallel())
        numpyro.sample("y", dist.Normal(2.0 * state, scale), obs=y_t)
        return state, None

    scan(transition, 0, y)


REFUSED = r"enumerated local latent '{}'.*temper\(marginalize\(model\), alpha\)"


def set_up(model, y=Y):
    MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), jnp.asarray(y))


@pytest.mark.filterwarnings("ignore:Some algorithms will automatically enumerate:FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda alpha: nt.temper(mixture, alpha=alpha),
        # NUTS and TraceEnum_ELBO configure what the model does not.
        lambda alpha: nt.temper(lambda y: mixture(y, marked=False), alpha=alpha),
        lambda alpha: nt.temper(config_enumerate(lambda y: mixture(y, marked=False)), alpha=alpha),
        lambda alpha: config_enumerate(nt.temper(lambda y: mixture(y, marked=False), alpha=alpha)),
        lambda alpha: handlers.scope(nt.temper(mixture, alpha=alpha), prefix="a", divider="."),
        lambda alpha: nt.temper(mixture, {"y": alpha}),
    ],
    ids=["marked", "unmarked", "configured inside", "configured outside", "scoped", "mapping"],
)
def test_an_enumerated_local_latent_is_refused(wrap):
    for alpha in (0.3, 0.0):
        with pytest.raises(ValueError, match=REFUSED.format(r"(a\.)?z")):
            set_up(wrap(alpha))


def test_an_enumerated_local_latent_without_a_power_is_not_refused():
    for model in (nt.temper(mixture, alpha=1.0), nt.temper(mixture, {"y": 1.0})):
        initialize_model(jax.random.key(0), model, model_args=(Y,))


def test_an_enumerated_local_latent_in_a_plate_around_the_handler_is_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))

        def one():
            z = numpyro.sample("z", dist.Categorical(jnp.asarray(WEIGHTS)), infer=parallel())
            numpyro.sample("y", dist.Normal(mu * z, 1.0), obs=y)

        with numpyro.plate("n", len(y)):
            nt.temper(one, alpha=0.3)()

    with pytest.raises(ValueError, match=REFUSED.format("z")):
        set_up(model)


def test_an_enumerated_local_latent_is_refused_under_svi():
    model = nt.temper(mixture, alpha=0.3)
    guide = AutoDelta(handlers.block(model, hide=["z"]))
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), TraceEnum_ELBO())
    with pytest.raises(ValueError, match=REFUSED.format("z")):
        svi.evaluate(svi.init(jax.random.key(0), Y), Y)


def test_an_enumerated_chain_in_a_scan_is_refused():
    with pytest.raises(ValueError, match="enumerated local latent"):
        set_up(nt.temper(chain, alpha=0.5), [0.1, 1.9, 2.2])


def test_summed_out_local_latent_is_tempered_outside_of_the_sum(x64):
    mu = 0.8
    parts = np.log(WEIGHTS) + np.stack([stats.norm.logpdf(Y), stats.norm.logpdf(Y, mu)], axis=-1)
    want = stats.norm.logpdf(mu) + 0.3 * logsumexp(parts, axis=-1).sum()
    got = potential(nt.temper(marginal_mixture, alpha=0.3), {"mu": mu}, Y)
    assert got == pytest.approx(-want, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_global_discrete_latent_is_summed_after_the_power(alpha, x64):
    info = initialize_model(jax.random.key(0), nt.temper(global_switch, alpha=alpha), model_args=(Y,))
    u = 0.4
    s = np.exp(u)
    log_lik = np.array([stats.norm.logpdf(Y, 2.0 * k, s).sum() for k in (0, 1)])
    want = stats.halfnorm.logpdf(s) + u + logsumexp(np.log(WEIGHTS) + alpha * log_lik)
    assert float(info.potential_fn({"s": jnp.array(u)})) == pytest.approx(-want, rel=1e-12)


def test_strict_does_not_meet_what_enumeration_replays(x64):
    model = nt.temper(global_switch, alpha=0.3, strict=True)
    initialize_model(jax.random.key(0), model, model_args=(Y,))
