"""One table of rules × families, and what each pair must satisfy."""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField, family_of

pytestmark = pytest.mark.usefixtures("strict")

D = 4
RULES = {
    "oga": partial(nt.online.oga, 0.1),
    "oga_el": partial(nt.online.oga_el, 0.1),
    "sva": partial(nt.online.sva, 0.1),
    "svb": partial(nt.online.svb, 0.1),
    "svb_rate": partial(nt.online.svb, nt.online.svb_rate(0.5)),
    "ewa": partial(nt.online.ewa, 0.7),
    "ngvi": partial(nt.online.ngvi, 0.7),
    "ngvi_evidence": partial(nt.online.ngvi, 0.7, evidence=4.0),
    "ngvi_fisher": partial(nt.online.ngvi, 0.7, curvature="fisher"),
    "ngvi_power": partial(nt.online.ngvi, 0.7, forget=nt.online.power(0.9)),
    "ngvi_walk": partial(nt.online.ngvi, 0.7, forget=nt.online.random_walk(0.1)),
    "ngvi_floor": partial(nt.online.ngvi, 0.7, negative="floor"),
}
UNBOXED = {name: make() for name, make in RULES.items()}
FAMILIES = ("MeanField", "FullRank", "LowRank")
REFUSED = {
    ("ewa", "MeanField"): r"exact on FullRank.*or take ngvi",
    ("ewa", "LowRank"): r"exact on FullRank.*or take ngvi",
    ("svb_rate", "FullRank"): r"one rate per coordinate.*schedule of the count",
    **{
        (rule, "LowRank"): "LowRank"
        for rule in ("oga", "oga_el", "sva", "svb", "svb_rate", "ngvi_walk")
    },
}
TABLE = [(rule, family) for rule in RULES for family in FAMILIES]
WORKING = [pair for pair in TABLE if pair not in REFUSED]
# Small eigenproblems take long to compile.
COMPILED = [
    pytest.param(
        *pair,
        marks=pytest.mark.slow
        if pair[1] == "LowRank" and pair[0] != "ngvi"
        else pytest.mark.full,
    )
    for pair in WORKING
]
# With the exact answers below and the tests of the rules on a mean field, each rule at least once.
DIAGONAL = [("ngvi_floor", "FullRank"), ("ngvi_power", "LowRank")]
SQUARED, HINGE = nt.expectations.squared(), nt.expectations.hinge()


def make_prior(family, d=D, dtype=jnp.float32):
    rng = np.random.default_rng(7)
    loc = rng.normal(size=d) / 2
    scale = np.linspace(0.5, 1.5, d)
    if family == "MeanField":
        leaves = (loc, scale)
    elif family == "FullRank":
        mix = np.eye(d) + 0.3 * rng.normal(size=(d, d))
        leaves = (loc, np.linalg.cholesky(scale[:, None] * (mix @ mix.T) * scale))
    else:
        leaves = (loc, 1 / scale**2, 0.5 * rng.normal(size=(d, 2)))
    kind = {"MeanField": MeanField, "FullRank": FullRank, "LowRank": LowRank}[family]
    return kind(*(jnp.asarray(leaf, dtype) for leaf in leaves))


def make_stream(num_rounds, d=D, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rounds, d))
    y = np.where(x[:, 0] + rng.normal(size=num_rounds) > 0, 1.0, -1.0)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def dense(q):
    """Mean and covariance in numpy, by the textbook's formulas."""
    if isinstance(q, MeanField):
        return np.asarray(q.loc), np.diag(np.asarray(q.scale) ** 2)
    if isinstance(q, FullRank):
        return np.asarray(q.loc), np.asarray(q.factor) @ np.asarray(q.factor).T
    factor = np.asarray(q.precision_factor)
    return np.asarray(q.loc), np.linalg.inv(
        np.diag(q.precision_diag) + factor @ factor.T
    )


def loss_of(rule):
    return SQUARED if rule == "ewa" else HINGE


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def op_by_op():
    """Loops in Python: programs of one operation each, which all rules share, in place of one for each rule."""
    with jax.disable_jit():
        yield


@pytest.fixture(params=["op by op", pytest.param("compiled", marks=pytest.mark.full)])
def loops(request):
    """How updates are taken, in a context."""
    return partial(jax.disable_jit, request.param == "op by op")


@pytest.fixture
def in_loops(loops):
    with loops():
        yield


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.full)])
def many(request):
    """Whether a stream is long and its loop compiled, or short and taken operation by operation."""
    if request.param == "many":
        yield True
    else:
        with jax.disable_jit():
            yield False


@pytest.mark.parametrize(("rule", "family"), REFUSED, ids=str)
def test_pairs_without_a_closed_form_are_refused_at_the_start(rule, family):
    with pytest.raises(TypeError, match=REFUSED[rule, family]):
        UNBOXED[rule].init(make_prior(family))


def check_rounds(rule, expectation, start, x, y):
    """A run and then two bad data; the state after the run."""
    ran, losses = nt.online.run(rule, expectation, start, x, y)
    assert (int(ran.count), int(ran.rejected), int(ran.floored)) == (len(x), 0, 0)
    assert np.all(np.isfinite(losses.expected))
    assert np.all(np.isfinite(dense(ran.posterior)[0]))
    assert_same(ran.prior, start.prior)
    # Jensen: both losses are convex.
    assert np.all(
        np.asarray(losses.expected) >= np.asarray(losses.at_mean) * (1 - 1e-6)
    )
    assert (
        np.max(np.abs(np.asarray(ran.posterior.loc) - np.asarray(start.posterior.loc)))
        > 1e-3
    )
    # A bad datum changes nothing but the count of rejections.
    spoiled = np.array(x[0])
    spoiled[1] = np.nan
    for bad in ((spoiled, y[0]), (x[0], np.inf * np.asarray(y[0]))):
        after, _ = nt.online.update(rule, expectation, ran, *bad)
        assert_same(after, ran._replace(rejected=ran.rejected + 1))
    assert_same(pickle.loads(pickle.dumps(ran)), ran)
    return ran


@pytest.mark.parametrize(("rule", "family"), COMPILED)
def test_rounds(rule, family):
    """Structure, bit-equality of run and update, rejection, pickling: one compilation each."""
    rule, expectation = UNBOXED[rule], loss_of(rule)
    x, y = make_stream(6)
    start = state = rule.init(make_prior(family))
    for t in range(6):
        state, _ = nt.online.update(rule, expectation, state, x[t], y[t])
    assert_same(check_rounds(rule, expectation, start, x, y), state)


@pytest.mark.full
@pytest.mark.parametrize(("rule", "family"), tiered(WORKING, unit=DIAGONAL))
def test_rounds_of_every_pair(x64, op_by_op, rule, family):
    rule, expectation = UNBOXED[rule], loss_of(rule)
    start = rule.init(make_prior(family, dtype=jnp.float64))
    ran = check_rounds(rule, expectation, start, *make_stream(2, dtype=jnp.float64))
    assert jax.tree.structure(ran) == jax.tree.structure(start)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(ran)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(start)
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "family"), [("svb", "FullRank"), ("ngvi", "FullRank"), ("ngvi", "LowRank")]
)
def test_vmap_over_streams_is_one_run_each(rule, family):
    rule = UNBOXED[rule]
    streams = [make_stream(6, seed=seed) for seed in range(3)]
    x, y = (np.stack(leaf) for leaf in zip(*streams, strict=True))
    start = rule.init(make_prior(family))
    states, losses = jax.vmap(lambda x, y: nt.online.run(rule, HINGE, start, x, y))(
        x, y
    )
    for i in range(3):
        state, loss = nt.online.run(rule, HINGE, start, x[i], y[i])
        np.testing.assert_allclose(
            np.asarray(losses.expected)[i], loss.expected, rtol=1e-5
        )
        one = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], states.posterior)
        for ours, theirs in zip(dense(one), dense(state.posterior), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


# Exact answers


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "family"), [("ngvi", "FullRank"), ("ewa", "FullRank"), ("ngvi", "LowRank")]
)
def test_conjugate_streams_end_at_the_exact_posterior(x64, many, name, family):
    rule = UNBOXED[name]
    x, y = make_stream(30 if many else 6, dtype=jnp.float64)
    prior = make_prior(family, dtype=jnp.float64)
    if family == "LowRank" and many:
        # As many directions as coordinates: nothing is left out.
        factor = jnp.concatenate(
            [prior.precision_factor, jnp.zeros((D, D - 2))], axis=1
        )
        prior = prior._replace(precision_factor=factor)
    elif family == "LowRank":
        # One direction beside the prior's only one: nothing is left out either.
        x = jnp.asarray(np.outer(x[:, 0], [1.0, -0.5, 2.0, 0.3]))
        prior = prior._replace(
            precision_factor=jnp.asarray(
                np.asarray(prior.precision_factor) * [1.0, 0.0]
            )
        )
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    m0, s0 = dense(prior)
    precision = np.linalg.inv(s0) + 2 * 0.7 * np.asarray(x).T @ np.asarray(x)
    mean = np.linalg.solve(
        precision, np.linalg.solve(s0, m0) + 2 * 0.7 * np.asarray(x).T @ np.asarray(y)
    )
    loc, covariance = dense(state.posterior)
    np.testing.assert_allclose(loc, mean, rtol=1e-10)
    np.testing.assert_allclose(
        covariance, np.linalg.inv(precision), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"evidence": 4.0}, (1 - 0.7 / 4.7, 0.7 / 4.7, 4.0 * 0.7 / 4.7)),
        ({"forget": nt.online.power(0.9)}, (0.9, 0.0, 0.7)),
    ],
    ids=["evidence", "power"],
)
@pytest.mark.parametrize("family", tiered(["FullRank", "LowRank"], unit=["FullRank"]))
def test_forgetting_is_the_recursion_in_natural_parameters(
    x64, many, family, options, weights
):
    keep, pull, step = weights
    rule = nt.online.ngvi(0.7, **options)
    x, y = make_stream(12 if many else 5, dtype=jnp.float64)
    prior = make_prior(family, dtype=jnp.float64)
    if family == "LowRank":
        factor = jnp.concatenate(
            [prior.precision_factor, jnp.zeros((D, D - 2))], axis=1
        )
        prior = prior._replace(precision_factor=factor)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    mean, s0 = dense(prior)
    p0 = np.linalg.inv(s0)
    m0, precision = mean.copy(), p0.copy()
    for row, target in zip(np.asarray(x), np.asarray(y), strict=True):
        precision = keep * precision + pull * p0 + 2 * step * np.outer(row, row)
        force = -2 * step * (target - row @ mean) * row + pull * p0 @ (mean - m0)
        mean = mean - np.linalg.solve(precision, force)
    loc, covariance = dense(state.posterior)
    np.testing.assert_allclose(loc, mean, rtol=1e-9)
    np.testing.assert_allclose(
        np.linalg.inv(covariance), precision, rtol=1e-8, atol=1e-9
    )


AXES = ["sva", "svb", "oga_el", "ngvi", "ngvi_evidence", "ngvi_walk", "ngvi_fisher"]


@pytest.mark.parametrize("name", tiered(AXES, unit=["oga_el", "ngvi_walk"]))
def test_data_along_the_axes_are_a_mean_field(x64, many, name):
    """One coordinate a datum leaves the coordinates independent: both families must agree."""
    rule = UNBOXED[name]
    rng = np.random.default_rng(1)
    num_rounds = 25 if many else 5
    x = jnp.asarray(
        np.eye(D)[rng.integers(0, D, num_rounds)] * rng.normal(size=(num_rounds, 1))
    )
    y = jnp.asarray(rng.choice([-1.0, 1.0], num_rounds))
    prior = make_prior("MeanField", dtype=jnp.float64)
    field, losses = nt.online.run(rule, HINGE, rule.init(prior), x, y)
    start = rule.init(FullRank(prior.loc, jnp.asarray(np.diag(prior.scale))))
    full, full_losses = nt.online.run(rule, HINGE, start, x, y)
    np.testing.assert_allclose(full_losses.expected, losses.expected, rtol=1e-10)
    np.testing.assert_allclose(full.posterior.loc, field.posterior.loc, rtol=1e-10)
    np.testing.assert_allclose(
        dense(full.posterior)[1], dense(field.posterior)[1], atol=1e-12
    )


def test_batches_are_summed_rows(x64):
    """A batch of rows in one round of a full covariance, against the dense recursion."""
    rule = nt.online.ngvi(0.7)
    x, y = make_stream(9, dtype=jnp.float64)
    prior = make_prior("FullRank", dtype=jnp.float64)
    state, _ = nt.online.update(rule, SQUARED, rule.init(prior), x, y)
    m0, s0 = dense(prior)
    xs, ys = np.asarray(x), np.asarray(y)
    precision = np.linalg.inv(s0) + 1.4 * xs.T @ xs
    loc, covariance = dense(state.posterior)
    np.testing.assert_allclose(
        covariance, np.linalg.inv(precision), rtol=1e-10, atol=1e-13
    )
    np.testing.assert_allclose(
        loc, m0 + np.linalg.solve(precision, 1.4 * xs.T @ (ys - xs @ m0)), rtol=1e-10
    )


def test_a_low_rank_step_keeps_the_diagonal_of_the_precision(x64, many):
    rule = nt.online.ngvi(1.0)
    x, y = make_stream(20 if many else 6, dtype=jnp.float64)
    prior = make_prior("LowRank", dtype=jnp.float64)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    exact = np.linalg.inv(dense(prior)[1]) + 2 * np.asarray(x).T @ np.asarray(x)
    found = np.linalg.inv(dense(state.posterior)[1])
    np.testing.assert_allclose(np.diag(found), np.diag(exact), rtol=1e-10)
    # Two directions of four: closer to the exact precision than its diagonal alone.
    assert np.linalg.norm(found - exact) < 0.7 * np.linalg.norm(
        np.diag(np.diag(exact)) - exact
    )


def loss_slopes(q, row, label):
    """Gradients of E[(1 - y u)_+] for u ~ N(x·m, xᵀΣx) in m and Σ."""
    m, covariance = dense(q)
    s, k = np.sqrt(row @ covariance @ row), 1 - label * row @ m
    return -label * row * stats.norm.cdf(k / s), 0.5 * stats.norm.pdf(
        k / s
    ) / s * np.outer(row, row)


@pytest.mark.parametrize("accumulate", [True, False], ids=["sva", "svb"])
def test_sva_and_svb_minimise_their_objectives_on_a_full_covariance(
    x64, loops, accumulate
):
    """In m and the triangular L with Σ = L Lᵀ, where the linear term is the loss's own gradient."""
    rule = (nt.online.sva if accumulate else nt.online.svb)(0.2)
    x, y = make_stream(3, dtype=jnp.float64)
    prior = make_prior("FullRank", dtype=jnp.float64)
    state, summed = rule.init(prior), (0.0, 0.0)
    for row, label in zip(np.asarray(x), np.asarray(y), strict=True):
        in_mean, in_covariance = loss_slopes(state.posterior, row, label)
        gradient = (in_mean, 2 * in_covariance @ np.asarray(state.posterior.factor))
        summed = (
            tuple(a + b for a, b in zip(summed, gradient, strict=True))
            if accumulate
            else gradient
        )
        m0, s0 = dense(prior if accumulate else state.posterior)
        with loops():
            state, _ = nt.online.update(rule, HINGE, state, row, label)
        m, factor = np.asarray(state.posterior.loc), np.asarray(state.posterior.factor)
        # The gradient of KL(q, p) / η is added.
        np.testing.assert_allclose(
            summed[0] + np.linalg.solve(s0, m - m0) / 0.2, 0.0, atol=1e-9
        )
        in_factor = np.linalg.solve(s0, factor) - np.diag(1 / np.diag(factor))
        np.testing.assert_allclose(np.tril(summed[1] + in_factor / 0.2), 0.0, atol=1e-9)
        assert np.all(np.diag(factor) > 0)
        assert np.all(np.triu(factor, 1) == 0)


def test_ngvi_minimises_objective_8_on_a_full_covariance(x64, loops):
    """In the expectation parameters (m, Σ + m mᵀ), where the linear term is the loss's own gradient."""
    step, evidence = 0.6, 3.0
    rule = nt.online.ngvi(step, evidence=evidence)
    x, y = (np.asarray(leaf) for leaf in make_stream(2, dtype=jnp.float64))
    prior = make_prior("FullRank", dtype=jnp.float64)
    with loops():
        before, _ = nt.online.update(rule, HINGE, rule.init(prior), x[0], y[0])
        after, _ = nt.online.update(rule, HINGE, before, x[1], y[1])
    in_mean, in_covariance = loss_slopes(before.posterior, x[1], y[1])
    # Σ is the second parameter less m mᵀ.
    first, second = in_mean - 2 * in_covariance @ before.posterior.loc, in_covariance
    m, covariance = dense(after.posterior)
    for p, weight in ((prior, evidence), (before.posterior, step)):
        m0, s0 = dense(p)
        first = (
            first + (np.linalg.solve(covariance, m) - np.linalg.solve(s0, m0)) / weight
        )
        second = second + 0.5 * (np.linalg.inv(s0) - np.linalg.inv(covariance)) / weight
    np.testing.assert_allclose(first, 0.0, atol=1e-9)
    np.testing.assert_allclose(second + second.T, 0.0, atol=1e-9)


# Curvature of both signs

CONCAVE = nt.expectations.gauss_hermite(lambda u, y: jnp.log1p(jnp.square(y - u)))


def as_it_comes(prior, evaluation, data):
    return CONCAVE


def known(prior, evaluation, data):
    """The expectation of the concave loss, by its value where it is known."""

    def evaluate(q, x, y, **options):
        # Of the datum at the posterior's own predictor.
        convex = Evaluation(
            evaluation.expected,
            evaluation.at_mean,
            0.1 * x,
            jnp.abs(evaluation.grad_var),
        )
        return evaluation if np.array_equal(y, data[1]) else convex

    return CONCAVE._replace(evaluate=evaluate)


def test_negative_curvature_is_rejected_or_floored_and_counted(x64, op_by_op):
    check_negative_curvature("MeanField", known)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_negative_curvature_of_a_quadrature_is_rejected_or_floored_and_counted(
    x64, in_loops, family
):
    check_negative_curvature(family, as_it_comes)


def check_negative_curvature(family, expectation):
    prior = make_prior(family, dtype=jnp.float64)
    x, y = jnp.asarray([3.0, 0.0, 0.0, 0.0]), jnp.asarray(12.0)
    with jax.disable_jit(False):
        evaluation = jax.jit(CONCAVE.evaluate)(prior, x, y)
    loss = expectation(prior, evaluation, (x, y))
    negative = (
        evaluation.grad_var[0]
        if family == "MeanField"
        else evaluation.grad_var.weights[0]
    )
    assert negative < 0
    # Taken as it is where the precision stays positive, refused where it would not.
    taken, _ = nt.online.update(
        nt.online.ngvi(0.1), loss, nt.online.ngvi(0.1).init(prior), x, y
    )
    assert (int(taken.count), int(taken.rejected)) == (1, 0)
    assert dense(taken.posterior)[1][0, 0] > dense(prior)[1][0, 0]
    steep = nt.online.ngvi(1e4)
    refused, _ = nt.online.update(steep, loss, steep.init(prior), x, y)
    assert_same(refused, steep.init(prior)._replace(rejected=jnp.ones((), jnp.int32)))
    floor = nt.online.ngvi(1e4, negative="floor")
    floored, _ = nt.online.update(floor, loss, floor.init(prior), x, y)
    assert (int(floored.count), int(floored.rejected), int(floored.floored)) == (
        1,
        0,
        1,
    )
    np.testing.assert_allclose(dense(floored.posterior)[1], dense(prior)[1], rtol=1e-10)
    assert not np.array_equal(floored.posterior.loc, prior.loc)
    # A convex datum is not counted.
    again, _ = nt.online.update(
        floor, loss, floored, x, jnp.sum(x * floored.posterior.loc)
    )
    assert int(again.floored) == 1


def floored_covariance(lower, hessian, step):
    """The covariance after a step with the Hessian's positive part, whitened by q, alone."""
    values, vectors = np.linalg.eigh(lower.T @ hessian @ lower)
    kept = vectors @ np.diag(np.maximum(values, 0)) @ vectors.T
    return lower @ np.linalg.inv(np.eye(len(lower)) + step * kept) @ lower.T


def test_a_dense_curvature_is_floored_by_its_eigenvalues(x64, op_by_op):
    prior = make_prior("FullRank", dtype=jnp.float64)
    hessian = np.diag([2.0, -2.0, 1.0, 0.0]) + 0.5
    zero = jnp.zeros(())
    curved = Evaluation(zero, zero, jnp.zeros(D), jnp.asarray(0.5 * hessian))
    rule = nt.online.ngvi(3.0, negative="floor")
    state = rule.update(curved, rule.init(prior))
    assert int(state.floored) == 1
    expected = floored_covariance(np.asarray(prior.factor), hessian, 3.0)
    np.testing.assert_allclose(dense(state.posterior)[1], expected, rtol=1e-10)


def test_rounding_of_a_singular_curvature_is_not_negative(op_by_op):
    prior, rule = make_prior("FullRank"), nt.online.ngvi(0.5, negative="floor")
    start, zero = rule.init(prior), jnp.zeros((), prior.loc.dtype)
    for row in np.random.default_rng(0).normal(size=(5, D)).astype(np.float32):
        # Of rank 1: the other eigenvalues are rounding, of both signs.
        curved = Evaluation(
            zero,
            zero,
            jnp.zeros_like(prior.loc),
            jnp.asarray(np.outer(row, row), zero.dtype),
        )
        state = rule.update(curved, start)
        assert int(state.floored) == 0
        expected = np.linalg.inv(np.linalg.inv(dense(prior)[1]) + np.outer(row, row))
        np.testing.assert_allclose(
            dense(state.posterior)[1], expected, rtol=1e-3, atol=1e-4
        )


@pytest.mark.full
def test_a_dense_hessian_is_floored_by_its_eigenvalues(x64, key):
    saddle = nt.expectations.monte_carlo(
        lambda theta, x: x * (theta[0] ** 2 - theta[1] ** 2 + theta[0] * theta[1])
    )
    rule = nt.online.ngvi(3.0, negative="floor")
    prior = FullRank(jnp.zeros(2), jnp.asarray([[1.0, 0.0], [0.5, 2.0]]))
    state, _ = nt.online.update(rule, saddle, rule.init(prior), 1.0, rng_key=key)
    assert int(state.floored) == 1
    hessian = np.asarray([[2.0, 1.0], [1.0, -2.0]])
    expected = floored_covariance(np.asarray(prior.factor), hessian, 3.0)
    np.testing.assert_allclose(dense(state.posterior)[1], expected, rtol=1e-10)
    rejecting = nt.online.ngvi(3.0)
    state, _ = nt.online.update(
        rejecting, saddle, rejecting.init(prior), 1.0, rng_key=key
    )
    assert (int(state.count), int(state.rejected)) == (0, 1)


def test_arguments():
    with pytest.raises(ValueError, match="negative must be one of"):
        nt.online.ngvi(negative="ignore")
    with pytest.raises(ValueError, match=r"^a finite evidence forgets.*not both"):
        nt.online.ngvi(evidence=3.0, forget=nt.online.power(0.9))
    with pytest.raises(
        TypeError,
        match=r"^ewa is exact on.*quadratic in the parameters.*this one take ngvi",
    ):
        nt.online.update(
            UNBOXED["ewa"],
            HINGE,
            UNBOXED["ewa"].init(make_prior("FullRank")),
            jnp.ones(D),
            1.0,
        )
    for rule in ("sva", "ngvi"):
        boxed = RULES[rule](box=nt.online.Box(loc=1.0))
        with pytest.raises(
            TypeError, match=r"^a box is for.*quadratic program.*Leave the box out"
        ):
            boxed.init(make_prior("FullRank"))
    per_coordinate = nt.online.svb(lambda t, q: jnp.ones_like(q.loc))
    with pytest.raises(
        ValueError,
        match=r"^a full covariance.*scalar step size.*MeanField takes an array",
    ):
        nt.online.update(
            per_coordinate,
            HINGE,
            per_coordinate.init(make_prior("FullRank")),
            jnp.ones(D),
            1.0,
        )


# Long streams in single precision


@pytest.mark.parametrize(
    "family", ["FullRank", pytest.param("LowRank", marks=pytest.mark.slow)]
)
def test_a_long_stream_in_float32_keeps_its_digits(x64, family):
    """Data that add less than a rounding each: 10^5 rows after 10^4 times their information."""
    d, num_rounds = 3, 100_000
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_rounds, d)) * [1.0, 0.3, 2.0]
    y = x @ [0.5, -1.0, 0.2] + rng.normal(size=num_rounds)
    single = [jnp.asarray(leaf, jnp.float32) for leaf in (x, y)]
    exact = np.asarray(single[0], np.float64)
    held = 1e4
    if family == "FullRank":
        prior = FullRank(
            jnp.zeros(d, jnp.float32),
            jnp.eye(d, dtype=jnp.float32) / np.float32(np.sqrt(held)),
        )
    else:
        prior = LowRank(
            jnp.zeros(d, jnp.float32),
            jnp.full(d, np.float32(held)),
            jnp.zeros((d, d), jnp.float32),
        )
    rule = nt.online.ngvi(0.01)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), *single)
    assert int(state.rejected) == 0
    s0 = dense(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), prior))[1]
    precision = np.linalg.inv(s0) + 0.02 * exact.T @ exact
    mean = np.linalg.solve(
        precision, 0.02 * exact.T @ np.asarray(single[1], np.float64)
    )
    q = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.posterior)
    scale = np.sqrt(np.diag(np.linalg.inv(precision)))
    np.testing.assert_allclose(
        np.asarray(family_of(q).marginal_scale(q)), scale, rtol=2e-5
    )
    np.testing.assert_allclose(q.loc, mean, atol=0.01 * scale.min())


@pytest.mark.parametrize("strength", [1e3, 1e5])
def test_a_low_rank_step_along_strong_directions_keeps_its_digits_in_float32(strength):
    """In posterior deviations, and not in those of the weak prior beside the strong directions."""
    rng, rule = np.random.default_rng(1), UNBOXED["ngvi"]
    plane = rng.normal(size=(D, 2))
    leaves = np.zeros(D), np.ones(D), np.sqrt(strength) * plane
    prior = LowRank(*(jnp.asarray(leaf, jnp.float32) for leaf in leaves))
    row = np.asarray(plane @ [1.0, -0.5], np.float32)
    # On the far side of the kink the hinge is linear: the precision stays.
    state, _ = nt.online.update(rule, HINGE, rule.init(prior), row, jnp.float32(1.0))
    _, covariance = dense(
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), prior)
    )
    precision, exact = np.linalg.inv(covariance), 0.7 * covariance @ row.astype(float)
    error = np.asarray(state.posterior.loc, np.float64) - exact
    off = np.sqrt((error @ precision @ error) / (exact @ precision @ exact))
    # A rounding of what is beside the directions, which the prior holds.
    assert off < 10.0 * np.finfo(np.float32).eps * np.sqrt(strength)


# Looking again at a datum


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        "MeanField",
        pytest.param("FullRank", marks=pytest.mark.full),
        pytest.param("LowRank", marks=pytest.mark.slow),
    ],
)
def test_local_steps_reach_streaming_variational_bayes(x64, family):
    """The fixed point maximises E_q[-l] - KL(q, q_t), here by an independent search over the predictor's q."""
    from scipy import optimize

    counts = nt.expectations.gauss_hermite(
        lambda u, y: jnp.exp(u) - y * u, num_nodes=40
    )
    x, y = jnp.asarray([1.0, -0.5]), 7.0
    kind = {"MeanField": MeanField, "FullRank": FullRank, "LowRank": LowRank}[family]
    second = {"MeanField": jnp.ones(2), "FullRank": jnp.eye(2), "LowRank": jnp.ones(2)}[
        family
    ]
    prior = kind(
        jnp.zeros(2), second, *([jnp.zeros((2, 1))] if family == "LowRank" else [])
    )

    def negative_elbo(v):
        # Poisson with log link: E exp(u) = exp(m + s²/2).
        if family == "MeanField":
            m, covariance = v[:2], np.diag(np.exp(2 * v[2:]))
        else:
            lower = np.array([[np.exp(v[2]), 0.0], [v[4], np.exp(v[3])]])
            m, covariance = v[:2], lower @ lower.T
        mean, variance = np.asarray(x) @ m, np.asarray(x) @ covariance @ np.asarray(x)
        kl = 0.5 * (np.trace(covariance) + m @ m - np.linalg.slogdet(covariance)[1])
        return np.exp(mean + variance / 2) - y * mean + kl

    size = 4 if family == "MeanField" else 5
    best = optimize.minimize(
        negative_elbo, np.zeros(size), tol=1e-14, options={"gtol": 1e-10}
    ).x
    if family == "MeanField":
        covariance = np.diag(np.exp(2 * best[2:4]))
    else:
        lower = np.array([[np.exp(best[2]), 0.0], [best[4], np.exp(best[3])]])
        covariance = lower @ lower.T
    rule = nt.online.rvga()
    state, losses = nt.online.update(rule, counts, rule.init(prior), x, y)
    loc, found = dense(state.posterior)
    np.testing.assert_allclose(loc, best[:2], rtol=1e-6)
    np.testing.assert_allclose(found, covariance, rtol=1e-6, atol=1e-8)
    once = nt.online.ngvi()
    state, once_losses = nt.online.update(once, counts, once.init(prior), x, y)
    assert abs(dense(state.posterior)[0][0] - best[0]) > 0.05
    # Losses are those before the round, whatever comes after.
    np.testing.assert_allclose(losses.expected, once_losses.expected, rtol=1e-14)
