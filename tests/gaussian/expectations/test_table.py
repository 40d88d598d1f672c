"""Every expectation on every family, against dense quadrature."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import Rows, family_of

pytestmark = pytest.mark.usefixtures("strict")

X = np.array(
    [
        [1.0, -0.6, 0.5],
        [0.0, 0.3, -1.0],
        [-0.7, 1.1, 0.4],
        [0.1, 0.0, 0.0],
        [0.8, 0.5, -1.2],
    ]
)
LABELS = np.array([1.0, -1.0, -1.0, 1.0, 1.0])
OUTCOMES = np.array([0.4, -3.0, 2.0, 0.1, 5.0])
COUNTS = np.array([0.0, 3.0, 1.0, 2.0, 7.0])
CLASSES = np.array([2.0, 0.0, 1.0, 1.0, 0.0])
PAIRS = np.stack([OUTCOMES, LABELS], axis=1)
ALL, KEPT = (0, 1, 2, 3, 4), (0, 2, 3)


class Case(NamedTuple):
    """One row: an expectation, its loss and slope in numpy, outcomes, and the error its quadrature leaves."""

    expectation: Any
    loss: Any
    slope: Any
    y: np.ndarray
    kinks: Any = None
    num_outputs: int | None = None
    tolerance: float = 1e-10


def scalar(expectation, name, y, tolerance=1e-10):
    loss, slope, kinks = oracles.LINEAR_LOSSES[name]
    return Case(expectation, loss, slope, y, kinks, tolerance=tolerance)


def student(u, y):
    return 2.5 * jnp.log1p(jnp.square(y - u) / 4.0)


def bilinear(u, y):
    # Neither convex nor a sum over outputs.
    return jnp.square(u[0]) * u[1] - y[0] * u[1] + y[1] * u[0] * u[1]


def inner(theta, x):
    return jnp.sum(theta * x)


def outer(theta, x):
    return jnp.sum(jnp.reshape(theta, (3, -1)) * x[None, :], axis=-1)


SOFTMAX = (oracles.softmax_loss, oracles.softmax_slope, CLASSES, None, 3)
BILINEAR = (
    lambda u, y: (
        u[..., 0] ** 2 * u[..., 1] - y[0] * u[..., 1] + y[1] * u[..., 0] * u[..., 1]
    ),
    lambda u, y: np.stack(
        [
            2 * u[..., 0] * u[..., 1] + y[1] * u[..., 1],
            u[..., 0] ** 2 - y[0] + y[1] * u[..., 0],
        ],
        axis=-1,
    ),
    PAIRS,
    None,
    2,
)
ex = nt.expectations
CASES = {
    "hinge": scalar(ex.hinge(), "hinge", LABELS),
    "absolute": scalar(ex.absolute(), "absolute", OUTCOMES),
    "pinball": scalar(ex.pinball(0.9), "quantile_90", OUTCOMES),
    "squared": scalar(ex.squared(), "squared", OUTCOMES),
    "gaussian": scalar(ex.squared(noise_scale=1.7), "gaussian", OUTCOMES),
    "poisson": scalar(ex.poisson(), "poisson", COUNTS),
    "probit": scalar(ex.probit(num_nodes=60), "probit", LABELS),
    "logistic": scalar(ex.logistic(num_nodes=60), "logistic", LABELS),
    # Its branch points lie 2 from the real line: 60 nodes leave 3e-9 at s = 1.2.
    "student": scalar(
        ex.gauss_hermite(student, num_nodes=60), "student", OUTCOMES, 1e-8
    ),
    "linearised": scalar(
        ex.linearised(inner, ex.pinball(0.9)), "quantile_90", OUTCOMES
    ),
    "bilinear": Case(ex.gauss_hermite(bilinear, num_outputs=2, num_nodes=4), *BILINEAR),
    "softmax": Case(ex.softmax(3, num_nodes=40), *SOFTMAX, tolerance=1e-8),
    "linearised-softmax": Case(
        ex.linearised(outer, ex.softmax(3, num_nodes=40)), *SOFTMAX, tolerance=1e-8
    ),
}
FAMILIES = ("MeanField", "FullRank", "LowRank")


def dimension(case):
    return X.shape[1] * (case.num_outputs or 1)


def make(name, d, dtype=None):
    """A q of the family, with its mean and covariance."""
    rng = np.random.default_rng(3)
    m, scale = rng.normal(0.0, 0.5, d), rng.uniform(0.3, 0.9, d)
    if name == "MeanField":
        q, covariance = nt.gaussian.families.MeanField(m, scale), np.diag(scale**2)
    elif name == "FullRank":
        factor = np.tril(rng.normal(0.0, 0.15, (d, d)), -1) + np.diag(scale)
        q, covariance = nt.gaussian.families.FullRank(m, factor), factor @ factor.T
    else:
        diag, columns = scale**-2, rng.normal(0.0, 1.5, (d, 2))
        q = nt.gaussian.families.LowRank(m, diag, columns)
        covariance = np.linalg.inv(np.diag(diag) + columns @ columns.T)
    return (
        jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, dtype)), q),
        m,
        covariance,
    )


def reference(name, family, rows=ALL):
    """What the expectation of a case is."""
    each = [reference_of_row(name, family, row) for row in rows]
    return {field: sum(one[field] for one in each) for field in each[0]}


@cache
def reference_of_row(name, family, row):
    case = CASES[name]
    _, m, covariance = make(family, dimension(case))
    x, y = X[[row]], case.y[[row]]
    if case.num_outputs is None:
        return oracles.expected_full_loss(
            case.loss, case.slope, m, covariance, x, y, case.kinks
        )
    return oracles.expected_linear_outputs_loss(
        case.loss, case.slope, m, covariance, x, y, case.num_outputs
    )


def matrix(grad_var):
    return grad_var.dense() if isinstance(grad_var, Rows) else grad_var


def check(ours, exact, curvature, **tolerance):
    for field in ("at_mean", "expected", "grad_loc"):
        np.testing.assert_allclose(
            getattr(ours, field), exact[field], err_msg=field, **tolerance
        )
    second = exact["fisher" if curvature == "fisher" else "grad_var"]
    grad_var = matrix(ours.grad_var)
    np.testing.assert_allclose(
        grad_var, second if np.ndim(grad_var) == 2 else np.diag(second), **tolerance
    )


def shown(evaluation):
    """An evaluation with its curvature as an array."""
    return evaluation._replace(grad_var=matrix(evaluation.grad_var))


# Those of the same moments as another row: on the other families in the slow run.
ALIKE = {"absolute", "gaussian", "linearised", "linearised-softmax"}
# By default each closed form and each kind of quadrature on one family, but for those of other files: the hinge,
# linearised predictors, several outputs on a full rank.
DEFAULT = {
    ("absolute", "MeanField"),
    ("pinball", "LowRank"),
    ("squared", "FullRank"),
    ("gaussian", "MeanField"),
    ("poisson", "LowRank"),
    ("probit", "MeanField"),
    ("logistic", "FullRank"),
    ("bilinear", "MeanField"),
}


def rows(default, slow):
    def mark(name, family):
        if (name, family) in default:
            return []
        return pytest.mark.slow if slow(name, family) else pytest.mark.full

    return [
        pytest.param(name, family, marks=mark(name, family))
        for name in CASES
        for family in FAMILIES
    ]


ROWS = rows(DEFAULT, slow=lambda name, family: name in ALIKE and family != "MeanField")
ROWS_32 = rows(
    {("logistic", "MeanField")}, slow=lambda name, family: family != "MeanField"
)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize(("name", "family"), ROWS)
def test_value_gradients_and_masks(x64, name, family):
    case = CASES[name]
    q, _, _ = make(family, dimension(case))

    @jax.jit
    def evaluate(q, x, y, mask):
        return {
            c: case.expectation.evaluate(q, x, y, curvature=c, mask=mask)
            for c in ("hessian", "fisher")
        }

    for kept, exact in (
        (np.ones(len(X), bool), reference(name, family)),
        (np.isin(np.arange(len(X)), KEPT), reference(name, family, KEPT)),
    ):
        for curvature, ours in evaluate(q, X, case.y, kept).items():
            check(ours, exact, curvature, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize(("name", "family"), ROWS_32)
def test_float32_mapped_over_data(name, family):
    case = CASES[name]
    q, _, _ = make(family, dimension(case), jnp.float32)
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(case.y, jnp.float32)
    evaluate = jax.jit(jax.vmap(lambda x, y: shown(case.expectation.evaluate(q, x, y))))
    each = evaluate(x, y)
    assert {leaf.dtype for leaf in each} == {jnp.dtype("float32")}
    summed = jax.tree.map(lambda leaf: np.sum(np.asarray(leaf), axis=0), each)
    # Stein's quotient in gauss_hermite multiplies rounding by 1/s: 3e-6 at the narrowest of these.
    check(summed, reference(name, family), "hessian", rtol=1e-4, atol=3e-5)
    # A missing outcome passes the check of labels and has no loss, which rejects its round.
    y = y.at[1].set(jnp.nan)
    if case.expectation.check is not None:
        case.expectation.check(X, np.asarray(y))
    missing = evaluate(x, y)
    np.testing.assert_array_equal(np.isnan(missing.at_mean), np.arange(len(X)) == 1)
    np.testing.assert_array_equal(np.isnan(missing.expected), np.arange(len(X)) == 1)


@pytest.mark.parametrize(
    "name", tiered(sorted(CASES.keys() - ALIKE), unit=["poisson", "softmax"])
)
def test_without_spread(x64, name):
    case = CASES[name]
    q, m, _ = make("FullRank", dimension(case))
    point = family_of(q).point(q)

    @jax.jit
    def evaluate(q, x, y):
        return {
            c: shown(case.expectation.evaluate(q, x, y, curvature=c))
            for c in ("hessian", "fisher")
        }

    with jax.debug_nans(True):
        found = evaluate(point, jnp.asarray(X), jnp.asarray(case.y))
    value, first, second, square = 0.0, 0.0, 0.0, 0.0
    for xi, yi in zip(X, case.y, strict=True):
        jacobian = np.kron(np.eye(case.num_outputs or 1), xi)
        u = jacobian @ m if case.num_outputs else xi @ m
        slope = np.atleast_1d(case.slope(u, yi))
        h = 1e-5
        steps = h * np.eye(len(slope)) if case.num_outputs else [h]
        hessian = [
            np.atleast_1d(case.slope(u + e, yi) - case.slope(u - e, yi)) / (2 * h)
            for e in steps
        ]
        value = value + case.loss(u, yi)
        first = first + jacobian.T @ slope
        second = second + 0.5 * jacobian.T @ np.array(hessian) @ jacobian
        square = square + 0.5 * jacobian.T @ np.outer(slope, slope) @ jacobian
    for ours in found.values():
        np.testing.assert_allclose(ours.at_mean, value, rtol=1e-12)
        np.testing.assert_allclose(ours.expected, value, rtol=1e-12)
        np.testing.assert_allclose(ours.grad_loc, first, rtol=1e-11, atol=1e-11)
    # The reference differences slopes: h² and eps / h.
    np.testing.assert_allclose(found["hessian"].grad_var, second, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found["fisher"].grad_var, square, rtol=1e-10, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("name", ["hinge", "bilinear"])
def test_a_diagonal_covariance_is_the_mean_field(x64, name):
    case = CASES[name]
    q, m, _ = make("MeanField", dimension(case))
    full = nt.gaussian.families.FullRank(q.loc, jnp.asarray(np.diag(q.scale)))
    low = nt.gaussian.families.LowRank(
        q.loc, jnp.asarray(1 / np.square(q.scale)), jnp.zeros((len(m), 1))
    )
    evaluate = jax.jit(lambda q, x, y: shown(case.expectation.evaluate(q, x, y)))
    ours, *others = (
        evaluate(p, jnp.asarray(X), jnp.asarray(case.y)) for p in (q, full, low)
    )
    for other in others:
        np.testing.assert_allclose(other.expected, ours.expected, rtol=1e-12)
        np.testing.assert_allclose(
            other.grad_loc, ours.grad_loc, rtol=1e-11, atol=1e-12
        )
        np.testing.assert_allclose(
            np.diag(other.grad_var), ours.grad_var, rtol=1e-10, atol=1e-12
        )


def test_the_loss_itself(x64, case):
    m = make("MeanField", dimension(case))[1]
    ours = jax.jit(case.expectation.loss)(m, X, case.y)
    u = X @ m if case.num_outputs is None else X @ m.reshape(case.num_outputs, -1).T
    exact = [case.loss(ui, yi) for ui, yi in zip(u, case.y, strict=True)]
    np.testing.assert_allclose(ours, exact, rtol=1e-12, atol=1e-13)


def test_quadratic_is_said_of_the_quadratic_alone():
    assert {name for name, case in CASES.items() if case.expectation.quadratic} == {
        "squared",
        "gaussian",
    }
