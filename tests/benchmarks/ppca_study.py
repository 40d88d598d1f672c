"""The number of factors of probabilistic PCA, by several criteria side by side.

Ten columns of unit noise with strong, weak or no factors in random orthogonal directions, and the wine data of
scikit-learn, standardised, with the density of held-out rows as a judge. Writes ``ppca_study.csv``,
``ppca_study.txt``, ``ppca_wine.csv`` and ``ppca_study.png``.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from provenance import describe
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA

import numpyro_tempered as nt
from numpyro_tempered import ppca

D = 10
ALPHAS = (0.5, 0.9, 1.0)
# Standard deviations of the factors; those of the noise are 1. A factor of variance v stands out of the noise of
# n rows, in the limit of many columns, where v > sqrt(D / n): .45, .32, .18, .10 and .06 for the n below.
SETTINGS = {
    "3 strong": (3.0, 2.0, 1.5),
    "2 strong, 2 weak": (3.0, 2.0, 0.6, 0.5),
    "none": (),
}


def data(seed, n, scales):
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(D, D)))[0][:, : len(scales)]
    return rng.normal(size=(n, len(scales))) * scales @ directions.T + rng.normal(
        size=(n, D)
    )


def bic(x, k):
    """Bayesian information criterion of the maximum-likelihood fit with k < d factors, as a log evidence."""
    n, d = x.shape
    values = np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1]
    noise = values[k:].mean()
    log_lik = (
        -0.5
        * n
        * (
            d * np.log(2 * np.pi)
            + np.log(values[:k]).sum()
            + (d - k) * np.log(noise)
            + d
        )
    )
    return log_lik - 0.5 * (d * k - k * (k - 1) / 2 + d + 1) * np.log(n)


def choices(key, x, orders):
    """The K that each method takes, and how far each criterion is decided."""
    row, margins = {}, {}
    for alpha in ALPHAS:
        chosen = ppca.select_num_factors(
            key, x, num_factors=orders, log_prior=nt.dyadic, alpha=alpha
        )
        row[f"ELBO {alpha:g}"], margins[f"margin {alpha:g}"] = (
            chosen.selected,
            chosen.margin,
        )
        if not chosen.converged.all():
            raise RuntimeError("a fit has not converged")
    row["ELBO 1, no ARD"] = ppca.select_num_factors(
        key, x, num_factors=orders, log_prior=nt.dyadic, ard=False
    ).selected
    largest = max(orders)
    row["ARD"] = ppca.fit(
        key, x, num_factors=largest, num_restarts=2 * largest
    ).num_occupied
    row["Minka"] = PCA(n_components="mle").fit(x).n_components_
    row["BIC"] = orders[int(np.argmax([bic(x, k) for k in orders]))]
    return row, margins


def synthetic(sizes, num_seeds):
    rows = []
    for setting, scales in SETTINGS.items():
        for n in sizes:
            for seed in range(num_seeds):
                row, margins = choices(
                    jax.random.key(seed), data(seed, n, scales), list(range(D))
                )
                rows.append(
                    {
                        "setting": setting,
                        "true": len(scales),
                        "n": n,
                        "seed": seed,
                        **row,
                        **margins,
                    }
                )
    return pd.DataFrame(rows)


def summary(raw, methods):
    """Mean of the selected K, and the share of data sets where it is the true one."""
    groups = raw.groupby(["setting", "true", "n"], sort=False)
    mean = groups[methods].mean()
    share = groups[methods].agg(
        lambda column: np.mean(column == raw.loc[column.index, "true"])
    )
    return mean, share


def wine(num_splits, num_orders=None):
    """Criteria on all rows, and the mean log density of held-out rows, by K."""
    x = load_wine().data
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    orders = list(range(x.shape[1]))[:num_orders]
    table = pd.DataFrame(
        {"BIC": [bic(x, k) for k in orders]}, index=pd.Index(orders, name="K")
    )
    for alpha in ALPHAS:
        table[f"ELBO {alpha:g}"] = ppca.select_num_factors(
            jax.random.key(0), x, num_factors=orders, log_prior=nt.dyadic, alpha=alpha
        ).criterion
    held_out = np.zeros((num_splits, len(orders)))
    for split in range(num_splits):
        order = np.random.default_rng(split).permutation(len(x))
        train, test = x[order[36:]], x[order[:36]]
        fits = ppca.select_num_factors(
            jax.random.key(split), train, num_factors=orders
        ).fits
        for k, fit in fits.items():
            held_out[split, k] = ppca.log_predictive(
                jax.random.key(split), fit, test, 500
            ).value.mean()
    table["held out"] = held_out.mean(axis=0)
    # Differences are what splits agree on, and what their error is about.
    best = int(np.argmax(held_out.mean(axis=0)))
    behind = held_out - held_out[:, [best]]
    table["held out, behind"] = behind.mean(axis=0)
    table["held out, se"] = behind.std(axis=0, ddof=1) / np.sqrt(num_splits)
    return table, choices(jax.random.key(0), x, orders)[0]


def draw(mean, table, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    markers = dict(zip(mean.columns, "os^DvXP", strict=True))
    for axis, setting in zip(axes.flat, SETTINGS, strict=False):
        block = mean.loc[setting]
        true = block.index[0][0]
        sizes = [n for _, n in block.index]
        axis.axhline(true, color="0.6", linewidth=6, alpha=0.4, zorder=0, label="true")
        for i, (method, marker) in enumerate(markers.items()):
            # Methods that agree would hide one another.
            shifted = np.array(sizes) * 1.04 ** (i - 3)
            axis.plot(
                shifted,
                block[method],
                marker=marker,
                markersize=5,
                linewidth=1,
                label=method,
            )
        axis.set(title=setting, xscale="log", xlabel="rows", ylabel="mean selected K")
        axis.set_xticks(sizes, [str(n) for n in sizes])
        axis.minorticks_off()
    axes[0, 1].legend(fontsize=8)
    axis = axes[1, 1]
    for name in (*[f"ELBO {alpha:g}" for alpha in ALPHAS], "BIC"):
        scaled = table[name] - table[name].max()
        color = f"C{list(mean.columns).index(name)}"
        axis.plot(
            table.index,
            scaled,
            marker=markers[name],
            color=color,
            markersize=4,
            linewidth=1,
            label=name,
        )
    axis.set(
        title="wine",
        xlabel="K",
        ylabel="criterion, nats below its maximum",
        ylim=(-300, 10),
    )
    axis.legend(fontsize=8, loc="lower right")
    twin = axis.twinx()
    twin.errorbar(
        table.index,
        table["held out, behind"],
        table["held out, se"],
        color="black",
        fmt="x--",
        linewidth=1,
    )
    twin.set_ylim(-1.0, 1.0 / 30.0)
    twin.set_ylabel("held out (x), nats a row below the best")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="one size, one seed, two splits, few K"
    )
    parser.add_argument(
        "--output", type=Path, help="directory for results; none are written without it"
    )
    options = parser.parse_args()
    sizes, num_seeds, num_splits = (
        ((300,), 1, 2) if options.small else ((50, 100, 300, 1000, 3000), 20, 10)
    )
    start = time.perf_counter()
    raw = synthetic(sizes, num_seeds)
    methods = [name for name in raw.columns[4:] if not name.startswith("margin")]
    mean, share = summary(raw, methods)
    table, chosen = wine(num_splits, 4 if options.small else None)
    said = (
        f"{num_seeds} seeds, n = {sizes}, d = {D}, K = 0..{D - 1}, b_K = 2^-(K+1), float32; wine: 178 rows, "
        f"13 columns, {num_splits} splits with 36 rows held out"
    )
    text = "\n".join(
        [
            describe(said),
            "mean selected K",
            mean.round(2).to_string(),
            "\nshare of data sets with the true K",
            share.round(2).to_string(),
            "\nwine, selected K: "
            + ", ".join(f"{name} {k}" for name, k in chosen.items()),
            "wine, criteria, and log density of held-out rows (alpha = 1): nats a row",
            table.round(3).to_string(),
            "",
        ]
    )
    print(text)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        raw.round(3).to_csv(options.output / "ppca_study.csv", index=False)
        table.round(4).to_csv(options.output / "ppca_wine.csv")
        (options.output / "ppca_study.txt").write_text(text)
        draw(mean, table, options.output / "ppca_study.png")


if __name__ == "__main__":
    main()
