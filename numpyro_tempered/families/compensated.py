"""Sums that keep their rounding error."""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_tempered._typing import Array


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
        return CompensatedSum(jnp.where(condition, value, self.value), jnp.where(condition, 0.0, self.error))
