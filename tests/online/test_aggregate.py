"""Aggregation against an AdaHedge written out in numpy, its bound, and what may go wrong."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import closes_over_a_tracer, tiered
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.online import stream
from numpyro_tempered.online.experts.aggregate import (
    aggregate,
    exponential_weights,
    mix_loss,
)
from numpyro_tempered.online.experts.grid import grid
from numpyro_tempered.online.experts.state import (
    expert_states,
    regret,
    regret_bound,
    weighted_posteriors,
    weights,
)
from numpyro_tempered.online.rules.ewa import ewa_grid

HINGE, SQUARED = nt.expectations.hinge(), nt.expectations.squared()
D = 3


def oga(c):
    return nt.online.oga(lambda t: c / jnp.sqrt(t.astype(jnp.result_type(float))))


def grids():
    return (
        grid(
            nt.online.ngvi,
            step_size=[0.25, 1.0],
            prior_scale=[0.5, 2.0],
            curvature="fisher",
        ),
        grid(oga, c=[0.1, 1.0, 3.0]),
    )


def alone():
    """The members of ``grids``: how to make a rule, and its argument with its prior's scale for each."""
    fisher = [(a, s) for a in (0.25, 1.0) for s in (0.5, 2.0)]
    return (functools.partial(nt.online.ngvi, curvature="fisher"), fisher), (
        oga,
        [(c, 1.0) for c in (0.1, 1.0, 3.0)],
    )


RULE = aggregate(*grids())


def make_prior(d=D, dtype=None):
    dtype = jnp.result_type(float) if dtype is None else dtype
    return MeanField(
        *(
            jnp.asarray(np.asarray(leaf, dtype))
            for leaf in (np.zeros(d), np.linspace(0.5, 1.5, d))
        )
    )


def make_stream(num_rounds, d=D, dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rounds, d))
    y = np.where(x[:, 0] + 0.5 * rng.normal(size=num_rounds) > 0, 1.0, -1.0)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


# Oracles, in numpy and in the plain form of the papers


def hinge_loss(u, y):
    return np.maximum(1.0 - y * u, 0.0)


def squared_loss(u, y):
    return (y - u) ** 2


def adahedge(u, y, loss, share=0.0, rate=None):
    """Decisions' losses and, at the end, weights and gap; ``u`` (T, K) are the members' predictors.

    ``rate`` is that of Hedge, a function of the round 1, 2, ...
    """
    num_members = u.shape[1]
    complexity = math.log(num_members) + (math.log(1 / share) if share else 0.0)
    potential, gap, suffered = np.zeros(num_members), 0.0, []
    lam = rate(1) if rate else math.inf
    w = np.full(num_members, 1 / num_members)
    for t, (row, label) in enumerate(zip(u, y, strict=True), start=1):
        losses, decision = loss(row, label), loss(w @ row, label)
        if math.isinf(lam):
            mix = np.min(potential + losses) - np.min(potential)
        else:
            mix = -math.log(w @ np.exp(-lam * losses)) / lam
        gap += max(decision - mix, 0.0)
        suffered.append(decision)
        potential = potential + losses
        lam = rate(t + 1) if rate else (complexity / gap if gap > 0 else math.inf)
        if math.isinf(lam):
            potential = np.zeros(num_members) if share else potential
            w = (potential == potential.min()).astype(float)
        else:
            w = np.exp(-lam * (potential - potential.min()))
        w = w / w.sum()
        if share and not math.isinf(lam):
            w = (1 - share) * w + share / num_members
            potential = -np.log(w) / lam
    return np.array(suffered), w, gap


def run_alone(squared):
    """Data, and of the members, each run by itself: posteriors, predictors before each round (T, K), losses."""
    expectation = SQUARED if squared else HINGE
    x, y = make_stream(40)
    prior = make_prior()

    def member(make, argument, factor):
        rule = make(argument)

        def body(state, row):
            u = jnp.sum(row[0] * state.posterior.loc)
            state, losses = stream.step(rule, expectation, state, row, None)
            return state, (u, *losses)

        return jax.lax.scan(
            body, rule.init(prior._replace(scale=factor * prior.scale)), (x, y)
        )

    ends, seen = [], []
    for make, pairs in alone():
        state, leaves = jax.jit(jax.vmap(functools.partial(member, make)))(
            *np.array(pairs).T
        )
        ends += [
            jax.tree.map(lambda leaf, k=k: np.asarray(leaf)[k], state.posterior)
            for k in range(len(pairs))
        ]
        seen.append(leaves)
    return x, y, ends, *(np.concatenate(leaves).T for leaves in zip(*seen, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("squared", [False, True], ids=["hinge", "squared"])
def test_members_as_rules_of_their_own_run_as_under_vmap(x64, squared):
    x, y, ends, *seen = run_alone(squared)
    expectation = SQUARED if squared else HINGE
    rules = [
        (make(argument), factor)
        for make, pairs in alone()
        for argument, factor in pairs
    ]

    def body(states, row):
        u = jnp.stack([jnp.sum(row[0] * state.posterior.loc) for state in states])
        steps = [
            stream.step(rule, expectation, state, row, None)
            for (rule, _), state in zip(rules, states, strict=True)
        ]
        losses = [
            jnp.stack(leaves)
            for leaves in zip(*(losses for _, losses in steps), strict=True)
        ]
        return [state for state, _ in steps], (u, *losses)

    prior = make_prior()
    start = [
        rule.init(prior._replace(scale=factor * prior.scale)) for rule, factor in rules
    ]
    states, leaves = jax.jit(lambda states: jax.lax.scan(body, states, (x, y)))(start)
    for ours, theirs in zip(leaves, seen, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    for state, end in zip(states, ends, strict=True):
        np.testing.assert_allclose(state.posterior.loc, end.loc, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(
            state.posterior.scale, end.scale, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize(
    ("squared", "share"),
    [(False, 0.05), pytest.param(True, 0.0, marks=pytest.mark.full)],
    ids=["hinge, shares", "squared"],
)
def test_the_aggregate_is_adahedge_on_members_that_run_alone(x64, squared, share):
    x, y, ends, u, at_mean, expected = run_alone(squared)
    expectation, loss = (SQUARED, squared_loss) if squared else (HINGE, hinge_loss)
    rule = aggregate(*grids(), share=share) if share else RULE
    state, losses = nt.online.run(rule, expectation, rule.init(make_prior()), x, y)
    decided, w, gap = adahedge(u, np.asarray(y), loss, share)
    np.testing.assert_allclose(losses.at_mean, decided, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(weights(state), w, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(state.memory.gap.value, gap, rtol=1e-9)
    np.testing.assert_allclose(state.memory.losses.value, at_mean.sum(0), rtol=1e-10)
    np.testing.assert_allclose(
        regret(state), decided.sum() - at_mean.sum(0).min(), rtol=1e-7, atol=1e-9
    )
    posteriors = weighted_posteriors(state).posteriors
    for k, end in enumerate(ends):
        np.testing.assert_allclose(
            np.asarray(posteriors.loc)[k], end.loc, rtol=1e-9, atol=1e-11
        )
        np.testing.assert_allclose(
            np.asarray(posteriors.scale)[k], end.scale, rtol=1e-9, atol=1e-11
        )
    # The expected loss is that of the mixture before the round.
    np.testing.assert_allclose(
        np.asarray(losses.expected)[0], np.mean(expected[0]), rtol=1e-10
    )


def test_weights_follow_the_rate_of_the_next_round(x64):
    """And the bound on the regret is that of its formula, at this rate."""
    steps, share = np.array([0.02, 0.1, 0.4]), 0.1
    rule = nt.online.aggregate(
        nt.online.grid(nt.online.oga, step_size=steps),
        learning_rate=lambda t: 2.0 / t,
        share=share,
    )
    x, y = (np.asarray(leaf) for leaf in make_stream(5))
    state, losses = nt.online.run(rule, SQUARED, jax.jit(rule.init)(make_prior()), x, y)
    points, u = np.zeros((3, D)), []
    for row, label in zip(x, y, strict=True):
        u.append(points @ row)
        points = points - 2.0 * np.outer(steps * (u[-1] - label), row)
    decided, w, gap = adahedge(np.array(u), y, squared_loss, share, lambda t: 2.0 / t)
    np.testing.assert_allclose(losses.at_mean, decided, rtol=1e-9)
    np.testing.assert_allclose(nt.online.weights(state), w, rtol=1e-9)
    for switches in range(5):
        switching = switches * math.log(3 / share) - (5 - 1 - switches) * math.log(
            1 - share
        )
        bound = gap + (math.log(3) + switching) * 6 / 2.0
        np.testing.assert_allclose(
            nt.online.regret_bound(state, switches), bound, rtol=1e-9
        )


@functools.partial(jax.jit, static_argnums=0)
def play(expectation, adversary, x, y):
    """One game: the states and losses of each round, the labels against the decision if asked for."""

    def body(state, row):
        features, label = row
        against = jnp.where(features @ state.posterior.loc > 0, -1.0, 1.0).astype(
            label.dtype
        )
        label = jnp.where(adversary, against, label)
        after, suffered = stream.step(RULE, expectation, state, (features, label), None)
        seen = (
            weights(state),
            weighted_posteriors(state).posteriors.loc @ features,
            label,
            suffered.at_mean,
        )
        return after, (
            *seen,
            after.memory.active,
            regret(after),
            regret_bound(after),
            after.cumulative.at_mean.value,
        )

    return jax.lax.scan(body, RULE.init(make_prior(dtype=x.dtype)), (x, y))[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "squared",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["hinge", "squared"],
)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31 - 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    adversary=st.booleans(),
)
def test_the_regret_is_within_the_bound(seed, scale, adversary, squared):
    rng = np.random.default_rng(seed)
    x = np.asarray(scale * rng.standard_t(2, size=(40, D)), np.float32)
    y = np.asarray(rng.choice([-1.0, 1.0], 40), np.float32)
    expectation, loss = (SQUARED, squared_loss) if squared else (HINGE, hinge_loss)
    seen = [np.asarray(leaf) for leaf in play(expectation, adversary, x, y)]
    w, u, label, suffered, alive, ahead, bound, total = seen
    np.testing.assert_allclose(w.sum(1), 1.0, rtol=1e-5)
    slack = 1e-4 * (1 + total)
    assert np.all(ahead <= bound + slack)
    losses = loss(u.astype(float), label[:, None].astype(float))
    mean = np.sum(np.where(w > 0, w * losses, 0.0), axis=1)
    # Jensen's inequality
    assert np.all(
        suffered <= mean + 1e-4 * (1 + np.max(np.where(w > 0, losses, 0.0), axis=1))
    )
    widest = max(np.ptp(row[on]) for row, on in zip(losses, alive, strict=True))
    log_size = math.log(w.shape[1])
    assert (
        bound[-1]
        <= widest * (math.sqrt(40 * log_size) + 4 / 3 * log_size + 2) + slack[-1]
    )


@pytest.mark.full
def test_with_shares_the_bound_holds_against_sequences_that_switch(x64):
    """Brute force: the best sequence with m switches, by dynamic programming over the members' losses."""
    num_rounds, share = 120, 0.02
    rng = np.random.default_rng(3)
    # Each third of the stream has another best point.
    best = np.repeat([0, 1, 0], num_rounds // 3)
    y = jnp.asarray(
        np.where(best == 0, 1.0, -1.0)
        * np.where(rng.random(num_rounds) < 0.9, 1.0, -1.0)
    )
    points = np.array([[1.0], [-1.0]])
    rule = aggregate(grid(lambda k: standing(points, k), k=range(2)), share=share)
    state = rule.init(MeanField(jnp.zeros(1), jnp.ones(1)))
    state, losses = nt.online.run(rule, HINGE, state, jnp.ones((num_rounds, 1)), y)
    table = hinge_loss(points[:, 0], np.asarray(y)[:, None])
    least = np.full((5, 2), np.inf)
    least[0] = 0.0
    for row in table:
        moved = np.vstack(
            [np.full((1, 2), np.inf), np.repeat(least.min(1)[:-1, None], 2, axis=1)]
        )
        least = np.minimum(least, moved) + row
    for num_switches in range(5):
        assert (
            np.sum(losses.at_mean) - least[num_switches].min()
            <= regret_bound(state, num_switches) + 1e-9
        )
    unshared, _ = nt.online.run(
        ewa_grid(points),
        HINGE,
        ewa_grid(points).init(state.prior),
        jnp.ones((4, 1)),
        y[:4],
    )
    assert np.isinf(regret_bound(unshared, 1))


def standing(points, index):
    return ewa_grid_member(jnp.asarray(points)[index])


def ewa_grid_member(theta):
    base = nt.online.oga(1.0)
    return base._replace(
        init=lambda prior: base.init(prior._replace(loc=theta)),
        update=lambda evaluation, state: state._replace(count=state.count + 1),
    )


# Exponential weights on a grid


@jax.jit
def summary(state):
    """Weights, regret and its bound."""
    return weights(state), regret(state), regret_bound(state)


def test_ewa_on_a_grid_is_theorem_1_by_brute_force(x64):
    rng = np.random.default_rng(1)
    points = rng.uniform(-1, 1, size=(30, 2))
    x, y = rng.uniform(-1, 1, size=(200, 2)), rng.choice([-1.0, 1.0], 200)
    widest = 1.0 + np.max(np.abs(x @ points.T))
    eta = math.sqrt(8 * math.log(30) / 200) / widest
    p, decisions = np.full(30, 1 / 30), []
    for row, label in zip(x, y, strict=True):
        decisions.append(hinge_loss(row @ (p @ points), label))
        p = p * np.exp(-eta * hinge_loss(points @ row, label))
        p /= p.sum()
    rule = ewa_grid(points, eta)
    state, losses = nt.online.run(rule, HINGE, jax.jit(rule.init)(make_prior(2)), x, y)
    found, ahead, limit = summary(state)
    np.testing.assert_allclose(losses.at_mean, decisions, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found, p, rtol=1e-10)
    np.testing.assert_allclose(state.posterior.loc, p @ points, rtol=1e-10)
    variance = p @ points**2 - (p @ points) ** 2
    np.testing.assert_allclose(np.square(state.posterior.scale), variance, rtol=1e-9)
    totals = hinge_loss(points @ x.T, y).sum(1)
    bound = eta * widest**2 * 200 / 8 + math.log(30) / eta
    assert ahead <= limit <= bound
    np.testing.assert_allclose(ahead, np.sum(decisions) - totals.min(), rtol=1e-9)


# The first are the sizes of the test above, for its programs.
@pytest.mark.parametrize(
    ("num_points", "num_rounds"), tiered([(30, 200), (50, 300)], unit=[(30, 200)])
)
def test_an_exp_concave_loss_has_no_gap(x64, num_points, num_rounds):
    rng = np.random.default_rng(2)
    # The second feature is 0.
    points = rng.uniform(-1, 1, size=(num_points, 2))
    x, y = np.tile([1.0, 0.0], (num_rounds, 1)), rng.uniform(-1, 1, size=num_rounds)
    rule = ewa_grid(points, 1 / 8)
    state, _ = nt.online.run(rule, SQUARED, jax.jit(rule.init)(make_prior(2)), x, y)
    _, ahead, limit = summary(state)
    assert float(state.memory.gap.value) == 0.0
    np.testing.assert_allclose(limit, 8 * math.log(num_points), rtol=1e-12)
    assert ahead <= limit


@jax.jit
def weights_and_mix_loss(before, losses, rate):
    return exponential_weights(before, rate), mix_loss(before, losses, rate)


@pytest.mark.parametrize("rate", [1e-12, 1e-3, 1.0, 50.0, np.inf])
def test_weights_and_mix_loss(x64, rate):
    before = jnp.asarray([3.0, 0.0, np.inf, 1e4, 0.0])
    losses = np.array([1.0, 5.0, np.nan, 0.0, 2.0])
    found = weights_and_mix_loss(before, losses, rate)
    w = np.asarray(found[0])
    kept = np.array([0, 1, 3, 4])
    if np.isinf(rate):
        exact, mix = np.array([0, 0.5, 0, 0, 0.5]), 2.0
    else:
        exact = np.zeros(5)
        exact[kept] = np.exp(-rate * np.asarray(before)[kept])
        exact /= exact.sum()
        mix = -np.log(np.sum(exact[kept] * np.exp(-rate * losses[kept]))) / rate
    np.testing.assert_allclose(w, exact, rtol=1e-12, atol=1e-300)
    tolerance = 1e-3 if rate < 1e-6 else 1e-9
    np.testing.assert_allclose(found[1], mix, rtol=tolerance)


# Members


@pytest.mark.full
def test_one_member_is_its_rule(x64):
    x, y = make_stream(20)
    rule = aggregate(grid(nt.online.ngvi, step_size=[0.7], prior_scale=2.0, alpha=0.3))
    prior = make_prior()
    state, losses = nt.online.run(rule, HINGE, jax.jit(rule.init)(prior), x, y)
    # Without forgetting and with Hessian curvature, tempering is a smaller step.
    same = nt.online.ngvi(0.7 * 0.3)
    wide = prior._replace(scale=jnp.asarray(2.0 * np.asarray(prior.scale)))
    end, plain = nt.online.run(same, HINGE, same.init(wide), x, y)
    np.testing.assert_allclose(losses.at_mean, plain.at_mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(losses.expected, plain.expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state.posterior.scale, end.posterior.scale, rtol=1e-10)
    assert abs(float(regret(state))) < 1e-12


@pytest.mark.full
def test_full_covariances_are_matched_in_mean_and_covariance(x64):
    rule = aggregate(
        grid(nt.online.ngvi, step_size=[0.1, 1.0], prior_scale=[0.5, 1.0]),
        grid(oga, c=[0.1]),
    )
    factor = np.array([[1.0, 0.0, 0.0], [0.3, 0.8, 0.0], [-0.2, 0.1, 0.5]])
    x, y = make_stream(10)
    state, _ = nt.online.run(
        rule, HINGE, rule.init(FullRank(jnp.zeros(3), jnp.asarray(factor))), x, y
    )
    mix = weighted_posteriors(state)
    w, loc, tril = (np.asarray(leaf) for leaf in (mix.weights, *mix.posteriors))
    mean = w @ loc
    covariance = np.einsum("k,kij,klj->il", w, tril, tril) + np.einsum(
        "k,ki,kj->ij", w, loc - mean, loc - mean
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-12)
    found = state.posterior.factor @ state.posterior.factor.T
    np.testing.assert_allclose(found, covariance, rtol=1e-10, atol=1e-12)
    points = aggregate(grid(oga, c=[0.1, 1.0]))
    start = points.init(FullRank(jnp.zeros(3), jnp.asarray(factor)))
    np.testing.assert_array_equal(start.posterior.factor, np.zeros((3, 3)))


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.slow
def test_all_members_draw_the_same_numbers(key):
    loss = nt.expectations.monte_carlo(
        lambda theta, x, y: jax.nn.softplus(-y * jnp.sum(x * theta))
    )
    rule = aggregate(
        grid(nt.online.ngvi, step_size=[0.5, 0.5]),
        grid(nt.online.ngvi, step_size=[0.5]),
    )
    x, y = make_stream(6, dtype=jnp.float32)
    # A datum that all refuse leaves the keys in step.
    x = x.at[2, 0].set(jnp.nan)
    state, _ = nt.online.run(
        rule, loss, rule.init(make_prior(dtype=jnp.float32)), x, y, rng_key=key
    )
    loc = weighted_posteriors(state).posteriors.loc
    np.testing.assert_allclose(loc, jnp.broadcast_to(loc[:1], loc.shape), rtol=1e-6)
    assert (int(state.count), int(state.rejected)) == (5, 1)
    with pytest.raises(ValueError, match="pass rng_key="):
        nt.online.run(rule, loss, rule.init(make_prior(dtype=jnp.float32)), x, y)


# What goes wrong


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_members_that_diverge_are_left_out(x64):
    # As many members as those of ``grids``, for their programs.
    check_diverging([0.005, 0.01, 0.02, 0.05, 0.1], [1e5, 1e10], jnp.float64)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.full
def test_members_that_diverge_are_left_out_in_single_precision():
    check_diverging([0.01, 0.1], [10.0, 1e10], jnp.float32)


def check_diverging(good, bad, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(300, D)), dtype)
    y = jnp.asarray(
        np.asarray(x) @ [1.0, -1.0, 0.5] + 0.3 * rng.normal(size=300), dtype
    )
    rule = aggregate(grid(nt.online.oga, step_size=[*good, *bad]))
    state, losses = nt.online.run(
        rule, SQUARED, rule.init(make_prior(dtype=dtype)), x, y
    )
    np.testing.assert_array_equal(
        state.memory.active, [True] * len(good) + [False] * len(bad)
    )
    assert np.all(np.asarray(weights(state))[len(good) :] == 0)
    assert all(
        np.all(np.isfinite(leaf))
        for leaf in (*state.posterior, weights(state), state.cumulative.at_mean)
    )
    assert int(state.rejected) <= 2
    assert regret(state) <= regret_bound(state)
    # One round can be lost to each of them before it shows.
    assert np.mean(np.asarray(losses.at_mean)[20:]) < 0.5


# Drivers


@pytest.mark.full
def test_run_is_a_loop_of_update_bit_for_bit():
    x, y = make_stream(7, dtype=jnp.float32)
    begin = state = RULE.init(make_prior(dtype=jnp.float32))
    each = []
    for row, label in zip(x, y, strict=True):
        state, losses = nt.online.update(RULE, HINGE, state, row, label)
        each.append(losses)
    ran, losses = nt.online.run(RULE, HINGE, begin, x, y)
    assert_same(ran, state)
    assert_same(losses, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    # A datum that all members refuse leaves the state.
    for bad_x, bad_y in ((jnp.nan, 1.0), (jnp.inf, 1.0), (1.0, jnp.nan)):
        after, _ = nt.online.update(
            RULE, HINGE, state, jnp.full(D, bad_x, jnp.float32), jnp.float32(bad_y)
        )
        # All of it but the members' own counts of rejections
        kept = [
            member._replace(rejected=member.rejected + 1)
            for member in expert_states(state)
        ]
        memory = state.memory._replace(states=tuple(kept))
        assert_same(after, state._replace(rejected=jnp.int32(1), memory=memory))
    after = jax.eval_shape(
        lambda s: stream.step(RULE, HINGE, s, (x[0], y[0]), None)[0], begin
    )
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(after)] == [
        (b.shape, b.dtype) for b in jax.tree.leaves(begin)
    ]


@pytest.mark.slow
def test_rows_that_are_off_count_nothing():
    rule = aggregate(grid(nt.online.svb, step_size=[0.1, 1.0]))
    x, y = make_stream(5, dtype=jnp.float32)
    begin = rule.init(make_prior(dtype=jnp.float32))
    mask = jnp.array([True, False, True, False, True])
    one_round = jax.jit(
        lambda *args: stream.step(rule, HINGE, begin, args[:2], None, *args[2:])
    )
    padded, losses = one_round(x.at[1].set(jnp.nan), y, mask)
    state, exact = one_round(x[mask], y[mask])
    for a, b in zip(
        jax.tree.leaves((padded, losses)), jax.tree.leaves((state, exact)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    nothing, _ = one_round(x, y, jnp.zeros(5, bool))
    assert_same(nothing, begin)


@pytest.mark.full
@closes_over_a_tracer
def test_many_streams_under_vmap():
    rule = aggregate(grid(nt.online.svb, step_size=[0.1, 1.0]))
    streams = [make_stream(5, dtype=jnp.float32, seed=seed) for seed in range(3)]
    x, y = (jnp.stack(leaves) for leaves in zip(*streams, strict=True))
    begin = rule.init(make_prior(dtype=jnp.float32))
    together, _ = jax.vmap(lambda x, y: nt.online.run(rule, HINGE, begin, x, y))(x, y)
    for k in range(3):
        single, _ = nt.online.run(rule, HINGE, begin, x[k], y[k])
        np.testing.assert_allclose(weights(together)[k], weights(single), rtol=1e-5)


@pytest.mark.slow
def test_the_aggregate_runs_on_a_model(key):
    def model(x, y=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        eta = numpyro.deterministic("eta", x @ theta)
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    x, y = make_stream(30, 2, jnp.float32)
    rule = aggregate(
        grid(nt.online.ngvi, step_size=[0.25, 1.0], prior_scale=[1.0, 3.0])
    )
    online = nt.OnlineVI(
        model,
        nt.guides.AutoOnlineDiagonalNormal,
        rule,
        nt.expectations.gauss_hermite(predictor="eta"),
    )
    state, losses = online.run(key, x, (y > 0).astype(jnp.float32))
    assert regret(state.rule_state) <= regret_bound(state.rule_state)
    np.testing.assert_allclose(online.get_posterior(state).mean, state.posterior.loc)
    assert np.mean(losses.at_mean[-10:]) < np.mean(losses.at_mean[:10])
    with pytest.raises(TypeError, match=r"state\.rule_state"):
        weights(state)


@pytest.mark.slow
def test_the_best_member_of_the_toy_stream_is_reached():
    """Two Gaussian clouds, CA19 section 5.1."""
    rng = np.random.default_rng(0)
    y = rng.choice([-1.0, 1.0], 5000)
    x = np.sqrt(2.0) * rng.normal(size=(5000, 2)) + y[:, None]
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    state, losses = nt.online.run(
        RULE, HINGE, RULE.init(make_prior(2, jnp.float32)), *data
    )
    assert np.sum(losses.at_mean) <= 1.02 * np.min(state.memory.losses.value)
    plain = nt.online.oga(5000**-0.5)
    _, other = nt.online.run(
        plain, HINGE, plain.init(make_prior(2, jnp.float32)), *data
    )
    assert np.sum(losses.at_mean) < np.sum(other.at_mean)


# Arguments


def test_labels_are_in_the_order_of_the_members():
    one = grid(
        nt.online.ngvi, step_size=[0.5, 1.0], prior_scale=(1.0, 4.0), curvature="fisher"
    )
    assert one.labels == tuple(
        f"ngvi(step_size={a}, prior_scale={s}, curvature=fisher)"
        for a, s in (("0.5", 1), ("0.5", 4), ("1", 1), ("1", 4))
    )
    box = nt.online.Box(loc=3.0, scale=1.0)
    assert grid(nt.online.svb, step_size=np.array([0.1]), box=box).constants == {
        "box": box
    }
    state = jax.eval_shape(RULE.init, make_prior())
    assert [m.posterior.loc.shape for m in expert_states(state)] == [(4, D), (3, D)]


def test_arguments_are_checked():
    for bad in ([0.1, -1.0], [np.nan]):
        with pytest.raises(
            ValueError, match=r"step_size must be positive.*will do too"
        ):
            grid(nt.online.svb, step_size=bad)
    for name in ("alpha", "prior_scale"):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
            grid(nt.online.ngvi, **{name: [1.0, 0.0]})
    with pytest.raises(
        TypeError,
        match=r"^curvature must be a.*a grid of its own.*aggregate takes several",
    ):
        grid(nt.online.ngvi, curvature=["hessian", "fisher"])
    with pytest.raises(ValueError, match=r"a number or a sequence.*of some, got shape"):
        grid(nt.online.svb, step_size=[[0.1]])
    with pytest.raises(TypeError, match=r"^the factory.*must return an online rule"):
        grid(lambda c: c, c=[1.0])
    one = grid(nt.online.svb, step_size=[0.1])
    with pytest.raises(
        ValueError, match=r"^aggregate needs.*at least one grid.*of rules, from"
    ):
        aggregate()
    with pytest.raises(TypeError, match="takes grids of rules"):
        aggregate(nt.online.svb(0.1))
    for bad in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"share must be in \[0, 1\)"):
            aggregate(one, share=bad)
    with pytest.raises(
        ValueError, match=r"learning_rate must be positive.*will do too"
    ):
        aggregate(one, learning_rate=0.0)
    low = nt.gaussian.families.LowRank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1)))
    with pytest.raises(
        TypeError,
        match=r"^aggregate does not.*MeanField or FullRank.*ngvi works on all",
    ):
        aggregate(one).init(low)
    with pytest.raises(ValueError, match=r"^points must have.*shape \(K, d\)"):
        ewa_grid([1.0, 2.0])
    with pytest.raises(ValueError, match=r"^points have.*2 coordinates, the prior 3"):
        ewa_grid([[1.0, 2.0]]).init(make_prior())
    with pytest.raises(ValueError, match=r"num_switches.*integer of at least"):
        regret_bound(aggregate(one).init(make_prior()), -1)
    with pytest.raises(
        TypeError, match=r"^an aggregate.*run it by.*nt.online.run, update or OnlineVI"
    ):
        aggregate(one).update(None, None)
