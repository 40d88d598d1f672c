"""Streams that come in chunks."""

import itertools
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField

TRACES = []


def _counted(expectation):
    def evaluate(*args, **kwargs):
        TRACES.append(1)
        return expectation.evaluate(*args, **kwargs)

    return expectation._replace(evaluate=evaluate)


SQUARED = _counted(nt.expectations.squared())
DRAWN = nt.expectations.monte_carlo(
    lambda theta, x, y: jax.nn.softplus(-y * jnp.sum(x * theta))
)
NGVI, SVA = nt.online.ngvi(0.5), nt.online.sva(0.1)
D = 3


def make_prior(d=D):
    return MeanField(np.zeros(d, np.float32), np.ones(d, np.float32))


def make_rows(n, d=D, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), np.where(rng.random(n) < 0.5, 1.0, -1.0)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def cut(x, y, *lengths):
    edges = np.cumsum((0, *lengths))
    assert edges[-1] == len(x)
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]


X, Y = make_rows(40)
DATES = pd.date_range("2026-01-01", periods=40)
ONCE = nt.online.run(NGVI, SQUARED, NGVI.init(make_prior()), X, Y)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 17), max_size=6), st.sampled_from([2, 5, 12]))
def test_the_numbers_do_not_depend_on_how_rows_are_cut(lengths, size):
    cumulated = np.minimum(np.cumsum(lengths, dtype=int), 40)
    lengths = np.diff([0, *cumulated, 40])
    chunks = cut(X, Y, *lengths)
    assert_same(
        nt.online.run_chunks(
            NGVI, SQUARED, NGVI.init(make_prior()), iter(chunks), size=size
        ),
        ONCE,
    )


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize(
    ("rule", "prior", "size"),
    [
        pytest.param(SVA, make_prior(), 2, id="sva"),
        pytest.param(
            NGVI,
            FullRank(np.zeros(D), np.eye(D)),
            7,
            id="full rank",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_chunks_of_other_rules_and_draws(rule, prior, size, key):
    # A last block of one row, too: a loop over a single row would be compiled to other arithmetic.
    x, y = make_rows(29)
    x[5] = np.nan
    state = rule.init(prior)
    once = nt.online.run(rule, DRAWN, state, x, y, rng_key=key)
    assert int(once[0].rejected) == 1
    chunks = cut(x, y, 10, 0, 1, 18)
    assert_same(
        nt.online.run_chunks(rule, DRAWN, state, chunks, size=size, rng_key=key), once
    )


def test_chunks_of_all_lengths_share_one_compilation():
    state = NGVI.init(make_prior(2))
    x, y = make_rows(50, 2)
    nt.online.run_chunks(NGVI, SQUARED, state, cut(x, y, 50), size=8)
    traces = len(TRACES)
    nt.online.run_chunks(NGVI, SQUARED, state, cut(x, y, 1, 2, 30, 17), size=8)
    assert len(TRACES) == traces


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_blocks_are_there_in_between_and_a_run_goes_on():
    x, y = make_rows(20)
    states = [
        state
        for state, _ in nt.online.iterate_chunks(
            NGVI, SQUARED, NGVI.init(make_prior()), [(x, y)], size=8
        )
    ]
    assert [int(state.count) for state in states] == [8, 16, 20]
    assert_same(
        states[0],
        nt.online.run(NGVI, SQUARED, NGVI.init(make_prior()), x[:8], y[:8])[0],
    )
    x[3, 0] = np.nan
    whole, _ = nt.online.run_chunks(
        NGVI, SQUARED, NGVI.init(make_prior()), cut(x, y, 5, 15), size=4
    )
    first = next(
        iter(
            nt.online.iterate_chunks(
                NGVI, SQUARED, NGVI.init(make_prior()), [(x, y)], size=11
            )
        )
    )[0]
    skip = int(first.count + first.rejected)
    assert (skip, int(first.rejected)) == (11, 1)
    rest, losses = nt.online.run_chunks(
        NGVI, SQUARED, first, cut(x, y, 5, 15), size=4, skip=skip
    )
    assert_same(rest, whole)
    assert losses.expected.shape == (9,)
    done, losses = nt.online.run_chunks(NGVI, SQUARED, whole, cut(x, y, 5, 15), skip=20)
    assert_same(done, whole)
    assert losses.expected.shape == (0,)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_losses_are_kept_averaged_or_dropped():
    x, y = make_rows(20)
    y[3] = np.nan
    state = NGVI.init(make_prior())
    options = {"size": 8}
    after, losses = nt.online.run_chunks(NGVI, SQUARED, state, [(x, y)], **options)
    same, averages = nt.online.run_chunks(
        NGVI, SQUARED, state, [(x, y)], keep="blocks", **options
    )
    for column, average in zip(losses, averages, strict=True):
        expected = [
            np.nanmean(np.asarray(column[a : a + 8], float)) for a in (0, 8, 16)
        ]
        np.testing.assert_allclose(average, expected, rtol=1e-12)
    assert_same(same, after)
    same, nothing = nt.online.run_chunks(
        NGVI, SQUARED, state, [(x, y)], keep="nothing", **options
    )
    assert nothing is None
    assert_same(same, after)
    with pytest.raises(ValueError, match="keep must be one of"):
        nt.online.run_chunks(NGVI, SQUARED, state, [(x, y)], keep="all")


def test_passes_at_a_fraction_of_the_step_hold_the_data_once(x64):
    x, y = make_rows(30)
    prior = FullRank(np.zeros(D), np.eye(D))

    def passes(rule, number):
        state = rule.init(prior)
        for _ in range(number):
            state, _ = nt.online.run_chunks(rule, SQUARED, state, [(x, y)])
        return state.posterior.loc, np.asarray(state.posterior.scale_tril)

    once, tril = passes(NGVI, 1)
    loc, scale_tril = passes(nt.online.ngvi(0.125), 4)
    np.testing.assert_allclose(loc, once, rtol=1e-10)
    np.testing.assert_allclose(scale_tril, tril, rtol=1e-9, atol=1e-12)
    # At the full step they count twice.
    _, scale_tril = passes(NGVI, 2)
    precision = np.linalg.inv(scale_tril @ scale_tril.T)
    np.testing.assert_allclose(precision, np.eye(D) + 2 * x.T @ x, rtol=1e-9, atol=1e-9)


def test_chunks_are_checked():
    x, y = make_rows(4)
    state = NGVI.init(make_prior())

    def run(chunks, **options):
        return nt.online.run_chunks(NGVI, SQUARED, state, chunks, **options)

    used = iter([(x, y)])
    run(used)
    for empty in (used, []):
        with pytest.raises(ValueError, match=r"the stream has no chunk.*or a new one"):
            run(empty)
    with pytest.raises(
        ValueError, match=r"a chunk must be a tuple of arrays.*got ndarray"
    ):
        run([x])
    with pytest.raises(
        ValueError,
        match=r"chunk 0 needs arrays with one common leading axis.*got shapes",
    ):
        run([(x, y[:3])])
    with pytest.raises(ValueError, match=r"chunk 1 has rows of shapes.*all must agree"):
        run([(x, y), (x[:, :2], y)])
    with pytest.raises(ValueError, match="size must be an integer of at least 2"):
        run([(x, y)], size=1)
    hinge = nt.expectations.hinge()
    with pytest.raises(ValueError, match=r"hinge needs labels.*turn labels in"):
        nt.online.run_chunks(NGVI, hinge, state, [(x, y), (x, 3 * y)])
    # Integers fit floats, and padding is not data.
    assert int(run([(x, y), (x, y.astype(int))])[0].count) == 8
    assert int(nt.online.run_chunks(NGVI, hinge, state, [(x[:3], y[:3])])[0].count) == 3


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize("size", [2, 5, 12])
@pytest.mark.parametrize("dtype", [int, np.int8, bool, np.float16])
def test_numbers_of_the_first_chunk_do_not_decide_how_others_are_read(dtype, size):
    x = np.concatenate([(2 * X[:10]).astype(dtype), X[10:20]])
    first = [((2 * X[:10]).astype(dtype), Y[:10].astype(int)), (X[10:20], Y[10:20])]
    expected = nt.online.run_chunks(
        NGVI, SQUARED, NGVI.init(make_prior()), [(x, Y[:20])], size=size
    )
    for chunks in (first, first + [(each[:0], Y[:0]) for each, _ in first]):
        found = nt.online.run_chunks(
            NGVI, SQUARED, NGVI.init(make_prior()), chunks, size=size
        )
        assert_same(found, expected)
    wide = [((2 * X[:10]).astype(np.int8), Y[:10]), (np.full((4, D), 300), Y[:4])]
    state, _ = nt.online.run_chunks(
        NGVI, SQUARED, NGVI.init(make_prior()), wide, size=size
    )
    squares = np.sum(np.square((2 * X[:10]).astype(int)), axis=0) + 4 * 300**2
    # Half of the natural step, of losses of curvature 2 x².
    np.testing.assert_allclose(state.posterior.scale**-2, 1 + squares, rtol=1e-5)


def test_batches_of_all_processes_keep_the_dtypes_of_the_first():
    y = np.arange(8.0)
    ys = [
        batch[0]
        for batch, _ in nt.online.global_batches([(np.float32(y),), (y,)], size=4)
    ]
    np.testing.assert_array_equal(np.concatenate(ys), [*y, *y])
    with pytest.raises(
        ValueError,
        match=r"holds float64 where the first rows hold int64.*chunk.astype\(float\)",
    ):
        list(nt.online.global_batches([(y.astype(int),), (y,)], size=4))


def as_columns(convert):
    return lambda: [
        (convert(X[:20]), convert(Y[:20])),
        (convert(X[20:]), convert(Y[20:])),
    ]


READABLE = {
    "lists": as_columns(np.ndarray.tolist),
    "a list of lists": lambda: [[X.tolist(), Y.tolist()]],
    "objects": as_columns(lambda a: a.astype(object)),
    "frames": as_columns(lambda a: pd.DataFrame(a) if a.ndim == 2 else pd.Series(a)),
    "nullable": as_columns(
        lambda a: (pd.DataFrame(a) if a.ndim == 2 else pd.Series(a)).convert_dtypes()
    ),
    "arrays of jax": as_columns(jnp.asarray),
}
UNREADABLE = {
    "dates": (
        pd.DataFrame(X).assign(day=DATES),
        Y,
        TypeError,
        r"columns \['day'\]. Pass numbers, such as days",
    ),
    "all dates": (
        pd.DataFrame({"day": DATES}),
        Y,
        TypeError,
        "Pass numbers, such as days",
    ),
    "text": (X.astype(str), Y, TypeError, "must be real numbers, got dtype <U32"),
    "complex": (X + 1j, Y, TypeError, "got dtype complex128"),
    "sparse": (
        sparse.csr_matrix(X),
        Y,
        TypeError,
        r"must be dense, got a sparse csr_matrix. Pass x.toarray\(\)",
    ),
    "rows": (
        list(X),
        list(Y),
        ValueError,
        "and 37 more. Join lists of arrays by numpy.stack",
    ),
    "labels": (
        X,
        pd.Series(["a", "b"] * 20, dtype="category"),
        TypeError,
        "Pass codes",
    ),
}


@pytest.mark.parametrize("name", READABLE)
def test_chunks_of_all_kinds_are_read_alike(name):
    state, losses = nt.online.run_chunks(
        NGVI, SQUARED, NGVI.init(make_prior()), READABLE[name](), size=12
    )
    assert_same((state, losses), ONCE)


@pytest.mark.parametrize("name", UNREADABLE)
def test_other_chunks_are_refused_in_a_sentence(name):
    x, y, kind, message = UNREADABLE[name]
    for number, chunks in ((0, [(x, y)]), (1, [(X, Y), (x, y)])):
        with pytest.raises(kind, match=rf"chunk {number} .*{message}") as error:
            nt.online.run_chunks(
                NGVI, SQUARED, NGVI.init(make_prior()), chunks, size=12
            )
        assert len(str(error.value)) < 300


def test_memory_does_not_grow_with_the_stream():
    size, num_chunks = 256, 20
    alive, most = [], [0, 0]

    def chunks():
        for seed in range(num_chunks):
            x, y = make_rows(size, seed=seed)
            alive.append(weakref.ref(x))
            # Chunks and their copies on the device.
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            on_device = [a for a in jax.live_arrays() if a.shape == (size, D)]
            most[1] = max(most[1], len(on_device))
            yield x, y

    before = len([a for a in jax.live_arrays() if a.shape == (size, D)])
    state, _ = nt.online.run_chunks(
        NGVI, SQUARED, NGVI.init(make_prior()), chunks(), size=size, keep="nothing"
    )
    assert int(state.count) == size * num_chunks
    assert most[0] <= 4
    assert most[1] <= before + 3


RSS_PROBE = """
import resource
import jax.numpy as jnp, numpy as np
import numpyro_tempered as nt
from numpyro_tempered.online.drivers import run_chunks
d, rule = 54, nt.online.ngvi()
def chunks(num_rows):
    rng = np.random.default_rng(0)
    for _ in range(num_rows // 10_000):
        yield rng.normal(size=(10_000, d)), rng.normal(size=10_000)
state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d)))
peaks = []
for num_rows in (50_000, 1_000_000):
    after, _ = run_chunks(rule, nt.expectations.squared(), state, chunks(num_rows), keep="nothing")
    assert int(after.count) == num_rows
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
def test_a_million_rows_of_54_features_in_constant_memory():
    done = subprocess.run(
        [sys.executable, "-c", RSS_PROBE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Megabytes; the features alone are 216 in float32.
    assert float(done.stdout) < 30.0


def test_the_bar_counts_rows(capsys):
    x, y = make_rows(20)
    state = NGVI.init(make_prior())
    nt.online.run_chunks(
        NGVI, SQUARED, state, [(x, y)], size=8, progress_bar=True, total=20
    )
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "20.0/20.0" in shown
    nt.online.run_chunks(NGVI, SQUARED, state, [(x, y)], size=8)
    assert capsys.readouterr().err == ""


# Tables


def make_frame(n=25):
    x, y = make_rows(n)
    frame = pd.DataFrame(
        {"one": np.ones(n), "y": y, "count": np.arange(n) % 3, "x": x[:, 0]}
    )
    frame.loc[4, "y"] = np.nan
    return frame


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_data_frame_is_a_stream():
    frame = make_frame()
    state, losses = nt.online.run_chunks(
        NGVI,
        SQUARED,
        NGVI.init(make_prior()),
        nt.online.frame_chunks(frame, "y", size=7),
        size=8,
    )
    x = frame[["one", "count", "x"]].to_numpy()
    expected = nt.online.run(
        NGVI, SQUARED, NGVI.init(make_prior()), x, frame["y"].to_numpy()
    )
    assert_same((state, losses), expected)
    assert (int(state.count), int(state.rejected)) == (24, 1)
    ((x, _),) = nt.online.frame_chunks(frame, "y", features=["x", "one"])
    np.testing.assert_array_equal(x, frame[["x", "one"]])


def test_missing_values_of_nullable_columns_are_nan():
    frame = pd.DataFrame(
        {"x": pd.array([1, None], "Int64"), "y": pd.array([True, None], "boolean")}
    )
    ((x, y),) = nt.online.frame_chunks(frame, "y")
    np.testing.assert_array_equal(x, [[1.0], [np.nan]])
    np.testing.assert_array_equal(y, [1.0, np.nan])


def test_tables_are_checked():
    frame = pd.DataFrame({"x": ["red", "blue"], "y": [1.0, 2.0]})
    with pytest.raises(
        ValueError, match=r"column 'x' holds .*, not numbers.*\.cat\.codes, or"
    ):
        next(nt.online.frame_chunks(frame, "y"))
    with pytest.raises(ValueError, match=r"^a table needs its.*\['z'\] are not among"):
        next(nt.online.frame_chunks(frame, "z"))
    with pytest.raises(
        ValueError, match=r"^a table needs its.*at least one feature.*are not among"
    ):
        next(nt.online.frame_chunks(frame[["y"]], "y"))


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_parquet_file_is_a_stream(tmp_path):
    pytest.importorskip("pyarrow")
    frame, path = make_frame(), tmp_path / "data.parquet"
    frame.to_parquet(path, row_group_size=10, index=False)
    chunks = list(nt.online.parquet_chunks(path, "y", size=8))
    assert [len(y) for _, y in chunks] == [8, 2, 8, 2, 5]
    ours = nt.online.run_chunks(NGVI, SQUARED, NGVI.init(make_prior()), chunks, size=8)
    theirs = nt.online.run_chunks(
        NGVI,
        SQUARED,
        NGVI.init(make_prior()),
        nt.online.frame_chunks(frame, "y"),
        size=8,
    )
    assert_same(ours, theirs)


def test_parts_of_a_parquet_file_are_its_row_groups(tmp_path):
    pytest.importorskip("pyarrow")
    frame, path = make_frame(), tmp_path / "data.parquet"
    frame.to_parquet(path, row_group_size=10, index=False)
    parts = [list(nt.online.parquet_chunks(path, "y", part=(k, 2))) for k in range(2)]
    assert [[len(y) for _, y in part] for part in parts] == [[10, 10], [5]]
    together = np.concatenate([x for part in parts for x, _ in part])
    np.testing.assert_array_equal(together, frame.drop(columns="y").to_numpy(float))
    assert list(nt.online.parquet_chunks(path, "y", part=(3, 4))) == []
    with pytest.raises(
        ValueError, match="the number of a part must be an integer from 0 to 1, got 2"
    ):
        next(nt.online.parquet_chunks(path, "y", part=(2, 2)))


def test_batches_of_one_process_are_its_rows():
    x, y = np.arange(22.0).reshape(11, 2), np.arange(11.0)
    chunks = [(x[:3], y[:3]), (x[3:], y[3:])]
    batches = list(nt.online.global_batches(chunks, size=4))
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(xs)[np.asarray(on)] for (xs, _), on in batches]), x
    )
    skipped = list(nt.online.global_batches(chunks, size=4, skip=2))
    assert [np.asarray(ys)[np.asarray(on)].tolist() for (_, ys), on in skipped] == [
        [8.0, 9.0, 10.0]
    ]
    # A run that had ended has nothing to go on with; a used iterator is an error.
    assert list(nt.online.global_batches(chunks, size=4, skip=3)) == []
    with pytest.raises(ValueError, match=r"no process has a row.*or a new one"):
        next(nt.online.global_batches(iter([]), size=4))
    with pytest.raises(
        ValueError,
        match=r"^a chunk must be.*a tuple of arrays, such as.*of them a tree",
    ):
        next(nt.online.global_batches([({"x": x}, y)], size=4))
    with pytest.raises(
        ValueError, match="size must be an integer of at least 2, got 1"
    ):
        next(nt.online.global_batches(chunks, size=1))


def test_parquet_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ImportError,
        match=r"^reading Parquet.*numpyro_tempered\[parquet\].*give the chunks yourself",
    ):
        next(nt.online.parquet_chunks(tmp_path / "data.parquet", "y"))
