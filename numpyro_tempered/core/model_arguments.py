"""The arguments of a model as arrays that vary, and a structure that is compiled in."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array, Numbers

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


def separate(args: tuple, kwargs: dict) -> tuple[tuple[Array, ...], ArgumentStructure]:
    """The arrays and floats among the arguments, and the structure around them.

    Raises:
        TypeError: If an argument is neither an array nor hashable.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = tuple(hasattr(leaf, "ndim") or isinstance(leaf, float) for leaf in leaves)
    static = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    structure = ArgumentStructure(tree, is_array, static, tuple(type(leaf) for leaf in static))
    try:
        hash(structure)
    except TypeError as error:
        kinds = sorted({kind.__name__ for kind in structure.kinds})
        raise TypeError(f"arguments must be arrays or hashable values, got objects of types {kinds}.") from error
    arrays = tuple(_to_jax(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array)
    return arrays, structure


def _to_jax(leaf: object) -> Array:
    """``jnp.asarray``, which takes ten microseconds to find that it has nothing to do, or compiles a copy."""
    leaf = leaf if isinstance(leaf, jax.Array) else fill_masked(leaf)
    # A copy, as JAX reads the memory of NumPy's arrays, which a stream may fill with its next round meanwhile.
    return jax.device_put(np.array(leaf)) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)


def join(arrays: tuple[Array, ...], structure: ArgumentStructure) -> tuple[tuple, dict]:
    """The arguments that :func:`separate` took apart."""
    remaining, pairs = iter(arrays), zip(structure.static, structure.is_array, strict=True)
    leaves = [next(remaining) if array else leaf for leaf, array in pairs]
    args, kwargs = jax.tree.unflatten(structure.tree, leaves)
    return args, kwargs


def on_arrays(fn: Callable[..., T], structure: ArgumentStructure) -> Callable[..., T]:
    """A function of ``(q, args, kwargs)`` as one of ``(q, *arrays)``."""

    def joined(q: object, *arrays: Array, **options: object) -> T:
        return fn(q, *join(arrays, structure), **options)

    return joined


def as_array(value: object, name: str, advice: str = "") -> Numbers:
    """Numbers of any kind as an array: of jax or numpy, in lists, or in pandas.

    Missing ones of pandas and those under the mask of a masked array become NaN.

    Args:
        value: The numbers.
        name: What they are called in an error.
        advice: What to do about other things than categories and dates.

    Raises:
        TypeError: If they are text, categories, dates or other objects.

    Example:
        >>> import pandas as pd
        >>> from numpyro_tempered.core.model_arguments import as_array
        >>> as_array(pd.Series([1, None], dtype="Int64"), "y")
        array([ 1., nan])
        >>> as_array(pd.Series(["a", "b"], dtype="category"), "group")
        Traceback (most recent call last):
        TypeError: group must be real numbers, got dtype category, such as 'a'. Pass codes: pandas' .cat.codes,
        or numpy.unique(values, return_inverse=True)[1].
    """
    value = fill_masked(value)
    if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiub"):
        return value
    columns = np.ravel(np.asarray(getattr(value, "dtypes", None), object))
    is_number = np.array([getattr(dtype, "kind", "O") in "fiub" for dtype in columns])
    try:
        array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError as error:
        raise TypeError(f"{name} must be real numbers, got lists of different lengths.") from error
    if array.dtype.kind == "O" and is_number.all():
        # Nullable columns, or integers beside booleans.
        array = value.to_numpy(dtype=float, na_value=np.nan)  # type: ignore[attr-defined]
    if array.dtype.kind in "fiubc" or array.dtype.name == "bfloat16":
        return array
    if hasattr(value, "columns"):
        got = f"other things in columns {np.asarray(value.columns)[~is_number].tolist()}"
    else:
        kind = f"dtype {getattr(value, 'dtype', array.dtype)}"
        got = f"{kind}, such as '{array.flat[0]!s:.20}'" if array.size else kind
    if array.dtype.kind in "mM":
        advice = "Pass numbers, such as days since the first date."
    elif array.dtype.kind in "SUT" or any(isinstance(entry, str) for entry in array.flat):
        advice = "Pass codes: pandas' .cat.codes, or numpy.unique(values, return_inverse=True)[1]."
    raise TypeError(f"{name} must be real numbers, got {got}. {advice}".rstrip())


def fill_masked(value: Any) -> Any:
    """A masked array of NumPy as an array, with NaN under its mask; everything else as it is.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.core.model_arguments import fill_masked
        >>> fill_masked(np.ma.masked_equal([1, -999], -999))
        array([ 1., nan])
    """
    if not isinstance(value, np.ma.MaskedArray):
        return value
    if not np.ma.is_masked(value):
        return value.data
    floating: Any = np.ma.asarray(value, float if value.dtype.kind in "iub" else None)
    return floating.filled(np.nan)


def is_list(value: object) -> bool:
    """Whether a value is a list of numbers or strings, perhaps in lists; other lists are trees of arrays."""
    scalars = int | float | str | None | np.generic
    return isinstance(value, list) and bool(value) and all(isinstance(v, scalars) or is_list(v) for v in value)


def stream_arrays(data: tuple) -> tuple:
    """The data of a stream as arrays of jax.

    Raises:
        TypeError: If they are text, categories, dates or other objects.
    """

    def convert(leaf: object) -> Array:
        if isinstance(leaf, jax.Array):
            return leaf
        leaf = fill_masked(leaf)
        plain = not (is_list(leaf) or isinstance(leaf, np.ndarray) or hasattr(leaf, "to_numpy"))
        return jnp.asarray(leaf if plain else as_array(leaf, "the data of a stream"))

    return jax.tree.map(convert, data, is_leaf=is_list)
