"""Tables as chunks of a stream: data frames, CSV and Parquet files."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from numpyro_tempered.core.checks import check_count

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["csv_chunks", "frame_chunks", "parquet_chunks"]

# Of the text that one thread parses at a time.
PARSED_BYTES = 1 << 20

Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, np.ndarray]


def frame_chunks(
    frame: "pd.DataFrame", outcome: str | None = None, *, features: Sequence[str] | None = None, size: int = 65536
) -> Iterator[Arrays]:
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
    part: tuple[int, int] = (0, 1),
) -> Iterator[Arrays]:
    """The rows of a Parquet file as chunks ``(x, y)``, read row group by row group.

    Args:
        path: The file.
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others. Only
            these columns are read.
        size: Most rows in a chunk; a chunk never crosses a row group.
        part: Which share of the row groups is read: number k of n, from 0, each of consecutive groups that no
            other has. Several processes read one file with ``(jax.process_index(), jax.process_count())``. With
            fewer groups than shares some are empty.

    Yields:
        As :func:`frame_chunks`.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If a column is not there, or does not hold numbers, or there is no such part.

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
    index, count = part
    check_count(index, "the number of a part", 0, check_count(count, "the number of parts") - 1)
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            'reading Parquet needs pyarrow: pip install "numpyro_tempered[parquet]", or give the chunks yourself.'
        ) from error
    with parquet.ParquetFile(path) as file:
        names = _columns(list(file.schema_arrow.names), outcome, features)
        for group in np.array_split(np.arange(file.num_row_groups), count)[index].tolist():
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=names):
                yield _arrays(batch.to_pandas(), names, outcome)


def csv_chunks(
    path: str | os.PathLike[str],
    outcome: str | None = None,
    *,
    features: Sequence[str] | None = None,
    delimiter: str = ",",
    block_bytes: int = 1 << 24,
) -> Iterator[Arrays]:
    r"""The rows of a CSV file as chunks ``(x, y)``, read block by block, as fast as the disk and pyarrow are.

    Args:
        path: The file, with the names of its columns in the first line; compressed where its name ends as that of
            a compressed file (``.gz``, ``.bz2``, ``.zst``).
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others. Other
            columns are not converted, and may hold anything.
        delimiter: What stands between two values, one character.
        block_bytes: Length of the text of a chunk, which sets its number of rows.

    Yields:
        As :func:`frame_chunks`: an empty field, ``NA``, ``NaN`` or ``null`` is NaN.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If a column is not there or stands twice, the first line holds no names, a value is not a
            number, or a line has too few or too many values.

    Example:
        >>> import pathlib, tempfile
        >>> import numpyro_tempered as nt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "data.csv")
        ...     _ = path.write_text("id,x,y\na,2,0.5\nb,,1.5\n")
        ...     ((x, y),) = nt.tables.csv_chunks(path, outcome="y", features=["x"])
        >>> x.tolist(), y.tolist()
        ([[2.0], [nan]], [0.5, 1.5])
    """
    try:
        import pyarrow
        import pyarrow.csv as csv
    except ImportError as error:
        raise ImportError(
            'reading CSV needs pyarrow: pip install "numpyro_tempered[parquet]", or give the chunks of '
            "pandas.read_csv(path, chunksize=65536) to frame_chunks."
        ) from error
    check_count(block_bytes, "block_bytes")
    name, parse = os.fspath(path), csv.ParseOptions(delimiter=delimiter)
    present: list[str] = []
    try:
        with csv.open_csv(name, parse_options=parse) as file:
            present = list(file.schema.names)
        if all(map(_is_number, present)):
            raise ValueError(f"the first line must hold the names of the columns, got numbers: {present}.")
        names = _columns(present, outcome, features)
        # Of one type from the first line to the last: a type is not guessed from the first rows.
        types = dict.fromkeys(names, pyarrow.float64())
        convert = csv.ConvertOptions(column_types=types, include_columns=names)
        # By its name pyarrow sees whether the file is compressed.
        with pyarrow.input_stream(name, compression="detect") as stream:
            for lines in _whole_lines(stream.read, block_bytes):
                # On several threads, which a reader of the whole file would not parse with.
                table = csv.read_csv(
                    pyarrow.BufferReader(lines),
                    read_options=csv.ReadOptions(column_names=present, block_size=PARSED_BYTES),
                    parse_options=parse,
                    convert_options=convert,
                )
                yield _stacked([column.to_numpy() for column in table.columns], outcome)
    except pyarrow.ArrowInvalid as error:
        # Columns have numbers there.
        words = re.sub(r"column #(\d+)", lambda match: f"column {present[int(match[1])]!r}", str(error))
        raise ValueError(f"{name} is not a table of numbers: {words}") from error


def _columns(present: list[str], outcome: str | None, features: Sequence[str] | None) -> list[str]:
    """The columns of the features, and last that of the outcome."""
    inputs = [name for name in present if name != outcome] if features is None else list(features)
    names = inputs if outcome is None else [*inputs, outcome]
    twice = sorted({name for name in names if present.count(name) > 1 or names.count(name) > 1})
    if twice:
        raise ValueError(f"a column must stand once, as a feature or as the outcome, and {twice} stand twice.")
    absent = [name for name in names if name not in present]
    if absent or not inputs:
        raise ValueError(f"a table needs its outcome and at least one feature; {absent} are not among {present}.")
    return names


def _whole_lines(read: Callable[[int], bytes], num_bytes: int) -> Iterator[bytes]:
    """The text of a file but for its first line, in pieces of about this length that end where a line does."""
    text = read(num_bytes)
    while b"\n" not in text and (more := read(num_bytes)):
        text += more
    text = text[text.find(b"\n") + 1 :] if b"\n" in text else b""
    while more := read(num_bytes):
        end = text.rfind(b"\n") + 1
        if text[:end].strip():
            yield text[:end]
        text = text[end:] + more
    if text.strip():
        yield text


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _arrays(frame: "pd.DataFrame", names: list[str], outcome: str | None) -> Arrays:
    def numbers(name: str) -> np.ndarray:
        try:
            return frame[name].to_numpy(dtype=float, na_value=np.nan)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"column {name!r} holds {frame[name].dtype}, not numbers: encode it, or leave it out (features=)."
            ) from error

    return _stacked([numbers(name) for name in names], outcome)


def _stacked(columns: list[np.ndarray], outcome: str | None) -> Arrays:
    """The columns as a matrix; without the last of them, where that is the outcome."""
    return np.stack(columns, axis=1) if outcome is None else (np.stack(columns[:-1], axis=1), columns[-1])
