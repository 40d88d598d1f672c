"""Which power of the likelihood real data ask for, and what it does to predictions and intervals.

Seven regressions (examples/alpha_data.py). Each data set is taken for a population: training sets of n rows are
drawn from it with replacement, the truth is the minimiser of the loss of the whole, and rows not drawn are held
out. On every training set each method chooses an alpha, and the posterior at it is scored:

- coverage of the coefficients by 95% intervals, the mean over coefficients;
- score, the mean log posterior predictive density of a held-out datum;
- gibbs, the mean log-density of a held-out datum under posterior draws.

Posteriors are normal, at the mode and with the curvature of likelihood^alpha times prior (Laplace), so that all
of it is mapped over training sets; SafeBayes' blocks, too. The criteria are the library's pure parts, and on the
first training sets they are compared with what ``decide`` and ``nt.select_alpha`` say, the latter by a Gaussian
guide with full covariance. Standard errors are over training sets; differences to alpha = 1 are paired.

    python tests/benchmarks/alpha_real_data.py --data-dir ../shared/data
"""

import argparse
import os
import sys
import time
import warnings
from functools import partial
from operator import itemgetter
from pathlib import Path

# Two pools of threads on few cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.autoguide import AutoMultivariateNormal
from provenance import describe
from scipy.stats import chi2

import numpyro_tempered as nt
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.bootstrap_fisher import fisher_parts
from numpyro_tempered.select.alpha.data_weights import resamples
from numpyro_tempered.select.alpha.gpc_posteriors import laplace_ratios
from numpyro_tempered.select.alpha.lyddon import matched_power
from numpyro_tempered.select.alpha.minimise import minimise
from numpyro_tempered.select.alpha.safe_bayes import block_edges, judge
from numpyro_tempered.select.alpha.sandwich import Flat, check_sandwich, sandwich

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from alpha_data import LOADERS  # noqa: E402

jax.config.update("jax_enable_x64", True)

DOCS = ROOT / "docs" / "results"
GRID = 2.0 ** np.arange(-8, 1)
COARSENING = 100.0
LEVEL = 0.95
BLOCKS = 8
METHODS = [
    "alpha = 1",
    "SafeBayes",
    "Lyddon",
    "bootstrap Fisher",
    "GPC",
    "coarsening",
    "theory 1/2",
]
# Of the secant method in log alpha, along which the log-ratios of distance and radius have a slope of nearly 1.
GPC_STEPS = 6


def flatten(problem):
    """The losses of the rows and the log-prior as functions of flat latents, all of which are real; and d."""
    first = tuple(jnp.asarray(part[:1]) for part in problem.data)
    trace = handlers.trace(handlers.seed(problem.model, 0)).get_trace(*first)
    latents = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    start, unravel = ravel_pytree(latents)

    def trace_at(theta, data):
        return handlers.trace(
            handlers.substitute(problem.model, unravel(theta))
        ).get_trace(*data)

    def losses(theta, data):
        trace = trace_at(theta, data)
        return -trace["y"]["fn"].log_prob(trace["y"]["value"])

    def log_prior(theta, data):
        trace = trace_at(theta, data)
        return sum(
            jnp.sum(trace[name]["fn"].log_prob(trace[name]["value"]))
            for name in latents
        )

    return losses, log_prior, len(start)


def laplace(flat, weights, alpha, start):
    """Mode and Cholesky factor of the precision of the tempered posterior of weighted rows."""
    found = minimise(
        lambda t: jnp.append(alpha * weights * flat.losses(t), -flat.log_prior(t)),
        start,
    )
    return found.point, jnp.linalg.cholesky(found.hessian), found.converged


def draws_of(mode, factor, noise):
    """Draws of the normal with that precision."""
    return mode + jax.scipy.linalg.solve_triangular(factor.T, noise.T, lower=False).T


def choose(flat, num_rows, counts, edges, noise):
    """Every method's alpha on one training set, with flags; SafeBayes as its losses ``(A, n)``."""
    found = sandwich(flat.losses, jnp.zeros_like(flat.start))
    point, dim = found.minimum.point, len(flat.start)
    parts = fisher_parts(flat, point, counts)
    fisher = jnp.sum(parts.numerator) / jnp.sum(parts.denominator)

    def step(state, _):
        last, last_excess, now, modes = state
        ratios, found = laplace_ratios(
            flat, None, point, counts, chi2.ppf(LEVEL, dim), jnp.exp(now)
        )
        excess = jnp.log(jnp.quantile(ratios, LEVEL))
        moved = now - last
        slope = jnp.where(jnp.abs(moved) > 1e-9, (excess - last_excess) / moved, 1.0)
        return (
            now,
            excess,
            now - excess / jnp.clip(slope, 0.3, 3.0),
            modes & jnp.all(found),
        ), excess

    guess = jnp.log(dim / jnp.sum(1.0 / found.powers))
    first = (guess, 0.0, guess, jnp.array(True))
    (gpc, _, _, modes), excess = jax.lax.scan(step, first, None, length=GPC_STEPS)

    def losses_of_block(edge, alpha):
        mode, factor, ok = laplace(flat, jnp.arange(num_rows) < edge, alpha, point)
        return jnp.mean(
            jax.vmap(flat.losses)(draws_of(mode, factor, noise)), axis=0
        ), ok

    blocks, blocks_ok = jax.lax.map(
        lambda edge: jax.vmap(lambda alpha: losses_of_block(edge, alpha))(
            jnp.asarray(GRID)
        ),
        jnp.asarray(edges),
    )
    of_row = (
        jnp.searchsorted(jnp.asarray(edges), jnp.arange(num_rows), side="right") - 1
    )
    prequential = jnp.where(
        of_row[None] >= 0, blocks[of_row, :, jnp.arange(num_rows)].T, 0.0
    )
    return {
        "Lyddon": matched_power(found.curvature, found.variance),
        "bootstrap Fisher": fisher,
        "GPC": jnp.exp(gpc),
        "prequential": prequential,
        "sandwich": found,
        "fisher_found": jnp.all(parts.converged),
        "gpc_found": jnp.all(modes),
        "gpc_off": jnp.abs(excess[-1]),
        "blocks_found": jnp.all(blocks_ok),
    }


def score(flat, losses_of, num_rows, alpha, start, truth, held_out, in_use, noise):
    """Coverage of each latent, and the two held-out scores, of the posterior at alpha on one training set."""
    mode, factor, ok = laplace(flat, jnp.ones(num_rows), alpha, start)
    half = jax.scipy.linalg.solve_triangular(factor, jnp.eye(len(mode)), lower=True)
    sd = jnp.sqrt(jnp.sum(jnp.square(half), axis=0))
    log_lik = -jax.vmap(lambda theta: losses_of(theta, held_out))(
        draws_of(mode, factor, noise)
    )
    share = in_use / jnp.sum(in_use)
    predictive = jax.nn.logsumexp(log_lik, axis=0) - jnp.log(len(noise))
    return {
        "covered": jnp.abs(mode - truth) <= 1.959963984540054 * sd,
        "score": jnp.where(in_use > 0, predictive, 0.0) @ share,
        "gibbs": jnp.where(in_use > 0, jnp.mean(log_lik, axis=0), 0.0) @ share,
        "ok": ok,
    }


def study(name, problem, sizes, seed):
    """Long tables of one data set: methods and curves by training set; and what is kept for comparison."""
    losses_of, log_prior_of, dim = flatten(problem)
    population = tuple(jnp.asarray(part) for part in problem.data)
    num, num_rows = len(problem.data[1]), problem.num_train
    truth = minimise(lambda t: losses_of(t, population), jnp.zeros(dim))
    if not bool(truth.converged):
        raise RuntimeError(f"{name}: no minimiser of the whole data set.")
    rng = np.random.default_rng([seed, num])
    rows = rng.integers(num, size=(sizes["sets"], num_rows))
    rest = [
        rng.permutation(np.setdiff1d(np.arange(num), each))[: sizes["held_out"]]
        for each in rows
    ]
    width = max(map(len, rest))
    in_use = np.array([np.arange(width) < len(each) for each in rest], float)
    rest = np.array([np.pad(each, (0, width - len(each))) for each in rest])
    key = jax.random.key(seed)
    counts = resamples(key, sizes["bootstrap"], num_rows).astype(float)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (sizes["draws"], dim))
    edges = block_edges(BLOCKS, num_rows)

    def flat_of(data):
        return Flat(
            jnp.zeros(dim),
            lambda t: losses_of(t, data),
            lambda t: log_prior_of(t, tuple(p[:1] for p in data)),
        )

    def data_of(these):
        return tuple(part[these] for part in population)

    @jax.jit
    def choose_all(rows):
        return jax.lax.map(
            lambda these: choose(
                flat_of(data_of(these)), num_rows, counts, edges, noise
            ),
            rows,
        )

    chosen = jax.device_get(choose_all(rows))
    verdicts = [
        judge({"gibbs": each}, "gibbs", "one_se", GRID)
        for each in chosen.pop("prequential")
    ]
    alphas = {
        "alpha = 1": np.ones(len(rows)),
        "SafeBayes": np.array([verdict.alpha for verdict in verdicts]),
        "Lyddon": chosen["Lyddon"],
        "bootstrap Fisher": np.where(
            chosen["fisher_found"], chosen["bootstrap Fisher"], np.nan
        ),
        "GPC": np.where(
            chosen["gpc_found"] & (chosen["gpc_off"] < 0.01), chosen["GPC"], np.nan
        ),
        "coarsening": np.full(len(rows), 1.0 / (1.0 + num_rows / COARSENING)),
        "theory 1/2": np.full(len(rows), 0.5),
    }
    usable = np.array(
        [
            passes(jax.tree.map(itemgetter(k), chosen["sandwich"]))
            for k in range(len(rows))
        ]
    )
    for method in ("Lyddon", "bootstrap Fisher", "GPC"):
        alphas[method] = np.where(usable, alphas[method], np.nan)
    if not np.all(chosen["blocks_found"]):
        print(
            f"{name}: no mode in {np.sum(~chosen['blocks_found'])} sets of blocks",
            flush=True,
        )

    @jax.jit
    def score_all(alphas, rows, rest, in_use):
        def of_set(part):
            alphas, these, others, in_use = part
            flat = flat_of(data_of(these))
            one = partial(
                score,
                flat,
                losses_of,
                num_rows,
                start=truth.point,
                truth=truth.point,
                held_out=data_of(others),
                in_use=in_use,
                noise=noise,
            )
            return jax.lax.map(lambda alpha: one(alpha=alpha), alphas)

        return jax.lax.map(of_set, (alphas, rows, rest, in_use))

    table = np.concatenate(
        [np.stack([alphas[m] for m in METHODS], 1), np.tile(GRID, (len(rows), 1))],
        axis=1,
    )
    # A refused set is scored at 1 and dropped below.
    scored = jax.device_get(
        score_all(np.where(np.isnan(table), 1.0, table), rows, rest, in_use)
    )
    num_coef = len(problem.columns)
    labels = METHODS + ["grid"] * len(GRID)
    long = pd.DataFrame(
        {
            "data": name,
            "set": np.repeat(np.arange(len(rows)), len(labels)),
            "method": labels * len(rows),
            "alpha": table.ravel(),
            "coverage": scored["covered"][..., :num_coef].mean(-1).ravel(),
            "coverage_scale": (
                scored["covered"][..., -1].astype(float).ravel()
                if dim > num_coef
                else np.nan
            ),
            "score": scored["score"].ravel(),
            "gibbs": scored["gibbs"].ravel(),
            "ok": scored["ok"].ravel(),
        }
    )
    if not long["ok"].all():
        print(f"{name}: no mode in {np.sum(~long['ok'])} posteriors", flush=True)
    whole = sandwich(lambda theta: losses_of(theta, population), truth.point)
    limits = {
        "Lyddon": matched_power(whole.curvature, whole.variance),
        "bootstrap Fisher": jnp.trace(whole.curvature) / jnp.trace(whole.variance),
        "GPC": dim / jnp.sum(1.0 / whole.powers),
        "least": whole.powers[0],
        "largest": whole.powers[-1],
    }
    return (
        long,
        alphas,
        rows,
        key,
        {name: float(value) for name, value in limits.items()},
    )


def passes(found):
    """Whether the library's guards let a sandwich pass."""
    try:
        check_sandwich(found)
    except ValueError:
        return False
    return True


def mean_and_se(values):
    """Of those that are finite."""
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return np.nan, np.nan
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def summarise(long, by):
    """Means over training sets, with paired differences to alpha = 1."""
    base = long[long["method"] == "alpha = 1"].set_index(["data", "set"])
    lines = []
    for keys, part in long.groupby(by, sort=False):
        used = part[part["alpha"].notna()]
        at_one = base.loc[pd.MultiIndex.from_frame(used[["data", "set"]])]
        line = dict(zip(by, keys, strict=True)) | {
            "alpha": used["alpha"].mean(),
            "alpha_sd": used["alpha"].std(ddof=1),
            "sets": len(used),
            "refused": len(part) - len(used),
        }
        for column in ("coverage", "coverage_scale", "score", "gibbs"):
            line[column], line[f"{column}_se"] = mean_and_se(used[column])
        for column in ("score", "gibbs"):
            gain = used[column].to_numpy() - at_one[column].to_numpy()
            line[f"{column}_gain"], line[f"{column}_gain_se"] = mean_and_se(gain)
        lines.append(line)
    return pd.DataFrame(lines)


def compare(name, problem, alphas, rows, key, sizes):
    """The same choices by ``decide`` on one training set, and by ``select_alpha`` on a few."""
    lines = []
    for k in range(sizes["generic"]):
        data = tuple(jnp.asarray(part[rows[k]]) for part in problem.data)
        if k == 0:
            task = Task(problem.model, key, data, {})
            for method, criterion in {
                "Lyddon": nt.alpha.lyddon(),
                "bootstrap Fisher": nt.alpha.bootstrap_fisher(
                    num_bootstrap=sizes["bootstrap"]
                ),
                "GPC": nt.alpha.gpc(LEVEL, num_bootstrap=sizes["bootstrap"]),
            }.items():
                try:
                    verdict = criterion.decide(key, task, GRID, None)
                    lines.append(
                        (
                            name,
                            k,
                            method,
                            alphas[method][k],
                            verdict.alpha,
                            verdict.attrs["alpha_se"],
                        )
                    )
                except ValueError as error:
                    print(f"{name}, {method}: {error}", flush=True)
                    lines.append((name, k, method, alphas[method][k], np.nan, np.nan))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            choice = nt.select_alpha(
                jax.random.key(k),
                problem.model,
                AutoMultivariateNormal,
                *data,
                alphas=GRID,
                criterion=nt.alpha.safe_bayes(blocks=BLOCKS, permutations=0),
            )
        for warning in caught:
            print(f"{name}, set {k}: {str(warning.message)[:150]}", flush=True)
        lines.append(
            (name, k, "SafeBayes", alphas["SafeBayes"][k], choice.alpha, np.nan)
        )
    return pd.DataFrame(
        lines, columns=["data", "set", "method", "mapped", "library", "library_se"]
    )


def merged(table, path):
    """A table with the rows of other data sets that its file has, in order; written."""
    if path.exists():
        old = pd.read_csv(path)
        table = pd.concat([old[~old["data"].isin(table["data"])], table])
    order = table["data"].map(list(LOADERS).index)
    table = table.iloc[np.argsort(order, kind="stable")].reset_index(drop=True)
    table.to_csv(path, index=False)
    return table


def crossing(curve):
    """The largest alpha at which coverage is the level, interpolated in log alpha; NaN where there is none."""
    log_alpha, excess = (
        np.log(curve["alpha"].to_numpy()),
        curve["coverage"].to_numpy() - LEVEL,
    )
    falls = np.flatnonzero((excess[:-1] >= 0) & (excess[1:] < 0))
    if len(falls) == 0:
        return np.nan
    k = falls[-1]
    share = excess[k] / (excess[k] - excess[k + 1])
    return np.exp(log_alpha[k] + share * (log_alpha[k + 1] - log_alpha[k]))


def short(methods):
    """The table of the page: scores at alpha = 1, and differences to them at the others."""
    at_one = methods["method"] == "alpha = 1"

    def column(name, digits):
        value, se = methods[name], methods[f"{name}_se"]
        if name.endswith("_gain"):
            base = name.removesuffix("_gain")
            value, se = (
                value.mask(at_one, methods[base]),
                se.mask(at_one, methods[f"{base}_se"]),
            )
            sign = ["" if one else "+" for one in at_one]
        else:
            sign = [""] * len(value)
        return [
            "" if not np.isfinite(v) else f"{v:{plus}.{digits}f} ± {s:.{digits}f}"
            for v, s, plus in zip(value, se, sign, strict=True)
        ]

    return pd.DataFrame(
        {
            "data": methods["data"],
            "method": methods["method"],
            "alpha (sd)": [
                f"{a:.2g}" if not s > 1e-9 else f"{a:.2g} ({s:.1g})"
                for a, s in zip(methods["alpha"], methods["alpha_sd"], strict=True)
            ],
            "refused": methods["refused"],
            "coverage": column("coverage", 3),
            "of the noise scale": column("coverage_scale", 3),
            "predictive score": column("score_gain", 3),
            "score of draws": column("gibbs_gain", 3),
        }
    )


COLOURS = {
    "alpha = 1": "black",
    "SafeBayes": "tab:blue",
    "Lyddon": "tab:orange",
    "bootstrap Fisher": "tab:red",
    "GPC": "tab:purple",
    "coarsening": "tab:green",
    "theory 1/2": "0.5",
}
MARKERS = dict(zip(METHODS, "o*sDv^P", strict=True))


def draw_figure(methods, curves, troubles, path):
    """Coverage, and the two scores against those at alpha = 1, along alpha, with each method at its mean."""
    names = list(methods["data"].unique())
    figure, axes = plt.subplots(
        2,
        len(names),
        figsize=(2.3 * len(names) + 0.8, 5.4),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for column, name in zip(axes.T, names, strict=True):
        curve, points = curves[curves["data"] == name], methods[methods["data"] == name]
        column[0].axhline(LEVEL, color="0.6", linewidth=1.0, linestyle="--")
        column[0].plot(curve["alpha"], curve["coverage"], color="0.35", linewidth=1.2)
        column[1].axhline(0.0, color="0.6", linewidth=1.0, linestyle="--")
        column[1].plot(
            curve["alpha"],
            curve["score_gain"],
            color="0.35",
            linewidth=1.2,
            label="predictive density",
        )
        column[1].plot(
            curve["alpha"],
            curve["gibbs_gain"],
            color="tab:blue",
            linewidth=1.2,
            linestyle=":",
            label="single draws (SafeBayes' aim)",
        )
        for _, point in points.iterrows():
            style = {
                "color": COLOURS[point["method"]],
                "marker": MARKERS[point["method"]],
                "markersize": 9 if point["method"] == "SafeBayes" else 6,
                "linestyle": "none",
                "zorder": 3,
            }
            for ax, value in zip(column, ("coverage", "score_gain"), strict=True):
                ax.plot(
                    point["alpha"],
                    point[value],
                    **style,
                    label=point["method"] if ax is column[0] else None,
                )
        column[0].set(xscale="log", ylim=(0.2, 1.02))
        column[0].set_title(f"{name}\n{troubles[name]}", fontsize="small")
        shown = curve.loc[curve["alpha"] >= 0.03, "score_gain"].abs().max()
        shown = 1.3 * max(shown, points["score_gain"].abs().max())
        column[1].set(ylim=(-shown, shown), xlabel="alpha")
        column[1].tick_params(axis="y", labelsize="x-small")
        for ax in column:
            ax.set_xticks([0.01, 0.1, 1.0], labels=["0.01", "0.1", "1"])
            ax.grid(alpha=0.3)
    for ax in axes[0, 1:]:
        ax.tick_params(labelleft=False)
    axes[0, 0].set_ylabel("coverage of 95% intervals")
    axes[1, 0].set_ylabel("held-out score less that\nat alpha = 1, nats a datum")
    handles, words = axes[0, 0].get_legend_handles_labels()
    more = axes[1, 0].get_legend_handles_labels()
    figure.legend(
        handles + more[0],
        words + more[1],
        loc="outside lower center",
        ncols=9 if len(names) > 4 else 5,
        fontsize="small",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    """Run the study, data set by data set, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one data set, few training sets"
    )
    parser.add_argument(
        "--data",
        nargs="*",
        choices=list(LOADERS),
        help="some data sets, and the tables keep the others; all by default",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder of california_housing.csv.gz; else downloaded",
    )
    parser.add_argument(
        "--output", type=Path, default=None, help="folder for tables and figure"
    )
    options = parser.parse_args()
    small = options.small
    if options.output is None:
        if small:
            parser.error(
                "--small needs --output: it does not overwrite the committed results."
            )
        options.output = DOCS
    sizes = {"sets": 100, "bootstrap": 200, "draws": 200, "held_out": 500, "generic": 1}
    if small:
        sizes = {"sets": 8, "bootstrap": 100, "draws": 50, "held_out": 50, "generic": 0}
    names = options.data or (["Engel"] if small else list(LOADERS))
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    parts, checks, ranges = [], [], []
    for name in names:
        began = time.perf_counter()
        problem = LOADERS[name](options.data_dir)
        long, alphas, rows, key, limits = study(name, problem, sizes, seed=1)
        parts.append(long)
        ranges.append(
            {
                "data": name,
                "rows": len(problem.data[1]),
                "coefficients": len(problem.columns),
                "n": problem.num_train,
                "trouble": problem.trouble,
                **limits,
            }
        )
        if sizes["generic"]:
            checks.append(compare(name, problem, alphas, rows, key, sizes))
            merged(
                pd.concat(checks).round(4), options.output / "alpha_real_library.csv"
            )
        everything = pd.concat(parts)
        methods = summarise(
            everything[everything["method"] != "grid"], ["data", "method"]
        )
        # Along the grid, with alpha = 1 for the pairs.
        curves = everything[everything["method"].isin(["grid", "alpha = 1"])]
        curves = summarise(curves, ["data", "alpha", "method"])
        curves = curves[curves["method"] == "grid"].drop(
            columns=["method", "alpha_sd", "sets", "refused"]
        )
        sets = pd.DataFrame(ranges)
        sets["covers"] = [
            crossing(curves[curves["data"] == each]) for each in sets["data"]
        ]
        methods = merged(methods.round(5), options.output / "alpha_real_methods.csv")
        curves = merged(curves.round(5), options.output / "alpha_real_curves.csv")
        sets = merged(sets.round(3), options.output / "alpha_real_sets.csv")
        short(methods).to_csv(options.output / "alpha_real_table.csv", index=False)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        print(
            short(methods[methods["data"] == name]).to_string(index=False), flush=True
        )
    troubles = dict(zip(sets["data"], sets["trouble"], strict=True))
    draw_figure(methods, curves, troubles, options.output / "alpha_real_data.png")
    (options.output / "alpha_real_data.txt").write_text(
        describe(
            f"{sizes['sets']} training sets, {sizes['bootstrap']} resamples, {sizes['draws']} draws, at most "
            f"{sizes['held_out']} held-out rows, {BLOCKS} blocks, coarsening a = {COARSENING:g}; float64"
        )
    )
    print(
        f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of them on the processor"
    )


if __name__ == "__main__":
    main()
