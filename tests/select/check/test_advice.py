"""What a check says, in words, of numbers that are given."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from numpyro_tempered.infer.moments import LocationScale
from numpyro_tempered.infer.settle import Convergence
from numpyro_tempered.select.alpha.guides import shortfall, unconverged
from numpyro_tempered.select.check.bars import ErrorBars
from numpyro_tempered.select.check.calibration import _advise, _list
from numpyro_tempered.select.check.divergence import Divergences
from numpyro_tempered.select.check.missed import Missed
from numpyro_tempered.select.check.reference import Reference
from numpyro_tempered.select.check.result import advise, advise_of_modes
from numpyro_tempered.select.check.target import Draws

NAMES = ["a", "b", "c"]
BARS = ErrorBars(
    mean=np.array([1.0, 0.0, 0.0]),
    sd=np.array([1.0, 2.0, 0.5]),
    mean_bound=np.array([0.1, 0.8, 0.1]),
    sd_bound=np.array([0.1, 0.2, 0.1]),
    corrected_mean=np.array([1.3, 0.1, 0.0]),
    corrected_mean_se=np.array([0.05, 0.02, 0.01]),
    corrected_sd=np.array([1.0, 1.0, 0.5]),
    corrected_sd_se=np.array([0.05, 0.02, 0.01]),
)
ESTIMATE = (
    "By estimate no mean is further off than that of a, by 0.3 +- 0.05 sd, and no sd than that of b, 2 times the "
    "posterior's"
)


def reference(name, k=0.3, law=None, *, is_mixture=False):
    draws = Draws(np.zeros(4), np.zeros((4, 1)), np.zeros((4, 3)), None, law)
    divergences = Divergences(*[0.0] * 7, k)
    return Reference(name, draws, divergences, np.full(4, 0.25), is_mixture)


def said(status, name="fit", bars=BARS, *, law=None, is_alone=True, **options):
    base = reference(name, 0.2, law, **options)
    return advise(status, reference("fit", 0.9), base, bars, NAMES, is_alone=is_alone)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fit", "draws of the fit"),
        ("reference", "draws of the reference"),
        (
            "gaussian",
            "draws of a Gaussian, which is nearer to the posterior than the fit,",
        ),
    ],
)
def test_a_bound_is_that_of_the_number_with_the_largest(name, source):
    bound = "no mean is off by more than 0.4 sd (b)"
    assert said("bounded", name) == f"By {source} Pareto k 0.20: {bound}. {ESTIMATE}."


def test_an_estimate_says_why_there_is_no_bound():
    text = said("estimated")
    assert text.startswith(
        "No bound that says anything: the weights of draws of the fit have no second moment"
    )
    assert (
        f"Pareto k 0.20) or by the curvature of the posterior. {ESTIMATE}. A richer guide"
        in text
    )


def test_what_no_draws_cover_is_said_with_what_was_tried():
    alone, others = said("unreliable"), said("unreliable", is_alone=False)
    assert alone.startswith(
        "Draws of the fit do not cover its posterior (Pareto k 0.90): draws say neither"
    )
    assert (
        "(Pareto k 0.90), nor did other distributions that were tried: draws say neither"
        in others
    )
    assert alone.endswith("or run NUTS.")


def test_heavy_tails_are_told():
    heavier = "The posterior has heavier tails than a Gaussian"
    assert heavier in said("bounded", "student_t")
    assert heavier not in said("bounded", "student_t", is_mixture=True)
    assert heavier not in said("bounded", "gaussian")
    no_fourth = "up to 4 degrees of freedom a Student's t has no fourth moment"
    for df in (4.0, 5.0):
        law = LocationScale(np.zeros(1), np.eye(1), np.array([df]))
        assert (no_fourth in said("bounded", law=law)) == (df == 4.0)


def test_numbers_without_a_moment_are_counted():
    nan = math.nan
    none = BARS._replace(mean_bound=np.full(3, nan))
    assert "Pareto k 0.20: no number has a bound. By estimate" in said(
        "bounded", bars=none
    )
    some = BARS._replace(
        mean=np.array([1.0, nan, nan]), corrected_sd=np.array([1.0, nan, 0.25])
    )
    text = said("bounded", bars=some)
    assert (
        "no sd than that of c, 2 times the posterior's; 1 of 3 have too heavy a tail for an estimate"
        in text
    )
    assert "2 of 3 have no mean that can be told under the fit" in text
    without = BARS._replace(mean=np.full(3, nan), corrected_sd=np.full(3, nan))
    assert "No number has a mean under the fit; 3 of 3 have too heavy a tail" in said(
        "bounded", bars=without
    )
    # A constant has a bound of 0, and is not divided by.
    constant = BARS._replace(
        sd=np.array([1.0, 0.0, 0.5]), mean_bound=np.array([0.1, 0.0, 0.2])
    )
    assert "no mean is off by more than 0.4 sd (c)" in said("bounded", bars=constant)


@pytest.mark.parametrize(("number", "modes"), [(1, "a mode"), (2, "2 modes")])
def test_modes_that_are_missed_are_told_with_three_numbers(number, modes):
    text = advise_of_modes(Missed(number, 0.256, np.array([1.0, -2.5, 3.0])), NAMES)
    assert text.startswith(
        f"The posterior has {modes} that no draw comes near, with 26% of the mass by estimate, "
    )
    assert (
        "the heaviest at a = 1, b = -2.5, c = 3: weights of draws say nothing of it"
        in text
    )
    more = advise_of_modes(Missed(number, 0.5, np.arange(4.0)), [*NAMES, "d"])
    assert "at a = 0, b = 1, c = 2, ...: weights" in more


@pytest.mark.parametrize(
    ("p_values", "alpha", "converged", "expected"),
    [
        (
            [0.9, 0.06, np.nan],
            1.0,
            4,
            "no sign of error; of 2 scalars in 4 simulations, at the level 0.05 adjusted",
        ),
        ([0.05, 0.9, 0.01], 1.0, 4, "a, c too low; of 3 scalars in 4 simulations"),
        (
            [0.9, 0.9, 0.9],
            0.25,
            4,
            " even an exact tempered posterior is not.*between 1 and 0.5, and only",
        ),
        (
            [0.9, 0.9, 0.9],
            1.0,
            3,
            r"number\. 1 of the 4 fits did not converge, and are among the ranks\.$",
        ),
    ],
)
def test_a_calibration_names_what_is_wrong_and_how_it_was_judged(
    p_values, alpha, converged, expected
):
    judgement = SimpleNamespace(
        p_value=np.array(p_values), verdict=np.array(["too low"] * 3)
    )
    text = _advise(NAMES, judgement, alpha, np.arange(4) < converged)
    assert re.search(expected, text)
    assert ("tempered" in text) == (alpha != 1.0)
    assert ("converge" in text) == (converged < 4)


def test_of_many_names_the_first_six_are_listed():
    assert _list(list("abcdef")) == "a, b, c, d, e, f"
    assert _list(list("abcdefgh")) == "a, b, c, d, e, f and 2 others"


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({"gap": 0.25, "fall": 1.0}, "70 steps, 0.25 nats by estimate"),
        ({"gap": np.inf, "fall": 1.5}, "70 steps, and the loss still fell by 1.5 nats"),
        ({"gap": np.inf, "fall": 0.0}, "70 steps, too few to judge"),
        ({"gap": np.nan, "fall": np.inf}, "70 steps, too few to judge"),
    ],
)
def test_a_fit_says_by_how_much_it_misses_its_optimum(evidence, expected):
    fit = Convergence(False, evidence["gap"], 0.1, 0.1, evidence["fall"], 0.01, 70)
    assert shortfall(fit) == expected
    others = [fit, fit._replace(converged=True), fit._replace(converged=None)]
    assert unconverged(others).tolist() == [True, False, True]
