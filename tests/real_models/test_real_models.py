"""Models that others wrote, with and without ``temper``: the same at 1, the hand-scaled density at 1/2."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
from numpyro.optim import Adam
from zoo import EXAMPLES, SHARED

import numpyro_tempered as nt

pytestmark = pytest.mark.full

ALPHA = 0.5


# All of them run in tests/benchmarks/real_models.py too.
FAST = [
    name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow)
    for i, name in enumerate(EXAMPLES)
]


@pytest.fixture(params=FAST, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def example(request):
    example = EXAMPLES[request.param]
    if not example.is_available:
        pytest.skip(f"{example.file} is not in {SHARED}")
    return example


def by_hand(example, values, args):
    """Log prior and log-likelihood at constrained values, from a trace of the undecorated model."""
    model = handlers.substitute(example.by_hand or example.model, values)
    trace = handlers.trace(model).get_trace(*args)
    prior = likelihood = 0.0
    for site in trace.values():
        if site["type"] != "sample":
            continue
        log_prob = jnp.sum(site["fn"].log_prob(site["value"]))
        if site["is_observed"]:
            likelihood += log_prob
        else:
            prior += log_prob
    return prior, likelihood


def supports(example, args):
    """Bijections from the unconstrained space by latent site, and shapes there."""
    trace = handlers.trace(
        handlers.seed(example.by_hand or example.model, 0)
    ).get_trace(*args)
    sites = {
        k: s for k, s in trace.items() if s["type"] == "sample" and not s["is_observed"]
    }
    maps = {k: biject_to(s["fn"].support) for k, s in sites.items()}
    return maps, {
        k: maps[k].inverse_shape(jnp.shape(s["value"])) for k, s in sites.items()
    }


def energy_and_loss(model, loc, scale, key, args):
    """Potential energy at the draw that SVI's loss takes from an AutoNormal, and that loss."""
    guide = AutoNormal(model)
    params = {f"{k}_auto_loc": v for k, v in loc.items()}
    params |= {f"{k}_auto_scale": jnp.full(jnp.shape(v), scale) for k, v in loc.items()}
    # Set up and used in one trace: compiling the guide's initialisation takes longer than the test.
    handlers.seed(guide, key)(*args)
    loss = Trace_ELBO().loss(key, params, model, guide, *args)
    return potential_energy(model, args, {}, draw(loc, scale, key)), loss


def draw(loc, scale, key):
    """AutoNormal's draw in ``Trace_ELBO`` on the unconstrained space."""
    _, key = jax.random.split(key)
    point = {}
    for name, mean in loc.items():
        key, site_key = jax.random.split(key)
        point[name] = mean + scale * jax.random.normal(site_key, jnp.shape(mean))
    return point


def energy_and_loss_by_hand(example, maps, loc, scale, key, args):
    """The same two without the likelihood, and the log-likelihood."""
    point = draw(loc, scale, key)
    values = {k: maps[k](v) for k, v in point.items()}
    log_det = sum(
        jnp.sum(maps[k].log_abs_det_jacobian(v, values[k])) for k, v in point.items()
    )
    log_q = sum(
        jnp.sum(jax.scipy.stats.norm.logpdf(v, loc[k], scale)) for k, v in point.items()
    )
    prior, likelihood = by_hand(example, values, args)
    return (-prior - log_det, log_q - log_det - prior), likelihood


def test_potential_energy_and_loss_are_those_of_the_likelihood_scaled_by_hand(
    example, x64, key
):
    args, scale = example.data(), 0.3
    tempered = nt.temper(example.model, alpha=ALPHA)

    @jax.jit
    def both(key):
        maps, shapes = supports(example, args)
        loc = {
            k: jnp.linspace(-0.3, 0.4, math.prod(s)).reshape(s)
            for k, s in shapes.items()
        }
        got = energy_and_loss(tempered, loc, scale, key, args)
        return got, energy_and_loss_by_hand(example, maps, loc, scale, key, args)

    got, (without, likelihood) = both(key)
    assert abs(likelihood) > 1.0
    np.testing.assert_allclose(got, np.array(without) - ALPHA * likelihood, rtol=1e-10)


def program(example, alpha, key, args):
    """The potential energy and SVI's loss as the text of one lowered program; undecorated for None."""
    model = example.model if alpha is None else nt.temper(example.model, alpha)

    @jax.jit
    def both(key):
        _, shapes = supports(example, args)
        return energy_and_loss(
            model, {k: jnp.zeros(s) for k, s in shapes.items()}, 0.3, key, args
        )

    return both.lower(key).as_text()


def test_at_alpha_one_the_program_is_that_of_the_undecorated_model(example, key):
    args = example.data()
    plain = program(example, None, key, args)
    assert program(example, 1.0, key, args) == plain
    assert program(example, ALPHA, key, args) != plain


def nuts(model, args, key, num_warmup, num_samples):
    mcmc = MCMC(
        NUTS(model), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False
    )
    mcmc.run(key, *args)
    return mcmc.get_samples()


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def check_runs(example, key, num_warmup, num_samples, num_steps):
    """Bitwise the same draws and parameters at alpha = 1, finite ones at 1/2."""
    args = example.data()
    models = [example.model, nt.temper(example.model), nt.temper(example.model, ALPHA)]
    plain, bayes, half = (
        nuts(model, args, key, num_warmup, num_samples) for model in models
    )
    assert_same(bayes, plain)
    assert all(np.all(np.isfinite(draws)) for draws in half.values())
    assert not np.array_equal(example.summary(half), example.summary(plain))
    fits = [
        SVI(model, AutoNormal(model), Adam(0.05), Trace_ELBO()).run(
            key, num_steps, *args, progress_bar=False
        )
        for model in models
    ]
    assert_same(fits[1].params, fits[0].params)
    np.testing.assert_array_equal(fits[1].losses, fits[0].losses)
    assert all(np.all(np.isfinite(value)) for value in fits[2].params.values())
    assert np.all(np.isfinite(fits[2].losses))
    return half, plain


@pytest.mark.slow
def test_draws_and_parameters(example, key):
    check_runs(example, key, 100, 100, 300)


# The data dominate the prior of the headline, so its posterior widens as they are discounted.
WIDER = [
    "radon, varying intercepts",
    "logistic regression",
    "mixture, MixtureSameFamily",
    "mixture, marginalize",
    "HMM, forward algorithm",
    "HMM, marginalize",
    "horseshoe regression",
    "negative-binomial regression",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_half_the_likelihood_widens_the_posterior_by_the_square_root_of_two(name, key):
    example = EXAMPLES[name]
    if not example.is_available:
        pytest.skip(f"{example.file} is not in {SHARED}")
    draws = [
        np.asarray(example.summary(nuts(model, example.data(), key, 500, 1500)))
        for model in (example.model, nt.temper(example.model, ALPHA))
    ]
    log_ratio = np.log(draws[1].std(ddof=1) / draws[0].std(ddof=1))
    # The standard error of a log standard deviation is 1 / sqrt(2 ESS) of the squared deviations, if Gaussian.
    deviations = [(each - each.mean()) ** 2 for each in draws]
    error = np.sqrt(sum(0.5 / effective_sample_size(each[None]) for each in deviations))
    assert log_ratio > 4 * error
    # Not exactly the square root: priors and finite samples move it.
    assert abs(log_ratio - np.log(2) / 2) < 0.2 + 4 * error
