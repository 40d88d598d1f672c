"""The matrix: each NumPyro algorithm on each model of tests/matrix, at three powers.

Writes ``algorithm_matrix.csv`` (one row for each cell and power), ``algorithm_matrix.md`` (the table of the
documentation) and ``algorithm_matrix.txt``. The exit status is 1 where a cell is not what it should be.

    python tests/benchmarks/algorithm_matrix.py
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Compilation is most of the time.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)

import jax
import pandas as pd
from provenance import describe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "tests"))
# Samplers step out of the range of float32 before they have adapted.
jax.config.update("jax_enable_x64", True)

from matrix.algorithms import CHECKS, MAX_DIFFERENCE, MAX_Z, Cell, check, expected  # noqa: E402
from matrix.models import ALPHAS, MODELS  # noqa: E402

SEED = 0
# One algorithm of each kind, for --small.
SMALL = (
    "BarkerMH",
    "AIES",
    "SVI, AutoNormal",
    "Predictive",
    "log_likelihood",
    "psis_diagnostic",
    "HMCECS",
)
SMALL_MODELS = ("normal", "half_normal_scale")


def run(job):
    """The rows of one algorithm on one model, and its seconds."""
    name, model_name, alphas = job
    start = time.perf_counter()
    try:
        # Of the older type: vsbc_diagnostic reshapes its keys.
        cells = check(name, model_name, alphas, jax.random.PRNGKey(SEED))
    except Exception as error:  # a cell must not take the table with it
        cells = [Cell("WRONG", note=repr(error))] * len(alphas)
    seconds = (time.perf_counter() - start) / len(alphas)
    return [
        {
            "algorithm": name,
            "model": model_name,
            "alpha": alpha,
            "verdict": cell.verdict,
            "right": cell.verdict == expected(name, model_name, alpha),
            "value": f"{cell.value:.2g}",
            "effective": f"{cell.effective:.0f}",
            "seconds": f"{seconds:.1f}",
            "note": " ".join(cell.note.split()),
        }
        for alpha, cell in zip(alphas, cells, strict=True)
    ]


def summarise(rows):
    """One word, and the worst number, for a cell over its powers."""
    if not rows.right.all():
        return "**wrong**"
    verdict = rows.verdict.iloc[0]  # of the smallest power
    return (
        f"exact {rows.value.astype(float).max():.1f}" if verdict == "exact" else verdict
    )


def markdown(table, names, model_names):
    """Algorithms by models."""
    lines = [
        "| | " + " | ".join(name.replace("_", " ") for name in model_names) + " |",
        "|---" * (len(model_names) + 1) + "|",
    ]
    for name in names:
        cells = [
            summarise(table[(table.algorithm == name) & (table.model == model_name)])
            for model_name in model_names
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    """Run the cells and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="some algorithms, two models, one power; no files",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the table; by default that of the documentation",
    )
    options = parser.parse_args()
    names, model_names, alphas = (
        (SMALL, SMALL_MODELS, (0.5,)) if options.small else (CHECKS, MODELS, ALPHAS)
    )
    jobs = [(name, model_name, alphas) for name in names for model_name in model_names]
    start, rows = time.perf_counter(), []
    with ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn")
    ) as pool:
        for cells in pool.map(run, jobs):
            rows += cells
            verdicts = " ".join(cell["verdict"] for cell in cells)
            wrong = (
                ""
                if all(cell["right"] for cell in cells)
                else f"  <- {[cell['note'] for cell in cells]}"
            )
            print(
                f"{cells[0]['algorithm']}, {cells[0]['model']}: {verdicts}{wrong}",
                flush=True,
            )
    minutes = (time.perf_counter() - start) / 60
    table = pd.DataFrame(rows)
    wrong = table[~table.right]
    print(f"{len(table)} cells, {len(wrong)} wrong, {minutes:.1f} minutes")
    output = options.output or (None if options.small else DOCS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        table.to_csv(output / "algorithm_matrix.csv", index=False)
        (output / "algorithm_matrix.md").write_text(markdown(table, names, model_names))
        sizes = (
            f"seed {SEED}, {len(names)} algorithms, {len(model_names)} models, alpha in {list(alphas)}, float64, "
            f"{minutes:.0f} minutes in {options.jobs} processes\n"
            f"tolerances: {MAX_Z:g} standard errors (exact), {MAX_DIFFERENCE:g} (equal, untempered)"
        )
        (output / "algorithm_matrix.txt").write_text(describe(sizes))
    return int(len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main())
