"""The gallery's notebooks: each is its script, executed, and stands alone."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "gallery"
in_checkout = pytest.mark.skipif(
    not (ROOT / "docs" / "results").exists(),
    reason="notebooks are not in the source distribution",
)
SCRIPTS = sorted(FOLDER.glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]
SIBLINGS = {path.stem for path in [*FOLDER.glob("*.py"), *FOLDER.parent.glob("*.py")]}
MOST_BYTES = 400_000


def cells_of_script(path):
    """Kind, tags and source of each cell of a percent script, the first of which may be a docstring."""
    text = path.read_text(encoding="utf-8")
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    cells = []
    for options, body in zip(parts[::2], parts[1::2], strict=True):
        lines = body.strip("\n").split("\n")
        is_text = "[markdown]" in options
        if is_text:
            quotes = '"""'
            lines = [
                line.removeprefix("#").removeprefix(" ").removeprefix(quotes)
                for line in lines
            ]
            lines = lines[:-1] if lines[-1] == "" else lines
        cells.append(
            (
                "markdown" if is_text else "code",
                re.findall(r'"(\w+)"', options),
                "\n".join(lines),
            )
        )
    return cells


def notebook(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def cells_of_notebook(content):
    return [
        (cell["cell_type"], cell["metadata"].get("tags", []), "".join(cell["source"]))
        for cell in content["cells"]
    ]


def printed(name):
    outputs = [
        output for cell in notebook(name)["cells"] for output in cell.get("outputs", [])
    ]
    return "".join("".join(output.get("text", "")) for output in outputs)


@in_checkout
def test_there_are_five_and_no_notebook_without_a_script():
    assert len(NAMES) >= 5
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@in_checkout
@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_its_script(name):
    content = notebook(name)
    assert cells_of_notebook(content) == cells_of_script(FOLDER / f"{name}.py")
    # Progress bars that have ended, a megabyte of them.
    assert "widgets" not in content["metadata"]


@in_checkout
@pytest.mark.parametrize(
    "path", sorted(FOLDER.parent.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebook_of_an_experiment_is_its_script(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert cells_of_notebook(content) == cells_of_script(path.with_suffix(".py"))


@pytest.mark.parametrize("name", NAMES)
def test_first_cells_have_title_badge_and_installation(name):
    (kind, _, first), (_, _, install), *_ = cells_of_script(FOLDER / f"{name}.py")
    assert kind == "markdown"
    assert first.startswith("# ")
    assert "[![Open in Colab][badge]][colab]" in first
    repository = "numpyro-tempered/numpyro_tempered/blob/main"
    link = f"[colab]: https://colab.research.google.com/github/{repository}/examples/gallery/{name}.ipynb"
    assert link in first.splitlines()
    assert 'find_spec("numpyro_tempered") is None' in install
    assert (
        "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
        in install
    )


@pytest.mark.parametrize("name", NAMES)
def test_notebook_stands_alone(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert not imported & (SIBLINGS | {"argparse", "google"})
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [text for text in strings if text.startswith(("/", "~", "../"))]
    assert "__file__" not in {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
    }


@in_checkout
@pytest.mark.parametrize("name", NAMES)
def test_notebook_was_executed_in_order_without_an_error_or_warning(name):
    code = [cell for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@in_checkout
@pytest.mark.parametrize("name", NAMES)
def test_one_cell_prints_device_versions_and_throughput(name):
    text = printed(name)
    assert (
        len(re.findall(r"^device +\S.*\((cpu|gpu|tpu)\)$", text, flags=re.MULTILINE))
        == 1
    )
    assert (
        len(
            re.findall(
                r"^versions +jax \d.*numpyro_tempered \d", text, flags=re.MULTILINE
            )
        )
        == 1
    )
    assert re.search(r"\d s: [\d,]+ [a-z]+/s", text)
    assert "no network" not in text


@in_checkout
@pytest.mark.parametrize("name", NAMES)
def test_last_figure_is_the_thumbnail(name):
    with_figure = [
        cell
        for cell in notebook(name)["cells"]
        if any(
            "image/png" in output.get("data", {}) for output in cell.get("outputs", [])
        )
    ]
    assert [cell["metadata"].get("tags", []) for cell in with_figure[:-1]] == [[]] * (
        len(with_figure) - 1
    )
    assert with_figure[-1]["metadata"]["tags"] == ["thumbnail"]
