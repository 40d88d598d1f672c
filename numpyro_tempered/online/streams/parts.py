"""States of several processes on disk.

What all hold is one file, which the first process writes. Of a state whose arrays are shared out each process
writes its own part, in turn to one of two files. A part has a number and a token of its save, so that a crash
between the files of two processes leaves the save before, which all of them hold.
"""

import json
import secrets
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from numpyro_tempered.core import Array, Columns, FilePath, Shape
from numpyro_tempered.online.streams.files import (
    as_bytes,
    describe,
    difference,
    from_bytes,
    is_key,
    kind_of,
    read_file,
    readable,
    write_arrays,
)
from numpyro_tempered.online.streams.processes import (
    exchange,
    is_shared_out,
    on_all_processes,
)

T = TypeVar("T")
FORMAT, VERSION = "numpyro_tempered part of a state", 1


def save_together(path: FilePath, header: dict, leaves: list[Array]) -> None:
    """Write a state that lies on several processes; all return when all files are on the disk.

    Raises:
        OSError: If a process cannot write; all of them raise, others than its own a RuntimeError.
    """
    # Of keys their words, and by all processes, as it is a computation of all.
    data = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    if not any(map(is_shared_out, data)):
        arrays = [as_bytes(leaf) for leaf in data]
        on_all_processes(
            lambda: (
                write_arrays(path, header, arrays) if jax.process_index() == 0 else None
            )
        )
        return
    number, _ = _newest(_saves(Path(path), with_arrays=False))
    token = exchange(secrets.token_hex(8))[0]
    shards = [_shards(leaf) for leaf in data]
    flat = [array for each in shards for array in each.values()]
    part = {
        "format": FORMAT,
        "version": VERSION,
        "structure": header["structure"],
        "kinds": header["leaves"],
        "save": [number + 1, token],
        "places": [list(each) for each in shards],
        "leaves": [kind_of(array) for array in flat],
    }
    file = _part(Path(path), number + 1)
    on_all_processes(
        lambda: write_arrays(file, part, [as_bytes(array) for array in flat])
    )


def restore_together(path: FilePath, like: T) -> T:
    """Read the last state that every process has a part of; its arrays are shared out as those of ``like``.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it was saved by another number of processes, or is not of the form of ``like``.
    """
    # A computation of all processes.
    like_data = [
        jax.random.key_data(leaf) if is_key(leaf) else leaf
        for leaf in jax.tree.leaves(like)
    ]
    present = _saves(Path(path), with_arrays=True)
    save = _newest(present)

    def read() -> list[Array]:
        if save == (0, ""):
            raise _missing(Path(path))
        header, arrays = present[save]
        return _leaves(path, header, list(arrays), like, like_data)

    data = on_all_processes(read)
    leaves = [
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        if is_key(leaf)
        else array
        for array, leaf in zip(data, jax.tree.leaves(like), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _part(path: Path, number: int, process: str | None = None) -> Path:
    """The file of a process for a save; two files take turns."""
    name = (
        f"{jax.process_index()}of{jax.process_count()}" if process is None else process
    )
    return path.with_name(f"{path.stem}.{name}.{'ab'[number % 2]}{path.suffix}")


def _saves(
    path: Path, *, with_arrays: bool
) -> dict[tuple[int, str], tuple[dict, list[np.ndarray]]]:
    """The saves of which this process has a part that can be read."""
    present = {}
    for turn in range(2):
        try:
            if with_arrays:
                header, arrays = read_file(_part(path, turn), "a part of a state")
            else:
                # NumPy leaves a damaged file open that it has opened itself.
                with (
                    open(_part(path, turn), "rb") as file,
                    np.load(file, allow_pickle=False) as archive,
                ):
                    header, arrays = (
                        json.loads(archive["header"].tobytes().decode()),
                        [],
                    )
            number, token = header["save"]
        except Exception:  # a file that is not there or damaged holds no save
            continue
        present[number, token] = header, arrays
    return present


def _newest(present: dict) -> tuple[int, str]:
    """The last save of which every process has a part; number 0 where there is none."""
    by_process = [json.loads(each) for each in exchange(json.dumps(list(present)))]
    saves = [{(number, token) for number, token in each} for each in by_process]
    return max(set.intersection(*saves), default=(0, ""))


def _missing(path: Path) -> Exception:
    """Why there is no save."""
    count = jax.process_count()
    others = {
        file.name[len(path.stem) + 1 : -len(path.suffix) - 2 or None]
        for file in path.parent.glob(f"{path.stem}.*of*.[ab]{path.suffix}")
    }
    counts = sorted(
        {
            int(name.rsplit("of", 1)[1])
            for name in others
            if name.rsplit("of", 1)[-1].isdigit()
        }
    )
    if counts and count not in counts:
        return ValueError(
            f"{path} was saved in parts by {counts[-1]} processes, and there are {count}: start as many. A state "
            "that every process holds in full can be restored on any number of them."
        )
    return FileNotFoundError(
        f"no save of {path} has a part of each of the {count} processes."
    )


def _shards(leaf: Array) -> Columns:
    """The parts of an array on the devices of this process, by where they lie in it."""
    if not is_shared_out(leaf):
        return {"whole": np.asarray(leaf)}
    return {
        _place(shard.index, leaf.shape): np.asarray(shard.data)
        for shard in leaf.addressable_shards
    }


def _place(index: tuple[slice, ...], shape: Shape) -> str:
    return ",".join(
        f"{s.start or 0}:{size if s.stop is None else s.stop}"
        for s, size in zip(index, shape, strict=True)
    )


def _leaves(
    path: FilePath,
    header: dict,
    arrays: list[np.ndarray],
    like: object,
    like_data: list[Array],
) -> list[Array]:
    """The arrays of a part, placed as those of ``like``, keys as their words.

    Raises:
        ValueError: If they do not fit.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    if header["structure"] != describe(structure):
        what = difference(header["structure"], describe(structure))
        raise ValueError(
            f"{path} holds a state of another structure than like: {what}."
        )
    placed, remaining = [], iter(arrays)
    for (where, leaf), data, kind, places in zip(
        paths, like_data, header["kinds"], header["places"], strict=True
    ):
        name = jax.tree_util.keystr(where) or "the whole state"
        if kind != kind_of(leaf):
            raise ValueError(
                f"{path} holds {readable(kind)} at {name}, expected {readable(kind_of(leaf))}."
            )
        parts = {place: next(remaining) for place in places}
        shared = is_shared_out(data)
        expected = (
            {_place(s.index, data.shape) for s in data.addressable_shards}
            if shared
            else {"whole"}
        )
        if set(parts) != expected:
            raise ValueError(
                f"{path} holds {name} at {sorted(parts)} on this process, expected {sorted(expected)}: like must "
                "be shared out as the state was."
            )
        if not shared:
            placed.append(
                from_bytes(parts["whole"], jax.ShapeDtypeStruct(data.shape, data.dtype))
            )
            continue
        shards = []
        for shard in data.addressable_shards:
            form = jax.ShapeDtypeStruct(shard.data.shape, data.dtype)
            shards.append(
                jax.device_put(
                    from_bytes(parts[_place(shard.index, data.shape)], form),
                    shard.device,
                )
            )
        placed.append(
            jax.make_array_from_single_device_arrays(data.shape, data.sharding, shards)
        )
    return placed
