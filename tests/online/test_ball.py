"""Rules in Euclidean balls: minimisers by another solver, recursions by hand, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.online import Ball, Box, ball

HINGE = nt.expectations.hinge()
LOC, SCALE = np.array([0.3, -0.2, 0.1]), np.array([0.5, 1.0, 2.0])


def stream(num_rounds=8, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return 2.0 * rng.normal(size=(num_rounds, d)), np.where(
        rng.normal(size=num_rounds) > 0, 1.0, -1.0
    )


def shorten(vector, radius):
    return vector * min(1.0, radius / np.linalg.norm(vector))


@pytest.mark.parametrize(
    ("radii", "binds"),
    [
        ((0.4, 0.9), (True, True)),
        ((0.4, 9.0), (True, False)),
        ((np.inf, 0.9), (False, True)),
    ],
)
def test_svas_minimiser_in_a_ball_is_that_of_another_solver(x64, radii, binds):
    from scipy.optimize import minimize

    rng = np.random.default_rng(1)
    in_loc, in_scale, rate = rng.normal(size=3), rng.normal(size=3), 0.7
    # Some scales grow and some shrink.
    in_scale[0] = -1.0
    q = ball.kl_prox(MeanField(LOC, SCALE), in_loc, in_scale, rate, Ball(*radii))

    def objective(mu):
        m, sigma = mu[:3], np.exp(mu[3:])
        kl = 0.5 * np.sum((sigma / SCALE) ** 2 + ((m - LOC) / SCALE) ** 2 - 1) - np.sum(
            np.log(sigma / SCALE)
        )
        return in_loc @ m + in_scale @ sigma + kl / rate

    def inside(mu):
        norms = np.array([mu[:3] @ mu[:3], np.sum(np.exp(2 * mu[3:]))])
        return np.minimum(np.square(radii), 1e4) - norms

    constraint = {"type": "ineq", "fun": inside}
    options = {"ftol": 1e-15, "maxiter": 1000}
    start = np.r_[np.zeros(3), np.full(3, np.log(0.1))]
    other = minimize(
        objective, start, method="SLSQP", constraints=[constraint], options=options
    )
    np.testing.assert_allclose(np.r_[q.loc, np.log(q.scale)], other.x, atol=2e-6)
    for vector, radius, touches in zip(q, radii, binds, strict=True):
        length = np.linalg.norm(vector)
        assert length <= radius * (1 + 1e-12)
        assert (length > radius * (1 - 1e-9)) == touches


@pytest.mark.parametrize("radius", [1e-3, 0.05])
def test_minimisers_in_small_balls_are_inside(radius):
    q = ball.kl_prox(
        MeanField(LOC, SCALE),
        np.ones(3),
        np.array([0.1, -0.1, 0.0]),
        0.7,
        Ball(radius, radius),
    )
    np.testing.assert_allclose(
        [np.linalg.norm(q.loc), np.linalg.norm(q.scale)], radius, rtol=1e-5
    )


@pytest.mark.full
def test_sva_keeps_its_sums_unprojected(x64):
    x, y = stream()
    radii = Ball(0.5, 1.2)
    rule, free = nt.online.sva(0.4, box=radii), nt.online.sva(0.4)
    prior = MeanField(jnp.asarray(LOC), jnp.asarray(SCALE))
    state = rule.init(prior)
    assert np.linalg.norm(state.posterior.scale) <= 1.2 * (1 + 1e-12)
    totals = [np.zeros(3), np.zeros(3)]
    for row, label in zip(x, y, strict=True):
        at = HINGE.evaluate(state.posterior, row, label)
        totals[0] += at.grad_loc
        totals[1] += at.grad_scale(state.posterior)
        state, _ = nt.online.update(rule, HINGE, state, row, label)
        q = ball.kl_prox(prior, *totals, 0.4, radii)
        np.testing.assert_allclose(state.posterior.loc, q.loc, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(state.posterior.scale, q.scale, rtol=1e-9)
    # A ball that does not bind changes nothing.
    wide = nt.online.sva(0.4, box=Ball(1e3, 1e3))
    ends = [
        nt.online.run(each, HINGE, each.init(prior), x, y)[0].posterior
        for each in (free, wide)
    ]
    np.testing.assert_allclose(ends[0].loc, ends[1].loc, rtol=1e-12)
    np.testing.assert_allclose(ends[0].scale, ends[1].scale, rtol=1e-12)


@pytest.mark.parametrize("name", ["svb", "oga_el", "oga"])
def test_other_rules_project_orthogonally(x64, name):
    x, y = stream()
    radii, c = Ball(0.5, 1.2), 0.6
    make = {
        "svb": lambda: nt.online.svb(nt.online.svb_rate(c), box=radii),
        "oga_el": lambda: nt.online.oga_el(
            lambda t: c / jnp.sqrt(t.astype(float)), box=radii
        ),
        "oga": lambda: nt.online.oga(
            lambda t: c / jnp.sqrt(t.astype(float)), box=radii
        ),
    }
    rule = make[name]()
    state = rule.init(MeanField(jnp.asarray(LOC), jnp.asarray(SCALE)))
    m, sigma = shorten(LOC, 0.5), np.zeros(3) if name == "oga" else shorten(SCALE, 1.2)
    bound = 0
    for t, (row, label) in enumerate(zip(x, y, strict=True), 1):
        np.testing.assert_allclose(state.posterior.loc, m, rtol=1e-10)
        np.testing.assert_allclose(state.posterior.scale, sigma, rtol=1e-10)
        at = HINGE.evaluate(MeanField(m, sigma), row, label)
        in_scale = 2.0 * sigma * at.grad_var
        step = c / np.sqrt(t)
        free = m - step * at.grad_loc
        bound += np.linalg.norm(free) > 0.5
        m = shorten(free, 0.5)
        if name == "svb":
            a = 0.5 * step * in_scale
            sigma = shorten(np.sqrt(sigma**2 + a**2) - a, 1.2)
        elif name == "oga_el":
            sigma = shorten(np.maximum(sigma - step * in_scale, 0.0), 1.2)
        state, _ = nt.online.update(rule, HINGE, state, row, label)
    assert 0 < bound < len(y) + 1
    np.testing.assert_allclose(state.posterior.loc, m, rtol=1e-10)


def test_the_factor_of_a_covariance_is_projected_in_its_frobenius_norm(x64):
    x, y = stream()
    factor = jnp.asarray(np.tril(np.full((3, 3), 0.4)) + np.diag(SCALE))
    radii = Ball(0.5, 1.2)
    state = nt.online.oga_el(0.3, box=radii).init(FullRank(jnp.asarray(LOC), factor))
    np.testing.assert_allclose(state.posterior.factor, shorten(factor, 1.2), rtol=1e-12)
    state, losses = nt.online.run(nt.online.oga_el(0.3, box=radii), HINGE, state, x, y)
    assert np.all(np.isfinite(losses.expected))
    assert np.linalg.norm(state.posterior.loc) <= 0.5 * (1 + 1e-12)
    assert np.linalg.norm(state.posterior.factor) <= 1.2 * (1 + 1e-12)
    assert np.all(np.triu(state.posterior.factor, 1) == 0)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_bad_round_is_rejected_in_a_ball_and_large_ones_stay_finite():
    rule = nt.online.sva(0.4, box=Ball(0.5, 1.2))
    state = rule.init(MeanField(jnp.zeros(3), jnp.ones(3)))
    x, y = stream()
    x = np.array(x, np.float32)
    x[2], x[4] = np.nan, 1e12
    state, _ = nt.online.run(rule, HINGE, state, x, jnp.asarray(y, jnp.float32))
    assert (int(state.count), int(state.rejected)) == (7, 1)
    assert np.linalg.norm(state.posterior.loc) <= 0.5 * (1 + 1e-5)
    assert np.all(np.isfinite(state.posterior.scale))


@pytest.mark.full
def test_a_grid_of_rules_runs_in_a_ball():
    prior = MeanField(jnp.zeros(3), jnp.ones(3))
    rule = nt.online.aggregate(
        nt.online.grid(nt.online.sva, step_size=[0.1, 0.4], box=Ball(0.5, 1.2))
    )
    x, y = stream()
    state, losses = nt.online.run(rule, HINGE, rule.init(prior), x, y)
    assert np.all(np.isfinite(losses.at_mean))
    locs = np.asarray(nt.online.expert_states(state)[0].posterior.loc)
    assert np.all(np.linalg.norm(locs, axis=1) <= 0.5 * (1 + 1e-5))
    single = nt.online.sva(0.4, box=Ball(0.5, 1.2))
    alone, _ = nt.online.run(single, HINGE, single.init(prior), x, y)
    np.testing.assert_allclose(locs[1], alone.posterior.loc, rtol=1e-4)


def test_balls_are_refused_where_they_would_be_wrong():
    full = FullRank(jnp.zeros(2), jnp.eye(2))
    for make in (nt.online.sva, nt.online.svb):
        with pytest.raises(
            TypeError, match=r"in a Ball is for MeanField, .*got FullRank: .*oga_el"
        ):
            make(0.1, box=Ball(1.0, 1.0)).init(full)
    for make in (nt.online.ngvi, nt.online.rvga):
        with pytest.raises(
            TypeError, match=r"a Ball is for oga, oga_el, sva and svb.*Take a Box"
        ):
            make(box=Ball(1.0, 1.0))
    for bad, message in (
        (-1.0, "box.loc must be"),
        (np.nan, r"box.loc must be.*each coordinate are a"),
    ):
        with pytest.raises(ValueError, match=message):
            nt.online.sva(0.1, box=Ball(bad, 1.0))
    with pytest.raises(ValueError, match=r"box\.loc must be one number.*Box's"):
        nt.online.oga(0.1, box=Ball(np.ones(2), 1.0))
    assert nt.online.sva(0.1, box=Box(1.0, 1.0)).box == Box(1.0, 1.0)
    with pytest.raises(TypeError, match=r"a box is for MeanField.*Leave the box out"):
        nt.online.svb(0.1, box=Box(1.0, 1.0)).init(full)


def test_a_projection_neither_overflows_nor_divides_by_zero():
    q = ball.project(MeanField(jnp.full(2, 3e30), jnp.zeros(2)), Ball(2.0, 1.0))
    np.testing.assert_allclose(q.loc, np.sqrt([2.0, 2.0]), rtol=1e-6)
    np.testing.assert_array_equal(q.scale, 0.0)
    slope = jax.grad(
        lambda m: ball.project(MeanField(m, jnp.ones(2)), Ball(2.0, 9.0)).loc[0]
    )(jnp.ones(2))
    np.testing.assert_allclose(slope, [1.0, 0.0])
