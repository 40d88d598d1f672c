"""Every case against the record, and every public name with a case."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from conftest import tiered

import numpyro_tempered as nt
from golden import trajectories
from golden.table import CASES

RECORDS = sorted(trajectories.FOLDER.glob("*.json"))
COMMAND = "python tests/golden/trajectories.py --record"
# What makes no numbers: files and messages, words, pictures, tables, and what others are written with.
WITHOUT = {
    *(
        f"online.{name}"
        for name in (
            "save",
            "restore",
            "to_bytes",
            "from_bytes",
            "export_update",
            "load_update",
        )
    ),
    *(
        f"online.{name}"
        for name in (
            "csv_chunks",
            "diagnose",
            "frame_chunks",
            "parquet_chunks",
            "share_rows",
            "to_host",
        )
    ),
    *("mixtures.components.check_component", "mixtures.components.columnwise"),
    *(
        "gaussian.families.family_of",
        "gaussian.families.register",
        "guides.AutoOnlineGuide",
        "guides.LowRankPrecisionNormal",
    ),
    # The default of AutoNetworkNormal, and what fit_gaussian makes of several components.
    *("guides.init_by_fan_in", "guides.AutoGaussianMixture"),
}
WITHOUT_MODULES = ("plots", "results", "warnings")
# Some tenths of a second each, from every part of the package: numbers that no other quick test holds.
QUICK = """
bounds; ledger; merge; flow; changes; masked rounds; one round at a time; prescribed powers; start of a network
hindsight squared; hindsight hinge; hindsight absolute; hindsight pinball; hindsight convex; estimator of numbers
rule rvga, mean field; rule rvga, full rank; rows that are not finite; chunks, one by one
descent forward backward, mean field; gaussian forward backward; optimiser svb; optimiser ngvi; optimiser sva
em, three passes; mixture, three passes
"""
QUICK = [name for line in QUICK.strip().splitlines() for name in line.split("; ")]


@pytest.fixture(scope="module")
def record():
    """The record for this Python and jax, and in what else this environment differs from that of the record."""
    found = trajectories.read_record()
    if found is None:
        pytest.skip(
            f"there is no {trajectories.record_path().name}: {COMMAND} writes it"
        )
    changed = trajectories.differences(found)
    for name in ("x64", "devices"):
        if name in changed:
            pytest.skip(f"the record is of other numbers: {changed[name]}")
    return found["cases"], changed


@pytest.mark.parametrize("name", tiered(CASES, unit=QUICK))
def test_a_case_has_the_numbers_of_the_record(name, record):
    cases, changed = record
    if changed and name in trajectories.TIES:
        pytest.skip(
            f"other rounding may end in another of its optima: {'; '.join(changed.values())}"
        )
    lines = trajectories.moved(
        trajectories.run(name), cases.get(name, {}), exact=not changed
    )
    where = (
        f" (within {trajectories.RTOL}: {'; '.join(changed.values())})"
        if changed
        else ""
    )
    assert not lines, "\n".join(
        [f"{name} has moved{where}. If it should, {COMMAND} --only '{name}'.", *lines]
    )


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_have_the_cases_of_the_table(path):
    assert set(json.loads(path.read_text())["cases"]) == set(CASES)


def public_names(module=nt, prefix=""):
    """Public functions and classes, but those that only hold or warn."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            if name not in WITHOUT_MODULES:
                yield from public_names(value, f"{prefix}{name}.")
        elif inspect.isfunction(value) or (
            inspect.isclass(value) and not holds_or_warns(value)
        ):
            yield prefix + name


def holds_or_warns(kind):
    return hasattr(kind, "_fields") or issubclass(kind, Warning)


def names_in_cases():
    """What the cases take from the package."""
    for path in trajectories.FOLDER.glob("*.py"):
        if path.name != Path(__file__).name:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
                    "nt."
                ):
                    yield ast.unparse(node).removeprefix("nt.")


def test_ties_are_cases():
    assert set(CASES) >= trajectories.TIES


def test_every_public_name_has_a_case():
    public, used = set(public_names()), set(names_in_cases())
    assert sorted(public - used - WITHOUT) == []
    assert sorted(WITHOUT & used | WITHOUT - public) == []


def test_what_has_moved_is_said():
    then = trajectories.describe([[1.0, 2.0, 3.0], "word"])
    assert (then["size"], then["ends"], then["words"]) == (3, [1.0, 2.0, 3.0], ["word"])
    now = trajectories.describe([[1.0, 2.0, 3.0 + 1e-6], "word"])
    assert trajectories.moved({"all": then}, {"all": then}, exact=True) == []
    assert trajectories.moved({"all": now}, {"all": then}, exact=False) == []
    (line,) = trajectories.moved({"all": now}, {"all": then}, exact=True)
    assert "was [1.0, 2.0, 3.0], is [1.0, 2.0, 3.000001]" in line
    far = trajectories.describe([[1.0, 2.0, 3.1], "word"])
    assert trajectories.moved({"all": far}, {"all": then}, exact=False)
    assert trajectories.moved({"new": now}, {"all": then}, exact=True) == [
        "'new' is not in the record",
        "'all' is in the record only",
    ]
