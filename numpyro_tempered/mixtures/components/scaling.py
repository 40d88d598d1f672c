"""Priors of Gaussian components in the data's units."""

import numpy as np

from numpyro_tempered.core import ArrayLike, check_known, check_number, doubles
from numpyro_tempered.mixtures.components.base import floating_rows
from numpyro_tempered.mixtures.prepare import weight_on_host


def scaled_to(
    x: ArrayLike, *, fraction: float = 0.1, sample_weight: ArrayLike | None = None
) -> dict[str, np.ndarray | float]:
    r"""Keywords of a weakly informative prior for Gaussian components, in the units of the data.

    The prior expects components whose variances are ``fraction`` of the data's, column by column, and whose means
    scatter as the data do: with m and v the data's means and variances, ``loc`` = m, ``variance`` =
    ``fraction`` × v and ``mean_precision`` = ``fraction``, so that a mean has variance v when the component has
    the expected one. It is worth ``fraction`` of a datum for a component's mean, and what the family's
    ``concentration`` or ``df`` say for its variance: 2 data for :func:`diagonal_gaussian`,
    d + 2 for :func:`gaussian`.

    The number of components is compared under one prior: take it from all the data once, and give the same
    component to every K. A prior that follows K, or a part of the data, changes the objective's constants.

    Args:
        x: Data ``(n, d)``; missing entries (NaN) are left out.
        fraction: The share of the variance that is expected within components, above 0 and at most 1.
        sample_weight: How often each row counts, ``(n,)``, not negative.

    Returns:
        ``loc`` ``(d,)``, ``variance`` ``(d,)`` and ``mean_precision``, for :func:`diagonal_gaussian`,
        :func:`spherical_gaussian`, :func:`gaussian` and :func:`tied_gaussian`.

    Raises:
        ValueError: If a column has no two different values in rows that count, ``fraction`` is out of its range,
            or the weights do not fit.
        TypeError: If the data are not numbers, or are traced.

    References:
        Richardson, Green, *On Bayesian analysis of mixtures with an unknown number of components*, JRSS B 1997
        (priors from the range of the data).

    Example:
        >>> import numpyro_tempered as nt
        >>> x = [[0.0, 10.0], [2.0, 30.0]]
        >>> component = nt.mixtures.components.diagonal_gaussian(2, **nt.mixtures.components.scaled_to(x))
        >>> component.prior.loc.tolist(), [round(rate, 2) for rate in component.prior.rate.tolist()]
        ([1.0, 20.0], [0.1, 10.0])
    """
    check_known("scaled_to reads the data on the host", x)
    check_number(fraction, "fraction", "(0, 1]")
    rows = doubles(floating_rows(x, "scaled_to", None))
    loc, variance = column_moments(rows, weight_on_host(sample_weight, rows))
    constant = variance == 0.0
    if constant.any():
        raise ValueError(
            f"column {int(np.argmax(constant))} of the data has no two different values, so that it has no "
            "scale. Leave the column out, or give the prior by hand."
        )
    return {"loc": loc, "mean_precision": fraction, "variance": fraction * variance}


def column_moments(
    rows: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted means and variances of the observed entries of each column; 0 where no two values differ."""
    share = np.where(np.isnan(rows), 0.0, weight[:, None])
    total = share.sum(axis=0)
    share = share / np.where(total > 0, total, 1.0)
    rows = np.nan_to_num(rows)
    loc = (share * rows).sum(axis=0)
    # A sum of many terms is off by as many roundings; that of the deviations is not.
    loc = loc + (share * (rows - loc)).sum(axis=0)
    variance = (share * np.square(rows - loc)).sum(axis=0)
    # A constant's mean is rounded, and leaves a variance of that size.
    return loc, np.where(
        variance <= np.square(8 * np.finfo(np.float64).eps * np.abs(loc)), 0.0, variance
    )
