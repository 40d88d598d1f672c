"""Gauss-Hermite quadrature over a predictor."""

from collections.abc import Callable
from typing import Any

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
    linear,
    masked,
    pull_back,
    rows_of,
    standard_deviation,
    with_jacobian,
)
from numpyro_tempered.gaussian.expectations.outputs import bound_outputs, linear_outputs, moments_of, product_rule
from numpyro_tempered.gaussian.families.base import family_of

# Beyond this numpy's nodes and weights overflow.
MAX_NODES = 350

LossesOfPredictor = Callable[[Array], tuple[Array, Array]]


def gauss_hermite(
    loss: Callable[[Array, Array], Array] | None = None,
    *,
    predictor: str | None = None,
    num_nodes: int = 20,
    num_outputs: int | None = None,
) -> Expectation:
    r"""Expected loss of a linear predictor by quadrature, in one dimension or few.

    The predictor of a datum is u = x·θ ~ N(m·x, s²), s² = Σ σ_j² x_j². The gradient in the means is
    x E[l'(u)], in the variances x² E[l''(u)]/2, with E[l''] = E[l'(u)(u - m·x)]/s² by Stein's
    identity, valid for losses with kinks too. Fisher curvature is x² E[l'(u)²]. Exact to rounding
    for losses that are polynomials of degree up to ``2 * num_nodes - 1``, or ``num_nodes`` for Fisher
    curvature; for a wide predictor take more nodes (logistic loss at s = 5: 20 nodes err by 2.5e-3, 80 by
    5e-6).

    Two uses:

    - a bare loss, ``gauss_hermite(loss)``: data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``,
      scalar or ``(n,)``;
    - a NumPyro model that names its predictor by ``numpyro.deterministic("eta", ...)``,
      ``gauss_hermite(predictor="eta")``: any model whose likelihood depends on its parameters through
      that site alone, datum by datum. Exact to quadrature where the predictor is affine in the
      unconstrained parameters, a local linearisation at the mean otherwise.

    With ``num_outputs=K`` the predictor of a datum is u in R^K: of a bare loss u_k = x·θ_k with θ of shape
    ``(K d,)``, of a model a site of shape ``(n, K)`` with n log-probabilities. The nodes are those of the
    product rule, num_nodes^K and no more than 10,000 in all, and each holds K² numbers a datum; the Hessian is
    the average of the loss's own, so the loss must be twice differentiable. For classes see :func:`softmax`,
    which needs one dimension less; for larger K :func:`predictor_monte_carlo`.

    Args:
        loss: ``(u, y) -> loss`` of one datum, differentiable by JAX; scalars, or u of shape ``(K,)`` and y of
            any shape.
        predictor: Name of the model's deterministic site.
        num_nodes: Number of quadrature nodes, from 2 to 350; an even one keeps them off the mean.
        num_outputs: K, None for a scalar predictor.

    Returns:
        An :class:`Expectation`.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given, or ``num_nodes`` or
            ``num_outputs`` is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u))
        >>> q = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = jax.jit(logistic.evaluate)(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.693 2.123
    """
    if (loss is None) == (predictor is None):
        raise ValueError("give gauss_hermite either a loss (u, y) -> value or a predictor's name.")
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be between 2 and {MAX_NODES}, got {num_nodes}.")
    if num_outputs is not None and num_outputs < 1:
        raise ValueError(f"num_outputs must be at least 1, got {num_outputs}.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    rule = (nodes, weights / weights.sum())
    product = None if num_outputs is None else product_rule(num_nodes, num_outputs, "predictor_monte_carlo")

    if loss is None:

        def unbound(*args: Any, **kwargs: Any) -> Evaluation:
            raise TypeError(
                f"gauss_hermite(predictor={predictor!r}) needs a model: use it in OnlineVI or "
                "ExpectedNLL, or give a loss function for a bare stream."
            )

        def bind(model: ModelLoss) -> Expectation:
            return _bound(model, rule) if product is None else bound_outputs(model, product)

        return Expectation(unbound, bind=bind, predictor=predictor, num_outputs=num_outputs)

    batch = jax.vmap(loss)
    if product is not None:
        return linear_outputs(PredictorLoss(moments_of(product, batch), batch, num_outputs))

    def moments(mean: Array, variance: Array, y: Array, curvature: str) -> Moments:
        one = jnp.ones((), mean.dtype)
        return quadrature(rule, mean, variance, lambda u: (batch(u, y)[None, :], one), curvature)

    return linear(moments, batch)


def _bound(model: ModelLoss, rule: tuple[np.ndarray, np.ndarray]) -> Expectation:
    predict, given = model.predictor, model.losses_given_predictor
    if predict is None or given is None:
        raise TypeError("the model was bound without a predictor.")

    def evaluate(
        q: Any, *data: Any, rng_key: Array | None = None, curvature: str = "hessian", mask: Array | None = None
    ) -> Evaluation:
        mean, x = with_jacobian(lambda theta: predict(theta, *data), q.loc)
        mask = None if mask is None else rows_of(mask, mean.shape[0])
        variance = family_of(q).predictor_variance(q, x)
        found = quadrature(rule, mean, variance, lambda u: given(u, q.loc, *data), curvature)
        return pull_back(q, x, masked(found, mask))

    def loss(theta: Array, *data: Any) -> Array:
        return jnp.sum(model.losses(theta, *data)[0], axis=0)

    return Expectation(evaluate, loss=loss)


def quadrature(
    rule: tuple[np.ndarray, np.ndarray],
    mean: Array,
    variance: Array,
    losses: LossesOfPredictor,
    curvature: str,
) -> Moments:
    """The moments of losses of predictors u ~ N(mean, variance), ``(n,)`` each.

    ``losses`` maps predictors ``(n,)`` to losses ``(S, n)`` and their weights, which gradients carry.
    """
    dtype = mean.dtype
    # The node 0 with weight 0 gives the loss at the mean in the same vectorised pass.
    nodes = jnp.asarray(np.append(rule[0], 0.0), dtype)[:, None]
    weights = jnp.asarray(np.append(rule[1], 0.0), dtype)[:, None, None]
    s, spread = standard_deviation(variance)
    # A mean may sit on a kink of the loss as written, where automatic differentiation picks a side (NumPyro's
    # Bernoulli by logits at 0 is one): nodes stay some roundings off it.
    off = 8.0 * jnp.finfo(dtype).eps * jnp.maximum(jnp.abs(mean), 1.0)
    width = jnp.maximum(jnp.where(spread, s, 0.0), off)
    u = mean[None, :] + width[None, :] * nodes

    values, first, scale = jax.vmap(lambda row: _slopes(losses, row))(u)
    expected_first = jnp.sum(weights * first, axis=0)
    if curvature == "none":
        second = jnp.zeros_like(expected_first)
    elif curvature == "fisher":
        second = jnp.sum(weights * jnp.square(first), axis=0)
    else:
        stein = jnp.sum(weights * first * nodes[:, None, :], axis=0) / width[None, :]
        # For a narrow q the quotient loses its digits; the derivative beside the mean has them.
        narrow = jnp.maximum(jnp.sqrt(jnp.finfo(dtype).eps), 8.0 * off)
        second = jnp.where(width[None, :] > narrow[None, :], stein, _curvature(losses, mean, off))
    return Moments(
        jnp.sum(values[-1], axis=0),
        jnp.sum(weights * values, axis=(0, 1)),
        jnp.sum(scale[-1] * expected_first, axis=0),
        jnp.sum(scale[-1] * second, axis=0),
    )


def _curvature(losses: LossesOfPredictor, mean: Array, off: Array) -> Array:
    """Second derivatives in the predictors, the mean of those on both sides of ``mean``."""

    def first(u: Array) -> Array:
        return _slopes(losses, u)[1]

    def second(u: Array) -> Array:
        return jax.jvp(first, (u,), (jnp.ones_like(u),))[1]

    return 0.5 * (second(mean - off) + second(mean + off))


def _slopes(losses: LossesOfPredictor, u: Array) -> tuple[Array, Array, Array]:
    """Losses, their slopes and their weights, each (S, n)."""
    values, pull, scale = jax.vjp(losses, u, has_aux=True)
    # A site's loss of datum i depends on the predictor of datum i alone, so one vector-Jacobian
    # product a site gives all its slopes.
    sites = jnp.eye(values.shape[0], dtype=values.dtype)
    rows = jnp.broadcast_to(sites[:, :, None], (values.shape[0], *values.shape))
    (first,) = jax.vmap(pull)(rows)
    return values, first, jnp.broadcast_to(scale, values.shape)
