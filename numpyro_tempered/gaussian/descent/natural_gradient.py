"""Natural-gradient steps on a Gaussian (KL17)."""

import functools

import jax.numpy as jnp

from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.descent.base import Derivatives, Method, diagonal, newton_direction
from numpyro_tempered.gaussian.families.base import Gain, Gaussian, Q, family_of

# The largest number of coordinates for which a mean-field q takes the whole Hessian.
_DENSE = 1000


@functools.lru_cache(maxsize=64)
def natural_gradient(damping: float = 0.5, *, backtrack: bool = True, dense: bool | None = None) -> Method:
    r"""Natural-gradient steps in the natural parameters of a Gaussian.

    With the precision P = V^-1, g = E_q[∇f] and H = E_q[∇²f],

    .. math:: P' = (1 - \rho) P + \rho H, \qquad m' = m - \rho\, P'^{-1} g

    where ρ is the ``damping``. ρ = 1 is exact in one step on a conjugate model, and fast near the optimum of
    others; away from it a step may overshoot, or lead to no positive precision where the target is not
    log-concave. Backtracking halves ρ until the ELBO rises.

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
        >>> nt.descent.natural_gradient(damping=1.0).name
        'natural_gradient'
    """
    check_number(damping, "damping", "(0, 1]")

    def max_size(q: Gaussian, derivatives: Derivatives) -> Array:
        return jnp.full((), damping, q.loc.dtype)

    def is_too_long(q: Gaussian, derivatives: Derivatives) -> Array:
        return jnp.zeros((), bool)

    def takes_whole_hessian(d: int) -> bool:
        return d <= _DENSE if dense is None else dense

    return Method(natural_step, max_size, is_too_long, backtrack, takes_whole_hessian, "natural_gradient")


def natural_step(q: Q, derivatives: Derivatives, size: Array) -> Q:
    """One step of damping ``size``; NaN where the new precision is not positive definite."""
    family, gain = family_of(q), Gain(step=size, keep=1.0 - size)
    hessian = diagonal(derivatives.hessian) if family.diagonal_only else derivatives.hessian
    proposal, _ = family.natural_step(family.start(q), q, q, derivatives.grad, 0.5 * hessian, gain)
    if not family.diagonal_only:
        return family.canonical(proposal)
    direction = newton_direction(derivatives, jnp.full_like(q.loc, jnp.nan))
    newton = q.loc - size * direction
    return proposal._replace(loc=jnp.where(jnp.all(jnp.isfinite(direction)), newton, proposal.loc))
