"""Every number of README and front page is that of a committed result, or is listed with its reason."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="docs/results is not in the source distribution")
PAGES = ("README.md", "docs/index.md")
# What is no result: versions, definitions, and what the scripts are given.
GIVEN = {
    "Python 3.11 or newer": "a requirement",
    "95% interval": "a definition",
    "95% intervals": "a definition",
    "from 250 people": "given to the script",
    "sixty samples of 250 people": "given to the script",
    "alpha = 1 is efficient": "Bayes",
    "less log(1/b)": "a formula",
    "a power below 1": "Bayes",
    "on the way to 1": "Bayes",
    "Apache-2.0": "a licence",
}


def front(figure, number):
    with open(RESULTS / "front.csv") as file:
        values = {(row["figure"], row["number"]): float(row["value"]) for row in csv.DictReader(file)}
    return values[figure, number]


def decimals(value, digits):
    """Without the leading zero, as the pages write it."""
    return f"{value:.{digits}f}".removeprefix("0")


# Sentences of the pages, with the numbers as results have them.
CLAIMS = {
    "docs/index.md": [
        lambda: f"cover the estimate from everybody {front('temper', 'bayes_covers'):.0f} times",
        lambda: f"each sample chooses, {decimals(front('temper', 'mean_alpha'), 2)} on average",
        lambda: f"they cover it {front('temper', 'tempered_covers'):.0f} times",
        lambda: f"up to {decimals(front('stream', 'largest_gap_in_sds'), 1)} standard deviations",
        lambda: f"the petals of {front('choose', 'flowers'):.0f} irises",
        lambda: f"says {['none', 'one', 'two', 'three', 'four'][int(front('choose', 'selected'))]}",
    ],
    "README.md": [
        lambda: (
            f"covers the estimate from all people {front('temper', 'bayes_covers'):.0f} times of"
            f" {front('temper', 'samples'):.0f}"
        ),
        lambda: f"covers it {front('temper', 'tempered_covers'):.0f} times",
    ],
}


def prose(page):
    """The text of a page without code, targets of links and formulas, with single blanks."""
    text = (ROOT / page).read_text()
    text = re.sub(r"^```.*?^```$", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|^\[[^\]]*\]: .*$|`[^`]*`|\$[^$]*\$|^:+.*$|<[^>]*>", " ", text, flags=re.MULTILINE)
    return " ".join(text.split())


def without(text, sentences):
    for sentence in sentences:
        text = text.replace(sentence, " ")
    return text


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_is_what_the_results_say(page):
    text = prose(page)
    missing = [sentence for sentence in (claim() for claim in CLAIMS[page]) if sentence not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_other_number_of_a_page_is_given(page):
    rest = without(prose(page), [*(claim() for claim in CLAIMS[page]), *GIVEN])
    numbers = [rest[max(0, match.start() - 30) : match.end() + 10] for match in re.finditer(r"\d+", rest)]
    assert numbers == []


def test_a_number_that_differs_is_seen(monkeypatch):
    monkeypatch.setitem(globals(), "front", lambda figure, number: 4.0)
    with pytest.raises(AssertionError):
        test_what_a_page_says_is_what_the_results_say("docs/index.md")
    assert re.search(r"\d", "in under 4 minutes")
