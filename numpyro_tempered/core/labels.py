"""Labels of rows and columns that data bring along, for the coordinates of results."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from numpyro_tempered.core.typing import Columns, PyTree

Labels = Mapping[str, np.ndarray]


def axis_labels(data: PyTree) -> Columns:
    """The labels of named axes, by name: of pandas' ``index`` and ``columns``, and of xarray's dimensions.

    Two objects that disagree about a name have none for it.

    Example:
        >>> import pandas as pd
        >>> from numpyro_tempered.core.labels import axis_labels
        >>> frame = pd.DataFrame({"age": [61.0, 47.0], "dose": [2.0, 1.0]}).rename_axis(columns="covariate")
        >>> {name: labels.tolist() for name, labels in axis_labels((frame,)).items()}
        {'covariate': ['age', 'dose']}
    """
    labels: Columns = {}
    disputed = set()
    for name, values in _named_axes(data):
        disputed |= (
            {name}
            if name in labels and not np.array_equal(labels[name], values)
            else set()
        )
        labels[name] = values
    return {name: values for name, values in labels.items() if name not in disputed}


def column_labels(data: PyTree) -> np.ndarray | None:
    """The names of the columns of the first data frame; None where there is none, or they are numbers."""
    for leaf in jax.tree.leaves(data):
        if (columns := getattr(leaf, "columns", None)) is not None:
            values = _plain(columns)
            return None if values is None or values.dtype.kind in "iu" else values
    return None


def number_names(name: str, axes: Iterable[Iterable]) -> list[str]:
    """Names of the numbers of an array by the labels of its axes, as ``weights[age, 1]``."""
    places = itertools.product(*axes)
    return [name + (f"[{', '.join(map(str, at))}]" if at else "") for at in places]


def columns_of(table: object) -> tuple:
    """The names of the columns of a table; () of what is none."""
    # The columns of a table of Arrow are its data.
    return tuple(getattr(table, "column_names", getattr(table, "columns", ())))


def is_frame(value: object) -> bool:
    """Whether a value is a data frame, of pandas, polars or another library."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def names_of(x: object) -> tuple[str, ...] | None:
    """The names of the columns of a table, where all are strings."""
    names = columns_of(x)
    return names if names and all(isinstance(name, str) for name in names) else None


def frame_columns(arguments: Mapping[str, object]) -> dict[str, tuple]:
    """The names of the columns of the tables in arguments, by argument."""
    columns = {
        name + jax.tree_util.keystr(path): columns_of(leaf)
        for name, value in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }
    return {name: each for name, each in columns.items() if each}


def check_columns(
    of_fit: Mapping[str, tuple | None] | None, of_arguments: Mapping[str, tuple]
) -> None:
    """Refuse tables with other columns than those of a fit, or in another order.

    Raises:
        ValueError: With both.
    """
    for name, columns in of_arguments.items():
        expected = (of_fit or {}).get(name)
        if not expected or columns == expected:
            continue
        # Numbers by which a table counts its columns are no names.
        counted = {tuple(range(len(columns))), tuple(range(len(expected)))}
        if set(columns) == set(expected) or counted.isdisjoint({columns, expected}):
            raise ValueError(
                f"argument {name} has columns {list(columns)}, that of the fit {list(expected)}: pass these, in "
                "this order."
            )


def check_order(arguments: Mapping[str, object]) -> None:
    """Refuse tables or series of pandas with the same rows in another order: rows are taken by their places.

    Raises:
        ValueError: With the first rows that differ.
    """
    indexes = [
        (name + jax.tree_util.keystr(path), leaf.index)
        for name, value in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        if hasattr(getattr(leaf, "index", None), "equals")
    ]
    for (first, one), (second, two) in itertools.combinations(indexes, 2):
        if len(one) == len(two) and not one.equals(two) and set(one) == set(two):
            row = int(np.argmax(np.asarray(one) != np.asarray(two)))
            raise ValueError(
                f"arguments {first} and {second} have the same rows in another order: row {row} is {one[row]} in "
                f"one and {two[row]} in the other, and rows are taken by their places. Take one of them in the "
                f"order of the other, as {second}.loc[{first}.index]."
            )


def check_names(fit: Any, x: object) -> None:
    """Refuse a table x with other columns than the fit's ``column_names``, or in another order.

    Raises:
        ValueError: With both.
    """
    check_columns({"x": fit.column_names}, frame_columns({"x": x}))


def _named_axes(data: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    for leaf in jax.tree.leaves(data):
        for axis in (getattr(leaf, "columns", None), getattr(leaf, "index", None)):
            name = getattr(axis, "name", None)
            if isinstance(name, str) and (values := _plain(axis)) is not None:
                yield name, values
        if hasattr(leaf, "dims") and hasattr(leaf, "indexes"):
            for name, index in leaf.indexes.items():
                if (values := _plain(index)) is not None:
                    yield str(name), values


def _plain(index: object) -> np.ndarray | None:
    """Labels as files of netCDF take them: numbers, dates, or else text. None of several levels."""
    if getattr(index, "nlevels", 1) > 1:
        return None
    values = np.asarray(index)
    return values if values.dtype.kind in "fiubM" else values.astype(str)
