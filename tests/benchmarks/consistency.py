"""Divergence of a tempered posterior from the truth against n, beside its certificate and the theorem's bound.

Everything is at alpha = 1/2. Each study measures the integral of D_alpha(P_theta, P0) against the posterior, in
nats per datum, and the certificate with log p0(X) itself at delta = .05.
Regression: five standard normal covariates, coefficients (1, -1, .5, 0, 0), noise N(0, 1) known, prior N(0, I);
posterior, evidence and divergence in closed form, given the covariates. The theorem's bound is
inf over rho of alpha/(1-alpha) E_rho KL(P0, P_theta) + KL(rho, prior)/(n(1-alpha)), also closed form.
Misspecified: the same model, of data whose mean has .5 (x1² - 1) besides and whose noise has standard deviation
1.5. The floor is the divergence of the best P_theta, and the excess what the posterior adds. Beside them the
certificate from the maximum likelihood, which is not valid here.
Mixtures: .4 N(-s/2, 1) + .6 N(s/2, 1) with s = 4 and 2.5; components N(theta, 1) with theta ~ N(0, 5²), weights
Dirichlet(1), K = 1 ... 4 chosen by the penalised ELBO with b_K = 2^-K; divergences by quadrature, averaged over
draws of theta.
Slopes are of log(divergence) on log(n), by least squares over all runs, with their standard errors.

    python tests/benchmarks/consistency.py
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
ALPHA, DELTA = 0.5, 0.05
COEFFICIENTS = np.array([1.0, -1.0, 0.5, 0.0, 0.0])
WRONG_SCALE = 1.5
WEIGHTS = np.array([0.4, 0.6])
SEPARATIONS = {"mixture, 4 apart": 4.0, "mixture, 2.5 apart": 2.5}
COMPONENT = nt.mixtures.components.known_variance(1, prior_scale=5.0)
RESTARTS = 4
NUM_DRAWS = 100
LOG_TWO_PI = np.log(2 * np.pi)


def log_normal(x, loc, scale=1.0):
    """Log densities of normals."""
    return -0.5 * ((x - loc) / scale) ** 2 - np.log(scale) - 0.5 * LOG_TWO_PI


def regression_run(rng, num_data, wrong):
    """One data set: the divergence, its floor, the bound, and the certificates."""
    x = rng.normal(size=(num_data, len(COEFFICIENTS)))
    mean = x @ COEFFICIENTS + (0.5 * (x[:, 0] ** 2 - 1) if wrong else 0.0)
    scale = WRONG_SCALE if wrong else 1.0
    y = mean + scale * rng.normal(size=num_data)
    gram = ALPHA * x.T @ x
    precision = gram + np.eye(len(gram))
    cov = np.linalg.inv(precision)
    loc = cov @ (ALPHA * x.T @ y)
    logdet = np.linalg.slogdet(precision)[1]
    log_evidence = 0.5 * (
        loc @ precision @ loc - ALPHA * (y @ y + num_data * LOG_TWO_PI) - logdet
    )
    best, least = (np.linalg.lstsq(x, target, rcond=None)[0] for target in (mean, y))
    # The divergence is quadratic in the distance of the means: the posterior's spread adds its trace.
    by_datum = nt.bounds.renyi_normal(ALPHA, x @ loc, 1.0, mean, scale)
    mixed = (1 - ALPHA) + ALPHA * scale**2
    divergence = by_datum.mean() + 0.5 * ALPHA * np.einsum("ij,jk,ik->", x, cov, x) / (
        num_data * mixed
    )
    floor = (
        nt.bounds.renyi_normal(ALPHA, x @ best, 1.0, mean, scale).mean()
        if wrong
        else 0.0
    )
    nearest_kl = 0.5 * (
        np.mean((x @ best - mean) ** 2) + scale**2 - 1 - np.log(scale**2)
    )
    price = 0.5 * logdet + 0.5 * best @ np.linalg.solve(precision, gram @ best)
    options = {"num_data": num_data, "alpha": ALPHA, "delta": DELTA}
    certificate = nt.bounds.tempered_certificate(
        log_evidence,
        nt.bounds.known_density(log_normal(y, mean, scale).sum()),
        **options,
    )
    likely = nt.bounds.tempered_certificate(
        log_evidence,
        nt.bounds.maximum_likelihood(log_normal(y, x @ least).sum()),
        **options,
    )
    return {
        "divergence": divergence,
        "floor": floor,
        "excess": divergence - floor,
        "bound": ALPHA / (1 - ALPHA) * nearest_kl + price / (num_data * (1 - ALPHA)),
        "certificate": certificate.value,
        "of_maximum_likelihood": likely.value,
    }


def log_mixture(x, weights, centres):
    """Log density at nodes ``(k,)`` of unit-variance mixtures ``(..., K)``."""
    parts = np.log(weights)[..., None, :] + log_normal(
        x[:, None], centres[..., None, :]
    )
    top = parts.max(axis=-1)
    return top + np.log(np.exp(parts - top[..., None]).sum(axis=-1))


def mixture_run(rng, num_data, seed, separation, orders):
    """One data set, with K chosen."""
    truth = separation * np.array([-0.5, 0.5])
    x = (
        truth[rng.choice(2, size=num_data, p=WEIGHTS)] + rng.normal(size=num_data)
    ).astype(np.float32)[:, None]
    fit_key, draw_key = jax.random.split(jax.random.key(seed))
    choice = nt.mixtures.select_num_components(
        fit_key,
        x,
        COMPONENT,
        num_components=orders,
        alpha=ALPHA,
        num_restarts=RESTARTS,
        num_draws=50,
        num_samples=2,
        baselines=False,
    )
    draws = nt.mixtures.sample_posterior(draw_key, choice.fit, NUM_DRAWS)
    weights, centres = (
        np.asarray(part, np.float64)
        for part in (draws["weights"], draws["loc"][..., 0])
    )
    weights = np.maximum(weights, 1e-30)
    divergence = nt.bounds.renyi_quadrature(
        ALPHA,
        lambda node: log_mixture(
            node, weights / weights.sum(axis=-1, keepdims=True), centres
        ),
        lambda node: log_mixture(node, WEIGHTS, truth),
        -40.0,
        40.0,
        num_panels=80,
    ).mean()
    table = choice.data["model_comparison"]
    certificate = nt.bounds.selection_certificate(
        np.asarray(table["elbo"]),
        np.asarray(table["log_prior"]),
        nt.bounds.known_density(
            log_mixture(x[:, 0].astype(np.float64), WEIGHTS, truth).sum()
        ),
        num_data,
        alpha=ALPHA,
        delta=DELTA,
        elbo_se=np.asarray(table["se"]),
    )
    return {
        "divergence": divergence,
        "excess": divergence,
        "certificate": certificate.value,
        "K_is_2": float(choice.selected == 2),
    }


def study(name, sizes, num_seeds, orders=()):
    """All runs of one study, in long form."""
    rows = []
    for size in sizes:
        for seed in range(num_seeds):
            rng = np.random.default_rng([seed, size])
            if name in SEPARATIONS:
                run = mixture_run(rng, size, seed, SEPARATIONS[name], orders)
            else:
                run = regression_run(rng, size, wrong=name == "misspecified")
            rows.append({"study": name, "n": size, "seed": seed, **run})
        print(f"{name}, n = {size}", flush=True)
    return pd.DataFrame(rows)


def slope(runs, column):
    """Least-squares slope of log(column) on log(n), and its standard error."""
    t, u = np.log(runs["n"].to_numpy(float)), np.log(runs[column].to_numpy(float))
    t = t - t.mean()
    value = t @ u / (t @ t)
    residual = u - u.mean() - value * t
    return value, np.sqrt(residual @ residual / (len(t) - 2) / (t @ t))


def summarise(runs):
    """Means by study and n, with standard errors and shares."""
    columns = [
        "divergence",
        "floor",
        "excess",
        "bound",
        "certificate",
        "of_maximum_likelihood",
    ]
    runs = runs.reindex(columns=["study", "n", *columns, "K_is_2"])
    runs = runs.assign(
        broken=(runs["divergence"] > runs["certificate"]).astype(float),
        likely_broken=np.where(
            runs["of_maximum_likelihood"].isna(),
            np.nan,
            runs["divergence"] > runs["of_maximum_likelihood"],
        ).astype(float),
    )
    groups = runs.groupby(["study", "n"], sort=False)
    table = groups[[*columns, "broken", "likely_broken", "K_is_2"]].mean()
    table.insert(0, "seeds", groups.size())
    table.insert(2, "divergence_se", groups["divergence"].sem())
    table["looseness"] = table["certificate"] / table["divergence"]
    return table.reset_index()


def draw_figure(table, slopes, path):
    """Regressions and mixtures, log-log."""
    titles = {
        "regression": "regression, well specified",
        "misspecified": "regression, misspecified",
        "mixture": "mixtures, K chosen",
    }
    certificate = "certificate, log p0(X) given"
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.4), layout="constrained")
    for ax, (panel, title) in zip(axes, titles.items(), strict=True):
        names = SEPARATIONS if panel == "mixture" else (panel,)
        for name, marker, line in zip(names, "os", ("-", "--"), strict=False):
            part = table[table["study"] == name]
            value, error = slopes[name]
            found = f"slope {value:.3f} ± {error:.3f}"
            # (column, colour, style, label)
            lines = [
                ("divergence", "C0", f"{marker}-", f"divergence: {found}"),
                ("certificate", "C3", "^-", certificate),
            ]
            if name == "regression":
                lines.append(("bound", "C1", "--", "bound of the theorem"))
            elif name == "misspecified":
                ax.axhline(
                    part["floor"].iloc[-1],
                    color="C0",
                    linestyle=":",
                    linewidth=1.0,
                    label="floor",
                )
                lines[0] = ("divergence", "C0", "o-", "divergence")
                lines += [
                    ("bound", "C1", "--", "bound of the theorem"),
                    ("excess", "C2", "s-", f"excess over the floor: {found}"),
                    (
                        "of_maximum_likelihood",
                        "0.45",
                        "x:",
                        "from maximum likelihood (invalid)",
                    ),
                ]
            else:
                apart = name.removeprefix("mixture, ")
                lines = [
                    (
                        "divergence",
                        "C0",
                        f"{marker}{line}",
                        f"{apart}, divergence: {found}",
                    ),
                    ("certificate", "C3", f"^{line}", f"{apart}, certificate"),
                ]
            for column, colour, style, label in lines:
                ax.plot(
                    part["n"],
                    part[column],
                    style,
                    color=colour,
                    markersize=5,
                    label=label,
                )
        steepest = part["excess"].iloc[-1] * part["n"].iloc[-1] / part["n"]
        ax.plot(part["n"], 0.5 * steepest, color="0.7", linewidth=1.0, label="slope -1")
        ax.set(xscale="log", yscale="log", xlabel="n", title=title)
        ax.grid(alpha=0.3)
        shown = ax.legend(frameon=False, fontsize=8, loc="upper right").get_texts()
        low, high = ax.get_ylim()
        # Room for the legend above the curves.
        ax.set_ylim(low, high * (high / low) ** (0.07 * len(shown)))
    axes[0].set_ylabel("nats a datum")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Run the studies, write table, slopes and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few seeds, small data, K = 2 alone"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for table and figure"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    sizes = (50, 100, 200) if options.small else tuple(50 * 2**i for i in range(9))
    mixture_sizes = (50,) if options.small else (50, 200, 800, 3200, 12_800)
    num_seeds, num_mixtures = (3, 2) if options.small else (100, 30)
    orders = (2,) if options.small else (1, 2, 3, 4)
    start = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    runs, slopes = [], {}
    for name in ("regression", "misspecified", *SEPARATIONS):
        if name in SEPARATIONS:
            runs.append(study(name, mixture_sizes, num_mixtures, orders))
        else:
            runs.append(study(name, sizes, num_seeds))
        if runs[-1]["n"].nunique() > 1:
            slopes[name] = slope(runs[-1], "excess")
        else:
            slopes[name] = (np.nan, np.nan)
        table = summarise(pd.concat(runs, ignore_index=True))
        table.to_csv(
            options.output / "consistency.csv", index=False, float_format="%.4g"
        )
        lines = [
            f"  {key}: {value:.4f} +- {error:.4f}"
            for key, (value, error) in slopes.items()
        ]
        (options.output / "consistency.txt").write_text(
            describe(
                f"n = {list(sizes)}, {num_seeds} seeds each; mixture n = {list(mixture_sizes)}, {num_mixtures} "
                f"seeds each, {RESTARTS} restarts, {NUM_DRAWS} draws; float64 and, for the mixture, float32"
            )
            + "slopes of log(divergence less its floor) on log(n):\n"
            + "\n".join(lines)
            + "\n"
        )
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    print(table.to_string(index=False, float_format="%.4g"))
    print("\n".join(lines))
    draw_figure(table, slopes, options.output / "consistency.png")


if __name__ == "__main__":
    main()
