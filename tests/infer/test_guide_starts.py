"""Starts of the online guides elsewhere than at the prior, as NumPyro's own guides take them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_mean, init_to_value

import numpyro_tempered as nt

GUIDES = {
    "diagonal": nt.guides.AutoOnlineDiagonalNormal,
    "full": nt.guides.AutoOnlineMultivariateNormal,
    "low rank": nt.guides.AutoOnlineLowRankNormal,
}
Y = np.random.default_rng(0).normal(2.0, 1.0, 20).astype(np.float32)
START = init_to_value(values={"a": jnp.array([3.0, -1.0]), "b": 0.5})


def model(y=None):
    a = numpyro.sample("a", dist.Normal(jnp.array([1.0, 0.0]), 2.0).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 0.5))
    mean = numpyro.deterministic("mean", a[0] + 0.1 * a[1] + b)
    with numpyro.plate("n", 20 if y is None else len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("kind", GUIDES)
def test_the_means_start_where_init_loc_fn_says_and_the_prior_stays(kind):
    guide = GUIDES[kind](model, init_loc_fn=START, prefix="q")
    for each in (guide, guide.fresh()):
        params = SVI(model, each, numpyro.optim.Adam(0.1), Trace_ELBO()).init(
            jax.random.key(0), Y
        )
        start = each.from_params(numpyro.optim.Adam(0.1).get_params(params.optim_state))
        np.testing.assert_allclose(start.loc, [3.0, -1.0, 0.5])
        np.testing.assert_allclose(each.prior.loc, [1.0, 0.0, 0.0])
        scale = nt.gaussian.families.family_of(each.prior).marginal_scale(each.prior)
        np.testing.assert_allclose(scale, [2.0, 2.0, 0.5], rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", GUIDES)
def test_strategies_of_numpyro_are_taken_by_the_fits(kind):
    guide = GUIDES[kind](model, init_loc_fn=init_to_mean())
    handlers.seed(guide, jax.random.key(0))(Y)
    np.testing.assert_allclose(guide._init_latent, [1.0, 0.0, 0.0], atol=1e-6)
    if kind != "low rank":
        far = GUIDES[kind](model, init_loc_fn=START)
        near, other = (
            nt.fit_gaussian(jax.random.key(1), model, g, Y, num_particles=100)
            for g in (guide, far)
        )
        np.testing.assert_allclose(
            near.params["auto_loc"], other.params["auto_loc"], atol=2e-3
        )
        assert float(other.convergence.trace.elbo[0]) != float(
            near.convergence.trace.elbo[0]
        )


@pytest.mark.parametrize("kind", GUIDES)
def test_online_rules_refuse_a_start_that_is_not_the_prior(kind):
    guide = GUIDES[kind](model, init_loc_fn=START)
    with pytest.raises(
        ValueError,
        match=r"OnlineVI weighs the data .* leave init_loc_fn out.*own optimisers",
    ):
        nt.OnlineVI(model, guide).init(jax.random.key(0), Y[:1])
    if kind != "low rank":
        with pytest.raises(
            ValueError,
            match=r"an online optimiser weighs the data .* leave init_loc_fn out",
        ):
            nt.optim.NGVI(guide)
