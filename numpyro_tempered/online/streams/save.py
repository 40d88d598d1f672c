"""States on disk: bit-exact, written atomically, checked when read."""

import contextlib
import json
import os
import secrets
from collections import namedtuple
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.typing import Array
from numpyro_tempered.online.base import OnlineState

FORMAT, VERSION = "numpyro_tempered state", 2
# Version 1 has no moves.
FormerState = namedtuple("OnlineState", OnlineState._fields[:-2])  # type: ignore[misc]

T = TypeVar("T")
# Type, fields and children of a node; "*" is a leaf.
Description: TypeAlias = str | list["Description"]


def save(path: str | os.PathLike[str], state: object) -> None:
    """Write a state to one file, in NumPy's own format.

    The file appears whole or not at all: it is written beside ``path``, forced to the disk, and renamed. Where
    the process or the machine stops in between, the old file stays, and perhaps a ``.tmp`` beside it.

    Args:
        path: The file; its name is taken as it is, ``.npz`` by custom.
        state: Any pytree of arrays: the state of a rule or of :class:`~numpyro_tempered.OnlineVI`, of one stream
            or of many, alone or in a dictionary with others. Typed keys are arrays too.

    Raises:
        TypeError: If a leaf is not an array (or is traced).

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nt.online.save(f"{folder}/state.npz", state)
        ...     again = nt.online.restore(f"{folder}/state.npz", like=state)
        >>> again.posterior.loc
        Array([0., 0.], dtype=float32)
    """
    if is_traced(state):
        raise TypeError("save writes values, and this state is traced: call it outside of jit, vmap and scan.")
    leaves, structure = jax.tree.flatten(state)
    header = {"format": FORMAT, "version": VERSION, "structure": describe(structure)}
    write_file(path, header, leaves)


def write_file(path: str | os.PathLike[str], header: dict, leaves: list) -> None:
    """Write a header of plain values, and arrays, to one file, whole or not at all.

    Raises:
        TypeError: If a leaf is not an array.
    """
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


def archive_of(header: dict, leaves: list) -> dict:
    """What the archive of a header and arrays holds, by name.

    Raises:
        TypeError: If a leaf is not an array.
    """
    header = header | {"leaves": [kind_of(leaf) for leaf in leaves]}
    arrays = {f"leaf{i}": _as_bytes(leaf) for i, leaf in enumerate(leaves)}
    return arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}


def restore(path: str | os.PathLike[str], like: T) -> T:
    """Read a state that :func:`save` wrote.

    The rule is not in the file: give the same one to go on, or the numbers are of another run. States of the
    format's version 1 come back too, with no moves counted.

    Args:
        path: The file.
        like: A state of the same structure, shapes and dtypes, such as ``rule.init(prior)``, or its
            ``jax.eval_shape``; values are not looked at.

    Returns:
        The state, bit for bit, with fresh arrays on the default device.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is truncated, is not a state, is of another version, or holds a state of another
            structure, shape or dtype than ``like``.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nt.online.save(f"{folder}/state.npz", jnp.arange(3))
        ...     nt.online.restore(f"{folder}/state.npz", like=jnp.zeros(3))
        Traceback (most recent call last):
        ...
        ValueError: .../state.npz holds int32[3] at the whole state, expected float32[3]...
    """
    header, arrays = read_file(path, "a state that save wrote")
    name, version = header.get("format"), header.get("version")
    if name == FORMAT and version == 1:
        return present(restore_from(path, header, arrays, former(like)), like)
    if (name, version) != (FORMAT, VERSION):
        raise ValueError(f"{path} holds {name!r} of version {version}, expected {FORMAT!r} of {VERSION}.")
    return restore_from(path, header, arrays, like)


def restore_from(path: str | os.PathLike[str], header: dict, arrays: list[np.ndarray], like: T) -> T:
    """The state of a file that was read.

    Raises:
        ValueError: If it is of another structure, shape or dtype than ``like``.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    expected, stored = describe(structure), header.get("structure", [])
    if expected != stored:
        raise ValueError(
            f"{path} holds a state of another structure than like: {difference(stored, expected)}. Give the "
            "state of the same rule, family and model."
        )
    if len(paths) != len(arrays):
        raise ValueError(f"{path} holds {len(arrays)} arrays, expected {len(paths)}.")
    leaves = []
    for (where, leaf), kind, array in zip(paths, header["leaves"], arrays, strict=True):
        name = jax.tree_util.keystr(where) or "the whole state"
        if kind != kind_of(leaf):
            raise ValueError(
                f"{path} holds {readable(kind)} at {name}, expected {readable(kind_of(leaf))}: a state is read "
                "with the precision and the sizes it was saved with."
            )
        try:
            leaves.append(from_bytes(array, leaf))
        except TypeError as error:
            # Data of a key that are of no key.
            raise ValueError(f"{path} holds no {readable(kind)} at {name} ({error}).") from error
    return jax.tree.unflatten(structure, leaves)


def former(tree: T) -> T:
    """A tree with its states as version 1 has them."""

    def convert(node: object) -> object:
        return FormerState(*map(former, node[:-2])) if isinstance(node, OnlineState) else node

    return jax.tree.map(convert, tree, is_leaf=lambda node: isinstance(node, OnlineState))


def present(tree: T, like: T) -> T:
    """A tree with its states of version 1 as they are now: no move is known of them."""

    def convert(node: object, like: Any) -> object:
        if not isinstance(node, FormerState):
            return node
        moves = (jnp.zeros(leaf.shape, leaf.dtype) for leaf in (like.jumps, like.max_move))
        return OnlineState(*map(present, node, like[:-2]), *moves)

    return jax.tree.map(convert, tree, like, is_leaf=lambda node: isinstance(node, FormerState))


def describe(structure: jax.tree_util.PyTreeDef) -> Description:
    """Types, field names and static parts of a tree structure, as nested lists; ``"*"`` is a leaf."""
    data = structure.node_data()
    if data is None:
        return "*"
    kind, static = data
    fields = getattr(kind, "_fields", static)
    return [kind.__name__, repr(fields), *(describe(child) for child in structure.children())]


def difference(stored: Description, expected: Description, where: str = "the whole state") -> str:
    """The first place where two descriptions differ, in words."""

    def plain(part: Description) -> str:
        if isinstance(part, list) and len(part) >= 2:
            return f"{part[0]} {part[1]}"
        return "an array" if part == "*" else f"{part!r}, which no state has"

    is_leaf = not (isinstance(stored, list) and isinstance(expected, list))
    if is_leaf or stored[:2] != expected[:2] or len(stored) != len(expected):
        return f"{where} is {plain(stored)}, expected {plain(expected)}"
    number = next(i for i, pair in enumerate(zip(stored, expected, strict=True)) if pair[0] != pair[1])
    return difference(stored[number], expected[number], f"part {number - 2} of {stored[0]}")


def kind_of(leaf: object) -> list:
    """Dtype and shape; a typed key by its implementation."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"a state is made of arrays, got {type(leaf).__name__}.")
    return [str(leaf.dtype), list(leaf.shape)]


def readable(kind: list) -> str:
    """Dtype and shape in the way of JAX."""
    return f"{kind[0]}[{','.join(map(str, kind[1]))}]"


def is_key(leaf: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array is one of typed keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_bytes(leaf: Array) -> np.ndarray:
    """The array; as bytes where NumPy has no name for the dtype, such as bfloat16."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)


def from_bytes(array: np.ndarray, leaf: Array | jax.ShapeDtypeStruct) -> Array:
    """The array of a file, with the dtype of the leaf."""
    if is_key(leaf):
        # A shape without values does not tell its implementation: a key of its dtype does.
        key = leaf if isinstance(leaf, jax.Array) else jnp.empty((), leaf.dtype)
        return jax.random.wrap_key_data(jax.device_put(array), impl=jax.random.key_impl(key))
    if array.dtype != leaf.dtype:
        array = np.frombuffer(array.tobytes(), leaf.dtype).reshape(leaf.shape)
    # jnp.asarray would compile a program for each shape.
    return jax.device_put(array)


def stored_array(array: np.ndarray, dtype: str, shape: tuple) -> np.ndarray:
    """The array of a file, where it is what the header says.

    Raises:
        ValueError: If it is of another dtype or shape.
    """
    if dtype.startswith("key<"):
        # Keys are stored as their data, whose last axis depends on the implementation.
        agrees = array.dtype == np.uint32 and array.shape[:-1] == shape
    elif array.dtype == np.uint8 and dtype != "uint8":
        agrees = array.ndim == 1 and array.size == np.prod(shape, dtype=int) * jnp.dtype(dtype).itemsize
    else:
        agrees = (str(array.dtype), array.shape) == (dtype, shape)
    if not agrees:
        stored = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"an array is {stored}, and the header says {dtype}{list(shape)}")
    return array


def read_file(path: str | os.PathLike[str], what: str) -> tuple[dict, list[np.ndarray]]:
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
            return header, [stored_array(archive[f"leaf{i}"], *kind) for i, kind in enumerate(kinds)]
    except Exception as error:
        # A damaged archive raises almost any error, of struct, zlib, zipfile, NumPy or json.
        raise ValueError(f"{name} is truncated, or not {what} ({type(error).__name__}: {error}).") from error
