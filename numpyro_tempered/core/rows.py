"""One reading of rows: numbers of any kind, in arrays, lists or tables, as arrays that no cast changes.

=============================================  =========================================================
what comes                                     what it is read as
=============================================  =========================================================
integers, floats, booleans, nullable columns   themselves
objects that are all numbers                   double precision
None, NaN, NA, NaT beside numbers, masked      NaN
integers beyond those of JAX's precision       floating, where that tells them apart, and refused if not
dates, text, complex numbers                   refused, with what to pass instead
sparse matrices, other objects                 refused
=============================================  =========================================================
"""

import datetime
import math
from decimal import Decimal
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import doubles
from numpyro_tempered.core.processes import automatic_mesh, spans_processes, to_host
from numpyro_tempered.core.typing import Array, Numbers, PyTree
from numpyro_tempered.core.warn import warn_caller

# Columns of whole numbers that become floating span at least as many of their steps.
MIN_STEPS = 1024
# Columns that an error names.
MOST_NAMED = 8
_MISSING = {"NoneType", "NAType", "NaTType"}
_DATES = datetime.date, datetime.timedelta, np.datetime64, np.timedelta64


def as_array(value: object, name: str, advice: str = "") -> Numbers:
    """Numbers of any kind as an array: of jax or numpy, in lists, or in tables of pandas, polars and Arrow.

    Args:
        value: The numbers; what jax traces passes, unless it is complex.
        name: What they are called in an error.
        advice: What to do about objects that are neither text nor dates.

    Raises:
        TypeError: If they are not real numbers.

    Example:
        >>> import pandas as pd
        >>> from numpyro_tempered.core.rows import as_array
        >>> as_array(pd.Series([1, None], dtype="Int64"), "y")
        array([ 1., nan])
        >>> as_array(pd.Series(["a", "b"], dtype="category"), "group")
        Traceback (most recent call last):
        TypeError: group must be real numbers, got dtype category, such as 'a'. Pass codes: pandas' .cat.codes,
        or numpy.unique(values, return_inverse=True)[1].
    """
    value = fill_masked(value)
    if type(value).__module__.partition(".")[0] == "pyarrow":
        # Scalars of Arrow's have no such method.
        value = value.to_pandas() if hasattr(value, "to_pandas") else value.as_py()  # type: ignore[attr-defined]
    if isinstance(value, jax.Array) and not jnp.iscomplexobj(value):
        return value
    array = value if isinstance(value, jax.Array | np.ndarray) else _plain(value, name)
    if _is_real(array.dtype):
        return array
    if array.dtype.kind == "O" and (numbers := _numbers_of(array)) is not None:
        return numbers
    got = f"dtype {getattr(value, 'dtype', array.dtype)}"
    if hasattr(value, "columns"):
        columns = {column: _plain(value[column], name) for column in value.columns}  # type: ignore[index]
        odd = [
            column for column, entries in columns.items() if not _is_real(entries.dtype)
        ]
        odd = [column for column in odd if _numbers_of(columns[column]) is None]
        got = f"other things in columns {odd[:MOST_NAMED]}" + " and others" * (
            len(odd) > MOST_NAMED
        )
    elif array.size and isinstance(array, np.ndarray):
        got += f", such as '{next(entry for entry in array.flat if not _is_number(entry))!s:.20}'"
    if array.dtype.kind == "c":
        advice = "Pass real and imaginary parts, or absolute values, as columns of their own."
    elif holds_dates(array):
        advice = "Pass numbers, such as days since the first date."
    elif array.dtype.kind in "SUT" or _holds(array, str):
        advice = "Pass codes: pandas' .cat.codes, or numpy.unique(values, return_inverse=True)[1]."
    raise TypeError(f"{name} must be real numbers, got {got}. {advice}".rstrip())


def _plain(value: Any, name: str) -> np.ndarray:
    """Lists and tables as an array, which may be of objects."""
    if hasattr(value, "nnz") and hasattr(value, "toarray"):
        raise TypeError(
            f"{name} must be dense, got a sparse {type(value).__name__}. Pass x.toarray()."
        )
    if hasattr(value, "iloc") and {
        dtype.kind for dtype in np.ravel(value.dtypes)
    } <= set("fiub"):
        # pandas makes objects of nullable columns, and of booleans beside numbers.
        plain = value.to_numpy()
        return (
            plain
            if plain.dtype.kind != "O"
            else value.to_numpy(dtype=float, na_value=np.nan)
        )
    if hasattr(value, "columns") and not hasattr(value, "iloc"):
        # polars makes integers of dates.
        columns = [_plain(value[column], name) for column in value.columns]
        if all(_is_real(column.dtype) for column in columns):
            return np.stack(columns, axis=1)
        return np.array([list(column) for column in columns], object).T
    try:
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError as error:
        raise TypeError(
            f"{name} must be real numbers, got lists of different lengths."
        ) from error


def _is_real(dtype: Any) -> bool:
    return dtype.kind in "fiub" or dtype.name == "bfloat16"


def _is_number(entry: object) -> bool:
    """Whether an object is a number, or stands for a missing one."""
    if type(entry).__name__ in _MISSING:
        return True
    # A timedelta64 is an integer to NumPy.
    return isinstance(entry, Real | Decimal | np.bool_) and not isinstance(
        entry, _DATES
    )


def _numbers_of(array: Any) -> np.ndarray | None:
    """Objects that are numbers or missing, in double precision; None where one is something else."""
    if not all(map(_is_number, array.flat)):
        return None
    missing = np.array([type(entry).__name__ in _MISSING for entry in array.flat], bool)
    numbers = np.full(array.size, np.nan)
    numbers[~missing] = [_as_float(entry) for entry in array.flat[~missing]]
    return numbers.reshape(array.shape)


def _as_float(entry: float) -> float:
    try:
        return float(entry)
    except OverflowError:  # an integer of Python's
        return math.copysign(math.inf, entry)


def holds_dates(value: object) -> bool:
    """Return whether an array, or what NumPy reads as one, holds dates or spans of time."""
    array = np.asarray(value)
    return array.dtype.kind in "mM" or _holds(array, _DATES)


def _holds(array: Numbers, kind: Any) -> bool:
    return isinstance(array, np.ndarray) and any(
        isinstance(entry, kind) for entry in array.flat
    )


def in_precision(array: Numbers, name: str) -> Numbers:
    """The array, floating where it holds integers that JAX's would wrap around.

    Args:
        array: From :func:`as_array`.
        name: What it is called in an error.

    Raises:
        ValueError: If it holds such integers, and a column of them spans too few steps of the floating numbers.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.core.rows import in_precision
        >>> in_precision(np.array([1, 5_000_000_000]), "y")
        array([1.e+00, 5.e+09])
        >>> in_precision(np.array([5_000_000_001, 5_000_000_002]), "y")
        Traceback (most recent call last):
        ValueError: y holds integers from 5000000001 to 5000000002, and single precision counts in steps of 512
        there. Subtract the smallest, or enable double precision: jax.config.update("jax_enable_x64", True).
    """
    if isinstance(array, jax.Array) or array.dtype.kind not in "iu" or not array.size:
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype or (
        array.min() >= np.iinfo(dtype).min and array.max() <= np.iinfo(dtype).max
    ):
        return array
    axes = tuple(range(array.ndim - 1)) if array.ndim > 1 else None
    columns = np.ravel(array.min(axes)).tolist(), np.ravel(array.max(axes)).tolist()
    for low, high in zip(*columns, strict=True):
        step = float(np.spacing(np.float32(max(-low, high))))
        if step > 1.0 and 0 < high - low < MIN_STEPS * step:
            raise ValueError(
                f"{name} holds integers from {low} to {high}, and single precision counts in steps of {step:g} "
                'there. Subtract the smallest, or enable double precision: jax.config.update("jax_enable_x64", '
                "True)."
            )
    return array.astype(np.float64)


def warn_if_unresolved(x: object, centre: np.ndarray, dtype: np.dtype) -> None:
    """Warn where the data's own coordinates, in which NumPyro's model works, lose digits that the fit kept.

    Args:
        x: The data ``(n, d)``.
        centre: What the fit subtracted from them, ``(d,)``.
        dtype: What the model computes in.
    """
    array = as_array(x, "x")
    if spans_processes(array):
        deviation = to_host(jnp.nanstd(automatic_mesh(array), axis=0))
    else:
        deviation = np.nanstd(doubles(array), axis=0)
    deviation = np.reshape(deviation, -1)
    rounding = (
        float(jnp.finfo(dtype).eps)
        * np.abs(centre)
        / np.where(deviation > 0, deviation, np.inf)
    )
    if rounding.max() > 1e-3:
        column = int(rounding.argmax())
        warn_caller(
            f"column {column} of the data is so far from 0 that {dtype} keeps it to {rounding[column]:.1g} of "
            "its standard deviation: likelihoods and draws of the NumPyro model are off by as much. Subtract a "
            "constant from the column, or let jax have 64 bits."
        )


def fill_masked(value: Any) -> Any:
    """A masked array of NumPy as an array, with NaN under its mask; everything else as it is.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.core.rows import fill_masked
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
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, scalars) or is_list(v) for v in value)
    )


def held_array(value: object, name: str) -> Numbers:
    """Numbers of any kind as an array that JAX holds without a loss, still where it is.

    Raises:
        TypeError: As :func:`as_array`.
        ValueError: As :func:`in_precision`.
    """
    return in_precision(as_array(value, name), name)


def held_arrays(data: PyTree, name: str) -> PyTree:
    """:func:`held_array` of each array, list and table of a tree."""
    return jax.tree.map(lambda leaf: held_array(leaf, name), data, is_leaf=is_list)


def stream_arrays(data: PyTree) -> PyTree:
    """The data of a stream as arrays of jax; errors as of :func:`held_array`."""

    def convert(leaf: object) -> Array:
        # A number of Python's keeps its weak type.
        return jnp.asarray(
            leaf
            if isinstance(leaf, float)
            else held_array(leaf, "the data of a stream")
        )

    return jax.tree.map(convert, data, is_leaf=is_list)
