"""Time of one online step: compiled loop, numba loop of the same arithmetic, SVI.update per datum.

All in one process, float32, on the hinge loss; medians over repeats, compilation apart. The numba loops
do the same arithmetic as the rules, compensated sums included, and the script checks that the posteriors
agree. SVI.update is timed before the others, five times. Writes ``online_step_py3X.csv``.

    python tests/benchmarks/online_step.py
"""

import argparse
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numba
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
F = np.float32
HALF, ONE, TWO, ZERO = F(0.5), F(1.0), F(2.0), F(0.0)
SQRT_HALF, INVERSE_SQRT_2PI = F(math.sqrt(0.5)), F(1.0 / math.sqrt(2.0 * math.pi))


@numba.njit(inline="always")
def hinge(m, sigma, x, y):
    """Loss at the mean, expected loss, slope in u and curvature in u."""
    u, v = ZERO, ZERO
    for j in range(len(m)):
        u += x[j] * m[j]
        v += (x[j] * sigma[j]) * (x[j] * sigma[j])
    k = ONE - y * u
    at_mean = max(k, ZERO)
    if v > 0:
        s = F(math.sqrt(v))
        z = k / s
        cdf = HALF * F(math.erfc(-SQRT_HALF * z))
        pdf = INVERSE_SQRT_2PI * F(math.exp(-HALF * z * z))
        return at_mean, max(k * cdf + s * pdf, at_mean), -y * cdf, pdf / s
    return at_mean, at_mean, -y if k > 0 else ZERO, ZERO


@numba.njit(inline="always")
def add(total, error, j, term):
    """One compensated addition."""
    new = total[j] + term
    virtual = new - total[j]
    held = error[j] + ((total[j] - (new - virtual)) + (term - virtual))
    total[j] = new + held
    error[j] = held - (total[j] - new)


@numba.njit(inline="always")
def shrink(scale, slope):
    """The proximal step in the scale."""
    hypotenuse = F(math.hypot(scale, slope))
    return scale * (scale / (hypotenuse + slope)) if slope > 0 else hypotenuse - slope


@numba.njit
def numba_ngvi(x, y, at_mean, expected, sums, errors):
    n, d = x.shape
    m, sigma = np.zeros(d, F), np.ones(d, F)
    tau, error, m_error = np.ones(d, F), np.zeros(d, F), np.zeros(d, F)
    for t in range(n):
        at_mean[t], expected[t], slope, curvature = hinge(m, sigma, x[t], y[t])
        add(sums, errors, 0, at_mean[t])
        add(sums, errors, 1, expected[t])
        for j in range(d):
            add(tau, error, j, curvature * x[t, j] * x[t, j])
            add(m, m_error, j, -slope * x[t, j] / tau[j])
            sigma[j] = ONE / F(math.sqrt(tau[j]))
    return m, sigma


@numba.njit
def numba_sva(x, y, at_mean, expected, sums, errors, eta):
    n, d = x.shape
    m, sigma = np.zeros(d, F), np.ones(d, F)
    g, g_error, h, h_error = (
        np.zeros(d, F),
        np.zeros(d, F),
        np.zeros(d, F),
        np.zeros(d, F),
    )
    for t in range(n):
        at_mean[t], expected[t], slope, curvature = hinge(m, sigma, x[t], y[t])
        add(sums, errors, 0, at_mean[t])
        add(sums, errors, 1, expected[t])
        for j in range(d):
            add(g, g_error, j, slope * x[t, j])
            add(h, h_error, j, sigma[j] * curvature * x[t, j] * x[t, j])
            m[j] = -eta * g[j]
            sigma[j] = shrink(ONE, HALF * eta * h[j])
    return m, sigma


@numba.njit
def numba_svb(x, y, at_mean, expected, sums, errors, constant):
    n, d = x.shape
    m, sigma = np.zeros(d, F), np.ones(d, F)
    for t in range(n):
        at_mean[t], expected[t], slope, curvature = hinge(m, sigma, x[t], y[t])
        add(sums, errors, 0, at_mean[t])
        add(sums, errors, 1, expected[t])
        rate = constant / F(math.sqrt(F(t + 1)))
        for j in range(d):
            m[j] -= rate * slope * x[t, j]
            sigma[j] = shrink(
                sigma[j], HALF * rate * sigma[j] * curvature * x[t, j] * x[t, j]
            )
    return m, sigma


ETA, CONSTANT = 0.05, 0.3
RULES = {
    "NGVI": (nt.online.ngvi(), numba_ngvi, ()),
    "SVA": (nt.online.sva(ETA), numba_sva, (F(ETA),)),
    "SVB": (nt.online.svb(nt.online.svb_rate(CONSTANT)), numba_svb, (F(CONSTANT),)),
}


def hinge_model(x, y):
    """The hinge loss as a factor, for stock SVI."""
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    numpyro.factor("hinge", -jnp.maximum(1.0 - y * (x @ theta), 0.0))


def logistic_model(x, y):
    """A model with a named predictor, for gauss_hermite."""
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def stream(num_rounds, d):
    """A noisy linear classification stream, rows of norm about 1."""
    rng = np.random.default_rng(d)
    x = (rng.normal(size=(num_rounds, d)) / math.sqrt(d)).astype(F)
    noise = 0.3 * rng.normal(size=num_rounds)
    return x, np.where(x @ rng.normal(size=d) + noise > 0, 1.0, -1.0).astype(F)


def timed(functions, num_rounds, repeats):
    """First-call seconds and median microseconds a step, the contestants taking turns."""
    first, times = {}, {name: [] for name in functions}
    for name, fn in functions.items():
        begin = time.perf_counter()
        jax.block_until_ready(fn())
        first[name] = time.perf_counter() - begin
    for _ in range(repeats):
        for name, fn in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(fn())
            times[name].append(time.perf_counter() - begin)
    return first, {
        name: 1e6 * float(np.median(v)) / num_rounds for name, v in times.items()
    }


def time_svi(x, y, num_steps):
    """Microseconds of a jitted SVI.update called once per datum."""
    svi = SVI(
        hinge_model,
        AutoDiagonalNormal(hinge_model),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(),
    )
    state = svi.init(jax.random.key(0), x[0], y[0])
    update = jax.jit(svi.update)
    state, _ = update(state, x[0], y[0])
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for t in range(num_steps):
            state, loss = update(state, x[t], y[t])
        jax.block_until_ready(loss)
        times.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(times)) / num_steps


def measure(d, num_rounds, repeats, svi_steps):
    """The rows of the table for one dimension."""
    x, y = stream(num_rounds, d)
    device_x, device_y = jnp.asarray(x), jnp.asarray(y)
    prior = nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))
    svi = time_svi(device_x, device_y, svi_steps)
    rows, model_rows, contestants, found = [], [], {}, {}
    for name, (rule, loop, options) in RULES.items():
        state = rule.init(prior)

        def compiled(rule=rule, state=state, name=name):
            found[name] = nt.online.run(
                rule, nt.expectations.hinge(), state, device_x, device_y
            )
            return found[name]

        def by_numba(loop=loop, options=options, name=name):
            buffers = [
                np.empty(num_rounds, F),
                np.empty(num_rounds, F),
                np.zeros(2, F),
                np.zeros(2, F),
            ]
            found[name, "numba"] = (*loop(x, y, *buffers, *options), buffers[1])
            return 0

        contestants |= {name: compiled, (name, "numba"): by_numba}
    logistic = nt.expectations.logistic()
    rule = nt.online.ngvi()
    state = rule.init(prior)
    contestants["bare"] = lambda: nt.online.run(
        rule, logistic, state, device_x, device_y
    )
    guide = nt.guides.AutoOnlineDiagonalNormal(logistic_model)
    online = nt.OnlineVI(
        logistic_model, guide, rule, nt.expectations.gauss_hermite(predictor="eta")
    )
    labels = (device_y > 0).astype(jnp.int32)
    begin = online.init(jax.random.key(0), device_x[:1], labels[:1])
    contestants["model"] = lambda: online.run(begin, device_x, labels)
    first, median = timed(contestants, num_rounds, repeats)
    for name in RULES:
        state, losses = found[name]
        m, sigma, expected = found[name, "numba"]
        np.testing.assert_allclose(state.posterior.loc, m, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(state.posterior.scale, sigma, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(losses.expected.mean(), expected.mean(), rtol=1e-4)
        rows.append(
            {
                "rule": f"{name}, hinge",
                "d": d,
                "time / numba": median[name] / median[name, "numba"],
                "SVI.update / time": svi / median[name],
                "first call, in steps": 1e6 * first[name] / median[name],
            }
        )
    for label, name in (
        ("NGVI, bare logistic, 20 nodes", "bare"),
        ("NGVI, model, 20 nodes", "model"),
    ):
        model_rows.append(
            {
                "rule": label,
                "d": d,
                "time / bare hinge": median[name] / median["NGVI"],
                "time / bare logistic": median[name] / median["bare"],
                "first call, in steps": 1e6 * first[name] / median[name],
            }
        )
    return rows, model_rows


def main():
    """Measure every dimension and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="short streams, d = 2 and 30"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    sizes = (
        ((2, 2000), (30, 2000))
        if options.small
        else ((2, 50_000), (30, 50_000), (54, 50_000), (1000, 5000))
    )
    repeats = 3 if options.small else 15
    tables = [], []
    for d, num_rounds in sizes:
        measured = measure(d, num_rounds, repeats, 200 if options.small else 3000)
        for table, rows in zip(tables, measured, strict=True):
            table.extend(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    python = f"py3{sys.version_info.minor}"
    for name, rows in zip(("online_step", "model_step"), tables, strict=True):
        table = pd.DataFrame(rows).round(2)
        steps = "first call, in steps"
        table[steps] = table[steps].round(-3).astype(int)
        table.to_csv(options.output / f"{name}_{python}.csv", index=False)
        print(table.to_string(index=False))
    (options.output / f"online_step_{python}.txt").write_text(
        describe(
            f"d and rounds {list(sizes)}, median of {repeats} repeats, float32, numba {numba.__version__}"
        )
    )


if __name__ == "__main__":
    main()
