"""Mixtures of Gaussians by Bures-Wasserstein steps: the free energy, its derivatives, known optima."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.descent.mixture_energy import (
    evaluate,
    normal_nodes,
    reweigh,
)
from numpyro_tempered.gaussian.families import GaussianMixture

WEIGHTS = np.array([0.3, 0.7])
MEANS = np.array([[-3.0, 0.0], [3.0, 1.0]])
COVARIANCES = np.array([[[1.0, 0.8], [0.8, 1.0]], [[0.3, -0.1], [-0.1, 0.5]]])


def of_mixture(theta, data):
    """Minus the log-density of a mixture, in other words than the package's."""
    weights, means, covariances = data

    def one(mean, covariance):
        return jax.scipy.stats.multivariate_normal.logpdf(theta, mean, covariance)

    return -jax.nn.logsumexp(jnp.log(weights) + jax.vmap(one)(means, covariances))


def target():
    return tuple(jnp.asarray(part) for part in (WEIGHTS, MEANS, COVARIANCES))


def other_mixture(diagonal=False):
    """Two components that overlap, and no target's."""
    roots = np.array([[[1.0, 0.0], [0.5, 0.7]], [[0.8, 0.0], [-0.2, 1.1]]])
    roots = np.array([[1.0, 0.9], [0.8, 1.1]]) if diagonal else roots
    parts = (np.log([0.4, 0.6]), np.array([[-0.5, 0.2], [0.6, -0.3]]), roots)
    return GaussianMixture(*(jnp.asarray(part) for part in parts))


def test_nodes_have_the_moments_of_a_normal_distribution():
    nodes = normal_nodes(0, 64, 5)
    np.testing.assert_allclose(nodes.mean(axis=0), 0.0, atol=1e-14)
    np.testing.assert_allclose(nodes.T @ nodes / 64, np.eye(5), atol=1e-12)
    np.testing.assert_array_equal(nodes[:32], -nodes[32:])
    diagonal = normal_nodes(0, 64, 5, diagonal=True)
    np.testing.assert_allclose(np.mean(diagonal**2, axis=0), 1.0, atol=1e-12)
    # Fourth moments, and a number that is no power of two.
    assert np.mean(normal_nodes(1, 4000, 2) ** 4) == pytest.approx(3.0, abs=0.05)
    assert normal_nodes(1, 10, 2).shape == (10, 2)
    # Too few to have all second moments: those of each coordinate.
    few = normal_nodes(0, 8, 5)
    np.testing.assert_allclose(np.mean(few**2, axis=0), 1.0, atol=1e-12)
    np.testing.assert_allclose(
        normal_nodes(0, 20, 5).T @ normal_nodes(0, 20, 5) / 20, np.eye(5), atol=1e-12
    )


@pytest.mark.parametrize(
    "diagonal", [False, pytest.param(True, marks=pytest.mark.full)]
)
def test_the_free_energy_is_that_of_scipys_densities(diagonal):
    q, noise = other_mixture(diagonal), normal_nodes(0, 32, 2)
    point = jax.jit(evaluate, static_argnums=0)(
        of_mixture, q, jnp.asarray(noise), target()
    )
    total = 0.0
    for weight, mean, root in zip(np.exp(q.logits), q.loc, q.root, strict=True):
        matrix = np.diag(root) if diagonal else np.asarray(root)
        theta = np.asarray(mean) + noise @ matrix.T
        roots = [np.diag(r) if diagonal else np.asarray(r) for r in q.root]
        parts = zip(np.exp(q.logits), np.asarray(q.loc), roots, strict=True)
        log_q = np.log(
            sum(
                w * stats.multivariate_normal(m, r @ r.T).pdf(theta)
                for w, m, r in parts
            )
        )
        parts = zip(WEIGHTS, MEANS, COVARIANCES, strict=True)
        f = -np.log(
            sum(w * stats.multivariate_normal(m, v).pdf(theta) for w, m, v in parts)
        )
        # The entropy of the component itself is known: its part of log q has no noise.
        of_component = stats.multivariate_normal(np.asarray(mean), matrix @ matrix.T)
        total += weight * (
            np.mean(f + log_q - of_component.logpdf(theta)) - of_component.entropy()
        )
    assert float(point.energy) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "diagonal", [True, pytest.param(False, marks=pytest.mark.full)]
)
def test_derivatives_are_those_of_the_average(diagonal):
    at = jax.jit(evaluate, static_argnums=0)
    with enable_x64():
        q, noise, data = (
            other_mixture(diagonal),
            jnp.asarray(normal_nodes(0, 16, 2)),
            target(),
        )
        q = GaussianMixture(*(jnp.asarray(np.asarray(part), float) for part in q))
        point = at(of_mixture, q, noise, data)

        def energy(logits, loc, root):
            return float(
                at(of_mixture, GaussianMixture(logits, loc, root), noise, data).energy
            )

        h, weights = 1e-5, np.exp(q.logits)
        for k in range(2):
            root = jnp.diag(q.root[k]) if diagonal else q.root[k]
            for a in range(2):
                # Along the axes in which the component is standard.
                move = h * root[:, a]
                up, down = (
                    energy(q.logits, q.loc.at[k].add(s * move), q.root) for s in (1, -1)
                )
                assert (up - down) / (2 * h) / weights[k] == pytest.approx(
                    float(point.at.grad[k, a]), abs=1e-8
                )
                turn = (
                    jnp.zeros((2, 2)).at[a, a].set(h)
                    if diagonal
                    else jnp.zeros((2, 2)).at[a, 0].add(h)
                )
                turn = 0.5 * (turn + turn.T)
                change = jnp.diagonal(root @ turn) if diagonal else root @ turn
                up, down = (
                    energy(q.logits, q.loc, q.root.at[k].add(s * change))
                    for s in (1, -1)
                )
                entry = (
                    point.at.hessian[k, a] if diagonal else point.at.hessian[k, a, 0]
                )
                # The entropy has the identity as its derivative.
                expected = float(entry) - (1.0 if diagonal or a == 0 else 0.0)
                assert (up - down) / (2 * h) / weights[k] == pytest.approx(
                    expected, abs=1e-7
                )
        shift = h * jnp.array([1.0, -float(weights[0] / weights[1])])
        up, down = (
            energy(jnp.log(jnp.asarray(weights * (1 + s * shift))), q.loc, q.root)
            for s in (1, -1)
        )
        expected = float(jnp.sum(weights * shift / h * point.in_weight))
        assert (up - down) / (2 * h) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("x64", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_mixture_is_fitted_exactly(x64):
    with enable_x64() if x64 else contextlib.nullcontext():
        roots = jnp.broadcast_to(jnp.eye(2), (2, 2, 2))
        init = GaussianMixture(
            jnp.log(jnp.array([0.5, 0.5])), jnp.array([[-2.0, 0.0], [2.0, 0.0]]), roots
        )
        result = nt.gaussian.descent.minimise_mixture(
            of_mixture,
            init,
            normal_nodes(0, 64, 2),
            target(),
            tolerance=1e-8 if x64 else 1e-5,
        )
    assert bool(result.converged)
    q, atol = GaussianMixture(*map(np.asarray, result.posterior)), 1e-4 if x64 else 5e-3
    np.testing.assert_allclose(np.exp(q.logits), WEIGHTS, atol=atol)
    np.testing.assert_allclose(q.loc, MEANS, atol=4 * atol)
    np.testing.assert_allclose(
        q.root @ np.swapaxes(q.root, 1, 2), COVARIANCES, atol=4 * atol
    )
    assert np.all(np.triu(q.root[0], 1) == 0.0)
    # The log evidence of a density is 0.
    assert float(result.elbo) == pytest.approx(0.0, abs=1e-5 if x64 else 1e-4)
    accepted = np.asarray(result.trace.elbo)[np.asarray(result.trace.accepted)]
    assert np.all(np.diff(accepted) >= -1e-5)


@pytest.mark.parametrize(
    ("shift", "scale"), [(0.0, 1.0), (0.5, 1.2)], ids=["weights alone", "all"]
)
def test_what_is_wrong_with_a_mixture_is_how_far_it_is_from_stationary(shift, scale):
    # So far apart that each component has no part in what the other one meets.
    means, roots, weights = (
        10.0 * MEANS,
        np.linalg.cholesky(COVARIANCES),
        np.array([0.6, 0.4]),
    )
    init = GaussianMixture(
        *map(
            jnp.asarray,
            (np.log(weights), means + shift * roots[:, :, 0], scale * roots),
        )
    )
    far = tuple(jnp.asarray(part) for part in (WEIGHTS, means, COVARIANCES))
    # The start has converged by any tolerance.
    result = nt.gaussian.descent.minimise_mixture(
        of_mixture, init, normal_nodes(0, 64, 2), far, tolerance=np.inf
    )
    assert int(result.num_evaluations) == 1
    # In coordinates in which a component is standard, that of the target is shifted and scaled.
    slope, curvature = scale * shift, scale**2 * np.eye(2)
    divergence = 0.5 * shift**2 + scale**2 - 1.0 - 2.0 * np.log(scale)
    in_weight = np.log(weights / WEIGHTS) + divergence
    apart = in_weight - weights @ in_weight
    of_component = 0.5 * slope**2 + 0.25 * np.sum(np.square(curvature - np.eye(2)))
    expected = of_component + 0.5 * weights @ np.square(apart)
    np.testing.assert_allclose(result.stationarity, expected, rtol=1e-4)


def test_one_step_ends_at_narrow_components_that_are_far_apart():
    means, weights, eye = (
        jnp.array([[-20.0, 1.0], [20.0, 0.0]]),
        jnp.array([0.5, 0.5]),
        jnp.eye(2),
    )
    init = GaussianMixture(jnp.log(weights), means + 0.3, jnp.stack([eye, eye]))
    far = (weights, means, jnp.stack([eye / 4.0, eye / 4.0]))
    result = nt.gaussian.descent.minimise_mixture(
        of_mixture, init, normal_nodes(0, 64, 2), far, tolerance=1e-5
    )
    assert int(result.num_evaluations) == 2
    np.testing.assert_allclose(result.posterior.loc, means, atol=1e-4)
    np.testing.assert_allclose(
        result.posterior.root, 0.5 * np.stack([eye, eye]), atol=1e-4
    )


def test_weights_are_those_of_known_components():
    roots = jnp.asarray(np.linalg.cholesky(COVARIANCES))
    q = GaussianMixture(jnp.log(jnp.array([0.9, 0.1])), jnp.asarray(MEANS), roots)
    q = reweigh(of_mixture, q, normal_nodes(3, 256, 2), target())
    np.testing.assert_allclose(np.exp(q.logits), WEIGHTS, atol=1e-5)


def test_moments_and_draws_of_a_mixture():
    q = GaussianMixture(
        *(
            jnp.asarray(part)
            for part in (np.log(WEIGHTS), MEANS, np.linalg.cholesky(COVARIANCES))
        )
    )
    mean = WEIGHTS @ MEANS
    apart = MEANS - mean
    covariance = np.einsum("k,kab->ab", WEIGHTS, COVARIANCES) + np.einsum(
        "k,ka,kb->ab", WEIGHTS, apart, apart
    )
    np.testing.assert_allclose(q.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(q.covariance, covariance, rtol=1e-5)
    draws = np.asarray(q.sample(jax.random.key(0), (40_000,)))
    assert q.sample(jax.random.key(0)).shape == (2,)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(np.cov(draws.T), covariance, rtol=0.03, atol=0.03)
    expected = -jax.vmap(lambda theta: of_mixture(theta, target()))(draws[:100])
    np.testing.assert_allclose(q.log_prob(draws[:100]), expected, rtol=1e-4, atol=1e-4)


def test_what_is_refused():
    noise, init = normal_nodes(0, 8, 2), other_mixture()
    with pytest.raises(TypeError, match="init must be a GaussianMixture"):
        nt.gaussian.descent.minimise_mixture(of_mixture, (0, 0), noise)
    with pytest.raises(ValueError, match=r"init must have logits \(K,\)"):
        nt.gaussian.descent.minimise_mixture(
            of_mixture, init._replace(loc=init.loc[0]), noise
        )
    with pytest.raises(
        ValueError, match=r"standard_points must have shape \(S, 2\).*with S at least"
    ):
        nt.gaussian.descent.minimise_mixture(of_mixture, init, noise[:, :1])
    with pytest.raises(
        ValueError,
        match=r"^the ELBO.*not finite at the start.*start at narrower components",
    ):
        nt.gaussian.descent.minimise_mixture(
            lambda theta, _: jnp.nan * theta[0], init, noise, max_evaluations=3
        )
