"""The arguments of a model as data that vary and structure that is compiled in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array


class Structure(NamedTuple):
    """Arguments without their data; hashable.

    Attributes:
        tree: How ``(args, kwargs)`` is nested.
        is_array: Which leaves are data.
        static: The other leaves, None in the place of data.
        kinds: Their types, as 1, 1.0 and True are equal.
    """

    tree: Any
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]
    kinds: tuple[type, ...]


def separate(args: tuple, kwargs: dict) -> tuple[tuple[Array, ...], Structure]:
    """The data among the arguments (arrays and floats), and the structure around them.

    Raises:
        TypeError: If an argument is neither data nor hashable.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = tuple(hasattr(leaf, "ndim") or isinstance(leaf, float) for leaf in leaves)
    static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    structure = Structure(tree, is_array, static, tuple(type(leaf) for leaf in static))
    try:
        hash(structure)
    except TypeError as error:
        kinds = sorted({kind.__name__ for kind in structure.kinds})
        raise TypeError(f"arguments must be arrays or hashable values, got objects of types {kinds}.") from error
    arrays = tuple(jnp.asarray(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array)
    return arrays, structure


def join(arrays: tuple[Array, ...], structure: Structure) -> tuple[tuple, dict]:
    """The arguments of which :func:`separate` gave these."""
    remaining = iter(arrays)
    leaves = [
        next(remaining) if array else leaf
        for leaf, array in zip(structure.static, structure.is_array, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(structure.tree, leaves)
    return args, kwargs


def on_arrays(fn: Callable[..., Any], structure: Structure) -> Callable[..., Any]:
    """A function of ``(q, args, kwargs)`` as one of ``(q, *arrays)``."""

    def joined(q: Any, *arrays: Array, **options: Any) -> Any:
        return fn(q, *join(arrays, structure), **options)

    return joined
