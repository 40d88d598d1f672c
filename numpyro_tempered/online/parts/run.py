"""Rounds of partitioned variational inference for shards on one machine."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Description,
    add_repr,
    check_count,
    check_number,
    check_record,
    stream_arrays,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import Derivatives, stationarity
from numpyro_tempered.gaussian.expectations.base import Data
from numpyro_tempered.gaussian.families.base import Gaussian, family_of
from numpyro_tempered.online.parts.local import check_rows
from numpyro_tempered.online.parts.partitioned import Partitioned
from numpyro_tempered.online.parts.state import Change, Factor, PartitionedState
from numpyro_tempered.online.streams.findings import StreamWarning


@add_repr
class PartitionedRun(NamedTuple):
    """The end of :func:`run_partitioned`, and its rounds.

    Attributes:
        state: The :class:`PartitionedState` of the server.
        factors: The :class:`Factor` of all machines, with a leading axis ``(K,)``.
        elbo: The ELBO of the posterior before each round, in nats, where the loss is a negative log-likelihood
            with every constant; shape ``(R,)``.
        move: How far each round moved the posterior, the KL of both to second order over ρ², in nats: about the
            KL gap to where the rounds lead; shape ``(R,)``.
        skipped: Rows left out in the last round because they are not finite, ``(K,)``.
        converged: Whether the last round moved by no more than the tolerance.
    """

    state: PartitionedState
    factors: Factor
    elbo: np.ndarray
    move: np.ndarray
    skipped: np.ndarray
    converged: bool

    @property
    def posterior(self) -> Gaussian:
        """The posterior of all rows."""
        return self.state.posterior

    @property
    def target(self) -> None:
        """None: the loss is none that ArviZ knows."""
        return None

    def sample_posterior(
        self, rng_key: Array, sample_shape: tuple[int, ...] = ()
    ) -> dict[str, Array]:
        """Draws of the posterior, ``theta``."""
        q = self.posterior
        return {"theta": family_of(q).sample(rng_key, q, sample_shape)}

    def describe(self) -> Description:
        """The rounds, for :func:`~numpyro_tempered.to_inference_data`."""
        return Description(
            {"variational": {"elbo_trace": self.elbo, "move_trace": self.move}},
            {
                "algorithm": "partitioned",
                "elbo": float(self.elbo[-1]),
                "converged": int(self.converged),
                "num_rounds": len(self.move),
            },
            {"theta": ["coordinate"], "elbo_trace": ["round"], "move_trace": ["round"]},
        )


def run_partitioned(
    pvi: Partitioned,
    prior: Gaussian,
    shards: Sequence[tuple],
    *,
    num_rounds: int = 20,
    tolerance: float = 1e-4,
    sequential: bool = False,
    rng_key: Array | None = None,
) -> PartitionedRun:
    """Rounds over shards that one machine holds: to plan rounds of many, or to try a damping.

    In a synchronous round all shards are refitted from the same posterior, and their changes enter at once. In a
    sequential one each is refitted from the posterior that has the changes of those before it, which takes no
    damping on most problems; of K machines only one is then at work.

    Args:
        pvi: From :func:`partitioned`.
        prior: A :class:`.MeanField` or :class:`.FullRank`.
        shards: The data of each machine, tuples such as ``(x, y)``; sizes may differ, and be 0.
        num_rounds: At most.
        tolerance: On the move of a round, in nats.
        sequential: Whether rounds are sequential.
        rng_key: For expectations that draw: the same draws in each round.

    Returns:
        A :class:`PartitionedRun`. Outside of transformations one :class:`StreamWarning` says where rounds did not
        converge, changes were refused or rows left out.

    Raises:
        ValueError: If there is no shard, data do not fit the loss, or the expected loss of a shard is beyond the
            dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.logistic()
        >>> x, y = jnp.array([[1.0, 0.5], [0.2, -1.0], [1.0, 1.0], [0.3, 0.1]]), jnp.array([1.0, -1.0, -1.0, 1.0])
        >>> prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
        >>> pvi = nt.online.partitioned(logistic)
        >>> run = nt.online.run_partitioned(pvi, prior, [(x[:3], y[:3]), (x[3:], y[3:])])
        >>> run.converged, len(run.elbo) < 20
        (True, True)
    """
    check_record(
        pvi, "pvi", Partitioned, "nt.online.partitioned(nt.expectations.squared())"
    )
    check_count(num_rounds, "num_rounds")
    check_number(tolerance, "tolerance", "(0, inf]")
    if not len(shards):
        raise ValueError("shards must hold the data of at least one machine, got none.")
    data, mask = _stack(pvi, [stream_arrays(tuple(shard)) for shard in shards])
    state = pvi.init(prior, len(shards))
    factors = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *(pvi.factor(state, part) for part in range(len(shards))),
    )
    one_round = _sequential if sequential else _synchronous
    elbo, move = [], []
    for _ in range(num_rounds):
        state, factors, record = one_round(pvi, state, factors, (data, mask), rng_key)
        elbo.append(float(record.elbo))
        move.append(float(record.move) / float(pvi.damping) ** 2)
        if not np.all(np.isfinite(factors.change.linear)):
            part = int(np.argmin(np.all(np.isfinite(factors.change.linear), axis=1)))
            raise ValueError(
                f"round {len(move)}: the local fit of shard {part} is not finite: the expected loss of its rows "
                "is beyond the dtype at the posterior. Standardise the features, or take a narrower prior."
            )
        if move[-1] <= tolerance:
            break
    run = PartitionedRun(
        state,
        factors,
        np.asarray(elbo),
        np.asarray(move),
        np.asarray(factors.change.skipped),
        bool(move[-1] <= tolerance),
    )
    _warn(run, tolerance)
    return run


class _Record(NamedTuple):
    elbo: Array
    move: Array


def _stack(pvi: Partitioned, shards: list[Data]) -> tuple[Data, Array]:
    """The shards with a leading axis of machines, filled up to the largest, and which rows are there."""
    checked = [check_rows(pvi.expectation, shard, None) for shard in shards]
    structures = {jax.tree.structure(data) for data, _ in checked}
    if len(structures) > 1:
        raise ValueError(
            f"shards must hold the same arrays, got {sorted(map(str, structures))}."
        )
    size = max(on.shape[0] for _, on in checked)

    def fill_up(leaf: Array) -> Array:
        return jnp.concatenate(
            [leaf, jnp.broadcast_to(leaf[:1], (size - leaf.shape[0], *leaf.shape[1:]))]
        )

    full = [
        (jax.tree.map(fill_up, data), jnp.arange(size) < jnp.sum(on))
        for data, on in checked
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *full)


@functools.partial(jax.jit, static_argnums=0)
def _synchronous(
    pvi: Partitioned,
    state: PartitionedState,
    factors: Factor,
    rows: tuple[Data, Array],
    rng_key: Array | None,
) -> tuple[PartitionedState, Factor, _Record]:
    """All machines from one posterior."""

    def refit(inputs: tuple[Factor, tuple[Data, Array]]) -> Factor:
        factor, (data, on) = inputs
        return pvi.refit(factor, state, *data, mask=on, rng_key=rng_key)

    after = jax.lax.map(refit, (factors, rows))
    combined = pvi.combine(state, after.change)
    return combined, after, _record(state, combined, after.change)


@functools.partial(jax.jit, static_argnums=0)
def _sequential(
    pvi: Partitioned,
    state: PartitionedState,
    factors: Factor,
    rows: tuple[Data, Array],
    rng_key: Array | None,
) -> tuple[PartitionedState, Factor, _Record]:
    """One machine after the other, each from the posterior that it finds."""

    def advance(
        present: PartitionedState, inputs: tuple[Factor, tuple[Data, Array]]
    ) -> tuple[PartitionedState, Factor]:
        factor, (data, on) = inputs
        after = pvi.refit(factor, present, *data, mask=on, rng_key=rng_key)
        return pvi.combine(present, after.change), after

    combined, after = jax.lax.scan(advance, state, (factors, rows))
    return combined, after, _record(state, combined, after.change)


def _record(
    before: PartitionedState, after: PartitionedState, changes: Change
) -> _Record:
    family = family_of(before.posterior)
    elbo = -jnp.sum(changes.expected_loss) - family.kl(before.posterior, before.prior)
    # The KL to second order, which is no difference of large numbers.
    pull = -after.natural.slope(before.posterior.loc - before.prior.loc)
    move = stationarity(
        before.posterior, Derivatives(jnp.zeros_like(elbo), pull, after.precision)
    )
    return _Record(elbo, move)


def _warn(run: PartitionedRun, tolerance: float) -> None:
    """One warning of what a run did not do."""
    remarks = []
    if not run.converged:
        fall = len(run.elbo) > 2 and run.elbo[-1] < np.max(run.elbo) - 1e-6 * abs(
            np.max(run.elbo)
        )
        remedy = "a smaller damping" if fall or run.state.halved else "more num_rounds"
        if run.state.linear.dtype != jnp.float64:
            remedy += ", or double precision where features are nearly collinear under a wide prior"
        fell = ", and the ELBO fell" if fall else ""
        remarks.append(
            f"{len(run.move)} rounds did not converge{fell}: the last moved the posterior by {run.move[-1]:.2g} "
            f"nats, above the tolerance {tolerance:.2g}; take {remedy}"
        )
    if rejected := int(run.state.rejected):
        remarks.append(
            f"{rejected} changes were refused, since they leave no Gaussian; take a smaller damping, or double "
            "precision"
        )
    if skipped := int(np.sum(run.skipped)):
        remarks.append(f"{skipped} rows are not finite and were left out")
    if remarks:
        warn_caller("; ".join(remarks) + ".", StreamWarning)
