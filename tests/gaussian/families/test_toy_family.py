"""A family that a user writes: an isotropic Gaussian, by one record of functions."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import (
    Family,
    FullRank,
    MeanField,
    base,
    family_of,
)


class Isotropic(NamedTuple):
    """N(loc, scale² I), one scale for all coordinates."""

    loc: jax.Array
    scale: jax.Array


def check(prior):
    loc = jnp.asarray(prior.loc, float)
    return Isotropic(loc, jnp.asarray(prior.scale, loc.dtype))


def natural_step(memory, q, prior, grad_loc, grad_var, gain):
    of_q, of_prior = 1.0 / q.scale**2, 1.0 / prior.scale**2
    precision = (
        jnp.mean(jnp.asarray(gain.keep)) * of_q
        + gain.pull * of_prior
        + 2.0 * gain.step * jnp.mean(grad_var)
    )
    force = gain.step * grad_loc + gain.pull * of_prior * (q.loc - prior.loc)
    return Isotropic(q.loc - force / precision, jax.lax.rsqrt(precision)), memory


def kl(q, p):
    shift = jnp.sum((q.loc - p.loc) ** 2) / p.scale**2
    ratio = (q.scale / p.scale) ** 2
    return 0.5 * (shift + q.loc.size * (ratio - 1.0 - jnp.log(ratio)))


def kl_prox_scaled(anchor, grads, rate):
    slope = 0.5 * rate * grads.scale / anchor.loc.size
    return Isotropic(
        anchor.loc - rate * grads.loc, jnp.sqrt(anchor.scale**2 + slope**2) - slope
    )


def merge(a, b, prior):
    precisions = [1.0 / q.scale**2 for q in (a, b, prior)]
    total = precisions[0] + precisions[1] - precisions[2]
    force = precisions[0] * a.loc + precisions[1] * b.loc - precisions[2] * prior.loc
    return Isotropic(force / total, jax.lax.rsqrt(total))


def scales(q):
    return jnp.broadcast_to(q.scale, q.loc.shape)


FAMILY = Family(
    name="Isotropic",
    check=check,
    sample=lambda rng_key, q, sample_shape=(): (
        q.loc
        + q.scale
        * jax.random.normal(rng_key, (*sample_shape, *q.loc.shape), q.loc.dtype)
    ),
    kl=kl,
    root=scales,
    predictor_variance=lambda q, x: q.scale**2 * jnp.sum(x**2, axis=-1),
    curvature_form="diagonal",
    witness=lambda q: q.loc + q.scale,
    marginal_scale=scales,
    init=lambda q: (),
    natural_step=natural_step,
    floor=lambda q, grad_var: (jnp.maximum(grad_var, 0.0), jnp.any(grad_var < 0.0)),
    merge=merge,
    from_root=lambda loc, root: Isotropic(loc, jnp.sqrt(jnp.mean(root**2))),
    gradient=lambda q, grad_loc, grad_var: Isotropic(
        grad_loc, 2.0 * q.scale * jnp.sum(grad_var)
    ),
    kl_prox=lambda anchor, grads, rate: kl_prox_scaled(
        anchor, grads, rate * anchor.scale**2
    ),
    kl_prox_scaled=kl_prox_scaled,
    descend=lambda q, grads, rate: Isotropic(
        q.loc - rate * grads.loc, jnp.maximum(q.scale - rate * grads.scale, 0.0)
    ),
)


class AutoIsotropic(nt.guides.AutoOnlineGuide):
    """The guide of the family."""

    def start_at(self, loc, scale, moments):
        return Isotropic(loc, jnp.sqrt(jnp.mean(scale**2)))


@pytest.fixture(scope="module", autouse=True)
def registered():
    nt.gaussian.families.register(Isotropic, FAMILY)
    yield
    base._FAMILIES.pop(Isotropic)


BOX = nt.online.Box(loc=0.6, scale=0.9)
LOGISTIC = nt.expectations.logistic()
SQUARED = nt.expectations.squared(noise_scale=1.0)
RULES = {
    "ngvi": nt.online.ngvi(0.7),
    "svb": nt.online.svb(0.1),
    "oga": nt.online.oga(0.1),
    "oga_el": nt.online.oga_el(0.1, box=BOX),
    "sva": nt.online.sva(0.1, box=BOX),
    "svb_rate": nt.online.svb(nt.online.svb_rate(0.5)),
    "ngvi_box": nt.online.ngvi(0.7, box=BOX),
    "ngvi_evidence": nt.online.ngvi(0.7, evidence=4.0),
    "ngvi_fisher": nt.online.ngvi(0.7, curvature="fisher"),
    "ngvi_floor": nt.online.ngvi(0.7, negative="floor"),
    "rvga": nt.online.rvga(0.7),
    "ngvi_power": nt.online.ngvi(0.7, forget=nt.online.power(0.9)),
    "ngvi_walk": nt.online.ngvi(0.7, forget=nt.online.random_walk(0.1)),
    "standardised": nt.online.standardise(nt.online.ngvi(0.7)),
    "averaged": nt.online.with_average(nt.online.svb(0.1)),
    "doubling": nt.online.doubling(nt.online.sva, 0.1),
    "ewa_grid": nt.online.ewa_grid(np.linspace(-1.0, 1.0, 5)[:, None]),
}


def data(d, count=6):
    rng = np.random.default_rng(3)
    return rng.normal(size=(count, d)), np.sign(rng.normal(size=count))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("ngvi", "svb") else pytest.mark.full)
        for name in RULES
    ],
)
def test_every_rule_takes_it(x64, name):
    """In one dimension it is the mean field, whose oracles hold for it."""
    x, y = data(1)
    ends = []
    for prior in (
        Isotropic(np.array([0.2]), 0.8),
        MeanField(np.array([0.2]), np.array([0.8])),
    ):
        state, losses = nt.online.run(
            RULES[name], LOGISTIC, RULES[name].init(prior), x, y
        )
        assert int(state.count) == len(y)
        q = state.posterior
        ends.append(
            (q.loc, family_of(q).marginal_scale(q), losses.expected, losses.at_mean)
        )
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_an_aggregate_and_its_state_take_it(x64, tmp_path):
    rule = nt.online.aggregate(
        nt.online.grid(nt.online.ngvi, step_size=[0.3, 1.0], prior_scale=[0.5, 2.0]),
        nt.online.grid(nt.online.svb, step_size=[0.1]),
    )
    start = rule.init(Isotropic(jnp.zeros(3), 1.0))
    state, _ = nt.online.run(rule, LOGISTIC, start, *data(3))
    assert isinstance(state.posterior, Isotropic)
    assert (
        float(nt.online.regret(state)) <= float(nt.online.regret_bound(state)) + 1e-12
    )
    nt.online.save(tmp_path / "state.npz", state)
    jax.tree.map(
        np.testing.assert_array_equal,
        nt.online.restore(tmp_path / "state.npz", like=start),
        state,
    )


def test_halves_of_a_stream_merge(x64):
    """On rows of the identity, in which an isotropic posterior is exact."""
    rule, (x, y) = nt.online.ngvi(), (np.concatenate([np.eye(2)] * 3), np.arange(6.0))
    start = rule.init(Isotropic(jnp.zeros(2), 2.0))
    rows = np.stack(np.split(x, 3)), np.stack(np.split(y, 3))
    whole, _ = nt.online.run(rule, SQUARED, start, *rows)
    first, _ = nt.online.run(rule, SQUARED, start, *(leaf[:1] for leaf in rows))
    rest, _ = nt.online.run(rule, SQUARED, start, *(leaf[1:] for leaf in rows))
    merged = nt.online.merge(rule, first, rest)
    # Three data on each coordinate: the exact posterior.
    np.testing.assert_allclose(
        whole.posterior.scale, 1.0 / np.sqrt(0.25 + 3.0), rtol=1e-12
    )
    np.testing.assert_allclose(
        whole.posterior.loc, (y[::2].sum() / 3.25, y[1::2].sum() / 3.25), rtol=1e-12
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
        merged.posterior,
        whole.posterior,
    )


def model(x, y=None):
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, 2.0).expand([x.shape[-1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


EXPECTATION = nt.expectations.gauss_hermite(predictor="eta")


@pytest.mark.full
def test_online_vi_takes_its_guide(x64, tmp_path, key):
    x, y = np.concatenate([np.eye(2)] * 3), np.arange(6.0)
    online = nt.OnlineVI(model, AutoIsotropic, nt.online.ngvi(), EXPECTATION)
    state = online.init(key, x[:2], y[:2])
    for i in range(0, 6, 2):
        state, _ = online.update(state, x[i : i + 2], y[i : i + 2])
    np.testing.assert_allclose(state.posterior.scale, 1.0 / np.sqrt(3.25), rtol=1e-6)
    np.testing.assert_allclose(
        online.guide.median(online.get_params(state))["theta"], state.posterior.loc
    )
    np.testing.assert_allclose(
        online.get_posterior(state).variance, np.full(2, 1 / 3.25), rtol=1e-6
    )

    nt.online.save(tmp_path / "state.npz", state)
    restored = nt.online.restore(tmp_path / "state.npz", like=state)
    jax.tree.map(np.testing.assert_array_equal, restored.posterior, state.posterior)
    # Other families convert to it, and it to others.
    wide = online.init(
        key, x[:2], y[:2], prior=MeanField(jnp.zeros(2), jnp.array([3.0, 4.0]))
    )
    np.testing.assert_allclose(wide.posterior.scale, math.sqrt(12.5), rtol=1e-12)
    full = nt.OnlineVI(
        model, nt.guides.AutoOnlineMultivariateNormal, nt.online.ngvi(), EXPECTATION
    )
    start = full.init(key, x[:2], y[:2], prior=state).posterior
    assert isinstance(start, FullRank)
    np.testing.assert_allclose(start.factor, np.eye(2) / np.sqrt(3.25), rtol=1e-6)
    draws = nt.to_inference_data(online.posterior(state), x, y, num_samples=50)
    assert draws.posterior["theta"].shape == (1, 50, 2)


@pytest.mark.full
def test_fit_gaussian_takes_its_guide(x64, key):
    x, y = np.concatenate([np.eye(2)] * 3), np.arange(6.0)
    for method in (
        nt.gaussian.descent.natural_gradient(),
        nt.gaussian.descent.forward_backward(),
    ):
        fit = nt.fit_gaussian(
            key, model, AutoIsotropic, x, y, expectation=EXPECTATION, method=method
        )
        assert bool(fit.convergence.converged)
        np.testing.assert_allclose(
            fit.params["auto_scale"], 1.0 / np.sqrt(3.25), rtol=1e-3
        )
        np.testing.assert_allclose(
            fit.params["auto_loc"],
            [y[::2].sum() / 3.25, y[1::2].sum() / 3.25],
            rtol=1e-3,
        )
    draws = nt.to_inference_data(fit, num_samples=50)
    assert draws.posterior["theta"].shape == (1, 50, 2)


def test_rules_refuse_what_it_has_not():
    prior = Isotropic(jnp.zeros(2), 1.0)
    with pytest.raises(
        TypeError, match=r"ewa is exact on FullRank, got Isotropic.*or take ngvi"
    ):
        nt.online.ewa(0.5).init(prior)
    nt.gaussian.families.register(
        Isotropic, FAMILY._replace(kl_prox=None, from_root=None)
    )
    with pytest.raises(
        TypeError,
        match=r"svb does not work on Isotropic: take MeanField or FullRank\. Of the rules ngvi",
    ):
        nt.online.svb(0.1).init(prior)
    with pytest.raises(
        TypeError,
        match="aggregate does not work on Isotropic: take MeanField or FullRank",
    ):
        nt.online.aggregate(nt.online.grid(nt.online.ngvi, step_size=[0.1])).init(prior)
    nt.gaussian.families.register(Isotropic, FAMILY)


def test_what_is_registered_is_checked():
    with pytest.raises(
        TypeError,
        match=r"^a family.*a NamedTuple whose first field is loc, got <class 'dict'>",
    ):
        nt.gaussian.families.register(dict, FAMILY)
    with pytest.raises(TypeError, match="takes a Family, got function"):
        nt.gaussian.families.register(Isotropic, check)


def test_a_guide_without_a_start_says_what_it_lacks(key):
    class Unfinished(nt.guides.AutoOnlineGuide):
        pass

    def model(y=None):
        numpyro.sample(
            "y", dist.Normal(numpyro.sample("theta", dist.Normal(0.0, 1.0)), 1.0), obs=y
        )

    with pytest.raises(
        TypeError,
        match=r"Unfinished needs a method start_at\(loc, scale, moments\).*the family",
    ):
        nt.OnlineVI(model, Unfinished, nt.online.ngvi()).init(key, y=0.5)
