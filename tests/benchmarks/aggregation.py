"""The aggregate against the best member of its grid on six streams, and over windows on a stream that flips.

The grid is the same for all streams, in units that the number of features d (with the intercept) gives: prior
N(0, I/d), under which a predictor of standardised features has unit variance, times 1/4, 1, 4; NGVI with both
curvatures and steps 1/16, 1/4, 1; SVA with steps 4^-4 to 1; SVB and OGA with steps c/√t, c = 4^-3/d to 4/d. OGA
at its paper rate is 1/√T. Features, and the outcome of a regression, are standardised; the order is permuted.
Writes ``aggregation.csv`` and ``aggregation.txt``, ``drift.csv``, ``drift.png`` and ``drift.txt``.

    python tests/benchmarks/aggregation.py
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt
from numpyro_tempered.online.base import SVBRate
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.change import WINDOWS, aggregate_windows
from numpyro_tempered.online.experts.grid import grid
from numpyro_tempered.online.experts.state import regret, regret_bound, weights

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

from streams_data import LOADERS, Stream, prepare, toy  # noqa: E402

DOCS = ROOT / "docs" / "results"
CLIPPED = "California, features within 5 s.d."
NUM_FLIPS, FLIP_SEEDS = 2500, 20


def svb(c):
    """SVB with the step of its regret bound."""
    return nt.online.svb(SVBRate(c))


def oga(c):
    """Online gradient with steps c/√t."""
    return nt.online.oga(lambda t: c / jnp.sqrt(t))


def make_grids(d):
    """The grids for d features."""
    natural = {"step_size": [1 / 16, 1 / 4, 1.0], "prior_scale": [1 / 4, 1.0, 4.0]}
    rates = [4.0**k / d for k in range(-3, 2)]
    return (
        grid(nt.online.rvga, **natural),
        grid(nt.online.ngvi, curvature="fisher", **natural),
        grid(nt.online.sva, step_size=[4.0**k for k in range(-4, 1)]),
        grid(svb, c=rates),
        grid(oga, c=rates),
    )


def load(name, data_dir, seed):
    """A stream, standardised, in the order of a permutation; the toy stream is drawn anew."""
    stream = toy(seed=seed) if name == "toy" else LOADERS[name.split(",")[0]](data_dir)
    x, y, loss = prepare(stream, True)
    if name == CLIPPED:
        x = np.clip(x, -5.0, 5.0)
    order = np.random.default_rng(seed).permutation(len(y))
    return Stream(x[order], y[order], loss)


def average(losses):
    """The mean of float32 losses, summed in double precision."""
    return float(np.mean(np.asarray(losses, np.float64)))


def on_streams(names, data_dir, num_permutations, num_rounds):
    """One row for each stream and permutation."""
    rows = []
    for name in names:
        rule = None
        for seed in range(1 if name == "Cover Type" else num_permutations):
            x, y, loss = load(name, data_dir, seed)
            x, y = (
                jnp.asarray(x[:num_rounds], jnp.float32),
                jnp.asarray(y[:num_rounds], jnp.float32),
            )
            length, d = x.shape
            if rule is None:
                grids = make_grids(d)
                labels = sum((s.labels for s in grids), ())
                rule, plain = aggregate(*grids), nt.online.oga(length**-0.5)
            expectation = (
                nt.expectations.hinge()
                if loss == "hinge"
                else nt.expectations.squared()
            )
            prior = nt.gaussian.families.MeanField(
                jnp.zeros(d, jnp.float32), jnp.full(d, d**-0.5, jnp.float32)
            )
            state, losses = nt.online.run(rule, expectation, rule.init(prior), x, y)
            _, other = nt.online.run(plain, expectation, plain.init(prior), x, y)
            each = np.asarray(state.memory.losses.value, np.float64) / length
            best = int(np.argmin(each))
            rows.append(
                {
                    "stream": name,
                    "T": length,
                    "d": d,
                    "order": seed,
                    "aggregate": average(losses.at_mean),
                    "best member": each[best],
                    "ratio": average(losses.at_mean) / each[best],
                    "OGA 1/√T": average(other.at_mean),
                    "regret": float(regret(state)),
                    "bound": float(regret_bound(state)),
                    "largest loss": float(np.max(losses.at_mean)),
                    "left out": int(np.sum(~np.asarray(state.memory.active))),
                    "which": labels[best],
                }
            )
            print(rows[-1], flush=True)
    return pd.DataFrame(rows), len(labels)


def flipping(seed, num_rounds):
    """The toy stream with its labels flipped every 2500 rounds."""
    x, y, _ = toy(seed=seed, num_rounds=num_rounds)
    sign = 1.0 - 2.0 * (np.arange(num_rounds) // NUM_FLIPS % 2)
    return jnp.asarray(x, jnp.float32), jnp.asarray(sign * y, jnp.float32)


def on_drift(num_seeds, num_rounds):
    """Losses of windows and aggregates on the stream that flips, and the weights over time of one run."""
    hinge = nt.expectations.hinge()
    prior = nt.gaussian.families.MeanField(
        jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    )
    rows = []
    for share in (0.0, 1e-4, 1e-3, 1e-2):
        rule = aggregate_windows(share=share)
        for seed in range(num_seeds):
            state, losses = nt.online.run(
                rule, hinge, rule.init(prior), *flipping(seed, num_rounds)
            )
            each = np.asarray(state.memory.losses.value, np.float64) / num_rounds
            row = {
                "share": share,
                "seed": seed,
                "aggregate": average(losses.at_mean),
                "best window": each.min(),
            }
            row |= {
                "ratio": row["aggregate"] / each.min(),
                "regret": float(regret(state)),
            }
            row |= {"bound": float(regret_bound(state))}
            rows.append(
                row
                | {f"window {w:g}": loss for w, loss in zip(WINDOWS, each, strict=True)}
            )
    rule = aggregate_windows()
    x, y = flipping(0, num_rounds)
    state, shown = rule.init(prior), []
    for first in range(0, num_rounds, 50):
        state, _ = nt.online.run(
            rule, hinge, state, x[first : first + 50], y[first : first + 50]
        )
        shown.append(np.asarray(weights(state)))
    return pd.DataFrame(rows), np.array(shown)


def draw(table, shown, path):
    """Average loss by window, and the weights over time."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    default = table[table.share == 1e-3]
    names = [f"window {w:g}" for w in WINDOWS]
    ticks = ["never" if np.isinf(w) else f"{w:g}" for w in WINDOWS]
    left.errorbar(
        ticks,
        default[names].mean(),
        default[names].std(),
        marker="o",
        capsize=3,
        label="one window",
    )
    left.axhline(default["aggregate"].mean(), color="C1", label="aggregate")
    left.set(
        xlabel="window (rounds)",
        ylabel="average hinge loss",
        title="Labels flip every 2500 rounds",
    )
    left.tick_params(axis="x", rotation=45)
    left.legend()
    image = right.imshow(
        shown.T,
        aspect="auto",
        origin="lower",
        extent=(0, 50 * len(shown), -0.5, len(ticks) - 0.5),
        cmap="viridis",
    )
    right.set(
        xlabel="round",
        ylabel="window (rounds)",
        title="Weights of the windows, one run",
    )
    right.set_yticks(range(len(ticks)), ticks)
    figure.colorbar(image, ax=right)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def about(sizes, options):
    """What the results were measured with; where the data lie is nobody's business."""
    return describe(sizes).replace(str(options.data_dir), "DATA_DIR")


def main():
    """Run both parts, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="2 streams, 1 order of 400 rounds, 1 seed of 2000",
    )
    parser.add_argument(
        "--data-dir", type=Path, help="folder of the data files; downloaded without it"
    )
    parser.add_argument(
        "--drift-only", action="store_true", help="the stream that flips alone"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    drift(options)
    if not options.drift_only:
        streams(options)


def drift(options):
    """The stream that flips: table and figure."""
    seeds, flips = (1, 2000) if options.small else (FLIP_SEEDS, 10_000)
    table, shown = on_drift(seeds, flips)
    summary = table.groupby("share").agg(["mean", "max"])[
        ["ratio", "aggregate", "best window", "regret"]
    ]
    print(summary.to_string())
    table.round(5).to_csv(options.output / "drift.csv", index=False)
    draw(table, shown, options.output / "drift.png")
    sizes = (
        f"{seeds} seeds, T = {flips}, labels flipped every {NUM_FLIPS} rounds, "
        f"{len(WINDOWS)} windows, float32"
    )
    (options.output / "drift.txt").write_text(
        f"{about(sizes, options)}\n{summary.round(4).to_string()}\n"
    )


def streams(options):
    """The six streams: table."""
    orders, rounds = (1, 400) if options.small else (5, None)
    # These two need no download.
    names = ["toy", "breast cancer"] if options.small else [*LOADERS, CLIPPED]
    table, size = on_streams(names, options.data_dir, orders, rounds)
    table.round(5).to_csv(options.output / "aggregation.csv", index=False)
    columns = ["aggregate", "best member", "OGA 1/√T", "regret", "bound"]
    means = table.groupby(["stream", "T", "d"], sort=False)[columns].mean()
    ratio = table.groupby(["stream", "T", "d"], sort=False).ratio.agg(
        ["mean", "max", "sem"]
    )
    means.insert(2, "ratio", ratio["mean"])
    means.insert(3, "s.e.", ratio["sem"])
    means.insert(4, "largest", ratio["max"])
    print(means.to_string())
    sizes = f"{size} experts, {orders} orders (Cover Type 1), float32"
    (options.output / "aggregation.txt").write_text(
        f"{about(sizes, options)}\n{means.round(4).to_string()}\n"
    )


if __name__ == "__main__":
    main()
