"""Losses of Gaussian predictors, and the way back to the parameters."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array, ArrayLike, PyTree
from numpyro_tempered.gaussian.expectations import base as expectations
from numpyro_tempered.gaussian.expectations.differentiate import LossesOfPredictors, with_jacobian
from numpyro_tempered.gaussian.families.base import Gaussian, family_of

# Moments of any losses of predictors, by mean, variance (n,) or covariance (n, K, K), and options.
Integral: TypeAlias = Callable[[LossesOfPredictors, Array, Array, expectations.Options], expectations.Moments]


def evaluate_predictors(
    q: Gaussian,
    predictors: tuple[Array, Array],
    y: Array,
    moments: expectations.MomentsOf,
    options: expectations.Options,
) -> expectations.Evaluation:
    """The evaluation of a batch by its predictors at the mean of q.

    Args:
        q: The Gaussian.
        predictors: Their values, ``(n,)`` or ``(n, K)``, and gradients, ``(n, d)`` or ``(n, K, d)``.
        y: Outcomes.
        moments: Of the loss.
        options: Of the round.
    """
    family, (mean, jacobian) = family_of(q), predictors
    outputs = jacobian.ndim == 3
    spread = predictor_covariance(q, jacobian) if outputs else family.predictor_variance(q, jacobian)
    of_u = expectations.Moments(
        *(expectations.zero_where_off(leaf, options.mask) for leaf in moments(mean, spread, y, options))
    )
    grad_loc = jnp.sum(jacobian * of_u.first[..., None], axis=(0, 1) if outputs else 0)
    rows, weights = curvature_rows(jacobian, of_u.second) if outputs else (jacobian, of_u.second)
    grad_var = family.covariance_gradient(q, rows, 0.5 * weights)
    return expectations.Evaluation(jnp.sum(of_u.at_mean), jnp.sum(of_u.expected), grad_loc, grad_var)


def predictor_covariance(q: Gaussian, jacobian: Array) -> Array:
    """Covariances ``(n, K, K)`` of predictors with gradients ``jacobian``, ``(n, K, d)``."""
    n, k, d = jacobian.shape
    left, right = jacobian[:, :, None, :], jacobian[:, None, :, :]
    # Var(a + b) - Var(a - b) = 4 Cov(a, b).
    pairs = jnp.stack([left + right, left - right])
    variance = family_of(q).predictor_variance(q, jnp.reshape(pairs, (-1, d)))
    plus, minus = jnp.reshape(variance, (2, n, k, k))
    return 0.25 * (plus - minus)


def curvature_rows(jacobian: Array, blocks: Array) -> tuple[Array, Array]:
    """The matrix Σ_i J_iᵀ B_i J_i as rows ``(nK, d)`` and weights ``(nK,)``, by the eigenvectors of B_i."""
    values, vectors = jnp.linalg.eigh(blocks)
    # Rounding makes tiny negative eigenvalues of a singular block.
    tiny = values.shape[-1] * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    values = jnp.where(jnp.abs(values) <= tiny, 0.0, values)
    rows = jnp.matmul(jnp.swapaxes(vectors, -1, -2), jacobian)
    return jnp.reshape(rows, (-1, jacobian.shape[-1])), jnp.ravel(values)


def as_rows(theta: Array, x: ArrayLike, y: ArrayLike, *, num_outputs: int | None = None) -> tuple[Array, Array]:
    """One datum ``(d,)`` or a batch ``(n, d)`` as ``(n, d)`` features and ``(n,)`` outcomes.

    With K outputs θ has K d coordinates, and outcomes have any shape ``(n, ...)``.

    Raises:
        ValueError: If the shapes do not fit the coordinates of ``theta``.
    """
    x, y = jnp.asarray(x).astype(theta.dtype), jnp.asarray(y).astype(theta.dtype)
    lead, (d,) = x.shape[:-1], theta.shape
    fits = x.ndim in (1, 2) and x.shape[-1] * (num_outputs or 1) == d
    if num_outputs is None and (not fits or y.shape != lead):
        raise ValueError(
            f"expected x of shape ({d},) with a scalar y, or x of shape (n, {d}) with y of shape "
            f"(n,), got {x.shape} and {y.shape}."
        )
    if not fits or y.shape[: len(lead)] != lead:
        raise ValueError(
            "expected x of shape (d,) with an outcome y, or x of shape (n, d) with y of shape (n, ...), and "
            f"{num_outputs} d parameters, got {x.shape}, {y.shape} and {d} parameters."
        )
    return jnp.reshape(x, (-1, x.shape[-1])), y if x.ndim == 2 else y[None]


@functools.lru_cache(maxsize=256)
def linear(
    moments: expectations.MomentsOf,
    loss: Callable[[Array, Array], Array],
    *,
    num_outputs: int | None = None,
    check: Callable[[ArrayLike, ArrayLike], None] | None = None,
    quadratic: bool = False,
    needs_key: bool = False,
) -> expectations.Expectation:
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
        return jnp.sum(x[:, None, :] * jnp.reshape(theta, (1, num_outputs, -1)), axis=-1)

    @expectations.evaluator
    def evaluate(q: Gaussian, data: expectations.Data, options: expectations.Options) -> expectations.Evaluation:
        x, y = as_rows(q.loc, *data, num_outputs=num_outputs)
        jacobian = x
        if num_outputs is not None:
            eye = jnp.eye(num_outputs, dtype=x.dtype)
            jacobian = eye[None, :, :, None] * x[:, None, None, :]
            jacobian = jnp.reshape(jacobian, (x.shape[0], num_outputs, -1))
        return evaluate_predictors(q, (predict(q.loc, x), jacobian), y, moments, options)

    def of_theta(theta: Array, *data: PyTree) -> Array:
        x, y = as_rows(theta, *data, num_outputs=num_outputs)
        return loss(predict(theta, x), y)

    of_predictor = expectations.PredictorLoss(moments, loss, num_outputs)
    return expectations.Expectation(
        evaluate, check=check, loss=of_theta, quadratic=quadratic, needs_key=needs_key, of_predictor=of_predictor
    )


def linear_of(
    loss: Callable[[Array, Array], Array],
    integral: Integral,
    *,
    num_outputs: int | None = None,
    needs_key: bool = False,
) -> expectations.Expectation:
    """As :func:`linear`, for a loss ``(u, y)`` of one datum whose moments are an integral."""
    batch = jax.vmap(loss)

    def moments(mean: Array, spread: Array, y: Array, options: expectations.Options) -> expectations.Moments:
        one = jnp.ones((), mean.dtype)
        return integral(lambda u: (batch(u, y)[None, :], one), mean, spread, options)

    return linear(moments, batch, num_outputs=num_outputs, needs_key=needs_key)


def bound(
    model: expectations.ModelLoss, integral: Integral, *, needs_key: bool = False
) -> expectations.Expectation:
    """The expectation of a model's likelihood given its predictors, linearised at the mean."""
    predict, losses_at = model.by_predictor()

    @expectations.evaluator
    def evaluate(q: Gaussian, data: expectations.Data, options: expectations.Options) -> expectations.Evaluation:
        mean, jacobian = with_jacobian(lambda theta: predict(theta, *data), q.loc)

        def moments(mean: Array, spread: Array, y: Array, options: expectations.Options) -> expectations.Moments:
            return integral(lambda u: losses_at(u, q.loc, *data), mean, spread, options)

        options = options._replace(mask=expectations.rows_of(options.mask, mean.shape[0]))
        return evaluate_predictors(q, (mean, jacobian), mean, moments, options)

    return expectations.Expectation(evaluate, loss=model.total, needs_key=needs_key)
