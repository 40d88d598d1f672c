"""Merges, deaths and splits on the same objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64

import numpyro_tempered as nt
from numpyro_tempered.mixtures.moves import affinities, propose
from numpyro_tempered.mixtures.sweep import make_blocks

pytestmark = pytest.mark.full

CENTRES = np.array([[-9.0, 0.0], [-9.0, 4.0], [0.0, 0.0], [9.0, 0.0], [9.0, 4.0]])


@pytest.fixture(scope="module")
def x():
    return (
        np.repeat(CENTRES, 40, axis=0)
        + np.random.default_rng(5).normal(size=(200, 2)) * 0.7
    )


@pytest.fixture(scope="module")
def component():
    return nt.mixtures.components.known_variance(2, prior_scale=10.0, scale=0.7)


# Two clusters on the left share a component, and the one in the middle has two.
STUCK = np.repeat([0, 0, 1, 3, 4], 40)
STUCK[80:100] = 2


def stuck_fit(x, component, **options):
    with enable_x64():
        start = nt.mixtures.starts.given_responsibilities(STUCK)
        return nt.mixtures.fit(
            jax.random.key(1),
            x,
            component,
            num_components=5,
            init=start,
            num_draws=0,
            num_restarts=4,
            **options,
        )


@pytest.fixture(scope="module")
def stuck(x, component):
    return stuck_fit(x, component)


@pytest.fixture(scope="module")
def best(x, component):
    with enable_x64():
        labels = nt.mixtures.starts.given_responsibilities(np.repeat(np.arange(5), 40))
        return nt.mixtures.fit(
            jax.random.key(1),
            x,
            component,
            num_components=5,
            init=labels,
            num_draws=0,
            num_restarts=4,
        )


def test_the_start_is_a_local_optimum(stuck, best):
    assert stuck.converged
    assert stuck.objective < best.objective - 20.0


def test_moves_leave_it(stuck, best, x, component):
    moved = stuck_fit(x, component, num_moves=10)
    assert moved.num_moves >= 1
    # The optimum of the true partition, or one that is better still.
    assert moved.objective > best.objective - 1e-3
    assert moved.converged


def test_no_move_lowers_the_objective(best, x, component):
    with enable_x64():
        moved = nt.mixtures.fit(
            jax.random.key(2),
            x,
            component,
            num_components=5,
            init=best,
            num_restarts=4,
            num_moves=2,
            num_draws=0,
        )
    assert moved.objective >= best.objective - 1e-6


def test_a_move_keeps_all_weight(stuck, x):
    with enable_x64():
        rows = jnp.asarray(x - stuck.centre)
        weight = jnp.linspace(0.5, 1.5, len(x))
        blocks = make_blocks(rows, weight, 64)
        for seed in range(6):
            moved = propose(
                jax.random.key(seed),
                stuck.component,
                stuck.problem,
                stuck.factors,
                blocks,
            )
            added = moved.concentration - stuck.problem.concentration
            np.testing.assert_allclose(added.sum(), weight.sum(), rtol=1e-12)
            assert np.all(added >= -1e-12)
            changed = (
                np.abs(moved.posterior.loc - stuck.factors.posterior.loc).max(axis=1)
                > 1e-3
            )
            assert 1 <= changed.sum() <= 5


def test_affinity_is_large_where_components_share_data(stuck, x):
    with enable_x64():
        rows = jnp.asarray(x - stuck.centre)
        weight = jnp.ones(len(x))
        from numpyro_tempered.mixtures.factors import coefficients

        shared = affinities(
            stuck.component,
            coefficients(stuck.component, stuck.factors),
            make_blocks(rows, weight, 64),
        )
        omega = np.asarray(nt.mixtures.responsibilities(stuck, x))
    np.testing.assert_allclose(shared, omega.T @ omega, atol=1e-9)


def test_one_component_has_no_moves(x, component):
    fit = nt.mixtures.fit(
        jax.random.key(0), x, component, num_components=1, num_moves=3, num_draws=0
    )
    assert fit.num_moves == 0
