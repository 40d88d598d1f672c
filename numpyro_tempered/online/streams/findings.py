"""What went wrong in the rounds of a stream: rejections, jumps, and predictions worse than the prior's."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    CompensatedSum,
    first_row,
    is_traced,
    map_batches,
    share_trace,
    spans_processes,
    to_host,
    warn_caller,
)
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import JUMP, Data, Losses, OnlineState, layers
from numpyro_tempered.online.streams.robust import Weighing
from numpyro_tempered.online.streams.skip import Skipping
from numpyro_tempered.online.streams.standardise import Standardisation

# With fewer rounds, losses above those of the prior prove nothing.
MIN_ROUNDS = 50
# A datum that the prior itself does not predict tells nothing of the run.
SHARE = 0.99
MAX_OUTCOMES = 20
MIN_WEIGHT = 0.5
BATCH = 1024


class StreamWarning(UserWarning):
    """Findings of :func:`diagnose`, or of the end of a run.

    Example:
        >>> import numpyro_tempered as nt
        >>> issubclass(nt.online.StreamWarning, UserWarning)  # for warnings.filterwarnings
        True
    """


class Finding(NamedTuple):
    """Something to look at in the state of a stream.

    Attributes:
        kind: ``"rejected"``, ``"jump"``, ``"loss"``, ``"weights"``, ``"collapse"``, ``"box"`` or ``"features"``.
        message: What is wrong, and what to do.
        coordinates: Indices of the coordinates or features concerned, for the last three; else empty.
    """

    kind: str
    message: str
    coordinates: np.ndarray


class Pass(NamedTuple):
    """The rounds of one run, for its findings.

    Attributes:
        expectation: E_q of the loss.
        data: Arrays with a leading axis of T rounds.
        losses: Those of the T rounds.
        mask: Which rounds, or rows of their batches, are on; None for all.
    """

    expectation: Expectation
    data: Data
    losses: Losses
    mask: Array | None = None


def conclude(before: OnlineState, after: OnlineState, rounds: Pass) -> None:
    """Issue one :class:`StreamWarning` with all findings of a run; nothing inside of transformations."""
    if is_traced(before, after, rounds.data, rounds.losses):
        return
    findings = [*count_findings(after, before, rounds), *loss_findings(after, rounds)]
    if findings:
        messages = " ".join(finding.message for finding in findings)
        warn_caller(f"In this run {messages}", StreamWarning)


def count_findings(
    state: OnlineState, before: OnlineState | None = None, rounds: Pass | None = None
) -> Iterator[Finding]:
    """Findings in the counters of a state, less those of the state before a run."""
    counters = {
        name: int(getattr(state, name)) for name in ("count", "rejected", "jumps")
    }
    if before is not None:
        counters = {
            name: number - int(getattr(before, name))
            for name, number in counters.items()
        }
    total = counters["count"] + counters["rejected"]
    if counters["rejected"]:
        where = _skipped(state, before)
        if rounds is not None:
            where += _where(rounds, counters["rejected"])
        details = f" ({', '.join(where)})" if where else ""
        message = (
            f"{counters['rejected']} of {total} rounds were rejected{details}, and taught nothing: look for "
            "missing values, outcomes that the loss does not admit, or a step size that is too large."
        )
        yield Finding("rejected", message, np.empty(0, int))
    if counters["jumps"]:
        message = (
            f"{counters['jumps']} of {total} rounds moved a mean by more than {JUMP:g} of its standard "
            f"deviations (the longest of the stream by {float(state.max_move):.3g}). Explicit steps overshoot "
            "at outliers and unscaled features, mean fields at collinear ones, and data may be far from a narrow "
            "prior: take rvga, a full covariance, a wider prior or nt.online.standardise, or wrap the rule by "
            "nt.online.clip or robust."
        )
        yield Finding("jump", message, np.empty(0, int))
    yield from _weight_findings(state, before)


def _skipped(state: OnlineState, before: OnlineState | None) -> list[str]:
    """How many of the rejections are those of a rule by :func:`skip`."""
    number = _memory_sum(state, Skipping, "skipped") - _memory_sum(
        before, Skipping, "skipped"
    )
    return [f"{int(number)} skipped by the rule"] if number else []


def _memory_sum(state: OnlineState | None, kind: type, name: str) -> float:
    """The sum of a number over the layers of a memory that are of one kind."""
    memories = (
        []
        if state is None
        else [memory for memory in layers(state) if isinstance(memory, kind)]
    )
    return sum(float(_value(getattr(memory, name))) for memory in memories)


def _value(number: Array | CompensatedSum) -> Array:
    return number.value if isinstance(number, CompensatedSum) else number


def _weight_findings(
    state: OnlineState, before: OnlineState | None
) -> Iterator[Finding]:
    """Whether a rule by :func:`robust` gave its data little weight."""
    number = _memory_sum(state, Weighing, "count") - _memory_sum(
        before, Weighing, "count"
    )
    total = _memory_sum(state, Weighing, "total") - _memory_sum(
        before, Weighing, "total"
    )
    if number >= MIN_ROUNDS and total < MIN_WEIGHT * number:
        message = (
            f"robust gave {int(number)} rounds a mean weight of {total / number:.2g}: most are far from their "
            "predictions, and hardly count. Give the noise its scale, a larger threshold, or a prior nearer the "
            "data."
        )
        yield Finding("weights", message, np.empty(0, int))


def _where(rounds: Pass, number: int) -> list[str]:
    """Which rounds were rejected, as far as data and losses show."""
    num_rounds = np.shape(rounds.losses.expected)[0]
    missing = np.zeros(num_rounds, bool)
    for leaf in jax.tree.leaves(rounds.data):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            # Rounds of several processes are looked at where they are.
            library = jnp if spans_processes(leaf) else np
            missing |= ~to_host(
                library.all(library.isfinite(leaf).reshape(num_rounds, -1), axis=1)
            )
    at_mean = to_host(rounds.losses.at_mean)
    lost = ~(np.isfinite(at_mean) & np.isfinite(to_host(rounds.losses.expected)))
    if rounds.mask is not None and np.ndim(rounds.mask) == 1:
        on = to_host(rounds.mask)
        missing, lost = missing & on, lost & on
    lost &= ~missing
    # Rules with implicit steps take rounds whose expected loss is infinite: those were not lost.
    if np.sum(missing | lost) > number:
        lost &= ~np.isfinite(at_mean)
    parts = []
    if missing.any() and (rounds.mask is None or np.ndim(rounds.mask) == 1):
        parts.append(
            f"{missing.sum()} with data that are not finite, the first in row {missing.argmax()}"
        )
    if lost.any():
        parts.append(
            f"{lost.sum()} with a loss that is not finite, the first in row {lost.argmax()}"
        )
        parts += _common_outcome(jax.tree.leaves(rounds.data)[-1], lost)
    return parts


def _common_outcome(outcomes: Array, lost: np.ndarray) -> list[str]:
    """The outcomes whose every round was lost, where there are few distinct ones."""
    if np.size(outcomes) != lost.size:
        return []
    values = to_host(outcomes).reshape(lost.size, -1)
    if values.dtype.kind not in "bif":
        return []
    distinct = np.unique(values[np.isfinite(values)])
    lost_outcomes = [
        f"{value:g}" for value in distinct if np.all(lost[values[:, 0] == value])
    ]
    return (
        [f"all those of outcome {', '.join(lost_outcomes)}"]
        if lost_outcomes and distinct.size <= MAX_OUTCOMES
        else []
    )


def loss_findings(state: OnlineState, rounds: Pass) -> Iterator[Finding]:
    """Whether the losses of a run exceed those of predictions at the prior mean on the same rows.

    What learning costs is not told: on pure noise d parameters cost about d (1 + log(1 + T/d)) times the loss of
    one round.
    """
    standardised = any(isinstance(memory, Standardisation) for memory in layers(state))
    num_rounds = np.shape(rounds.losses.at_mean)[0]
    if rounds.expectation.loss is None or num_rounds < MIN_ROUNDS:
        return
    loc = state.prior.loc
    # The features of the loss are not those of the data, which does not matter at 0.
    if standardised and np.any(np.asarray(loc)):
        return
    rows = (rounds.data, rounds.mask)
    prior = to_host(prior_losses(rounds.expectation.loss, loc, rows)).astype(float)
    ours = to_host(rounds.losses.at_mean).astype(float)
    used = np.isfinite(prior) & np.isfinite(ours)
    if rounds.mask is not None:
        used &= to_host(rounds.mask).reshape(num_rounds, -1).any(axis=1)
    if used.sum() < MIN_ROUNDS:
        return
    size = np.abs(prior)
    used &= size <= np.quantile(size[used], SHARE)
    ours, prior, size = ours[used], prior[used], size[used]
    per_round = loc.shape[0] / used.sum()
    allowance = (
        0.05 + 2.0 * per_round * (1.0 + np.log1p(1.0 / per_round))
    ) * size.mean()
    if ours.mean() > prior.mean() + allowance:
        message = (
            f"the mean loss, {ours.mean():.4g}, is above {prior.mean():.4g}, that of predictions at the prior "
            "mean for the same rows: the posterior predicts worse than if it had not learned. Take rvga, a full "
            "covariance or a smaller step size, standardise the features, or wrap the rule by nt.online.clip or "
            "robust."
        )
        yield Finding("loss", message, np.empty(0, int))


def prior_losses(
    loss: Callable[..., Array], theta: Array, rows: tuple[Data, Array | None]
) -> Array:
    """The losses ``(T,)`` of T rounds at one θ; rows that are off do not count."""
    of_row: Callable[..., Array] = share_trace(RowLoss(loss), theta, *first_row(rows))  # type: ignore[arg-type]
    return _prior_losses(of_row, theta, rows)


class RowLoss(NamedTuple):
    """The loss of one round as a function of θ, data and mask, in which rows that are off do not count."""

    loss: Callable[..., Array]

    def __call__(self, theta: Array, data: Data, mask: Array | None) -> Array:
        """The sum over the rows of the round."""
        losses = self.loss(theta, *data)
        if mask is None or mask.ndim == 0:
            return jnp.sum(losses)
        return jnp.sum(jnp.where(mask, losses, jnp.zeros((), losses.dtype)))


@partial(jax.jit, static_argnums=0)
def _prior_losses(
    of_row: Callable[..., Array], theta: Array, rows: tuple[Data, Array | None]
) -> Array:
    return map_batches(lambda row: of_row(theta, *row), rows, BATCH)
