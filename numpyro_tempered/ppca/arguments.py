"""What fits of probabilistic PCA refuse, and what they warn of."""

import math
import warnings
from typing import Any

import numpy as np

from numpyro_tempered.ppca.base import Prior


def check_prior(prior: Prior, d: int) -> Prior:
    """The prior, if it is one for d columns.

    Raises:
        ValueError: If a part is not positive and finite, or the mean has another shape.
    """
    for name in Prior._fields[1:]:
        part = getattr(prior, name)
        if not (np.ndim(part) == 0 and math.isfinite(part) and part > 0.0):
            raise ValueError(f"prior.{name} must be a positive finite number, got {part}.")
    mean = np.asarray(prior.mean, np.float64)
    if mean.shape not in ((), (d,)) or not np.all(np.isfinite(mean)):
        raise ValueError(f"prior.mean must be finite, a number or of shape ({d},), got {prior.mean}.")
    return prior


def check_arguments(
    values: np.ndarray, num_factors: Any, alpha: Any, tol: Any, max_iter: Any, num_restarts: Any
) -> None:
    """Complain about data without entries, and about numbers out of range.

    Raises:
        ValueError: As it says.
        TypeError: If ``num_factors`` is not an integer.
    """
    if values.shape[0] == 0:
        raise ValueError("x has no row with an observed entry.")
    empty = np.flatnonzero(np.all(np.isnan(values), axis=0))
    if empty.size:
        raise ValueError(f"x has no observed entry in columns {empty.tolist()}: leave these columns out.")
    if isinstance(num_factors, bool) or not isinstance(num_factors, int | np.integer):
        raise TypeError(f"num_factors must be an integer, got {num_factors!r}.")
    if not 0 <= num_factors <= values.shape[1]:
        raise ValueError(f"num_factors must be from 0 to the {values.shape[1]} columns of x, got {num_factors}.")
    if not (np.ndim(alpha) == 0 and math.isfinite(alpha) and alpha > 0.0):
        raise ValueError(f"alpha must be a positive finite number, got {alpha}.")
    if not (math.isfinite(tol) and tol >= 0.0):
        raise ValueError(f"tol must be at least 0, got {tol}.")
    if max_iter < 1 or num_restarts < 1:
        raise ValueError(f"max_iter and num_restarts must be at least 1, got {max_iter} and {num_restarts}.")


def warn_of_scale(values: np.ndarray, about: Prior) -> None:
    """Warn of data that are far from where the prior, relative to their origin, expects them."""
    far = np.flatnonzero(np.abs(about.mean) > 5.0 * about.mean_scale)
    if far.size:
        warnings.warn(
            f"the means of columns {far.tolist()} lie more than 5 prior standard deviations from prior.mean: "
            "standardise the columns, or pass prior=nt.ppca.prior(scale, mean).",
            stacklevel=4,
        )
    deviation = math.sqrt(np.mean(np.nanvar(values, axis=0)))
    unit = math.sqrt(about.noise_rate / about.noise_shape)
    if values.shape[0] > 1 and not unit / 100.0 <= deviation <= 100.0 * unit:
        warnings.warn(
            f"the columns deviate by {deviation:.3g} from their means, the prior is made for {unit:.3g}: "
            "standardise the columns, or pass prior=nt.ppca.prior(scale, mean).",
            stacklevel=4,
        )
