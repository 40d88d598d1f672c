"""States on disk: bit-exact, written atomically, checked when read."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORMAT, VERSION = "numpyro_tempered state", 1


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write a state to one file, in NumPy's own format.

    The file appears whole or not at all: it is written beside ``path``, forced to the disk, and renamed. Where
    the process or the machine dies in between, the old file stays, and perhaps a ``.tmp`` beside it.

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
    leaves, structure = jax.tree.flatten(state)
    arrays: dict[str, Any] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                "save writes values, and this state is traced: call it outside of jit, vmap and scan."
            )
        arrays[f"leaf{i}"] = _as_bytes(leaf)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "structure": describe(structure),
        "leaves": [_kind(leaf) for leaf in leaves],
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
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
    _force_folder(path.parent)


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a state that :func:`save` wrote.

    The rule is not in the file: give the same one to go on, or the numbers are of another run.

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
    header, arrays = _read(path)
    found = [header.get("format"), header.get("version")]
    if found != [FORMAT, VERSION]:
        raise ValueError(f"{path} holds {found[0]!r} of version {found[1]}, expected {FORMAT!r} of {VERSION}.")
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    expected, there = describe(structure), header["structure"]
    if expected != there:
        raise ValueError(
            f"{path} holds a state of another structure than like: {difference(there, expected)}. Give the state "
            "of the same rule, family and model."
        )
    leaves = []
    for (where, leaf), kind, array in zip(paths, header["leaves"], arrays, strict=True):
        name = jax.tree_util.keystr(where) or "the whole state"
        if kind != _kind(leaf):
            raise ValueError(
                f"{path} holds {_readable(kind)} at {name}, expected {_readable(_kind(leaf))}: a state is read "
                "with the precision and the sizes it was saved with."
            )
        leaves.append(_from_bytes(array, leaf, kind))
    return jax.tree.unflatten(structure, leaves)


def describe(structure: Any) -> Any:
    """Types, field names and static parts of a tree structure, as nested lists; ``"*"`` is a leaf."""
    data = structure.node_data()
    if data is None:
        return "*"
    kind, static = data
    fields = getattr(kind, "_fields", static)
    return [kind.__name__, repr(fields), *(describe(child) for child in structure.children())]


def difference(there: Any, expected: Any, where: str = "the whole state") -> str:
    """The first place where two descriptions differ, in words."""

    def plain(part: Any) -> str:
        return "an array" if part == "*" else f"{part[0]} {part[1]}"

    if "*" in (there, expected) or there[:2] != expected[:2] or len(there) != len(expected):
        return f"{where} is {plain(there)}, expected {plain(expected)}"
    number = next(i for i, pair in enumerate(zip(there, expected, strict=True)) if pair[0] != pair[1])
    return difference(there[number], expected[number], f"part {number - 2} of {there[0]}")


def _kind(leaf: Any) -> list[Any]:
    """Dtype and shape; a typed key by its implementation."""
    if not hasattr(leaf, "dtype"):
        raise TypeError(f"a state is made of arrays, got {type(leaf).__name__}.")
    return [str(leaf.dtype), list(leaf.shape)]


def _readable(kind: list[Any]) -> str:
    return f"{kind[0]}[{','.join(map(str, kind[1]))}]"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_bytes(leaf: Any) -> np.ndarray:
    """The array; as bytes where NumPy has no name for the dtype, such as bfloat16."""
    _kind(leaf)
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if array.dtype.isbuiltin == 1:
        return array
    return np.frombuffer(array.tobytes(), np.uint8)


def _from_bytes(array: np.ndarray, leaf: Any, kind: list[Any]) -> jax.Array:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=_implementation(leaf))
    if array.dtype != leaf.dtype:
        array = np.frombuffer(array.tobytes(), leaf.dtype).reshape(leaf.shape)
    return jnp.asarray(array)


def _implementation(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_impl(leaf)
    # Of a shape without values: a key of that dtype tells.
    return jax.random.key_impl(jnp.empty((), leaf.dtype))


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Header and arrays; the checksums of the archive notice every changed byte."""
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                header = json.loads(archive["header"].tobytes().decode())
                count = len(header["leaves"])
                return header, [archive[f"leaf{i}"] for i in range(count)]
        except Exception as error:
            # A damaged archive can raise almost anything, from struct, zlib, zipfile, NumPy or json.
            raise ValueError(
                f"{path} is truncated, or not a state that save wrote ({type(error).__name__}: {error})."
            ) from error


def _force_folder(folder: Path) -> None:
    """Force the renaming to the disk, where the system knows of folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
