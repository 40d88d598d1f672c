"""Precision: products of full width, double precision for a block, sums that keep their rounding error."""

from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array

# Accelerators multiply float32 in fewer bits unless told otherwise.
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def doubles(values: object) -> np.ndarray:
    """Numbers as an array of the host in double precision, whatever that of JAX is."""
    return np.asarray(values, np.float64)


def double_precision() -> AbstractContextManager[None]:
    """Arrays of 64 bits within, in this thread alone; under old and new jax.

    An objective of 10^6 terms is off by a nat in float32, from the rounding of its coefficients alone.
    """
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    return experimental.enable_x64(True)  # type: ignore[attr-defined]


class CompensatedSum(NamedTuple):
    """A running sum with its rounding error, accurate to float32 after 10^7 terms."""

    value: Array
    error: Array

    @classmethod
    def start(cls, value: Array) -> "CompensatedSum":
        """A sum that holds ``value`` so far."""
        return cls(value, jnp.zeros_like(value))

    def add(self, term: Array) -> "CompensatedSum":
        """The sum with one more term: Knuth's two-sum, then the error folded in by the fast one."""
        total = self.value + term
        virtual = total - self.value
        error = self.error + ((self.value - (total - virtual)) + (term - virtual))
        value = total + error
        return CompensatedSum(value, error - (value - total))

    def restart_where(self, condition: Array, value: Array) -> "CompensatedSum":
        """The sum, set to ``value`` where the condition holds."""
        return CompensatedSum(
            jnp.where(condition, value, self.value),
            jnp.where(condition, 0.0, self.error),
        )
