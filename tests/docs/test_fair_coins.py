"""The code of docs/understand/fair_coins.md: its cells run, its functions are exact, and its checks can fail."""

import itertools
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import tiered

PAGE = Path(__file__).resolve().parents[2] / "docs" / "understand" / "fair_coins.md"
CELLS = "\n".join(
    re.findall(r"```\{code-cell\} ipython3\n(.*?)```", PAGE.read_text(), re.DOTALL)
)
DEPTH = 12


class Flips:
    """A generator that replays one string of coin flips, and stops where it ends."""

    def __init__(self, string):
        self.left = iter(string)

    def integers(self, high, size):
        assert high == 2
        assert size == 1
        return np.array([next(self.left)])


def over_all_strings(draw):
    """Answer and flips for each of the 2^DEPTH strings that come to an answer."""
    found = []
    for string in itertools.product([0, 1], repeat=DEPTH):
        try:
            (answer,), (flips,) = draw(Flips(string))
        except StopIteration:
            continue
        found.append((answer, flips))
    return np.array(found)


@pytest.fixture(scope="module")
def page():
    """What the cells define; their own checks are within."""
    names = {}
    exec(compile(CELLS, str(PAGE), "exec"), names)
    return names


PROBABILITIES = [Fraction(1, 3), Fraction(1, 10), Fraction(5, 7), Fraction(3, 8)]


@pytest.mark.parametrize(
    "p", tiered(PROBABILITIES, unit=[Fraction(1, 3), Fraction(3, 8)])
)
def test_bernoulli_over_all_strings_of_flips(page, p):
    found = over_all_strings(lambda rng: page["bernoulli"](p, 1, rng))
    # All but the string without a head come to an answer; the share of ones is p cut after its last digit.
    assert len(found) == 2**DEPTH - 1
    assert found[:, 0].sum() == int(2**DEPTH * p)
    assert found[:, 1].sum() == sum(k * 2 ** (DEPTH - k) for k in range(1, DEPTH + 1))


THREE = [
    [Fraction(1, 3), Fraction(1, 2), Fraction(1, 6)],
    [Fraction(3, 4), Fraction(0), Fraction(1, 4)],
]
LISTS = [
    [Fraction(1, 6)] * 6,
    *THREE,
    [Fraction(17, 100), Fraction(80, 100), Fraction(3, 100)],
]


@pytest.mark.parametrize("p", tiered(LISTS, unit=THREE))
def test_categorical_over_all_strings_of_flips(page, p):
    found = over_all_strings(lambda rng: page["categorical"](p, 1, rng))
    assert np.bincount(found[:, 0], minlength=len(p)).tolist() == [
        int(2**DEPTH * p_i) for p_i in p
    ]
    digits = [[int(2**k * p_i) % 2 for k in range(1, DEPTH + 1)] for p_i in p]
    assert found[:, 1].sum() == sum(
        k * 2 ** (DEPTH - k) * row[k - 1] for row in digits for k in range(1, DEPTH + 1)
    )


def test_draws_side_by_side_are_draws_one_by_one(page):
    """With bits of their own, many walks at once come to the answers of single ones."""
    p, bits = [Fraction(1, 6)] * 6, np.random.default_rng(0).integers(2, size=(50, 40))

    class Columns:
        """Flip k of the walks that still go, found by replaying each one alone."""

        def __init__(self):
            self.flips = np.array(
                [page["categorical"](p, 1, Flips(row))[1][0] for row in bits]
            )
            self.k = 0

        def integers(self, high, size):
            going = self.flips > self.k
            assert size == going.sum()
            self.k += 1
            return bits[going, self.k - 1]

    alone = [page["categorical"](p, 1, Flips(row))[0][0] for row in bits]
    assert page["categorical"](p, 50, Columns())[0].tolist() == alone


def test_expected_flips_of_known_cases(page):
    near = Fraction(1, 2**180)
    for p, flips in (
        ([Fraction(1, 6)] * 6, Fraction(11, 3)),
        ([Fraction(1, 3), Fraction(2, 3)], Fraction(2)),
        ([Fraction(1, 8)] * 8, Fraction(3)),
        ([Fraction(3, 4), Fraction(1, 4)], Fraction(3, 2)),
    ):
        assert abs(page["expected_flips"](p) - flips) < near


@pytest.mark.parametrize("seed", range(20))
def test_expected_flips_are_between_entropy_and_two_more(page, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 10 ** rng.integers(1, 6), size=rng.integers(2, 12))
    p = [Fraction(int(c), int(counts.sum())) for c in counts]
    flips, entropy = float(page["expected_flips"](p)), page["entropy"](p)
    assert entropy - 1e-12 <= flips < entropy + 2


def test_the_check_can_fail(page):
    answer, _ = page["bernoulli"](Fraction(1, 3), 100_000, np.random.default_rng(0))
    page["check"](answer, 1 / 3)
    with pytest.raises(AssertionError, match="expected"):
        page["check"](answer, 0.345)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("= bit(p, n), n", "= bit(p, n + 1), n"),
        ("= bit(p, n), n", "= bit(p, n), n - 1"),
        ("leaves[node[arrived]], k", "leaves[node[arrived]], k + 1"),
        ("leaves[node[arrived]], k", "leaves[0 * node[arrived]], k"),
        ("Fraction(k * bit(p_i, k), 2**k)", "Fraction(k * bit(p_i, k), 2**k + 1)"),
    ],
)
def test_the_page_stops_where_its_code_is_wrong(right, wrong):
    assert CELLS.count(right) == 1
    with pytest.raises(AssertionError, match="expected"):
        exec(compile(CELLS.replace(right, wrong), str(PAGE), "exec"), {})
