"""Each posterior of a model whose latents live on supports of their own: one law, however it is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:the priors of:UserWarning"),
]
KEY = jax.random.key(0)
ALPHA, NUM_DRAWS = 0.5, 4000
RNG = np.random.default_rng(0)
Y = jnp.asarray(RNG.normal([0.9, 0.4, 3.0, 1.1], 1.0, (12, 4)), jnp.float32)
SHAPES = {
    "positive": (),
    "share": (),
    "between": (2,),
    "simplex": (3,),
    "correlation": (2, 2),
    "ordered": (2,),
}
SUPPORTS = {
    "positive": dist.constraints.positive,
    "share": dist.constraints.unit_interval,
    "between": dist.constraints.interval(2.0, 5.0),
    "simplex": dist.constraints.simplex,
    "correlation": dist.constraints.corr_cholesky,
    "ordered": dist.constraints.ordered_vector,
}


def model(y):
    # Not in the order of their names, and each site is in the mean of a column or two.
    between = numpyro.sample("between", dist.Uniform(2.0, 5.0).expand([2]).to_event(1))
    positive = numpyro.sample("positive", dist.Gamma(2.0, 2.0))
    simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
    share = numpyro.sample("share", dist.Beta(2.0, 3.0))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 3.0))
    ordered = numpyro.sample(
        "ordered",
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0).expand([2]).to_event(1),
            dist.transforms.OrderedTransform(),
        ),
    )
    loc = jnp.stack(
        [
            positive + ordered[0],
            share + correlation[1, 0],
            between.mean(),
            simplex @ jnp.array([0.0, 1.0, 2.0]) + ordered[1],
        ]
    )
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)


def stream():
    online = nt.OnlineVI(
        nt.temper(model, ALPHA),
        nt.guides.AutoOnlineMultivariateNormal,
        expectation=nt.expectations.monte_carlo(num_particles=64, antithetic=True),
    )
    state, _ = online.run(KEY, jnp.reshape(Y, (3, 4, 4)))
    return online.posterior(state).on(Y)


def by_svi(guide):
    return nt.fit_svi(KEY, model, guide, Y, alpha=ALPHA)


POSTERIORS = {
    "fit_svi of AutoNormal": lambda: by_svi(AutoNormal),
    "fit_svi of AutoDiagonalNormal": lambda: by_svi(AutoDiagonalNormal),
    "fit_gaussian": lambda: nt.fit_gaussian(
        KEY, model, AutoMultivariateNormal, Y, alpha=ALPHA
    ),
    "linear_response": lambda: nt.linear_response(
        KEY, nt.fit_gaussian(KEY, model, AutoNormal, Y, alpha=ALPHA)
    ),
    "a stream": stream,
}


@pytest.fixture(scope="module", params=POSTERIORS)
def posterior(request):
    return POSTERIORS[request.param]()


@pytest.fixture(scope="module")
def draws(posterior):
    return posterior.sample_posterior(jax.random.key(1), (NUM_DRAWS,))


def test_draws_have_the_shapes_and_lie_in_the_supports(draws):
    assert {name: value.shape[1:] for name, value in draws.items()} == SHAPES
    for name, value in draws.items():
        assert np.all(SUPPORTS[name](value)), name


def test_means_and_standard_deviations_are_those_of_draws(posterior, draws):
    for name, value in draws.items():
        value = np.asarray(value, float)
        centred = value - value.mean(axis=0)
        sd = value.std(axis=0)
        spread = np.sqrt(np.var(centred**2, axis=0) / NUM_DRAWS)
        # The draws of its own have noise too where they are no formula.
        se = np.sqrt(2.0 / NUM_DRAWS) * sd
        assert np.all(
            np.abs(posterior.mean[name] - value.mean(axis=0)) <= 6 * se + 1e-6
        ), name
        off = np.abs(np.square(posterior.sd[name]) - sd**2)
        assert np.all(off <= 6 * np.sqrt(2.0) * spread + 1e-6), name


def test_its_density_is_that_of_its_elbo(posterior, draws):
    """alpha E log L - KL is the mean of log joint less log q, in the units of the model."""
    tempered = nt.results.Target(nt.temper(model, ALPHA), (Y,), {}, KEY)
    gaps = np.asarray(
        jax.lax.map(
            lambda one: tempered.log_joint(one) - posterior.log_prob(one),
            draws,
            batch_size=100,
        ),
        float,
    )
    elbo = posterior.elbo if posterior.elbo is not None else posterior.evaluate().elbo
    se = np.hypot(gaps.std() / np.sqrt(NUM_DRAWS), elbo.se)
    assert abs(gaps.mean() - elbo.value) <= 5 * se + 1e-3


def test_outside_of_a_support_it_is_minus_infinity(posterior, draws):
    at = {name: value[0] for name, value in draws.items()}
    assert np.isfinite(posterior.log_prob(at))
    assert posterior.log_prob(at | {"share": at["share"] + 1.0}) == -np.inf
    assert posterior.log_prob(at | {"simplex": 2.0 * at["simplex"]}) == -np.inf
