"""Natural-gradient steps on a Gaussian (KL17)."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, check_number, matmul
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    Method,
    diagonal,
    newton_direction,
    whitened,
)
from numpyro_tempered.gaussian.families.base import Gain, Gaussian, Q, family_of

# The largest number of coordinates for which a mean-field q takes the whole Hessian.
_DENSE = 1000


@lru_cache(maxsize=64)
def natural_gradient(
    damping: float = 0.5, *, backtrack: bool = True, dense: bool | None = None
) -> Method:
    r"""Natural-gradient steps in the natural parameters of a Gaussian.

    With the precision P = V^-1, g = E_q[∇f] and H = E_q[∇²f],

    .. math:: P' = (1 - \rho) P + \rho H, \qquad m' = m - \rho\, P'^{-1} g

    where ρ is the ``damping``. ρ = 1 is exact in one step on a conjugate model, and fast near the optimum of
    others; away from it a step may overshoot, and backtracking halves ρ until the ELBO rises. Where the target is
    not log-concave and P' would not be positive definite, the step takes the part of H that is: without the
    negative eigenvalues in the coordinates in which q is standard, or the negative entries of a diagonal.

    For a mean-field q the precision and H are diagonals, and a mean that moves by the diagonal P'^-1 crawls where
    coordinates correlate. With the whole H at hand (``dense``) it moves by -ρ H^-1 g instead, to the same
    optimum.

    Args:
        damping: ρ in (0, 1], the longest step.
        backtrack: Whether to halve a step that does not improve; without, one that leads to no Gaussian ends the
            run.
        dense: Whether a mean-field q takes the whole Hessian, ``(d, d)``; by default up to d = 1000.

    Returns:
        A :class:`Method`.

    Raises:
        ValueError: If ``damping`` is not in (0, 1].

    References:
        KL17, with all data in each step; AR and YPB for its tempered objective.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.gaussian.descent.natural_gradient(damping=1.0).name
        'natural_gradient'
    """
    check_number(damping, "damping", "(0, 1]")

    def max_size(q: Gaussian, derivatives: Derivatives) -> Array:
        return jnp.full((), damping, q.loc.dtype)

    def is_too_long(q: Gaussian, derivatives: Derivatives) -> Array:
        return jnp.zeros((), bool)

    def takes_whole_hessian(d: int) -> bool:
        return d <= _DENSE if dense is None else dense

    return Method(
        natural_step,
        max_size,
        is_too_long,
        backtrack,
        takes_whole_hessian,
        "natural_gradient",
    )


def natural_step(q: Q, derivatives: Derivatives, size: Array) -> Q:
    """One step of damping ``size``."""
    family, gain = family_of(q), Gain(step=size, keep=1.0 - size)

    def step(hessian: Array) -> Q:
        return family.natural_step(
            family.init(q), q, q, derivatives.grad, 0.5 * hessian, gain
        )[0]

    if not family.diagonal_only:
        plain = family.canonical(step(derivatives.hessian))
        is_gaussian = jnp.isfinite(jnp.sum(family.witness(plain)))

        def convex() -> Q:
            return family.canonical(step(positive_part(q, derivatives)))

        return jax.lax.cond(is_gaussian, lambda: plain, convex)
    curvatures = diagonal(derivatives.hessian)
    plain = step(curvatures)
    is_gaussian = jnp.isfinite(jnp.sum(family.witness(plain)))
    proposal = jax.tree.map(
        partial(jnp.where, is_gaussian), plain, step(jnp.maximum(curvatures, 0.0))
    )
    direction = newton_direction(derivatives, jnp.full_like(q.loc, jnp.nan))
    newton = q.loc - size * direction
    return proposal._replace(
        loc=jnp.where(jnp.all(jnp.isfinite(direction)), newton, proposal.loc)
    )


def positive_part(q: Gaussian, derivatives: Derivatives) -> Array:
    """The Hessian ``(d, d)`` without its negative eigenvalues, in the coordinates in which q is standard."""
    lower = family_of(q).root(q)
    values, vectors = jnp.linalg.eigh(whitened(q, derivatives)[1])
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]
    columns = solve_triangular(lower, root, lower=True, trans=1)
    return matmul(columns, columns.T)
