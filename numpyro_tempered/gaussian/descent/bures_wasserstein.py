"""Gaussians under the Bures-Wasserstein metric: distance, flow, forward-backward steps (Lam22, Diao23)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.descent.base import Derivatives, Gaussian, Method, require_gaussian, whitened
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.mean_field import MeanField

# How far above 1/L rounding may lead a step of exactly 1/L.
_ROUNDING = 1e-3


def wasserstein(q: Gaussian, p: Gaussian) -> Array:
    r"""The 2-Wasserstein distance of two Gaussians.

    .. math:: W_2^2 = \|m_q - m_p\|^2 + \mathrm{tr}\, V_q + \mathrm{tr}\, V_p
              - 2\, \mathrm{tr}\big(V_q^{1/2} V_p V_q^{1/2}\big)^{1/2}

    Args:
        q: A :class:`~numpyro_tempered.families.MeanField` or :class:`~numpyro_tempered.families.FullRank`.
        p: Another of the same kind.

    Returns:
        W_2, a scalar in the units of θ.

    Raises:
        TypeError: If they are of different kinds.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> p = nt.families.MeanField(jnp.array([3.0, 0.0]), jnp.array([1.0, 5.0]))
        >>> float(nt.descent.wasserstein(q, p))
        5.0
    """
    if isinstance(q, MeanField) and isinstance(p, MeanField):
        spread = jnp.sum(jnp.square(q.scale - p.scale))
    elif isinstance(q, FullRank) and isinstance(p, FullRank):
        # The nearest square roots of both covariances: an orthogonal Procrustes problem, without cancellation.
        left, _, right = jnp.linalg.svd(matmul(p.factor.T, q.factor))
        spread = jnp.sum(jnp.square(q.factor - matmul(p.factor, matmul(left, right))))
    else:
        raise TypeError(f"expected two of one family, got {type(q).__name__} and {type(p).__name__}.")
    return jnp.sqrt(jnp.sum(jnp.square(q.loc - p.loc)) + spread)


def flow(derivatives: Callable[[Any], Derivatives], start: Gaussian, times: ArrayLike) -> Any:
    r"""The Bures-Wasserstein gradient flow of the free energy, integrated.

    .. math:: \dot m = -g, \qquad \dot V = 2I - V H - H V

    If f is a-strongly convex, :math:`W_2^2(q_t, \hat q) \le e^{-2at}\, W_2^2(q_0, \hat q)`. It is the limit of
    small steps of :func:`forward_backward` without whitening, for teaching and tests: a fit takes hundreds to
    thousands of evaluations along it. A square root of V is integrated, S' = S^-T - H S, by the adaptive
    Dormand-Prince method of ``jax.experimental.ode``.

    Args:
        derivatives: ``q -> Derivatives`` of f, such as an :class:`Objective`.
        start: q_0, a :class:`~numpyro_tempered.families.MeanField` or
            :class:`~numpyro_tempered.families.FullRank`.
        times: Increasing times, shape ``(T,)``; the first is that of ``start``.

    Returns:
        The Gaussians at ``times``: ``start``'s family, with a leading axis of T.

    Raises:
        TypeError: If ``start`` is of another family.
        ValueError: If ``times`` is not a vector of at least two.

    References:
        Lam22.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> def standard_normal(q):  # f(θ) = θ² / 2
        ...     value = 0.5 * jnp.sum(q.loc**2 + q.scale**2)
        ...     return nt.descent.Derivatives(value, q.loc, jnp.ones_like(q.loc))
        >>> start = nt.families.MeanField(jnp.array([4.0]), jnp.array([1.0]))
        >>> path = nt.descent.flow(standard_normal, start, jnp.array([0.0, 1.0]))
        >>> print(f"{path.loc[1, 0]:.4f}")  # 4 exp(-1)
        1.4715
    """
    q = require_gaussian(start)
    times = jnp.asarray(times, q.loc.dtype)
    if times.ndim != 1 or times.shape[0] < 2:
        raise ValueError(f"times must be a vector of at least two, got shape {times.shape}.")

    def velocity(q: Any, _: Array) -> Any:
        at = derivatives(q)
        if isinstance(q, MeanField):
            return MeanField(-at.grad, 1.0 / q.scale - at.hessian * q.scale)
        inverse = jnp.linalg.solve(q.factor.T, jnp.eye(q.loc.shape[0], dtype=q.loc.dtype))
        return FullRank(-at.grad, inverse - matmul(at.hessian, q.factor))

    tolerance = 100.0 * float(jnp.finfo(q.loc.dtype).eps)
    path = odeint(velocity, q, times, rtol=tolerance, atol=tolerance)
    return path._replace(factor=jax.vmap(_lower)(path.factor)) if isinstance(q, FullRank) else path


@functools.lru_cache(maxsize=64)
def forward_backward(step_size: float | None = None, *, whiten: bool = True, backtrack: bool = True) -> Method:
    r"""Forward-backward steps in the Bures-Wasserstein metric: explicit in f, proximal in the entropy.

    With the step h,

    .. math:: m' = m - h g, \quad S = (I - hH)\, V\, (I - hH), \quad
              V' = \tfrac12 \big(S + 2hI + (S(S + 4hI))^{1/2}\big).

    The limit of the step is 1/L, L the largest eigenvalue of H, not the 2/L of a gradient step: for 1 < hL < 2 it
    converges silently to hL/(2 - hL) times the right variance. Steps above 1/L are refused.

    ``whiten`` takes the step in coordinates in which the present q is standard, where h = 1 is natural and L is
    near 1: 10 to 50 evaluations where the plain step takes hundreds to thousands.

    Args:
        step_size: h. By default 1 whitened, and the longest admissible otherwise, in both cases no more than 1/L
            at each q. A number is taken as it is, and refused where it is above 1/L.
        whiten: Whether to step in the coordinates of the present q.
        backtrack: Whether to halve a step that does not improve.

    Returns:
        A :class:`Method`.

    Raises:
        ValueError: If ``step_size`` is not positive; :func:`minimise` raises where it is above 1/L.

    References:
        Diao23.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.descent.forward_backward(whiten=False).name
        'forward_backward'
    """
    if step_size is not None and not 0.0 < step_size < float("inf"):
        raise ValueError(f"step_size must be positive and finite, got {step_size}.")

    def limit(q: Any, derivatives: Derivatives) -> Array:
        """1/L in the coordinates of the step."""
        hessian = whitened(q, derivatives)[1] if whiten else derivatives.hessian
        largest = jnp.max(hessian if hessian.ndim == 1 else jnp.linalg.eigvalsh(hessian))
        return jnp.where(largest > 0, 1.0 / jnp.where(largest > 0, largest, 1.0), jnp.inf)

    def longest(q: Any, derivatives: Derivatives) -> Array:
        if step_size is not None:
            return jnp.full((), step_size, q.loc.dtype)
        # A plain step where f bends nowhere upwards has no limit: that of a whitened one is its length then.
        cap = 1.0 if whiten else jnp.max(jnp.square(_marginal(q)))
        return jnp.minimum(cap, limit(q, derivatives)).astype(q.loc.dtype)

    def refused(q: Any, derivatives: Derivatives) -> Array:
        if step_size is None:
            return jnp.zeros((), bool)
        return step_size > (1.0 + _ROUNDING) * limit(q, derivatives)

    step = whitened_step if whiten else plain_step
    return Method(step, longest, refused, backtrack, lambda d: False, "forward_backward")


def _marginal(q: Any) -> Array:
    return q.scale if isinstance(q, MeanField) else jnp.sqrt(jnp.sum(jnp.square(q.factor), axis=-1))


def plain_step(q: Any, derivatives: Derivatives, size: Array) -> Any:
    """One forward-backward step of size h = ``size``, at whatever size."""
    loc = q.loc - size * derivatives.grad
    if isinstance(q, MeanField):
        return MeanField(loc, _prox_scale(jnp.abs(q.scale * (1.0 - size * derivatives.hessian)), size))
    root = q.factor - size * matmul(derivatives.hessian, q.factor)
    vectors, values, _ = jnp.linalg.svd(root)
    return FullRank(loc, _lower(vectors * _prox_scale(values, size)[None, :]))


def whitened_step(q: Any, derivatives: Derivatives, size: Array) -> Any:
    """One forward-backward step of size ``size`` in coordinates in which q is standard."""
    grad, hessian = whitened(q, derivatives)
    if isinstance(q, MeanField):
        scale = q.scale * _prox_scale(jnp.abs(1.0 - size * hessian), size)
        return MeanField(q.loc - size * q.scale * grad, scale)
    values, vectors = jnp.linalg.eigh(hessian)
    factor = matmul(q.factor, vectors) * _prox_scale(jnp.abs(1.0 - size * values), size)[None, :]
    return FullRank(q.loc - size * matmul(q.factor, grad), _lower(factor))


def _prox_scale(scale: Array, size: Array) -> Array:
    """The proximal step of the entropy in a standard deviation: σ -> (σ + √(σ² + 4h))/2."""
    return 0.5 * (scale + jnp.sqrt(jnp.square(scale) + 4.0 * size))


def _lower(factor: Array) -> Array:
    return FullRank(jnp.zeros(factor.shape[0], factor.dtype), factor).scale_tril
