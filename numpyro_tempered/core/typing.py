"""Type aliases used across the package."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
Scalar: TypeAlias = Array | float
# On the host or on a device.
Numbers: TypeAlias = Array | np.ndarray
# Any nesting of tuples, lists and dictionaries of arrays.
PyTree: TypeAlias = Any
Params: TypeAlias = dict[str, Array]
Model: TypeAlias = Callable[..., Any]
Guide: TypeAlias = Callable[..., Any]
