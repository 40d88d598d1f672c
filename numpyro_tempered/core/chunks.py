"""Streams in pieces: tables as chunks, chunks cut into blocks of one size, batches padded to one."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import jax
import numpy as np

from numpyro_tempered.core.checks import check_count

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["csv_chunks", "frame_chunks", "parquet_chunks"]

T = TypeVar("T")
Chunk = TypeVar("Chunk", bound=tuple[object, ...])
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
    block_bytes: int = 1 << 20,
) -> Iterator[Arrays]:
    r"""The rows of a CSV file as chunks ``(x, y)``, read block by block, as fast as the disk and pyarrow are.

    Args:
        path: The file, with the names of its columns in the first line; compressed where its name ends as that of
            a compressed file (``.gz``, ``.bz2``, ``.zst``).
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others. Other
            columns are not converted, and may hold anything.
        delimiter: What stands between two values, one character.
        block_bytes: Length of the text of a chunk, which sets its number of rows. No line may be longer.

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
    parse = csv.ParseOptions(delimiter=delimiter)

    def read(convert: csv.ConvertOptions) -> csv.CSVStreamingReader:
        # By its name pyarrow sees whether the file is compressed.
        return csv.open_csv(
            os.fspath(path),
            read_options=csv.ReadOptions(block_size=block_bytes),
            parse_options=parse,
            convert_options=convert,
        )

    present: list[str] = []
    try:
        with read(csv.ConvertOptions()) as file:
            present = list(file.schema.names)
        if all(map(_is_number, present)):
            raise ValueError(f"the first line must hold the names of the columns, got numbers: {present}.")
        names = _columns(present, outcome, features)
        number = pyarrow.float64()
        # Of one type from the first line to the last: a type is not guessed from the first block.
        numbers = csv.ConvertOptions(column_types=dict.fromkeys(names, number), include_columns=names)
        with read(numbers) as file:
            for batch in file:
                columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                yield _stacked(columns, outcome)
    except pyarrow.ArrowInvalid as error:
        # Columns have numbers there.
        words = re.sub(r"column #(\d+)", lambda match: f"column {present[int(match[1])]!r}", str(error))
        raise ValueError(f"{os.fspath(path)} is not a table of numbers: {words}") from error


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


def blocks(chunks: Iterable[Chunk], size: int, skip: int = 0) -> Iterator[tuple[Chunk, int]]:
    """The rows of the chunks in blocks of exactly ``size`` rows, the last one padded, and their number.

    Args:
        chunks: Tuples of arrays with any number of rows each.
        size: Rows in a block, at least 2: a loop over a single row is compiled to other arithmetic.
        skip: Rows to leave out at the start.

    Raises:
        ValueError: If ``size`` is less than 2, there is no chunk, or a chunk does not look like the first.
    """
    check_count(size, "size", least=2)
    model: Chunk | None = None
    parts: list[Chunk] = []
    num_rows = 0
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, tuple | list):
            raise ValueError(f"a chunk must be a tuple of arrays, such as (x, y), got {type(chunk).__name__}.")
        chunk = jax.tree.map(np.asarray, tuple(chunk))
        chunk_rows = common_rows(chunk, f"chunk {number}")
        if model is None:
            model = jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), chunk)
        chunk = like_first(chunk, model, number)
        start = min(skip, chunk_rows)
        skip -= start
        while start < chunk_rows:
            stop = min(chunk_rows, start + size - num_rows)
            parts.append(jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], chunk))
            num_rows += stop - start
            start = stop
            if num_rows == size:
                yield join(parts), size
                parts, num_rows = [], 0
    if model is None:
        raise ValueError(
            "the stream has no chunk. An iterator is used up by one pass: give a list, or a new one."
        )
    if num_rows:
        yield jax.tree.map(lambda leaf: grow(leaf, size), join(parts)), num_rows


def like_first(chunk: Chunk, first: Chunk, number: int) -> Chunk:
    """The chunk with the dtypes of the first.

    Raises:
        ValueError: If the structure or the shape of a row differ, or a dtype does not fit.
    """
    shapes, expected = ([leaf.shape[1:] for leaf in jax.tree.leaves(part)] for part in (chunk, first))
    if shapes != expected or jax.tree.structure(chunk) != jax.tree.structure(first):  # type: ignore[operator]
        raise ValueError(f"chunk {number} has rows of shapes {shapes}, the first of {expected}: all must agree.")

    def cast(leaf: np.ndarray, model: np.ndarray) -> np.ndarray:
        if not np.can_cast(leaf.dtype, model.dtype, "same_kind"):
            raise ValueError(
                f"chunk {number} holds {leaf.dtype} where the first chunk holds {model.dtype}: all must agree."
            )
        return leaf.astype(model.dtype, copy=False)

    return jax.tree.map(cast, chunk, first)


def join(parts: Sequence[T]) -> T:
    """Chunks of one structure as one, their rows in order."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def pad_batch(*data: object, size: int | None = None) -> tuple[tuple[object, ...], np.ndarray]:
    """A batch of n rows with more rows to reach ``size``, and the mask of those that are data.

    On the host, in NumPy: a padding by JAX would itself be compiled for each n.

    Args:
        *data: Arrays with one common leading axis of n rows, n >= 0.
        size: Number of rows to reach; by default the next power of two, so that batches of 1 to N rows have
            at most 1 + log2(N) shapes.

    Returns:
        The arrays with ``size`` rows, those added being copies of the last (zeros where there is none), and the
        mask ``(size,)`` for :func:`update`.

    Raises:
        ValueError: If there is no array, the leading axes differ, or there are more than ``size`` rows.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> (x, y), mask = nt.online.pad_batch(np.ones((3, 2)), np.array([1.0, 2.0, 3.0]))
        >>> y, mask
        (array([1., 2., 3., 3.]), array([ True,  True,  True, False]))
    """
    arrays = jax.tree.map(np.asarray, data)
    num_rows = common_rows(arrays, "pad_batch")
    size = 1 << max(num_rows - 1, 0).bit_length() if size is None else size
    if not num_rows <= size or size < 1:
        raise ValueError(f"a batch of {num_rows} rows does not fit size = {size}.")
    return jax.tree.map(lambda leaf: grow(leaf, size), arrays), np.arange(size) < num_rows


def common_rows(arrays: object, name: str, least: int = 0, *, hint: str = "") -> int:
    """The common number of rows of arrays.

    Raises:
        ValueError: If there is no array, an array has no axis or fewer rows than ``least``, or they disagree.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths or shapes[0][0] < least:
        rows = f" of at least {least}" if least else ""
        raise ValueError(f"{name} needs arrays with one common leading axis{rows}, got shapes {shapes}.{hint}")
    return shapes[0][0]


def grow(leaf: np.ndarray, size: int) -> np.ndarray:
    """The array with ``size`` rows: copies of its last, or zeros where it has none."""
    missing = size - leaf.shape[0]
    if missing == 0:
        return leaf
    last = leaf[-1:] if len(leaf) else np.zeros((1, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(last, missing, axis=0)])
