"""Arrays that several processes hold together, each its rows: one program runs on all of them.

With ``jax.distributed`` every process runs the same script. An array that is sharded over processes is an argument
of every program, and never a constant in one; what programs return is replicated, so that each process reads all of
it. A decision of the host is the same everywhere, as it looks at such results alone.
"""

import hashlib
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core.typing import ArrayLike, PyTree

T = TypeVar("T")

# Numbers of a digest.
_WIDTH = 8
# Arguments that are told apart where processes differ.
_MOST = 32


def spans_processes(*values: PyTree) -> bool:
    """Whether any leaf is an array of which this process holds a part, or a copy among others."""
    return any(map(_spans, jax.tree.leaves(values)))


def _spans(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def replicated_over(*values: PyTree) -> NamedSharding | None:
    """The sharding of copies on the devices of the first array that spans processes; None where none does."""
    for leaf in jax.tree.leaves(values):
        if _spans(leaf):
            mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
            if mesh is None:
                mesh = Mesh(np.array(sorted(leaf.sharding.device_set, key=lambda each: each.id)), ("devices",))
            return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec())
    return None


def to_host(value: ArrayLike) -> np.ndarray:
    """A value as an array of the host, with all rows in their order.

    Of an array that is sharded over processes every process gets the whole, and all must ask for it.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.core.processes import to_host
        >>> to_host(jnp.arange(3))
        array([0, 1, 2], dtype=int32)
    """
    if not _spans(value) or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(jax.jit(_itself, out_shardings=replicated_over(value))(value))


def _itself(value: T) -> T:
    return value


def all_finite(value: ArrayLike) -> bool:
    """Whether all numbers are finite; those that are sharded over processes are looked at where they are."""
    return bool(_all_finite(value)) if _spans(value) else bool(np.all(np.isfinite(value)))


@jax.jit
def _all_finite(value: ArrayLike) -> ArrayLike:
    return jnp.all(jnp.isfinite(value))


def automatic_mesh(value: T) -> T:
    """The same array under a mesh whose axes the compiler shards; other values as they are.

    Under a mesh with explicit axes, which newer jax makes by default, each operation would have to name the
    sharding of its result.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    if not isinstance(value.sharding, NamedSharding):
        return value
    mesh = value.sharding.mesh
    return jax.device_put(value, NamedSharding(Mesh(mesh.devices, mesh.axis_names), value.sharding.spec))


def check_same(values: Mapping[str, PyTree], beside: PyTree) -> None:
    """Refuse arguments that differ between the processes that share data.

    Programs would run on different numbers, or be different programs, which wait for each other without end.

    Args:
        values: Arguments by name; leaves that span processes are left out.
        beside: The data; where none of them spans processes there is nothing to check.

    Raises:
        ValueError: On all processes, with the first that differs.
    """
    copies = replicated_over(beside)
    if copies is None:
        return
    digests = np.zeros((_MOST + 1, _WIDTH), np.uint32)
    names = list(values)
    for place, name in enumerate(names[:_MOST]):
        digests[place + 1] = _digest(values[name])
    digests[0] = _digest(names)
    everywhere = _gather(digests, copies)
    differs = np.any(everywhere != everywhere[:1], axis=(0, 2))
    if differs.any():
        name = "the number of arguments" if differs[0] else f"argument {names[int(np.argmax(differs)) - 1]!r}"
        raise ValueError(
            f"{name} differs between the {jax.process_count()} processes: each must pass the same key and options, "
            "and data that are the same array everywhere, or sharded by rows with "
            "jax.make_array_from_process_local_data."
        )


def _digest(value: PyTree) -> np.ndarray:
    """Numbers that differ where values do."""
    digest = hashlib.sha256()
    leaves, tree = jax.tree.flatten(value)
    digest.update(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if _spans(leaf):
            digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic) and np.asarray(leaf).dtype != object:
            digest.update(f"{leaf.shape} {leaf.dtype}".encode() + np.asarray(leaf).tobytes())
        elif isinstance(leaf, bool | int | float | str | None):
            digest.update(repr(leaf).encode())
        else:
            # Of functions and other objects the address would differ.
            digest.update(type(leaf).__qualname__.encode())
    return np.frombuffer(digest.digest(), np.uint32)


def _gather(value: np.ndarray, copies: NamedSharding) -> np.ndarray:
    """A value of each device's process, with a leading axis of devices."""
    mesh = copies.mesh
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    array = jax.make_array_from_callback((mesh.size, *value.shape), rows, lambda _: value[None])
    return to_host(array)
