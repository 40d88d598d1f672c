"""What an expectation is: value and gradients of E_q[loss] for a Gaussian q, of Gaussian predictors too."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, PyTree, matmul
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.families.base import Curvature, Gaussian, family_of
from numpyro_tempered.gaussian.families.mean_field import MeanField

Data: TypeAlias = tuple[PyTree, ...]


class Evaluation(NamedTuple):
    """Value and gradients of an expected loss at one q.

    Attributes:
        at_mean: The untempered loss at the mean of q, a scalar.
        expected: The untempered E_q[loss], a scalar.
        grad_loc: Gradient of the (tempered) E_q[loss] in the means, shape ``(d,)``.
        grad_var: Its gradient in the covariance, E[∇²l]/2, or half the expected squared gradient where the
            rule takes Fisher curvature. For a mean-field q the diagonal, shape ``(d,)``; for the others
            :class:`.Rows`, or for FullRank an array ``(d, d)``.
        tempered: The tempered E_q[loss], or None where it is ``expected``.
    """

    at_mean: Array
    expected: Array
    grad_loc: Array
    grad_var: Curvature
    tempered: Array | None = None

    @property
    def objective(self) -> Array:
        """The tempered E_q[loss], whose gradients these are."""
        return self.expected if self.tempered is None else self.tempered

    def grad_scale(self, q: MeanField) -> Array:
        """Gradient in the standard deviations of a mean-field q, by the chain rule."""
        return 2.0 * q.scale * jnp.asarray(self.grad_var)


class Moments(NamedTuple):
    """A loss l(u) of a predictor u ~ N(mean, variance), datum by datum, shape ``(n,)`` each.

    Attributes:
        at_mean: l at the mean.
        expected: E[l(u)].
        first: E[l'(u)], the derivative of ``expected`` in the mean; ``(n, K)`` for u in R^K.
        second: E[l''(u)], twice its derivative in the variance; E[l'(u)²] for Fisher curvature. The matrices
            E[∇²l] or E[∇l ∇lᵀ], ``(n, K, K)``, for u in R^K.
        tempered: E[l(u)] with the weights that ``first`` and ``second`` carry, or None where they are 1.
    """

    at_mean: Array
    expected: Array
    first: Array
    second: Array
    tempered: Array | None = None

    @property
    def objective(self) -> Array:
        """The tempered E[l(u)], whose derivatives these are."""
        return self.expected if self.tempered is None else self.tempered


class Predictors(NamedTuple):
    """Predictors of a batch, affine in the parameters or linearised at some θ, and what is lost by them.

    Attributes:
        mean: Their values at θ, ``(n,)`` or ``(n, K)``.
        jacobian: Their derivatives, ``(n, d)`` or ``(n, K, d)``.
        moments: ``(mean, variance) -> Moments`` for Gaussian predictors of these data.
        losses: ``u -> (n,)``, the untempered losses of predictors of the shape of ``mean``; None where they
            depend on more.
    """

    mean: Array
    jacobian: Array
    moments: Callable[[Array, Array], Moments]
    losses: Callable[[Array], Array] | None = None


class Options(NamedTuple):
    """How a round is evaluated: the key of random numbers, the curvature, and which rows are on."""

    rng_key: Array | None = None
    curvature: str = "hessian"
    mask: Array | None = None


# A loss of a predictor and its outcome.
Loss: TypeAlias = Callable[[Array, Array], Array]
# Moments of predictors by mean, variance (n,) or covariance (n, K, K), outcomes and options.
MomentsOf: TypeAlias = Callable[[Array, Array, Array, Options], Moments]


class PredictorLoss(NamedTuple):
    """A loss of a predictor, and its moments for a Gaussian one: what any model of u may use.

    Attributes:
        moments: ``(mean, variance, y, options) -> Moments`` for u ~ N(mean, variance), arrays ``(n,)``; for u in
            R^K mean and covariance have shapes ``(n, K)`` and ``(n, K, K)``.
        loss: ``(u, y) -> losses`` of n data, ``(n,)``.
        num_outputs: K, or None for a scalar predictor.
    """

    moments: MomentsOf
    loss: Loss
    num_outputs: int | None = None


class OfTheta(Protocol):
    """A function of the parameters ``(d,)`` and data."""

    def __call__(self, theta: Array, /, *data: PyTree) -> Array:
        """One value for each datum, ``(n,)`` or ``(n, K)``."""


# Losses (S, n) of S observed sites, and their weights.
WeighedLosses: TypeAlias = Callable[..., tuple[Array, Array]]


class Shared(NamedTuple):
    """Coordinates of θ that the losses of all data depend on besides their predictors, such as a log-scale.

    Attributes:
        coordinates: Their places in θ, ``(m,)``.
        nodes: ``rng_key -> (z, weights)``, which stand for N(0, I) in R^m: ``(M, m)`` and ``(M,)``.
        needs_key: Whether the nodes are drawn.
    """

    coordinates: np.ndarray
    nodes: Callable[[Array | None], tuple[Array, Array]]
    needs_key: bool


class Kinks(Protocol):
    """Where losses have a kink."""

    def __call__(self, u: Array, theta: Array, /, *data: PyTree) -> tuple[Array, Array]:
        """Location and outcome of the sites that have one, ``(S, n)`` each; NaN for the others."""


class ModelLoss(NamedTuple):
    """Negative log-likelihood of a model, as functions of the flat unconstrained parameters.

    Losses are untempered and have shape ``(S, n)``: S observed sites of n log-probabilities.
    The weights (tempering times other scales) have the same shape or broadcast to it.

    Attributes:
        losses: ``(theta, *data) -> (losses, weights)``.
        predictor: ``(theta, *data) -> u``, shape ``(n,)`` or ``(n, K)``, or None where none was named.
        losses_given_predictor: ``(u, theta, *data) -> (losses, weights)``.
        shared: What the losses depend on besides the predictor, or None.
        kinks: ``(u, theta, *data) -> (locations, outcomes)`` where each loss with a kink has it at its outcome,
            so that an integral may take it in closed form; None where they are not known.
    """

    losses: WeighedLosses
    predictor: OfTheta | None
    losses_given_predictor: WeighedLosses | None
    shared: Shared | None = None
    kinks: Kinks | None = None

    def total(self, theta: Array, *data: PyTree) -> Array:
        """The losses of all sites by datum, ``(n,)``."""
        return jnp.sum(self.losses(theta, *data)[0], axis=0)

    def by_predictor(self) -> tuple[OfTheta, WeighedLosses]:
        """The predictor, and the losses given it.

        Raises:
            TypeError: If there is none.
        """
        if self.predictor is None or self.losses_given_predictor is None:
            raise TypeError("the model was bound without a predictor.")
        return self.predictor, self.losses_given_predictor


class PredictorsAt(Protocol):
    """The predictors of data."""

    def __call__(
        self,
        theta: Array,
        /,
        *data: PyTree,
        rng_key: Array | None = ...,
        mask: Array | None = ...,
    ) -> Predictors:
        """Those of a batch, linearised at ``theta``; their moments have Hessian curvature."""


class Evaluate(Protocol):
    """An expected loss as a function of q and data."""

    def __call__(
        self,
        q: Gaussian,
        /,
        *data: PyTree,
        rng_key: Array | None = ...,
        curvature: str = ...,
        mask: Array | None = ...,
    ) -> Evaluation:
        """Value and gradients at ``q``; rows of a batch where ``mask`` is False count nothing."""


def evaluator(evaluate: Callable[[Gaussian, Data, Options], Evaluation]) -> Evaluate:
    """The function that an :class:`Expectation` has, of one that takes data and options as tuples."""

    def with_options(q: Gaussian, *data: PyTree, **options: Any) -> Evaluation:
        return evaluate(q, data, Options(**options))

    return with_options


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
        num_outputs: K where the model's predictor site has K outputs for each datum, or None.
        predictors: ``(theta, *data, rng_key, mask) -> Predictors``, or None where the loss is not one of
            predictors.
        integrates: Whether, bound to a model, it takes what :attr:`ModelLoss.shared` and ``kinks`` say.
    """

    evaluate: Evaluate
    bind: Callable[[ModelLoss], "Expectation"] | None = None
    predictor: str | None = None
    needs_key: bool = False
    check: Callable[[ArrayLike, ArrayLike], None] | None = None
    loss: OfTheta | None = None
    quadratic: bool = False
    of_predictor: PredictorLoss | None = None
    num_outputs: int | None = None
    predictors: PredictorsAt | None = None
    integrates: bool = False


def unbound(call: str) -> Evaluate:
    """``evaluate`` of a model's likelihood that is not bound yet: it raises TypeError, naming the ``call``."""

    def refuse(q: Gaussian, *data: PyTree, **options: object) -> NoReturn:
        raise TypeError(
            f"{call} needs a model: use it in OnlineVI or ExpectedNLL, or give a loss function for a bare stream."
        )

    return refuse


def zero_where_off(leaf: Array, mask: Array | None) -> Array:
    """The rows of an array ``(n, ...)``, 0 where the mask ``(n,)`` is False."""
    if mask is None:
        return leaf
    rows = jnp.reshape(mask, (-1,) + (1,) * (leaf.ndim - 1))
    return jnp.where(rows, leaf, jnp.zeros((), leaf.dtype))


def rows_of(mask: Array | None, size: int) -> Array | None:
    """The mask of n rows for ``size`` losses, those of one or more sites of n losses each.

    Raises:
        ValueError: If there is not one loss for each row and site.
    """
    if mask is None:
        return None
    if size % mask.shape[0]:
        raise ValueError(
            f"a batch of {mask.shape[0]} rows has {size} losses: a mask needs one loss for each row and site."
        )
    return jnp.tile(mask, size // mask.shape[0])


def check_outcomes(
    y: ArrayLike, admits: Callable[[np.ndarray], np.ndarray], need: str, hint: str = ""
) -> None:
    """Raise ValueError with the first outcome that is finite and not admitted.

    An outcome that is not finite is a missing one, whose round is rejected.
    """
    outcomes = np.asarray(y, dtype=float)
    bad = np.isfinite(outcomes) & ~admits(outcomes)
    if np.any(bad):
        raise ValueError(f"{need}, got {outcomes[bad].flat[0]}{hint}.")


def check_labels(x: ArrayLike, y: ArrayLike, *, name: str) -> None:
    """Raise ValueError where a finite label is neither -1 nor 1."""
    hint = "; turn labels in {0, 1} into 2 * y - 1"
    check_outcomes(
        y,
        lambda labels: np.isin(labels, (-1.0, 1.0)),
        f"{name} needs labels y in {{-1, 1}}",
        hint,
    )


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
        raise ValueError(
            f"{expectation} needs an rng_key: pass rng_key= to run or update."
        )
    return rng_key


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
