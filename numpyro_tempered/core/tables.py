"""Tables as chunks of a stream: data frames, CSV and Parquet files."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from numpyro_tempered.core.checks import check_count, describe
from numpyro_tempered.core.labels import columns_of
from numpyro_tempered.core.precision import doubles
from numpyro_tempered.core.rows import as_array
from numpyro_tempered.core.typing import FilePath

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

# One thread parses this much text at a time.
PARSED_BYTES = 1 << 20
# A longer line has a quote that is not closed, and the search for its end would take all memory.
MAX_LINE_BYTES = 1 << 28

Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, np.ndarray]


def frame_chunks(
    frame: "pd.DataFrame | pyarrow.Table",
    outcome: str | None = None,
    *,
    features: Sequence[str] | None = None,
    size: int = 65536,
) -> Iterator[Arrays]:
    """Yield the rows of a data frame as chunks ``(x, y)`` for :func:`~numpyro_tempered.online.run_chunks`.

    Args:
        frame: A data frame of pandas or polars, or an Arrow table.
        outcome: Name of the outcome's column; without one chunks are ``x`` alone, as for
            :func:`~numpyro_tempered.mixtures.fit`.
        features: Names of the features' columns, in the order of the parameters; by default all others that have
            a name and are no index. In pandas outcome and features may be levels of the index.
        size: Rows in a chunk, of which only one is held in memory as an array.

    Yields:
        ``x`` of shape ``(n, d)`` and ``y`` of shape ``(n,)``, in double precision, missing values as NaN. A round
        whose outcome or a feature is missing is rejected and counted.

    Raises:
        TypeError: If it is no table.
        ValueError: If a column is not there, stands twice or does not hold numbers, or there is no row.

    Example:
        >>> import pandas as pd
        >>> import numpyro_tempered as nt
        >>> frame = pd.DataFrame({"one": [1.0, 1.0], "x": [2, 3], "y": [0.5, None]})
        >>> ((x, y),) = nt.online.frame_chunks(frame, outcome="y")
        >>> x.tolist(), y.tolist()
        ([[1.0, 2.0], [1.0, 3.0]], [0.5, nan])
    """
    check_count(size, "size")
    if not hasattr(frame, "columns") or not hasattr(frame, "__len__"):
        raise TypeError(
            f"frame must be a data frame of pandas or polars, or an Arrow table, got {describe(frame)}."
        )
    if is_pandas := hasattr(frame, "iloc"):
        named = {outcome, *([] if features is None else features)}.difference(
            frame.columns, [None]
        )
        levels = [level for level in frame.index.names if level in named]
        names = _columns([*levels, *frame.columns], outcome, features)
    else:
        names = _columns(columns_of(frame), outcome, features, frame.schema)
    for start in range(0, _check_rows(len(frame), "the table"), size):
        if is_pandas:
            part = frame.iloc[start : start + size]
            yield _arrays(part.reset_index(levels) if levels else part, names, outcome)
        else:
            yield _arrays(frame.slice(start, size), names, outcome)


def parquet_chunks(
    path: FilePath,
    outcome: str | None = None,
    *,
    features: Sequence[str] | None = None,
    size: int = 65536,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Arrays]:
    """Yield the rows of a Parquet file as chunks ``(x, y)``, read row group by row group.

    Args:
        path: The file.
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others that have
            a name and are no index of pandas. Only these columns are read.
        size: Most rows in a chunk; a chunk never crosses a row group.
        part: Which share of the row groups is read: number k of n, from 0, each of consecutive groups that no
            other has. Several processes read one file with ``(jax.process_index(), jax.process_count())``. With
            fewer groups than shares some are empty.

    Yields:
        As :func:`frame_chunks`.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: As :func:`frame_chunks`, or if there is no such part.

    Example:
        >>> import tempfile, pandas as pd
        >>> import numpyro_tempered as nt
        >>> frame = pd.DataFrame({"x": [2.0, 3.0, 4.0], "y": [0.5, 1.0, 1.5]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_parquet(f"{folder}/data.parquet")
        ...     chunks = list(nt.online.parquet_chunks(f"{folder}/data.parquet", outcome="y", size=2))
        >>> [x.shape for x, y in chunks]
        [(2, 1), (1, 1)]
    """
    index, count = part
    check_count(
        index, "the number of a part", 0, check_count(count, "the number of parts") - 1
    )
    check_count(size, "size")
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            'reading Parquet needs pyarrow: pip install "numpyro_tempered[parquet]", or give the chunks yourself.'
        ) from error
    with parquet.ParquetFile(path) as file:
        names = _columns(file.schema_arrow.names, outcome, features, file.schema_arrow)
        _check_rows(file.metadata.num_rows, os.fspath(path))
        for group in np.array_split(np.arange(file.num_row_groups), count)[
            index
        ].tolist():
            for batch in file.iter_batches(
                batch_size=size, row_groups=[group], columns=names
            ):
                yield _arrays(batch, names, outcome)


def csv_chunks(
    path: FilePath,
    outcome: str | None = None,
    *,
    features: Sequence[str] | None = None,
    delimiter: str = ",",
    encoding: str = "utf-8",
    block_bytes: int = 1 << 24,
) -> Iterator[Arrays]:
    r"""Yield the rows of a CSV file as chunks ``(x, y)``, block by block, as fast as the disk and pyarrow are.

    Args:
        path: The file, with the names of its columns in the first line; compressed where its name ends as that of
            a compressed file (``.gz``, ``.bz2``, ``.zst``).
        outcome: Name of the outcome's column; without one chunks are ``x`` alone.
        features: Names of the features' columns, in the order of the parameters; by default all others that have
            a name. Other columns are not converted, and may hold anything.
        delimiter: What stands between two values, one character.
        encoding: Encoding of the text, such as ``"latin-1"``.
        block_bytes: Length of the text of a chunk, which sets its number of rows.

    Yields:
        As :func:`frame_chunks`: an empty field, ``NA``, ``NaN`` or ``null`` is NaN, ``True`` 1 and ``False`` 0.

    Raises:
        ImportError: If pyarrow is not installed.
        ValueError: If a column is not there or stands twice, the first line holds no names, there is no row, a
            value is not a number, a line has too few or too many values, or a quote is not closed.

    Example:
        >>> import pathlib, tempfile
        >>> import numpyro_tempered as nt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "data.csv")
        ...     _ = path.write_text("id,x,y\na,2,0.5\nb,,1.5\n")
        ...     ((x, y),) = nt.online.csv_chunks(path, outcome="y", features=["x"])
        >>> x.tolist(), y.tolist()
        ([[2.0], [nan]], [0.5, 1.5])
    """
    try:
        import pyarrow
        import pyarrow.csv as csv
        from pyarrow import ArrowInvalid
    except ImportError as error:
        raise ImportError(
            'reading CSV needs pyarrow: pip install "numpyro_tempered[parquet]", or give the chunks of '
            "pandas.read_csv(path, chunksize=65536) to frame_chunks."
        ) from error
    check_count(block_bytes, "block_bytes")
    if len(delimiter) != 1:
        raise ValueError(f"delimiter must be one character, got {delimiter!r}.")
    name, float64 = os.fspath(path), pyarrow.float64()
    present: list[str] = []
    names: list[str] = []

    def parse(
        lines: bytes, types: "dict[str, pyarrow.DataType]", block_size: int
    ) -> "pyarrow.Table":
        return csv.read_csv(
            pyarrow.BufferReader(lines),
            read_options=csv.ReadOptions(column_names=present, block_size=block_size),
            parse_options=csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=b'"' in lines
            ),
            convert_options=csv.ConvertOptions(
                column_types=types, include_columns=names
            ),
        )

    try:
        # By its name pyarrow sees whether the file is compressed.
        with pyarrow.input_stream(name, compression="detect") as stream:
            if encoding != "utf-8":
                stream = pyarrow.transcoding_input_stream(stream, encoding, "utf-8")
            pieces = _whole_lines(stream.read, block_bytes, delimiter, name)
            header = next(pieces) + b"\n"
            if header.isspace():
                raise ValueError(f"{name} is empty.")
            present = parse(header, {}, len(header)).column_names
            if all(map(_is_number, present)):
                raise ValueError(
                    f"the first line of {name} must name its columns, got numbers: {present}."
                )
            names, num_rows = _columns(present, outcome, features), 0
            # Several threads parse a piece, each some hundred rows.
            block_size = max(PARSED_BYTES, len(present) << 10)
            # Of one type from the first line to the last: a type is not guessed from the first rows.
            types = dict.fromkeys(names, float64)
            for lines in pieces:
                try:
                    table = parse(lines, types, block_size)
                except ArrowInvalid:
                    # To pyarrow True and False are no numbers, and a line may be longer than a thread's share.
                    guesses = parse(lines, {}, len(lines)).schema
                    flags = [
                        guess.name for guess in guesses if guess.type == pyarrow.bool_()
                    ]
                    types = dict.fromkeys(names, float64) | dict.fromkeys(
                        flags, pyarrow.bool_()
                    )
                    table = parse(lines, types, len(lines))
                num_rows += len(table)
                yield _stacked(
                    [column.cast(float64).to_numpy() for column in table.columns],
                    outcome,
                )
            _check_rows(num_rows, name)
    except UnicodeError as error:
        raise ValueError(
            f"{name} is not {encoding}: pass its encoding, such as encoding='latin-1'."
        ) from error
    except ArrowInvalid as error:
        # Columns have numbers there.
        words = re.sub(
            r"column #(\d+)",
            lambda match: f"column {present[int(match[1])]!r}",
            str(error),
        )
        if "conversion" in words:
            words += ". Write numbers as 1234.5, encode dates and text, or leave the column out (features=)."
        raise ValueError(f"{name} is not a table of numbers: {words}") from error


def _columns(
    present: Sequence[str],
    outcome: str | None,
    features: Sequence[str] | None,
    schema: object = None,
) -> list[str]:
    """Return the columns of the features, and last that of the outcome."""
    if features is not None:
        others = list(features)
    else:
        # pandas saves its index in columns, whose names outlive its metadata.
        metadata = getattr(schema, "pandas_metadata", None) or {}
        hidden = {
            "",
            outcome,
            *(
                name
                for name in metadata.get("index_columns", [])
                if isinstance(name, str)
            ),
        }
        others = [
            n
            for n in present
            if n not in hidden and not str(n).startswith("__index_level_")
        ]
    names = [*others] if outcome is None else [*others, outcome]
    counts, uses = Counter(present), Counter(names)
    twice = sorted(
        (name for name in uses if counts[name] > 1 or uses[name] > 1), key=str
    )
    if twice:
        raise ValueError(
            f"a column must stand once, as a feature or as the outcome, and {twice} stand twice."
        )
    absent = [name for name in names if name not in counts]
    if absent or not others:
        some = f"{list(present[:20])}{' and others' * (len(present) > 20)}"
        raise ValueError(
            f"a table needs its outcome and at least one feature; {absent} are not among {some}."
        )
    return names


def _whole_lines(
    read: Callable[[int], bytes], num_bytes: int, delimiter: str, name: str
) -> Iterator[bytes]:
    """Yield the first line of a text, then the others in pieces of about this length, each of whole lines."""
    # A quote opens a value only where one begins, and a doubled one within does not close it, as for pyarrow.
    quoted = rb'(?:(?<=[^\r\n%b])"|"[^"]*+(?:""[^"]*+)*+")' % re.escape(
        delimiter.encode()
    )

    def line(excluded: bytes) -> bytes:
        return rb'[^"%b]*+(?:%b[^"%b]*+)*+' % (excluded, quoted, excluded)

    # A carriage return at the end may be half of a line end.
    first = re.compile(line(b"\r\n") + rb"(?:\r\n|\n|\r(?!\Z))")
    text, most = b"", num_bytes + MAX_LINE_BYTES

    def read_on() -> bytes:
        # As much as there is, so that the text of a long line is not searched many times.
        return read(max(num_bytes, len(text))) if len(text) <= most else b""

    while not (match := first.match(text)) and (more := read_on()):
        text = (text + more).removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    header = match[0] if match else text
    end = b"\r" if header.endswith(b"\r") else b"\n"
    lines = re.compile(rb"(?:%b%b)*+" % (line(end), end))
    closed = re.compile(line(b""))

    def length(text: bytes) -> int:
        """Return where the last whole line ends."""
        place = text.rfind(end) + 1
        if b'"' in text and not closed.fullmatch(text, 0, place):
            # Going through all lines takes several times longer, and few texts break a line within quotes.
            complete = lines.match(text)
            place = complete.end() if complete else 0
        return place

    if match:
        yield header
        text = text[len(header) :]
        while more := read_on():
            piece = text[: length(text)]
            if piece and not piece.isspace():
                yield piece
            text = text[len(piece) :] + more
    if (start := length(text + end)) <= len(text) or len(text) > most:
        some = text[start : start + 40].decode(errors="replace")
        raise ValueError(f"a line of {name} does not end, close its quotes: {some!r}.")
    if not match or text.strip():
        yield text


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _check_rows(num_rows: int, name: str) -> int:
    if not num_rows:
        raise ValueError(f"{name} has no row.")
    return num_rows


def _arrays(table: "pyarrow.Table", names: list[str], outcome: str | None) -> Arrays:
    return _stacked([_numbers(table[name], name) for name in names], outcome)


def _stacked(columns: list[np.ndarray], outcome: str | None) -> Arrays:
    """Return the columns as a matrix; without the last of them, where that is the outcome."""
    return (
        np.stack(columns, axis=1)
        if outcome is None
        else (np.stack(columns[:-1], axis=1), columns[-1])
    )


def _numbers(column: "pyarrow.Array", name: str) -> np.ndarray:
    try:
        array = doubles(as_array(column, "Columns"))
        if array.ndim != 1:
            raise TypeError(
                f"Columns must have one number in a row, got shape {array.shape}."
            )
    except TypeError as error:
        kind = getattr(column, "dtype", getattr(column, "type", None))
        raise ValueError(
            f"column {name!r} holds {kind}, not numbers: encode it, or leave it out (features=). {error}"
        ) from error
    return array
