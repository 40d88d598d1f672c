"""Three unit Gaussians, estimated by tempered variational Bayes at two alphas and by EM.

n = 1000 rows of sum_j p_j N(theta_j, 1), theta_j ~ N(0, 10²) a priori, weights Dirichlet(1). The estimates are
the posterior means, and those of maximum likelihood; components are put in the order of their means, which is the
truth's. MAE of each is the mean over replications of the absolute error (for p of the three errors' mean), with
the standard deviation of it over replications. The designs are identifiable; those of the published table are
not printed, see the page that shows the result.
Writes ``mixture_2019.csv``.

    python tests/benchmarks/mixture_2019.py
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
COMPONENT = nt.mixtures.components.known_variance(1, prior_scale=10.0)
DESIGNS = {
    "far, equal": ((1 / 3, 1 / 3, 1 / 3), (-4.0, 0.0, 4.0)),
    "near, equal": ((1 / 3, 1 / 3, 1 / 3), (-2.0, 0.0, 2.0)),
    "far, unequal": ((0.2, 0.3, 0.5), (-4.0, 0.0, 4.0)),
}
RESTARTS = 8


def estimates(key, x):
    """Weights and means by method, in the order of the means."""
    found = {}
    for alpha in (0.5, 1.0):
        fit = nt.mixtures.fit(
            key,
            x,
            COMPONENT,
            num_components=3,
            alpha=alpha,
            num_restarts=RESTARTS,
            num_draws=0,
            max_iter=5000,
        )
        a = np.asarray(fit.factors.concentration)
        found[f"VB, alpha = {alpha:g}"] = (
            a / a.sum(),
            np.asarray(fit.posterior.loc)[:, 0],
        )
    fit = nt.mixtures.em(
        key, x, COMPONENT, num_components=3, num_restarts=RESTARTS, max_iter=5000
    )
    found["EM"] = np.asarray(fit.weights), np.asarray(fit.parameters["loc"])[:, 0]
    return {name: (p[np.argsort(m)], np.sort(m)) for name, (p, m) in found.items()}


def errors(weights, means, num_data, replications):
    """Absolute errors, one row for each replication and method."""
    rows = []
    for seed in range(replications):
        rng = np.random.default_rng([seed, 2019])
        labels = rng.choice(3, num_data, p=weights)
        x = (np.asarray(means)[labels] + rng.normal(size=num_data))[:, None]
        for method, (p, m) in estimates(jax.random.key(seed), x).items():
            rows.append(
                (
                    seed,
                    method,
                    np.abs(p - weights).mean(),
                    *np.abs(m - np.asarray(means)),
                )
            )
    return pd.DataFrame(
        rows, columns=["seed", "method", "p", "theta 1", "theta 2", "theta 3"]
    )


def main():
    """Run the designs, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="three replications of 200 rows"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    num_data, counts = (200, (3,)) if options.small else (1000, (10, 500))
    start, tables = time.perf_counter(), []
    for design, (weights, means) in DESIGNS.items():
        long = errors(weights, means, num_data, max(counts))
        for count in counts:
            grouped = (
                long[long["seed"] < count]
                .drop(columns="seed")
                .groupby("method", sort=False)
            )
            mean, deviation = grouped.mean(), grouped.std(ddof=1)
            table = (
                mean.map("{:.3f}".format) + " (" + deviation.map("{:.3f}".format) + ")"
            )
            tables.append(table.reset_index().assign(design=design, replications=count))
        print(f"{design}: {time.perf_counter() - start:.0f} s", flush=True)
    table = pd.concat(tables)[
        ["design", "replications", "method", "p", "theta 1", "theta 2", "theta 3"]
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "mixture_2019.csv", index=False)
    designs = "; ".join(
        f"{k}: p = {np.round(p, 3).tolist()}, theta = {list(m)}"
        for k, (p, m) in DESIGNS.items()
    )
    (options.output / "mixture_2019.txt").write_text(
        describe(
            f"n = {num_data}, {list(counts)} replications, {RESTARTS} restarts; {designs}; float32"
        )
    )
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
