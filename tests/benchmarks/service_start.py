"""Seconds until a fresh process has taken a first round of a stream: by its model, and by an exported update.

The times are those of a process of its own for each number, medians over several: imports of JAX and of
numpyro_tempered (with NumPyro), and from then to the first updated state. "From the cache" is a process that has
the persistent compilation cache of JAX filled by one before it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import calls as fresh

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NUM_ROWS, NUM_FEATURES = 100, 5
NUM_PROCESSES = 5
WAYS = {"OnlineVI of the model": "model", "exported update": "exported"}


def batch():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, NUM_FEATURES))
    return x, x @ rng.normal(size=NUM_FEATURES) + rng.normal(size=NUM_ROWS)


def start_online(path):
    """An OnlineVI and its state."""
    import jax
    import numpyro
    import numpyro.distributions as dist

    import numpyro_tempered as nt

    def model(x, y):
        beta = numpyro.sample(
            "beta", dist.Normal(0.0, 3.0).expand([x.shape[1]]).to_event(1)
        )
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample(
                "y", dist.Normal(numpyro.deterministic("eta", x @ beta), 1.0), obs=y
            )

    eta = nt.expectations.gauss_hermite(predictor="eta")
    online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal, expectation=eta)
    return online, online.init(jax.random.key(0), *batch())


def start_loaded(path):
    """A loaded update and its state."""
    import numpyro_tempered as nt

    loaded = nt.online.load_update(path)
    return loaded, loaded.state


def export(path):
    """Write the file that is loaded."""
    import numpyro_tempered as nt

    online, state = start_online(path)
    nt.online.export_update(path, online, state, *batch())


def measure(way, path):
    """Seconds of a process, which has done nothing yet."""
    begin = time.perf_counter()
    import jax

    with_jax = time.perf_counter()
    import numpyro_tempered  # noqa: F401

    with_package = time.perf_counter()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(seconds) if "backend_compile" in event else None
        )
    )
    data = batch()
    ready = time.perf_counter()
    runner, state = (start_online if way == "model" else start_loaded)(path)
    jax.block_until_ready(runner.update(state, *data))
    return {
        "import jax": with_jax - begin,
        "import numpyro_tempered": with_package - with_jax,
        "first updated state": time.perf_counter() - ready,
        "programs": len(compiled),
    }


def run(way, path, cache=""):
    """:func:`measure` in a process of its own, without a cache on disk unless there is a folder for it."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return fresh.in_new_process(__file__, way, str(path), **environment)


def median(rows):
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PATH"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return

    import pandas as pd
    from provenance import describe

    num_processes = 1 if options.small else NUM_PROCESSES
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.npz"
        export(path)
        for name, way in WAYS.items():
            cache = str(Path(folder) / way)
            times = median([run(way, path) for _ in range(num_processes)])
            run(way, path, cache)
            again = median([run(way, path, cache) for _ in range(num_processes)])
            rows.append(
                {"way": name, **times, "from the cache": again["first updated state"]}
            )
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"service_start_py{sys.version_info.major}{sys.version_info.minor}"
    table.to_csv(options.output / f"{stem}.csv", index=False, float_format="%.3g")
    text = table.to_string(index=False, float_format="%.3f")
    sizes = f"n = {NUM_ROWS}, d = {NUM_FEATURES}, full covariance, medians of {num_processes} processes"
    (options.output / f"{stem}.txt").write_text(f"{describe(sizes)}\n{text}\n")


if __name__ == "__main__":
    main()
