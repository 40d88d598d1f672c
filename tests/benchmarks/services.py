"""One datum at a time from Python: CPU time and latency of a call, beside other packages.

A logistic regression on rows of NumPy's arrays, float32, d features. "Learn" and "predict" are calls of their
own, which return numbers of Python's. Percentiles of the wall time of a call, and the mean CPU time of the
process, all its threads, microseconds; the compiled loop over a whole stream is ``peers.py``. How each is
called:

- *Service*: ``nt.online.Service``, ``learn(x, y)`` and ``class_probabilities(x)``, with JAX's CPU programs run in
  the calling thread; *async* with JAX's default, which hands them to another;
- *nt.online.update* with arrays of JAX's;
- *jit(SVI.update)*: NumPyro's, mean field, Adam, jitted, with its loss read as a float;
- *river*: ``LogisticRegression``, ``learn_one`` and ``predict_proba_one`` on dictionaries that exist already;
- *NumPy*: a step of stochastic gradients on the same loss, five lines.

Writes ``services.csv`` and ``services.txt``.

    python tests/benchmarks/services.py
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
PERCENTILES = (50, 95, 99)


def measure(call, num_calls):
    """Percentiles of the microseconds of a call, and the mean of its CPU time."""
    for _ in range(max(num_calls // 10, 3)):
        call()
    wall = np.empty(num_calls)
    begin = time.process_time()
    for n in range(num_calls):
        start = time.perf_counter()
        call()
        wall[n] = time.perf_counter() - start
    cpu = time.process_time() - begin
    values = {
        f"p{p}": value
        for p, value in zip(
            PERCENTILES, 1e6 * np.percentile(wall, PERCENTILES), strict=True
        )
    }
    return {"cpu": 1e6 * cpu / num_calls} | values


def services(x, y):
    """Calls of our own."""
    import jax
    import jax.numpy as jnp

    import numpyro_tempered as nt

    logistic = nt.expectations.logistic()
    d = x.shape[1]
    rows, priors = (
        iter(np.tile(np.arange(len(x)), 10_000)),
        {"mean field": nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))},
    )
    if d <= 100:
        priors["full covariance"] = nt.gaussian.families.FullRank(
            jnp.zeros(d), jnp.eye(d)
        )
    calls = {}
    for family, prior in priors.items():
        for name, rule, loss in (
            ("rvga, logistic", nt.online.rvga(), logistic),
            ("ngvi, logistic", nt.online.ngvi(), logistic),
            ("ngvi, squared", nt.online.ngvi(0.5), nt.expectations.squared()),
        ):
            service = nt.online.Service(
                rule, loss, rule.init(prior), x[0], y[0], rng_key=jax.random.key(0)
            )

            def learn(service=service):
                n = next(rows)
                return service.learn(x[n], y[n])

            calls[f"Service, {name}, {family}", "learn"] = learn
            if name == "rvga, logistic":
                calls[f"Service, {family}", "predict"] = lambda s=service: (
                    s.class_probabilities(x[next(rows)])
                )
                calls[f"Service, {family}", "mean and variance"] = lambda s=service: (
                    s.predict(x[next(rows)])
                )
                calls[f"Service, {family}", "posterior draw"] = lambda s=service: (
                    s.draw(x[next(rows)])
                )
    return calls


def others(x, y):
    """Calls of other packages, and of ``nt.online.update``."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDiagonalNormal
    from river import linear_model

    import numpyro_tempered as nt

    d = x.shape[1]
    rows = iter(np.tile(np.arange(len(x)), 10_000))
    logistic = nt.expectations.logistic()
    rule = nt.online.rvga()
    holder = {
        "state": rule.init(nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d)))
    }
    on_device = jnp.asarray(x[0]), jnp.asarray(y[0])

    def update():
        holder["state"], losses = nt.online.update(
            rule, logistic, holder["state"], *on_device
        )
        return float(losses.at_mean)

    def model(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)

    svi = SVI(model, AutoDiagonalNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    step = jax.jit(svi.update)
    positive = y > 0
    batch = x[:1], positive[:1].astype(np.float32)
    holder["svi"] = svi.init(jax.random.key(0), *batch)

    def svi_update():
        holder["svi"], loss = step(holder["svi"], *batch)
        return float(loss)

    river = linear_model.LogisticRegression()
    dicts = [dict(enumerate(row)) for row in x.astype(float).tolist()]
    weights, rate = np.zeros(d, np.float32), np.float32(0.01)

    def numpy_step():
        n = next(rows)
        slope = -y[n] / (1.0 + np.exp(y[n] * (x[n] @ weights)))
        np.subtract(weights, rate * slope * x[n], out=weights)

    def numpy_predict():
        return float(1.0 / (1.0 + np.exp(-(x[next(rows)] @ weights))))

    def river_learn():
        n = next(rows)
        river.learn_one(dicts[n], bool(positive[n]))

    return {
        ("nt.online.update, rvga, logistic, mean field", "learn"): update,
        ("jit(SVI.update), logistic, mean field", "learn"): svi_update,
        ("river, LogisticRegression", "learn"): river_learn,
        ("river, LogisticRegression", "predict"): lambda: river.predict_proba_one(
            dicts[next(rows)]
        ),
        ("NumPy, stochastic gradients", "learn"): numpy_step,
        ("NumPy, stochastic gradients", "predict"): numpy_predict,
    }


def run(which, num_features, num_calls):
    """Rows of the table, in a process whose JAX is set as ``which`` says."""
    import jax

    if which != "async":
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    rng = np.random.default_rng(0)
    rows = []
    for d in num_features:
        x = rng.normal(size=(500, d)).astype(np.float32) / np.float32(np.sqrt(d))
        y = np.where(rng.random(500) < 0.5, 1.0, -1.0).astype(np.float32)
        for (name, what), call in (others if which == "others" else services)(
            x, y
        ).items():
            name = (
                name.replace("Service", "Service, async") if which == "async" else name
            )
            rows.append({"d": d, "call": name, "what": what} | measure(call, num_calls))
    return rows


def main():
    """Measure in three processes, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="d = 3, 50 calls")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_features, num_calls = ((3,), 50) if args.small else ((2, 30, 54, 1000), 5000)
    if args.one:
        print(json.dumps(run(args.one, num_features, num_calls)))
        return
    rows = []
    for which in ("services", "async", "others"):
        command = [
            sys.executable,
            __file__,
            "--one",
            which,
            *(["--small"] if args.small else []),
        ]
        printed = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ
        ).stdout
        rows += json.loads(printed.strip().splitlines()[-1])
    from provenance import describe

    args.output.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows).round(
        dict.fromkeys(("cpu", *(f"p{p}" for p in PERCENTILES)), 1)
    )
    frame = frame.sort_values("d", kind="stable")
    frame.to_csv(args.output / "services.csv", index=False)
    text = (
        describe(f"d = {num_features}, {num_calls} calls each; microseconds")
        + "\n"
        + frame.to_string(index=False)
    )
    (args.output / "services.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
