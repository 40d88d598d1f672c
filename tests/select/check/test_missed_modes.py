"""Modes that no draw of a fit comes near: their share, their place, and when there is none to tell."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.moments import of_draws
from numpyro_tempered.select.check import missed
from numpyro_tempered.select.check.missed import missed_modes
from numpyro_tempered.select.check.target import Draws

KEY = jax.random.key(4)
WEIGHTS = np.array([0.6, 0.3, 0.1])
LOC = np.array([[-7.0, 0.0], [6.0, 8.0], [5.0, -9.0]])
COV = np.array(
    [[[1.0, 0.6], [0.6, 0.5]], [[0.5, -0.9], [-0.9, 4.0]], [[0.3, 0.1], [0.1, 0.2]]]
)
# The density of the datum, which the evidence has too.
LOG_DATUM = stats.norm(0.0, 2.0).logpdf(1.0)


def three_modes():
    parts = dist.MultivariateNormal(
        jnp.asarray(LOC, jnp.float32), jnp.asarray(COV, jnp.float32)
    )
    numpyro.sample(
        "z",
        dist.MixtureSameFamily(
            dist.Categorical(jnp.asarray(WEIGHTS, jnp.float32)), parts
        ),
    )
    numpyro.sample("y", dist.Normal(0.0, 2.0), obs=1.0)


@pytest.fixture(scope="module")
def target():
    return Target(three_modes, (), {}, KEY, {"z": jnp.zeros(2)})


def draws_about(modes):
    """Draws of the Gaussians at some of the modes."""
    rng = np.random.default_rng(1)
    flat = np.concatenate(
        [rng.multivariate_normal(LOC[j], COV[j], 300) for j in modes]
    ).astype(np.float32)
    return Draws(np.zeros(len(flat)), flat, flat, of_draws(flat), None)


def test_modes_that_no_draw_is_near_are_found_with_their_share_of_the_mass(target):
    missed = missed_modes(KEY, draws_about([0]), LOG_DATUM + np.log(WEIGHTS[0]), target)
    assert missed.num_modes == 2
    assert missed.share == pytest.approx(0.4, abs=2e-3)
    np.testing.assert_allclose(missed.values, LOC[1], atol=1e-4)


def test_what_draws_spread_over_or_a_hundredth_is_nothing_missed(target):
    """The third mode is in the midst of these draws, though none is near."""
    corners = np.tile(
        np.array(
            [[-40.0, 30.0], [40.0, -30.0], [40.0, 30.0], [-40.0, -30.0]], np.float32
        ),
        (50, 1),
    )
    flat = np.concatenate([draws_about([0, 1]).flat, corners])
    wide = draws_about([0])._replace(flat=flat)
    assert (
        missed_modes(KEY, wide, LOG_DATUM + np.log(WEIGHTS[:2].sum()), target) is None
    )
    # It is a tenth of a posterior of which there is ten times as much.
    assert (
        missed_modes(KEY, draws_about([0, 1]), LOG_DATUM + np.log(10.0), target) is None
    )


@pytest.mark.parametrize(
    ("gradient", "hessians", "expected"),
    [
        (lambda z: z, [np.eye(2)] * 3, True),
        # Slopes that fall from the first point on, as between two modes.
        (lambda z: z * (z**2 - 1.0), [np.eye(2)] * 3, False),
        (lambda z: z, [np.eye(2), np.diag([1.0, -0.5]), np.eye(2)], False),
        (lambda z: z, [np.eye(2), np.full((2, 2), np.nan), np.eye(2)], False),
        # Narrow in one direction, and flat in another but for rounding.
        (lambda z: z, [np.diag([1e8, 1.0])] * 3, True),
        (lambda z: z, [np.diag([1.0, -1e-12])] * 3, False),
    ],
)
def test_what_bends_upwards_everywhere_is_looked_at_no_further(
    gradient, hessians, expected, monkeypatch
):
    points = np.array([[0.1, 0.0], [2.0, 1.0], [-1.5, 0.3]])
    monkeypatch.setattr(missed, "curvatures", lambda target, points: hessians)
    assert (
        missed.bends_upwards(None, lambda z: (0.0, gradient(np.asarray(z))), points)
        == expected
    )
