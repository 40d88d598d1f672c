"""Mixtures of full-covariance Gaussians on rows with missing entries, beside what is done instead.

Each contender is fitted to training rows, K = 1 to 4 by the penalised ELBO, alpha = 1, and predicts the observed
entries of held-out rows: their mean log density a row, with its standard error over rows. Missing entries are
integrated out under full covariance, or under independent columns; replaced by the means of their columns; or
their rows are left out.
Simulated: .6 N(0, S) + .4 N(m, S), four columns of correlation .8, 1,000 rows, entries missing at random, and
5,000 complete rows held out. The truth's log density stands beside.
Pima: zeros of five columns are missing (49 % of insulin, 30 % of skin thickness), insulin, pedigree and age by
their logarithms, a quarter of the 768 rows held out. Needs ``--data-dir``.
Writes ``mixture_missing.csv``.

    python tests/benchmarks/mixture_missing.py --data-dir ../shared/data
"""

import argparse
import warnings
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from provenance import describe
from scipy.stats import multivariate_normal

import numpyro_tempered as nt

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
DIM, CORRELATION, DISTANCE, SHARE = 4, 0.8, np.array([3.0, 0.0, 3.0, 0.0]), 0.4
MISSING = (0.0, 0.1, 0.3, 0.5)


def simulate(rng, num_rows):
    """Complete rows."""
    covariance = np.full((DIM, DIM), CORRELATION) + (1.0 - CORRELATION) * np.eye(DIM)
    rows = rng.multivariate_normal(np.zeros(DIM), covariance, size=num_rows)
    return rows + np.where(rng.random(num_rows) < SHARE, 1.0, 0.0)[:, None] * DISTANCE


def log_truth(rows):
    """The log density of complete rows under what they were drawn from."""
    covariance = np.full((DIM, DIM), CORRELATION) + (1.0 - CORRELATION) * np.eye(DIM)
    first, second = (
        multivariate_normal(mean, covariance).logpdf(rows)
        for mean in (np.zeros(DIM), DISTANCE)
    )
    return np.logaddexp(np.log(1.0 - SHARE) + first, np.log(SHARE) + second)


def pima(folder):
    """Rows with missing entries, and the held-out ones."""
    table = pd.read_csv(folder / "pima_diabetes.csv")
    zeros = ["glucose", "blood_pressure", "skin_thickness", "insulin", "bmi"]
    x = table[zeros].replace(0, np.nan).join(table[["pedigree", "age"]])
    x[["insulin", "pedigree", "age"]] = np.log(x[["insulin", "pedigree", "age"]])
    is_test = np.random.default_rng(0).random(len(x)) < 0.25
    return x.to_numpy(float)[~is_test], x.to_numpy(float)[is_test]


def contenders(train):
    """By name, the rows that each is fitted to and its family."""
    full, diagonal = (
        nt.mixtures.components.gaussian,
        nt.mixtures.components.diagonal_gaussian,
    )
    imputed = np.where(np.isnan(train), np.nanmean(train, axis=0), train)
    return {
        "full covariance, integrated out": (train, full),
        "independent columns, integrated out": (train, diagonal),
        "full covariance, means imputed": (imputed, full),
        "full covariance, complete rows alone": (
            train[~np.isnan(train).any(axis=1)],
            full,
        ),
    }


def table_of(data, missing, train, test, orders):
    """A row for each contender."""
    rows = []
    for name, (x, family) in contenders(train).items():
        component = family(x.shape[1], **nt.mixtures.components.scaled_to(x))
        choice = nt.mixtures.select_num_components(
            jax.random.key(0),
            x,
            component,
            num_components=orders,
            num_restarts=8,
            baselines=False,
        )
        values = np.asarray(nt.mixtures.log_predictive(choice.fit, test), np.float64)
        rows.append(
            {
                "data": data,
                "missing": missing,
                "contender": name,
                "rows": len(x),
                "K": choice.selected,
                "held-out nats a row": values.mean(),
                "se": values.std(ddof=1) / np.sqrt(len(values)),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    """Run the studies, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="200 simulated rows, one share, K = 1 and 2",
    )
    parser.add_argument("--data-dir", type=Path, help="folder of pima_diabetes.csv")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for the table"
    )
    options = parser.parse_args()
    # Ranges that end at the selected K, and restarts that have not converged, are in the table's choices.
    warnings.simplefilter("ignore")
    orders = [1, 2] if options.small else [1, 2, 3, 4]
    rng = np.random.default_rng(1)
    complete, test = simulate(rng, 200 if options.small else 1000), simulate(rng, 5000)
    uniform, rows = rng.random(complete.shape), []
    for share in (0.3,) if options.small else MISSING:
        train = np.where(uniform < share, np.nan, complete)
        rows += table_of("simulated", f"{share:.0%}", train, test, orders)
    truth = log_truth(test)
    rows.append(
        {
            "data": "simulated",
            "contender": "the truth",
            "held-out nats a row": truth.mean(),
        }
    )
    rows[-1]["se"] = truth.std(ddof=1) / np.sqrt(len(truth))
    if options.data_dir is not None:
        train, test = pima(options.data_dir)
        rows += table_of("Pima", f"{np.isnan(train).mean():.0%}", train, test, orders)
    table = pd.DataFrame(rows).round({"held-out nats a row": 3, "se": 3})
    for name in ("rows", "K"):
        table[name] = table[name].astype("Int64")
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "mixture_missing.csv", index=False)
    print(table.to_string(index=False))
    (options.output / "mixture_missing.txt").write_text(
        describe("as in the script; seeds by numpy and jax.random")
    )


if __name__ == "__main__":
    main()
