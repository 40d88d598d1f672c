"""Small errors in the package are noticed by the tests, and each module has tests that are near."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import numpyro_tempered as nt

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(nt.__file__).parent
BENCHMARKS = ROOT / "tests" / "benchmarks"
NEAREST = ROOT / "docs" / "results" / "mutants_nearest.csv"
in_checkout = pytest.mark.skipif(
    not NEAREST.exists(), reason="needs the results of a checkout"
)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@in_checkout
def test_the_map_from_modules_to_tests_names_files_that_are_there():
    """`python tests/benchmarks/mutants.py --map` writes it anew."""
    named = {
        name for row in rows(NEAREST) for name in [row["module"], *row["tests"].split()]
    }
    assert len(named) > 400
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


def test_an_equivalent_has_a_reason_and_its_line_is_there():
    for row in rows(BENCHMARKS / "mutants_equivalent.csv"):
        lines = [
            line.strip()
            for line in (PACKAGE.parent / row["module"]).read_text().splitlines()
        ]
        assert row["before"] in lines
        assert row["after"] != row["before"]
        assert len(row["reason"].split()) >= 3


@in_checkout
@pytest.mark.slow
def test_most_small_errors_are_noticed(tmp_path):
    pytest.importorskip("cosmic_ray")
    command = [
        sys.executable,
        BENCHMARKS / "mutants.py",
        "--seed",
        "1",
        "--count",
        "24",
        "--refusals",
        "8",
    ]
    subprocess.run([*map(str, command), "--output", str(tmp_path)], check=True)
    outcomes = [
        row["outcome"]
        for row in rows(tmp_path / "mutants.csv")
        if row["outcome"] != "equivalent"
    ]
    # Of 32 draws with a share of 0.85 fewer than 22 are noticed once in a hundred samples.
    assert (
        len(
            [
                outcome
                for outcome in outcomes
                if outcome in ("nearest", "default", "full")
            ]
        )
        >= 22
    )


def test_a_sample_stays_where_other_modules_change(monkeypatch):
    pytest.importorskip("cosmic_ray")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mutants

    one, other = (
        "numpyro_tempered/core/batching.py",
        "numpyro_tempered/core/operations.py",
    )
    drawn = mutants.draw(mutants.find_mutants([one, other]), 20, 5)
    kept = [mutant for mutant in drawn if mutant.module == one]
    assert 0 < len(kept) < len(drawn) == 20
    assert kept == mutants.draw(mutants.find_mutants([one]), len(kept), 5)
