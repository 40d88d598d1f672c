"""What the online rules share: states, step sizes, boxes, and the bookkeeping of a round."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    CompensatedSum,
    PyTree,
    Scalar,
    add_repr,
    check_number,
    is_traced,
)
from numpyro_tempered.gaussian.expectations.base import (
    Data,
    Evaluation,
    Expectation,
    Predictors,
)
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of
from numpyro_tempered.online.ball import Ball
from numpyro_tempered.online.box import Box, check_box, project

T = TypeVar("T")

# A datum that agrees with the posterior moves a mean by a few standard deviations at most.
JUMP = 10.0


@add_repr
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


@add_repr
class OnlineState(NamedTuple):
    """State of an online rule: a pytree of arrays that scans, vmaps and pickles.

    Attributes:
        posterior: q_t, a :class:`.MeanField` or of another family.
        prior: q_1, the Gaussian the run started from, of the same family.
        memory: What the rule itself accumulates.
        count: Rounds taken, a scalar integer.
        rejected: Rounds refused because data, loss or update were not finite.
        cumulative: Sums of the losses over the rounds taken, each a compensated sum.
        floored: Rounds whose negative curvature was floored.
        jumps: Rounds taken that moved a mean by more than 10 of its standard deviations before the round.
        max_move: The longest move of a mean in one round, in its standard deviations before the round.
    """

    posterior: Gaussian
    prior: Gaussian
    memory: PyTree
    count: Array  # type: ignore[assignment]
    rejected: Array
    cumulative: CumulativeLosses
    floored: Array
    jumps: Array
    max_move: Array


Step: TypeAlias = Callable[
    [Expectation, OnlineState, Data, Array | None, Array | None],
    tuple[OnlineState, Losses],
]


class Datum(NamedTuple):
    """The data of a round, for rules that evaluate them more than once.

    Attributes:
        evaluate: ``q -> Evaluation``.
        predictors: ``theta -> Predictors``, or None where the loss is not one of predictors.
        is_drawn: Whether evaluations are by random draws, the same ones in all of a round.
        quadratic: Whether the loss is quadratic in the parameters.
        mask: Which rows are on, ``(n,)``; None for all.
    """

    evaluate: Callable[[Gaussian], Evaluation]
    predictors: Callable[[Array], Predictors] | None
    is_drawn: bool = False
    quadratic: bool = False
    mask: Array | None = None


class Rule(NamedTuple):
    """An online rule as a pair of pure functions.

    Attributes:
        init: ``prior -> state``.
        update: ``(evaluation, state) -> state``, one round.
        curvature: ``"hessian"``, ``"fisher"`` or ``"none"``: what the rule takes for twice the gradient in
            σ².
        name: Short name, for reports.
        point: Whether the rule moves a point, so that its posterior has scale 0.
        step: ``(expectation, state, data, rng_key, mask) -> (state, losses)``, a whole round with the losses
            before its update, for rules that are more than an evaluation and an update; None for others.
        quadratic: Whether the rule is only for losses that are quadratic in the parameters.
        refine: ``(datum, evaluation, state) -> evaluation`` to update with, for rules that evaluate a datum
            again at posteriors that it leads to; None for others. Its losses enter the sums of the state.
        box: The box that the rule projects on, or None; also where it projects on a ball.
        holds_evidence: Whether the posterior holds a number of data, so that those of two streams merge.
        features: Which of the data arrays :func:`standardise` changes, or None.
        calibrated: Whether its scales measure uncertainty. The moves of other rules, of points and by gradient
            steps, are measured in the scales of the prior.
    """

    init: Callable[[Gaussian], OnlineState]
    update: Callable[[Evaluation, OnlineState], OnlineState]
    curvature: str
    name: str
    point: bool = False
    step: Step | None = None
    quadratic: bool = False
    refine: Callable[[Datum, Evaluation, OnlineState], Evaluation] | None = None
    holds_evidence: bool = False
    box: Box | None = None
    calibrated: bool = True
    features: int | None = None


# A number, or a function of the count or of the count and q.
StepSize: TypeAlias = float | Callable[..., Scalar]
Schedule: TypeAlias = Callable[[Array, Gaussian], Scalar]


class SVBRate(NamedTuple):
    """The step size c / (√t σ²); made by :func:`svb_rate`."""

    constant: float

    def __call__(self, count: Array, q: Gaussian) -> Array:
        """The rates at round ``count`` (1, 2, ...), one for each coordinate."""
        return self.times_variance(count, q) / jnp.square(
            family_of(q).marginal_scale(q)
        )

    def times_variance(self, count: Array, q: Gaussian) -> Array:
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
    return SVBRate(check_number(c, "c", "(0, inf)"))


def as_schedule(step_size: StepSize, name: str = "step_size") -> Schedule:
    """The step size as a function of ``(count, q)``; ``count`` is 1 in the first round.

    Args:
        step_size: A positive float, a callable of the count, or of ``(count, q)``.
        name: Name of the argument, for messages.

    Raises:
        ValueError: If it is an array, or a number that is not positive and finite. Where a callable returns a
            negative rate, the round is rejected.
        TypeError: If it is neither a number nor a callable of one or two arguments.
    """
    if not callable(step_size):
        if is_traced(step_size):
            # A traced rate lets a grid of rates run under one vmap.
            return lambda count, q: _not_negative(step_size, q)
        hint = "A callable of the count or of (count, q) will do too."
        value = float(check_number(step_size, name, "(0, inf)", hint=hint))
        return lambda count, q: value
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    parameters = inspect.signature(step_size).parameters.values()
    num_required = sum(
        p.default is p.empty and p.kind in positional for p in parameters
    )
    if num_required not in (1, 2):
        required = f"requires {num_required} arguments"
        raise TypeError(
            f"{name} must take the count or (count, q), but {step_size!r} {required}."
        )
    return lambda count, q: _not_negative(step_size(*(count, q)[:num_required]), q)


def _not_negative(rate: ArrayLike, q: Gaussian) -> Array:
    rate = jnp.asarray(rate, q.loc.dtype)
    return jnp.where(rate >= 0, rate, jnp.nan)


def check_prior(prior: Q) -> Q:
    """The prior as floating arrays of one dtype.

    Raises:
        TypeError: If it is of no family.
        ValueError: If shapes disagree, or (outside of transformations) values are not those of a prior.
    """
    return family_of(prior).check(prior)


def in_box(rule: Rule, box: Box | Ball | None) -> Rule:
    """The rule with its prior checked, and projected on a box or ball before the first and after every round.

    Raises:
        ValueError: If a bound is not positive.
    """
    box = check_box(box, in_ball=True)

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(check_prior(prior))
        return state._replace(posterior=project(state.posterior, box))

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        state = rule.update(evaluation, state)
        return state._replace(posterior=project(state.posterior, box))

    return rule._replace(
        init=init, update=update, box=None if isinstance(box, Ball) else box
    )


def refuse_model(value: object) -> None:
    """Raise TypeError where an ``OnlineVI`` or its state stands for a rule, an expectation or a state."""
    calls = "online.run(rng_key, *args), online.update(state, *args), online.run_chunks(rng_key, chunks)"
    if hasattr(value, "prepare_round"):
        raise TypeError(
            f"an OnlineVI has calls of its own: {calls}, and online.service(state, *args), which predicts."
        )
    if hasattr(value, "rule_state"):
        raise TypeError(
            f"an OnlineVI takes its state itself: {calls}; or pass state.rule_state with a bare loss."
        )


def choose(condition: Array, new: T, old: T) -> T:
    """The new tree where the condition holds, the old one elsewhere."""
    return jax.tree.map(partial(jnp.where, condition), new, old)


def start(prior: Gaussian, posterior: Gaussian, memory: PyTree = ()) -> OnlineState:
    """A state before the first round."""
    # Distinct buffers, so that the state can be donated to a compiled update.
    zeros = [jnp.zeros((), prior.loc.dtype) for _ in range(5)]
    count, rejected, floored, jumps = (jnp.zeros((), jnp.int32) for _ in range(4))
    cumulative = CumulativeLosses(
        CompensatedSum(*zeros[:2]), CompensatedSum(*zeros[2:4])
    )
    return OnlineState(
        posterior, prior, memory, count, rejected, cumulative, floored, jumps, zeros[4]
    )


def advance(
    state: OnlineState,
    posterior: Gaussian,
    memory: PyTree = (),
    floored: Array | None = None,
) -> OnlineState:
    """The state after a round that led to ``posterior``."""
    state = state._replace(posterior=posterior, memory=memory, count=state.count + 1)
    return (
        state
        if floored is None
        else state._replace(floored=state.floored + floored.astype(jnp.int32))
    )


def close_round(state: OnlineState, losses: Losses, accept: Array) -> OnlineState:
    """The state with the losses of a round that is accepted, or with one more rejection."""
    sums = CumulativeLosses(
        *(total.add(loss) for total, loss in zip(state.cumulative, losses, strict=True))
    )
    return state._replace(
        rejected=state.rejected + (~accept).astype(state.rejected.dtype),
        cumulative=choose(accept, sums, state.cumulative),
    )


def move(rule: Rule, before: OnlineState, after: OnlineState) -> Array:
    """The longest move of a mean in a round, in standard deviations; coordinates without any do not count."""
    return move_of(before.posterior, after.posterior, unit_of(rule, before))


def unit_of(rule: Rule, state: OnlineState) -> Gaussian:
    """The Gaussian whose standard deviations measure moves."""
    return state.posterior if rule.calibrated else state.prior


def move_of(before: Gaussian, after: Gaussian, unit: Gaussian) -> Array:
    """The longest move of a mean in standard deviations of ``unit``."""
    scale = family_of(unit).marginal_scale(unit)
    return jnp.max(
        jnp.abs(after.loc - before.loc) / jnp.where(scale > 0, scale, jnp.inf)
    )


def layers(state: OnlineState) -> Iterator[PyTree]:
    """The memory of a state, and those inside of it where rules wrap rules."""
    memory: Any = getattr(state, "memory", None)
    yield memory
    while hasattr(memory, "memory"):
        memory = memory.memory
        yield memory


def memory_of(state: OnlineState, kind: type[T], maker: str) -> T:
    """The memory of a state, for functions that read the states of one rule.

    Args:
        state: The state.
        kind: Type of the memory of that rule.
        maker: What makes such a rule, for the message.

    Raises:
        TypeError: If the state is of another rule.
    """
    for memory in layers(state):
        if isinstance(memory, kind):
            return memory
    raise TypeError(
        f"the state must be that of a rule made by {maker} (OnlineVI's is state.rule_state), whose memory is "
        f"{kind.__name__}; got {type(getattr(state, 'memory', None)).__name__}."
    )
