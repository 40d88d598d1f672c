"""Rényi divergences by sums and by quadrature."""

from collections.abc import Callable

import numpy as np

from numpyro_tempered.core import ArrayLike, check_count, check_number
from numpyro_tempered.theory.bounds.renyi import check_order

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
        array = np.asarray(value, np.float64)
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
        values = np.asarray(density(nodes), np.float64)
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
