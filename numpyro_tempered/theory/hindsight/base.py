"""A best parameter with its certificate, and what the solvers share."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    add_repr,
    check_number,
    check_numbers,
    doubles,
)
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box


@add_repr
class Hindsight(NamedTuple):
    """The best fixed parameter of a stream.

    Attributes:
        theta: θ, shape ``(d,)``.
        value: Its cumulative loss.
        lower: No parameter within ``reach`` has a cumulative loss below this.
        losses: The loss of θ in each round, shape ``(T,)``.
        reach: Bounds on the absolute values of θ, shape ``(d,)``: those of the box, or the radius of the ball;
            where there is none, at least ten times the larger of 1 and the absolute value.
    """

    theta: np.ndarray
    value: float
    lower: float
    losses: np.ndarray
    reach: np.ndarray

    @property
    def gap(self) -> float:
        """How much better another parameter could be, at most."""
        return self.value - self.lower


def minimise(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    *,
    radius: float = math.inf,
    **options: float,
) -> np.ndarray:
    """The minimiser of a function that returns value and gradient, in a box by L-BFGS-B, in a ball by SLSQP."""
    from scipy.optimize import minimize

    if math.isfinite(radius):
        # In units of the radius.
        inside = {
            "type": "ineq",
            "fun": lambda u: 1.0 - u @ u,
            "jac": lambda u: -2.0 * u,
        }

        def scaled(u: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = objective(radius * u)
            return value, radius * slope

        fine = {"maxiter": 1000, "ftol": 1e-15}
        u = minimize(
            scaled,
            start / radius,
            jac=True,
            method="SLSQP",
            constraints=[inside],
            options=fine,
        ).x
        return radius * u / max(float(np.linalg.norm(u)), 1.0)
    limits = list(zip(lower, upper, strict=True))
    start = np.clip(start, lower, upper)
    return minimize(
        objective, start, jac=True, method="L-BFGS-B", bounds=limits, options=options
    ).x


def by_gradient(
    theta: np.ndarray,
    losses: np.ndarray,
    slope: np.ndarray,
    reach: np.ndarray,
    radius: float = math.inf,
) -> Hindsight:
    """The certificate of a smooth convex loss: the least value of its tangent over the box or ball."""
    value = float(losses.sum())
    depth = (
        radius * np.linalg.norm(slope)
        if math.isfinite(radius)
        else np.abs(slope) @ reach
    )
    gap = float(slope @ theta + depth)
    return Hindsight(theta, value, value - max(gap, 0.0), losses, reach)


def as_reach(
    theta: np.ndarray, bound: np.ndarray, unit: np.ndarray | float = 1.0
) -> np.ndarray:
    """The box, with a wide bound where it has none; ``unit`` is that of θ."""
    return np.where(np.isinf(bound), 10.0 * np.maximum(unit, np.abs(theta)), bound)


def units(x: np.ndarray) -> np.ndarray:
    """Largest absolute value of each feature: the solvers see features of one size."""
    largest = np.max(np.abs(x), axis=0)
    return np.where(largest > 0, largest, 1.0)


def as_data(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Features ``(T, d)`` and outcomes ``(T,)`` in double precision.

    Raises:
        ValueError: If the shapes are others or a value is not finite.
    """
    rows, outcomes = doubles(x), doubles(y)
    if rows.ndim != 2 or rows.shape[0] == 0 or outcomes.shape != rows.shape[:1]:
        raise ValueError(
            f"expected x of shape (T, d) and y of shape (T,), got {rows.shape}, {outcomes.shape}."
        )
    for name, values in (("x", rows), ("y", outcomes)):
        check_numbers(values, name, hint="Leave out the rounds that were rejected.")
    return rows, outcomes


def as_radius(box: Box | Ball | None) -> float:
    """The largest norm of θ: infinite but in a ball."""
    return (
        float(check_number(box.loc, "box.loc", "(0, inf]"))
        if isinstance(box, Ball)
        else math.inf
    )


def as_bounds(box: Box | Ball | None, rows: np.ndarray) -> np.ndarray:
    """Bounds on |θ_j|, shape ``(d,)``."""
    bound = check_numbers(math.inf if box is None else box.loc, "box.loc", "(0, inf]")
    return np.array(np.broadcast_to(doubles(bound), rows.shape[1:]))
