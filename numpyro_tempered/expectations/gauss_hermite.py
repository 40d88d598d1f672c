"""Gauss-Hermite quadrature over a scalar predictor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered._typing import Array
from numpyro_tempered.expectations.base import (
    Evaluation,
    Expectation,
    ModelLoss,
    as_rows,
    predictor_moments,
    pull_back,
    standard_deviation,
)
from numpyro_tempered.families.mean_field import MeanField

# Beyond this numpy's nodes and weights overflow.
MAX_NODES = 350

LossesOfPredictor = Callable[[Array], tuple[Array, Array]]


def gauss_hermite(
    loss: Callable[[Array, Array], Array] | None = None,
    *,
    predictor: str | None = None,
    num_nodes: int = 20,
) -> Expectation:
    r"""Expected loss of a linear predictor by one-dimensional quadrature.

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

    Args:
        loss: ``(u, y) -> loss`` of one datum, scalars, differentiable by JAX.
        predictor: Name of the model's deterministic site.
        num_nodes: Number of quadrature nodes, from 2 to 350; an even one keeps them off the mean.

    Returns:
        An :class:`Expectation`.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given, or ``num_nodes`` is
            out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u))
        >>> q = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = logistic.evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.693 2.123
    """
    if (loss is None) == (predictor is None):
        raise ValueError("give gauss_hermite either a loss (u, y) -> value or a predictor's name.")
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be between 2 and {MAX_NODES}, got {num_nodes}.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    rule = (nodes, weights / weights.sum())

    if loss is None:

        def unbound(*args: Any, **kwargs: Any) -> Evaluation:
            raise TypeError(
                f"gauss_hermite(predictor={predictor!r}) needs a model: use it in OnlineVI or "
                "ExpectedNLL, or give a loss function for a bare stream."
            )

        return Expectation(unbound, bind=lambda model: _bound(model, rule), predictor=predictor)

    def evaluate(
        q: MeanField, x: Any, y: Any, rng_key: Array | None = None, curvature: str = "hessian"
    ) -> Evaluation:
        x, y = as_rows(q, x, y)
        one = jnp.ones((), q.loc.dtype)
        return _quadrature(
            rule,
            q,
            x,
            jnp.sum(x * q.loc[None, :], axis=-1),
            lambda u: (jax.vmap(loss)(u, y)[None, :], one),
            curvature,
        )

    return Expectation(evaluate)


def _bound(model: ModelLoss, rule: tuple[np.ndarray, np.ndarray]) -> Expectation:
    predict, given = model.predictor, model.losses_given_predictor
    if predict is None or given is None:
        raise TypeError("the model was bound without a predictor.")

    def evaluate(
        q: MeanField, *data: Any, rng_key: Array | None = None, curvature: str = "hessian"
    ) -> Evaluation:
        mean, pull = jax.vjp(lambda theta: predict(theta, *data), q.loc)
        (x,) = jax.vmap(pull)(jnp.eye(mean.shape[0], dtype=mean.dtype))
        return _quadrature(rule, q, x, mean, lambda u: given(u, q.loc, *data), curvature)

    return Expectation(evaluate)


def _quadrature(
    rule: tuple[np.ndarray, np.ndarray],
    q: MeanField,
    x: Array,
    mean: Array,
    losses: LossesOfPredictor,
    curvature: str,
) -> Evaluation:
    """The evaluation from predictors ``mean`` (n,) with slopes ``x`` (n, d).

    ``losses`` maps predictors (n,) to losses and weights (S, n).
    """
    dtype = q.loc.dtype
    # The node 0 with weight 0 gives the loss at the mean in the same vectorised pass.
    nodes = jnp.asarray(np.append(rule[0], 0.0), dtype)[:, None]
    weights = jnp.asarray(np.append(rule[1], 0.0), dtype)[:, None, None]
    _, variance = predictor_moments(q, x)
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
    grad_loc, grad_var = pull_back(
        x, jnp.sum(scale[-1] * expected_first, axis=0), jnp.sum(scale[-1] * second, axis=0)
    )
    return Evaluation(jnp.sum(values[-1]), jnp.sum(weights * values), grad_loc, grad_var)


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
