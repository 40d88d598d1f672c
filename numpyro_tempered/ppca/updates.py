r"""Coordinate ascent for tempered probabilistic PCA: each function is one half-step.

:func:`translate` and :func:`rotate` move along the invariances of the likelihood, :math:`z\to z + c, m\to m - Wc`
and :math:`z\to Rz, W\to WR^{-1}` for any invertible R, jointly with the precisions λ. No residual changes, and
coordinate ascent alone creeps along such directions for hundreds of sweeps. Both are maximised in closed form:
parameter-expanded variational Bayes in the sense of Qi and Jaakkola (2006).
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, Scalar
from numpyro_tempered.ppca.base import Posterior, Prior, Rows, Scores, Target
from numpyro_tempered.ppca.bound import (
    gamma_shapes,
    second_moments,
    squared_error,
    squared_loadings,
    with_one,
)


def sweep(q: Posterior, target: Target) -> tuple[Posterior, Scores]:
    """Each half-step once."""
    z = update_scores(q, target.rows)
    q = update_loadings(q, z, target)
    q, z = translate(q, z, target)
    q, z = rotate(q, z, target)
    return update_noise(q, z, target), z


def inverse(precision: Array, xp: ModuleType = jnp) -> Array:
    """Inverses of a stack of positive definite matrices, by their Cholesky factors."""
    factor = xp.linalg.cholesky(precision)
    identity = xp.broadcast_to(
        xp.eye(precision.shape[-1], dtype=precision.dtype), precision.shape
    )
    if xp is jnp:
        half = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
    else:
        half = xp.linalg.solve(factor, identity)
    return xp.swapaxes(half, -1, -2) @ half


def update_scores(q: Posterior, rows: Rows, xp: ModuleType = jnp) -> Scores:
    r"""The Gaussians of z, without alpha: :math:`S_i^{-1} = I + E\tau\sum_j E[w_jw_j']`, sums over observed j."""
    n, k = rows.x.shape[0], q.loc.shape[1] - 1
    if k == 0:
        return Scores(
            xp.zeros_like(rows.x, shape=(n, 0)), xp.zeros_like(rows.x, shape=(1, 0, 0))
        )
    loadings, mean, tau = q.loc[:, :-1], q.loc[:, -1], q.noise_precision
    residual = rows.x - mean[None, :]
    with_mean = q.cov[:, :-1, -1]
    across, shift = None, q.loc.shape[0] * with_mean
    if rows.mask is not None:
        across, residual, shift = (
            rows.mask.T,
            residual * rows.mask,
            xp.matmul(rows.mask, with_mean),
        )
    identity = xp.eye(k, dtype=q.loc.dtype)[None]
    cov = inverse(
        identity + tau * second_moments(across, loadings, q.cov[:, :-1, :-1], xp), xp
    )
    linear = tau * (residual @ loadings - shift)
    return Scores(xp.squeeze(cov @ linear[:, :, None], -1), cov)


def update_loadings(q: Posterior, z: Scores, target: Target) -> Posterior:
    r"""The Gaussians of :math:`\tilde w_j`, from rows that observe column j.

    .. math:: \Sigma_j^{-1} = \Lambda + \alpha\,E\tau\sum_iE[\tilde z_i\tilde z_i']

    Columns that are not ``active`` are 0: a model with fewer factors in arrays of the same shape.
    """
    rows, prior, alpha, _, active = target
    augmented, k = with_one(z), z.loc.shape[1]
    mean_precision = prior.mean_scale**-2 * jnp.ones_like(q.loc, shape=(1,))
    diagonal = jnp.diag(jnp.concatenate([q.loading_precision, mean_precision]))
    weight = alpha * q.noise_precision
    cov = inverse(
        diagonal[None]
        + weight * second_moments(rows.mask, augmented.loc, augmented.cov)
    )
    if active is not None:
        keep = jnp.append(active, 1.0)
        cov = cov * keep[None, :, None] * keep[None, None, :]
    # Missing entries of x are 0.
    linear = (
        (weight * (rows.x.T @ augmented.loc))
        .at[:, k]
        .add(prior.mean * mean_precision[0])
    )
    return q._replace(loc=jnp.squeeze(cov @ linear[:, :, None], -1), cov=cov)


def update_loading_precision(q: Posterior, prior: Prior) -> Posterior:
    """The Gammas of λ (ARD), which carry no alpha."""
    shape = prior.ard_shape + 0.5 * q.loc.shape[0]
    return q._replace(
        loading_precision=shape / (prior.ard_rate + 0.5 * squared_loadings(q))
    )


def update_noise(q: Posterior, z: Scores, target: Target) -> Posterior:
    """The Gamma of τ."""
    shape, _ = gamma_shapes(target)
    rate = target.prior.noise_rate + 0.5 * target.alpha * squared_error(
        q, z, target.rows
    )
    return q._replace(noise_precision=shape / rate)


def translate(q: Posterior, z: Scores, target: Target) -> tuple[Posterior, Scores]:
    r"""The best shift :math:`z\to z + c, m\to m - Wc`, a least squares problem in c."""
    prior, alpha, k = target.prior, target.alpha, z.loc.shape[1]
    if k == 0:
        return q, z
    precision = prior.mean_scale**-2
    off = q.loc.at[:, k].add(-1.0 * prior.mean)
    moments = second_moments(
        None, off, jnp.sum(q.cov, axis=0, keepdims=True) / q.cov.shape[0]
    )[0]
    normal = (
        alpha * z.loc.shape[0] * jnp.eye(k, dtype=z.loc.dtype)
        + precision * moments[:-1, :-1]
    )
    shift = jnp.linalg.solve(
        normal, precision * moments[:-1, -1] - alpha * jnp.sum(z.loc, axis=0)
    )
    step = jnp.eye(k + 1, dtype=z.loc.dtype).at[k, :k].set(-shift)
    q = q._replace(loc=q.loc @ step.T, cov=step[None] @ q.cov @ step.T[None])
    return q, z._replace(loc=z.loc + shift[None, :])


def rotate(q: Posterior, z: Scores, target: Target) -> tuple[Posterior, Scores]:
    r"""The best R, jointly with λ where there is ARD.

    With :math:`G = R'R` and λ at its optimum the ELBO is, up to constants,
    :math:`\tfrac{\alpha n + 2c_0}{2}\log|G| - \tfrac\alpha2\mathrm{tr}(G\,E[Z'Z])
    - (c_0 + \tfrac d2)\log|e_0G + \tfrac12E[W'W]|`. In the basis where E[Z'Z] is I and E[W'W] is diagonal D, the
    best G is diagonal (Fiedler's bounds for the determinant of a sum), and each entry the positive root of a
    quadratic. The same holds without ARD, with :math:`\lambda\,\mathrm{tr}(G^{-1}E[W'W])/2`.
    """
    _, prior, alpha, ard, active = target
    (n, k), d = z.loc.shape, q.loc.shape[0]
    if k == 0:
        return q, z
    # The sum over rows of E[zz']: covariances are shared by all rows, or one for each.
    total = second_moments(
        None, z.loc, jnp.sum(z.cov, axis=0, keepdims=True) / z.cov.shape[0]
    )[0]
    factor = jnp.linalg.cholesky(total)
    cov_w = d // q.cov.shape[0] * jnp.sum(q.cov[:, :-1, :-1], axis=0)
    loadings = q.loc[:, :-1] @ factor
    within = factor.T @ cov_w @ factor
    moments = loadings.T @ loadings + within
    if active is not None:
        # Padding comes last, apart from columns that rounding makes as small.
        moments = moments - jnp.diag(1.0 - active)
    basis = jnp.linalg.eigh(moments)[1][:, ::-1]
    # Eigenvalues far below the first have lost their digits; sums of squares in this basis have not.
    energy = jnp.sum((loadings @ basis) ** 2, axis=0) + jnp.sum(
        basis * (within @ basis), axis=0
    )
    if ard:
        c, e = prior.ard_shape, prior.ard_rate
        linear, free = (
            (alpha * n - d) * e - 0.5 * alpha * energy,
            0.5 * energy * (alpha * n + 2.0 * c),
        )
        root = _positive_root(alpha * e, linear, free)
    else:
        root = _positive_root(
            alpha, alpha * n - d + jnp.zeros_like(energy), q.loading_precision * energy
        )
    if active is not None:
        root = jnp.where(active > 0.0, root, float(n))
    size = jnp.sqrt(root)
    of_loadings = factor @ basis / size[None, :]
    of_scores = (
        size[:, None]
        * jax.scipy.linalg.solve_triangular(factor, basis, lower=True, trans=1).T
    )
    step = jnp.eye(k + 1, dtype=z.loc.dtype).at[:k, :k].set(of_loadings.T)
    q = q._replace(loc=q.loc @ step.T, cov=step[None] @ q.cov @ step.T[None])
    scores = Scores(z.loc @ of_scores.T, of_scores[None] @ z.cov @ of_scores.T[None])
    return (update_loading_precision(q, prior) if ard else q), scores


def _positive_root(square: Scalar, linear: Array, free: Array) -> Array:
    """The positive g with square·g² = linear·g + free, without cancellation."""
    root = jnp.sqrt(linear**2 + 4.0 * square * free)
    return jnp.where(
        linear > 0.0, (linear + root) / (2.0 * square), 2.0 * free / (root - linear)
    )
