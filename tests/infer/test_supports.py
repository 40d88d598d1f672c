"""Latents on supports of their own: what depends on other latents, starts elsewhere, or lies outside."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.distributions import constraints
from numpyro.infer.autoguide import (
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt
from numpyro_tempered.infer.moments import LocationScale, moments_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:the priors of:UserWarning"),
    # Few steps, as what is looked at here is exact for every fit.
    pytest.mark.filterwarnings("ignore:the fit has not converged"),
]
KEY = jax.random.key(0)
Y = jnp.asarray(np.random.default_rng(1).normal(3.0, 1.0, 12), jnp.float32)


def of(prior):
    """A model of a mean with this prior."""

    def model(y):
        s = numpyro.sample("s", prior)
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(s, 1.0), obs=y)

    return model


def moving(y):
    low = numpyro.sample("low", dist.HalfNormal(1.0))
    s = numpyro.sample("s", dist.Uniform(low, low + 3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(s, 1.0), obs=y)


def with_param(y):
    high = numpyro.param("high", 4.0)
    s = numpyro.sample("s", dist.Uniform(0.0, high))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(s, 1.0), obs=y)


@pytest.fixture(scope="module")
def fit():
    return nt.fit_gaussian(KEY, of(dist.Uniform(2.0, 5.0)), AutoMultivariateNormal, Y)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nt.fit_svi(KEY, moving, AutoNormal, Y),
        lambda: nt.fit_gaussian(KEY, moving, AutoMultivariateNormal, Y),
        lambda: nt.OnlineVI(moving, nt.guides.AutoOnlineDiagonalNormal).init(KEY, Y),
        lambda: nt.fit_svi(KEY, with_param, AutoNormal, Y),
    ],
)
def test_a_support_that_depends_on_latents_or_params_is_refused(call):
    with pytest.raises(ValueError, match="the support of latent 's' depends on other"):
        call()


def test_numbers_of_a_support_that_moves_have_their_moments_by_draws():
    """The Gaussian of all coordinates says nothing of one by itself."""
    target = nt.results.Target(moving, (Y,), {}, KEY)
    assert target.moving == ["s"]
    q = LocationScale(np.array([0.5, 0.2]), np.array([[0.2, 0.1], [0.1, 0.3]]))
    z = np.random.default_rng(0).multivariate_normal(q.loc, q.cov, 2000)
    draws = jax.vmap(target.constrain)(jnp.asarray(z))
    np.testing.assert_allclose(
        draws["s"], np.exp(z[:, 0]) + 3.0 / (1.0 + np.exp(-z[:, 1])), rtol=1e-5
    )
    values = np.stack([draws["low"], draws["s"]], axis=1).astype(float)
    found = moments_of(q, target.coordinates, values, target.moving)
    assert found.exact.tolist() == [True, False]
    np.testing.assert_allclose(found.mean[1], values[:, 1].mean(), rtol=1e-6)
    np.testing.assert_allclose(found.mean[0], np.exp(0.5 + 0.1), rtol=1e-4)


def test_bounds_that_are_arrays_do_not_move():
    runs = []

    def model(y):
        runs.append(0)
        of(dist.Uniform(jnp.array(2.0), jnp.array(5.0)))(y)

    target = nt.results.Target(model, (Y,), {}, KEY)
    assert target.moving == []
    before = len(runs)
    np.testing.assert_allclose(target.constrain(jnp.zeros(1))["s"], 3.5)
    assert len(runs) == before


@pytest.mark.parametrize(
    "prior", [dist.Uniform(2.0, 10.0), dist.Normal(0.0, 5.0), dist.LogNormal(0.0, 1.0)]
)
def test_a_prior_of_another_support_starts_a_stream_at_its_moments(fit, prior):
    online = nt.OnlineVI(of(prior), nt.guides.AutoOnlineMultivariateNormal)
    start = online.posterior(online.init(KEY, Y[:1], prior=fit))
    # A Gaussian on the one scale is not quite one on the other; taken over as it is, it would be off by more than
    # 6 standard deviations.
    assert abs(start.mean["s"] - fit.mean["s"]) < 0.1 * fit.sd["s"]
    assert abs(start.sd["s"] / fit.sd["s"] - 1.0) < 0.1


def test_a_prior_outside_of_the_support_is_refused(fit):
    online = nt.OnlineVI(
        of(dist.Uniform(-5.0, 0.0)), nt.guides.AutoOnlineMultivariateNormal
    )
    with pytest.raises(ValueError, match="latent 's' are outside of its support"):
        online.init(KEY, Y[:1], prior=fit)


def test_a_posterior_of_a_stream_starts_one_of_another_support():
    first = nt.OnlineVI(
        of(dist.Uniform(-5.0, 15.0)), nt.guides.AutoOnlineMultivariateNormal
    )
    posterior = first.posterior(first.init(KEY, Y))
    second = nt.OnlineVI(
        of(dist.Normal(0.0, 5.0)), nt.guides.AutoOnlineMultivariateNormal
    )
    start = second.posterior(second.init(KEY, Y[:1], prior=posterior))
    assert abs(start.mean["s"] - posterior.mean["s"]) < 0.1 * posterior.sd["s"]


OUTSIDE = {
    "simplex": (
        dist.Dirichlet(jnp.ones(3)),
        [0.2, 0.3, 0.5],
        [[0.2, 0.3, -0.1], [0.5, 0.5, 0.5]],
    ),
    "corr_cholesky": (
        dist.LKJCholesky(2),
        [[1.0, 0.0], [0.6, 0.8]],
        [[[2.0, 0.0], [0.0, 2.0]]],
    ),
    "zero_sum": (dist.ZeroSumNormal(1.0, (3,)), [1.0, -2.0, 1.0], [[1.0, 1.0, 1.0]]),
}


@pytest.mark.parametrize("name", tiered(OUTSIDE, unit=["simplex"]))
def test_outside_of_a_support_there_is_no_density(name):
    prior, inside, outside = OUTSIDE[name]

    def model(y):
        s = numpyro.sample("s", prior)
        numpyro.sample("y", dist.Normal(jnp.sum(s * s), 1.0), obs=y)

    fit = nt.fit_svi(
        KEY, model, AutoMultivariateNormal, 1.0, num_steps=50, tolerance=1e9
    )
    log_prob = jax.vmap(fit.log_prob)
    values = log_prob({"s": jnp.array([inside, *outside])})
    assert np.isfinite(values[0])
    assert np.all(values[1:] == -np.inf)
    draws = fit.sample_posterior(KEY, (100,))
    assert np.all(np.isfinite(log_prob(draws)))


@pytest.mark.full
def test_log_prob_of_a_laplace_approximation_under_jit():
    fit = nt.fit_svi(
        KEY, of(dist.HalfNormal(3.0)), AutoLaplaceApproximation, Y, num_steps=500
    )
    at = {"s": jnp.array(2.9)}
    np.testing.assert_allclose(jax.jit(fit.log_prob)(at), fit.log_prob(at), rtol=1e-5)


def test_predictions_under_an_improper_prior():
    def model(x, y=None):
        slope = numpyro.sample(
            "slope", dist.ImproperUniform(constraints.positive, (), ())
        )
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)

    x = jnp.arange(1.0, 5.0)
    fit = nt.fit_gaussian(KEY, model, AutoNormal, x, 2.0 * x)
    draws = fit.predict(KEY, jnp.array([10.0, 20.0, 30.0]), num_samples=50)["y"]
    np.testing.assert_allclose(draws.mean(axis=0), [20.0, 40.0, 60.0], rtol=0.02)
