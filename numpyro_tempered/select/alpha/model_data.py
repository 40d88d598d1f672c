"""Models and methods of posteriors at many powers of the likelihood."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core import ArrayLike, Guide, Model, check_numbers, doubles
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.report.arviz import Dims

# From model to guide, MCMC kernel or OnlineVI.
Method: TypeAlias = Callable[[Model], Any]
_NEEDS = {
    "data": "",
    "support": "",
    "latents": ", so there is no posterior to follow.",
    "params": ", which would differ by alpha: give them a prior.",
    "plates": ", and each alpha needs the log-likelihood of all data: leave subsample_size out.",
    "proper": ", and alpha = 0 has no posterior: change it.",
    "global": ", but the likelihood here is conditional on all latents: pass the model without local_plates.",
    "chain and draw": "",
    "alpha": "",
}


class CountsRuns:
    """A model that counts its runs: a guide or kernel that is built on another is noticed."""

    def __init__(self, fn: Model) -> None:
        self.fn, self.runs = fn, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        self.runs += 1
        return self.fn(*args, **kwargs)


def check_powers(data: Target, dims: Dims | None = None) -> None:
    """Raise for a model whose posterior does not exist at every power."""
    require(data.trace, _NEEDS)
    if unknown := sorted(set(dims or {}) - {*data.latents, *data.observed}):
        raise ValueError(
            f"dims names {unknown}, which are not among the sites {list(data.latents)}."
        )


def build_method(
    method: Method, model: Model, *, online: bool = False
) -> Guide | MCMCKernel:
    """The guide or kernel that a method makes of a model, or the :class:`OnlineVI` if ``online``.

    Raises:
        TypeError: If ``method`` is built already, is not callable, fails, or returns none of these.
    """
    expected = "guide, kernel or OnlineVI" if online else "guide or kernel"
    advice = f"Pass a class, or a callable from model to {expected} such as `lambda model: NUTS(model)`."
    if isinstance(method, AutoGuide | MCMCKernel | OnlineVI):
        raise TypeError(
            f"this {type(method).__name__} is built already, for one alpha. {advice}"
        )
    if not callable(method):
        raise TypeError(
            f"method must be a callable from model to {expected}, got {method!r}. {advice}"
        )
    try:
        algorithm = method(model)
    except Exception as error:
        raise TypeError(f"method failed on the model. {advice}") from error
    if not callable(algorithm) and not isinstance(
        algorithm, (MCMCKernel, OnlineVI) if online else MCMCKernel
    ):
        raise TypeError(
            f"method returned {type(algorithm).__name__}, not a {expected}. {advice}"
        )
    return algorithm


def check_alphas(
    alphas: ArrayLike | Sequence[float], least: int, interval: str
) -> np.ndarray:
    """Increasing powers in an interval, as floats ``(A,)``.

    Raises:
        ValueError: If there are less than ``least``, one is outside of the interval, or they do not increase.
    """
    grid = doubles(check_numbers(alphas, "alphas", interval))
    if grid.ndim != 1 or len(grid) < least:
        raise ValueError(
            f"alphas must be a list of powers, {least} or more, got {alphas!r}."
        )
    if np.any(np.diff(grid) <= 0):
        raise ValueError(f"alphas must increase from each to the next, got {grid}.")
    return grid
