"""One pass over a CSV file, read and learned from, beside Vowpal Wabbit.

A logistic regression on d features, rounded to four decimals as files have them. All read what is in the page
cache, and take turns; seconds of wall time and of CPU time of all threads, medians. How each is called:

- *NGVI*, *R-VGA*: ``nt.online.run_chunks`` on ``nt.online.csv_chunks``, mean field; *full covariance*: R-VGA
  on one; *reading alone*: all chunks of ``csv_chunks``;
- *Vowpal Wabbit, CSV*: ``--csv`` on the same file, but for the name of the column of labels;
- *Vowpal Wabbit, text*: on the same numbers in its text format. Both by its Python package, whose parser is a
  thread of its own, with ``--loss_function logistic``; ``--noop`` reads alone.

Writes ``csv_stream.csv`` and ``csv_stream.txt``.

    python tests/benchmarks/csv_stream.py
"""

import argparse
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import vowpalwabbit
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"


def write_files(folder, num_rows, d):
    """The rows as CSV, as CSV with the label's name that Vowpal Wabbit wants, and in its text format."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, d)).round(4)
    y = np.where(
        rng.random(num_rows)
        < 1.0 / (1.0 + np.exp(-x @ rng.normal(size=d) / np.sqrt(d))),
        1,
        -1,
    )
    names = [f"x{j}" for j in range(d)]
    frame = pd.DataFrame(x, columns=names).assign(y=y)
    frame.to_csv(folder / "ours.csv", index=False)
    frame.rename(columns={"y": "_label"}).to_csv(folder / "vw.csv", index=False)
    with (folder / "vw.txt").open("w") as file:
        for row, label in zip(x, y, strict=True):
            features = " ".join(
                f"{name}:{value}" for name, value in zip(names, row, strict=True)
            )
            file.write(f"{label} | {features}\n")


def contestants(folder, d):
    """Calls by name."""
    logistic = nt.expectations.logistic()
    mean_field = nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))
    full = nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d))

    def chunks():
        return nt.online.csv_chunks(folder / "ours.csv", outcome="y")

    def read():
        for _ in chunks():
            pass

    def learn(rule, prior):
        state, _ = nt.online.run_chunks(
            rule, logistic, rule.init(prior), chunks(), keep="nothing"
        )
        jax.block_until_ready(state)

    def wabbit(arguments):
        vowpalwabbit.Workspace(f"--quiet --loss_function logistic {arguments}").finish()

    return {
        "NGVI": lambda: learn(nt.online.ngvi(), mean_field),
        "R-VGA": lambda: learn(nt.online.rvga(), mean_field),
        "R-VGA, full covariance": lambda: learn(nt.online.rvga(), full),
        "reading alone": read,
        "Vowpal Wabbit, CSV": lambda: wabbit(f"--csv -d {folder / 'vw.csv'}"),
        "Vowpal Wabbit, CSV, reading alone": lambda: wabbit(
            f"--noop --csv -d {folder / 'vw.csv'}"
        ),
        "Vowpal Wabbit, text": lambda: wabbit(f"-d {folder / 'vw.txt'}"),
        "Vowpal Wabbit, text, reading alone": lambda: wabbit(
            f"--noop -d {folder / 'vw.txt'}"
        ),
    }


def main():
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few rows")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    num_rows, d, repeats = (2000, 10, 2) if options.small else (581_012, 54, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, num_rows, d)
        calls = contestants(folder, d)
        seconds = {name: [] for name in calls}
        for _ in range(1 + repeats):
            for name, call in calls.items():
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                seconds[name].append(
                    (time.perf_counter() - wall, time.process_time() - cpu)
                )
        sizes = {
            path.name: path.stat().st_size / 1e6 for path in sorted(folder.iterdir())
        }
    table = pd.DataFrame(
        [
            {
                "contestant": name,
                "first call": runs[0][0],
                "wall": wall,
                "CPU": cpu,
                "rows a second": num_rows / wall,
            }
            for name, runs in seconds.items()
            for wall, cpu in [np.median(runs[1:], axis=0)]
        ]
    )
    table = table.round({"first call": 2, "wall": 2, "CPU": 2, "rows a second": -3})
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "csv_stream.csv", index=False)
    print(table.to_string(index=False))
    files = ", ".join(f"{name} {size:.0f} MB" for name, size in sizes.items())
    packages = f"pyarrow {version('pyarrow')}, vowpalwabbit {version('vowpalwabbit')}"
    work = f"{num_rows} rows, d = {d}, median of {repeats} turns, {files}, {packages}"
    (options.output / "csv_stream.txt").write_text(describe(work))


if __name__ == "__main__":
    main()
