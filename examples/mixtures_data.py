"""Six data sets of the literature on mixtures, five of numbers and one of categories.

Each loader reads a file from ``data_dir``: ``old_faithful.csv``, ``galaxies.csv``, ``acidity.csv``,
``enzyme.csv``, ``iris.csv``. Without a folder iris comes from scikit-learn, Old Faithful and the galaxies from
Rdatasets on GitHub; acidity and enzyme come from files alone. The digits are always scikit-learn's.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits, load_iris

# Fixed commits: the files cannot change.
RDATASETS = "https://raw.githubusercontent.com/vincentarelbundock/Rdatasets"
OLD_FAITHFUL_URL = (
    f"{RDATASETS}/cc03c29690889dbe83089f5206e2422db8c3f71f/csv/datasets/faithful.csv"
)
GALAXIES_URL = (
    f"{RDATASETS}/a44de06f4edac532bcc05deadc560dea870f6173/csv/MASS/galaxies.csv"
)


class Table(NamedTuple):
    """Rows ``x`` (n, d), names of the columns, and known classes (n,) where there are any."""

    x: np.ndarray
    columns: list[str]
    classes: np.ndarray | None = None


def old_faithful(data_dir=None):
    """Old Faithful, 272 × 2: minutes of an eruption and until the next (Azzalini and Bowman 1990)."""
    columns = ["eruptions", "waiting"]
    data = pd.read_csv(
        OLD_FAITHFUL_URL if data_dir is None else Path(data_dir) / "old_faithful.csv"
    )
    return Table(data[columns].to_numpy(float), columns)


def galaxies(data_dir=None):
    """Velocities of 82 galaxies in 1000 km/s (Roeder 1990), as Richardson and Green (1997) have them.

    Row 78 is 26.960 there and 26.690 in R's package MASS, which is where the values come from without a folder.
    The file has both versions; the column is ``velocity_1000km_s_RG97``.
    """
    if data_dir is None:
        x = pd.read_csv(GALAXIES_URL)["dat"].to_numpy(float) / 1000.0
        x[77] = 26.960
    else:
        x = pd.read_csv(Path(data_dir) / "galaxies.csv")[
            "velocity_1000km_s_RG97"
        ].to_numpy(float)
    return Table(x[:, None], ["velocity, 1000 km/s"])


def acidity(data_dir=None):
    """Acid-neutralising capacity of 155 lakes in Wisconsin, on a log scale (Crawford 1994)."""
    return Table(_one_column(data_dir, "acidity"), ["log acidity index"])


def enzyme(data_dir=None):
    """Enzymatic activity in the blood of 245 persons (Bechtel et al. 1993)."""
    return Table(_one_column(data_dir, "enzyme"), ["enzymatic activity"])


def iris(data_dir=None):
    """Fisher's iris, 150 × 4, with three species."""
    if data_dir is None:
        data = load_iris()
        return Table(
            data.data,
            [name.removesuffix(" (cm)") for name in data.feature_names],
            data.target,
        )
    data = pd.read_csv(Path(data_dir) / "iris.csv")
    x, columns = (
        data.iloc[:, :4].to_numpy(float),
        [name.replace("_", " ") for name in data.columns[:4]],
    )
    return Table(x, columns, pd.factorize(data["species"])[0])


def digits(data_dir=None):
    """Handwritten digits, 1797 × 55: pixels of 8 × 8 images in three grey levels, 0 to 5, 6 to 10 and 11 to 16.

    Codes 0, 1, 2. Pixels with the same level in all images are left out.
    """
    data = load_digits()
    codes = np.digitize(data.data, [5.5, 10.5])
    varies = np.ptp(codes, axis=0) > 0
    columns = [
        name for name, keep in zip(data.feature_names, varies, strict=True) if keep
    ]
    return Table(codes[:, varies].astype(float), columns, data.target)


LOADERS = {
    "Old Faithful": old_faithful,
    "galaxies": galaxies,
    "acidity": acidity,
    "enzyme": enzyme,
    "iris": iris,
    "digits": digits,
}


def _one_column(data_dir, name):
    if data_dir is None:
        raise ValueError(
            f"{name} is read from a file alone: write {name}.csv, one column of numbers under the header "
            f"{name!r}, and name its folder with --data-dir. The values are in R's package multimode as "
            f"data({name}), and in mixAK as {name.title()}."
        )
    return pd.read_csv(Path(data_dir) / f"{name}.csv")[[name]].to_numpy(float)
