r"""What a bound on one Rényi divergence says of other orders and of distances (vEH).

All are concave in the divergence, so that they hold for averages too: of a bound on :math:`\int D_a\,d\rho` they
make one on the average distance.
"""

import numpy as np

from numpyro_tempered.core import ArrayLike, check_numbers, doubles
from numpyro_tempered.theory.bounds.renyi import check_order


def change_order(divergence: ArrayLike, order: float, to: float) -> np.ndarray:
    r"""Upper bound on D_b(P, R) given D_a(P, R).

    D_b <= D_a for b <= a, and :math:`D_b \le \frac{b}{a}\frac{1-a}{1-b}\,D_a` for a < b < 1. Nothing follows for
    b >= 1 > a, nor for b > a >= 1: infinite. With skew symmetry,
    :math:`D_{1-a}(R, P) = \frac{1-a}{a} D_a(P, R)`, it bounds divergences the other way round.

    Args:
        divergence: D_a or an upper bound on it, in nats.
        order: a.
        to: b.

    Returns:
        The bounds in nats, of ``divergence``'s shape.

    Raises:
        ValueError: If an order is not positive and finite, or a divergence negative or NaN.

    References:
        vEH, Theorem 3 (increasing in the order), Theorem 16 (orders in (0, 1)), Proposition 2 (skew symmetry).

    Example:
        >>> import numpyro_tempered as nt
        >>> float(nt.bounds.change_order(0.25, 0.2, to=0.5)), float(nt.bounds.change_order(0.25, 0.75, to=0.5))
        (1.0, 0.25)
    """
    a, b = check_order(order), check_order(to)
    value = doubles(check_numbers(divergence, "divergence", "[0, inf]"))
    if b <= a:
        return value
    if b < 1.0:
        return value * (b * (1.0 - a)) / (a * (1.0 - b))
    return np.where(value == 0.0, 0.0, np.inf)


def hellinger_bound(divergence: ArrayLike, order: float) -> np.ndarray:
    r"""Upper bound on the squared Hellinger distance :math:`H^2 = \int(\sqrt p - \sqrt r)^2` given D_a.

    :math:`H^2 = 2(1 - e^{-D_{1/2}/2}) \le D_{1/2}`, and D_{1/2} is bounded by :func:`change_order`: so H² <= D_a
    for a >= 1/2, and :math:`H^2 \le \frac{1-a}{a} D_a` below.

    Args:
        divergence: D_a or an upper bound on it, in nats.
        order: a.

    Returns:
        The bounds on H², in [0, 2], of ``divergence``'s shape.

    Raises:
        ValueError: As :func:`change_order`.

    References:
        vEH, section I, Theorems 3 and 16.

    Example:
        >>> import numpyro_tempered as nt
        >>> print(f"{nt.bounds.hellinger_bound(0.02, order=0.5):.4f}")
        0.0199
    """
    return -2.0 * np.expm1(-0.5 * change_order(divergence, order, 0.5))


def total_variation_bound(divergence: ArrayLike, order: float) -> np.ndarray:
    r"""Upper bound on the total variation :math:`\sup_A|P(A) - R(A)| = \frac12\int|p - r|` given D_a.

    :math:`\sqrt{D_a/(2a)}`, which is Pinsker's inequality :math:`\frac a2\big(\int|p - r|\big)^2 \le D_a` for
    a <= 1; for larger a it is applied to D_1 <= D_a.

    Args:
        divergence: D_a or an upper bound on it, in nats.
        order: a.

    Returns:
        The bounds, in [0, 1], of ``divergence``'s shape.

    Raises:
        ValueError: As :func:`change_order`.

    References:
        vEH, Theorem 31 (Pinsker's inequality).

    Example:
        >>> import numpyro_tempered as nt
        >>> print(f"{nt.bounds.total_variation_bound(0.02, order=0.5):.4f}")
        0.1414
    """
    a = min(check_order(order), 1.0)
    return np.minimum(np.sqrt(change_order(divergence, order, a) / (2.0 * a)), 1.0)
