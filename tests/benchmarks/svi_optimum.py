"""How near the default fit_svi comes to the best fit of its family, or whether it warns.

Models and data of posteriordb, and generalised linear models in raw units. ``--posteriordb`` is its folder
``posterior_database/data/data``; models without their data are left out. For each model and guide:

* ``adam``: the gap of 3,000 steps of NumPyro's Adam, constant at .05 and then falling, from the guide's start;
* ``default``: the largest gap of ``fit_svi`` with no options over the seeds, with its standard error;
* ``estimate``: the gap that this fit reports of itself;
* ``steps`` and ``warns``: its steps, and in how many fits it warned.

Gaps are in nats, to the best of all these fits and one of a tenth of the tolerance and 100,000 steps, by 20,000
antithetic pairs of draws that all fits share.
"""

import argparse
import json
import time
import warnings
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from provenance import describe
from sklearn.datasets import load_breast_cancer, load_diabetes

import numpyro_tempered as nt
from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.infer.antithetic import Antithetic
from numpyro_tempered.infer.fixed_steps import default_optim

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
GUIDES = {"mean field": AutoNormal, "full covariance": AutoMultivariateNormal}


def coefficients(name, d, scale):
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([d]).to_event(1))


def eight_schools(sigma, y):
    mu, tau = (
        numpyro.sample("mu", dist.Normal(0, 5)),
        numpyro.sample("tau", dist.HalfCauchy(5)),
    )
    with numpyro.plate("J", len(y)):
        theta = numpyro.sample("theta_trans", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)


def autoregression(order, y):
    alpha, beta = (
        numpyro.sample("alpha", dist.Normal(0, 10)),
        coefficients("beta", order, 10.0),
    )
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    lagged = jnp.stack(
        [y[order - k - 1 : len(y) - k - 1] for k in range(order)], axis=1
    )
    numpyro.sample("y", dist.Normal(alpha + lagged @ beta, sigma), obs=y[order:])


def bayes_regression(x, y):
    beta, sigma = (
        coefficients("beta", x.shape[1], 10.0),
        numpyro.sample("sigma", dist.HalfNormal(10)),
    )
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def kid_score(x, y):
    # The flat prior of the original, as wide as it needs to be for an ELBO that compares.
    beta, sigma = (
        coefficients("beta", 3, 1000.0),
        numpyro.sample("sigma", dist.HalfCauchy(2.5)),
    )
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def linear(x, y):
    alpha, beta = (
        numpyro.sample("alpha", dist.Normal(0, 1000)),
        coefficients("beta", x.shape[1], 1000.0),
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(1000))
    numpyro.sample("y", dist.Normal(alpha + x @ beta, sigma), obs=y)


def logistic(x, y):
    alpha, beta = (
        numpyro.sample("alpha", dist.Normal(0, 10)),
        coefficients("beta", x.shape[1], 10.0),
    )
    numpyro.sample("y", dist.Bernoulli(logits=alpha + x @ beta), obs=y)


def narrow_logistic(x, y):
    numpyro.sample(
        "y", dist.Bernoulli(logits=x @ coefficients("beta", x.shape[1], 1.0)), obs=y
    )


def poisson(x, y):
    alpha, beta = (
        numpyro.sample("alpha", dist.Normal(0, 10)),
        coefficients("beta", x.shape[1], 10.0),
    )
    numpyro.sample("y", dist.Poisson(jnp.exp(alpha + x @ beta)), obs=y)


def of_posteriordb(folder):
    """The models of posteriordb whose data are there."""

    def read(name):
        with zipfile.ZipFile(folder / f"{name}.json.zip") as archive:
            return {
                k: np.asarray(v, float)
                for k, v in json.loads(archive.read(archive.namelist()[0])).items()
            }

    kid, series, schools = read("kidiq"), read("arK"), read("eight_schools")
    x = np.column_stack([np.ones(len(kid["mom_iq"])), kid["mom_hs"], kid["mom_iq"]])
    models = {"kidscore_momhsiq": (kid_score, (x, kid["kid_score"]))}
    order = int(series["K"])
    models["arK"] = (lambda y: autoregression(order, y), (series["y"],))
    for name in ("sblrc", "sblri"):
        regression = read(name)
        models[f"{name}-blr"] = (bayes_regression, (regression["X"], regression["y"]))
    models["eight_schools_noncentered"] = (
        eight_schools,
        (schools["sigma"], schools["y"]),
    )
    return models


def generalised_linear():
    """Generalised linear models in raw units."""
    rng = np.random.default_rng(0)
    cancer, diabetes = load_breast_cancer(), load_diabetes(scaled=False)
    height = rng.normal(170.0, 10.0, (300, 1))
    counts = rng.poisson(np.exp(-3.0 + 0.025 * height[:, 0]))
    money = rng.normal(500.0, 100.0, (200, 1))
    x = rng.normal(size=(1000, 200))
    chances = 1.0 / (1.0 + np.exp(-x @ (0.3 * rng.normal(size=200))))
    return {
        "linear, one covariate of scale 100": (
            linear,
            (money, 27.1 + 0.3 * money[:, 0] + rng.normal(0, 20, 200)),
        ),
        "linear, diabetes": (linear, (diabetes.data, diabetes.target)),
        "logistic, breast cancer": (logistic, (cancer.data, cancer.target)),
        "logistic, 200 covariates": (
            narrow_logistic,
            (x, rng.uniform(size=1000) < chances),
        ),
        "Poisson, heights in cm": (poisson, (height, counts)),
    }


def values(fit, num_pairs):
    """The ELBO of a fit by draws that depend on its guide's type alone."""
    loss, keys = Antithetic(), jax.random.split(jax.random.key(99), num_pairs)
    return -np.asarray(
        compiled_map(
            lambda key: loss.loss(key, fit.params, fit.model, fit.guide, *fit.args),
            keys,
            32,
        ),
        float,
    )


def rows_of(name, model, args, sizes):
    arrays = tuple(jnp.asarray(arg, float) for arg in args)
    for label, guide in GUIDES.items():
        if label == "full covariance" and name.startswith("logistic, 200"):
            # Twenty thousand parameters: the noise of 20,000 steps is above the tolerance, and the fit warns.
            continue

        def fit(seed, guide=guide, **options):
            begin = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", nt.warnings.ConvergenceWarning)
                found = nt.fit_svi(
                    jax.random.key(seed),
                    model,
                    guide,
                    *arrays,
                    num_particles=10,
                    **options,
                )
            warned = any(
                issubclass(entry.category, nt.warnings.ConvergenceWarning)
                for entry in caught
            )
            return found, warned, time.perf_counter() - begin

        try:
            adam = fit(0, optim=default_optim(sizes["adam"]), num_steps=sizes["adam"])
        except ValueError:  # it ended in parameters that are not finite
            adam = None
        defaults = [fit(seed) for seed in range(sizes["seeds"])]
        careful = fit(100, tolerance=0.005, num_steps=sizes["careful"])
        elbos = [values(entry[0], sizes["pairs"]) for entry in (*defaults, careful)]
        elbos = [
            np.full(sizes["pairs"], -np.inf)
            if adam is None
            else values(adam[0], sizes["pairs"]),
            *elbos,
        ]
        best = elbos[int(np.argmax([elbo.mean() for elbo in elbos]))]
        gaps = [best - elbo for elbo in elbos]
        worst = 1 + int(np.argmax([gap.mean() for gap in gaps[1:-1]]))
        evidence = defaults[worst - 1][0].convergence
        yield {
            "model": name,
            "guide": label,
            "adam": gaps[0].mean(),
            "adam_warns": "fails" if adam is None else int(adam[1]),
            "default": gaps[worst].mean(),
            "se": gaps[worst].std() / np.sqrt(len(best)),
            "estimate": evidence.gap,
            "steps": evidence.num_steps,
            "warns": f"{sum(entry[1] for entry in defaults)} of {len(defaults)}",
            "at_mode": evidence.starts_at_mode,
            "seconds": min(entry[2] for entry in defaults),
            "adam_seconds": np.nan if adam is None else adam[2],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--posteriordb", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = {"adam": 3000, "seeds": 3, "careful": 100_000, "pairs": 20_000}
    models = generalised_linear()
    if options.small:
        sizes = {"adam": 100, "seeds": 1, "careful": 500, "pairs": 100}
        models = {
            "linear, one covariate of scale 100": models[
                "linear, one covariate of scale 100"
            ]
        }
    if options.posteriordb is not None:
        models = of_posteriordb(options.posteriordb) | models
    table = []
    for name, (model, args) in models.items():
        for row in rows_of(name, model, args, sizes):
            print(
                " ".join(
                    f"{value:.4g}" if isinstance(value, float) else str(value)
                    for value in row.values()
                )
            )
            table.append(row)
    options.output.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(table)
    frame.to_csv(options.output / "svi_optimum.csv", index=False, float_format="%.4g")
    (options.output / "svi_optimum.txt").write_text(
        describe(sizes)
        + "\n"
        + frame.to_string(index=False, float_format="{:.3g}".format)
        + "\n"
    )


if __name__ == "__main__":
    main()
