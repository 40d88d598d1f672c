"""Warnings where the user reads them: at the line of the call."""

import sys
import warnings
from types import FrameType

# What stands between a user's line and the place that warns.
_BETWEEN = {"numpyro_tempered", "numpyro", "jax", "sklearn", "contextlib", "functools"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of code outside of this package and of the libraries that call it.

    Args:
        message: What is wrong, and what to do.
        category: The class of the warning.
    """
    level, frame = 1, sys._getframe()
    at: FrameType | None = frame
    while at is not None and str(at.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        level, at = level + 1, at.f_back
    warnings.warn(message, category, stacklevel=level)
