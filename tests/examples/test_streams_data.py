"""The data of the streams example: what each file must hold, and what is done to it."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn", reason="the example's loaders need scikit-learn")

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"


def load_module():
    spec = importlib.util.spec_from_file_location(
        "streams_data", ROOT / "examples" / "streams_data.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


streams_data = load_module()


def from_file(name, file):
    if not (SHARED / file).exists():
        pytest.skip(f"no file {file} in a folder shared/data beside the checkout")
    return streams_data.LOADERS[name](SHARED)


# name, file, rows, columns, positive labels
CLASSES = [
    ("breast cancer", "breast_cancer_wdbc.csv", 569, 30, 357),
    ("Pima", "pima_diabetes.csv", 768, 8, 268),
    # A quarter of a gigabyte.
    pytest.param(
        "Cover Type", "covtype.npz", 581012, 54, 283301, marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize(("name", "file", "rows", "columns", "positive"), CLASSES)
def test_classification_files_hold_the_published_counts(
    name, file, rows, columns, positive
):
    x, y, loss = from_file(name, file)
    assert x.shape == (rows, columns)
    assert y.shape == (rows,)
    assert loss == "hinge"
    assert set(np.unique(y)) == {-1.0, 1.0}
    assert np.sum(y == 1.0) == positive
    assert np.all(np.isfinite(x))


@pytest.mark.full
def test_cover_type_has_one_wilderness_and_one_soil_a_row():
    x, _, _ = from_file("Cover Type", "covtype.npz")
    assert np.all(x[:, 10:14].sum(1) == 1.0)
    assert np.all(x[:, 14:].sum(1) == 1.0)
    assert (x[:, 0].min(), x[:, 0].max()) == (1859.0, 3858.0)


def test_breast_cancer_file_is_that_of_scikit_learn():
    file, built_in = (
        from_file("breast cancer", "breast_cancer_wdbc.csv"),
        streams_data.breast_cancer(),
    )
    np.testing.assert_allclose(file.x, built_in.x, rtol=1e-12)
    np.testing.assert_array_equal(file.y, built_in.y)


def test_boston_file_holds_the_published_means():
    x, y, loss = from_file("Boston", "boston_housing.csv")
    assert x.shape == (506, 13)
    assert loss == "squared"
    assert y.mean() == pytest.approx(22.532806, abs=1e-6)
    assert np.sum(x[:, 3] == 1.0) == 35


def test_california_file_gives_the_features_of_scikit_learn():
    x, y, loss = from_file("California", "california_housing.csv.gz")
    means = [
        3.870671,
        28.639486,
        5.429000,
        1.096675,
        1425.476744,
        3.070655,
        35.631861,
        -119.569704,
    ]
    assert x.shape == (20640, 8)
    assert loss == "squared"
    np.testing.assert_allclose(x.mean(0), means, rtol=0, atol=1e-6)
    assert y.mean() == pytest.approx(2.068558, abs=1e-6)


def test_openml_sets_are_read_as_the_files_are(monkeypatch):
    # OpenML's frames: classes by name, and whole numbers of Boston as categories of strings.
    for name, file, title in (
        ("Pima", "pima_diabetes.csv", "diabetes"),
        ("Boston", "boston_housing.csv", "boston"),
    ):
        x, y, _ = expected = from_file(name, file)
        data = pd.DataFrame(x)
        if name == "Pima":
            target = pd.Series(
                np.where(y > 0, "tested_positive", "tested_negative"), dtype="category"
            )
        else:
            data[3] = data[3].astype(int).astype(str).astype("category")
            target = pd.Series(y)

        def fetch(asked, version, as_frame, title=title, data=data, target=target):
            assert (asked, version, as_frame) == (title, 1, True)
            return SimpleNamespace(data=data, target=target)

        monkeypatch.setattr(streams_data, "fetch_openml", fetch)
        found = streams_data.LOADERS[name]()
        np.testing.assert_array_equal(found.x, expected.x)
        np.testing.assert_array_equal(found.y, expected.y)
        assert found.x.dtype == np.float64


def test_toy_stream_is_two_clouds():
    x, y, loss = streams_data.toy(num_rounds=40_000)
    centred = x - y[:, None]
    assert x.shape == (40_000, 2)
    assert loss == "hinge"
    assert set(np.unique(y)) == {-1.0, 1.0}
    # Six standard errors of a mean with deviation sqrt(2), of a label, and of a variance of 2.
    assert np.all(np.abs(centred.mean(0)) < 6 * np.sqrt(2.0 / 40_000))
    assert abs(y.mean()) < 6 / np.sqrt(40_000)
    assert np.all(np.abs(centred.var(0) - 2.0) < 6 * 2.0 * np.sqrt(2.0 / 40_000))


@pytest.mark.parametrize("loss", ["hinge", "squared"])
def test_prepare_standardises_and_adds_ones(loss):
    rng = np.random.default_rng(0)
    x, y = (
        3.0 + 2.0 * rng.normal(size=(50, 4)),
        np.where(rng.random(50) < 0.3, 1.0, -1.0),
    )
    x[:, 3] = 7.0  # a constant column becomes 0, not NaN
    stream = streams_data.Stream(x, y, loss)
    raw, done = streams_data.prepare(stream, False), streams_data.prepare(stream, True)
    np.testing.assert_array_equal(raw.x, np.column_stack([x, np.ones(50)]))
    np.testing.assert_array_equal(raw.y, y)
    np.testing.assert_allclose(done.x[:, :3].mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(done.x[:, :3].std(0), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(done.x[:, 3:], np.tile([0.0, 1.0], (50, 1)))
    # Labels stay labels.
    np.testing.assert_allclose(
        done.y, y if loss == "hinge" else (y - y.mean()) / y.std(), rtol=1e-12
    )
