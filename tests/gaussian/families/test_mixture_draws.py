"""The density and the draws of a mixture of Gaussians, against SciPy and the random numbers of the key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

import numpyro_tempered as nt

WEIGHTS, LOC = np.array([0.2, 0.8]), np.array([[-1.0, 2.0], [3.0, 0.5]])
MATRICES = np.array([[[1.0, 0.5], [-0.3, 2.0]], [[0.5, 0.0], [0.4, -1.0]]])
DEVIATIONS = np.array([[0.5, 1.0], [2.0, 0.3]])


@pytest.mark.parametrize(
    "root",
    [MATRICES, pytest.param(DEVIATIONS, marks=pytest.mark.full)],
    ids=["matrices", "deviations"],
)
def test_a_mixture_has_its_density_and_its_draws(root, key, x64):
    def both(key, theta):
        q = nt.gaussian.families.GaussianMixture(
            jnp.log(WEIGHTS), jnp.asarray(LOC), jnp.asarray(root)
        )
        return q.log_prob(theta), q.sample(key, (5, 3))

    theta = np.random.default_rng(0).normal(size=(4, 2))
    log_prob, draws = jax.jit(both)(key, theta)
    dense = [np.diag(each) if each.ndim == 1 else each for each in root]
    parts = [
        stats.multivariate_normal(LOC[k], dense[k] @ dense[k].T).logpdf(theta)
        for k in range(2)
    ]
    expected = logsumexp(np.stack(parts, axis=-1) + np.log(WEIGHTS), axis=-1)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-9)
    which_key, noise_key = jax.random.split(key)
    which = np.asarray(
        jax.random.categorical(which_key, jnp.log(WEIGHTS), shape=(5, 3))
    )
    noise = np.asarray(jax.random.normal(noise_key, (5, 3, 2), float))
    assert set(which.ravel()) == {0, 1}
    expected = LOC[which] + np.einsum("...ab,...b->...a", np.array(dense)[which], noise)
    np.testing.assert_allclose(draws, expected, rtol=1e-9)
