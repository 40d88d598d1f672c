r"""Gaussians whose precision is diagonal plus low rank, q = N(loc, (diag(D) + U Uᵀ)^-1).

The precision, not the covariance, has this form: data add to it. Every operation is O(d k²).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, CompensatedSum, Shape, check_numbers, matmul
from numpyro_tempered.gaussian.families import base, rank_updates


class LowRank(NamedTuple):
    """A Gaussian with precision ``diag(precision_diag) + precision_factor @ precision_factor.T``.

    A round of n rows takes O(d k (k + n)). On a CPU, with k = 10, it is cheaper than that of ``FullRank`` for
    single data from about d = 150 on, for batches of 10 rows from d = 100 on and of 30 rows from d = 54 on;
    below, its small factorisations cost more than they save.

    Attributes:
        loc: Means, shape ``(d,)``.
        precision_diag: Positive, shape ``(d,)``.
        precision_factor: Shape ``(d, k)``, 1 <= k <= d; zeros at a prior that is diagonal.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families import LowRank
        >>> q = LowRank(jnp.zeros(5), jnp.ones(5), jnp.zeros((5, 2)))
        >>> q.precision_factor.shape
        (5, 2)
    """

    loc: Array
    precision_diag: Array
    precision_factor: Array

    @property
    def mean(self) -> Array:
        """Means of the coordinates, ``(d,)``."""
        return self.loc

    @property
    def sd(self) -> Array:
        """Standard deviations of the coordinates, ``(d,)``."""
        return marginal_scale(self)

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)``."""
        return times_covariance(self, jnp.eye(len(self.loc), dtype=self.loc.dtype))

    def log_prob(self, theta: Array) -> Array:
        """The log-density at ``theta``, ``(..., d)``; gives ``(...)``."""
        return log_density(self, theta)

    def sample(self, rng_key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""
        return sample(rng_key, self, sample_shape)


class Memory(NamedTuple):
    """Mean, diagonal and factor; all move by less than their rounding error on long streams."""

    loc: CompensatedSum
    precision_diag: CompensatedSum
    precision_factor: CompensatedSum


def check(prior: LowRank) -> LowRank:
    """The prior as floating arrays of one dtype.

    Raises:
        ValueError: If the shapes disagree, d or k is 0, k > d, or (outside of transformations) a value is not
            finite or a diagonal entry not positive.
    """
    loc, diag, factor = base.as_floating(*prior)
    fits = (
        loc.ndim == 1
        and loc.size
        and diag.shape in ((), loc.shape)
        and factor.ndim == 2
    )
    if (
        not fits
        or factor.shape[0] != loc.shape[0]
        or not 1 <= factor.shape[1] <= loc.shape[0]
    ):
        raise ValueError(
            "prior needs loc of shape (d,) with d >= 1, precision_diag of shape (d,) or (), and precision_factor "
            f"of shape (d, k) with 1 <= k <= d, got {loc.shape}, {diag.shape} and {factor.shape}."
        )
    diag = jnp.broadcast_to(diag, loc.shape)
    check_numbers(loc, "prior.loc")
    check_numbers(diag, "prior.precision_diag", "(0, inf)")
    check_numbers(factor, "prior.precision_factor")
    return LowRank(loc, diag, factor)


def _core(q: LowRank) -> tuple[Array, Array]:
    """D^-1 U, and the lower Cholesky factor of I + Uᵀ D^-1 U.

    By a QR factorisation: the matrix itself would lose the weak directions once a strong one has 1 / eps data.
    """
    rank, dtype = q.precision_factor.shape[1], q.loc.dtype
    scale = jax.lax.rsqrt(q.precision_diag)[:, None]
    stacked = jnp.concatenate([jnp.eye(rank, dtype=dtype), q.precision_factor * scale])
    upper = jnp.linalg.qr(stacked, mode="r")
    signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(dtype)
    return q.precision_factor * jnp.square(scale), upper.T * signs[None, :]


def _solve(q: LowRank, vectors: Array) -> tuple[Array, Array]:
    r"""Y = XΣ and YU for the rows X of ``vectors`` ``(n, d)``, by Woodbury's identity, refined once.

    With M = I + UᵀD^-1 U and B = X D^-1 U M^-1 it is Y = R D^-1, R = X - BUᵀ. Rounding leaves some of U's span
    in R, where it counts by the prior's variance: R - (R D^-1 U - B) M^-1 Uᵀ, equal but for rounding, replaces R.
    """
    scaled, core = _core(q)

    def divide(columns: Array) -> Array:
        half = solve_triangular(core, columns, lower=True)
        return solve_triangular(core, half, lower=True, trans=1)

    inner = divide(matmul(vectors, scaled).T)
    rest = vectors - matmul(q.precision_factor, inner).T
    excess = divide(matmul(rest, scaled).T - inner)
    rest = rest - matmul(q.precision_factor, excess).T
    return rest / q.precision_diag[None, :], inner.T


def times_covariance(q: LowRank, vectors: Array) -> Array:
    """The rows of ``vectors`` ``(n, d)`` times the covariance."""
    return _solve(q, vectors)[0]


def times_precision(q: LowRank, shift: Array) -> Array:
    """The precision times a vector, shape ``(d,)``."""
    return q.precision_diag * shift + matmul(
        q.precision_factor, matmul(shift, q.precision_factor)
    )


def predictor_variance(q: LowRank, x: Array) -> Array:
    """Variances of the rows of ``x @ theta``, shape ``(n,)``: yᵀPy with y = Σx, which does not cancel."""
    solution, inner = _solve(q, x)
    return matmul(jnp.square(solution), q.precision_diag) + jnp.sum(
        jnp.square(inner), axis=-1
    )


def marginal_scale(q: LowRank) -> Array:
    """Standard deviations of the coordinates, shape ``(d,)``."""
    scaled, core = _core(q)
    inner = solve_triangular(core, scaled.T, lower=True)
    return jnp.sqrt(
        jnp.maximum(1.0 / q.precision_diag - jnp.sum(jnp.square(inner), axis=0), 0.0)
    )


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
    colored = (rows - matmul(whitened, inner).T) * jax.lax.rsqrt(q.precision_diag)[
        None, :
    ]
    return jnp.reshape(colored, noise.shape)


sample = base.sampler(color)


def quadratic_form(q: LowRank, theta: Array) -> Array:
    """(θ - m)ᵀ P (θ - m) over the last axis."""
    shift = theta - q.loc
    projection = matmul(shift, q.precision_factor)
    return jnp.sum(q.precision_diag * jnp.square(shift), -1) + jnp.sum(
        jnp.square(projection), -1
    )


def log_det_precision(q: LowRank) -> Array:
    """Log-determinant of P, by the determinant lemma."""
    _, core = _core(q)
    return jnp.sum(jnp.log(q.precision_diag)) + 2.0 * jnp.sum(
        jnp.log(jnp.diagonal(core))
    )


def log_density(q: LowRank, theta: Array) -> Array:
    """The log-density at ``theta``, ``(..., d)``, in O(d k)."""
    constant = len(q.loc) * math.log(2.0 * math.pi)
    return 0.5 * (log_det_precision(q) - constant - quadratic_form(q, theta))


def kl(q: LowRank, p: LowRank) -> Array:
    r"""Kullback-Leibler divergence KL(q, p) in nats, in O(d k²)."""
    # tr(P_p Σ_q) = Σ D_p diag(Σ_q) + tr(U_pᵀ Σ_q U_p).
    trace = jnp.sum(p.precision_diag * jnp.square(marginal_scale(q)))
    trace = trace + jnp.sum(predictor_variance(q, p.precision_factor.T))
    logs = log_det_precision(q) - log_det_precision(p)
    return 0.5 * (trace + quadratic_form(p, q.loc) - q.loc.shape[0] + logs)


def init(q: LowRank) -> Memory:
    """Mean, diagonal and factor of ``q`` as sums that natural-gradient steps add to."""
    return Memory(*(CompensatedSum.start(leaf) for leaf in q))


def natural_step(
    memory: Memory,
    q: LowRank,
    prior: LowRank,
    grad_loc: Array,
    grad_var: base.Curvature,
    gain: base.Gain,
) -> tuple[LowRank, Memory]:
    r"""A natural-gradient step, P' = keep P + pull P_0 + step · 2 grad_var, projected on the family.

    The rows of data join the columns of U; of the k + n directions the k strongest stay, and the diagonal of
    the others is added to D, so that the diagonal of the precision is that of the full-covariance step
    (Mishkin et al. 2018, SLANG). Exact where the precision has rank k beyond its diagonal, in float32 too as long
    as the data in a direction are fewer than 1 / eps. Rows of negative weight are taken off after the others.
    """
    if not isinstance(grad_var, base.Rows):
        raise TypeError(
            "LowRank takes curvature as rows of data: use a named predictor, a closed form, or "
            'ngvi(curvature="fisher"), not a dense Hessian.'
        )
    force, weights = gain.step * grad_loc, 2.0 * gain.step * grad_var.weights
    factor, added = memory.precision_factor, jnp.zeros_like(q.loc)
    if not gain.keeps_all:
        factor = jax.tree.map(lambda leaf: jnp.sqrt(gain.keep) * leaf, factor)
        added = (gain.keep - 1.0) * q.precision_diag
    columns = [grad_var.x.T * jnp.sqrt(jnp.maximum(weights, 0.0))[None, :]]
    if gain.pulls:
        columns.append(jnp.sqrt(gain.pull) * prior.precision_factor)
        added = added + gain.pull * prior.precision_diag
        force = force + gain.pull * times_precision(prior, q.loc - prior.loc)
    factor, dropped = rank_updates.add_columns(factor, jnp.concatenate(columns, axis=1))
    factor, removed = jax.lax.cond(
        jnp.any(weights < 0.0),
        rank_updates.remove_columns,
        lambda factor, columns: (factor, jnp.zeros_like(dropped)),
        factor,
        grad_var.x.T * jnp.sqrt(jnp.maximum(-weights, 0.0))[None, :],
    )
    diag = memory.precision_diag.add(added + (dropped - removed))
    proposal = LowRank(
        q.loc, jnp.where(jnp.all(diag.value > 0), diag.value, jnp.nan), factor.value
    )
    loc = memory.loc.add(-times_covariance(proposal, force[None, :])[0])
    return proposal._replace(loc=loc.value), Memory(loc, diag, factor)


def merge(a: LowRank, b: LowRank, prior: LowRank) -> LowRank:
    """The Gaussian of natural parameters λ_a + λ_b - λ_0, projected on the family."""
    columns = jnp.concatenate(
        [a.precision_factor, b.precision_factor, prior.precision_factor], axis=1
    )
    ranks = [q.precision_factor.shape[1] for q in (a, b, prior)]
    signs = jnp.asarray(np.repeat([1.0, 1.0, -1.0], ranks), a.loc.dtype)
    factor, rest = rank_updates.truncate(columns, signs, ranks[0])
    diag = a.precision_diag + b.precision_diag - prior.precision_diag + rest

    proposal = LowRank(a.loc, jnp.where(jnp.all(diag > 0), diag, jnp.nan), factor)
    force = times_precision(b, b.loc - a.loc) - times_precision(
        prior, prior.loc - a.loc
    )
    return proposal._replace(loc=a.loc + times_covariance(proposal, force[None, :])[0])


def convert(q: base.Gaussian, like: LowRank) -> LowRank:
    """The Gaussian whose precision has the diagonal of that of ``q`` and its strongest directions."""
    (d,), rank = q.loc.shape, like.precision_factor.shape[1]
    if isinstance(q, LowRank):
        if q.precision_factor.shape[1] == rank:
            return q
        columns, diag = q.precision_factor, q.precision_diag
    else:
        family = base.family_of(q)
        root = family.root(family.canonical(q))
        if root.ndim == 1:
            return LowRank(
                q.loc, 1.0 / jnp.square(root), jnp.zeros((d, rank), q.loc.dtype)
            )
        inverse = solve_triangular(root, jnp.eye(d, dtype=q.loc.dtype), lower=True)
        values, vectors = jnp.linalg.eigh(jnp.matmul(inverse.T, inverse))
        # Half of the least precision stays on the diagonal, which must be positive whatever the rank.
        diag = jnp.full((d,), 0.5 * values[0])
        columns = vectors * jnp.sqrt(values - diag)[None, :]
    padded = jnp.concatenate(
        [columns, jnp.zeros((d, max(0, rank - columns.shape[1])), q.loc.dtype)], axis=1
    )
    factor, rest = rank_updates.truncate(
        padded, jnp.ones((padded.shape[1],), q.loc.dtype), rank
    )
    return LowRank(q.loc, diag + rest, factor)


FAMILY = base.Family(
    name="LowRank",
    check=check,
    sample=sample,
    kl=kl,
    root=lambda q: color(q, jnp.eye(q.loc.shape[0], dtype=q.loc.dtype)).T,
    predictor_variance=predictor_variance,
    curvature_form="rows",
    # A step carries a factor that is not finite into the mean.
    witness=lambda q: q.loc + q.precision_diag,
    marginal_scale=marginal_scale,
    init=init,
    natural_step=natural_step,
    floor=lambda q, grad_var: grad_var.floor(),
    merge=merge,
    convert=convert,
)
base.register(LowRank, FAMILY)
