"""How often the penalised ELBO finds the number of components, and what it finds under a wrong family.

Recovery: K0 unit Gaussians in one dimension with equal weights, their means ``separation`` apart, centred at 0.
Components N(theta, 1) with theta ~ N(0, 5²), weights Dirichlet(1), K = 1 ... 6 with b_K = 2^-K. Beside E1 at
three alphas: BIC of the same unit-variance components by EM, BIC of scikit-learn's GaussianMixture with free
variances, and the occupied components (one datum or more) of its BayesianGaussianMixture of 6 components with
the same Dirichlet(1) at alpha = 1.
Misspecified: two components of Student's t with 5 degrees of freedom and variance 1, means -3 and 3, under
components N(theta, 1), K = 1 ... 9; the path over alpha, warm-started.
Each study writes its table, ``mixture_recovery.csv`` and ``mixture_recovery_t5.csv``; the figure is of both.

    python tests/benchmarks/mixture_recovery.py
"""

import argparse
import os
import time
import warnings
from pathlib import Path

# Two pools of threads on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from provenance import describe
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
COMPONENT = nt.mixtures.components.known_variance(1, prior_scale=5.0)
ALPHAS = (0.5, 0.9, 1.0)
ORDERS = range(1, 7)
RESTARTS = 8
WRONG_RESTARTS = 4


def draw(rng, num_components, separation, num_data):
    """Rows ``(n, 1)`` of K0 unit Gaussians."""
    centres = separation * (np.arange(num_components) - 0.5 * (num_components - 1))
    return (
        centres[rng.integers(num_components, size=num_data)] + rng.normal(size=num_data)
    )[:, None]


def of_scikit_learn(x, orders, seed):
    """Its choice by BIC, and the components that its variational mixture fills."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"n_init": 2, "random_state": seed}
        bic = [
            GaussianMixture(k, covariance_type="full", **options).fit(x).bic(x)
            for k in orders
        ]
        bayes = BayesianGaussianMixture(
            n_components=max(orders),
            weight_concentration_prior_type="dirichlet_distribution",
            weight_concentration_prior=1.0,
            max_iter=1000,
            random_state=seed,
        ).fit(x)
    filled = np.sum(bayes.weight_concentration_ - 1.0 >= 1.0)
    return {"sklearn BIC": orders[int(np.argmin(bic))], "sklearn Bayesian": int(filled)}


def recovery(separations, sizes, truths, orders, num_seeds):
    """The choice of every method on every data set, in long form."""
    rows = []
    for separation in separations:
        for truth in truths:
            for size in sizes:
                for seed in range(num_seeds):
                    x = draw(
                        np.random.default_rng(
                            [seed, truth, size, int(10 * separation)]
                        ),
                        truth,
                        separation,
                        size,
                    )
                    key = jax.random.key(seed)
                    path = nt.mixtures.num_components_path(
                        key,
                        x,
                        COMPONENT,
                        alphas=ALPHAS,
                        num_components=orders,
                        num_restarts=RESTARTS,
                        num_draws=50,
                    )
                    chosen = dict(
                        zip(
                            (f"alpha {a:g}" for a in ALPHAS),
                            path["num_components_path"]["selected"].values,
                            strict=True,
                        )
                    )
                    fits = [
                        nt.mixtures.em(
                            key, x, COMPONENT, num_components=k, num_restarts=RESTARTS
                        )
                        for k in orders
                    ]
                    chosen["unit-variance BIC"] = orders[
                        int(np.argmin([fit.bic for fit in fits]))
                    ]
                    chosen |= of_scikit_learn(x, orders, seed)
                    for method, selected in chosen.items():
                        rows.append(
                            (separation, truth, size, seed, method, int(selected))
                        )
                print(
                    f"separation {separation:g}, K0 = {truth}, n = {size}", flush=True
                )
    return pd.DataFrame(
        rows, columns=["separation", "K0", "n", "seed", "method", "selected"]
    )


def misspecified(num_data, orders, alphas, num_seeds):
    """The number of components along alpha, of t5 data."""
    rows = []
    for seed in range(num_seeds):
        rng = np.random.default_rng([seed, 5])
        x = (
            rng.choice([-3.0, 3.0], num_data)
            + np.sqrt(0.6) * rng.standard_t(5, num_data)
        )[:, None]
        path = nt.mixtures.num_components_path(
            jax.random.key(seed),
            x,
            COMPONENT,
            alphas=alphas,
            num_components=orders,
            num_restarts=WRONG_RESTARTS,
            num_draws=20,
            max_iter=3000,
        )["num_components_path"]
        rows += [
            (seed, a, int(k))
            for a, k in zip(path["alpha"].values, path["selected"].values, strict=True)
        ]
        print(
            f"t5, seed {seed}: {dict(rows[i][1:] for i in range(-len(alphas), 0))}",
            flush=True,
        )
    return pd.DataFrame(rows, columns=["seed", "alpha", "selected"])


def draw_figure(summary, wrong, path):
    """Recovery against n, and the path under a wrong family."""
    separations = sorted(summary["separation"].unique())
    figure, axes = plt.subplots(
        1,
        len(separations) + 1,
        figsize=(4.3 * (len(separations) + 1), 3.9),
        layout="constrained",
    )
    pooled = (
        summary.groupby(["separation", "method", "n"], sort=False)["right"]
        .mean()
        .reset_index()
    )
    for ax, separation in zip(axes, separations, strict=False):
        part = pooled[pooled["separation"] == separation]
        for (method, each), style in zip(
            part.groupby("method", sort=False),
            ("-", "-", "-", "--", ":", ":"),
            strict=True,
        ):
            ax.plot(each["n"], each["right"], f"o{style}", markersize=4, label=method)
        ax.set(
            xscale="log",
            xlabel="n",
            ylabel="share of data sets with the right K",
            ylim=(-0.03, 1.03),
        )
        ax.set_title(f"separation {separation:g}, K0 = 1 ... {summary['K0'].max()}")
        ax.grid(alpha=0.3)
    axes[len(separations) - 1].legend(
        frameon=False, fontsize="small", loc="lower right"
    )
    axes[-1].errorbar(
        wrong["alpha"],
        wrong["mean"],
        yerr=wrong["std"],
        fmt="o-",
        capsize=3,
        markersize=4,
    )
    axes[-1].axhline(2.0, color="0.3", linestyle="--", linewidth=1.0)
    axes[-1].set(xlabel="alpha", ylabel="selected K (mean ± s.d.)")
    axes[-1].set_title("two t5 clusters under unit Gaussians")
    axes[-1].grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Run both studies, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed, few K, small data"
    )
    parser.add_argument(
        "--study", choices=["recovery", "t5"], help="one of the two; both by default"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    small = options.small
    sizes, truths, num_seeds = (
        ((100,), (2,), 1) if small else ((100, 300, 1000, 3000), (1, 2, 3, 4), 20)
    )
    orders = range(1, 4) if small else ORDERS
    separations = (3.0,) if small else (2.0, 3.0)
    alphas = (0.1, 1.0) if small else (0.1, 0.25, 0.5, 1.0)
    num_wrong = 300 if small else 10_000
    start = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    recovery_file = options.output / "mixture_recovery.csv"
    wrong_file = options.output / "mixture_recovery_t5.csv"
    if options.study != "t5":
        long = recovery(separations, sizes, truths, orders, num_seeds)
        summary = (
            long.assign(
                right=long["selected"] == long["K0"],
                under=long["selected"] < long["K0"],
            )
            .groupby(["separation", "K0", "n", "method"], sort=False)
            .agg(
                right=("right", "mean"),
                under=("under", "mean"),
                mean=("selected", "mean"),
            )
            .reset_index()
        )
        summary.round(3).to_csv(recovery_file, index=False)
    if options.study != "recovery":
        wrong = misspecified(
            num_wrong, range(1, 4) if small else range(1, 10), alphas, num_seeds
        )
        table = (
            wrong.groupby("alpha")["selected"]
            .agg(["mean", "std", "min", "max"])
            .reset_index()
        )
        table.round(2).to_csv(wrong_file, index=False)
    (options.output / "mixture_recovery.txt").write_text(
        describe(
            f"n = {list(sizes)}, separations {list(separations)}, {num_seeds} seeds a cell, {RESTARTS} restarts; "
            f"t5: n = {num_wrong}, {num_seeds} seeds, {WRONG_RESTARTS} restarts; float32"
        )
    )
    print(f"{time.perf_counter() - start:.0f} s")
    summary, table = pd.read_csv(recovery_file), pd.read_csv(wrong_file)
    print(
        summary.pivot_table(
            index=["separation", "K0", "n"],
            columns="method",
            values="right",
            sort=False,
        ).to_string()
    )
    print(table.to_string(index=False))
    draw_figure(summary, table, options.output / "mixture_recovery.png")


if __name__ == "__main__":
    main()
