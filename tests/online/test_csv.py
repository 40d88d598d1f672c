"""CSV files as streams: the numbers of pandas, and a sentence where a file is not a table of numbers."""

import bz2
import csv
import gzip
import io
import random
import sys

import numpy as np
import pandas as pd
import pytest

import numpyro_tempered as nt
from numpyro_tempered.core import tables


@pytest.fixture
def write(tmp_path):
    pytest.importorskip("pyarrow")

    compressions = {".gz": gzip.compress, ".bz2": bz2.compress, ".csv": bytes}

    def to_file(text, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(
            compressions[path.suffix](
                text if isinstance(text, bytes) else text.encode()
            )
        )
        return path

    return to_file


def test_chunks_of_a_csv_file_are_those_of_pandas(write):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        rng.normal(size=(500, 3)) * [1e-8, 1.0, 1e12], columns=["a", "b", "c"]
    )
    # Whole numbers in the first blocks, as a guess of the type by the first block would have it.
    frame.loc[:400, "a"] = 1
    frame.loc[7, "b"] = np.nan
    path = write(frame.assign(word="text").to_csv(index=False))
    chunks = list(
        nt.online.csv_chunks(path, outcome="c", features=["b", "a"], block_bytes=4096)
    )
    assert len(chunks) > 3
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in chunks]), frame[["b", "a"]].to_numpy()
    )
    np.testing.assert_array_equal(
        np.concatenate([y for _, y in chunks]), frame["c"].to_numpy()
    )


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("x;y\r\n1;2\r\n\r\n3;NA", {"delimiter": ";"}),
        ("x,y\n1,2\n3,\n", {"name": "data.csv.gz"}),
        ("x,y\n1,2\n3,\n", {"name": "data.csv.bz2"}),
        ('\ufeffx,y\n"1",2\n3,nan\n', {}),
        ('\ufeff"x",y\n" 1 ", 2\n+3,\n', {}),
        # No line end but that of old Macs, and none at all at the end.
        ("x,y\r1,2\r3,\r", {}),
        ("x,y\r1,2\r3,", {"name": "data.csv.gz"}),
        ("\n\r\nx,y\n\n1,2\n3,null\n\n\n", {}),
        ("x,y\n1e0,2.\n3,N/A", {}),
        # An index that pandas wrote, and a delimiter at the end.
        (",x,y\n7,1,2\n8,3,\n", {}),
        ("x,y,\n1,2,\n3,,\n", {}),
        ("x,y\n1,2\n3,\n".encode("utf-16"), {"encoding": "utf-16"}),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 24])
def test_other_forms_of_a_csv_file(write, text, options, block_bytes):
    options = {"block_bytes": block_bytes, **options}
    path = write(text, options.pop("name", "data.csv"))
    chunks = list(nt.online.csv_chunks(path, outcome="y", **options))
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in chunks]), [[1.0], [3.0]]
    )
    np.testing.assert_array_equal(np.concatenate([y for _, y in chunks]), [2.0, np.nan])
    chunks = list(nt.online.csv_chunks(path, **options))
    assert np.concatenate(chunks).shape == (2, 2)


def test_names_of_another_encoding(write):
    path = write("größe,y,text\n1,2,é\n".encode("latin-1"))
    ((x, y),) = nt.online.csv_chunks(path, "y", features=["größe"], encoding="latin-1")
    assert (x.tolist(), y.tolist()) == ([[1.0]], [2.0])
    with pytest.raises(
        ValueError, match=r"data\.csv is not utf-8: pass its encoding, such as"
    ):
        next(nt.online.csv_chunks(path, "y", features=["größe"]))
    # Of columns that are not read only the name must be in the encoding.
    ((x, y),) = nt.online.csv_chunks(
        write(b"x,y,text\n1,2,\xe9\n"), "y", features=["x"]
    )
    assert (x.tolist(), y.tolist()) == ([[1.0]], [2.0])


def test_true_and_false_are_1_and_0(write):
    lines = (
        ["0,1", ",2", "True,3", "FALSE,4", "", '"true",6'] * 40
        + ["0,7"] * 40
        + ["2.5,8"]
    )
    path = write("\n".join(["x,y", *lines]))
    chunks = list(nt.online.csv_chunks(path, "y", block_bytes=60))
    assert len(chunks) > 10
    x = np.concatenate([x[:, 0] for x, _ in chunks])
    np.testing.assert_array_equal(x, [0, np.nan, 1, 0, 1] * 40 + [0] * 40 + [2.5])
    with pytest.raises(
        ValueError, match=r"CSV column 'y': .* invalid value 'a'.*leave the column out"
    ):
        list(nt.online.csv_chunks(write("x,y\nTrue,1\nFalse,a\n"), "y"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_values_with_line_breaks_are_of_one_row(write, end):
    rng = random.Random(0)
    rows = [
        [str(i), f'a{end}"{i},0{end}', "x" * rng.randrange(90), str(2 * i)]
        for i in range(1000)
    ]
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator=end).writerows(
        [["x", f"a{end}b", "c,d", "y"], *rows]
    )
    path = write(stream.getvalue())
    for block_bytes in [1, 100, 777, 1 << 24]:
        chunks = list(
            nt.online.csv_chunks(
                path, outcome="y", features=["x"], block_bytes=block_bytes
            )
        )
        np.testing.assert_array_equal(
            np.concatenate([x[:, 0] for x, _ in chunks]), np.arange(1000.0)
        )
        np.testing.assert_array_equal(
            np.concatenate([y for _, y in chunks]), 2 * np.arange(1000.0)
        )


@pytest.mark.parametrize("seed", range(3))
def test_quotes_are_those_of_the_standard_library(write, seed):
    rng = random.Random(seed)
    for number in range(100):
        end, delimiter = rng.choice(["\n", "\r\n", "\r"]), rng.choice(",;\t|")

        def text(delimiter=delimiter, end=end):
            value = "".join(
                rng.choices(
                    ["a", '"', '""', delimiter, end, "\n", "\r", " ", "é", "1"],
                    k=rng.randrange(6),
                )
            )
            if (
                value.startswith('"')
                or rng.random() < 0.5
                or any(c in value for c in (delimiter, "\n", "\r"))
            ):
                value = (
                    '"'
                    + value.replace('"', '""')
                    + '"'
                    + rng.choice(["", "", "z", 'z"'])
                )
            return value

        names = rng.sample(["x", "y", text(), f'"t""{end}"'], 4)
        rows = [
            [str(i) if name in ("x", "y") else text() for name in names]
            for i in range(rng.randrange(1, 8))
        ]
        content = end.join(map(delimiter.join, [names, *rows])) + rng.choice(
            ["", end, 2 * end]
        )
        expected = [
            row
            for row in csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
            if row
        ][1:]
        chunks = nt.online.csv_chunks(
            write(content),
            "y",
            features=["x"],
            delimiter=delimiter,
            block_bytes=rng.choice([1, 2, 3, 7, 50, 1000]),
        )
        x = np.concatenate([x[:, 0] for x, _ in chunks])
        np.testing.assert_array_equal(
            x,
            [float(row[names.index("x")]) for row in expected],
            str((number, content)),
        )


def test_long_lines(write):
    wide = [f"column {i}" for i in range(3000)]
    text = (
        ",".join([*wide, "y"])
        + "\n"
        + (",".join("1.25" for _ in [*wide, "y"]) + "\n") * 3
    )
    chunks = list(nt.online.csv_chunks(write(text), "y", block_bytes=10))
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in chunks]), np.full((3, 3000), 1.25)
    )
    # Longer than what one thread parses.
    ((x, _),) = nt.online.csv_chunks(
        write(f'x,y,t\n1,2,"{"a" * 3_000_000}"\n'), "y", features=["x"]
    )
    assert x.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "id,x,y\n1,2,a\n",
            {"features": ["x"]},
            r"CSV column 'y': .* invalid value 'a'.*the column out",
        ),
        (
            "x,y\n2020-01-01,2\n",
            {},
            "CSV column 'x': .* '2020-01-01'. .*encode dates and text.*features=",
        ),
        (
            'x,y\n"1,234",2\n',
            {},
            r"CSV column 'x': .* '1,234'. Write numbers as 1234.5.*the column out",
        ),
        (
            "x;y\n1,5;2\n",
            {"delimiter": ";"},
            "CSV column 'x': .* '1,5'. Write numbers as 1234.5",
        ),
        (
            "x,y\n1,None\n",
            {},
            r"CSV column 'y': .* invalid value 'None'.*leave the column out",
        ),
        ("x,y\n1,2\n1,2,3\n", {}, "Expected 2 columns, got 3"),
        ("x,y\n1,2\n1\n", {}, "Expected 2 columns, got 1"),
        ("x,y\n# note\n1,2\n", {}, "Expected 2 columns, got 1: # note"),
        ("x,y\n1,2,\n", {}, "Expected 2 columns, got 3"),
        ("x,x,y\n1,2,3\n", {}, r"^a column must stand.*\['x'\] stand twice"),
        (
            "x,y\n1,2\n",
            {"features": ["x", "y"]},
            r"^a column must stand.*\['y'\] stand twice",
        ),
        ("x,z\n1,2\n", {}, r"^a table needs its.*\['y'\] are not among \['x', 'z'\]"),
        ("x;y\n1;2\n", {}, r"^a table needs its.*\['y'\] are not among \['x;y'\]"),
        (
            "x, y\n1, 2\n",
            {},
            r"^a table needs its.*\['y'\] are not among \['x', ' y'\]",
        ),
        (
            "1,2\n3,4\n",
            {},
            r"first line of .*data\.csv must name its columns.*got numbers",
        ),
        (
            'x,y\n1,2\n"3,4\n5,6\n',
            {},
            r"a line of .*data\.csv does not end, close its quotes: '\"3,4",
        ),
        ('"x,y\n1,2\n', {}, r"a line of .*data\.csv does not end, close its quotes"),
        ("", {}, r"data\.csv is empty"),
        ("\n \n", {}, r"data\.csv is empty"),
        ("x,y\n", {}, r"data\.csv has no row"),
        ("x,y", {}, r"data\.csv has no row"),
        ("x,y\r\n\r\n", {}, r"data\.csv has no row"),
        (
            "x,y\n1,2\n",
            {"delimiter": "||"},
            r"delimiter must be one character, got '\|\|'",
        ),
        ("x,y\n1,2\n".encode("utf-16"), {}, "is not utf-8: pass its encoding"),
        ("é,y\n1,2\n", {"encoding": "ascii"}, "is not ascii: pass its encoding"),
    ],
)
@pytest.mark.parametrize("block_bytes", [2, 1 << 24])
def test_what_is_not_a_table_of_numbers(write, text, options, message, block_bytes):
    with pytest.raises(ValueError, match=message):
        list(
            nt.online.csv_chunks(
                write(text), outcome="y", block_bytes=block_bytes, **options
            )
        )


def test_a_quote_that_is_not_closed_is_not_sought_to_the_end_of_memory(
    write, monkeypatch
):
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 1000)
    for text in [
        'x,y\n1,"2\n' + "1,2\n" * 100_000,
        '"x,y\n' + "1,2\n" * 100_000,
        "x" * 100_000 + ",y\n1,2\n",
    ]:
        with pytest.raises(
            ValueError, match=r"^a line of.*does not end, close its quotes"
        ):
            next(nt.online.csv_chunks(write(text), "y", block_bytes=100))


def test_csv_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(
        ImportError, match=r"^reading CSV needs.*numpyro_tempered\[parquet\].*chunksize"
    ):
        next(nt.online.csv_chunks(tmp_path / "data.csv", "y"))
