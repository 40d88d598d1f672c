# %% [markdown]
"""# Which alpha for these data?

Seven regressions of textbooks. On five of them the model is visibly wrong: the spread grows, there is an
outlier, tails are heavy, counts vary more than the model allows. On two it is about right. Which power alpha of
the likelihood does each method choose, and what is it good for: better predictions, or intervals that
hold the truth as often as they say?

As a script: `python examples/choose_alpha.py [--small] [--output FOLDER]`. The study is
`tests/benchmarks/alpha_real_data.py`, and its tables are read here; the choices of the first part are made live.
`--small` shortens these. A notebook takes the same options from the environment variable `CHOOSE_ALPHA`.
"""

# %%
import argparse
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

if "__file__" in globals():
    matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

parser = argparse.ArgumentParser(description="Which alpha for these data?")
parser.add_argument("--small", action="store_true", help="few alphas and steps")
parser.add_argument(
    "--output", type=Path, help="folder for figures; they are not saved by default"
)
is_script = "__file__" in globals()
options = parser.parse_args(
    None if is_script else os.environ.get("CHOOSE_ALPHA", "").split()
)
HERE = Path(__file__).resolve().parent if is_script else Path.cwd()
RESULTS = HERE.parent / "docs" / "results"
sys.path.insert(0, str(HERE))

from alpha_data import engel  # noqa: E402


def finish(figure, name):
    """Save a figure, where that is asked for."""
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.output / f"choose_alpha_{name}.png", dpi=120)


# %% [markdown]
# ## One data set, live: Engel's households
#
# Food expenditure on income, 235 Belgian households of 1857, both standardised. The model is a line with normal
# noise of one unknown scale, and the noise plainly has not one scale:

# %%
problem = engel()
x, y = (jnp.asarray(part) for part in problem.data)
slope, level = np.polyfit(np.asarray(x[:, 1]), np.asarray(y), 1)
figure, ax = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
ax.plot(x[:, 1], y, "o", markersize=4, alpha=0.6)
ends = np.array([x[:, 1].min(), x[:, 1].max()])
ax.plot(ends, level + slope * ends, color="black", linewidth=1.2)
ax.set(xlabel="income, standardised", ylabel="food expenditure, standardised")
finish(figure, "engel")

# %% [markdown]
# One call for each method. Each says what it aims at, and whether there is a need to temper:

# %%
criteria = {
    "SafeBayes": nt.alpha.safe_bayes(blocks=4 if options.small else 8),
    "Lyddon": nt.alpha.lyddon(),
    "magnitude": nt.alpha.magnitude(),
    "bootstrap Fisher": nt.alpha.bootstrap_fisher(),
    "GPC": nt.alpha.gpc(),
}
if options.small:
    criteria = {name: criteria[name] for name in ("SafeBayes", "Lyddon")}
grid = [0.25, 1.0] if options.small else 2.0 ** np.arange(-6, 1)
choices = {}
for name, criterion in criteria.items():
    try:
        choices[name] = nt.select_alpha(
            jax.random.key(0),
            problem.model,
            AutoMultivariateNormal,
            x,
            y,
            # The grid is SafeBayes' alone: the others name their alpha outright.
            alphas=grid if name == "SafeBayes" else [1.0],
            criterion=criterion,
        )
        print(f"{name}: {choices[name].advice}\n")
    except ValueError as refusal:
        print(f"{name} refuses: {refusal}\n")

# %% [markdown]
# The path of SafeBayes. `criterion` is the loss of posterior draws on data to come, in nats, and
# `effective_parameters` is 3 where the three parameters are determined by the data:

# %%
nt.table(choices["SafeBayes"].data).round(2)

# %% [markdown]
# **Two camps.** SafeBayes sees no need to temper, and magnitude, bootstrap Fisher and GPC ask for a fifth or
# less. Neither is wrong, and the advice of SafeBayes says both. There are 235 data for three parameters: the line
# is known well enough to predict with, and a wider posterior makes its draws worse. But its 95% intervals pretend
# to know the line better than they do. Lyddon's method has the second aim and the first one's answer: its power
# is a mean of those that single directions ask for, here .06 to 2, and one quiet direction outweighs the others.
# Powers of single parameters:

# %%
nt.alpha.calibrated_powers(jax.random.key(3), problem.model, x, y).round(3)

# %% [markdown]
# Intervals of the slope:

# %%
alphas = {"alpha = 1": 1.0} | {name: choice.alpha for name, choice in choices.items()}
fits = {name: choice.fit for name, choice in choices.items()}
at_one = nt.fit_svi(jax.random.key(1), problem.model, AutoMultivariateNormal, x, y)
draws = {
    name: np.asarray(
        fit.guide.sample_posterior(jax.random.key(2), fit.params, sample_shape=(4000,))[
            "coef"
        ][:, 1]
    )
    for name, fit in ({"alpha = 1": at_one} | fits).items()
}
figure, ax = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
for k, values in enumerate(draws.values()):
    low, high = np.quantile(values, [0.025, 0.975])
    ax.plot([low, high], [k, k], linewidth=3)
    ax.plot(values.mean(), k, "o", color="black", markersize=4)
ax.set_yticks(
    range(len(draws)), labels=[f"{name} ({alphas[name]:.2g})" for name in draws]
)
ax.invert_yaxis()
ax.set(xlabel="slope: posterior mean and 95% interval")
ax.grid(alpha=0.3, axis="x")
finish(figure, "intervals")

# %% [markdown]
# Which interval is right? One data set cannot tell: for that we need many of them, and the truth.
#
# ## Seven data sets, a hundred training sets each
#
# The whole data set is the population, and the minimiser of its loss the truth: what a model that is wrong can
# know at best. Training sets of n rows are drawn from it with replacement; each method chooses its alpha on each,
# and the rows not drawn are predicted. Posteriors are normal approximations at the mode (Laplace); the
# intervals are of the coefficients.

# %%
sets = pd.read_csv(RESULTS / "alpha_real_sets.csv")
methods = pd.read_csv(RESULTS / "alpha_real_methods.csv")
curves = pd.read_csv(RESULTS / "alpha_real_curves.csv")
sets[["data", "trouble", "rows", "coefficients", "n"]]

# %%
for value in ("alpha", "coverage", "score_gain"):
    print(f"\n{value}")
    print(
        methods.pivot_table(index="data", columns="method", values=value, sort=False)
        .round(3)
        .to_string()
    )

# %% [markdown]
# Rows: data sets. `coverage` is that of nominal 95% intervals, with a standard error of at most
# .03; `score_gain` the mean log predictive density of a held-out datum less that at alpha = 1, in nats.

# %%
COLOURS = [
    "black",
    "tab:blue",
    "tab:orange",
    "tab:red",
    "tab:purple",
    "tab:green",
    "0.5",
]
figure, ax = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
order = list(sets["data"])
for (name, part), colour, shift in zip(
    methods.groupby("method", sort=False),
    COLOURS,
    np.linspace(-0.3, 0.3, 7),
    strict=True,
):
    place = [order.index(each) + shift for each in part["data"]]
    ax.errorbar(
        place,
        part["coverage"],
        yerr=part["coverage_se"],
        fmt="o",
        color=colour,
        markersize=5,
        label=name,
    )
ax.axhline(0.95, color="0.5", linestyle="--", linewidth=1.0)
ax.set_xticks(
    range(len(order)),
    labels=[f"{r.data}\n{r.trouble}" for r in sets.itertuples()],
    fontsize="x-small",
)
ax.set(ylabel="coverage of 95% intervals")
ax.grid(alpha=0.3, axis="y")
figure.legend(loc="outside lower center", ncols=7, fontsize="small")
finish(figure, "coverage")

# %%
worst = methods[methods["method"] == "alpha = 1"].set_index("data")["coverage"]
print(
    "coverage at alpha = 1, and the alpha at which it is .95 (all coefficients together):"
)
print(sets.set_index("data")[["covers"]].assign(at_one=worst).round(2).to_string())

# %% [markdown]
# **The answer.** It depends on the question. For predictions by draws, alpha = 1 on all seven: SafeBayes says
# so, but for state crime, where it errs. For intervals, GPC or bootstrap Fisher: they keep close to 1 where the
# model is right, and repair most of the coverage where it is wrong, if the training set shows what is wrong.
# Lyddon's power is to be believed where its directions agree. A fixed 1/2 is too little for overdispersed
# counts and too much for a model that is right.
