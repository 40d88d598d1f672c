"""The loop that all methods share: steps, backtracking, the stopping rule, the record."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Description,
    Params,
    PyTree,
    Shape,
    add_repr,
    check_count,
    check_number,
    is_traced,
    run_program,
)
from numpyro_tempered.gaussian.descent import base
from numpyro_tempered.gaussian.descent.base import Evaluate, Objective
from numpyro_tempered.gaussian.descent.natural_gradient import natural_gradient
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of, square_root
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture, draw

# A run whose step is this much shorter than the longest has stalled.
MIN_SHARE = 2.0**-24
# By how much the stationarity must fall for a step that does not lower the free energy.
_CONTRACTION = 0.9

RUNNING, CONVERGED, STALLED, LOST, REFUSED, FLAT = range(6)
REASONS = {
    RUNNING: "the evaluations were used up",
    CONVERGED: "stationary",
    STALLED: "no step improves the ELBO",
    LOST: "a step led to no Gaussian, or to values that are not finite",
    FLAT: "the ELBO rises by less than the tolerance at each evaluation",
    REFUSED: "the step size is above 1/L, where forward-backward steps converge to a wrong variance",
}


@add_repr
class Trace(NamedTuple):
    """The record of all evaluations, ``(max_evaluations,)``; NaN after the last.

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


@add_repr
class Result(NamedTuple):
    """A Gaussian found by :func:`minimise`.

    Attributes:
        posterior: The last accepted q: finite and positive definite whatever happened. Of
            :func:`minimise_mixture` a :class:`.GaussianMixture`.
        derivatives: Those of f at it.
        elbo: Its ELBO, in nats; with an objective that draws an estimate by the fixed draws, and no bound.
        stationarity: How far it is from stationary, in nats: an estimate of the KL gap.
        gap_bound: An upper bound on the KL gap where the likelihood is log-concave and the prior Gaussian, see
            :func:`gap_bound`; infinite where the prior is not Gaussian or the derivatives are not exact, and for
            ``fit_gaussian`` where a datum's loss has negative curvature at some predictor of a grid.
        converged: Whether ``stationarity`` is at most the tolerance.
        status: Why the run ended, as a number; :attr:`reason` has it in words.
        num_evaluations: Evaluations of the derivatives, the start's included.
        trace: A :class:`Trace` of all evaluations.
        optima: The ELBOs of the distinct optima that the restarts of ``fit_gaussian`` found, the best first.
    """

    posterior: Gaussian | GaussianMixture
    derivatives: base.Derivatives
    elbo: Array
    stationarity: Array
    gap_bound: Array
    converged: Array
    status: Array
    num_evaluations: Array
    trace: Trace
    optima: tuple[float, ...] = ()

    @property
    def target(self) -> None:
        """None: the density that was fitted is not held."""
        return None

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws of q, ``theta``."""
        size = int(np.prod(sample_shape, dtype=int))
        theta = draw(rng_key, self.posterior, size)
        return {"theta": theta.reshape(*sample_shape, *theta.shape[1:])}

    def describe(self) -> Description:
        """The evaluations, for :func:`~numpyro_tempered.to_inference_data`."""
        trace = {f"{name}_trace": v for name, v in self.trace._asdict().items()}
        return Description(
            {"variational": trace},
            {
                "algorithm": "gaussian_vi",
                "elbo": float(self.elbo),
                "converged": int(self.converged),
                "stationarity": float(self.stationarity),
                "num_evaluations": int(self.num_evaluations),
            },
            {"theta": ["coordinate"]} | {name: ["evaluation"] for name in trace},
        )

    @property
    def reason(self) -> str:
        """Why the run ended, in words."""
        return REASONS[int(self.status)]


class _Point(NamedTuple):
    """A Gaussian with the derivatives of f, the free energy and the stationarity there."""

    q: Gaussian
    at: base.Derivatives
    energy: Array
    residual: Array


class _Carry(NamedTuple):
    point: _Point
    min_residual: Array
    share: Array  # of the longest step, for the next one
    num_evaluations: Array
    status: Array
    trace: Trace


def minimise(
    objective: Objective,
    init: Q,
    *,
    method: base.Method | None = None,
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
        init: The first q, a :class:`.MeanField` or
            :class:`.FullRank`, which decides the family.
        method: :func:`natural_gradient` (the default) or :func:`forward_backward`.
        tolerance: On the stationarity, in nats.
        max_evaluations: Of the derivatives, at least 1.
        rng_key: For an objective that draws: the same draws at every evaluation.

    Returns:
        A :class:`Result`. A run that does not converge says why in ``status`` and keeps the last accepted q: a
        target that is not log-concave may leave no improving step, never a q that is not a Gaussian.

    Raises:
        TypeError: If ``init`` is of another family.
        ValueError: If an argument is out of range, ``rng_key`` is missing, or, outside of transformations, the
            objective is not finite at ``init`` or a forward-backward step size is above 1/L.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> x, y = jnp.array([[1.0, 0.5], [0.2, -1.0], [1.0, 1.0]]), jnp.array([1.0, -1.0, 1.0])
        >>> logistic = nt.expectations.logistic()
        >>> f = nt.gaussian.descent.objective(logistic, prior, x, y, alpha=0.5)
        >>> result = nt.gaussian.descent.minimise(f, prior)
        >>> bool(result.converged), int(result.num_evaluations) < 30
        (True, True)
    """
    q = base.require_gaussian(init)
    method = natural_gradient() if method is None else method
    if not isinstance(method, base.Method):
        raise TypeError(
            f"method must be natural_gradient() or forward_backward(), got {method!r}."
        )
    check_count(max_evaluations, "max_evaluations")
    check_number(tolerance, "tolerance", "(0, inf]")
    if objective.needs_key and rng_key is None:
        raise ValueError("this objective draws: pass rng_key.")

    spec = _Spec(objective.evaluate, method, max_evaluations, objective.exact)
    operands = (
        q,
        objective.data,
        objective.precision,
        jnp.asarray(tolerance, q.loc.dtype),
        rng_key,
    )
    # The function of a model is another at each call, and may hold arrays that have changed.
    shared = objective.shared
    result: Result = (
        _shared_loop(spec, *operands)
        if shared
        else run_program(partial(_loop, spec), *operands)
    )
    if not is_traced(result.status):
        if not bool(jnp.isfinite(result.elbo)):
            raise ValueError(
                "the ELBO is not finite at the start: check the data for NaN, whether a linearised predictor "
                "leaves the support of the likelihood, or start at a narrower Gaussian."
            )
        if int(result.status) == REFUSED:
            raise ValueError(
                f"step {int(result.num_evaluations)}: {REASONS[REFUSED]}. Leave step_size out for the longest."
            )
    return result


class _Spec(NamedTuple):
    """What a loop is compiled for."""

    evaluate: Evaluate
    method: base.Method
    max_evaluations: int
    exact: bool


def _loop(
    spec: _Spec,
    init: Gaussian,
    data: PyTree,
    precision: Array | None,
    tolerance: Array,
    rng_key: Array | None,
) -> Result:
    method, max_evaluations = spec.method, spec.max_evaluations
    dtype, family = init.loc.dtype, family_of(init)
    dense = family.diagonal_only and method.dense(init.loc.shape[0])

    def evaluate(q: Gaussian) -> _Point:
        # The whole Hessian is that of the same Gaussian as a full-rank one.
        of_q = spec.evaluate(
            FullRank(q.loc, square_root(q)) if dense else q, data, rng_key
        )
        at: base.Derivatives = jax.tree.map(lambda leaf: leaf.astype(dtype), of_q)
        finite = jnp.isfinite(jnp.sum(family.witness(q)))
        finite &= jnp.isfinite(at.value + jnp.sum(at.grad) + jnp.sum(at.hessian))
        energy = jnp.where(finite, at.value - base.entropy(q), jnp.inf)
        return _Point(
            q, at, energy, jnp.where(finite, base.stationarity(q, at), jnp.inf)
        )

    def write(trace: Trace, number: Array | int, row: Trace) -> Trace:
        return jax.tree.map(
            lambda column, value: column.at[number].set(value), trace, row
        )

    def status_at(point: _Point) -> Array:
        status = jnp.where(method.is_too_long(point.q, point.at), REFUSED, RUNNING)
        return jnp.where(point.residual <= tolerance, CONVERGED, status)

    def advance(carry: _Carry) -> _Carry:
        current, is_first = carry.point, carry.num_evaluations == 0
        size = jnp.where(
            is_first, 0.0, carry.share * method.max_size(current.q, current.at)
        ).astype(dtype)
        step = method.step(current.q, current.at, size)
        # The start too is evaluated in the loop: a model is traced and compiled once, not twice.
        trial = evaluate(jax.tree.map(partial(jnp.where, is_first), init, step))
        # F is a difference of two sums: what rounding leaves of it.
        rounding = (
            8.0
            * jnp.finfo(dtype).eps
            * (jnp.abs(current.at.value) + jnp.abs(current.energy))
        )
        better = trial.energy <= current.energy + rounding
        if not spec.exact:
            better |= trial.residual <= _CONTRACTION * carry.min_residual
        accept = jnp.isfinite(trial.energy) & (better if method.backtrack else True)
        point: _Point = jax.tree.map(partial(jnp.where, accept), trial, current)
        # After a failure the step is halved, after a success it may grow again.
        share = jnp.where(
            accept, jnp.minimum(1.0, 2.0 * carry.share), 0.5 * carry.share
        )
        is_over = ~accept & ((share < MIN_SHARE) | (not method.backtrack))
        ending = jnp.where(
            is_over, STALLED if method.backtrack else LOST, status_at(point)
        )
        return _Carry(
            point,
            jnp.minimum(carry.min_residual, point.residual),
            share.astype(dtype),
            carry.num_evaluations + 1,
            jnp.where(is_first & ~accept, LOST, ending),
            write(
                carry.trace,
                carry.num_evaluations,
                Trace(-trial.energy, trial.residual, size, accept | is_first),
            ),
        )

    column = jnp.full((max_evaluations,), jnp.nan, dtype)
    trace = Trace(column, column, column, jnp.zeros((max_evaluations,), bool))
    (d,), infinite, one = (
        init.loc.shape,
        jnp.full((), jnp.inf, dtype),
        jnp.ones((), dtype),
    )
    is_diagonal = family.diagonal_only and not dense
    unknown = base.Derivatives(
        infinite, jnp.zeros(d, dtype), jnp.zeros((d,) if is_diagonal else (d, d), dtype)
    )
    zero, blank = jnp.zeros((), jnp.int32), _Point(init, unknown, infinite, infinite)
    (q, at, energy, residual), _, _, num_evaluations, status, trace = (
        jax.lax.while_loop(
            lambda carry: (
                (carry.status == RUNNING) & (carry.num_evaluations < max_evaluations)
            ),
            advance,
            _Carry(blank, infinite, one, zero, jnp.full((), RUNNING), trace),
        )
    )
    bound = jnp.full((), jnp.inf, dtype)
    if precision is not None:
        metric = precision.astype(dtype)
        if metric.ndim == 2 and family.diagonal_only:
            # A diagonal below the matrix.
            metric = jnp.full(init.loc.shape, jnp.linalg.eigvalsh(metric)[0])
        bound = base.gap_bound(q, at, metric)
    return Result(
        q,
        at,
        -energy,
        residual,
        bound,
        status == CONVERGED,
        status,
        num_evaluations,
        trace,
    )


_shared_loop = jax.jit(_loop, static_argnums=0)
