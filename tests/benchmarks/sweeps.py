"""Many configurations of a rule over one stream, each in runs of one by itself.

64 step sizes, hinge loss, float32: ``nt.online.run_grid``, and ``jax.vmap`` of ``nt.online.run`` over all
of them, beside ``nt.online.run`` of one, all compiled before and taking turns; CPU time of all threads, medians.

Writes ``sweeps.csv`` and ``sweeps.txt``.

    python tests/benchmarks/sweeps.py
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
COUNT = 64
RULES = {"NGVI": nt.online.ngvi, "SVA": nt.online.sva, "SVB": nt.online.svb}


def contestants(make, prior, x, y):
    """One run, a sweep, and a sweep under one vmap."""
    hinge, rates = nt.expectations.hinge(), np.geomspace(0.1, 2.0, COUNT)
    rule, grid = make(0.5), nt.online.grid(make, step_size=rates.tolist())
    start = rule.init(prior)

    @jax.jit
    def side_by_side(rates):
        return jax.vmap(
            lambda rate: nt.online.run(make(rate), hinge, make(rate).init(prior), x, y)
        )(rates)

    return {
        "one": lambda: nt.online.run(rule, hinge, start, x, y),
        "run_grid": lambda: nt.online.run_grid(grid, hinge, prior, x, y),
        "vmap": lambda: side_by_side(jnp.asarray(rates, x.dtype)),
    }


def measure(name, family, d, num_rounds, repeats):
    """A row of the table."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_rounds, d)) / np.sqrt(d), jnp.float32)
    y = jnp.asarray(np.where(rng.random(num_rounds) < 0.5, 1.0, -1.0), jnp.float32)
    wide = {
        "mean field": nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d)),
        "full covariance": nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d)),
    }
    calls = contestants(RULES[name], wide[family], x, y)
    seconds = {call: [] for call in calls}
    for _ in range(1 + repeats):
        for call, run in calls.items():
            begin = time.process_time()
            jax.block_until_ready(run())
            seconds[call].append(time.process_time() - begin)
    median = {call: np.median(each[1:]) for call, each in seconds.items()}
    each = {
        call: round(median[call] / COUNT / median["one"], 2)
        for call in ("run_grid", "vmap")
    }
    us = round(1e6 * median["one"] / num_rounds, 2)
    return {"rule": name, "family": family, "d": d, "one, us a round": us} | each


def main():
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="short streams")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    sizes, num_rounds, repeats = (
        ((2, 30), 200, 2) if options.small else ((54, 1000), 5000, 7)
    )
    rows = [
        measure(name, "mean field", d, num_rounds, repeats)
        for d in sizes
        for name in RULES
    ]
    rows.append(measure("NGVI", "full covariance", sizes[0], num_rounds, repeats))
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "sweeps.csv", index=False)
    print(table.to_string(index=False))
    work = f"{COUNT} configurations, {num_rounds} rounds, medians of {repeats} turns"
    (options.output / "sweeps.txt").write_text(describe(work))


if __name__ == "__main__":
    main()
