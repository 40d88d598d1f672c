"""The reference page lists the public names, and no others."""

import functools
import re
from pathlib import Path

from test_package import NAMESPACES, PUBLIC

import numpyro_tempered as nt

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference" / "api.md"


def listed():
    tables = re.findall(
        r"^\.\. autosummary::\n((?:   :.*\n)*)\n((?:   \S+\n)+)",
        REFERENCE.read_text(),
        re.MULTILINE,
    )
    assert all(":toctree: api" in options for options, _ in tables)
    return [f"numpyro_tempered.{name}" for _, names in tables for name in names.split()]


def expected():
    return {f"numpyro_tempered.{name}" for name in PUBLIC}


def test_no_public_name_is_missing_from_the_reference():
    assert expected() - set(listed()) == set()


def test_no_name_is_listed_twice():
    assert len(listed()) == len(set(listed()))


def test_the_expected_names_include_every_kind():
    assert {
        "numpyro_tempered.temper",
        "numpyro_tempered.online.ngvi",
        "numpyro_tempered.optim.SVB",
        "numpyro_tempered.guides.AutoOnlineDiagonalNormal",
        "numpyro_tempered.plots.plot_regret",
    } <= expected()


def exists(name):
    try:
        functools.reduce(getattr, name.split(".")[1:], nt)
    except AttributeError:
        return False
    return True


def test_every_listed_name_exists():
    assert not [name for name in listed() if not exists(name)]
    assert not exists("numpyro_tempered.online.no_such_rule")


def named_in(path):
    """Public names in a text, each up to the function or class in it."""
    modules = {prefix for prefix in NAMESPACES if prefix}
    for dotted in re.findall(r"(?<![\w.])nt\.((?:\w+\.)*\w+)", path.read_text()):
        parts = dotted.split(".")
        while ".".join(parts[:-1]) + "." not in modules and len(parts) > 1:
            parts.pop()
        yield ".".join(parts)


def test_pages_and_examples_name_what_exists():
    # The changelog has old names.
    pages = set((ROOT / "docs").rglob("*.md")) - {REFERENCE.with_name("changelog.md")}
    paths = [ROOT / "README.md", *pages, *(ROOT / "examples").rglob("*.py")]
    named = {name: path.name for path in paths for name in named_in(path)}
    assert len(named) > 150
    known = set(PUBLIC) | {prefix[:-1] for prefix in NAMESPACES} | set(nt.__all__)
    assert {name: page for name, page in named.items() if name not in known} == {}
