"""Step sizes of the theorems, the constants that they need, restarts, and averages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.online import Box
from numpyro_tempered.online.rates import (
    doubling,
    ewa_rate,
    oga_rate,
    sva_rate,
    svb_constant,
    svb_strongly_convex_rate,
)
from numpyro_tempered.online.streams.average import (
    RunningAverage,
    average,
    with_average,
)
from numpyro_tempered.theory.bounds import (
    diameter,
    lipschitz,
    lipschitz_squared,
    strong_convexity,
)

HINGE = nt.expectations.hinge()
LOGISTIC = nt.expectations.logistic()
SQUARED = nt.expectations.squared()


def stream(num_rounds, d=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rounds, d))
    return jnp.asarray(x), jnp.asarray(
        np.where(x[:, 0] + rng.normal(size=num_rounds) > 0, 1.0, -1.0)
    )


@pytest.fixture(params=["op by op", pytest.param("compiled", marks=pytest.mark.full)])
def loops(request):
    """In Python: programs of one operation each, which all rules share, in place of one for each rule."""
    with jax.disable_jit(request.param == "op by op"):
        yield request.param


# Constants


def largest_gradient(expectation, x, y, box, seed=0, number=400):
    """The largest gradient in (m, σ) found at random points of the box."""
    rng = np.random.default_rng(seed)
    d = x.shape[1]
    loc = rng.uniform(-1, 1, (number, d)) * np.asarray(box.loc)
    # Corners are where the squared loss is steepest.
    loc[: number // 2] = np.sign(loc[: number // 2]) * np.asarray(box.loc)
    scale = rng.uniform(0, 1, (number, d)) * np.asarray(box.scale)
    scale[: number // 2] = box.scale

    @jax.jit
    def norms(loc, scale):
        def one(loc, scale, row, label):
            q = MeanField(loc, scale)
            found = expectation.evaluate(q, row, label)
            return jnp.sqrt(
                jnp.sum(found.grad_loc**2) + jnp.sum((2 * scale * found.grad_var) ** 2)
            )

        over_rows = jax.vmap(one, (None, None, 0, 0))
        return jax.vmap(over_rows, (0, 0, None, None))(loc, scale, x, y)

    return float(np.max(norms(loc, scale)))


@pytest.mark.parametrize(
    "expectation",
    [HINGE, pytest.param(LOGISTIC, marks=pytest.mark.full)],
    ids=["hinge", "logistic"],
)
def test_the_row_norm_bounds_the_gradients_and_is_nearly_reached(x64, expectation):
    x, y = stream(20, d=3)
    found = largest_gradient(expectation, x, y, Box(loc=8.0, scale=2.0))
    assert 0.9 * lipschitz(x) < found <= lipschitz(x) * (1 + 1e-12)


def test_the_squared_loss_has_its_constant_on_a_box(x64):
    x, y = stream(20, d=3)
    box = Box(loc=jnp.array([1.0, 2.0, 0.5]), scale=jnp.array([0.3, 1.0, 2.0]))
    found = largest_gradient(SQUARED, x, y, box)
    assert (
        0.9 * lipschitz_squared(x, y, box)
        < found
        <= lipschitz_squared(x, y, box) * (1 + 1e-12)
    )


def test_diameter_of_a_box():
    box = Box(loc=np.array([1.0, 2.0]), scale=3.0)
    np.testing.assert_allclose(diameter(box, 2) ** 2, 4 * (1 + 4) + 2 * (9 + 9))
    np.testing.assert_allclose(diameter(box, 2, point=True), 2 * np.sqrt(5))
    np.testing.assert_allclose(diameter(Box(loc=1.0), 4, point=True), 4.0)


def full_rank_kl(free, loc, factor):
    """KL of N(m, L L') from N(loc, factor factor'), with free = (m, the lower triangle of L)."""
    d = len(loc)
    own = np.zeros((d, d))
    own[np.tril_indices(d)] = free[d:]
    ratio, shift = np.linalg.solve(factor, own), np.linalg.solve(factor, free[:d] - loc)
    return 0.5 * (np.sum(ratio**2) + np.sum(shift**2) - d) - np.sum(
        np.log(np.diagonal(ratio))
    )


def hessian_of_kl(free, factor):
    """Its second derivatives: the prior's precision in m and each column of L, and 1 / L_ii² on the diagonal."""
    d = len(factor)
    precision = np.linalg.inv(factor @ factor.T)
    row, column = np.tril_indices(d)
    of_factor = precision[np.ix_(row, row)] * (column[:, None] == column)
    of_factor += np.diag(np.where(row == column, free[d:], np.inf) ** -2.0)
    return np.block(
        [[precision, np.zeros((d, len(row)))], [np.zeros((len(row), d)), of_factor]]
    )


@pytest.mark.parametrize(
    "factor", [np.diag([0.5, 2.0]), np.array([[1.5, 0.0], [0.7, 0.4]])]
)
def test_kl_is_as_convex_as_stated_and_no_more(x64, factor):
    loc = np.array([0.3, -1.0])
    prior = FullRank(jnp.asarray(loc), jnp.asarray(factor))
    stated = strong_convexity(prior)
    if factor[1, 0] == 0:
        np.testing.assert_allclose(
            strong_convexity(MeanField(prior.loc, jnp.asarray(np.diag(factor)))), stated
        )
    near, wide = (
        np.array([0.0, 0.0, 1.0, 0.2, 1.0]),
        np.array([0.0, 0.0, 1e4, 0.0, 1e4]),
    )
    np.testing.assert_allclose(
        full_rank_kl(near, loc, factor),
        jax.jit(nt.gaussian.families.full_rank.kl)(
            FullRank(np.zeros(2), np.array([[1.0, 0.0], [0.2, 1.0]])), prior
        ),
        rtol=1e-10,
    )
    hessian = hessian_of_kl(near, factor)
    steps = 1e-3 * np.eye(5)
    found = [
        [
            sum(
                i * j * full_rank_kl(near + i * a + j * b, loc, factor)
                for i in (-1, 1)
                for j in (-1, 1)
            )
            for b in steps
        ]
        for a in steps
    ]
    np.testing.assert_allclose(np.array(found) / 4e-6, hessian, rtol=1e-4, atol=1e-4)
    assert np.linalg.eigvalsh(hessian)[0] >= stated * (1 - 1e-9)
    # The logarithm has no curvature left for a wide posterior.
    np.testing.assert_allclose(
        np.linalg.eigvalsh(hessian_of_kl(wide, factor))[0], stated, rtol=1e-6
    )


# Rates


@given(
    st.integers(1, 10**6),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
)
@settings(deadline=None, max_examples=50)
def test_rates_make_the_two_terms_of_their_bounds_equal(
    num_rounds, kl, constant, convexity
):
    eta = sva_rate(num_rounds, kl=kl, lipschitz=constant, strong_convexity=convexity)
    np.testing.assert_allclose(eta * constant**2 * num_rounds / convexity, kl / eta)
    eta = ewa_rate(num_rounds, kl=kl, loss_range=constant)
    np.testing.assert_allclose(eta * constant**2 * num_rounds / 8, kl / eta)
    c = svb_constant(lipschitz=constant, diameter=convexity)
    # The sum of 1/sqrt(t) is at most 2 sqrt(T).
    np.testing.assert_allclose(c * constant**2, convexity**2 / (2 * c))


def test_the_rates_of_oga_and_of_strongly_convex_svb():
    count = jnp.arange(1, 9)
    rate = oga_rate(lipschitz=2.0, diameter=3.0)
    np.testing.assert_allclose(
        rate(count), 3.0 / (2.0 * np.sqrt(2 * np.arange(1, 9))), rtol=1e-6
    )
    strong = svb_strongly_convex_rate(4.0)
    q = MeanField(jnp.zeros(2), jnp.array([0.5, 2.0]))
    np.testing.assert_allclose(
        strong(jnp.int32(5), q), 2 / (4 * 5 * np.array([0.25, 4.0])), rtol=1e-6
    )


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_the_strongly_convex_rate_survives_vanishing_scales_in_float32():
    scales = jnp.asarray(10.0 ** -np.arange(0, 25, 4, dtype=float), jnp.float32)
    rule = nt.online.svb(svb_strongly_convex_rate(0.5))
    x, y = jnp.ones((50, len(scales)), jnp.float32) / 3, jnp.ones(50, jnp.float32)
    state = rule.init(MeanField(jnp.zeros(len(scales), jnp.float32), scales))
    state, losses = nt.online.run(rule, SQUARED, state, x, y)
    assert (int(state.count), int(state.rejected)) == (50, 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((state, losses)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: lipschitz(np.zeros((3, 2))),
            r"L must be positive.*finite, and not all",
        ),
        (lambda: lipschitz([[np.nan]]), r"L must be positive.*finite, and not all"),
        (
            lambda: lipschitz([[1.0]], slope=0.0),
            r"slope must be positive.*and finite, got",
        ),
        (
            lambda: lipschitz_squared([[1.0]], [1.0], Box(loc=1.0)),
            r"box\.scale must be positive and finite, got inf.*bounded set.*box with finite bounds",
        ),
        (
            lambda: diameter(Box(scale=1.0), 2),
            r"box\.loc must be positive and finite, got inf.*bounded set",
        ),
        (
            lambda: diameter(Box(scale=1.0), 2, point=True),
            r"box\.loc must be positive and finite, got inf.*bounded set.*box with finite bounds",
        ),
        (
            lambda: sva_rate(0, kl=1.0, lipschitz=1.0, strong_convexity=1.0),
            "num_rounds must be positive",
        ),
        (
            lambda: sva_rate(9, kl=np.inf, lipschitz=1.0, strong_convexity=1.0),
            "kl must be positive and finite",
        ),
        (
            lambda: ewa_rate(9, kl=1.0, loss_range=-1.0),
            r"loss_range must be positive.*and finite, got",
        ),
        (
            lambda: svb_constant(lipschitz=1.0, diameter=np.inf),
            "diameter must be positive and finite",
        ),
        (
            lambda: svb_strongly_convex_rate(0.0),
            r"curvature must be positive.*and finite, got",
        ),
        (
            lambda: doubling(nt.online.sva, 0.0),
            r"rate must be positive.*and finite, got",
        ),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_other_families_have_no_known_convexity():
    with pytest.raises(TypeError, match=r"MeanField and FullRank.*priors, got"):
        strong_convexity(jnp.zeros(3))


# Doubling


@pytest.mark.full
def test_doubling_is_a_chain_of_runs_from_the_prior(x64, loops):
    make = partial(nt.online.sva, box=Box(loc=0.5))
    num_rounds = 6 if loops == "compiled" else 4
    prior = MeanField(jnp.array([0.2, -0.4]), jnp.array([0.7, 1.5]))
    x, y = stream(num_rounds)
    rule = doubling(make, 0.8)
    state, losses = nt.online.run(rule, HINGE, rule.init(prior), x, y)
    pieces, start = [], 0
    while start < num_rounds:
        length = start + 1
        own = make(0.8 / np.sqrt(length))
        end = min(start + length, num_rounds)
        last, piece = nt.online.run(
            own, HINGE, own.init(prior), x[start:end], y[start:end]
        )
        pieces.append(piece.expected)
        start = end
    np.testing.assert_allclose(losses.expected, np.concatenate(pieces), rtol=1e-12)
    for ours, theirs in zip(
        jax.tree.leaves(state.posterior), jax.tree.leaves(last.posterior), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert int(state.count) == num_rounds


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_rejected_round_does_not_count_for_the_restarts(x64, loops, dtype):
    prior = MeanField(jnp.zeros(2, dtype), jnp.ones(2, dtype))
    x, y = (np.asarray(array, dtype) for array in stream(6))
    rule = doubling(nt.online.sva, 0.5)

    def with_a_bad_round(at):
        rows, labels = np.insert(x, at, np.nan, axis=0), np.insert(y, at, 1.0)
        return nt.online.run(rule, HINGE, rule.init(prior), rows, labels)[0]

    within, behind = with_a_bad_round(2), with_a_bad_round(6)
    assert (int(within.count), int(within.rejected)) == (6, 1)
    np.testing.assert_array_equal(within.posterior.loc, behind.posterior.loc)


def test_doubling_of_ewa_starts_again_too(x64):
    prior = FullRank(jnp.zeros(2), jnp.eye(2))
    x, y = stream(7)
    rule = doubling(nt.online.ewa, 0.4)
    state = rule.init(prior)
    for t in range(6):
        state, _ = nt.online.update(rule, SQUARED, state, x[t], y[t])
    x, y = np.asarray(x), np.asarray(y)
    precision = np.eye(2) + 2 * 0.2 * x[3:6].T @ x[3:6]
    np.testing.assert_allclose(
        state.posterior.loc,
        np.linalg.solve(precision, 2 * 0.2 * x[3:6].T @ y[3:6]),
        rtol=1e-10,
    )
    # Rounds 4 to 7 are the last phase: at its end the posterior is the prior again.
    state, _ = nt.online.update(rule, SQUARED, state, x[6], y[6])
    np.testing.assert_array_equal(state.posterior.loc, prior.loc)


@pytest.mark.full
def test_a_run_of_doubled_ewa_starts_again_too(x64):
    prior = FullRank(jnp.zeros(2), jnp.eye(2))
    x, y = stream(7)
    rule = doubling(nt.online.ewa, 0.4)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    # Rounds 4 to 7 are in the last phase, which has just ended: the posterior is the prior again.
    np.testing.assert_array_equal(state.posterior.loc, prior.loc)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x[:6], y[:6])
    precision = np.eye(2) + 2 * 0.2 * np.asarray(x[3:6]).T @ np.asarray(x[3:6])
    mean = np.linalg.solve(
        precision, 2 * 0.2 * np.asarray(x[3:6]).T @ np.asarray(y[3:6])
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-10)


# Averages


def test_the_average_is_that_of_the_means_before_each_round(x64, loops):
    num_rounds, bad = (9, 4) if loops == "compiled" else (5, 2)
    x, y = stream(num_rounds)
    x = np.array(x)
    x[bad] = np.nan
    prior = MeanField(jnp.array([0.2, -0.4]), jnp.array([0.7, 1.5]))
    plain = doubling(nt.online.sva, 0.5)
    rule = with_average(plain)
    state, kept = plain.init(prior), rule.init(prior)
    np.testing.assert_array_equal(average(kept), prior.loc)
    means = []
    for t in range(num_rounds):
        if t != bad:
            means.append(np.asarray(state.posterior.loc))
        state, losses = nt.online.update(plain, HINGE, state, x[t], y[t])
        kept, same = nt.online.update(rule, HINGE, kept, x[t], y[t])
        np.testing.assert_array_equal(losses.expected, same.expected)
        np.testing.assert_allclose(average(kept), np.mean(means, axis=0), rtol=1e-13)
    assert isinstance(kept.memory, RunningAverage)
    assert (int(kept.memory.count), int(kept.rejected)) == (num_rounds - 1, 1)
    for ours, theirs in zip(
        jax.tree.leaves(kept.posterior), jax.tree.leaves(state.posterior), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    "num_rounds", [2**16, pytest.param(2**18, marks=pytest.mark.full)]
)
def test_the_average_is_compensated_in_float32(num_rounds):
    # The mean stays at 0.1, whose plain float32 sum drifts.
    rule = with_average(nt.online.sva(1e-30))
    state = rule.init(
        MeanField(jnp.full(1, 0.1, jnp.float32), jnp.ones(1, jnp.float32))
    )
    x = jnp.zeros((num_rounds, 1), jnp.float32)
    state, _ = nt.online.run(rule, HINGE, state, x, jnp.ones(num_rounds, jnp.float32))
    np.testing.assert_allclose(average(state), np.float32(0.1), rtol=2e-7)
    plain = np.cumsum(np.full(num_rounds, 0.1, np.float32))[-1] / num_rounds
    assert abs(plain / np.float32(0.1) - 1) > 1e-5


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_rule_that_takes_its_own_steps_is_averaged_too(x64, loops):
    inner = nt.online.svb(0.3)

    def step(expectation, state, data, rng_key, mask):
        return nt.online.stream.step(inner, expectation, state, data, rng_key)

    own = with_average(inner._replace(step=step, update=None))
    plain = with_average(inner)
    x, y = stream(6)
    x = np.array(x)
    x[2] = np.nan
    prior = MeanField(jnp.zeros(2), jnp.ones(2))
    first, _ = nt.online.run(own, HINGE, own.init(prior), x, y)
    second, _ = nt.online.run(plain, HINGE, plain.init(prior), x, y)
    np.testing.assert_array_equal(average(first), average(second))
    assert int(first.memory.count) == 5


def test_a_rule_that_was_not_averaged_has_no_average():
    state = nt.online.svb(0.3).init(MeanField(jnp.zeros(2), jnp.ones(2)))
    with pytest.raises(
        TypeError,
        match=r"^the state.*with_average\(rule\).*is RunningAverage; got tuple",
    ):
        average(state)
