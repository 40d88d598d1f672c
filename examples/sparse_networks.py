# %% [markdown]
"""# Sparse ReLU networks: a theorem, its experiment, and three numbers of which one is no bound.

CA-DNN (Chérief-Abdellatif, *Convergence rates of variational inference in sparse deep learning*, ICML 2020) shows
that tempered variational inference with spike and slab factors learns a regression function by a sparse ReLU
network at a rate that is optimal up to logarithms, and that the ELBO may choose the architecture. This notebook
fits such networks, by relaxed gates and by backward elimination, and compares risks with the rates.

As a script: `python examples/sparse_networks.py [--small] [--output FOLDER]`. The long tables come from
`tests/benchmarks/sparse_networks_study.py` and `tests/benchmarks/sparse_networks_inputs.py`. `--small` takes few
steps and writes to a temporary folder. A notebook takes the same options from the environment variable
`SPARSE_NETWORKS`.
"""

# %%
import argparse
import itertools
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

if "__file__" in globals():
    matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import init_to_value

import numpyro_tempered as nt

parser = argparse.ArgumentParser(
    description="Sparse ReLU networks by spike and slab variational inference."
)
parser.add_argument(
    "--small", action="store_true", help="few steps, to a temporary folder"
)
parser.add_argument("--output", type=Path, help="folder for tables and figures")
is_script = "__file__" in globals()
options = parser.parse_args(
    None if is_script else os.environ.get("SPARSE_NETWORKS", "").split()
)
HERE = Path(__file__).resolve().parent if is_script else Path.cwd()
RESULTS = HERE.parent / "docs" / "results"
if options.output is None:
    options.output = Path(tempfile.mkdtemp()) if options.small else RESULTS
options.output.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## The three numbers, where the truth is known
#
# A linear model with eight covariates that have correlations of a half, of which three count. Its log evidence is
# a sum over 2^8 sets of coefficients.

# %%
rng = np.random.default_rng(0)
x = np.sqrt(0.5) * (rng.normal(size=(40, 1)) + rng.normal(size=(40, 8)))
y = x @ np.r_[1.0, -0.7, 0.4, np.zeros(5)] + rng.normal(size=40)


def linear(x, y):
    """One coefficient in four is not 0."""
    prior = nt.sparse.SpikeAndSlab(0.25, 0.0, 1.0)
    w = numpyro.sample("w", prior.expand([x.shape[1]]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


terms = []
for gates in itertools.product([False, True], repeat=8):
    part = x[:, list(gates)]
    evidence = dist.MultivariateNormal(
        np.zeros(40), np.eye(40) + part @ part.T
    ).log_prob(y)
    terms.append(
        float(evidence) + sum(gates) * np.log(0.25) + (8 - sum(gates)) * np.log(0.75)
    )
log_evidence = np.logaddexp.reduce(terms)

rows = []
temperatures = (
    {"temperature 1": 1.0}
    if options.small
    else {"temperature 1": 1.0, "temperature .1": 0.1, "from 1 to .1": None}
)
for name, temperature in temperatures.items():
    chosen = {} if temperature is None else {"temperature": temperature}
    fit = nt.fit_svi(
        jax.random.key(0),
        linear,
        partial(nt.guides.AutoSpikeAndSlab, **chosen),
        x,
        y,
        num_steps=100 if options.small else 3000,
        num_particles=32 if options.small else 1000,
    )
    rounded = nt.sparse.round_and_refit(
        jax.random.key(1),
        fit,
        num_steps=0 if options.small else 1000,
        num_particles=32 if options.small else 1000,
    )
    rows.append(
        {
            "gates": name,
            "relaxed objective": -float(fit.losses[-500:].mean()),
            "ELBO": fit.elbo.value,
            "ELBO, rounded": rounded.elbo.value,
            "log evidence": log_evidence,
        }
    )
numbers = pd.DataFrame(rows).round(2)
numbers.to_csv(options.output / "sparse_networks_numbers.csv", index=False)
print(numbers.to_string(index=False))

# %% [markdown]
# At temperature 1 the relaxed objective is above the log evidence: it is no bound, and a comparison of models by
# it would compare excesses. Both others are bounds, and the greater one counts. Here, where the posterior is
# truly undecided about coefficients, rounding loses.
#
# ## A network
#
# All T weights and biases are one site, with the prior that each is not 0 with probability S/T, and then N(0, 1).


# %%
def layer_sizes(depth, width):
    """Inputs and outputs of each layer."""
    return list(itertools.pairwise([1] + [width] * depth + [1]))


def network(theta, x, depth, width):
    """The ReLU network of flat weights."""
    hidden, start = x, 0
    sizes = layer_sizes(depth, width)
    for k, (a, b) in enumerate(sizes):
        hidden = (
            hidden @ theta[start : start + a * b].reshape(a, b)
            + theta[start + a * b : start + (a + 1) * b]
        )
        hidden = jax.nn.relu(hidden) if k + 1 < len(sizes) else hidden
        start += (a + 1) * b
    return hidden[:, 0]


def num_weights(depth, width):
    """T."""
    return sum((a + 1) * b for a, b in layer_sizes(depth, width))


def sparse_network(x, y=None, *, num_on, depth, width):
    """Regression with noise of standard deviation .1."""
    size = num_weights(depth, width)
    theta = numpyro.sample(
        "theta", nt.sparse.SpikeAndSlab(num_on / size).expand([size]).to_event(1)
    )
    mean = numpyro.deterministic("f", network(theta, x, depth, width))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def start_at(rng_key, depth, width):
    """Weights of variance 2 / inputs; biases uniform over the range of x, so that kinks are spread."""
    parts = []
    for k, (a, b) in enumerate(layer_sizes(depth, width)):
        one, two = jax.random.split(jax.random.fold_in(rng_key, k))
        parts += [
            jax.random.normal(one, (a * b,)) * np.sqrt(2.0 / a),
            jax.random.uniform(two, (b,), minval=-1.0),
        ]
    return jnp.concatenate(parts)


TARGETS = {
    "smooth": lambda x: np.sin(np.pi * x),
    "rough": lambda x: (
        0.5 * sum(2.0 ** (-k / 2) * np.cos(2.0**k * np.pi * x) for k in range(7))
    ),
}


def draw(target, n, seed):
    """The data of the study."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, (n, 1))
    y = TARGETS[target](x[:, 0]) + 0.1 * rng.normal(size=n)
    return x.astype(np.float32), y.astype(np.float32)


num_steps, num_draws = (60, 32) if options.small else (6000, 192)


def fit_network(seed, x, y, num_on, depth, width, alpha=0.5):
    """One restart: fit, round, refit."""
    key = jax.random.key(seed)
    guide = partial(
        nt.guides.AutoSpikeAndSlab,
        temperature=lambda step: jnp.maximum(10.0 ** (-2.0 * step / num_steps), 0.1),
        init_loc_fn=init_to_value(values={"theta": start_at(key, depth, width)}),
        init_probs=0.9,
        init_scale=0.02,
    )
    model = partial(sparse_network, num_on=num_on, depth=depth, width=width)
    with warnings.catch_warnings():
        # The relaxed objective of a network still falls slowly after thousands of steps; restarts tell more.
        warnings.simplefilter("ignore")
        fit = nt.fit_svi(
            key,
            model,
            guide,
            x,
            y,
            alpha=alpha,
            num_steps=num_steps,
            num_particles=num_draws,
        )
        return fit, nt.sparse.round_and_refit(
            key, fit, num_steps=num_steps // 4, num_particles=num_draws
        )


# %% [markdown]
# Two restarts of three architectures on 200 points of the smooth target, at alpha = 1/2, and the ELBO's choice
# between the best restarts. The weights b of the penalty log(1/b) are 2^-L, shared equally by the architectures
# of a depth.

# %%
x, y = draw("smooth", 200, 0)
shapes = [(12, 1, 8)] if options.small else [(12, 1, 8), (24, 1, 16), (24, 2, 8)]
restarts = {
    shape: [
        fit_network(seed, x, y, *shape) for seed in range(1 if options.small else 2)
    ]
    for shape in shapes
}
best = {
    str(shape): max(itertools.chain(*pairs), key=lambda fit: fit.elbo.value)
    for shape, pairs in restarts.items()
}
log_prior = {
    str(s): -s[1] * np.log(2.0) - np.log(sum(t[1] == s[1] for t in shapes))
    for s in shapes
}
comparison = nt.compare(best, log_prior, num_samples=num_draws)
table = nt.table(comparison)[
    ["rank", "elbo", "se", "log_prior", "criterion", "kl"]
].round(1)
table.to_csv(options.output / "sparse_networks_comparison.csv")
print(table.to_string())

# %%
each = pd.DataFrame(
    [
        {
            "(S, L, D)": str(shape),
            "relaxed": -float(fit.losses[-300:].mean()),
            "ELBO": fit.elbo.value,
            "ELBO, rounded": rounded.elbo.value,
            "weights on": int(rounded.params["theta_auto_probs"].sum()),
            "of": num_weights(*shape[1:]),
        }
        for shape, pairs in restarts.items()
        for fit, rounded in pairs
    ]
).round(1)
each.to_csv(options.output / "sparse_networks_restarts.csv", index=False)
print(each.to_string(index=False))

# %% [markdown]
# The spread between restarts of one architecture is as large as the differences between architectures: the choice
# is one between optima that were found.
#
# ## The study of relaxed gates
#
# Six sizes of data, two targets, five architectures, three data sets and four restarts each. The smooth target is
# a sine; the rough one is a Weierstrass sum, with Hölder exponent 1/2 down to scales of 1/64.

# %%
fits = pd.read_csv(RESULTS / "sparse_networks_fits.csv")
curves = pd.read_csv(RESULTS / "sparse_networks_curves.csv")
fits["architecture"] = [
    f"({s}, {d}, {w})" for s, d, w in zip(fits["S"], fits["L"], fits["D"], strict=True)
]
kinds = fits[["S", "L", "D"]].drop_duplicates()
shared = kinds["L"].value_counts()
# Before and after rounding: both are bounds, and the greater one counts.
after = fits["elbo"] >= fits["elbo_before"]
for name in ("elbo", "risk", "risk_of_draws"):
    fits[f"rounded_{name}"] = fits[name]
    fits[name] = fits[name].where(after, fits[f"{name}_before"])
fits["rounded"] = after
fits["criterion"] = (
    fits["elbo"] - fits["L"] * np.log(2.0) - np.log(fits["L"].map(shared))
)
half = fits[fits["alpha"] == 0.5]
# Of each data set the restart and architecture that the criterion selects.
selected = half.loc[half.groupby(["target", "n", "data"])["criterion"].idxmax()]


def finish(figure, name):
    """Save a figure."""
    figure.savefig(options.output / f"sparse_networks_{name}.png", dpi=110)
    if is_script:
        plt.close(figure)


def draw_functions():
    """Targets, data and, rounded, the best restart of the selected architecture for the first data set."""
    sizes = sorted(fits["n"].unique())
    shown = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    figure, axes = plt.subplots(
        2, 3, figsize=(10.5, 6.0), sharex=True, sharey="row", layout="constrained"
    )
    for row, target in zip(axes, TARGETS, strict=True):
        for ax, n in zip(row, shown, strict=True):
            chosen = selected.query("target == @target and n == @n and data == 0").iloc[
                0
            ]
            own = half.query(
                "target == @target and n == @n and data == 0 and architecture == @chosen.architecture"
            )
            chosen = own.loc[own["rounded_elbo"].idxmax()]
            curve = curves.query("target == @target and n == @n and alpha == 0.5")
            curve = curve[
                (curve[["S", "L", "D"]] == chosen[["S", "L", "D"]].to_numpy()).all(
                    axis=1
                )
            ]
            x, y = draw(target, n, 0)
            ax.plot(x[:, 0], y, ".", color="0.75", markersize=3, zorder=0)
            ax.plot(
                curve["x"],
                TARGETS[target](curve["x"].to_numpy()),
                color="black",
                linewidth=1.0,
                label="target",
            )
            ax.fill_between(
                curve["x"],
                curve["low"],
                curve["high"],
                color="tab:blue",
                alpha=0.3,
                linewidth=0,
            )
            ax.plot(
                curve["x"],
                curve["mean"],
                color="tab:blue",
                linewidth=1.6,
                label="posterior mean, 90% of draws",
            )
            words = f"n = {n}: (S, L, D) = {chosen['architecture']}, {chosen['num_on']:.0f} on"
            ax.set_title(words, fontsize="medium")
            ax.grid(alpha=0.3)
        row[0].set_ylabel(f"{target} target")
    axes[0, 0].legend(frameon=False, fontsize="small")
    for ax in axes[1]:
        ax.set_xlabel("x")
    return figure


figure = draw_functions()
figure.suptitle("The selected architecture's best restart, rounded, at alpha = 1/2")
finish(figure, "functions")

# %% [markdown]
# ## Risk against n


# %%
SMOOTHNESS = {"smooth": 2.0, "rough": 0.5}


def rate(chosen):
    """The rate of the theorem at a selected architecture, in units of the noise's variance."""
    n, s, depth, width = (chosen[name] for name in ("n", "S", "L", "D"))
    return 0.01 * np.maximum(s * np.log(n * depth / s), depth * s * np.log(width)) / n


def draw_risks():
    """Excess risks on logarithmic axes, beside the rates."""
    figure, axes = plt.subplots(
        1, 2, figsize=(10.5, 4.6), sharey=True, layout="constrained"
    )
    for ax, (target, beta) in zip(axes, SMOOTHNESS.items(), strict=True):
        part, every = (
            selected[selected["target"] == target],
            half[half["target"] == target],
        )
        ax.plot(
            every["n"] * 1.06,
            every["risk"],
            ".",
            color="0.8",
            markersize=4,
            label="every restart",
            zorder=0,
        )
        for column, colour, words in (
            ("risk", "tab:blue", "selected: posterior mean"),
            ("risk_of_draws", "tab:orange", "selected: draws, E_q"),
        ):
            grouped = part.groupby("n")[column]
            mean, se = grouped.mean(), grouped.std() / np.sqrt(grouped.size())
            ax.errorbar(
                mean.index,
                mean,
                yerr=se,
                fmt="o-",
                color=colour,
                capsize=3,
                markersize=5,
                label=words,
            )
        ns = np.array(sorted(part["n"].unique()), float)
        anchor = part.groupby("n")["risk_of_draws"].mean().iloc[0]
        slope = 2 * beta / (2 * beta + 1)
        ax.plot(
            ns,
            anchor * (ns / ns[0]) ** -slope,
            "k--",
            linewidth=1.0,
            label=f"minimax slope n^-{slope:g}",
        )
        theorem = part.assign(rate=rate(part)).groupby("n")["rate"].mean()
        ax.plot(
            theorem.index,
            theorem,
            "k:",
            linewidth=1.4,
            label="theorem's rate at the selected (S, L, D)",
        )
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="number of data",
            title=f"{target} target (exponent {beta:g})",
        )
        ax.set_xticks(ns, labels=[f"{n:g}" for n in ns])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("squared distance to the target")
    handles, words = axes[0].get_legend_handles_labels()
    words = [
        w.replace(f"n^-{4 / 5:g}", "n^(-2β/(2β+1)), through the first point")
        for w in words
    ]
    figure.legend(
        handles,
        words,
        loc="outside lower center",
        ncols=3,
        fontsize="small",
        frameon=False,
    )
    return figure


finish(draw_risks(), "risk")

# %%
summary = selected.groupby(["target", "n"], sort=False).agg(
    risk=("risk", "mean"),
    risk_of_draws=("risk_of_draws", "mean"),
    weights_on=("num_on", "mean"),
    architectures=("architecture", lambda names: ", ".join(sorted(set(names)))),
)
summary.insert(2, "best risk of all", half.groupby(["target", "n"])["risk"].min())
summary = summary.reset_index()
summary.to_csv(
    options.output / "sparse_networks_summary.csv", index=False, float_format="%.5f"
)
print(summary.round(5).to_string(index=False))

# %% [markdown]
# ## Restarts


# %%
def draw_restarts(n):
    """ELBO and risk of every restart of every architecture."""
    figure, axes = plt.subplots(
        2, 2, figsize=(10.5, 6.4), sharex="col", sharey="row", layout="constrained"
    )
    names = list(dict.fromkeys(half["architecture"]))
    for column, target in zip(axes.T, TARGETS, strict=True):
        part = half.query("target == @target and n == @n")
        best = part.groupby("data")["elbo"].transform("max")
        for data, colour in zip(
            sorted(part["data"].unique()),
            ("tab:blue", "tab:orange", "tab:green"),
            strict=False,
        ):
            own = part[part["data"] == data]
            where = [
                names.index(name) + 0.18 * (data - 1) for name in own["architecture"]
            ]
            column[0].plot(
                where,
                (best - own["elbo"])[own.index] + 1.0,
                "o",
                color=colour,
                markersize=4,
            )
            column[1].plot(
                where,
                own["risk"],
                "o",
                color=colour,
                markersize=4,
                label=f"data set {data + 1}",
            )
            at = own["criterion"].idxmax()
            mark = names.index(own.loc[at, "architecture"]) + 0.18 * (data - 1)
            column[1].plot(
                mark,
                own.loc[at, "risk"],
                "o",
                color=colour,
                markersize=11,
                fillstyle="none",
            )
        column[0].set(yscale="log", title=f"{target} target, n = {n}")
        column[1].set(yscale="log", xlabel="(S, L, D)")
        column[1].set_xticks(range(len(names)), labels=names, fontsize="small")
        for ax in column:
            ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("ELBO below the best + 1, nats")
    axes[1, 0].set_ylabel("risk of the posterior mean (ring: selected)")
    axes[0, 0].invert_yaxis()
    axes[1, 1].legend(frameon=False, fontsize="small")
    return figure


finish(
    draw_restarts(int(sorted(fits["n"].unique())[len(fits["n"].unique()) // 2])),
    "restarts",
)

# %%
by_shape = half.groupby(["target", "n", "architecture", "data"])
spread = pd.DataFrame(
    {
        "ELBO, best less worst": by_shape["elbo"].max() - by_shape["elbo"].min(),
        "risk, worst over best": by_shape["risk"].max() / by_shape["risk"].min(),
        "rounding gains, nats": by_shape["rounded_elbo"].mean()
        - by_shape["elbo_before"].mean(),
        "relaxed less ELBO, nats": by_shape["relaxed"].mean()
        - by_shape["elbo_before"].mean(),
    }
)
spread = spread.groupby(["target", "n"], sort=False).median().round(1)
spread.reset_index().to_csv(options.output / "sparse_networks_spread.csv", index=False)
print(spread.to_string())

# %% [markdown]
# ## alpha = 1
#
# The architecture (24, 1, 16) at both powers, best of four restarts by ELBO, mean over data sets.

# %%
alike = fits[fits["architecture"] == "(24, 1, 16)"]
found = alike.loc[alike.groupby(["target", "n", "alpha", "data"])["elbo"].idxmax()]
powers = found.pivot_table(
    index=["target", "n"],
    columns="alpha",
    values=["risk", "risk_of_draws", "num_on"],
    sort=False,
)
powers.columns = [f"{name}, alpha = {alpha:g}" for name, alpha in powers.columns]
powers.reset_index().to_csv(
    options.output / "sparse_networks_alpha.csv", index=False, float_format="%.5f"
)
print(powers.round(4).to_string())

# %% [markdown]
# ## What relaxed gates miss
#
# On the rough target the risk of relaxed gates stops falling at n = 400. Is that the model, or the search? One
# may build a network by hand: 16 kinks at equal distances, with the coefficients of least squares. All its gates
# are on, and they are fitted from there, on the first data set. Or one may let data place the kinks, by
# `start_relu_network`, and switch weights off, one group after the other, by `fit_support`:


# %%
def build(x, y, width):
    """Weights of the piecewise linear least squares fit with equidistant knots, as a network with one layer."""
    knots = np.linspace(-1.0, 1.0, width + 1)[:-1]
    basis = np.column_stack([np.ones(len(x)), np.maximum(x - knots, 0.0)])
    intercept, *slopes = np.linalg.lstsq(basis, y, rcond=None)[0]
    # Shared between the layers, which the N(0, 1) slabs prefer.
    root = np.sqrt(np.abs(slopes))
    return jnp.asarray(
        np.concatenate([root, -root * knots, np.sign(slopes) * root, [intercept]]),
        jnp.float32,
    )


def fit_from(name, key, x, y, theta, **options):
    """ELBO and risk of a fit by backward elimination from flat weights."""
    model = partial(sparse_network, num_on=24, depth=1, width=16)
    guide = partial(
        nt.guides.AutoSpikeAndSlab, init_loc_fn=init_to_value(values={"theta": theta})
    )
    fit = nt.sparse.fit_support(
        key, model, guide, x, y, alpha=0.5, num_particles=200, **options
    )
    grid = np.linspace(-1.0, 1.0, 401)
    drawn = fit.guide.sample_posterior(
        jax.random.key(2), fit.params, sample_shape=(100,)
    )["theta"]
    mean = jax.vmap(lambda theta: network(theta, grid[:, None], 1, 16))(drawn).mean(0)
    return {
        "network": f"{name}, (24, 1, 16)",
        "ELBO": fit.elbo.value,
        "risk": float(np.mean((mean - TARGETS["rough"](grid)) ** 2)),
        "weights on": int(fit.params["theta_auto_probs"].sum()),
    }


def start_from_data(key, x, y):
    """Flat weights of the start by matching pursuit."""
    layers = nt.guides.start_relu_network(key, x, y, (16,))
    return jnp.asarray(
        np.concatenate([np.ravel(part) for layer in layers for part in layer]),
        jnp.float32,
    )


steps = {"num_steps": 10 if options.small else 500}
everything = num_weights(1, 16)
rows = []
for n in (60,) if options.small else (800, 1600):
    x, y = draw("rough", n, 0)
    each = [
        fit_from(
            "by hand",
            jax.random.key(1),
            x,
            y,
            build(x, y, 16),
            num_weights=everything,
            **steps,
        )
    ]
    relaxed = half.query("target == 'rough' and n == @n and data == 0")
    for words, part in (
        ("relaxed, best of 20", relaxed),
        ("relaxed", relaxed.query("S == 24 and D == 16")),
    ):
        for _, best in part.nlargest(1, "elbo").iterrows():
            row = {
                "network": f"{words}, {best['architecture']}",
                "ELBO": best["elbo"],
                "risk": best["risk"],
            }
            each.append(row | {"weights on": int(best["num_on"])})
    for seed in range(1 if options.small else 3):
        key = jax.random.key(seed)
        start = start_from_data(key, x, y)
        each.append(
            fit_from(f"eliminated, start {seed + 1}", key, x, y, start, **steps)
        )
    rows += [{"n": n} | row for row in each]
missed = pd.DataFrame(rows).round({"ELBO": 1, "risk": 4})
missed.to_csv(options.output / "sparse_networks_missed.csv", index=False)
print(missed.to_string(index=False))

# %% [markdown]
# The network by hand has a greater ELBO than the best of twenty with relaxed gates, and about half the risk:
# there the search is the limit, not the theorem. The best of three starts by elimination has yet a greater ELBO.
#
# `tests/benchmarks/sparse_networks_inputs.py` does this for one, two and five inputs and up to 10,000 data; its
# tables are on the page of this experiment.

# %%
if is_script:
    print(f"Tables and figures are in {options.output}")
