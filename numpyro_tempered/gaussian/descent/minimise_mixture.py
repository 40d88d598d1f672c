"""The free energy of mixtures of Gaussians, minimised by Bures-Wasserstein steps (Lam22, PetitTalamon25)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import (
    Array,
    Numbers,
    PyTree,
    check_count,
    check_number,
    is_traced,
    run_program,
)
from numpyro_tempered.gaussian.descent.base import Derivatives
from numpyro_tempered.gaussian.descent.minimise import (
    CONVERGED,
    FLAT,
    LOST,
    MIN_SHARE,
    RUNNING,
    STALLED,
    Result,
    Trace,
)
from numpyro_tempered.gaussian.descent.mixture_energy import (
    Point,
    Potential,
    evaluate,
    floored,
    step,
)
from numpyro_tempered.gaussian.families.gaussian_mixture import (
    GaussianMixture,
    check,
    triangular,
)

# How a step grows after a success: a failure halves it.
_GROWTH = 1.25
# The part of what derivatives promise that a step must hold: less is beyond the bottom, and such steps oscillate.
_ENOUGH = 0.25
# Evaluations after which the ELBO is looked at: it is flat if it rose by less than the tolerance at each.
_WINDOW = 50


class _Carry(NamedTuple):
    point: Point
    share: Array
    num_evaluations: Array
    status: Array
    past: Array  # the free energy a while ago
    trace: Trace


def minimise_mixture(
    potential: Potential,
    init: GaussianMixture,
    standard_points: Numbers,
    data: PyTree = (),
    *,
    tolerance: float = 1e-4,
    max_evaluations: int = 1000,
) -> Result:
    r"""Minimise a free energy over mixtures of Gaussians, to a stated stationarity.

    With r_k the probability that a point is of component k, and f_k = f - log r_k + log w_k, the free energy is

    .. math:: F(q) = \sum_k w_k \big(E_k f_k - \mathrm{entropy}(N_k)\big).

    Each component takes the forward-backward step of a single Gaussian for f_k in the Bures-Wasserstein metric,
    in coordinates in which it is standard: the term -log r_k keeps components apart. The weights take a step of
    mirror descent, :math:`w_k' \propto w_k \exp(-h\, E_k[f + \log q])`, which lowers F for h up to 1.
    Expectations are averages over ``standard_points`` mapped to each component, and derivatives those of the
    averages. A step that does not lower F by a quarter of what they promise is halved. The run stops where

    .. math:: \sum_k w_k \big(\tfrac12 g_k^\top V_k g_k + \tfrac14 \|R_k^\top H_k R_k - I\|_F^2
              + \tfrac12 (E_k[f + \log q] - F)^2\big) \le \mathrm{tolerance},

    or where 50 evaluations have raised the ELBO by less than 50 times the tolerance.

    Where components overlap, F is flat along moves of mass between them, and the last digits of weights and means
    mean little; those of q do.

    Args:
        potential: ``(theta, data) -> f``, minus the log of the target density, ``theta`` of shape ``(d,)``.
        init: The first mixture. Its roots decide the family: ``(K, d, d)``, or ``(K, d)`` for diagonals.
        standard_points: Standard normal points, shape ``(S, d)``, in antithetic pairs.
        data: Arrays that the potential takes.
        tolerance: On the stationarity, in nats.
        max_evaluations: Of the free energy.

    Returns:
        A :class:`Result`. ``posterior`` is a :class:`.GaussianMixture`; ``derivatives``
        are those of f_k for each component, in coordinates in which it is standard.

    Raises:
        TypeError: If ``init`` is no mixture.
        ValueError: If shapes disagree, an argument is out of range, or the ELBO is not finite at the start.

    References:
        Lam22, section 6; PetitTalamon25; Diao23 for the step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> from numpyro_tempered.gaussian.descent.mixture_energy import normal_nodes
        >>> def potential(theta, _):  # three tenths at -2, seven at 2
        ...     modes = jnp.array([-2.0, 2.0])
        ...     return -jax.nn.logsumexp(-2.0 * (theta - modes) ** 2, b=jnp.array([0.3, 0.7]))
        >>> init = nt.gaussian.families.GaussianMixture(
        ...     jnp.log(jnp.array([0.5, 0.5])), jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
        ... )
        >>> result = nt.gaussian.descent.minimise_mixture(potential, init, normal_nodes(0, 64, 1))
        >>> print(" ".join(f"{weight:.2f}" for weight in jnp.exp(result.posterior.logits)))
        0.30 0.70
    """
    q = check(init, "init")
    q = q._replace(logits=floored(q.logits))
    standard_points = jnp.asarray(standard_points, q.loc.dtype)
    if (
        standard_points.ndim != 2
        or standard_points.shape[1] != q.loc.shape[1]
        or len(standard_points) < 2
    ):
        raise ValueError(
            f"standard_points must have shape (S, {q.loc.shape[1]}) with S at least 2, got "
            f"{standard_points.shape}."
        )
    check_count(max_evaluations, "max_evaluations")
    check_number(tolerance, "tolerance", "(0, inf]")
    loop = partial(_loop, potential, max_evaluations)
    result: Result = run_program(
        loop, q, standard_points, data, jnp.asarray(tolerance, q.loc.dtype)
    )
    if not is_traced(result.status) and int(result.status) == LOST:
        raise ValueError(
            "the ELBO is not finite at the start: check the data for NaN, or start at narrower components."
        )
    return result


def _loop(
    potential: Potential,
    max_evaluations: int,
    init: GaussianMixture,
    standard_points: Array,
    data: PyTree,
    tolerance: Array,
) -> Result:
    dtype = init.loc.dtype

    def advance(carry: _Carry) -> _Carry:
        current, is_first = carry.point, carry.num_evaluations == 0
        # The start too is evaluated in the loop: the density is compiled once.
        mixture, promise = step(current, carry.share)
        trial_q = jax.tree.map(partial(jnp.where, is_first), init, mixture)
        trial = evaluate(potential, trial_q, standard_points, data)
        rounding = (
            8.0
            * jnp.finfo(dtype).eps
            * (jnp.sum(jnp.abs(current.at.value)) + jnp.abs(current.energy))
        )
        enough = trial.energy <= current.energy - _ENOUGH * promise + rounding
        accept = jnp.isfinite(trial.energy) & (is_first | enough)
        point: Point = jax.tree.map(partial(jnp.where, accept), trial, current)
        share = jnp.where(
            accept, jnp.minimum(1.0, _GROWTH * carry.share), 0.5 * carry.share
        ).astype(dtype)
        status = jnp.where(point.residual <= tolerance, CONVERGED, RUNNING)
        status = jnp.where(~accept & (share < MIN_SHARE), STALLED, status)
        # Along moves of mass between components that overlap q hardly changes, and steps are many.
        is_due = (carry.num_evaluations > 0) & (carry.num_evaluations % _WINDOW == 0)
        is_flat = is_due & (carry.past - point.energy <= _WINDOW * tolerance)
        status = jnp.where(is_flat & (status == RUNNING), FLAT, status)
        row = Trace(
            -trial.energy,
            trial.residual,
            jnp.where(is_first, 0.0, carry.share),
            accept | is_first,
        )
        return _Carry(
            point,
            jnp.where(is_first, 1.0, share).astype(dtype),
            carry.num_evaluations + 1,
            jnp.where(is_first & ~accept, LOST, status),
            jnp.where(is_due | is_first, point.energy, carry.past),
            jax.tree.map(
                lambda column, value: column.at[carry.num_evaluations].set(
                    value.astype(column.dtype)
                ),
                carry.trace,
                row,
            ),
        )

    (num, d), infinite = init.loc.shape, jnp.full((), jnp.inf, dtype)
    zeros = jnp.zeros((num, d), dtype)
    unknown = Derivatives(
        jnp.zeros(num, dtype), zeros, jnp.zeros(init.root.shape, dtype)
    )
    blank = Point(init, infinite, jnp.zeros(num, dtype), unknown, infinite)
    column = jnp.full((max_evaluations,), jnp.nan, dtype)
    trace = Trace(column, column, column, jnp.zeros((max_evaluations,), bool))
    begin = _Carry(
        blank,
        jnp.ones((), dtype),
        jnp.zeros((), jnp.int32),
        jnp.full((), RUNNING),
        infinite,
        trace,
    )
    end = jax.lax.while_loop(
        lambda carry: (
            (carry.status == RUNNING) & (carry.num_evaluations < max_evaluations)
        ),
        advance,
        begin,
    )
    point = end.point
    return Result(
        triangular(point.q),
        point.at,
        -point.energy,
        point.residual,
        infinite,
        (end.status == CONVERGED) | (end.status == FLAT),
        end.status,
        end.num_evaluations,
        end.trace,
    )
