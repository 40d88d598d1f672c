"""Single entries, and rows of data frames whose columns may come and go, as the mini-batches of river."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from numpyro_tempered.core import PyTree, as_array, describe, doubles
from numpyro_tempered.estimators.base import check_once
from numpyro_tempered.estimators.scales import LARGEST


def rows_of(X: PyTree) -> np.ndarray:
    """Return the rows of a frame, NaN where missing.

    Raises:
        TypeError: If it is no frame, or holds other things than numbers.
        ValueError: If a name stands twice.
    """
    if not hasattr(X, "columns"):
        raise TypeError(
            f"X must be a data frame, got {describe(X)}: partial_fit takes arrays."
        )
    check_once(list(X.columns))
    return doubles(as_array(X, "X"))


def place(
    rows: np.ndarray,
    names: Sequence[Hashable],
    columns: Mapping[Hashable, int],
    size: int,
) -> np.ndarray:
    """Return rows ``(n, size)`` with an intercept first, each column in its place; others are left out."""
    numbers = [number for number, name in enumerate(names) if name in columns]
    full = np.zeros((len(rows), size))
    full[:, 0] = 1.0
    full[:, [columns[names[number]] for number in numbers]] = rows[:, numbers]
    return full


def check_some(sample_weight: PyTree) -> None:
    """Refuse weights that are all 0.

    Raises:
        ValueError: If they are.
    """
    if sample_weight is not None and not np.any(np.asarray(sample_weight)):
        raise ValueError("sample_weight is zero for all rows.")


def are_rows(full: np.ndarray) -> np.ndarray:
    """Return which rows can be learned: those without missing, infinite and too large entries."""
    return np.all(np.abs(full) <= LARGEST, axis=-1)


def as_number(value: object, name: str) -> float:
    """Return one number, NaN where it is missing.

    Raises:
        TypeError: If it is none.
        ValueError: If there are several.
    """
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
        return float(value)
    array = doubles(as_array([value], name))
    if array.size != 1:
        raise ValueError(f"{name} must be one number, got shape {array.shape[1:]}.")
    return array.item()
