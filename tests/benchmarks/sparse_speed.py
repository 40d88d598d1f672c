"""A sweep of sparse regression beside a numba loop of the same arithmetic, on one core.

``sweep`` is one pass of closed-form updates over all coefficients; ``iteration`` adds the fresh residual, the
noise (or the ξ) and the objective, as each iteration of a fit does. The loop of numba goes one by one: a dot
product with the residual, the update, the residual moved. It is timed as it is, so that its sums may not be
reordered, and with ``fastmath``, which lets them be vectorised; the table has ours over each. Compilation is
the time of our first call less that of a later one. Same data, same precision, medians of calls in turn;
that results agree is checked.
Writes ``sparse_speed.csv`` and ``sparse_speed.txt``.

    python tests/benchmarks/sparse_speed.py --output docs/results
"""

import argparse
import os
import time
from pathlib import Path

# One core for both, before any of their thread pools exists.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pandas as pd
from provenance import describe

from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.sparse.arguments import Regression
from numpyro_tempered.sparse.ascent import Start
from numpyro_tempered.sparse.linear import Estimated, linear_ascent
from numpyro_tempered.sparse.logistic import logistic_ascent
from numpyro_tempered.sparse.sweep import block_design, block_prior, blocks, sweep

ALPHA, LAMBDA, SLAB = 0.5, 0.01, 1.0


def loops(fastmath):
    """The sweep and the iterations, by numba."""

    @numba.njit(fastmath=fastmath)
    def one_sweep(
        columns, residual, mean, probs, locs, scales, norms, log_odds, precision, slab
    ):
        d, n = columns.shape
        for j in range(d):
            product = norms[j] * mean[j]
            for i in range(n):
                product += columns[j, i] * residual[i]
            square = 1.0 / (precision * norms[j] + 1.0 / (slab * slab))
            loc = square * precision * product
            scale = np.sqrt(square)
            prob = 1.0 / (
                1.0
                + np.exp(
                    -(log_odds[j] + np.log(scale / slab) + 0.5 * loc * loc / square)
                )
            )
            move = prob * loc - mean[j]
            for i in range(n):
                residual[i] -= move * columns[j, i]
            mean[j], probs[j], locs[j], scales[j] = prob * loc, prob, loc, scale

    @numba.njit(fastmath=fastmath)
    def refresh(columns, y, mean, residual):
        residual[:] = y
        for j in range(columns.shape[0]):
            for i in range(columns.shape[1]):
                residual[i] -= mean[j] * columns[j, i]

    @numba.njit(fastmath=fastmath)
    def kl(probs, locs, scales, prob, slab):
        total = 0.0
        for j in range(len(probs)):
            p = probs[j]
            ratio = scales[j] / slab
            slab_kl = 0.5 * (ratio * ratio + (locs[j] / slab) ** 2 - 1.0) - np.log(
                ratio
            )
            gate = 0.0
            if p > 0.0:
                gate += p * np.log(p / prob)
            if p < 1.0:
                gate += (1.0 - p) * np.log((1.0 - p) / (1.0 - prob))
            total += gate + p * slab_kl
        return total

    @numba.njit(fastmath=fastmath)
    def linear(
        columns,
        y,
        residual,
        mean,
        probs,
        locs,
        scales,
        norms,
        log_odds,
        alpha,
        v,
        prob,
        slab,
    ):
        one_sweep(
            columns,
            residual,
            mean,
            probs,
            locs,
            scales,
            norms,
            log_odds,
            alpha / v,
            slab,
        )
        refresh(columns, y, mean, residual)
        error = 0.0
        for i in range(len(y)):
            error += residual[i] * residual[i]
        for j in range(len(mean)):
            p, m = probs[j], locs[j]
            error += norms[j] * p * (scales[j] * scales[j] + (1.0 - p) * m * m)
        v = error / len(y)
        bound = -0.5 * alpha * len(y) * (np.log(2.0 * np.pi * v) + 1.0)
        return v, bound - kl(probs, locs, scales, prob, slab)

    @numba.njit(fastmath=fastmath)
    def logistic(
        columns,
        y,
        scaled,
        predictor,
        xi,
        mean,
        probs,
        locs,
        scales,
        norms,
        log_odds,
        alpha,
        prob,
        slab,
    ):
        d, n = columns.shape
        root, residual = np.empty_like(y), np.empty_like(y)
        for i in range(n):
            root[i] = np.sqrt(np.tanh(0.5 * xi[i]) / (2.0 * xi[i]))
            residual[i] = (y[i] - 0.5) / root[i] - root[i] * predictor[i]
        for j in range(d):
            total = y[0] * 0.0
            for i in range(n):
                scaled[j, i] = columns[j, i] * root[i]
                total += scaled[j, i] * scaled[j, i]
            norms[j] = total
        one_sweep(
            scaled, residual, mean, probs, locs, scales, norms, log_odds, alpha, slab
        )
        square = np.zeros_like(y)
        predictor[:] = 0.0
        for j in range(d):
            p, m = probs[j], locs[j]
            variance = p * (scales[j] * scales[j] + (1.0 - p) * m * m)
            for i in range(n):
                predictor[i] += mean[j] * columns[j, i]
                square[i] += variance * columns[j, i] * columns[j, i]
        bound = 0.0
        for i in range(n):
            xi[i] = np.sqrt(predictor[i] * predictor[i] + square[i])
            bound += (
                (y[i] - 0.5) * predictor[i] - 0.5 * xi[i] - np.log1p(np.exp(-xi[i]))
            )
        return alpha * bound - kl(probs, locs, scales, prob, slab)

    return one_sweep, linear, logistic


def data(n, d, dtype):
    rng = np.random.default_rng([n, d])
    x = rng.normal(size=(n, d))
    theta = np.zeros(d)
    theta[: d // 100] = rng.normal(size=d // 100)
    u = x @ theta
    return (
        x.astype(dtype),
        (u + rng.normal(size=n)).astype(dtype),
        (u > 0.0).astype(dtype),
    )


def compiled(function, *args):
    """A jitted function as a call without arguments, what it returns, and the time of its first call."""
    jitted = jax.jit(function)
    begin = time.perf_counter()
    out = jax.block_until_ready(jitted(*args))
    return (
        (lambda: jax.block_until_ready(jitted(*args))),
        out,
        time.perf_counter() - begin,
    )


def ours(x, y, classes, v):
    """What is measured of ours, by name: calls, results, times of first calls; and the means they lead to."""
    (n, d), dtype = x.shape, x.dtype
    x, y, classes, alpha = (jnp.asarray(part, dtype) for part in (x, y, classes, ALPHA))
    prior = SpikeSlab(
        jnp.full(d, LAMBDA, dtype), jnp.zeros(d, dtype), jnp.full(d, SLAB, dtype)
    )
    start = Start(jnp.zeros(d, dtype), jnp.arange(d))
    design, blocked = block_design(blocks(x.T)), block_prior(prior)
    linear = linear_ascent(
        Regression(x, y, prior, jnp.zeros(d), None),
        start,
        alpha,
        Estimated(jnp.zeros((), dtype)),
    )
    step, begin = logistic_ascent(
        Regression(x, classes, prior, jnp.zeros(d), None), start, alpha
    )
    # At xi = 0 the loop would divide 0 by 0.
    begin = begin._replace(xi=jnp.ones(n, dtype))
    runs = {
        "sweep": compiled(
            sweep, design, blocked, alpha / v, y, blocks(jnp.zeros(d, dtype))
        ),
        "iteration, linear": compiled(*linear),
        "iteration, logistic": compiled(step, begin),
    }
    means = [
        runs["sweep"][1].mean,
        *(runs[name][1][0].q.mean for name in list(runs)[1:]),
    ]
    return runs, [np.ravel(mean)[:d] for mean in means]


def theirs(x, y, classes, v, fastmath):
    """The same by numba, and the array that each leaves its means in."""
    (n, d), dtype = x.shape, x.dtype.type
    one_sweep, linear, logistic = loops(fastmath)
    columns = np.ascontiguousarray(x.T)
    norms = np.sum(columns**2, axis=1)
    log_odds = np.full(d, np.log(LAMBDA / (1 - LAMBDA)), dtype)
    alpha, slab, prob = dtype(ALPHA), dtype(SLAB), dtype(LAMBDA)
    mean, *factors = (np.zeros(d, dtype) for _ in range(4))
    residual, scaled, weighted = y.copy(), np.empty_like(columns), norms.copy()

    def of_sweep():
        residual[:] = y
        mean[:] = 0.0
        one_sweep(
            columns, residual, mean, *factors, norms, log_odds, dtype(alpha / v), slab
        )

    def of_linear():
        residual[:] = y
        mean[:] = 0.0
        return linear(
            columns, y, residual, mean, *factors, norms, log_odds, alpha, v, prob, slab
        )[1]

    def of_logistic():
        mean[:] = 0.0
        predictor, xi = np.zeros(n, dtype), np.ones(n, dtype)
        arrays = (
            columns,
            classes,
            scaled,
            predictor,
            xi,
            mean,
            *factors,
            weighted,
            log_odds,
        )
        return logistic(*arrays, alpha, prob, slab)

    return (of_sweep, of_linear, of_logistic), mean


def measure(n, d, dtype, repetitions):
    x, y, classes = data(n, d, dtype)
    v = dtype(np.mean(y**2))
    runs, results = ours(x, y, classes, v)
    loops_of = {
        fastmath: theirs(x, y, classes, v, fastmath) for fastmath in (False, True)
    }
    rows = []
    for i, (name, (run, out, first)) in enumerate(runs.items()):
        contestants = [run]
        for calls, mean in loops_of.values():
            objective = calls[i]()
            np.testing.assert_allclose(mean, results[i], atol=1e-4)
            if objective is not None:
                np.testing.assert_allclose(objective, out[1], rtol=1e-4)
            contestants.append(calls[i])
        times = np.empty((repetitions, 3))
        # In turn, so that what else the machine does meets all of them.
        for repetition in range(repetitions):
            for j, contestant in enumerate(contestants):
                begin = time.perf_counter()
                contestant()
                times[repetition, j] = time.perf_counter() - begin
        mine, plain, fast = np.median(times, axis=0)
        rows.append(
            {
                "what": name,
                "n": n,
                "d": d,
                "precision": np.dtype(dtype).name,
                "ours / numba": mine / plain,
                "ours / numba fastmath": mine / fast,
                "compile / call of ours": first / mine - 1.0,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main():
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="n = 100, d = 500, float32, three repetitions",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the tables; none are written without it"
    )
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_enable_x64", True)
    # In the calling thread, as numba runs: a hand-over waits for whatever else the core does.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    d, repetitions = (500, 3) if options.small else (5000, 51)
    rows = [
        row
        for n in ((100,) if options.small else (100, 1000))
        for dtype in ((np.float32,) if options.small else (np.float64, np.float32))
        for row in measure(n, d, dtype, repetitions)
    ]
    table = pd.DataFrame(rows).round(2)
    table["compile / call of ours"] = (
        table["compile / call of ours"].round(-1).astype(int)
    )
    print(table.to_string(index=False))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        table.to_csv(options.output / "sparse_speed.csv", index=False)
        text = describe(
            f"n = 100 and 1000, d = {d}; one core; medians of {repetitions}; numba {numba.__version__}"
        )
        (options.output / "sparse_speed.txt").write_text(
            text + "\n" + table.to_string(index=False) + "\n"
        )


if __name__ == "__main__":
    main()
