"""The error bars of a fit."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import add_repr
from numpyro_tempered.report.arviz import ArviZData, as_attr, assemble, dataset
from numpyro_tempered.select.check.bars import ErrorBars
from numpyro_tempered.select.check.divergence import Divergences
from numpyro_tempered.select.check.missed import Missed
from numpyro_tempered.select.check.reference import Reference

_HEAVIER = """The posterior has heavier tails than a Gaussian: nt.guides.AutoMultivariateStudentT has such \
tails, the heavier the smaller its df."""
_NO_FOURTH = """There is no bound on standard deviations or W_2: up to 4 degrees of freedom a Student's t has no \
fourth moment. A fit with df above 4 has them."""


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
    bars: ErrorBars,
    covariances: Mapping[str, np.ndarray],
    names: Sequence[str],
    attrs: Mapping[str, object],
) -> ArviZData:
    """The groups ``check`` and ``check_covariance``, with the names of the numbers as coordinates."""
    plain = {key: as_attr(value) for key, value in attrs.items()}
    coords = {"number": names, "other_number": names}
    of_numbers = {name: ["number"] for name in bars._fields}
    groups = {"check": dataset(bars._asdict(), (), coords, of_numbers, plain)}
    of_pairs = {name: ["number", "other_number"] for name in covariances}
    groups["check_covariance"] = dataset(covariances, (), coords, of_pairs, plain)
    return assemble(groups, plain)


def advise(
    status: str,
    of_fit: Reference,
    base: Reference,
    bars: ErrorBars,
    names: Sequence[str],
    *,
    is_alone: bool,
) -> str:
    """What a check says, in words; ``is_alone`` where nothing but the fit was drawn from."""
    k = base.divergences.pareto_k
    if status == "unreliable":
        others = "" if is_alone else ", nor did other distributions that were tried"
        return (
            f"Draws of the fit do not cover its posterior (Pareto k {of_fit.divergences.pareto_k:.2f}){others}: "
            "draws say neither how far off the fit is nor what is right. Fit full covariance if it has none, or "
            "several Gaussians (fit_gaussian with num_components), write hierarchies non-centred "
            "(numpyro.infer.reparam.LocScaleReparam), or run NUTS."
        )
    source = {
        "fit": "draws of the fit",
        "reference": "draws of the reference",
        "gaussian": "draws of a Gaussian, which is nearer to the posterior than the fit,",
        "student_t": "draws of a Student's t, which is nearer to the posterior than the fit,",
    }[base.name]
    estimate = _estimate(bars, names)
    if status == "estimated":
        return (
            f"No bound that says anything: the weights of {source} have no second moment, or a large one, by "
            f"their tail (Pareto k {k:.2f}) or by the curvature of the posterior. {estimate} A richer guide may "
            "have a bound, or be the reference= of this one."
        )
    worst = np.where(bars.sd > 0, bars.mean_bound, math.nan) / np.where(
        bars.sd > 0, bars.sd, 1.0
    )
    at = int(np.argmax(np.nan_to_num(worst, nan=-1.0)))
    bound = f"no mean is off by more than {worst[at]:.2g} sd ({names[at]})"
    if np.isnan(worst[at]):
        bound = "no number has a bound"
    # A posterior that a Gaussian does not cover otherwise, such as a funnel, a Student's t does not cover either.
    if base.name == "student_t" and not (of_fit.is_heavy or base.is_mixture):
        estimate += f" {_HEAVIER}"
    law = base.draws.law
    if law is not None and law.df is not None and np.any(law.df <= 4.0):
        estimate += f" {_NO_FOURTH}"
    return f"By {source} Pareto k {k:.2f}: {bound}. {estimate}"


def advise_of_modes(missed: Missed, names: Sequence[str]) -> str:
    """What a check says of a fit that does not reach some modes."""
    at = ", ".join(
        f"{name} = {value:.3g}"
        for name, value in zip(names[:3], missed.values, strict=False)
    )
    more = ", ..." if len(names) > 3 else ""
    modes = "a mode" if missed.num_modes == 1 else f"{missed.num_modes} modes"
    return (
        f"The posterior has {modes} that no draw comes near, with {missed.share:.0%} of the mass by estimate, "
        f"the heaviest at {at}{more}: weights of draws say nothing of it. Take fit_gaussian with num_components, "
        "NUTS from several starts, or, where modes are permutations of each other, a model that orders them."
    )


def _estimate(bars: ErrorBars, names: Sequence[str]) -> str:
    """The largest errors by the corrected values, and what has none."""
    with np.errstate(invalid="ignore", divide="ignore"):  # of constants
        off, ratio = (
            (bars.corrected_mean - bars.mean) / bars.sd,
            bars.sd / bars.corrected_sd,
        )
        se = bars.corrected_mean_se / bars.sd
        sizes = np.abs(off), np.abs(np.log(ratio))
    mean_at, sd_at = (
        int(np.argmax(np.where(np.isfinite(size), size, -1.0))) for size in sizes
    )
    text = (
        "No number has a mean under the fit"
        if np.isnan(off[mean_at])
        else (
            f"By estimate no mean is further off than that of {names[mean_at]}, by {abs(off[mean_at]):.2g} +- "
            f"{se[mean_at]:.1g} sd"
        )
    )
    if np.isfinite(ratio[sd_at]):
        text += f", and no sd than that of {names[sd_at]}, {ratio[sd_at]:.2g} times the posterior's"
    if heavy := int(np.isnan(bars.corrected_sd).sum()):
        text += f"; {heavy} of {len(names)} have too heavy a tail for an estimate of their sd"
    if infinite := int(np.isnan(bars.mean).sum()):
        text += (
            f". {infinite} of {len(names)} have no mean that can be told under the fit, as the exponential of a "
            "Student's t has none: report their medians and quantiles, or corrected values"
        )
    return f"{text}."
