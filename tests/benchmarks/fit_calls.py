"""The first, second and third call of a fit in a fresh process, beside NumPyro's own SVI.run.

For each way and model a process of its own, whose imports do not count: seconds of three calls with other keys
and other outcomes of the same shape, programs that XLA compiled in each, and the seconds it took for them.

* ``SVI.run``: 3,000 steps of Adam with ``Trace_ELBO``, and nothing else;
* ``fit_svi`` and ``fit_gaussian``: the defaults, with the ELBO that they report; ``fit_gaussian`` by draws, and
  by quadrature where the model names its predictor.
"""

import argparse
import json
import sys
from pathlib import Path

from calls import in_new_process
from calls import measure as measure_calls

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
WAYS = ("SVI.run", "fit_svi", "fit_gaussian, draws", "fit_gaussian, quadrature")
MODELS = ("logistic", "linear, latent sigma", "eight schools")
NUM_CALLS = 3


def models():
    """The models, with their data by the number of a call."""
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist

    def logistic(x, y):
        beta = numpyro.sample(
            "beta", dist.Normal(0.0, 3.0).expand([x.shape[1]]).to_event(1)
        )
        numpyro.sample(
            "y", dist.Bernoulli(logits=numpyro.deterministic("eta", x @ beta)), obs=y
        )

    def linear(x, y):
        beta = numpyro.sample(
            "beta", dist.Normal(0.0, 3.0).expand([x.shape[1]]).to_event(1)
        )
        sigma = numpyro.sample("sigma", dist.HalfNormal(3.0))
        numpyro.sample(
            "y", dist.Normal(numpyro.deterministic("eta", x @ beta), sigma), obs=y
        )

    def eight_schools(sigma, y):
        mu, tau = (
            numpyro.sample("mu", dist.Normal(0, 5)),
            numpyro.sample("tau", dist.HalfCauchy(5)),
        )
        with numpyro.plate("J", 8):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)

    def of_regression(number):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(500, 5))
        eta = x @ rng.normal(size=5)
        return jnp.array(x), eta, rng

    def logistic_data(number):
        x, eta, rng = of_regression(number)
        return x, jnp.array(
            (rng.uniform(size=500) < 1.0 / (1.0 + np.exp(-eta))).astype(int)
        )

    def linear_data(number):
        x, eta, rng = of_regression(number)
        return x, jnp.array(eta + rng.normal(size=500))

    def schools_data(number):
        y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]) + number
        return jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]), jnp.array(y)

    functions = (
        (logistic, logistic_data),
        (linear, linear_data),
        (eight_schools, schools_data),
    )
    return dict(zip(MODELS, functions, strict=True))


def measure(way, name):
    """The calls of one process, as rows."""
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    model, data = models()[name]

    def fit(key, *args):
        if way == "SVI.run":
            svi = SVI(
                model,
                AutoMultivariateNormal(model),
                numpyro.optim.Adam(0.01),
                Trace_ELBO(),
            )
            return svi.run(key, 3000, *args, progress_bar=False).losses
        if way == "fit_svi":
            return nt.fit_svi(key, model, AutoMultivariateNormal, *args).losses
        by = (
            None
            if way.endswith("draws")
            else nt.expectations.gauss_hermite(predictor="eta")
        )
        return nt.fit_gaussian(
            key, model, AutoMultivariateNormal, *args, expectation=by
        ).losses

    rows = measure_calls(fit, range(1, NUM_CALLS + 1), data)
    return [{"model": name, "way": way} | row for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "MODEL"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return

    import pandas as pd
    from provenance import describe

    pairs = [
        (way, name)
        for name in MODELS
        for way in WAYS
        if not (name == MODELS[2] and "quadrature" in way)
    ]
    repeats = 1 if options.small else 3
    table = []
    for repeat in range(repeats):
        for way, name in pairs[:2] if options.small else pairs:
            table += [
                row | {"repeat": repeat} for row in in_new_process(__file__, way, name)
            ]
    calls = pd.DataFrame(table)
    # The least of the processes: what else the machine did only adds.
    least = (
        calls.groupby(["model", "way", "call"], sort=False).min().drop(columns="repeat")
    )
    wide = least.unstack("call")
    wide.columns = [f"{column} {call}" for column, call in wide.columns]
    for model in wide.index.get_level_values(0).unique():
        rows = wide.loc[model]
        wide.loc[[model], "first, of SVI.run's"] = (
            rows["seconds 1"] / rows.loc["SVI.run", "seconds 1"]
        ).to_numpy()
    wide = wide.reset_index().drop(
        columns=["programs 3", "compile_seconds 2", "compile_seconds 3"]
    )
    wide = wide.rename(columns={"compile_seconds 1": "of which XLA 1"})
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"fit_calls_py{sys.version_info.major}{sys.version_info.minor}"
    wide.to_csv(options.output / f"{stem}.csv", index=False, float_format="%.3g")
    text = wide.to_string(index=False, float_format="%.2f")
    sizes = f"the least of {repeats} processes for each row"
    (options.output / f"{stem}.txt").write_text(f"{describe(sizes)}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
