# %% [markdown]
"""# When a posterior gets worse with more data, and SafeBayes.

The experiment of GvO (Grünwald, van Ommen, *Inconsistency of Bayesian inference for misspecified linear models,
and a proposal for repairing it*, Bayesian Analysis 12, 2017): a linear regression whose noise is not what the
model says. There are no outliers, the best parameters are in the model and all priors are proper; still the
average over nested models fits noise with forty covariates where four count. A smaller power alpha on the
likelihood repairs it, and SafeBayes finds that power from the data.

As a script: `python examples/safe_bayes.py [--small] [--output FOLDER]`. The long tables come from
`tests/benchmarks/safe_bayes_gvo.py`, which computes them in closed form; figures and the last part are made here.
`--small` shortens the last part and writes to a temporary folder. A notebook takes the same options from the
environment variable `SAFE_BAYES`.
"""

# %%
import argparse
import os
import tempfile
import warnings
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
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

parser = argparse.ArgumentParser(description="The experiment of GvO, and SafeBayes.")
parser.add_argument(
    "--small", action="store_true", help="few alphas and steps, to a temporary folder"
)
parser.add_argument("--output", type=Path, help="folder for tables and figures")
is_script = "__file__" in globals()
options = parser.parse_args(
    None if is_script else os.environ.get("SAFE_BAYES", "").split()
)
HERE = Path(__file__).resolve().parent if is_script else Path.cwd()
RESULTS = HERE.parent / "docs" / "results"
if options.output is None:
    options.output = Path(tempfile.mkdtemp()) if options.small else RESULTS
options.output.mkdir(parents=True, exist_ok=True)

tables = {
    name: pd.read_csv(RESULTS / f"safe_bayes_{name}.csv")
    for name in ("choices", "curves", "compression", "blocks", "generic")
}
choices = tables["choices"]


def cell(table, data, models, **columns):
    """The rows of one kind of data, one of models, and what else."""
    wanted = {"data": data, "models": models} | columns
    return table[
        np.logical_and.reduce([table[name] == value for name, value in wanted.items()])
    ]


def plain_ticks(ax, values):
    """A logarithmic axis of y with plain numbers."""
    ax.set(yscale="log")
    limits = ax.get_ylim()
    ax.set_yticks(values, labels=[f"{value:g}" for value in values])
    ax.set_ylim(limits)
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def finish(figure, name):
    """Save a figure."""
    figure.savefig(options.output / f"safe_bayes_{name}.png", dpi=120)


# %% [markdown]
# ## The data and the model
#
# There are 50 covariates. The mean of y is 0.1 times the sum of the first four, and there is an intercept of 0.
#
# * **Wrong**: a fair coin is tossed for each row. Heads: x = 0 and y = 0. Tails: x ~ N(0, I), and noise of
#   variance 1/20.
# * **Correct**: x ~ N(0, I) and noise of variance 1/40.
#
# The model is y ~ N(x'beta, s2), with beta | s2 ~ N(0, s2 I) and s2 ~ InverseGamma(1, 1/40). On wrong data its
# noise has the same variance everywhere, where the data have none at x = 0 and twice the average elsewhere. In
# all other ways the data are friendly: the true regression function is in the model, the best variance is 1/40 in
# both cases, and half of the rows are easy. One may think of customers who buy nothing, sensors that are off, or
# questions that all answer.
#
# Everything is in closed form, tempering included: the likelihood to the power alpha adds alpha x x' to a
# precision matrix where Bayes adds x x'. Nested models have the first p covariates, p = 0 ... 50, and a uniform
# prior.


# %%
def draw(seed, num_data, wrong):
    """Rows with their intercept, and outcomes."""
    rng = np.random.default_rng(seed)
    x = np.c_[np.ones(num_data), rng.normal(size=(num_data, 50))]
    heads = rng.random(num_data) < (0.5 if wrong else 0.0)
    x[heads, 1:] = 0.0
    noise = rng.normal(size=num_data) * np.sqrt(1 / 20 if wrong else 1 / 40)
    return x, np.where(heads, 0.0, 0.1 * x[:, 1:5].sum(1) + noise)


# %% [markdown]
# ## What goes wrong
#
# The excess risk is E (x'(b - beta))², with b the posterior mean of the coefficients in the average over models
# and x as in the data. A hundred data sets of each kind; bars are standard errors.

# %%
COLOURS = {
    "Bayes": "black",
    "leave-one-out": "tab:orange",
    "SafeBayes R-log (one-SE)": "tab:blue",
    "SafeBayes I-log (one-SE)": "tab:green",
}
WORDS = {
    "Bayes": "alpha = 1 (Bayes)",
    "leave-one-out": "alpha by leave-one-out",
    "SafeBayes R-log (one-SE)": "alpha by SafeBayes, R-log",
    "SafeBayes I-log (one-SE)": "alpha by SafeBayes, I-log",
}
MARKERS = dict(zip(COLOURS, "oDsv", strict=True))
TITLES = {
    "wrong": "wrong model: half the rows have no noise",
    "correct": "correct model",
}


def draw_risks(models):
    """Risk against n on both kinds of data."""
    figure, axes = plt.subplots(
        1, 2, figsize=(9.6, 4.0), sharey=True, layout="constrained"
    )
    sizes = sorted(choices["n"].unique())
    for ax, (data, title) in zip(axes, TITLES.items(), strict=True):
        for k, (method, colour) in enumerate(COLOURS.items()):
            part = cell(choices, data, models, method=method).sort_values("n")
            ax.errorbar(
                part["n"] * 1.02 ** (k - 1.5),
                part["risk"],
                yerr=part["risk_se"],
                fmt=f"{MARKERS[method]}-",
                color=colour,
                markersize=5,
                capsize=3,
                label=WORDS[method],
            )
        ax.set(xscale="log", xlabel="number of data")
        ax.set_xticks(sizes, labels=[str(n) for n in sizes])
        ax.set_title(title, fontsize="medium")
    for ax in axes:
        plain_ticks(ax, [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05])
    axes[0].set_ylabel("excess risk of the posterior mean")
    axes[1].legend(frameon=False, fontsize="small", loc="upper right")
    return figure


figure = draw_risks("average")
figure.suptitle(
    "Average over 51 nested regressions: a hundred data sets, ± standard error"
)
finish(figure, "risk")

# %% [markdown]
# From 50 to 100 data Bayes nearly doubles its risk, while the posterior puts its mass on forty covariates. Of a
# hundred rows fifty have x apart from 0, for 51 coefficients. With 200 data, two such rows a coefficient, most of
# the trouble has gone. With 100 covariates the peak is at 200 data.
#
# Ridge regression on all 50 covariates, without an average, has the same trouble and less of a cure, as no alpha
# takes out the 46 covariates that do not count.

# %%
figure = draw_risks("ridge")
figure.suptitle(
    "Ridge regression on all 50 covariates: a hundred data sets, ± standard error"
)
finish(figure, "ridge_risk")


# %%
def summary(models):
    """Risk in thousandths ± standard error by n, and size and alpha at n = 100."""
    rows = []
    for (data, method), part in choices[choices["models"] == models].groupby(
        ["data", "method"], sort=False
    ):
        by_n = part.set_index("n")
        row = {"data": data, "alpha": "1" if method == "Bayes" else method}
        row |= {
            f"n = {n}": f"{1e3 * r['risk']:.2f} ± {1e3 * r['risk_se']:.2f}"
            for n, r in by_n.iterrows()
        }
        at = by_n.loc[100]
        row |= {"alpha at 100": f"{2 ** at['log2_alpha']:.2g}"}
        if models == "average":
            row |= {"E p at 100": f"{at['size']:.1f}"}
        rows.append(row | {"ratio at 100": f"{at['ratio']:.3f} ± {at['ratio_se']:.3f}"})
    return pd.DataFrame(rows)


for models in ("average", "ridge"):
    table = summary(models)
    table.to_csv(options.output / f"safe_bayes_table_{models}.csv", index=False)
    print(f"{models}: excess risk, thousandths")
    print(table.to_string(index=False))

# %% [markdown]
# Alpha is its geometric mean over data sets. "Best in hindsight" takes, on each data set, the alpha with the
# least risk.
#
# ## How to see it: hypercompression
#
# The predictive density of a posterior is a mixture of members of the model, and itself no member. Where the
# model is wrong, such a mixture may predict better than all members. Here the model lacks a noise that is small
# at x = 0 and large elsewhere; regressions that agree at x = 0 and disagree elsewhere have it as a mixture. The
# price is that they disagree: each of them is bad.
#
# Left: cumulative log-loss of the predictive mixture, datum by datum, less that of the best parameters in the
# model. On wrong data it falls to -17 nats at n = 75, and is negative up to about n = 120: Bayes compresses the
# data better than the best of its own models, which cannot be expected to happen when the model is right. Right:
# the same for a draw from the posterior (R-log). Draws get worse while the mixture is doing well, and a look at
# predictive densities does not show it. Bands are two standard errors.


# %%
def draw_compression():
    """Cumulative losses against the best of the model, on wrong and on correct data."""
    table = tables["compression"]
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    for data, style in (("wrong", "-"), ("correct", "--")):
        part = table[table["data"] == data]
        for ax, column, colour, words in (
            (axes[0], "predictive", "black", "predictive mixture, alpha = 1"),
            (axes[1], "gibbs", "black", "draw, alpha = 1"),
            (axes[1], "gibbs, alpha 1/4", "tab:blue", "draw, alpha = 1/4"),
        ):
            line, se = part[column], part[f"{column}_se"]
            ax.plot(
                part["n"], line, style, color=colour, label=f"{words}, {data} model"
            )
            ax.fill_between(
                part["n"],
                line - 2 * se,
                line + 2 * se,
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
    axes[0].axhline(0.0, color="0.5", linewidth=1.0)
    axes[0].text(
        395,
        -0.4,
        "best in the model",
        ha="right",
        va="top",
        color="0.4",
        fontsize="small",
    )
    axes[0].set(ylabel="cumulative log-loss less that of the best, nats")
    axes[0].set_title(
        "the mixture: under a wrong model better than its best member",
        fontsize="medium",
    )
    axes[1].set_yscale("log")
    axes[1].set_title(
        "its draws: under a wrong model far worse (log scale)", fontsize="medium"
    )
    for ax in axes:
        ax.set_xlabel("number of data")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    return figure


finish(draw_compression(), "compression")

# %% [markdown]
# ## What SafeBayes does
#
# It asks what a *draw* from the posterior would lose on the next datum, or the posterior mean as a point, instead
# of the mixture:
#
# * **R-log**: the sum over i of E[-log p(y_i | x_i, theta)], with theta from the tempered posterior on the first
#   i - 1 data;
# * **I-log**: the same at the posterior mean of beta and of s2.
#
# These sums cannot gain from disagreement. The one-SE rule takes the largest alpha whose sum is within one
# standard error of the least, the error being that of the paired differences.
#
# For one regression the tempered posterior is a few lines.


# %%
def posterior(x, y, alpha):
    """Mean, cov, shape and rate: beta | s2 ~ N(mean, s2 cov) and s2 ~ IG(shape, rate)."""
    precision = np.eye(x.shape[1]) + alpha * x.T @ x
    mean = np.linalg.solve(precision, alpha * x.T @ y)
    rate = 1 / 40 + 0.5 * (alpha * np.sum((y - x @ mean) ** 2) + mean @ mean)
    return mean, np.linalg.inv(precision), 1.0 + 0.5 * alpha * len(y), rate


def r_log(x, y, alpha):
    """Loss of each datum, but for a constant, in expectation under the posterior of those before it."""
    found = []
    for i in range(1, len(y)):
        mean, cov, shape, rate = posterior(x[:i], y[:i], alpha)
        # -E log s2 is digamma(shape) - log(rate), of which log(shape) - 1/(2 shape) is enough here.
        log_s2 = np.log(rate / shape) + 0.5 / shape
        found.append(
            0.5
            * (log_s2 + (y[i] - x[i] @ mean) ** 2 * shape / rate + x[i] @ cov @ x[i])
        )
    return np.array(found)


x, y = draw(0, 100, wrong=True)
alphas = 2.0 ** -np.arange(7.0)
losses = np.array([r_log(x, y, alpha) for alpha in alphas])
difference = losses - losses[losses.sum(1).argmin()]
pd.DataFrame(
    {
        "alpha": alphas,
        "R-log less the least": difference.sum(1),
        "paired standard error": np.sqrt(len(y) - 1) * difference.std(1, ddof=1),
        "squared distance of the mean to beta": [
            np.sum((posterior(x, y, a)[0] - np.r_[0.0, [0.1] * 4, np.zeros(46)]) ** 2)
            for a in alphas
        ],
    }
).round(3)

# %% [markdown]
# Over a hundred data sets at n = 100, with the losses that do choose well and those that do not:


# %%
CRITERIA = {
    "gibbs": ("R-log", "tab:blue", "-"),
    "plugin": ("I-log", "tab:green", "-"),
    "loo": ("leave-one-out", "tab:orange", "--"),
    "predictive": ("prequential prediction", "tab:red", "--"),
    "evidence": ("evidence, negative", "tab:purple", ":"),
    "evidence of 100 y": ("evidence of 100 y, negative", "tab:pink", ":"),
}


def draw_curves():
    """Risk, and criteria less their minimum, along alpha."""
    table = tables["curves"]
    figure, axes = plt.subplots(
        2, 2, figsize=(9.6, 6.6), sharex=True, layout="constrained"
    )
    for column, (data, title) in zip(axes.T, TITLES.items(), strict=True):
        for models, colour in (("average", "black"), ("ridge", "tab:brown")):
            part = cell(table, data, models)
            words = "average over models" if models == "average" else "ridge, p = 50"
            column[0].errorbar(
                part["alpha"],
                part["risk"],
                yerr=part["risk_se"],
                color=colour,
                fmt="o-",
                markersize=3,
                label=words,
            )
        part = cell(table, data, "average").set_index("alpha")
        for k, (name, (words, colour, style)) in enumerate(CRITERIA.items()):
            shown = part[name] - part[name].min()
            column[1].plot(
                shown.index,
                shown,
                style,
                color=colour,
                label=words if data == "wrong" else None,
            )
            # Below the curves, as those that are flat near their least say little of where it is.
            column[1].plot(
                shown.idxmin(), -8.0 - 6.0 * k, "^", color=colour, markersize=6
            )
        column[0].set(xscale="log")
        plain_ticks(column[0], [0.001, 0.002, 0.005, 0.01, 0.02, 0.05])
        column[0].set_title(title, fontsize="medium")
        column[1].set(ylim=(-44.0, 100.0), xlabel="alpha", yticks=range(0, 101, 20))
        column[1].axhline(0.0, color="0.5", linewidth=0.8)
        column[1].grid(alpha=0.3)
        column[0].set_ylim(0.001, 0.1)
    axes[0, 0].set_ylabel("excess risk, n = 100")
    axes[1, 0].set_ylabel(
        "criterion less its least, nats\n(average over models; triangle: its least)"
    )
    axes[0, 0].legend(frameon=False, fontsize="small", loc="lower left")
    figure.legend(
        *axes[1, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        fontsize="small",
    )
    return figure


finish(draw_curves(), "curves")

# %% [markdown]
# On wrong data the evidence is best at alpha = 1, where the risk is largest, and what judges the predictive
# mixture at .7 or .5, where the risk is a multiple of the least or about to rise. In units a hundred times
# smaller (100 y) the evidence is best at the other end: its derivative in alpha is the expected log-likelihood,
# whose sign has no meaning.
#
# ## What it costs where the model is right
#
# Ratio of the risk to that of alpha = 1, over the same data sets, and how often alpha = 1 is chosen:

# %%
SAFE = [m for m in choices["method"].unique() if m.startswith("SafeBayes")]
cost = cell(choices, "correct", "average")
cost = cost[cost["method"].isin(SAFE)]
shown = cost.assign(
    ratio=[
        f"{r:.3f} ± {s:.3f}"
        for r, s in zip(cost["ratio"], cost["ratio_se"], strict=True)
    ]
).pivot_table(
    index="method", columns="n", values=["ratio", "at_one"], aggfunc="first", sort=False
)
shown.columns = [
    f"{'alpha = 1' if name == 'at_one' else name}, n = {n}" for name, n in shown.columns
]
shown.reset_index().to_csv(options.output / "safe_bayes_cost.csv", index=False)
print(shown.to_string())

# %% [markdown]
# ## Eight refits instead of n
#
# Where each refit costs a fit, the posterior is refitted at the start of eight blocks only. The blocks may be
# equal, or grow: geometric has edges n^(k/8), quadratic n (k/8)². How often the chosen alpha is within one step
# (a factor of the square root of 2) of that of n refits, how far it is away in powers of 2, and the risk of both,
# over n = 50 ... 400 and both kinds of data:

# %%
blocks = tables["blocks"]
named = blocks.replace(
    {
        "loss": {"gibbs": "R-log", "plugin": "I-log"},
        "rule": {"min": "minimum", "one_se": "one-SE"},
    }
)
named = named[
    [
        "models",
        "loss",
        "rule",
        "spacing",
        "within_a_step",
        "log2_ratio",
        "log2_distance",
        "risk",
        "risk_n_refits",
    ]
].sort_values(["models", "loss", "rule"], kind="stable")
named.round(
    {
        "within_a_step": 2,
        "log2_ratio": 2,
        "log2_distance": 2,
        "risk": 4,
        "risk_n_refits": 4,
    }
).to_csv(options.output / "safe_bayes_table_blocks.csv", index=False)
print(named.round(4).to_string(index=False))

# %% [markdown]
# No spacing is best throughout, and the risks hardly differ. The first block has the prior's loss, at all alphas
# the same, and leaving it out never changed a choice.
#
# ## With a NumPyro model
#
# The same ridge regression as a NumPyro model, a Gaussian guide with full covariance, and `nt.select_alpha`:
# eight blocks, in the order of the data.


# %%
def model(x, y=None):
    """The ridge regression with its prior."""
    s2 = numpyro.sample("s2", dist.InverseGamma(1.0, 1 / 40))
    coef = numpyro.sample(
        "coef", dist.Normal(0.0, jnp.sqrt(s2)).expand([x.shape[1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ coef)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, jnp.sqrt(s2)), obs=y)


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    choice = nt.select_alpha(
        jax.random.key(0),
        model,
        AutoMultivariateNormal,
        jnp.asarray(x),
        jnp.asarray(y),
        alphas=[0.125, 1.0] if options.small else alphas[::-1],
        criterion=nt.alpha.safe_bayes(blocks=8, permutations=0),
    )
print(choice.advice, *(warning.message for warning in caught), sep="\n")
nt.table(choice.data).round(2)

# %% [markdown]
# Against the closed form, on the same data, blocks and order (five data sets of each kind): R-log of the library,
# of the best Gaussian guide and of the exact posterior, each less its value at the exact best alpha; the paired
# standard error that the one-SE rule has; and the largest difference to the exact one, in these standard errors.

# %%
generic = tables["generic"]
centred = generic.copy()
for _, part in generic.groupby(["data", "seed"]):
    best = part["gibbs_exact"].idxmin()
    for name in ("gibbs", "gibbs_guide", "gibbs_exact"):
        centred.loc[part.index, name] -= part.loc[best, name]
centred["off"] = (centred["gibbs"] - centred["gibbs_exact"]).abs() / centred[
    "se"
].where(centred["se"] > 0)
shown = centred.groupby(["data", "alpha"], sort=False).agg(
    library=("gibbs", "mean"),
    guide=("gibbs_guide", "mean"),
    exact=("gibbs_exact", "mean"),
    standard_error=("se", "mean"),
    largest_difference=("off", "max"),
)
shown.columns = shown.columns.str.replace("_", " ")
shown.round(
    {name: 2 if "difference" in name else 1 for name in shown}
).reset_index().to_csv(options.output / "safe_bayes_table_generic.csv", index=False)
print(shown.round(2).to_string())
each = generic.drop_duplicates(["data", "seed"])
print(
    f"the same alpha on {(each['chosen'] == each['chosen_exact']).sum()} of {len(each)} data sets"
)

# %%
if is_script:
    print(f"Tables and figures are in {options.output}")
