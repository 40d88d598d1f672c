"""Powers of the likelihood: their validation, and their place on a message."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_tempered.handlers.effects import Message


def check_alpha(alpha: Any) -> Any:
    """A concrete ``alpha`` as a float, a traced one as it is, a mapping as a dict of these.

    Raises:
        ValueError: If it is not a real scalar, negative or not finite.
    """
    if isinstance(alpha, Mapping):
        if not alpha or not all(isinstance(name, str) for name in alpha):
            raise ValueError(f"alpha as a mapping must go from site names to powers, got {alpha!r}.")
        return {name: _check_power(value, f"alpha[{name!r}]") for name, value in alpha.items()}
    return _check_power(alpha, "alpha")


def _check_power(alpha: Any, name: str) -> Any:
    if isinstance(alpha, jax.core.Tracer):
        if alpha.shape != ():
            raise ValueError(f"{name} must be a scalar, got shape {alpha.shape}.")
        return alpha
    try:
        if np.shape(alpha) != () or np.asarray(alpha).dtype.kind not in "biuf":
            raise TypeError
        value = float(alpha)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be one real number, got {alpha!r}.") from error
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")
    return value


def is_power(alpha: Any, value: float) -> bool:
    """Whether a power, or each of a mapping, is this concrete value."""
    if isinstance(alpha, dict):
        return all(is_power(part, value) for part in alpha.values())
    return isinstance(alpha, float) and alpha == value


def scale(msg: Message, alpha: Any) -> None:
    """Multiply the scale of a site, in the two places where NumPyro keeps it."""
    msg["scale"] = alpha if msg.get("scale") is None else alpha * msg["scale"]
    plates = msg.setdefault("plate_to_scale", {})
    plates[None] = alpha if plates.get(None) is None else alpha * plates[None]
