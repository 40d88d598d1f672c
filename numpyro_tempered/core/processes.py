"""Arrays that several processes hold together, each its rows: one program runs on all of them.

With ``jax.distributed`` every process runs the same script. An array that is sharded over processes is an
argument of every program, and never a constant in one; what programs return is replicated, so that each process
reads all of it. A decision of the host is the same everywhere, as it looks at such results alone.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core.typing import Array, PyTree

T = TypeVar("T")

# Numbers of a digest.
_WIDTH = 8
# Arguments that are told apart where processes differ.
_MOST = 32


def spans_processes(*values: PyTree) -> bool:
    """Whether any leaf is an array of which this process holds a part, or a copy among others."""
    return any(map(_spans, jax.tree.leaves(values)))


def _spans(leaf: object) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_fully_addressable
    )


def replicated_over(*values: PyTree) -> NamedSharding | None:
    """The sharding of copies on the devices of the first array that spans processes; None where none does."""
    for leaf in jax.tree.leaves(values):
        if _spans(leaf):
            mesh = (
                leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
            )
            if mesh is None:
                mesh = Mesh(
                    np.array(
                        sorted(leaf.sharding.device_set, key=lambda each: each.id)
                    ),
                    ("devices",),
                )
            return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec())
    return None


def to_host(value: object) -> np.ndarray:
    """A value as an array of the host, with all rows in their order.

    Of an array that is sharded over processes every process gets the whole, and all must ask for it together.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> nt.online.to_host(jnp.ones(3))
        array([1., 1., 1.], dtype=float32)
    """
    if isinstance(value, jax.Array) and _spans(value) and not value.is_fully_replicated:
        value = jax.jit(_itself, out_shardings=replicated_over(value))(value)
    return np.asarray(value)


def _itself(value: T) -> T:
    return value


def all_finite(value: object) -> bool:
    """Whether all numbers are finite; those that are sharded over processes are looked at where they are."""
    if isinstance(value, jax.Array) and _spans(value):
        return bool(_all_finite(value))
    return bool(np.all(np.isfinite(np.asarray(value))))


@jax.jit
def _all_finite(value: Array) -> Array:
    return jnp.all(jnp.isfinite(value))


def automatic_mesh(value: T) -> T:
    """The same array under a mesh whose axes the compiler shards; other values as they are.

    Under a mesh with explicit axes, which newer jax makes by default, each operation would have to name the
    sharding of its result.
    """
    if not has_mesh(value):
        return value
    former, spec = value.sharding.mesh, value.sharding.spec
    if former.size == 1 and value.is_fully_addressable:
        # JAX takes one mesh of a device for another of the same, and changes nothing.
        return value.addressable_shards[0].data
    mesh = Mesh(former.devices, former.axis_names)
    return value if mesh == former else jax.device_put(value, NamedSharding(mesh, spec))


def has_mesh(value: object) -> TypeGuard[Any]:
    """Whether a value is an array that lies on a mesh."""
    return not isinstance(value, jax.core.Tracer) and isinstance(
        getattr(value, "sharding", None), NamedSharding
    )


def check_same(values: Mapping[str, PyTree]) -> None:
    """Refuse arguments that differ between the processes that share data.

    Programs would run on different numbers, or be different programs, which wait for each other without end.

    Args:
        values: Arguments by name; of leaves that span processes the shapes are compared. Without such a leaf
            there is nothing to check.

    Raises:
        ValueError: On all processes, with the first that differs.
    """
    copies = replicated_over(values)
    if copies is None:
        return
    digests = np.zeros((_MOST + 1, _WIDTH), np.uint32)
    names = list(values)
    for place, name in enumerate(names[:_MOST]):
        digests[place + 1] = digest_of(values[name])
    digests[0] = digest_of(names)
    everywhere = gather(digests, copies)
    differs = np.any(everywhere != everywhere[:1], axis=(0, 2))
    if differs.any():
        name = (
            "the number of arguments"
            if differs[0]
            else f"argument {names[int(np.argmax(differs)) - 1]!r}"
        )
        raise ValueError(
            f"{name} differs between the processes: each must pass the same key and options, and data that are "
            "the same in all, or sharded by rows, as by nt.online.share_rows."
        )


def check_same_program(key: object, copies: NamedSharding) -> None:
    """Refuse a program that differs between the processes that are to run it together.

    Args:
        key: What tells it from others.
        copies: The devices that run it.

    Raises:
        ValueError: On all processes.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(key))
    everywhere = gather(digest_of(text), copies)
    if np.any(everywhere != everywhere[:1]):
        raise ValueError(
            "the processes have made different programs of one model, and would wait for each other or mix "
            "their numbers up: its code must do the same everywhere. Sets of strings have another order in each: "
            "sort them, or start all processes with one PYTHONHASHSEED, such as 0."
        )


def digest_of(value: PyTree) -> np.ndarray:
    """Numbers ``(8,)`` that differ where values do, or for arrays that span processes their shapes."""
    digest = hashlib.sha256()
    leaves, tree = jax.tree.flatten(value)
    digest.update(str(tree).encode())
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        leaf = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            digest.update(f"{leaf.shape} {leaf.dtype}".encode())
            if not _spans(leaf):
                array = np.asarray(leaf)
                digest.update(
                    repr(array.tolist()).encode()
                    if array.dtype == object
                    else array.tobytes()
                )
        elif isinstance(leaf, bool | int | float | str):
            digest.update(repr(leaf).encode())
        else:
            # Of functions and other objects the address would differ.
            digest.update(type(leaf).__qualname__.encode())
    return np.frombuffer(digest.digest(), np.uint32)


def gather(value: np.ndarray, copies: NamedSharding) -> np.ndarray:
    """A value of the process of each device that ``copies`` names, with a leading axis of devices."""
    mesh = copies.mesh
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = mesh.size, *value.shape
    by_device = jax.make_array_from_callback(shape, rows, lambda _: value[None])
    return np.asarray(jax.jit(_itself, out_shardings=copies)(by_device))
