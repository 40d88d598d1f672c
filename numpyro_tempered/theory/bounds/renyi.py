r"""Rényi divergences of Gaussians and of exponential families in closed form.

:math:`D_a(P, R) = \frac{1}{a-1}\log\int p^a r^{1-a}`, and KL(P, R) at order 1.

All in double precision and batched over leading axes, so that a divergence can be averaged over draws of θ.
Skew symmetry: :math:`(1-a)\,D_a(P, R) = a\,D_{1-a}(R, P)` for 0 < a < 1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    check_number,
    check_numbers,
    double_precision,
)


def renyi_normal(
    order: float, loc0: ArrayLike, scale0: ArrayLike, loc1: ArrayLike, scale1: ArrayLike
) -> np.ndarray:
    r"""D_a of P = N(loc0, scale0²) from R = N(loc1, scale1²), elementwise.

    Independent coordinates add up: of Gaussians with diagonal covariances it is the sum over coordinates.

    Args:
        order: a > 0; 1 is KL(P, R).
        loc0: Means of P; the four arrays broadcast.
        scale0: Standard deviations of P.
        loc1: Means of R.
        scale1: Standard deviations of R.

    Returns:
        The divergences in nats; infinite for a > 1 where (1 - a) scale0² + a scale1² is not positive.

    Raises:
        ValueError: If ``order`` is not positive and finite, a scale not positive, or a mean not finite.

    References:
        vEH, section I (normal distributions).

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.renyi_normal(0.5, [0.0, 2.0], 1.0, 0.0, 1.0).tolist()
        [0.0, 1.0]
    """
    order = check_order(order)
    m0, m1 = _numbers("loc0", loc0), _numbers("loc1", loc1)
    s0, s1 = (
        _numbers(name, s, "(0, inf)")
        for name, s in (("scale0", scale0), ("scale1", scale1))
    )
    # The variances' ratio less 1, without the cancellation of two close squares.
    excess = (s0 - s1) / s1 * ((s0 + s1) / s1)
    return _gaussian(
        order, ((m0 - m1) / s1)[..., None], excess[..., None], 2.0 * np.log(s0 / s1)
    )


def renyi_gaussian(
    order: float, loc0: ArrayLike, cov0: ArrayLike, loc1: ArrayLike, cov1: ArrayLike
) -> np.ndarray:
    r"""D_a of P = N(loc0, cov0) from R = N(loc1, cov1).

    .. math:: D_a = \tfrac a2\, d^\top S_a^{-1} d
              - \frac{\log|S_a| - (1-a)\log|S_0| - a\log|S_1|}{2(a-1)}, \quad S_a = (1-a) S_0 + a S_1

    with d = loc0 - loc1. It is computed from the eigenvalues of S_0 relative to S_1, in which the limit a → 1
    is exact.

    Args:
        order: a > 0; 1 is KL(P, R).
        loc0: Means of P, ``(..., d)``; leading axes broadcast.
        cov0: Covariances of P, ``(..., d, d)``.
        loc1: Means of R, ``(..., d)``.
        cov1: Covariances of R, ``(..., d, d)``.

    Returns:
        The divergences in nats, shape ``(...)``; infinite for a > 1 where S_a is not positive definite.

    Raises:
        ValueError: If ``order`` is not positive and finite, shapes disagree, or a covariance is not symmetric
            and positive definite.

    References:
        M. Gil, F. Alajaji, T. Linder, *Rényi divergence measures for commonly used univariate
        continuous distributions*, Information Sciences 2013.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> print(f"{nt.bounds.renyi_gaussian(0.5, [2.0, 0.0], np.eye(2), [0.0, 0.0], np.eye(2)):.3f}")
        1.000
    """
    order = check_order(order)
    m0, m1 = _numbers("loc0", loc0), _numbers("loc1", loc1)
    (s0, root0), (s1, root1) = _covariance("cov0", cov0), _covariance("cov1", cov1)
    d = s0.shape[-1]
    if (
        m0.ndim < 1
        or m1.ndim < 1
        or not m0.shape[-1] == m1.shape[-1] == s1.shape[-1] == d
    ):
        raise ValueError(
            f"the Gaussians have means of shapes {m0.shape} and {m1.shape} and covariances of shapes {s0.shape} "
            f"and {s1.shape}: expected (..., d) and (..., d, d) with one d."
        )
    half = np.linalg.solve(root1, s0)
    relative = np.linalg.solve(root1, np.swapaxes(half, -1, -2))
    values, vectors = np.linalg.eigh(0.5 * (relative + np.swapaxes(relative, -1, -2)))
    z = np.linalg.solve(root1, (m0 - m1)[..., None])
    w = (np.swapaxes(vectors, -1, -2) @ z)[..., 0]
    # Small eigenvalues are known to the error of the largest alone; their product the determinants know better.
    return _gaussian(
        order, w, values - 1.0, 2.0 * (_log_diagonal(root0) - _log_diagonal(root1))
    )


def renyi_exponential_family(
    order: float,
    log_partition: Callable[[Array], Array],
    eta0: ArrayLike,
    eta1: ArrayLike,
) -> np.ndarray:
    r"""D_a of members of one exponential family, :math:`p_\eta(x) = h(x)\,e^{\eta^\top T(x) - A(\eta)}`.

    .. math:: D_a = \frac{A(a\eta_0 + (1-a)\eta_1) - a A(\eta_0) - (1-a) A(\eta_1)}{a-1}

    and at order 1 :math:`A(\eta_1) - A(\eta_0) - (\eta_1 - \eta_0)^\top\nabla A(\eta_0)`, by ``jax.grad``. In
    double precision; the numerator cancels near order 1, where about :math:`10^{-16}|A|/|a-1|` is lost.

    Args:
        order: a > 0; 1 is KL(P, R).
        log_partition: A, from natural parameters ``(d,)`` to a scalar, in functions that jax can trace. Outside
            the natural parameters' domain, which matters for a > 1 alone, it must return inf or NaN.
        eta0: Natural parameters of P, ``(..., d)``.
        eta1: Natural parameters of R, ``(..., d)``; leading axes broadcast.

    Returns:
        The divergences in nats, shape ``(...)``; infinite where the tilted parameters leave the domain.

    Raises:
        ValueError: If ``order`` is not positive and finite, parameters are not finite or of different length, or
            A is not finite at one of them.

    References:
        vEH; F. Liese, I. Vajda, *Convex statistical distances*, 1987.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> def poisson(eta):  # eta = log rate
        ...     return jnp.exp(eta[0])
        >>> print(f"{nt.bounds.renyi_exponential_family(0.5, poisson, [0.0], jnp.log(jnp.array([4.0]))):.4f}")
        1.0000
    """
    order = check_order(order)
    p, r = (
        np.asarray(check_numbers(eta, name), np.float64)
        for name, eta in (("eta0", eta0), ("eta1", eta1))
    )
    if p.ndim < 1 or r.ndim < 1 or p.shape[-1] != r.shape[-1]:
        raise ValueError(
            f"natural parameters must have shapes (..., d) with one d, got {p.shape} and {r.shape}."
        )
    p, r = np.broadcast_arrays(p, r)
    value = jnp.vectorize(log_partition, signature="(d)->()")
    with double_precision():
        at_p, at_r = (np.asarray(value(jnp.asarray(eta)), np.float64) for eta in (p, r))
        if not (np.isfinite(at_p).all() and np.isfinite(at_r).all()):
            raise ValueError(
                "log_partition is not finite at eta0 or eta1: they must lie inside of its domain."
            )
        if order == 1.0:
            slope = jnp.vectorize(jax.grad(log_partition), signature="(d)->(d)")(
                jnp.asarray(p)
            )
            return np.maximum(
                at_r - at_p - ((r - p) * np.asarray(slope, np.float64)).sum(-1), 0.0
            )
        between = np.asarray(
            value(jnp.asarray(order * p + (1.0 - order) * r)), np.float64
        )
    gap = (between - order * at_p - (1.0 - order) * at_r) / (order - 1.0)
    return np.where(np.isfinite(between), np.maximum(gap, 0.0), np.inf)


def check_order(order: float) -> float:
    """The order of a divergence.

    Raises:
        ValueError: If it is not positive and finite.
    """
    return float(check_number(order, "order", "(0, inf)"))


def _gaussian(
    order: float, w: np.ndarray, excess: np.ndarray, log_ratio: np.ndarray
) -> np.ndarray:
    """D_a in coordinates where R is standard and P has mean w, variances 1 + excess of log product log_ratio."""
    tilt = 1.0 - order
    near = np.abs(excess) < 0.5
    close = np.log1p(np.where(near, excess, 0.0)).sum(-1)
    log_ratio = np.where(np.all(near, axis=-1), close, log_ratio)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = 1.0 + tilt * excess if order > 1 else order + tilt * (1.0 + excess)
        small = np.abs(tilt * excess) < 0.5
        logs = np.where(
            small, np.log1p(np.where(small, tilt * excess, 0.0)), np.log(variance)
        )
        spread = (excess if tilt == 0.0 else logs / tilt).sum(-1) - log_ratio
        value = 0.5 * (order * (w**2 / variance).sum(-1) + spread)
    value = np.where(np.all(variance > 0, axis=-1), np.maximum(value, 0.0), np.inf)
    if np.any(np.isnan(value)):
        raise ValueError(
            "the two Gaussians are too far apart for double precision: rescale the variable."
        )
    return value


def _log_diagonal(root: np.ndarray) -> np.ndarray:
    return np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(-1)


def _numbers(name: str, value: ArrayLike, interval: str = "(-inf, inf)") -> np.ndarray:
    array = np.asarray(check_numbers(value, name, interval), np.float64)
    if array.size == 0:
        raise ValueError(f"{name} must be finite and not empty, got {value!r}.")
    return array


def _covariance(name: str, value: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The covariance and its Cholesky factor."""
    cov = _numbers(name, value)
    if cov.ndim < 2 or cov.shape[-1] != cov.shape[-2]:
        raise ValueError(
            f"{name} must have shape (..., d, d), got {cov.shape}; renyi_normal takes scales."
        )
    size = np.max(np.abs(cov), axis=(-2, -1), keepdims=True)
    # float32 covariances are symmetric to their own rounding.
    if np.any(np.abs(cov - np.swapaxes(cov, -1, -2)) > 1e-6 * size):
        raise ValueError(f"{name} is not symmetric.")
    try:
        return cov, np.linalg.cholesky(cov)
    except np.linalg.LinAlgError:
        raise ValueError(
            f"{name} is not positive definite: a singular Gaussian is infinitely far from every other."
        ) from None
