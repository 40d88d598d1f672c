"""What refits to resamples say about the coverage of intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import Array, add_repr, doubles
from numpyro_tempered.report.arviz import ArviZData, assemble, dataset, versions

# Of all tests together that intervals cover what they say.
SIGNIFICANCE = 0.05
# The level of which the advice speaks, where it is among those that are checked.
MAIN_LEVEL = 0.9
# Below it the bootstrap is rough.
FEW_UNITS = 30
# The share of fits that may be short of their optimum without a word.
MOST_UNCONVERGED = 0.05
MOST_LISTED = 4


class Refits(NamedTuple):
    """Posteriors of K numbers; of R data sets with the axis ``(R,)`` in front.

    Attributes:
        centre: ``(K,)``.
        sd: ``(K,)``.
        ends: Lower and upper ends of the intervals of the levels, ``(2, L, K)``.
    """

    centre: Array
    sd: Array
    ends: Array


@add_repr
class CoverageCheck(NamedTuple):
    """Whether tempered intervals cover, by :func:`numpyro_tempered.alpha.check_coverage`, with B resamples.

    Attributes:
        advice: What the resamples say, in words.
        alpha: Power of the likelihood.
        num_bootstrap: B.
        num_independent: How many independent rows, groups or blocks there are.
        converged: Which of the fits to the resamples converged, ``(B,)``. All of them are counted.
        data: ArviZ data with the group ``coverage``, whose rows :func:`numpyro_tempered.table` shows, and
            ``resamples``, the centres of the fits.
    """

    advice: str
    alpha: float
    num_bootstrap: int
    num_independent: int
    converged: np.ndarray
    data: ArviZData


def report(
    refits: Refits,
    converged: np.ndarray,
    alpha: float,
    levels: np.ndarray,
    names: Sequence[str],
    *,
    num_independent: int,
) -> CoverageCheck:
    """The coverage of intervals of refits, of which the first is that to all data.

    Raises:
        ValueError: If a fit has draws that are not finite.
    """
    centres, sds, ends = map(doubles, refits)
    is_finite = np.all(np.isfinite(ends), axis=(1, 2, 3)) & np.all(
        np.isfinite(centres), axis=1
    )
    if not np.all(is_finite):
        raise ValueError(
            f"{np.sum(~is_finite)} of {len(is_finite)} fits have draws that are not finite, and so no intervals: "
            "take another parameterisation of the model, or whole groups= where a resample may lack a group."
        )
    centre, others = centres[0], centres[1:]
    num = len(others)
    inside = (ends[1:, 0] <= centre) & (centre <= ends[1:, 1])
    hits = inside.sum(axis=0).T
    share = (hits + 0.5) / (num + 1.0)
    sd, bootstrap_sd = (
        np.sqrt(np.mean(np.square(sds[1:]), axis=0)),
        others.std(axis=0, ddof=1),
    )
    # Entries that are constant, such as the zeros of a triangular matrix, have no intervals.
    moves = sd > 0
    ratio = bootstrap_sd[moves] / sd[moves]
    kept_names = [name for name, can_move in zip(names, moves, strict=True) if can_move]
    by_level = {
        "coverage": (hits / num)[moves],
        "coverage_se": np.sqrt(share * (1.0 - share) / num)[moves],
        "width": (ends[1:, 1] - ends[1:, 0]).mean(axis=0).T[moves],
    }
    by_number = {
        "centre": centre[moves],
        "sd": sd[moves],
        "bootstrap_sd": bootstrap_sd[moves],
        "ratio": ratio,
        "power": alpha / np.square(np.where(ratio > 0, ratio, np.nan)),
    }
    advice = advise(
        kept_names,
        by_level["coverage"],
        by_level["coverage_se"],
        ratio,
        levels,
        alpha,
        num=num,
    )
    missed = float(np.mean(~converged))
    if missed > MOST_UNCONVERGED:
        advice += f" {missed:.0%} of the fits have not converged, and are counted all the same."
    if num_independent < FEW_UNITS:
        advice += f" Only {num_independent} units are independent: resamples vary too little, so this is rough."
    attrs = {
        "alpha": alpha,
        "advice": advice,
        "num_bootstrap": num,
        "num_independent": num_independent,
        "num_unconverged": int(np.sum(~converged)),
        **versions(),
    }
    coords = {"number": kept_names, "level": levels.tolist()}
    dims = {name: ["number", "level"] for name in by_level} | {
        name: ["number"] for name in by_number
    }
    groups = {
        "coverage": dataset(
            by_level | by_number, coords=coords, dims=dims, attrs=attrs
        ),
        "resamples": dataset(
            {"centre": others[:, moves]},
            coords=coords,
            dims={"centre": ["resample", "number"]},
            attrs=attrs,
        ),
    }
    return CoverageCheck(
        advice, alpha, num, num_independent, converged[1:], assemble(groups, attrs)
    )


def advise(
    names: Sequence[str],
    coverage: np.ndarray,
    se: np.ndarray,
    ratio: np.ndarray,
    levels: np.ndarray,
    alpha: float,
    *,
    num: int,
) -> str:
    """What the coverage ``(K, L)`` of intervals says, in a few sentences."""
    from scipy.stats import norm

    at = int(np.argmin(np.abs(levels - MAIN_LEVEL)))
    level, covers, errors = levels[at], coverage[:, at], se[:, at]
    low, high = int(np.argmin(covers)), int(np.argmax(covers))
    share = _share(covers, errors, low)
    text = f"In {num} resamples {100.0 * level:.3g}% intervals at alpha = {alpha:.3g} cover {share}"
    if len(names) > 1:
        text += f" ({names[low]}) to {_share(covers, errors, high)} ({names[high]})"
    limit = norm.ppf(1.0 - 0.5 * SIGNIFICANCE / len(names)) * np.sqrt(
        level * (1.0 - level) / num
    )
    narrow = np.flatnonzero(covers < level - limit)
    wide = np.flatnonzero(covers > level + limit)
    if not len(narrow) and not len(wide):
        return f"{text}: no more from {100.0 * level:.3g}% than resampling explains."
    clauses = [
        f"too {word}{f' for {list_names([names[int(k)] for k in some])}' if len(names) > 1 else ''}"
        for some, word in ((narrow, "narrow"), (wide, "wide"))
        if len(some)
    ]
    worst = low if len(narrow) else high
    name = f" of {names[worst]}" if len(names) > 1 else ""
    text += f": {', and '.join(clauses)}. The centre{name} varies {ratio[worst]:.2g} times as much as its sd says"
    # Ratios by B resamples have relative standard errors of about (2 B)^(-1/2).
    agree = (
        np.ptp(np.log(ratio)) <= 4.0 / np.sqrt(2.0 * num)
        if np.all(ratio > 0)
        else False
    )
    if agree:
        power = alpha / np.mean(np.square(ratio))
        return f"{text}; where widths go as 1/sqrt(alpha), alpha = {power:.2g} would equal the two."
    return f"{text}; no one power would equal the two for all numbers: see nt.sandwich."


def _share(covers: np.ndarray, errors: np.ndarray, k: int) -> str:
    return f"{covers[k]:.0%} +- {100.0 * errors[k]:.1f}%"


def list_names(names: Sequence[str]) -> str:
    """Some names in words."""
    more = len(names) - MOST_LISTED
    first = ", ".join(names[:MOST_LISTED])
    return first if more <= 0 else f"{first} and {more} other{'s' if more > 1 else ''}"
