"""The figures of ``alpha_decision.py``."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np


def draw_paths(path, shown, best, file):
    """SafeBayes' losses, fit and effective parameters along alpha, and the alpha of each method."""
    titles = {
        "wrong": "wrong: noise 1 + 3 x₁², model 1",
        "right": "right: noise 1, model 1",
    }
    num = path["problem"].nunique()
    figure, axes = plt.subplots(
        3,
        num,
        figsize=(1.5 + 4.8 * num, 10),
        squeeze=False,
        sharex=True,
        layout="constrained",
        height_ratios=(1, 0.8, 1.2),
    )
    for (top, middle, bottom), (problem, part) in zip(
        axes.T, path.groupby("problem", sort=False), strict=True
    ):
        for name, se, label, color in (
            ("gibbs", "criterion_se", "R-log: draws", "C0"),
            ("plugin", "plugin_se", "I-log: posterior mean", "C1"),
        ):
            loss = part[name] - part[name].min()
            top.plot(part["alpha"], loss, "o-", color=color, markersize=4, label=label)
            top.fill_between(
                part["alpha"], loss - part[se], loss + part[se], color=color, alpha=0.2
            )
        top.set(
            ylabel="cumulative loss above its least (nats)",
            title=titles[problem],
            ylim=(-5, 45),
        )
        top.legend(frameon=False, fontsize="small")
        middle.plot(
            part["alpha"], part["expected_log_lik"], "s-", color="C2", markersize=4
        )
        middle.set_ylabel("expected log-likelihood", color="C2")
        other = middle.twinx()
        other.plot(
            part["alpha"], part["effective_parameters"], "^--", color="C4", markersize=4
        )
        other.set_ylabel("effective parameters", color="C4")
        other.set_ylim(0, 12)
        mine = shown[shown["problem"] == problem].reset_index(drop=True)
        colors = {"coverage": "C3", "none": "0.6"}
        for k, row in mine.iterrows():
            color = colors.get(
                row["aim"], "C0" if row["aim"].startswith("risk") else "k"
            )
            if np.isnan(row["alpha"]):
                bottom.text(
                    0.02, k, "refused", color=color, va="center", fontsize="small"
                )
                continue
            bottom.plot([row["low"], row["high"]], [k, k], color=color, linewidth=2)
            bottom.plot(
                row["alpha"],
                k,
                "x" if row["aim"] == "none" else "o",
                color=color,
                markersize=7,
            )
        at = best.set_index("problem").loc[problem]
        for name, label, style in (
            ("risk_mean", "least risk of the mean", ("C0", ":")),
            ("coverage_others", "coverage right, coefficients 2 to 10", ("C3", "--")),
            ("coverage_first", "coverage right, coefficient 1", ("C3", ":")),
        ):
            bottom.axvline(
                at[name], color=style[0], linestyle=style[1], linewidth=1.2, label=label
            )
        bottom.set_yticks(
            range(len(mine)), mine["method"] if bottom is axes[2, 0] else []
        )
        bottom.invert_yaxis()
        bottom.set(xscale="log", xlabel="alpha", xlim=(1 / 80, 2))
        bottom.set_xticks(
            [1 / 64, 1 / 16, 1 / 4, 1 / 2, 1], ["1/64", "1/16", "1/4", "1/2", "1"]
        )
        bottom.set_xticks([], minor=True)
        bottom.grid(alpha=0.3)
    handles, labels = axes[2, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        frameon=False,
        loc="outside lower center",
        ncol=3,
        fontsize="small",
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_outcomes(curves, best, outcomes, level, file):
    """Risk and coverage along alpha."""
    figure, axes = plt.subplots(
        2, 3, figsize=(12, 7), sharex=True, sharey="row", layout="constrained"
    )
    for (above, below), (problem, part) in zip(
        axes.T, curves.groupby("problem", sort=False), strict=True
    ):
        at = best.set_index("problem").loc[problem]
        for k, (name, title) in enumerate(outcomes.items()):
            ax, color = (above, below)[k // 2], f"C{k if k < 2 else k + 1}"
            ax.plot(part["alpha"], part[name], color=color, label=title)
            low, high = (
                part[name] - 2 * part[f"{name}_se"],
                part[name] + 2 * part[f"{name}_se"],
            )
            ax.fill_between(part["alpha"], low, high, color=color, alpha=0.25)
            value = np.interp(np.log(at[name]), np.log(part["alpha"]), part[name])
            ax.plot(at[name], value, "o", color=color, markersize=7)
        below.axhline(level, color="0.3", linestyle=":", linewidth=1)
        above.set_title(problem)
        above.set(xscale="log", ylim=(0.05, 2), yscale="log")
        below.set(xlabel="alpha", ylim=(0.2, 1.02))
        below.set_xticks(
            [1 / 64, 1 / 16, 1 / 4, 1, 4], ["1/64", "1/16", "1/4", "1", "4"]
        )
        below.set_xticks([], minor=True)
        for ax in (above, below):
            ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("excess square risk")
    axes[0, 0].set_yticks(
        [0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    )
    axes[1, 0].set_ylabel("coverage of 95% intervals")
    axes[0, 2].legend(frameon=False, fontsize="small")
    axes[1, 2].legend(frameon=False, fontsize="small", loc="lower left")
    figure.savefig(file, dpi=150)
    plt.close(figure)
