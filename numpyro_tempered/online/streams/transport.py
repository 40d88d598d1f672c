"""States as bytes, for a queue, a socket or a table: what ``save`` writes to a file."""

import io
from typing import TypeVar

import jax
import numpy as np

from numpyro_tempered.core import check_known
from numpyro_tempered.online.streams.files import (
    archive_of,
    as_bytes,
    describe,
    kind_of,
    read_archive,
)
from numpyro_tempered.online.streams.save import FORMAT, VERSION, restore_from

T = TypeVar("T")


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
