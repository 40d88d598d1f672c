"""States on disk, bit-exact, written atomically, checked when read; and as bytes, for a queue or a socket."""

import io
from collections import namedtuple
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import FilePath, PyTree, check_known, spans_processes
from numpyro_tempered.online.base import OnlineState
from numpyro_tempered.online.streams.files import (
    archive_of,
    as_bytes,
    describe,
    difference,
    kind_of,
    read_archive,
    read_file,
    readable,
    write_file,
)
from numpyro_tempered.online.streams.files import from_bytes as read_leaf
from numpyro_tempered.online.streams.parts import restore_together, save_together
from numpyro_tempered.online.streams.processes import is_shared_out

FORMAT, VERSION = "numpyro_tempered state", 2
# Version 1 has no moves.
FormerState = namedtuple("OnlineState", OnlineState._fields[:-2])  # type: ignore[misc]

T = TypeVar("T")


def save(path: FilePath, state: object) -> None:
    """Write a state to one file, in NumPy's own format.

    The file appears whole or not at all: it is written beside ``path``, forced to the disk, and renamed. Where
    the process or the machine stops in between, the old file stays, and perhaps a ``.tmp`` beside it.

    A state of several processes (``jax.distributed``) is saved by all of them at once. If each holds the whole,
    the first process writes the file. If arrays are shared out, such as stacks of streams, each writes its own
    part beside ``path``, and keeps the one before it.

    Args:
        path: The file; its name is taken as it is, ``.npz`` by custom.
        state: Any pytree of arrays: the state of a rule or of :class:`~numpyro_tempered.OnlineVI`, of one stream
            or of many, alone or in a dictionary with others. Typed keys are arrays too.

    Raises:
        TypeError: If a leaf is not an array (or is traced).
        OSError: If the file cannot be written; of several processes those that can raise a RuntimeError.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nt.online.save(f"{folder}/state.npz", state)
        ...     again = nt.online.restore(f"{folder}/state.npz", like=state)
        >>> again.posterior.loc
        Array([0., 0.], dtype=float32)
    """
    check_known("save writes values, and this state is traced", state)
    leaves, structure = jax.tree.flatten(state)
    header = {"format": FORMAT, "version": VERSION, "structure": describe(structure)}
    if spans_processes(leaves):
        save_together(
            path, header | {"leaves": [kind_of(leaf) for leaf in leaves]}, leaves
        )
    else:
        write_file(path, header, leaves)


def restore(path: FilePath, like: T) -> T:
    """Read a state that :func:`save` wrote.

    The rule is not in the file: give the same one to go on, or the numbers are of another run. States of the
    format's version 1 come back too, with no moves counted.

    Args:
        path: The file.
        like: A state of the same structure, shapes and dtypes, such as ``rule.init(prior)``, or its
            ``jax.eval_shape``; values are not looked at. For a state that is shared out over processes one whose
            arrays are shared out alike, on all of them.

    Returns:
        The state, bit for bit, with fresh arrays on the default device, or on the devices of ``like`` where those
        are of several processes. Of parts, the last save that every process has.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is truncated, is not a state, is of another version, or holds a state of another
            structure, shape or dtype than ``like``, or parts of another number of processes.

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
    if any(map(is_shared_out, jax.tree.leaves(like))):
        return restore_together(path, like)
    header, arrays = read_file(path, "a state that save wrote")
    name, version = header.get("format"), header.get("version")
    if name == FORMAT and version == 1:
        return present(restore_from(path, header, arrays, former(like)), like)
    if (name, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} holds {name!r} of version {version}, expected {FORMAT!r} of {VERSION}."
        )
    return restore_from(path, header, arrays, like)


def restore_from(path: FilePath, header: dict, arrays: list[np.ndarray], like: T) -> T:
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
            leaves.append(read_leaf(array, leaf))
        except TypeError as error:
            # Data of a key that are of no key.
            raise ValueError(
                f"{path} holds no {readable(kind)} at {name} ({error})."
            ) from error
    return jax.tree.unflatten(structure, leaves)


def former(tree: T) -> T:
    """A tree with its states as version 1 has them."""

    def convert(node: object) -> object:
        return (
            FormerState(*map(former, node[:-2]))
            if isinstance(node, OnlineState)
            else node
        )

    return jax.tree.map(
        convert, tree, is_leaf=lambda node: isinstance(node, OnlineState)
    )


def present(tree: T, like: T) -> T:
    """A tree with its states of version 1 as they are now: no move is known of them."""

    def convert(node: object, like: PyTree) -> object:
        if not isinstance(node, FormerState):
            return node
        moves = (
            jnp.zeros(leaf.shape, leaf.dtype) for leaf in (like.jumps, like.max_move)
        )
        return OnlineState(*map(present, node, like[:-2]), *moves)

    return jax.tree.map(
        convert, tree, like, is_leaf=lambda node: isinstance(node, FormerState)
    )


def to_bytes(state: object) -> bytes:
    """A state as bytes, in the format of :func:`save`.

    Args:
        state: Any pytree of arrays, such as a :class:`Change`.

    Raises:
        TypeError: If a leaf is not an array (or is traced).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> nt.online.from_bytes(nt.online.to_bytes(jnp.arange(3)), like=jnp.zeros(3, int))
        Array([0, 1, 2], dtype=int32)
    """
    check_known("to_bytes writes values, and this state is traced", state)
    leaves, structure = jax.tree.flatten(state)
    header = {"format": FORMAT, "version": VERSION, "structure": describe(structure)}
    header |= {"leaves": [kind_of(leaf) for leaf in leaves]}
    buffer = io.BytesIO()
    np.savez(buffer, **archive_of(header, [as_bytes(leaf) for leaf in leaves]))
    return buffer.getvalue()


def from_bytes(data: bytes, like: T) -> T:
    """Read the bytes of :func:`to_bytes`.

    Args:
        data: The bytes.
        like: A state of the same structure, shapes and dtypes; values are not looked at. For a :class:`Change`
            that of any factor: ``pvi.factor(pvi.init(prior, 1), 0).change``.

    Returns:
        The state, bit for bit, with fresh arrays on the default device.

    Raises:
        ValueError: If the bytes are cut off, are no state, are of another version, or hold a state of another
            structure, shape or dtype than ``like``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> nt.online.from_bytes(nt.online.to_bytes(jnp.arange(3))[:-10], like=jnp.zeros(3, int))
        Traceback (most recent call last):
        ...
        ValueError: the message is truncated, or not a state that to_bytes made (...).
    """
    name = "the message"
    header, arrays = read_archive(io.BytesIO(data), name, "a state that to_bytes made")
    got = header.get("format"), header.get("version")
    if got != (FORMAT, VERSION):
        raise ValueError(
            f"{name} holds {got[0]!r} of version {got[1]}, expected {FORMAT!r} of {VERSION}."
        )
    return restore_from(name, header, arrays, like)
