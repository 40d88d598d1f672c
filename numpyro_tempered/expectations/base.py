"""What an expectation is: value and gradients of E_q[loss] for a mean-field Gaussian q."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered._typing import Array
from numpyro_tempered.families.mean_field import MeanField


class Evaluation(NamedTuple):
    """Value and gradients of an expected loss at one q.

    Attributes:
        at_mean: The untempered loss at the mean of q, a scalar.
        expected: The untempered E_q[loss], a scalar.
        grad_loc: Gradient of the (tempered) E_q[loss] in the means, shape ``(d,)``.
        grad_var: Its gradient in the variances, or half the expected squared gradient where the
            rule asked for Fisher curvature, shape ``(d,)``.
    """

    at_mean: Array
    expected: Array
    grad_loc: Array
    grad_var: Array

    def grad_scale(self, q: MeanField) -> Array:
        """Gradient in the standard deviations, by the chain rule."""
        return 2.0 * q.scale * self.grad_var


class ModelLoss(NamedTuple):
    """Negative log-likelihood of a model, as functions of the flat unconstrained parameters.

    Losses are untempered and have shape ``(S, n)``: S observed sites of n log-probabilities.
    The weights (tempering times other scales) have the same shape or broadcast to it.

    Attributes:
        losses: ``(theta, *data) -> (losses, weights)``.
        predictor: ``(theta, *data) -> u``, shape ``(n,)``, or None where none was named.
        losses_given_predictor: ``(u, theta, *data) -> (losses, weights)``.
    """

    losses: Callable[..., tuple[Array, Array]]
    predictor: Callable[..., Array] | None
    losses_given_predictor: Callable[..., tuple[Array, Array]] | None


class Expectation(NamedTuple):
    """E_q of a loss, as a value: pass it to ``run``, ``update`` or ``OnlineVI``.

    Attributes:
        evaluate: ``(q, *data, rng_key, curvature) -> Evaluation``.
        bind: ``ModelLoss -> Expectation`` for a model's own likelihood, or None.
        predictor: Name of the model's predictor site, or None.
        needs_key: Whether ``evaluate`` draws random numbers.
        check: Raises ValueError on concrete data that the loss does not admit, or None.
    """

    evaluate: Callable[..., Evaluation]
    bind: Callable[[ModelLoss], "Expectation"] | None = None
    predictor: str | None = None
    needs_key: bool = False
    check: Callable[..., None] | None = None


def as_rows(q: MeanField, x: Any, y: Any) -> tuple[Array, Array]:
    """One datum ``(d,)`` or a batch ``(n, d)`` as ``(n, d)`` features and ``(n,)`` outcomes.

    Raises:
        ValueError: If the shapes do not fit the ``d`` coordinates of ``q``.
    """
    x, y = jnp.asarray(x).astype(q.loc.dtype), jnp.asarray(y).astype(q.loc.dtype)
    (d,) = q.loc.shape
    if x.ndim not in (1, 2) or x.shape[-1] != d or y.shape != x.shape[:-1]:
        raise ValueError(
            f"expected x of shape ({d},) with a scalar y, or x of shape (n, {d}) with y of shape "
            f"(n,), got {x.shape} and {y.shape}."
        )
    return jnp.reshape(x, (-1, d)), jnp.reshape(y, (-1,))


def predictor_moments(q: MeanField, x: Array) -> tuple[Array, Array]:
    """Mean and variance of the linear predictors ``x @ theta``, each ``(n,)``."""
    mean = jnp.sum(x * q.loc[None, :], axis=-1)
    variance = jnp.sum(jnp.square(x * q.scale[None, :]), axis=-1)
    return mean, variance


def pull_back(x: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Gradients in means and variances from E[l'] and E[l''] (or E[l'²]) of the predictors."""
    grad_loc = jnp.sum(x * first[:, None], axis=0)
    grad_var = 0.5 * jnp.sum(jnp.square(x) * second[:, None], axis=0)
    return grad_loc, grad_var


def standard_deviation(variance: Array) -> tuple[Array, Array]:
    """The square root, with 1 in place of 0, and where it is positive.

    Both branches of the ``where`` that follows stay finite, and so do their gradients.
    """
    positive = variance > 0
    return jnp.sqrt(jnp.where(positive, variance, 1.0)), positive


def depends_on(fn: Callable[[Array], Any], argument: Array) -> bool:
    """Whether ``fn`` uses its argument at all, read from the traced program."""
    program = jax.make_jaxpr(fn)(argument).jaxpr
    reached = set(program.invars)
    for equation in program.eqns:
        if any(not hasattr(v, "val") and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return any(not hasattr(v, "val") and v in reached for v in program.outvars)
