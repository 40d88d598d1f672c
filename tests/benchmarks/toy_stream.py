"""A toy stream after CA19, section 5.1: regret of the online rules on the hinge loss.

Here two Gaussian clouds with equal weights, x | y ~ N(y (1, 1), 2 I), y in {-1, 1}; those of the paper, with
weights 2/3 and 1/3 and unequal covariances, are in ``figure_1.py``. T = 10^4 rounds, prior N(0, I). The best
parameter in hindsight is over |theta_j| <= 20.
Writes ``toy_stream.csv`` and ``toy_stream.png``.

    python tests/benchmarks/toy_stream.py
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scipy.sparse as sparse
from provenance import describe
from scipy.optimize import linprog

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"


def stream(seed, num_rounds):
    """Features (T, 2) and labels (T,)."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1.0, 1.0], num_rounds)
    x = np.sqrt(2.0) * rng.normal(size=(num_rounds, 2)) + y[:, None]
    return x, y


def best_in_hindsight(x, y, bound=20.0):
    """The least average hinge loss of a fixed parameter in the box, by linear programming."""
    n, d = x.shape
    solution = linprog(
        np.r_[np.zeros(d), np.full(n, 1.0 / n)],
        A_ub=sparse.hstack([sparse.csr_matrix(-y[:, None] * x), -sparse.eye(n)]),
        b_ub=-np.ones(n),
        bounds=[(-bound, bound)] * d + [(0.0, None)] * n,
        method="highs",
    )
    return solution.fun


def rules(num_rounds):
    """The rules with their step sizes."""
    return {
        "OGA, 1/√t": nt.online.oga(lambda t: 1.0 / jnp.sqrt(t)),
        "OGA, 0.3/√t": nt.online.oga(lambda t: 0.3 / jnp.sqrt(t)),
        "OGA-EL, 1/√t": nt.online.oga_el(lambda t: 1.0 / jnp.sqrt(t)),
        "SVA, 1/√T": nt.online.sva(1.0 / np.sqrt(num_rounds)),
        "SVB, 1/(√t σ²)": nt.online.svb(nt.online.svb_rate(1.0)),
        "NGVI": nt.online.ngvi(),
        "NGVI, Fisher": nt.online.ngvi(curvature="fisher"),
        "NGVI, evidence = 1": nt.online.ngvi(evidence=1.0),
        "NGVI, evidence = 1, Fisher": nt.online.ngvi(evidence=1.0, curvature="fisher"),
    }


def main():
    """Run the seeds, write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="2 seeds of 1000 rounds")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for table and figure"
    )
    options = parser.parse_args()
    num_seeds, num_rounds = (2, 1000) if options.small else (20, 10_000)
    prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
    best = np.empty(num_seeds)
    losses = {name: np.empty((num_seeds, num_rounds)) for name in rules(num_rounds)}
    for name, rule in rules(num_rounds).items():
        for seed in range(num_seeds):
            x, y = stream(seed, num_rounds)
            state = rule.init(prior)
            _, loss = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
            losses[name][seed] = loss.at_mean
    for seed in range(num_seeds):
        best[seed] = best_in_hindsight(*stream(seed, num_rounds))
    rows = {"best in hindsight": (best, np.zeros(num_seeds))}
    rows |= {
        name: (value.mean(1), value.mean(1) - best) for name, value in losses.items()
    }
    table = pd.DataFrame(
        [
            (
                name,
                average.mean(),
                average.std(ddof=1) / np.sqrt(num_seeds),
                regret.mean(),
                regret.std(ddof=1) / np.sqrt(num_seeds),
            )
            for name, (average, regret) in rows.items()
        ],
        columns=["rule", "average loss", "s.e.", "average regret", "s.e. of regret"],
    ).round(4)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "toy_stream.csv", index=False)
    (options.output / "toy_stream.txt").write_text(
        describe(f"{num_seeds} seeds (0 to {num_seeds - 1}), T = {num_rounds}, float32")
    )
    print(table.to_string(index=False))
    shown = ["OGA, 1/√t", "SVA, 1/√T", "SVB, 1/(√t σ²)", "NGVI", "NGVI, evidence = 1"]
    ax = nt.plots.plot_regret(
        {name: losses[name].mean(0) for name in shown}, hindsight=best.mean()
    )
    ax.set(
        ylim=(0.35, 1.0), title=f"Toy stream, mean over {num_seeds} seeds, hinge loss"
    )
    ax.figure.savefig(options.output / "toy_stream.png", dpi=150)
    plt.close(ax.figure)


if __name__ == "__main__":
    main()
