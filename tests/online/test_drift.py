"""Forgetting against discounted least squares and a Kalman filter, and the aggregate over windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import closes_over_a_tracer
from sklearn.datasets import load_wine

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online import power, random_walk
from numpyro_tempered.online.experts.change import aggregate_windows, detect_changes
from numpyro_tempered.online.experts.state import (
    regret,
    regret_bound,
    weighted_posteriors,
    weights,
)

pytestmark = pytest.mark.full

HINGE, SQUARED = nt.expectations.hinge(), nt.expectations.squared()


def make_stream(num_rounds, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_rounds, d)), rng.normal(size=num_rounds) * 2.0


def discounted_least_squares(x, y, factors, mean, covariance):
    """argmin of the discounted sum of squares and prior, and its inverse Hessian (unit noise)."""
    age = np.cumprod(np.append(factors[::-1], 1.0)[:-1])[::-1]
    # The datum of a round is not discounted in it: the factors of later rounds are.
    later = np.append(age[1:], 1.0)
    precision = age[0] * np.linalg.inv(covariance) + (x * later[:, None]).T @ x
    force = age[0] * np.linalg.solve(covariance, mean) + x.T @ (later * y)
    return np.linalg.solve(precision, force), np.linalg.inv(precision)


def kalman(x, y, walk, mean, covariance):
    """Mean and covariance of the parameters of the round to come, unit noise, by the gain form."""
    for row, outcome in zip(x, y, strict=True):
        gain = covariance @ row / (row @ covariance @ row + 1.0)
        mean = mean + gain * (outcome - row @ mean)
        covariance = covariance - np.outer(gain, row @ covariance) + np.diag(walk)
    return mean, covariance


def run(forget, prior, x, y, rule=nt.online.ngvi):
    # Half the squared loss is unit noise.
    rule = rule(0.5, forget=forget)
    return nt.online.run(
        rule, SQUARED, rule.init(prior), jnp.asarray(x), jnp.asarray(y)
    )[0]


@pytest.mark.parametrize("varying", [False, True], ids=["constant", "schedule"])
def test_power_is_discounted_least_squares(x64, varying):
    x, y = make_stream(12, 3)
    factor = (lambda t: 1.0 - 0.5 / (1.0 + t)) if varying else 0.8
    factors = (
        np.array([factor(t) for t in range(1, 13)]) if varying else np.full(12, 0.8)
    )
    root = np.array([[1.0, 0.0, 0.0], [0.4, 0.7, 0.0], [-0.3, 0.2, 1.5]])
    mean = np.array([0.5, -1.0, 0.2])
    exact, covariance = discounted_least_squares(x, y, factors, mean, root @ root.T)
    state = run(power(factor), FullRank(jnp.asarray(mean), jnp.asarray(root)), x, y)
    assert int(state.rejected) == 0
    np.testing.assert_allclose(state.posterior.loc, exact, rtol=1e-10)
    np.testing.assert_allclose(
        state.posterior.factor @ state.posterior.factor.T,
        covariance,
        rtol=1e-9,
        atol=1e-12,
    )
    # One coordinate: mean field is exact too.
    exact, covariance = discounted_least_squares(
        x[:, :1], y, factors, mean[:1], np.eye(1)
    )
    state = run(
        power(factor), MeanField(jnp.asarray(mean[:1]), jnp.ones(1)), x[:, :1], y
    )
    np.testing.assert_allclose(state.posterior.loc, exact, rtol=1e-10)
    np.testing.assert_allclose(state.posterior.scale**2, covariance[0], rtol=1e-10)


@pytest.mark.parametrize("each", [False, True], ids=["one scale", "a scale each"])
def test_random_walk_is_a_kalman_filter(x64, each):
    x, y = make_stream(12, 3)
    scale = np.array([0.1, 0.3, 0.0]) if each else 0.2
    walk = np.broadcast_to(np.square(scale), (3,))
    root = np.array([[1.0, 0.0, 0.0], [0.4, 0.7, 0.0], [-0.3, 0.2, 1.5]])
    mean = np.array([0.5, -1.0, 0.2])
    exact, covariance = kalman(x, y, walk, mean, root @ root.T)
    state = run(
        random_walk(scale), FullRank(jnp.asarray(mean), jnp.asarray(root)), x, y
    )
    np.testing.assert_allclose(state.posterior.loc, exact, rtol=1e-9)
    np.testing.assert_allclose(
        state.posterior.factor @ state.posterior.factor.T,
        covariance,
        rtol=1e-9,
        atol=1e-12,
    )
    exact, covariance = kalman(x[:, :1], y, walk[:1], mean[:1], np.eye(1))
    scale = scale[:1] if each else scale
    state = run(
        random_walk(scale), MeanField(jnp.asarray(mean[:1]), jnp.ones(1)), x[:, :1], y
    )
    np.testing.assert_allclose(state.posterior.loc, exact, rtol=1e-10)
    np.testing.assert_allclose(state.posterior.scale**2, covariance[0], rtol=1e-10)


def test_a_walk_that_changes_with_time(x64):
    x, y = make_stream(8, 1)
    mean, variance = np.zeros(1), np.eye(1)
    for t in range(8):
        mean, variance = kalman(
            x[t : t + 1], y[t : t + 1], [1.0 / (t + 1) ** 2], mean, variance
        )
    state = run(
        random_walk(lambda t: 1.0 / t), MeanField(jnp.zeros(1), jnp.ones(1)), x, y
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-10)
    np.testing.assert_allclose(state.posterior.scale**2, variance[0], rtol=1e-10)


@pytest.mark.parametrize("window", [5.0, 50.0])
def test_the_windows_are_what_is_printed(x64, window):
    """Precision in the long run, with one unit of information a datum."""
    ones = np.ones((600, 1)), np.ones(600)
    prior = MeanField(jnp.zeros(1), jnp.ones(1))
    forget = power(1.0 - 1.0 / window)
    assert repr(forget) == f"power: window {window:.4g} rounds"
    np.testing.assert_allclose(
        run(forget, prior, *ones).posterior.scale ** -2.0, [window], rtol=1e-4
    )
    forget = random_walk(1.0 / window)
    assert (
        repr(forget)
        == f"random_walk: window {window:.4g} / √h rounds, h the information in a datum"
    )
    # The fixed point of 1/v' = 1/v + 1, v'' = v' + q²: exactly v = q²/2 + √(q⁴/4 + q²).
    held = 1.0 / (0.5 / window**2 + np.sqrt(0.25 / window**4 + 1.0 / window**2))
    np.testing.assert_allclose(
        run(forget, prior, *ones).posterior.scale ** -2.0, [held], rtol=1e-6
    )
    assert abs(held / window - 1.0) < 0.1


def test_forgetting_nothing_is_ngvi_itself():
    x, y = (jnp.asarray(leaf, jnp.float32) for leaf in make_stream(20, 3))
    prior = MeanField(jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32))
    assert repr(power(1.0)) == "power: window unbounded"
    assert repr(random_walk(0.0)) == "random_walk: window unbounded"
    plain = run(None, prior, x, y)
    np.testing.assert_array_equal(
        run(power(1.0), prior, x, y).posterior.loc, plain.posterior.loc
    )
    np.testing.assert_allclose(
        run(random_walk(0.0), prior, x, y).posterior.loc, plain.posterior.loc, rtol=1e-5
    )


@pytest.mark.parametrize("family", [MeanField, FullRank])
def test_a_coordinate_without_data_does_not_overflow(family):
    x = jnp.zeros((4000, 2), jnp.float32).at[:, 0].set(1.0)
    y = jnp.ones(4000, jnp.float32)
    spread = (
        jnp.ones(2, jnp.float32)
        if family is MeanField
        else jnp.eye(2, dtype=jnp.float32)
    )
    prior = family(jnp.zeros(2, jnp.float32), spread)
    wide = run(power(0.9), prior, x, y)
    assert int(wide.rejected) == 0
    assert np.all(np.isfinite(wide.posterior[1]))
    widest = run(power(0.9, max_scale=10.0), prior, x, y).posterior[1]
    limit = np.sqrt(1 / 0.9) * 10.0
    assert np.max(widest) <= limit * (1 + 1e-5)
    if family is MeanField:
        np.testing.assert_allclose(widest[0] ** -2, 10.0, rtol=1e-4)
    # Once it gets data it is estimated anew.
    state = wide
    rule = nt.online.ngvi(0.5, forget=power(0.9))
    state, _ = nt.online.update(
        rule, SQUARED, state, jnp.array([0.0, 1.0]), jnp.float32(3.0)
    )
    np.testing.assert_allclose(state.posterior.loc[1], 3.0, rtol=1e-4)


@closes_over_a_tracer
def test_a_grid_of_factors_and_scales_runs_under_vmap(x64):
    x, y = make_stream(10, 1)
    prior = MeanField(jnp.zeros(1), jnp.ones(1))
    for forgetting, values in (
        (power, [0.5, 0.9, 1.0]),
        (random_walk, [0.0, 0.1, 1.0]),
    ):
        together = jax.vmap(
            lambda v, f=forgetting: run(f(v), prior, x, y).posterior.loc
        )(jnp.asarray(values))
        single = [run(forgetting(v), prior, x, y).posterior.loc for v in values]
        np.testing.assert_allclose(together, single, rtol=1e-10)


def flipping(seed, num_rounds, every):
    """Two Gaussian clouds whose labels change sign."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1.0, 1.0], num_rounds)
    x = np.sqrt(2.0) * rng.normal(size=(num_rounds, 2)) + y[:, None]
    sign = 1.0 - 2.0 * (np.arange(num_rounds) // every % 2)
    return jnp.asarray(x, jnp.float32), jnp.asarray(sign * y, jnp.float32)


def test_the_aggregate_over_windows_is_near_the_best_one():
    rule = aggregate_windows()
    start = rule.init(MeanField(jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)))
    ratios = []
    for seed in range(3):
        state, losses = nt.online.run(rule, HINGE, start, *flipping(seed, 10_000, 2500))
        total, each = (
            float(np.sum(losses.at_mean)),
            np.asarray(state.memory.losses.value),
        )
        ratios.append(total / each.min())
        # The window that never forgets is lost: the drift is there to be followed.
        assert each[-1] > 1.5 * each.min()
        assert total - each.min() <= regret_bound(state)
    assert max(ratios) <= 1.05
    np.testing.assert_allclose(np.sum(weights(state)), 1.0, rtol=1e-5)


def test_without_drift_the_aggregate_over_windows_takes_a_long_one():
    rule = aggregate_windows()
    start = rule.init(MeanField(jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)))
    state, losses = nt.online.run(rule, HINGE, start, *flipping(0, 10_000, 10_000))
    each = np.asarray(state.memory.losses.value)
    assert np.sum(losses.at_mean) <= 1.02 * each.min()
    assert np.argmin(each) >= 5


def test_the_steps_of_a_mean_field_are_implicit_on_a_squared_loss(x64):
    """By hand: m' minimises β(y - x·m)² + Σ (m - m_j)²/2v_j, and the precisions grow by 2βx²; then the walk."""
    d, beta, windows = 6, 0.7, [2.0, 100.0]
    rng = np.random.default_rng(0)
    x, y = 10.0 * rng.normal(size=(3, d)), rng.normal(size=3)
    rule = aggregate_windows(windows, step_size=beta, scale=0.5)
    start = rule.init(MeanField(jnp.zeros(d), jnp.linspace(0.5, 1.5, d)))
    state, _ = nt.online.run(rule, SQUARED, start, jnp.asarray(x), jnp.asarray(y))
    posteriors = weighted_posteriors(state).posteriors
    for k, window in enumerate(windows):
        mean, variance = np.zeros(d), np.linspace(0.5, 1.5, d) ** 2
        for row, outcome in zip(x, y, strict=True):
            system = np.diag(1.0 / variance) + 2.0 * beta * np.outer(row, row)
            step = np.linalg.solve(system, 2.0 * beta * row * (outcome - row @ mean))
            # Which is no overshoot: the residual shrinks.
            assert abs(outcome - row @ (mean + step)) < abs(outcome - row @ mean)
            mean, variance = (
                mean + step,
                1.0 / (1.0 / variance + 2.0 * beta * row**2) + (0.5 / window) ** 2,
            )
        np.testing.assert_allclose(posteriors.loc[k], mean, rtol=1e-9)
        np.testing.assert_allclose(posteriors.scale[k], np.sqrt(variance), rtol=1e-9)


@pytest.mark.slow
def test_on_a_full_covariance_and_a_squared_loss_the_steps_are_those_of_ngvi():
    x, y = (jnp.asarray(leaf, jnp.float32) for leaf in make_stream(30, 3))
    prior = FullRank(jnp.zeros(3, jnp.float32), jnp.eye(3, dtype=jnp.float32))
    ends = []
    for factory in (nt.online.rvga, nt.online.ngvi):
        rule = aggregate_windows([16, 64], factory=factory)
        ends.append(nt.online.run(rule, SQUARED, rule.init(prior), x, y)[0])
    for ours, theirs in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def linear_stream(seed, num_rounds, d, features):
    """Unit noise, coefficients N(0, I/d)."""
    rng = np.random.default_rng(seed)
    x = features(rng, (num_rounds, d))
    return x, x @ rng.normal(size=d) / np.sqrt(d) + rng.normal(size=num_rounds)


def over_windows(x, y, expectation=SQUARED, spread=1.0):
    """Average loss of the default aggregate, its ratio to that of the best window, and the state."""
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    rule, d = aggregate_windows(), x.shape[-1]
    start = rule.init(
        MeanField(jnp.zeros(d, jnp.float32), jnp.full(d, spread, jnp.float32))
    )
    state, losses = jax.vmap(
        lambda *rows: nt.online.run(rule, expectation, start, *rows)
    )(x, y)
    total = np.sum(np.asarray(losses.at_mean, np.float64), axis=1)
    best = np.min(np.asarray(state.memory.losses.value, np.float64), axis=1)
    assert np.all(jax.vmap(regret)(state) <= jax.vmap(regret_bound)(state))
    return total / x.shape[1], total / best


def several(make, num_seeds):
    return (
        np.stack(leaves) for leaves in zip(*map(make, range(num_seeds)), strict=True)
    )


@pytest.mark.parametrize("spread", [1.0, 20**-0.5], ids=["unit prior", "N(0, I/d)"])
def test_unscaled_features_do_not_make_the_windows_diverge(spread):
    x, y = several(
        lambda seed: linear_stream(seed, 4000, 20, lambda *a: 10.0 * normal(*a)), 3
    )
    loss, ratio = over_windows(x, y, spread=spread)
    assert np.all(np.mean(np.square(y), axis=1) > 60.0)
    assert np.all(loss < 3.0)
    assert np.all(ratio < 1.05)


def normal(rng, shape):
    return rng.normal(size=shape)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["Student-t", "doubling", "wine", "wine, classes"])
def test_the_aggregate_over_windows_is_near_the_best_one_on_rough_streams(stream):
    """Ratios on average over ten seeds, as in tests/benchmarks/rough_streams.py."""

    def make(seed):
        if stream == "Student-t":
            return linear_stream(
                seed, 2000, 10, lambda rng, shape: rng.standard_t(2, size=shape)
            )
        if stream == "doubling":
            x, y = linear_stream(seed, 4064, 5, normal)
            # The noise is symmetric: flipping outcomes is flipping coefficients.
            return x, y * (
                1.0 - 2.0 * (np.floor(np.log2(np.arange(4064) / 32 + 1)) % 2)
            )
        data = load_wine()
        x = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
        x, y = (
            (x[:, 1:], x[:, 0])
            if stream == "wine"
            else (x, np.where(data.target == 1, 1.0, -1.0))
        )
        order = np.random.default_rng(seed).permutation(len(y))
        return np.column_stack([np.ones(len(y)), x])[order], y[order]

    x, y = several(make, 10)
    _, ratio = over_windows(
        x,
        y,
        HINGE if stream == "wine, classes" else SQUARED,
        spread=x.shape[-1] ** -0.5,
    )
    assert np.mean(ratio) <= 1.05


def test_a_flip_is_flagged_and_a_quiet_stream_is_not():
    rule = aggregate_windows()
    state = rule.init(MeanField(jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)))
    x, y = flipping(0, 4000, 2500)
    history = []
    for first in range(0, 4000, 10):
        state, _ = nt.online.run(
            rule, HINGE, state, x[first : first + 10], y[first : first + 10]
        )
        history.append(weights(state))
    flags = 10 * (detect_changes(history, stride=10) + 1)
    assert len(flags) == 1
    assert 2500 < flags[0] < 2600


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_arguments_are_checked():
    for bad in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="factor must be in"):
            power(bad)
    with pytest.raises(ValueError, match="max_scale must be positive"):
        power(0.9, max_scale=0.0)
    for bad in (-0.1, np.inf, np.nan, [0.1, -0.1]):
        with pytest.raises(ValueError, match="scale must be at least 0 and finite"):
            random_walk(bad)
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="windows must be positive"):
            aggregate_windows([16, bad])
    with pytest.raises(ValueError, match="scale must be positive"):
        aggregate_windows(scale=0.0)
    with pytest.raises(ValueError, match="share must be in"):
        aggregate_windows(share=1.0)
    low = LowRank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1)))
    with pytest.raises(TypeError, match="random_walk does not work on LowRank"):
        nt.online.ngvi(forget=random_walk(0.1)).init(low)
    # A schedule that leaves its range makes the round one that is rejected.
    for forget in (power(lambda t: 2.0), random_walk(lambda t: jnp.nan)):
        state = run(
            forget, MeanField(jnp.zeros(1), jnp.ones(1)), np.ones((2, 1)), np.ones(2)
        )
        assert (int(state.count), int(state.rejected)) == (0, 2)


def test_a_schedule_of_evidence_is_the_recursion_to_the_prior(x64):
    """Precisions by the formula; an infinite evidence accumulates."""
    schedule = nt.online.ngvi(
        0.5, forget=nt.online.to_prior(lambda t: jnp.where(t > 2, jnp.inf, 3.0))
    )
    prior = MeanField(jnp.zeros(1), jnp.full(1, 0.5))
    x, y = jnp.ones((4, 1)), jnp.asarray([1.0, 2.0, 3.0, 4.0])
    state, _ = nt.online.run(
        schedule, nt.expectations.squared(), schedule.init(prior), x, y
    )
    precision, mean = 4.0, 0.0
    for t, target in enumerate(np.asarray(y)):
        rho, beta = (0.5 / 3.5, 3.0 * 0.5 / 3.5) if t < 2 else (0.0, 0.5)
        precision = (1 - rho) * precision + rho * 4.0 + 2 * beta
        mean -= (-2 * beta * (target - mean) + rho * 4.0 * mean) / precision
    np.testing.assert_allclose(
        state.posterior.scale, 1 / np.sqrt(precision), rtol=1e-12
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-12)
    assert (
        repr(nt.online.to_prior(99.0)) == "to_prior: window 1 + 99 / step_size rounds"
    )
    with pytest.raises(ValueError, match="must be positive, got 0"):
        nt.online.to_prior(0.0)
