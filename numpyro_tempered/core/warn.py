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
    level = 1
    frame: FrameType | None = sys._getframe()
    while (
        frame is not None
        and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
