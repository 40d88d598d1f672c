"""Mixtures of full-covariance Gaussians beside scikit-learn's BayesianGaussianMixture, on one core.

Per pass: coordinate ascent with its objective, the difference of two runs of different length (compilation and
starts cancel), median of repetitions; both from the same responsibilities, alpha = 1, the same priors. The ratio
is to scikit-learn in float64, its default; its float32 stands beside. The floor of a pass is the time of its
products (2 × 2 n K F flops for F statistics, at the rate of the machine's own products of the block's shape) and
of n K exponentials, both measured here.
Restarts: 32 side by side against one, per pass, to convergence, and as calls of fit with all their overhead.
To an objective: the wall time until F is within a nat of the best F that either found, with equal restarts
and starts, compilation apart.
Rounding: F as reported by a float32 fit of n = 10^6 rows against a float64 evaluation at the same parameters, by
numpy and scipy.
Writes ``mixture_speed.csv``, ``mixture_speed_restarts.csv``, ``mixture_speed_objective.csv``,
``mixture_speed_rounding.csv``.

    python tests/benchmarks/mixture_speed.py
"""

import argparse
import os
import time
import warnings
from pathlib import Path

# One core for all contestants, before any of their thread pools exists.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from provenance import describe
from scipy.special import digamma, gammaln, logsumexp
from sklearn.mixture import BayesianGaussianMixture

import numpyro_tempered as nt
from numpyro_tempered.mixtures.array import array_source
from numpyro_tempered.mixtures.ascent import Limits
from numpyro_tempered.mixtures.factors import COMMON_CAVI, TEMPERED_CAVI, problem_of
from numpyro_tempered.mixtures.prepare import Settings, prepare
from numpyro_tempered.mixtures.source import Starts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
SHAPES = [(1_000, 1, 3), (100_000, 2, 10), (1_000_000, 2, 10), (100_000, 16, 32)]
NEVER = -1e30


def draw(n, d, k, seed=0):
    """Rows of K Gaussians at random centres."""
    rng = np.random.default_rng([seed, n, d, k])
    centres = 4.0 * rng.normal(size=(k, d))
    return centres[rng.integers(k, size=n)] + rng.normal(size=(n, d))


def component_for(x):
    """The priors that scikit-learn takes by default, as ours."""
    d = x.shape[1]
    covariance = np.atleast_2d(np.cov(x.T))
    return nt.mixtures.components.gaussian(
        d, loc=x.mean(0), mean_precision=1.0, df=float(d), scale=covariance
    )


class FromResponsibilities(BayesianGaussianMixture):
    """scikit-learn's mixture, started from given responsibilities."""

    def _initialize_parameters(self, X, *args, **kwargs):
        self._initialize(X, self.start)


def scikit_learn(k, start, **options):
    """A mixture with ascent of the same objective; ``n_init`` is 1."""
    model = FromResponsibilities(
        n_components=k,
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=1.0,
        reg_covar=0.0,
        **options,
    )
    model.start = start
    return model


def timed(run, repetitions):
    """Median wall time."""
    times = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return float(np.median(times))


def ours(x, k, dtype, restarts=1):
    """A function of the number of passes that runs the compiled loop, and the rows of a block."""
    data = prepare(np.asarray(x, dtype), component_for(x), None)
    dtype = data.rows.dtype
    source = array_source(data, k, restarts)
    problem = problem_of(data, Settings(1.0, np.ones(k)), source.capacity(k))
    starts = Starts(k, nt.mixtures.starts.kmeans_plus_plus(), restarts)
    problem, factors = source.begin(jax.random.key(0), TEMPERED_CAVI, problem, starts)

    def run(passes, tolerance=NEVER):
        algorithm = COMMON_CAVI if source.is_large else TEMPERED_CAVI
        return source.ascend(
            algorithm, problem, factors, Limits(restarts, passes, tolerance, False)
        )

    return run, source.blocks.weight.shape[-1]


def per_pass(run, short, long, repetitions):
    """Seconds a pass."""
    run(short)
    return (
        timed(lambda: run(long), repetitions) - timed(lambda: run(short), repetitions)
    ) / (long - short)


def floor(n, d, k, size, dtype, repetitions):
    """Seconds that the products and exponentials of a pass take by themselves."""
    num_statistics = d + d * (d + 1) // 2
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(k, num_statistics)), dtype)
    statistics = jnp.asarray(rng.normal(size=(num_statistics, size)), dtype)
    omega = jnp.asarray(rng.normal(size=(k, size)), dtype)
    blocks = -(-n // size)

    # A loop, so that no call's overhead counts; the sum keeps each round in use.
    @jax.jit
    def products(weights, omega):
        def body(_, carry):
            linear = (weights + carry * 0) @ statistics
            sums = statistics @ (omega + carry * 0).T
            return carry + linear[0, 0] + sums[0, 0]

        return jax.lax.fori_loop(0, blocks, body, jnp.zeros((), dtype))

    @jax.jit
    def exponentials(omega):
        return jax.lax.fori_loop(
            0,
            blocks,
            lambda _, carry: carry + jnp.sum(jnp.exp(omega + carry * 0)),
            jnp.zeros((), dtype),
        )

    total = 0.0
    for run in (lambda: products(weights, omega), lambda: exponentials(omega)):
        jax.block_until_ready(run())
        total += timed(lambda run=run: jax.block_until_ready(run()), repetitions)
    return total


def per_pass_table(shapes, repetitions):
    """Time a pass by size and precision."""
    rows = []
    for n, d, k in shapes:
        x = draw(n, d, k)
        labels = np.random.default_rng(1).integers(k, size=n)
        start = np.eye(k)[labels]
        short, long = (5, 25) if n < 10_000 else (1, 4)

        def theirs(passes, x=x, k=k, start=start):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scikit_learn(k, start.astype(x.dtype), tol=0.0, max_iter=passes).fit(x)

        sklearn64 = per_pass(theirs, short, long, repetitions)
        x32 = x.astype(np.float32)
        sklearn32 = per_pass(
            lambda passes, x32=x32: theirs(passes, x32), short, long, repetitions
        )
        short, long = (100, 900) if n < 10_000 else (2, 22) if n < 1_000_000 else (1, 6)
        for dtype in (np.float64, np.float32):
            run, size = ours(x, k, dtype)
            mine = per_pass(run, short, long, repetitions)
            least = floor(n, d, k, size, dtype, repetitions)
            rows.append(
                {
                    "n": n,
                    "d": d,
                    "K": k,
                    "precision": np.dtype(dtype).name,
                    "scikit-learn float64 / ours": sklearn64 / mine,
                    "scikit-learn float32 / ours": sklearn32 / mine,
                    # Of one block, overheads are most of both.
                    "ours / floor": mine / least if n >= 100_000 else np.nan,
                }
            )
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def restarts_table(repetitions, small):
    """32 restarts in units of one."""
    x = draw(1_000, 1, 3)
    rows = []
    for dtype in (np.float32,) if small else (np.float64, np.float32):
        one, _ = ours(x, 3, dtype)
        many, _ = ours(x, 3, dtype, 32)
        passes = (20, 60) if small else (100, 500)
        ratio = per_pass(many, *passes, repetitions) / per_pass(
            one, *passes, repetitions
        )
        # To convergence: 32 single fits from the starts of the 32.
        tolerance = 1e-8 if dtype == np.float64 else 1e-6
        state = many(1000, tolerance)
        together = timed(lambda many=many, t=tolerance: many(1000, t), repetitions)
        iterations = np.asarray(state.num_iter)
        single = per_pass(one, *passes, repetitions) * iterations.mean()
        calls = {}
        for restarts in (1, 32):

            def call(restarts=restarts, dtype=dtype):
                nt.mixtures.fit(
                    jax.random.key(0),
                    np.asarray(x, dtype),
                    component_for(x),
                    num_components=3,
                    num_restarts=restarts,
                    num_draws=0,
                )

            call()
            calls[restarts] = timed(call, repetitions)
        rows.append(
            {
                "precision": np.dtype(dtype).name,
                "32 restarts a pass / one": ratio,
                "32 restarts to convergence / mean single fit": together / single,
                "call of fit with 32 / with one": calls[32] / calls[1],
                "passes of the longest / mean": iterations.max() / iterations.mean(),
            }
        )
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def objective_table(repetitions, small):
    """Time to within a nat of the best objective, equal starts for both."""
    n, d, k, restarts = (1_000, 2, 3, 2) if small else (20_000, 2, 10, 8)
    x = draw(n, d, k)
    component = component_for(x)
    prior = component.prior
    keys = jax.random.split(jax.random.key(3), restarts)
    begun = [
        nt.mixtures.starts.kmeans_plus_plus().assign(
            key, (), jnp.asarray(x), jnp.ones(n), jnp.ones(k, bool)
        )
        for key in keys
    ]
    starting = [np.eye(k)[np.asarray(labels)] for labels in begun]
    # What lower_bound_ leaves out; mean_precision is 1, whose logarithm is 0.
    df, log_det = (
        float(prior.df),
        np.linalg.slogdet(np.asarray(prior.scale, np.float64))[1],
    )
    of_each = 0.5 * df * (log_det - d * np.log(2.0)) - sum(
        gammaln(0.5 * (df - i)) for i in range(d)
    )
    constant = gammaln(k) + k * of_each - 0.5 * n * d * np.log(2.0 * np.pi)

    def of_sklearn(tolerance):
        best, used = -np.inf, 0.0
        for start in starting:
            begin_time = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = scikit_learn(k, start, tol=tolerance, max_iter=1000).fit(x)
            used += time.perf_counter() - begin_time
            best = max(best, model.lower_bound_ + constant)
        return best, used

    def of_ours(dtype, tolerance):
        best, used = -np.inf, 0.0
        for start in starting:
            begin_time = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = nt.mixtures.fit(
                    jax.random.key(0),
                    np.asarray(x, dtype),
                    component,
                    num_components=k,
                    init=nt.mixtures.starts.given_responsibilities(start),
                    num_restarts=1,
                    num_draws=0,
                    tolerance=tolerance / n,
                )
            used += time.perf_counter() - begin_time
            best = max(best, fit.objective)
        return best, used

    tolerance = 1e-2
    rows = []
    for name, run in (
        ("scikit-learn, float64", lambda: of_sklearn(tolerance)),
        ("ours, float64", lambda: of_ours(np.float64, tolerance)),
        ("ours, float32", lambda: of_ours(np.float32, max(tolerance, 1e-6 * n))),
    ):
        run()
        results = [run() for _ in range(repetitions)]
        rows.append(
            {
                "method": name,
                "best F": results[0][0],
                "seconds": float(np.median([r[1] for r in results])),
            }
        )
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    table["below the best, nats"] = table["best F"].max() - table["best F"]
    table["scikit-learn / ours, time"] = table["seconds"].iloc[0] / table["seconds"]
    return table.drop(columns="seconds")


def rounding_table(small):
    """F of a float32 fit against numpy's and scipy's float64 at the same parameters."""
    rows = []
    for n in (2_000,) if small else (10_000, 100_000, 1_000_000):
        x = draw(n, 2, 10).astype(np.float32)
        # As on a machine without 64 bits.
        with jax.enable_x64(False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = nt.mixtures.fit(
                    jax.random.key(0),
                    x,
                    component_for(x),
                    num_components=10,
                    num_restarts=1,
                    num_draws=0,
                    max_iter=60,
                )
            assert fit.trace.dtype == np.float32
        exact = objective_by_scipy(fit, x)
        rows.append(
            {
                "n": n,
                "reported - exact, nats": fit.objective - exact,
                "last of the float32 trace - exact, nats": float(fit.trace[-1]) - exact,
            }
        )
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def objective_by_scipy(fit, x):
    """F of normal-Wishart components from the formulas, in float64."""
    # The rows as the fit saw them, rounded to float32 about the centre.
    x = (x - fit.centre).astype(np.float32).astype(np.float64)
    q, p = (
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), t)
        for t in (fit.factors.posterior, fit.problem.prior)
    )
    a = np.asarray(fit.factors.concentration, np.float64)
    a0 = np.asarray(fit.problem.concentration, np.float64)
    n, d = x.shape
    log_p = digamma(a) - digamma(a.sum())
    kl = (
        gammaln(a.sum())
        - gammaln(a).sum()
        - gammaln(a0.sum())
        + gammaln(a0).sum()
        + ((a - a0) * log_p).sum()
    )
    joint = np.empty((n, len(a)))
    index = np.arange(d)
    for j in range(len(a)):
        precision = q.df[j] * np.linalg.inv(q.scale[j])
        log_det = (
            digamma(0.5 * (q.df[j] - index)).sum()
            + d * np.log(2)
            - np.linalg.slogdet(q.scale[j])[1]
        )
        moved = x - q.loc[j]
        quadratic = np.einsum("ni,ij,nj->n", moved, precision, moved)
        joint[:, j] = log_p[j] + 0.5 * (
            log_det - d * np.log(2 * np.pi) - quadratic - d / q.mean_precision[j]
        )
        ratio = p.mean_precision / q.mean_precision[j]
        shift = q.loc[j] - p.loc
        kl += 0.5 * (
            d * (ratio - 1 - np.log(ratio))
            + p.mean_precision * shift @ precision @ shift
        )
        kl += 0.5 * (
            (q.df[j] - p.df) * log_det + np.sum(precision * p.scale) - d * q.df[j]
        )
        for sign, df, scale in ((1, p.df, p.scale), (-1, q.df[j], q.scale[j])):
            log_scale = np.linalg.slogdet(scale)[1]
            kl += sign * (
                0.5 * df * (d * np.log(2) - log_scale)
                + gammaln(0.5 * (df - index)).sum()
            )
    return float(fit.alpha * logsumexp(joint, axis=1).sum() - kl)


def main():
    """Run all four, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="the smallest sizes, one precision, two repetitions",
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    options = parser.parse_args()
    repetitions = 2 if options.small else 5
    if hasattr(os, "sched_setaffinity"):
        # The threads of jax are made with its first array, and stay on this core.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_enable_x64", True)
    shapes = [(1_000, 1, 3)] if options.small else SHAPES
    tables = {
        "mixture_speed": per_pass_table(shapes, repetitions).round(1),
        "mixture_speed_restarts": restarts_table(repetitions, options.small).round(2),
        "mixture_speed_objective": objective_table(
            1 if options.small else 3, options.small
        ).round(2),
        "mixture_speed_rounding": rounding_table(options.small).map("{:.2g}".format),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(options.output / f"{name}.csv", index=False)
        print(table.to_string(index=False))
    (options.output / "mixture_speed.txt").write_text(
        describe(f"(n, d, K) = {shapes}; one core; seeds by numpy")
    )


if __name__ == "__main__":
    main()
