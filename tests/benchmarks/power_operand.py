"""How far fits move where the power is an operand of their programs instead of a constant.

``python tests/benchmarks/power_operand.py`` fits each case with ``alpha``, an operand, and on the model that
``nt.temper`` has tempered by hand, whose power is a constant as it was before, and writes
``docs/results/power_operand.csv``: of each quantity the number that differs most, and by how much of the root
mean square of all.
"""

import csv
import sys
from pathlib import Path

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from provenance import describe

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from golden.table import COUNT, KEY, LABEL, X, Y, counts, linear, location, logistic  # noqa: E402

import numpyro_tempered as nt  # noqa: E402

TABLE = ROOT / "docs" / "results" / "power_operand.csv"
SIZES = "40 rows, up to 3 features"
COLUMNS = ("case", "quantity", "before", "after", "relative difference")
AT_ETA = nt.expectations.gauss_hermite(predictor="eta")
DRAWN = {"num_draws": 64}
QUADRATURE = {"expectation": AT_ETA}
CASES = {
    "svi, linear, mean field": (nt.fit_svi, linear, AutoNormal, (X, Y), 0.3, {}),
    "svi, logistic, mean field": (
        nt.fit_svi,
        logistic,
        AutoNormal,
        (X, LABEL),
        0.3,
        {},
    ),
    "svi, counts, powers by site": (
        nt.fit_svi,
        counts,
        AutoNormal,
        (X, COUNT),
        {"y": 0.7},
        {},
    ),
    "svi, location, full rank": (
        nt.fit_svi,
        location,
        AutoMultivariateNormal,
        (Y,),
        0.3,
        {},
    ),
    "gaussian, location, draws": (
        nt.fit_gaussian,
        location,
        AutoMultivariateNormal,
        (Y,),
        0.3,
        DRAWN,
    ),
    "gaussian, logistic, quadrature": (
        nt.fit_gaussian,
        logistic,
        AutoNormal,
        (X, LABEL),
        0.3,
        QUADRATURE,
    ),
}


def quantities(fit):
    """What a fit holds, in flat arrays."""
    params = [np.ravel(leaf) for leaf in jax.tree.leaves(fit.params)]
    return {
        "params": np.concatenate(params),
        "losses": fit.losses,
        "elbo": fit.elbo[:4],
    }


def rows_of(name, constant, operand):
    for quantity, old in quantities(constant).items():
        old, new = (
            np.asarray(each, float) for each in (old, quantities(operand)[quantity])
        )
        if old.shape != new.shape:
            yield name, f"number of {quantity}", old.size, new.size, ""
            continue
        place = int(np.nanargmax(np.abs(new - old)))
        share = abs(new[place] - old[place]) / np.sqrt(np.nanmean(old**2))
        yield name, quantity, f"{old[place]:.9g}", f"{new[place]:.9g}", f"{share:.1e}"


def main():
    rows = []
    for name, (function, model, guide, data, alpha, options) in CASES.items():
        operand = function(KEY, model, guide, *data, alpha=alpha, **options)
        constant = function(KEY, nt.temper(model, alpha), guide, *data, **options)
        rows += rows_of(name, constant, operand)
        if guide is AutoNormal and function is nt.fit_gaussian:
            responses = (
                nt.linear_response(KEY, fit, **options) for fit in (constant, operand)
            )
            rows += rows_of(
                "linear response",
                *(each._replace(losses=each.elbo[:1]) for each in responses),
            )
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerows([COLUMNS, *rows])
    TABLE.with_suffix(".txt").write_text(describe(SIZES))


if __name__ == "__main__":
    main()
