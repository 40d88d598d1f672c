"""Online variational inference on NumPyro models."""

import functools
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import closes_over_a_tracer, tiered
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.reparam import CircularReparam
from oracles import tempered_normal_posterior
from scipy import special, stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations import gauss_hermite, hinge, monte_carlo
from numpyro_tempered.gaussian.families import MeanField
from numpyro_tempered.handlers.model_loss import model_loss
from numpyro_tempered.infer.elbo import bind
from numpyro_tempered.infer.guides import AutoOnlineDiagonalNormal
from numpyro_tempered.infer.online_checks import _depend_on_others
from numpyro_tempered.infer.svi import TemperedFit

ETA = gauss_hermite(predictor="eta")
DRAWS = monte_carlo()
PREDICTOR_DRAWS = monte_carlo(predictor="eta")
EXPECTATIONS = {
    "gauss_hermite": ETA,
    "monte_carlo": DRAWS,
    "predictor": PREDICTOR_DRAWS,
}
NGVI, OGA = nt.online.ngvi(), nt.online.oga(0.1)
KEY = jax.random.key(7)


def make_rng():
    return np.random.default_rng(20260)


def logistic(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def logistic_stream(rounds=7):
    rng = make_rng()
    return rng.normal(size=(rounds, 3)), rng.integers(0, 2, rounds)


LOC, SCALE, NOISE = np.array([0.5, -1.0, 2.0]), np.array([1.0, 0.5, 2.0]), 0.7


CALLS = []


def linear(x, y=None):
    CALLS.append(1)
    theta = numpyro.sample(
        "theta",
        dist.Normal(jnp.array(LOC.tolist()), jnp.array(SCALE.tolist())).to_event(1),
    )
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


COLUMNS = np.array([0, 1, 0, 2, 1, 0, 2])


def one_hot_stream():
    """Rows with one regressor each: the exact posterior is then mean-field."""
    return np.eye(3)[COLUMNS], make_rng().normal(size=len(COLUMNS))


def exact_posterior(y, alpha, columns=COLUMNS, loc=LOC, scale=SCALE):
    per_column = [
        tempered_normal_posterior(
            np.asarray(y)[columns == j], alpha, loc[j], scale[j], NOISE
        )
        for j in range(3)
    ]
    return MeanField(*map(np.array, zip(*per_column, strict=True)))


HALF = nt.temper(linear, alpha=0.5)


def online(model, expectation=ETA, rule=NGVI):
    return nt.OnlineVI(model, AutoOnlineDiagonalNormal, rule, expectation)


def shared(model, expectation=ETA, rule=NGVI):
    """One OnlineVI for all tests, whose compiled rounds they find again."""
    return _shared(model, expectation, rule, jax.dtypes.canonicalize_dtype(float))


@functools.cache
def _shared(model, expectation, rule, dtype):
    return online(model, expectation, rule)


@functools.cache
def half_run(expectation=ETA):
    """One run in double precision on the conjugate stream, with its OnlineVI."""
    vi = shared(HALF, expectation)
    return vi, *vi.run(KEY, *one_hot_stream())


@functools.cache
def guide_of(model):
    """A guide in double precision that has been set up on two data of three features."""
    guide = AutoOnlineDiagonalNormal(model)
    with handlers.block(), numpyro.validation_enabled(False), handlers.seed(rng_seed=0):
        guide(np.eye(3)[:1], np.zeros(1))
    return guide


def evaluate(expectation, model, guide, q, *data, curvature="hessian"):
    bound = bind(expectation, model, guide)
    return jax.jit(
        lambda q, data: bound.evaluate(q, data, {}, rng_key=KEY, curvature=curvature)
    )(q, data)


def assert_equal(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def assert_close(q, want, rtol):
    np.testing.assert_allclose(q.loc, want.loc, rtol=rtol)
    np.testing.assert_allclose(q.scale, want.scale, rtol=rtol)


# A stream is its rounds.


@pytest.mark.full
@pytest.mark.parametrize(
    "name", tiered(["gauss_hermite", "monte_carlo"], unit=["monte_carlo"])
)
def test_run_equals_a_loop_of_updates_to_the_bit(name, x64):
    x, y = one_hot_stream()
    vi, first, first_losses = half_run(EXPECTATIONS[name])
    # Going on from a state equals one run.
    second, second_losses = vi.run(first, x, y)
    state, losses = vi.init(KEY, x[:1], y[:1]), []
    for t in [*range(len(y)), *range(len(y))]:
        state, loss = vi.update(state, x[t : t + 1], y[t : t + 1])
        losses.append(loss)
        if len(losses) == len(y):
            assert_equal(first.rule_state, state.rule_state)
    assert_equal(second.rule_state, state.rule_state)
    found = [
        np.concatenate(pair) for pair in zip(first_losses, second_losses, strict=True)
    ]
    assert_equal(found, [np.array(column) for column in zip(*losses, strict=True)])
    assert int(state.count) == 2 * len(y)
    np.testing.assert_allclose(state.cumulative.expected, found[1].sum(), rtol=1e-5)
    np.testing.assert_allclose(state.cumulative.at_mean, found[0].sum(), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "expectation", [ETA, DRAWS], ids=["gauss_hermite", "monte_carlo"]
)
def test_two_runs_equal_one_in_single_precision(expectation):
    x, y = logistic_stream()
    vi = online(nt.temper(logistic, alpha=0.5), expectation)
    run_state, run_losses = vi.run(KEY, x, y)
    state = vi.init(KEY, x[:1], y[:1])
    for t in range(len(y)):
        state, _ = vi.update(state, x[t : t + 1], y[t : t + 1])
    assert_equal(run_state.rule_state, state.rule_state)
    half, _ = vi.run(KEY, x[:3], y[:3])
    assert_equal(vi.run(half, x[3:], y[3:])[0].rule_state, run_state.rule_state)
    np.testing.assert_allclose(
        state.cumulative.expected, run_losses.expected.sum(), rtol=1e-5
    )


@pytest.mark.full
def test_the_key_decides_the_draws(x64):
    x, y = one_hot_stream()
    vi, state, _ = half_run(DRAWS)
    start = vi.init(KEY, x[:1], y[:1])
    starts = (start, start._replace(rng_key=jax.random.key(8)))
    one, (same, other) = state.posterior, (vi.run(s, x, y)[0].posterior for s in starts)
    assert_equal(one, same)
    assert (np.asarray(one.loc) != np.asarray(other.loc)).all()


@pytest.mark.parametrize("alpha", tiered([0.5, 2.0], unit=[0.5]))
def test_a_conjugate_stream_ends_at_the_tempered_posterior(alpha, x64):
    x, y = one_hot_stream()
    state = (
        half_run()[1]
        if alpha == 0.5
        else online(nt.temper(linear, alpha=alpha)).run(KEY, x, y)[0]
    )
    assert_close(state.posterior, exact_posterior(y, alpha), 1e-10)
    counts = np.bincount(COLUMNS)
    precision = np.asarray(state.posterior.scale) ** -2
    np.testing.assert_allclose(
        precision, SCALE**-2 + alpha * counts / NOISE**2, rtol=1e-10
    )


@pytest.mark.full
@closes_over_a_tracer
def test_powers_under_vmap_weigh_gradients_and_not_losses(x64):
    x, y = one_hot_stream()

    def evaluation(alpha):
        bound = bind(ETA, nt.temper(linear, alpha=alpha), guide_of(linear))
        return bound.evaluate(
            MeanField(LOC, SCALE), (x, y), {}, rng_key=None, curvature="hessian"
        )

    guide_of(linear)
    alphas = np.array([0.0, 0.5, 1.0, 2.0])
    found = jax.jit(jax.vmap(evaluation))(alphas)
    force, curvature = x.T @ (x @ LOC - y) / NOISE**2, 0.5 * (x**2).sum(0) / NOISE**2
    np.testing.assert_allclose(found.grad_loc, alphas[:, None] * force, rtol=1e-10)
    np.testing.assert_allclose(found.grad_var, alphas[:, None] * curvature, rtol=1e-10)
    at_mean = -stats.norm.logpdf(y, x @ LOC, NOISE).sum()
    np.testing.assert_allclose(found.at_mean, at_mean, rtol=1e-12)
    np.testing.assert_allclose(
        found.expected, at_mean + (SCALE**2 * curvature).sum(), rtol=1e-12
    )


@pytest.mark.full
@closes_over_a_tracer
def test_powers_under_vmap_end_at_their_tempered_posteriors(x64):
    x, y = one_hot_stream()
    guide = AutoOnlineDiagonalNormal(linear)
    start = nt.OnlineVI(linear, guide, NGVI, ETA).init(KEY, x[:1], y[:1])

    def run(alpha):
        state, losses = nt.OnlineVI(
            nt.temper(linear, alpha=alpha), guide, NGVI, ETA
        ).run(start, x, y)
        return state.posterior, losses

    alphas = (0.0, 0.5, 1.0, 2.0)
    posterior, losses = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(run))(np.array(alphas))
    )
    for i, alpha in enumerate(alphas):
        q = MeanField(*(leaf[i] for leaf in posterior))
        assert_close(q, exact_posterior(y, alpha), 1e-10)
        # The first round starts at the prior under every power.
        assert losses.at_mean[i, 0] == losses.at_mean[0, 0]
        assert losses.expected[i, 0] == losses.expected[0, 0]
    assert (np.diff(posterior.scale, axis=0) < 0).all()
    np.testing.assert_allclose(
        losses.at_mean[0], -stats.norm.logpdf(y, x @ LOC, NOISE), rtol=1e-12
    )


@pytest.mark.full
def test_one_batch_is_one_round(x64):
    x, y = one_hot_stream()
    vi = shared(HALF)
    state, losses = vi.update(vi.init(KEY, x, y), x, y)
    assert_close(state.posterior, exact_posterior(y, 0.5), 1e-10)
    assert int(state.count) == 1
    assert losses.at_mean == pytest.approx(
        -stats.norm.logpdf(y, x @ LOC, NOISE).sum(), rel=1e-12
    )


def test_losses_are_untempered_and_before_the_update(x64):
    _, y = one_hot_stream()
    _, state, losses = half_run()
    for t in range(len(y)):
        q = exact_posterior(y[:t], 0.5, COLUMNS[:t])
        j = COLUMNS[t]
        at_mean = -stats.norm.logpdf(float(y[t]), q.loc[j], NOISE)
        assert float(losses.at_mean[t]) == pytest.approx(at_mean, rel=1e-9)
        expected = at_mean + 0.5 * q.scale[j] ** 2 / NOISE**2
        assert float(losses.expected[t]) == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(
        state.cumulative.expected, np.sum(losses.expected), rtol=1e-12
    )


@pytest.mark.full
def test_losses_of_the_first_round_are_those_of_the_prior_under_every_power(x64):
    x, y = one_hot_stream()
    (plain_state, plain), (state, losses) = (
        shared(model).run(KEY, x, y) for model in (linear, HALF)
    )
    assert_equal(
        *(jax.tree.map(lambda leaf: leaf[0], pair) for pair in (plain, losses))
    )
    assert (plain_state.posterior.scale < state.posterior.scale).all()


def test_other_scales_weigh_gradients_and_not_losses(x64):
    x, y = one_hot_stream()
    model = numpyro.handlers.scale(HALF, scale=3.0)
    found = evaluate(ETA, model, guide_of(linear), MeanField(LOC, SCALE), x, y)
    np.testing.assert_allclose(
        found.grad_loc, 1.5 * x.T @ (x @ LOC - y) / NOISE**2, rtol=1e-10
    )
    np.testing.assert_allclose(
        found.grad_var, 0.5 * 1.5 * (x**2).sum(0) / NOISE**2, rtol=1e-10
    )
    assert found.at_mean == pytest.approx(
        -stats.norm.logpdf(y, x @ LOC, NOISE).sum(), rel=1e-12
    )


@pytest.mark.full
def test_other_scales_weigh_the_steps_of_a_run_and_not_its_losses(x64):
    x, y = one_hot_stream()
    state, losses = online(numpyro.handlers.scale(HALF, scale=3.0)).run(KEY, x, y)
    assert_close(state.posterior, exact_posterior(y, 1.5), 1e-10)
    assert losses.at_mean[0] == pytest.approx(
        -stats.norm.logpdf(y[0], x[0] @ LOC, NOISE), rel=1e-12
    )


@pytest.mark.full
def test_other_scales_weigh_gradients_and_not_losses_of_a_batch(x64):
    x, y = one_hot_stream()
    vi = online(numpyro.handlers.scale(HALF, scale=3.0))
    state, losses = vi.update(vi.init(KEY, x, y), x, y)
    assert_close(state.posterior, exact_posterior(y, 1.5), 1e-10)
    assert losses.at_mean == pytest.approx(
        -stats.norm.logpdf(y, x @ LOC, NOISE).sum(), rel=1e-12
    )


@pytest.mark.full
def test_alpha_zero_stays_at_the_prior(x64):
    x, y = one_hot_stream()
    state, losses = online(nt.temper(linear, alpha=0.0)).run(KEY, x, y)
    assert_close(state.posterior, MeanField(LOC, SCALE), 1e-15)
    np.testing.assert_allclose(
        losses.at_mean, -stats.norm.logpdf(y, x @ LOC, NOISE), rtol=1e-12
    )


@pytest.mark.full
def test_the_expectation_of_a_model_is_that_of_its_bare_loss(x64):
    x, y = logistic_stream()
    bare = gauss_hermite(lambda u, y: jax.nn.softplus(u) - y * u)
    q = MeanField(np.array([0.2, -0.3, 0.1]), np.array([1.0, 0.5, 2.0]))
    found = evaluate(ETA, logistic, guide_of(linear), q, x, y)
    want = jax.jit(functools.partial(bare.evaluate, curvature="hessian"))(q, x, y)
    for ours, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)


@pytest.mark.full
def test_a_model_equals_its_bare_loss(x64):
    x, y = logistic_stream()
    state, losses = shared(logistic).run(KEY, x, y)
    bare = gauss_hermite(lambda u, y: jax.nn.softplus(u) - y * u)
    start = NGVI.init(MeanField(np.zeros(3), np.ones(3)))
    bare_state, bare_losses = nt.online.run(NGVI, bare, start, x, y)
    assert_close(state.posterior, bare_state.posterior, 1e-11)
    np.testing.assert_allclose(losses.at_mean, bare_losses.at_mean, rtol=1e-11)
    np.testing.assert_allclose(losses.expected, bare_losses.expected, rtol=1e-11)


@pytest.mark.full
def test_several_sites_and_their_own_powers(x64):
    def model(x, y, z):
        theta = numpyro.sample(
            "theta",
            dist.Normal(jnp.array(LOC.tolist()), jnp.array(SCALE.tolist())).to_event(1),
        )
        eta = numpyro.deterministic("eta", x @ theta)
        with nt.temper(alpha=0.5):
            numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)
        numpyro.sample("z", dist.Normal(eta, NOISE), obs=z)

    x, y = one_hot_stream()
    z = y[::-1] + 0.5
    found = evaluate(ETA, model, guide_of(linear), MeanField(LOC, SCALE), x, y, z)
    # The power of y counts its data half.
    force = x.T @ (0.5 * (x @ LOC - y) + x @ LOC - z) / NOISE**2
    np.testing.assert_allclose(found.grad_loc, force, rtol=1e-10)
    np.testing.assert_allclose(
        found.grad_var, 0.5 * 1.5 * (x**2).sum(0) / NOISE**2, rtol=1e-10
    )
    want = -stats.norm.logpdf([y, z], x @ LOC, NOISE).sum()
    assert found.at_mean == pytest.approx(want, rel=1e-12)


@pytest.mark.full
def test_a_run_on_several_sites_with_their_own_powers(x64):
    def model(y, z):
        theta = numpyro.sample("theta", dist.Normal(0.5, 1.0))
        eta = numpyro.deterministic("eta", theta * np.ones(y.shape))
        with nt.temper(alpha=0.5):
            numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)
        numpyro.sample("z", dist.Normal(eta, NOISE), obs=z)

    y, z = np.array([1.0, -0.3]), np.array([0.4, 2.0])
    state, losses = online(model).run(KEY, y, z)
    # The power of y counts its data half, and so do half the noise precisions.
    precision = 1.0 + (0.5 * 2 + 2) / NOISE**2
    mean = (0.5 + (0.5 * y.sum() + z.sum()) / NOISE**2) / precision
    assert_close(
        state.posterior, MeanField(np.array([mean]), np.array([precision**-0.5])), 1e-10
    )
    first = -stats.norm.logpdf([y[0], z[0]], 0.5, NOISE).sum()
    assert losses.at_mean[0] == pytest.approx(first, rel=1e-12)


# Monte Carlo.


def test_draws_of_a_predictor_have_the_exact_curvature_of_a_conjugate_model(x64):
    x, y = one_hot_stream()
    found = evaluate(
        PREDICTOR_DRAWS, HALF, guide_of(linear), MeanField(LOC, SCALE), x, y
    )
    np.testing.assert_allclose(
        found.grad_var, 0.5 * 0.5 * (x**2).sum(0) / NOISE**2, rtol=1e-10
    )


@pytest.mark.parametrize(
    "name", tiered(["monte_carlo", "predictor"], unit=["monte_carlo"])
)
def test_monte_carlo_precision_is_exact_on_a_conjugate_stream(name, x64):
    _, y = one_hot_stream()
    _, state, _ = half_run(EXPECTATIONS[name])
    np.testing.assert_allclose(
        state.posterior.scale, exact_posterior(y, 0.5).scale, rtol=1e-10
    )


def square(y=None):
    theta = numpyro.sample("theta", dist.Normal(1.0, 1e-3))
    eta = numpyro.deterministic("eta", theta**2 * np.ones(1))
    numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


CURVATURES = pytest.mark.parametrize(
    ("expectation", "curvature", "gain"),
    [
        (PREDICTOR_DRAWS, "hessian", 4.0),  # (d eta)² l''
        (DRAWS, "hessian", 4.0 + 2.0 * (1.0 + 3.0)),  # ... + l' eta''
        (DRAWS, "fisher", (2.0 * (1.0 + 3.0)) ** 2),  # (l' d eta)²
    ],
    ids=["Gauss-Newton", "Hessian", "Fisher"],
)


@CURVATURES
def test_curvatures_of_a_curved_predictor(expectation, curvature, gain, x64):
    def first_of_three(x, y=None):
        theta = numpyro.sample(
            "theta", dist.Normal(np.array([1.0, 0.0, 0.0]), 1e-3).to_event(1)
        )
        eta = numpyro.deterministic("eta", theta[:1] ** 2)
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    q = MeanField(np.array([1.0, 0.0, 0.0]), np.full(3, 1e-3))
    data = np.eye(3)[:1], np.array([-3.0])
    found = evaluate(
        expectation, first_of_three, guide_of(linear), q, *data, curvature=curvature
    )
    # As below, of the precision that a step of one adds.
    slack = 6e-3 * (320.0 if curvature == "fisher" else 24.0)
    assert abs(2.0 * float(found.grad_var[0]) - gain) < slack
    np.testing.assert_allclose(found.grad_var[1:], 0.0, atol=1e-12)


@pytest.mark.full
@CURVATURES
def test_a_run_takes_the_curvatures_of_a_curved_predictor(
    expectation, curvature, gain, x64
):
    y = np.array([-3.0])
    vi = online(square, expectation, nt.online.ngvi(curvature=curvature))
    state, _ = vi.run(KEY, y)
    # Draws are within 6e-3 of 1, where each of the three moves by at most 320 times that; two of them
    # by at most 24 times that. The three differ by 8 or more.
    slack = 6e-3 * (320.0 if curvature == "fisher" else 24.0)
    assert abs(float(state.posterior.scale[0] ** -2) - 1e6 - gain) < slack


def test_monte_carlo_losses_are_unbiased(x64):
    x, y = one_hot_stream()
    n = 4000
    expectation = monte_carlo(num_particles=n)
    bound = bind(expectation, linear, guide_of(linear))
    # The rest of the evaluation is compiled to nothing.
    losses = jax.jit(
        lambda q, data: nt.online.Losses(*bound.evaluate(q, data, {}, rng_key=KEY)[:2])
    )(MeanField(LOC, SCALE), (x[:1], y[:1]))
    residual, v = float(y[0]) - LOC[0], SCALE[0] ** 2
    at_mean = -stats.norm.logpdf(residual, 0.0, NOISE)
    sd = np.sqrt(2.0 * v**2 + 4.0 * residual**2 * v) / (2.0 * NOISE**2)
    assert float(losses.at_mean) == pytest.approx(at_mean, rel=1e-5)
    assert abs(
        float(losses.expected) - at_mean - 0.5 * v / NOISE**2
    ) < 5 * sd / np.sqrt(n)


# What comes out.


def test_the_posterior_and_its_parameters(x64):
    vi, state, _ = half_run()
    q, params = check_posterior(vi, state)
    n = 2000
    draws = jax.jit(
        lambda params: vi.guide.sample_posterior(KEY, params, sample_shape=(n,))[
            "theta"
        ]
    )(params)
    assert (
        np.abs(np.mean(draws, 0) - q.loc) < 5 * np.asarray(q.scale) / np.sqrt(n)
    ).all()
    np.testing.assert_allclose(np.std(draws, 0), q.scale, rtol=5 / np.sqrt(2 * n))


def check_posterior(vi, state):
    q = state.posterior
    posterior = vi.get_posterior(state)
    np.testing.assert_array_equal(posterior.mean, q.loc)
    np.testing.assert_allclose(posterior.variance, np.square(q.scale), rtol=1e-6)
    params = vi.get_params(state)
    assert set(params) == {"auto_loc", "auto_scale"}
    np.testing.assert_array_equal(vi.guide.median(params)["theta"], q.loc)
    return q, params


@pytest.mark.full
def test_posterior_params_and_the_methods_of_the_guide(x64):
    x, y = logistic_stream()
    vi = shared(logistic)
    state, _ = vi.run(KEY, x, y)
    q, params = check_posterior(vi, state)
    n = 2000
    draws = vi.guide.sample_posterior(jax.random.key(1), params, sample_shape=(n,))[
        "theta"
    ]
    draws = np.asarray(draws)
    assert (np.abs(draws.mean(0) - q.loc) < 5 * np.asarray(q.scale) / np.sqrt(n)).all()
    by_guide = Predictive(logistic, guide=vi.guide, params=params, num_samples=n)(
        jax.random.key(2), x
    )["y"]
    by_draws = make_rng().random((n, len(x))) < special.expit(np.asarray(draws) @ x.T)
    assert by_guide.shape == (n, len(x))
    # Two estimates of one probability.
    assert (
        np.abs(np.mean(by_guide, 0) - by_draws.mean(0)) < 5 * np.sqrt(2 * 0.25 / n)
    ).all()


def test_a_point_rule_gives_a_delta(x64):
    x, y = logistic_stream()
    vi = shared(logistic, ETA, OGA)
    # NumPyro's logistic loss has the wrong slope at 0 exactly, so it starts elsewhere.
    start = vi.init(
        KEY, x[:1], y[:1], prior=MeanField(np.array([0.2, -0.3, 0.1]), np.ones(3))
    )
    state, losses = vi.run(start, x, y)
    posterior = vi.get_posterior(state)
    assert isinstance(posterior, dist.Delta)
    np.testing.assert_array_equal(posterior.v, state.posterior.loc)
    np.testing.assert_allclose(losses.at_mean, losses.expected, rtol=1e-6)
    np.testing.assert_array_equal(
        vi.guide.median(vi.get_params(state))["theta"], state.posterior.loc
    )
    draws = Predictive(vi.guide, params=vi.get_params(state), num_samples=3)(KEY, x, y)[
        "theta"
    ]
    np.testing.assert_array_equal(draws, np.tile(state.posterior.loc, (3, 1)))
    # The steps by hand.
    want = np.array([0.2, -0.3, 0.1])
    for t in range(len(y)):
        want = want - 0.1 * (special.expit(x[t] @ want) - y[t]) * x[t]
    np.testing.assert_allclose(state.posterior.loc, want, rtol=1e-5)


# Yesterday's posterior as today's prior.


def fit_of(guide, model, args, params):
    """A fit at ``params``: the optimiser's error has no part in these tests."""
    guide = guide(model)
    with handlers.block(), handlers.seed(rng_seed=0):
        guide(*args)
    return TemperedFit(model, guide, params, 0.5, np.zeros(1), None, {}, args, {}, KEY)


def params_of(guide, q):
    if guide is AutoNormal:
        return {"theta_auto_loc": q.loc, "theta_auto_scale": q.scale}
    if guide is AutoDiagonalNormal:
        return {"auto_loc": q.loc, "auto_scale": q.scale}
    return {"auto_loc": q.loc, "auto_scale_tril": np.diag(q.scale)}


GUIDES = [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal]


@pytest.mark.parametrize("source", ["state", "mean_field"])
def test_two_stages_equal_one(source, x64):
    x, y = one_hot_stream()
    tomorrow = y[::-1] + 0.3
    vi, first, _ = half_run()
    prior = exact_posterior(y, 0.5) if source == "mean_field" else first
    state = vi.init(KEY, x[:1], tomorrow[:1], prior=prior)
    assert int(state.count) == 0
    state, _ = vi.run(state, x, tomorrow)
    want = exact_posterior(np.concatenate([y, tomorrow]), 0.5, np.tile(COLUMNS, 2))
    assert_close(state.posterior, want, 1e-10)


@pytest.mark.parametrize("guide", tiered(GUIDES, unit=[AutoNormal]))
def test_a_stream_starts_at_the_gaussian_of_a_fit(guide, x64):
    x, y = one_hot_stream()
    q = exact_posterior(y, 0.5)
    fit = fit_of(guide, linear, (x[:1], y[:1]), params_of(guide, q))
    state = shared(HALF).init(KEY, x[:1], y[:1], prior=fit)
    assert int(state.count) == 0
    assert_close(state.posterior, q, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("guide", GUIDES)
def test_a_fit_and_a_stream_equal_one_stream(guide, x64):
    x, y = one_hot_stream()
    params = params_of(guide, exact_posterior(y[:4], 0.5, COLUMNS[:4]))
    fit = nt.fit_svi(
        KEY,
        linear,
        guide,
        x[:4],
        y[:4],
        alpha=0.5,
        num_steps=1,
        num_particles=2,
        optim=numpyro.optim.Adam(0.05),
    )
    assert set(params) == set(fit.params)
    fit = fit._replace(params=jax.tree.map(jnp.asarray, params))
    vi = shared(HALF)
    state = vi.init(KEY, x[4:5], y[4:5], prior=fit)
    assert int(state.count) == 0
    state, _ = vi.run(state, x[4:], y[4:])
    assert_close(state.posterior, exact_posterior(y, 0.5), 1e-10)


def test_a_prior_of_another_shape_is_refused(x64):
    x, y = one_hot_stream()
    vi, data = shared(with_options), (X3[:1], Y3[:1])
    with pytest.raises(
        ValueError, match=r"^prior has.*\(3,\) coordinates, the model \(1,\)"
    ):
        vi.init(KEY, *data, prior=MeanField(LOC, SCALE))
    longer = shared(HALF).init(KEY, x[:1], y[:1])
    fit = fit_of(
        AutoNormal, linear, (x[:1], y[:1]), params_of(AutoNormal, MeanField(LOC, SCALE))
    )
    for prior in (longer, fit):
        with pytest.raises(
            ValueError, match=r"^prior has latent sites.*names and shapes.*must agree"
        ):
            vi.init(KEY, *data, prior=prior)
    with pytest.raises(TypeError, match=r"^prior must be an.*got dict"):
        vi.init(KEY, *data, prior={"loc": 0.0})


def test_a_fit_that_is_no_gaussian_is_refused(x64):
    x, y = one_hot_stream()
    fit = fit_of(AutoDelta, linear, (x[:1], y[:1]), {"theta_auto_loc": LOC})
    with pytest.raises(
        TypeError,
        match=r"AutoDelta is not a Gaussian.*AutoNormal or AutoMultivariateNormal",
    ):
        shared(HALF).init(KEY, x[:1], y[:1], prior=fit)


# Data that cannot be used.


@pytest.mark.parametrize(
    ("scale_x", "scale_y"),
    tiered(
        [(x, y) for x in ("1", "nan", "inf") for y in ("nan", "inf")],
        unit=[("nan", "inf")],
    ),
)
def test_init_reads_shapes_and_not_values(scale_x, scale_y, x64):
    x, y = one_hot_stream()
    with np.errstate(invalid="ignore"):
        x, y = float(scale_x) * x, float(scale_y) * y
    q = online(linear).init(KEY, x, y).posterior
    assert_close(q, MeanField(LOC, SCALE), 1e-15)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_rounds_that_are_not_finite_are_rejected_and_counted(x64):
    x, y = one_hot_stream()
    vi, before, _ = half_run()
    for bad_x, bad_y in (
        (np.where(x == 0, np.nan, x), y),
        (np.where(x == 0, np.inf, x), y),
    ):
        after, _ = vi.run(before, bad_x, bad_y)
        assert_equal(after.posterior, before.posterior)
        assert_equal(after.cumulative, before.cumulative)
        assert (int(after.count), int(after.rejected)) == (7, 7)


@pytest.mark.full
@pytest.mark.parametrize(
    "expectation", [ETA, PREDICTOR_DRAWS], ids=["quadrature", "draws"]
)
def test_a_round_that_is_not_finite_is_rejected_and_counted(expectation):
    x, y = one_hot_stream()
    vi = online(linear, expectation)
    before, _ = vi.run(KEY, x[:3], y[:3])
    for bad_x, bad_y in (
        (x[3:4], np.array([np.nan])),
        (np.where(x[3:4] == 0, np.nan, np.inf), y[3:4]),
    ):
        after, _ = vi.update(before, bad_x, bad_y)
        assert_equal(after.posterior, before.posterior)
        assert_equal(after.cumulative, before.cumulative)
        assert (int(after.count), int(after.rejected)) == (3, 1)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_stream_goes_on_after_a_rejected_round(x64):
    x, y = one_hot_stream()
    keep = np.arange(len(y)) != 2
    state, losses = shared(HALF).run(KEY, x, np.where(keep, y, np.nan))
    assert_close(state.posterior, exact_posterior(y[keep], 0.5, COLUMNS[keep]), 1e-10)
    assert (int(state.count), int(state.rejected)) == (len(y) - 1, 1)
    assert not np.isfinite(losses.at_mean[2])
    assert np.isfinite(np.asarray(losses.at_mean)[keep]).all()


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.full
def test_a_rejected_round_changes_no_bit():
    x, y = one_hot_stream()
    vi = online(linear)
    keep = np.arange(len(y)) != 2
    state, _ = vi.run(KEY, x, np.where(keep, y, np.nan))
    clean, _ = vi.run(KEY, x[keep], y[keep])
    assert_equal(state.posterior, clean.posterior)


# Errors, at the first call that can know.


def subsampling(x, y=None):
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("rows", 10, subsample_size=2):
        eta = numpyro.deterministic("eta", theta * x)
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def noisy(x, y=None):
    theta = numpyro.sample("theta", dist.Normal())
    log_sigma = numpyro.sample("log_sigma", dist.Normal())
    eta = numpyro.deterministic("eta", theta * x)
    numpyro.sample("y", dist.Normal(eta, jnp.exp(log_sigma)), obs=y)


def unnamed(x, y=None):
    theta = numpyro.sample("theta", dist.Normal())
    numpyro.deterministic("mu", theta * x)
    numpyro.sample("eta", dist.Normal(theta * x, 1.0), obs=y)


def mismatched(x, y=None):
    theta = numpyro.sample("theta", dist.Normal())
    eta = numpyro.deterministic("eta", theta)
    numpyro.sample("y", dist.Normal(eta, 1.0).expand(x.shape), obs=y)


def joint(x, y=None):
    theta = numpyro.sample("theta", dist.Normal())
    eta = numpyro.deterministic("eta", theta * x)
    numpyro.sample("y", dist.Normal(eta, 1.0).to_event(1), obs=y)


PAIR = (np.ones(2), np.zeros(2))


@pytest.mark.parametrize(
    ("model", "expectation", "data", "match"),
    [
        (subsampling, DRAWS, PAIR, r"'rows' subsamples 2 of 10.*data that stay take"),
        pytest.param(
            subsampling,
            ETA,
            PAIR,
            r"'rows' subsamples 2 of 10.*stay take",
            marks=pytest.mark.full,
        ),
        (
            joint,
            ETA,
            PAIR[:1],
            r"^the model has.*no observed site.*that it conditions on",
        ),
        pytest.param(
            joint,
            DRAWS,
            PAIR[:1],
            r"no observed site.*it conditions on",
            marks=pytest.mark.full,
        ),
        (
            unnamed,
            ETA,
            PAIR,
            r"no deterministic site 'eta' \(it has \['mu'\]\).*the linear predictor by",
        ),
        (
            mismatched,
            ETA,
            PAIR,
            r"'y' has log-probabilities of shape \(2,\), predictor 'eta' has shape \(\)",
        ),
        (
            joint,
            ETA,
            PAIR,
            r"'y' has log-probabilities of shape \(\), predictor 'eta' has shape \(2,\)",
        ),
    ],
)
def test_models_that_do_not_fit_raise_in_init(model, expectation, data, match, x64):
    with pytest.raises(ValueError, match=match):
        online(model, expectation).init(KEY, *data)


def test_a_likelihood_with_another_latent_beside_the_predictor_is_refused(x64):
    guide = AutoOnlineDiagonalNormal(noisy)
    vi = nt.OnlineVI(noisy, guide, NGVI, ETA)
    with pytest.raises(
        ValueError,
        match=r"^the likelihood.*other than through predictor 'eta'.*at their prior. Use",
    ):
        vi.init(KEY, *PAIR)
    # Draws of the whole parameter see both.
    nt.OnlineVI(noisy, guide, NGVI, DRAWS).init(KEY, *PAIR)


def test_wrong_parts_raise_when_they_are_put_together():
    rule = nt.online.ngvi()
    with pytest.raises(
        TypeError,
        match=r"^this expectation is of.*bare loss.*by nt.online.run, or take",
    ):
        nt.OnlineVI(logistic, AutoOnlineDiagonalNormal, rule, hinge())
    for guide in (
        AutoNormal,
        AutoNormal(logistic),
        AutoDiagonalNormal,
        lambda x, y: None,
    ):
        with pytest.raises(
            TypeError, match=r"^OnlineVI needs an.*AutoOnlineDiagonalNormal"
        ):
            nt.OnlineVI(logistic, guide, rule, ETA)


def test_init_comes_first_and_outside_of_transformations(x64):
    x, y = logistic_stream()
    vi = online(logistic)
    state = shared(logistic).init(KEY, x[:1], y[:1])
    with pytest.raises(ValueError, match=r"OnlineVI\.init before.*run with a key"):
        vi.update(state, x[:1], y[:1])
    with pytest.raises(
        ValueError,
        match=r"^OnlineVI\.init sets the.*outside of jit.*run can be transformed",
    ):
        jax.jit(lambda x, y: vi.init(KEY, x, y))(x[:1], y[:1])
    with pytest.raises(
        ValueError,
        match=r"^OnlineVI\.init sets the.*outside of jit.*run can be transformed",
    ):
        jax.jit(lambda key: vi.init(key, x[:1], y[:1]))(KEY)
    # The failed attempts left nothing behind.
    assert vi.guide.prototype_trace is None
    jax.eval_shape(vi.update, vi.init(KEY, x[:1], y[:1]), x[:1], y[:1])


@pytest.mark.full
def test_failed_attempts_leave_nothing_behind():
    x, y = logistic_stream()
    vi = online(logistic)
    with pytest.raises(
        ValueError,
        match=r"^OnlineVI\.init sets the.*outside of jit.*run can be transformed",
    ):
        jax.jit(lambda x, y: vi.init(KEY, x, y))(x, y)
    vi.update(vi.init(KEY, x, y), x, y)


def test_streams_without_rounds_or_of_different_lengths_are_refused():
    x, y = logistic_stream()
    vi = shared(logistic)
    for bad in ((x[:0], y[:0]), (x[:3], y[:2])):
        with pytest.raises(
            ValueError, match=r"^run needs.*one common leading axis.*model or the loss"
        ):
            vi.run(KEY, *bad)


# Arguments, transformations, compilation.


def with_options(x, y=None, *, link="identity", flip=False, offset=None, power=1):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    eta = numpyro.deterministic("eta", theta * x**power)
    mean = {"identity": eta, "negative": -eta}[link]
    mean = -mean if flip else mean
    numpyro.sample(
        "y", dist.Normal(mean if offset is None else mean + offset, 1.0), obs=y
    )


X3, Y3 = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -0.7])
# Options, the sign and power of the slope, and the offset.
OPTIONS = {
    "none": ({}, 1.0, 1, 0.0),
    "string, flag, None": (
        {"link": "negative", "flip": True, "offset": None},
        1.0,
        1,
        0.0,
    ),
    "flag, float": ({"flip": True, "offset": 0.25}, -1.0, 1, 0.25),
    "array": ({"offset": np.array(0.25)}, 1.0, 1, 0.25),
    "rows": ({"offset": X3}, 1.0, 1, X3),
    "integer": ({"power": 2}, 1.0, 2, 0.0),
    "flag, integer, float": ({"flip": True, "power": 2, "offset": 0.25}, -1.0, 2, 0.25),
}


def slope_and_offset(name):
    _, sign, power, offset = OPTIONS[name]
    return sign * X3**power, offset


def check_options(vi, name):
    options = OPTIONS[name][0]
    slope, offset = slope_and_offset(name)
    precision = 1.0 + (slope**2).sum()
    mean = (slope * (Y3 - offset)).sum() / precision
    state, _ = vi.run(KEY, X3, y=Y3, **options)
    assert_close(
        state.posterior, MeanField(np.array([mean]), np.array([precision**-0.5])), 1e-10
    )
    return mean, options


def test_keyword_and_static_arguments_of_one_object_do_not_mix(x64):
    vi = shared(with_options)
    q = vi.init(KEY, X3[:1], y=Y3[:1]).posterior
    for name in ("string, flag, None", "flag, integer, float"):
        arrays, _, expectation = vi._split((X3,), {"y": Y3, **OPTIONS[name][0]})
        found = jax.jit(functools.partial(expectation.evaluate, curvature="hessian"))(
            q, *arrays
        )
        slope, offset = slope_and_offset(name)
        np.testing.assert_allclose(
            found.grad_loc, [-(slope * (Y3 - offset)).sum()], rtol=1e-10
        )
        np.testing.assert_allclose(found.grad_var, [0.5 * (slope**2).sum()], rtol=1e-10)


@pytest.mark.full
def test_runs_of_one_object_do_not_mix_keyword_and_static_arguments(x64):
    vi = online(with_options)
    for name in ("string, flag, None", "flag, integer, float"):
        check_options(vi, name)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_keyword_and_static_arguments(name, x64):
    vi = online(with_options)
    mean, options = check_options(vi, name)
    if "flip" in options:
        state = vi.init(KEY, X3[:1], y=Y3[:1], **options)
        for t in range(3):
            state, _ = vi.update(state, X3[t : t + 1], y=Y3[t : t + 1], **options)
        assert state.posterior.loc[0] == pytest.approx(mean, rel=1e-10)


@pytest.mark.full
def test_static_arguments_of_one_object_do_not_mix(x64):
    x, y = np.array([1.0, -2.0]), np.array([0.3, 1.0])
    vi = online(with_options)
    locs = [
        float(vi.run(KEY, x, y, **options)[0].posterior.loc[0])
        for options in (
            {},
            {"flip": True},
            {"flip": False},
            {"link": "negative"},
            {"power": 2},
        )
    ]
    mean, squared = -1.7 / 6.0, 4.3 / 18.0
    assert locs == pytest.approx([mean, -mean, mean, -mean, squared], rel=1e-12)


@pytest.mark.full
def test_update_under_jit_scan_and_vmap_together(x64):
    x, y = one_hot_stream()
    vi = shared(HALF)
    streams = np.stack([y, y[::-1]])

    @jax.jit
    @jax.vmap
    def run(y):
        return jax.lax.scan(
            lambda state, row: vi.update(state, *row), start, (x[:, None], y[:, None])
        )

    start = vi.init(KEY, x[:1], y[:1])
    many, many_losses = run(streams)
    for i, stream in enumerate(streams):
        one, losses = vi.run(KEY, x, stream)
        assert_close(
            jax.tree.map(lambda leaf, i=i: leaf[i], many.posterior),
            one.posterior,
            1e-10,
        )
        np.testing.assert_allclose(many_losses.expected[i], losses.expected, rtol=1e-10)
        np.testing.assert_allclose(many_losses.at_mean[i], losses.at_mean, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    "expectation", [ETA, DRAWS], ids=["gauss_hermite", "monte_carlo"]
)
def test_update_under_jit_scan_and_vmap(expectation):
    x, y = logistic_stream()
    vi = online(logistic, expectation)
    state = vi.init(KEY, x[:1], y[:1])
    want, want_losses = vi.update(state, x[:1], y[:1])
    got, losses = jax.jit(vi.update)(state, x[:1], y[:1])
    assert_close(got.posterior, want.posterior, 1e-5)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)

    def one_round(state, row):
        return vi.update(state, *row)

    scanned, _ = jax.lax.scan(one_round, state, (x[:, None], y[:, None]))
    assert_close(scanned.posterior, vi.run(KEY, x, y)[0].posterior, 1e-4)

    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    many, many_losses = jax.vmap(vi.update)(states, x[:2, None], y[:2, None])
    for t in range(2):
        one, loss = vi.update(state, x[t : t + 1], y[t : t + 1])
        assert_close(
            jax.tree.map(lambda leaf, t=t: leaf[t], many.posterior), one.posterior, 1e-5
        )
        assert float(many_losses.expected[t]) == pytest.approx(
            float(loss.expected), rel=1e-5
        )


def counted_model():
    calls = []

    def counted(x, y=None):
        calls.append(1)
        logistic(x, y)

    return counted, calls


def test_repeated_runs_compile_once(x64):
    x, y = one_hot_stream()
    vi, state, _ = half_run()
    before = len(CALLS)
    state, _ = vi.run(state, x, y)
    assert len(CALLS) == before
    # Another start is no other program.
    again = vi.init(KEY, x[:1], y[:1], prior=state)
    assert len(CALLS) > before
    before = len(CALLS)
    vi.run(again, x, y)
    assert len(CALLS) == before


@pytest.mark.full
def test_repeated_rounds_compile_once():
    model, calls = counted_model()
    x, y = logistic_stream()
    vi = online(model)
    state = vi.init(KEY, x[:1], y[:1])
    state, _ = vi.update(state, x[:1], y[:1])
    once = len(calls)
    for t in range(1, 5):
        state, _ = vi.update(state, x[t : t + 1], y[t : t + 1])
    assert len(calls) == once
    # Another start is no other program.
    again = vi.init(KEY, x[:1], y[:1], prior=state)
    before = len(calls)
    vi.update(again, x[:1], y[:1])
    assert len(calls) == before

    vi.run(KEY, x, y)
    before = len(calls)
    vi.run(jax.random.key(9), x, y)
    # Only what init runs to look at shapes.
    checks = len(calls) - before
    vi.run(jax.random.key(9), x, y)
    assert len(calls) - before == 2 * checks


def test_the_expectation_is_monte_carlo_by_default(x64):
    x, y = one_hot_stream()
    by_default = nt.OnlineVI(HALF, AutoOnlineDiagonalNormal(linear), NGVI)
    four = nt.expectations.monte_carlo(num_particles=4, antithetic=True)
    assert_equal(by_default.run(KEY, x, y)[0].posterior, half_run(four)[1].posterior)


def affine(x, y=None, prior_loc=0.0):
    theta = numpyro.sample(
        "theta", dist.Normal(prior_loc, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def with_scale(x, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, sigma), obs=y)


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore::numpyro_tempered.online.StreamWarning", "ignore:the priors of"
)
@pytest.mark.parametrize(
    "guide", [AutoOnlineDiagonalNormal, nt.guides.AutoOnlineMultivariateNormal]
)
@pytest.mark.parametrize("model", [affine, with_scale])
def test_a_regression_by_the_defaults_loses_hardly_a_row(model, guide):
    online = nt.OnlineVI(model, guide)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(200, 3)).astype(np.float32)
        y = (
            x @ [0.5, -0.3, 0.2]
            + (1.0 if model is affine else 0.7) * rng.normal(size=200)
        ).astype(np.float32)
        state, _ = online.run(jax.random.key(seed), x, y)
        assert int(state.rule_state.rejected) <= (0 if model is affine else 10)
        q, least_squares = (
            online.get_posterior(state),
            np.linalg.lstsq(x, y, rcond=None)[0],
        )
        assert np.all(
            np.abs(q.mean[:3] - least_squares) <= 3.0 * np.sqrt(q.variance[:3])
        )


STREAM = (np.array([[1.0, 0.5], [-1.0, 2.0], [0.3, 0.1]]), np.array([1.0, -0.5, 2.0]))


@pytest.mark.full
@closes_over_a_tracer
def test_a_grid_of_alphas_runs_under_vmap():
    guide = nt.guides.AutoOnlineDiagonalNormal(affine)

    def run(alpha):
        online = nt.OnlineVI(
            nt.temper(affine, alpha=alpha), guide, nt.online.ngvi(), ETA
        )
        return online.run(start, *STREAM)[0].posterior

    begin = nt.OnlineVI(affine, guide, nt.online.ngvi(), ETA)
    start = begin.init(KEY, STREAM[0][:1], STREAM[1][:1])
    alphas = jnp.array([0.0, 0.5, 1.0])
    together = jax.jit(jax.vmap(run))(alphas)
    for i, alpha in enumerate((0.0, 0.5, 1.0)):
        alone = run(alpha)
        np.testing.assert_allclose(together.loc[i], alone.loc, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.scale[i], alone.scale, rtol=1e-5)


def test_a_guide_of_another_model_is_refused():
    with pytest.raises(
        ValueError, match=r"^the guide is.*built on another model.*it on this one"
    ):
        nt.OnlineVI(
            linear,
            nt.guides.AutoOnlineDiagonalNormal(lambda x, y: affine(x, y, 5.0)),
            nt.online.ngvi(),
        )


def ridge(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.factor("ridge", -1.5 * theta**2)
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_prior_terms_are_refused(x64):
    def circular(y):
        angle = numpyro.sample("angle", dist.VonMises(0.0, 1.0))
        numpyro.sample("y", dist.Normal(angle, 1.0), obs=y)

    unwrapped = handlers.reparam(circular, config={"angle": CircularReparam()})
    with pytest.raises(
        ValueError, match=r"^a prior cannot be.*is it improper.*start at the prior"
    ):
        online(unwrapped, DRAWS).init(KEY, 0.5)
    with pytest.raises(
        ValueError, match=r"\['ridge'\] are prior terms.*it the model without"
    ):
        online(nt.temper(ridge, alpha=1.0, factors=False), DRAWS).init(KEY, 0.5)


@pytest.mark.full
def test_prior_terms_are_no_obstacle_to_a_fit():
    fit = nt.fit_svi(
        KEY,
        ridge,
        AutoNormal,
        0.5,
        num_steps=1,
        num_particles=2,
        optim=numpyro.optim.Adam(0.05),
    )
    assert fit.alpha == 1.0


def two_latents(order, y):
    values = {name: numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in order}
    numpyro.sample("y", dist.Normal(values["u"], 0.1), obs=y)


def uv(y):
    two_latents("uv", y)


def vu(y):
    two_latents("vu", y)


def test_a_state_as_prior_goes_by_name(x64):
    def vw(y):
        numpyro.sample("w", dist.Normal(0.0, 1.0))
        two_latents("u", y)

    state = online(uv, DRAWS).init(KEY, 3.0)
    assert [name for name, _ in state.layout.sites] == ["u", "v"]
    posterior = MeanField(np.array([2.5, 0.0]), np.array([0.1, 1.0]))
    state = state._replace(rule_state=state.rule_state._replace(posterior=posterior))
    start = online(vu, DRAWS).init(KEY, 3.0, prior=state)
    for ours, theirs in zip(start.posterior, posterior, strict=True):
        by_name = dict(
            zip((name for name, _ in start.layout.sites), np.asarray(ours), strict=True)
        )
        assert (by_name["u"], by_name["v"]) == tuple(theirs)
    with pytest.raises(
        ValueError, match=r"^prior has latent sites.*names and shapes.*must agree"
    ):
        online(vw, DRAWS).init(KEY, 3.0, prior=state)


@pytest.mark.full
def test_the_posterior_of_a_run_as_prior_goes_by_name():
    state, _ = online(uv, DRAWS).run(KEY, np.full(5, 3.0))
    start = online(vu, DRAWS).init(KEY, 3.0, prior=state)
    by_name = dict(zip("vu", start.posterior.loc, strict=True))
    assert float(by_name["u"]) == float(state.posterior.loc[0]) > 2.0
    assert float(by_name["v"]) == 0.0


def test_every_init_starts_at_the_prior_of_its_arguments(x64):
    def scaled(x, y, scale):
        theta = numpyro.sample(
            "theta", dist.Normal(0.0, scale).expand([x.shape[-1]]).to_event(1)
        )
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(x @ theta, NOISE), obs=y)

    x, y = one_hot_stream()
    vi = online(scaled, DRAWS)
    for scale in (1.0, 10.0):
        np.testing.assert_allclose(
            vi.init(KEY, x[:1], y[:1], scale).posterior.scale, scale
        )
    with pytest.raises(
        ValueError,
        match=r"^the latent sites are .*, at the first call they were .*: build a new guide",
    ):
        vi.init(KEY, x[:1, :1], y[:1], 1.0)


def nested(y):
    top = numpyro.sample("top", dist.LogNormal(0.0, 0.5))
    z = numpyro.sample("z", dist.Uniform(0.0, top))
    numpyro.sample("y", dist.Normal(z, 0.1), obs=y)


def test_the_loss_takes_the_support_given_the_other_latents(x64):
    guide = SimpleNamespace(
        _unpack_latent=lambda theta: {"top": theta[0], "z": theta[1]}
    )
    losses, _ = jax.jit(
        lambda theta: model_loss(nested, guide).losses(theta, (1.5,), {})
    )(np.array([np.log(3.0), 0.0]))
    # z is the middle of (0, 3).
    np.testing.assert_allclose(
        losses, [[-stats.norm.logpdf(1.5, 1.5, 0.1)]], rtol=1e-10
    )


def test_local_latents_and_params_are_refused(x64):
    def local(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(theta + z, 0.5), obs=y)

    def with_param(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta, numpyro.param("noise", 1.0)), obs=y)

    with pytest.raises(
        ValueError,
        match=r"^latent sites.*\['z'\] have one value for each datum.*them a leading axis",
    ):
        nt.OnlineVI(local, AutoOnlineDiagonalNormal, nt.online.ngvi()).run(
            KEY, np.arange(4.0)
        )
    with pytest.raises(
        ValueError, match=r"^the model has.*params \['noise'\].*or fit them by"
    ):
        nt.OnlineVI(with_param, AutoOnlineDiagonalNormal, nt.online.ngvi()).init(
            KEY, 0.5
        )


def test_rows_that_mix_are_refused(x64):
    def centred(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        eta = numpyro.deterministic("eta", x @ theta)
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(eta - eta.mean(), 1.0), obs=y)

    x, y = one_hot_stream()
    vi = online(centred)
    state = vi.init(KEY, x[:1], y[:1])
    with pytest.raises(
        ValueError,
        match=r"^the likelihood of.*the predictor of another.*one by one. Use",
    ):
        vi.update(state, x, y)
    with pytest.raises(
        ValueError,
        match=r"^observed site.*broadcast against each other.*Give them one shape",
    ):
        online(linear, DRAWS).init(KEY, x, y[:, None])


@pytest.mark.parametrize("outputs", [(), (2,)], ids=["one output", "two"])
@pytest.mark.parametrize("n", [6, 1001], ids=["all pairs", "random halves"])
def test_which_losses_depend_on_the_predictor_of_another(n, outputs):
    def own(u):
        return jnp.sum(jnp.reshape(u, (n, -1)) ** 2, axis=1)[None]

    def felt_by_the_next(u):
        # Of two outputs their difference alone.
        contrast = jnp.reshape(u, (n, -1)) @ (
            jnp.array([1.0, -1.0]) if outputs else jnp.ones(1)
        )
        return own(u) + jnp.roll(contrast, 1)

    verdicts = jax.jit(
        lambda u: [_depend_on_others(losses, u) for losses in (own, felt_by_the_next)]
    )
    u = np.random.default_rng(0).normal(size=(n, *outputs)).astype(np.float32)
    assert [bool(verdict) for verdict in verdicts(u)] == [False, True]
    # Each pair of few data; of many no square matrix.
    assert (f"[1,{n},{n}" in str(jax.make_jaxpr(verdicts)(u))) == (n == 6)


def test_pandas_arguments(x64):
    x, y = one_hot_stream()
    vi, theirs, _ = half_run()
    ours, _ = vi.run(KEY, pd.DataFrame(x), pd.Series(y))
    np.testing.assert_array_equal(ours.posterior.loc, theirs.posterior.loc)


def test_a_point_rule_needs_no_curvature(x64):
    def absolute(y):
        numpyro.sample(
            "y",
            dist.Laplace(numpyro.sample("theta", dist.Normal(0.0, 1.0)), 1.0),
            obs=y,
        )

    state, _ = nt.OnlineVI(absolute, AutoOnlineDiagonalNormal, nt.online.oga(0.5)).run(
        KEY, np.ones(4)
    )
    np.testing.assert_allclose(state.posterior.loc, 1.0)


@pytest.mark.full
def test_a_shifted_normal_prior_by_a_transform(x64):
    def shifted(y):
        prior = dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(1.0, 2.0)
        )
        numpyro.sample("y", dist.Normal(numpyro.sample("theta", prior), 1.0), obs=y)

    vi = nt.OnlineVI(shifted, AutoOnlineDiagonalNormal, nt.online.ngvi())
    with pytest.warns(UserWarning, match="not Normal"):
        q = vi.init(KEY, 0.5).posterior
    # Five standard errors of the moments of the draws.
    np.testing.assert_allclose(q.loc, 1.0, atol=5 * 2 / np.sqrt(10_000))
    np.testing.assert_allclose(q.scale, 2.0, atol=5 * 2 / np.sqrt(20_000))


@pytest.mark.full
def test_floats_are_data_and_compile_once(x64):
    traces = []

    def scalar(x, y=None):
        traces.append(1)
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta * x, 1.0), obs=y)

    online = nt.OnlineVI(scalar, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())
    state = online.init(KEY, 1.0, 0.5)
    state, _ = online.update(state, 1.0, 0.5)
    before = len(traces)
    for value in (0.1, 0.2, 0.3):
        state, _ = online.update(state, 1.0, value)
    assert len(traces) == before
    with pytest.raises(TypeError, match="arrays or hashable"):
        online.update(state, 1.0, {1, 2})


def test_state_pickles_and_goes_on(x64):
    x, y = one_hot_stream()
    vi, state, _ = half_run()
    # A typed key does not pickle.
    raw = state._replace(rng_key=jax.random.PRNGKey(0))
    copy = pickle.loads(pickle.dumps(raw))
    assert_equal(copy, raw)
    again = vi.run(copy._replace(rng_key=KEY), x, y)[0]
    assert_equal(again.posterior, vi.run(state, x, y)[0].posterior)


@pytest.mark.full
def test_the_state_of_a_run_with_a_raw_key_goes_on(x64):
    x, y = one_hot_stream()
    vi = shared(HALF)
    state, _ = vi.run(jax.random.PRNGKey(0), x, y)
    copy = pickle.loads(pickle.dumps(state))
    assert_equal(vi.run(copy, x, y)[0].posterior, vi.run(state, x, y)[0].posterior)


@pytest.mark.parametrize(
    "name", tiered(["gauss_hermite", "monte_carlo"], unit=["gauss_hermite"])
)
@pytest.mark.parametrize("label", [0, 1])
def test_the_first_step_of_a_point_from_a_mean_of_zero(name, label, x64):
    # NumPyro's derivative of this loss at a predictor of exactly 0 is 0 or 1 in size, not 1/2.
    x, y = np.array([[1.0, -2.0, 0.5]]), np.array([label])
    vi = shared(logistic, EXPECTATIONS[name], OGA)
    state, _ = vi.run(KEY, x, y)
    np.testing.assert_allclose(
        state.posterior.loc, 0.1 * (label - 0.5) * x[0], rtol=1e-5
    )


def test_a_model_that_keeps_what_it_computes_runs_online():
    kept = []

    def model(y):
        if not kept:
            kept.append(jnp.linspace(0.5, 1.0, 2))
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta, jnp.sum(kept[0])), obs=y)

    online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())
    state = online.init(jax.random.key(0), np.ones(1))
    assert state.posterior.loc.shape == (1,)
