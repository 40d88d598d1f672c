r"""Half-steps along the invariances of the likelihood.

Moving z and undoing it in W and m changes no residual, while coordinate ascent alone creeps along such
directions for hundreds of sweeps. Here each is maximised in closed form, so both raise the ELBO:
:math:`z\to z + c, m\to m - Wc`, and :math:`z\to Rz, W\to WR^{-1}` for any invertible R, jointly with the
precisions λ. Parameter-expanded variational Bayes in the sense of Qi and Jaakkola (2006).
"""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered.ppca.ascent import update_loading_precision
from numpyro_tempered.ppca.base import Posterior, Prior, Scores
from numpyro_tempered.ppca.bound import second_moments


def translate(q: Posterior, z: Scores, prior: Prior, alpha: Any) -> tuple[Posterior, Scores]:
    r"""The best shift :math:`z\to z + c, m\to m - Wc`, a least squares problem in c."""
    k = z.loc.shape[1]
    if k == 0:
        return q, z
    precision = prior.mean_scale**-2
    off = q.loc.at[:, k].add(-1.0 * prior.mean)
    moments = second_moments(None, off, jnp.sum(q.cov, axis=0, keepdims=True) / q.cov.shape[0])[0]
    normal = alpha * z.loc.shape[0] * jnp.eye(k, dtype=z.loc.dtype) + precision * moments[:-1, :-1]
    shift = jnp.linalg.solve(normal, precision * moments[:-1, -1] - alpha * jnp.sum(z.loc, axis=0))
    step = jnp.eye(k + 1, dtype=z.loc.dtype).at[k, :k].set(-shift)
    moved = q._replace(loc=q.loc @ step.T, cov=step[None] @ q.cov @ step.T[None])
    return moved, z._replace(loc=z.loc + shift[None, :])


def rotate(
    q: Posterior, z: Scores, prior: Prior, alpha: Any, ard: bool, active: Any = None
) -> tuple[Posterior, Scores]:
    r"""The best R, jointly with λ where there is ARD.

    With :math:`G = R'R` and λ at its optimum the ELBO is, up to constants,
    :math:`\tfrac{\alpha n + 2c_0}{2}\log|G| - \tfrac\alpha2\mathrm{tr}(G\,E[Z'Z])
    - (c_0 + \tfrac d2)\log|e_0G + \tfrac12E[W'W]|`. In the basis where E[Z'Z] is I and E[W'W] is diagonal D, the
    best G is diagonal (Fiedler's bounds for the determinant of a sum), and each entry the positive root of a
    quadratic. The same holds without ARD, with :math:`\lambda\,\mathrm{tr}(G^{-1}E[W'W])/2`.
    """
    (n, k), d = z.loc.shape, q.loc.shape[0]
    if k == 0:
        return q, z
    # The sum over rows of E[zz']: covariances are shared by all rows, or one for each.
    total = second_moments(None, z.loc, jnp.sum(z.cov, axis=0, keepdims=True) / z.cov.shape[0])[0]
    factor = jnp.linalg.cholesky(total)
    cov_w = d // q.cov.shape[0] * jnp.sum(q.cov[:, :-1, :-1], axis=0)
    loadings = q.loc[:, :-1] @ factor
    within = factor.T @ cov_w @ factor
    moments = loadings.T @ loadings + within
    if active is not None:
        # What is 0 comes last, apart from columns that rounding makes as small.
        moments = moments - jnp.diag(1.0 - active)
    basis = jnp.linalg.eigh(moments)[1][:, ::-1]
    # Eigenvalues far below the first have lost their digits; sums of squares in this basis have not.
    energy = jnp.sum((loadings @ basis) ** 2, axis=0) + jnp.sum(basis * (within @ basis), axis=0)
    if ard:
        c, e = prior.ard_shape, prior.ard_rate
        root = _positive_root(
            alpha * e, (alpha * n - d) * e - 0.5 * alpha * energy, 0.5 * energy * (alpha * n + 2.0 * c)
        )
    else:
        root = _positive_root(alpha, alpha * n - d + jnp.zeros_like(energy), q.loading_precision * energy)
    if active is not None:
        root = jnp.where(active > 0.0, root, float(n))
    size = jnp.sqrt(root)
    back = factor @ basis / size[None, :]
    forth = size[:, None] * jax.scipy.linalg.solve_triangular(factor, basis, lower=True, trans=1).T
    step = jnp.eye(k + 1, dtype=z.loc.dtype).at[:k, :k].set(back.T)
    moved = q._replace(loc=q.loc @ step.T, cov=step[None] @ q.cov @ step.T[None])
    scores = Scores(z.loc @ forth.T, forth[None] @ z.cov @ forth.T[None])
    return (update_loading_precision(moved, prior) if ard else moved), scores


def _positive_root(square: Any, linear: Any, free: Any) -> Any:
    """The positive g with square·g² = linear·g + free, without cancellation."""
    root = jnp.sqrt(linear**2 + 4.0 * square * free)
    return jnp.where(linear > 0.0, (linear + root) / (2.0 * square), 2.0 * free / (root - linear))
