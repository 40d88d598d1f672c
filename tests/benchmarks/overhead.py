"""What tempering costs: operations, running time, tracing time.

Everything is the ratio of a model with ``alpha = 0.5`` to the same model without ``temper``. Operations are
XLA's count. Running times are CPU seconds of the process, which other programs on the machine disturb less than
the clock. They are interleaved: in each round the undecorated model, a second compilation of it and the
tempered one take turns in an order that rotates, and ratios are taken within the round. The band is what the
undecorated model shows against itself: least and greatest of its medians over the blocks of rounds.
Writes ``overhead_{flops,time,trace,marginalize}_py3X.csv``.

    python tests/benchmarks/overhead.py
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import pandas as pd
from provenance import describe
from workloads import (
    WORKLOADS,
    energy_and_gradient,
    flops,
    gradient,
    labels,
    mixture,
    numpyro_scale,
    simulate,
    svi_update,
    unconstrained_point,
)

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
ALPHA = 0.5
# Long enough for the clock, short enough that the neighbours' load is the same for all contestants.
SECONDS_A_TURN = 5e-4


def work(model, data):
    """The two units of work with their arguments: one leapfrog evaluation, one SVI update."""
    update, state = svi_update(model, data)
    return {
        "energy and gradient": (
            energy_and_gradient(model),
            (unconstrained_point(model, data), data),
        ),
        "SVI update": (update, (state, data)),
    }


def count(models, sizes):
    """Ratios of XLA's operation counts."""
    rows = []
    for name, model in models.items():
        for n in sizes:
            data = simulate(n)
            point = unconstrained_point(model, data)
            contestants = {
                "plain": model,
                "tempered": nt.temper(model, ALPHA),
                "scaled": numpyro_scale(model, ALPHA),
            }
            alone = {k: flops(gradient(m), point, data) for k, m in contestants.items()}
            both = {
                k: flops(energy_and_gradient(m), point, data)
                for k, m in contestants.items()
            }
            svi = {}
            for k, m in contestants.items():
                update, state = svi_update(m, data)
                svi[k] = flops(update, state, data)
            rows.append(
                {
                    "model": name,
                    "n": n,
                    "flops a datum": both["plain"] / n,
                    "gradient": alone["tempered"] / alone["plain"],
                    "energy and gradient": both["tempered"] / both["plain"],
                    "SVI update": svi["tempered"] / svi["plain"],
                    "added a datum": (both["tempered"] - both["plain"]) / n,
                    "by handlers.scale": (both["scaled"] - both["plain"]) / n,
                }
            )
    return pd.DataFrame(rows).round(4)


def take_turns(contestants, num_rounds):
    """CPU seconds of each contestant in each round, ``{name: (num_rounds,)}``."""
    calls = {
        name: jax.jit(fn).lower(*args).compile()
        for name, (fn, args) in contestants.items()
    }
    names = list(calls)

    def turn(name, repeats):
        begin = time.process_time()
        for _ in range(repeats):
            result = calls[name](*contestants[name][1])
        jax.block_until_ready(result)
        return (time.process_time() - begin) / repeats

    for name in names:
        turn(name, 3)
    repeats = max(1, int(SECONDS_A_TURN / min(turn(names[0], 10) for _ in range(5))))
    times = {name: np.empty(num_rounds) for name in names}
    for i in range(num_rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order if i % 2 else reversed(order):
            times[name][i] = turn(name, repeats)
    return times


def ratios(times, numerator, denominator, num_blocks):
    """The median ratio within rounds, and least and greatest median over blocks of rounds."""
    ratio = times[numerator] / times[denominator]
    blocks = [np.median(block) for block in np.array_split(ratio, num_blocks)]
    return float(np.median(ratio)), min(blocks), max(blocks)


def run_times(models, sizes, num_rounds, num_blocks):
    """Tempered against undecorated, and undecorated against itself."""
    rows = []
    for name, model in models.items():
        for n in sizes:
            data = simulate(n)
            units = [work(m, data) for m in (model, model, nt.temper(model, ALPHA))]
            for unit in units[0]:
                contestants = dict(
                    zip(
                        ("plain", "again", "tempered"),
                        (u[unit] for u in units),
                        strict=True,
                    )
                )
                times = take_turns(contestants, num_rounds)
                _, low, high = ratios(times, "again", "plain", num_blocks)
                tempered, *_ = ratios(times, "tempered", "plain", num_blocks)
                rows.append(
                    {
                        "model": name,
                        "n": n,
                        "work": unit,
                        "tempered / plain": tempered,
                        "band from": low,
                        "to": high,
                        "inside": "yes" if low <= tempered <= high else "no",
                    }
                )
    return pd.DataFrame(rows).round(3)


def lowering_times(models, data, repeats):
    """Median CPU seconds to trace and lower each unit of work, the models taking turns."""
    times = {}
    units = {name: work(model, data) for name, model in models.items()}
    for _ in range(repeats + 1):
        for name, parts in units.items():
            for unit, (fn, args) in parts.items():
                begin = time.process_time()
                # A function of its own each time: jit caches its trace.
                jax.jit(lambda *args, fn=fn: fn(*args)).lower(*args)
                times.setdefault((name, unit), []).append(time.process_time() - begin)
    return {key: float(np.median(values[1:])) for key, values in times.items()}


def trace_times(models, repeats):
    """Tracing and lowering, as ratios to the undecorated model."""
    data, rows = simulate(1000), []
    for name, model in models.items():
        contestants = {
            "plain": model,
            "again": lambda data, model=model: model(data),
            "tempered": nt.temper(model, ALPHA),
        }
        times = lowering_times(contestants, data, repeats)
        for unit in ("energy and gradient", "SVI update"):
            rows.append(
                {
                    "model": name,
                    "work": unit,
                    "tempered / plain": times["tempered", unit] / times["plain", unit],
                    "plain again / plain": times["again", unit] / times["plain", unit],
                }
            )
    return pd.DataFrame(rows).round(2)


def marginalize_times(sizes, num_rounds, num_blocks, repeats):
    """Labels summed out by marginalize beside MixtureSameFamily, both tempered."""
    rows = []
    tempered = {
        "mixture": nt.temper(mixture, ALPHA),
        "marginalize": nt.temper(nt.marginalize(labels), ALPHA),
    }
    lowered = lowering_times(tempered, simulate(1000), repeats)
    for n in sizes:
        data = simulate(n)
        units = {name: work(model, data) for name, model in tempered.items()}
        for unit in units["mixture"]:
            contestants = {name: parts[unit] for name, parts in units.items()}
            counts = {
                name: flops(fn, *args) for name, (fn, args) in contestants.items()
            }
            times = take_turns(contestants, num_rounds)
            rows.append(
                {
                    "work": unit,
                    "n": n,
                    "run time": ratios(times, "marginalize", "mixture", num_blocks)[0],
                    "flops": counts["marginalize"] / counts["mixture"],
                    "tracing": lowered["marginalize", unit] / lowered["mixture", unit],
                }
            )
    return pd.DataFrame(rows).round(2)


def main():
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="one model, n = 1000, few rounds, nothing written by default",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="folder for the tables; docs/results, or none if small",
    )
    options = parser.parse_args()
    models = {"location": WORKLOADS["location"]} if options.small else WORKLOADS
    sizes = (1000,) if options.small else (1000, 10_000, 100_000)
    num_rounds, num_blocks, repeats = (20, 4, 3) if options.small else (300, 10, 20)
    output = options.output or (None if options.small else DOCS)
    python = f"py3{sys.version_info.minor}"
    tables = {
        "flops": lambda: count(models, sizes),
        "trace": lambda: trace_times(models, repeats),
        "time": lambda: run_times(models, sizes, num_rounds, num_blocks),
        "marginalize": lambda: marginalize_times(
            sizes, num_rounds, num_blocks, repeats
        ),
    }
    for name, measure in tables.items():
        table = measure()
        print(table.to_string(index=False), flush=True)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            table.to_csv(output / f"overhead_{name}_{python}.csv", index=False)
    if output is None:
        return
    (output / f"overhead_{python}.txt").write_text(
        describe(
            f"n {list(sizes)}, alpha {ALPHA}, {num_rounds} rounds in {num_blocks} blocks, "
            f"{repeats} tracings, float32, SVI with AutoNormal and Adam"
        )
    )


if __name__ == "__main__":
    main()
