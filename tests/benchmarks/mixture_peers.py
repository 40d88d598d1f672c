"""EM for mixtures of full-covariance Gaussians beside scikit-learn, gmmx and mlpack.

Loop: seconds a pass from the same start, the difference of two runs of different length (compilation, starts and
what follows cancel), least of the repetitions, on one core. scikit-learn and mlpack have float64 alone, gmmx has
the default precision of JAX. mlpack starts from its own k-means, whose time cancels.
First call: a fit of 500 rows in two columns, K = 3, one start, defaults, all cores, in a fresh process whose
imports do not count, and the next call in that process with other data of the same shape.
Likelihood: log L a datum at the end of the longer run, by scipy, of the parameters that each contender returns.
Writes ``mixture_peers.csv`` and ``mixture_peers_first.csv``.

    python tests/benchmarks/mixture_peers.py
"""

import argparse
import json
import os
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import calls as fresh
import numpy as np
import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
SHAPES = [(1_000, 2, 3), (100_000, 2, 10), (100_000, 16, 32)]
PASSES = {
    (1_000, 2, 3): (100, 1100),
    (100_000, 2, 10): (5, 45),
    (100_000, 16, 32): (2, 8),
}
CONTENDERS = [
    "ours, float32",
    "ours, float64",
    "gmmx, float32",
    "scikit-learn, float64",
    "mlpack, float64",
]
REGULARISATION = 1e-6
# One core for all contestants, before any of their thread pools exists.
ONE_CORE = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
NEVER = -1e30


def draw(n, d, k, seed=0):
    """Rows of K Gaussians at random centres."""
    rng = np.random.default_rng([seed, n, d, k])
    centres = 4.0 * rng.normal(size=(k, d))
    return centres[rng.integers(k, size=n)] + rng.normal(size=(n, d))


def start_of(x, k):
    """The nearest of K rows, as one-hot responsibilities."""
    seeds = x[np.random.default_rng(1).choice(len(x), k, replace=False)]
    squares = (x**2).sum(axis=1)[:, None] - 2.0 * x @ seeds.T + (seeds**2).sum(axis=1)
    return np.eye(k)[squares.argmin(axis=1)]


def moments(x, omega):
    """Weights, means and covariances of one M step."""
    counts = omega.sum(axis=0)
    means = omega.T @ x / counts[:, None]
    covariances = (
        np.einsum("nk,ni,nj->kij", omega, x, x, optimize=True) / counts[:, None, None]
    )
    covariances = covariances - means[:, :, None] * means[:, None, :]
    return counts / len(x), means, covariances + REGULARISATION * np.eye(x.shape[1])


def log_likelihood(x, weights, means, covariances):
    """A datum, by scipy."""
    from scipy.special import logsumexp
    from scipy.stats import multivariate_normal

    parts = [
        multivariate_normal(m, c).logpdf(x)
        for m, c in zip(means, covariances, strict=True)
    ]
    return float(np.mean(logsumexp(np.log(weights) + np.array(parts).T, axis=1)))


def ours(x, k, omega, dtype):
    """A function of the number of passes, None for the defaults, to the fitted parameters."""
    import jax

    import numpyro_tempered as nt

    component = nt.mixtures.components.gaussian(x.shape[1])
    x, key = x.astype(dtype), jax.random.key(0)
    if omega is None:
        return lambda passes: nt.mixtures.em(
            key, x, component, num_components=k, num_restarts=1
        )
    start = nt.mixtures.starts.given_responsibilities(omega.astype(dtype))
    loop = compiled_loop(x, component, k, start)

    def run(passes):
        point = loop(passes)
        covariances = np.linalg.inv(
            np.asarray(point.parameters["precision"][0], np.float64)
        )
        # The data are moved to their mean, the parameters to the centres.
        means = (point.parameters["loc"] + point.centres)[0] + x.mean(
            axis=0, dtype=np.float64
        )
        return np.exp(np.asarray(point.log_weights[0], np.float64)), means, covariances

    return run


def compiled_loop(x, component, k, start):
    """A function of the number of passes that runs so many, whatever the objective does."""
    import jax

    from numpyro_tempered.mixtures.array import array_source
    from numpyro_tempered.mixtures.ascent import Limits
    from numpyro_tempered.mixtures.components.base import as_dtype
    from numpyro_tempered.mixtures.likelihood import EXPECTATION_MAXIMISATION, EMProblem
    from numpyro_tempered.mixtures.prepare import prepare
    from numpyro_tempered.mixtures.source import Starts

    data = prepare(x, component, None)
    source = array_source(data, k, 1)
    prior, *numbers = as_dtype((data.prior, 0.0, data.total), data.rows.dtype)
    problem = EMProblem(prior, np.arange(source.capacity(k)) < k, *numbers)
    problem, points = source.begin(
        jax.random.key(0), EXPECTATION_MAXIMISATION, problem, Starts(k, start, 1)
    )

    def run(passes):
        state = source.ascend(
            EXPECTATION_MAXIMISATION, problem, points, Limits(1, passes, NEVER, False)
        )
        assert int(state.num_steps) == passes
        return jax.tree.map(lambda leaf: leaf[:, :k], state.point.update)

    return run


def gmmx(x, k, omega, dtype):
    """As :func:`ours`."""
    import jax.numpy as jnp
    from gmmx import EMFitter, GaussianMixtureModelJax

    if omega is None:
        omega = start_of(x, k)
    weights, means, covariances = moments(x, omega)
    x = jnp.asarray(x, dtype)

    def run(passes):
        limits = {} if passes is None else {"max_iter": passes, "tol": -1.0}
        model = GaussianMixtureModelJax.from_squeezed(
            means=jnp.asarray(means, dtype),
            covariances=jnp.asarray(covariances, dtype),
            weights=jnp.asarray(weights, dtype),
        )
        fitted = EMFitter(reg_covar=REGULARISATION, **limits).fit(x, model).gmm
        return tuple(
            np.asarray(each, np.float64)
            for each in (
                jnp.ravel(fitted.weights),
                fitted.means.reshape(k, -1),
                fitted.covariances.values.reshape(k, x.shape[1], x.shape[1]),
            )
        )

    return run


def scikit_learn(x, k, omega, dtype):
    """As :func:`ours`."""
    from sklearn.mixture import GaussianMixture

    def run(passes):
        options = {} if passes is None else {"max_iter": passes, "tol": 0.0}
        if omega is not None:
            weights, means, covariances = moments(x, omega)
            precisions = np.linalg.inv(covariances)
            options |= {
                "weights_init": weights,
                "means_init": means,
                "precisions_init": precisions,
            }
        model = GaussianMixture(
            k, reg_covar=REGULARISATION, random_state=0, **options
        ).fit(x)
        return model.weights_, model.means_, model.covariances_

    return run


def mlpack(x, k, omega, dtype):
    """As :func:`ours`, from its own start; its parameters cannot be read from Python."""
    import mlpack as library

    def run(passes):
        limits = (
            {} if passes is None else {"max_iterations": passes, "tolerance": 1e-300}
        )
        library.gmm_train(input_=x, gaussians=k, seed=1, **limits)

    return run


MAKERS = {"ours": ours, "gmmx": gmmx, "scikit-learn": scikit_learn, "mlpack": mlpack}


def maker_of(contender):
    """The function of a contender, and its precision."""
    name, dtype = contender.split(", ")
    return MAKERS[name], dtype


def loop(contender, shape, passes, repetitions):
    """Seconds a pass, and log L a datum after the longer run."""
    import jax

    make, dtype = maker_of(contender)
    jax.config.update("jax_enable_x64", contender == "ours, float64")
    n, d, k = shape
    x = draw(n, d, k)
    run = make(x, k, start_of(x, k), dtype)
    seconds = []
    for number in passes:
        parameters = run(number)
        times = []
        for _ in range(repetitions):
            began = time.perf_counter()
            run(number)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
    each = (seconds[1] - seconds[0]) / (passes[1] - passes[0])
    return each, None if parameters is None else log_likelihood(x, *parameters)


def first_calls(contender):
    """Seconds of the first and of the second fit of this process."""
    import jax

    make, dtype = maker_of(contender)
    jax.config.update("jax_enable_x64", contender == "ours, float64")
    if make is not mlpack:
        make(draw(10, 2, 1), 1, None, dtype)
    seconds = []
    for seed in (1, 2):
        x = draw(500, 2, 3, seed)
        began = time.perf_counter()
        make(x, 3, None, dtype)(None)
        seconds.append(time.perf_counter() - began)
    return seconds


def main():
    """Run the loops and the first calls, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="the smallest size, few passes, one repetition",
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder for the tables"
    )
    parser.add_argument(
        "--one", nargs="+", help="what one process measures, printed as JSON"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        contender, *number = options.one
        if not number:
            print(json.dumps(first_calls(contender)))
            return
        if hasattr(os, "sched_setaffinity"):
            # The threads of jax are made with its first array, and stay on this core.
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        shape = SHAPES[int(number[0])]
        passes = (2, 6) if options.small else PASSES[shape]
        print(json.dumps(loop(contender, shape, passes, 1 if options.small else 3)))
        return
    from provenance import describe

    contenders = [
        c
        for c in CONTENDERS
        if c.split(", ")[0] in ("ours", "scikit-learn") or find_spec(c.split(", ")[0])
    ]
    rows, firsts = [], []
    small = ["--small"] if options.small else []
    for contender in contenders:
        first, second = fresh.in_new_process(__file__, contender, *small)
        firsts.append(
            {"contender": contender, "first call, s": first, "second call, s": second}
        )
        print(firsts[-1], flush=True)
    for number, shape in enumerate(SHAPES[:1] if options.small else SHAPES):
        for contender in contenders:
            each, value = fresh.in_new_process(
                __file__, contender, str(number), *small, **ONE_CORE
            )
            rows.append(
                dict(zip("ndK", shape, strict=True))
                | {"contender": contender, "ms a pass": 1e3 * each}
            )
            rows[-1]["log L a datum"] = value
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    reference = table[table["contender"] == "ours, float32"].set_index(["n", "d", "K"])[
        "ms a pass"
    ]
    table.insert(
        5,
        "time / ours, float32",
        table["ms a pass"]
        / reference.loc[
            list(zip(table["n"], table["d"], table["K"], strict=True))
        ].values,
    )
    table = table.round({"ms a pass": 3, "time / ours, float32": 1, "log L a datum": 4})
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "mixture_peers.csv", index=False)
    pd.DataFrame(firsts).round(3).to_csv(
        options.output / "mixture_peers_first.csv", index=False
    )
    print(table.to_string(index=False))
    names = [
        name
        for name in ("gmmx", "mlpack", "scikit-learn")
        if find_spec({"scikit-learn": "sklearn"}.get(name, name))
    ]
    text = describe("one core; seeds by numpy")
    (options.output / "mixture_peers.txt").write_text(text + versions(names))


def versions(names):
    """A line of the versions of the peers."""
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in names) + "\n"


if __name__ == "__main__":
    main()
