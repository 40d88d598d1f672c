"""Streams over several processes: arrays of all of them on the host, and checks that all pass or fail together.

What one process alone raises leaves the others waiting in their next sum, for ever.
"""

import hashlib
import json
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from numpyro_tempered.core import (
    Array,
    PyTree,
    automatic_mesh,
    has_mesh,
    is_traced,
    spans_processes,
    to_host,
)

T = TypeVar("T")
ADVICE = "Make arrays of all of them, by nt.online.global_batches or jax.make_array_from_process_local_data."
_KINDS = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, FileNotFoundError, ImportError, OSError)
}


def is_shared_out(leaf: object) -> bool:
    """Whether no process has the whole of an array."""
    return spans_processes(leaf) and not leaf.is_fully_replicated  # type: ignore[attr-defined]


def replicate(values: T, like: PyTree = None) -> T:
    """A tree whose every array all processes hold in full, but for those of which ``like`` has parts."""

    def replicate_leaf(leaf: object, before: object = None) -> object:
        if not is_shared_out(leaf) or is_shared_out(before):
            return leaf
        return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))  # type: ignore[attr-defined]

    return (
        jax.tree.map(replicate_leaf, values)
        if like is None
        else jax.tree.map(replicate_leaf, values, like)
    )


def automatic_meshes(values: T) -> T:
    """A tree of arrays after :func:`automatic_mesh`."""
    # A round in a loop of Python must not wait for this.
    if not any(map(has_mesh, jax.tree.leaves(values))):
        return values
    return jax.tree.map(automatic_mesh, values)


def gather(row: np.ndarray) -> np.ndarray:
    """The rows of all processes, ``(number of processes, n)``."""
    if jax.process_count() == 1:
        return row[None]
    from jax.experimental import multihost_utils

    return np.reshape(
        np.asarray(multihost_utils.process_allgather(row)), (-1, row.size)
    )


def exchange(message: str) -> list[str]:
    """The messages of all processes, in their order."""
    content = np.frombuffer(message.encode(), np.uint8)
    lengths = gather(np.asarray([content.size], np.int32))[:, 0]
    if not lengths.any():
        return [""] * len(lengths)
    # Of few lengths, each of which is compiled.
    row = np.zeros(1 << int(lengths.max()).bit_length(), np.uint8)
    row[: content.size] = content
    rows = gather(row)
    return [
        each[:length].tobytes().decode()
        for each, length in zip(rows, lengths, strict=True)
    ]


def on_all_processes(call: Callable[[], T]) -> T:
    """Call a function on every process; where it raises on one, all raise what the first of them did."""
    result, failure = attempt(call)
    failures = exchange(failure)
    if any(failures):
        raise_first(failures)
    return result  # type: ignore[return-value]


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """What a function returns, and what it raises, as a message for the other processes."""
    try:
        return call(), ""
    except Exception as error:
        return None, json.dumps([type(error).__name__, str(error)])


def raise_first(failures: list[str]) -> NoReturn:
    """Raise the failure of the first process that has one."""
    number = next(k for k, failure in enumerate(failures) if failure)
    kind, text = json.loads(failures[number])
    prefix = "" if kind in _KINDS else f"{kind}: "
    raise _KINDS.get(kind, RuntimeError)(
        f"{prefix}{text} (on process {number} of {len(failures)})"
    )


class Placement(NamedTuple):
    """How the arrays of a chunk lie on several processes.

    Attributes:
        shardings: Of each leaf, None where each process holds the whole; empty for chunks of this process alone.
    """

    shardings: tuple[NamedSharding | None, ...] = ()

    @classmethod
    def of(cls, chunk: PyTree) -> "Placement":
        """That of a chunk. An array whose rounds are cut is gathered: every process needs all of them."""
        if not spans_processes(chunk):
            return cls()
        return cls(
            tuple(_by_round(leaf) for leaf in jax.tree.leaves(automatic_meshes(chunk)))
        )

    def take(self, chunk: T) -> T:
        """The part of a chunk that this process holds, on the host.

        Raises:
            ValueError: If it lies otherwise than the first chunk.
        """
        other = Placement.of(chunk)
        if other.shardings != self.shardings:
            raise ValueError(
                f"a chunk lies on the processes as {other.shardings}, the first one as {self.shardings}: cut all "
                "chunks alike."
            )
        if not self.shardings:
            return chunk
        leaves, tree = jax.tree.flatten(automatic_meshes(chunk))
        pairs = zip(leaves, self.shardings, strict=True)
        return jax.tree.unflatten(
            tree, [to_host(leaf) if s is None else _local(leaf) for leaf, s in pairs]
        )

    def put(self, block: PyTree) -> PyTree:
        """Arrays of all processes, of the parts that they hold."""
        if not self.shardings:
            return jax.tree.map(jnp.asarray, block)
        leaves, tree = jax.tree.flatten(block)
        pairs = zip(leaves, self.shardings, strict=True)
        return jax.tree.unflatten(
            tree,
            [
                jnp.asarray(leaf)
                if s is None
                else jax.make_array_from_process_local_data(s, leaf)
                for leaf, s in pairs
            ],
        )


def _by_round(leaf: object) -> NamedSharding | None:
    """The sharding of an array whose first axis is whole."""
    if not is_shared_out(leaf) or not isinstance(leaf.sharding, NamedSharding):  # type: ignore[attr-defined]
        return None
    is_cut = leaf.sharding.shard_shape(leaf.shape)[0] != leaf.shape[0]  # type: ignore[attr-defined]
    return None if is_cut else leaf.sharding  # type: ignore[attr-defined]


def _local(leaf: Array) -> np.ndarray:
    """What this process holds of an array, as ``jax.make_array_from_process_local_data`` takes it."""
    from jax.experimental import multihost_utils

    layout = leaf.sharding.mesh, leaf.sharding.spec  # type: ignore[attr-defined]
    return np.asarray(multihost_utils.global_array_to_host_local_array(leaf, *layout))


def check_pieces(check: Callable[..., None], *values: PyTree) -> None:
    """Run a check on the rows that each process holds; where it raises on one, all raise."""
    parts = _pieces(values)

    def run() -> None:
        for part in parts:
            check(*part)

    on_all_processes(run)


def _pieces(values: tuple) -> list[tuple]:
    """The parts of arrays on the devices of this process, or the whole, where arrays are not cut alike."""
    leaves, tree = jax.tree.flatten(values)
    cuts = {_cut(leaf) for leaf in leaves if np.ndim(leaf)}
    if len(cuts) > 1 or None in cuts:
        return [jax.tree.map(to_host, values)]
    by_device = [
        {shard.device: np.asarray(shard.data) for shard in leaf.addressable_shards}
        if np.ndim(leaf)
        else leaf
        for leaf in leaves
    ]
    devices = next(each for each in by_device if isinstance(each, dict))
    parts = [
        [each[device] if isinstance(each, dict) else each for each in by_device]
        for device in devices
    ]
    return [jax.tree.unflatten(tree, part) for part in parts]


def _cut(leaf: object) -> tuple | None:
    """By which mesh and along which axes an array is cut; None where this cannot be said."""
    if not spans_processes(leaf) or not isinstance(leaf.sharding, NamedSharding):  # type: ignore[attr-defined]
        return None
    spec = list(leaf.sharding.spec)  # type: ignore[attr-defined]
    while spec and spec[-1] is None:
        spec.pop()
    return leaf.sharding.mesh, tuple(spec)  # type: ignore[attr-defined]


def check_same(values: PyTree, name: str, advice: str) -> None:
    """Raise where processes pass different arrays for what they compute together.

    Raises:
        ValueError: If arrays of this process are not those of the others.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(values):
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    digests = gather(np.frombuffer(digest.digest(), np.uint8))
    if np.any(digests != digests[0]):
        raise ValueError(
            f"{name} differ between processes, which compute this round together. {advice}"
        )


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_start(state: PyTree, rng_key: Array | None) -> None:
    """Raise where processes begin a run of all of them at other states, or with other keys.

    Raises:
        ValueError: If they differ.
    """
    if not spans_processes(state):
        check_same(
            (state, rng_key),
            "states or keys",
            "Start at one prior, or restore one file.",
        )


def prepare(
    state: T, data: PyTree, mask: PyTree, rng_key: Array | None
) -> tuple[T, PyTree, PyTree]:
    """State, data and mask of a run, ready to be computed on by all processes that hold them.

    Raises:
        ValueError: If the state is one for all processes, and each passes other data, or the data are, and each
            passes another state.
    """
    data, mask = automatic_meshes(data), automatic_meshes(mask)
    # A state has many arrays, and a round on one device must not look at each.
    state = automatic_meshes(state) if jax.device_count() > 1 else state
    if jax.process_count() > 1 and not is_traced(state, data, mask):
        if spans_processes(data, mask):
            check_start(state, rng_key)
        elif spans_processes(state):
            check_same((data, mask), "the data", ADVICE)
    return state, data, mask
