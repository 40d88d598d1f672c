"""Time of one online step beside other packages, in one process.

Logistic and linear regression streams, float32, one datum a step, medians over repeats, compilation apart.

*Compiled loops*, ratios: NumPyro's SVI and blackjax's mean-field VI inside a scan, and numba loops of the same
arithmetic, beside ``nt.online.run`` and ``OnlineVI.run``. The numba loop of the full covariance adds one row at a
time to a square root of the covariance, as the rule does, compensated sums included; the script checks that the
posteriors agree. ``Cover Type`` is one pass over streams of its size.

*Calls from Python*, microseconds a datum: ``nt.online.update``, ``OnlineVI.update``, a jitted ``SVI.update`` and
river's linear models (predict and learn, float64, a dictionary of features made before). Rows are those of numpy
arrays.

Writes ``peers_py3X.csv`` and ``calls_py3X.csv``.

    python tests/benchmarks/peers.py
"""

import argparse
import math
import sys
import time
from pathlib import Path

import blackjax
import jax
import jax.numpy as jnp
import numba
import numpy as np
import numpyro
import optax
import pandas as pd
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from online_step import DOCS, RULES, F, add, logistic_model, stream, timed
from provenance import describe
from river import linear_model

import numpyro_tempered as nt

ONE = F(1.0)


@numba.njit
def numba_rank_one(x, y):
    """Exact Bayes for the squared loss by Potter's update, as NGVI on a full covariance."""
    n, d = x.shape
    m, m_error = np.zeros(d, F), np.zeros(d, F)
    root, error = np.eye(d).astype(F), np.zeros((d, d), F)
    v, w = np.empty(d, F), np.empty(d, F)
    losses = np.empty((2, n), F)
    for t in range(n):
        u = F(0.0)
        v[:] = F(0.0)
        for i in range(d):
            u += x[t, i] * m[i]
            for j in range(d):
                v[j] += root[i, j] * x[t, i]
        total = F(0.0)
        for j in range(d):
            total += v[j] * v[j]
        residual = y[t] - u
        losses[0, t], losses[1, t] = residual * residual, residual * residual + total
        s = ONE + F(2.0) * total
        kappa = F(2.0) / (s + F(math.sqrt(s)))
        for i in range(d):
            projected = F(0.0)
            for j in range(d):
                projected += root[i, j] * v[j]
            for j in range(d):
                add(root[i], error[i], j, -kappa * projected * v[j])
        w[:] = F(0.0)
        for i in range(d):
            for j in range(d):
                w[j] += root[i, j] * (F(-2.0) * residual * x[t, i])
        for i in range(d):
            shift = F(0.0)
            for j in range(d):
                shift += root[i, j] * w[j]
            add(m, m_error, i, -shift)
    return m, root, losses


def svi_contestants(x, y, num_steps):
    """A jitted SVI.update called once per datum, and the same inside one scan."""
    svi = SVI(
        logistic_model,
        AutoDiagonalNormal(logistic_model),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(),
    )
    start = svi.init(jax.random.key(0), x[:1], y[:1])
    host_x, host_y = np.asarray(x), np.asarray(y)
    update = jax.jit(svi.update)

    def per_datum():
        state, loss = start, None
        for t in range(num_steps):
            state, loss = update(state, host_x[t : t + 1], host_y[t : t + 1])
        return loss

    @jax.jit
    def scanned(state):
        return jax.lax.scan(
            lambda s, row: svi.update(s, row[0], row[1]),
            state,
            (x[:, None], y[:, None]),
        )

    return per_datum, lambda: scanned(start)


def blackjax_contestant(x, y):
    """blackjax's mean-field VI with Adam, one datum and one draw a step, inside one scan."""

    def log_density(theta, row, label):
        logits = row @ theta
        return (
            label * logits
            - jax.nn.softplus(logits)
            - 0.5 * jnp.sum(jnp.square(theta)) / len(x)
        )

    optimizer = optax.adam(0.01)

    def step(state, row):
        algorithm = blackjax.meanfield_vi(
            lambda theta: log_density(theta, *row[1:]), optimizer, num_samples=1
        )
        state, info = algorithm.step(row[0], state)
        return state, info.elbo

    start = blackjax.meanfield_vi(
        lambda theta: log_density(theta, x[0], y[0]), optimizer
    ).init(jnp.zeros(x.shape[1]))
    keys = jax.random.split(jax.random.key(0), len(x))
    run = jax.jit(lambda state: jax.lax.scan(step, state, (keys, x, y)))
    return lambda: run(start)


def our_calls(x, y, online, num_steps):
    """The updates of this package called once per datum."""
    d, logistic = x.shape[1], nt.expectations.logistic()
    field = nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))
    full = nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d))

    def bare(rule, expectation, prior):
        def run():
            state = rule.init(prior)
            for t in range(num_steps):
                state, _ = nt.online.update(rule, expectation, state, x[t], y[t])
            return state

        return run

    labels = (y > 0).astype(np.int32)
    start = online.init(jax.random.key(0), x[:1], labels[:1])

    def model():
        state = start
        for t in range(num_steps):
            state, _ = online.update(state, x[t : t + 1], labels[t : t + 1])
        return state

    found = {
        "nt.online.update, logistic, mean field": bare(
            nt.online.rvga(), logistic, field
        ),
        "nt.online.update, squared, mean field": bare(
            nt.online.rvga(), nt.expectations.squared(), field
        ),
        "OnlineVI.update, logistic model": model,
    }
    if d <= 100:
        found["nt.online.update, squared, full covariance"] = bare(
            nt.online.rvga(), nt.expectations.squared(), full
        )
    return found


def river_contestants(x, y, num_steps):
    """river's linear models, a dictionary of features per datum."""
    rows = [dict(enumerate(map(float, row))) for row in x[:num_steps]]
    labels = [bool(label > 0) for label in y[:num_steps]]
    targets = [float(label) for label in y[:num_steps]]

    def learn(make, outcomes):
        def run():
            model = make()
            for row, outcome in zip(rows, outcomes, strict=True):
                model.predict_one(row)
                model.learn_one(row, outcome)

        return run

    found = {
        "river LogisticRegression": learn(linear_model.LogisticRegression, labels),
        "river LinearRegression": learn(linear_model.LinearRegression, targets),
    }
    if x.shape[1] <= 100:
        # It stores a covariance in dictionaries: minutes a run at d = 1000.
        found["river BayesianLinearRegression"] = learn(
            linear_model.BayesianLinearRegression, targets
        )
    return found


def measure(d, num_rounds, repeats, slow_steps):
    """The rows of the table for one dimension."""
    host_x, host_y = stream(num_rounds, d)
    x, y = jnp.asarray(host_x), jnp.asarray(host_y)
    labels = (y > 0).astype(jnp.int32)
    field = nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))
    hinge, squared = nt.expectations.hinge(), nt.expectations.squared()
    ours, contestants, steps, found = {}, {}, {}, {}

    def compiled(name, rule, expectation, prior):
        state = rule.init(prior)

        def run():
            found[name] = nt.online.run(rule, expectation, state, x, y)
            return found[name]

        contestants[name], steps[name] = run, num_rounds

    compiled("NGVI, hinge", nt.online.ngvi(), hinge, field)
    rule, loop, options = RULES["NGVI"]

    def by_numba():
        loop(
            host_x,
            host_y,
            np.empty(num_rounds, F),
            np.empty(num_rounds, F),
            np.zeros(2, F),
            np.zeros(2, F),
            *options,
        )
        return 0

    contestants["numba, NGVI, hinge"], steps["numba, NGVI, hinge"] = (
        by_numba,
        num_rounds,
    )
    if d <= 100:
        compiled(
            "NGVI, full covariance",
            nt.online.ngvi(),
            squared,
            nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d)),
        )

        def rank_one():
            found["rank one"] = numba_rank_one(host_x, host_y)
            return 0

        contestants["numba, full covariance"], steps["numba, full covariance"] = (
            rank_one,
            num_rounds,
        )
    guide = nt.guides.AutoOnlineDiagonalNormal(logistic_model)
    online = nt.OnlineVI(
        logistic_model, guide, rule, nt.expectations.gauss_hermite(predictor="eta")
    )
    begin = online.init(jax.random.key(0), x[:1], labels[:1])
    implicit = nt.OnlineVI(
        logistic_model,
        nt.guides.AutoOnlineDiagonalNormal,
        expectation=online.expectation,
    )
    first = implicit.init(jax.random.key(0), x[:1], labels[:1])
    contestants["NGVI, NumPyro model"] = lambda: online.run(begin, x, labels)
    contestants["R-VGA, NumPyro model"] = lambda: implicit.run(first, x, labels)
    steps |= dict.fromkeys(["NGVI, NumPyro model", "R-VGA, NumPyro model"], num_rounds)
    per_datum, scanned = svi_contestants(x, labels, slow_steps)
    contestants["NumPyro SVI, scan"], steps["NumPyro SVI, scan"] = scanned, num_rounds
    contestants["blackjax meanfield_vi, scan"] = blackjax_contestant(
        x, labels.astype(jnp.float32)
    )
    steps["blackjax meanfield_vi, scan"] = num_rounds
    calls = {
        "jit(SVI.update)": per_datum,
        **our_calls(host_x, host_y, online, slow_steps),
    }
    calls |= river_contestants(host_x, host_y, slow_steps)
    contestants |= calls
    steps |= dict.fromkeys(calls, slow_steps)
    _, median = timed(contestants, 1, repeats)
    ours = {name: median[name] / steps[name] for name in contestants}
    if d <= 100:
        posterior, m, root = (
            found["NGVI, full covariance"][0].posterior,
            *found["rank one"][:2],
        )
        np.testing.assert_allclose(posterior.loc, m, rtol=5e-3, atol=5e-4)
        np.testing.assert_allclose(
            posterior.factor @ posterior.factor.T, root @ root.T, rtol=5e-3, atol=1e-5
        )
    # Each against the one of ours that does its work.
    reference = dict.fromkeys(
        ["NumPyro SVI, scan", "blackjax meanfield_vi, scan"], "NGVI, NumPyro model"
    )
    reference |= {
        "numba, NGVI, hinge": "NGVI, hinge",
        "numba, full covariance": "NGVI, full covariance",
    }
    reference["NGVI, NumPyro model"] = "NGVI, hinge"
    reference["R-VGA, NumPyro model"] = "NGVI, NumPyro model"
    loops = [
        {
            "d": d,
            "contestant": name,
            "beside": mate,
            "time / time": ours[name] / ours[mate],
        }
        for name, mate in reference.items()
        if name in ours
    ]
    return loops, [{"d": d, "call": name, "us": ours[name]} for name in calls]


def one_pass(num_rounds):
    """Seconds of one pass of NGVI over a stream of the size of Cover Type."""
    x, y = map(jnp.asarray, stream(num_rounds, 54))
    rule, hinge = nt.online.ngvi(), nt.expectations.hinge()
    state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(54), jnp.ones(54)))
    jax.block_until_ready(nt.online.run(rule, hinge, state, x, y))
    begin = time.process_time()
    jax.block_until_ready(nt.online.run(rule, hinge, state, x, y))
    return time.process_time() - begin


def main():
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="short streams, d = 2 and 30"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    options = parser.parse_args()
    sizes = (
        [(2, 1000), (30, 1000)]
        if options.small
        else [(2, 20_000), (30, 20_000), (54, 20_000), (1000, 2000)]
    )
    repeats, slow_steps = (2, 50) if options.small else (9, 500)
    loops, calls = zip(
        *(measure(d, n, repeats, slow_steps) for d, n in sizes), strict=True
    )
    table, by_call = (
        pd.DataFrame([row for rows in part for row in rows]) for part in (loops, calls)
    )
    by_call = by_call.pivot_table(index="call", columns="d", values="us", sort=False)
    by_call = by_call.map(lambda us: float(f"{us:.2g}")).reset_index()
    table = table.pivot_table(
        index=["contestant", "beside"], columns="d", values="time / time", sort=False
    )
    table = table.map(lambda ratio: float(f"{ratio:.3g}")).reset_index()
    num_rounds = 20_000 if options.small else 581_012
    seconds = one_pass(num_rounds)
    options.output.mkdir(parents=True, exist_ok=True)
    python = f"py3{sys.version_info.minor}"
    table.to_csv(options.output / f"peers_{python}.csv", index=False)
    by_call.to_csv(options.output / f"calls_{python}.csv", index=False)
    print(table.to_string(index=False), by_call.to_string(index=False), sep="\n\n")
    work = f"d and rounds {sizes}, median of {repeats} repeats, float32, numba {numba.__version__}"
    passes = f"one pass of NGVI, hinge, over {num_rounds} rows at d = 54: {seconds:.2f} s of CPU time"
    (options.output / f"peers_{python}.txt").write_text(describe(f"{work}; {passes}"))
    print(passes)


if __name__ == "__main__":
    main()
