"""Sparse ReLU networks with one, two and five inputs, by backward elimination: risk against the theorem's rate.

Targets of two smoothnesses on [-1, 1]^d with noise of standard deviation .1, up to 10,000 data, alpha = 1/2. For
each data set, one fit of each shape (L, D) with at most n weights, by ``nt.sparse.fit_support`` from
``nt.guides.start_relu_network``; S is the size of the support it ends at, and the bound that of the prior that is
uniform over supports of S of T weights. The fit with the largest bound less log(1/b) is selected, with b = 2^-L,
shared equally by the shapes of a depth and all S.

    python tests/benchmarks/sparse_networks_inputs.py [--small] [--output FOLDER]

Writes sparse_networks_inputs.csv (one row a fit), sparse_networks_inputs_summary.csv and _slopes.csv (the fits
that are selected), sparse_networks_search.csv (data and prior of ``sparse_networks_study.py``, whose gates are
relaxed), sparse_networks_size.csv (supports of a given size), sparse_networks_inputs.png, and
sparse_networks_inputs.txt (what it was measured with).
"""

import argparse
import itertools
import time
import warnings
from functools import partial
from math import lgamma
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import provenance
from numpyro.infer import init_to_value

import numpyro_tempered as nt

NOISE = 0.1
RESULTS = Path(__file__).parents[2] / "docs" / "results"
ANGLES = 0.7 + 2.4 * np.arange(5)


def weierstrass(t, num_terms):
    """A sum of Hölder exponent 1/2 down to scales of 2^(1 - num_terms)."""
    return 0.5 * sum(
        2.0 ** (-k / 2) * np.cos(2.0**k * np.pi * t) for k in range(num_terms)
    )


def plane_waves(x):
    """The same with a direction of its own for each wave."""
    along = [x @ [np.cos(angle), np.sin(angle)] for angle in ANGLES]
    return 0.5 * sum(
        2.0 ** (-k / 2) * np.cos(2.0**k * np.pi * t) for k, t in enumerate(along)
    )


def bump(x):
    """Smooth, of the first two inputs."""
    return np.sin(np.pi * x[:, 0]) * np.cos(0.5 * np.pi * x[:, 1])


# By name and number of inputs: the function, and how many inputs a term of it has.
TARGETS = {
    ("smooth", 1): (lambda x: np.sin(np.pi * x[:, 0]), 1),
    ("rough", 1): (lambda x: weierstrass(x[:, 0], 7), 1),
    ("smooth", 2): (bump, 2),
    ("rough", 2): (plane_waves, 2),
    ("smooth", 5): (bump, 2),
    ("rough", 5): (
        lambda x: (weierstrass(x[:, 0], 5) + weierstrass(x[:, 1], 5)) / np.sqrt(2.0),
        1,
    ),
}
# Hölder exponents; of networks that are piecewise linear at most 2.
SMOOTHNESS = {"smooth": 2.0, "rough": 0.5}
# Inputs that count in five dimensions.
NUM_RELEVANT = 2


def layer_sizes(d, widths):
    """Inputs and outputs of each layer."""
    return list(itertools.pairwise([d, *widths, 1]))


def num_weights(d, widths):
    """T, biases included."""
    return sum((a + 1) * b for a, b in layer_sizes(d, widths))


def network(theta, x, widths):
    """The ReLU network of flat weights ``theta`` at ``x``, ``(n, d)``."""
    hidden, start = x, 0
    sizes = layer_sizes(x.shape[1], widths)
    for k, (a, b) in enumerate(sizes):
        weights, biases = (
            theta[start : start + a * b].reshape(a, b),
            theta[start + a * b : start + (a + 1) * b],
        )
        hidden = hidden @ weights + biases
        hidden = jax.nn.relu(hidden) if k + 1 < len(sizes) else hidden
        start += (a + 1) * b
    return hidden[:, 0]


def model(x, y=None, *, probability, widths):
    """Regression on a network whose weights are independently on with one probability."""
    prior = nt.sparse.SpikeAndSlab(probability, 0.0, 1.0)
    theta = numpyro.sample(
        "theta", prior.expand([num_weights(x.shape[1], widths)]).to_event(1)
    )
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(network(theta, x, widths), NOISE), obs=y)


def draw(target, d, n, seed):
    """Data by numpy: the same on every device; with one input those of sparse_networks_study.py."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, (n, d))
    y = TARGETS[target, d][0](x) + NOISE * rng.normal(size=n)
    return x.astype(np.float32), y.astype(np.float32)


def flatten(layers):
    """Weights and biases of all layers, in the model's order."""
    return jnp.asarray(
        np.concatenate([np.concatenate([w.ravel(), b]) for w, b in layers]), jnp.float32
    )


def fit(key, x, y, widths, theta=None, probability=0.5, **options):
    """A fit by backward elimination, from the start by matching pursuit unless ``theta`` is another."""
    if theta is None:
        theta = flatten(nt.guides.start_relu_network(key, x, y, widths))
    guide = partial(
        nt.guides.AutoSpikeAndSlab, init_loc_fn=init_to_value(values={"theta": theta})
    )
    chosen = partial(model, probability=probability, widths=widths)
    return nt.sparse.fit_support(
        key, chosen, guide, x, y, alpha=0.5, num_particles=200, **options
    )


@partial(jax.jit, static_argnames="widths")
def risks(theta, x, truth, widths):
    """Squared distance to the target of the mean of draws, and the mean of that of each."""
    drawn = jax.lax.map(lambda t: network(t, x, widths), theta)
    return jnp.mean((drawn.mean(0) - truth) ** 2), jnp.mean((drawn - truth) ** 2)


def evaluate(result, target, d, widths):
    """What the tables hold of a fit."""
    rng = np.random.default_rng(10**6 + d)
    points = rng.uniform(-1.0, 1.0, (4000, d))
    theta = result.guide.sample_posterior(
        jax.random.key(3), result.params, sample_shape=(100,)
    )["theta"]
    truth = jnp.asarray(TARGETS[target, d][0](points), jnp.float32)
    risk, risk_of_draws = risks(theta, jnp.asarray(points, jnp.float32), truth, widths)
    gates = np.asarray(result.params["theta_auto_probs"])
    first = gates[: d * widths[0]].reshape(d, widths[0])
    irrelevant = int(first[NUM_RELEVANT:].sum()) if d > 2 else 0
    return {
        "num_on": int(gates.sum()),
        "irrelevant_on": irrelevant,
        "elbo": result.elbo.value,
        "risk": float(risk),
        "risk_of_draws": float(risk_of_draws),
    }


def log_binomial(total, size):
    """log of total over size."""
    return lgamma(total + 1) - lgamma(size + 1) - lgamma(total - size + 1)


def run_inputs(targets, sizes, shapes, num_sets, num_steps, save):
    """One fit of each shape on each data set."""
    began, rows = time.perf_counter(), []
    shared = {depth: sum(len(s) == depth for s in shapes) for depth in map(len, shapes)}
    for n, data, (target, d), widths in itertools.product(
        sizes, range(num_sets), targets, shapes
    ):
        key, total = jax.random.key(data), num_weights(d, widths)
        if total > n:
            continue
        x, y = draw(target, d, n, data)
        result = fit(key, x, y, widths, num_steps=num_steps)
        size = int(result.params["theta_auto_probs"].sum())
        exact = nt.sparse.round_and_refit(
            key, result, num_weights=max(size, 1), num_steps=0, num_particles=200
        )
        row = {
            "target": target,
            "d": d,
            "n": n,
            "data": data,
            "L": len(widths),
            "D": widths[0],
            "T": total,
        }
        row |= evaluate(exact, target, d, widths)
        # Of independent gates with probability S/T, less that of S of T exactly.
        share = size / total
        independent = -sum(
            k * np.log(p) for k, p in ((size, share), (total - size, 1.0 - share)) if k
        )
        row["kl_independent_less_exact"] = independent - log_binomial(total, size)
        row["criterion"] = (
            row["elbo"]
            - len(widths) * np.log(2.0)
            - np.log(shared[len(widths)])
            - np.log(total)
        )
        rows.append(row | {"steps": len(result.losses)})
        if widths == shapes[-1]:
            print(
                f"{time.perf_counter() - began:6.0f} s: n = {n}, {target}, d = {d}, data {data}",
                flush=True,
            )
            save(pd.DataFrame(rows))
    return pd.DataFrame(rows)


def run_search(sizes, num_sets, num_steps):
    """The shape (24, 1, 16) under the prior of sparse_networks_study.py, on its data."""
    rows, widths = [], (16,)
    probability = 24.0 / num_weights(1, widths)
    for target, n, data, restart in itertools.product(
        ("smooth", "rough"), sizes, range(num_sets), range(2)
    ):
        x, y = draw(target, 1, n, data)
        result = fit(
            jax.random.key(restart),
            x,
            y,
            widths,
            probability=probability,
            num_steps=num_steps,
        )
        rows.append(
            {"target": target, "n": n, "data": data}
            | evaluate(result, target, 1, widths)
        )
    table = pd.DataFrame(rows)
    table = table.loc[table.groupby(["target", "n", "data"])["elbo"].idxmax()]
    before = pd.read_csv(RESULTS / "sparse_networks_fits.csv").query(
        "alpha == 0.5 and S == 24 and D == 16"
    )
    after = before["elbo"] >= before["elbo_before"]
    for name in ("elbo", "risk"):
        before[name] = before[name].where(after, before[f"{name}_before"])
    before = before.loc[before.groupby(["target", "n", "data"])["elbo"].idxmax()]
    both = table.merge(before, on=["target", "n", "data"], suffixes=("", "_relaxed"))
    both["gain"] = both["elbo"] - both["elbo_relaxed"]
    return both.groupby(["target", "n"], sort=False).agg(
        elbo_relaxed=("elbo_relaxed", "mean"),
        elbo=("elbo", "mean"),
        least_gain=("gain", "min"),
        risk_relaxed=("risk_relaxed", "mean"),
        risk=("risk", "mean"),
    )


def run_sizes(n, widths, num_steps):
    """Supports of S weights exactly, for a grid of S, from starts of about as many."""
    rows, total = [], num_weights(1, widths)
    for target, size in itertools.product(
        ("smooth", "rough"), (6, 12, 24, 36, 48, 60, 72, 84, total)
    ):
        if size <= total:
            x, y = draw(target, 1, n, 0)
            few = min(widths[0], max(1, size // 3))
            (weights, biases), (last, shift) = nt.guides.start_relu_network(
                jax.random.key(0), x, y, (few,)
            )
            pad = (0, widths[0] - few)
            layers = [
                (np.pad(weights, ((0, 0), pad)), np.pad(biases, pad)),
                (np.pad(last, (pad, (0, 0))), shift),
            ]
            options = {"num_weights": size, "num_steps": num_steps}
            result = fit(jax.random.key(0), x, y, widths, flatten(layers), **options)
            row = {"target": target, "S": size} | evaluate(result, target, 1, widths)
            rows.append(
                row | {"kl": result.elbo.kl, "of supports": log_binomial(total, size)}
            )
    return pd.DataFrame(rows).drop(columns=["num_on", "irrelevant_on"])


def select(fits):
    """Of each data set the fit with the largest criterion, with the theorem's rate at its (S, L, D)."""
    found = fits.loc[
        fits.groupby(["target", "d", "n", "data"], sort=False)["criterion"].idxmax()
    ].copy()
    # The talk counts layers of weights, one more than hidden layers.
    size, layers, n = found["num_on"], found["L"] + 1, found["n"]
    rate = (
        np.maximum(size * np.log(n * layers / size), layers * size * np.log(found["D"]))
        / n
    )
    return found.assign(rate=NOISE**2 * rate)


def slope(x, y):
    """Of a least squares line."""
    return np.polyfit(np.log(x), np.log(y), 1)[0] if len(set(x)) > 1 else np.nan


def fit_slopes(found):
    """Slopes of log risks in log r_n and log n: means over data sets, with standard errors."""
    rows = []
    for (target, d), part in found.groupby(["target", "d"], sort=False):
        beta, effective = SMOOTHNESS[target], TARGETS[target, d][1]
        row = {"target": target, "d": d}
        for name, by, risk in (
            ("draws on r_n", "rate", "risk_of_draws"),
            ("mean on r_n", "rate", "risk"),
            ("draws on n", "n", "risk_of_draws"),
            ("mean on n", "n", "risk"),
            ("r_n on n", "n", "rate"),
        ):
            each = [
                slope(own[by].to_numpy(float), own[risk].to_numpy())
                for _, own in part.groupby("data")
            ]
            row[name] = np.mean(each)
            row[f"{name}, se"] = (
                np.std(each, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
            )
        row["-2β/(2β+d)"] = -2.0 * beta / (2.0 * beta + d)
        row["with d of a term"] = -2.0 * beta / (2.0 * beta + effective)
        rows.append(row)
    return pd.DataFrame(rows)


def summarise(found, fits):
    """Means over data sets."""
    groups = found.assign(
        shape=[f"({a}, {b})" for a, b in zip(found["L"], found["D"], strict=True)]
    )
    table = groups.groupby(["target", "d", "n"], sort=False).agg(
        risk=("risk", "mean"),
        risk_of_draws=("risk_of_draws", "mean"),
        rate=("rate", "mean"),
        S=("num_on", "mean"),
        irrelevant=("irrelevant_on", "mean"),
        shapes=("shape", lambda names: ", ".join(sorted(set(names)))),
    )
    best = (
        fits.groupby(["target", "d", "n", "data"])["risk"]
        .min()
        .groupby(["target", "d", "n"])
        .mean()
    )
    table.insert(1, "least risk of all", best)
    return table.reset_index().sort_values(
        ["target", "d", "n"], ascending=[False, True, True]
    )


def draw_figure(found):
    """Risks against n above, and against the theorem's rate below."""
    inputs = sorted(found["d"].unique())
    figure, axes = plt.subplots(
        2,
        len(inputs),
        figsize=(11.0, 7.0),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, d in zip(axes.T, inputs, strict=True):
        for target, colour in (("rough", "tab:orange"), ("smooth", "tab:blue")):
            part = found.query("target == @target and d == @d")
            beta, effective = SMOOTHNESS[target], TARGETS[target, d][1]
            for name, style, fill in (
                ("risk_of_draws", "-", "full"),
                ("risk", ":", "none"),
            ):
                words = f"{target}: {'draws, E_q' if name == 'risk_of_draws' else 'posterior mean'}"
                grouped = part.groupby("n")[name].mean()
                column[0].plot(
                    grouped.index,
                    grouped,
                    f"o{style}",
                    color=colour,
                    fillstyle=fill,
                    label=words,
                )
                column[1].plot(
                    part["rate"],
                    part[name],
                    "o",
                    color=colour,
                    fillstyle=fill,
                    markersize=4,
                )
            first = part.groupby("n")["risk_of_draws"].mean()
            ns = first.index.to_numpy(float)
            for dimension, dash in {d: "--", effective: "-."}.items():
                line = first.iloc[0] * (ns / ns[0]) ** (
                    -2.0 * beta / (2.0 * beta + dimension)
                )
                column[0].plot(ns, line, dash, color="black", linewidth=0.8)
        ends = found.query("d == @d")["rate"].agg(["min", "max"]).to_numpy()
        column[1].plot(ends, ends, "k:", linewidth=1.0)
        column[0].set(
            xscale="log", yscale="log", xlabel="number of data", title=f"d = {d}"
        )
        column[1].set(
            xscale="log", yscale="log", xlabel="σ² r_n at the selected (S, L, D)"
        )
        for ax in column:
            ax.grid(alpha=0.3)
    for ax in axes[:, 0]:
        ax.set_ylabel("squared distance to the target")
    handles, words = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        words,
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
    return figure


def main():
    """Run the study and write its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", FutureWarning)
    sizes, shapes, num_sets, num_steps = (
        ([70], [(16,)], 1, 10)
        if options.small
        else (
            [100, 300, 1000, 3000, 10_000],
            [(8,), (16,), (32,), (64,), (8, 8)],
            3,
            300,
        )
    )
    began = time.perf_counter()

    def write(table, name, form="%.6g", **how):
        table.to_csv(
            options.output / f"sparse_networks_{name}.csv", float_format=form, **how
        )

    search_sizes = [50] if options.small else [50, 100, 200, 400, 800, 1600]
    longer = num_steps if options.small else 500
    write(
        run_search(search_sizes, num_sets, longer).reset_index(),
        "search",
        "%.4g",
        index=False,
    )
    of_size = (
        run_sizes(50, (16,), longer)
        if options.small
        else run_sizes(1600, (32,), longer)
    )
    write(of_size, "size", "%.5g", index=False)
    targets = [key for key in TARGETS if key[1] < 5 or not options.small]

    def save(table):
        write(table, "inputs", index=False)

    fits = run_inputs(targets, sizes, shapes, num_sets, num_steps, save)
    save(fits)
    found = select(fits)
    write(summarise(found, fits), "inputs_summary", "%.3g", index=False)
    write(fit_slopes(found), "inputs_slopes", "%.2f", index=False)
    draw_figure(found).savefig(options.output / "sparse_networks_inputs.png", dpi=110)
    words = f"n = {sizes}, widths {shapes}, {num_sets} data sets, {num_steps} steps a support"
    text = provenance.describe(words)
    (options.output / "sparse_networks_inputs.txt").write_text(
        f"{text}seconds: {time.perf_counter() - began:.0f}\n"
    )


if __name__ == "__main__":
    main()
