"""Each way to choose alpha, on a problem where the model is wrong and on one where it is right.

Model: y ~ N(x'θ, 1) with ten coefficients θ ~ N(0, .1 I), n = 100. Every data set has covariates x ~ N(0, I) and
true coefficients of its own.
Wrong: noise of variance 1 + 3 x_1², 4 on average. Right: noise of variance 1, and true coefficients from the
prior. Wide prior: the same noise, but the true coefficients have a quarter of the prior's variance.
Posteriors, criteria, risks and intervals are in closed form. The risk is the excess square risk |θ - θ*|²,
of the posterior mean, and averaged over draws from the posterior. Intervals are the central 95% ones of each
coefficient.
The first data set of the wrong and of the right problem also goes through ``select_alpha``.
Location: n = 100 data N(1, 4) under the model N(θ, 1), θ ~ N(0, 100): what the evidence, leave-one-out and
held-out scores choose where 1/4 is right.

    python tests/benchmarks/alpha_decision.py
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from alpha_decision_figures import draw_outcomes, draw_paths
from alpha_decision_linear import (
    LEVEL,
    by_curvature,
    held_out,
    log_evidence,
    loo,
    posterior,
    safe_bayes_losses,
)
from numpyro.infer.autoguide import AutoMultivariateNormal
from provenance import describe
from scipy.stats import norm

import numpyro_tempered as nt
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.safe_bayes import judge

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
DIM, NUM_DATA, PRIOR_VAR, COARSE = 10, 100, 0.1, 50.0
POWERS = 2.0 ** (np.arange(-24, 9) / 4)
TRIED = POWERS[POWERS <= 1.0]
FINE = np.geomspace(1e-4, 1.0, 161)
PROBLEMS = ("wrong", "right", "wide prior")
# The same covariates, coefficients and noise in all problems, up to scales.
NOISE = {"wrong": lambda x: 1.0 + 3.0 * x[:, 0] ** 2}
TRUTH = {"wide prior": 0.5}
PLUGIN = 'safe_bayes, "plugin"'


def draw(problem, seed, num_data=NUM_DATA):
    """Covariates, outcomes and true coefficients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_data, DIM))
    truth = TRUTH.get(problem, 1.0) * np.sqrt(PRIOR_VAR) * rng.normal(size=DIM)
    scale = np.sqrt(NOISE[problem](x)) if problem in NOISE else 1.0
    return x, x @ truth + scale * rng.normal(size=num_data), truth


def choose(x, y, prior_var, seed, alphas, num_bootstrap):
    """The alpha of each method."""
    rng = np.random.default_rng([seed, 1])
    counts = rng.multinomial(
        len(y), np.full(len(y), 1.0 / len(y)), size=num_bootstrap
    ).astype(float)
    losses = safe_bayes_losses(x, y, prior_var, alphas)
    return {
        "alpha = 1": 1.0,
        "safe_bayes": judge(losses, "gibbs", "one_se", alphas).alpha,
        'safe_bayes, "min"': judge(losses, "gibbs", "min", alphas).alpha,
        PLUGIN: judge(losses, "plugin", "one_se", alphas).alpha,
        'safe_bayes, "plugin", "min"': judge(losses, "plugin", "min", alphas).alpha,
        **by_curvature(x, y, prior_var, counts),
        "coarsening(50)": 1.0 / (1.0 + len(y) / COARSE),
        "theory_default": 0.5,
        "not to be used: loo": alphas[np.argmax(loo(x, y, prior_var, alphas))],
        "not to be used: held_out": alphas[
            np.argmax(held_out(x, y, prior_var, alphas))
        ],
        "not to be used: evidence": alphas[
            np.argmax(log_evidence(x, y, prior_var, alphas))
        ],
    }


# Consequences.


def outcomes(x, y, truth, alphas):
    """Excess risk of the mean and of draws, coverage of the first coefficient and of the others, ``(A, 4)``."""
    mean, covariance = posterior(x, y, PRIOR_VAR, alphas)
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    risk = np.sum((mean - truth) ** 2, axis=1)
    covered = np.abs(mean - truth) <= norm.ppf(0.5 + 0.5 * LEVEL) * np.sqrt(variance)
    # A method that has refused has no outcome.
    risk, covered = risk + 0.0 * alphas, covered + 0.0 * alphas[:, None]
    return np.column_stack(
        [risk, risk + variance.sum(axis=1), covered[:, 0], covered[:, 1:].mean(axis=1)]
    )


OUTCOMES = ("risk_mean", "risk_draws", "coverage_first", "coverage_others")
TITLES = (
    "risk of the mean",
    "risk of draws",
    "coverage, coefficient 1",
    "coverage, coefficients 2 to 10",
)


def simulate(problem, num_seeds, num_bootstrap):
    """Outcomes along alpha, and for each method's alpha, with standard errors over data sets."""
    along, chosen = [], []
    for seed in range(num_seeds):
        x, y, truth = draw(problem, seed)
        along.append(outcomes(x, y, truth, POWERS))
        alphas = choose(x, y, PRIOR_VAR, seed, TRIED, num_bootstrap)
        found = outcomes(x, y, truth, np.array(list(alphas.values())))
        chosen += [
            (name, alpha, *row)
            for (name, alpha), row in zip(alphas.items(), found, strict=True)
        ]
    root = np.sqrt(num_seeds)
    mean, se = np.mean(along, axis=0), np.std(along, axis=0, ddof=1) / root
    curves = pd.DataFrame({"problem": problem, "alpha": POWERS})
    for k, name in enumerate(OUTCOMES):
        curves[name], curves[f"{name}_se"] = mean[:, k], se[:, k]
    rows = []
    for name, part in pd.DataFrame(
        chosen, columns=["method", "alpha", *OUTCOMES]
    ).groupby("method", sort=False):
        logs = np.log(part["alpha"].dropna())
        row = {
            "problem": problem,
            "method": name,
            "refused": part["alpha"].isna().mean(),
        }
        row |= {"alpha": np.exp(logs.mean()), "alpha_low": np.exp(logs.quantile(0.1))}
        row |= {"alpha_high": np.exp(logs.quantile(0.9))}
        for each in OUTCOMES:
            row |= {each: part[each].mean(), f"{each}_se": part[each].sem()}
        rows.append(row)
    return curves, pd.DataFrame(rows)


def best_alphas(curves):
    """The alpha of least risk and those at which the coverage is right, by problem."""
    rows = []
    for problem, part in curves.groupby("problem", sort=False):
        row = {"problem": problem}
        for name in OUTCOMES[:2]:
            row[name] = part["alpha"].iloc[part[name].argmin()]
        for name in OUTCOMES[2:]:
            # From above: with next to no data the intervals are the prior's.
            last = np.flatnonzero(part[name] >= LEVEL)[-1]
            logs, level = (
                np.log(part["alpha"].values[last : last + 2]),
                part[name].values[last : last + 2],
            )
            row[name] = np.exp(np.interp(-LEVEL, -level, logs))
        rows.append(row)
    return pd.DataFrame(rows)


def sizes(numbers, num_seeds, num_bootstrap):
    """The criteria of coverage against the number of data, on right data, where alpha = 1 is right."""
    rows = []
    for num_data in numbers:
        found = []
        for seed in range(num_seeds):
            x, y, _ = draw("right", seed, num_data)
            counts = np.random.default_rng([seed, 1]).multinomial(
                num_data, np.full(num_data, 1.0 / num_data), size=num_bootstrap
            )
            found.append(by_curvature(x, y, PRIOR_VAR, counts.astype(float)))
        table = pd.DataFrame(found)
        row = {"n": num_data, "n/d": num_data / DIM}
        for name in ("lyddon", "bootstrap_fisher", "gpc"):
            row[name] = f"{table[name].mean():.2f} ± {table[name].sem():.2f}"
        rows.append(row)
    return pd.DataFrame(rows)


def location(num_seeds, num_bootstrap):
    """Every alpha for the normal location model with a variance four times too small."""
    rows = []
    for seed in range(num_seeds):
        y = np.random.default_rng([seed, 2]).normal(1.0, 2.0, NUM_DATA)
        x = np.ones((NUM_DATA, 1))
        found = choose(x, y, 100.0, seed, FINE, num_bootstrap)
        # The same data in hundredths of the unit: every density is a hundredth of what it was.
        finer = log_evidence(x, y, 100.0, FINE) + FINE * NUM_DATA * np.log(100.0)
        found["not to be used: evidence, y / 100"] = FINE[np.argmax(finer)]
        rows += [
            (name, alpha)
            for name, alpha in found.items()
            if name not in ("alpha = 1", "gpc, first coefficient")
        ]
    table = pd.DataFrame(rows, columns=["method", "alpha"]).groupby(
        "method", sort=False
    )["alpha"]
    return (
        table.quantile([0.1, 0.5, 0.9])
        .unstack()
        .set_axis(["low", "median", "high"], axis=1)
        .reset_index()
    )


def model(x, y):
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, np.sqrt(PRIOR_VAR)).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(x @ theta, 1.0), obs=y)


def by_library(problem, num_bootstrap, small):
    """``select_alpha`` on the first data set: the path of alphas, and each method's alpha."""
    x, y, _ = draw(problem, 0)
    closed = choose(x, y, PRIOR_VAR, 0, np.geomspace(1 / 64, 1.0, 10), num_bootstrap)
    blocks = 2 if small else 8
    data = x.astype(np.float32), y.astype(np.float32)
    choice = nt.select_alpha(
        jax.random.key(0),
        model,
        AutoMultivariateNormal,
        *data,
        alphas=[0.25, 1.0] if small else None,
        criterion=nt.alpha.safe_bayes(permutations=0, blocks=blocks),
        diagnostics=[nt.alpha.loo()],
    )
    path = nt.table(choice.data).reset_index()
    alphas = path["alpha"].values
    losses = safe_bayes_losses(x, y, PRIOR_VAR, alphas, blocks)
    path["gibbs_exact"], path["plugin_exact"] = (
        losses[name].sum(axis=1) for name in ("gibbs", "plugin")
    )
    path["plugin_se"] = judge(losses, "plugin", "min", alphas).columns["criterion_se"]
    path["elpd_loo_exact"] = loo(x, y, PRIOR_VAR, alphas)
    within = [
        path.loc[path[n] <= path[n].min() + path[f"{c}_se"], "alpha"]
        for n, c in (("gibbs", "criterion"), ("plugin", "plugin"))
    ]
    rows = [
        (
            "safe_bayes",
            "risk of draws",
            choice.alpha,
            within[0].min(),
            within[0].max(),
            closed["safe_bayes"],
        ),
        (
            PLUGIN,
            "risk of the mean",
            within[1].max(),
            within[1].min(),
            within[1].max(),
            closed[PLUGIN],
        ),
    ]
    task = Task(model, jax.random.key(1), data, {})
    criteria = (
        ("lyddon", nt.alpha.lyddon()),
        ("bootstrap_fisher", nt.alpha.bootstrap_fisher(num_bootstrap=num_bootstrap)),
        ("gpc", nt.alpha.gpc(LEVEL, num_bootstrap=num_bootstrap)),
        (
            "gpc, first coefficient",
            nt.alpha.gpc(
                LEVEL, of=lambda v: v["theta"][0], num_bootstrap=num_bootstrap
            ),
        ),
    )
    for name, criterion in criteria[:1] if small else criteria:
        try:
            found = criterion.decide(jax.random.key(2), task, TRIED, None)
            alpha, se = found.alpha, found.attrs["alpha_se"]
        except ValueError as error:
            print(f"{problem}, {name}: {error}")
            alpha, se = np.nan, np.nan
        rows.append((name, "coverage", alpha, alpha - se, alpha + se, closed[name]))
    for name, aim, alpha in (
        ("coarsening(50)", "robustness", 1 / 3),
        ("theory_default", "theory", 0.5),
    ):
        rows.append((name, aim, alpha, alpha, alpha, alpha))
    best = alphas[path["elpd_loo"].argmax()]
    rows.append(
        ("not to be used: loo", "none", best, best, best, closed["not to be used: loo"])
    )
    shown = pd.DataFrame(
        rows, columns=["method", "aim", "alpha", "low", "high", "closed_form"]
    )
    return path.assign(problem=problem), shown.assign(problem=problem)


# Tables for the page, and figures.


def plus_minus(table, name):
    """Numbers with standard errors, as text."""
    return [
        f"{v:.3f} ± {e:.3f}"
        for v, e in zip(table[name], table[f"{name}_se"], strict=True)
    ]


def powers(values):
    """Alphas with two digits or four decimals; those that do not exist are refusals."""
    return [
        "refused" if np.isnan(v) else f"{v:.2f}" if v >= 0.01 else f"{v:.4f}"
        for v in values
    ]


def methods_table(part):
    """What each method does to risk and coverage."""
    table = pd.DataFrame({"method": part["method"]})
    spread = [powers(part[name]) for name in ("alpha", "alpha_low", "alpha_high")]
    table["alpha (10% to 90%)"] = [
        f"{a} ({b} to {c})" for a, b, c in zip(*spread, strict=True)
    ]
    for name, title in zip(OUTCOMES, TITLES, strict=True):
        table[title] = plus_minus(part, name)
    table["refused"] = [f"{share:.0%}" for share in part["refused"]]
    return table


def shown_table(shown):
    """Each method on the two data sets that the first figure shows, library and closed form."""
    table = shown[["method", "aim"]].drop_duplicates()
    for problem, part in shown.groupby("problem", sort=False):
        ends = zip(
            *(powers(part[name]) for name in ("alpha", "low", "high")), strict=True
        )
        table[problem] = [a if b == c else f"{a} ({b} to {c})" for a, b, c in ends]
        table[f"{problem}, closed form"] = powers(part["closed_form"])
    return table


def main():
    """Run all, write tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few data sets, short fits"
    )
    parser.add_argument(
        "--output", type=Path, help="folder; docs/results, none in small mode"
    )
    options = parser.parse_args()
    small = options.small
    output = options.output or (None if small else DOCS)
    num_seeds, num_few, num_bootstrap = (4, 2, 60) if small else (1000, 200, 200)
    numbers = (60, 100) if small else (60, 100, 200, 500, 1000)
    start = time.perf_counter()

    def write(table, name):
        print(
            f"{name}, {time.perf_counter() - start:.0f} s\n{table.to_string(index=False)}",
            flush=True,
        )
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            table.to_csv(output / f"alpha_decision_{name}.csv", index=False)

    curves = []
    for problem in PROBLEMS:
        along, chosen = simulate(problem, num_seeds, num_bootstrap)
        curves.append(along)
        write(methods_table(chosen), problem.replace(" ", "_"))
    curves = pd.concat(curves)
    write(curves.round(4), "curves")
    best = best_alphas(curves)
    write(
        best.round(3).rename(columns=dict(zip(OUTCOMES, TITLES, strict=True))), "best"
    )
    write(sizes(numbers, num_few, num_bootstrap), "sizes")
    table = location(num_few, num_bootstrap)
    write(
        table.assign(
            **{name: powers(table[name]) for name in ("low", "median", "high")}
        ),
        "location",
    )
    found = [
        by_library(problem, 2 * num_bootstrap, small)
        for problem in PROBLEMS[1 if small else 0 : 2]
    ]
    path, shown = (pd.concat(parts) for parts in zip(*found, strict=True))
    write(path.round(3), "path")
    write(shown_table(shown), "shown")
    if output is not None:
        draw_paths(path, shown, best, output / "alpha_decision.png")
        draw_outcomes(
            curves,
            best,
            dict(zip(OUTCOMES, TITLES, strict=True)),
            LEVEL,
            output / "alpha_decision_outcomes.png",
        )
        (output / "alpha_decision.txt").write_text(
            describe(
                f"n = {NUM_DATA}, d = {DIM}; {num_seeds} data sets a problem, {num_few} for sizes and location; "
                f"{num_bootstrap} resamples; float64, select_alpha in float32"
            )
        )
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
