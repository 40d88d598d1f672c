"""Moments, densities and draws that every family has, against dense ones by NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_tempered.gaussian.families import (
    FullRank,
    GaussianMixture,
    LowRank,
    MeanField,
    SpikeSlab,
)

rng = np.random.default_rng(0)
LOC, SCALE = rng.normal(size=3), np.array([0.5, 1.0, 2.0])
ROOT, FACTOR = rng.normal(size=(3, 3)), rng.normal(size=(3, 2))
WEIGHTS, PROBS = np.array([0.3, 0.7]), np.array([0.2, 0.5, 0.9])
LOCS, SCALES = rng.normal(size=(2, 3)), rng.uniform(0.5, 2.0, (2, 3))
ROOTS = rng.normal(size=(2, 3, 3))
# One row is 0 in two coordinates, where the spikes are.
THETA = rng.normal(size=(4, 2, 3))
THETA[0, 0, :2] = 0.0


def gaussians(weights, locs, covariances):
    """Mean, covariance and log-density of a mixture."""
    mean = weights @ locs
    within = np.einsum("k,kab->ab", weights, covariances)
    densities = [
        weight * stats.multivariate_normal(loc, covariance).pdf(THETA)
        for weight, loc, covariance in zip(weights, locs, covariances, strict=True)
    ]
    shift = locs - mean
    return mean, within + (shift.T * weights) @ shift, np.log(sum(densities))


def spikes(probs, loc, scale):
    second = probs * (scale**2 + loc**2)
    slab = np.log(probs) + stats.norm(loc, scale).logpdf(THETA)
    each = np.where(THETA == 0.0, np.log(1.0 - probs), slab)
    return probs * loc, np.diag(second - (probs * loc) ** 2), each.sum(axis=-1)


def one(covariance):
    return gaussians(np.ones(1), LOC[None], covariance[None])


CASES = {
    "mean field": (MeanField(LOC, SCALE), one(np.diag(SCALE**2))),
    "full rank": (FullRank(LOC, ROOT), one(ROOT @ ROOT.T)),
    "low rank": (
        LowRank(LOC, SCALE, FACTOR),
        one(np.linalg.inv(np.diag(SCALE) + FACTOR @ FACTOR.T)),
    ),
    "mixture of deviations": (
        GaussianMixture(np.log(WEIGHTS), LOCS, SCALES),
        gaussians(WEIGHTS, LOCS, np.array([np.diag(each**2) for each in SCALES])),
    ),
    "mixture of roots": (
        GaussianMixture(np.log(WEIGHTS), LOCS, ROOTS),
        gaussians(WEIGHTS, LOCS, ROOTS @ ROOTS.swapaxes(1, 2)),
    ),
    "spike and slab": (SpikeSlab(PROBS, LOC, SCALE), spikes(PROBS, LOC, SCALE)),
}


@pytest.mark.parametrize("name", CASES)
def test_moments_density_and_draws(name, key, x64):
    q, (mean, covariance, log_density) = CASES[name]
    size = 20_000

    @jax.jit
    def numbers(q):
        draws = q.sample(key, (size // 2, 2))
        return q.mean, q.sd, q.covariance, q.log_prob(THETA), q.sample(key), draws

    *found, single, draws = numbers(jax.tree.map(jnp.asarray, q))
    expected = mean, np.sqrt(np.diag(covariance)), covariance, log_density
    for value, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-9, atol=1e-12)
    assert single.shape == mean.shape
    draws = np.reshape(draws, (size, 3))
    standardised = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    # Means and second moments of unit variance: six standard errors, of a fourth moment below 25.
    np.testing.assert_allclose(standardised.mean(axis=1), 0.0, atol=6 * size**-0.5)
    np.testing.assert_allclose(
        np.cov(standardised), np.eye(3), atol=6 * 5.0 * size**-0.5
    )
