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
# # Did my variational inference work?
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/did_it_work.ipynb
#
# Variational inference always returns something: a mean and a standard deviation for everything. **Are they
# right?** Two models that everybody has fitted: a logistic regression, where the answer is "in part, and here
# is the rest", and eight schools, where it is "no, and nobody can tell from here how far off". Both fits have
# converged.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
# %%
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")

# %% [markdown]
# ## The data frame
#
# Six measurements of 569 tumours, standardised. The radius, the perimeter and the area of a cell nucleus are
# nearly the same number. The data come with scikit-learn, so no network is needed.

# %%
cancer = load_breast_cancer(as_frame=True)
x = cancer.data.iloc[:, :6].rename_axis(columns="measurement")
x, y = (x - x.mean()) / x.std(), cancer.target
x.corr().round(2)

# %% [markdown]
# ## A fit, checked
#
# The likelihood has the power 1/2, as for a model that nobody believes to the letter. The guide is mean field: a
# Gaussian for each number, none of which knows of another.


# %%
def logistic(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    with numpyro.plate("measurement", x.shape[1]):
        weights = numpyro.sample("weights", dist.Normal(0.0, 2.0))
    with numpyro.plate("tumour", len(y)):
        numpyro.sample(
            "benign",
            dist.Bernoulli(logits=jnp.asarray(x) @ weights + intercept),
            obs=jnp.asarray(y),
        )


began = time.perf_counter()
fit = nt.fit_svi(
    jax.random.key(0), logistic, AutoNormal, x, y, alpha=0.5, progress_bar=False
)
seconds_of_fit = time.perf_counter() - began
began = time.perf_counter()
check = nt.check_fit(jax.random.key(1), fit)
seconds_of_check = time.perf_counter() - began
print(check.advice)
nt.table(check).round(2)

# %% [markdown]
# The means are right. The standard deviations of the three twins are a third of what they should be, and the
# check knows what they should be: it has drawn from a Gaussian that covers the posterior, weighed the draws, and
# reports the moments with their errors. NUTS, which takes longer, agrees.

# %%
kernel = NUTS(nt.temper(logistic, alpha=0.5))
began = time.perf_counter()
mcmc = MCMC(
    kernel,
    num_warmup=500,
    num_samples=1000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(2), x.to_numpy(), y.to_numpy())
seconds_of_nuts = time.perf_counter() - began
draws = nt.to_inference_data(mcmc)

# %% tags=["thumbnail"]
ax = nt.plots.plot_check(check, draws)

# %% [markdown]
# *Blue: the fit, with the bound on its mean. Orange: what it should have been. Green: NUTS.* Orange and green are
# the same.
#
# ## Three ways to mend it
#
# Correct it, by the table above; give the mean-field fit its covariance back by linear response; or fit full
# covariance. Standard deviations over those of NUTS:

# %%
full = nt.fit_svi(
    jax.random.key(0),
    logistic,
    AutoMultivariateNormal,
    x,
    y,
    alpha=0.5,
    progress_bar=False,
)
response = nt.linear_response(jax.random.key(3), fit)
checks = {
    "linear response": nt.check_fit(jax.random.key(1), response),
    "full covariance": nt.check_fit(jax.random.key(1), full),
}
posterior = draws["posterior"]
nuts = np.r_[posterior["intercept"].std(), posterior["weights"].std(("chain", "draw"))]
sds = {
    "mean field": nt.table(check)["sd"],
    "corrected": nt.table(check)["corrected_sd"],
}
sds |= {name: nt.table(other)["sd"] for name, other in checks.items()}
(pd.DataFrame(sds).div(nuts, axis=0)).round(2)

# %% [markdown]
# ## A fit that no check can mend
#
# Eight schools, with the effect of each drawn from a population whose spread is not known. The posterior is a
# funnel: where the spread is small, all effects must be close together. No Gaussian is a funnel.

# %%
effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def centred(errors, effects):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(5.0))
    with numpyro.plate("school", len(effects)):
        theta = numpyro.sample("theta", dist.Normal(mean, spread))
        numpyro.sample("effect", dist.Normal(theta, errors), obs=effects)


def non_centred(errors, effects):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(5.0))
    with numpyro.plate("school", len(effects)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("effect", dist.Normal(mean + spread * z, errors), obs=effects)


schools = {
    model.__name__: nt.check_fit(
        jax.random.key(1),
        nt.fit_svi(
            jax.random.key(0), model, AutoNormal, errors, effects, progress_bar=False
        ),
    )
    for model in (centred, non_centred)
}
for name, result in schools.items():
    print(f"{name}: {result.status}. {result.advice}\n")

# %% [markdown]
# The centred model gets no numbers, rather than wrong ones. The other model says the same about the schools in
# other coordinates, without the funnel, and its fit can be corrected. The mean and the spread of the population:

# %%
runs = MCMC(
    NUTS(non_centred, target_accept_prob=0.95),
    num_warmup=1000,
    num_samples=2000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
runs.run(jax.random.key(4), errors, effects)
truth = runs.get_samples()
rows = {
    f"{name}, {kind}": {
        site: f"{nt.table(result)[prefix + 'mean'][site]:.1f} ± {nt.table(result)[prefix + 'sd'][site]:.1f}"
        for site in ("mean", "spread")
    }
    for name, result in schools.items()
    for kind, prefix in (("fit", ""), ("corrected", "corrected_"))
}
rows["NUTS"] = {
    site: f"{truth[site].mean():.1f} ± {truth[site].std():.1f}"
    for site in ("mean", "spread")
}
pd.DataFrame(rows).T.replace({"nan ± nan": "no answer", "± nan": "± ?"}, regex=True)

# %% [markdown]
# The spread of the centred fit is off by more than its standard deviation; its check refused it. The other one is
# corrected to what NUTS says. Its tail is long: how wide it is cannot be told from four thousand draws, and the
# check leaves that out.
#
# ## Device, time and throughput

# %%
again = time.perf_counter()
nt.check_fit(jax.random.key(5), fit)
again = time.perf_counter() - again
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"fit         {seconds_of_fit:.1f} s, compilation included; NUTS {seconds_of_nuts:.1f} s"
)
print(f"check       {seconds_of_check:.1f} s, compilation included")
count = 2 * check.num_draws
print(
    f"again       {count:,} draws weighed in {again:.2f} s: {count / again:,.0f} draws/s"
)
