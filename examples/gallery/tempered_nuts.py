# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tempered posterior by NUTS: do people see a doctor less if they pay for it?
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/tempered_nuts.ipynb
#
# In the RAND Health Insurance Experiment families were assigned to plans that paid all of their bills, or some.
# **How many visits does a patient's share of the bill prevent, and how sure can we be?** The outcome is a count
# for each person and year. A Poisson regression is the model of the textbook, but counts vary seven times as
# much as a Poisson variable would, and people of one family resemble each other: twenty thousand rows say less
# than a likelihood that multiplies them believes. The notebook tempers the model, runs 64 chains side by side,
# and looks at both posteriors in ArviZ.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)

# %%
import time
import warnings
from importlib.metadata import version

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import statsmodels.api as sm
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"

# %% [markdown]
# ## The data frame
#
# The data come with statsmodels, so no network is needed. They have no number for a family; successive rows
# with the same plan and the same index of diseases are taken for one. A GPU gets all families, a processor
# every eighth.

# %%
visits = sm.datasets.randhie.load_pandas().data
plan = ["lncoins", "idp", "lpi", "fmde", "disea"]
family = (visits[plan].diff().abs().sum(axis=1) > 1e-9).cumsum().to_numpy()
if jax.default_backend() == "cpu":
    visits, family = visits[family % 8 == 0], family[family % 8 == 0]
num_families = len(np.unique(family))
print(
    f"RAND Health Insurance Experiment from statsmodels: {len(visits):,} rows, {num_families:,} families"
)
print(
    f"visits to a doctor in a year: mean {visits['mdvis'].mean():.2f}, variance {visits['mdvis'].var():.1f}"
)

# %%
names = [
    "level",
    "share of the bill",
    "physical limitation",
    "chronic diseases",
    "good health",
    "fair or poor health",
]
x = np.column_stack(
    [
        np.ones(len(visits)),
        visits["lncoins"]
        / np.log(96.0),  # log(share in percent + 1), from 0 (free) to 1 (95%)
        visits["physlm"],
        visits["disea"] / 10.0,
        visits["hlthg"],
        visits["hlthf"] + visits["hlthp"],
    ]
).astype(np.float32)
y = visits["mdvis"].to_numpy(int)

# %% [markdown]
# ## The model, and a power for it
#
# `calibrated_powers` compares, coefficient by coefficient, the standard deviation that the model believes in
# with the one that families imply when they are counted as the independent units. `coverage` is what an
# interval of the untempered posterior that claims 95% holds.


# %%
def poisson(x, y=None):
    effects = numpyro.sample(
        "effects", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    with numpyro.plate("person_years", len(x)):
        numpyro.sample("visits", dist.Poisson(jnp.exp(x @ effects)), obs=y)


powers = nt.alpha.calibrated_powers(jax.random.key(0), poisson, x, y, groups=family)
powers.set_axis(names).round(3)

# %% [markdown]
# `select_alpha` finds one power for all, by the criterion whose aim is the width of intervals. It reads
# curvature and scores of the model at the mode, and fits a Gaussian guide at the powers that are compared.

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore", nt.warnings.CompilationWarning)
    choice = nt.select_alpha(
        jax.random.key(1),
        poisson,
        AutoMultivariateNormal,
        x,
        y,
        alphas=[0.03, 1.0],
        criterion=nt.alpha.magnitude(),
        groups=family,
    )
alpha = choice.alpha
print(choice.advice)

# %% [markdown]
# ## Sixty-four chains in one program
#
# `temper` makes of the model one whose likelihood has the power alpha, which NumPyro's NUTS takes like any
# other. `chain_method="vectorized"` runs the chains as rows of one array.

# %%
num_chains = 64
num_warmup, num_samples = (150, 50) if jax.default_backend() == "cpu" else (500, 500)


def sample(power):
    """The chains, and the seconds of the warm-up (with compilation) and of the draws."""
    kernel = NUTS(nt.temper(poisson, alpha=power), dense_mass=True)
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.perf_counter()
    mcmc.warmup(jax.random.key(2), x, y)
    jax.block_until_ready(mcmc.post_warmup_state)
    middle = time.perf_counter()
    mcmc.run(jax.random.key(3), x, y)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, middle - began, time.perf_counter() - middle


labels = {"coords": {"effect": names}, "dims": {"effects": ["effect"]}}
runs = {"Bayes": sample(1.0), "tempered": sample(alpha)}
posteriors = {
    name: nt.to_inference_data(mcmc, log_lik=False, **labels)
    for name, (mcmc, *_) in runs.items()
}

# %%
summaries = {
    name: az.summary(data, var_names=["effects"]) for name, data in posteriors.items()
}
columns = ["mean", "sd", "ess_bulk", "r_hat"]
tables = {
    name: summary[columns].astype(float).set_axis(names)
    for name, summary in summaries.items()
}
pd.concat(tables, axis=1).round(3)

# %% [markdown]
# Means agree and standard deviations do not. All $\hat R$ are near 1: both posteriors are sampled well, and
# that says nothing about which of them to believe.

# %% tags=["thumbnail"]
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for shift, (name, data), colour in zip(
    (0.15, -0.15), posteriors.items(), (BLUE, ORANGE), strict=True
):
    draws = (
        data["posterior"]["effects"]
        .sel(effect=names[1:])
        .stack(draws=("chain", "draw"))
        .values
    )
    low, middle, high = np.quantile(np.exp(draws), [0.025, 0.5, 0.975], axis=1)
    height = np.arange(len(names) - 1)[::-1] + shift
    label = f"{name}, alpha = {1.0 if name == 'Bayes' else alpha:.2g}"
    ax.errorbar(
        middle,
        height,
        xerr=[middle - low, high - middle],
        fmt="o",
        color=colour,
        capsize=4,
        label=label,
    )
ax.axvline(1.0, color=GREY, linestyle="--")
ax.set_yticks(np.arange(len(names) - 1), names[:0:-1])
ax.set(
    xlabel="visits are multiplied by (95% intervals)",
    title="What changes the number of visits to a doctor?",
)
_ = ax.legend()

# %% [markdown]
# *Orange and blue agree on the points and not on the widths: with the power that the families ask for,
# intervals are several times as long. The share of the bill stays clearly below the dashed line.*

# %%
for name, data in posteriors.items():
    share = np.exp(data["posterior"]["effects"].sel(effect="share of the bill").values)
    low, high = np.quantile(share, [0.025, 0.975])
    print(
        f"{name:8s} who pays 95% of the bill makes {share.mean():.2f} times as many visits,",
        f"95% interval {low:.2f} to {high:.2f}",
    )

# %% [markdown]
# The answer: those who pay almost all of their bill go to the doctor less, by an amount that Bayes knows to a
# few percent and the experiment does not. A better model, negative binomial with an effect of each family, is
# the better remedy where you can have it; the power is one line.
#
# ## Device, time and throughput

# %%
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
for name, (_, first, loop) in runs.items():
    draws = num_chains * num_samples
    effective = tables[name]["ess_bulk"].min()
    print(
        f"{name:8s}    compiled and warmed up in {first:.1f} s, {draws:,} draws in {loop:.1f} s:",
        f"{draws / loop:,.0f} draws/s, {effective / loop:,.0f} effective draws/s of the worst effect",
    )
