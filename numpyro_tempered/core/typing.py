"""Type aliases used across the package."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
Model: TypeAlias = Callable[..., Any]
Guide: TypeAlias = Callable[..., Any]
