"""Cards of the gallery: what they take from a notebook."""

import base64
import importlib.util
from pathlib import Path

import pytest

EXTENSION = Path(__file__).resolve().parents[2] / "docs" / "_ext" / "gallery.py"
spec = importlib.util.spec_from_file_location("gallery", EXTENSION)
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)


def figure(name):
    return {"data": {"image/png": base64.b64encode(name.encode()).decode()}}


def notebook(first, *cells):
    text = {"source": [first], "metadata": {}}
    return {
        "cells": [
            text,
            *(
                {"metadata": {"tags": tags}, "outputs": outputs}
                for tags, outputs in cells
            ),
        ]
    }


def test_a_card_shows_the_last_figure_of_the_tagged_cell_or_of_the_notebook():
    one, two, three = (
        ([], [figure("a"), figure("b")]),
        (["thumbnail"], [figure("c")]),
        ([], [figure("d")]),
    )
    assert gallery.thumbnail(notebook("# T", one, two, three)) == b"c"
    assert gallery.thumbnail(notebook("# T", one, three)) == b"d"
    assert gallery.thumbnail(notebook("# T", ([], [{"text": "no figure"}]))) is None


def test_a_card_has_the_title_and_the_question():
    badge = "[![Open in Colab][badge]][colab]\n\n[badge]: https://a.b/c.svg\n[colab]: https://a.b"
    text = (
        f"# How many?\n\n{badge}\n\nPixels. **How many\ncolours?** And more.\n\nLater."
    )
    assert gallery.heading(notebook(text)) == ("How many?", "How many colours?")
    assert gallery.heading(notebook("# T\n\nOne paragraph,\nno question.")) == (
        "T",
        "One paragraph, no question.",
    )
    with pytest.raises(
        ValueError, match=r"^the first cell of.*is a heading.*Title, and a paragraph"
    ):
        gallery.heading(notebook("no title"))
