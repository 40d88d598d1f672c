"""Batch Gaussian variational inference: natural gradients, Bures-Wasserstein steps, a stopping rule."""

from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    Method,
    Objective,
    gap_bound,
    objective,
    stationarity,
)
from numpyro_tempered.gaussian.descent.bures_wasserstein import (
    flow,
    forward_backward,
    wasserstein,
)
from numpyro_tempered.gaussian.descent.minimise import Result, Trace, minimise
from numpyro_tempered.gaussian.descent.minimise_mixture import minimise_mixture
from numpyro_tempered.gaussian.descent.natural_gradient import natural_gradient

__all__ = [
    "Derivatives",
    "Method",
    "Objective",
    "Result",
    "Trace",
    "flow",
    "forward_backward",
    "gap_bound",
    "minimise",
    "minimise_mixture",
    "natural_gradient",
    "objective",
    "stationarity",
    "wasserstein",
]
__dir__ = __all__.copy
