"""The matrix: each verb on each kind of tempered posterior, of tests/matrix/posteriors.py.

Writes ``posterior_matrix.md`` (the table of the documentation) and ``posterior_matrix.txt``. The exit status is 1
where a cell is not what it should be.

    python tests/benchmarks/posterior_matrix.py
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

# Compilation is most of the time.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)

from provenance import describe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "tests"))

from matrix.posteriors import POSTERIORS, REFUSED, VERBS  # noqa: E402

# Words of a refusal that the table shows.
WORDS = 12


def run(verb, name):
    """What a cell is, in a word or a sentence, and whether it should be."""
    expected = REFUSED.get((verb, name))
    try:
        VERBS[verb](name)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        is_right = expected is not None and re.search(expected, text) is not None
        return f"refused: {' '.join(text.split()[:WORDS])} ...", is_right
    except AssertionError as error:
        return f"**wrong**: {str(error).strip().splitlines()[:1]}", False
    return "right", expected is None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DOCS)
    parser.add_argument(
        "--small", action="store_true", help="two verbs on three posteriors"
    )
    options = parser.parse_args()
    verbs = ("compare", "table") if options.small else tuple(VERBS)
    names = (
        ("fit_gaussian", "OnlineVI", "ppca.fit") if options.small else tuple(POSTERIORS)
    )
    warnings.simplefilter("ignore")
    cells = {(verb, name): run(verb, name) for verb in verbs for name in names}
    options.output.mkdir(parents=True, exist_ok=True)
    lines = ["| verb | " + " | ".join(f"`{name}`" for name in names) + " |"]
    lines += ["|---|" + "---|" * len(names)]
    notes = []
    for verb in verbs:
        words = []
        for name in names:
            text, _ = cells[verb, name]
            if text.startswith("refused: "):
                notes.append((verb, name, text.removeprefix("refused: ")))
                text = f"refused [{len(notes)}]"
            words.append(text)
        lines.append(f"| `{verb}` | " + " | ".join(words) + " |")
    lines += [
        "",
        *(f"{k}. `{v}` of `{n}`: {t}" for k, (v, n, t) in enumerate(notes, 1)),
    ]
    (options.output / "posterior_matrix.md").write_text("\n".join(lines) + "\n")
    sizes = f"{len(verbs)} verbs, {len(names)} posteriors"
    (options.output / "posterior_matrix.txt").write_text(describe(sizes))
    wrong = [cell for cell, (_, is_right) in cells.items() if not is_right]
    for cell in wrong:
        print(*cell, cells[cell][0])
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
