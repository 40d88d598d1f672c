"""Type aliases used across the package."""

import os
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
# Arrays by name: parameters, or the values of sites.
Params: TypeAlias = dict[str, Array]
Shape: TypeAlias = tuple[int, ...]
# Columns of a table by name.
Columns: TypeAlias = dict[str, np.ndarray]
FilePath: TypeAlias = str | os.PathLike[str]
Model: TypeAlias = Callable[..., Any]
Guide: TypeAlias = Callable[..., Any]
