"""Smooth convex losses, by bounded least squares and L-BFGS-B."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, doubles
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box
from numpyro_tempered.theory.hindsight import base


def squared(
    x: ArrayLike, y: ArrayLike, box: Box | Ball | None = None
) -> base.Hindsight:
    r"""The θ with the least :math:`\sum_t(y_t - x_t^\top\theta)^2`, by bounded least squares or ridge regression.

    Args:
        x: Features, shape ``(T, d)``.
        y: Outcomes, shape ``(T,)``.
        box: Optional bounds, a box or a ball; only ``box.loc`` matters.

    Returns:
        A :class:`Hindsight`.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> import numpyro_tempered as nt
        >>> best = nt.bounds.hindsight.squared([[1.0], [1.0]], [0.0, 4.0], box=nt.online.Box(loc=1.0))
        >>> print(f"{best.theta[0]:.1f} {best.value:.1f} {best.gap:.1f}")
        1.0 10.0 0.0
    """
    from scipy.optimize import lsq_linear

    rows, outcomes = base.as_data(x, y)
    bound, d = base.as_bounds(box, rows), rows.shape[1]
    unit = base.units(rows)
    # The triangular factor has the same normal equations, in d + 1 rows.
    small: np.ndarray = np.linalg.qr(np.column_stack([rows / unit, outcomes]), mode="r")  # type: ignore[assignment]
    limit, radius = bound * unit, base.as_radius(box)
    if math.isfinite(radius):
        scaled = unit * _ridge(small[:, :d] * unit, small[:, d], radius)
    elif np.all(np.isinf(limit)):
        scaled = np.linalg.lstsq(small[:, :d], small[:, d], rcond=None)[0]
    else:
        scaled = lsq_linear(
            small[:, :d], small[:, d], (-limit, limit), method="bvls", tol=1e-15
        ).x
    theta = np.clip(scaled / unit, -bound, bound)
    residual = rows @ theta - outcomes
    reach = base.as_reach(theta, bound)
    losses = np.square(residual)
    return base.by_gradient(theta, losses, 2.0 * (residual @ rows), reach, radius)


def _ridge(rows: np.ndarray, outcomes: np.ndarray, radius: float) -> np.ndarray:
    """The least squares in a ball: ridge regression with the least penalty that ends inside."""
    left, sizes, right = np.linalg.svd(rows, full_matrices=False)
    sizes = np.where(sizes > 1e-14 * sizes[0], sizes, 0.0)
    force = sizes * (left.T @ outcomes)

    def at(penalty: float) -> np.ndarray:
        total = np.square(sizes) + penalty
        return np.divide(force, total, out=np.zeros_like(force), where=total > 0)

    low, high = 0.0, float(np.linalg.norm(force)) / radius
    if np.linalg.norm(at(low)) > radius:
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (
                (middle, high) if np.linalg.norm(at(middle)) > radius else (low, middle)
            )
        return at(high) @ right
    return at(low) @ right


def convex(
    loss: Expectation | Callable[..., Array],
    init: ArrayLike,
    *data: ArrayLike,
    box: Box | Ball | None = None,
) -> base.Hindsight:
    r"""The θ with the least :math:`\sum_t\ell_t(\theta)` for a smooth convex loss, by L-BFGS-B or SLSQP.

    The gradient is JAX's, in its default precision: under float32 value and gap carry rounding errors of about
    10^-6 of the value; under JAX_ENABLE_X64 they do not. The certificate needs convexity, which is not checked.

    Args:
        loss: An expectation of a bare loss, such as ``nt.expectations.gauss_hermite(...)``, or a function
            ``(theta, *data) -> (T,)``, differentiable by JAX.
        init: θ to start from, shape ``(d,)``.
        *data: Arrays with one leading axis of T rounds, as the loss takes them.
        box: Optional bounds, a box or a ball; only ``box.loc`` matters.

    Returns:
        A :class:`Hindsight`.

    Raises:
        TypeError: If the expectation has no loss function.
        ValueError: If the loss at the start is not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> def logistic(theta, x, y):
        ...     return jax.nn.softplus(-y * (x @ theta))
        >>> x, y = jnp.ones((4, 1)), jnp.array([1.0, 1.0, 1.0, -1.0])
        >>> best = nt.bounds.hindsight.convex(logistic, jnp.zeros(1), x, y)
        >>> print(f"{best.theta[0]:.3f}")
        1.099
    """
    losses_at = loss.loss if isinstance(loss, Expectation) else loss
    if losses_at is None:
        raise TypeError(
            "the expectation has no loss function: give the loss as a function (theta, *data)."
        )
    arrays = jax.tree.map(jnp.asarray, data)
    origin = doubles(init)
    bound, radius = base.as_bounds(box, origin[None, :]), base.as_radius(box)

    @jax.jit
    def parts(theta: Array) -> tuple[Array, Array]:
        losses, pull = jax.vjp(lambda t: losses_at(t, *arrays), theta)
        return losses, pull(jnp.ones_like(losses))[0]

    def evaluate(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        losses, slope = parts(jnp.asarray(theta))
        return doubles(losses), doubles(slope)

    first = evaluate(origin)[0]
    if first.ndim != 1 or not np.all(np.isfinite(first)):
        raise ValueError(
            f"loss must return finite losses of shape (T,) at the start, got shape {first.shape}."
        )
    size = max(abs(first.sum()), 1e-30)

    def mean(theta: np.ndarray) -> tuple[float, np.ndarray]:
        losses, slope = evaluate(theta)
        return losses.sum() / size, slope / size

    options = {
        "maxiter": 5000,
        "maxfun": 10_000,
        "ftol": 1e-16,
        "gtol": 1e-13,
        "maxcor": 30,
    }
    theta = base.minimise(mean, origin, -bound, bound, radius=radius, **options)
    losses, slope = evaluate(theta)
    return base.by_gradient(theta, losses, slope, base.as_reach(theta, bound), radius)
