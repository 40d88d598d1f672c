"""Checks of data and arguments of probabilistic PCA."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

from numpyro_tempered.core.checks import check_count, check_number, check_numbers
from numpyro_tempered.ppca.base import Prior


def check_prior(prior: Prior, d: int) -> Prior:
    """The prior, if it is one for d columns.

    Raises:
        ValueError: If a part is not positive and finite, or the mean has another shape.
    """
    for name in Prior._fields[1:]:
        check_number(getattr(prior, name), f"prior.{name}", "(0, inf)")
    check_numbers(prior.mean, "prior.mean")
    if np.shape(prior.mean) not in ((), (d,)):
        raise ValueError(
            f"prior.mean must be a number or have shape ({d},), got an array of shape {np.shape(prior.mean)}."
        )
    return prior


def check_table(values: np.ndarray, orders: Sequence[int]) -> None:
    """Complain about data without entries, and about numbers of factors out of range.

    Raises:
        ValueError: As it says.
    """
    n, d = values.shape
    if n == 0:
        raise ValueError("x has no row with an observed entry.")
    empty = np.flatnonzero(np.all(np.isnan(values), axis=0))
    if empty.size:
        raise ValueError(f"x has no observed entry in columns {empty.tolist()}: leave these columns out.")
    for k in orders:
        check_count(k, "num_factors", 0, d, hint=f"x has {d} columns.")


def warn_of_scale(values: np.ndarray, centred: Prior) -> None:
    """Warn of data far from where the prior, relative to their origin, expects them."""
    far = np.flatnonzero(np.abs(centred.mean) > 5.0 * centred.mean_scale)
    if far.size:
        warnings.warn(
            f"the means of columns {far.tolist()} lie more than 5 prior standard deviations from prior.mean: "
            "standardise the columns, or pass prior=nt.ppca.prior(scale, mean).",
            stacklevel=4,
        )
    deviation = math.sqrt(np.mean(np.nanvar(values, axis=0)))
    unit = math.sqrt(centred.noise_rate / centred.noise_shape)
    if values.shape[0] > 1 and not unit / 100.0 <= deviation <= 100.0 * unit:
        warnings.warn(
            f"the columns deviate by {deviation:.3g} from their means, the prior is made for {unit:.3g}: "
            "standardise the columns, or pass prior=nt.ppca.prior(scale, mean).",
            stacklevel=4,
        )
