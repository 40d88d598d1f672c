"""Tables as chunks of a stream: pandas data frames and Parquet files."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["frame_chunks", "parquet_chunks"]


def frame_chunks(
    frame: Any, outcome: str | None = None, *, features: Sequence[str] | None = None, size: int = 65536
) -> Iterator[Any]:
    """The rows of a pandas DataFrame as chunks ``(x, y)`` for :func:`~numpyro_tempered.online.run_chunks`.

    Args:
        frame: The data frame.
        outcome: Name of the outcome's column; without one chunks are ``x`` alone, as for
            :func:`~numpyro_tempered.mixtures.fit_chunks`.
        features: Names of the features' columns, in the order of the parameters; by default all others.
        size: Rows in a chunk, of which only one is held in memory as an array.

    Yields:
        ``x`` of shape ``(n, d)`` and ``y`` of shape ``(n,)``, floating, missing values as NaN. A round whose
        outcome or a feature is missing is rejected and counted.

    Raises:
        ValueError: If a column is not there, or does not hold numbers.

    Example:
        >>> import pandas as pd
        >>> import numpyro_tempered as nt
        >>> frame = pd.DataFrame({"one": [1.0, 1.0], "x": [2, 3], "y": [0.5, None]})
        >>> ((x, y),) = nt.tables.frame_chunks(frame, outcome="y")
        >>> x.tolist(), y.tolist()
        ([[1.0, 2.0], [1.0, 3.0]], [0.5, nan])
    """
    names = _columns(list(frame.columns), outcome, features)
    for start in range(0, len(frame), size):
        yield _arrays(frame.iloc[start : start + size], names, outcome)


def parquet_chunks(
    path: str | os.PathLike[str],
    outcome: str | None = None,
    *,
    features: Sequence[str] | None = None,
    size: int = 65536,
) -> Iterator[Any]:
    """The rows of a Parquet file as chunks ``(x, y)``, read row group by row group.

    Args:
        path: The file.
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others. Only
            these columns are read.
        size: Most rows in a chunk; a chunk never crosses a row group.

    Yields:
        As :func:`frame_chunks`.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If a column is not there, or does not hold numbers.

    Example:
        >>> import tempfile, pandas as pd
        >>> import numpyro_tempered as nt
        >>> frame = pd.DataFrame({"x": [2.0, 3.0, 4.0], "y": [0.5, 1.0, 1.5]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_parquet(f"{folder}/data.parquet")
        ...     chunks = list(nt.tables.parquet_chunks(f"{folder}/data.parquet", outcome="y", size=2))
        >>> [x.shape for x, y in chunks]
        [(2, 1), (1, 1)]
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            'reading Parquet needs pyarrow: pip install "numpyro_tempered[parquet]", or give the chunks yourself.'
        ) from error
    with parquet.ParquetFile(path) as file:
        names = _columns(list(file.schema_arrow.names), outcome, features)
        needed = names if outcome is None else [*names, outcome]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=needed):
                yield _arrays(batch.to_pandas(), names, outcome)


def _columns(present: list[Any], outcome: str | None, features: Sequence[str] | None) -> list[str]:
    names = [name for name in present if name != outcome] if features is None else list(features)
    needed = names if outcome is None else [*names, outcome]
    absent = [name for name in needed if name not in present]
    if absent or not names:
        raise ValueError(
            f"the table needs its outcome and at least one feature; {absent} are not among {present}."
        )
    return names


def _arrays(frame: Any, names: list[str], outcome: str | None) -> Any:
    def numbers(name: str) -> np.ndarray:
        try:
            return frame[name].to_numpy(dtype=float, na_value=np.nan)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"column {name!r} holds {frame[name].dtype}, not numbers: encode it, or leave it out (features=)."
            ) from error

    x = np.stack([numbers(name) for name in names], axis=1)
    return x if outcome is None else (x, numbers(outcome))
