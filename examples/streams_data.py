"""The six data sets of CA19, section 5, as streams.

Each loader downloads through scikit-learn or OpenML, or reads a file from ``data_dir``: ``covtype.npz``,
``pima_diabetes.csv``, ``boston_housing.csv``, ``california_housing.csv.gz``, ``breast_cancer_wdbc.csv``.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from sklearn.datasets import (
    fetch_california_housing,
    fetch_covtype,
    fetch_openml,
    load_breast_cancer,
)


class Stream(NamedTuple):
    """Features ``x`` (T, d), outcomes ``y`` (T,), and the loss: hinge with y in {-1, 1}, or squared."""

    x: np.ndarray
    y: np.ndarray
    loss: str


def toy(data_dir=None, seed=0, num_rounds=10_000):
    """Two Gaussian clouds with equal weights, x | y ~ N(y (1, 1), 2 I), y in {-1, 1}; a variant of CA19's."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1.0, 1.0], num_rounds)
    return Stream(
        np.sqrt(2.0) * rng.normal(size=(num_rounds, 2)) + y[:, None], y, "hinge"
    )


def breast_cancer(data_dir=None):
    """Wisconsin diagnostic breast cancer, 569 × 30: benign (1) or malignant (-1)."""
    if data_dir is None:
        x, y = load_breast_cancer(return_X_y=True)
    else:
        x, y = _split(pd.read_csv(Path(data_dir) / "breast_cancer_wdbc.csv"))
    return Stream(x, _signs(y == 1), "hinge")


def pima(data_dir=None):
    """Pima diabetes, 768 × 8: diabetes (1) or not (-1); zeros that stand for missing values are left."""
    if data_dir is None:
        data = fetch_openml("diabetes", version=1, as_frame=True)
        return Stream(
            data.data.to_numpy(float), _signs(data.target == "tested_positive"), "hinge"
        )
    x, y = _split(pd.read_csv(Path(data_dir) / "pima_diabetes.csv"))
    return Stream(x, _signs(y == 1), "hinge")


def cover_type(data_dir=None):
    """Forest Cover Type, 581012 × 54: class 2, the most frequent (1), against the six others (-1)."""
    if data_dir is None:
        x, y = fetch_covtype(return_X_y=True)
        return Stream(x, _signs(y == 2), "hinge")
    file = np.load(Path(data_dir) / "covtype.npz")
    rows = np.arange(len(file["y"]))
    x = np.zeros((len(rows), 54))
    x[:, :10] = file["numeric"]
    x[rows, 9 + file["wilderness"].astype(int)] = 1.0
    x[rows, 13 + file["soil"].astype(int)] = 1.0
    return Stream(x, _signs(file["y"] == 2), "hinge")


def boston(data_dir=None):
    """Boston housing, 506 × 13, median value in thousands of dollars: for reproduction only.

    Column B is 1000 (Bk - 0.63)², Bk the share of Black residents of a town: its authors assumed that
    self-segregation raises house prices. scikit-learn removed the set for it. It is here because
    a published figure uses it, and should serve for nothing else.
    """
    if data_dir is None:
        data = fetch_openml("boston", version=1, as_frame=True)
        return Stream(
            data.data.astype(float).to_numpy(), data.target.to_numpy(float), "squared"
        )
    return Stream(
        *_split(pd.read_csv(Path(data_dir) / "boston_housing.csv")), "squared"
    )


def california(data_dir=None):
    """California housing, 20640 × 8 (rooms, bedrooms and occupants per household), value in 100,000 dollars."""
    if data_dir is None:
        return Stream(*fetch_california_housing(return_X_y=True), "squared")
    raw = pd.read_csv(Path(data_dir) / "california_housing.csv.gz")
    x = pd.DataFrame(
        {
            "MedInc": raw.median_income,
            "HouseAge": raw.housing_median_age,
            "AveRooms": raw.total_rooms / raw.households,
            "AveBedrms": raw.total_bedrooms / raw.households,
            "Population": raw.population,
            "AveOccup": raw.population / raw.households,
            "Latitude": raw.latitude,
            "Longitude": raw.longitude,
        }
    )
    return Stream(
        x.to_numpy(float), raw.median_house_value.to_numpy(float) / 1e5, "squared"
    )


LOADERS = {
    "toy": toy,
    "breast cancer": breast_cancer,
    "Pima": pima,
    "Cover Type": cover_type,
    "Boston": boston,
    "California": california,
}


def prepare(stream, standardised):
    """The stream with a column of ones, and with features and the outcome of a regression standardised.

    Means and deviations are those of the whole data set: known in hindsight, and the same for all rules.
    """
    x, y, loss = stream
    if standardised:
        x = _standardise(x)
        y = _standardise(y) if loss == "squared" else y
    return Stream(np.column_stack([x, np.ones(len(x))]), y, loss)


def _standardise(values):
    deviation = values.std(axis=0)
    return (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def _split(table):
    values = table.to_numpy(float)
    return values[:, :-1], values[:, -1]


def _signs(positive):
    return np.where(np.asarray(positive), 1.0, -1.0)
