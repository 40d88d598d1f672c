import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("strict")

D = 3
X = np.array(
    [
        [1.0, -2.0, 0.5],
        [0.0, 0.3, -1.0],
        [-0.7, 1.5, 2.0],
        [0.1, 0.0, 0.0],
        [3.0, 3.0, -4.0],
    ]
)
LABELS = np.array([1.0, -1.0, -1.0, 1.0, 1.0])
OUTCOMES = np.array([0.4, -3.0, 2.0, 0.0, 11.0])
LOC, SCALE = np.array([0.2, -0.4, 0.9]), np.array([0.6, 1e-2, 1.3])
HINGE, SQUARED = nt.expectations.hinge(), nt.expectations.squared()
CASES = {"hinge": (HINGE, LABELS), "squared": (SQUARED, OUTCOMES)}
FIELDS = ("at_mean", "expected", "grad_loc", "grad_var")


@pytest.fixture(params=CASES)
def case(request):
    expectation, y = CASES[request.param]
    return request.param, expectation, y


def family(loc=LOC, scale=SCALE, dtype=None):
    return nt.gaussian.families.MeanField(
        *(jnp.asarray(np.asarray(leaf, dtype)) for leaf in (loc, scale))
    )


@functools.partial(jax.jit, static_argnums=0)
def evaluations(expectation, q, x, y):
    """One program, found again for the same expectation, in place of one for each operation and curvature."""
    return {
        c: expectation.evaluate(q, x, y, curvature=c) for c in ("hessian", "fisher")
    }


def evaluate(expectation, q, x, y, curvature="hessian"):
    return evaluations(expectation, q, x, y)[curvature]


def reference(name, loc, scale, x, y, curvature="hessian"):
    expected = oracles.expected_linear_loss(
        *oracles.LINEAR_LOSSES[name][:2], loc, scale, x, y, KINKS[name]
    )
    if curvature == "fisher":
        expected["grad_var"] = expected["fisher"]
    return expected


KINKS = {name: loss[2] for name, loss in oracles.LINEAR_LOSSES.items()}


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize(
    "scale", [SCALE, 1e-4 * SCALE, 30 * SCALE], ids=["unit", "narrow", "wide"]
)
def test_batch_matches_quadrature(x64, case, curvature, scale):
    name, expectation, y = case
    ours = evaluate(expectation, family(scale=scale), X, y, curvature)
    # The reference divides by the variance what it integrates: 1e-16 / (1e-4)² at the narrow q.
    atol = 1e-10 if scale[0] > 1e-2 else 1e-7
    for field, expected in reference(name, LOC, scale, X, y, curvature).items():
        if field != "fisher":
            np.testing.assert_allclose(
                getattr(ours, field), expected, rtol=1e-10, atol=atol, err_msg=field
            )


@pytest.mark.parametrize(
    "curvature", ["hessian", pytest.param("fisher", marks=pytest.mark.full)]
)
def test_losses_of_a_batch_are_summed(x64, case, curvature):
    _, expectation, y = case
    batch = evaluate(expectation, family(), X, y, curvature)
    single = [
        evaluate(expectation, family(), xi, yi, curvature)
        for xi, yi in zip(X, y, strict=True)
    ]
    for field in FIELDS:
        np.testing.assert_allclose(
            getattr(batch, field),
            sum(np.asarray(getattr(one, field)) for one in single),
            rtol=1e-13,
            atol=1e-14,
        )


def test_gradients_are_those_of_the_value(x64, case):
    _, expectation, y = case

    def value(loc, var):
        return expectation.evaluate(
            nt.gaussian.families.MeanField(loc, jnp.sqrt(var)),
            jnp.asarray(X),
            jnp.asarray(y),
        ).expected

    grad_loc, grad_var = jax.jit(jax.grad(value, (0, 1)))(LOC, SCALE**2)
    ours = evaluate(expectation, family(), X, y)
    np.testing.assert_allclose(ours.grad_loc, grad_loc, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours.grad_var, grad_var, rtol=1e-11, atol=1e-11)


def test_grad_scale_is_the_chain_rule(x64, case):
    _, expectation, y = case
    q = family()
    evaluation = evaluate(expectation, q, X, y)
    np.testing.assert_array_equal(
        evaluation.grad_scale(q), 2 * SCALE * np.asarray(evaluation.grad_var)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_hinge_at_a_point(x64, dtype, curvature):
    x, y = np.asarray(X, dtype), np.asarray(LABELS, dtype)
    margin = 1 - LABELS * (X @ LOC)
    active = margin > 0
    ours = evaluate(HINGE, family(scale=np.zeros(D), dtype=dtype), x, y, curvature)
    assert {leaf.dtype for leaf in ours} == {jnp.dtype(dtype)}
    tolerance = {"rtol": 16 * float(jnp.finfo(dtype).eps)}
    np.testing.assert_allclose(ours.at_mean, margin[active].sum(), **tolerance)
    assert ours.expected == ours.at_mean
    np.testing.assert_allclose(
        ours.grad_loc, -(LABELS[active] @ X[active]), atol=1e-12, **tolerance
    )
    squares = 0.5 * (X[active] ** 2).sum(0) if curvature == "fisher" else np.zeros(D)
    np.testing.assert_allclose(ours.grad_var, squares, **tolerance)


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_squared_at_a_point(x64, curvature):
    residual = OUTCOMES - X @ LOC
    ours = evaluate(SQUARED, family(scale=np.zeros(D)), X, OUTCOMES, curvature)
    np.testing.assert_allclose(ours.expected, residual @ residual, rtol=1e-14)
    np.testing.assert_allclose(ours.at_mean, residual @ residual, rtol=1e-14)
    np.testing.assert_allclose(ours.grad_loc, -2 * residual @ X, rtol=1e-13)
    second = 4 * residual**2 if curvature == "fisher" else np.full(len(X), 2.0)
    np.testing.assert_allclose(ours.grad_var, 0.5 * second @ X**2, rtol=1e-13)


def test_the_value_can_be_differentiated_at_a_point(case):
    _, expectation, y = case
    x, y = np.asarray(X, np.float32), np.asarray(y, np.float32)
    point = family(scale=np.zeros(D), dtype=jnp.float32)
    gradient = jax.jit(jax.grad(lambda q: expectation.evaluate(q, x, y).expected))(
        point
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in gradient)
    np.testing.assert_allclose(
        gradient.loc, evaluate(expectation, point, x, y).grad_loc, rtol=1e-5
    )


@pytest.mark.parametrize("margin", [30.0, -30.0])
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_hinge_far_in_the_tails_in_float32(spread, margin, curvature):
    q = family(
        [(1 - margin * spread) if spread >= 1 else 1 - margin], [spread], jnp.float32
    )
    ours = evaluate(HINGE, q, np.ones(1, np.float32), np.float32(1.0), curvature)
    k = np.float32(1.0) - np.float32(q.loc[0])
    assert all(np.all(np.isfinite(leaf)) for leaf in ours)
    assert ours.expected >= max(k, 0.0)
    np.testing.assert_allclose(ours.expected, max(k, 0.0), rtol=1e-6)
    np.testing.assert_allclose(ours.grad_loc, [-1.0 if margin > 0 else 0.0], atol=1e-6)
    assert ours.grad_var >= 0
    np.testing.assert_allclose(
        ours.grad_var, [0.5 if margin > 0 and curvature == "fisher" else 0.0], atol=1e-6
    )


def test_hinge_never_falls_below_jensen_in_float32():
    z = np.linspace(-12, 12, 4001).astype(np.float32)

    def one(loc):
        q = nt.gaussian.families.MeanField(loc[None], jnp.ones(1, jnp.float32))
        evaluation = HINGE.evaluate(q, jnp.ones(1, jnp.float32), jnp.float32(1.0))
        return evaluation.expected, evaluation.at_mean

    expected, at_mean = (np.asarray(leaf) for leaf in jax.jit(jax.vmap(one))(1 - z))
    assert np.all(expected >= at_mean)
    assert np.all(at_mean >= 0)


def test_closed_forms_in_float32(case):
    name, expectation, y = case
    ours = evaluate(
        expectation,
        family(dtype=np.float32),
        np.asarray(X, np.float32),
        np.asarray(y, np.float32),
    )
    assert {leaf.dtype for leaf in ours} == {jnp.dtype("float32")}
    for field, expected in reference(name, LOC, SCALE, X, y).items():
        if field != "fisher":
            # Sums of five terms of size up to 200.
            np.testing.assert_allclose(
                getattr(ours, field), expected, rtol=2e-6, atol=2e-5, err_msg=field
            )


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.ones(D + 1), 1.0),
        (np.ones(()), 1.0),
        (np.ones(D), np.ones(1)),
        (np.ones((2, D)), 1.0),
        (np.ones((2, D)), np.ones(3)),
        (np.ones((2, 2, D)), np.ones((2, 2))),
    ],
)
def test_shapes_that_do_not_fit(case, x, y):
    _, expectation, _ = case
    with pytest.raises(ValueError, match=r"expected x of shape.*parameters, got"):
        expectation.evaluate(family(), x, y)


def test_labels_other_than_plus_and_minus_one():
    hinge = nt.expectations.hinge()
    rule = nt.online.sva(0.1)
    state = rule.init(family(dtype=jnp.float32))
    x = jnp.ones((2, D), jnp.float32)
    with pytest.raises(
        ValueError, match=r"^hinge needs.*labels y in \{-1, 1\}, got 0.*turn labels in"
    ):
        nt.online.update(rule, hinge, state, x[0], 0)
    with pytest.raises(
        ValueError, match=r"^hinge needs labels y.*got 2.*turn labels in"
    ):
        nt.online.run(rule, hinge, state, x, jnp.array([1, 2]))


def test_labels_other_than_plus_and_minus_one_have_no_loss():
    losses = [
        evaluate(HINGE, family(dtype=np.float32), np.ones(D, np.float32), y).expected
        for y in (0.0, -1.0)
    ]
    np.testing.assert_array_equal(np.isfinite(losses), [False, True])


@pytest.mark.full
def test_traced_labels_other_than_plus_and_minus_one():
    hinge = nt.expectations.hinge()
    rule = nt.online.sva(0.1)
    state = rule.init(family(dtype=jnp.float32))
    x = jnp.ones((2, D), jnp.float32)

    @jax.jit
    def traced(state, y):
        return nt.online.update(rule, hinge, state, x[0], y)

    after, losses = traced(state, jnp.float32(0.0))
    assert np.isnan(losses.expected)
    assert (int(after.count), int(after.rejected)) == (0, 1)
    after, losses = traced(state, jnp.float32(-1.0))
    assert np.isfinite(losses.expected)
    assert (int(after.count), int(after.rejected)) == (1, 0)


@pytest.mark.parametrize("label", [np.int32(1), np.int64(-1), True])
def test_hinge_admits_integer_labels(label):
    HINGE.check(np.ones(D), label)
    ours = evaluate(HINGE, family(dtype=np.float32), np.ones(D, np.float32), label)
    same = evaluate(
        HINGE, family(dtype=np.float32), np.ones(D, np.float32), float(label)
    )
    np.testing.assert_array_equal(ours.expected, same.expected)


@pytest.mark.full
@pytest.mark.parametrize("label", [np.int32(1), np.int64(-1), True])
def test_hinge_admits_integer_labels_that_are_not_traced(label):
    ours, same = (
        HINGE.evaluate(family(dtype=jnp.float32), jnp.ones(D, jnp.float32), y)
        for y in (label, float(label))
    )
    np.testing.assert_array_equal(ours.expected, same.expected)
