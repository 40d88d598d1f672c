"""How far fits on fixed keys move where the power is an operand of their programs.

``python tests/benchmarks/power_operand.py --save FILE`` writes what the golden cases compute, in a checkout whose
programs hold the power as a constant. ``--before FILE`` in another checkout compares with it, and writes what
moved to ``docs/results/power_operand.csv``. ``--only WORD ...`` takes the cases with one of the words.
"""

import argparse
import csv
import pickle
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from golden import cases_choices, cases_fits  # noqa: E402, F401
from golden.table import CASES  # noqa: E402
from golden.trajectories import as_array  # noqa: E402

TABLE = ROOT / "docs" / "results" / "power_operand.csv"
COLUMNS = ("case", "quantity", "before", "after", "relative difference")


def numbers(tree):
    """The numbers of a tree in one vector."""
    leaves = [as_array(leaf) for leaf in jax.tree.leaves(tree)]
    parts = [
        np.ravel(leaf).astype(float) for leaf in leaves if leaf.dtype.kind in "biuf"
    ]
    return np.concatenate([np.zeros(0), *parts])


def run(words):
    """What the cases with one of these words in their names compute."""
    found = {}
    for name, case in CASES.items():
        if any(word in name for word in words):
            found[name] = {entry: numbers(tree) for entry, tree in case().items()}
            jax.clear_caches()
    return found


def largest(old, new):
    """The two numbers that differ most, and their difference over the root mean square of the old ones."""
    if old.shape != new.shape:
        return len(old), len(new), np.inf
    apart = np.abs(np.where(np.isfinite(old) | np.isfinite(new), new - old, 0.0))
    place, finite = int(np.argmax(apart)), old[np.isfinite(old)]
    return old[place], new[place], apart[place] / np.sqrt(np.mean(finite**2))


def rows(before, after):
    for name, entries in after.items():
        for entry, new in entries.items():
            old = before[name][entry]
            if not np.array_equal(old, new, equal_nan=True):
                yield name, entry, *(f"{value:.9g}" for value in largest(old, new))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    options = parser.parse_args()
    found = run(options.only)
    if options.save:
        options.save.write_bytes(pickle.dumps(found))
        return
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(rows(pickle.loads(options.before.read_bytes()), found))


if __name__ == "__main__":
    main()
