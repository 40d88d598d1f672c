"""Seconds and memory against rows, columns and components, and what a second process saves.

    python tests/benchmarks/scaling.py

Streams of single rows by ``ngvi`` and ``rvga`` under a full covariance, K of them under ``aggregate``; mixtures
of K full covariances, 20 passes; logistic regressions by ``fit_gaussian`` under a full covariance, ten
evaluations with quadrature. Each line of ``scaling.csv`` is a process of its own: the first call with its
compilation, the second alone, and the most memory that the process ever had, of which it had ``start_MiB`` when
the package was imported. Slopes are those of the log of the seconds of second calls, and of the log of the memory
above the start, between the two largest sizes.

``scaling_processes.csv`` has one fit by one process on one core, the same by two processes with a core each, and
twice the fit by two processes that know nothing of each other, which is what the machine can do.
Also writes ``scaling.png`` and ``scaling.txt``.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import calls as fresh
import numpy as np
import pandas as pd

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
# Sizes n, d and K of each method, where one of them changes and where it does not.
BASE = {
    "ngvi": {"n": (10**5, 10, 1), "d": (10**4, 10, 1), "K": (10**4, 10, 1)},
    "rvga": {"n": (10**5, 10, 1), "d": (10**4, 10, 1), "K": (10**4, 10, 1)},
    "mixture": {"n": (10**5, 10, 8), "d": (10**5, 10, 8), "K": (10**5, 10, 8)},
    "logistic fit": {"n": (10**5, 10, 1), "d": (10**5, 10, 1)},
}
SIZES = {
    "ngvi": {
        "n": (10**4, 10**5, 10**6, 10**7),
        "d": (8, 32, 128, 512),
        "K": (1, 8, 64, 256),
    },
    "rvga": {
        "n": (10**4, 10**5, 10**6, 10**7),
        "d": (8, 32, 128, 512),
        "K": (1, 8, 64, 256),
    },
    "mixture": {
        "n": (10**4, 10**5, 10**6, 10**7),
        "d": (4, 16, 64),
        "K": (2, 8, 32, 128),
    },
    "logistic fit": {"n": (10**4, 10**5, 10**6), "d": (8, 32, 128)},
}
SMALL = {
    "ngvi": {"n": (10**3, 10**4), "d": (8,), "K": (1,)},
    "mixture": {"n": (10**3, 10**4)},
}
SMALL |= {"logistic fit": {"n": (10**3, 10**4)}}
# A first call compiles, whatever other processes have left behind.
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
AXES = {"n": "rows n", "d": "columns d", "K": "components, or learners, K"}


def peak_mebibytes():
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def regression(n, d):
    """Rows and labels of -1 and 1, made in single precision and in pieces, so that memory is that of the data."""
    rng = np.random.default_rng(0)
    x, y = np.empty((n, d), np.float32), np.empty(n, np.float32)
    for start in range(0, n, 10**5):
        part = rng.standard_normal(
            (min(10**5, n - start), d), dtype=np.float32
        ) / np.float32(np.sqrt(d))
        x[start : start + 10**5] = part
        y[start : start + 10**5] = np.where(
            rng.random(len(part)) < 1.0 / (1.0 + np.exp(-part.sum(1))), 1.0, -1.0
        )
    return x, y


def clusters(n, d):
    """Rows around four centres."""
    rng = np.random.default_rng(0)
    centres, x = 2.0 * rng.normal(size=(4, d)), np.empty((n, d), np.float32)
    for start in range(0, n, 10**5):
        size = min(10**5, n - start)
        part = rng.standard_normal((size, d), dtype=np.float32)
        x[start : start + size] = part + centres[rng.integers(4, size=size)]
    return x


def stream_call(method, n, d, num_experts):
    """A pass of single rows."""
    import jax.numpy as jnp

    import numpyro_tempered as nt

    factory = getattr(nt.online, method)
    rule = factory()
    if num_experts > 1:
        rule = nt.online.aggregate(
            nt.online.grid(factory, step_size=np.geomspace(0.1, 1.0, num_experts))
        )
    loss = nt.expectations.logistic()
    state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d)))
    x, y = map(jnp.asarray, regression(n, d))
    return lambda key: nt.online.run(rule, loss, state, x, y)[0]


def mixture_call(n, d, num_components, rows=None, weight=None):
    """Twenty passes of one restart: the same work at any size."""
    import numpyro_tempered as nt

    x = clusters(n, d) if rows is None else rows
    component = nt.mixtures.components.gaussian(
        d, **nt.mixtures.components.scaled_to(clusters(1000, d))
    )
    warnings.filterwarnings("ignore", "the best restart has not converged")

    def call(key):
        fit = nt.mixtures.fit(
            key,
            x,
            component,
            num_components=num_components,
            sample_weight=weight,
            num_restarts=1,
            max_iter=20,
            tolerance=0.0,
            num_draws=0,
            progress_bar=False,
        )
        return fit.factors

    return call


def logistic_call(n, d, _):
    """Ten evaluations: the same work at any size."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
        with numpyro.plate("n", n):
            eta = numpyro.deterministic("eta", x @ beta)
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    x, y = regression(n, d)
    x, y = jnp.asarray(x), jnp.asarray(y > 0, jnp.float32)
    quadrature = nt.expectations.gauss_hermite(predictor="eta")
    options = {"expectation": quadrature, "max_evaluations": 10, "num_particles": 2}
    warnings.filterwarnings("ignore", message=".*")
    return lambda key: (
        nt.fit_gaussian(key, model, AutoMultivariateNormal, x, y, **options).params
    )


def cell(method, n, d, k):
    """A line of the table, in this process."""
    import jax

    key = jax.block_until_ready(jax.random.key(0))
    import numpyro_tempered  # noqa: F401

    start = peak_mebibytes()
    make = {"mixture": mixture_call, "logistic fit": logistic_call}.get(method)
    call = stream_call(method, n, d, k) if make is None else make(n, d, k)
    first, again = seconds_of(call, key)
    return {
        "first_call_s": first,
        "seconds": again,
        "peak_MiB": peak_mebibytes(),
        "start_MiB": start,
    }


def seconds_of(call, key):
    """Of the first and of the second call."""
    import jax

    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        jax.block_until_ready(call(key))
        seconds.append(time.perf_counter() - begin)
    return seconds


def one_of(kind, number, index, port, n):
    """Seconds of one of the processes of a fit; with port 0 they know nothing of each other."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if port:
        jax.distributed.initialize(
            f"localhost:{port}", num_processes=number, process_id=index
        )
    count = number if port else 1
    mesh = jax.make_mesh((count,), ("rows",))

    def place(array, axis=0):
        part = np.array_split(array, count, axis=axis)[index if port else 0]
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "rows"))
        return jax.make_array_from_process_local_data(sharding, part)

    call = (
        mixture_call(n, 10, 8, place(clusters(n, 10)))
        if kind == "mixture"
        else batches_call(n, place)
    )
    first, again = seconds_of(call, jax.random.key(0))
    return {"first_call_s": first, "seconds": again}


def batches_call(n, place):
    """A stream on 54 columns in batches of 8192 rows."""
    import jax.numpy as jnp

    import numpyro_tempered as nt

    d, size = 54, min(8192, n)
    x, y = regression(n // size * size, d)
    x, y = place(x.reshape(-1, size, d), 1), place(y.reshape(-1, size), 1)
    rule = nt.online.rvga()
    loss = nt.expectations.logistic()
    state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d)))
    return lambda key: nt.online.run(rule, loss, state, x, y)[0]


def side_by_side(kind, number, together, n):
    """What each of several processes that run at once measures."""
    port = 0
    if together:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--one",
                "process",
                kind,
                str(number),
                str(index),
                str(port),
                str(n),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | NO_CACHE | {"no_proxy": "localhost"},
        )
        for index in range(number)
    ]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(
            f"{kind} on {number} processes failed: {[p.returncode for p in running]}"
        )
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]


def processes(sizes):
    """Seconds of one process and of two, and the efficiency of the second."""
    rows = []
    for kind, n in sizes.items():
        ways = {"one": (1, False), "two together": (2, True), "two apart": (2, False)}
        seconds = {}
        for way, (number, together) in ways.items():
            measured = side_by_side(kind, number, together, n)
            first, seconds[way] = (
                max(each[name] for each in measured)
                for name in ("first_call_s", "seconds")
            )
            # Two apart do twice the work.
            share = 1.0 if way == "two apart" else 1.0 / number
            row = {
                "fit": kind,
                "n": n,
                "processes": way,
                "first_call_s": first,
                "seconds": seconds[way],
            }
            rows.append(row | {"efficiency": share * seconds["one"] / seconds[way]})
    return pd.DataFrame(rows)


def sweep(sizes):
    """The lines of the table, and slopes in the last line of each sweep."""
    rows = []
    for method, axes in sizes.items():
        for axis, values in axes.items():
            for value in values:
                n, d, k = (
                    value if name == axis else BASE[method][axis][i]
                    for i, name in enumerate(("n", "d", "K"))
                )
                row = {"method": method, "axis": axis, "n": n, "d": d, "K": k}
                rows.append(
                    row
                    | fresh.in_new_process(
                        __file__, "cell", method, *map(str, (n, d, k)), **NO_CACHE
                    )
                )
                print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    table["above_MiB"] = table["peak_MiB"] - table["start_MiB"]
    for column, name in (("seconds", "slope_seconds"), ("above_MiB", "slope_memory")):
        table[name] = np.nan
        for (_, axis), part in table.groupby(["method", "axis"]):
            if len(part) > 1:
                last = part.iloc[-2:]
                table.loc[part.index[-1], name] = np.diff(
                    np.log(last[column])
                ) / np.diff(np.log(last[axis]))
    return table.drop(columns="above_MiB")


def draw(table, path):
    """Seconds and memory against each size, with slopes in the legends."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.style.use("numpyro_tempered.plots.house")
    _, axes = plt.subplots(2, 3, figsize=(10, 6.5), sharex="col", sharey="row")
    for column, (axis, label) in zip(axes.T, AXES.items(), strict=True):
        for method, part in table[table["axis"] == axis].groupby("method", sort=False):
            part = part.sort_values(axis)
            for ax, values, name in (
                (column[0], part["seconds"], "slope_seconds"),
                (column[1], part["peak_MiB"] - part["start_MiB"], "slope_memory"),
            ):
                slope = part[name].iloc[-1]
                ax.loglog(
                    part[axis],
                    values,
                    "o-",
                    label=method + ("" if np.isnan(slope) else f", slope {slope:.2f}"),
                )
        column[1].set(xlabel=label)
        for ax in column:
            if ax.lines:
                ax.legend(fontsize="x-small")
    axes[0, 0].set(ylabel="seconds of a second call")
    axes[1, 0].set(ylabel="MiB above the start")
    axes[0, 0].figure.savefig(path)
    plt.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few small sizes, to a temporary folder"
    )
    parser.add_argument(
        "--output", type=Path, help="folder; docs/results, or a temporary one if small"
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, *rest = options.one
        if what == "cell":
            print(json.dumps(cell(rest[0], *map(int, rest[1:]))))
        else:
            print(json.dumps(one_of(rest[0], *map(int, rest[1:]))))
        return
    output = options.output or (Path(tempfile.mkdtemp()) if options.small else DOCS)
    output.mkdir(parents=True, exist_ok=True)
    from provenance import describe

    begin = time.perf_counter()
    small, large = (
        {"stream of batches": 2 * 8192},
        {"mixture": 10**6, "stream of batches": 10**6},
    )
    by_process = processes(small if options.small else large)
    by_process.to_csv(
        output / "scaling_processes.csv", index=False, float_format="%.4g"
    )
    print(by_process.to_string())
    table = sweep(SMALL if options.small else SIZES)
    table.to_csv(output / "scaling.csv", index=False, float_format="%.4g")
    print(table.to_string())
    draw(table, output / "scaling.png")
    seconds = time.perf_counter() - begin
    (output / "scaling.txt").write_text(
        describe("as in the table, single precision") + f"whole run: {seconds:.0f} s\n"
    )


if __name__ == "__main__":
    main()
