"""Losses of Gaussian predictors, and the way back to the parameters."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, PyTree, matmul
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.families.base import Gaussian, family_of


def evaluate_predictors(
    q: Gaussian, predictors: base.Predictors, mask: Array | None
) -> base.Evaluation:
    """The evaluation of a batch by its predictors at the mean of q; ``mask`` is that of their moments."""
    mean, jacobian = predictors.mean, predictors.jacobian
    of_u = predictors.moments(mean, predictor_covariance(q, jacobian))
    leaves = (of_u.at_mean, of_u.expected, of_u.first, of_u.second, of_u.objective)
    at_mean, expected, first, second, tempered = (
        base.zero_where_off(leaf, mask) for leaf in leaves
    )
    grad_loc = jnp.sum(jacobian * first[..., None], axis=tuple(range(first.ndim)))
    rows, weights = curvature_rows(jacobian, second)
    grad_var = family_of(q).covariance_gradient(q, rows, 0.5 * weights)
    return base.Evaluation(
        jnp.sum(at_mean), jnp.sum(expected), grad_loc, grad_var, jnp.sum(tempered)
    )


def of_predictors(
    at: Callable[[Array, base.Data, base.Options], base.Predictors], **options: Any
) -> base.Expectation:
    """The expectation of a loss of predictors.

    Args:
        at: ``(theta, data, options) -> Predictors``, linearised at ``theta``.
        **options: Of the :class:`Expectation`.
    """

    @base.evaluator
    def evaluate(
        q: Gaussian, data: base.Data, options: base.Options
    ) -> base.Evaluation:
        predictors = at(q.loc, data, options)
        return evaluate_predictors(
            q, predictors, base.rows_of(options.mask, predictors.mean.shape[0])
        )

    def predictors(
        theta: Array,
        *data: PyTree,
        rng_key: Array | None = None,
        mask: Array | None = None,
    ) -> base.Predictors:
        return at(theta, data, base.Options(rng_key, "hessian", mask))

    return base.Expectation(evaluate, predictors=predictors, **options)


def predictor_covariance(q: Gaussian, jacobian: Array) -> Array:
    """Variances ``(n,)`` of predictors with gradients ``(n, d)``; covariances ``(n, K, K)`` for ``(n, K, d)``."""
    if jacobian.ndim == 2:
        return family_of(q).predictor_variance(q, jacobian)
    # The rows times Σ are half the gradients of xᵀΣx.
    variance, gradient = jax.vjp(
        lambda x: jax.vmap(lambda rows: family_of(q).predictor_variance(q, rows))(x),
        jacobian,
    )
    (times_covariance,) = gradient(jnp.full_like(variance, 0.5))
    covariance = matmul(times_covariance, jnp.swapaxes(jacobian, -1, -2))
    return 0.5 * (covariance + jnp.swapaxes(covariance, -1, -2))


def root(covariance: Array) -> Array:
    """Lower triangular R, ``(n, K, K)``, with R Rᵀ the covariance, which may be singular or 0."""
    rest, columns = covariance, []
    size = covariance.shape[-1]
    for k in range(size):
        pivot = rest[:, k, k]
        # What rounding leaves of a direction without spread; anything not finite goes through.
        none = jnp.isfinite(pivot) & (
            pivot <= size * jnp.finfo(pivot.dtype).eps * covariance[:, k, k]
        )
        scale = jnp.where(none, 0.0, jax.lax.rsqrt(jnp.where(none, 1.0, pivot)))
        column = (
            rest[:, :, k]
            * scale[:, None]
            * (np.arange(size) >= k).astype(pivot.dtype)[None, :]
        )
        rest = rest - column[:, :, None] * column[:, None, :]
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def curvature_rows(jacobian: Array, blocks: Array) -> tuple[Array, Array]:
    """The matrix Σ_i J_iᵀ B_i J_i as rows ``(nK, d)`` and weights ``(nK,)``, by the eigenvectors of B_i."""
    if blocks.ndim == 1:
        return jacobian, blocks
    # Predictors may have units of their own: in those of their curvatures no eigenvalue is small for its unit.
    size = jnp.max(jnp.abs(jnp.diagonal(blocks, axis1=-2, axis2=-1)), axis=0)
    scale = jnp.sqrt(jnp.where(size > 0, size, 1.0))
    values, vectors = jnp.linalg.eigh(blocks / (scale[:, None] * scale[None, :])[None])
    # Rounding makes tiny negative eigenvalues of a singular block.
    tiny = (
        values.shape[-1]
        * jnp.finfo(values.dtype).eps
        * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    )
    values = jnp.where(jnp.abs(values) <= tiny, 0.0, values)
    rows = jnp.matmul(jnp.swapaxes(vectors, -1, -2), scale[None, :, None] * jacobian)
    return jnp.reshape(rows, (-1, jacobian.shape[-1])), jnp.ravel(values)


def as_rows(
    theta: Array, x: ArrayLike, y: ArrayLike, *, num_outputs: int | None = None
) -> tuple[Array, Array]:
    """One datum ``(d,)`` or a batch ``(n, d)`` as ``(n, d)`` features and ``(n,)`` outcomes.

    With K outputs θ has K d coordinates, and outcomes have any shape ``(n, ...)``.

    Raises:
        ValueError: If the shapes do not fit the coordinates of ``theta``.
    """
    x, y = jnp.asarray(x).astype(theta.dtype), jnp.asarray(y).astype(theta.dtype)
    lead, (d,) = x.shape[:-1], theta.shape
    fits = (
        x.ndim in (1, 2)
        and x.shape[-1] * (num_outputs or 1) == d
        and y.shape[: len(lead)] == lead
    )
    if not fits or (num_outputs is None and y.shape != lead):
        width, size, outcomes = (
            (d, d, "(n,)")
            if num_outputs is None
            else ("d", f"{num_outputs} d", "(n, ...)")
        )
        raise ValueError(
            f"expected x of shape ({width},) with one outcome y, or (n, {width}) with y of shape {outcomes}, and "
            f"{size} parameters, got {x.shape}, {y.shape} and {d}."
        )
    return jnp.reshape(x, (-1, x.shape[-1])), y if x.ndim == 2 else y[None]


@functools.lru_cache(maxsize=256)
def linear(
    moments: base.MomentsOf,
    loss: base.Loss,
    *,
    num_outputs: int | None = None,
    check: Callable[[ArrayLike, ArrayLike], None] | None = None,
    quadratic: bool = False,
    needs_key: bool = False,
) -> base.Expectation:
    """The expectation of a loss of a linear predictor u = x·θ, from its moments.

    Args:
        moments: ``(mean, variance, y, options) -> Moments`` for u ~ N(mean, variance), arrays ``(n,)``; the
            variance may be 0.
        loss: ``(u, y) -> loss``, elementwise on arrays ``(n,)``.
        num_outputs: K, for predictors u_k = x·θ_k, θ the K of them one after the other; None for one.
        check: Raises ValueError on concrete ``(x, y)`` that the loss does not admit.
        quadratic: Whether the loss is quadratic in u.
        needs_key: Whether the moments are drawn.

    Returns:
        An :class:`Expectation` on data ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``. The
        same one for the same arguments, so that compiled loops are shared.
    """

    def predict(theta: Array, x: Array) -> Array:
        if num_outputs is None:
            return matmul(x, theta)
        return jnp.sum(
            x[:, None, :] * jnp.reshape(theta, (1, num_outputs, -1)), axis=-1
        )

    def at(theta: Array, data: base.Data, options: base.Options) -> base.Predictors:
        x, y = as_rows(theta, *data, num_outputs=num_outputs)
        jacobian = x
        if num_outputs is not None:
            eye = jnp.eye(num_outputs, dtype=x.dtype)
            jacobian = jnp.reshape(
                eye[None, :, :, None] * x[:, None, None, :],
                (x.shape[0], num_outputs, -1),
            )
        return base.Predictors(
            predict(theta, x),
            jacobian,
            lambda mean, spread: moments(mean, spread, y, options),
            lambda u: loss(u, y),
        )

    def of_theta(theta: Array, *data: PyTree) -> Array:
        x, y = as_rows(theta, *data, num_outputs=num_outputs)
        return loss(predict(theta, x), y)

    of_predictor = base.PredictorLoss(moments, loss, num_outputs)
    return of_predictors(
        at,
        check=check,
        loss=of_theta,
        quadratic=quadratic,
        needs_key=needs_key,
        of_predictor=of_predictor,
    )
