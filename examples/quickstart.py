"""The three pillars on real data: temper a model, learn a stream, choose a model.

Run ``python examples/quickstart.py``; under two minutes on two CPU cores, compilation included. Prints
tables and writes figures to a folder that it names (``--output``). ``--small`` does the same work on
fewer draws and models.
"""

import argparse
import platform
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoNormal
from scipy.optimize import linprog
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt

ALPHA = 0.5
SEED = 2019


@nt.temper(alpha=ALPHA)
def tempered_logistic(x, y=None):
    """Logistic regression whose likelihood is raised to the power ALPHA."""
    logistic(x, y)


def logistic(x, y=None):
    """Logistic regression with a unit Gaussian prior on standardised features."""
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    with numpyro.plate("patients", x.shape[0]):
        numpyro.sample("benign", dist.Bernoulli(logits=x @ weights), obs=y)


def load_data():
    """Breast cancer, Wisconsin (569 patients): standardised features with an intercept, labels in {0, 1}."""
    data = load_breast_cancer()
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    x = np.column_stack([np.ones(len(x)), x]).astype(np.float32)
    return x, data.target.astype(np.int32), ["intercept", *data.feature_names]


def temper_a_model(x, y, names, num_draws):
    """(a) One decorated model, the tempered posterior by NUTS and by SVI, beside plain Bayes."""
    columns = [
        names.index(f"worst {name}")
        for name in ("radius", "texture", "smoothness", "concavity")
    ]
    x, names = x[:, [0, *columns]], [names[j] for j in (0, *columns)]
    labels = {"coords": {"feature": names}, "dims": {"weights": ["feature"]}}

    def run_nuts(model):
        mcmc = MCMC(
            NUTS(model),
            num_warmup=num_draws // 2,
            num_samples=num_draws,
            num_chains=2,
            chain_method="sequential",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(SEED), x, y)
        return nt.to_inference_data(mcmc, **labels)

    fit = nt.fit_svi(jax.random.key(SEED), logistic, AutoNormal, x, y, alpha=ALPHA)
    results = {
        f"NUTS, alpha = {ALPHA}": run_nuts(tempered_logistic),
        f"SVI, alpha = {ALPHA}": nt.to_inference_data(
            fit, num_samples=num_draws, **labels
        ),
        "NUTS, alpha = 1": run_nuts(logistic),
    }
    for name, data in results.items():
        # Convergence diagnostics are for chains, not for independent draws from a fit.
        kind = "all" if name.startswith("NUTS") else "stats"
        print(f"\nPosterior by {name}")
        print(az.summary(data, var_names=["weights"], kind=kind).to_string())

    _, ax = plt.subplots()
    for i, (name, data) in enumerate(results.items()):
        draws = data["posterior"]["weights"].values.reshape(-1, len(names))
        low, middle, high = np.quantile(draws, [0.05, 0.5, 0.95], axis=0)
        position = np.arange(len(names)) + 0.2 * (i - 1)
        ax.errorbar(
            middle,
            position,
            xerr=[middle - low, high - middle],
            fmt="o",
            capsize=3,
            label=name,
        )
    ax.set_yticks(np.arange(len(names)), names)
    ax.invert_yaxis()
    ax.set(
        xlabel="weight (median and 90% interval)",
        title="Logistic regression, 569 patients",
    )
    ax.grid(visible=False, axis="y")
    ax.legend()


def learn_a_stream(x, y):
    """(b) One pass over the patients: five online rules on the hinge loss, and their regret."""
    order = np.random.default_rng(SEED).permutation(len(y))
    x, labels = x[order], 2.0 * y[order].astype(np.float32) - 1.0
    num_rounds, d = x.shape
    box = nt.online.Box(loc=20.0, scale=1.0)
    # Rates of the theory for gradients bounded by L = max |x|: regret grows as the root of T.
    lipschitz = float(np.linalg.norm(x, axis=1).max())
    rules = {
        "OGA": nt.online.oga(lambda t: 2.0 / (lipschitz * jnp.sqrt(t)), box),
        "OGA-EL": nt.online.oga_el(lambda t: 2.0 / (lipschitz * jnp.sqrt(t)), box),
        "SVA": nt.online.sva(np.sqrt(d / num_rounds) / lipschitz, box),
        "SVB": nt.online.svb(nt.online.svb_rate(2.0 / lipschitz), box),
        "NGVI (Fisher)": nt.online.ngvi(curvature="fisher", box=box),
    }
    prior = nt.gaussian.families.MeanField(loc=jnp.zeros(d), scale=jnp.ones(d))
    losses = {}
    for name, rule in rules.items():
        state, loss = nt.online.run(
            rule, nt.expectations.hinge(), rule.init(prior), x, labels
        )
        if state.rejected:
            raise RuntimeError(f"{name} rejected {state.rejected} rounds")
        losses[name] = np.asarray(loss.at_mean, dtype=np.float64)
    at = sorted({min(t, num_rounds) for t in (50, 100, 200, 400, num_rounds)})
    best = {t: best_in_hindsight(x[:t], labels[:t]) for t in at}
    table = pd.DataFrame(
        {
            f"t = {t}": [*(values[:t].mean() for values in losses.values()), best[t]]
            for t in at
        },
        index=[*losses, "best in hindsight"],
    )
    print("\nAverage cumulative hinge loss after t patients")
    print(table.round(3).to_string())
    ax = nt.plots.plot_regret(losses, hindsight=best[num_rounds])
    ax.set(title="One pass over 569 patients, hinge loss", ylim=(0.0, 1.1))


def best_in_hindsight(x, y):
    """The least average hinge loss of one fixed parameter in the box, a linear program."""
    n, d = x.shape
    solution = linprog(
        np.r_[np.zeros(d), np.full(n, 1.0 / n)],
        A_ub=np.column_stack([-y[:, None] * x, -np.eye(n)]),
        b_ub=-np.ones(n),
        bounds=[(-20.0, 20.0)] * d + [(0.0, None)] * n,
    )
    return solution.fun


def choose_a_model(x, y, names, small):
    """(c) Which measurements? Feature subsets compared by the penalised ELBO."""
    groups = {
        "mean": [j for j, name in enumerate(names) if name.startswith("mean")],
        "error": [j for j, name in enumerate(names) if name.endswith("error")],
        "worst": [j for j, name in enumerate(names) if name.startswith("worst")],
    }
    if not small:
        groups |= {
            "mean + worst": groups["mean"] + groups["worst"],
            "all": list(range(1, len(names))),
        }
    fits = {
        name: nt.fit_svi(
            jax.random.key(SEED),
            logistic,
            AutoNormal,
            x[:, [0, *columns]],
            y,
            alpha=ALPHA,
        )
        for name, columns in groups.items()
    }
    data = nt.compare(fits)
    print("\nPenalised ELBO of feature subsets, as ArviZ data")
    print(data)
    print("\nThe same as a pandas table")
    print(nt.table(data).round(2).to_string())
    nt.plots.plot_comparison(data)


def main():
    """Run the three parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer draws and models")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("quickstart_output"),
        help="folder for the figures",
    )
    options = parser.parse_args()
    begin = time.perf_counter()
    plt.style.use("numpyro_tempered.plots.house")
    x, y, names = load_data()
    num_draws = 200 if options.small else 1000
    figures = {
        "tempered_posterior": lambda: temper_a_model(x, y, names, num_draws),
        "regret": lambda: learn_a_stream(x, y),
        "model_comparison": lambda: choose_a_model(x, y, names, options.small),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for name, part in figures.items():
        part()
        plt.gcf().savefig(options.output / f"{name}.png", dpi=150)
        plt.close("all")
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("jax", "numpyro", "numpyro_tempered")
    )
    (options.output / "quickstart.txt").write_text(
        f"device: {jax.devices()[0].device_kind}\nversions: Python {platform.python_version()}, {versions}\n"
        f"sizes: {len(y)} patients, {num_draws} draws, seed {SEED}\n"
        "command: python examples/quickstart.py --output docs/results\n"
    )
    print(
        f"\nFigures are in {options.output.resolve()} ({time.perf_counter() - begin:.0f} s)"
    )


if __name__ == "__main__":
    main()
