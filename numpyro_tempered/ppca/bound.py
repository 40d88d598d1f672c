"""The ELBO of tempered probabilistic PCA, with every constant."""

import math
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, Numbers, Scalar
from numpyro_tempered.ppca.base import Posterior, Rows, Scores, Target, in_double


def second_moments(
    mask: Numbers | None, loc: Array, cov: Array, xp: ModuleType = jnp
) -> Array:
    """Sums of E[v v'] over the rows of ``mask``, one for each of its columns; a single one without a mask.

    v is the z of rows, or with the mask transposed the w of features.
    """
    if mask is None:
        return (loc.T @ loc + loc.shape[0] * cov[0])[None]
    return xp.einsum("ij,ikl->jkl", mask, cov + loc[:, :, None] * loc[:, None, :])


def with_one(z: Scores, xp: ModuleType = jnp) -> Scores:
    """The Gaussians of (z, 1)."""
    loc = xp.concatenate(
        [z.loc, xp.ones_like(z.loc[:, :0], shape=(z.loc.shape[0], 1))], axis=1
    )
    return Scores(loc, xp.pad(z.cov, ((0, 0), (0, 1), (0, 1))))


def squared_error(q: Posterior, z: Scores, rows: Rows, xp: ModuleType = jnp) -> Array:
    """Sum over observed entries of E[(x - w̃'(z, 1))²], as squares and traces, which do not cancel."""
    d, augmented = q.loc.shape[0], with_one(z, xp)
    residual = rows.x - augmented.loc @ q.loc.T
    if rows.mask is not None:
        residual = residual * rows.mask
    over_rows = second_moments(rows.mask, augmented.loc, augmented.cov, xp)
    loadings = q.loc[:, :-1]
    across = None if rows.mask is None else rows.mask.T
    over_features = second_moments(
        across, loadings, xp.zeros_like(q.cov[:, :-1, :-1]), xp
    )
    return (
        xp.sum(residual**2)
        + d // q.cov.shape[0] * xp.sum(q.cov * over_rows)
        + z.loc.shape[0] // z.cov.shape[0] * xp.sum(z.cov * over_features)
    )


def squared_loadings(q: Posterior, xp: ModuleType = jnp) -> Array:
    """E|W_k|² of each column of W, shape ``(K,)``."""
    d = q.loc.shape[0]
    variances = xp.diagonal(q.cov[:, :-1, :-1], axis1=1, axis2=2)
    return xp.sum(q.loc[:, :-1] ** 2, axis=0) + d // q.cov.shape[0] * xp.sum(
        variances, axis=0
    )


def log_det(cov: Array, xp: ModuleType = jnp) -> Array:
    """The sum of the log determinants of a stack of positive definite matrices."""
    return 2.0 * xp.sum(xp.log(xp.diagonal(xp.linalg.cholesky(cov), axis1=1, axis2=2)))


def gamma_shapes(target: Target) -> tuple[Scalar, float]:
    """Shapes of the Gamma posteriors of τ and of λ; without ARD d/2, the power of λ in the density of W."""
    prior, num_observed, d = (
        target.prior,
        target.rows.num_observed,
        target.rows.x.shape[1],
    )
    loading_shape = 0.5 * d + (prior.ard_shape if target.ard else 0.0)
    return prior.noise_shape + 0.5 * target.alpha * num_observed, loading_shape


def varying_terms(
    q: Posterior, z: Scores, target: Target, xp: ModuleType = jnp
) -> Array:
    r"""The terms of the ELBO that depend on the factors; :func:`constant` gives the others.

    The z carry alpha in model and guide. As a Gamma posterior keeps its shape a, the digammas in
    :math:`E\log\tau` and in its KL cancel up to :math:`a\log E\tau - b_0 E\tau`.
    """
    rows, prior, alpha, ard, active = target
    (n, d), k = rows.x.shape, z.loc.shape[1]
    a, c = gamma_shapes(target)
    tau, precision = q.noise_precision, q.loading_precision
    active = xp.ones_like(precision) if active is None else active
    log_det_z = n // z.cov.shape[0] * log_det(z.cov, xp) if k else 0.0
    trace_z = n // z.cov.shape[0] * xp.sum(xp.diagonal(z.cov, axis1=1, axis2=2))
    shared = d // q.cov.shape[0]
    off_mean = xp.sum((q.loc[:, -1] - prior.mean) ** 2) + shared * xp.sum(
        q.cov[:, -1, -1]
    )
    return xp.stack(
        [
            -0.5 * alpha * tau * squared_error(q, z, rows, xp),
            a * xp.log(tau),
            -prior.noise_rate * tau,
            -0.5 * alpha * (xp.sum(z.loc**2) + trace_z - n * k - log_det_z),
            0.5
            * shared
            * log_det(q.cov + xp.diag(xp.append(1.0 - active, 0.0))[None], xp),
            -0.5 * off_mean / prior.mean_scale**2,
            -0.5 * xp.sum(precision * squared_loadings(q, xp)),
            xp.sum(
                active
                * (c * xp.log(precision) - (prior.ard_rate if ard else 0.0) * precision)
            ),
        ]
    )


def constant(target: Target, k: int) -> float:
    """The terms of the ELBO of k factors that depend on sizes and prior alone, in float64."""
    prior, alpha, d = target.prior, float(target.alpha), target.rows.x.shape[1]
    a, c = gamma_shapes(target)
    likelihood = -0.5 * alpha * int(target.rows.num_observed) * math.log(2.0 * math.pi)
    mean = -d * math.log(prior.mean_scale)
    gammas = _gamma_constant(float(a), prior.noise_shape, prior.noise_rate)
    if target.ard:
        gammas += k * _gamma_constant(c, prior.ard_shape, prior.ard_rate)
    return likelihood + mean + 0.5 * d * (k + 1) + gammas


def _gamma_constant(shape: float, prior_shape: float, prior_rate: float) -> float:
    posterior = math.lgamma(shape) + shape - shape * math.log(shape)
    return posterior - math.lgamma(prior_shape) + prior_shape * math.log(prior_rate)


def elbo(q: Posterior, z: Scores, target: Target) -> float:
    """The ELBO in float64 on the host, at any factors whose Gammas have the shapes of :func:`gamma_shapes`."""
    q, z, target = (
        in_double(q),
        in_double(z),
        target._replace(rows=in_double(target.rows)),
    )
    return float(varying_terms(q, z, target, np).sum()) + constant(
        target, z.loc.shape[1]
    )
