"""Sums of matrices of low rank, projected on k directions and a diagonal (Mishkin et al. 2018, SLANG)."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, CompensatedSum, matmul

NUM_INVERSE_ITERATIONS = 3
# The largest share of a direction that negative curvature takes off in one step.
MAX_REMOVED = 0.999


def add_columns(factor: CompensatedSum, columns: Array) -> tuple[CompensatedSum, Array]:
    """The strongest directions of U Uᵀ + C Cᵀ, and the diagonal of what they leave out.

    Args:
        factor: U, shape ``(d, k)``.
        columns: C, shape ``(d, n)``.

    Returns:
        The factor, and a diagonal ``(d,)``, at least 0.
    """
    return (
        add_block(factor, columns)
        if columns.shape[1] > 1
        else add_column(factor, columns[:, 0])
    )


def add_column(factor: CompensatedSum, column: Array) -> tuple[CompensatedSum, Array]:
    r"""U' and the diagonal of e eᵀ, where U'U'ᵀ + e eᵀ = U Uᵀ + c cᵀ.

    With the weakest direction (a, γ) of [U, c], γ >= 0, it is

    .. math:: e = U a + \gamma c, \qquad U' = U - (e + c)\, a^\top / (1 + \gamma)

    The identity holds for every unit vector, and the change is as small as the datum: a compensated sum holds it.
    """
    root = factor.value
    both = jnp.concatenate([root, column[:, None]], axis=1)
    # A row of zeros, so that the triangular factor is square with k = d.
    upper = jnp.linalg.qr(jnp.pad(both, ((0, 1), (0, 0))), mode="r")
    # Singular where the data span few directions. Inverse iteration needs no more than tiny pivots.
    least = (
        jnp.finfo(upper.dtype).eps * jnp.max(jnp.abs(upper))
        + jnp.finfo(upper.dtype).tiny
    )
    upper = upper + jnp.diag(
        jnp.where(jnp.abs(jnp.diagonal(upper)) < least, least, 0.0)
    )
    weakest = jnp.asarray(
        np.random.default_rng(0).normal(size=upper.shape[0]), upper.dtype
    )
    for _ in range(NUM_INVERSE_ITERATIONS):
        for transposed in (1, 0):
            weakest = solve_triangular(upper, weakest, trans=transposed)
            weakest = weakest / jnp.max(jnp.abs(weakest))
    weakest = weakest / jnp.sqrt(jnp.sum(jnp.square(weakest)))
    weakest = jnp.where(weakest[-1] < 0, -weakest, weakest)
    a, gamma = weakest[:-1], weakest[-1]
    dropped = matmul(root, a) + gamma * column
    change = (dropped + column) / (1.0 + gamma)
    return factor.add(-change[:, None] * a[None, :]), jnp.square(dropped)


def add_block(factor: CompensatedSum, columns: Array) -> tuple[CompensatedSum, Array]:
    r"""U' and the diagonal of E Eᵀ, where U'U'ᵀ + E Eᵀ = U Uᵀ + C Cᵀ.

    With orthonormal W = [W_1; W_2], the leading right singular vectors of [U, C], the decomposition
    W_1 = a cos bᵀ and s = W_2 b it is

    .. math:: U' = U + \big(C s - U a\, \tfrac{\sin^2}{1+\cos}\big) a^\top, \qquad
              E = C - \big(U a + C s\, \tfrac{1}{1+\cos}\big) s^\top

    of all roots with these directions the one next to U. With more than k columns the vectors are those in a
    subspace of 2k dimensions, U and k mixtures of C after one power iteration (Halko, Martinsson and Tropp 2011,
    as in SLANG): the directions are then close to the strongest, and exact where the rank is k.
    """
    root = factor.value
    (num_columns, rank), dtype = columns.T.shape[:1] + root.shape[1:], root.dtype
    basis = jnp.eye(rank + num_columns, dtype=dtype)
    both = jnp.concatenate([root, columns], axis=1)
    if num_columns > rank:
        # The same mixtures in every round.
        mixtures = jnp.asarray(
            np.random.default_rng(0).normal(size=(num_columns, rank)), dtype
        )
        images = matmul(
            both.T, jnp.concatenate([root, matmul(columns, mixtures)], axis=1)
        )
        basis = jnp.linalg.qr(images)[0]
    images = matmul(both, basis)
    vectors = jnp.linalg.eigh(matmul(images.T, images), symmetrize_input=False)[1]
    directions = matmul(basis, vectors[:, -rank:])
    a, cos, b = jnp.linalg.svd(directions[:rank])
    s = matmul(directions[rank:], b.T)
    turned, mixed = matmul(root, a), matmul(columns, s)
    change = mixed - turned * (jnp.sum(jnp.square(s), axis=0) / (1.0 + cos))[None, :]
    dropped = columns - matmul(turned + mixed / (1.0 + cos)[None, :], s.T)
    return factor.add(matmul(change, a.T)), jnp.sum(jnp.square(dropped), axis=1)


def remove_columns(
    factor: CompensatedSum, columns: Array
) -> tuple[CompensatedSum, Array]:
    r"""The factor of UUᵀ - CCᵀ within the span of U, and the diagonal of what is left to take off.

    With C = U B + E, BBᵀ = a β² aᵀ and T = (I - BBᵀ)^{1/2} it is U' = U T - E Bᵀ T^-1, and
    E Eᵀ + E Bᵀ T^-2 B Eᵀ stays. Where β is not below 1, as much of B as leaves U' a factor is taken.
    """
    root = factor.value
    left, strength, right = jnp.linalg.svd(root, full_matrices=False)
    least = jnp.finfo(strength.dtype).eps * strength.shape[0] * strength[0]
    inverse = jnp.where(strength > least, 1.0 / jnp.maximum(strength, least), 0.0)
    fitted = matmul(right.T, inverse[:, None] * matmul(left.T, columns))
    a, beta, b = jnp.linalg.svd(fitted, full_matrices=False)
    beta = jnp.minimum(beta, MAX_REMOVED)
    rest = columns - matmul(root, matmul(a * beta[None, :], b))
    cos = jnp.sqrt(1.0 - jnp.square(beta))
    mixed = matmul(rest, b.T) * (beta / cos)[None, :]
    change = matmul(root, a) * (-jnp.square(beta) / (1.0 + cos))[None, :] - mixed
    removed = jnp.sum(jnp.square(rest), axis=1) + jnp.sum(jnp.square(mixed), axis=1)
    return factor.add(matmul(change, a.T)), removed


def truncate(columns: Array, signs: Array, rank: int) -> tuple[Array, Array]:
    """The ``rank`` leading directions of Σ signs_i c_i c_iᵀ, and the diagonal of what they leave out.

    Args:
        columns: Shape ``(d, r)``.
        signs: 1 or -1, shape ``(r,)``.
        rank: Number of directions of the factor.

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
    inner = matmul(
        (scale[:, None] * vectors.T) * signs[None, :], vectors * scale[None, :]
    )
    strength, directions = jnp.linalg.eigh(inner, symmetrize_input=False)
    strongest = jnp.maximum(strength[-rank:], 0.0)
    factor = matmul(basis, directions[:, -rank:]) * jnp.sqrt(strongest)[None, :]
    return factor, jnp.sum(jnp.square(columns) * signs[None, :], axis=1) - jnp.sum(
        jnp.square(factor), axis=1
    )
