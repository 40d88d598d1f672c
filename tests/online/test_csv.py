"""CSV files as streams: the numbers of pandas, and a sentence where a file is not a table of numbers."""

import gzip
import sys

import numpy as np
import pandas as pd
import pytest

import numpyro_tempered as nt


@pytest.fixture
def write(tmp_path):
    pytest.importorskip("pyarrow")

    def to_file(text, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return to_file


def test_chunks_of_a_csv_file_are_those_of_pandas(write):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(500, 3)) * [1e-8, 1.0, 1e12], columns=["a", "b", "c"])
    # Whole numbers in the first blocks, as a guess of the type by the first block would have it.
    frame.loc[:400, "a"] = 1
    frame.loc[7, "b"] = np.nan
    path = write(frame.assign(word="text").to_csv(index=False))
    chunks = list(nt.tables.csv_chunks(path, outcome="c", features=["b", "a"], block_bytes=4096))
    assert len(chunks) > 3
    np.testing.assert_array_equal(np.concatenate([x for x, _ in chunks]), frame[["b", "a"]].to_numpy())
    np.testing.assert_array_equal(np.concatenate([y for _, y in chunks]), frame["c"].to_numpy())


def test_other_forms_of_a_csv_file(write):
    for text, name, delimiter in [
        ("x;y\r\n1;2\r\n\r\n3;NA", "data.csv", ";"),
        ("x,y\n1,2\n3,\n", "data.csv.gz", ","),
        ('\ufeffx,y\n"1",2\n3,nan\n', "data.csv", ","),
    ]:
        ((x, y),) = nt.tables.csv_chunks(write(text, name), outcome="y", delimiter=delimiter)
        np.testing.assert_array_equal(x, [[1.0], [3.0]])
        np.testing.assert_array_equal(y, [2.0, np.nan])
        (x,) = nt.tables.csv_chunks(write(text, name), delimiter=delimiter)
        assert x.shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("id,x,y\n1,2,a\n", {"features": ["x"]}, "CSV column 'y': .* invalid value 'a'"),
        ("x,y\n1,2\n1,2,3\n", {}, "Expected 2 columns, got 3"),
        ("x,x,y\n1,2,3\n", {}, r"\['x'\] stand twice"),
        ("x,y\n1,2\n", {"features": ["x", "y"]}, r"\['y'\] stand twice"),
        ("x,z\n1,2\n", {}, r"\['y'\] are not among \['x', 'z'\]"),
        ("1,2\n3,4\n", {}, "first line must hold the names"),
        ("", {}, "Empty CSV file"),
    ],
)
def test_what_is_not_a_table_of_numbers(write, text, options, message):
    with pytest.raises(ValueError, match=message):
        list(nt.tables.csv_chunks(write(text), outcome="y", **options))


def test_csv_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(ImportError, match=r"numpyro_tempered\[parquet\].*chunksize"):
        next(nt.tables.csv_chunks(tmp_path / "data.csv", "y"))
