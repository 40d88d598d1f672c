"""One table of rules, and what each of them must satisfy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import closes_over_a_tracer, tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.online import Box

pytestmark = pytest.mark.usefixtures("strict")

RULES = {
    "oga": partial(nt.online.oga, 0.3),
    "oga_el": partial(nt.online.oga_el, 0.3),
    "sva": partial(nt.online.sva, 0.3),
    "svb": partial(nt.online.svb, 0.3),
    "svb_rate": partial(nt.online.svb, nt.online.svb_rate(0.5)),
    "ngvi": partial(nt.online.ngvi, 0.7),
    "ngvi_evidence": partial(nt.online.ngvi, 0.7, evidence=4.0),
    "ngvi_fisher": partial(nt.online.ngvi, 0.7, curvature="fisher"),
}
# One instance each: compiled programs are shared by every test that uses the same shapes.
UNBOXED = {name: make() for name, make in RULES.items()}
TRACES = []


def counted(expectation):
    def evaluate(*args, **kwargs):
        TRACES.append(1)
        return expectation.evaluate(*args, **kwargs)

    return expectation._replace(evaluate=evaluate)


HINGE = counted(nt.expectations.hinge())
LOGISTIC = counted(nt.expectations.logistic())
SQUARED = nt.expectations.squared()
HALF_SQUARED = nt.expectations.gauss_hermite(
    lambda u, y: 0.5 * jnp.square(y - u), num_nodes=4
)


@pytest.fixture(params=RULES)
def name(request):
    return request.param


# Whose loop is compiled by default.
compiled = pytest.mark.parametrize("name", tiered(RULES, unit=["ngvi_evidence"]))


def make_prior(d=3, dtype=None):
    loc = np.array([0.2, -0.5, 0.0, 1.0, -0.1])[:d]
    return MeanField(
        jnp.asarray(loc, dtype), jnp.asarray([0.7, 1.5, 0.3, 1.0, 2.0][:d], dtype)
    )


def make_stream(num_rounds, d=3, dtype=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rounds, d))
    y = np.where(x[:, 0] + rng.normal(size=num_rounds) > 0, 1.0, -1.0)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def by_hand(rule, expectation, state, x, y):
    """One round without the driver: the evaluation and the state after."""
    # Compiled, for one program a loss; the rules share the small programs of their operations.
    evaluate = jax.jit(expectation.evaluate, static_argnames="curvature")
    evaluation = evaluate(state.posterior, x, y, curvature=rule.curvature)
    return evaluation, rule.update(evaluation, state)


# Protocol


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.full)]
)
def test_update_preserves_structure_shapes_and_dtypes(x64, name, dtype):
    rule = UNBOXED[name]
    state = rule.init(make_prior(dtype=dtype))
    x, y = make_stream(1, dtype=dtype)
    assert (int(state.count), int(state.rejected)) == (0, 0)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.posterior, state.prior))} == {
        jnp.dtype(dtype)
    }
    after, losses = jax.eval_shape(
        lambda s, x, y: nt.online.update(rule, HINGE, s, x, y), state, x[0], y[0]
    )
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert {(leaf.shape, leaf.dtype) for leaf in losses} == {((), jnp.dtype(dtype))}


def test_init_starts_at_the_prior_or_at_its_mean(name):
    prior = make_prior(dtype=jnp.float32)
    state = UNBOXED[name].init(prior)
    assert_same(state.prior, prior)
    scale = jnp.zeros_like(prior.scale) if UNBOXED[name].point else prior.scale
    assert_same(state.posterior, MeanField(prior.loc, scale))
    assert UNBOXED[name].point == (name == "oga")
    boxed = RULES[name](box=Box(loc=0.1, scale=0.5)).init(prior)
    assert_same(
        boxed.posterior,
        MeanField(jnp.clip(prior.loc, -0.1, 0.1), jnp.minimum(scale, 0.5)),
    )


@compiled
@pytest.mark.parametrize("d", tiered([1, 5], unit=[5]))
@pytest.mark.parametrize(
    "expectation",
    [HINGE, pytest.param(LOGISTIC, marks=pytest.mark.full)],
    ids=["hinge", "logistic"],
)
def test_run_is_a_loop_of_update_bit_for_bit_and_compiles_once(name, expectation, d):
    rule, num_rounds = UNBOXED[name], 7
    x, y = make_stream(num_rounds, d, jnp.float32)
    start = state = rule.init(make_prior(d, jnp.float32))
    all_losses = []
    for t in range(num_rounds):
        state, losses = nt.online.update(rule, expectation, state, x[t], y[t])
        all_losses.append(losses)
        if t == 0:
            traces = len(TRACES)
    assert len(TRACES) == traces
    assert (int(state.count), int(state.rejected)) == (num_rounds, 0)
    ran, ran_losses = nt.online.run(rule, expectation, start, x, y)
    assert_same(ran, state)
    assert_same(ran_losses, jax.tree.map(lambda *rows: np.stack(rows), *all_losses))
    assert not np.array_equal(state.posterior.loc, start.posterior.loc)
    for total, losses in zip(state.cumulative, ran_losses, strict=True):
        np.testing.assert_allclose(
            total.value, np.sum(np.asarray(losses, float)), rtol=1e-6
        )
    traces = len(TRACES)
    nt.online.run(rule, expectation, state, x, y)
    assert len(TRACES) == traces


@compiled
def test_driver_is_evaluate_then_update(name):
    rule = UNBOXED[name]
    x, y = make_stream(7, 5, jnp.float32)
    state = rule.init(make_prior(5, jnp.float32))
    for t in range(3):
        evaluation, expected = by_hand(rule, HINGE, state, x[t], y[t])
        state, losses = nt.online.update(rule, HINGE, state, x[t], y[t])
        # Compilation may fuse and reorder: a few roundings of sums of five terms.
        np.testing.assert_allclose(losses.expected, evaluation.expected, rtol=1e-5)
        np.testing.assert_allclose(
            losses.at_mean, evaluation.at_mean, rtol=1e-5, atol=1e-6
        )
        for ours, theirs in zip(state.posterior, expected.posterior, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@compiled
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_round_that_is_not_finite_is_refused(name, bad):
    rule, d = UNBOXED[name], 5
    x, y = make_stream(4, d, jnp.float32)
    x, y = np.array(x), np.array(y)
    row = x[0].copy()
    row[2] = bad
    spoiled = [(row, y[0])] + ([(x[0], np.float32(bad))] if np.isnan(bad) else [])
    clean = dirty = rule.init(make_prior(d, jnp.float32))
    refused = 0
    for t in range(4):
        if t in (0, 2):
            for datum in spoiled:
                after, losses = nt.online.update(rule, HINGE, dirty, *datum)
                refused += 1
                assert_same(after, dirty._replace(rejected=jnp.int32(refused)))
                dirty = after
        clean, losses = nt.online.update(rule, HINGE, clean, x[t], y[t])
        dirty, same = nt.online.update(rule, HINGE, dirty, x[t], y[t])
        assert_same(same, losses)
    assert_same(dirty, clean._replace(rejected=jnp.int32(refused)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_outcome_that_is_not_finite_is_refused_within_a_run(bad):
    rule = UNBOXED["ngvi"]
    x, y = make_stream(6, 2, jnp.float32)
    state = rule.init(make_prior(2, jnp.float32))
    dirty, losses = nt.online.run(rule, SQUARED, state, x, y.at[3].set(bad))
    keep = np.array([0, 1, 2, 4, 5])
    clean, clean_losses = nt.online.run(rule, SQUARED, state, x[keep], y[keep])
    assert (int(dirty.count), int(dirty.rejected)) == (5, 1)
    assert_same(dirty._replace(rejected=clean.rejected), clean)
    assert_same(jax.tree.map(lambda leaf: leaf[keep], losses), clean_losses)


def test_a_step_that_overflows_is_refused():
    # Data, loss and gradient are finite in float32; the step is not.
    rule = nt.online.oga(1e25)
    state = rule.init(MeanField(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)))
    after, _ = nt.online.update(
        rule, HINGE, state, jnp.full(1, 1e19, jnp.float32), jnp.float32(1.0)
    )
    assert_same(after, state._replace(rejected=jnp.int32(1)))


@pytest.mark.full
def test_vmap_over_streams_is_one_run_each(name):
    rule = UNBOXED[name]
    streams = [make_stream(7, 5, jnp.float32, seed) for seed in (1, 2, 3)]
    priors = [
        make_prior(5, jnp.float32)._replace(loc=jnp.full(5, shift, jnp.float32))
        for shift in (0.0, 0.3, -1.0)
    ]
    stack = partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    states, losses = jax.vmap(
        lambda p, x, y: nt.online.run(rule, HINGE, rule.init(p), x, y)
    )(stack(*priors), *stack(*streams))
    for i, (prior, stream) in enumerate(zip(priors, streams, strict=True)):
        state, loss = nt.online.run(rule, HINGE, rule.init(prior), *stream)
        assert int(states.count[i]) == 7
        np.testing.assert_allclose(
            np.asarray(losses.expected)[i], loss.expected, rtol=1e-4, atol=1e-5
        )
        for ours, theirs in zip(states.posterior, state.posterior, strict=True):
            np.testing.assert_allclose(
                np.asarray(ours)[i], theirs, rtol=1e-4, atol=1e-5
            )


def test_a_datum_that_is_not_finite_is_refused_though_the_loss_is():
    blind = nt.expectations.gauss_hermite(lambda u, y: jnp.square(u), num_nodes=4)
    state = UNBOXED["ngvi"].init(make_prior(2, jnp.float32))
    x = jnp.ones(2, jnp.float32)
    after, losses = nt.online.update(
        UNBOXED["ngvi"], blind, state, x, jnp.float32(np.nan)
    )
    assert np.isfinite(losses.expected)
    assert_same(after, state._replace(rejected=jnp.int32(1)))


def test_one_key_serves_a_whole_stream(key):
    def draw(q, x, y, *, rng_key, curvature):
        zero = jnp.zeros((), jnp.float32)
        return Evaluation(
            zero,
            jax.random.uniform(rng_key, (), jnp.float32),
            zero * q.loc,
            zero * q.loc,
        )

    # The gradients are zero, so losses differ by their draws alone.
    check_one_key(
        HINGE._replace(evaluate=draw, needs_key=True), nt.online.oga(1.0), key
    )


@pytest.mark.full
def test_one_key_serves_a_whole_stream_of_losses(key):
    expectation = nt.expectations.monte_carlo(
        lambda theta, x, y: jax.nn.softplus(-y * jnp.sum(x * theta))
    )
    # The step is too small to move q, so losses differ by their draws alone.
    check_one_key(expectation, nt.online.sva(1e-12), key)


def check_one_key(expectation, rule, key):
    x, y = make_stream(1, 2, jnp.float32)
    x, y = jnp.repeat(x, 4, axis=0), jnp.repeat(y, 4)
    start = state = rule.init(make_prior(2, jnp.float32))
    for t in range(4):
        state, _ = nt.online.update(rule, expectation, state, x[t], y[t], rng_key=key)
    ran, losses = nt.online.run(rule, expectation, start, x, y, rng_key=key)
    assert_same(ran, state)
    assert len(np.unique(losses.expected)) == 4
    assert len(np.unique(losses.at_mean)) == 1
    _, other = nt.online.run(rule, expectation, start, x, y, rng_key=jax.random.key(1))
    assert not np.intersect1d(losses.expected, other.expected).size


@compiled
def test_a_run_of_one_round(name):
    rule = UNBOXED[name]
    x, y = make_stream(1, 5, jnp.float32)
    state = rule.init(make_prior(5, jnp.float32))
    after, losses = nt.online.run(rule, HINGE, state, x, y)
    expected, loss = nt.online.update(rule, HINGE, state, x[0], y[0])
    assert_same(after, expected)
    assert_same(losses, jax.tree.map(lambda leaf: leaf[None], loss))


# The printed objectives

SCHEDULE = {"constant": lambda t: 0.4, "schedule": lambda t: 0.6 / t**0.5}
BOXES = {"no box": None, "box": Box(loc=0.45, scale=0.45)}
# A loss with curvature of both signs lets scales grow into the box.
WAVE = nt.expectations.gauss_hermite(lambda u, y: jnp.square(jnp.sin(u - y)))


def bounds(box):
    return (np.inf, np.inf) if box is None else box


def step_sizes(schedule):
    """The schedule as the package takes it, and as a plain function of the round."""
    plain = SCHEDULE[schedule]
    ours = (
        0.4
        if schedule == "constant"
        else lambda t: 0.6 * jax.lax.rsqrt(t.astype(jnp.float64))
    )
    return ours, plain


def rounds(box):
    """An expectation and a stream: convex without a box, not convex with one."""
    x, y = make_stream(8)
    return (
        (HINGE, zip(x, y, strict=True))
        if box is None
        else (WAVE, zip(0.5 * x, y, strict=True))
    )


def assert_binds(states, box, scales_can_grow=True):
    if box is None:
        return
    locs = np.abs([s.posterior.loc for s in states])
    scales = np.array([s.posterior.scale for s in states])
    assert np.any(locs == box.loc)
    assert np.any(locs < box.loc)
    assert np.any(scales == box.scale) == scales_can_grow
    assert np.any(scales < box.scale)


def assert_argmin(state, argmin):
    np.testing.assert_allclose(state.posterior.loc, argmin[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(state.posterior.scale, argmin[1], rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "schedule", "boxed"),
    tiered(
        itertools.product(["sva", "svb"], SCHEDULE, BOXES),
        unit=[
            ("sva", "constant", "box"),
            ("sva", "schedule", "no box"),
            ("svb", "schedule", "box"),
        ],
    ),
)
def test_sva_and_svb_minimise_their_objectives(x64, name, schedule, boxed):
    accumulate, box = name == "sva", BOXES[boxed]
    step_size, plain = step_sizes(schedule)
    rule = (nt.online.sva if accumulate else nt.online.svb)(step_size, box=box)
    prior = make_prior()
    state, states = rule.init(prior), []
    summed = np.zeros((2, 3))
    expectation, stream = rounds(box)
    for t, (x, y) in enumerate(stream, start=1):
        q = state.posterior
        evaluation, state = by_hand(rule, expectation, state, x, y)
        states.append(state)
        gradient = np.array([evaluation.grad_loc, 2 * q.scale * evaluation.grad_var])
        summed += gradient
        anchor, grads = (prior, summed) if accumulate else (q, gradient)
        assert_argmin(
            state, oracles.argmin_source(*grads, *anchor, plain(t), *bounds(box))
        )
    assert int(state.count) == 8
    assert_binds(states, box)


@pytest.mark.parametrize(
    ("schedule", "boxed"),
    tiered(
        itertools.product(SCHEDULE, BOXES),
        unit=[("constant", "no box"), ("schedule", "box")],
    ),
)
def test_svb_with_finite_evidence_minimises_objective_8_in_means_and_scales(
    x64, schedule, boxed
):
    box, (step_size, plain) = BOXES[boxed], step_sizes(schedule)
    rule = nt.online.svb(step_size, box=box, evidence=1.7)
    state = rule.init(make_prior())
    expectation, stream = rounds(box)
    for t, (x, y) in enumerate(stream, start=1):
        q = state.posterior
        evaluation, state = by_hand(rule, expectation, state, x, y)
        gradient = (evaluation.grad_loc, 2 * q.scale * evaluation.grad_var)
        argmin = oracles.argmin_source_to_prior(
            *gradient, q, make_prior(), plain(t), 1.7, *bounds(box)
        )
        assert_argmin(state, argmin)


@pytest.mark.full
def test_svb_with_finite_evidence_minimises_objective_8_on_a_full_covariance(x64):
    from scipy.optimize import minimize

    prior = FullRank(jnp.array([0.2, -0.5]), jnp.array([[0.7, 0.0], [0.4, 1.2]]))
    rule = nt.online.svb(0.4, evidence=1.7)
    state = rule.init(prior)
    rows, columns = np.tril_indices(2)

    def divergence(m, factor, p):
        inverse = np.linalg.inv(p.factor @ p.factor.T)
        trace, shift = np.trace(inverse @ factor @ factor.T), m - p.loc
        logs = np.log(np.abs(np.diag(factor)) / np.abs(np.diag(p.factor)))
        return 0.5 * (trace + shift @ inverse @ shift - 2) - np.sum(logs)

    for x, y in zip(*make_stream(4, d=2), strict=True):
        q = state.posterior
        evaluation, state = by_hand(rule, HINGE, state, x, y)
        in_factor = 2 * np.asarray(evaluation.grad_var.dense()) @ np.asarray(q.factor)

        def objective(mu, q=q, evaluation=evaluation, in_factor=in_factor):
            factor = np.zeros((2, 2))
            factor[rows, columns] = mu[2:]
            linear = np.asarray(evaluation.grad_loc) @ mu[:2] + np.sum(
                in_factor * factor
            )
            return (
                linear
                + divergence(mu[:2], factor, prior) / 1.7
                + divergence(mu[:2], factor, q) / 0.4
            )

        start = np.r_[q.loc, np.asarray(q.factor)[rows, columns]]
        best = minimize(objective, start, method="BFGS", options={"gtol": 1e-8})
        ours = np.r_[
            state.posterior.loc, np.asarray(state.posterior.factor)[rows, columns]
        ]
        np.testing.assert_allclose(ours, best.x, atol=2e-6)


def test_svb_refuses_evidence_that_it_cannot_have():
    for step_size, box in (
        (nt.online.svb_rate(0.5), None),
        (0.1, nt.online.Ball(1.0, 1.0)),
    ):
        with pytest.raises(ValueError, match=r"finite evidence .*objective \(7\)"):
            nt.online.svb(step_size, box, evidence=2.0)
    with pytest.raises(ValueError, match=r"evidence must be.*positive, got"):
        nt.online.svb(0.1, evidence=0.0)


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_svb_rate_minimises_objective_7(x64, box):
    rule, same = (
        nt.online.svb(rate, box=box)
        for rate in (nt.online.svb_rate(0.5), svb_rate_by_hand)
    )
    state, states = rule.init(make_prior()), []
    expectation, stream = rounds(box)
    for t, (x, y) in enumerate(stream, start=1):
        q = state.posterior
        _, alternative = by_hand(same, expectation, state, x, y)
        evaluation, state = by_hand(rule, expectation, state, x, y)
        states.append(state)
        eta = 0.5 / (np.sqrt(t) * np.asarray(q.scale) ** 2)
        grads = (evaluation.grad_loc, 2 * q.scale * evaluation.grad_var)
        assert_argmin(state, oracles.argmin_source(*grads, *q, eta, *bounds(box)))
        assert_argmin(alternative, state.posterior)
    assert_binds(states, box)


def svb_rate_by_hand(t, q):
    return 0.5 / (jnp.sqrt(t.astype(q.scale.dtype)) * jnp.square(q.scale))


@pytest.mark.parametrize(
    ("curvature", "evidence", "schedule", "boxed"),
    tiered(
        itertools.product(["hessian", "fisher"], [np.inf, 4.0, 0.5], SCHEDULE, BOXES),
        unit=[
            ("hessian", np.inf, "schedule", "box"),
            ("hessian", 4.0, "constant", "no box"),
            ("hessian", 0.5, "constant", "box"),
            ("fisher", np.inf, "constant", "no box"),
            ("fisher", 0.5, "schedule", "box"),
        ],
    ),
)
def test_ngvi_minimises_objective_8(x64, curvature, evidence, schedule, boxed):
    box = BOXES[boxed]
    step_size, plain = step_sizes(schedule)
    rule = nt.online.ngvi(step_size, evidence=evidence, curvature=curvature, box=box)
    prior = make_prior()
    state, states = rule.init(prior), []
    expectation, stream = rounds(box)
    for t, (x, y) in enumerate(stream, start=1):
        q = state.posterior
        evaluation, state = by_hand(rule, expectation, state, x, y)
        states.append(state)
        argmin = oracles.argmin_expectation(
            evaluation.grad_loc,
            evaluation.grad_var,
            *q,
            *prior,
            plain(t),
            evidence,
            *bounds(box),
        )
        assert_argmin(state, argmin)
    assert_binds(
        states, box, scales_can_grow=curvature == "hessian" or np.isfinite(evidence)
    )


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("schedule", SCHEDULE)
def test_oga_and_oga_el_are_their_recursions(x64, schedule, box):
    step_size, plain = step_sizes(schedule)
    point, gaussian = (
        nt.online.oga(step_size, box=box),
        nt.online.oga_el(step_size, box=box),
    )
    bound, largest = bounds(box)
    prior = make_prior()
    theta = np.clip(prior.loc, -bound, bound)
    m, sigma = theta, np.minimum(prior.scale, largest)
    first, second = point.init(prior), gaussian.init(prior)
    for t, (x, y) in enumerate(zip(*make_stream(8), strict=True), start=1):
        _, first = by_hand(point, HINGE, first, x, y)
        gradient = np.where(1 - y * (x @ theta) > 0, -y * x, 0.0)
        theta = np.clip(theta - plain(t) * gradient, -bound, bound)
        np.testing.assert_allclose(first.posterior.loc, theta, rtol=1e-13, atol=1e-14)
        assert np.all(first.posterior.scale == 0)
        evaluation, second = by_hand(gaussian, HINGE, second, x, y)
        m = np.clip(m - plain(t) * evaluation.grad_loc, -bound, bound)
        sigma = np.clip(
            sigma - plain(t) * 2 * sigma * evaluation.grad_var, 0.0, largest
        )
        np.testing.assert_allclose(second.posterior.loc, m, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(
            second.posterior.scale, sigma, rtol=1e-13, atol=1e-14
        )


def test_oga_el_stops_at_scale_zero():
    rule = nt.online.oga_el(10.0)
    state = rule.init(MeanField(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)))
    for _ in range(2):
        _, state = by_hand(
            rule, SQUARED, state, jnp.ones(1, jnp.float32), jnp.float32(0.0)
        )
        np.testing.assert_array_equal(state.posterior.scale, [0.0])


def test_the_lazy_projection_of_sva_is_not_the_greedy_one(x64):
    prior, eta, bound = make_prior(1), 2.0, 0.6
    rule = nt.online.sva(eta, box=Box(loc=bound))
    state = rule.init(prior)
    rate = eta * float(prior.scale[0]) ** 2
    greedy = lazy = float(prior.loc[0])
    gap = 0.0
    x = jnp.ones(1)
    for y in (1.0, 1.0, 1.0, -1.0, -1.0, -1.0):
        clipped_before = abs(lazy) > bound
        evaluation, state = by_hand(rule, HINGE, state, x, jnp.asarray(y))
        step = rate * float(evaluation.grad_loc[0])
        lazy -= step
        greedy = np.clip(greedy - step, -bound, bound)
        np.testing.assert_allclose(
            state.posterior.loc, [np.clip(lazy, -bound, bound)], rtol=1e-12
        )
        gap = max(gap, abs(float(state.posterior.loc[0]) - greedy))
        assert clipped_before or gap < 1e-12
    assert gap > 0.1


# NGVI: evidence


def one_hot_stream(num_rounds=12, d=3):
    rng = np.random.default_rng(4)
    x = np.eye(d)[rng.integers(d, size=num_rounds)] * rng.normal(size=(num_rounds, 1))
    return x, rng.normal(size=num_rounds) * 3


@pytest.mark.parametrize(
    ("rule", "expectation", "noise_variance"),
    [
        (nt.online.ngvi(1.0), SQUARED, 0.5),
        (nt.online.ngvi(0.5), SQUARED, 1.0),
        pytest.param(nt.online.ngvi(1.0), HALF_SQUARED, 1.0, marks=pytest.mark.full),
        pytest.param(nt.online.ngvi(0.25), HALF_SQUARED, 4.0, marks=pytest.mark.full),
    ],
    ids=["squared", "half step", "half squared", "tempered"],
)
def test_ngvi_is_exact_on_a_conjugate_stream(x64, rule, expectation, noise_variance):
    prior = make_prior()
    x, y = one_hot_stream()
    mean, covariance = oracles.linear_posterior(x, y, noise_variance, *prior)
    assert np.count_nonzero(covariance) == 3
    state, _ = nt.online.run(
        rule, expectation, rule.init(prior), jnp.asarray(x), jnp.asarray(y)
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(
        state.posterior.scale**2, np.diag(covariance), rtol=1e-10
    )
    _, batch = by_hand(
        rule, expectation, rule.init(prior), jnp.asarray(x), jnp.asarray(y)
    )
    np.testing.assert_allclose(batch.posterior.loc, mean, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(
        batch.posterior.scale**2, np.diag(covariance), rtol=1e-10
    )


def test_ngvi_agrees_with_the_tempered_normal_posterior(x64):
    y = np.array([1.2, -0.4, 3.0])
    mean, sd = oracles.tempered_normal_posterior(y, 0.3, 0.5, 2.0, 1.0)
    rule = nt.online.ngvi(0.3)
    state = rule.init(MeanField(jnp.array([0.5]), jnp.array([2.0])))
    for value in y:
        _, state = by_hand(rule, HALF_SQUARED, state, jnp.ones(1), jnp.asarray(value))
    np.testing.assert_allclose(state.posterior.loc, [mean], rtol=1e-12)
    np.testing.assert_allclose(state.posterior.scale, [sd], rtol=1e-12)


@pytest.mark.parametrize(("step_size", "evidence"), [(1.0, 1.0), (0.5, 5.0)])
def test_finite_evidence_forgets(x64, step_size, evidence):
    rule = nt.online.ngvi(step_size, evidence=evidence)
    prior = MeanField(jnp.array([0.3]), jnp.array([0.5]))
    state = rule.init(prior)
    window = 1 + evidence / step_size
    for t in range(1, 41):
        # Each datum adds one to the exact precision.
        _, state = by_hand(
            rule, SQUARED, state, jnp.full(1, 0.5**0.5), jnp.asarray(1.0)
        )
        held = float(state.posterior.scale[0]) ** -2 - 4.0
        assert 0 < held < evidence * (1 + 1e-12)
        np.testing.assert_allclose(
            held, evidence * (1 - (1 - 1 / window) ** t), rtol=1e-11
        )


QUADRATIC = nt.expectations.gauss_hermite(
    lambda u, c: 0.5 * c * jnp.square(u), num_nodes=4
)
NGVI, BOXED = nt.online.ngvi(), nt.online.ngvi(box=Box(scale=3.0))


def test_ngvi_in_a_box_starts_each_round_from_the_clipped_scale(x64):
    rule = nt.online.ngvi(1.0, box=Box(scale=0.5))
    state = rule.init(MeanField(jnp.zeros(1), jnp.full(1, 2.0)))
    precisions = []
    for curvature in (0.0, -1.5, 0.0, -0.5, 1.0, 3.0, -2.0, -3.0, 1.0):
        _, state = by_hand(rule, QUADRATIC, state, jnp.ones(1), jnp.asarray(curvature))
        precisions.append(float(state.posterior.scale[0]) ** -2)
    np.testing.assert_allclose(precisions, [4, 4, 4, 4, 5, 8, 6, 4, 5], rtol=1e-12)


@pytest.mark.parametrize(
    "rule", [pytest.param(NGVI, marks=pytest.mark.full), BOXED], ids=["no box", "box"]
)
@pytest.mark.parametrize("curvature", [-1.0, -6.0], ids=["zero", "negative"])
def test_a_precision_that_is_not_positive_is_refused_and_counted(rule, curvature):
    state = rule.init(MeanField(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)))
    # The squared node 3.2 and its weight leave the sum 1 to rounding: stay off the exact zero.
    c = jnp.float32(curvature * (1 + 1e-5))
    after, losses = nt.online.update(
        rule, QUADRATIC, state, jnp.ones(1, jnp.float32), c
    )
    assert np.isfinite(losses.expected)
    assert_same(after, state._replace(rejected=jnp.int32(1)))
    after, _ = nt.online.update(
        rule, QUADRATIC, after, jnp.ones(1, jnp.float32), jnp.float32(3.0)
    )
    assert (int(after.count), int(after.rejected)) == (1, 1)
    np.testing.assert_allclose(after.posterior.scale, [0.5], rtol=1e-5)


# SVB's rate in float32


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_svb_rate_survives_vanishing_scales_in_float32():
    scales = jnp.asarray(10.0 ** -np.arange(0, 19, dtype=float), jnp.float32)
    d = len(scales)
    rule = nt.online.svb(nt.online.svb_rate(2.0))
    state = rule.init(MeanField(jnp.zeros(d, jnp.float32), scales))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(100, d)), jnp.float32)
    state, losses = nt.online.run(
        rule, HINGE, state, x, jnp.where(x[:, 0] > 0, 1.0, -1.0).astype(jnp.float32)
    )
    assert (int(state.count), int(state.rejected)) == (100, 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((state, losses)))
    assert np.all(state.posterior.scale >= 0)


def test_svb_rate_shrinks_past_the_smallest_float32():
    rule = nt.online.svb(nt.online.svb_rate(5.0))
    state = rule.init(MeanField(jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)))
    x, y = jnp.ones((300, 1), jnp.float32), jnp.zeros(300, jnp.float32)
    # The squared loss gives sigma' = sigma h(5 / sqrt t): log h = -arcsinh.
    exact = np.exp(-np.cumsum(np.arcsinh(5 / np.sqrt(np.arange(1, 301)))))
    first, _ = nt.online.run(rule, SQUARED, state, x[:30], y[:30])
    np.testing.assert_allclose(first.posterior.scale, exact[29:30], rtol=30 * 1e-6)
    assert exact[29] < 1e-12
    last, _ = nt.online.run(rule, SQUARED, state, x, y)
    assert exact[-1] < 1e-45
    # Products below the smallest normal number are 0, and the scale stays where they become so.
    assert 0 <= float(last.posterior.scale[0]) < 10 * np.finfo(np.float32).tiny
    assert (int(last.count), int(last.rejected)) == (300, 0)


# Arguments

FACTORIES = (
    nt.online.oga,
    nt.online.oga_el,
    nt.online.sva,
    nt.online.svb,
    nt.online.ngvi,
)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_step_sizes_and_boxes_are_checked(factory):
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(
            ValueError, match=r"step_size must be positive and finite.*will do too"
        ):
            factory(bad)
    for arity in (lambda: 1.0, lambda a, b, c: 1.0):
        with pytest.raises(
            TypeError, match=r"step_size must take the count or \(count, q\)"
        ):
            factory(arity)
    with pytest.raises(
        ValueError,
        match=r"step_size must be one number.*callable of the count.*will do too",
    ):
        factory([0.1])
    with pytest.raises(
        TypeError,
        match=r"step_size must be a number.*callable of the count.*will do too",
    ):
        factory("0.1")
    for box in (
        Box(loc=0.0),
        Box(loc=-1.0),
        Box(loc=np.nan),
        Box(loc=np.array([1.0, 0.0])),
    ):
        with pytest.raises(ValueError, match=r"box\.loc must be positive"):
            factory(0.1, box=box)
    with pytest.raises(ValueError, match=r"box\.scale must be positive"):
        factory(0.1, box=Box(scale=0.0))


def test_arguments_of_ngvi_and_svb_rate():
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="evidence must be positive"):
            nt.online.ngvi(evidence=bad)
    with pytest.raises(
        ValueError,
        match=r"^evidence must.*pass a traced one by forget=to_prior\(evidence\)",
    ):
        jax.jit(
            lambda evidence: nt.online.ngvi(evidence=evidence).init(make_prior()).count
        )(3.0)
    with pytest.raises(ValueError, match="curvature must be one of"):
        nt.online.ngvi(curvature="newton")
    for bad in (0.0, -2.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="c must be positive and finite"):
            nt.online.svb_rate(bad)


BAD_PRIORS = [
    ([], [], r"prior needs loc of shape.*and scale of"),
    (0.0, 1.0, r"prior needs loc of shape.*and scale of"),
    ([[0.0]], [[1.0]], r"prior needs loc of shape.*and scale of"),
    ([0.0, 0.0], [1.0, 1.0, 1.0], r"prior needs loc of shape.*and scale of"),
    ([0.0, 0.0], [1.0], r"prior needs loc of shape.*and scale of"),
    ([0.0, 0.0], [1.0, 0.0], r"prior.scale must be positive.*and finite, got"),
    ([0.0], [-1.0], r"prior.scale must be positive.*and finite, got"),
    ([np.nan], [1.0], "finite, got"),
    ([0.0], [np.inf], "finite, got"),
    ([0.0], [np.nan], "finite, got"),
]


def test_priors_are_checked(name):
    for loc, scale, message in BAD_PRIORS:
        with pytest.raises(ValueError, match=message):
            UNBOXED[name].init(MeanField(np.array(loc), np.array(scale)))


def test_a_scalar_prior_scale_is_broadcast(name):
    state = UNBOXED[name].init(MeanField(jnp.zeros(3, jnp.float32), jnp.float32(2.0)))
    np.testing.assert_array_equal(state.prior.scale, [2.0, 2.0, 2.0])


def test_streams_are_checked():
    rule = UNBOXED["sva"]
    state = rule.init(make_prior(dtype=jnp.float32))
    x, y = make_stream(4, dtype=jnp.float32)
    for data in ((x, y[:3]), (x[:0], y[:0]), (x[0], y[0]), ()):
        with pytest.raises(
            ValueError,
            match=r"one common leading axis of at least 1, got shapes.*or the loss",
        ):
            nt.online.run(rule, SQUARED, state, *data)
    with pytest.raises(ValueError, match=r"expected x of shape.*parameters, got"):
        nt.online.run(rule, SQUARED, state, x[:, :2], y)


def test_a_negative_rate_rejects_its_round():
    rule = nt.online.sva(lambda t: 2.0 - t.astype(float))
    state = rule.init(make_prior(2, jnp.float32))
    for _ in range(3):
        state, _ = nt.online.update(rule, HINGE, state, jnp.ones(2), jnp.float32(1.0))
    # Rates 1 and 0 are taken; the round of rate -1 is refused.
    assert (int(state.count), int(state.rejected)) == (2, 1)


@closes_over_a_tracer
@pytest.mark.full
def test_a_grid_of_rates_runs_under_vmap():
    x, y = jnp.ones((4, 2)), jnp.array([1.0, -1.0, 1.0, 1.0])

    def run(rate):
        rule = nt.online.svb(rate)
        return nt.online.run(rule, HINGE, rule.init(make_prior(2, jnp.float32)), x, y)[
            0
        ].posterior.loc

    rates = (0.1, 0.5)
    together = jax.vmap(run)(jnp.array(rates))
    np.testing.assert_allclose(
        together, np.stack([run(rate) for rate in rates]), rtol=1e-6
    )
