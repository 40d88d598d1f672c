"""Coordinate ascent for tempered probabilistic PCA: each function is one half-step."""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered.ppca.base import Posterior, Prior, Rows, Scores
from numpyro_tempered.ppca.bound import second_moments, shapes, squared_error, squared_loadings, with_one


def inverse(precision: Any, xp: Any = jnp) -> Any:
    """Inverses of a stack of positive definite matrices, by their Cholesky factors."""
    factor = xp.linalg.cholesky(precision)
    identity = xp.broadcast_to(xp.eye(precision.shape[-1], dtype=precision.dtype), precision.shape)
    if xp is jnp:
        half = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
    else:
        half = xp.linalg.solve(factor, identity)
    return xp.swapaxes(half, -1, -2) @ half


def update_scores(q: Posterior, rows: Rows, xp: Any = jnp) -> Scores:
    r"""The Gaussians of z, without alpha: :math:`S_i^{-1} = I + E\tau\sum_j E[w_jw_j']`, sums over observed j."""
    n, k = rows.x.shape[0], q.loc.shape[1] - 1
    if k == 0:
        return Scores(xp.zeros_like(rows.x, shape=(n, 0)), xp.zeros_like(rows.x, shape=(1, 0, 0)))
    loadings, mean, tau = q.loc[:, :-1], q.loc[:, -1], q.noise_precision
    residual = rows.x - mean[None, :]
    with_mean = q.cov[:, :-1, -1]
    if rows.mask is None:
        across = None
        shift = q.loc.shape[0] * with_mean
    else:
        across, residual = rows.mask.T, residual * rows.mask
        shift = rows.mask @ with_mean
    identity = xp.eye(k, dtype=q.loc.dtype)[None]
    cov = inverse(identity + tau * second_moments(across, loadings, q.cov[:, :-1, :-1], xp), xp)
    linear = tau * (residual @ loadings - shift)
    return Scores(xp.squeeze(cov @ linear[:, :, None], -1), cov)


def update_loadings(
    q: Posterior, z: Scores, rows: Rows, prior: Prior, alpha: Any, active: Any = None
) -> Posterior:
    r"""The Gaussians of :math:`\tilde w_j`, from rows that observe column j.

    .. math:: \Sigma_j^{-1} = \Lambda + \alpha\,E\tau\sum_iE[\tilde z_i\tilde z_i']

    Columns that are not ``active`` are 0: a model with fewer factors in arrays of the same shape.
    """
    augmented, k = with_one(z), z.loc.shape[1]
    mean_precision = prior.mean_scale**-2 * jnp.ones_like(q.loc, shape=(1,))
    diagonal = jnp.diag(jnp.concatenate([q.loading_precision, mean_precision]))
    weight = alpha * q.noise_precision
    cov = inverse(diagonal[None] + weight * second_moments(rows.mask, augmented.loc, augmented.cov))
    if active is not None:
        keep = jnp.append(active, 1.0)
        cov = cov * keep[None, :, None] * keep[None, None, :]
    # Missing entries of x are 0.
    linear = (weight * (rows.x.T @ augmented.loc)).at[:, k].add(prior.mean * mean_precision[0])
    return q._replace(loc=jnp.squeeze(cov @ linear[:, :, None], -1), cov=cov)


def update_loading_precision(q: Posterior, prior: Prior) -> Posterior:
    """The Gammas of λ (ARD), which carry no alpha."""
    shape = prior.ard_shape + 0.5 * q.loc.shape[0]
    return q._replace(loading_precision=shape / (prior.ard_rate + 0.5 * squared_loadings(q)))


def update_noise(q: Posterior, z: Scores, rows: Rows, prior: Prior, alpha: Any) -> Posterior:
    """The Gamma of τ."""
    n, d = rows.x.shape
    num_observed = n * d if rows.mask is None else jnp.sum(rows.mask)
    shape, _ = shapes(prior, alpha, num_observed, d, False)
    rate = prior.noise_rate + 0.5 * alpha * squared_error(q, z, rows)
    return q._replace(noise_precision=shape / rate)
