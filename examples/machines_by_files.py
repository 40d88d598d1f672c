"""One posterior of rows on several machines that share a folder: partitioned variational inference by files.

The server and each machine are a process of their own, started in any order, killed and started again::

    python examples/machines_by_files.py serve --folder shared --machines 3
    python examples/machines_by_files.py work 0 --folder shared --machines 3
    python examples/machines_by_files.py work 1 --folder shared --machines 3
    python examples/machines_by_files.py work 2 --folder shared --machines 3

Every file appears whole or not at all, as ``save`` renames it. No file is ever deleted, and none is written by
two processes: the server writes ``server.npz``, machine k ``factor_k.npz``, which is its memory, and
``change_k.npz``. ``python examples/machines_by_files.py demo`` starts all of them here, in a folder that is
deleted after.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import numpyro_tempered as nt

# What is the same everywhere: the prior and its dtype, the loss and its power.
PRIOR = nt.gaussian.families.FullRank(jnp.zeros(3), 2.0 * jnp.eye(3))
LOGISTIC = nt.expectations.logistic()
PVI = nt.online.partitioned(LOGISTIC, alpha=1.0)
PAUSE = 0.02


def read_rows(part):
    """The rows of a machine, which no other reads."""
    rng = np.random.default_rng(part)
    x = rng.normal(size=(200 + 100 * part, 3))
    return x, np.where(
        rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-x @ [1.0, -2.0, 0.5])),
        1.0,
        -1.0,
    )


def serve(folder, num_machines, num_rounds):
    """Add up changes as they come, until all machines have made their rounds."""
    state = PVI.init(PRIOR, num_machines)
    like, path = PVI.factor(state, 0).change, folder / "server.npz"
    if path.exists():
        state = nt.online.restore(path, like=state)
    nt.online.save(path, state)
    while int(jnp.min(state.rounds)) < num_rounds:
        for source in folder.glob("change_*.npz"):
            change = nt.online.restore(source, like=like)
            # A change that has entered would be counted as a duplicate at each look.
            if int(change.round) > int(state.rounds[change.part]):
                state = PVI.combine(state, change)
                nt.online.save(path, state)
        time.sleep(PAUSE)
    return state


def work(part, folder, num_machines, num_rounds):
    """Refit the machine's factor to the posterior of the moment, and send its change."""
    x, y = read_rows(part)
    state = PVI.init(PRIOR, num_machines)
    factor, path, server = (
        PVI.factor(state, part),
        folder / f"factor_{part}.npz",
        folder / "server.npz",
    )
    if path.exists():
        factor = nt.online.restore(path, like=factor)
    last_sent = 0
    while True:
        if server.exists():
            state = nt.online.restore(server, like=state)
            if int(state.rounds[part]) >= num_rounds:
                return
            if int(state.rounds[part]) == int(factor.change.round):
                factor = PVI.refit(factor, state, x, y)
                # Its memory first: what was sent must not be forgotten.
                nt.online.save(path, factor)
            if int(factor.change.round) != last_sent:
                # After a kill in between the change is sent now, or a second time.
                nt.online.save(folder / f"change_{part}.npz", factor.change)
                last_sent = int(factor.change.round)
        time.sleep(PAUSE)


def demo(num_machines, num_rounds):
    """All processes here, and the posterior of all rows in one process."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--folder",
            folder,
            "--machines",
            str(num_machines),
            "--rounds",
            str(num_rounds),
        ]
        command = [sys.executable, __file__, "work"]
        workers = [
            subprocess.Popen([*command, str(part), *options])
            for part in range(num_machines)
        ]
        state = serve(Path(folder), num_machines, num_rounds)
        assert [worker.wait() for worker in workers] == [0] * num_machines
    x, y = (
        np.concatenate(rows)
        for rows in zip(*map(read_rows, range(num_machines)), strict=True)
    )
    batch = nt.gaussian.descent.minimise(
        nt.gaussian.descent.objective(LOGISTIC, PRIOR, x, y), PRIOR
    ).posterior
    off = np.linalg.solve(
        np.asarray(batch.factor), np.asarray(state.posterior.loc - batch.loc)
    )
    print(
        "means:",
        np.round(state.posterior.loc, 3),
        "of all rows in one process:",
        np.round(batch.loc, 3),
    )
    print(f"largest difference in standard deviations: {np.max(np.abs(off)):.4f}")


def main():
    """Read the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "role", choices=["serve", "work", "demo"], nargs="?", default="demo"
    )
    parser.add_argument(
        "part", type=int, nargs="?", help="number of the machine, from 0"
    )
    parser.add_argument("--folder", type=Path, help="folder that all machines reach")
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.role == "demo":
        return demo(options.machines, options.rounds)
    if options.folder is None or (options.role == "work" and options.part is None):
        parser.error(
            "serve takes --folder, work takes the number of its machine and --folder"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.role == "work":
        return work(options.part, options.folder, options.machines, options.rounds)
    state = serve(options.folder, options.machines, options.rounds)
    print("means:", np.round(state.posterior.loc, 3))


if __name__ == "__main__":
    main()
