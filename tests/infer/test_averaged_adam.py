"""Stochastic optimisation with a stopping rule, on objectives whose optimum is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.infer.averaged_adam import descend, minimise
from numpyro_tempered.infer.descent_programs import compile_descent

KEY, VALUE_KEY = jax.random.split(jax.random.key(5))
CURVATURE = np.array([0.5, 1.0, 2.0, 4.0], np.float32)
OPTIMUM = np.array([0.3, -1.0, 2.0, 0.1], np.float32)


def quadratic(z, key):
    """Half of z' C z about the optimum, with noise of unit variance in each derivative."""
    shift = z["z"] - OPTIMUM
    return 0.5 * jnp.sum(CURVATURE * shift**2) + jnp.sum(
        shift * jax.random.normal(key, shift.shape)
    )


def gap(z):
    return 0.5 * float(np.sum(CURVATURE * (np.asarray(z["z"], float) - OPTIMUM) ** 2))


def run(objective=quadratic, start=0.0, key=KEY, **options):
    options = {"step_size": 0.05, "num_steps": 20_000, "tolerance": 0.02, **options}
    return minimise(
        objective, {"z": jnp.full(4, start)}, key, value_key=VALUE_KEY, **options
    )


def test_a_run_ends_at_the_optimum_and_says_how_near():
    told = []
    settled = run(report=told.append)
    assert settled.converged
    assert settled.noise + settled.bias <= 0.02
    # The estimate is one of few degrees of freedom.
    assert gap(settled.z) < 0.1
    assert sum(told) == len(settled.losses) < 20_000
    assert np.isfinite(settled.losses).all()
    assert settled.value == pytest.approx(gap(settled.z), abs=0.2)


def test_a_far_start_keeps_its_step_size_and_too_few_steps_are_no_convergence():
    # A hundred steps of .05 go five units of the way.
    settled = run(start=200.0, num_steps=1000)
    assert not settled.converged
    assert settled.fall > 1.0
    assert settled.step_size == 0.05
    assert settled.bias == np.inf


@pytest.mark.parametrize("num_steps", [1, pytest.param(7, marks=pytest.mark.full)])
def test_a_few_steps_are_taken_and_not_judged(num_steps):
    settled = run(num_steps=num_steps)
    assert 0 < len(settled.losses) <= num_steps
    assert not settled.converged


@pytest.mark.full
def test_gradients_that_are_not_finite_move_nothing():
    def holes(z, key):
        hole = jax.random.uniform(jax.random.fold_in(key, 1)) < 0.1
        return jnp.where(hole, jnp.nan, quadratic(z, key))

    settled = run(holes, num_steps=2500)
    share = np.mean(np.isnan(settled.losses))
    assert 0.05 < share < 0.15
    assert gap(settled.z) < 0.2
    # Values have holes too, and what cannot be valued has not converged.
    assert not settled.converged


def test_steps_that_are_left_out_by_what_they_would_do_are_no_convergence():
    """Draws that pull one way have no gradient: the iterates settle, elsewhere."""

    def one_sided(z, key):
        noise = jax.random.normal(key, z["z"].shape)
        shift = z["z"] - OPTIMUM
        loss = 0.5 * jnp.sum(CURVATURE * shift**2) + jnp.sum(shift * noise)
        # The value is known, its derivative is not.
        return loss + jnp.sqrt(jnp.where(noise[0] > 0.0, 0.0 * z["z"][0], 1.0))

    settled = run(one_sided, tolerance=0.05)
    assert 0.3 < np.mean(np.isnan(settled.losses)) < 0.7
    assert not settled.converged


@pytest.mark.full
def test_a_start_that_is_better_than_what_follows_is_the_end():
    settled = run(start=OPTIMUM, num_steps=50, step_size=1.0)
    np.testing.assert_array_equal(settled.z["z"], OPTIMUM)


@pytest.mark.full
def test_the_estimated_gap_is_the_gap_on_average():
    runs = [
        run(key=jax.random.fold_in(KEY, i), num_steps=1500, tolerance=1e-9)
        for i in range(40)
    ]
    truth = np.array([gap(settled.z) for settled in runs])
    estimate = np.array([settled.noise for settled in runs])
    error = np.hypot(truth.std(), estimate.std()) / np.sqrt(len(runs))
    assert abs(truth.mean() - estimate.mean()) < 4.0 * error
    assert truth.mean() > 4.0 * error


@pytest.mark.parametrize(
    ("quorum", "ends"), [(0.75, True), pytest.param(1.0, False, marks=pytest.mark.full)]
)
def test_a_run_without_an_optimum_holds_up_others_only_where_all_must_settle(
    quorum, ends
):
    def objective(z, key, slope):
        return jnp.where(slope > 0.0, slope * jnp.sum(z["z"]), quadratic(z, key))

    starts, slopes = (
        {"z": np.zeros((4, 4), np.float32)},
        np.array([0.0, 0.0, 10.0, 0.0], np.float32),
    )
    descent = compile_descent(objective, starts, slopes, KEY, 4000)
    settled = descend(
        descent,
        starts,
        slopes,
        KEY,
        value_key=VALUE_KEY,
        step_size=0.05,
        num_steps=4000,
        tolerance=0.02,
        quorum=quorum,
    )
    np.testing.assert_array_equal(settled.converged, [ends, ends, False, ends])
    assert settled.bias[2] == np.inf
