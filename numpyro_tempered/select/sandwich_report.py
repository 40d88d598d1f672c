"""What the sandwich says about the error bars of a fit."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpyro.distributions import biject_to

from numpyro_tempered.core import Columns, add_repr, number_names
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.report.arviz import (
    ArviZData,
    as_attr,
    assemble,
    dataset,
    versions,
)
from numpyro_tempered.select.alpha.coverage_report import list_names
from numpyro_tempered.select.alpha.sandwich import least_data

# The share of a number's information from which on the prior decides on it.
MOST_PRIOR = 0.5
# Of all tests together that a ratio is 1.
LEVEL = 0.05
# The standard deviation by the curvature, over that of the fit, above which the guide is too narrow.
NARROW_GUIDE = 1.2

# Columns by name, and the names of their rows.
Table: TypeAlias = tuple[Mapping[str, np.ndarray], Sequence[str]]


@add_repr
class SandwichErrors(NamedTuple):
    """Sampling standard deviations of a fit, by :func:`sandwich`.

    Attributes:
        advice: What they say of the fit, in words.
        alpha: Power on the likelihood; by site where sites or data differ.
        num_independent: How many independent rows, groups or blocks there are.
        ratios: The sandwich standard deviations over those of the fit, the smallest and the largest.
        covariance: The sandwich covariance on the flat unconstrained scale, ``(d, d)``, in the order of the group
            ``sandwich_unconstrained``.
        data: ArviZ data with the groups ``sandwich``, whose rows :func:`table` shows, and
            ``sandwich_unconstrained``.
    """

    advice: str
    alpha: float | Mapping[str, object]
    num_independent: int
    ratios: tuple[float, float]
    covariance: np.ndarray
    data: ArviZData


def columns_of(
    mean: np.ndarray,
    sd: np.ndarray,
    curvature_sd: np.ndarray,
    sandwich_sd: np.ndarray,
    share: np.ndarray,
) -> Columns:
    """The columns of a table; constants, such as the zeros of a triangular matrix, have no ratio."""
    return {
        "mean": mean,
        "sd": sd,
        "curvature_sd": curvature_sd,
        "sandwich_sd": sandwich_sd,
        "ratio": np.where(sd > 0, sandwich_sd / np.where(sd > 0, sd, 1.0), np.nan),
        "prior_share": share,
    }


def prior_share(
    slopes: np.ndarray, inverse: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """The part of the prior in the information about K functions with the gradients ``slopes``, ``(K, d)``.

    Args:
        slopes: The gradients.
        inverse: The inverse of the Hessian of the posterior, ``(d, d)``.
        prior: The Hessian of the prior.
    """
    shifts = slopes @ inverse
    variance = np.sum(shifts * slopes, axis=1)
    share = np.sum(shifts * (shifts @ prior), axis=1)
    return np.where(variance > 0, share / np.where(variance > 0, variance, 1.0), np.nan)


def coordinate_names(target: Target, names: Sequence[str]) -> list[str]:
    """Names of the unconstrained coordinates: those of the numbers of a site where there are as many."""
    coordinates: list[str] = []
    start = 0
    for name, site in target.coordinates.items():
        shape = np.shape(site["value"])
        size = math.prod(shape)
        inverse = tuple(biject_to(site["fn"].support).inverse_shape(shape))
        if inverse == shape:
            coordinates += names[start : start + size]
        else:
            coordinates += number_names(name, map(range, inverse))
        start += size
    return coordinates


def to_arviz(
    numbers: Table,
    coordinates: Table,
    alpha: float | Mapping[str, object],
    units: int,
    advice: str,
) -> ArviZData:
    """The two tables as groups."""
    attrs = {
        "alpha": as_attr(alpha),
        "advice": advice,
        "num_independent": units,
        **versions(),
    }
    groups = {
        name: dataset(
            columns, (), {dim: names}, {column: [dim] for column in columns}, attrs
        )
        for name, dim, (columns, names) in (
            ("sandwich", "number", numbers),
            ("sandwich_unconstrained", "coordinate", coordinates),
        )
    }
    return assemble(groups, attrs)


def describe_prior(names: Sequence[str]) -> str:
    """A sentence on numbers on which the prior decides."""
    return (
        f"the prior supplies most of what is known about {list_names(names)}: the sandwich leaves its bias "
        "out, and is no error bar there. Take the posterior's."
    )


def advise(
    names: Sequence[str],
    columns: Mapping[str, np.ndarray],
    units: int,
    num_latents: int,
    decided: Sequence[str],
) -> str:
    """What the sandwich says of a fit, in words; ``decided`` are the numbers on which the prior decides."""
    from scipy.stats import norm

    ratio, se = columns["ratio"], columns["ratio_se"]
    is_known = np.isfinite(ratio) & (ratio > 0) & ~np.isin(names, decided)
    if not np.any(is_known):
        return "The prior decides on all numbers: the sandwich says nothing about the error bars of this fit."
    order = np.argsort(np.where(is_known, ratio, np.inf))[: np.sum(is_known)]
    low, high = int(order[0]), int(order[-1])
    text = f"{ratio[low]:.2f} +- {se[low]:.2f} ({names[low]})"
    if low != high:
        text += f" to {ratio[high]:.2f} +- {se[high]:.2f} ({names[high]})"
    text = f"Over samples of the data the centre of the fit varies {text} times as much as its sd says"
    z = norm.ppf(1.0 - 0.5 * LEVEL / len(order))
    narrow = [int(k) for k in order[::-1] if ratio[k] - z * se[k] > 1.0]
    wide = [int(k) for k in order if ratio[k] + z * se[k] < 1.0]
    for some, word in ((narrow, "narrow"), (wide, "wide")):
        if some:
            text += f"; its intervals of {list_names([names[k] for k in some])} are too {word}"
    by_guide = [
        k
        for k in narrow
        if columns["curvature_sd"][k] > NARROW_GUIDE * columns["sd"][k]
    ]
    if by_guide:
        text += (
            f"; for {list_names([names[k] for k in by_guide])} that is the guide, narrower than the posterior: "
            "take nt.linear_response or a full covariance first"
        )
    if not narrow and not wide:
        text += "; none of it is more than sampling error"
    if units < least_data(num_latents):
        text += f"; only {units} units are independent, so this is rough, and too small"
    return f"{text}."
