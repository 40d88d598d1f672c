"""Labels of rows and columns that data bring along, for the coordinates of results."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from numpyro_tempered.core.typing import PyTree

Labels = Mapping[str, np.ndarray]


def axis_labels(data: PyTree) -> dict[str, np.ndarray]:
    """The labels of named axes, by name: of pandas' ``index`` and ``columns``, and of xarray's dimensions.

    Two objects that disagree about a name have none for it.

    Example:
        >>> import pandas as pd
        >>> from numpyro_tempered.core.labels import axis_labels
        >>> frame = pd.DataFrame({"age": [61.0, 47.0], "dose": [2.0, 1.0]}).rename_axis(columns="covariate")
        >>> {name: labels.tolist() for name, labels in axis_labels((frame,)).items()}
        {'covariate': ['age', 'dose']}
    """
    labels: dict[str, np.ndarray] = {}
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


def frame_columns(arguments: Mapping[str, object]) -> dict[str, list]:
    """The names of the columns of the tables in arguments, by argument."""
    tables = {
        name + jax.tree_util.keystr(path): leaf
        for name, value in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }
    # The columns of a table of Arrow are its data.
    columns = {
        name: getattr(leaf, "column_names", getattr(leaf, "columns", None))
        for name, leaf in tables.items()
    }
    return {name: list(each) for name, each in columns.items() if each is not None}


def check_columns(
    of_fit: Mapping[str, list] | None, of_arguments: Mapping[str, list]
) -> None:
    """Refuse tables with other columns than those of a fit, or in another order.

    Raises:
        ValueError: With both.
    """
    for name, columns in of_arguments.items():
        expected = (of_fit or {}).get(name)
        if expected is not None and columns != expected:
            raise ValueError(
                f"argument {name} of the model has columns {columns}, that of the fit {expected}: pass these, in "
                "this order."
            )


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
