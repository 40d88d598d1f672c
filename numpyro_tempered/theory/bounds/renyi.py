r"""Rényi divergences of Gaussians and of exponential families in closed form, and others by sums and quadrature.

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
    check_count,
    check_number,
    check_numbers,
    double_precision,
    doubles,
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
        doubles(check_numbers(eta, name))
        for name, eta in (("eta0", eta0), ("eta1", eta1))
    )
    if p.ndim < 1 or r.ndim < 1 or p.shape[-1] != r.shape[-1]:
        raise ValueError(
            f"natural parameters must have shapes (..., d) with one d, got {p.shape} and {r.shape}."
        )
    p, r = np.broadcast_arrays(p, r)
    value = jnp.vectorize(log_partition, signature="(d)->()")
    with double_precision():
        at_p, at_r = (doubles(value(jnp.asarray(eta))) for eta in (p, r))
        if not (np.isfinite(at_p).all() and np.isfinite(at_r).all()):
            raise ValueError(
                "log_partition is not finite at eta0 or eta1: they must lie inside of its domain."
            )
        if order == 1.0:
            slope = jnp.vectorize(jax.grad(log_partition), signature="(d)->(d)")(
                jnp.asarray(p)
            )
            return np.maximum(at_r - at_p - ((r - p) * doubles(slope)).sum(-1), 0.0)
        between = doubles(value(jnp.asarray(order * p + (1.0 - order) * r)))
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
    array = doubles(check_numbers(value, name, interval))
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


# Gauss-Legendre nodes of a panel: enough for densities that are smooth on it.
NODES = 16


def renyi_discrete(order: float, p: ArrayLike, r: ArrayLike) -> np.ndarray:
    r"""D_a of distributions on a finite set, by the sum.

    Args:
        order: a > 0; 1 is KL(P, R).
        p: Probabilities of P, ``(..., k)``.
        r: Probabilities of R on the same points, ``(..., k)``; leading axes broadcast.

    Returns:
        The divergences in nats, shape ``(...)``; infinite where P and R have no common point, and for a >= 1
        where R excludes a point of P.

    Raises:
        ValueError: If ``order`` is not positive and finite, or probabilities are negative or do not sum to 1.

    References:
        vEH, section I.

    Example:
        >>> import numpyro_tempered as nt
        >>> print(f"{nt.bounds.renyi_discrete(0.5, [0.5, 0.5], [1.0, 0.0]):.4f}")  # log 2
        0.6931
    """
    order = check_order(order)
    arrays = []
    for name, value in (("p", p), ("r", r)):
        array = doubles(value)
        if (
            array.ndim < 1
            or not np.all(array >= 0)
            or not np.allclose(array.sum(-1), 1.0, atol=1e-6, rtol=0)
        ):
            raise ValueError(
                f"{name} must be probabilities that sum to 1 over the last axis, got {value!r}."
            )
        arrays.append(array)
    with np.errstate(divide="ignore"):
        return renyi_of_logs(
            order, *np.broadcast_arrays(*(np.log(array) for array in arrays))
        )


def renyi_quadrature(
    order: float,
    log_p: Callable[[np.ndarray], ArrayLike],
    log_r: Callable[[np.ndarray], ArrayLike],
    lower: float,
    upper: float,
    *,
    num_panels: int = 200,
    tolerance: float = 1e-6,
) -> np.ndarray:
    r"""D_a of distributions of one real variable by quadrature: for mixtures, and where no closed form is.

    Sixteen Gauss-Legendre nodes on each of ``num_panels`` equal panels of [lower, upper].

    Args:
        order: a > 0; 1 is KL(P, R).
        log_p: Log density of P with every constant, from nodes ``(k,)`` to ``(..., k)``: one distribution for
            each draw of θ, for instance.
        log_r: Log density of R, likewise; leading axes broadcast.
        lower: Lower end of an interval that holds the mass of both.
        upper: Its upper end.
        num_panels: Panels; more for densities with narrow peaks or kinks.
        tolerance: How far from 1 the mass on the interval may be. Both densities are normalised.

    Returns:
        The divergences in nats, shape ``(...)``. For a > 1 the tails matter more than their mass: widen the
        interval until the value stays.

    Raises:
        ValueError: If ``order`` is not positive and finite, the interval is empty or infinite, a log density is
            NaN or of a wrong shape, or the mass on the interval is not 1: a density without its constants, too
            short an interval, or too few panels.

    References:
        vEH, section II.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> def normal(loc):
        ...     return lambda x: -0.5 * (x - loc) ** 2 - 0.5 * np.log(2 * np.pi)
        >>> print(f"{nt.bounds.renyi_quadrature(0.5, normal(0.0), normal(2.0), -10.0, 12.0):.6f}")
        1.000000
    """
    order = check_order(order)
    hint = "Take an interval that holds all but a negligible part of both masses."
    check_number(lower, "lower", hint=hint)
    check_number(upper, "upper", f"({lower}, inf)", hint=hint)
    check_count(num_panels, "num_panels")
    node, weight = np.polynomial.legendre.leggauss(NODES)
    edges = np.linspace(lower, upper, num_panels + 1)
    half = 0.5 * np.diff(edges)[:, None]
    nodes = (edges[:-1, None] + half * (1.0 + node)).ravel()
    log_weights = np.log(half * weight).ravel()
    logs = []
    for name, density in (("log_p", log_p), ("log_r", log_r)):
        values = doubles(density(nodes))
        if values.ndim < 1 or values.shape[-1] != nodes.size:
            raise ValueError(
                f"{name} returned shape {values.shape} for {nodes.size} nodes: the last axis must be the nodes."
            )
        if np.any(np.isnan(values)) or np.any(values == np.inf):
            raise ValueError(
                f"{name} is NaN or infinite at a node; -inf is the log of a density of 0."
            )
        mass = np.exp(values + log_weights).sum(-1)
        if not np.all(np.abs(mass - 1.0) <= tolerance):
            worst = mass.ravel()[np.argmax(np.abs(mass - 1.0))]
            raise ValueError(
                f"exp({name}) has mass {worst:.6g} on [{lower:g}, {upper:g}], not 1: keep every constant of the "
                "density, widen the interval, or raise num_panels."
            )
        logs.append(values + log_weights)
    # The weights cancel in the ratio, and belong to the measure once: p^a r^(1-a) w = (pw)^a (rw)^(1-a).
    return renyi_of_logs(order, *np.broadcast_arrays(*logs))


def renyi_of_logs(order: float, log_p: np.ndarray, log_r: np.ndarray) -> np.ndarray:
    """D_a of the masses exp(log_p) and exp(log_r) along the last axis, each normalised first."""
    log_p, log_r = log_p - _log_sum(log_p), log_r - _log_sum(log_r)
    p, r, inside = np.exp(log_p), np.exp(log_r), log_p > -np.inf
    tilt = 1.0 - order
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # x = log(r/p); where P has no mass the tilted distribution has none at any order.
        x = np.where(inside, log_r - log_p, 0.0)
        close = np.abs(x) < 1.0
        # Masses sum to 1, so r - p may be added to each term: all are then of one sign, and of second order in x,
        # and nothing cancels between close distributions.
        if order == 1.0:
            terms = np.where(close, p * (np.expm1(x) - x), r - p - p * x)
            # Also where p itself has underflowed.
            terms = np.where(x == -np.inf, np.inf, terms)
            return np.where(inside, terms, r).sum(-1)
        tilted = np.where(inside, log_p + tilt * x, -np.inf)
        terms = np.where(
            close,
            p * (tilt * np.expm1(x) - np.expm1(tilt * x)),
            tilt * (r - p) - np.exp(tilted) + p,
        )
        difference = -np.where(inside, terms, tilt * r).sum(-1)
        near = np.log1p(np.clip(difference, -0.5, 0.5))
        logs = np.where(np.abs(difference) < 0.5, near, _log_sum(tilted)[..., 0])
        return np.maximum(logs / (order - 1.0), 0.0)


def _log_sum(logs: np.ndarray) -> np.ndarray:
    top = np.max(logs, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return top + np.log(np.exp(logs - top).sum(-1, keepdims=True))
