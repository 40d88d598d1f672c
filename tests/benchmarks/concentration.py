"""Expected squared Hellinger distance of tempered posteriors from the truth against n, for alpha up to 1.

H² = integral of (sqrt p - sqrt r)², per datum, is averaged over the posterior in closed form or by quadrature.
Regression: five standard normal covariates, of which neighbours have correlation .5; coefficients (1, -1, .5,
0, 0), noise N(0, 1) known, prior N(0, I). The posterior, and the best Gaussian with independent coordinates.
The limit is (1 + 1/alpha) d/(4n) for both; `bound` is the theorem's for alpha < 1, at its best Gaussian of the
family, on the Renyi divergence of order alpha, `renyi`.
Misspecified: the same model, of data whose mean has .5 (x1² - 1) besides and whose noise has standard deviation
1.5; the distance is from the nearest distribution of the model in KL, given the covariates.
Rough: the truth is uniform on [0, 1]. Half of the prior is on densities proportional to exp(-theta x), theta ~
inverse gamma(1, 3), half on densities that are 2 on m of 2m equal cells and 0 on the others, any m of them, m =
4^j with probability 2^-j: after Barron's counterexample. Each neighbourhood of the truth in KL has prior mass.
The rate of the prior mass is n^(-2/3), as mass exp(-3/theta) is within theta²/24. `rough` is the posterior mass
of the second half.
Slopes are of log(distance) on log(n), by least squares over all runs, with their standard errors; `late` from
the middle n on.

    python tests/benchmarks/concentration.py
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from consistency import COEFFICIENTS, DOCS, WRONG_SCALE, slope
from provenance import describe

ALPHAS = (0.25, 0.5, 0.75, 1.0)
CORRELATION = 0.5
NUM_LEVELS, PRIOR_RATE = 40, 3.0
THETA = np.exp(np.linspace(np.log(1e-5), np.log(1e3), 6001))
RATES = {"regression": -1.0, "misspecified": -1.0, "rough": -2 / 3}


def hellinger_of_normals(gap, variance):
    """E H² of N(mean + g, 1) from N(mean, 1), g normal with mean ``gap``."""
    wide = 1 + variance / 4
    return 2 - 2 * np.exp(-(gap**2) / (8 * wide)) / np.sqrt(wide)


def covariates(rng, num_data):
    """Rows of AR(1) normals."""
    z = rng.normal(size=(num_data, len(COEFFICIENTS)))
    for j in range(1, z.shape[1]):
        z[:, j] = CORRELATION * z[:, j - 1] + np.sqrt(1 - CORRELATION**2) * z[:, j]
    return z


def gaussian_posterior(x, y, alpha, family):
    """Mean and covariance: the exact ones, or those of the best independent Gaussian."""
    precision = alpha * x.T @ x + np.eye(x.shape[1])
    cov = np.linalg.inv(precision)
    loc = cov @ (alpha * x.T @ y)
    return loc, cov if family == "exact" else np.diag(1 / np.diag(precision))


def regression_run(rng, num_data, wrong):
    """One data set, all alphas and families."""
    x = covariates(rng, num_data)
    mean = x @ COEFFICIENTS + (0.5 * (x[:, 0] ** 2 - 1) if wrong else 0.0)
    scale = WRONG_SCALE if wrong else 1.0
    y = mean + scale * rng.normal(size=num_data)
    nearest = x @ np.linalg.lstsq(x, mean, rcond=None)[0]
    rows = []
    for alpha in ALPHAS:
        for family in ("exact", "mean field"):
            loc, cov = gaussian_posterior(x, y, alpha, family)
            gap, variance = x @ loc - nearest, np.einsum("ij,jk,ik->i", x, cov, x)
            row = {
                "family": family,
                "alpha": alpha,
                "hellinger": hellinger_of_normals(gap, variance).mean(),
            }
            if not wrong:
                row["limit"] = (1 + 1 / alpha) * len(COEFFICIENTS) / (4 * num_data)
                row["renyi"] = 0.5 * alpha * np.mean(gap**2 + variance)
            if not wrong and alpha < 1:
                # The best Gaussian of the family for the expected log-likelihood.
                m, v = gaussian_posterior(x, mean, alpha, family)
                kl_data = 0.5 * np.sum(
                    (x @ m - mean) ** 2 + np.einsum("ij,jk,ik->i", x, v, x)
                )
                kl_prior = 0.5 * (
                    np.trace(v) + m @ m - len(m) - np.linalg.slogdet(v)[1]
                )
                row["bound"] = (alpha * kl_data + kl_prior) / (num_data * (1 - alpha))
            rows.append(row)
    return rows


def log_rough(x, alpha):
    """Log of the rough half's integral of the tempered likelihood, prior mass 1."""
    logs = []
    for level in range(1, NUM_LEVELS + 1):
        m = 4.0**level
        occupied = len(np.unique(np.floor(x * 2 * m)))
        if occupied > m:
            continue
        i = np.arange(occupied)
        # The share of choices of m cells that have all occupied ones among them.
        share = np.sum(np.log1p(-i / (2 * m - i))) - occupied * np.log(2)
        logs.append(share + alpha * len(x) * np.log(2) - level * np.log(2))
    return np.logaddexp.reduce(logs)


def rough_run(rng, num_data):
    """One data set, all alphas."""
    x = rng.uniform(size=num_data)
    log_density = np.log(THETA) - np.log(-np.expm1(-THETA))
    affinity = np.exp(0.5 * log_density) * -np.expm1(-0.5 * THETA) * 2 / THETA
    # On the grid of log(theta), the density of the inverse gamma times theta.
    log_prior = (
        np.log(PRIOR_RATE)
        - np.log(THETA)
        - PRIOR_RATE / THETA
        + np.log(np.log(THETA[1] / THETA[0]))
    )
    rows = []
    for alpha in ALPHAS:
        logs = alpha * (num_data * log_density - THETA * x.sum()) + log_prior
        smooth, rough = np.logaddexp.reduce(logs), log_rough(x, alpha)
        total = np.logaddexp(smooth, rough)
        inside = np.exp(logs - total) @ (2 - 2 * affinity)
        mass = np.exp(rough - total)
        rows.append(
            {
                "family": "exact",
                "alpha": alpha,
                "hellinger": inside + mass * (2 - np.sqrt(2)),
                "rough": mass,
            }
        )
    return rows


def study(name, sizes, num_seeds):
    """All runs of one study, in long form."""
    rows = []
    for size in sizes:
        for seed in range(num_seeds):
            rng = np.random.default_rng([seed, size, sorted(RATES).index(name)])
            runs = (
                rough_run(rng, size)
                if name == "rough"
                else regression_run(rng, size, name == "misspecified")
            )
            rows += [{"study": name, "n": size, "seed": seed, **run} for run in runs]
        print(f"{name}, n = {size}", flush=True)
    return pd.DataFrame(rows)


def summarise(runs):
    """Means by study, family, alpha and n, and slopes beside the rate of the theory."""
    columns = ["hellinger", "limit", "renyi", "bound", "rough"]
    runs = runs.reindex(columns=["study", "family", "alpha", "n", "seed", *columns])
    groups = runs.groupby(["study", "family", "alpha", "n"], sort=False)
    table = groups[columns].mean()
    table.insert(1, "hellinger_se", groups["hellinger"].sem())
    rows = []
    for (name, family, alpha), part in runs.groupby(
        ["study", "family", "alpha"], sort=False
    ):
        sizes = np.unique(part["n"])
        late = part[part["n"] >= sizes[len(sizes) // 2]]
        # Around the nearest distribution the divergence of BPY is positive below 1/scale² alone.
        covered = {
            "regression": True,
            "misspecified": family == "exact" and alpha < WRONG_SCALE**-2,
            "rough": alpha < 1,
        }
        (value, error), (late_value, late_error) = (
            slope(part, "hellinger"),
            slope(late, "hellinger"),
        )
        last = part[part["n"] == sizes[-1]]
        rows.append(
            {
                "study": name,
                "family": family,
                "alpha": alpha,
                "slope": value,
                "slope_se": error,
                "late_slope": late_value,
                "late_se": late_error,
                "rate": RATES[name] if covered[name] else np.nan,
                "hellinger_at_end": last["hellinger"].mean(),
                "over_limit": (last["hellinger"] / last["limit"]).mean(),
                "bound_over_renyi": (last["bound"] / last["renyi"]).mean(),
                "rough_at_end": last["rough"].mean(),
            }
        )
    return table.reset_index(), pd.DataFrame(rows)


def draw_figure(table, path):
    """One panel for each study, log-log."""
    titles = {
        "regression": "regression, well specified (mean field)",
        "misspecified": "misspecified: from the nearest (mean field)",
        "rough": "a prior with a rough half: alpha = 1 fails",
    }
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        part = table[
            (table["study"] == name)
            & (table["family"] == ("exact" if name == "rough" else "mean field"))
        ]
        for alpha, colour in zip(ALPHAS, ("C0", "C2", "C1", "C3"), strict=True):
            line = part[part["alpha"] == alpha]
            ax.plot(
                line["n"],
                line["hellinger"],
                "o-",
                color=colour,
                markersize=4,
                label=f"alpha = {alpha:g}",
            )
        line = part[part["alpha"] == 0.5]
        n, end = line["n"].to_numpy(float), line["hellinger"].iloc[-1]
        rate = RATES[name]
        label = "slope -2/3" if name == "rough" else "slope -1"
        ax.plot(
            n, 0.5 * end * (n / n[-1]) ** rate, color="0.7", linewidth=1.0, label=label
        )
        ax.set(xscale="log", yscale="log", xlabel="n", title=title)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("expected squared Hellinger distance")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Run the studies, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few seeds, small data")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    exponents = (2, 2.5, 3) if options.small else np.arange(2, 5.01, 0.5)
    sizes = [round(10**exponent) for exponent in exponents]
    num_seeds = 3 if options.small else 50
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    table, slopes = summarise(
        pd.concat([study(name, sizes, num_seeds) for name in RATES], ignore_index=True)
    )
    table.to_csv(options.output / "concentration.csv", index=False, float_format="%.4g")
    slopes.to_csv(
        options.output / "concentration_slopes.csv", index=False, float_format="%.4g"
    )
    (options.output / "concentration.txt").write_text(
        describe(f"n = {sizes}, {num_seeds} seeds each, float64")
    )
    draw_figure(table, options.output / "concentration.png")
    print(slopes.to_string(index=False, float_format="%.4g"))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
