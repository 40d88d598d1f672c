"""What the online rules share: state, step sizes, the box, compensated sums."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import CompensatedSum
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.gaussian.families.mean_field import MeanField


class Losses(NamedTuple):
    """Untempered, unscaled losses of a round, before its update.

    Attributes:
        at_mean: l_t at the posterior mean.
        expected: The posterior expectation of l_t.
    """

    at_mean: Array
    expected: Array


class CumulativeLosses(NamedTuple):
    """Sums of the losses of the rounds taken."""

    at_mean: CompensatedSum
    expected: CompensatedSum


class OnlineState(NamedTuple):
    """State of an online rule: a pytree of arrays that scans, vmaps and pickles.

    Attributes:
        posterior: q_t, a :class:`~numpyro_tempered.families.MeanField` or of another family.
        prior: q_1, the Gaussian the run started from, of the same family.
        memory: What the rule itself accumulates.
        count: Rounds taken, a scalar integer.
        rejected: Rounds refused because data, loss or update were not finite.
        cumulative: Sums of the losses over the rounds taken, each a compensated sum.
        floored: Rounds whose negative curvature was floored.
    """

    posterior: Any
    prior: Any
    memory: Any
    count: Array  # type: ignore[assignment]
    rejected: Array
    cumulative: CumulativeLosses
    floored: Array


class Box(NamedTuple):
    """Bounds on a posterior, each a scalar or shape ``(d,)``; infinite ones do not bind.

    Attributes:
        loc: Largest absolute value of the means.
        scale: Largest standard deviation.
    """

    loc: ArrayLike = math.inf
    scale: ArrayLike = math.inf


class Rule(NamedTuple):
    """An online rule as a pair of pure functions.

    Attributes:
        init: ``prior -> state``.
        update: ``(evaluation, state) -> state``, one round.
        curvature: ``"hessian"``, ``"fisher"`` or ``"none"``: what the rule takes for twice the gradient in
            σ².
        name: Short name, for reports.
        point: Whether the rule moves a point, so that its posterior has scale 0.
        step: ``(expectation, state, data, rng_key, mask) -> (state, losses)``, a round as a whole, for rules
            that are more than an evaluation and an update; None for these.
        quadratic: Whether the rule is for losses that are quadratic in the parameters alone.
        relook: ``(evaluate, evaluation, state) -> evaluation`` to update with, for rules that evaluate a datum
            again at posteriors that it leads to; None for others.
        box: The bounds that the rule projects on, or None.
        holds_evidence: Whether the posterior holds a number of data, so that those of two streams merge.
    """

    init: Callable[[Any], OnlineState]
    update: Callable[[Evaluation, OnlineState], OnlineState]
    curvature: str
    name: str
    point: bool = False
    step: Callable[..., tuple[OnlineState, Losses]] | None = None
    quadratic: bool = False
    relook: Callable[..., Evaluation] | None = None
    holds_evidence: bool = False
    box: Box | None = None


StepSize: TypeAlias = float | Callable[..., Any]


class SVBRate(NamedTuple):
    """The step size c / (√t σ²); made by :func:`svb_rate`."""

    constant: float

    def __call__(self, count: Array, q: MeanField) -> Array:
        """The rate at round ``count`` (1, 2, ...), one a coordinate."""
        return self.times_variance(count, q) / jnp.square(q.scale)

    def times_variance(self, count: Array, q: MeanField) -> Array:
        """The rate times σ², which neither overflows nor divides by zero."""
        return self.constant * jax.lax.rsqrt(count.astype(q.loc.dtype))


def svb_rate(c: float) -> SVBRate:
    r"""The step size of SVB's regret bound, :math:`\eta_{t,j} = c / (\sqrt t\, \sigma_{t,j}^2)`.

    CA19, Theorem 3, gives c = D / (√2 L) for gradients bounded by L, with D² = sup ‖m - m'‖² +
    2 sup ‖σ‖² over the box (the published constant is twice too large).

    Args:
        c: Positive constant.

    Returns:
        A callable of ``(count, q)`` for ``step_size``.

    Raises:
        ValueError: If ``c`` is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.svb(step_size=nt.online.svb_rate(0.5))
    """
    if not isinstance(c, jax.core.Tracer) and not (math.isfinite(c) and c > 0):
        raise ValueError(f"c must be a positive finite number, got {c!r}.")
    return SVBRate(c)


def as_schedule(step_size: StepSize, name: str = "step_size") -> Callable[[Array, Any], Any]:
    """The step size as a function of ``(count, q)``; ``count`` is 1 in the first round.

    Args:
        step_size: A positive float, a callable of the count, or of ``(count, q)``.
        name: The argument's name, for error messages.

    Raises:
        ValueError: If a float is not positive and finite. A callable that returns a negative rate makes
            the round one that is rejected.
        TypeError: If it is neither a number nor a callable of one or two arguments.
    """
    if isinstance(step_size, jax.core.Tracer):
        # A traced rate lets a grid of rates run under one vmap.
        return lambda count, q: _not_negative(step_size, q)
    if not callable(step_size):
        try:
            value = float(step_size)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} must be a float, a callable of the count or of (count, q), "
                f"got {type(step_size).__name__}."
            ) from error
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}.")
        return lambda count, q: value
    required = [
        parameter
        for parameter in inspect.signature(step_size).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 1:
        return lambda count, q: _not_negative(step_size(count), q)
    if len(required) == 2:
        return lambda count, q: _not_negative(step_size(count, q), q)
    raise TypeError(
        f"{name} must take the count or (count, q), but {step_size!r} requires {len(required)} arguments."
    )


def _not_negative(rate: ArrayLike, q: Any) -> Array:
    rate = jnp.asarray(rate, q.loc.dtype)
    return jnp.where(rate >= 0, rate, jnp.nan)


def check_prior(prior: Any) -> Any:
    """The prior as floating arrays of one dtype.

    Raises:
        TypeError: If it is of no family.
        ValueError: If shapes disagree, or (outside of transformations) values are not those of a prior.
    """
    return family_of(prior).check(prior)


def check_box(box: Box | None) -> Box | None:
    """The box, validated.

    Raises:
        ValueError: If a bound is not positive.
    """
    if box is None:
        return None
    for name, bound in zip(box._fields, box, strict=True):
        if not isinstance(bound, jax.core.Tracer) and not np.all(np.asarray(bound) > 0):
            raise ValueError(f"box.{name} must be positive, got {bound}.")
    return box


def project(q: Any, box: Box | None) -> Any:
    """The nearest point of the box, coordinate by coordinate.

    Raises:
        TypeError: If ``q`` has a covariance: the projection would be a quadratic program.
    """
    if box is None:
        return q
    if not isinstance(q, MeanField):
        raise TypeError(
            f"a box is for MeanField, whose coordinates it bounds one by one; on {type(q).__name__} the "
            "projection is a quadratic program. Leave the box out."
        )
    dtype = q.loc.dtype
    bound, largest = jnp.asarray(box.loc, dtype), jnp.asarray(box.scale, dtype)
    for name, limit in (("loc", bound), ("scale", largest)):
        if limit.shape not in ((), q.loc.shape):
            raise ValueError(f"box.{name} must have shape () or {q.loc.shape}, got {limit.shape}.")
    return MeanField(jnp.clip(q.loc, -bound, bound), jnp.minimum(q.scale, largest))


def start(prior: Any, posterior: Any, memory: Any) -> OnlineState:
    """A state before the first round."""
    # Distinct buffers, so that the state can be donated to a compiled update.
    zeros = [jnp.zeros((), prior.loc.dtype) for _ in range(4)]
    return OnlineState(
        posterior=posterior,
        prior=prior,
        memory=memory,
        count=jnp.zeros((), jnp.int32),
        rejected=jnp.zeros((), jnp.int32),
        cumulative=CumulativeLosses(CompensatedSum(*zeros[:2]), CompensatedSum(*zeros[2:])),
        floored=jnp.zeros((), jnp.int32),
    )


def advance(state: OnlineState, posterior: Any, memory: Any = (), floored: Array | None = None) -> OnlineState:
    """The state after a round that led to ``posterior``."""
    state = state._replace(posterior=posterior, memory=memory, count=state.count + 1)
    return state if floored is None else state._replace(floored=state.floored + floored.astype(jnp.int32))
