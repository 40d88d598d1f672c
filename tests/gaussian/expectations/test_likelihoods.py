"""Closed forms at their edges: outcomes, tails, overflow, kinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy.special import gammaln

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("strict")
ex = nt.expectations


def point_or(loc, scale, dtype=jnp.float32):
    return nt.gaussian.families.MeanField(
        *(jnp.asarray(np.array([leaf], dtype)) for leaf in (loc, scale))
    )


@functools.partial(jax.jit, static_argnums=0)
def evaluations(expectation, q, x, y):
    """One program, found again for the same expectation, in place of one for each operation and curvature."""
    return {
        c: expectation.evaluate(q, x, y, curvature=c) for c in ("hessian", "fisher")
    }


def one(expectation, loc, scale, y, dtype=jnp.float32, curvature="hessian"):
    q = point_or(loc, scale, dtype)
    return evaluations(expectation, q, np.ones(1, dtype), np.asarray(y, dtype))[
        curvature
    ]


ABSOLUTE, PINBALL, PROBIT, POISSON = (
    ex.absolute(),
    ex.pinball(0.9),
    ex.probit(),
    ex.poisson(),
)
LOGISTIC = ex.logistic()
SOFTMAX, NGVI = ex.softmax(3), nt.online.ngvi()
LINEARISED = ex.linearised(lambda theta, x: theta[0] * x[0], PROBIT)


@pytest.mark.parametrize(
    ("expectation", "y", "message"),
    [
        (
            LOGISTIC,
            0.0,
            r"logistic needs labels y in \{-1, 1\}, got 0.0; turn labels in \{0, 1\} into 2 \* y - 1",
        ),
        (LOGISTIC, 2.0, r"got 2.*turn labels in"),
        (PROBIT, 0.0, r"probit needs labels y in \{-1, 1\}, got 0.*turn labels in"),
        (POISSON, -1.0, r"poisson needs counts y in \{0, 1, 2, ...\}, got -1"),
        (POISSON, 1.5, r"^poisson needs counts y.*got 1.5"),
        (SOFTMAX, 3.0, r"softmax\(3\) needs labels y in \{0, ..., 2\}, got 3"),
        (SOFTMAX, -1.0, "got -1"),
        (LINEARISED, 2.0, r"got 2.*turn labels in"),
    ],
)
def test_outcomes_that_a_loss_does_not_admit(expectation, y, message):
    d = 3 if expectation.of_predictor and expectation.of_predictor.num_outputs else 1
    state = NGVI.init(nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d)))
    with pytest.raises(ValueError, match=message):
        nt.online.update(NGVI, expectation, state, jnp.ones(1), y)
    expectation.check(np.ones(1), np.nan)


@pytest.mark.parametrize(
    ("expectation", "y"),
    [
        (SOFTMAX, 3.0),
        (LOGISTIC, 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (PROBIT, 0.0),
                (POISSON, -1.0),
                (POISSON, 1.5),
                (SOFTMAX, -1.0),
                (LINEARISED, 2.0),
            ]
        ),
    ],
)
def test_traced_outcomes_that_a_loss_does_not_admit(expectation, y):
    d = 3 if expectation.of_predictor and expectation.of_predictor.num_outputs else 1
    state = NGVI.init(nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d)))
    # Traced, it cannot be read: no loss, and the round is rejected.
    after, losses = jax.jit(
        lambda y: nt.online.update(NGVI, expectation, state, jnp.ones(1), y)
    )(np.float32(y))
    assert np.isnan(losses.expected)
    assert (int(after.count), int(after.rejected)) == (0, 1)


def test_arguments():
    for level in (0.0, 1.0, -0.1, np.nan):
        with pytest.raises(
            ValueError, match=r"level must be in \(0, 1\).*quantile that is estimated"
        ):
            ex.pinball(level)
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(
            ValueError, match=r"noise_scale must be positive.*and finite, got"
        ):
            ex.squared(noise_scale=scale)
    with pytest.raises(ValueError, match="num_nodes must be an integer of at least 2"):
        ex.probit(num_nodes=1)
    with pytest.raises(ValueError, match="num_nodes must be an integer from 2 to 350"):
        ex.logistic(num_nodes=1)


def test_the_logistic_loss_is_that_of_its_formula():
    formula = ex.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u))
    for y in (-1.0, 1.0):
        for ours, same in zip(
            *(one(expectation, 0.7, 1.3, y) for expectation in (LOGISTIC, formula)),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, same)
    # One object, by which programs are shared.
    assert ex.logistic() is LOGISTIC
    assert ex.logistic(num_nodes=40) is ex.logistic(num_nodes=40) is not LOGISTIC


@pytest.mark.parametrize(
    ("expectation", "slope"), [(ABSOLUTE, 0.0), (PINBALL, 0.5 - 0.9)]
)
def test_the_derivative_at_a_kink_is_the_mean_of_both_sides(expectation, slope):
    at, near = (one(expectation, 2.0, scale, 2.0) for scale in (0.0, 1e-3))
    np.testing.assert_allclose(at.grad_loc, [slope], rtol=1e-6)
    np.testing.assert_allclose(near.grad_loc, [slope], rtol=1e-6)
    assert at.grad_var == 0.0
    fisher = [
        one(expectation, 2.0, scale, 2.0, curvature="fisher").grad_var
        for scale in (0.0, 1e-3)
    ]
    np.testing.assert_allclose(*fisher, rtol=1e-6)


@pytest.mark.parametrize(
    ("expectation", "name"),
    [(ABSOLUTE, "absolute"), (PINBALL, "quantile_90"), (PROBIT, "probit")],
)
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("margin", [-40.0, 40.0])
def test_far_in_the_tails_in_float32(expectation, name, margin, spread):
    loc = margin * max(spread, 1.0)
    loss, slope, _ = oracles.LINEAR_LOSSES[name]
    for curvature in ("hessian", "fisher"):
        ours = one(expectation, loc, spread, 1.0, curvature=curvature)
        assert all(np.all(np.isfinite(leaf)) for leaf in ours)
        assert ours.expected >= ours.at_mean
        np.testing.assert_allclose(
            ours.at_mean, loss(np.float64(loc), 1.0), rtol=1e-5, atol=1e-30
        )
        np.testing.assert_allclose(
            ours.grad_loc, [slope(np.float64(loc), 1.0)], rtol=2e-3, atol=1e-6
        )
        assert ours.grad_var >= 0


def test_probit_far_on_the_wrong_side_keeps_the_digits_of_its_curvature():
    # h (h - r) is 1 - 1/r² + 6/r⁴ - ...; with h - r as a difference, float32 has no digit of it at r = 1e4.
    for r in (6.0, 30.0, 1e3, 1e5):
        ours = one(PROBIT, -r, 0.0, 1.0)
        h = float(oracles.hazard(r))
        np.testing.assert_allclose(ours.grad_loc, [-h], rtol=1e-6)
        exact = 0.5 * h * (h - r) if r < 100 else 0.5 * (1 - 1 / r**2)
        np.testing.assert_allclose(ours.grad_var, [exact], rtol=1e-5)


@jax.jit
def probits(locs, spread):
    def at(loc):
        return PROBIT.evaluate(
            nt.gaussian.families.MeanField(loc[None], spread[None]),
            jnp.ones(1),
            jnp.ones(()),
        )

    return jax.vmap(at)(locs)


@pytest.mark.parametrize(
    ("spread", "error", "of_curvature"),
    [(0.5, 1e-9, 1e-11), (2.0, 1e-9, 1e-11), (7.0, 1e-5, 1e-9), (20.0, 1e-3, 1e-7)],
)
def test_the_error_of_the_probit_quadrature(x64, spread, error, of_curvature):
    locs = np.linspace(-4 * spread, 4 * spread, 9)
    ours = probits(locs, np.float64(spread))
    loss, slope, _ = oracles.LINEAR_LOSSES["probit"]
    exact = [
        oracles.expected_scalar_loss(
            lambda u: loss(u, 1.0), lambda u: slope(u, 1.0), m, spread
        )
        for m in locs
    ]
    exact = np.array(exact).T[:3]
    # The curvature is that of the bend, where the nodes gather.
    values = (
        ours.expected,
        np.asarray(ours.grad_loc)[:, 0],
        np.asarray(ours.grad_var)[:, 0],
    )
    for value, reference, limit in zip(
        values, exact, (error, error, of_curvature), strict=True
    ):
        assert np.all(
            np.abs(value - reference) <= limit * np.maximum(1.0, np.abs(reference))
        )


def test_the_predictive_probability_of_the_probit_bounds_its_loss(x64):
    z, w = oracles.standard_nodes()
    for m, s in ((0.3, 0.5), (-2.0, 3.0)):
        predictive = w @ np.exp(-oracles.LINEAR_LOSSES["probit"][0](m + s * z, 1.0))
        mix = oracles.LINEAR_LOSSES["probit"][0](m / np.sqrt(1 + s**2), 1.0)
        np.testing.assert_allclose(np.exp(-mix), predictive, rtol=1e-12)
        # Nine places, as above: the same program.
        assert np.all(mix < np.asarray(probits(np.full(9, m), np.float64(s)).expected))


def test_poisson_is_the_full_likelihood(x64):
    for y in (0.0, 3.0, 170.0):
        ours = one(POISSON, 0.4, 0.0, y, jnp.float64)
        np.testing.assert_allclose(
            ours.at_mean, np.exp(0.4) - 0.4 * y + gammaln(y + 1), rtol=1e-13
        )


def test_the_fisher_curvature_of_a_poisson_does_not_cancel():
    # E[(e^u - y)²] at e^m = y: y² (e^{v} - 1) and the like, of terms y² = 1e8.
    y, v = 1e4, 1e-4
    ours = one(POISSON, np.log(y), np.sqrt(v), y, curvature="fisher")
    exact = y**2 * (np.exp(2 * v) - 2 * np.exp(v / 2) + 1)
    # What is left is the rounding of the mean and its exponential: 2 y² v^(1/2) eps or so.
    np.testing.assert_allclose(ours.grad_var, [0.5 * exact], rtol=1e-3)


def test_a_rate_that_overflows_is_not_finite():
    assert not np.isfinite(one(POISSON, 0.0, 30.0, 3.0, curvature="fisher").expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ["MeanField", "FullRank", "LowRank"])
def test_a_rate_that_overflows_rejects_its_round(name):
    scale = 30.0
    prior = {
        "MeanField": point_or(0.0, scale),
        "FullRank": nt.gaussian.families.FullRank(
            jnp.zeros(1), jnp.full((1, 1), scale)
        ),
        "LowRank": nt.gaussian.families.LowRank(
            jnp.zeros(1), jnp.full(1, scale**-2), jnp.zeros((1, 1))
        ),
    }[name]
    after, losses = nt.online.update(NGVI, POISSON, NGVI.init(prior), jnp.ones(1), 3.0)
    assert not np.isfinite(losses.expected)
    assert (int(after.count), int(after.rejected)) == (0, 1)
    for new, old in zip(after.posterior, prior, strict=True):
        np.testing.assert_array_equal(new, old)
