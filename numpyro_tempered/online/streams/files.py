"""Arrays with a header in one file, in NumPy's own format."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import BinaryIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, FilePath

# Type, fields and children of a node; "*" is a leaf.
Description: TypeAlias = str | list["Description"]


def write_file(path: FilePath, header: dict, leaves: list) -> None:
    """Write a header of plain values, and arrays, to one file, whole or not at all.

    Raises:
        TypeError: If a leaf is not an array.
    """
    header = header | {"leaves": [kind_of(leaf) for leaf in leaves]}
    write_arrays(path, header, [as_bytes(leaf) for leaf in leaves])


def archive_of(header: dict, leaves: list[np.ndarray]) -> dict:
    """What the archive of a header and arrays of the host, whose kinds the header has, holds by name."""
    arrays = {f"leaf{i}": leaf for i, leaf in enumerate(leaves)}
    return arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}


def write_arrays(path: FilePath, header: dict, leaves: list[np.ndarray]) -> None:
    """:func:`write_file` of arrays of the host, whose kinds the header has."""
    arrays = archive_of(header, leaves)
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
    # Force the renaming to the disk too, where the system knows of folders.
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(path: FilePath, what: str) -> tuple[dict, list[np.ndarray]]:
    """Header and arrays of a file; the checksums of the archive reveal every changed byte.

    Raises:
        ValueError: If it is truncated, or not ``what`` it should be.
    """
    with open(path, "rb") as file:
        return read_archive(file, str(path), what)


def read_archive(file: BinaryIO, name: str, what: str) -> tuple[dict, list[np.ndarray]]:
    """Header and arrays of an open file, called ``name`` in errors; as :func:`read_file`."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes().decode())
            kinds = [(str(dtype), tuple(shape)) for dtype, shape in header["leaves"]]
            return header, [
                stored_array(archive[f"leaf{i}"], *kind) for i, kind in enumerate(kinds)
            ]
    except Exception as error:
        # A damaged archive raises almost any error, of struct, zlib, zipfile, NumPy or json.
        raise ValueError(
            f"{name} is truncated, or not {what} ({type(error).__name__}: {error})."
        ) from error


def stored_array(array: np.ndarray, dtype: str, shape: tuple) -> np.ndarray:
    """The array of a file, where it is what the header says.

    Raises:
        ValueError: If it is of another dtype or shape.
    """
    if dtype.startswith("key<"):
        # Keys are stored as their data, whose last axis depends on the implementation.
        agrees = array.dtype == np.uint32 and array.shape[:-1] == shape
    elif array.dtype == np.uint8 and dtype != "uint8":
        agrees = (
            array.ndim == 1
            and array.size == np.prod(shape, dtype=int) * jnp.dtype(dtype).itemsize
        )
    else:
        agrees = (str(array.dtype), array.shape) == (dtype, shape)
    if not agrees:
        stored = f"{array.dtype}{list(array.shape)}"
        raise ValueError(
            f"an array is {stored}, and the header says {dtype}{list(shape)}"
        )
    return array


def as_bytes(leaf: Array | np.ndarray) -> np.ndarray:
    """The array; as bytes where NumPy has no name for the dtype, such as bfloat16."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return (
        array
        if array.dtype.isbuiltin == 1
        else np.frombuffer(array.tobytes(), np.uint8)
    )


def from_bytes(array: np.ndarray, leaf: Array | jax.ShapeDtypeStruct) -> Array:
    """The array of a file, with the dtype of the leaf."""
    if is_key(leaf):
        # A shape without values does not tell its implementation: a key of its dtype does.
        key = leaf if isinstance(leaf, jax.Array) else jnp.empty((), leaf.dtype)
        return jax.random.wrap_key_data(
            jax.device_put(array), impl=jax.random.key_impl(key)
        )
    if array.dtype != leaf.dtype:
        array = np.frombuffer(array.tobytes(), leaf.dtype).reshape(leaf.shape)
    # jnp.asarray would compile a program for each shape.
    return jax.device_put(array)


def is_key(leaf: Array | np.ndarray | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is one of typed keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def kind_of(leaf: object) -> list:
    """Dtype and shape; a typed key by its implementation."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"a state is made of arrays, got {type(leaf).__name__}.")
    return [str(leaf.dtype), list(leaf.shape)]


def readable(kind: list) -> str:
    """Dtype and shape in the way of JAX."""
    return f"{kind[0]}[{','.join(map(str, kind[1]))}]"


def describe(structure: jax.tree_util.PyTreeDef) -> Description:
    """Types, field names and static parts of a tree structure, as nested lists; ``"*"`` is a leaf."""
    data = structure.node_data()
    if data is None:
        return "*"
    kind, static = data
    fields = getattr(kind, "_fields", static)
    return [
        kind.__name__,
        repr(fields),
        *(describe(child) for child in structure.children()),
    ]


def difference(
    stored: Description, expected: Description, where: str = "the whole state"
) -> str:
    """The first place where two descriptions differ, in words."""

    def plain(part: Description) -> str:
        if isinstance(part, list) and len(part) >= 2:
            return f"{part[0]} {part[1]}"
        return "an array" if part == "*" else f"{part!r}, which no state has"

    is_leaf = not (isinstance(stored, list) and isinstance(expected, list))
    if is_leaf or stored[:2] != expected[:2] or len(stored) != len(expected):
        return f"{where} is {plain(stored)}, expected {plain(expected)}"
    number = next(
        i
        for i, pair in enumerate(zip(stored, expected, strict=True))
        if pair[0] != pair[1]
    )
    return difference(
        stored[number], expected[number], f"part {number - 2} of {stored[0]}"
    )
