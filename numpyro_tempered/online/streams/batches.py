"""Batches of which each process reads its own rows."""

import itertools
import json
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core import Array, blocks, check_count
from numpyro_tempered.online.streams.processes import (
    attempt,
    exchange,
    gather,
    raise_first,
)


def global_batches(
    chunks: Iterable[tuple],
    *,
    size: int = 1024,
    mesh: Mesh | None = None,
    skip: int = 0,
) -> Iterator[tuple[tuple[Array, ...], Array]]:
    """Batches of the rows that all processes read, each its own share, for :func:`update` with its mask.

    All processes call this and take all batches: each batch has ``size / P`` rows of each of P processes. The
    stream ends when the last of them has no row left; rows that a process lacks are off in the mask. A reader
    that fails on one process raises on all of them, at the batch where it failed.

    Args:
        chunks: Tuples of arrays, such as ``(x, y)``, with the rows of this process alone, any number in each: for
            example ``nt.online.parquet_chunks(path, "y", part=(jax.process_index(), jax.process_count()))``.
        size: Rows in a batch, of all processes together.
        mesh: A mesh over the devices of all processes, over all of whose axes rows go; by default one of all
            devices.
        skip: Batches to leave out at the start. A run that was saved goes on with
            ``skip=int(state.count + state.rejected)``.

    Yields:
        The arrays of a batch, with ``size`` rows over all processes, and the mask ``(size,)`` of the rows that
        are data.

    Raises:
        ValueError: If ``size`` is not a multiple of the number of devices or less than 2 for each process, no
            process has a chunk, or chunks differ in form.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> chunks = [(np.ones((5, 2)), np.ones(5))]
        >>> [int(mask.sum()) for (x, y), mask in nt.online.global_batches(chunks, size=4)]
        [4, 1]
    """
    mesh = (
        Mesh(np.array(jax.devices()), ("rows",))
        if mesh is None
        else Mesh(mesh.devices, mesh.axis_names)
    )
    count = jax.process_count()
    if check_count(size, "size", least=2 * count) % mesh.size:
        raise ValueError(
            f"size must be a multiple of the {mesh.size} devices of the mesh, got {size}."
        )
    num_rows = size // count
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local = _local_blocks(chunks, num_rows, skip)
    block, failure = attempt(lambda: next(local, None))
    empty = _empty_block(block, failure, num_rows)
    if not empty and not skip:
        raise ValueError(
            "no process has a row. An iterator is used up by one pass: give a list, or a new one."
        )
    while True:
        numbers = gather(
            np.asarray([-1 if failure else block[1] if block else 0], np.int32)
        )[:, 0]
        if np.any(numbers < 0):
            raise_first(exchange(failure))
        if not np.any(numbers):
            return
        rows, number = block or (empty, 0)
        placed = [
            jax.make_array_from_process_local_data(sharding, leaf) for leaf in rows
        ]
        mask = jax.make_array_from_process_local_data(
            sharding, np.arange(num_rows) < number
        )
        yield tuple(placed), mask
        block, failure = attempt(lambda: next(local, None))


def _local_blocks(
    chunks: Iterable[tuple], num_rows: int, skip: int
) -> Iterator[tuple[tuple[np.ndarray, ...], int]]:
    """The rows of this process in blocks of one size; none where it has no chunk."""
    iterator = iter(chunks)
    first = list(itertools.islice(iterator, 1))
    if not first:
        return
    kinds: list[np.dtype] = []
    for rows, number in blocks(
        itertools.chain(first, iterator), num_rows, skip * num_rows
    ):
        if not all(isinstance(leaf, np.ndarray) for leaf in rows):
            raise ValueError(
                "a chunk must be a tuple of arrays, such as (x, y), and none of them a tree."
            )
        kinds = kinds or [leaf.dtype for leaf in rows]
        yield tuple(map(_as_first, rows, kinds)), number


def _as_first(leaf: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Return the array in the dtype of the first rows, on which all processes have agreed.

    Raises:
        ValueError: If that does not hold it.
    """
    if not np.can_cast(leaf.dtype, kind, "same_kind" if kind.kind == "f" else "safe"):
        raise ValueError(
            f"a chunk holds {leaf.dtype} where the first rows hold {kind}, which all processes take: pass floats "
            "from the start, by chunk.astype(float)."
        )
    return leaf.astype(kind, copy=False)


def _empty_block(
    block: tuple[tuple[np.ndarray, ...], int] | None, failure: str, num_rows: int
) -> tuple[np.ndarray, ...]:
    """The arrays of a process without rows, of the form that the others have; nothing where none has a row.

    Raises:
        ValueError: If forms differ.
    """
    form = (
        ""
        if block is None
        else json.dumps([[str(leaf.dtype), leaf.shape[1:]] for leaf in block[0]])
    )
    forms = exchange(form)
    failures = exchange(failure)
    if any(failures):
        raise_first(failures)
    present = sorted({form for form in forms if form})
    if len(present) > 1:
        raise ValueError(
            f"rows are {' and '.join(present)} on several processes: all must agree."
        )
    kinds = json.loads(present[0]) if present else []
    return tuple(np.zeros((num_rows, *shape), dtype) for dtype, shape in kinds)
