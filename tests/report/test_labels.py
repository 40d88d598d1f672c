"""Labels that data frames bring along."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from conftest import tiered
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.core.labels import axis_labels, column_labels
from numpyro_tempered.core.result import Description

KEY = jax.random.key(0)
COLUMNS = ["age", "dose", "weight"]


def frame():
    return pd.DataFrame(np.random.default_rng(0).normal(size=(30, 3)), columns=COLUMNS)


def labels_of(data, dim, group="posterior"):
    return data[group][dim].values.tolist()


def regression(x, y):
    with numpyro.plate("covariate", x.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0))
    with numpyro.plate("person", x.shape[0]):
        numpyro.sample(
            "y", dist.Normal(jnp.asarray(x) @ weights, 1.0), obs=jnp.asarray(y)
        )


def named():
    x = (
        frame()
        .rename_axis(columns="covariate")
        .set_axis([f"p{i}" for i in range(30)])
        .rename_axis("person")
    )
    return x, pd.Series(np.random.default_rng(1).normal(size=30), x.index, name="y")


FITS = {
    "fit_svi": lambda x, y: nt.to_inference_data(
        nt.fit_svi(KEY, regression, AutoNormal, x, y)
    ),
    "fit_gaussian": lambda x, y: nt.to_inference_data(
        nt.fit_gaussian(KEY, regression, AutoNormal, x, y=y)
    ),
    "draws": lambda x, y: nt.to_inference_data(
        {"weights": jnp.zeros((4, 3))}, regression, x, y
    ),
}


@pytest.mark.parametrize("name", tiered(FITS, unit=["draws"]))
def test_plates_take_the_labels_of_axes_of_their_name(name):
    data = FITS[name](*named())
    assert labels_of(data, "covariate") == COLUMNS
    assert labels_of(data, "person", "log_likelihood")[:2] == ["p0", "p1"]


@pytest.mark.full
def test_a_chosen_alpha_keeps_them():
    choice = nt.select_alpha(
        KEY, regression, AutoNormal, *named(), criterion=nt.alpha.magnitude()
    )
    assert labels_of(choice.data, "covariate") == COLUMNS
    assert labels_of(nt.to_inference_data(choice), "covariate") == COLUMNS


@pytest.mark.full
def test_a_stream_keeps_them():
    online = nt.OnlineVI(regression, nt.guides.AutoOnlineDiagonalNormal)
    state, _ = online.update(online.init(KEY, *named()), *named())
    assert (
        labels_of(nt.to_inference_data(online.posterior(state), *named()), "covariate")
        == COLUMNS
    )


def test_coords_win_and_names_that_do_not_match_are_no_labels():
    x, y = named()
    draws = {"weights": jnp.zeros((4, 3))}
    given = nt.to_inference_data(
        draws, regression, x, y, coords={"covariate": ["a", "b", "c"]}
    )
    assert labels_of(given, "covariate") == ["a", "b", "c"]
    plain = nt.to_inference_data(draws, regression, frame(), y)
    assert labels_of(plain, "covariate") == [0, 1, 2]
    # A name alone is no match: the axis is of another length.
    other = nt.to_inference_data(
        draws, regression, x.rename_axis(columns="person"), y.rename_axis("row")
    )
    assert labels_of(other, "person", "log_likelihood") == list(range(30))


def mixture(x, component):
    return nt.mixtures.fit(KEY, x, component, num_components=2, num_restarts=2)


class Moments(NamedTuple):
    """A result of a user's own, with a row and a column for each feature."""

    mean: np.ndarray

    target = None

    def on(self, *data, rng_key=None):
        return self

    def sample_posterior(self, rng_key, sample_shape=()):
        return {
            "mean": np.tile(self.mean, (*sample_shape, 1)),
            "covariance": np.ones((*sample_shape, 2, 2)),
        }

    def describe(self):
        dims = {"mean": ["feature"], "covariance": ["feature", "other_feature"]}
        return Description(dims=dims)


OWN = {
    "moments": lambda x: (Moments(x.to_numpy().mean(axis=0)), x),
    "mixture": lambda x: (mixture(x, nt.mixtures.components.known_variance(2)), x),
    "mixture of matrices": lambda x: (
        mixture(x, nt.mixtures.components.gaussian(2)),
        x,
    ),
    "pca": lambda x: (nt.ppca.fit(KEY, x, num_factors=1), x),
    "sparse": lambda x: (
        nt.sparse.fit_linear(KEY, x, x["age"], inclusion_prob=0.5, slab_scale=1.0),
        x,
        x["age"],
    ),
}


@pytest.mark.parametrize("name", tiered(OWN, unit=["moments"]))
def test_features_are_the_columns_of_the_frame(name):
    table = frame().iloc[:24, :2]
    data = nt.to_inference_data(*OWN[name](table), rng_key=KEY, num_samples=20)
    dims = {"feature", "other_feature"} & set(data["posterior"].dims)
    assert "feature" in dims
    for dim in dims:
        assert labels_of(data, dim) == table.columns.tolist()


def test_axes_in_dispute_or_of_several_levels_have_no_labels():
    x, y = named()
    assert set(axis_labels((x, y))) == {"covariate", "person"}
    assert set(axis_labels((x, y.set_axis(range(30)).rename_axis("person")))) == {
        "covariate"
    }
    levels = pd.MultiIndex.from_product(
        [["a", "b"], range(10)], names=["group", "person"]
    )
    assert axis_labels(pd.Series(np.zeros(20), index=levels)) == {}
    assert column_labels(pd.DataFrame(np.zeros((2, 3)))) is None
    assert column_labels((np.zeros(3), y)) is None


def test_labels_are_numbers_dates_or_text():
    array = xr.DataArray(
        np.zeros(2),
        dims="day",
        coords={"day": pd.to_datetime(["2024-01-01", "2024-01-02"])},
    )
    assert axis_labels({"x": array})["day"].dtype.kind == "M"
    bins = pd.Series([1, 2], index=pd.interval_range(0, 2, name="bin"))
    assert axis_labels([bins])["bin"].tolist() == ["(0, 1]", "(1, 2]"]
