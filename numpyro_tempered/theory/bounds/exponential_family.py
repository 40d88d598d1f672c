"""Rényi divergences within an exponential family, from its log-partition function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.checks import check_numbers
from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.theory.bounds.renyi import check_order


def renyi_exponential_family(
    order: float, log_partition: Callable[[Array], Array], eta0: ArrayLike, eta1: ArrayLike
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
    p, r = (np.asarray(check_numbers(eta, name), np.float64) for name, eta in (("eta0", eta0), ("eta1", eta1)))
    if p.ndim < 1 or r.ndim < 1 or p.shape[-1] != r.shape[-1]:
        raise ValueError(f"natural parameters must have shapes (..., d) with one d, got {p.shape} and {r.shape}.")
    p, r = np.broadcast_arrays(p, r)
    value = jnp.vectorize(log_partition, signature="(d)->()")
    with double_precision():
        at_p, at_r = (np.asarray(value(jnp.asarray(eta)), np.float64) for eta in (p, r))
        if not (np.isfinite(at_p).all() and np.isfinite(at_r).all()):
            raise ValueError("log_partition is not finite at eta0 or eta1: they must lie inside of its domain.")
        if order == 1.0:
            slope = jnp.vectorize(jax.grad(log_partition), signature="(d)->(d)")(jnp.asarray(p))
            return np.maximum(at_r - at_p - ((r - p) * np.asarray(slope, np.float64)).sum(-1), 0.0)
        between = np.asarray(value(jnp.asarray(order * p + (1.0 - order) * r)), np.float64)
    gap = (between - order * at_p - (1.0 - order) * at_r) / (order - 1.0)
    return np.where(np.isfinite(between), np.maximum(gap, 0.0), np.inf)
