"""The server of partitioned variational inference: changes of factors enter the posterior."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    CompensatedSum,
    check_record,
    describe,
    is_traced,
)
from numpyro_tempered.gaussian.families.base import Gaussian, family_of
from numpyro_tempered.gaussian.natural import Natural, from_natural
from numpyro_tempered.online.parts.state import (
    Change,
    Changes,
    Factor,
    PartitionedState,
    check_prior,
    check_size,
    checksum,
)

# A sum of changes that leaves no Gaussian is halved this often before it is refused.
MAX_HALVINGS = 10


def combine(state: PartitionedState, changes: Changes) -> PartitionedState:
    """The state with the changes of some machines; see :class:`Partitioned`."""
    check_record(state, "state", PartitionedState, "pvi.init(prior, num_parts)")
    sequence = [changes] if isinstance(changes, Change) else list(changes)
    if not sequence:
        return state
    for change in sequence:
        if not isinstance(change, Change):
            advice = "; send factor.change" if isinstance(change, Factor) else ""
            raise TypeError(f"combine takes changes, got {describe(change)}{advice}.")
        _check_change(change, state)
    stacked = [
        jax.tree.map(lambda leaf: leaf[None], c) if c.part.ndim == 0 else c
        for c in sequence
    ]
    joined = (
        stacked[0]
        if len(stacked) == 1
        else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacked)
    )
    return _combine(state, joined)


def _check_change(change: Change, state: PartitionedState) -> None:
    """Raise where a change does not belong to the state, as far as values can be read."""
    check_size(change, state, "change")
    if is_traced(change, state):
        return
    check_prior(change, state, "change")
    parts, numbers = (
        np.atleast_1d(np.asarray(change.part)),
        np.atleast_1d(np.asarray(change.round)),
    )
    num_parts = state.rounds.shape[0]
    if np.any((parts < 0) | (parts >= num_parts)):
        raise ValueError(
            f"a change came from machine {parts.tolist()}, and there are {num_parts}, from 0."
        )
    arrived = np.asarray(state.rounds)[parts]
    if np.any(late := numbers > arrived + 1):
        part, number, before = (
            int(column[late][0]) for column in (parts, numbers, arrived)
        )
        raise ValueError(
            f"change {number} of machine {part} came, and {before + 1} was expected: the one before is lost, or "
            "the machine and the server are of different runs."
        )


@jax.jit
def _combine(state: PartitionedState, changes: Change) -> PartitionedState:
    fresh, state = _sort(state, changes)
    sound = fresh & _is_finite(changes)
    total = jax.tree.map(
        lambda leaf: jnp.sum(jnp.where(_column(sound, leaf), leaf, 0.0), axis=0),
        changes.natural,
    )
    return _enter(state, changes.part, (fresh, sound), total)


def combine_over(
    state: PartitionedState, change: Change, axis_name: str
) -> PartitionedState:
    """The state with the changes of all devices of a named axis, by collectives; see :class:`Partitioned`."""
    check_size(change, state, "change")
    if change.part.ndim == 0:
        change = jax.tree.map(lambda leaf: leaf[None], change)
    finite = _is_finite(change)
    nothing = jnp.zeros((change.part.shape[0], 0), change.linear.dtype)
    # Of all changes the counters alone; the parameters are summed on their way.
    head = change._replace(linear=nothing, precision=nothing)
    heads, all_finite = jax.tree.map(
        lambda leaf: jax.lax.all_gather(leaf, axis_name, tiled=True), (head, finite)
    )
    fresh, state = _sort(state, heads)
    sound = fresh & all_finite
    first = jax.lax.axis_index(axis_name) * change.part.shape[0]
    of_device = jax.lax.dynamic_slice_in_dim(sound, first, change.part.shape[0])
    total = jax.tree.map(
        lambda leaf: jax.lax.psum(
            jnp.sum(jnp.where(_column(of_device, leaf), leaf, 0.0), axis=0), axis_name
        ),
        change.natural,
    )
    return _enter(state, heads.part, (fresh, sound), total)


def _column(flags: Array, leaf: Array) -> Array:
    return jnp.reshape(flags, (-1,) + (1,) * (leaf.ndim - 1))


def _is_finite(changes: Change) -> Array:
    axes = tuple(range(1, changes.precision.ndim))
    return jnp.all(jnp.isfinite(changes.linear), axis=-1) & jnp.all(
        jnp.isfinite(changes.precision), axis=axes
    )


def _sort(state: PartitionedState, changes: Change) -> tuple[Array, PartitionedState]:
    """Which changes are the next of their machines, and the state with all of them counted."""
    num_parts = state.rounds.shape[0]
    of_state = (
        (changes.prior == checksum(state.prior))
        & (changes.part >= 0)
        & (changes.part < num_parts)
    )

    def arrive(rounds: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        part, number, is_of_state = row
        fresh = is_of_state & (number == rounds[part] + 1)
        return rounds.at[part].add(fresh.astype(rounds.dtype)), fresh

    rounds, fresh = jax.lax.scan(
        arrive, state.rounds, (changes.part, changes.round, of_state)
    )
    repeated = of_state & ~fresh & (changes.round <= rounds[changes.part])
    return fresh, state._replace(
        rounds=rounds,
        duplicates=state.duplicates + jnp.sum(repeated, dtype=jnp.int32),
        rejected=state.rejected + jnp.sum(~fresh & ~repeated, dtype=jnp.int32),
    )


def _enter(
    state: PartitionedState, parts: Array, flags: tuple[Array, Array], total: Natural
) -> PartitionedState:
    """The state with the longest share of a sum of changes that leaves a Gaussian."""
    fresh, sound = flags
    family = family_of(state.posterior)
    sums = list(zip(state.natural, state.rounding, strict=True))

    def entered(share: Array) -> tuple[Natural, Natural, Gaussian]:
        added = [
            CompensatedSum(*pair).add(share * term)
            for pair, term in zip(sums, total, strict=True)
        ]
        natural = Natural(*(each.value for each in added))
        posterior = from_natural(natural, state.prior.loc, state.posterior)
        return natural, Natural(*(each.error for each in added)), posterior

    def is_gaussian(posterior: Gaussian) -> Array:
        return jnp.isfinite(jnp.sum(family.witness(posterior)))

    def halve(carry: tuple) -> tuple:
        share = 0.5 * carry[0]
        return share, entered(share)

    one = jnp.ones((), state.linear.dtype)
    least = 2.0**-MAX_HALVINGS
    share, (natural, rounding, posterior) = jax.lax.while_loop(
        lambda carry: ~is_gaussian(carry[1][2]) & (carry[0] > least),
        halve,
        (one, entered(one)),
    )
    fits = is_gaussian(posterior)
    share = jnp.where(fits, share, 0.0)
    old = (state.natural, state.rounding, state.posterior)
    natural, rounding, posterior = jax.tree.map(
        functools.partial(jnp.where, fits & jnp.any(sound)),
        (natural, rounding, posterior),
        old,
    )
    # A place beyond the last drops what is not fresh.
    places = jnp.where(fresh, parts, state.shares.shape[0])
    shares = state.shares.at[places].set(jnp.where(sound, share, 0.0), mode="drop")
    lost = fresh & ~(sound & fits)
    return state._replace(
        posterior=posterior,
        linear=natural.linear,
        precision=natural.precision,
        rounding=rounding,
        shares=shares,
        halved=state.halved
        + ((share > 0) & (share < 1) & jnp.any(sound)).astype(jnp.int32),
        rejected=state.rejected + jnp.sum(lost, dtype=jnp.int32),
    )
