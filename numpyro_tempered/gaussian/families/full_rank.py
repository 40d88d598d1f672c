r"""Full-covariance Gaussian family, q = N(loc, S Sᵀ) by a square root S of the covariance.

SVA and SVB have their closed forms for a lower triangular S (the transpose of CA19's C, Σ = CᵀC), NGVI for any.
Nothing here inverts a matrix: a precision enters only whitened, as Sᵀ P S.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import (
    Array,
    CompensatedSum,
    Scalar,
    Shape,
    check_numbers,
    is_traced,
    matmul,
)
from numpyro_tempered.gaussian.families import base
from numpyro_tempered.gaussian.families.mean_field import shrink


class FullRank(NamedTuple):
    """A Gaussian with covariance ``factor @ factor.T``.

    The same two fields also carry a gradient with respect to ``(loc, factor)``.

    Attributes:
        loc: Means, shape ``(d,)``.
        factor: A square root of the covariance, shape ``(d, d)``. For a prior, and where SVA and SVB lead, lower
            triangular with a positive diagonal; NGVI leads to others. ``scale_tril`` is the triangular one.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families import FullRank
        >>> q = FullRank(jnp.zeros(2), jnp.eye(2))
        >>> q.scale_tril.shape
        (2, 2)
    """

    loc: Array
    factor: Array

    @property
    def scale_tril(self) -> Array:
        """The Cholesky factor of the covariance, by a QR factorisation of the square root."""
        upper = jnp.linalg.qr(self.factor.T, mode="r")
        signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(upper.dtype)
        return jnp.tril(upper.T * signs[None, :])

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
        return base.covariance(self.factor)

    def log_prob(self, theta: Array) -> Array:
        """The log-density at ``theta``, ``(..., d)``; gives ``(...)``."""
        return base.log_density(self.loc, self.factor, theta)

    def sample(self, rng_key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""
        return sample(rng_key, self, sample_shape)


class Memory(NamedTuple):
    """Mean and factor; both move by less than their rounding error on long streams."""

    loc: CompensatedSum
    factor: CompensatedSum


def check(prior: FullRank) -> FullRank:
    """The prior as floating arrays ``(d,)`` and ``(d, d)`` of one dtype.

    Raises:
        ValueError: If the shapes disagree, d is 0, or (outside of transformations) a value is not finite, a
            diagonal entry not positive, or an entry above the diagonal not 0.
    """
    loc, factor = base.as_floating(*prior)
    if loc.ndim != 1 or loc.size == 0 or factor.shape != 2 * loc.shape:
        raise ValueError(
            f"prior needs loc of shape (d,), d >= 1, and factor of (d, d), got {loc.shape} and {factor.shape}."
        )
    check_numbers(loc, "prior.loc")
    check_numbers(factor, "prior.factor")
    if not is_traced(loc, factor) and (
        np.any(np.triu(factor, 1) != 0) or not np.all(np.diag(factor) > 0)
    ):
        raise ValueError(
            "the factor of a prior must be lower triangular with a positive diagonal: give its scale_tril."
        )
    return FullRank(loc, factor)


def color(q: FullRank, noise: Array) -> Array:
    """Noise ``(..., d)`` times the factor."""
    if noise.ndim > 1:
        return matmul(noise, q.factor.T)
    # A product by BLAS takes three times as long as the rest of a draw. Without the barrier XLA would make the
    # noise anew for each row.
    return jnp.sum(q.factor * jax.lax.optimization_barrier(noise), axis=1)


sample: base.Sample[FullRank] = base.sampler(color)


def kl(q: FullRank, p: FullRank) -> Array:
    r"""Kullback-Leibler divergence KL(q, p) in nats; ``p`` must have a positive diagonal.

    .. math:: \tfrac12 \big[\|L_p^{-1} L_q\|_F^2 + \|L_p^{-1}(m_q - m_p)\|^2 - d\big]
              - \sum_j \log (L_q)_{jj} / (L_p)_{jj}
    """
    of_p, of_q = p.scale_tril, q.scale_tril
    ratio = solve_triangular(of_p, of_q, lower=True)
    shift = solve_triangular(of_p, q.loc - p.loc, lower=True)
    logs = jnp.log(jnp.diagonal(of_q)) - jnp.log(jnp.diagonal(of_p))
    return 0.5 * (
        jnp.sum(jnp.square(ratio)) + jnp.sum(jnp.square(shift)) - q.loc.shape[0]
    ) - jnp.sum(logs)


def predictor_variance(q: FullRank, x: Array) -> Array:
    """Variances of the rows of ``x @ theta``, shape ``(n,)``."""
    return jnp.sum(jnp.square(matmul(x, q.factor)), axis=-1)


def marginal_scale(q: FullRank) -> Array:
    """Standard deviations of the coordinates, shape ``(d,)``."""
    return jnp.sqrt(jnp.sum(jnp.square(q.factor), axis=-1))


def _whiten(q: FullRank, grad_var: base.Curvature) -> Array:
    """``L.T @ grad_var @ L``."""
    if isinstance(grad_var, base.Whitened):
        return grad_var.matrix
    if isinstance(grad_var, base.Rows):
        return base.Rows(matmul(grad_var.x, q.factor), grad_var.weights).dense()
    return matmul(q.factor.T, matmul(grad_var, q.factor))


def gradient(q: FullRank, grad_loc: Array, grad_var: base.Curvature) -> FullRank:
    """The gradient in ``(loc, factor)``: the lower triangle of ``2 grad_var @ L``."""
    if isinstance(grad_var, base.Rows):
        product = matmul(
            grad_var.x.T * grad_var.weights[None, :], matmul(grad_var.x, q.factor)
        )
    elif isinstance(grad_var, base.Whitened):
        product = solve_triangular(q.factor, grad_var.matrix, lower=True, trans=1)
    else:
        product = matmul(grad_var, q.factor)
    return FullRank(grad_loc, 2.0 * jnp.tril(product))


def kl_prox(anchor: FullRank, grads: FullRank, rate: Scalar) -> FullRank:
    r"""One proximal step in KL, the primitive of SVA and SVB.

    .. math:: \arg\min_\mu \langle g, \mu\rangle + \mathrm{KL}(q_\mu, \mathrm{anchor})/\eta,
              \qquad \mu = (m, L)

    is m = m_a - η Σ_a g_m and L = L_a A with D = L_aᵀ g_L, A_ij = -η D_ij below the diagonal and
    A_ii = h(η D_ii / 2), h(x) = √(1+x²) - x (CA19, section 4).

    Args:
        anchor: The Gaussian ``(m_a, L_a)`` from which the step measures KL.
        grads: Gradient with respect to ``(loc, factor)``, the latter lower triangular.
        rate: η, a scalar.

    Returns:
        The minimiser, a :class:`FullRank`.

    Raises:
        ValueError: If ``rate`` is not a scalar.
    """
    if jnp.ndim(rate):
        raise ValueError(
            f"a full covariance takes a scalar step size, got shape {jnp.shape(rate)}; MeanField takes an array."
        )
    factor = anchor.factor
    whitened = rate * matmul(factor.T, grads.factor)
    diagonal = shrink(jnp.ones_like(anchor.loc), 0.5 * jnp.diagonal(whitened))
    mix = jnp.diag(diagonal) - jnp.tril(whitened, -1)
    return FullRank(
        anchor.loc - rate * matmul(factor, matmul(factor.T, grads.loc)),
        matmul(factor, mix),
    )


def descend(q: FullRank, grads: FullRank, rate: Scalar) -> FullRank:
    """A gradient step in ``(loc, factor)``, the diagonal at least 0."""
    factor = q.factor - rate * grads.factor
    diagonal = jnp.diag(jnp.maximum(jnp.diagonal(factor), 0.0))
    # 0 times a factor that is finite, NaN otherwise: only the mean is checked.
    loc = q.loc - rate * grads.loc + 0.0 * jnp.sum(factor)
    return FullRank(loc, jnp.tril(factor, -1) + diagonal)


def init(q: FullRank) -> Memory:
    """Mean and factor of ``q`` as sums that natural-gradient steps add to."""
    return Memory(CompensatedSum.start(q.loc), CompensatedSum.start(q.factor))


def natural_step(
    memory: Memory,
    q: FullRank,
    prior: FullRank,
    grad_loc: Array,
    grad_var: base.Curvature,
    gain: base.Gain,
) -> tuple[FullRank, Memory]:
    """A natural-gradient step, P' = keep P + pull P_0 + step · 2 grad_var.

    Where the present precision is not discounted, fewer than d rows of data are added one rank at a time, in
    O(d²) each; otherwise the whitened precision is factored, in O(d³).
    """
    force, root = gain.step * grad_loc, memory.factor
    if gain.keeps_all and not gain.pulls and isinstance(grad_var, base.Rows):
        root = add_rows(root, base.Rows(grad_var.x, 2.0 * gain.step * grad_var.weights))
    else:
        whitened = gain.keep * jnp.eye(
            q.loc.shape[0], dtype=q.loc.dtype
        ) + 2.0 * gain.step * _whiten(q, grad_var)
        if gain.pulls:
            ratio = solve_triangular(prior.factor, q.factor, lower=True)
            whitened = whitened + gain.pull * matmul(ratio.T, ratio)
            shift = solve_triangular(prior.factor, q.loc - prior.loc, lower=True)
            force = force + gain.pull * solve_triangular(
                prior.factor, shift, lower=True, trans=1
            )
        root = CompensatedSum.start(_divide(q.factor, whitened))
    factor = root.value
    loc = memory.loc.add(-matmul(factor, matmul(factor.T, force)))
    return FullRank(loc.value, factor), Memory(loc, root)


def _divide(factor: Array, matrix: Array) -> Array:
    """S' = S C^-T where ``matrix = C @ C.T``, a square root of S matrix^-1 Sᵀ; NaN if not definite."""
    lower = jnp.linalg.cholesky(matrix, symmetrize_input=False)
    return solve_triangular(lower, factor.T, lower=True).T


def add_rows(factor: CompensatedSum, rows: base.Rows) -> CompensatedSum:
    """The factor of (Σ^-1 + Σ w_i x_i x_iᵀ)^-1: one row after the other, or from d rows on in one block."""
    if rows.x.shape[0] == 1:
        return add_row(factor, rows.x[0], rows.weights[0])
    if rows.x.shape[0] >= rows.x.shape[1]:
        return add_block(factor, rows)

    return jax.lax.scan(
        lambda total, row: (add_row(total, row.x, row.weights), None), factor, rows
    )[0]


def add_row(factor: CompensatedSum, x: Array, weight: Array) -> CompensatedSum:
    r"""A factor of :math:`(\Sigma^{-1} + w\, x x^\top)^{-1}` in O(d²), by Potter's square-root update.

    With v = Sᵀx and s = 1 + w |v|² it is S (I - κ v vᵀ), κ = w / (s + √s): no cancellation, and the
    covariance stays positive definite whatever the rounding. The change is added to S, not S rebuilt: on long
    streams it falls below S's rounding. Not finite where the precision would not be positive definite.
    """
    root = factor.value
    v = matmul(root.T, x)
    s = 1.0 + weight * jnp.sum(v * v)
    kappa = jnp.where(s > 0, weight / (s + jnp.sqrt(jnp.maximum(s, 0.0))), jnp.nan)
    return factor.add(matmul(root, v)[:, None] * (-kappa * v)[None, :])


def add_block(factor: CompensatedSum, rows: base.Rows) -> CompensatedSum:
    r"""The same by one Cholesky factorisation, C Cᵀ = I + V diag(w) Vᵀ with V = Sᵀxᵀ and S' = S C^-T.

    The factor is never formed: elimination runs on what differs from I in C and from S in S', so that a change
    is as exact as that of :func:`add_row` where it falls below the rounding of S. On a CPU a loop in the program
    also takes less time than LAPACK, which would run small matrices on several threads.
    """
    whitened = matmul(rows.x, factor.value)
    excess = matmul(whitened.T * rows.weights[None, :], whitened)
    transposed, index = factor.value.T, jnp.arange(excess.shape[0])

    def eliminate(j: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        excess, change = carried
        pivot = 1.0 + excess[j, j]
        root = jnp.where(pivot > 0, jnp.sqrt(jnp.maximum(pivot, 0.0)), jnp.nan)
        row = excess[j] / root
        changed = (
            change[j] / root - excess[j, j] / (root * (1.0 + root)) * transposed[j]
        )
        below = jnp.where(index > j, row, 0.0)[:, None]
        excess = excess - below * row[None, :]
        change = (
            (change - below * (transposed[j] + changed)[None, :]).at[j].set(changed)
        )
        return excess, change

    _, change = jax.lax.fori_loop(
        0, excess.shape[0], eliminate, (excess, jnp.zeros_like(transposed))
    )
    return factor.add(change.T)


def floor(q: FullRank, grad_var: base.Curvature) -> tuple[base.Curvature, Array]:
    """Curvature without its negative part, and whether there was any.

    It drops rows with negative weights, and the negative eigenvalues of a dense matrix, whitened by q.
    """
    if isinstance(grad_var, base.Rows):
        return grad_var.floor()
    values, vectors = jnp.linalg.eigh(_whiten(q, grad_var))
    # Rounding makes tiny negative eigenvalues of a singular matrix.
    tiny = jnp.finfo(values.dtype).eps * values.shape[0] * jnp.max(jnp.abs(values))
    positive = base.Rows(vectors.T, jnp.maximum(values, 0.0)).dense()
    return base.Whitened(q.factor, positive), jnp.any(values < -tiny)


def merge(a: FullRank, b: FullRank, prior: FullRank) -> FullRank:
    """The Gaussian of natural parameters λ_a + λ_b - λ_0; NaN where its precision is not definite."""
    of_a = a.scale_tril

    def whitened(q: FullRank) -> tuple[Array, Array]:
        lower = q.scale_tril
        ratio = solve_triangular(lower, of_a, lower=True)
        shift = solve_triangular(lower, q.loc - a.loc, lower=True)
        return matmul(ratio.T, ratio), matmul(ratio.T, shift)

    (of_b, force_b), (of_prior, force_prior) = whitened(b), whitened(prior)
    factor = _divide(of_a, jnp.eye(a.loc.shape[0], dtype=a.loc.dtype) + of_b - of_prior)
    # The force is L_a^T (λ_b - λ_0) around a.loc; the new covariance carries it back.
    force = solve_triangular(of_a, force_b - force_prior, lower=True, trans=1)
    return canonical(FullRank(a.loc + matmul(factor, matmul(factor.T, force)), factor))


def canonical(q: FullRank) -> FullRank:
    """The same Gaussian by a triangular factor."""
    return q._replace(factor=q.scale_tril)


FAMILY = base.Family(
    name="FullRank",
    check=check,
    sample=sample,
    kl=kl,
    root=lambda q: q.factor,
    predictor_variance=predictor_variance,
    curvature_form="matrix",
    # A step carries whatever is not finite into the mean or the diagonal.
    witness=lambda q: q.loc + jnp.diagonal(q.factor),
    marginal_scale=marginal_scale,
    init=init,
    natural_step=natural_step,
    floor=floor,
    merge=merge,
    canonical=canonical,
    from_root=FullRank,
    gradient=gradient,
    kl_prox=kl_prox,
    descend=descend,
)
base.register(FullRank, FAMILY)
