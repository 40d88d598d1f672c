"""What an expectation is: value and gradients of E_q[loss] for a Gaussian q."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.gaussian.families.mean_field import MeanField


class Evaluation(NamedTuple):
    """Value and gradients of an expected loss at one q.

    Attributes:
        at_mean: The untempered loss at the mean of q, a scalar.
        expected: The untempered E_q[loss], a scalar.
        grad_loc: Gradient of the (tempered) E_q[loss] in the means, shape ``(d,)``.
        grad_var: Its gradient in the covariance, E[∇²l]/2, or half the expected squared gradient where the
            rule asked for Fisher curvature. For a mean-field q the diagonal, shape ``(d,)``; for the others
            :class:`~numpyro_tempered.families.Rows`, or for FullRank an array ``(d, d)``.
    """

    at_mean: Array
    expected: Array
    grad_loc: Array
    grad_var: Any

    def grad_scale(self, q: MeanField) -> Array:
        """Gradient in the standard deviations of a mean-field q, by the chain rule."""
        return 2.0 * q.scale * self.grad_var


class Moments(NamedTuple):
    """A loss l(u) of a predictor u ~ N(mean, variance), datum by datum, shape ``(n,)`` each.

    Attributes:
        at_mean: l at the mean.
        expected: E[l(u)].
        first: E[l'(u)], the derivative of ``expected`` in the mean; ``(n, K)`` for u in R^K.
        second: E[l''(u)], twice its derivative in the variance; E[l'(u)²] for Fisher curvature. The matrices
            E[∇²l] or E[∇l ∇lᵀ], ``(n, K, K)``, for u in R^K.
    """

    at_mean: Array
    expected: Array
    first: Array
    second: Array


class PredictorLoss(NamedTuple):
    """A loss of a predictor, and its moments for a Gaussian one: what any model of u may use.

    Attributes:
        moments: ``(mean, variance, y, curvature) -> Moments`` for u ~ N(mean, variance), arrays ``(n,)``. For u
            in R^K ``(mean, covariance, y, curvature, rng_key) -> Moments``, of shapes ``(n, K)`` and
            ``(n, K, K)``.
        loss: ``(u, y) -> losses`` of n data, ``(n,)``.
        num_outputs: K, or None for a scalar predictor.
    """

    moments: Callable[..., Moments]
    loss: Callable[[Array, Array], Array]
    num_outputs: int | None = None


class ModelLoss(NamedTuple):
    """Negative log-likelihood of a model, as functions of the flat unconstrained parameters.

    Losses are untempered and have shape ``(S, n)``: S observed sites of n log-probabilities.
    The weights (tempering times other scales) have the same shape or broadcast to it.

    Attributes:
        losses: ``(theta, *data) -> (losses, weights)``.
        predictor: ``(theta, *data) -> u``, shape ``(n,)`` or ``(n, K)``, or None where none was named.
        losses_given_predictor: ``(u, theta, *data) -> (losses, weights)``.
    """

    losses: Callable[..., tuple[Array, Array]]
    predictor: Callable[..., Array] | None
    losses_given_predictor: Callable[..., tuple[Array, Array]] | None


class Expectation(NamedTuple):
    """E_q of a loss, as a value: pass it to ``run``, ``update`` or ``OnlineVI``.

    Attributes:
        evaluate: ``(q, *data, rng_key, curvature, mask) -> Evaluation``; rows of a batch where ``mask`` is
            False count nothing. They must hold data the loss admits, which the drivers see to.
        bind: ``ModelLoss -> Expectation`` for a model's own likelihood, or None.
        predictor: Name of the model's predictor site, or None.
        needs_key: Whether ``evaluate`` draws random numbers.
        check: Raises ValueError on concrete data that the loss does not admit, or None.
        loss: ``(theta, *data) -> (n,)``: the untempered loss itself, or None before ``bind``.
        quadratic: Whether the loss is quadratic in the parameters, so that Bayes is exact.
        of_predictor: The loss as one of a predictor, where it is: see :func:`linearised`.
        num_outputs: K where the model's predictor site has K outputs a datum, or None.
    """

    evaluate: Callable[..., Evaluation]
    bind: Callable[[ModelLoss], "Expectation"] | None = None
    predictor: str | None = None
    needs_key: bool = False
    check: Callable[..., None] | None = None
    loss: Callable[..., Array] | None = None
    quadratic: bool = False
    of_predictor: PredictorLoss | None = None
    num_outputs: int | None = None


@functools.lru_cache(maxsize=256)
def linear(
    moments: Callable[[Array, Array, Array, str], Moments],
    loss: Callable[[Array, Array], Array],
    *,
    check: Callable[..., None] | None = None,
    quadratic: bool = False,
) -> Expectation:
    """The expectation of a loss of a linear predictor u = x·θ, from its moments.

    Args:
        moments: ``(mean, variance, y, curvature) -> Moments`` for u ~ N(mean, variance), arrays ``(n,)``;
            the variance may be 0.
        loss: ``(u, y) -> loss``, elementwise on arrays ``(n,)``.
        check: Raises ValueError on concrete ``(x, y)`` that the loss does not admit.
        quadratic: Whether the loss is quadratic in u.

    Returns:
        An :class:`Expectation` on data ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``. The
        same one for the same arguments, so that compiled loops are shared.
    """

    def evaluate(
        q: Any,
        x: Any,
        y: Any,
        rng_key: Array | None = None,
        curvature: str = "hessian",
        mask: Array | None = None,
    ) -> Evaluation:
        x, y = as_rows(q, x, y)
        mean = matmul(x, q.loc)
        return pull_back(q, x, masked(moments(mean, family_of(q).predictor_variance(q, x), y, curvature), mask))

    def of_theta(theta: Array, x: Any, y: Any) -> Array:
        x, y = _as_rows(theta, x, y)
        return loss(matmul(x, theta), y)

    return Expectation(
        evaluate, check=check, loss=of_theta, quadratic=quadratic, of_predictor=PredictorLoss(moments, loss)
    )


def masked(moments: Moments, mask: Array | None) -> Moments:
    """The moments with 0 where the mask is False."""
    if mask is None:
        return moments

    def keep(leaf: Array) -> Array:
        rows = jnp.reshape(mask, (-1,) + (1,) * (leaf.ndim - 1))
        return jnp.where(rows, leaf, jnp.zeros((), leaf.dtype))

    return Moments(*(keep(leaf) for leaf in moments))


def rows_of(mask: Array, size: int) -> Array:
    """The mask of n rows for ``size`` losses, those of one or more sites of n losses each.

    Raises:
        ValueError: If the losses are not one a row and site.
    """
    if size % mask.shape[0]:
        raise ValueError(
            f"a batch of {mask.shape[0]} rows has {size} losses: leaving rows out needs one loss a row and site."
        )
    return jnp.tile(mask, size // mask.shape[0])


def as_rows(q: Any, x: Any, y: Any) -> tuple[Array, Array]:
    """One datum ``(d,)`` or a batch ``(n, d)`` as ``(n, d)`` features and ``(n,)`` outcomes.

    Raises:
        ValueError: If the shapes do not fit the ``d`` coordinates of ``q``.
    """
    return _as_rows(q.loc, x, y)


def _as_rows(theta: Array, x: Any, y: Any) -> tuple[Array, Array]:
    x, y = jnp.asarray(x).astype(theta.dtype), jnp.asarray(y).astype(theta.dtype)
    (d,) = theta.shape
    if x.ndim not in (1, 2) or x.shape[-1] != d or y.shape != x.shape[:-1]:
        raise ValueError(
            f"expected x of shape ({d},) with a scalar y, or x of shape (n, {d}) with y of shape "
            f"(n,), got {x.shape} and {y.shape}."
        )
    return jnp.reshape(x, (-1, d)), jnp.reshape(y, (-1,))


def pull_back(q: Any, x: Array, moments: Moments) -> Evaluation:
    """The evaluation of a batch whose predictors have these moments and gradients ``x``, shape ``(n, d)``."""
    grad_loc = jnp.sum(x * moments.first[:, None], axis=0)
    grad_var = family_of(q).covariance_gradient(q, x, 0.5 * moments.second)
    return Evaluation(jnp.sum(moments.at_mean), jnp.sum(moments.expected), grad_loc, grad_var)


def standard_deviation(variance: Array) -> tuple[Array, Array]:
    """The square root, with 1 in place of 0, and where it is positive.

    Both branches of the ``where`` that follows stay finite, and so do their gradients.
    """
    positive = variance > 0
    return jnp.sqrt(jnp.where(positive, variance, 1.0)), positive


def require_key(expectation: str, rng_key: Array | None) -> Array:
    """The key.

    Raises:
        ValueError: If there is none.
    """
    if rng_key is None:
        raise ValueError(f"{expectation} needs an rng_key: pass rng_key= to run or update.")
    return rng_key


def depends_on(fn: Callable[[Array], Any], argument: Array) -> bool:
    """Whether ``fn`` uses its argument at all, read from the traced program."""
    return any(jax.tree.leaves(which_depend(fn, argument)))


def which_depend(fn: Callable[[Array], Any], argument: Array) -> Any:
    """For each output of ``fn`` whether it uses the argument, read from the traced program."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(argument)
    count = len(program.jaxpr.outvars)
    flags = [any(dce_jaxpr(program.jaxpr, [i == j for j in range(count)])[1]) for i in range(count)]
    return jax.tree.unflatten(jax.tree.structure(shapes), flags)


def with_jacobian(predict: Callable[[Array], Array], theta: Array) -> tuple[Array, Array]:
    """Predictors u, and their derivatives ``(*u.shape, d)``, in the memory of these alone."""
    (d,) = theta.shape
    u, pull = jax.vjp(predict, theta)
    if u.size > d:
        units = jnp.eye(d, dtype=theta.dtype)
        return u, jax.vmap(lambda unit: jax.jvp(predict, (theta,), (unit,))[1], out_axes=-1)(units)
    (rows,) = jax.vmap(pull)(jnp.reshape(jnp.eye(u.size, dtype=u.dtype), (-1, *u.shape)))
    return u, jnp.reshape(rows, (*u.shape, d))
