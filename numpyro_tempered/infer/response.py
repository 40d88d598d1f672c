"""The Hessian of the free energy at a mean-field Gaussian, and the response of its means."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    PyTree,
    forward_else_reverse,
    map_batches,
    run_program,
    trace_once,
)
from numpyro_tempered.gaussian.descent import Objective
from numpyro_tempered.gaussian.families import MeanField

Product: TypeAlias = Callable[[Array], Array]
# Bytes for the products of the Hessian that are taken at a time.
_MEMORY_BUDGET = 2**28


class Response(NamedTuple):
    """The derivatives of the free energy at a mean-field Gaussian, in units of its standard deviations.

    Attributes:
        hessian: In means and relative scales, ``(2d, 2d)``.
        grad: The gradient in the same coordinates, ``(2d,)``.
        eigenvalues: Of the Hessian, ascending, ``(2d,)``.
        weakest: The eigenvector of the smallest, ``(2d,)``.
    """

    hessian: np.ndarray
    grad: np.ndarray
    eigenvalues: np.ndarray
    weakest: np.ndarray

    @property
    def gap(self) -> float:
        """½ gᵀ K⁻¹ g, the nats that a Newton step would gain."""
        return float(0.5 * self.grad @ np.linalg.solve(self.hessian, self.grad))

    def root(self) -> np.ndarray:
        """The triangular root of the covariance of the means, ``(d, d)``: of the inverse Schur complement."""
        d = len(self.grad) // 2
        cross = self.hessian[:d, d:]
        schur = self.hessian[:d, :d] - cross @ np.linalg.solve(
            self.hessian[d:, d:], cross.T
        )
        inverse = np.linalg.solve(np.linalg.cholesky(schur), np.eye(d))
        return np.linalg.cholesky(inverse.T @ inverse)


def respond(
    objective: Objective, q: MeanField, rng_key: Array, num_draws: int
) -> Response:
    r"""The derivatives of the free energy of N(m + σ a, diag σ²(1 + t)²) in (a, t), at 0.

    In these coordinates the expectation of a convex f is convex for every set of draws, and the entropy adds the
    identity to the block of t. With E[∇²f] in the block of a, the gradient in t is diag(σ²E[∇²f]) - 1 by Price's
    identity, which varies less over draws than its own derivative.

    Args:
        objective: E_q[f], of the model.
        q: The Gaussian, canonical.
        rng_key: For the draws, the same for all derivatives.
        num_draws: Their number, for the memory.
    """
    (d,) = q.loc.shape
    elements = sum(jnp.size(leaf) for leaf in jax.tree.leaves(objective.data)) + 2 * d
    chunk = max(1, _MEMORY_BUDGET // (q.loc.dtype.itemsize * num_draws * elements))

    def value(member: MeanField, data: PyTree, rng_key: Array) -> Array:
        return objective.evaluate(member, data, rng_key).value

    value = trace_once(value, q, objective.data, rng_key)

    def derivatives(q: MeanField, data: PyTree, rng_key: Array) -> tuple[Array, Array]:
        def expected(z: Array) -> Array:
            return value(
                MeanField(q.loc + q.scale * z[:d], q.scale * (1.0 + z[d:])),
                data,
                rng_key,
            )

        gradient, origin = jax.grad(expected), jnp.zeros(2 * d, q.loc.dtype)
        grad, product = forward_else_reverse(
            lambda: _products(gradient, origin),
            lambda: _transposed_products(gradient, origin),
        )
        return grad[:d], map_batches(product, jnp.eye(2 * d, dtype=grad.dtype), chunk)

    grad, columns = (
        np.asarray(leaf, np.float64)
        for leaf in run_program(derivatives, q, objective.data, rng_key)
    )
    hessian = 0.5 * (columns + columns.T)
    hessian[d:, d:] += np.eye(d)
    if not (np.all(np.isfinite(hessian)) and np.all(np.isfinite(grad))):
        raise ValueError(
            "the Hessian of the free energy at the fit is not finite: check the data for NaN and the model for "
            "densities that overflow near the fit, or take more precision by jax_enable_x64."
        )
    values, vectors = np.linalg.eigh(hessian)
    grad = np.concatenate([grad, np.diagonal(hessian)[:d] - 1.0])
    return Response(hessian, grad, values, vectors[:, 0])


def _products(gradient: Product, point: Array) -> tuple[Array, Product]:
    """A gradient, and the products of its derivative with vectors."""
    value, product = jax.linearize(gradient, point)
    # What has no rule for forward mode fails only where the products are taken.
    jax.eval_shape(jax.vmap(product), point[None])
    return value, product


def _transposed_products(gradient: Product, point: Array) -> tuple[Array, Product]:
    """The same in reverse mode, as the derivative is symmetric."""
    value, pull = jax.vjp(gradient, point)
    return value, lambda vector: pull(vector)[0]
