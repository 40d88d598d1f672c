"""The loop that all methods share: steps, backtracking, the stopping rule, the record."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    Method,
    entropy,
    gap_bound,
    require_gaussian,
    stationarity,
)
from numpyro_tempered.gaussian.descent.natural_gradient import natural_gradient
from numpyro_tempered.gaussian.descent.objective import Objective
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.mean_field import MeanField

# A step this much shorter than the longest finds nothing.
_SHORTEST = 2.0**-24
# By how much the stationarity must fall for a step that does not lower the free energy.
_CONTRACTION = 0.9

RUNNING, CONVERGED, STALLED, LOST, REFUSED = range(5)
REASONS = {
    RUNNING: "the evaluations were used up",
    CONVERGED: "stationary",
    STALLED: "no step improves the ELBO",
    LOST: "a step led to no Gaussian, or to values that are not finite",
    REFUSED: "the step size is above 1/L, where forward-backward steps converge to a wrong variance",
}


class Trace(NamedTuple):
    """What was found at each evaluation, ``(max_evaluations,)``; NaN after the last.

    Attributes:
        elbo: The ELBO at the q evaluated, -F, in nats: minus infinity where a step led to no Gaussian. With an
            objective that draws it is an estimate by the fixed draws, which may lie above the log evidence.
        stationarity: Of that q, in nats.
        size: The length of the step that led there; 0 for the start.
        accepted: Whether the run moved there.
    """

    elbo: Array
    stationarity: Array
    size: Array
    accepted: Array


class Result(NamedTuple):
    """A Gaussian found by :func:`minimise`.

    Attributes:
        posterior: The last accepted q: finite and positive definite whatever happened.
        derivatives: Those of f at it.
        elbo: Its ELBO, in nats; with an objective that draws an estimate by the fixed draws, and no bound.
        stationarity: How far it is from stationary, in nats: an estimate of the KL gap.
        gap_bound: An upper bound on the KL gap where the likelihood is log-concave and the prior Gaussian, see
            :func:`gap_bound`; infinite where the prior is not Gaussian or the derivatives are not exact, and for
            ``fit_gaussian`` where a datum's loss has negative curvature at some predictor that was looked at.
        converged: Whether ``stationarity`` is at most the tolerance.
        status: Why the run ended, as a number; :attr:`reason` has it in words.
        num_evaluations: Evaluations of the derivatives, the start's included.
        trace: A :class:`Trace` of all evaluations.
    """

    posterior: Any
    derivatives: Derivatives
    elbo: Array
    stationarity: Array
    gap_bound: Array
    converged: Array
    status: Array
    num_evaluations: Array
    trace: Trace

    @property
    def reason(self) -> str:
        """Why the run ended, in words."""
        return REASONS[int(self.status)]


class _Carry(NamedTuple):
    q: Any
    at: Derivatives
    energy: Array
    residual: Array
    least: Array  # the least residual so far
    share: Array  # of the longest step, for the next one
    used: Array
    status: Array
    trace: Trace


def minimise(
    objective: Objective,
    start: Any,
    *,
    method: Method | None = None,
    tolerance: float = 1e-6,
    max_evaluations: int = 200,
    rng_key: Array | None = None,
) -> Result:
    r"""Minimise a free energy over Gaussians, to a stated stationarity.

    Each evaluation of (E_q[f], g, H) is at a trial q. It is accepted if the ELBO rises, up to rounding. Where
    E_q[f] and its derivatives are known by draws or by a linearisation only, and so are not exactly derivatives
    of each other, a q whose stationarity is a tenth below the least so far is accepted too. Otherwise the step is
    halved. The run stops where

    .. math:: \tfrac12 g^\top V g + \tfrac14 \|R^\top H R - I\|_F^2 \le \mathrm{tolerance}.

    It is one compiled loop, and may be transformed by ``jit`` and ``vmap``.

    Args:
        objective: From :func:`objective`, or any function of q wrapped in :class:`Objective`.
        start: The first q, a :class:`~numpyro_tempered.families.MeanField` or
            :class:`~numpyro_tempered.families.FullRank`, which decides the family.
        method: :func:`natural_gradient` (the default) or :func:`forward_backward`.
        tolerance: On the stationarity, in nats.
        max_evaluations: Of the derivatives, at least 1.
        rng_key: For an objective that draws: the same draws at every evaluation.

    Returns:
        A :class:`Result`. A run that does not converge says why in ``status`` and keeps the last accepted q: a
        target that is not log-concave may leave no improving step, never a q that is not a Gaussian.

    Raises:
        TypeError: If ``start`` is of another family.
        ValueError: If an argument is out of range, ``rng_key`` is missing, or, outside of transformations, the
            objective is not finite at ``start`` or a forward-backward step size is above 1/L.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> x, y = jnp.array([[1.0, 0.5], [0.2, -1.0], [1.0, 1.0]]), jnp.array([1.0, -1.0, 1.0])
        >>> logistic = nt.expectations.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u))
        >>> f = nt.descent.objective(logistic, prior, x, y, alpha=0.5)
        >>> result = nt.descent.minimise(f, prior)
        >>> bool(result.converged), int(result.num_evaluations) < 30
        (True, True)
    """
    q = require_gaussian(start)
    method = natural_gradient() if method is None else method
    if not isinstance(method, Method):
        raise TypeError(f"method must be natural_gradient() or forward_backward(), got {method!r}.")
    if max_evaluations < 1:
        raise ValueError(f"max_evaluations must be at least 1, got {max_evaluations}.")
    if not isinstance(tolerance, jax.core.Tracer) and not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}.")
    if objective.needs_key and rng_key is None:
        raise ValueError("this objective draws: pass rng_key.")

    given = (objective.data, objective.precision)
    # A loop that nobody shares is forgotten with its function, which holds a model.
    own = jax.jit(partial(_loop, objective.evaluate), static_argnums=(0, 1, 2))
    loop: Callable[..., Result] = partial(_shared_loop, objective.evaluate) if objective.shared else own
    result = loop(
        method, max_evaluations, objective.exact, q, given, jnp.asarray(tolerance, q.loc.dtype), rng_key
    )
    if not isinstance(result.status, jax.core.Tracer):
        if not bool(jnp.isfinite(result.elbo)):
            raise ValueError(
                "the ELBO is not finite at the start: check the data for NaN, whether a linearised predictor "
                "leaves the support of the likelihood, or start at a narrower Gaussian."
            )
        if int(result.status) == REFUSED:
            raise ValueError(
                f"step {int(result.num_evaluations)}: {REASONS[REFUSED]}. Leave step_size out: it is then the "
                "longest that is admissible."
            )
    return result


def _loop(
    evaluate: Callable[[Any, Any, Array | None], Derivatives],
    method: Method,
    max_evaluations: int,
    exact: bool,
    q: Any,
    given: Any,
    tolerance: Array,
    rng_key: Array | None,
) -> Result:
    data, precision = given
    dtype = q.loc.dtype
    dense = isinstance(q, MeanField) and method.dense(q.loc.shape[0])

    def look(q: Any) -> tuple[Derivatives, Array, Array]:
        # At the same Gaussian as a full-rank one for the whole Hessian.
        seen = FullRank(q.loc, jnp.diag(q.scale)) if dense else q
        at = jax.tree.map(lambda leaf: leaf.astype(dtype), evaluate(seen, data, rng_key))
        finite = jnp.isfinite(jnp.sum(family_of(q).witness(q)))
        finite &= jnp.isfinite(at.value + jnp.sum(at.grad) + jnp.sum(at.hessian))
        energy = jnp.where(finite, at.value - entropy(q), jnp.inf)
        return at, energy, jnp.where(finite, stationarity(q, at), jnp.inf)

    def ended(q: Any, at: Derivatives, residual: Array) -> Array:
        status = jnp.where(method.refused(q, at), REFUSED, RUNNING)
        return jnp.where(residual <= tolerance, CONVERGED, status)

    def more(carry: _Carry) -> Array:
        return (carry.status == RUNNING) & (carry.used < max_evaluations)

    def advance(carry: _Carry) -> _Carry:
        size = carry.share * method.longest(carry.q, carry.at)
        trial = method.step(carry.q, carry.at, size)
        at, energy, residual = look(trial)
        # F is a difference of two sums: what rounding leaves of it.
        rounding = 8.0 * jnp.finfo(dtype).eps * (jnp.abs(carry.at.value) + jnp.abs(carry.energy))
        better = energy <= carry.energy + rounding
        if not exact:
            better |= residual <= _CONTRACTION * carry.least
        accept = jnp.isfinite(energy) & (better if method.backtrack else True)
        moved, at_moved, energy_moved, residual_moved = jax.tree.map(
            partial(jnp.where, accept),
            (trial, at, energy, residual),
            (carry.q, carry.at, carry.energy, carry.residual),
        )
        # After a failure the step is halved, after a success it may grow again.
        share = jnp.where(accept, jnp.minimum(1.0, 2.0 * carry.share), 0.5 * carry.share)
        failed = STALLED if method.backtrack else LOST
        short = ~accept & ((share < _SHORTEST) | (not method.backtrack))
        status = jnp.where(short, failed, ended(moved, at_moved, residual_moved))
        row = Trace(-energy, residual, size, accept)
        return _Carry(
            moved,
            at_moved,
            energy_moved,
            residual_moved,
            jnp.minimum(carry.least, residual_moved),
            share.astype(dtype),
            carry.used + 1,
            status,
            jax.tree.map(lambda column, value: column.at[carry.used].set(value), carry.trace, row),
        )

    at, energy, residual = look(q)
    blank = jnp.full((max_evaluations,), jnp.nan, dtype)
    trace = Trace(
        blank.at[0].set(-energy),
        blank.at[0].set(residual),
        blank.at[0].set(0.0),
        jnp.zeros((max_evaluations,), bool).at[0].set(True),
    )
    status = jnp.where(jnp.isfinite(energy), ended(q, at, residual), LOST)
    whole = jnp.ones((), dtype)
    first = _Carry(q, at, energy, residual, residual, whole, jnp.ones((), jnp.int32), status, trace)
    last = jax.lax.while_loop(more, advance, first)
    bound = jnp.full((), jnp.inf, dtype)
    if precision is not None:
        bound = gap_bound(last.q, last.at, _as_metric(last.q, precision.astype(dtype)))
    return Result(
        last.q,
        last.at,
        -last.energy,
        last.residual,
        bound,
        last.status == CONVERGED,
        last.status,
        last.used,
        last.trace,
    )


_shared_loop = jax.jit(_loop, static_argnums=(0, 1, 2, 3))


def _as_metric(q: Any, precision: Array) -> Array:
    """The precision, or for a mean-field q a diagonal below it."""
    if precision.ndim < 2 or q._fields[-1] == "factor":
        return precision
    return jnp.full(q.loc.shape, jnp.linalg.eigvalsh(precision)[0])
