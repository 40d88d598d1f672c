"""Results as pandas tables."""

import numpy as np
import pytest
import xarray as xr

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import assemble, dataset


def made(name, dim, coords, **columns):
    data = dataset(
        columns, coords={dim: coords}, dims={column: [dim] for column in columns}
    )
    return assemble({name: data}, {})


def test_models_come_best_first():
    data = made(
        "model_comparison",
        "model",
        ["a", "b", "c"],
        rank=[2, 0, 1],
        elbo=[-3.0, -1.0, -2.0],
    )
    table = nt.table(data)
    assert table.index.tolist() == ["b", "c", "a"]
    assert table["elbo"].tolist() == [-1.0, -2.0, -3.0]


def test_numbers_of_components_and_alphas_stay_in_order():
    by_order = nt.table(
        made("model_comparison", "num_components", [1, 2, 3], rank=[2, 0, 1])
    )
    assert by_order.index.tolist() == [1, 2, 3]
    for name in ("alpha_selection", "tempered_path"):
        assert nt.table(
            made(name, "alpha", [0.5, 1.0], elbo=[1.0, 2.0])
        ).index.tolist() == [0.5, 1.0]


def test_a_path_of_numbers_of_components_has_both_indexes():
    columns = {"elbo": np.arange(6.0).reshape(2, 3), "selected": np.array([2, 3])}
    dims = {"elbo": ["alpha", "num_components"], "selected": ["alpha"]}
    data = dataset(
        columns, coords={"alpha": [0.5, 1.0], "num_components": [1, 2, 3]}, dims=dims
    )
    table = nt.table(assemble({"num_components_path": data}, {}))
    assert table.index.names == ["alpha", "num_components"]
    assert table.loc[(1.0, 2)].tolist() == [4.0, 3.0]


def test_a_ledger_is_shown_at_its_last_round_with_guarantees():
    regret = dataset(
        {"average": np.array([[3.0, 2.0], [1.0, 1.5]]), "taken": np.array([2, 2])},
        coords={"rule": ["a", "b"], "round": [1, 2]},
        dims={"average": ["rule", "round"], "taken": ["rule"]},
    )
    batch = dataset(
        {"guarantee": np.array([0.5])},
        coords={"rule": ["a"]},
        dims={"guarantee": ["rule"]},
    )
    table = nt.table(assemble({"regret": regret, "online_to_batch": batch}, {}))
    assert table.index.tolist() == ["b", "a"]
    assert table["average"].tolist() == [1.5, 2.0]
    np.testing.assert_array_equal(table["guarantee"], [np.nan, 0.5])


def test_a_group_can_be_named():
    parts = {
        name: xr.Dataset({"rank": (dim, [0])}, coords={dim: [1.0]})
        for name, dim in (("model_comparison", "model"), ("alpha_selection", "alpha"))
    }
    assert nt.table(parts).index.name == "model"
    assert nt.table(parts, "alpha_selection").index.name == "alpha"
    with pytest.raises(
        ValueError,
        match=r"^the data.*no group regret, only .*pass the result of regret_ledger\.",
    ):
        nt.table(parts, "regret")


def test_other_data_are_refused():
    with pytest.raises(
        TypeError, match=r"^expected ArviZ data,.*got int.*pass a result through"
    ):
        nt.table(3)
    with pytest.raises(
        ValueError,
        match=r"^the data.*no group model_comparison or alpha_selection.*sandwich, sandwich",
    ):
        nt.table({"posterior": xr.Dataset()})
