"""Gaussians under the Bures-Wasserstein metric: distance, flow, forward-backward steps (Lam22, Diao23)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint

from numpyro_tempered.core import Array, ArrayLike, check_number, matmul
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    Method,
    require_gaussian,
    whitened,
)
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of, supports

# How far above 1/L rounding may lead a step of exactly 1/L.
_ROUNDING = 1e-3


def wasserstein(q: Gaussian, p: Gaussian) -> Array:
    r"""The 2-Wasserstein distance of two Gaussians.

    .. math:: W_2^2 = \|m_q - m_p\|^2 + \mathrm{tr}\, V_q + \mathrm{tr}\, V_p
              - 2\, \mathrm{tr}\big(V_q^{1/2} V_p V_q^{1/2}\big)^{1/2}

    Args:
        q: A :class:`.MeanField` or :class:`.FullRank`.
        p: Another of the same kind.

    Returns:
        W_2, a scalar in the units of θ.

    Raises:
        TypeError: If they are of different kinds.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> p = nt.gaussian.families.MeanField(jnp.array([3.0, 0.0]), jnp.array([1.0, 5.0]))
        >>> float(nt.gaussian.descent.wasserstein(q, p))
        5.0
    """
    if (
        not supports(q, "from_root")
        or not supports(p, "from_root")
        or family_of(q) is not family_of(p)
    ):
        raise TypeError(
            f"expected two of one family, got {type(q).__name__} and {type(p).__name__}."
        )
    root, target = family_of(q).root(q), family_of(p).root(p)
    if root.ndim == 2:
        # The nearest square roots of both covariances: an orthogonal Procrustes problem, without cancellation.
        left, _, right = jnp.linalg.svd(matmul(target.T, root))
        target = matmul(target, matmul(left, right))
    return jnp.sqrt(
        jnp.sum(jnp.square(q.loc - p.loc)) + jnp.sum(jnp.square(root - target))
    )


def flow(derivatives: Callable[[Q], Derivatives], init: Q, times: ArrayLike) -> Q:
    r"""The Bures-Wasserstein gradient flow of the free energy, integrated.

    .. math:: \dot m = -g, \qquad \dot V = 2I - V H - H V

    If f is a-strongly convex, :math:`W_2^2(q_t, \hat q) \le e^{-2at}\, W_2^2(q_0, \hat q)`. It is the limit of
    small steps of :func:`forward_backward` without whitening, for teaching and tests: a fit takes hundreds to
    thousands of evaluations along it. A square root of V is integrated, S' = S^-T - H S, by the adaptive
    Dormand-Prince method of ``jax.experimental.ode``.

    Args:
        derivatives: ``q -> Derivatives`` of f, such as an :class:`Objective`.
        init: q_0, a :class:`.MeanField` or
            :class:`.FullRank`.
        times: Increasing times, shape ``(T,)``; the first is that of ``init``.

    Returns:
        The Gaussians at ``times``: ``init``'s family, with a leading axis of T.

    Raises:
        TypeError: If ``init`` is of another family.
        ValueError: If ``times`` is not a vector of at least two.

    References:
        Lam22.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> def standard_normal(q):  # f(θ) = θ² / 2
        ...     value = 0.5 * jnp.sum(q.loc**2 + q.scale**2)
        ...     return nt.gaussian.descent.Derivatives(value, q.loc, jnp.ones_like(q.loc))
        >>> start = nt.gaussian.families.MeanField(jnp.array([4.0]), jnp.array([1.0]))
        >>> path = nt.gaussian.descent.flow(standard_normal, start, jnp.array([0.0, 1.0]))
        >>> print(f"{path.loc[1, 0]:.4f}")  # 4 exp(-1)
        1.4715
    """
    q = require_gaussian(init)
    times = jnp.asarray(times, q.loc.dtype)
    if times.ndim != 1 or times.shape[0] < 2:
        raise ValueError(
            f"times must be a vector of at least two, got shape {times.shape}."
        )

    family = family_of(q)

    def velocity(point: tuple[Array, Array], _: Array) -> tuple[Array, Array]:
        loc, root = point
        at = derivatives(family.with_root(loc, root))
        if root.ndim == 1:
            return -at.grad, 1.0 / root - at.hessian * root
        inverse = jnp.linalg.solve(root.T, jnp.eye(loc.shape[0], dtype=loc.dtype))
        return -at.grad, inverse - matmul(at.hessian, root)

    tolerance = 100.0 * float(jnp.finfo(q.loc.dtype).eps)
    path = odeint(
        velocity, (q.loc, family.root(q)), times, rtol=tolerance, atol=tolerance
    )
    return jax.vmap(lambda loc, root: family.canonical(family.with_root(loc, root)))(
        *path
    )


@functools.lru_cache(maxsize=64)
def forward_backward(
    step_size: float | None = None, *, whiten: bool = True, backtrack: bool = True
) -> Method:
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
        >>> nt.gaussian.descent.forward_backward(whiten=False).name
        'forward_backward'
    """
    if step_size is not None:
        check_number(step_size, "step_size", "(0, inf)")

    def limit(q: Gaussian, derivatives: Derivatives) -> Array:
        """1/L in the coordinates of the step."""
        hessian = whitened(q, derivatives)[1] if whiten else derivatives.hessian
        largest = jnp.max(
            hessian if hessian.ndim == 1 else jnp.linalg.eigvalsh(hessian)
        )
        return jnp.where(
            largest > 0, 1.0 / jnp.where(largest > 0, largest, 1.0), jnp.inf
        )

    def max_size(q: Gaussian, derivatives: Derivatives) -> Array:
        if step_size is not None:
            return jnp.full((), step_size, q.loc.dtype)
        # A plain step has no limit where f bends nowhere upwards: it then takes the length of a whitened one.
        cap = 1.0 if whiten else jnp.max(jnp.square(family_of(q).marginal_scale(q)))
        return jnp.minimum(cap, limit(q, derivatives)).astype(q.loc.dtype)

    def is_too_long(q: Gaussian, derivatives: Derivatives) -> Array:
        if step_size is None:
            return jnp.zeros((), bool)
        return step_size > (1.0 + _ROUNDING) * limit(q, derivatives)

    step = whitened_step if whiten else plain_step
    return Method(
        step, max_size, is_too_long, backtrack, lambda d: False, "forward_backward"
    )


def plain_step(q: Q, derivatives: Derivatives, size: Array) -> Q:
    """One forward-backward step of size h = ``size``, however large."""
    family = family_of(q)
    root, loc = family.root(q), q.loc - size * derivatives.grad
    if root.ndim == 1:
        return family.with_root(
            loc, _prox_scale(jnp.abs(root * (1.0 - size * derivatives.hessian)), size)
        )
    vectors, values, _ = jnp.linalg.svd(root - size * matmul(derivatives.hessian, root))
    return family.canonical(
        family.with_root(loc, vectors * _prox_scale(values, size)[None, :])
    )


def whitened_step(q: Q, derivatives: Derivatives, size: Array) -> Q:
    """One forward-backward step of size ``size`` in coordinates in which q is standard."""
    family = family_of(q)
    root, (grad, hessian) = family.root(q), whitened(q, derivatives)
    if root.ndim == 1:
        scale = root * _prox_scale(jnp.abs(1.0 - size * hessian), size)
        return family.with_root(q.loc - size * root * grad, scale)
    values, vectors = jnp.linalg.eigh(hessian)
    factor = (
        matmul(root, vectors) * _prox_scale(jnp.abs(1.0 - size * values), size)[None, :]
    )
    return family.canonical(family.with_root(q.loc - size * matmul(root, grad), factor))


def _prox_scale(scale: Array, size: Array) -> Array:
    """The proximal step of the entropy in a standard deviation: σ -> (σ + √(σ² + 4h))/2."""
    return 0.5 * (scale + jnp.sqrt(jnp.square(scale) + 4.0 * size))
