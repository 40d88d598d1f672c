import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import tiered

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("strict")

D = 3
X = np.array([[1.0, -2.0, 0.5], [0.0, 0.3, -1.0], [-0.7, 1.5, 2.0], [0.1, 0.0, 0.0]])
LABELS = np.array([1.0, -1.0, -1.0, 1.0])
OUTCOMES = np.array([0.4, -3.0, 2.0, 0.0])
LOC, SCALE = np.array([0.2, -0.4, 0.9]), np.array([0.3, 1e-2, 0.5])


def logistic(u, y):
    return jax.nn.softplus(-y * u)


def polynomial(u, y):
    return 0.1 * u**6 - u**3 + y * u


def pinball(u, y):
    return jnp.where(y > u, 0.3 * (y - u), 0.7 * (u - y))


LOGISTIC = nt.expectations.gauss_hermite(logistic)
PINBALL = nt.expectations.gauss_hermite(pinball)


@functools.partial(jax.jit, static_argnums=0)
def evaluations(expectation, q, x, y):
    """One program, found again for the same expectation, in place of one for each operation and curvature."""
    return {
        c: expectation.evaluate(q, x, y, curvature=c) for c in ("hessian", "fisher")
    }


def evaluate(expectation, q, x, y, curvature="hessian"):
    return evaluations(expectation, q, x, y)[curvature]


def family(loc=LOC, scale=SCALE, dtype=None):
    return nt.gaussian.families.MeanField(
        *(jnp.asarray(np.asarray(leaf, dtype)) for leaf in (loc, scale))
    )


def check(ours, name, loc, scale, x, y, curvature, **tolerance):
    loss, slope, kinks = oracles.LINEAR_LOSSES[name]
    expected = oracles.expected_linear_loss(loss, slope, loc, scale, x, y, kinks)
    if curvature == "fisher":
        expected["grad_var"] = expected["fisher"]
    for field in ("at_mean", "expected", "grad_loc", "grad_var"):
        np.testing.assert_allclose(
            getattr(ours, field), expected[field], err_msg=field, **tolerance
        )


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize(
    ("expectation", "loss", "y", "tolerance"),
    [
        # Degree 6, and 10 for the square of its slope: exact with 6 nodes.
        (
            nt.expectations.gauss_hermite(polynomial, num_nodes=6),
            polynomial,
            OUTCOMES,
            1e-11,
        ),
        pytest.param(
            nt.expectations.gauss_hermite(polynomial, num_nodes=20),
            polynomial,
            OUTCOMES,
            1e-11,
            marks=pytest.mark.full,
        ),
        # The integrand is analytic in |Im u| < pi; with s <= 1.2 that leaves 1e-7 with 20 nodes.
        (LOGISTIC, logistic, LABELS, 1e-6),
        pytest.param(
            nt.expectations.gauss_hermite(logistic, num_nodes=60),
            logistic,
            LABELS,
            1e-10,
            marks=pytest.mark.full,
        ),
    ],
    ids=["polynomial-6", "polynomial-20", "logistic-20", "logistic-60"],
)
def test_batch_matches_quadrature(x64, expectation, loss, y, tolerance, curvature):
    ours = evaluate(expectation, family(), X, y, curvature)
    check(
        ours, loss.__name__, LOC, SCALE, X, y, curvature, rtol=tolerance, atol=tolerance
    )


def test_one_node_too_few_for_the_polynomial(x64):
    ours = evaluate(
        nt.expectations.gauss_hermite(polynomial, num_nodes=3), family(), X, OUTCOMES
    )
    with pytest.raises(AssertionError):
        check(ours, "polynomial", LOC, SCALE, X, OUTCOMES, "hessian", rtol=1e-6)


@pytest.mark.parametrize("curvature", tiered(["hessian", "fisher"], unit=["hessian"]))
def test_a_kinked_loss(x64, curvature):
    num_nodes, y = 200, np.linspace(-2.5, 2.5, 41)
    expectation = nt.expectations.gauss_hermite(pinball, num_nodes=num_nodes)
    q = family([0.0], [1.0])
    ours = jax.jit(
        jax.vmap(lambda y: expectation.evaluate(q, np.ones(1), y, curvature=curvature))
    )(y)
    exact = [
        oracles.expected_linear_loss(
            *oracles.LINEAR_LOSSES["pinball"][:2], [0], [1], [1], [v], lambda y: (y,)
        )
        for v in y
    ]
    # A step is integrated to within the weight of the node next to it (Chebyshev, Markov, Stieltjes):
    # density times the spacing pi / sqrt(n) of the nodes. The loss has slopes -.3 and .7.
    weight = np.pi / np.sqrt(num_nodes) * np.exp(-0.5 * y**2) / np.sqrt(2 * np.pi)
    bounds = {"expected": weight / np.sqrt(num_nodes), "grad_loc": weight}
    bounds["grad_var"] = (
        0.5 * (0.49 - 0.09 if curvature == "fisher" else np.abs(y)) * weight
    )
    for field, bound in bounds.items():
        name = "fisher" if (field, curvature) == ("grad_var", "fisher") else field
        error = np.abs(
            np.squeeze(np.asarray(getattr(ours, field)))
            - np.array([e[name] for e in exact]).squeeze()
        )
        # The second term is the next order, a spacing squared times a derivative of the density.
        assert np.all(error < bound + 1 / num_nodes), field
    if curvature == "hessian":
        # Automatic differentiation of the loss gives 0 here.
        assert np.all(np.asarray(ours.grad_var)[np.abs(y) < 1] > 0.1)


def test_a_kink_at_the_mean_is_exact_by_symmetry(x64):
    ours = evaluate(PINBALL, family([0.7], [1.3]), np.array([2.0]), 1.4, "fisher")
    np.testing.assert_allclose(ours.grad_loc, [2 * (0.7 - 0.3) / 2], rtol=1e-12)
    np.testing.assert_allclose(ours.grad_var, [4 * (0.7**2 + 0.3**2) / 4], rtol=1e-12)
    assert ours.at_mean == 0.0


def test_losses_of_a_batch_are_summed(x64):
    batch = evaluate(LOGISTIC, family(), X, LABELS)
    rows = [
        evaluate(LOGISTIC, family(), xi, yi) for xi, yi in zip(X, LABELS, strict=True)
    ]
    for field in batch._fields:
        total = sum(np.asarray(getattr(row, field)) for row in rows)
        np.testing.assert_allclose(getattr(batch, field), total, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_at_a_point(x64, curvature):
    ours = evaluate(LOGISTIC, family(scale=np.zeros(D)), X, LABELS, curvature)
    u = X @ LOC
    p = oracles.sigmoid(-LABELS * u)
    second = p**2 if curvature == "fisher" else p * (1 - p)
    np.testing.assert_allclose(
        ours.at_mean, oracles.softplus(-LABELS * u).sum(), rtol=1e-13
    )
    np.testing.assert_allclose(ours.expected, ours.at_mean, rtol=1e-13)
    np.testing.assert_allclose(ours.grad_loc, -(LABELS * p) @ X, rtol=1e-12)
    np.testing.assert_allclose(ours.grad_var, 0.5 * second @ X**2, rtol=1e-12)


def test_the_value_can_be_differentiated(x64):
    @jax.jit
    @jax.grad
    def gradient(q):
        return LOGISTIC.evaluate(q, jnp.asarray(X), jnp.asarray(LABELS)).expected

    point = gradient(family(scale=np.zeros(D)))
    assert all(np.all(np.isfinite(leaf)) for leaf in point)
    at_point = evaluate(LOGISTIC, family(scale=np.zeros(D)), X, LABELS)
    np.testing.assert_allclose(point.loc, at_point.grad_loc, rtol=1e-12)
    inside = gradient(family())
    ours = evaluate(LOGISTIC, family(), X, LABELS)
    np.testing.assert_allclose(inside.loc, ours.grad_loc, rtol=1e-12)
    # The rule differentiates its own nodes: u = mean + s z gives Stein's quotient exactly.
    np.testing.assert_allclose(inside.scale, ours.grad_scale(family()), rtol=1e-11)


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4, 1e-5, 1e-7, 1e-20])
def test_small_spread_in_float32(spread, curvature):
    loc, scale = np.array([0.5, -3.0, 1.0]), spread * np.ones(3)
    data = np.asarray(X, np.float32), np.asarray(LABELS, np.float32)
    ours = evaluate(LOGISTIC, family(loc, scale, np.float32), *data, curvature)
    u = X @ loc
    p = oracles.sigmoid(-LABELS * u)
    second = p**2 if curvature == "fisher" else p * (1 - p)
    assert {leaf.dtype for leaf in ours} == {jnp.dtype("float32")}
    # Narrow enough that the expectation is the value at the mean plus O(spread²).
    np.testing.assert_allclose(
        ours.expected, oracles.softplus(-LABELS * u).sum(), rtol=1e-5 + spread
    )
    np.testing.assert_allclose(ours.grad_loc, -(LABELS * p) @ X, rtol=1e-5 + spread)
    # Stein's quotient loses eps / s of the slopes, with s above sqrt(eps) at the switch.
    lost = 8 * np.sqrt(np.finfo(np.float32).eps) if curvature == "hessian" else 1e-5
    np.testing.assert_allclose(ours.grad_var, 0.5 * second @ X**2, rtol=lost + spread)


@pytest.mark.parametrize("margin", [80.0, -80.0, 1e6, -1e6])
def test_far_tails_in_float32(margin):
    ours = evaluate(
        LOGISTIC,
        family([margin], [1.0], np.float32),
        np.ones(1, np.float32),
        np.float32(1.0),
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in ours)
    np.testing.assert_allclose(ours.expected, max(-margin, 0.0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.grad_loc, [-1.0 if margin < 0 else 0.0], atol=1e-5)
    np.testing.assert_allclose(ours.grad_var, [0.0], atol=1e-5)


def test_arguments():
    with pytest.raises(ValueError, match=r"either a loss.*value or a"):
        nt.expectations.gauss_hermite()
    with pytest.raises(ValueError, match=r"either a loss.*value or a"):
        nt.expectations.gauss_hermite(logistic, predictor="eta")
    for num_nodes in (0, -3, 1, 351):
        with pytest.raises(
            ValueError,
            match=f"num_nodes must be an integer from 2 to 350, got {num_nodes}",
        ):
            nt.expectations.gauss_hermite(logistic, num_nodes=num_nodes)
    with pytest.raises(TypeError, match=r"needs a model.*for a bare stream"):
        nt.expectations.gauss_hermite(predictor="eta").evaluate(family(), X, LABELS)
    with pytest.raises(ValueError, match=r"expected x of shape.*parameters, got"):
        nt.expectations.gauss_hermite(logistic).evaluate(family(), np.ones(D + 1), 1.0)


def bernoulli(u, y):
    # NumPyro writes its Bernoulli by logits like this: at 0 the automatic derivative in u is 0 or 1 in
    # size, not 1/2.
    return jnp.clip(u, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(u))) - u * y


BERNOULLI = nt.expectations.gauss_hermite(bernoulli)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("label", [0, 1])
def test_a_mean_on_the_kink_of_a_loss_as_written(scale, label):
    x = np.array([1.0, -2.0], np.float32)
    value = evaluate(
        BERNOULLI,
        family(np.zeros(2), np.full(2, scale), np.float32),
        x,
        np.float32(label),
    )
    np.testing.assert_allclose(value.grad_loc, (0.5 - label) * x, rtol=1e-5)
    if scale < 0.1:
        np.testing.assert_allclose(value.grad_var, 0.25 * x**2 / 2, rtol=1e-3)


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_a_large_predictor_in_single_precision(curvature):
    # Unit scale in the predictor would be lost beside 2000 if nodes were kept apart by a relative amount.
    def loss(u, y):
        return 50.0 * jnp.square(y - u)

    q = family([2000.0], [0.02], np.float32)
    x, y = np.ones(1, np.float32), np.float32(2000.5)
    value = evaluate(nt.expectations.gauss_hermite(loss), q, x, y, curvature)
    np.testing.assert_allclose(value.expected, 50 * (0.25 + 0.02**2), rtol=1e-2)
    exact = 100.0 if curvature == "hessian" else 100.0**2 * (0.25 + 0.02**2)
    np.testing.assert_allclose(2 * np.asarray(value.grad_var), exact, rtol=2e-2)
