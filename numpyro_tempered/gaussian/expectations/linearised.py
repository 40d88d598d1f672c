"""Expectations of a nonlinear predictor, linearised at the mean: the extended Kalman filter's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, ArrayLike, PyTree
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.base import of_predictors


def linearised(
    predict: Callable[[Array, Array], ArrayLike], expectation: base.Expectation
) -> base.Expectation:
    r"""Expected loss of a nonlinear predictor f(θ, x), such as a neural network's.

    Around the mean m of q, with J the Jacobian of f in θ there, the predictor is taken as
    :math:`u \sim N(f(m, x), J\Sigma J^\top)`, and the moments of its loss are those of ``expectation``, a
    closed form or a quadrature: gradient :math:`J^\top E[l'(u)]` and Gauss-Newton curvature
    :math:`J^\top E[l''(u)] J`, positive semidefinite where the loss is convex in u. With the squared loss
    and NGVI it is the extended Kalman filter. Exact where f is affine in θ; it leaves out the
    curvature of f.

    K reverse passes give J for each datum. A NumPyro model does not need this:
    ``gauss_hermite(predictor=...)`` linearises at the mean too.

    Args:
        predict: ``(theta, x) -> u`` of one datum, a scalar, or shape ``(K,)`` where the expectation has K
            outputs; ``theta`` has shape ``(d,)``.
        expectation: The loss of the predictor: ``squared()``, ``hinge()``, ``gauss_hermite(loss)``,
            ``softmax(K)`` and so on.

    Returns:
        An :class:`Expectation` on data ``x`` and ``y``. One datum has ``x`` of shape ``()`` or ``(f,)``, a batch
        ``(n, f)`` with ``y`` of shape ``(n, ...)``.

    Raises:
        TypeError: If the expectation is not one of a predictor.
        ValueError: When traced, if the predictor has another shape than the expectation takes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> def network(theta, x):  # two hidden units
        ...     return jnp.sum(theta[:2] * jnp.tanh(theta[2:4] * x[0] + theta[4:]))
        >>> loss = nt.expectations.linearised(network, nt.expectations.squared())
        >>> q = nt.gaussian.families.MeanField(jnp.ones(6), jnp.full(6, 0.1))
        >>> value = jax.jit(loss.evaluate)(q, jnp.ones(1), 1.0)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        0.861 0.880
    """
    of_predictor = getattr(expectation, "of_predictor", None)
    if of_predictor is None:
        came = (
            "one of a model or of the parameters"
            if hasattr(expectation, "evaluate")
            else repr(expectation)
        )
        raise TypeError(
            f"linearised needs the expectation of a predictor's loss, squared() or the like, got {came}."
        )
    moments, loss, num_outputs = of_predictor
    shape = () if num_outputs is None else (num_outputs,)

    def one(theta: Array, x: Array) -> Array:
        u = jnp.asarray(predict(theta, x))
        if u.shape != shape:
            raise ValueError(
                f"predict must return shape {shape} for one datum, got {u.shape}."
            )
        return u.astype(theta.dtype)

    def at(theta: Array, data: base.Data, options: base.Options) -> base.Predictors:
        x, y = _batch(theta, *data)
        mean = jax.vmap(one, (None, 0))(theta, x)
        jacobian = jax.vmap(jax.jacrev(one), (None, 0))(theta, x)
        return base.Predictors(
            mean,
            jacobian,
            lambda mean, spread: moments(mean, spread, y, options),
            lambda u: loss(u, y),
        )

    def of_theta(theta: Array, *data: PyTree) -> Array:
        x, y = _batch(theta, *data)
        return loss(jax.vmap(one, (None, 0))(theta, x), y)

    return of_predictors(
        at, check=expectation.check, loss=of_theta, needs_key=expectation.needs_key
    )


def _batch(theta: Array, x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    x, y = jnp.asarray(x), jnp.asarray(y).astype(theta.dtype)
    x = x.astype(theta.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    if x.ndim < 2:
        return x[None], y[None]
    if y.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"expected x of shape (n, f) with y of shape (n, ...), got {x.shape} and {y.shape}."
        )
    return x, y
