"""The rate of probabilistic PCA: divergence of its tempered posterior from the truth against n, d and K0.

The data are rows N(0, W0 W0' + I) with d = 5, 10, 20 columns and K0 = 1, 2, 4 factors in random orthogonal
directions, |W0_k|² = d ("strong": a mean square entry of 1); and with d = 10, K0 = 2 and |W0_k|² = .36 ("weak").
K is selected among 0 ... 6 (0 ... 5 for d = 5) by the ELBO less log(1/b_K), b_K = 2^-(K+1).
"W alone" is the model of the theorem: entries of W are N(0, 1), mean and noise are known, by priors so narrow
that the data do not move them. "defaults" is ``nt.ppca`` as it comes: mean and noise learnt, W with ARD.
Measured at alpha = 1/2, in nats per datum:
- ``divergence``: the integral of D_1/2(P_theta, P0) against the posterior of the selected K, by draws of theta;
- ``certificate``: with log p0(X) itself and delta = .05;
- ``at_mean``: D_1/2 at the posterior mean of theta;
- ``likelihood``: D_1/2 of the maximum likelihood of Tipping and Bishop with the same K;
- ``at_one``: ``divergence`` of the posterior with alpha = 1 and its own K, for which there is no theorem;
- ``bound``: the theorem's right side at its best Gaussian rho, for W alone;
- ``limit``: what the divergence is to first order in 1/n where K is right;
- ``rate``: d K0 log(d n)/n, and ``ratio``: the divergence over that.
Slopes are by least squares over all runs, with their standard errors.

    python tests/benchmarks/ppca_rate.py
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from provenance import describe

import numpyro_tempered as nt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "ppca"))

import rate_oracles as oracles  # noqa: E402

DOCS = ROOT / "docs" / "results"
ALPHA, DELTA = 0.5, 0.05
LARGEST, NUM_DRAWS = 6, 100
# The mean is 0 to 1e-4 and the noise 1 to 1e-4.
KNOWN = nt.ppca.prior()._replace(
    mean_scale=1e-4, noise_shape=1e8, noise_rate=1e8, loading_precision=1.0
)
MODELS = {"W alone": {"prior": KNOWN, "ard": False}, "defaults": {}}
WEAK = 0.36
CELL = ["model", "factors", "d", "K0"]
MEASURES = ["divergence", "certificate", "at_mean", "likelihood", "at_one"]


def select(seed, x, model, alpha):
    """The selected number of factors."""
    orders = range(min(x.shape[1], LARGEST) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The means of samples are far from a mean that is known to 1e-4.
        warnings.filterwarnings("ignore", message="the means of columns")
        return nt.ppca.select_num_factors(
            jax.random.key(seed),
            x,
            num_factors=orders,
            log_prior=nt.dyadic,
            alpha=alpha,
            **MODELS[model],
        )


def integrate(seed, fit, truth):
    """The integral of D_1/2(P_theta, P0) against the posterior, by draws."""
    draws = nt.ppca.sample_posterior(jax.random.key(seed), fit, NUM_DRAWS)
    mean, loadings, precision = (np.asarray(part, np.float64) for part in draws)
    cov = (
        loadings @ np.swapaxes(loadings, -1, -2)
        + np.eye(len(truth.cov)) / precision[:, None, None]
    )
    return nt.bounds.renyi_gaussian(
        ALPHA, mean, cov, np.zeros(len(truth.cov)), truth.cov
    ).mean()


def run(seed, d, true, size, num_data):
    """One data set under both models."""
    rng = np.random.default_rng([seed, d, true, num_data])
    truth = oracles.make_truth(rng, d, true, size)
    x = oracles.draw_rows(rng, truth, num_data)
    log_p0 = nt.bounds.known_density(oracles.log_density(x, truth.cov).sum())
    for model in MODELS:
        choice, at_one = (select(seed, x, model, alpha) for alpha in (ALPHA, 1.0))
        fit = choice.fits[choice.selected]
        certificate = nt.bounds.selection_certificate(
            choice.elbo, choice.log_prior, log_p0, num_data, alpha=ALPHA, delta=DELTA
        )
        likely = oracles.maximum_likelihood(x, fit.num_factors, model == "W alone")
        at_mean = fit.loadings @ fit.loadings.T + fit.noise_variance * np.eye(d)
        yield {
            "model": model,
            "divergence": integrate(seed, fit, truth),
            "certificate": float(certificate.value),
            "at_mean": oracles.renyi(ALPHA, fit.location, at_mean, truth.cov),
            "likelihood": oracles.renyi(ALPHA, *likely, truth.cov),
            "at_one": integrate(seed, at_one.fits[at_one.selected], truth),
            "K": choice.selected,
            "K_at_one": at_one.selected,
        }


def study(cells, sizes, num_seeds):
    """All runs in long form, with the numbers of theory beside."""
    rows, start = [], time.perf_counter()
    for factors, d, true in cells:
        size = float(d) if factors == "strong" else WEAK
        log_weight = -(true + 1) * np.log(2.0)
        for n in sizes:
            rng = np.random.default_rng([d, true])
            bound = oracles.bound(
                ALPHA, rng, oracles.make_truth(rng, d, true, size), n, log_weight
            )
            theory = {"rate": d * true * np.log(d * n) / n}
            for seed in range(num_seeds):
                for found in run(seed, d, true, size, n):
                    alone = found["model"] == "W alone"
                    theory["bound"] = bound if alone else np.nan
                    theory["limit"] = oracles.limit(ALPHA, d, true, size, alone) / n
                    cell = {
                        "factors": factors,
                        "d": d,
                        "K0": true,
                        "n": n,
                        "seed": seed,
                    }
                    rows.append({**cell, **found, **theory})
        print(
            f"{factors}, d = {d}, K0 = {true}: {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return pd.DataFrame(rows)


def summarise(runs):
    """Means by cell and n, with standard errors and shares."""
    runs = runs.assign(
        K_right=(runs["K"] == runs["K0"]).astype(float),
        K_more=(runs["K"] > runs["K0"]).astype(float),
        K_right_at_one=(runs["K_at_one"] == runs["K0"]).astype(float),
        broken=(runs["divergence"] > runs["certificate"]).astype(float),
        ratio=runs["divergence"] / runs["rate"],
    )
    groups = runs.groupby([*CELL, "n"], sort=False)
    shown = [
        *MEASURES,
        "bound",
        "limit",
        "rate",
        "ratio",
        "broken",
        "K_right",
        "K_more",
        "K_right_at_one",
    ]
    table = groups[shown].mean()
    for name in ("divergence", "ratio"):
        table.insert(
            list(table.columns).index(name) + 1, f"{name}_se", groups[name].sem()
        )
    return table.reset_index()


def least_squares(regressors, values):
    """Coefficients beside a constant, and their standard errors."""
    design = np.column_stack([np.ones(len(values)), *regressors])
    found, *_ = np.linalg.lstsq(design, values, rcond=None)
    free = max(len(values) - design.shape[1], 1)
    variance = np.sum((values - design @ found) ** 2) / free
    errors = np.sqrt(np.diag(variance * np.linalg.pinv(design.T @ design)))
    return list(zip(found[1:], errors[1:], strict=True))


def slopes_of_cells(runs, table):
    """One line a cell: its slope on n, the ratio to the rate, and how often K is right."""
    lines = []
    for cell, part in runs.groupby(CELL, sort=False):
        means = table[(table[CELL] == list(cell)).all(axis=1)].set_index("n")
        ((slope, error),) = least_squares(
            [np.log(part["n"])], np.log(part["divergence"])
        )
        least, most = means.index.min(), means.index.max()
        last = means.loc[most]
        lines.append(
            {
                **dict(zip(CELL, cell, strict=True)),
                "slope": f"{slope:.3f} ({error:.3f})",
                f"ratio, n={least}": f"{means.loc[least, 'ratio']:.4f} ({means.loc[least, 'ratio_se']:.4f})",
                f"ratio, n={most}": f"{last['ratio']:.4f} ({last['ratio_se']:.4f})",
                "largest ratio": (part["divergence"] / part["rate"]).max(),
                "over limit": last["divergence"] / last["limit"],
                "certificate over divergence": last["certificate"] / last["divergence"],
                f"K right, n={least}": means.loc[least, "K_right"],
                "K right, all n": means["K_right"].mean(),
                "K too large": means["K_more"].mean(),
            }
        )
    return pd.DataFrame(lines)


def slopes(runs, least):
    """Slopes of logarithms over all strong cells, from a smallest n on: three regressions a line.

    On log n, log d and log K0; on the log rate alone; on log n and the log of the number of parameters.
    """
    lines = []
    for model, part in runs[
        (runs["factors"] == "strong") & (runs["n"] >= least)
    ].groupby("model", sort=False):
        logs = {
            name: np.log(part[name].to_numpy(float))
            for name in ("n", "d", "K0", "rate")
        }
        parameters = oracles.count_parameters(part["d"], part["K0"])
        if model == "defaults":
            parameters = parameters + part["d"] + 1
        for name in ("divergence", "limit", "likelihood", "at_one"):
            values = np.log(part[name].to_numpy())
            found = least_squares([logs["n"], logs["d"], logs["K0"]], values)
            found += least_squares([logs["rate"]], values)
            found += least_squares(
                [np.log(parameters.to_numpy(float)), logs["n"]], values
            )[:1]
            line = {"model": model, "n from": least, "of": name}
            for label, (value, error) in zip(
                ("n", "d", "K0", "rate", "parameters"), found, strict=True
            ):
                line[label] = f"{value:.3f} ({error:.3f})"
            lines.append(line)
    return pd.DataFrame(lines)


def slope_of_ratio(runs):
    """Slope of log(ratio) on log(log(d n)) within the strong cells of W alone, and its standard error."""
    part = runs[(runs["factors"] == "strong") & (runs["model"] == "W alone")]
    logs = pd.DataFrame(
        {
            "x": np.log(np.log(part["d"] * part["n"])),
            "y": np.log(part["divergence"] / part["rate"]),
            "d": part["d"],
            "K0": part["K0"],
        }
    )
    centred = logs[["x", "y"]] - logs.groupby(["d", "K0"])[["x", "y"]].transform("mean")
    return least_squares([centred["x"]], centred["y"].to_numpy())[0]


def draw_figure(table, path):
    """Against n, ratio to the rate, against d K0, and weak factors."""
    figure, axes = plt.subplots(2, 2, figsize=(11.5, 9.0), layout="constrained")
    alone = table[(table["model"] == "W alone") & (table["factors"] == "strong")]
    colours, markers = {1: "C0", 2: "C1", 4: "C2"}, {5: "o", 10: "s", 20: "D"}
    draw_against_n(axes[0, 0], alone[alone["d"] == 10], colours)
    draw_ratios(axes[0, 1], table[table["factors"] == "strong"], colours, markers)
    draw_against_size(axes[1, 0], alone[alone["n"] == alone["n"].max()])
    draw_weak(axes[1, 1], table[table["factors"] == "weak"])
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_against_n(ax, part, colours):
    """Divergence, bound and certificate for d = 10."""
    styles = {
        "divergence": ("o-", "divergence"),
        "likelihood": ("x:", "of the maximum likelihood"),
        "certificate": ("^-", "certificate, log p0(X) given"),
        "bound": ("--", "bound of the theorem"),
    }
    for true, rows in part.groupby("K0"):
        for name, (style, _) in styles.items():
            ax.plot(
                rows["n"],
                rows[name],
                style,
                color=colours[true],
                markersize=4.5,
                linewidth=1.2,
            )
    handles = [
        Line2D([], [], color=colours[true], linewidth=4, label=f"K0 = {true}")
        for true in part["K0"].unique()
    ]
    for style, label in styles.values():
        line = style.lstrip("ox^")
        marker = style[0] if style[0] in "ox^" else None
        handles.append(
            Line2D(
                [],
                [],
                color="0.3",
                linestyle=line,
                marker=marker,
                markersize=4.5,
                label=label,
            )
        )
    rows = part[part["K0"] == part["K0"].min()]
    ax.plot(
        rows["n"],
        0.4 * rows["divergence"].iloc[-1] * rows["n"].iloc[-1] / rows["n"],
        color="0.7",
        linewidth=1,
    )
    handles.append(Line2D([], [], color="0.7", linewidth=1, label="slope -1"))
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="n",
        ylabel="nats a datum",
        title="d = 10, W alone",
    )
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 4)
    ax.legend(handles=handles, frameon=False, fontsize=8, ncols=2, loc="upper right")


def draw_ratios(ax, part, colours, markers):
    """Divergence over d K0 log(d n)/n, with standard errors."""
    for (model, d, true), rows in part.groupby(["model", "d", "K0"]):
        line = "-" if model == "W alone" else ":"
        ax.errorbar(
            rows["n"],
            rows["ratio"],
            rows["ratio_se"],
            linestyle=line,
            marker=markers[d],
            color=colours[true],
            markersize=4,
            linewidth=1,
        )
    handles = [
        Line2D([], [], color=colours[true], linewidth=4, label=f"K0 = {true}")
        for true in part["K0"].unique()
    ]
    handles += [
        Line2D([], [], color="0.3", marker=markers[d], linestyle="", label=f"d = {d}")
        for d in part["d"].unique()
    ]
    handles += [
        Line2D([], [], color="0.3", linestyle=line, label=model)
        for model, line in (("W alone", "-"), ("defaults", ":"))
    ]
    ax.set(
        xscale="log", yscale="log", xlabel="n", title="divergence / (d K0 log(d n) / n)"
    )
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 2.5)
    ax.legend(handles=handles, frameon=False, fontsize=8, ncols=3, loc="upper right")
    missed = part[part["K_right"] < 0.5]
    for _, row in missed.iterrows():
        ax.annotate(
            "K missed",
            (row["n"], row["ratio"]),
            (6, 3),
            textcoords="offset points",
            fontsize=8,
        )


def draw_against_size(ax, part):
    """Divergences against d K0 at the largest n."""
    x = part["d"] * part["K0"]
    for name, style, label, shift in (
        ("divergence", "o", "alpha = 1/2", 1.0),
        ("at_one", "s", "alpha = 1", 1.04),
        ("at_mean", "v", "at the posterior mean, alpha = 1/2", 0.96),
        ("likelihood", "x", "maximum likelihood", 1.0),
    ):
        ax.plot(shift * x, part[name], style, markersize=5, label=label)
    ax.plot(
        x, part["limit"], "_", color="black", markersize=14, label="limit, alpha = 1/2"
    )
    line = np.array([x.min(), x.max()])
    ax.plot(
        line,
        0.6 * line * part["divergence"].min() / x.min(),
        color="0.7",
        linewidth=1,
        label="slope 1",
    )
    ax.set(
        xscale="log", yscale="log", xlabel="d K0", ylabel="D of order 1/2, nats a datum"
    )
    ax.set(title=f"n = {part['n'].iloc[0]}, W alone, nine pairs (d, K0)")
    ticks = sorted(set(x))
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def draw_weak(ax, part):
    """Weak factors: divergence, certificate and rate, and the share of data sets where K is right."""
    for (model, rows), colour in zip(
        part.groupby("model", sort=False), ("C0", "C3"), strict=True
    ):
        label = f"divergence, {model}"
        ax.errorbar(
            rows["n"],
            rows["divergence"],
            rows["divergence_se"],
            fmt="o-",
            color=colour,
            markersize=4.5,
            linewidth=1.2,
            label=label,
        )
        height = 0.09 if model == "W alone" else 0.03
        for n, share in zip(rows["n"], rows["K_right"], strict=True):
            ax.text(
                n,
                height,
                f"{share:.0%}",
                color=colour,
                fontsize=8,
                ha="center",
                transform=ax.get_xaxis_transform(),
            )
        if model == "W alone":
            ax.plot(
                rows["n"],
                rows["certificate"],
                "^-",
                color="0.4",
                markersize=4.5,
                label="certificate, W alone",
            )
            ax.plot(
                rows["n"],
                rows["limit"],
                "_",
                color="C0",
                markersize=14,
                label="limit, W alone",
            )
            ax.plot(
                rows["n"],
                rows["rate"],
                "--",
                color="0.4",
                linewidth=1,
                label="d K0 log(d n) / n",
            )
    ax.text(0.02, 0.15, "data sets with K = 2:", fontsize=8, transform=ax.transAxes)
    ax.set(xscale="log", yscale="log", xlabel="n", ylabel="nats a datum")
    ax.set(title=f"weak factors: d = 10, K0 = 2, variances {WEAK}, noise 1")
    low, high = ax.get_ylim()
    ax.set_ylim(low / 6, high * 3)
    ax.legend(frameon=False, fontsize=8, loc="upper right")


def main():
    """Run all cells, write tables, slopes and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="four cells, n = 100 and 200, two seeds"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    jax.config.update("jax_enable_x64", True)
    if options.small:
        sizes, num_seeds = (100, 200), 2
        cells = [("strong", 5, 1), ("strong", 5, 2), ("strong", 10, 2), ("weak", 10, 2)]
    else:
        sizes, num_seeds = (100, 250, 640, 1600, 4000, 10_000), 25
        cells = [("strong", d, true) for d in (5, 10, 20) for true in (1, 2, 4)] + [
            ("weak", 10, 2)
        ]
    start = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = study(cells, sizes, num_seeds)
    table = summarise(runs)
    lines = slopes_of_cells(runs, table)
    table.to_csv(options.output / "ppca_rate.csv", index=False, float_format="%.4g")
    lines.to_csv(
        options.output / "ppca_rate_cells.csv", index=False, float_format="%.3g"
    )
    broken = int(np.sum(runs["divergence"] > runs["certificate"]))
    found = pd.concat(
        [slopes(runs, least) for least in (sizes[0], sizes[len(sizes) // 2])]
    )
    text = [
        describe(
            f"n = {list(sizes)}, {num_seeds} seeds each, {NUM_DRAWS} draws of theta; float64"
        ).rstrip(),
        f"runs: {len(runs)}, divergence above its certificate in {broken}",
        "slope of log(ratio) on log(log(d n)) within the strong cells, W alone: {:.3f} +- {:.3f}".format(
            *slope_of_ratio(runs)
        ),
        "slopes of logarithms over the strong cells, and standard errors:",
        found.to_string(index=False),
    ]
    (options.output / "ppca_rate.txt").write_text("\n".join(text) + "\n")
    print(lines.to_string(index=False, float_format="%.3g"))
    print("\n".join(text))
    draw_figure(table, options.output / "ppca_rate.png")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
