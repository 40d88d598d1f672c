"""The arguments of a model as arrays that vary, and a structure that is compiled in."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.labels import columns_of, is_frame
from numpyro_tempered.core.rows import held_array
from numpyro_tempered.core.typing import Array

T = TypeVar("T")


class ArgumentStructure(NamedTuple):
    """Arguments without their arrays; hashable.

    Attributes:
        tree: How ``(args, kwargs)`` is nested.
        is_array: Which leaves are arrays.
        static: The other leaves, and None for each array.
        kinds: The types of ``static``, as 1, 1.0 and True are equal.
    """

    tree: jax.tree_util.PyTreeDef
    is_array: tuple[bool, ...]
    static: tuple[object, ...]
    kinds: tuple[type, ...]


class _Frame(NamedTuple):
    """A data frame, whose columns a model reads; equal to those that hold the same."""

    frame: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frame) and bool(self.frame.equals(other.frame))

    def __hash__(self) -> int:
        return hash((*columns_of(self.frame), len(self.frame)))


def separate(args: tuple, kwargs: dict) -> tuple[tuple[Array, ...], ArgumentStructure]:
    """The arrays and floats among the arguments, and the structure around them.

    Raises:
        TypeError: If an argument is neither an array nor hashable.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    leaves = [_Frame(leaf) if is_frame(leaf) else leaf for leaf in leaves]
    is_array = tuple(
        hasattr(leaf, "ndim") or isinstance(leaf, float) for leaf in leaves
    )
    static = tuple(
        None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)
    )
    structure = ArgumentStructure(
        tree, is_array, static, tuple(type(leaf) for leaf in static)
    )
    try:
        hash(structure)
    except TypeError as error:
        kinds = sorted({kind.__name__ for kind in structure.kinds})
        raise TypeError(
            f"arguments must be arrays or hashable values, got objects of types {kinds}."
        ) from error
    arrays = tuple(
        _to_jax(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array
    )
    return arrays, structure


def _to_jax(leaf: object) -> Array:
    """``jnp.asarray``, which takes ten microseconds to find that it has nothing to do, or compiles a copy."""
    if isinstance(leaf, float):
        return jnp.asarray(leaf)
    array = held_array(leaf, "an array among the arguments")
    # A copy, as JAX reads the memory of NumPy's arrays, which a stream may fill with its next round meanwhile.
    return array if isinstance(array, jax.Array) else jax.device_put(np.array(array))


def join(arrays: tuple[Array, ...], structure: ArgumentStructure) -> tuple[tuple, dict]:
    """The arguments that :func:`separate` took apart."""
    remaining, pairs = (
        iter(arrays),
        zip(structure.static, structure.is_array, strict=True),
    )
    leaves = [
        next(remaining) if array else (leaf.frame if isinstance(leaf, _Frame) else leaf)
        for leaf, array in pairs
    ]
    args, kwargs = jax.tree.unflatten(structure.tree, leaves)
    return args, kwargs


def on_arrays(fn: Callable[..., T], structure: ArgumentStructure) -> Callable[..., T]:
    """A function of ``(q, args, kwargs)`` as one of ``(q, *arrays)``."""

    def joined(q: object, *arrays: Array, **options: object) -> T:
        return fn(q, *join(arrays, structure), **options)

    return joined
