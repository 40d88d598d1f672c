"""What the choice of alpha costs beside one fit: seconds and programs of the first two calls in a fresh process.

Logistic regression on the breast cancer data, ``AutoNormal``, all options at their defaults. For each way a
process of its own, whose imports do not count; the second call has another key and the same data.
"""

import argparse
import json
import warnings
from pathlib import Path

from calls import in_new_process
from calls import measure as measure_calls

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ONE_FIT = "one fit, fit_svi"
WAYS = (
    ONE_FIT,
    "calibrated_powers",
    "magnitude()",
    "lyddon()",
    "bootstrap_fisher()",
    "gpc()",
    "safe_bayes()",
    "temper_path",
)
SMALL = (ONE_FIT, "calibrated_powers")


def data():
    """The features with a constant, and the classes."""
    import jax.numpy as jnp
    import numpy as np
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    x = (table.data - table.data.mean(0)) / table.data.std(0)
    # Six features that a likelihood alone identifies.
    x = x[:, [1, 4, 7, 8, 18, 28]]
    return jnp.asarray(np.column_stack([np.ones(len(x)), x])), jnp.asarray(table.target)


def measure(way):
    """The calls of one process, as rows."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    def model(x, y=None):
        beta = numpyro.sample(
            "beta", dist.Normal(0.0, 3.0).expand([x.shape[1]]).to_event(1)
        )
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)

    criteria = {
        f"{make.__name__}()": make
        for make in (
            nt.alpha.magnitude,
            nt.alpha.lyddon,
            nt.alpha.bootstrap_fisher,
            nt.alpha.gpc,
        )
    } | {"safe_bayes()": nt.alpha.safe_bayes}

    def call(key, *args):
        if way == ONE_FIT:
            return nt.fit_svi(key, model, AutoNormal, *args, alpha=0.5).elbo.value
        if way == "temper_path":
            return nt.temper_path(key, model, AutoNormal, *args)
        if way == "calibrated_powers":
            return nt.alpha.calibrated_powers(key, model, *args)
        return nt.select_alpha(
            key, model, AutoNormal, *args, criterion=criteria[way]()
        ).alpha

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.alpha.DependenceWarning)
        rows = measure_calls(call, (1, 2), lambda number: data())
    return [
        {"way": way} | {name: row[name] for name in ("call", "seconds", "programs")}
        for row in rows
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", metavar="WAY")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return

    import pandas as pd
    from provenance import describe

    repeats = 1 if options.small else 3
    rows = []
    for _ in range(repeats):
        for way in SMALL if options.small else WAYS:
            rows += in_new_process(__file__, way)
    # The least of the processes: what else the machine did only adds.
    wide = pd.DataFrame(rows).groupby(["way", "call"], sort=False).min().unstack("call")
    wide.columns = [f"{column} {call}" for column, call in wide.columns]
    wide["first, of one fit's"] = wide["seconds 1"] / wide.loc[ONE_FIT, "seconds 1"]
    wide = wide.reset_index()
    options.output.mkdir(parents=True, exist_ok=True)
    wide.to_csv(options.output / "alpha_cost.csv", index=False, float_format="%.3g")
    text = wide.to_string(index=False, float_format="%.2f")
    sizes = f"n = 569, d = 7, defaults, the least of {repeats} processes for each row"
    (options.output / "alpha_cost.txt").write_text(f"{describe(sizes)}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
