r"""Gaussian variational inference as the minimisation of a free energy.

For a target density proportional to exp(-f) and a Gaussian q = N(m, V),

.. math:: F(q) = E_q[f] - \mathrm{entropy}(q) = \mathrm{KL}(q, \mathrm{target}) - \log\int e^{-f},

the negative ELBO. A tempered posterior has f = -α log L - log π. What methods need of f at q is in
:class:`Derivatives`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.mean_field import MeanField

Gaussian: TypeAlias = MeanField | FullRank


class Derivatives(NamedTuple):
    """E_q[f] and its derivatives at one q.

    Attributes:
        value: E_q[f], a scalar in nats.
        grad: g = E_q[∇f], shape ``(d,)``.
        hessian: H = E_q[∇²f], twice the gradient in the covariance: shape ``(d, d)``, or for a mean-field q its
            diagonal ``(d,)``.
    """

    value: Array
    grad: Array
    hessian: Array


class Method(NamedTuple):
    """A way to lower the free energy, as pure functions.

    Attributes:
        step: ``(q, derivatives, size) -> q``, a step of that size; not finite where it leads to no Gaussian.
        longest: ``(q, derivatives) -> size``, the longest step from here.
        refused: ``(q, derivatives) -> bool``, whether the size asked for is beyond what the method admits.
        backtrack: Whether a step that does not improve is halved.
        dense: ``d -> bool``, whether a mean-field q of d coordinates takes the whole Hessian all the same.
        name: Short name, for reports and errors.
    """

    step: Callable[[Any, Derivatives, Array], Any]
    longest: Callable[[Any, Derivatives], Array]
    refused: Callable[[Any, Derivatives], Array]
    backtrack: bool
    dense: Callable[[int], bool]
    name: str


def entropy(q: Gaussian) -> Array:
    """The entropy of ``q`` in nats; a factor is triangular here."""
    scale = q.scale if isinstance(q, MeanField) else jnp.diagonal(q.factor)
    return jnp.sum(jnp.log(scale)) + 0.5 * q.loc.shape[0] * math.log(2.0 * math.pi * math.e)


def whitened(q: Gaussian, derivatives: Derivatives) -> tuple[Array, Array]:
    """Gradient and Hessian in the coordinates in which q is standard: Sᵀg and SᵀHS, V = S Sᵀ."""
    if isinstance(q, MeanField):
        return q.scale * derivatives.grad, jnp.square(q.scale) * diagonal(derivatives)
    grad = matmul(q.factor.T, derivatives.grad)
    hessian = matmul(q.factor.T, matmul(derivatives.hessian, q.factor))
    return grad, 0.5 * (hessian + hessian.T)


def diagonal(derivatives: Derivatives) -> Array:
    """The diagonal of the Hessian, ``(d,)``."""
    hessian = derivatives.hessian
    return hessian if hessian.ndim == 1 else jnp.diagonal(hessian)


def newton_direction(derivatives: Derivatives, otherwise: Array) -> Array:
    """H^-1 g by Cholesky, or ``otherwise`` where H is a diagonal only or not positive definite."""
    if derivatives.hessian.ndim == 1:
        return otherwise
    lower = jnp.linalg.cholesky(derivatives.hessian)
    direction = cho_solve((lower, True), derivatives.grad)
    return jnp.where(jnp.all(jnp.isfinite(direction)), direction, otherwise)


def stationarity(q: Gaussian, derivatives: Derivatives) -> Array:
    r"""How far q is from a stationary point of the free energy, in nats.

    .. math:: \tfrac12 g^\top V g + \tfrac14 \|R^\top H R - I\|_F^2, \qquad V = R R^\top

    It is 0 exactly where g = 0 and H = V^-1, and near such a point it is the KL gap to it to second order, where
    f is nearly quadratic over the width of q. For a mean-field q only the diagonals of H and V are compared, and
    the first term is ½ gᵀ H^-1 g where the whole H is known; with a diagonal alone it tells too little where
    coordinates correlate.

    Args:
        q: A :class:`~numpyro_tempered.families.MeanField` or :class:`~numpyro_tempered.families.FullRank`.
        derivatives: Those of f at q.

    Returns:
        A scalar, at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> f = nt.descent.Derivatives(jnp.array(0.0), jnp.array([0.1]), jnp.array([1.0]))
        >>> print(f"{nt.descent.stationarity(q, f):.3f}")
        0.005
    """
    grad, hessian = whitened(q, derivatives)
    if isinstance(q, MeanField):
        # By Newton's direction where there is one: V is far from H^-1 where coordinates correlate.
        direction = newton_direction(derivatives, q.scale * grad)
        return 0.5 * jnp.sum(derivatives.grad * direction) + 0.25 * jnp.sum(jnp.square(hessian - 1.0))
    identity = jnp.eye(grad.shape[0], dtype=grad.dtype)
    return 0.5 * jnp.sum(jnp.square(grad)) + 0.25 * jnp.sum(jnp.square(hessian - identity))


def gap_bound(q: Gaussian, derivatives: Derivatives, precision: ArrayLike) -> Array:
    r"""An upper bound on the KL gap to the best Gaussian, for a target that is strongly log-concave.

    Where f minus ½ θᵀAθ is convex, F is 1-convex along Bures-Wasserstein geodesics in the metric of A, and so

    .. math:: F(q) - \min F \le \tfrac12 \big[g^\top A^{-1} g
              + \mathrm{tr}\, A^{-1}(H - V^{-1})\, V\, (H - V^{-1})\big],

    over full-rank or over mean-field Gaussians, whichever q is. With a Gaussian prior of precision A it holds for
    every likelihood that is log-concave in θ, tempered or not: generalised linear models with their canonical
    link, for instance. It is as exact as ``derivatives``.

    Args:
        q: A :class:`~numpyro_tempered.families.MeanField` or :class:`~numpyro_tempered.families.FullRank`.
        derivatives: Those of f at q.
        precision: A, positive: a scalar, or a diagonal ``(d,)``, or for a full-rank q a matrix ``(d, d)``.

    Returns:
        A scalar in nats.

    Raises:
        ValueError: If ``precision`` has another shape.

    References:
        Lam22, Theorem 1 and its strong convexity; the inequality is Polyak and Łojasiewicz's.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> f = nt.descent.Derivatives(jnp.array(0.0), jnp.array([0.1]), jnp.array([2.0]))
        >>> print(f"{nt.descent.gap_bound(q, f, 2.0):.4f}")  # the gap is 0.1591
        0.2525
    """
    a = jnp.asarray(precision, q.loc.dtype)
    (d,) = q.loc.shape
    shapes = [(), (d,)] + ([(d, d)] if isinstance(q, FullRank) else [])
    if a.shape not in shapes:
        raise ValueError(f"precision must have one of the shapes {shapes}, got {a.shape}.")
    if isinstance(q, MeanField):
        in_scale = q.scale * (diagonal(derivatives) - 1.0 / jnp.square(q.scale))
        return 0.5 * jnp.sum((jnp.square(derivatives.grad) + jnp.square(in_scale)) / a)
    # (H - V^-1) S, of which the trace is a sum of squares.
    lower = q.scale_tril
    inverse = solve_triangular(lower, jnp.eye(d, dtype=lower.dtype), lower=True, trans=1)
    columns = jnp.concatenate([derivatives.grad[:, None], matmul(derivatives.hessian, lower) - inverse], axis=1)
    if a.ndim < 2:
        return 0.5 * jnp.sum(jnp.square(columns) / jnp.broadcast_to(a, (d,))[:, None])
    root = jnp.linalg.cholesky(a)
    return 0.5 * jnp.sum(jnp.square(solve_triangular(root, columns, lower=True)))


def require_gaussian(q: Any) -> Gaussian:
    """``q`` as floating arrays of one dtype.

    Raises:
        TypeError: If it is neither mean-field nor full-rank.
        ValueError: If its shapes disagree, or (outside of transformations) values are not those of a Gaussian.
    """
    if not isinstance(q, MeanField | FullRank):
        raise TypeError(
            f"Gaussian variational inference starts at a MeanField or FullRank, got {type(q).__name__}."
        )
    return family_of(q).check(q)
