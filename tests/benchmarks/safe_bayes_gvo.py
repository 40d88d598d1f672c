"""The experiment of GvO: Bayesian regression under a wrong model, and SafeBayes.

Linear regression on 50 covariates of which four count, n in {50, 100, 200, 400}; on wrong data half of the rows
are (0, 0) and the others twice as noisy, on correct data all is as the model has it (``safe_bayes_oracles``).
Averages over the nested models p = 0 ... 50, and the ridge regression p = 50, all in closed form:

* ``choices``: excess risk, expected size and the chosen alpha of Bayes, of SafeBayes (R-log and I-log, n refits,
  the minimum and the one-SE rule), of leave-one-out, of the evidence, of prequential prediction, and of who knows
  the risks.
* ``curves``: risk and criteria along alpha. ``compression``: cumulative losses less those of the best parameters.
* ``blocks``: eight refits instead of n, by spacing, against n refits.
* ``generic``: ``nt.select_alpha`` of the same ridge regression as a NumPyro model, against the closed form.

Each part writes its table, ``safe_bayes_<part>.csv``; ``examples/safe_bayes.py`` draws them.

    python tests/benchmarks/safe_bayes_gvo.py
"""

import argparse
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

# Small matrices: threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer.autoguide import AutoMultivariateNormal
from provenance import describe
from scipy.special import logsumexp

import numpyro_tempered as nt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "select" / "alpha"))

import safe_bayes_oracles as gvo  # noqa: E402

ALPHAS = 2.0 ** -(np.arange(21) / 2)
SIZES = (50, 100, 200, 400)
MODELS = ("average", "ridge")
DATA = ("wrong", "correct")
RULES = {"min": "minimum", "one_se": "one-SE"}
NUM_BLOCKS = 8
LOG_UNITS = np.log(100)


def data_of(seed, data, num_data):
    """The first rows of the data set of a seed: smaller sets are parts of larger ones."""
    x, y = gvo.draw(
        np.random.default_rng([seed, DATA.index(data)]), max(SIZES), data == "wrong"
    )
    return x[:num_data], y[:num_data]


def mean_and_se(table, by, columns):
    """Mean and standard error over seeds."""
    grouped = table.groupby(by, sort=False)[columns]
    return grouped.mean().join(grouped.sem().add_suffix("_se")).reset_index()


# Choices, curves and cumulative losses: n refits.


def along_alpha(x, y, each, wrong):
    """Risk, size and criteria at each alpha, of the average and of the ridge regression.

    ``each`` are the prequential losses of these rows.
    """
    fits = [gvo.of_data(x, y, alpha) for alpha in ALPHAS]
    loo = np.array([gvo.leave_one_out(x, y, alpha).sum(-1) for alpha in ALPHAS])
    tables = []
    for m, models in enumerate(MODELS):
        averaged = models == "average"
        finite = np.isfinite(each[:, m]).all(
            1
        )  # I-log has no mean of s2 before the first datum
        tables.append(
            pd.DataFrame(
                {
                    "models": models,
                    "alpha": ALPHAS,
                    "risk": [
                        gvo.excess_risk(gvo.coefficients(q, averaged), wrong)
                        for q in fits
                    ],
                    "size": [
                        gvo.expected_size(q) if averaged else gvo.NUM_COVARIATES
                        for q in fits
                    ],
                    "loo": -loo[:, m],
                    "evidence": [
                        -(
                            logsumexp(q.log_evidence) - np.log(q.log_evidence.size)
                            if averaged
                            else q.log_evidence[-1]
                        )
                        for q in fits
                    ],
                }
                | {
                    name: each[k, m][:, finite[k]].sum(-1)
                    for k, name in enumerate(gvo.LOSSES)
                    if name != "plugin_log"
                }
            )
        )
    return tables


def choices_of(table, each, m):
    """The alpha of every method."""
    chosen = {"Bayes": 1.0}
    for name, label in (("gibbs", "R-log"), ("plugin", "I-log")):
        for rule, words in RULES.items():
            chosen[f"SafeBayes {label} ({words})"] = gvo.choose(
                ALPHAS, each[gvo.LOSSES.index(name), m], rule
            )
    for column, label in (
        ("loo", "leave-one-out"),
        ("evidence", "evidence"),
        ("predictive", "prequential prediction"),
        ("risk", "best in hindsight"),
    ):
        chosen[label] = ALPHAS[int(np.argmin(table[column]))]
    # With y and its prior in units a hundred times smaller each density is divided by 100.
    chosen["evidence of 100 y"] = ALPHAS[
        int(np.argmin(table["evidence"] + ALPHAS * each.shape[-1] * LOG_UNITS))
    ]
    return chosen


def compression_of(x, y, each):
    """Cumulative losses of the average over models, less those of the best parameters of the model."""
    best = 0.5 * (gvo.LOG_2PI + np.log(gvo.NOISE) + (y - x @ gvo.COEF) ** 2 / gvo.NOISE)
    one, quarter = 0, int(np.argmin(np.abs(ALPHAS - 0.25)))
    gibbs, predictive = (
        each[gvo.LOSSES.index(name), 0] for name in ("gibbs", "predictive")
    )
    return pd.DataFrame(
        {
            "n": np.arange(1, len(y) + 1),
            "predictive": np.cumsum(predictive[one] - best),
            "gibbs": np.cumsum(gibbs[one] - best),
            "gibbs, alpha 1/4": np.cumsum(gibbs[quarter] - best),
        }
    )


def closed_form(num_seeds, sizes):
    """Tables ``choices``, ``curves`` and ``compression`` in long form, one row for each seed."""
    choices, curves, compression = [], [], []
    for data in DATA:
        for seed in range(num_seeds):
            x, y = data_of(seed, data, max(sizes))
            each = gvo.prequential(x, y, ALPHAS)
            compression.append(compression_of(x, y, each).assign(data=data, seed=seed))
            for n in sizes:
                tables = along_alpha(x[:n], y[:n], each[..., :n], data == "wrong")
                for m, table in enumerate(tables):
                    curves.append(table.assign(data=data, n=n, seed=seed))
                    at = table.set_index("alpha")[["models", "risk", "size"]]
                    chosen = choices_of(table, each[..., :n], m)
                    choices += [
                        {
                            "data": data,
                            "n": n,
                            "seed": seed,
                            "method": method,
                            "alpha": a,
                        }
                        | at.loc[a].to_dict()
                        for method, a in chosen.items()
                    ]
        print(f"{data}: {num_seeds} seeds", flush=True)
    return pd.DataFrame(choices), pd.concat(curves), pd.concat(compression)


def summary_of_choices(long):
    """Means over seeds, and the paired ratio to the risk of Bayes."""
    long = long.assign(
        at_one=(long["alpha"] == 1.0).astype(float), log2_alpha=np.log2(long["alpha"])
    )
    cells = ["data", "models", "n"]
    bayes = (
        long[long["method"] == "Bayes"]
        .set_index([*cells, "seed"])["risk"]
        .rename("bayes")
    )
    joined = long.join(bayes, on=[*cells, "seed"])
    found = mean_and_se(
        long, [*cells, "method"], ["risk", "size", "log2_alpha", "at_one"]
    )
    grouped = joined.groupby([*cells, "method"], sort=False)

    def ratio(part):
        """Ratio of means, with the standard error of the linearised ratio."""
        value = part["risk"].mean() / part["bayes"].mean()
        residual = (part["risk"] - value * part["bayes"]) / part["bayes"].mean()
        return pd.Series({"ratio": value, "ratio_se": residual.sem()})

    return found.join(grouped[["risk", "bayes"]].apply(ratio), on=[*cells, "method"])


# Eight refits.


def spacings(num_data, num_blocks=NUM_BLOCKS):
    """Edges of the blocks, 0 and n among them: equal, geometric and quadratic."""
    k = np.arange(num_blocks + 1)
    share = k / num_blocks
    # No block is empty.
    return {
        "equal": num_data * k // num_blocks,
        "geometric": np.maximum(
            np.round(np.where(k > 0, num_data**share, 0.0)).astype(int), k
        ),
        "quadratic": np.maximum(np.round(num_data * share**2).astype(int), k),
    }


def blocks(num_seeds, sizes):
    """Choices by blocks beside those of n refits; with and without the first block, which the prior predicts."""
    rows = []
    for data in DATA:
        for seed in range(num_seeds):
            x, y = data_of(seed, data, max(sizes))
            full = gvo.prequential(x, y, ALPHAS)
            for n in sizes:
                fits = {alpha: gvo.of_data(x[:n], y[:n], alpha) for alpha in ALPHAS}
                for spacing, edges in spacings(n).items():
                    each = gvo.prequential(x[:n], y[:n], ALPHAS, edges)
                    for name in ("gibbs", "plugin"):
                        for m, models in enumerate(MODELS):
                            k = gvo.LOSSES.index(name)
                            for rule in RULES:
                                reference = gvo.choose(ALPHAS, full[k, m, :, :n], rule)
                                chosen = gvo.choose(ALPHAS, each[k, m], rule)
                                skipping = gvo.choose(
                                    ALPHAS, each[k, m, :, edges[1] :], rule
                                )
                                risk, risk_full = (
                                    gvo.excess_risk(
                                        gvo.coefficients(fits[a], models == "average"),
                                        data == "wrong",
                                    )
                                    for a in (chosen, reference)
                                )
                                steps = np.log2(chosen / reference)
                                cell = (data, models, n, seed, name, rule, spacing)
                                distance = (abs(steps) <= 0.5, steps, abs(steps))
                                rows.append(
                                    (
                                        *cell,
                                        *distance,
                                        risk,
                                        risk_full,
                                        skipping == chosen,
                                    )
                                )
        print(f"blocks, {data}: {num_seeds} seeds", flush=True)
    columns = ["data", "models", "n", "seed", "loss", "rule", "spacing"]
    columns += [
        "within_a_step",
        "log2_ratio",
        "log2_distance",
        "risk",
        "risk_n_refits",
        "same_without_first",
    ]
    return pd.DataFrame(rows, columns=columns).astype(
        {"within_a_step": float, "same_without_first": float}
    )


def summary_of_blocks(long):
    """Over seeds, sizes and data."""
    columns = [
        "within_a_step",
        "log2_ratio",
        "log2_distance",
        "risk",
        "risk_n_refits",
        "same_without_first",
    ]
    return mean_and_se(long, ["models", "loss", "rule", "spacing"], columns).drop(
        columns=[
            "within_a_step_se",
            "risk_se",
            "risk_n_refits_se",
            "same_without_first_se",
        ]
    )


# The library's route.

GENERIC_ALPHAS = 2.0 ** -np.arange(6.0, -1.0, -1.0)


def numpyro_model(x, y=None):
    """The ridge regression, with its prior, as a NumPyro model."""
    s2 = numpyro.sample("s2", dist.InverseGamma(gvo.SHAPE, gvo.RATE))
    coef = numpyro.sample(
        "coef", dist.Normal(0.0, jnp.sqrt(s2)).expand([x.shape[1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ coef)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, jnp.sqrt(s2)), obs=y)


def generic_route(seed, data, num_data, alphas=GENERIC_ALPHAS, tolerance=0.05):
    """R-log and I-log of ``nt.select_alpha`` beside the closed forms: the same data, blocks and order.

    Sums are from the second block on. ``se`` is the paired standard error of the exact R-log to its least, which
    is that of the rule. ``guide`` is the best Gaussian guide, ``exact`` the posterior; the library plugs in the
    mean of log s2.
    """
    x, y = data_of(seed, data, num_data)
    choice = nt.select_alpha(
        jax.random.key(seed),
        numpyro_model,
        AutoMultivariateNormal,
        jnp.asarray(x),
        jnp.asarray(y),
        alphas=alphas,
        criterion=nt.alpha.safe_bayes(blocks=NUM_BLOCKS, permutations=0),
        num_refit_samples=1000,
        tolerance=tolerance,
    )
    found = nt.table(choice.data)
    edges = spacings(num_data)["equal"]
    exact = gvo.prequential(x, y, alphas, edges)[:, 1, :, edges[1] :]
    gibbs, plug_in = (exact[gvo.LOSSES.index(name)] for name in ("gibbs", "plugin_log"))
    guide = np.array(
        [
            sum(
                gvo.guide_losses(x[:a], y[:a], alpha, x[a:b], y[a:b]).sum(1)
                for a, b in pairwise(edges[1:])
            )
            for alpha in alphas
        ]
    )
    excess = gibbs - gibbs[np.argmin(gibbs.sum(1))]
    return pd.DataFrame(
        {
            "data": data,
            "n": num_data,
            "seed": seed,
            "alpha": alphas,
            "gibbs": found["gibbs"].to_numpy(),
            "gibbs_guide": guide[:, 0],
            "gibbs_exact": gibbs.sum(1),
            "se": np.sqrt(excess.shape[1]) * excess.std(1, ddof=1),
            "plugin": found["plugin"].to_numpy(),
            "plugin_guide": guide[:, 1],
            "plugin_exact": plug_in.sum(1),
            "chosen": choice.alpha,
            "chosen_exact": gvo.choose(alphas, gibbs, "one_se"),
        }
    )


def main():
    """Run the parts, write their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="three seeds, n = 50 and 100"
    )
    parser.add_argument(
        "--part",
        choices=["closed", "blocks", "generic"],
        help="one part; all by default",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "results",
        help="folder for the tables",
    )
    options = parser.parse_args()
    small = options.small
    num_seeds, num_block_seeds = (3, 2) if small else (100, 50)
    sizes = SIZES[:2] if small else SIZES
    routes = (
        [("wrong", 0)]
        if small
        else [(data, seed) for data in DATA for seed in range(5)]
    )
    generic = {"alphas": GENERIC_ALPHAS[3::3], "tolerance": 1.0} if small else {}
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    def write(name, table, shown=None):
        table.to_csv(
            options.output / f"safe_bayes_{name}.csv", index=False, float_format="%.5g"
        )
        print(
            (table if shown is None else table[shown]).round(4).to_string(index=False),
            flush=True,
        )
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)

    if options.part in (None, "closed"):
        choices, curves, compression = closed_form(num_seeds, sizes)
        summary = summary_of_choices(choices)
        write("choices", summary)
        # What is the same for all alphas goes, and with it what varies most from seed to seed.
        criteria = [
            "gibbs",
            "plugin",
            "predictive",
            "loo",
            "evidence",
            "evidence of 100 y",
        ]
        curves["evidence of 100 y"] = (
            curves["evidence"] + curves["alpha"] * curves["n"] * LOG_UNITS
        )
        cells = ["data", "models", "n", "seed"]
        curves[criteria] -= curves.groupby(cells)[criteria].transform("min")
        along = mean_and_se(
            curves, ["data", "models", "n", "alpha"], ["risk", "size", *criteria]
        )
        write(
            "curves",
            along[along["n"] == 100],
            ["data", "models", "alpha", "risk", *criteria],
        )
        along = mean_and_se(
            compression, ["data", "n"], ["predictive", "gibbs", "gibbs, alpha 1/4"]
        )
        write("compression", along[along["n"] % 5 == 0])
    if options.part in (None, "blocks"):
        write("blocks", summary_of_blocks(blocks(num_block_seeds, sizes)))
    if options.part in (None, "generic"):
        write(
            "generic",
            pd.concat(
                [generic_route(seed, data, 100, **generic) for data, seed in routes]
            ),
        )
    (options.output / "safe_bayes.txt").write_text(
        describe(
            f"n = {list(sizes)}, {num_seeds} seeds, {len(ALPHAS)} alphas from 1 to {ALPHAS[-1]:g}; blocks: "
            f"{num_block_seeds} seeds; closed forms float64, nt.select_alpha float32; parts were run one by one"
        )
    )


if __name__ == "__main__":
    main()
