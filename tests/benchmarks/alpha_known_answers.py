"""Alpha where its answer is known: the normal location model with a wrong variance.

The model is N(θ, 1) with a wide prior, the data are N(θ, tau²): the power 1/tau² gives the posterior the spread
of the mean. For each criterion the table has mean and standard deviation of alpha over data sets, the mean of the
standard errors that the criterion itself reports, and the share of 95% intervals of the tempered posterior that
hold θ. SafeBayes (R-log, on powers up to 1, in closed form) stands beside it for contrast: its aim is another.
Writes ``alpha_known_answers.csv`` and ``alpha_known_answers.txt``.

    python tests/benchmarks/alpha_known_answers.py
"""

import argparse
import copy
import math
import sys
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from provenance import describe
from scipy.stats import chi2, norm

from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.bootstrap_fisher import fisher_parts
from numpyro_tempered.select.alpha.data_weights import resamples
from numpyro_tempered.select.alpha.gpc import solve
from numpyro_tempered.select.alpha.gpc_posteriors import laplace_ratios
from numpyro_tempered.select.alpha.lyddon import matched_power
from numpyro_tempered.select.alpha.sandwich import flat_task, sampling_se, sandwich

sys.path.append(str(Path(__file__).resolve().parents[1] / "select" / "alpha"))
from alpha_oracles import safe_bayes_location

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
LEVEL, PRIOR_SD, THETA = 0.95, 10.0, 1.0
GRID = np.geomspace(1 / 64, 1.0, 10)


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def criteria(num_data, num_bootstrap):
    """A function from key and data to alpha and standard error by criterion, compiled once for all data."""
    task = Task(model, jax.random.key(0), (np.zeros(num_data, np.float32),), {})

    def at(y):
        here = copy.copy(task)
        here.args = (y,)
        flat = flat_task(here)
        return flat, sandwich(flat.losses, flat.start)

    @jax.jit
    def once(y, counts):
        flat, found = at(y)
        se = sampling_se(flat.losses, found, lambda _, j, i: matched_power(j, i))
        alpha = matched_power(found.curvature, found.variance)
        return (
            found.minimum.converged,
            alpha,
            se,
            fisher_parts(flat, found.minimum.point, counts),
        )

    @jax.jit
    def ratios(y, counts, alpha):
        flat, found = at(y)
        return laplace_ratios(
            flat, None, found.minimum.point, counts, chi2.ppf(LEVEL, 1), alpha
        )

    def choose(key, y):
        counts = resamples(key, num_bootstrap, num_data)
        found, lyddon, sampling, parts = jax.device_get(once(y, counts))
        if not (found and np.all(parts.converged)):
            raise RuntimeError("no minimiser: the study has no such data")
        fisher = parts.numerator.sum() / parts.denominator.sum()
        resampling = (
            np.linalg.norm(parts.numerator - fisher * parts.denominator)
            / parts.denominator.sum()
        )
        gpc, root_se, _ = solve(
            lambda alpha: np.asarray(ratios(y, counts, alpha)[0], np.float64),
            LEVEL,
            float(lyddon),
            (0.0, math.inf),
        )
        relative = sampling / lyddon
        losses = safe_bayes_location(y.astype(np.float64), 1.0, PRIOR_SD, GRID).sum(
            axis=0
        )
        return {
            "lyddon": (lyddon, sampling),
            "bootstrap Fisher": (fisher, math.hypot(relative * fisher, resampling)),
            "GPC (Laplace)": (gpc, math.hypot(relative * gpc, root_se)),
            "SafeBayes R-log": (GRID[np.argmin(losses)], np.nan),
            "alpha = 1": (1.0, np.nan),
        }

    return choose


def covers(y, alpha):
    """Whether the interval of the tempered posterior holds θ."""
    precision = PRIOR_SD**-2 + alpha * len(y)
    return abs(alpha * y.sum() / precision - THETA) <= norm.ppf(
        0.5 + 0.5 * LEVEL
    ) / math.sqrt(precision)


def study(variances, num_data, num_seeds, num_bootstrap):
    """One row for each variance and criterion."""
    choose = criteria(num_data, num_bootstrap)
    rows = []
    for tau2 in variances:
        chosen = []
        for seed in range(num_seeds):
            rng = np.random.default_rng([seed, int(100 * tau2)])
            y = rng.normal(THETA, math.sqrt(tau2), num_data).astype(np.float32)
            found = choose(jax.random.key(seed), y)
            chosen += [
                (name, alpha, se, covers(y, alpha))
                for name, (alpha, se) in found.items()
            ]
        table = pd.DataFrame(chosen, columns=["criterion", "alpha", "se", "covered"])
        for name, part in table.groupby("criterion", sort=False):
            rows.append(
                {
                    "tau2": tau2,
                    "criterion": name,
                    "right": 1.0 / tau2,
                    "mean": part["alpha"].mean(),
                    "sd": part["alpha"].std(),
                    "reported_se": part["se"].mean(),
                    "coverage": part["covered"].mean(),
                    "coverage_se": math.sqrt(LEVEL * (1.0 - LEVEL) / num_seeds),
                }
            )
        print(f"tau² = {tau2:g} done", flush=True)
    return pd.DataFrame(rows)


def main():
    """Run the study, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="five seeds, fewer data and resamples"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the table; docs/results, none in small mode",
    )
    options = parser.parse_args()
    output = options.output or (None if options.small else DOCS)
    num_seeds, num_bootstrap, num_data = (
        (5, 100, 50) if options.small else (200, 500, 100)
    )
    start = time.perf_counter()
    table = study((0.25, 1.0, 4.0), num_data, num_seeds, num_bootstrap)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        table.round(4).to_csv(output / "alpha_known_answers.csv", index=False)
        (output / "alpha_known_answers.txt").write_text(
            describe(
                f"n = {num_data}, {num_seeds} seeds, {num_bootstrap} resamples, prior sd {PRIOR_SD:g}; float32"
            )
        )
    print(f"{time.perf_counter() - start:.0f} s")
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
