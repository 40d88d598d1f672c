"""Aggregates on unscaled, heavy-tailed, short and changing streams, against the best of their experts.

Streams, with squared loss unless said:

- *unscaled*: y = x·θ + noise, θ ~ N(0, I/20), noise N(0, 1), x ~ 10 N(0, I), 4000 rounds; and with prior N(0, I);
- *Student-t*: the same with d = 10 features from Student's t with 2 degrees of freedom, 2000 rounds; and the sign
  of x·θ + noise under hinge loss;
- *doubling*: d = 5 standard normal features, θ changes its sign after 32, 96, 224, ... rounds, in blocks of
  doubling length, 4064 rounds;
- *wine*: scikit-learn's ``load_wine``, 178 rows permuted, a constant, features and outcome standardised: alcohol
  on the twelve others, and class 1 against the rest under hinge loss; *raw*, alcohol with nothing standardised.

Aggregates: ``aggregate_windows()`` (*windows*); the same with explicit steps, ``factory=ngvi`` (*explicit*); the
grid of ``aggregation.py`` (*grid*); a grid of implicit steps, three sizes by three priors (*rvga*). The prior is
N(0, I/d) but for the stream that says otherwise.

Columns, means over seeds: *null*, the loss of predicting 0; *loss* of the aggregate, and of its *best* expert in
hindsight; the *ratio* of these two, its standard error and its *worst* value; *regret* and its *bound*, of all
rounds; the *largest* loss of a round. Writes ``rough_streams.csv`` and ``rough_streams.txt``.

    python tests/benchmarks/rough_streams.py
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from aggregation import make_grids
from provenance import describe
from sklearn.datasets import load_wine

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
EXPECTATIONS = {"squared": nt.expectations.squared(), "hinge": nt.expectations.hinge()}


NATURAL = {"step_size": [1 / 16, 1 / 4, 1.0], "prior_scale": [1 / 4, 1.0, 4.0]}
AGGREGATES = {
    "windows": lambda d: nt.online.aggregate_windows(),
    "explicit": lambda d: nt.online.aggregate_windows(factory=nt.online.ngvi),
    "grid": lambda d: nt.online.aggregate(*make_grids(d)),
    "rvga": lambda d: nt.online.aggregate(nt.online.grid(nt.online.rvga, **NATURAL)),
}


def regression(seed, num_rounds, d, draw, size=1.0, sign=1.0):
    """A linear model with unit noise, whose features are drawn and multiplied by ``size``."""
    rng = np.random.default_rng(seed)
    x = size * draw(rng, (num_rounds, d))
    theta = rng.normal(size=d) / np.sqrt(d)
    return x, sign * (x @ theta) + rng.normal(size=num_rounds)


def normal(rng, shape):
    return rng.normal(size=shape)


def student(rng, shape):
    return rng.standard_t(2, size=shape)


def unscaled(seed, num_rounds=4000):
    return regression(seed, num_rounds, 20, normal, size=10.0)


def heavy(seed, num_rounds=2000):
    return regression(seed, num_rounds, 10, student)


def heavy_classes(seed, num_rounds=2000):
    x, y = heavy(seed, num_rounds)
    return x, np.where(y > 0, 1.0, -1.0)


def doubling(seed, num_rounds=4064):
    block = np.floor(np.log2(np.arange(num_rounds) / 32 + 1))
    return regression(seed, num_rounds, 5, normal, sign=1.0 - 2.0 * (block % 2))


def wine(seed, outcome, standardised=True):
    data = load_wine()
    x = (
        (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
        if standardised
        else data.data
    )
    x, y = (
        (x, np.where(data.target == 1, 1.0, -1.0))
        if outcome == "class"
        else (x[:, 1:], x[:, 0])
    )
    order = np.random.default_rng(seed).permutation(len(y))
    return np.column_stack([np.ones(len(y)), x])[order], y[order]


STREAMS = {
    "unscaled": (unscaled, "squared"),
    "unscaled, prior N(0, I)": (unscaled, "squared"),
    "Student-t": (heavy, "squared"),
    "Student-t, classes": (heavy_classes, "hinge"),
    "doubling": (doubling, "squared"),
    "wine": (lambda seed: wine(seed, "alcohol"), "squared"),
    "wine, classes": (lambda seed: wine(seed, "class"), "hinge"),
    "wine, raw": (lambda seed: wine(seed, "alcohol", standardised=False), "squared"),
}


def measure(name, aggregate, num_seeds):
    """One row for each seed."""
    make, loss = STREAMS[name]
    data = [make(seed) for seed in range(num_seeds)]
    x, y = (
        jnp.asarray(np.stack(leaves), jnp.float32) for leaves in zip(*data, strict=True)
    )
    num_rounds, d = x.shape[1:]
    rule, expectation = AGGREGATES[aggregate](d), EXPECTATIONS[loss]
    spread = 1.0 if name.endswith("N(0, I)") else d**-0.5
    prior = nt.gaussian.families.MeanField(
        jnp.zeros(d, jnp.float32), jnp.full(d, spread, jnp.float32)
    )
    state = rule.init(prior)
    after, losses = jax.vmap(
        lambda x, y: nt.online.run(rule, expectation, state, x, y)
    )(x, y)
    regrets, bounds = (
        jax.vmap(f)(after) for f in (nt.online.regret, nt.online.regret_bound)
    )
    suffered = np.asarray(losses.at_mean, np.float64)
    best = np.min(np.asarray(after.memory.losses.value, np.float64), axis=1)
    null = np.mean(np.square(y), axis=1) if loss == "squared" else np.ones(num_seeds)
    return pd.DataFrame(
        {
            "stream": name,
            "T": num_rounds,
            "d": d,
            "aggregate": aggregate,
            "seed": range(num_seeds),
            "loss": suffered.mean(axis=1),
            "best": best / num_rounds,
            "null": null,
            "ratio": suffered.sum(axis=1) / best,
            "regret": regrets,
            "bound": bounds,
            "largest": suffered.max(axis=1),
            "rejected": after.rejected,
        }
    )


def main():
    """Run all, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="2 orders of the wine data"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    num_seeds = 2 if options.small else 10
    names = ["wine"] if options.small else list(STREAMS)
    tables = []
    for name in names:
        for aggregate in AGGREGATES:
            tables.append(measure(name, aggregate, num_seeds))
            print(
                tables[-1][["stream", "aggregate", "loss", "best", "ratio"]]
                .mean(numeric_only=True)
                .to_dict()
            )
    table = pd.concat(tables, ignore_index=True)
    table.to_csv(options.output / "rough_streams.csv", index=False, float_format="%.6g")
    keys = ["stream", "T", "d", "aggregate"]
    groups = table.groupby(keys, sort=False)
    means = groups[["null", "loss", "best", "regret", "bound", "largest"]].mean()
    means.insert(3, "ratio", groups.ratio.mean())
    means.insert(4, "s.e.", groups.ratio.sem())
    means.insert(5, "worst", groups.ratio.max())
    text = means.to_string(float_format=lambda value: f"{value:.4g}")
    print(text)
    about = describe(
        f"{num_seeds} seeds or orders, 11 windows, 33 or 9 experts, mean field, float32"
    )
    (options.output / "rough_streams.txt").write_text(f"{about}\n{text}\n")


if __name__ == "__main__":
    main()
