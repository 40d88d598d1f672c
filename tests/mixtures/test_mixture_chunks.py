"""Coordinate ascent over chunks: the numbers of a fit in memory, however the rows are cut."""

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.chunks import add_block, chunk_source
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.multinomial import multinomial
from numpyro_tempered.mixtures.components.poisson import poisson
from numpyro_tempered.mixtures.coordinate_ascent import fit

COMPONENT = known_variance(2, prior_loc=1e3, prior_scale=10.0)
OPTIONS = {
    "num_components": 2,
    "alpha": 0.5,
    "num_restarts": 2,
    "num_draws": 4,
    "tolerance": 1e-6,
}


def data():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.normal(size=(180, 2)), 0.5 * rng.normal(size=(120, 2)) + [3.0, 2.0]]
    )
    return rng.permutation(x) + 1e3


X = data()


def cut(*cuts, rows=X):
    """The rows in pieces, as a function that makes them anew."""
    return lambda: (
        rows[a:b] for a, b in zip((0, *cuts), (*cuts, len(rows)), strict=True)
    )


def assert_same(ours, expected):
    assert (ours.num_iter, ours.converged, ours.total) == (
        expected.num_iter,
        True,
        expected.total,
    )
    for name in ("objective", "trace", "restart_objectives", "counts"):
        np.testing.assert_allclose(
            getattr(ours, name), getattr(expected, name), rtol=1e-9, err_msg=name
        )
    np.testing.assert_allclose(ours.bound, expected.bound, rtol=1e-7)
    np.testing.assert_allclose(ours.posterior.loc, expected.posterior.loc, rtol=1e-9)
    np.testing.assert_allclose(ours.problem.base, expected.problem.base, rtol=1e-10)


# Chunks of one row, without a row, and larger than a block; all in blocks of 64 rows.
CUTS = [(), (1, 1, 200), tuple(range(50, 300, 50))]


@pytest.mark.full
@pytest.mark.parametrize("cuts", CUTS)
def test_chunks_give_the_fit_of_the_rows_in_memory(cuts, key, x64):
    expected = fit(key, X, COMPONENT, **OPTIONS)
    assert_same(fit(key, cut(*cuts), COMPONENT, size=64, **OPTIONS), expected)


@pytest.mark.full
def test_one_compilation_serves_all_chunks(key, x64):
    fit(key, [X], COMPONENT, size=64, **OPTIONS)
    before = add_block._cache_size()
    fit(key, [X[:7], X[7:100], X[100:299]], COMPONENT, size=64, **OPTIONS)
    assert add_block._cache_size() == before


@pytest.mark.full
def test_weights_and_missing_entries(key, x64):
    weight = np.arange(len(X)) % 3
    x = X.copy()
    x[::7, 0], x[3] = np.nan, np.nan
    expected = fit(key, x, COMPONENT, sample_weight=weight, **OPTIONS)
    pieces = [(x[:64], weight[:64]), (x[64:], weight[64:])]
    assert_same(fit(key, pieces, COMPONENT, size=64, **OPTIONS), expected)


@pytest.mark.full
def test_a_warm_start_gives_the_trajectory_of_the_fit_in_memory(key, x64):
    # The second restart starts from rows drawn at random, of which there are enough for all.
    first = fit(key, X, COMPONENT, **(OPTIONS | {"alpha": 0.01}))
    expected = fit(key, X, COMPONENT, init=first, **OPTIONS)
    assert expected.num_iter > 2
    options = OPTIONS | {"init": [first, nt.mixtures.starts.kmeans_plus_plus()]}
    assert_same(fit(key, cut(100), COMPONENT, size=64, **options), expected)


@pytest.mark.full
def test_single_precision_keeps_the_objective(key, x64):
    expected = fit(key, X, COMPONENT, **OPTIONS)
    with (
        jax.enable_x64(False)
        if hasattr(jax, "enable_x64")
        else jax.experimental.disable_x64()
    ):
        ours = fit(key, cut(100), COMPONENT, size=64, **OPTIONS)
    assert ours.trace.dtype == np.float32
    np.testing.assert_allclose(ours.objective, expected.objective, atol=2e-2)


@pytest.mark.full
@given(st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_what_starts_see_does_not_depend_on_the_cut(cuts, seed):
    rows = np.arange(40.0)
    key = jax.random.key(seed)
    options = {"num_start_rows": 12, "size": 64, "num_together": 1}
    result = chunk_source(
        key, cut(*sorted(cuts), rows=rows), diagonal_gaussian(1), **options
    )
    expected = chunk_source(key, [rows], diagonal_gaussian(1), **options)
    np.testing.assert_array_equal(result.data.rows, expected.data.rows)
    assert len(result.data.rows) == 12
    assert (result.num_rows, result.data.total, float(result.data.weight.sum())) == (
        40,
        40.0,
        12.0,
    )


def test_rows_are_moved_to_the_mean_of_all_chunks_where_the_family_moves():
    rows, weight = X[:40].copy(), np.arange(1.0, 41.0) / 16.0
    rows[3, 0] = np.nan
    chunks = [(rows[:25], weight[:25]), (rows[25:], weight[25:])]
    options = {"num_start_rows": 10, "size": 64, "num_together": 1}
    source = chunk_source(jax.random.key(0), chunks, diagonal_gaussian(2), **options)
    mean = [
        np.average(column[~np.isnan(column)], weights=weight[~np.isnan(column)])
        for column in rows.T
    ]
    np.testing.assert_allclose(source.data.centre, mean, rtol=1e-12)
    assert source.data.total == pytest.approx(weight.sum())
    counts = chunk_source(jax.random.key(0), [np.ones((9, 2))], poisson(2), **options)
    assert counts.data.centre is None
    np.testing.assert_array_equal(counts.data.rows, np.ones((9, 2)))


def test_starts_side_by_side_are_of_one_size():
    groups = {
        fill: ArraySource(None, None, fill).groups(num)
        for fill, num in ((True, 10), (False, 10), (None, 3))
    }
    assert [g.tolist() for g in groups[True]] == [list(range(8)), [8, 9] + 6 * [-1]]
    assert [g.tolist() for g in groups[False]] == [list(range(5)), list(range(5, 10))]
    assert [g.tolist() for g in groups[None]] == [[0, 1, 2]]
    assert [g.tolist() for g in ArraySource(None, None, fill=True).groups(3)] == [
        [0, 1, 2, -1]
    ]


@pytest.mark.full
def test_the_sample_is_uniform():
    # Each of 40 rows is in a sample of 10 with probability 1/4.
    draws = 400
    times = np.zeros(40)
    chunks = [np.arange(25.0), np.arange(25.0, 40.0)]
    for key in jax.random.split(jax.random.key(0), draws):
        sample = chunk_source(
            key,
            chunks,
            diagonal_gaussian(1),
            num_start_rows=10,
            size=64,
            num_together=1,
        ).data
        times[
            np.round(np.asarray(sample.rows)[:, 0] + sample.centre[0]).astype(int)
        ] += 1
    assert times.sum() == 10 * draws
    np.testing.assert_allclose(
        times / draws, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / draws)
    )


def test_chunks_that_cannot_be_read_again_are_named(key):
    one = iter([X[:10], X[10:]])
    with pytest.raises(
        TypeError,
        match="chunks is an iterator, which is used up by one pass; expected a list",
    ):
        fit(key, one, COMPONENT, num_components=2)
    with pytest.raises(TypeError, match="chunks gave a int; expected an iterable"):
        fit(key, lambda: 3, COMPONENT, num_components=2)
    with pytest.raises(
        ValueError,
        match=r"the stream has no chunk\. An iterator is used up.*or a new one",
    ):
        fit(key, lambda: one, COMPONENT, num_components=2)
    shrinking = [[X], [X[:200]]]
    with pytest.raises(
        ValueError,
        match=r"a pass over the chunks gave 200 rows, the first pass 300.*for each pass",
    ):
        fit(key, lambda: shrinking.pop(0), COMPONENT, num_components=2)


WRONG = {
    "no chunk": (list, ValueError, "the chunks hold no row"),
    "no row": ([X[:0]], ValueError, "the chunks hold no row"),
    "another width": (
        [X, X[:, :1]],
        ValueError,
        r"chunk 1: known_variance: the data have shape \(300, 1\)",
    ),
    "infinite": (
        [X, X * np.inf],
        ValueError,
        r"chunk 1: .* row 0, column 0 of the data is inf.*not valid",
    ),
    "words": (
        [X, np.array([["a", "b"]])],
        TypeError,
        "chunk 1: .* must be real numbers, got dtype",
    ),
    "three arrays": (
        [(X, X, X)],
        ValueError,
        r"chunk 0 is a tuple of 3.*array of rows, or",
    ),
    "weights of another length": (
        [(X, np.ones(3))],
        ValueError,
        r"chunk 0: sample_weight has shape \(3,\)",
    ),
    "negative weights": (
        [X, (X, -np.ones(300))],
        ValueError,
        "chunk 1: sample_weight must be finite",
    ),
    "no weight": (
        [(X, np.zeros(300))],
        ValueError,
        r"no row has both a positive weight.*an observed entry",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chunks_are_named(name, key):
    chunks, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fit(key, chunks, COMPONENT, num_components=2)


def test_wrong_arguments_are_named(key):
    with pytest.raises(TypeError, match="component is a str; expected a component"):
        fit(key, [X], "gaussian", num_components=2)
    with pytest.raises(
        ValueError, match=r"column 1 has missing entries.*leave the rows out"
    ):
        fit(key, [np.array([[0.0, np.nan]])], multinomial(2), num_components=2)
    with pytest.raises(
        ValueError, match=r"row 1, column 0 of the data is -1; expected.*are not valid"
    ):
        fit(key, [np.array([[2], [-1]])], poisson(1), num_components=2)
    with pytest.raises(
        ValueError, match="num_start_rows must be an integer of at least 1"
    ):
        fit(key, [X], COMPONENT, num_components=2, num_start_rows=0)


@pytest.mark.full
def test_what_has_not_converged_is_said(key, x64, capsys):
    with pytest.warns(UserWarning, match="has not converged in max_iter=1 passes"):
        result = fit(
            key,
            [X],
            COMPONENT,
            size=64,
            progress_bar=True,
            **(OPTIONS | {"max_iter": 1}),
        )
    assert (result.num_iter, result.converged) == (1, False)
    assert "passes" in capsys.readouterr().err


@pytest.mark.full
def test_row_groups_of_a_parquet_file(key, x64, tmp_path):
    arrow, parquet = (
        pytest.importorskip("pyarrow"),
        pytest.importorskip("pyarrow.parquet"),
    )
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        arrow.table({"a": X[:, 0], "b": X[:, 1]}), path, row_group_size=70
    )

    def chunks():
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group).to_pandas().to_numpy()

    assert len(list(chunks())) == 5
    expected = fit(key, X, COMPONENT, **OPTIONS)
    assert_same(fit(key, chunks, COMPONENT, size=64, **OPTIONS), expected)


@pytest.mark.full
def test_row_groups_of_a_parquet_file_are_chunks(key, x64, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"a": X[:, 0], "label": 0.0, "b": X[:, 1]}).to_parquet(
        path, row_group_size=70
    )
    from_file = fit(
        key,
        lambda: nt.online.parquet_chunks(path, features=["a", "b"]),
        COMPONENT,
        size=64,
        **OPTIONS,
    )
    assert_same(from_file, fit(key, X, COMPONENT, **OPTIONS))
