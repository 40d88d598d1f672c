"""Losses of a predictor u in R^K: its Gaussian, averages over nodes, and the way back to the parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import (
    Evaluation,
    Expectation,
    ModelLoss,
    Moments,
    PredictorLoss,
    depends_on,
    masked,
    require_key,
    rows_of,
    with_jacobian,
)
from numpyro_tempered.gaussian.families.base import family_of

# Nodes of a product rule: at more of them draws do as well.
MAX_PRODUCT = 10_000

LossesOfOutputs = Callable[[Array], tuple[Array, Array]]


class Nodes(NamedTuple):
    """Points z and weights that stand for N(0, I) in R^K.

    Attributes:
        at: ``(rng_key, n, dtype) -> (z, weights)``, of shapes ``(M, n, K)`` or ``(M, 1, K)``, and ``(M,)``.
        needs_key: Whether they are drawn.
    """

    at: Callable[[Array | None, int, Any], tuple[Array, Array]]
    needs_key: bool


def product_rule(num_nodes: int, dimension: int, instead: str) -> Nodes:
    """Gauss-Hermite nodes in each of the dimensions.

    Raises:
        ValueError: If there are too many, naming what to do ``instead``.
    """
    if num_nodes < 2 or num_nodes**dimension > MAX_PRODUCT:
        raise ValueError(
            f"{num_nodes} nodes in each of {dimension} dimensions are {num_nodes**dimension}: num_nodes must be "
            f"at least 2, with no more than {MAX_PRODUCT} in all. Take fewer, or {instead}."
        )
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    z = np.stack(np.meshgrid(*[nodes] * dimension, indexing="ij"), axis=-1).reshape(-1, 1, dimension)
    product = np.stack(np.meshgrid(*[weights / weights.sum()] * dimension, indexing="ij"), axis=-1)
    total = product.reshape(-1, dimension).prod(axis=-1)
    return Nodes(lambda rng_key, n, dtype: (jnp.asarray(z, dtype), jnp.asarray(total, dtype)), needs_key=False)


def draws(num_draws: int, dimension: int, expectation: str) -> Nodes:
    """Independent draws for each datum.

    Raises:
        ValueError: If ``num_draws`` < 1.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, got {num_draws}.")

    def at(rng_key: Array | None, n: int, dtype: Any) -> tuple[Array, Array]:
        z = jax.random.normal(require_key(expectation, rng_key), (num_draws, n, dimension), dtype)
        return z, jnp.full((num_draws,), 1.0 / num_draws, dtype)

    return Nodes(at, needs_key=True)


def predictor_covariance(q: Any, jacobian: Array) -> Array:
    """Covariances ``(n, K, K)`` of predictors with gradients ``jacobian``, ``(n, K, d)``."""
    n, k, d = jacobian.shape
    left, right = jacobian[:, :, None, :], jacobian[:, None, :, :]
    # Var(a + b) - Var(a - b) = 4 Cov(a, b).
    pairs = jnp.stack([left + right, left - right])
    variance = family_of(q).predictor_variance(q, jnp.reshape(pairs, (-1, d)))
    plus, minus = jnp.reshape(variance, (2, n, k, k))
    return 0.25 * (plus - minus)


def root(covariance: Array) -> Array:
    """Lower triangular R, ``(n, K, K)``, with R Rᵀ the covariance, which may be singular or 0."""
    rest, columns = covariance, []
    size = covariance.shape[-1]
    for k in range(size):
        pivot = rest[:, k, k]
        # What rounding leaves of a direction without spread; anything not finite goes through.
        none = jnp.isfinite(pivot) & (pivot <= size * jnp.finfo(pivot.dtype).eps * covariance[:, k, k])
        scale = jnp.where(none, 0.0, jax.lax.rsqrt(jnp.where(none, 1.0, pivot)))
        column = rest[:, :, k] * scale[:, None] * (np.arange(size) >= k).astype(pivot.dtype)[None, :]
        rest = rest - column[:, :, None] * column[:, None, :]
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def average(
    nodes: tuple[Array, Array], mean: Array, factor: Array, losses: LossesOfOutputs, curvature: str
) -> Moments:
    """The moments of losses of predictors mean + factor z over the nodes z.

    ``losses`` maps predictors ``(n, K)`` to losses ``(S, n)`` and their weights, which gradients carry. The
    Hessian is the average of those at the nodes: positive semidefinite for a convex loss, and without a
    division by a covariance that may be singular.
    """
    z, weights = nodes
    if curvature == "hessian":
        require_curvature(losses, mean)

    def at(node: Array) -> tuple[Array, Array, Array]:
        u = mean + jnp.sum(factor * node[:, None, :], axis=-1)
        values, pull, scale = jax.vjp(losses, u, has_aux=True)
        scale = jnp.broadcast_to(scale, values.shape)
        sites = jnp.eye(values.shape[0], dtype=values.dtype)
        (slopes,) = jax.vmap(pull)(jnp.broadcast_to(sites[:, :, None], (values.shape[0], *values.shape)))
        weighted = scale[:, :, None] * slopes
        if curvature == "none":
            second = jnp.zeros((*u.shape, u.shape[-1]), u.dtype)
        elif curvature == "fisher":
            second = jnp.sum(weighted[:, :, :, None] * slopes[:, :, None, :], axis=0)
        else:
            second = hessians(losses, u)
        return jnp.sum(values, axis=0), jnp.sum(weighted, axis=0), second

    found = jax.vmap(at)(z)
    expected, first, second = (jnp.tensordot(weights, leaf, 1) for leaf in found)
    return Moments(jnp.sum(losses(mean)[0], axis=0), expected, first, second)


def _products(losses: LossesOfOutputs, u: Array) -> Callable[[Array], Array]:
    def slope(v: Array) -> Array:
        def total(v: Array) -> Array:
            values, weights = losses(v)
            return jnp.sum(weights * values)

        return jax.grad(total)(v)

    return lambda tangent: jax.jvp(slope, (u,), (tangent,))[1]


def hessians(losses: LossesOfOutputs, u: Array) -> Array:
    """Second derivatives ``(n, K, K)`` of the weighted losses, datum by datum."""
    product, size = _products(losses, u), u.shape[-1]
    # The loss of datum i depends on the predictors of datum i alone: K products give all blocks.
    columns = jax.vmap(lambda e: product(jnp.broadcast_to(e[None, :], u.shape)))(jnp.eye(size, dtype=u.dtype))
    return jnp.moveaxis(columns, 0, -1)


def require_curvature(losses: LossesOfOutputs, u: Array) -> None:
    """Raise ValueError where automatic differentiation finds no second derivative at all."""
    if not depends_on(_products(losses, u), u):
        raise ValueError(
            "the loss is piecewise linear in its predictors, so automatic differentiation gives it no curvature: "
            'use ngvi(curvature="fisher").'
        )


def curvature_rows(jacobian: Array, blocks: Array) -> tuple[Array, Array]:
    """The matrix Σ_i J_iᵀ B_i J_i as rows ``(nK, d)`` and weights ``(nK,)``, by the eigenvectors of B_i."""
    values, vectors = jnp.linalg.eigh(blocks)
    # Rounding makes tiny negative eigenvalues of a singular block.
    tiny = values.shape[-1] * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    values = jnp.where(jnp.abs(values) <= tiny, 0.0, values)
    rows = jnp.matmul(jnp.swapaxes(vectors, -1, -2), jacobian)
    return jnp.reshape(rows, (-1, jacobian.shape[-1])), jnp.ravel(values)


def pull_back_outputs(q: Any, jacobian: Array, moments: Moments) -> Evaluation:
    """The evaluation of a batch whose predictors have these moments and gradients, ``(n, K, d)``."""
    grad_loc = jnp.sum(jacobian * moments.first[:, :, None], axis=(0, 1))
    rows, weights = curvature_rows(jacobian, moments.second)
    grad_var = family_of(q).covariance_gradient(q, rows, 0.5 * weights)
    return Evaluation(jnp.sum(moments.at_mean), jnp.sum(moments.expected), grad_loc, grad_var)


def moments_of(nodes: Nodes, loss: Callable[[Array, Array], Array]) -> Callable[..., Moments]:
    """The moments of ``loss(u, y)``, ``(n, K)`` to ``(n,)``, over the nodes."""

    def moments(
        mean: Array, covariance: Array, y: Array, curvature: str, rng_key: Array | None = None
    ) -> Moments:
        one = jnp.ones((1, 1), mean.dtype)
        points = nodes.at(rng_key, mean.shape[0], mean.dtype)
        return average(points, mean, root(covariance), lambda u: (loss(u, y)[None, :], one), curvature)

    return moments


def linear_outputs(
    of_predictor: PredictorLoss, *, check: Callable[..., None] | None = None, needs_key: bool = False
) -> Expectation:
    """The expectation of a loss of K linear predictors u_k = x·θ_k, θ the K of them one after the other.

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y`` of shape ``(...)`` or ``(n, ...)``.
    """
    size = of_predictor.num_outputs or 1

    def evaluate(
        q: Any,
        x: Any,
        y: Any,
        rng_key: Array | None = None,
        curvature: str = "hessian",
        mask: Array | None = None,
    ) -> Evaluation:
        x, y = _rows(q.loc, x, y, size)
        eye = jnp.eye(size, dtype=x.dtype)
        jacobian = eye[None, :, :, None] * x[:, None, None, :]
        jacobian = jnp.reshape(jacobian, (x.shape[0], size, -1))
        covariance = predictor_covariance(q, jacobian)
        found = of_predictor.moments(_predict(q.loc, x, size), covariance, y, curvature, rng_key)
        return pull_back_outputs(q, jacobian, masked(found, mask))

    def loss(theta: Array, x: Any, y: Any) -> Array:
        x, y = _rows(theta, x, y, size)
        return of_predictor.loss(_predict(theta, x, size), y)

    return Expectation(evaluate, check=check, loss=loss, needs_key=needs_key, of_predictor=of_predictor)


def _predict(theta: Array, x: Array, size: int) -> Array:
    return jnp.sum(x[:, None, :] * jnp.reshape(theta, (1, size, -1)), axis=-1)


def _rows(theta: Array, x: Any, y: Any, size: int) -> tuple[Array, Array]:
    x, y = jnp.asarray(x).astype(theta.dtype), jnp.asarray(y).astype(theta.dtype)
    lead = x.shape[:-1]
    if x.ndim not in (1, 2) or x.shape[-1] * size != theta.shape[0] or y.shape[: len(lead)] != lead:
        raise ValueError(
            "expected x of shape (d,) with an outcome y, or x of shape (n, d) with y of shape (n, ...), and "
            f"{size} d parameters, got {x.shape}, {y.shape} and {theta.shape[0]} parameters."
        )
    return jnp.reshape(x, (-1, x.shape[-1])), y if x.ndim == 2 else y[None]


def bound_outputs(model: ModelLoss, nodes: Nodes) -> Expectation:
    """The expectation of a model's likelihood given its predictors ``(n, K)``, linearised at the mean."""
    predict, given = model.predictor, model.losses_given_predictor
    if predict is None or given is None:
        raise TypeError("the model was bound without a predictor.")

    def evaluate(
        q: Any, *data: Any, rng_key: Array | None = None, curvature: str = "hessian", mask: Array | None = None
    ) -> Evaluation:
        mean, jacobian = with_jacobian(lambda theta: predict(theta, *data), q.loc)
        mask = None if mask is None else rows_of(mask, mean.shape[0])
        points = nodes.at(rng_key, mean.shape[0], mean.dtype)
        factor = root(predictor_covariance(q, jacobian))
        found = average(points, mean, factor, lambda u: given(u, q.loc, *data), curvature)
        return pull_back_outputs(q, jacobian, masked(found, mask))

    def loss(theta: Array, *data: Any) -> Array:
        return jnp.sum(model.losses(theta, *data)[0], axis=0)

    return Expectation(evaluate, loss=loss, needs_key=nodes.needs_key)
