"""Data frames and Parquet files as streams: each column is read right, or refused by its name."""

import datetime
import decimal
import time

import numpy as np
import pandas as pd
import pytest

import numpyro_tempered as nt

DAY = datetime.datetime(2020, 1, 1)
NAN = np.nan
# A column of two rows and its numbers, or words of its refusal.
COLUMNS = {
    **{
        dtype: (np.array([0, 1], dtype), [0, 1])
        for dtype in [
            "bool",
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        ]
    },
    **{
        dtype: (np.array([-0.0, 0.1], dtype), np.array([-0.0, 0.1], dtype))
        for dtype in ("float16", "float32", "float64")
    },
    **{
        dtype: (pd.array([1, None], dtype), [1, NAN])
        for dtype in ("Int8", "UInt64", "Float32", "boolean")
    },
    # Rounded, and not wrapped around.
    "large": (np.array([2**53 + 1, 2**63 - 1]), [2.0**53, 2.0**63]),
    "large unsigned": (np.array([2**64 - 1, 2**53 + 1], np.uint64), [2.0**64, 2.0**53]),
    "large nullable": (pd.array([2**53 + 1, None], "Int64"), [2.0**53, NAN]),
    "float objects": (pd.Series([1.5, None], dtype=object), [1.5, NAN]),
    "bool objects": (pd.Series([True, None], dtype=object), [1, NAN]),
    "decimals": (pd.Series([decimal.Decimal("1.5"), None], dtype=object), [1.5, NAN]),
    "number and NaT": (pd.Series([1, pd.NaT], dtype=object), [1, NAN]),
    "nothing": (pd.Series([None, None], dtype=object), [NAN, NAN]),
    "categories of numbers": (pd.Categorical([5.0, None]), [5, NAN]),
    "categories": (pd.Categorical(["a", "b"]), "Pass codes"),
    "text": (pd.Series(["1", None]), "Pass codes"),
    "text objects": (pd.Series(["1", None], dtype=object), "Pass codes"),
    "times": (pd.Series([DAY, None]), "Pass numbers, such as days"),
    "times of a zone": (
        pd.Series([DAY, None]).dt.tz_localize("UTC"),
        "Pass numbers, such as days",
    ),
    "no times": (pd.Series([pd.NaT, pd.NaT]), "Pass numbers, such as days"),
    "dates": (
        pd.Series([DAY.date(), None], dtype=object),
        "Pass numbers, such as days",
    ),
    "durations": (
        pd.Series([datetime.timedelta(1), None]),
        "Pass numbers, such as days",
    ),
    "lists": (pd.Series([[1.0, 2.0], [3.0, 4.0]]), "must be real numbers"),
    "records": (pd.Series([{"a": 1.0}, {"a": 2.0}]), "Columns must"),
}
# What Arrow and polars have no column for, or not this one.
PANDAS_ALONE = {
    "complex": (np.array([1j, 2.0]), "real and imaginary"),
    "complex objects": (pd.Series([1j, 2.0], dtype=object), "must be real numbers"),
    "sparse": (pd.arrays.SparseArray([0.0, 1.5]), [0, 1.5]),
    "huge objects": (pd.Series([2**70, 1]), [2.0**70, 1]),
    "extended precision": (np.array([1, 2], np.longdouble), [1, 2]),
    "periods": (pd.period_range("2020", periods=2), "must be real numbers"),
}


def from_frame(frame, folder):
    return nt.online.frame_chunks(frame, "y")


def from_parquet(frame, folder):
    frame.to_parquet(folder / "data.parquet")
    return nt.online.parquet_chunks(folder / "data.parquet", "y")


def from_arrow(frame, folder):
    return nt.online.frame_chunks(
        pytest.importorskip("pyarrow").Table.from_pandas(frame), "y"
    )


def from_batch(frame, folder):
    return nt.online.frame_chunks(
        pytest.importorskip("pyarrow").RecordBatch.from_pandas(frame), "y"
    )


def from_polars(frame, folder):
    return nt.online.frame_chunks(pytest.importorskip("polars").from_pandas(frame), "y")


READERS = [from_frame, from_parquet, from_arrow, from_batch, from_polars]


@pytest.mark.parametrize(
    ("reader", "name"),
    [(reader, name) for reader in READERS for name in COLUMNS]
    + [(from_frame, name) for name in PANDAS_ALONE],
)
def test_columns_are_read_right_or_refused_by_name(tmp_path, reader, name):
    if reader is not from_frame:
        pytest.importorskip("pyarrow")
    column, expected = (COLUMNS | PANDAS_ALONE)[name]
    chunks = reader(pd.DataFrame({"odd one": column, "y": [0.5, 1.5]}), tmp_path)
    if isinstance(expected, str):
        with pytest.raises(
            ValueError, match=f"column 'odd one' holds .*, not numbers: .*{expected}"
        ):
            list(chunks)
    else:
        ((x, y),) = chunks
        assert x.dtype == y.dtype == np.float64
        np.testing.assert_array_equal(x[:, 0], expected)
        np.testing.assert_array_equal(y, [0.5, 1.5])


def test_other_columns_of_polars():
    pl = pytest.importorskip("polars")
    lists = pl.Series([[1.0, 2.0]], dtype=pl.Array(pl.Float64, 2))
    for column in [
        lists,
        pl.Series(["a"], dtype=pl.Enum(["a"])),
        pl.Series([datetime.time(1)]),
    ]:
        with pytest.raises(ValueError, match=r"column 'x' holds .*, not numbers"):
            list(nt.online.frame_chunks(pl.DataFrame({"x": column})))
    (x,) = nt.online.frame_chunks(
        pl.DataFrame({"x": [2**64 - 1], "n": [None]}, schema_overrides={"x": pl.UInt64})
    )
    np.testing.assert_array_equal(x, [[2.0**64, NAN]])


def test_tables_of_all_libraries_have_the_same_chunks(tmp_path):
    pa, pl = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
    frame = pd.DataFrame(
        np.arange(21.0).reshape(7, 3), columns=["a", "b", "c"], dtype="float32"
    )
    frame.to_parquet(tmp_path / "data.parquet")
    expected = list(nt.online.frame_chunks(frame, "b", features=["c", "a"], size=3))
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in expected]), frame[["c", "a"]]
    )
    for table in [
        pl.from_pandas(frame),
        pa.Table.from_pandas(frame),
        pa.RecordBatch.from_pandas(frame),
    ]:
        np.testing.assert_equal(
            list(nt.online.frame_chunks(table, "b", features=["c", "a"], size=3)),
            expected,
        )
    chunks = nt.online.parquet_chunks(
        tmp_path / "data.parquet", "b", features=["c", "a"], size=3
    )
    np.testing.assert_equal(list(chunks), expected)


@pytest.mark.parametrize(
    "names", [[None], ["day"], ["day", None], ["a.b", "day"]], ids=str
)
def test_an_index_is_a_column_where_it_is_named(tmp_path, names):
    pa, pl = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
    levels = [[7, 8, 9], [4.0, 5.0, 6.0]][: len(names)]
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0.5, 1.5, 2.5]})
    frame.index = (
        pd.MultiIndex.from_arrays(levels, names=names)
        if len(names) > 1
        else pd.Index([7, 8, 9], name=names[0])
    )
    path = tmp_path / "data.parquet"
    frame.to_parquet(path)
    # polars drops what pandas says of its columns, which leaves the name of an index without one.
    pl.read_parquet(path).write_parquet(tmp_path / "again.parquet")
    again = ["again.parquet"] if names == [None] else []

    def readers(*args, **kwargs):
        yield nt.online.frame_chunks(frame, *args, size=2, **kwargs)
        yield nt.online.frame_chunks(
            pa.Table.from_pandas(frame), *args, size=2, **kwargs
        )
        for file in ["data.parquet", *again]:
            yield nt.online.parquet_chunks(tmp_path / file, *args, size=2, **kwargs)

    for chunks in readers("y"):
        x, y = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
        np.testing.assert_array_equal(x, [[1.0], [2.0], [3.0]])
        np.testing.assert_array_equal(y, [0.5, 1.5, 2.5])
    if "day" in names:
        days = levels[names.index("day")]
        for chunks in readers("day"):
            x, y = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
            np.testing.assert_array_equal(x, frame[["x", "y"]])
            np.testing.assert_array_equal(y, days)
        for chunks in readers("y", features=["day", "x"]):
            x = np.concatenate([x for x, _ in chunks])
            np.testing.assert_array_equal(x, np.column_stack([days, frame["x"]]))
    with pytest.raises(ValueError, match=r"^a table needs its.*\['z'\] are not among"):
        next(nt.online.parquet_chunks(path, "z"))


def test_an_index_of_dates_is_refused():
    frame = pd.DataFrame(
        {"x": [1.0, 2.0]}, index=pd.date_range("2020", periods=2, name="day")
    )
    with pytest.raises(
        ValueError, match=r"column 'day' holds datetime64.*days since.*the first date"
    ):
        next(nt.online.frame_chunks(frame, "day"))


def test_names_of_columns():
    frame = pd.DataFrame([[1.0, 2.0, 3.0, 4.0]])
    for names in [
        [0, 1, 2, 3],
        [True, ("a", "b"), "columns", "y"],
        ["iloc", "schema", "column_names", "shape"],
    ]:
        frame.columns = pd.Index(names, tupleize_cols=False)
        ((x, y),) = nt.online.frame_chunks(frame, names[2])
        assert (x.tolist(), y.tolist()) == ([[1.0, 2.0, 4.0]], [3.0])
    frame.columns = pd.MultiIndex.from_product([["a", "b"], [0, 1]])
    ((x, y),) = nt.online.frame_chunks(frame, ("b", 0))
    assert (x.tolist(), y.tolist()) == ([[1.0, 2.0, 4.0]], [3.0])


def test_columns_of_one_name_are_refused_where_they_are_read():
    frame = pd.DataFrame([[1.0, 2.0, 3.0, 4.0]], columns=["a", "b", "a", 7])
    with pytest.raises(ValueError, match=r"^a column must stand.*\['a'\] stand twice"):
        next(nt.online.frame_chunks(frame, "b"))
    with pytest.raises(
        ValueError, match=r"^a column must stand.*\[7, 'b'\] stand twice"
    ):
        next(nt.online.frame_chunks(frame, "b", features=["b", 7, 7]))
    ((x, y),) = nt.online.frame_chunks(frame, "b", features=[7])
    assert (x.tolist(), y.tolist()) == ([[4.0]], [2.0])
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_arrays([pa.array([1.0])] * 3, names=["a", "b", "a"])
    with pytest.raises(ValueError, match=r"^a column must stand.*\['a'\] stand twice"):
        next(nt.online.frame_chunks(table, "b"))


def test_what_has_no_rows_or_is_no_table(tmp_path):
    frame = pd.DataFrame({"x": [], "y": []})
    with pytest.raises(ValueError, match="the table has no row"):
        next(nt.online.frame_chunks(frame, "y"))
    with pytest.raises(
        ValueError, match="size must be an integer of at least 1, got 0"
    ):
        next(nt.online.frame_chunks(frame, "y", size=0))
    for table in [np.ones((3, 2)), {"x": [1.0]}, pd.Series([1.0]), None]:
        with pytest.raises(
            TypeError,
            match="frame must be a data frame of pandas or polars, or an Arrow table",
        ):
            next(nt.online.frame_chunks(table))
    pytest.importorskip("pyarrow")
    frame.to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet has no row"):
        next(nt.online.parquet_chunks(tmp_path / "data.parquet", "y"))
    with pytest.raises(
        ValueError, match="size must be an integer of at least 1, got 0"
    ):
        next(nt.online.parquet_chunks(tmp_path / "data.parquet", "y", size=0))


@pytest.mark.full
def test_many_columns_cost_in_proportion():
    frame = pd.DataFrame(np.zeros((1, 20_000))).rename(columns=str)
    start = time.process_time()
    with pytest.raises(
        ValueError, match=r"\['y'\] are not among \['0', .* and others\."
    ) as refusal:
        next(nt.online.frame_chunks(frame, "y"))
    ((x, _),) = nt.online.frame_chunks(frame, "7")
    assert time.process_time() - start < 2.0
    assert x.shape == (1, 19_999)
    assert len(str(refusal.value)) < 500
