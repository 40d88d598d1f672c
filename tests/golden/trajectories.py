"""Golden trajectories: the numbers of every fit and stream on fixed data and keys, bit for bit.

``python tests/golden/trajectories.py`` compares them with the record for this Python and jax, and ends with
status 1 where one has moved. ``--record`` writes the record; ``--only WORD`` takes the cases whose names have
the word. The record knows the names of cases and of what each returns and the order of its leaves, but no name
of the package: a renaming moves nothing.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(FOLDER.parent)]
    import quick_compilation

    quick_compilation.set_flags()
    quick_compilation.keep_programs(ROOT / ".pytest_cache" / "d" / "jax")

from golden import cases_choices, cases_fits, cases_mixtures, cases_rules, cases_streams  # noqa: E402, F401
from golden.table import CASES  # noqa: E402

# Another CPU rounds sums otherwise, by 1e-7 of them; steps and solves multiply that by up to some thousands. It
# is a share of the root mean square of the values, since one of them may be near 0.
RTOL = 1e-3
# Where rounding decides between optima of equal worth: a sign, the order of components, or which start is best.
TIES = {
    *("pca ard", "pca no ard", "pca missing entries", "sparse logistic, restarts"),
    *(
        "mixture, random start",
        "mixture, weighted rows",
        "em known variance",
        "em product",
    ),
}
RUNS = itertools.count(1)
PACKAGES = (
    "jax",
    "jaxlib",
    "numpyro",
    "numpy",
    "scipy",
    "arviz",
    "optax",
    "scikit-learn",
)


def environment():
    """What the bits depend on beside the package."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version(name) for name in PACKAGES},
        "cpu": processor(),
        "devices": f"{jax.device_count()} {jax.default_backend()}",
        "x64": bool(jax.config.jax_enable_x64),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def processor():
    """The model, and a hash of its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {}
    for name, _, value in (line.partition(":") for line in lines):
        fields.setdefault(name.strip(), value.strip())
    instructions = sorted(fields.get("flags", fields.get("Features", "")).split())
    digest = hashlib.sha256(" ".join(instructions).encode()).hexdigest()
    return f"{fields.get('model name', platform.machine())}, instructions {digest[:8]}"


def record_path():
    now = environment()
    return FOLDER / f"py{now['python']}_jax{now['jax']}.json"


def read_record():
    """The record for this Python and jax; None if there is none."""
    return json.loads(record_path().read_text()) if record_path().exists() else None


def differences(record):
    """The parts of the environment in which this one differs from that of the record, as words."""
    now, then = environment(), record["environment"]
    return {
        name: f"{name} was {then.get(name)}, is {now[name]}"
        for name in now
        if now[name] != then.get(name)
    }


def run(name):
    """What a case has, by entry."""
    found = {entry: describe(tree) for entry, tree in CASES[name]().items()}
    # Compiled programs of all cases would take gigabytes; those of neighbours are shared.
    if next(RUNS) % 40 == 0:
        jax.clear_caches()
    return found


def describe(tree):
    """Bits of the leaves of a tree, in their order, and values to read: the first and last two, mean and size."""
    leaves = [as_array(leaf) for leaf in jax.tree.leaves(tree)]
    bits = hashlib.sha256()
    for leaf in leaves:
        bits.update(
            f"{leaf.dtype} {leaf.shape} ".encode()
            + np.ascontiguousarray(leaf).tobytes()
        )
    values = [
        np.ravel(leaf).astype(float) for leaf in leaves if leaf.dtype.kind in "biuf"
    ]
    values = np.concatenate([np.zeros(0), *values])
    finite = values[np.isfinite(values)]
    mean, square = (np.mean(each) if each.size else 0.0 for each in (finite, finite**2))
    ends = values if values.size <= 4 else values[[0, 1, -2, -1]]
    found = {
        "bits": bits.hexdigest()[:16],
        "size": values.size,
        "mean": mean,
        "rms": square**0.5,
        "ends": ends,
    }
    # Nine digits tell float32 apart.
    found |= {name: float(f"{found[name]:.9g}") for name in ("mean", "rms")}
    found["ends"] = [float(f"{value:.9g}") for value in ends]
    words = [str(leaf) for leaf in leaves if leaf.dtype.kind == "U"]
    return found | ({"words": words} if words else {})


def as_array(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def moved(now, then, *, exact):
    """What differs between a case and its record, in lines to read."""
    lines = [f"{entry!r} is not in the record" for entry in now if entry not in then]
    lines += [f"{entry!r} is in the record only" for entry in then if entry not in now]
    for entry in (entry for entry in now if entry in then):
        new, old = now[entry], then[entry]
        if new["bits"] != old["bits"] if exact else not near(new, old):
            names = [
                name
                for name in ("size", "ends", "mean", "rms", "words")
                if new.get(name) != old.get(name)
            ]
            parts = [
                f"{name} was {old.get(name)}, is {new.get(name)}" for name in names
            ]
            lines.append(
                f"{entry!r}: {'; '.join(parts) or 'the same to nine digits, and other bits'}"
            )
    return lines


def near(new, old):
    """Whether the values to read are equal up to rounding."""
    if new["size"] != old["size"] or new.get("words") != old.get("words"):
        return False
    a, b = ([each["mean"], each["rms"], *each["ends"]] for each in (new, old))
    return np.allclose(a, b, rtol=0.0, atol=RTOL * old["rms"], equal_nan=True)


def write(cases, path):
    """The record, a line for each entry."""
    head = {
        "command": "python tests/golden/trajectories.py --record",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "threads": os.cpu_count(),
        "environment": environment(),
    }
    blocks = []
    for name in sorted(cases):
        lines = [
            f"{json.dumps(entry)}: {json.dumps(found)}"
            for entry, found in cases[name].items()
        ]
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    text = (
        json.dumps(head, indent=1).removesuffix("\n}")
        + ',\n"cases": {\n'
        + ",\n".join(blocks)
        + "\n}\n}\n"
    )
    path.write_text(text)


def record_cases(names):
    """Write the record: of all cases anew, of some of them into the one that is there."""
    old = {} if len(names) == len(CASES) else read_record() or {}
    if old and (changed := differences(old)):
        sys.exit(f"record all cases: {'; '.join(changed.values())}.")
    kept = {
        name: found for name, found in old.get("cases", {}).items() if name in CASES
    }
    write(kept | {name: run(name) for name in names}, record_path())


def compare_cases(names):
    """Print which cases have moved; their number."""
    record = read_record()
    if record is None:
        sys.exit(
            f"no {record_path().name}: record it by --record where the numbers are as they should be."
        )
    changed = differences(record)
    if changed:
        print(
            f"Within {RTOL} of the root mean square, since {'; '.join(changed.values())}; without {sorted(TIES)}."
        )
        names = [name for name in names if name not in TIES]
    count = 0
    for name in names:
        try:
            lines = moved(run(name), record["cases"].get(name, {}), exact=not changed)
        except Exception as error:  # The others are of interest too.
            lines = [f"raises {type(error).__name__}: {error}"]
        if lines:
            count += 1
            print(f"{name}", *lines, sep="\n    ", flush=True)
    print(f"{count} of {len(names)} cases have moved.")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the record instead of comparing with it",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="take the cases with this word in their name",
    )
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    if options.record:
        record_cases(names)
        return 0
    return int(compare_cases(names) > 0)


if __name__ == "__main__":
    sys.exit(main())
