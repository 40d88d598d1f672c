"""The committed tables by number of components: no F is below that of fewer components and empty ones."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.special import betaln

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def tables():
    """Tables with an objective for each number of components, by name."""
    every = {path.name: pd.read_csv(path) for path in RESULTS.glob("*.csv")}
    return {
        name: table
        for name, table in every.items()
        if {"num_components", "objective"} <= set(table)
    }


@pytest.mark.skipif(
    not RESULTS.exists(), reason="docs/results is not in the source distribution"
)
def test_the_objective_falls_by_no_more_than_the_weight_of_empty_components():
    # Weights are Dirichlet(1, ..., 1) in all of them.
    assert list(tables()) == ["mixtures_real_criteria.csv"]
    sizes = (
        pd.read_csv(RESULTS / "mixtures_real_data.csv")
        .drop_duplicates("data")
        .set_index("data")["n"]
    )
    below, num_pairs = [], 0
    for (data, prior, alpha), part in tables()["mixtures_real_criteria.csv"].groupby(
        ["data", "prior", "alpha"]
    ):
        rows = part.sort_values("num_components")
        k, value = rows["num_components"].to_numpy(), rows["objective"].to_numpy()
        n, added = alpha * sizes[data], np.diff(k)
        least = value[:-1] + betaln(k[:-1] + n, added) - betaln(k[:-1], added)
        # The table has seven digits.
        below += [
            (data, prior, alpha, k[1:][i])
            for i in np.flatnonzero(value[1:] < least - 1e-6 * np.abs(least))
        ]
        num_pairs += len(added)
    assert num_pairs >= 208
    assert below == []
