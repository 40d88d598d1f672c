r"""Gaussians whose precision is diagonal plus low rank, q = N(loc, (diag(D) + U Uᵀ)^-1).

The precision, not the covariance, has this form: data add to it. Every operation is O(d k²).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core.precision import CompensatedSum, matmul
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families.base import Family, Gain, Rows, register


class LowRank(NamedTuple):
    """A Gaussian with precision ``diag(precision_diag) + precision_factor @ precision_factor.T``.

    Attributes:
        loc: Means, shape ``(d,)``.
        precision_diag: Positive, shape ``(d,)``.
        precision_factor: Shape ``(d, k)``, 1 <= k <= d; zeros at a prior that is diagonal.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.families import LowRank
        >>> q = LowRank(jnp.zeros(5), jnp.ones(5), jnp.zeros((5, 2)))
        >>> q.precision_factor.shape
        (5, 2)
    """

    loc: Array
    precision_diag: Array
    precision_factor: Array


class Memory(NamedTuple):
    """Mean and diagonal; both move by less than their rounding error on long streams."""

    loc: CompensatedSum
    precision_diag: CompensatedSum


def check(prior: LowRank) -> LowRank:
    """The prior as floating arrays of one dtype.

    Raises:
        ValueError: If the shapes disagree, d or k is 0, k > d, or (outside of transformations) a value is not
            finite or a diagonal entry not positive.
    """
    arrays = [jnp.asarray(leaf) for leaf in prior]
    dtype = jnp.result_type(*arrays, float)
    loc, diag, factor = arrays
    shape = loc.shape
    fits = loc.ndim == 1 and loc.size and diag.shape in ((), shape) and factor.ndim == 2
    if not fits or factor.shape[0] != loc.shape[0] or not 1 <= factor.shape[1] <= loc.shape[0]:
        raise ValueError(
            "prior needs loc of shape (d,) with d >= 1, precision_diag of shape (d,) or (), and precision_factor "
            f"of shape (d, k) with 1 <= k <= d, got {shape}, {diag.shape} and {factor.shape}."
        )
    diag = jnp.broadcast_to(diag, shape)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        if not all(np.all(np.isfinite(leaf)) for leaf in arrays):
            raise ValueError("prior has a value that is not finite.")
        if not np.all(np.asarray(diag) > 0):
            raise ValueError(f"prior.precision_diag must be positive, got {np.asarray(diag).min()}.")
    return LowRank(loc.astype(dtype), diag.astype(dtype), factor.astype(dtype))


def _core(q: LowRank) -> tuple[Array, Array]:
    """D^-1 U, and the lower Cholesky factor of I + Uᵀ D^-1 U."""
    scaled = q.precision_factor / q.precision_diag[:, None]
    rank = q.precision_factor.shape[1]
    gram = jnp.eye(rank, dtype=q.loc.dtype) + matmul(q.precision_factor.T, scaled)
    return scaled, jnp.linalg.cholesky(gram, symmetrize_input=False)


def times_covariance(q: LowRank, vectors: Array) -> Array:
    """The rows of ``vectors`` ``(n, d)`` times the covariance, by Woodbury's identity."""
    scaled, core = _core(q)
    inner = solve_triangular(core, matmul(vectors, scaled).T, lower=True)
    outer = solve_triangular(core, inner, lower=True, trans=1)
    return vectors / q.precision_diag[None, :] - matmul(scaled, outer).T


def predictor_variance(q: LowRank, x: Array) -> Array:
    """Variances of the rows of ``x @ theta``, shape ``(n,)``."""
    scaled, core = _core(q)
    inner = solve_triangular(core, matmul(x, scaled).T, lower=True)
    variance = jnp.sum(jnp.square(x) / q.precision_diag[None, :], axis=-1) - jnp.sum(jnp.square(inner), axis=0)
    return jnp.maximum(variance, 0.0)


def marginal_scale(q: LowRank) -> Array:
    """Standard deviations of the coordinates, shape ``(d,)``."""
    scaled, core = _core(q)
    inner = solve_triangular(core, scaled.T, lower=True)
    return jnp.sqrt(jnp.maximum(1.0 / q.precision_diag - jnp.sum(jnp.square(inner), axis=0), 0.0))


def color(q: LowRank, noise: Array) -> Array:
    """Noise ``(..., d)`` of unit covariance times a square root of the covariance of ``q``.

    With Q = D^{-1/2} U and the Cholesky factor C of I + QᵀQ, the root is D^{-1/2} (I - Q C^-T (I + C)^-1 Qᵀ)
    (Andrews 1968); unlike an eigendecomposition it has gradients at U = 0.
    """
    _, core = _core(q)
    rows = jnp.reshape(noise, (-1, noise.shape[-1]))
    whitened = q.precision_factor / jnp.sqrt(q.precision_diag)[:, None]
    shifted = core + jnp.eye(core.shape[0], dtype=core.dtype)
    inner = solve_triangular(shifted, matmul(rows, whitened).T, lower=True)
    inner = solve_triangular(core, inner, lower=True, trans=1)
    colored = (rows - matmul(whitened, inner).T) * jax.lax.rsqrt(q.precision_diag)[None, :]
    return jnp.reshape(colored, noise.shape)


def sample(rng_key: Array, q: LowRank, sample_shape: tuple[int, ...] = ()) -> Array:
    """Draws from ``q``, shape ``sample_shape + (d,)``."""
    noise = jax.random.normal(rng_key, sample_shape + q.loc.shape, q.loc.dtype)
    expand = (None,) * len(sample_shape)
    return q.loc[expand] + color(q, noise)


def quadratic_form(q: LowRank, theta: Array) -> Array:
    """(θ - m)ᵀ P (θ - m) over the last axis."""
    shift = theta - q.loc
    return jnp.sum(q.precision_diag * jnp.square(shift), -1) + jnp.sum(
        jnp.square(matmul(shift, q.precision_factor)), -1
    )


def log_det_precision(q: LowRank) -> Array:
    """Log-determinant of P, by the determinant lemma."""
    _, core = _core(q)
    return jnp.sum(jnp.log(q.precision_diag)) + 2.0 * jnp.sum(jnp.log(jnp.diagonal(core)))


def kl(q: LowRank, p: LowRank) -> Array:
    r"""Kullback-Leibler divergence KL(q, p) in nats, in O(d k²)."""
    # tr(P_p Σ_q) = Σ D_p diag(Σ_q) + tr(U_pᵀ Σ_q U_p).
    variance = jnp.square(marginal_scale(q))
    factor = p.precision_factor
    trace = jnp.sum(p.precision_diag * variance) + jnp.sum(factor * times_covariance(q, factor.T).T)
    logs = log_det_precision(q) - log_det_precision(p)
    return 0.5 * (trace + quadratic_form(p, q.loc) - q.loc.shape[0] + logs)


def start(q: LowRank) -> Memory:
    """Mean and diagonal of ``q`` as sums that natural-gradient steps add to."""
    return Memory(CompensatedSum.start(q.loc), CompensatedSum.start(q.precision_diag))


def truncate(columns: Array, signs: Array, rank: int) -> tuple[Array, Array]:
    """The ``rank`` leading directions of Σ signs_i c_i c_iᵀ, and the diagonal of what they leave out.

    Args:
        columns: Shape ``(d, r)``.
        signs: 1 or -1, shape ``(r,)``.
        rank: Number of directions kept.

    Returns:
        A factor ``(d, rank)`` and a diagonal ``(d,)``: their sum has the diagonal of the whole.
    """
    gram = matmul(columns.T, columns)
    values, vectors = jnp.linalg.eigh(gram, symmetrize_input=False)
    tiny = jnp.finfo(values.dtype).eps * values.shape[0] * jnp.max(values)
    scale = jnp.sqrt(jnp.where(values > tiny, values, 0.0))
    inverse = jnp.where(values > tiny, 1.0 / jnp.where(values > tiny, scale, 1.0), 0.0)
    # In the basis of the columns' span the sum is scale Vᵀ diag(signs) V scale, of size r.
    basis = matmul(columns, vectors) * inverse[None, :]
    inner = matmul((scale[:, None] * vectors.T) * signs[None, :], vectors * scale[None, :])
    strength, directions = jnp.linalg.eigh(inner, symmetrize_input=False)
    kept = jnp.maximum(strength[-rank:], 0.0)
    factor = matmul(basis, directions[:, -rank:]) * jnp.sqrt(kept)[None, :]
    whole = jnp.sum(jnp.square(columns) * signs[None, :], axis=1)
    return factor, whole - jnp.sum(jnp.square(factor), axis=1)


def natural_step(
    memory: Memory, q: LowRank, prior: LowRank, grad_loc: Array, grad_var: Rows | Array, gain: Gain
) -> tuple[LowRank, Memory]:
    r"""A natural-gradient step, P' = keep P + pull P_0 + step · 2 grad_var, projected on the family.

    The rows of data join the columns of U; of the k + n directions the k strongest stay, and the diagonal of
    the others is added to D, so that the diagonal of the precision is that of the full-covariance step
    (Mishkin et al. 2018, SLANG). Exact where the precision has rank k beyond its diagonal.
    """
    if not isinstance(grad_var, Rows):
        raise TypeError(
            "LowRank takes curvature as rows of data: use a named predictor, a closed form, or "
            'ngvi(curvature="fisher"), not a dense Hessian.'
        )
    force = gain.step * grad_loc
    weights = 2.0 * gain.step * grad_var.weights
    columns = [jnp.sqrt(gain.keep) * q.precision_factor]
    signs = [jnp.ones((q.precision_factor.shape[1],), q.loc.dtype)]
    added = (gain.keep - 1.0) * q.precision_diag
    columns.append(grad_var.x.T * jnp.sqrt(jnp.abs(weights))[None, :])
    signs.append(jnp.where(weights < 0, -1.0, 1.0).astype(q.loc.dtype))
    if not (isinstance(gain.pull, float) and gain.pull == 0.0):
        columns.append(jnp.sqrt(gain.pull) * prior.precision_factor)
        signs.append(jnp.ones((prior.precision_factor.shape[1],), q.loc.dtype))
        added = added + gain.pull * prior.precision_diag
        shift = q.loc - prior.loc
        back = prior.precision_diag * shift + matmul(
            prior.precision_factor, matmul(shift, prior.precision_factor)
        )
        force = force + gain.pull * back
    factor, rest = truncate(jnp.concatenate(columns, axis=1), jnp.concatenate(signs), q.precision_factor.shape[1])
    # What is left of a positive sum is positive. Its rounding, of either sign, keeps the diagonal right on long
    # streams; only one that would use the diagonal up is left out.
    lost = jnp.all(weights >= 0) & (rest < -0.5 * q.precision_diag)
    diag = memory.precision_diag.add(added + jnp.where(lost, 0.0, rest))
    valid = jnp.all(diag.value > 0)
    moved = LowRank(q.loc, jnp.where(valid, diag.value, jnp.nan), factor)
    loc = memory.loc.add(-times_covariance(moved, force[None, :])[0])
    return moved._replace(loc=loc.value), Memory(loc, diag)


def floor(q: LowRank, grad_var: Rows) -> tuple[Rows, Array]:
    """Curvature without its rows of negative weight, and whether there were any."""
    return grad_var._replace(weights=jnp.maximum(grad_var.weights, 0.0)), jnp.any(grad_var.weights < 0.0)


def merge(a: LowRank, b: LowRank, prior: LowRank) -> LowRank:
    """The Gaussian of natural parameters λ_a + λ_b - λ_0, projected on the family."""
    columns = jnp.concatenate([a.precision_factor, b.precision_factor, prior.precision_factor], axis=1)
    ranks = [q.precision_factor.shape[1] for q in (a, b, prior)]
    signs = jnp.concatenate(
        [jnp.full((r,), s, a.loc.dtype) for r, s in zip(ranks, (1.0, 1.0, -1.0), strict=True)]
    )
    factor, rest = truncate(columns, signs, ranks[0])
    diag = a.precision_diag + b.precision_diag - prior.precision_diag + rest

    def pull(q: LowRank) -> Array:
        shift = q.loc - a.loc
        return q.precision_diag * shift + matmul(q.precision_factor, matmul(shift, q.precision_factor))

    moved = LowRank(a.loc, jnp.where(jnp.all(diag > 0), diag, jnp.nan), factor)
    shift = times_covariance(moved, (pull(b) - pull(prior))[None, :])[0]
    return moved._replace(loc=a.loc + shift)


register(
    LowRank,
    Family(
        name="LowRank",
        check=check,
        sample=sample,
        kl=kl,
        predictor_variance=predictor_variance,
        covariance_gradient=lambda q, x, weights: Rows(x, weights),
        diagonal_only=False,
        # A step carries a factor that is not finite into the mean.
        witness=lambda q: q.loc + q.precision_diag,
        marginal_scale=marginal_scale,
        start=start,
        natural_step=natural_step,
        floor=floor,
        merge=merge,
    ),
)
