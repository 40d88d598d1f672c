"""The rows of the data of a fit, and where their sandwich says nothing."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import Array, ArrayLike, trace_once
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.rows import find_data, log_lik_of_each
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.select.alpha.dependence import Block, num_units, read_dependence
from numpyro_tempered.select.alpha.independence import Rows
from numpyro_tempered.select.alpha.powers import MOST_SCORES
from numpyro_tempered.select.alpha.sandwich import Sandwich

# In standard deviations of the posterior: further away it is no Gaussian, or the fit not at its optimum.
MAX_DISTANCE = 1.0
_ESTIMATED = ", which are estimated too, and have no posterior: give them priors."
_NEEDS = {
    "params": _ESTIMATED,
    "states": _ESTIMATED,
    "no scales": ", and the sandwich does not know whether such weights count copies or are those of a survey: "
    "pass rows without weights.",
}
_SMOOTH = {
    "smooth": ", where no derivative sees the curvature: take nt.alpha.check_coverage, which resamples the rows, "
    "or a StudentT."
}


class FittedRows(NamedTuple):
    """The rows of a fit.

    Attributes:
        alpha: Power on the likelihood.
        losses: Tempered negative log-likelihood of each row, from flat unconstrained latents ``(d,)`` to
            ``(n,)``.
        penalty: Minus the log-density of the prior there.
        rows: The data.
    """

    alpha: float
    losses: Callable[[Array], Array]
    penalty: Callable[[Array], Array]
    rows: Rows


def read_rows(
    target: Target, plate: str | None, groups: ArrayLike | None, block: Block
) -> FittedRows:
    """The rows of a fit, with their dependence.

    Raises:
        ValueError: If it has none whose scores could be summed.
    """
    trace = target.trace
    require(trace, _NEEDS)
    alpha = likelihood.common_alpha(trace)
    if not isinstance(alpha, float):
        raise ValueError(
            "the sandwich is that of one power for all rows, and the fit has powers by site or datum."
        )
    if alpha == 0.0:
        raise ValueError(
            "at alpha = 0 the fit is one to the prior, which no sample of data moves."
        )
    require(likelihood.likelihood_sites(trace), _SMOOTH)
    places = find_data(trace, plate)
    dependence = read_dependence(groups, block, places)

    def losses(theta: Array) -> Array:
        trace = target.trace_at(target.constrain(theta))
        return -alpha * log_lik_of_each(trace, places)

    start = target.flatten(target.values)
    data = target.args, target.kwargs
    rows = Rows(trace, target.observed, data, places, dependence)
    return FittedRows(
        alpha,
        trace_once(losses, start),
        trace_once(target.prior_potential, start),
        rows,
    )


def check_units(rows: FittedRows, num_latents: int, lags: int) -> int:
    """The number of independent rows, groups or blocks.

    Raises:
        ValueError: If they are too few, or the scores too many.
    """
    dependence = rows.rows.dependence
    units = num_units(dependence, lags)
    if units < num_latents + 2:
        what = "rows" if dependence.labels is None and lags == 0 else "groups"
        what = f"blocks of {lags + 1} rows" if lags else what
        raise ValueError(
            f"{units} {what} do not tell how {num_latents} latent dimensions vary over samples: their scores "
            f"span fewer, and the sandwich would be too small. At least {num_latents + 2}, d + 2, are needed; "
            "latents of which there are more with more data are to be integrated out."
        )
    if num_latents * dependence.num_data > MOST_SCORES:
        raise ValueError(
            f"{num_latents} latents and {dependence.num_data} rows have too many scores for one matrix: take a "
            "random part of the rows; the sandwich falls as one over their number."
        )
    return units


def check_estimate(estimate: Sandwich) -> None:
    """Refuse a posterior without a mode, or whose curvature is lost to rounding.

    Raises:
        ValueError: With what to do.
    """
    minimum, dtype = estimate.minimum, estimate.minimum.point.dtype
    # Half of the digits are left.
    limit = float(np.finfo(dtype).eps) ** -0.5
    if not (minimum.converged and np.all(np.isfinite(minimum.hessian))):
        raise ValueError(
            "the tempered posterior has no mode that Newton's method finds from the centre of the fit (last "
            f"step: {minimum.step:.2g} standard deviations), as in a hierarchy whose scale may fall to 0, or at "
            "a kink of a Laplace prior: there is no estimate whose sampling distribution a Gaussian could be. "
            "Take nt.alpha.check_coverage, which resamples the rows."
        )
    if not minimum.condition <= limit:
        raise ValueError(
            f"the Hessian at the mode has condition number {minimum.condition:.2g} where {dtype} allows "
            f"{limit:.2g}: enable jax_enable_x64, scale or leave out collinear features."
        )


def check_centre(offset: np.ndarray, sd: np.ndarray) -> None:
    """Refuse a fit whose centre is not where its mode is.

    Args:
        offset: From one to the other, ``(d,)``.
        sd: Of the posterior by its curvature, ``(d,)``.

    Raises:
        ValueError: With the distance.
    """
    distance = np.abs(offset) / sd
    if not np.max(distance) <= MAX_DISTANCE:
        raise ValueError(
            f"the centre of the fit is {np.max(distance):.2g} standard deviations from the mode of its "
            "posterior, and the sandwich at the mode would not be that of the fit: fit again until it has "
            "converged, or take nt.alpha.check_coverage, which needs no Gaussian posterior."
        )
