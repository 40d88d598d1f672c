"""Losses with kinks, by linear programming."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import ArrayLike, check_number
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box
from numpyro_tempered.theory.hindsight.base import (
    Hindsight,
    as_bounds,
    as_data,
    as_radius,
    as_reach,
    minimise,
    units,
)

# Up to here the whole linear program takes a second.
MIN_SIZE = 5000


class PiecewiseLoss(NamedTuple):
    r"""The sum of :math:`up_t(c_t - x_t^\top\theta)_+ + down_t(x_t^\top\theta - c_t)_+` over rounds."""

    x: np.ndarray
    kinks: np.ndarray
    up: np.ndarray
    down: np.ndarray


def hinge(
    x: ArrayLike, y: ArrayLike, box: Box | Ball | None = None, tolerance: float = 1e-6
) -> Hindsight:
    r"""The θ with the least :math:`\sum_t(1 - y_tx_t^\top\theta)_+`, by linear programming.

    Args:
        x: Features, shape ``(T, d)``.
        y: Labels in {-1, 1}, shape ``(T,)``.
        box: Optional bounds, a box or a ball; only ``box.loc`` matters.
        tolerance: Gap at which to stop, relative to the loss. Streams of up to 5000 rounds are solved exactly.

    Returns:
        A :class:`Hindsight`.

    Raises:
        ValueError: If shapes or labels do not fit.

    Example:
        >>> import numpyro_tempered as nt
        >>> best = nt.bounds.hindsight.hinge([[1.0], [1.0], [1.0]], [1.0, 1.0, -1.0])
        >>> float(best.theta[0]), best.value
        (1.0, 2.0)
    """
    rows, labels = as_data(x, y)
    if not np.all(np.abs(labels) == 1.0):
        raise ValueError("hinge needs labels y in {-1, 1}.")
    up, down = (labels > 0).astype(float), (labels < 0).astype(float)
    return _solve(PiecewiseLoss(rows, labels, up, down), box, tolerance)


def absolute(
    x: ArrayLike, y: ArrayLike, box: Box | Ball | None = None, tolerance: float = 1e-6
) -> Hindsight:
    r"""The θ with the least :math:`\sum_t|y_t - x_t^\top\theta|`, by linear programming.

    Args:
        x: Features, shape ``(T, d)``.
        y: Outcomes, shape ``(T,)``.
        box: Optional bounds, a box or a ball; only ``box.loc`` matters.
        tolerance: Gap at which to stop, relative to the loss.

    Returns:
        A :class:`Hindsight`.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> import numpyro_tempered as nt
        >>> best = nt.bounds.hindsight.absolute([[1.0], [1.0], [1.0]], [0.0, 1.0, 5.0])
        >>> float(best.theta[0]), best.value
        (1.0, 5.0)
    """
    rows, outcomes = as_data(x, y)
    one = np.ones_like(outcomes)
    return _solve(PiecewiseLoss(rows, outcomes, one, one), box, tolerance)


def pinball(
    x: ArrayLike,
    y: ArrayLike,
    level: float,
    box: Box | Ball | None = None,
    tolerance: float = 1e-6,
) -> Hindsight:
    r"""The θ with the least pinball loss :math:`\sum_t\rho_\tau(y_t - x_t^\top\theta)`, by linear programming.

    ρ_τ(r) = τ r for r > 0 and (τ - 1) r below; τ = 1/2 is half the absolute loss.

    Args:
        x: Features, shape ``(T, d)``.
        y: Outcomes, shape ``(T,)``.
        level: τ, in (0, 1).
        box: Optional bounds, a box or a ball; only ``box.loc`` matters.
        tolerance: Gap at which to stop, relative to the loss.

    Returns:
        A :class:`Hindsight`.

    Raises:
        ValueError: If the shapes do not fit or the level is not in (0, 1).

    Example:
        >>> import numpyro_tempered as nt
        >>> best = nt.bounds.hindsight.pinball([[1.0]] * 3, [0.0, 1.0, 5.0], level=0.9)
        >>> print(f"{best.theta[0]:.1f} {best.value:.1f}")
        5.0 0.9
    """
    check_number(level, "level", "(0, 1)")
    rows, outcomes = as_data(x, y)
    up = np.full_like(outcomes, level)
    return _solve(PiecewiseLoss(rows, outcomes, up, 1.0 - up), box, tolerance)


def _solve(loss: PiecewiseLoss, box: Box | Ball | None, tolerance: float) -> Hindsight:
    """The minimum of the loss over a box or a ball.

    In a ball the linear program for the box around it decides where its θ lies inside. Elsewhere the minimiser is
    that of a smoothed loss, with slopes for the lower bound; look at the ``gap``.
    """
    bound, radius = as_bounds(box, loss.x), as_radius(box)
    best = _solve_in_box(loss, bound, tolerance)
    if np.linalg.norm(best.theta) <= radius:
        return best
    theta, slopes = _smoothed(loss, bound, radius)
    residual = loss.x @ theta - loss.kinks
    losses = np.where(residual < 0, -loss.up, loss.down) * residual
    value = float(losses.sum())
    lower = max(
        best.lower,
        float(-slopes @ loss.kinks - radius * np.linalg.norm(slopes @ loss.x)),
    )
    return Hindsight(theta, value, min(lower, value), losses, bound)


def _solve_in_box(
    loss: PiecewiseLoss, bound: np.ndarray, tolerance: float
) -> Hindsight:
    """The minimum of the loss over a box.

    The dual linear program has one bounded variable for each round, its slope, and d equations. Of a long stream
    only the rounds near their kink enter it. The others count with the line on their side, which lies below their
    loss, so that the program bounds the minimum from below. Those that cross to the other side then enter, until
    the gap closes (S. Portnoy, R. Koenker, *The Gaussian hare and the Laplacian tortoise*, Statistical Science
    1997).
    """
    unit = units(loss.x)
    loss, bound = loss._replace(x=loss.x / unit), bound * unit
    x, kinks, up, down = loss
    n, d = x.shape
    size = max(MIN_SIZE, math.ceil(n ** (2 / 3) * math.sqrt(d)))
    theta = np.zeros(d)
    if n > size:
        theta, _ = _smoothed(loss, bound)
    elif np.any(np.isinf(bound)):
        theta = np.linalg.lstsq(x, kinks, rcond=None)[0]
    reach = as_reach(theta, bound, unit)
    residual = x @ theta - kinks
    inside = np.ones(n, bool)
    if n > size:
        # A round leaves its side as θ moves by its leverage, not by its residual alone.
        inside[:] = False
        inside[np.argpartition(np.abs(residual) / _leverage(x), size)[:size]] = True
    value = previous = np.inf
    lower = -np.inf
    for _ in range(50):
        slopes = np.where(residual < 0, -up, down)
        at, slopes[inside] = _dual_program(loss, inside, slopes, reach)
        proposal = np.clip(at, -reach, reach)
        next_residual = x @ proposal - kinks
        losses = np.where(next_residual < 0, -up, down) * next_residual
        if losses.sum() < value:
            theta, value, best = proposal, float(losses.sum()), losses
        lower = max(lower, float(-slopes @ kinks - reach @ np.abs(slopes @ x)))
        crossings = ~inside & ((next_residual < 0) != (residual < 0))
        touches = np.isinf(bound) & (np.abs(theta) > 0.99 * reach)
        if value - lower <= tolerance * max(abs(value), 1e-300) or not np.any(
            crossings
        ):
            # A minimiser at the end of the reach may lie farther out, or the direction matters to no round.
            if not np.any(touches) or value >= previous - tolerance * abs(previous):
                break
            previous, reach, lower = (
                value,
                np.where(touches, 100.0 * reach, reach),
                -np.inf,
            )
        residual = np.where(inside | crossings, next_residual, residual)
        inside |= crossings
    return Hindsight(theta / unit, value, min(lower, value), best, reach / unit)


def _dual_program(
    loss: PiecewiseLoss, inside: np.ndarray, slopes: np.ndarray, reach: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """θ and the slopes of the rounds inside, for constant slopes of the others.

    Minimises s·c + reach·|g| over the slopes s inside, with g the total gradient; θ is the multiplier of the
    equation that defines g.
    """
    import scipy.sparse as sparse
    from scipy.optimize import linprog

    x, kinks, up, down = loss
    d = x.shape[1]
    limits = np.column_stack([-up[inside], down[inside]])
    result = linprog(
        np.concatenate([kinks[inside], reach, reach]),
        A_eq=sparse.hstack(
            [sparse.csc_matrix(x[inside].T), -sparse.eye(d), sparse.eye(d)],
            format="csc",
        ),
        b_eq=-(slopes[~inside] @ x[~inside]),
        bounds=np.concatenate([limits, np.tile([0.0, np.inf], (2 * d, 1))]),
        method="highs",
    )
    if result.x is None:
        raise RuntimeError(f"the linear program was not solved: {result.message}")
    return result.eqlin.marginals, np.clip(
        result.x[: len(limits)], limits[:, 0], limits[:, 1]
    )


def _smoothed(
    loss: PiecewiseLoss, bound: np.ndarray, radius: float = math.inf
) -> tuple[np.ndarray, np.ndarray]:
    """A minimiser of the loss with rounded kinks, ever less round, and its slopes there."""
    x, kinks, up, down = loss
    theta = np.zeros(x.shape[1])
    shares = (1.0, 0.3, 0.1, 0.03, 0.01)
    width = 0.0

    def smooth(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        residual = x @ theta - kinks
        size, side = np.abs(residual), np.where(residual < 0, up, down)
        value = np.where(
            size < width, 0.5 * np.square(residual) / width, size - 0.5 * width
        )
        return side * value, side * np.clip(residual / width, -1.0, 1.0)

    def mean(theta: np.ndarray) -> tuple[float, np.ndarray]:
        values, slopes = smooth(theta)
        return float(np.mean(values)), slopes @ x / len(kinks)

    for share in shares if math.isinf(radius) else (*shares, 1e-3, 1e-4):
        width = share * max(float(np.mean(np.abs(x @ theta - kinks))), 1e-12)
        theta = minimise(
            mean, theta, -bound, bound, radius=radius, maxiter=200, maxcor=30
        )
    return theta, smooth(theta)[1]


def _leverage(x: np.ndarray) -> np.ndarray:
    """Lengths of the rows in the metric of their own second moments, positive."""
    values, vectors = np.linalg.eigh(x.T @ x)
    span = values > 1e-10 * values[-1]
    return (
        np.linalg.norm(x @ (vectors[:, span] / np.sqrt(values[span])), axis=1) + 1e-300
    )
