"""The likelihood of a NumPyro model as a loss of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

ETA = nt.expectations.gauss_hermite(predictor="eta")


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.3, 1.5).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def make_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2))
    return x, (
        rng.uniform(size=30) < 1 / (1 + np.exp(-x @ np.array([1.0, -0.5])))
    ).astype(float)


@pytest.mark.full
@pytest.mark.parametrize("tempered", [False, True])
def test_a_partitioned_model_ends_at_the_batch_fit(x64, tempered):
    x, y = make_rows()
    ours = nt.temper(model, alpha=0.5) if tempered else model
    online = nt.OnlineVI(ours, nt.guides.AutoOnlineMultivariateNormal, expectation=ETA)
    loss, prior = online.bare_loss(jax.random.key(0), x[:3], y[:3])
    # Powers multiply: the other half, or all of it, is that of the rounds.
    pvi = nt.online.partitioned(loss, alpha=1.0 if tempered else 0.5, tolerance=1e-12)
    shards = [(x[:4], y[:4]), (x[4:20], y[4:20]), (x[20:], y[20:])]
    run = nt.online.run_partitioned(pvi, prior, shards, num_rounds=100, tolerance=1e-14)
    assert run.converged
    fit = nt.fit_gaussian(
        jax.random.key(1),
        model,
        AutoMultivariateNormal,
        x,
        y,
        alpha=0.5,
        expectation=ETA,
        tolerance=1e-12,
    )
    batch = fit.convergence.posterior
    np.testing.assert_allclose(run.posterior.loc, batch.loc, rtol=1e-6)
    np.testing.assert_allclose(run.posterior.factor, batch.factor, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(run.elbo[-1], float(fit.elbo.value), rtol=1e-8)
    # And back into the model.
    state = online.init(jax.random.key(2), x, y, prior=run.posterior)
    np.testing.assert_allclose(state.posterior.loc, batch.loc, rtol=1e-6)


@pytest.mark.full
def test_outcomes_outside_of_the_support_are_refused():
    x, y = make_rows()
    online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal, expectation=ETA)
    loss, prior = online.bare_loss(jax.random.key(0), x, y)
    pvi = nt.online.partitioned(loss)
    server = pvi.init(prior, 1)
    with pytest.raises(ValueError, match="y"):
        pvi.refit(pvi.factor(server, 0), server, x, np.where(y > 0, 2.0, 0.0))
    assert jnp.shape(prior.loc) == (2,)
