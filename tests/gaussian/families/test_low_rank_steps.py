"""Steps and conversions of a low-rank family where its rank suffices: those of dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.gaussian.families.base import Gain, Rows, Whitened

RNG = np.random.default_rng(0)
LOC, PRIOR_LOC = RNG.normal(size=(2, 3))
DIAG, PRIOR_DIAG = np.array([1.0, 2.0, 0.5]), np.array([0.3, 0.4, 0.2])
FACTOR, PRIOR_FACTOR = RNG.normal(size=(2, 3, 3))
X, WEIGHTS, FORCE = RNG.normal(size=(2, 3)), np.array([0.7, 1.3]), RNG.normal(size=3)


def precision_of(q):
    return np.diag(q[1]) + np.asarray(q[2]) @ np.asarray(q[2]).T


@pytest.mark.parametrize(
    ("keep", "pull"),
    tiered([(0.8, 0.3), (0.8, 0.0), (1.0, 0.0)], unit=[(0.8, 0.3), (0.8, 0.0)]),
)
def test_a_step_keeps_a_part_of_the_precision_and_is_pulled_to_the_prior(
    keep, pull, x64
):
    q, prior = (
        nt.gaussian.families.LowRank(LOC, DIAG, FACTOR),
        nt.gaussian.families.LowRank(PRIOR_LOC, PRIOR_DIAG, PRIOR_FACTOR),
    )

    @jax.jit
    def step(q, prior):
        family = family_of(q)
        return family.natural_step(
            family.init(q), q, prior, FORCE, Rows(X, WEIGHTS), Gain(0.5, keep, pull)
        )[0]

    after = step(*(jax.tree.map(jnp.asarray, each) for each in (q, prior)))
    of_prior = precision_of(prior)
    expected = keep * precision_of(q) + pull * of_prior + 2 * 0.5 * (X.T * WEIGHTS) @ X
    np.testing.assert_allclose(precision_of(after), expected, rtol=1e-9, atol=1e-10)
    force = 0.5 * FORCE + pull * of_prior @ (LOC - PRIOR_LOC)
    np.testing.assert_allclose(
        after.loc, LOC - np.linalg.solve(expected, force), rtol=1e-9
    )


def test_another_family_becomes_low_rank_by_its_precision(x64):
    like = nt.gaussian.families.LowRank(jnp.zeros(3), jnp.ones(3), jnp.zeros((3, 3)))
    root = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [-0.3, 0.2, 0.7]])
    convert = jax.jit(family_of(like).convert)
    full = convert(
        nt.gaussian.families.FullRank(jnp.asarray(LOC), jnp.asarray(root)), like
    )
    np.testing.assert_allclose(
        precision_of(full), np.linalg.inv(root @ root.T), rtol=1e-8, atol=1e-10
    )
    diagonal = convert(
        nt.gaussian.families.MeanField(jnp.asarray(LOC), jnp.asarray([0.5, 1.0, 2.0])),
        like,
    )
    np.testing.assert_allclose(
        precision_of(diagonal), np.diag([4.0, 1.0, 0.25]), atol=1e-12
    )
    wider = nt.gaussian.families.LowRank(
        jnp.asarray(LOC), jnp.asarray(DIAG), jnp.asarray(FACTOR)
    )
    assert family_of(like).convert(wider, like) is wider
    fewer = convert(
        wider,
        nt.gaussian.families.LowRank(jnp.zeros(3), jnp.ones(3), jnp.zeros((3, 1))),
    )
    # The diagonal of the precision stays.
    np.testing.assert_allclose(
        np.diag(precision_of(fewer)), np.diag(precision_of(wider)), rtol=1e-8
    )
    np.testing.assert_allclose(fewer.loc, LOC)


def test_forms_of_curvature_are_the_matrices_that_they_stand_for(x64):
    rows = Rows(jnp.asarray(X), jnp.array([0.7, -1.3]))
    floored, had_any = rows.floor()
    np.testing.assert_allclose(floored.weights, [0.7, 0.0])
    assert had_any
    assert not rows._replace(weights=jnp.ones(2)).floor()[1]
    np.testing.assert_allclose(rows.scaled(2.0).weights, [1.4, -2.6])
    root, matrix = np.linalg.cholesky(FACTOR @ FACTOR.T), np.diag([1.0, 2.0, 3.0]) + 0.5
    white = Whitened(jnp.asarray(root), jnp.asarray(root.T @ matrix @ root))
    np.testing.assert_allclose(white.dense(), matrix, rtol=1e-9)
    np.testing.assert_allclose(white.scaled(2.0).dense(), 2.0 * matrix, rtol=1e-9)
