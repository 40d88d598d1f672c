"""One pass by the implicit step and by the explicit ones, against the optimum of all rows.

Streams, each with a standard normal prior and losses that are log-likelihoods:

- *counts*: Poisson regression, d = 10, slopes .02 (1, ..., 10), standard normal features, 10,000 rows;
- *breast cancer*: logistic regression, 569 rows in file order, 30 features, standardised;
- *cover type*: class 2 against the rest, 54 features, standardised, and a constant; the first 60,000 of the rows
  permuted by seed 0. Needs ``--data-dir`` with ``covtype.npz``;
- *one huge row*: the first 3,000 of those, row 1,000 of which is multiplied by 10^6.

Columns: *loss*, mean log loss of each row at the posterior mean before it; *late*, of the last third; *mean*, the
largest distance of a posterior mean from the mode of all rows in standard deviations of Laplace's approximation
there (of its own variances, or for mean field of its diagonal precision); *sd*, the mean ratio of standard
deviations to those; *rejected*; microseconds a row of the compiled loop, and seconds of the first call.

Writes ``implicit_step.csv`` and ``implicit_step.txt``.

    python tests/benchmarks/implicit_step.py --data-dir ../shared/data
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from provenance import describe
from scipy.special import expit
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
RULES = {
    "rvga()": nt.online.rvga(),
    "ngvi()": nt.online.ngvi(),
    'ngvi(curvature="fisher")': nt.online.ngvi(curvature="fisher"),
}
LOSSES = {"logistic": nt.expectations.logistic(), "poisson": nt.expectations.poisson()}


def standardise(x):
    scale = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)


def counts(num_rows):
    """Poisson regression."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 10))
    return (
        "poisson",
        x,
        rng.poisson(np.exp(x @ (0.02 * np.arange(1, 11)))).astype(float),
    )


def breast_cancer():
    """Benign against malign."""
    x, y = load_breast_cancer(return_X_y=True)
    return "logistic", standardise(x), np.where(y == 1, 1.0, -1.0)


def cover_type(folder, num_rows):
    """Lodgepole pine against other trees."""
    with np.load(folder / "covtype.npz") as file:
        at = np.random.default_rng(0).permutation(file["y"].size)[:num_rows]
        areas, soils = (
            np.eye(4)[file["wilderness"][at] - 1],
            np.eye(40)[file["soil"][at] - 1],
        )
        x = np.concatenate([file["numeric"][at].astype(float), areas, soils], axis=1)
        y = np.where(file["y"][at] == 2, 1.0, -1.0)
    return (
        "logistic",
        np.concatenate([standardise(x), np.ones((at.size, 1))], axis=1),
        y,
    )


def one_huge_row(stream, size):
    """A row in other units by mistake."""
    kind, x, y = stream
    x = x[:3000].copy()
    x[1000] *= size
    return kind, x, y[:3000]


def mode(kind, x, y):
    """Mode and precision of the posterior of all rows, by Newton's method with halved steps."""

    def evaluate(theta):
        u = x @ theta
        if kind == "poisson":
            rate = np.exp(u)
            return (
                np.sum(rate - y * u) + 0.5 * theta @ theta,
                x.T @ (rate - y) + theta,
                rate,
            )
        p = expit(-y * u)
        return (
            np.sum(np.logaddexp(0.0, -y * u)) + 0.5 * theta @ theta,
            theta - x.T @ (y * p),
            p * (1.0 - p),
        )

    theta = np.zeros(x.shape[1])
    for _ in range(100):
        value, gradient, weights = evaluate(theta)
        precision = (x * weights[:, None]).T @ x + np.eye(theta.size)
        step = np.linalg.solve(precision, gradient)
        size = 1.0
        while (
            evaluate(theta - size * step)[0] > value + 1e-9 * abs(value) and size > 1e-6
        ):
            size *= 0.5
        theta = theta - size * step
        if np.max(np.abs(step)) < 1e-10:
            break
    return theta, precision


def measure(name, stream, rule, family, reference):
    """One row of the table."""
    kind, x, y = stream
    d = x.shape[1]
    zeros = jnp.zeros(d)
    full = family == "FullRank"
    prior = (
        nt.gaussian.families.FullRank(zeros, jnp.eye(d))
        if full
        else nt.gaussian.families.MeanField(zeros, jnp.ones(d))
    )
    start, seconds = RULES[rule].init(prior), []
    for _ in range(3):
        begin = time.perf_counter()
        state, losses = jax.block_until_ready(
            nt.online.run(RULES[rule], LOSSES[kind], start, x, y)
        )
        seconds.append(time.perf_counter() - begin)
    row = {
        "stream": name,
        "family": family,
        "rule": rule,
        "loss": float(jnp.mean(losses.at_mean)),
    }
    row["late"] = float(jnp.mean(losses.at_mean[-len(y) // 3 :]))
    theta, precision = reference
    sd = (
        np.sqrt(np.diag(np.linalg.inv(precision)))
        if full
        else 1.0 / np.sqrt(np.diag(precision))
    )
    scale = (
        np.sqrt(np.diag(state.posterior.factor @ state.posterior.factor.T))
        if full
        else state.posterior.scale
    )
    row["mean"] = float(np.max(np.abs(state.posterior.loc - theta) / sd))
    row["sd"] = float(np.mean(np.asarray(scale) / sd))
    row["rejected"] = int(state.rejected)
    row["us a row"] = 1e6 * min(seconds[1:]) / len(y)
    row["first call, s"] = seconds[0]
    return row


def main():
    """Run the streams and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few rows")
    parser.add_argument("--data-dir", type=Path, help="folder with covtype.npz")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    jax.config.update("jax_enable_x64", True)
    num_counts, num_covers = (500, 4000) if options.small else (10_000, 60_000)
    streams = {"counts": counts(num_counts), "breast cancer": breast_cancer()}
    if options.data_dir is not None:
        streams["cover type"] = cover_type(options.data_dir, num_covers)
        streams["one huge row"] = one_huge_row(streams["cover type"], 1e6)
        streams["the row as it was"] = one_huge_row(streams["cover type"], 1.0)
    rows = []
    for name, stream in streams.items():
        # The mode that the other rows have: a row of that size would decide alone.
        clean = streams["the row as it was"] if name == "one huge row" else stream
        reference = mode(*clean)
        rows += [
            measure(name, stream, rule, f, reference)
            for f in ("FullRank", "MeanField")
            for rule in RULES
        ]
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "implicit_step.csv", index=False, float_format="%.4g")
    text = describe(f"{num_counts} counts, {num_covers} rows of cover type; float64")
    (options.output / "implicit_step.txt").write_text(
        text + table.to_string(index=False, float_format=lambda v: f"{v:.4g}") + "\n"
    )
    print(table.to_string(index=False, float_format=lambda v: f"{v:.4g}"))


if __name__ == "__main__":
    main()
