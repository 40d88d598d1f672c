"""The error bars of a fit."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core.display import add_repr
from numpyro_tempered.report.arviz import ArviZData, as_attr, assemble, dataset
from numpyro_tempered.select.check.bars import ErrorBars
from numpyro_tempered.select.check.divergence import Divergences
from numpyro_tempered.select.check.reference import Reference


@add_repr
class FitCheck(NamedTuple):
    """How far a fit may be from its tempered posterior, by :func:`check_fit`.

    Attributes:
        status: ``"bounded"``: means and standard deviations have bounds on their errors, and corrected values.
            ``"estimated"``: they have corrected values alone. ``"unreliable"``: they have neither.
        advice: What that means for this fit, and what to do.
        divergences: Of the posterior from the fit: ELBO, CUBO_2, D_2 and the Pareto k of the weights.
        w1_bound: Bound on the Wasserstein distance W_1 of fit and posterior, in unconstrained coordinates; NaN
            where there is none.
        w2_bound: Bound on W_2, likewise.
        reference: What the draws are of: ``"fit"``, or what covers the posterior where the fit does not.
        reference_divergences: Of the posterior from that.
        alpha: Power on the likelihood.
        num_draws: Draws of each distribution.
        data: ArviZ data with the group ``check``, whose rows :func:`table` shows.
    """

    status: str
    advice: str
    divergences: Divergences
    w1_bound: float
    w2_bound: float
    reference: str
    reference_divergences: Divergences
    alpha: float | dict[str, float]
    num_draws: int
    data: ArviZData


def to_arviz(
    bars: ErrorBars, covariances: Mapping[str, np.ndarray], names: Sequence[str], attrs: Mapping[str, object]
) -> ArviZData:
    """The groups ``check`` and ``check_covariance``, with the names of the numbers as coordinates."""
    plain = {key: as_attr(value) for key, value in attrs.items()}
    coords = {"number": names, "other_number": names}
    of_numbers = {name: ["number"] for name in bars._fields}
    groups = {"check": dataset(bars._asdict(), (), coords, of_numbers, plain)}
    of_pairs = {name: ["number", "other_number"] for name in covariances}
    groups["check_covariance"] = dataset(covariances, (), coords, of_pairs, plain)
    return assemble(groups, plain)


def advise(status: str, of_fit: Divergences, base: Reference, bars: ErrorBars, names: Sequence[str]) -> str:
    """What a check says, in words."""
    k = base.divergences.pareto_k
    if status == "unreliable":
        return (
            f"Draws of the fit do not cover its posterior (Pareto k {of_fit.pareto_k:.2f}), nor did other "
            "distributions that were tried: draws say neither how far off the fit is nor what is right. Fit "
            "full covariance if it has none, write hierarchies non-centred "
            "(numpyro.infer.reparam.LocScaleReparam), or run NUTS."
        )
    with np.errstate(invalid="ignore", divide="ignore"):  # of constants
        off, ratio = (bars.corrected_mean - bars.mean) / bars.sd, bars.sd / bars.corrected_sd
        se, worst = bars.corrected_mean_se / bars.sd, bars.mean_bound / bars.sd
    mean_at, sd_at = int(np.nanargmax(np.abs(off))), int(np.nanargmax(np.abs(np.log(ratio))))
    estimate = (
        f"By estimate no mean is further off than that of {names[mean_at]}, by {abs(off[mean_at]):.2g} +- "
        f"{se[mean_at]:.1g} sd, and no sd than that of {names[sd_at]}, {ratio[sd_at]:.2g} times the posterior's."
    )
    source = "draws of the fit"
    if base.name != "fit":
        source = f"draws of {base.name}, which is nearer to the posterior than the fit,"
    if status == "estimated":
        return (
            f"No bound exists: the weights of {source} have no second moment, by their tail (Pareto k {k:.2f}) "
            f"or by the curvature of the posterior. {estimate} A richer guide may have a bound, or be the "
            "reference= of this one."
        )
    if np.all(np.isnan(worst)):
        return f"By {source} Pareto k {k:.2f}. {estimate}"
    at = int(np.nanargmax(worst))
    return (
        f"By {source} Pareto k {k:.2f}: no mean is off by more than {worst[at]:.2g} sd ({names[at]}). {estimate}"
    )
