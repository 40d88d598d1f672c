"""Small symmetric matrices: their triangles, and what follows from a Cholesky factor."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, matmul


def symmetric(triangle: Array, dim: int) -> Array:
    """Matrices ``(..., d, d)`` from their upper triangles, row by row."""
    i, j = np.triu_indices(dim)
    where = np.zeros((dim, dim), np.int32)
    where[i, j] = where[j, i] = np.arange(len(i))
    return triangle[..., where]


def outer_product(vector: Array) -> Array:
    """The symmetric matrix v v'."""
    # Without a factor on one side, which would round the two triangles differently: NumPyro asks for symmetry.
    return vector[..., :, None] * vector[..., None, :]


def cholesky(matrix: Array) -> Array:
    """The lower Cholesky factor."""
    # A call of LAPACK for one number takes longer than the pass over a thousand rows.
    return (
        jnp.sqrt(matrix)
        if matrix.shape[-1] == 1
        else jnp.linalg.cholesky(matrix, symmetrize_input=False)
    )


def inverse_root(root: Array) -> Array:
    """The inverse of a Cholesky factor."""
    if root.shape[-1] == 1:
        return 1.0 / root
    identity = jnp.broadcast_to(jnp.eye(root.shape[-1], dtype=root.dtype), root.shape)
    return jax.lax.linalg.triangular_solve(root, identity, left_side=True, lower=True)


def precision_of(covariance: Array) -> Array:
    """The inverse of a positive definite matrix, by its Cholesky factor."""
    return square(inverse_root(cholesky(covariance)))


def square(inverse: Array) -> Array:
    """R' R."""
    return matmul(jnp.swapaxes(inverse, -1, -2), inverse)


def log_det(root: Array) -> Array:
    """The log determinant of a matrix from its Cholesky factor."""
    i = np.arange(root.shape[-1])
    return 2.0 * jnp.sum(jnp.log(root[..., i, i]), axis=-1)
