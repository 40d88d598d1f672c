"""SpikeAndSlab as prior and factor, AutoSpikeAndSlab, and the honesty of what is called an ELBO."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoNormal,
)
from numpyro.optim import Adam
from scipy import optimize, special, stats

import numpyro_tempered as nt
from numpyro_tempered.infer.distributions import SpikeAndSlab
from numpyro_tempered.infer.elbo import evaluate_elbo
from numpyro_tempered.infer.guides import AutoSpikeAndSlab
from numpyro_tempered.infer.online_prior import of_fit
from numpyro_tempered.infer.svi import finish

# The linear model of most tests: y = x w + noise of this scale, and its prior.
NOISE, INCLUSION, SLAB = 1.0, 0.25, 1.0


def linear(x, y=None):
    w = numpyro.sample(
        "w", SpikeAndSlab(INCLUSION, 0.0, SLAB).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


def log_evidence(x, y, alpha=1.0):
    """log of the integral of L^alpha against the prior, by enumeration of the gates."""
    n, d = x.shape
    terms = []
    for gates in itertools.product([0, 1], repeat=d):
        part = x[:, np.array(gates) == 1]
        # L^alpha is a Normal density in y of variance noise²/alpha, but for its constant.
        covariance = NOISE**2 / alpha * np.eye(n) + SLAB**2 * part @ part.T
        log_lik = stats.multivariate_normal(np.zeros(n), covariance).logpdf(y)
        constant = (
            0.5 * n * ((1.0 - alpha) * np.log(2.0 * np.pi * NOISE**2) - np.log(alpha))
        )
        k = sum(gates)
        terms.append(
            log_lik + constant + k * np.log(INCLUSION) + (d - k) * np.log1p(-INCLUSION)
        )
    return np.logaddexp.reduce(terms)


def correlated_data():
    """Eight covariates with correlation a half, of which three count: 1, -.7 and .4."""
    rng = np.random.default_rng(0)
    x = np.sqrt(0.5) * (rng.normal(size=(40, 1)) + rng.normal(size=(40, 8)))
    y = x @ np.r_[1.0, -0.7, 0.4, np.zeros(5)] + rng.normal(size=40)
    return x, y


# The distribution


@jax.jit
def log_prob(probs, value):
    return SpikeAndSlab(probs, 0.5, 2.0).log_prob(value)


@pytest.mark.parametrize("probs", [0.0, 0.3, 1.0])
def test_log_prob_is_of_an_atom_and_a_density(x64, probs):
    nodes, weights = special.roots_legendre(300)
    at = np.exp(log_prob(probs, np.append(20.0 * nodes, 0.0)))
    density, atom = 20.0 * np.sum(weights * at[:-1]), at[-1]
    assert (atom, density) == pytest.approx((1.0 - probs, probs), abs=1e-10)


def test_log_prob_has_no_nan_gradient():
    @jax.jit
    @jax.vmap
    def grads(value, probs):
        return jax.grad(lambda *p: SpikeAndSlab(*p).log_prob(value), argnums=(0, 1, 2))(
            probs, 0.5, 2.0
        )

    cases = np.array(list(itertools.product([0.0, 1.0], [0.0, 0.3, 1.0])), np.float32)
    assert not np.any(np.isnan(grads(*cases.T)))


def test_draws_are_zeros_and_normals(key):
    draws = np.asarray(SpikeAndSlab(0.3, 2.0, 0.5).sample(key, (20_000,)))
    on = draws[draws != 0.0]
    assert draws.dtype == jnp.result_type(float)
    assert not np.any(np.signbit(draws[draws == 0.0]))
    assert np.mean(draws != 0.0) == pytest.approx(
        0.3, abs=5 * np.sqrt(0.3 * 0.7 / 20_000)
    )
    assert np.mean(on) == pytest.approx(2.0, abs=5 * 0.5 / np.sqrt(on.size))
    assert np.std(on) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(2 * on.size))


def test_moments_and_quantiles_are_those_of_draws(key):
    levels = np.array([0.05, 0.3, 0.5, 0.75, 0.95], np.float32)

    @jax.jit
    def run(*params):
        q = SpikeAndSlab(*params)
        return q.sample(key, (40_000,)), q.mean, q.variance, q.icdf(levels[:, None])

    params = np.array([[0.3, 0.8, 0.6], [2.0, -1.0, 0.2], [0.5, 1.0, 0.4]], np.float32)
    draws, mean, variance, quantiles = map(np.asarray, run(*params))
    draws = draws.astype(float)
    se = draws.std(axis=0) / 200.0
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5 * se)
    np.testing.assert_allclose(draws.var(axis=0), variance, rtol=0.05)
    for level, at in zip(levels, quantiles, strict=True):
        below, upto = np.mean(draws < at, axis=0), np.mean(draws <= at, axis=0)
        assert np.all(below <= level + 0.013)
        assert np.all(upto >= level - 0.013)


def test_quantile_and_distribution_function_agree(x64):
    levels = np.linspace(0.01, 0.99, 99)[:, None]

    @jax.jit
    def run(probs):
        q = SpikeAndSlab(probs, -0.4, 0.5)
        at = q.icdf(levels)
        return at, q.cdf(at)

    at, found = map(np.asarray, run(np.array([0.0, 0.3, 0.9, 1.0])))
    assert np.all(found >= levels - 1e-12)
    assert np.all((at == 0.0) | (np.abs(found - levels) < 1e-12))
    assert np.all(at[:, 0] == 0.0)


def test_shapes_under_expand_jit_and_vmap(key):
    q = SpikeAndSlab(np.array([0.2, 0.8], np.float32), 0.0, np.ones((3, 1), np.float32))
    assert q.batch_shape == (3, 2)
    event = q.expand([4, 3, 2]).to_event(2)
    assert jax.eval_shape(lambda key: event.sample(key, (5,)), key).shape == (
        5,
        4,
        3,
        2,
    )
    assert jax.eval_shape(event.log_prob, np.zeros((4, 3, 2))).shape == (4,)
    keys = jax.random.split(key, 3)

    def draw(key, probs, temperature):
        return SpikeAndSlab(probs, 0.0, 1.0, temperature=temperature).sample(key)

    probs = np.array([0.1, 0.5, 0.9])
    assert jax.eval_shape(
        jax.jit(jax.vmap(draw, (0, 0, None))), keys, probs, 0.5
    ).shape == (3,)
    again = jax.jit(lambda q: q)(q)
    sample = jax.jit(lambda q: q.sample(key))
    np.testing.assert_array_equal(sample(again), jax.jit(lambda: q.sample(key))())


@pytest.mark.full
def test_draws_under_expand_jit_and_vmap(key):
    q = SpikeAndSlab(jnp.array([0.2, 0.8]), 0.0, jnp.ones((3, 1)))
    event = q.expand([4, 3, 2]).to_event(2)
    assert event.sample(key, (5,)).shape == (5, 4, 3, 2)
    assert event.log_prob(jnp.zeros((4, 3, 2))).shape == (4,)
    keys = jax.random.split(key, 3)

    def draw(key, probs, temperature):
        return SpikeAndSlab(probs, 0.0, 1.0, temperature=temperature).sample(key)

    assert jax.jit(jax.vmap(draw, (0, 0, None)))(
        keys, jnp.array([0.1, 0.5, 0.9]), 0.5
    ).shape == (3,)
    again = jax.jit(lambda q: q)(q)
    np.testing.assert_array_equal(again.sample(key), q.sample(key))


def test_kl_to_and_from_normals(x64):
    @jax.jit
    def run(loc, probs):
        prior, normal = SpikeAndSlab(0.25, 0.0, 2.0), dist.Normal(loc, 0.5)
        return (
            dist.kl_divergence(normal, dist.Normal(0.0, 2.0)),
            dist.kl_divergence(normal, prior),
            dist.kl_divergence(normal.to_event(1), prior.expand([2]).to_event(1)),
            dist.kl_divergence(SpikeAndSlab(probs, 0.0, 1.0), dist.Normal(0.0, 1.0)),
        )

    plain, to_prior, summed, from_atoms = map(
        np.asarray, run(np.array([0.3, -1.0]), np.array([0.9, 1.0]))
    )
    expected = plain - np.log(0.25)
    np.testing.assert_allclose(to_prior, expected, rtol=1e-12)
    np.testing.assert_allclose(summed, expected.sum(), rtol=1e-12)
    # An atom where the other has none.
    np.testing.assert_array_equal(from_atoms, [np.inf, 0.0])


def test_kl_is_the_mean_log_ratio_of_draws(key):
    @jax.jit
    def run(key):
        q, p = SpikeAndSlab(0.6, 1.0, 0.5), SpikeAndSlab(0.2, 0.0, 2.0)
        draws = q.sample(key, (50_000,))
        return q.log_prob(draws) - p.log_prob(draws), dist.kl_divergence(q, p)

    ratio, found = map(np.asarray, run(key))
    assert np.mean(ratio) == pytest.approx(
        float(found), abs=5 * float(np.std(ratio)) / 223.0
    )


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_relaxed_gates_are_beyond_a_half_as_often_as_they_are_on(key, temperature):
    draws = np.asarray(
        SpikeAndSlab(0.3, 1.0, 1e-6, temperature=temperature).sample(key, (20_000,))
    )
    assert np.mean(draws > 0.5) == pytest.approx(
        0.3, abs=5 * np.sqrt(0.3 * 0.7 / 20_000)
    )
    assert np.all((draws > -1e-4) & (draws < 1.0001))


def test_relaxed_draws_have_the_derivatives_of_differences(key, x64):
    def draw(theta):
        return SpikeAndSlab(*theta, temperature=0.7).sample(key)

    theta = np.array([0.3, 1.0, 0.5])
    each = jax.jit(jax.vmap(jax.value_and_grad(draw)))
    steps = 1e-6 * np.vstack([np.eye(3), -np.eye(3), np.zeros(3)])
    values, grads = map(np.asarray, each(theta + steps))
    np.testing.assert_allclose(grads[-1], (values[:3] - values[3:6]) / 2e-6, rtol=1e-6)


def test_saturated_gates_have_finite_gradients(key):
    """Through NumPyro's own bijection of the unit interval, in draw and KL."""
    to_unit = dist.biject_to(dist.constraints.unit_interval)

    def objective(logit):
        q = SpikeAndSlab(to_unit(logit), 1.0, 0.5, temperature=0.1)
        return q.sample(key) + dist.kl_divergence(q, SpikeAndSlab(0.1, 0.0, 1.0))

    logits = np.array([-200.0, -20.0, 20.0, 200.0], np.float32)
    values, grads = jax.jit(jax.vmap(jax.value_and_grad(objective)))(logits)
    assert np.all(np.isfinite(values))
    assert np.all(np.isfinite(grads))


def test_relaxed_gates_of_0_and_1_are_exact(key):
    probs = np.array([0.0, 1.0], np.float32)
    draws = jax.jit(
        lambda key: SpikeAndSlab(probs, 2.0, 1e-6, temperature=0.5).sample(key, (50,))
    )(key)
    np.testing.assert_allclose(draws, np.broadcast_to([0.0, 2.0], (50, 2)), rtol=1e-4)


def test_a_relaxed_distribution_has_no_density():
    q = SpikeAndSlab(0.5, 0.0, 1.0, temperature=0.5)
    for refused in (
        lambda: q.log_prob(0.3),
        lambda: q.mean,
        lambda: q.variance,
        lambda: q.cdf(0.0),
        lambda: q.icdf(0.5),
        lambda: dist.kl_divergence(SpikeAndSlab(0.5, 0.0, 1.0), q),
    ):
        with pytest.raises(
            ValueError,
            match=r"^a SpikeAndSlab.*relaxation without a.*with exact gates, by",
        ):
            refused()
    with pytest.raises(
        ValueError, match=r"temperature must be positive.*for exact gates, got"
    ):
        SpikeAndSlab(0.5, 0.0, 1.0, temperature=0.0)
    with pytest.raises(
        ValueError, match=r"^SpikeAndSlab distribution got.*invalid probs"
    ):
        SpikeAndSlab(1.5, 0.0, 1.0, validate_args=True)


def test_exact_gates_have_no_derivative_in_probs(key):
    def draw(probs, loc):
        return SpikeAndSlab(probs, loc, 1.0).sample(key, (20,)).sum()

    @jax.jit
    def run(probs, loc):
        # Constant gates leave the rest of the gradient alone.
        constant = jax.grad(lambda loc: draw(1.0, loc))(loc)
        draws = SpikeAndSlab(probs, loc, 1.0).sample(key, (20,))
        return *jax.grad(draw, argnums=(0, 1))(probs, loc), draws, constant

    by_probs, by_loc, draws, constant = run(0.5, 0.0)
    assert np.isnan(by_probs)
    assert by_loc == np.sum(np.asarray(draws) != 0.0)
    assert np.isfinite(constant)


# Factors of the linear model, and a guide that is set up.
GIVEN = {
    "w_auto_probs": np.array([0.9, 0.7, 0.6, 0.1, 0.2, 0.3, 0.1, 0.4], np.float32),
    "w_auto_loc": np.array([0.9, -0.6, 0.4, 0.0, 0.1, -0.1, 0.0, 0.2], np.float32),
    "w_auto_scale": np.linspace(0.1, 0.4, 8, dtype=np.float32),
}


@functools.cache
def sparse_guide(temperature, model=linear):
    guide = AutoSpikeAndSlab(model, temperature=temperature)
    handlers.seed(guide, jax.random.key(0))(*correlated_data())
    return guide


# Algorithms that would lose the atom

REFUSED = {
    "NUTS": lambda x, y: MCMC(NUTS(linear), num_warmup=1, num_samples=1).run(
        jax.random.key(0), x, y
    ),
    **{
        guide.__name__: lambda x, y, guide=guide: nt.fit_svi(
            jax.random.key(0),
            linear,
            guide,
            x,
            y,
            num_steps=1,
            optim=numpyro.optim.Adam(0.05),
        )
        for guide in (
            AutoNormal,
            AutoDiagonalNormal,
            AutoDelta,
            AutoLaplaceApproximation,
            nt.guides.AutoOnlineDiagonalNormal,
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_density_refuses_the_prior(name):
    with pytest.raises(
        ValueError,
        match=r"^a latent.*has an atom at 0.*AutoSpikeAndSlab.*times a Normal site",
    ):
        REFUSED[name](*correlated_data())


@pytest.mark.full
@pytest.mark.parametrize(
    "loss", [Trace_ELBO(), RenyiELBO(num_particles=2), TraceGraph_ELBO()], ids=type
)
def test_losses_take_no_relaxed_density(loss):
    x, y = correlated_data()
    guide = sparse_guide(0.5)
    with pytest.raises(ValueError, match="TraceMeanField_ELBO"):
        jax.eval_shape(
            lambda key: loss.loss(key, GIVEN, linear, guide, x, y), jax.random.key(0)
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "loss", [Trace_ELBO(), RenyiELBO(num_particles=2), TraceGraph_ELBO()], ids=type
)
def test_losses_that_need_a_relaxed_density_raise(loss):
    x, y = correlated_data()
    svi = SVI(linear, AutoSpikeAndSlab(linear, temperature=0.5), Adam(0.01), loss)
    with pytest.raises(ValueError, match="TraceMeanField_ELBO"):
        svi.run(jax.random.key(0), 1, x, y, progress_bar=False)
    if isinstance(loss, Trace_ELBO):
        with pytest.raises(ValueError, match="TraceMeanField_ELBO"):
            nt.fit_svi(
                jax.random.key(0),
                linear,
                AutoSpikeAndSlab,
                x,
                y,
                num_steps=1,
                loss=loss,
            )


@pytest.mark.full
def test_scores_fit_exact_gates():
    """TraceGraph_ELBO takes the gradient that draws do not have; other losses with exact gates end in NaN."""
    x, y = correlated_data()

    def params(loss):
        svi = SVI(linear, AutoSpikeAndSlab(linear, temperature=None), Adam(0.01), loss)
        return svi.run(jax.random.key(0), 2, x, y, progress_bar=False).params[
            "w_auto_probs"
        ]

    scored = params(TraceGraph_ELBO())
    assert jnp.all(jnp.isfinite(scored))
    assert jnp.all(scored != 0.5)
    assert jnp.all(jnp.isnan(params(TraceMeanField_ELBO())))


# The guide


def hierarchical(x, groups, y=None, subsample=None):
    """Sites of every kind: scalar, expanded, in a plate, constrained, and a deterministic one."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    bias = numpyro.sample("bias", SpikeAndSlab(0.5, 0.0, 1.0))
    w = numpyro.sample(
        "w", SpikeAndSlab(jnp.array([0.1, 0.9]), 0.0, tau).expand([3, 2]).to_event(2)
    )
    with numpyro.plate("groups", 4, subsample_size=subsample) as chosen:
        u = numpyro.sample("u", SpikeAndSlab(0.3, 0.0, 1.0))
        v = numpyro.sample("v", SpikeAndSlab(0.3, 0.0, 1.0).expand([2]).to_event(1))
    effect = numpyro.deterministic("effect", u + v.sum(-1))
    mean = bias + (x @ w).sum(-1)
    if subsample is None:
        mean = mean + effect[groups]
    else:
        mean = mean + effect[0]
        assert chosen.shape == (subsample,)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def hierarchical_data():
    x = jax.random.normal(jax.random.key(1), (12, 3))
    return x, jnp.arange(12) % 4, x[:, 0]


@pytest.mark.full
def test_every_kind_of_site_has_its_factor(key):
    data = hierarchical_data()
    guide = AutoSpikeAndSlab(hierarchical, prefix="q", init_probs=0.7, init_scale=0.2)
    trace = handlers.trace(handlers.seed(guide, key)).get_trace(*data)
    shapes = {"tau": (), "bias": (), "w": (3, 2), "u": (4,), "v": (4, 2)}
    assert [k for k, site in trace.items() if site["type"] == "sample"] == list(shapes)
    assert guide.sparse_sites == ("bias", "w", "u", "v")
    for name, shape in shapes.items():
        assert (
            trace[name]["value"].shape == trace[f"{name}_q_loc"]["value"].shape == shape
        )
    assert {k for k in trace if k.endswith("_probs")} == {
        f"{k}_q_probs" for k in guide.sparse_sites
    }
    assert jnp.all(trace["w_q_probs"]["value"] == 0.7)
    assert jnp.all(trace["w_q_scale"]["value"] == 0.2)
    assert trace["tau"]["value"] > 0
    params = {k: site["value"] for k, site in trace.items() if site["type"] == "param"}
    draws = guide.sample_posterior(key, params, sample_shape=(7,))
    assert {k: v.shape[1:] for k, v in draws.items()} == {**shapes, "effect": (4,)}
    np.testing.assert_allclose(
        draws["effect"], draws["u"] + draws["v"].sum(-1), rtol=1e-6
    )
    assert (
        set(guide.median(params))
        == set(guide.quantiles(params, [0.1, 0.9]))
        == {*shapes, "effect"}
    )
    assert guide.quantiles(params, [0.1, 0.9])["w"].shape == (2, 3, 2)


@pytest.mark.full
def test_kl_site_by_site_is_that_of_the_formula(key, x64):
    data = hierarchical_data()
    guide = AutoSpikeAndSlab(hierarchical).hard()
    trace = handlers.trace(handlers.seed(guide, key)).get_trace(*data)
    params = {k: site["value"] for k, site in trace.items() if site["type"] == "param"}
    params |= {
        k: jnp.linspace(0.2, 0.9, v.size).reshape(v.shape)
        for k, v in params.items()
        if "probs" in k
    }
    parts = TraceMeanField_ELBO(sum_sites=False).loss(
        key, params, nt.temper(hierarchical, 0.5), guide, *data
    )

    def kl(name, prior_probs, prior_scale):
        probs, loc, scale = (
            np.asarray(params[f"{name}_auto_{field}"])
            for field in ("probs", "loc", "scale")
        )
        gate = probs * np.log(probs / prior_probs) + (1 - probs) * np.log(
            (1 - probs) / (1 - prior_probs)
        )
        ratio = scale / prior_scale
        return np.sum(
            gate
            + probs
            * 0.5
            * (ratio**2 + (loc / prior_scale) ** 2 - 1.0 - 2.0 * np.log(ratio))
        )

    # The same split of the key as NumPyro's, for the draw of tau that w's prior depends on.
    drawn = handlers.trace(
        handlers.substitute(handlers.seed(guide, jax.random.split(key)[1]), params)
    )
    tau = float(drawn.get_trace(*data)["tau"]["value"])
    expected = {
        "bias": (0.5, 1.0),
        "w": (np.array([0.1, 0.9]), tau),
        "u": (0.3, 1.0),
        "v": (0.3, 1.0),
    }
    for name, prior in expected.items():
        assert parts[name] == pytest.approx(kl(name, *prior), rel=1e-10), name


@pytest.mark.full
def test_a_subsampling_plate_keeps_factors_for_all(key):
    x, groups, y = hierarchical_data()
    svi = SVI(
        hierarchical, AutoSpikeAndSlab(hierarchical), Adam(0.01), TraceMeanField_ELBO()
    )
    found = svi.run(key, 3, x, groups, y, subsample=2, progress_bar=False)
    assert found.params["u_auto_probs"].shape == (4,)
    assert found.params["v_auto_loc"].shape == (4, 2)
    assert jnp.all(jnp.isfinite(found.losses))


@pytest.mark.full
def test_each_draw_counts_as_a_step_of_the_schedule(key):
    x, y = correlated_data()
    seen = []
    guide = AutoSpikeAndSlab(linear, temperature=lambda step: seen.append(step) or 1.0)
    handlers.seed(guide, key)(x, y)
    at_four = handlers.substitute(
        handlers.seed(guide, key), data={"auto_step": {"step": 4.0}}
    )
    trace = handlers.trace(at_four).get_trace(x, y)
    assert seen[-1] == 4.0
    assert trace["auto_step"]["value"] == {"step": 5.0}


@pytest.mark.full
@pytest.mark.parametrize("outer", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_schedule_counts_the_steps_of_stock_svi(key, outer):
    x, y = correlated_data()
    seen = []

    def schedule(step):
        jax.debug.callback(lambda s: seen.append(float(s)), step, ordered=True)
        return optax.exponential_decay(1.0, 10, 0.5)(step)

    svi = SVI(
        linear,
        AutoSpikeAndSlab(linear, temperature=schedule),
        Adam(0.01),
        TraceMeanField_ELBO(),
    )
    state = svi.init(key, x, y)
    start = float(state.mutable_state["auto_step"]["step"])
    update = outer(svi.update)
    for _ in range(3):
        state, _ = update(state, x, y)
    jax.effects_barrier()
    assert float(state.mutable_state["auto_step"]["step"]) == start + 3
    assert seen[0] == 0.0
    assert seen[-3:] == [start, start + 1, start + 2]


@pytest.mark.full
def test_a_number_as_temperature_takes_more_particles(key):
    x, y = correlated_data()
    fit = nt.fit_svi(
        key,
        linear,
        lambda m: AutoSpikeAndSlab(m, temperature=0.3),
        x,
        y,
        num_steps=5,
        loss=TraceMeanField_ELBO(num_particles=4),
    )
    assert fit.losses.shape == (5,)
    with pytest.raises(ValueError, match="num_particles = 4"):
        nt.fit_svi(
            key,
            linear,
            AutoSpikeAndSlab,
            x,
            y,
            num_steps=5,
            loss=TraceMeanField_ELBO(num_particles=4),
        )


def test_set_up_refuses_what_it_cannot_fit(key):
    def run(prior):
        def model():
            numpyro.sample("y", dist.Normal(numpyro.sample("w", prior), 1.0), obs=1.0)

        return handlers.seed(AutoSpikeAndSlab(model), key)()

    with pytest.raises(
        ValueError,
        match=r"^the model.*no latent site with a SpikeAndSlab prior.*take AutoNormal",
    ):
        run(dist.Normal(0.0, 1.0))
    with pytest.raises(
        ValueError,
        match=r"^the SpikeAndSlab prior.*site 'w' is masked.*holds no such site",
    ):
        run(SpikeAndSlab(0.5, 0.0, 1.0).mask(jnp.array(True)))
    with pytest.raises(
        ValueError,
        match=r"^the SpikeAndSlab.*site 'w' has a temperature.*gates. Leave it out",
    ):
        run(SpikeAndSlab(0.5, 0.0, 1.0, temperature=0.5))
    for options, message in (
        ({"init_probs": 1.0}, "init_probs"),
        ({"temperature": -1.0}, "temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoSpikeAndSlab(linear, **options)
    x, y = correlated_data()
    with pytest.raises(
        ValueError, match=r"exact gates, which have no derivative.*to fit it, or"
    ):
        nt.fit_svi(key, linear, lambda m: AutoSpikeAndSlab(m).hard(), x, y)


# Objectives and bounds


@pytest.fixture(scope="module")
def given_fit():
    """What a fit to these factors holds."""
    args = correlated_data()
    tempered = nt.temper(linear, 1.0)
    guide = sparse_guide(1.0, tempered)
    keys = jax.random.split(jax.random.key(0))
    return finish(
        tuple(keys),
        tempered,
        guide,
        GIVEN,
        np.zeros(1),
        args,
        kwargs={},
        num_particles=1000,
    )


@pytest.fixture(scope="module")
def rounded(given_fit):
    """Without its ELBO."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpyro_tempered.infer.svi.evaluate_elbo", lambda *_, **__: None)
        return nt.sparse.round_and_refit(jax.random.key(1), given_fit, num_steps=0)


@pytest.fixture(scope="module")
def relaxed_fit():
    """At temperature 1, where the relaxation is loosest."""
    x, y = correlated_data()
    return nt.fit_svi(
        jax.random.key(0),
        linear,
        lambda m: AutoSpikeAndSlab(m, temperature=1.0),
        x,
        y,
        num_steps=3000,
    )


@pytest.mark.full
def test_the_relaxed_objective_exceeds_the_evidence_and_no_elbo_does(relaxed_fit):
    log_z = log_evidence(*correlated_data())
    tail = -np.asarray(relaxed_fit.losses[-1000:], np.float64)
    # Its excess is beyond doubt: steps are nearly independent once the step size has fallen.
    assert tail.mean() - 5 * tail.std() / np.sqrt(1000) > log_z + 0.5
    rounded = nt.sparse.round_and_refit(jax.random.key(1), relaxed_fit)
    for elbo in (relaxed_fit.elbo, rounded.elbo):
        assert elbo.value < log_z + 5 * elbo.se
    assert relaxed_fit.elbo.value < tail.mean() - 1.0


def test_what_is_kept_has_exact_gates(given_fit):
    assert given_fit.guide.temperature is None
    draws = given_fit.guide.sample_posterior(
        jax.random.key(1), given_fit.params, sample_shape=(200,)
    )
    assert 0.1 < np.mean(np.asarray(draws["w"]) == 0.0) < 0.9


@pytest.mark.full
def test_what_a_fit_keeps_has_exact_gates(relaxed_fit):
    x, y = relaxed_fit.args
    assert relaxed_fit.guide.temperature is None
    for draws in (
        Predictive(relaxed_fit.guide, params=relaxed_fit.params, num_samples=200)(
            jax.random.key(0), x, y
        ),
        relaxed_fit.guide.sample_posterior(
            jax.random.key(1), relaxed_fit.params, sample_shape=(200,)
        ),
    ):
        assert 0.1 < jnp.mean(draws["w"] == 0.0) < 0.9
    data = nt.to_inference_data(relaxed_fit, num_samples=50)
    assert np.any(data["posterior"]["w"].values == 0.0)
    predictive = Predictive(
        linear, guide=relaxed_fit.guide, params=relaxed_fit.params, num_samples=10
    )
    assert predictive(jax.random.key(2), x)["y"].shape == (10, 40)


def exact_elbo(params, x, y, alpha=1.0, site="w"):
    """The ELBO of the linear model in closed form, from the first two moments of the factors."""
    probs, loc, scale = (
        np.asarray(params[f"{site}_auto_{field}"], np.float64)
        for field in ("probs", "loc", "scale")
    )
    mean, variance = probs * loc, probs * scale**2 + probs * (1 - probs) * loc**2
    squares = np.sum((y - x @ mean) ** 2) + np.sum(variance * np.sum(x**2, axis=0))
    expected_log_lik = (
        -0.5 * len(y) * np.log(2.0 * np.pi * NOISE**2) - 0.5 * squares / NOISE**2
    )
    gate = special.rel_entr(probs, INCLUSION) + special.rel_entr(
        1.0 - probs, 1.0 - INCLUSION
    )
    slab = 0.5 * ((scale / SLAB) ** 2 + (loc / SLAB) ** 2 - 1.0) - np.log(scale / SLAB)
    return alpha * expected_log_lik - np.sum(gate + probs * slab)


@pytest.mark.parametrize("refitted", tiered([False, True], unit=[False]))
def test_the_elbo_of_what_is_kept_is_that_in_closed_form(given_fit, refitted):
    fit = (
        nt.sparse.round_and_refit(jax.random.key(1), given_fit, num_steps=0)
        if refitted
        else given_fit
    )
    assert fit.elbo.value == pytest.approx(
        exact_elbo(fit.params, *correlated_data()), abs=5 * fit.elbo.se
    )
    assert fit.elbo.value < log_evidence(*correlated_data()) + 5 * fit.elbo.se


@pytest.mark.full
def test_the_elbo_of_a_fit_is_that_in_closed_form(relaxed_fit):
    for fit in (
        relaxed_fit,
        nt.sparse.round_and_refit(jax.random.key(1), relaxed_fit, num_steps=0),
    ):
        assert fit.elbo.value == pytest.approx(
            exact_elbo(fit.params, *correlated_data()), abs=5 * fit.elbo.se
        )


def sharp(model):
    """Little bias, and much noise, which many particles take out."""
    return AutoSpikeAndSlab(model, temperature=0.05)


@pytest.mark.full
def test_sharp_gates_reach_an_optimum_of_the_elbo(key):
    x, y = correlated_data()
    fit = nt.fit_svi(
        key, linear, sharp, x, y, loss=TraceMeanField_ELBO(num_particles=50)
    )

    def negative(flat):
        probs, loc, log_scale = np.split(flat, 3)
        params = {
            "w_auto_probs": special.expit(probs),
            "w_auto_loc": loc,
            "w_auto_scale": np.exp(log_scale),
        }
        return -exact_elbo(params, x, y)

    found = {k: np.asarray(v, np.float64) for k, v in fit.params.items()}
    start = [
        special.logit(found["w_auto_probs"]),
        found["w_auto_loc"],
        np.log(found["w_auto_scale"]),
    ]
    best = -optimize.minimize(negative, np.concatenate(start), method="BFGS").fun
    assert best - 0.1 < exact_elbo(fit.params, x, y) <= best
    assert best < log_evidence(x, y)


def orthogonal_data(alpha):
    """An orthogonal design, the tempered posterior in closed form, and the log evidence."""
    n, w = 32, np.array([1.5, 0.6, 0.35, 0.2, 0.0])
    rng = np.random.default_rng(3)
    x = np.sqrt(n) * np.linalg.qr(rng.normal(size=(n, 5)))[0]
    y = x @ w + rng.normal(size=n)
    precision = alpha * n / NOISE**2 + 1.0 / SLAB**2
    loc = alpha * x.T @ y / NOISE**2 / precision
    log_odds = (
        np.log(INCLUSION / (1 - INCLUSION))
        - np.log(SLAB)
        - 0.5 * np.log(precision)
        + 0.5 * precision * loc**2
    )
    return x, y, 1.0 / (1.0 + np.exp(-log_odds)), loc, np.full(5, precision**-0.5)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_elbo_of_the_exact_posterior_is_the_evidence(key, x64, alpha):
    x, y, probs, loc, scale = orthogonal_data(alpha)
    tempered = nt.temper(linear, alpha)
    guide = AutoSpikeAndSlab(tempered).hard()
    handlers.seed(guide, key)(x, y)
    params = {
        "w_auto_probs": jnp.array(probs),
        "w_auto_loc": jnp.array(loc),
        "w_auto_scale": jnp.array(scale),
    }
    found = evaluate_elbo(key, tempered, guide, params, (x, y), {}, num_particles=4000)
    assert found.value == pytest.approx(log_evidence(x, y, alpha), abs=5 * found.se)
    assert found.value == pytest.approx(
        alpha * found.expected_log_lik - found.kl, rel=1e-10
    )
    # No alpha in the KL.
    prior = SpikeAndSlab(INCLUSION, 0.0, SLAB)
    assert found.kl == pytest.approx(
        float(dist.kl_divergence(SpikeAndSlab(probs, loc, scale), prior).sum()),
        rel=1e-10,
    )


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_fit_of_an_orthogonal_design_is_the_closed_form(key, alpha):
    x, y, probs, loc, scale = orthogonal_data(alpha)
    fit = nt.fit_svi(
        key,
        linear,
        sharp,
        x,
        y,
        alpha=alpha,
        loss=TraceMeanField_ELBO(num_particles=50),
    )
    assert fit.alpha == alpha
    np.testing.assert_allclose(fit.params["w_auto_probs"], probs, atol=0.1)
    on = probs > 0.5
    np.testing.assert_allclose(
        fit.params["w_auto_loc"][on], loc[on], atol=0.5 * scale[0]
    )
    np.testing.assert_allclose(fit.params["w_auto_scale"][on], scale[on], rtol=0.2)


# Round and refit


def test_rounded_gates_are_those_beyond_the_threshold(given_fit, rounded):
    np.testing.assert_array_equal(
        rounded.params["w_auto_probs"], GIVEN["w_auto_probs"] >= 0.5
    )
    assert rounded.losses.size == 0
    np.testing.assert_array_equal(rounded.params["w_auto_loc"], GIVEN["w_auto_loc"])
    draws = rounded.guide.sample_posterior(
        jax.random.key(0), rounded.params, sample_shape=(200,)
    )["w"]
    np.testing.assert_array_equal(
        np.all(np.asarray(draws) == 0.0, axis=0), GIVEN["w_auto_probs"] < 0.5
    )


@pytest.mark.full
def test_rounded_gates_and_losses_that_are_elbos(relaxed_fit):
    rounded = nt.sparse.round_and_refit(jax.random.key(1), relaxed_fit, num_steps=2000)
    probs = relaxed_fit.params["w_auto_probs"]
    assert jnp.array_equal(
        rounded.params["w_auto_probs"], (probs >= 0.5).astype(probs.dtype)
    )
    tail = -np.asarray(rounded.losses[-500:], np.float64)
    se = np.hypot(rounded.elbo.se, tail.std() / np.sqrt(500))
    assert tail.mean() == pytest.approx(rounded.elbo.value, abs=5 * se)
    draws = rounded.guide.sample_posterior(
        jax.random.key(0), rounded.params, sample_shape=(100,)
    )["w"]
    assert jnp.array_equal(jnp.all(draws == 0.0, axis=0), probs < 0.5)
    # With its gates fixed this is conjugate: the exact ELBO of the best factors is known.
    x, y = correlated_data()
    part = x[:, np.asarray(probs) >= 0.5]
    precision = part.T @ part / NOISE**2 + np.eye(part.shape[1]) / SLAB**2
    np.testing.assert_allclose(
        rounded.params["w_auto_loc"][probs >= 0.5],
        np.linalg.solve(precision, part.T @ y),
        atol=0.05,
    )
    np.testing.assert_allclose(
        rounded.params["w_auto_scale"][probs >= 0.5],
        np.diag(precision) ** -0.5,
        rtol=0.1,
    )


@pytest.mark.full
def test_rounded_fits_are_compared_and_reported(relaxed_fit):
    alone = nt.sparse.round_and_refit(jax.random.key(1), relaxed_fit, num_steps=0)
    assert alone.losses.size == 0
    assert jnp.array_equal(alone.params["w_auto_loc"], relaxed_fit.params["w_auto_loc"])
    none = nt.sparse.round_and_refit(
        jax.random.key(1), relaxed_fit, threshold=0.999999, num_steps=0
    )
    _, y = correlated_data()
    at_zero = stats.norm(0.0, NOISE).logpdf(y).sum() + 8 * np.log1p(-INCLUSION)
    assert none.elbo.value == pytest.approx(at_zero, rel=1e-5)
    data = nt.compare({"gates": relaxed_fit, "rounded": alone, "empty": none})
    table = nt.table(data)
    assert table.loc["empty", "elbo"] == pytest.approx(at_zero, rel=1e-5)
    assert set(table.index) == {"gates", "rounded", "empty"}


def test_round_and_refit_refuses(given_fit, key):
    other = given_fit._replace(guide=AutoNormal(linear))
    for value in (other, "fit"):
        with pytest.raises(
            TypeError, match="round_and_refit takes a fit by AutoSpikeAndSlab"
        ):
            nt.sparse.round_and_refit(key, value)
    with pytest.raises(ValueError, match=r"threshold.*must be in"):
        nt.sparse.round_and_refit(key, given_fit, threshold=1.0)
    # Its factors are no Gaussians, which an online run would take for its prior.
    with pytest.raises(
        TypeError,
        match=r"^a posterior.*not a Gaussian.*with AutoNormal or AutoMultivariateNormal",
    ):
        of_fit(given_fit)


@pytest.mark.full
def test_round_and_refit_refuses_fits_by_other_guides(relaxed_fit, key):
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("w", dist.Normal()), 1.0), obs=y)

    other = nt.fit_svi(
        key, model, AutoNormal, 1.0, num_steps=2, optim=numpyro.optim.Adam(0.05)
    )
    with pytest.raises(
        TypeError, match="round_and_refit takes a fit by AutoSpikeAndSlab"
    ):
        nt.sparse.round_and_refit(key, other)
    with pytest.raises(ValueError, match=r"threshold.*must be in"):
        nt.sparse.round_and_refit(key, relaxed_fit, threshold=1.0)
    with pytest.raises(
        TypeError,
        match=r"^a posterior.*not a Gaussian.*with AutoNormal or AutoMultivariateNormal",
    ):
        of_fit(relaxed_fit)


@pytest.mark.full
def test_a_tempered_fit_in_double_precision(key, x64):
    x, y = correlated_data()
    fit = nt.fit_svi(
        key, linear, AutoSpikeAndSlab, x, y, alpha=0.5, num_steps=5, num_particles=2
    )
    rounded = nt.sparse.round_and_refit(key, fit, num_steps=5, num_particles=2)
    assert {leaf.dtype for leaf in jax.tree.leaves((fit.params, rounded.params))} == {
        jnp.dtype("float64")
    }
    assert rounded.alpha == 0.5


# Fits by coordinate ascent


@pytest.mark.parametrize("intercept_scale", [None, 2.0])
@pytest.mark.full
def test_a_sparse_linear_fit_becomes_a_tempered_fit(key, x64, intercept_scale):
    x, y = correlated_data()
    fit = nt.sparse.fit_linear(
        key,
        x,
        y,
        inclusion_prob=INCLUSION,
        slab_scale=SLAB,
        noise_scale=NOISE,
        intercept_scale=intercept_scale,
        alpha=0.5,
    )
    found = fit.on(x, y, rng_key=key)
    assert found.elbo.value == float(fit.objective)
    assert found.alpha == 0.5
    evaluated = evaluate_elbo(
        key, found.model, found.guide, found.params, found.args, {}, num_particles=2000
    )
    assert evaluated.value == pytest.approx(found.elbo.value, abs=5 * evaluated.se)
    assert evaluated.expected_log_lik == pytest.approx(
        found.elbo.expected_log_lik, abs=10 * evaluated.se
    )
    if intercept_scale is None:
        assert found.elbo.value == pytest.approx(
            exact_elbo(found.params, x, y, 0.5, "coef"), rel=1e-10
        )
        rounded = nt.sparse.round_and_refit(key, found, num_steps=0)
        table = nt.table(
            nt.compare({"factors": found, "rounded": rounded}, num_samples=20)
        )
        assert set(table["rank"]) == {0, 1}


@pytest.mark.full
def test_a_sparse_logistic_fit_is_above_its_objective(key):
    x, y = correlated_data()
    labels = (y > 0).astype(int)
    fit = nt.sparse.fit_logistic(
        key, x, labels, inclusion_prob=INCLUSION, slab_scale=SLAB
    )
    found = fit.on(x, labels).evaluate()
    assert found.elbo.value > float(fit.objective) - 5 * found.elbo.se
    assert found.elbo.value < float(fit.objective) + 5.0


@pytest.mark.full
def test_a_noise_with_a_prior_is_a_latent(key):
    x, y = correlated_data()
    fit = nt.sparse.fit_linear(
        key, x, y, inclusion_prob=0.25, slab_scale=1.0, noise_prior=(2.0, 2.0)
    )
    found = fit.on(x, y)
    assert set(found.target.latents) == {"coef", "noise_precision", "intercept"} & set(
        fit.mean
    )
    evaluated = found.evaluate(2000).elbo
    assert evaluated.value == pytest.approx(found.elbo.value, abs=5 * evaluated.se)
    assert evaluated.kl == pytest.approx(found.elbo.kl, abs=5 * evaluated.se)


def test_a_regression_at_other_data_is_refused(key):
    x, y = correlated_data()
    fit = nt.sparse.fit_linear(
        key, x, y, inclusion_prob=0.25, slab_scale=1.0, noise_scale=1.0
    )
    with pytest.raises(ValueError, match=r"followed by the data.*x and y: got 1"):
        fit.on(x)
    with pytest.raises(ValueError, match=r"that of the fit.*give the x and y"):
        fit.on(x, y + 3.0)
    with pytest.raises(ValueError, match=r"x must have shape \(n, "):
        fit.on(x[:, 1:], y)


# Other drivers


def test_grids_of_alpha_refuse_relaxed_draws(key):
    """They fit all alphas side by side, with one temperature."""
    x, y = correlated_data()
    with pytest.raises(
        ValueError,
        match=r"AutoSpikeAndSlab has a schedule of its own.*alpha by alpha by",
    ):
        nt.temper_path(
            key, linear, AutoSpikeAndSlab, x, y, alphas=[0.5, 1.0], num_steps=2
        )
