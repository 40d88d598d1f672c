"""What sparse regression finds, beside scikit-learn's lasso, and how far mean-field answers are from exact ones.

Recovery: n = 100 rows of d = 500 Gaussian columns, independent or with correlation .7 between neighbours (.7^k at
distance k), 10 coefficients ± U(.5, 2), noise of deviation 1, which is not told to the fits. Selected are
variables with an inclusion probability above 1/2, and coefficients of the lasso that are not 0. The prediction
error is the root mean square of x'(estimate - truth) on 1000 further rows.
Enumeration: n = 50, d = 10, known noise; the log of the tempered evidence over all 1024 models less the ELBO, and
the largest error of an inclusion probability in each data set, by correlation of neighbours.
Real data, held-out rows of random splits: breast cancer (scikit-learn) with all products of two columns,
standardised, and diabetes with the same. Priors are set before looking: ten variables expected, slab 1 for
log-odds and 1/2 for a standardised target.
Writes ``sparse_recovery.csv``, ``sparse_enumeration.csv``, ``sparse_real_data.csv``, ``sparse_recovery.txt`` and
``sparse_recovery.png``.

    python tests/benchmarks/sparse_recovery.py --output docs/results
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from provenance import describe
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LassoCV, LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

import numpyro_tempered as nt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparse"))
from sparse_oracles import design, enumerate_linear

ALPHAS = (0.5, 1.0)
METHODS = [
    *(f"spike and slab, alpha = {alpha:g}" for alpha in ALPHAS),
    "lasso, cross-validated",
]
DESIGNS = {"independent": 0.0, "correlated .7": 0.7}


def timed(run):
    begin = time.perf_counter()
    out = run()
    return out, time.perf_counter() - begin


def recovery(num_seeds, n=100, d=500, num_true=10, num_restarts=10):
    rows = []
    for name, rho in DESIGNS.items():
        for seed in range(num_seeds):
            rng = np.random.default_rng([seed, 5])
            x, new = design([seed, 3], n, d, rho), design([seed, 4], 1000, d, rho)
            theta = np.zeros(d)
            chosen = rng.choice(d, num_true, replace=False)
            theta[chosen] = rng.choice([-1.0, 1.0], num_true) * rng.uniform(
                0.5, 2.0, num_true
            )
            y = x @ theta + rng.normal(size=n)
            for method, alpha in zip(METHODS, (*ALPHAS, None), strict=True):
                if alpha is None:
                    found, seconds = timed(
                        lambda x=x, y=y: LassoCV(
                            cv=5, fit_intercept=False, max_iter=20_000
                        ).fit(x, y)
                    )
                    estimate, selected = found.coef_, np.flatnonzero(found.coef_)
                else:

                    def run(x=x, y=y, alpha=alpha, seed=seed):
                        return jax.block_until_ready(
                            nt.sparse.fit_linear(
                                jax.random.key(seed),
                                x,
                                y,
                                inclusion_prob=num_true / d,
                                slab_scale=1.0,
                                alpha=alpha,
                                num_restarts=num_restarts,
                            )
                        )

                    if seed == 0:
                        run()
                    found, seconds = timed(run)
                    estimate, selected = (
                        np.asarray(found.posterior.mean),
                        nt.sparse.selected(found),
                    )
                right = np.isin(selected, chosen).sum()
                rows.append(
                    {
                        "design": name,
                        "method": method,
                        "seed": seed,
                        "selected": len(selected),
                        "true positive rate": right / num_true,
                        "false discoveries": (len(selected) - right)
                        / max(1, len(selected)),
                        "estimation error": np.linalg.norm(estimate - theta),
                        "prediction error": np.sqrt(
                            np.mean((new @ (estimate - theta)) ** 2)
                        ),
                        "noise": np.nan if alpha is None else float(found.noise_scale),
                        "seconds": seconds,
                    }
                )
    return pd.DataFrame(rows)


def enumeration(num_seeds, n=50, d=10):
    rows = []
    prior = np.full(d, 0.3), np.full(d, 1.0)
    for rho in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95):
        for seed in range(num_seeds):
            rng = np.random.default_rng([seed, 6])
            x = design([seed, 7], n, d, rho)
            theta = np.where(rng.random(d) < 0.3, rng.normal(size=d), 0.0)
            y = x @ theta + rng.normal(size=n)
            for alpha in ALPHAS:
                found = nt.sparse.fit_linear(
                    jax.random.key(seed), x, y, inclusion_prob=0.3, slab_scale=1.0, noise_scale=1.0,
                    alpha=alpha, num_restarts=10, tolerance=1e-8,
                )  # fmt: skip
                evidence, probs, _ = enumerate_linear(x, y, alpha, prior, 1.0)
                error = np.abs(np.asarray(found.inclusion_probs) - probs)
                rows.append(
                    {
                        "correlation": rho,
                        "alpha": alpha,
                        "seed": seed,
                        "gap": evidence - float(found.objective),
                        "error": error.max(),
                        "wrong side of 1/2": np.sum(
                            (np.asarray(found.inclusion_probs) > 0.5) != (probs > 0.5)
                        ),
                    }
                )
                if rows[-1]["gap"] < 0.0:
                    raise RuntimeError(f"the ELBO exceeds the evidence: {rows[-1]}")
    return pd.DataFrame(rows)


def with_products(train, test):
    """All columns and products of two, each in units of its deviation in the training rows."""
    scaler, products = (
        StandardScaler().fit(train),
        PolynomialFeatures(2, include_bias=False),
    )
    first, second = (
        products.fit_transform(scaler.transform(part)) for part in (train, test)
    )
    scaler = StandardScaler().fit(first)
    first, second = scaler.transform(first), scaler.transform(second)
    # The square of a column of two values is that column again.
    again = np.any(
        np.triu(np.abs(first.T @ first) / len(first), 1) > 1.0 - 1e-9, axis=0
    )
    return first[:, ~again], second[:, ~again]


def real(num_splits):
    rows = []

    def record(data, method, x, split, selected, loss, error, seconds):
        rows.append(
            {
                "data": data,
                "n": len(x),
                "d": x.shape[1],
                "method": method,
                "split": split,
                "selected": selected,
                "held-out loss": loss,
                "held-out error": error,
                "seconds": seconds,
            }
        )

    for split in range(num_splits):
        rng, key = np.random.default_rng([split, 8]), jax.random.key(split)
        cancer = load_breast_cancer()
        order = rng.permutation(len(cancer.target))
        train, test = order[170:], order[:170]
        x, new = with_products(cancer.data[train], cancer.data[test])
        y, truth = cancer.target[train], cancer.target[test]
        for method, alpha in zip(METHODS, (*ALPHAS, None), strict=True):
            if alpha is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = LogisticRegressionCV(
                        Cs=np.logspace(-3, 2, 11), cv=5, l1_ratios=(1.0,), solver="liblinear",
                        scoring="neg_log_loss", use_legacy_attributes=False,
                    )  # fmt: skip
                    found, seconds = timed(
                        lambda model=model, x=x, y=y: model.fit(x, y)
                    )
                probability, selected = (
                    found.predict_proba(new)[:, 1],
                    np.count_nonzero(found.coef_),
                )
            else:

                def run(x=x, y=y, alpha=alpha, key=key):
                    return jax.block_until_ready(
                        nt.sparse.fit_logistic(
                            key,
                            x,
                            y,
                            inclusion_prob=10 / x.shape[1],
                            slab_scale=1.0,
                            alpha=alpha,
                            num_restarts=10,
                        )
                    )

                run()
                found, seconds = timed(run)
                probability = np.asarray(
                    nt.sparse.predict_proba(key, found, new, 4000).mean, float
                )
                selected = len(nt.sparse.selected(found))
            wrong = np.mean((probability > 0.5) != truth)
            record(
                "breast cancer",
                method,
                x,
                split,
                selected,
                log_loss(truth, probability),
                wrong,
                seconds,
            )
        sugar = load_diabetes(scaled=False)
        order = rng.permutation(len(sugar.target))
        train, test = order[110:], order[:110]
        x, new = with_products(sugar.data[train], sugar.data[test])
        centre, unit = sugar.target[train].mean(), sugar.target[train].std()
        y, truth = (
            (sugar.target[train] - centre) / unit,
            (sugar.target[test] - centre) / unit,
        )
        for method, alpha in zip(METHODS, (*ALPHAS, None), strict=True):
            if alpha is None:
                found, seconds = timed(
                    lambda x=x, y=y: LassoCV(cv=5, max_iter=20_000).fit(x, y)
                )
                mean, selected = found.predict(new), np.count_nonzero(found.coef_)
                # In-sample, as its predictions have no variance.
                scale = np.full(len(new), np.std(y - found.predict(x)))
            else:

                def run(x=x, y=y, alpha=alpha, key=key):
                    return jax.block_until_ready(
                        nt.sparse.fit_linear(
                            key, x, y, inclusion_prob=10 / x.shape[1], slab_scale=0.5, intercept_scale=1.0,
                            alpha=alpha, num_restarts=10,
                        )
                    )  # fmt: skip

                run()
                found, seconds = timed(run)
                mean, scale = (
                    np.asarray(part, float) for part in nt.sparse.predict(found, new)
                )
                selected = len(nt.sparse.selected(found))
            loss = np.mean(
                0.5 * np.log(2 * np.pi * scale**2) + 0.5 * ((truth - mean) / scale) ** 2
            )
            record(
                "diabetes",
                method,
                x,
                split,
                selected,
                loss,
                np.sqrt(np.mean((truth - mean) ** 2)),
                seconds,
            )
    return pd.DataFrame(rows)


def against_lasso(summary, level):
    """Times as ratios to the lasso's."""
    seconds = summary.pop("seconds")
    of_lasso = seconds.xs(METHODS[-1], level="method").groupby(level).first()
    summary["time / lasso's"] = (
        seconds / of_lasso.loc[summary.index.get_level_values(level)].to_numpy()
    )
    return summary


def draw(found, exact, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
    labels = [
        "spike and slab\nalpha = 1/2",
        "spike and slab\nalpha = 1",
        "lasso\n(5-fold CV)",
    ]
    panels = [
        "true positive rate",
        "false discoveries",
        "estimation error",
        "prediction error",
    ]
    rng = np.random.default_rng(0)
    for axis, column in zip(axes.flat, panels, strict=False):
        for i, name in enumerate(DESIGNS):
            for j, method in enumerate(METHODS):
                values = found.loc[
                    (found["design"] == name) & (found["method"] == method), column
                ]
                at = j + 0.3 * (i - 0.5)
                axis.plot(
                    at + rng.uniform(-0.08, 0.08, len(values)),
                    values,
                    "o",
                    color=f"C{i}",
                    ms=3,
                    alpha=0.4,
                )
                label = name if j == 0 else None
                axis.plot(
                    [at - 0.12, at + 0.12],
                    [values.mean()] * 2,
                    color=f"C{i}",
                    linewidth=3,
                    label=label,
                )
        axis.set_xticks(range(3), labels, fontsize=8)
        axis.set_title(column)
        axis.set_ylim(bottom=0.0)
    axes[0, 0].set_ylim(0.0, 1.05)
    axes[0, 1].legend(loc="upper left", fontsize=8)
    for axis, column, title in (
        (axes[1, 1], "gap", "log evidence - ELBO, nats"),
        (axes[1, 2], "error", "largest error of an inclusion probability"),
    ):
        for k, (alpha, marker) in enumerate(zip(ALPHAS, "os", strict=True)):
            groups = exact[exact["alpha"] == alpha].groupby("correlation")[column]
            low, middle, high = (groups.quantile(q) for q in (0.1, 0.5, 0.9))
            axis.fill_between(
                middle.index, low, high, color=f"C{k + 2}", alpha=0.2, linewidth=0
            )
            axis.plot(
                middle.index,
                groups.mean(),
                marker=marker,
                color=f"C{k + 2}",
                label=f"alpha = {alpha:g}",
            )
        axis.set(xlabel="correlation of neighbours", title=title)
        axis.set_ylim(bottom=0.0)
        axis.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    """Run all three, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed and one split, d = 100"
    )
    parser.add_argument(
        "--output", type=Path, help="folder for results; none are written without it"
    )
    options = parser.parse_args()
    num_seeds, num_exact, num_splits = (1, 1, 1) if options.small else (20, 20, 10)
    found = recovery(num_seeds, d=100 if options.small else 500)
    summary = (
        found.drop(columns="seed").groupby(["design", "method"], sort=False).mean()
    )
    summary = against_lasso(summary, "design")
    print(summary.round(3).to_string(), flush=True)
    exact = enumeration(num_exact, d=6 if options.small else 10)
    by = exact.groupby(["correlation", "alpha"])
    table = pd.DataFrame(
        {
            "mean gap": by["gap"].mean(),
            "largest gap": by["gap"].max(),
            "mean error": by["error"].mean(),
            "largest error": by["error"].max(),
            "wrong side of 1/2": by["wrong side of 1/2"].mean(),
        }
    )
    print(table.round(3).to_string(), flush=True)
    held_out = real(num_splits)
    columns = ["selected", "held-out loss", "held-out error", "seconds"]
    groups = held_out.groupby(["data", "n", "d", "method"], sort=False)[columns]
    of_real = against_lasso(groups.mean(), "data")
    # Splits share their rows: the error of a difference, paired by split, is what methods are compared by.
    lasso = held_out[held_out["method"] == METHODS[-1]].set_index(["data", "split"])[
        "held-out loss"
    ]
    index = pd.MultiIndex.from_frame(held_out[["data", "split"]])
    held_out["behind"] = (
        held_out["held-out loss"].to_numpy() - lasso.loc[index].to_numpy()
    )
    behind = held_out.groupby(["data", "n", "d", "method"], sort=False)["behind"]
    of_real["loss - lasso's"], of_real["its se"] = behind.mean(), behind.sem()
    print(of_real.round(3).to_string(), flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        summary.round(4).to_csv(options.output / "sparse_recovery.csv")
        table.round(4).to_csv(options.output / "sparse_enumeration.csv")
        of_real.round(4).to_csv(options.output / "sparse_real_data.csv")
        draw(found, exact, options.output / "sparse_recovery.png")
        d, d_exact = (100, 6) if options.small else (500, 10)
        sizes = (
            f"recovery: {num_seeds} data sets, n = 100, d = {d}; enumeration: {num_exact} data sets, n = 50, "
            f"d = {d_exact}; real data: {num_splits} splits; 10 restarts; float32; times are of warm calls, "
            "for whole fits (all restarts; all folds)"
        )
        parts = (summary.round(3), table.round(3), of_real.round(3))
        text = "\n\n".join(part.to_string() for part in parts)
        (options.output / "sparse_recovery.txt").write_text(
            describe(sizes) + "\n" + text + "\n"
        )


if __name__ == "__main__":
    main()
