"""Data outside of the support of their site, which batch fits refuse as streams do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.requirements import check_data

KEY = jax.random.key(0)


def observing(fn):
    """A model that observes the distribution that a function makes of a latent."""

    def model(y, there=True):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(y)), handlers.mask(mask=there):
            numpyro.sample("y", fn(theta), obs=y)

    return model


flips = observing(lambda theta: dist.Bernoulli(logits=theta))
ONES_AND_TWOS = np.array([0, 1, 2, 2, 2, 2, 2, 0])
BINARY = "observed site 'y' takes values in Boolean(), got 2 in 5 of 8 data."
NAN = np.nan
REFUSED = {
    "two": (flips, ONES_AND_TWOS, BINARY),
    "signs": (
        flips,
        np.array([-1.0, 1.0, -1.0]),
        "observed site 'y' takes values in Boolean(), got -1.0 in 2 of 3 data: turn labels in {-1, 1} into "
        "(y + 1) / 2.",
    ),
    "labels from 1": (
        observing(lambda theta: dist.Categorical(logits=jnp.stack([theta, 0.0]))),
        np.array([1, 2, 2]),
        "got 2 in 2 of 3 data: labels that begin at 1 become y - 1.",
    ),
    "negative counts": (
        observing(lambda theta: dist.Poisson(jnp.exp(theta))),
        np.array([3, -1, 0]),
        "got -1 in 1 of 3 data.",
    ),
    "part of an event": (
        observing(lambda theta: dist.LogNormal(theta, 1.0).expand([2]).to_event(1)),
        np.array([[1.0, -2.0], [1.0, 2.0]]),
        "got -2.0 in 1 of 4 data.",
    ),
    "beside what is missing": (
        observing(lambda theta: dist.Gamma(jnp.exp(theta), 1.0)),
        np.array([NAN, 1.0, -1.0]),
        "got -1.0 in 1 of 3 data.",
    ),
}


def check(model, *args):
    check_data(get_trace(handlers.seed(model, 0), args, {}))


@pytest.mark.parametrize("name", REFUSED)
def test_data_outside_of_the_support_are_refused(name):
    model, y, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words) + "$"):
        check(model, y)


MASK = np.array([True, True, *5 * [False], True])
TAKEN = {
    "inside": (flips, ONES_AND_TWOS // 2),
    "masked": (flips, ONES_AND_TWOS, MASK),
    "weight 0": (nt.temper(flips, 1.0 * MASK), ONES_AND_TWOS),
    "alpha 0": (nt.temper(flips, 0.0), ONES_AND_TWOS),
    "missing": (flips, np.array([0.0, NAN, 1.0])),
    "real": (observing(lambda theta: dist.Normal(theta, 1.0)), -np.ones(2)),
    "real vectors": (
        observing(lambda theta: dist.MultivariateNormal(theta * np.ones(2), np.eye(2))),
        -np.ones((3, 2)),
    ),
    # Whether a value is possible is up to theta.
    "a support of parameters": (
        observing(lambda theta: dist.Uniform(theta, theta + 0.1)),
        np.array([90.0]),
    ),
    "a support by row": (
        observing(lambda theta: dist.Binomial(np.array([3, 1]), logits=theta)),
        np.array([3, 1]),
    ),
}


@pytest.mark.filterwarnings("ignore:Out-of-support values:UserWarning")
@pytest.mark.parametrize("name", TAKEN)
def test_masked_missing_and_weightless_data_are_no_data(name):
    check(*TAKEN[name])


@pytest.mark.full
def test_every_batch_verb_refuses_them_before_it_fits():
    call = (KEY, flips, AutoNormal, ONES_AND_TWOS)
    inside = nt.fit_gaussian(KEY, flips, AutoNormal, ONES_AND_TWOS // 2)
    moved = inside._replace(args=(jnp.asarray(ONES_AND_TWOS),))
    for refused in (
        lambda: nt.fit_svi(*call),
        lambda: nt.fit_svi(*call, optim=numpyro.optim.Adam(0.1), num_steps=1),
        lambda: nt.fit_gaussian(*call),
        lambda: nt.select_alpha(*call, criterion=nt.alpha.magnitude()),
        lambda: nt.temper_path(*call, alphas=[0.0, 1.0]),
        lambda: nt.sandwich(KEY, moved),
        lambda: nt.check_fit(KEY, moved),
        lambda: nt.linear_response(KEY, moved),
        lambda: nt.certify_risk(KEY, moved, "y"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(BINARY)}$"):
            refused()
