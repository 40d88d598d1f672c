"""The numbers in the prose of the pages on risk and on concentration are those of their results."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import rel_entr
from test_numbers import RESULTS, ROOT, WORDS, cell, column, decimals, noted, rows

pytestmark = pytest.mark.skipif(
    not RESULTS.exists(), reason="docs/results is not in the source distribution"
)
CANCER, DIGITS = "breast cancer", "digits, even or odd"


def risk(key, data, prior, alpha):
    (value,) = [
        row[key]
        for row in rows("risk_certificates")
        if (row["data"], row["prior"], row["alpha"]) == (data, prior, alpha)
    ]
    return value


def rounded(data, prior, alpha, key="certificate"):
    return decimals(risk(key, data, prior, alpha), 3)


def of_test_rows(error, num_rows):
    """What as many rows that were set aside would certify."""
    return brentq(
        lambda q: (
            rel_entr(error, q) + rel_entr(1 - error, 1 - q) - math.log(20) / num_rows
        ),
        error,
        0.999,
    )


def risk_claims():
    """Claims of the page on certificates of risk."""
    n, gibbs = risk("n", CANCER, "units", 1.0), risk("gibbs", CANCER, "units", 1.0)
    value = rounded(CANCER, "units", 1.0)
    yield f"30 features, {n:.0f} rows, of 569): the certificate is {value} at $\\alpha = 1$"
    mean = rounded(CANCER, "units", 1.0, "mean")
    yield f"a draw errs on {decimals(gibbs, 3)} of the test rows and the mean on {mean}."
    yield f"it is {rounded(CANCER, 'pilot', 0.5)} at $\\alpha = 1/2$."
    yield f"{n:.0f} more rows with that error would certify {decimals(of_test_rows(gibbs, n), 3)} by"
    n, gibbs = risk("n", DIGITS, "units", 0.5), risk("gibbs", DIGITS, "units", 0.5)
    value = rounded(DIGITS, "units", 0.5)
    yield f"65 coefficients, {n:.0f} rows): {value} at $\\alpha = 1/2$, test error {decimals(gibbs, 3)};"
    n_pilot, value = risk("n", DIGITS, "pilot", 0.25), rounded(DIGITS, "pilot", 0.25)
    yield f"and {n_pilot:.0f} for the certificate {value} at $\\alpha = 1/4$."
    yield f"{n:.0f} more rows would certify {decimals(of_test_rows(gibbs, n), 3)}."
    fixed = [row for row in rows("risk_certificates") if row["alpha"] != "best"]
    best = [row for row in rows("risk_certificates") if row["alpha"] == "best"]
    cells = [(row["data"], row["prior"]) for row in best]
    least = [
        min(row["certificate"] for row in fixed if (row["data"], row["prior"]) == each)
        for each in cells
    ]
    prices = [
        row["certificate"] - value for row, value in zip(best, least, strict=True)
    ]
    alphas = len({row["alpha"] for row in fixed})
    costs = f"costs {decimals(min(prices), 3)} to {decimals(max(prices), 3)}"
    yield f"*The best alpha* of {WORDS[alphas]}, chosen by the certificate itself, {costs}"
    chosen = [row["chosen"] for row in best]
    yield f"between {decimals(min(chosen), 2)} and {decimals(max(chosen), 2)} on average"
    assert not any(row["broken"] for row in fixed)
    ratios = [row["certificate"] / row["gibbs"] for row in fixed]
    fits = sum(row["splits"] for row in fixed)
    yield f"in {fits:.0f} fits. On average they are {min(ratios):.1f} to {max(ratios):.1f} times that error"
    gain = max(row["certificate"] - row["catoni"] for row in fixed)
    yield f"is up to {decimals(gain, 3)} smaller than Maurer's"


def slopes(key, study, family):
    return column("concentration_slopes", key, study=study, family=family)


def short(value, digits=3):
    sign = "-" if value < 0 else ""
    return sign + decimals(abs(value), digits)


def concentration_claims():
    """Claims of the page on concentration."""
    values, errors = (
        slopes(key, "regression", "mean field") for key in ("slope", "slope_se")
    )
    by_alpha = [
        f"{short(v)} ({a})"
        for v, a in zip(values, (".25", ".5", ".75", "1"), strict=True)
    ]
    yield f"slopes {', '.join(by_alpha[:3])} and {by_alpha[3]}"
    yield f"with standard errors of {short(min(errors))} to {short(max(errors))}"
    worst = max(
        abs(row["over_limit"] - 1)
        for row in rows("concentration_slopes")
        if row["over_limit"] != ""
    )
    yield f"is within {short(math.ceil(1000 * worst - 1e-9) / 10, 1)} % of its limit"
    ratios = slopes("bound_over_renyi", "regression", "exact") + slopes(
        "bound_over_renyi", "regression", "mean field"
    )
    yield f"The bound of AR is {min(ratios):.0f} to {max(ratios):.0f} times the divergence"
    values, errors = (
        slopes("slope", "misspecified", "mean field"),
        slopes("slope_se", "misspecified", "mean field"),
    )
    yield f"(slopes {short(max(values))} to {short(min(values))}, standard errors {short(min(errors))} to"
    rough = [
        row
        for row in rows("concentration_slopes")
        if row["study"] == "rough" and row["alpha"] < 1
    ]
    values, errors = ([row[key] for row in rough] for key in ("slope", "slope_se"))
    yield f"slopes {short(max(values))} to {short(min(values))} (standard errors {short(min(errors))} to"
    at_one = {"study": "rough", "alpha": 1.0}
    assert cell("concentration_slopes", "rough_at_end", **at_one) == 1.0
    yield f"and the distance to {short(cell('concentration_slopes', 'hellinger_at_end', **at_one))}."
    yield f"for {noted('concentration', r'([0-9]+) seeds each')} data sets of each size"


@pytest.mark.parametrize(
    ("page", "claims"),
    [("theory_risk", risk_claims), ("concentration", concentration_claims)],
)
def test_the_numbers_are_those_of_the_results(page, claims):
    text = " ".join(
        (ROOT / "docs" / "understand" / f"{page}.md")
        .read_text(encoding="utf-8")
        .split()
    )
    assert [claim for claim in claims() if " ".join(claim.split()) not in text] == []


def test_the_wrong_model_leaves_no_divergence_above_its_alpha():
    """alpha (1 - s² alpha) of noise s = 1.5 is positive below 4/9, the .44 of the page."""
    alphas = np.array([0.25, 0.44, 0.45, 0.75])
    assert ((1 - 1.5**2 * alphas) > 0).tolist() == [True, True, False, False]
