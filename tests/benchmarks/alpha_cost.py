"""What a grid of alphas and SafeBayes cost beside one fit: logistic regression on the breast cancer data.

All take the same number of SVI steps for their fit to all data, and run in turn, so that what else the machine
does falls on all of them. Every call compiles anew, with JAX's caches emptied before it. The compiled program is
the same for any number of steps, so the time of a call with ten steps is that of compiling and reporting, and
what a whole call takes beyond it is that of the steps.
"""

import argparse
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer.autoguide import AutoNormal
from provenance import describe
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt
from numpyro_tempered.infer.fixed_steps import default_optim

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ALPHAS = np.geomspace(1 / 64, 1.0, 10)


def data():
    found = load_breast_cancer()
    x = (found.data - found.data.mean(0)) / found.data.std(0)
    return jnp.asarray(np.column_stack([np.ones(len(x)), x])), jnp.asarray(found.target)


def model(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def one_fit(key, x, y, steps):
    return nt.fit_svi(key, model, AutoNormal, x, y, alpha=0.5, num_steps=steps, optim=default_optim(steps)).params


def ten_alphas(key, x, y, steps):
    criterion = nt.alpha.theory_default()
    return nt.select_alpha(
        key, model, AutoNormal, x, y, alphas=ALPHAS_WITH_HALF, criterion=criterion, num_steps=steps
    ).fit.params


def safe_bayes(key, x, y, steps):
    criterion = nt.alpha.safe_bayes(blocks=8)
    return nt.select_alpha(
        key, model, AutoNormal, x, y, alphas=ALPHAS, criterion=criterion, num_steps=steps, num_refit_steps=steps
    ).fit.params


WORK = {"one fit": one_fit, "ten alphas": ten_alphas, "SafeBayes, 8 blocks": safe_bayes}
# The default of the theory is among them, so that its grid has ten alphas too.
ALPHAS_WITH_HALF = np.sort(np.append(np.delete(ALPHAS, 8), 0.5))


def seconds(work, key, x, y, steps):
    jax.clear_caches()
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Ten steps are no fit.
        warnings.simplefilter("ignore")
        jax.block_until_ready(work(key, x, y, steps))
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    steps, repeats = (100, 1) if options.small else (5000, 3)
    x, y = data()
    rows = []
    for repeat in range(repeats):
        for name, work in WORK.items():
            key = jax.random.key(repeat)
            few, whole = seconds(work, key, x, y, 10), seconds(work, key, x, y, steps)
            rows.append({"repeat": repeat, "work": name, "whole": whole, "steps alone": whole - few})
            print(rows[-1], flush=True)
    wide = pd.DataFrame(rows).pivot(index="repeat", columns="work")
    table = pd.DataFrame(
        {
            "seconds, whole call": wide["whole"].median(),
            "ratio to one fit": wide["whole"].div(wide["whole"]["one fit"], axis=0).median(),
            "seconds, steps alone": wide["steps alone"].median(),
            "ratio of the steps": wide["steps alone"].div(wide["steps alone"]["one fit"], axis=0).median(),
        }
    ).loc[list(WORK)]
    print(table.to_string(float_format="%.2f"))
    options.output.mkdir(parents=True, exist_ok=True)
    table.round(3).to_csv(options.output / "alpha_cost.csv")
    sizes = (
        f"n = {x.shape[0]}, d = {x.shape[1]}, {steps} steps, {len(ALPHAS)} alphas, medians of {repeats} rounds, "
        "refits of as many steps"
    )
    (options.output / "alpha_cost.txt").write_text(
        describe(sizes) + "\n" + table.to_string(float_format="%.2f") + "\n"
    )


if __name__ == "__main__":
    main()
