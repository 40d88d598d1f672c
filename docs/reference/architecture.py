"""Draw the rooms of the package, and the imports between them, from its sources.

    python docs/reference/architecture.py

writes docs/reference/architecture.svg. An arrow that follows from others, through a room between, is not drawn.
"""

import argparse
import ast
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "numpyro_tempered"
# Centre of each room: column and floor.
PLACES = {
    "plots": (0.3, 8),
    "estimators": (1.7, 8),
    "mixtures": (0.3, 7),
    "ppca": (1.7, 7),
    "select": (0.3, 6),
    "sparse": (1.7, 6),
    "infer": (0.3, 5),
    "theory": (1.7, 5),
    "report": (1.0, 4),
    "handlers": (0.3, 3),
    "online": (1.7, 3),
    "gaussian": (1.0, 2),
    "core": (1.0, 1),
}
WIDTH, HEIGHT = 1.06, 0.6


def arrows():
    """Pairs of rooms of which the first imports the second."""
    pairs = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "numpyro_tempered."
            ):
                pairs.add((room, node.module.split(".")[1]))
    return {
        (above, below) for above, below in pairs if above != below and above in PLACES
    }


def below(room, pairs):
    """All rooms that a room imports, straight or through others."""
    direct = {target for source, target in pairs if source == room}
    return direct.union(*(below(target, pairs) for target in direct))


def drawn(pairs):
    """The arrows that do not follow from others."""
    return {
        (above, target)
        for above, target in pairs
        if not any(
            target in below(other, pairs)
            for source, other in pairs
            if source == above and other != target
        )
    }


def purpose(room):
    return ast.get_docstring(
        ast.parse((PACKAGE / room / "__init__.py").read_text())
    ).splitlines()[0]


def draw(path):
    pairs = arrows()
    figure = Figure(figsize=(9, 9))
    axes = figure.add_axes((0, 0, 1, 1))
    for room, (x, y) in PLACES.items():
        axes.add_patch(
            FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0.02,rounding_size=0.06",
                facecolor="#e8eef6",
                edgecolor="#33465c",
            )
        )
        axes.text(x, y + 0.14, room, ha="center", va="center", weight="bold", size=12)
        lines = textwrap.fill(purpose(room), 46)
        axes.text(
            x, y - 0.11, lines, ha="center", va="center", size=7.5, color="#33465c"
        )
    for above, target in sorted(drawn(pairs)):
        (x0, y0), (x1, y1) = PLACES[above], PLACES[target]
        axes.annotate(
            "",
            xy=(x1 + 0.25 * (x0 - x1), y1 + HEIGHT / 2 + 0.03),
            xytext=(x0 + 0.25 * (x1 - x0), y0 - HEIGHT / 2 - 0.03),
            arrowprops={"arrowstyle": "->", "color": "#8a98a8"},
        )
    axes.set(xlim=(-0.3, 2.3), ylim=(0.5, 8.5))
    axes.axis("off")
    with matplotlib.rc_context(
        {"svg.hashsalt": "numpyro_tempered", "svg.fonttype": "none"}
    ):
        figure.savefig(
            path,
            bbox_inches="tight",
            metadata={"Date": None} if path.suffix == ".svg" else None,
        )
    return len(pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "reference" / "architecture.svg"
    )
    print(draw(parser.parse_args().output), "arrows between rooms")
