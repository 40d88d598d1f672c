r"""Natural parameters of Gaussians, which add up where independent terms multiply.

A term exp(hᵀ(θ - o) - ½ (θ - o)ᵀ J (θ - o)) has parameters (h, J) around an origin o. Those of a product of terms
are sums; J of a single term need not be positive definite.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, Scalar, matmul
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of

# A Gaussian whose variance in some direction would grow by more than this is as good as improper.
MOST_GROWTH = 1e3


class Natural(NamedTuple):
    """Natural parameters of a Gaussian term, around an origin that goes without saying.

    Attributes:
        linear: h, shape ``(d,)``.
        precision: J, a matrix ``(d, d)``, or the diagonal ``(d,)`` for a mean-field family.
    """

    linear: Array
    precision: Array

    def plus(self, term: "Natural", weight: Scalar = 1.0) -> "Natural":
        """The parameters with ``weight`` times those of another term."""
        return Natural(
            self.linear + weight * term.linear, self.precision + weight * term.precision
        )

    def slope(self, shift: Array) -> Array:
        """The gradient of the term's logarithm at a distance ``shift`` from the origin, ``(d,)``."""
        return self.linear - apply(self.precision, shift)


def apply(precision: Array, vector: Array) -> Array:
    """A matrix, or a diagonal, times a vector."""
    return precision * vector if precision.ndim == 1 else matmul(precision, vector)


def to_natural(q: Gaussian, origin: Array) -> Natural:
    """The natural parameters of ``q`` around an origin."""
    family = family_of(q)
    root = family.root(family.canonical(q))
    if root.ndim == 1:
        precision = 1.0 / jnp.square(root)
    else:
        inverse = solve_triangular(
            root, jnp.eye(root.shape[0], dtype=root.dtype), lower=True
        )
        precision = matmul(inverse.T, inverse)
    return Natural(apply(precision, q.loc - origin), precision)


def from_natural(natural: Natural, origin: Array, near: Q) -> Q:
    """The Gaussian with these natural parameters, of the family of ``near``.

    It is computed in the coordinates in which ``near`` is standard, so that the units of θ do not matter.

    Args:
        natural: Of the Gaussian.
        origin: What they are around, ``(d,)``.
        near: A Gaussian that is not far from it, canonical.

    Returns:
        The Gaussian; not finite where the precision is not positive definite, or a variance would be above a
        thousand times that of ``near``.
    """
    family = family_of(near)
    root = family.root(near)
    force = natural.slope(near.loc - origin)
    if root.ndim == 1:
        ratio = jnp.square(root) * natural.precision
        scale = root / jnp.sqrt(jnp.where(ratio * MOST_GROWTH > 1.0, ratio, jnp.nan))
        return family.with_root(near.loc + jnp.square(scale) * force, scale)
    whitened = matmul(root.T, matmul(natural.precision, root))
    whitened = 0.5 * (whitened + whitened.T)
    identity = jnp.eye(root.shape[0], dtype=root.dtype)
    least = jnp.linalg.cholesky(
        whitened - identity / MOST_GROWTH, symmetrize_input=False
    )
    lower = jnp.linalg.cholesky(whitened, symmetrize_input=False) + 0.0 * jnp.sum(
        jnp.diagonal(least)
    )
    factor = solve_triangular(lower, root.T, lower=True).T
    return family.canonical(
        family.with_root(near.loc + matmul(factor, matmul(factor.T, force)), factor)
    )
