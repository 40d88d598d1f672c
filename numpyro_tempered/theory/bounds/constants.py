r"""Constants of data and box that the regret theorems need (Chérief-Abdellatif et al. 2019, "CA19").

- L, a Lipschitz constant of the expected losses in μ = (m, C), in the Euclidean norm: :func:`lipschitz` and
  :func:`lipschitz_squared`. A loss that is L-Lipschitz in θ has an expectation that is L-Lipschitz in μ, because
  E‖Δm + ΔC z‖ ≤ (‖Δm‖² + ‖ΔC‖²)^½ for z ~ N(0, I): the 2L of the paper is not needed.
- D, the size of the box: :func:`diameter`.
- γ, the strong convexity of KL(q_μ, prior) in μ: :func:`strong_convexity`.

They hold for losses that are convex in θ.
"""

import math

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    check_number,
    check_numbers,
    check_positive,
    doubles,
)
from numpyro_tempered.gaussian.families.base import Gaussian, able, family_of, supports
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.base import Box
from numpyro_tempered.theory.hindsight.base import as_data

NO_SLOPE = "The features must be finite, and not all 0."


def lipschitz(x: ArrayLike, slope: float = 1.0) -> float:
    r"""The constant L of losses :math:`\ell(x^\top\theta, y)` whose slope in the predictor is bounded.

    :math:`L = \texttt{slope} \cdot \max_t \lVert x_t\rVert`. The slope is 1 for the hinge with labels ±1, the
    logistic, the absolute and the pinball loss (max(τ, 1 - τ) serves there). The squared loss has none: see
    :func:`lipschitz_squared`.

    Args:
        x: Features, shape ``(d,)`` or ``(T, d)``, one row for each round; for rounds that are batches of n rows
            whose losses are summed, multiply by n.
        slope: Largest absolute slope of the loss in the predictor.

    Returns:
        L, positive.

    Raises:
        ValueError: If the features are not finite or all 0, or of another shape, or the slope is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.lipschitz([[3.0, 4.0], [1.0, 0.0]])
        5.0
    """
    check_positive(slope=slope)
    rows = np.atleast_2d(doubles(x))
    if rows.ndim > 2:
        raise ValueError(f"x must have shape (d,) or (T, d), got {rows.shape}.")
    constant = slope * math.sqrt(np.max(np.sum(np.square(rows), axis=-1)))
    return float(check_number(constant, "L", "(0, inf)", hint=NO_SLOPE))


def lipschitz_squared(x: ArrayLike, y: ArrayLike, box: Box | Ball) -> float:
    r"""The constant L of expected squared losses :math:`E_q(y - x^\top\theta)^2` over a box.

    The gradients are -2(y - m·x) x in the means and 2σ_j x_j² in the scales, so that with bounds M on the means
    and S on the scales L² is the largest of :math:`4(|y| + \sum_j M_j|x_j|)^2\lVert x\rVert^2 +
    4\sum_j S_j^2x_j^4`; in a ball the sums are :math:`M\lVert x\rVert` and :math:`S^2\max_jx_j^4`.

    Args:
        x: Features, shape ``(T, d)``.
        y: Outcomes, shape ``(T,)``.
        box: Finite bounds.

    Returns:
        L, positive.

    Raises:
        ValueError: If a bound or a number is not finite, or features or outcomes are of another shape.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.lipschitz_squared([[1.0]], [2.0], nt.online.Box(loc=1.5, scale=2.0))
        8.06225774829855
    """
    rows, y = as_data(x, y)
    loc, scale = _finite_box(box, rows.shape[-1])
    lengths = np.sum(np.square(rows), axis=-1)
    if isinstance(box, Ball):
        reach, in_scale = (
            loc[0] * np.sqrt(lengths),
            np.square(scale[0]) * np.max(rows**4, axis=-1),
        )
    else:
        reach, in_scale = (
            np.abs(rows) @ loc,
            np.sum(np.square(scale * np.square(rows)), axis=-1),
        )
    in_loc = np.square(np.abs(y) + reach) * lengths
    constant = 2.0 * math.sqrt(np.max(in_loc + in_scale))
    return float(check_number(constant, "L", "(0, inf)", hint=NO_SLOPE))


def diameter(box: Box | Ball, d: int, *, point: bool = False) -> float:
    r"""The size D of a box or ball: :math:`D^2 = \sup\lVert m - m'\rVert^2 + 2\sup\lVert\sigma\rVert^2`.

    The factor 2 is what SVB's recursion in σ proves, whose step is half of that in m (CA19, Theorem 3; the D
    printed in section 4 is D²). In a ball of radii M and S it is :math:`4M^2 + 2S^2` in every dimension.

    Args:
        box: Finite bounds; of a :class:`~numpyro_tempered.online.Box` each a scalar or ``(d,)``.
        d: Number of coordinates.
        point: Whether the rule moves a point (OGA), for which the scales do not count.

    Returns:
        D, positive.

    Raises:
        ValueError: If a bound that counts is not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.diameter(nt.online.Box(loc=1.0, scale=2.0), d=4)
        6.928203230275509
    """
    loc, scale = _finite_box(box._replace(scale=1.0) if point else box, d)
    # In a ball the radii bound the norms themselves.
    size = np.max if isinstance(box, Ball) else np.sum
    return math.sqrt(
        4.0 * size(np.square(loc)) + (0.0 if point else 2.0 * size(np.square(scale)))
    )


def strong_convexity(prior: Gaussian) -> float:
    r"""The constant γ of KL(q_μ, prior) in μ = (m, σ), or (m, C) for a full covariance C'C.

    One over the largest variance of the prior: the Hessian of KL is that of ‖μ‖²/2 in the prior's metric plus
    one of -log det, which is positive (CA19, section 4).

    Args:
        prior: A ``MeanField`` or ``FullRank``.

    Returns:
        γ, positive.

    Raises:
        TypeError: If the family is another.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> nt.bounds.strong_convexity(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.array([0.5, 2.0])))
        0.25
    """
    if not supports(prior, "from_root"):
        raise TypeError(
            f"strong_convexity is known for {able('from_root')} priors, got {type(prior).__name__}."
        )
    root = doubles(family_of(prior).root(prior))
    return 1.0 / float(
        np.max(np.square(root)) if root.ndim == 1 else np.linalg.norm(root, 2) ** 2
    )


def _finite_box(box: Box | Ball, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Both bounds as ``(d,)`` arrays."""
    hint = "The theorem needs a bounded set: run the rule in a box with finite bounds."
    for name, bound in box._asdict().items():
        check_numbers(bound, f"box.{name}", "(0, inf)", hint=hint)
    loc, scale = (np.broadcast_to(doubles(bound), (d,)) for bound in box)
    return loc, scale
