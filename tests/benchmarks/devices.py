"""What a device makes of batch sizes, learners side by side, rows of a mixture, and precision.

    python tests/benchmarks/devices.py

On the default device of JAX: streams of 54 columns under a full covariance in batches of 1 to 512 rows, 1 to 1000
learners of 20 columns under ``vmap``, and mixture fits of 10^4 to 10^6 rows. Seconds are the best of three calls
after the first, which is a column of its own. Memory is what XLA plans for the program, beside its arguments.
Writes ``devices.csv``, ``devices.png`` and ``devices.txt``; ``--precision double`` appends double precision.
"""

import argparse
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
LOGISTIC = nt.expectations.logistic()
UNITS = {
    "stream": "rows in a batch",
    "learners": "learners side by side",
    "mixture": "rows of a mixture",
}


def seconds_of(call, repeats=3):
    """Of the first call, and the best of later ones."""
    seconds = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return seconds[0], min(seconds[1:])


def stream(size, num_rows):
    """Rows of a logistic regression on 54 columns in batches of a size, in one compiled loop."""
    d = 54
    x, y = logistic_data(num_rows // size * size, d)
    rule = nt.online.rvga()
    state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d)))
    batches = (jnp.reshape(x, (-1, size, d)), jnp.reshape(y, (-1, size)))
    program = jax.jit(lambda state, x, y: nt.online.run(rule, LOGISTIC, state, x, y)[0])
    return program, (state, *(batches if size > 1 else (x, y))), len(x)


def learners(number, num_rows):
    """Rows times learners: one stream of 20 columns, seen by learners with priors of their own."""
    d = 20
    x, y = logistic_data(num_rows, d)
    rule = nt.online.rvga()
    scales = jnp.geomspace(0.1, 10.0, number)
    states = jax.vmap(
        lambda scale: rule.init(
            nt.gaussian.families.FullRank(jnp.zeros(d), scale * jnp.eye(d))
        )
    )(scales)

    def one(state, x, y):
        return nt.online.run(rule, LOGISTIC, state, x, y)[0]

    return jax.jit(jax.vmap(one, (0, None, None))), (states, x, y), number * len(x)


def mixture(num_rows):
    """Rows times passes of a fit of eight components on four columns, two restarts and twenty passes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 4)) + 6.0 * rng.integers(4, size=(num_rows, 1))
    component = nt.mixtures.components.gaussian(
        4, **nt.mixtures.components.scaled_to(x)
    )
    # Twenty passes are the same work at any size, and no end.
    warnings.filterwarnings("ignore", "the best restart has not converged")

    def call():
        fit = nt.mixtures.fit(
            jax.random.key(0),
            x,
            component,
            num_components=8,
            num_restarts=2,
            max_iter=20,
            tolerance=0.0,
            num_draws=0,
        )
        return fit.factors

    return call, 40 * num_rows


def logistic_data(num_rows, d):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, d)) / np.sqrt(d)
    y = rng.random(num_rows) < 1.0 / (1.0 + np.exp(-x.sum(1)))
    return jnp.asarray(x, float), jnp.asarray(np.where(y, 1.0, -1.0), float)


def measure(kind, size, program, arguments, work):
    """A row of the table."""
    begin, planned = time.perf_counter(), np.nan
    if arguments is not None:
        compiled = program.lower(*arguments).compile()
        planned = compiled.memory_analysis().temp_size_in_bytes / 2**20
        program = partial(compiled, *arguments)
    compilation = time.perf_counter() - begin
    first, again = seconds_of(program)
    precision = "double" if jax.config.jax_enable_x64 else "single"
    return {
        "kind": kind, "size": size, "precision": precision, "first_call_s": compilation + first, "seconds": again,
        "rows_per_s": work / again, "temporary_MiB": planned,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few rows, to a temporary folder"
    )
    parser.add_argument(
        "--output", type=Path, help="folder; docs/results, or a temporary one if small"
    )
    parser.add_argument("--precision", choices=["single", "double"], default="single")
    options = parser.parse_args()
    output = options.output or (Path(tempfile.mkdtemp()) if options.small else DOCS)
    output.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", options.precision == "double")

    num_rows = 1024 if options.small else 65536
    rows = [
        measure("stream", size, *stream(size, num_rows)) for size in (1, 8, 64, 512)
    ]
    numbers = (1, 10) if options.small else (1, 10, 100, 1000)
    rows += [
        measure("learners", number, *learners(number, num_rows // 16))
        for number in numbers
    ]
    for size in (1000, 4000) if options.small else (10**4, 10**5, 10**6):
        call, work = mixture(size)
        rows.append(measure("mixture", size, call, None, work))
    table = pd.DataFrame(rows)
    path = output / "devices.csv"
    if options.precision == "double" and path.exists():
        former = pd.read_csv(path)
        table = pd.concat([former[former["precision"] == "single"], table])
    table.to_csv(path, index=False, float_format="%.4g")
    print(table.to_string())

    plt.style.use("numpyro_tempered.plots.house")
    _, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True)
    for ax, (kind, unit) in zip(axes, UNITS.items(), strict=True):
        for precision, each in table[table["kind"] == kind].groupby("precision"):
            ax.loglog(
                each["size"], each["rows_per_s"], "o-", label=f"{precision} precision"
            )
        ax.set(xlabel=unit)
    axes[0].set(ylabel="rows per second")
    axes[0].legend()
    axes[0].figure.savefig(output / "devices.png")
    (output / "devices.txt").write_text(
        describe("as in the table; two million rows at most")
    )


if __name__ == "__main__":
    main()
