"""A gallery from the notebooks of ``examples/gallery``: a page for each, and an index of cards with its figure.

A notebook that is dropped into that folder is in the gallery. Its first cell is a heading and a paragraph; the
last figure of the cell that has the tag ``thumbnail``, or else of the notebook, is on its card.
"""

import base64
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "examples" / "gallery"
# The site fetches nothing from another host, also not the badge.
BADGE, OWN_BADGE = (
    "https://colab.research.google.com/assets/colab-badge.svg",
    "../_static/colab.svg",
)


def figures(cell):
    """The PNG figures among the outputs of a cell, as bytes."""
    outputs = [output.get("data", {}) for output in cell.get("outputs", [])]
    return [
        base64.b64decode("".join(data["image/png"]))
        for data in outputs
        if "image/png" in data
    ]


def thumbnail(notebook):
    """The figure of a card, or None where the notebook has none."""
    tagged = [
        cell
        for cell in notebook["cells"]
        if "thumbnail" in cell["metadata"].get("tags", [])
    ]
    drawn = [figure for cell in tagged or notebook["cells"] for figure in figures(cell)]
    return drawn[-1] if drawn else None


def heading(notebook):
    """Title of a notebook, and its question: what is bold in its first paragraph, or else that paragraph."""
    text = "".join(notebook["cells"][0]["source"])
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    if title is None:
        raise ValueError(
            "the first cell of a notebook of the gallery is a heading, # Title, and a paragraph"
        )
    paragraphs = [each.strip() for each in text[title.end() :].split("\n\n")]
    prose = [
        each
        for each in paragraphs
        if each and not re.match(r"\[!?\[|\[\w+\]:|<|#", each)
    ]
    first = " ".join(prose[0].split()) if prose else ""
    question = re.search(r"\*\*(.+?)\*\*", first)
    return title[1].strip(), question[1] if question else first


def card(path, image, title, sentence):
    """One card of the index."""
    figure = f":img-top: {image}\n" if image else ""
    return f":::{{grid-item-card}} {title}\n:link: {path.stem}\n:link-type: doc\n{figure}\n{sentence}\n:::\n"


def write(app):
    """Copy the notebooks to the sources of the site, and write the index."""
    folder = Path(app.srcdir) / "gallery"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    cards, names = [], []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        figure, (title, sentence) = thumbnail(notebook), heading(notebook)
        if figure:
            (folder / f"{path.stem}.png").write_bytes(figure)
        (folder / path.name).write_text(path.read_text().replace(BADGE, OWN_BADGE))
        cards.append(
            card(path, f"{path.stem}.png" if figure else None, title, sentence)
        )
        names.append(path.stem)
    index = (
        "# Gallery\n\nNotebooks on real data, each about one question. Each runs as it is on a CPU, on a GPU "
        "and in Colab.\n\n"
        "::::{grid} 1 1 2 2\n:gutter: 3\n\n" + "\n".join(cards) + "::::\n\n"
        "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
    )
    (folder / "index.md").write_text(index)


def setup(app):
    """Write the gallery before the sources are read."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
