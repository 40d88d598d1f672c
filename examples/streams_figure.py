"""Figures of the online experiments, from their tables: average loss against the round, a row for each stream.

`python examples/streams_figure.py [--output FOLDER]` draws those of ``online_streams.py`` from the tables in the
folder, ``docs/results`` by default.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Label, colour and dashes of each rule, the same in every figure. OGA, OGA-EL and SVA have the same means where
# the loss is squared: with dashes all three are seen. NGVI is dashed where it forgets all but one datum.
DASHED = (0, (3, 1.5))
STYLES = {
    "OGA": ("gradient steps, point (OGA)", "#0072B2", "-"),
    "SVA": ("sequential approximation (SVA)", "#E69F00", (0, (6, 4))),
    "OGA-EL": ("gradient steps, Gaussian (OGA-EL)", "#56B4E9", (0, (2, 4))),
    "SVB": ("streaming Bayes (SVB)", "#D55E00", "-"),
    "NGVI": ("natural gradients (NGVI)", "#009E73", "-"),
    "NGVI, evidence 1": ("NGVI, evidence 1", "#009E73", DASHED),
    "NGVI, Fisher": ("NGVI, Fisher", "#CC79A7", "-"),
    "NGVI, evidence 1, Fisher": ("NGVI, Fisher, evidence 1", "#CC79A7", DASHED),
    "NGVI, full, Fisher": ("NGVI, Fisher, full covariance", "#882255", "-"),
    "R-VGA": ("implicit steps (R-VGA)", "#332288", "-"),
    "EWA": ("exact Bayes (EWA)", "black", "-"),
    "(5), step 1": ("exact minimiser (5), step 1", "#777777", "-"),
    "(5), step 1/√T": ("exact minimiser (5), step 1/√T", "#777777", DASHED),
    "aggregate": ("aggregate of thirty rules", "#BBBBBB", "-"),
    "best in hindsight": ("best parameter in hindsight", "black", ":"),
}
WIDTHS = {"aggregate": 6.0}  # below all others
LEFT = ("aggregate", "OGA", "SVA", "OGA-EL", "SVB")
RIGHT = (
    "aggregate",
    *(name for name in STYLES if name not in (*LEFT, "best in hindsight")),
)
FIRST_ROUND = 10
GROUPS = {
    "hinge": ("toy", "breast cancer", "Pima", "Cover Type"),
    "squared": ("Boston", "California, linear", "California, network"),
    "raw": (
        "breast cancer, raw",
        "Pima, raw",
        "Cover Type, raw",
        "Boston, raw",
        "California, linear, raw",
    ),
}


def plain(value, _=None):
    """A number at an axis: 0.5, 20, 10,000, and powers of ten above."""
    if value > 2e5:
        return f"$10^{{{np.log10(value):.0f}}}$"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def ticks(low, high, most):
    """Round numbers of a logarithmic axis, at least three of them if there are so many, and at most ``most``."""
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in (
        [1.0],
        [1.0, 3.0],
        [1.0, 2.0, 5.0],
        [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    ):
        at = np.outer(decades, steps).ravel()
        at = at[(at >= low) & (at <= high)]
        if len(at) >= 3:
            break
    return at[:: -(-len(at) // most)] if len(at) else at


def limits(curves, best, reach):
    """From below the best to above all rules that end within ``reach`` times the best of them.

    The aggregate, which has no constant to choose, does not stretch the axis of constants that are chosen.
    """
    curves = curves.drop(columns="aggregate", errors="ignore")
    ends = curves.iloc[-1]
    floor = best if np.isfinite(best) else curves.to_numpy().min()
    least = max(floor, ends.min())
    top = min(
        1.15 * curves.loc[:, ends <= reach * least].to_numpy().max(),
        3.0 * reach * least,
    )
    return floor * (floor / top) ** 0.08, top


def draw_panel(ax, curves, best, rules, bounds):
    """Curves of some rules, with the names of those that lie above the panel."""
    for name in rules:
        if name in curves:
            _, colour, dashes = STYLES[name]
            ax.plot(
                curves.index,
                curves[name],
                color=colour,
                linestyle=dashes,
                linewidth=WIDTHS.get(name),
            )
    above = [
        name for name in rules if name in curves and curves[name].min() > bounds[1]
    ]
    if rules is LEFT and "aggregate" in above:
        above.remove(
            "aggregate"
        )  # named on the right, where there is no title beside it
    if np.isfinite(best):
        ax.axhline(best, color="black", linestyle=":")
    if above:
        ax.set_title("above: " + "; ".join(above), loc="right", fontsize=10)
    ax.set(
        xscale="log", yscale="log", xlim=(FIRST_ROUND, curves.index[-1]), ylim=bounds
    )
    for axis, ends, most in ((ax.xaxis, ax.get_xlim(), 4), (ax.yaxis, bounds, 5)):
        axis.set_major_locator(FixedLocator(ticks(*ends, most)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(plain))


def draw(curves, best, reach=100.0):
    """A figure with a row of two panels, of equal axes, for each stream.

    Args:
        curves: By stream, a table of average losses: rounds by rules.
        best: By stream, the average loss of the best fixed parameter; NaN where none is known.
        reach: Rules that end at more than so many times the least loss do not stretch the axis.

    Returns:
        The figure.
    """
    figure, axes = plt.subplots(
        len(curves), 2, figsize=(6.4, 2.0 * len(curves) + 1.4), squeeze=False
    )
    for (left, right), (stream, table) in zip(axes, curves.items(), strict=True):
        table = table[table.index >= FIRST_ROUND]
        bounds = limits(table, best[stream], reach)
        draw_panel(left, table, best[stream], LEFT, bounds)
        draw_panel(right, table, best[stream], RIGHT, bounds)
        left.set_title(stream[0].upper() + stream[1:])
        left.set_ylabel("average loss")
        right.tick_params(labelleft=False)
    for ax in axes[-1]:
        ax.set_xlabel("round")
    present = {name for table in curves.values() for name in table} | {
        "best in hindsight"
    }
    order = [
        name
        for name in (*LEFT[1:], "aggregate", "best in hindsight", *RIGHT[1:])
        if name in present
    ]
    lines = [
        Line2D(
            [],
            [],
            color=STYLES[name][1],
            linestyle=STYLES[name][2],
            linewidth=WIDTHS.get(name),
        )
        for name in order
    ]
    labels = [STYLES[name][0] for name in order]
    figure.legend(
        lines,
        labels,
        loc="outside upper center",
        ncols=2,
        fontsize=10.5,
        columnspacing=1.0,
    )
    figure.get_layout_engine().set(wspace=0.06)
    return figure


def by_stream(curves):
    """A table of curves with columns stream and round, as tables by stream."""
    return {
        stream: part.drop(columns="stream").set_index("round").dropna(axis=1, how="all")
        for stream, part in curves.groupby("stream", sort=False)
    }


def draw_groups(losses, curves, folder):
    """Figures of ``online_streams.py``: for each choice of constants those of hinge loss, squared loss and raw.

    Args:
        losses: The long table of losses, of which ``best`` is taken.
        curves: Average losses: stream, rate, round, and a column for each rule.
        folder: Where ``figure1_RATE_GROUP.png`` are written.
    """
    best = losses.groupby("stream").best.first()
    for rate, part in curves.groupby("rate", sort=False):
        tables = by_stream(part.drop(columns="rate"))
        for group, streams in GROUPS.items():
            present = {stream: tables[stream] for stream in streams if stream in tables}
            if present:
                # On raw features the distances are what there is to see.
                figure = draw(present, best, reach=np.inf if group == "raw" else 100.0)
                figure.savefig(folder / f"figure1_{rate}_{group}.png")


def main():
    """Draw the figures of the tables in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = Path(__file__).resolve().parents[1] / "docs" / "results"
    parser.add_argument(
        "--output", type=Path, default=results, help="folder of the tables and figures"
    )
    folder = parser.parse_args().output
    plt.switch_backend("agg")
    plt.style.use("numpyro_tempered.plots.house")
    draw_groups(
        pd.read_csv(folder / "figure1_losses.csv"),
        pd.read_csv(folder / "figure1_curves.csv"),
        folder,
    )


if __name__ == "__main__":
    main()
