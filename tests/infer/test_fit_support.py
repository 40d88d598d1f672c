"""Supports of spikes and slabs: exact sizes, backward elimination, and the start of ReLU networks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import init_to_median, init_to_value
from numpyro.infer.autoguide import AutoNormal
from scipy import special, stats

import numpyro_tempered as nt
from numpyro_tempered.infer.fit_support import _switch_off
from numpyro_tempered.infer.support_prior import given_size, log_prob_of_size
from numpyro_tempered.infer.svi import finish

NOISE, INCLUSION, SLAB, ALPHA = 0.5, 0.25, 2.0, 0.5


def linear(x, y=None, probs=INCLUSION, unit=1.0):
    prior = nt.sparse.SpikeAndSlab(probs, 0.0, unit * SLAB)
    w = numpyro.sample("w", prior.expand([x.shape[1]]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


def data():
    """Six orthogonal covariates, of which the fourth is on the edge."""
    rng = np.random.default_rng(3)
    x = np.sqrt(30.0) * np.linalg.qr(rng.normal(size=(30, 6)))[0]
    y = x @ [1.5, -0.8, 0.6, 0.35, 0.05, 0.0] + NOISE * rng.normal(size=30)
    return x.astype(np.float32), y.astype(np.float32)


def best_elbo(support, log_prior):
    """Of an orthogonal design: the ELBO of the best slabs on a support, from the formula."""
    x, y = (part.astype(float) for part in data())
    part = x[:, support]
    covariance = NOISE**2 / ALPHA * np.eye(len(y)) + SLAB**2 * part @ part.T
    constant = (
        0.5 * len(y) * ((1.0 - ALPHA) * np.log(2.0 * np.pi * NOISE**2) - np.log(ALPHA))
    )
    return (
        stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)
        + constant
        + log_prior
    )


def log_independent(size):
    return size * np.log(INCLUSION) + (6 - size) * np.log1p(-INCLUSION)


# The prior of a size

PARAMS = {
    "w_auto_probs": np.array([1.0, 1.0, 1.0, 0.6, 0.1, 0.6], np.float32),
    "w_auto_loc": np.array([1.4, -0.7, 0.5, 0.2, 0.1, -0.3], np.float32),
    "w_auto_scale": np.full(6, 0.1, np.float32),
}


def slab_kl(on):
    loc, scale = (
        PARAMS[f"w_auto_{name}"][on].astype(float) for name in ("loc", "scale")
    )
    return np.sum(0.5 * (scale**2 + loc**2) / SLAB**2 - 0.5 - np.log(scale / SLAB))


@functools.cache
def given_fit():
    """A fit that no ELBO was evaluated of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpyro_tempered.infer.svi.evaluate_elbo", lambda *_, **__: None)
        tempered = nt.temper(linear, ALPHA)
        guide = nt.guides.AutoSpikeAndSlab(tempered)
        handlers.seed(guide, jax.random.key(0))(*data())
        keys = tuple(jax.random.split(jax.random.key(1)))
        return finish(
            keys,
            tempered,
            guide,
            PARAMS,
            np.zeros(1),
            data(),
            kwargs={},
            num_particles=200,
        )


def test_a_size_has_its_binomial_probability():
    sizes = np.arange(8)
    found = [log_prob_of_size(size, 7, 0.3) for size in sizes]
    np.testing.assert_allclose(found, stats.binom(7, 0.3).logpmf(sizes), rtol=1e-12)
    assert log_prob_of_size(7, 7, 1.0) == log_prob_of_size(0, 7, 0.0) == 0.0


def test_the_kl_is_that_to_a_uniform_support():
    """log of T over S, and the KLs of the slabs."""
    on = np.array([True, True, False, False, True, False])
    independent = nt.results.TemperedELBO(
        -50.0 - slab_kl(on) + log_independent(3),
        0.1,
        -100.0,
        slab_kl(on) - log_independent(3),
    )
    params = PARAMS | {"w_auto_probs": on.astype(np.float32)}
    elbo = given_size(given_fit()._replace(params=params, elbo=independent)).elbo
    assert elbo.kl == pytest.approx(np.log(special.comb(6, 3)) + slab_kl(on), rel=1e-10)
    assert elbo.value == pytest.approx(-50.0 - elbo.kl, rel=1e-10)


@pytest.mark.parametrize("size", tiered([2, 5], unit=[2]))
def test_rounding_to_a_size(key, size):
    """Equal gates are taken by the ratio of mean to scale."""
    fit = nt.sparse.round_and_refit(
        key, given_fit(), num_weights=size, num_steps=0, num_particles=200
    )
    on = np.array({2: [1, 1, 0, 0, 0, 0], 5: [1, 1, 1, 1, 0, 1]}[size], bool)
    np.testing.assert_array_equal(fit.params["w_auto_probs"], on)
    expected = np.log(special.comb(6, size)) + slab_kl(on)
    assert fit.elbo.kl == pytest.approx(expected, rel=1e-5)
    assert fit.elbo.value == pytest.approx(
        ALPHA * fit.elbo.expected_log_lik - expected, rel=1e-5
    )


def test_the_prior_of_a_size_differs_from_independent_gates_by_half_a_logarithm():
    """At λ = S/T the binomial probability is about that of a Gaussian at its centre."""
    size, total = 12, 40
    difference = -log_prob_of_size(size, total, size / total)
    assert difference == pytest.approx(
        0.5 * np.log(2.0 * np.pi * size * (1.0 - size / total)), abs=0.02
    )


def test_sizes_need_gates_that_are_equally_likely(key):
    def learned(x, y):
        linear(x, y, numpyro.sample("p", dist.Beta(1.0, 1.0)))

    for model in (lambda x, y: linear(x, y, np.array([0.1] * 5 + [0.2])), learned):
        fit = given_fit()._replace(model=nt.temper(model, ALPHA))
        with pytest.raises(
            ValueError,
            match=r"one fixed probability for all weights.*not equally likely",
        ):
            given_size(fit)
    for size in (0, 7):
        with pytest.raises(ValueError, match=r"num_weights.*be an integer from"):
            nt.sparse.round_and_refit(key, given_fit(), num_weights=size)


# Which weights go


def test_groups_go_by_what_they_gain():
    """Weights of a unit go together, and what has no effect goes first."""
    idle = np.eye(5, dtype=bool)
    idle[0, 1] = True
    loss, saved = (
        np.array([3.0, 9.0, 1.0, 8.0, 0.0]),
        np.array([4.0, 4.0, 2.0, 1.0, 3.0]),
    )
    none, on = np.zeros(5, bool), np.ones(5, bool)

    def off(most, excess=None, is_idle=none, tried=none):
        return np.flatnonzero(
            _switch_off(on, (loss, saved, idle, is_idle), most, excess, tried)
        ).tolist()

    assert off(1) == [4]
    assert off(3) == [0, 1, 4]
    assert off(4) == [0, 1, 2, 4]
    assert off(1, tried=np.eye(5, dtype=bool)[4]) == [0, 1]
    assert off(1, excess=1, tried=np.eye(5, dtype=bool)[4]) == [0]
    # No more than must go.
    assert off(4, excess=3) == [0, 1, 4]
    # Both go at no loss, and one of them alone might not.
    assert off(4, is_idle=np.array([False, False, False, True, True])) == [0, 1, 3, 4]


# Elimination


@pytest.mark.parametrize(
    ("num_weights", "unit"),
    tiered(
        [(None, 1.0), (2, 1.0), (5, 1.0), (None, 1e-3), (None, 1e3)],
        unit=[(None, 1.0), (2, 1.0)],
    ),
)
def test_the_support_is_the_best_of_all(key, num_weights, unit):
    """In whatever units coefficients are."""
    x, y = data()
    options = {
        "alpha": ALPHA,
        "num_weights": num_weights,
        "num_steps": 500,
        "unit": unit,
    }
    guide = functools.partial(nt.guides.AutoSpikeAndSlab, init_loc_fn=init_to_median)
    fit = nt.sparse.fit_support(key, linear, guide, x / np.float32(unit), y, **options)
    elbos = {}
    for gates in itertools.product([False, True], repeat=6):
        size = sum(gates)
        if num_weights in (None, size):
            prior = (
                log_independent(size)
                if num_weights is None
                else -np.log(special.comb(6, size))
            )
            elbos[gates] = best_elbo(np.array(gates), prior)
    best = max(elbos, key=elbos.get)
    np.testing.assert_array_equal(fit.params["w_auto_probs"], np.array(best, float))
    assert fit.elbo.value == pytest.approx(elbos[best], abs=5 * fit.elbo.se + 0.1)
    assert fit.elbo.value < np.logaddexp.reduce(list(elbos.values())) + 5 * fit.elbo.se
    assert fit.alpha == ALPHA


def test_a_weight_without_effect_is_off_unless_all_must_stay(key):
    """A covariate of zeros: of the others those stay that would without it."""
    x, y = data()
    x[:, 4] = 0.0
    guide = functools.partial(nt.guides.AutoSpikeAndSlab, init_loc_fn=init_to_median)
    options = {"alpha": ALPHA, "num_steps": 500, "unit": 1.0, "num_weights": None}
    fit = nt.sparse.fit_support(key, linear, guide, x, y, **options)
    np.testing.assert_array_equal(fit.params["w_auto_probs"], [1, 1, 1, 0, 0, 0])
    expected = best_elbo(np.arange(6) < 3, log_independent(3))
    assert fit.elbo.value == pytest.approx(expected, abs=5 * fit.elbo.se + 0.1)
    # With steps of no length the scales are those at the start: of posteriors given all others.
    fit = nt.sparse.fit_support(
        key, linear, guide, x, y, **options | {"num_weights": 6}, step_size=1e-9
    )
    np.testing.assert_array_equal(fit.params["w_auto_probs"], np.ones(6))
    precision = ALPHA * np.sum(np.square(x), axis=0) / NOISE**2 + SLAB**-2
    np.testing.assert_allclose(fit.params["w_auto_scale"], precision**-0.5, rtol=1e-4)


@pytest.mark.full
def test_other_sites_and_precisions(key, x64):
    def model(x, y):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        w = numpyro.sample(
            "w", nt.sparse.SpikeAndSlab(0.25, 0.0, 2.0).expand([6]).to_event(1)
        )
        shift = numpyro.sample("shift", nt.sparse.SpikeAndSlab(0.25, 0.0, 2.0))
        with numpyro.plate("n", len(x)):
            mean = numpyro.param("offset", jnp.array(2.0)) + shift + x @ w
            numpyro.sample("y", dist.Normal(mean, noise), obs=y)

    x, y = (part.astype(float) for part in data())
    fit = nt.sparse.fit_support(
        key,
        model,
        nt.guides.AutoSpikeAndSlab,
        x,
        y + 5.0,
        num_steps=1000,
        step_size=0.02,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(fit.params)} == {
        jnp.dtype("float64")
    }
    # A param has no prior, and so the site has nothing to explain.
    assert fit.params["offset"] == pytest.approx(5.0, abs=0.5)
    assert fit.params["shift_auto_probs"] == 0.0
    assert np.exp(fit.params["noise_auto_loc"]) == pytest.approx(NOISE, rel=0.3)
    assert fit.params["w_auto_probs"][:3].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.full
def test_weights_without_effect_at_the_start_are_off_and_sizes_are_exact(key):
    """Two covariates of zeros: their slabs would be as wide as the prior."""
    x, y = data()
    x = np.concatenate([x, np.zeros((30, 2), np.float32)], axis=1)
    for size in (3, 7):
        fit = nt.sparse.fit_support(
            key,
            linear,
            nt.guides.AutoSpikeAndSlab,
            x,
            y,
            num_weights=size,
            num_steps=100,
            num_particles=10,
        )
        gates = np.asarray(fit.params["w_auto_probs"])
        assert gates.sum() == size
        assert np.all(gates[:3] == 1.0)
        assert gates[6:].sum() == max(0, size - 6)


@pytest.mark.full
def test_nothing_may_remain(key):
    """Without a signal all gates go, and the ELBO is that of zeros."""
    x, _ = data()
    fit = nt.sparse.fit_support(
        key,
        linear,
        nt.guides.AutoSpikeAndSlab,
        x,
        np.zeros(30, np.float32),
        num_steps=100,
    )
    assert not np.any(fit.params["w_auto_probs"])
    expected = stats.norm(0.0, NOISE).logpdf(np.zeros(30)).sum() + log_independent(0)
    assert fit.elbo.value == pytest.approx(expected, rel=1e-5)


def test_fit_support_refuses(key):
    x, y = data()
    with pytest.raises(
        TypeError, match="takes an AutoSpikeAndSlab guide, got AutoNormal"
    ):
        nt.sparse.fit_support(key, lambda x, y: None, AutoNormal, x, y)
    with pytest.raises(
        ValueError, match=r"site 'w' starts .* of its slab away.*the prior, such as"
    ):
        nt.sparse.fit_support(key, linear, nt.guides.AutoSpikeAndSlab, x, y, unit=1e-3)
    for options in (
        {"num_steps": 0},
        {"step_size": 0.0},
        {"num_weights": 7},
        {"alpha": -1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            nt.sparse.fit_support(
                key, linear, nt.guides.AutoSpikeAndSlab, x, y, **options
            )


@pytest.mark.full
def test_the_distance_of_a_start_is_from_the_slab(key):
    x, y = data()

    def shifted(x, y):
        prior = nt.sparse.SpikeAndSlab(INCLUSION, 70.0, SLAB)
        w = numpyro.sample("w", prior.expand([6]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, NOISE).to_event(1), obs=y)

    guide = functools.partial(
        nt.guides.AutoSpikeAndSlab,
        init_loc_fn=init_to_value(values={"w": jnp.full(6, 10.0)}),
    )
    with pytest.raises(
        ValueError, match=r"site 'w' starts 30 deviations of its slab away"
    ):
        nt.sparse.fit_support(key, shifted, guide, x, y)


# Networks


def evaluate(layers, x):
    for k, (weights, biases) in enumerate(layers):
        x = x @ weights + biases
        x = np.maximum(x, 0.0) if k + 1 < len(layers) else x
    return x[:, 0]


def rough(x):
    return 0.5 * sum(2.0 ** (-k / 2) * np.cos(2.0**k * np.pi * x) for k in range(7))


@pytest.mark.parametrize("widths", [(8,), (8, 6)])
def test_the_start_fits_and_is_balanced(key, widths):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.0, 1.0, (300, 3))
    y = np.abs(x[:, 1] - 0.2) - 2.0 * np.maximum(x[:, 0], 0.3)
    layers = nt.guides.start_relu_network(key, x, y, widths)
    shapes = [(a, b) for a, b in itertools.pairwise((3, *widths, 1))]
    assert [weights.shape for weights, _ in layers] == shapes
    assert [biases.shape for _, biases in layers] == [(b,) for _, b in shapes]
    assert np.mean((evaluate(layers, x) - y) ** 2) < 0.05 * np.var(y)
    into = [np.sum(weights**2, axis=0) + biases**2 for weights, biases in layers[:-1]]
    out = [np.sum(weights**2, axis=1) for weights, _ in layers[1:]]
    np.testing.assert_allclose(np.concatenate(into), np.concatenate(out), rtol=1e-3)
    again = nt.guides.start_relu_network(key, x, y, widths)
    np.testing.assert_array_equal(again[0][0], layers[0][0])


def test_units_that_are_not_worth_their_price_are_zero(key):
    x = np.linspace(-1.0, 1.0, 200)[:, None]
    (weights, _), (last, _) = nt.guides.start_relu_network(
        key, x, np.maximum(x[:, 0], 0.0), (8,), penalty=0.1
    )
    units = np.any(weights != 0.0, axis=0)
    assert 0 < units.sum() < 5
    assert np.all(last[~units] == 0.0)


def test_the_start_refuses(key):
    x, y = np.zeros((5, 2)), np.zeros(5)
    for args, options, message in (
        ((x[:, 0], y), {}, "shape"),
        ((x, y[:4]), {}, "shape"),
        ((x, np.full(5, np.nan)), {}, "finite"),
        ((x, y, ()), {}, "widths"),
        ((x, y, (0,)), {}, "widths"),
        ((x, y, (8,)), {"num_candidates": 7}, "num_candidates"),
        ((x, y), {"penalty": -1.0}, "penalty"),
    ):
        with pytest.raises(ValueError, match=message):
            nt.guides.start_relu_network(key, *args, **options)


@pytest.mark.full
def test_a_rough_network_is_beyond_relaxed_gates(key):
    """Relaxed gates from a random start lose what is rough, which no training afterwards brings back."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1.0, 1.0, (400, 1)).astype(np.float32)
    y = (rough(x[:, 0]) + 0.1 * rng.normal(size=400)).astype(np.float32)

    def model(x, y):
        theta = numpyro.sample(
            "theta", nt.sparse.SpikeAndSlab(0.5).expand([49]).to_event(1)
        )
        hidden = jax.nn.relu(x * theta[:16] + theta[16:32])
        with numpyro.plate("n", len(x)):
            numpyro.sample(
                "y", dist.Normal(hidden @ theta[32:48] + theta[48], 0.1), obs=y
            )

    def guide(theta):
        return functools.partial(
            nt.guides.AutoSpikeAndSlab,
            init_loc_fn=init_to_value(
                values={"theta": jnp.asarray(theta, jnp.float32)}
            ),
            init_probs=0.9,
            init_scale=0.02,
        )

    at_random = np.concatenate(
        [
            1.4 * rng.normal(size=16),
            rng.uniform(-1.0, 1.0, 16),
            0.35 * rng.normal(size=17),
        ]
    )
    relaxed = nt.fit_svi(
        key,
        model,
        guide(at_random),
        x,
        y,
        alpha=0.5,
        optim=numpyro.optim.Adam(0.02),
        num_particles=100,
    )
    relaxed = nt.sparse.round_and_refit(key, relaxed, num_particles=100)
    layers = nt.guides.start_relu_network(key, x, y, (16,))
    start = np.concatenate(
        [np.concatenate([weights.ravel(), biases]) for weights, biases in layers]
    )
    fit = nt.sparse.fit_support(
        key, model, guide(start), x, y, alpha=0.5, num_steps=300, num_particles=100
    )
    assert fit.elbo.value > relaxed.elbo.value + 50.0
