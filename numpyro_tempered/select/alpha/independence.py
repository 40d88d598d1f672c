"""Signs that rows of data are not independent of each other."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Params, doubles, is_frame, to_host, warn_caller
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.handlers.rows import DataRows
from numpyro_tempered.select.alpha.dependence import Dependence

# A standard normal exceeds this once in 300,000 times.
LEAST_Z = 4.5
# The least ratio of variances that matters: widths are off by a tenth.
LEAST_RATIO = 1.2
# The share of rows that repeat others from which on they are a sign, and their least number.
SHARE, LEAST_REPEATS = 0.05, 5


class DependenceWarning(UserWarning):
    """Rows of data are not independent, by all appearances, and nothing says so.

    Example:
        >>> import numpyro_tempered as nt
        >>> issubclass(nt.alpha.DependenceWarning, UserWarning)  # for warnings.filterwarnings
        True
    """


class Rows(NamedTuple):
    """A model whose data are rows.

    Attributes:
        trace: Of the model.
        observed: Observed values by site.
        arguments: Of the model.
        places: Where they lie.
        dependence: Which data depend on each other.
    """

    trace: Trace
    observed: Params
    arguments: tuple
    places: DataRows
    dependence: Dependence


def warn_of_dependence(
    rows: Rows,
    influence: np.ndarray | None,
    *,
    otherwise: str = "Criteria take the rows for independent, and powers are too large where they are not.",
) -> None:
    """Warn of rows that look dependent, unless ``groups`` or ``block`` say how.

    Args:
        rows: The data.
        influence: Of each datum on the estimate, ``(n, d)``; None where it has no derivatives.
        otherwise: What is wrong where the rows depend on each other.
    """
    if rows.dependence.labels is not None or rows.dependence.block is not None:
        return
    signs = []
    if repeats := num_repeats(_columns(rows)):
        signs.append(
            f"{repeats} of {rows.dependence.num_data} rows repeat others exactly, to the last digit. If they are "
            "copies, leave them out, or give those of one row one label in groups="
        )
    if influence is not None:
        ratio, z = serial_ratio(influence)
        k = int(np.argmax(np.where(ratio > LEAST_RATIO, z, -np.inf)))
        if ratio[k] > LEAST_RATIO and z[k] > LEAST_Z:
            signs.append(
                f"the scores of successive rows are correlated ({z[k]:.1f} standard errors): estimates vary "
                f"{ratio[k]:.2g} times as much as those of independent rows, at least. For a series take "
                'block="auto", for rows of the same unit groups=; for rows sorted by a covariate look at the '
                "mean of the model; rows sorted by what is observed, as those of a table, are to be shuffled"
            )
    if signs:
        warn_caller(f"{'; and '.join(signs)}. {otherwise}", DependenceWarning)


def _columns(rows: Rows) -> list[np.ndarray]:
    """The rows of all arrays, ``(n, k)`` each: what the model observes, and its arguments."""
    places = rows.places
    # Batch dimensions are counted from those of events.
    observed = [
        (value, places.dim - rows.trace[name]["fn"].event_dim)
        for name, value in rows.observed.items()
    ]
    arguments = [
        (part, 0)
        for value in jax.tree.leaves(rows.arguments)
        for part in (
            [value[name].to_numpy() for name in value.columns]
            if is_frame(value)
            else [value]
        )
    ]
    columns = []
    for value, axis in observed + arguments:
        if jnp.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key):
            continue
        array = to_host(value)
        if -array.ndim <= axis < array.ndim and array.shape[axis] == places.size:
            data = places.take(np.moveaxis(array, axis, 0))
            columns.append(np.reshape(data, (len(data), -1)))
    return columns


def num_repeats(arrays: Sequence[np.ndarray]) -> int:
    """How many rows repeat others, where that can be no chance and no single value; 0 elsewhere.

    Rounded values and counts repeat by chance. m distinct values of a continuous quantity have a smallest gap of
    about 1/m² of their range: a column counts as continuous where its smallest gap is not far above that.
    """
    columns = [a for array in arrays for a in array.T if a.dtype.kind in "fiub"]
    if not any(_is_continuous(column) for column in columns):
        return 0
    # Rows are equal where a random combination of their columns is, column by column so that rounding is too.
    weights = np.random.default_rng(0).normal(size=len(columns))
    codes = np.zeros(len(columns[0]))
    for weight, column in zip(weights, columns, strict=True):
        size = np.max(np.abs(column.astype(np.float64)), initial=0.0)
        codes += weight * column.astype(np.float64) / (size or 1.0)
    counts = np.unique(codes, return_counts=True)[1]
    repeats = len(codes) - len(counts)
    # One row many times is an atom, such as zeros in the place of what is masked.
    is_many = np.sum(counts > 1) >= LEAST_REPEATS and repeats >= SHARE * len(codes)
    return int(repeats) if is_many else 0


def _is_continuous(column: np.ndarray) -> bool:
    values = np.unique(column.astype(np.float64))
    if column.dtype.kind != "f" or len(values) < LEAST_REPEATS:
        return False
    cells = (values[-1] - values[0]) / np.min(np.diff(values))
    return bool(cells >= len(values) ** 2 / 10.0)


def serial_ratio(influence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much more an estimate varies than that of independent rows, by the correlation of successive ones.

    Args:
        influence: Of each datum on d parameters, ``(n, d)``.

    Returns:
        The variance of Newey and West, over few lags, over that of independent rows, and its distance from 1 in
        the standard errors that it has for independent rows, which may be of unlike variances; ``(d,)`` each.
    """
    values = doubles(influence)
    num_data = len(values)
    lags = min(int(4.0 * (num_data / 100.0) ** (2.0 / 9.0)), num_data - 1)
    earlier = np.zeros_like(values)
    for lag in range(1, lags + 1):
        earlier[lag:] += (1.0 - lag / (lags + 1)) * values[:-lag]
    products = 2.0 * values * earlier
    size = np.sum(np.square(values), axis=0)
    size = np.where(size > 0, size, 1.0)
    se = np.sqrt(np.sum(np.square(products), axis=0))
    total = np.sum(products, axis=0)
    return 1.0 + total / size, np.divide(
        total, se, out=np.zeros_like(total), where=se > 0
    )
