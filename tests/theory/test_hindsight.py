"""The best parameter in hindsight: closed forms, grids, certificates, long streams."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.online import Ball, Box
from numpyro_tempered.theory import hindsight
from numpyro_tempered.theory.hindsight.gaussian import _gaussian_at, _limits

HINGE = nt.expectations.hinge()
LOSSES = {
    "hinge": (hindsight.hinge, lambda u, y: np.maximum(1 - y * u, 0)),
    "absolute": (hindsight.absolute, lambda u, y: np.abs(y - u)),
    "pinball": (
        partial(hindsight.pinball, level=0.8),
        lambda u, y: np.where(y > u, 0.8 * (y - u), 0.2 * (u - y)),
    ),
    "squared": (hindsight.squared, lambda u, y: (y - u) ** 2),
}


def data(name, num_rounds, d, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rounds, d))
    y = x @ rng.normal(size=d) + rng.normal(size=num_rounds)
    return x, np.where(y > 0, 1.0, -1.0) if name == "hinge" else y


def softplus_losses(theta, x, y):
    return jax.nn.softplus(-y * (x @ theta))


def on_grid(loss, x, y, bound, points):
    """The least cumulative loss on a grid of the box, in one or two dimensions."""
    axes = [np.linspace(-bound, bound, points)] * x.shape[1]
    theta = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, x.shape[1])
    return loss(theta @ x.T, y).sum(-1).min()


@pytest.mark.parametrize("d", tiered([1, 2], unit=[2]))
@pytest.mark.parametrize("bound", tiered([0.4, 3.0], unit=[0.4]))
@pytest.mark.parametrize("name", LOSSES)
def test_no_point_of_a_grid_is_better_and_one_is_nearly_as_good(name, bound, d):
    solve, loss = LOSSES[name]
    x, y = data(name, 60, d)
    best = solve(x, y, box=Box(loc=bound))
    assert np.all(np.abs(best.theta) <= bound)
    np.testing.assert_allclose(
        best.losses, loss(x @ best.theta, y), rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(best.value, best.losses.sum(), rtol=1e-12)
    assert -1e-12 <= best.gap < 1e-7 * best.value
    points = 4001 if d == 1 else 301
    least = on_grid(loss, x, y, bound, points)
    assert best.value <= least + 1e-9
    # The nearest grid point is half a step away in each coordinate.
    half = bound / (points - 1)
    slope = np.abs(x).sum() * (
        2 * np.max(np.abs(y) + np.abs(x).sum(1) * bound) if name == "squared" else 1.0
    )
    assert least <= best.value + half * slope


@pytest.mark.parametrize("name", tiered([*LOSSES, "convex"], unit=["hinge", "squared"]))
def test_the_best_in_a_ball_is_that_of_a_grid(name):
    ball = Ball(loc=0.35)
    if name == "convex":
        solve, loss = (
            partial(hindsight.convex, softplus_losses, jnp.zeros(2)),
            lambda u, y: np.logaddexp(0, -y * u),
        )
        x, y = data("hinge", 60, 2)
    else:
        solve, loss = LOSSES[name]
        x, y = data(name, 60, 2)
    best, wide = solve(x, y, box=ball), solve(x, y, box=Ball(loc=100.0))
    assert np.linalg.norm(best.theta) <= 0.35 * (1 + 1e-9)
    # It binds: the free one, which a wide ball and no bounds both have, is outside.
    assert np.linalg.norm(wide.theta) > 0.4
    np.testing.assert_allclose(wide.value, solve(x, y).value, rtol=1e-6)
    np.testing.assert_allclose(best.losses, loss(x @ best.theta, y), rtol=1e-5)
    # A smoothed loss leaves a gap for losses with kinks, float32 one for convex.
    assert (
        -1e-12
        <= best.gap
        < (1e-3 if name in ("hinge", "absolute", "pinball") else 1e-5) * best.value
    )
    radii, angles = np.linspace(0, 0.35, 120), np.linspace(0, 2 * np.pi, 720)
    points = np.stack(
        [np.outer(radii, np.cos(angles)), np.outer(radii, np.sin(angles))], -1
    ).reshape(-1, 2)
    least = loss(points @ x.T, y).sum(-1).min()
    assert best.lower <= least * (1 + 1e-7)
    assert best.value <= least * (1 + 1e-4)
    if name in ("hinge", "squared"):
        with pytest.raises(
            ValueError, match=r"best Gaussian in a Ball is not supported.*Box, or take"
        ):
            hindsight.gaussian(
                HINGE,
                MeanField(jnp.zeros(2), jnp.ones(2)),
                1.0,
                x,
                np.sign(y),
                box=ball,
            )


def test_medians_quantiles_and_means_are_found():
    y = np.random.default_rng(0).normal(size=101) * 10
    ones = np.ones((101, 1))
    np.testing.assert_allclose(
        hindsight.absolute(ones, y).theta, [np.median(y)], rtol=1e-9
    )
    level = hindsight.pinball(ones, y, 0.25).theta[0]
    np.testing.assert_allclose(level, np.sort(y)[25], rtol=1e-9)
    np.testing.assert_allclose(
        hindsight.squared(ones, y).theta, [np.mean(y)], rtol=1e-9
    )
    np.testing.assert_allclose(
        hindsight.squared(ones, y, box=Box(loc=0.01)).theta,
        [0.01 * np.sign(np.mean(y))],
    )
    half = hindsight.pinball(ones, y, 0.5)
    np.testing.assert_allclose(
        2 * half.value, hindsight.absolute(ones, y).value, rtol=1e-12
    )


def test_least_squares_agrees_with_the_normal_equations():
    x, y = data("squared", 200, 7)
    best = hindsight.squared(x, y)
    np.testing.assert_allclose(
        best.theta, np.linalg.solve(x.T @ x, x.T @ y), rtol=1e-10
    )
    assert best.gap < 1e-9 * best.value
    # Features of very different size, and one that says nothing.
    scale = np.array([1e-6, 1.0, 1e6, 1.0, 1.0, 0.0, 1.0])
    scaled = hindsight.squared(x * scale, y)
    np.testing.assert_allclose(
        scaled.value, hindsight.squared(x[:, scale > 0], y).value, rtol=1e-10
    )


def test_the_logistic_minimum_has_the_log_odds(x64):
    y = np.array([1.0] * 3 + [-1.0])
    best = hindsight.convex(softplus_losses, jnp.zeros(1), jnp.ones((4, 1)), y)
    np.testing.assert_allclose(best.theta, [np.log(3)], rtol=1e-6)
    np.testing.assert_allclose(best.value, 3 * np.log(4 / 3) + np.log(4), rtol=1e-12)
    assert best.gap < 1e-5
    boxed = hindsight.convex(
        softplus_losses, jnp.zeros(1), jnp.ones((4, 1)), y, box=Box(loc=0.5)
    )
    np.testing.assert_allclose(boxed.theta, [0.5])
    np.testing.assert_allclose(boxed.gap, 0.0, atol=1e-10)


def test_an_expectation_gives_its_own_loss(x64):
    expectation = nt.expectations.logistic()
    x, y = data("hinge", 80, 3)
    first = hindsight.convex(expectation, jnp.zeros(3), x, y)
    second = hindsight.convex(softplus_losses, jnp.zeros(3), x, y)
    np.testing.assert_allclose(first.value, second.value, rtol=1e-12)
    with pytest.raises(
        TypeError, match=r"^the expectation has.*no loss function.*loss as a function"
    ):
        hindsight.convex(
            nt.expectations.gauss_hermite(predictor="eta"), jnp.zeros(3), x, y
        )


def test_in_float32_the_value_is_right_to_rounding():
    x, y = data("hinge", 300, 3)
    best = hindsight.convex(softplus_losses, jnp.zeros(3), x, y, box=Box(loc=3.0))
    exact = np.logaddexp(0, -y * (x @ best.theta)).sum()
    np.testing.assert_allclose(best.value, exact, rtol=1e-6)
    assert best.gap < 1e-3 * best.value


@given(
    st.sampled_from(sorted(LOSSES)),
    st.integers(1, 4),
    st.integers(1, 30),
    st.floats(0.1, 20),
    st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_no_parameter_of_the_box_is_below_the_certificate(
    name, d, num_rounds, bound, seed
):
    solve, loss = LOSSES[name]
    x, y = data(name, num_rounds, d, seed)
    best = solve(x, y, box=Box(loc=bound))
    rng = np.random.default_rng(seed)
    near = best.theta + rng.normal(size=(50, d)) * 10.0 ** rng.uniform(-6, 0, (50, 1))
    theta = np.clip(
        np.concatenate([near, rng.uniform(-bound, bound, (50, d))]), -bound, bound
    )
    assert loss(theta @ x.T, y).sum(-1).min() >= best.lower - 1e-9 * max(
        1.0, best.value
    )
    assert best.gap <= 1e-6 * max(best.value, 1e-3)


@pytest.mark.parametrize("name", ["hinge", "absolute", "pinball"])
@pytest.mark.parametrize("boxed", [True, False])
def test_a_long_stream_has_the_value_of_the_whole_program(name, boxed, monkeypatch):
    solve, _ = LOSSES[name]
    box = Box(loc=0.3) if boxed else None
    x, y = data(name, 3000, 4, seed=1)
    # A rare feature, with a scale of its own: few rounds decide about it.
    x[:, 3] = np.where(np.arange(3000) < 3, 50.0, 0.0)
    whole = solve(x, y, box=box, tolerance=1e-10)
    sizes = []
    original = hindsight.kinks._dual_program

    def watched(loss, inside, slopes, reach):
        sizes.append(int(inside.sum()))
        return original(loss, inside, slopes, reach)

    monkeypatch.setattr(hindsight.kinks, "_dual_program", watched)
    monkeypatch.setattr(hindsight.kinks, "MIN_SIZE", 50)
    best = solve(x, y, box=box, tolerance=1e-10)
    np.testing.assert_allclose(best.value, whole.value, rtol=1e-9)
    assert best.gap < 1e-9 * best.value
    assert 0 < max(sizes) < 3000


def test_without_a_box_the_answer_may_lie_far_out():
    # The smoothed start is at hand; the optimum needs a parameter of 1000.
    x, y = np.full((5, 1), 1e-3), np.ones(5)
    best = hindsight.hinge(x, y)
    np.testing.assert_allclose(best.value, 0.0, atol=1e-9)
    assert best.theta[0] >= 1000 * (1 - 1e-9)
    x, y = np.ones((3, 1)), np.array([-1e6, 0.0, 1e6])
    assert hindsight.absolute(x, y).value == pytest.approx(2e6)


def test_features_that_are_copies_are_no_trouble():
    x, y = data("absolute", 50, 2)
    once = hindsight.absolute(x, y)
    twice = hindsight.absolute(np.hstack([x, x]), y)
    np.testing.assert_allclose(once.value, twice.value, rtol=1e-9)
    np.testing.assert_allclose(
        hindsight.squared(x, y).value,
        hindsight.squared(np.hstack([x, x]), y).value,
        rtol=1e-9,
    )


@pytest.mark.slow
def test_a_stream_of_two_hundred_thousand_rounds_is_certified():
    x, y = data("hinge", 200_000, 20, seed=2)
    best = hindsight.hinge(x, y, Box(loc=20.0))
    assert best.gap < 1e-6 * best.value
    best = hindsight.absolute(*data("absolute", 200_000, 20, seed=2))
    assert best.gap < 1e-6 * best.value


# The best Gaussian


def quadratic_comparator(x, y, rate, loc, covariance):
    """Minimiser of the expected squared losses plus KL/rate: Bayes with noise of variance 1/(2 rate)."""
    precision = np.linalg.inv(covariance) + 2 * rate * x.T @ x
    mean = np.linalg.solve(
        precision, np.linalg.solve(covariance, loc) + 2 * rate * x.T @ y
    )
    return mean, precision


@pytest.mark.parametrize(
    "family", tiered(["mean field", "full rank"], unit=["full rank"])
)
def test_the_best_gaussian_of_the_squared_loss_is_bayes(x64, family):
    x, y = data("squared", 30, 3)
    loc, scale = np.array([0.5, 0.0, -0.2]), np.array([0.5, 1.0, 2.0])
    if family == "mean field":
        x, y = np.concatenate([np.diag([1.0, 2.0, 0.5])] * 4), y[:12]
        prior = MeanField(jnp.asarray(loc), jnp.asarray(scale))
        covariance = np.diag(scale**2)
    else:
        factor = np.array([[0.5, 0, 0], [0.3, 1.0, 0], [-0.5, 0.2, 0.8]])
        prior, covariance = (
            FullRank(jnp.asarray(loc), jnp.asarray(factor)),
            factor @ factor.T,
        )
    mean, precision = quadratic_comparator(x, y, 0.7, loc, covariance)
    best = hindsight.gaussian(nt.expectations.squared(), prior, 0.7, x, y)
    np.testing.assert_allclose(best.q.loc, mean, rtol=1e-4, atol=1e-5)
    own = (
        np.diag(best.q.scale**2)
        if family == "mean field"
        else np.asarray(best.q.factor @ best.q.factor.T)
    )
    np.testing.assert_allclose(own, np.linalg.inv(precision), rtol=1e-3, atol=1e-5)
    expected = (y - x @ np.asarray(best.q.loc)) ** 2 + np.einsum(
        "ti,ij,tj->t", x, own, x
    )
    np.testing.assert_allclose(best.expected, expected, rtol=1e-10)
    # The objective is minus the log evidence over the rate, up to a constant: its least value is known.
    least = (
        np.sum((y - x @ mean) ** 2) * 0.7
        + 0.5 * (mean - loc) @ np.linalg.solve(covariance, mean - loc)
        + 0.5 * (np.linalg.slogdet(precision)[1] + np.linalg.slogdet(covariance)[1])
    ) / 0.7
    np.testing.assert_allclose(best.expected.sum() + best.kl / 0.7, least, rtol=1e-9)


def test_the_limits_of_the_search_are_the_box(x64):
    prior = MeanField(jnp.array([0.5, -0.2]), jnp.array([0.5, 2.0]))
    lower, upper = _limits(prior, Box(loc=0.4, scale=0.3))
    for end, loc in ((lower, -0.4), (upper, 0.4)):
        q = _gaussian_at(np.where(np.isfinite(end), end, 0.0), prior)
        np.testing.assert_allclose(q.loc, [loc, loc], rtol=1e-12)
    np.testing.assert_allclose(q.scale, [0.3, 0.3], rtol=1e-12)
    # Any width above 0 is in the box, and without a box any Gaussian.
    assert np.all(lower[2:] == -np.inf)
    assert np.all(np.isinf(_limits(prior, Box())))


@pytest.mark.full
def test_a_box_holds_the_best_gaussian(x64):
    x, y = data("hinge", 40, 2)
    prior = MeanField(jnp.zeros(2), jnp.ones(2))
    free = hindsight.gaussian(HINGE, prior, 1.0, x, y)
    box = Box(
        loc=0.5 * float(np.abs(free.q.loc).max()),
        scale=0.5 * float(np.min(free.q.scale)),
    )
    best = hindsight.gaussian(HINGE, prior, 1.0, x, y, box=box)
    assert np.max(np.abs(best.q.loc)) <= box.loc * (1 + 1e-12)
    assert np.max(best.q.scale) <= box.scale * (1 + 1e-12)
    assert best.expected.sum() + best.kl > free.expected.sum() + free.kl


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: hindsight.hinge([[1.0]], [0.0]),
            ValueError,
            r"^hinge needs.*labels y in \{-1, 1\}",
        ),
        (
            lambda: hindsight.absolute([[1.0]], [0.0, 1.0]),
            ValueError,
            r"expected x of shape.*and y of shape",
        ),
        (
            lambda: hindsight.squared([1.0], [0.0]),
            ValueError,
            r"expected x of shape.*and y of shape",
        ),
        (
            lambda: hindsight.squared([[np.nan]], [0.0]),
            ValueError,
            r"must be finite.*that were rejected",
        ),
        (
            lambda: hindsight.pinball([[1.0]], [0.0], 1.0),
            ValueError,
            r"level must be in \(0, 1\)",
        ),
        (
            lambda: hindsight.absolute([[1.0]], [0.0], box=Box(loc=-1.0)),
            ValueError,
            r"box\.loc must be positive",
        ),
        (
            lambda: hindsight.convex(lambda theta: theta[0] ** 2, [1.0]),
            ValueError,
            r"losses of shape \(T,\)",
        ),
        (
            lambda: hindsight.gaussian(
                nt.expectations.monte_carlo(lambda theta, x: theta[0] * x),
                MeanField(jnp.zeros(1), jnp.ones(1)),
                1.0,
                jnp.ones(2),
            ),
            ValueError,
            r"^the comparator needs a.*not an expectation that draws",
        ),
        (
            lambda: hindsight.gaussian(
                nt.expectations.hinge(),
                FullRank(jnp.zeros(1), jnp.eye(1)),
                1.0,
                [[1.0]],
                [1.0],
                box=Box(loc=1.0),
            ),
            ValueError,
            r"a box on a full covariance.*supported: leave it out",
        ),
        (
            lambda: hindsight.gaussian(
                nt.expectations.hinge(), Box(), 1.0, [[1.0]], [1.0]
            ),
            TypeError,
            r"^the comparator is a.*MeanField or FullRank.*a prior of Box",
        ),
    ],
)
def test_arguments_are_checked(call, error, message):
    with pytest.raises(error, match=message):
        call()
