"""Alternating updates of a mixture as steps of :mod:`numpyro_tempered.core.ascent`."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core import ascent
from numpyro_tempered.core.ascent import Iterate, Step
from numpyro_tempered.core.typing import Array

T = TypeVar("T")


class Visit(NamedTuple, Generic[T]):
    """The state of an algorithm whose passes over the data evaluate the objective where they start.

    Attributes:
        factors: Where the objective was taken.
        update: Where the next pass starts.
    """

    factors: T
    update: T


def begin(factors: T, max_iter: int) -> ascent.Ascent[Visit[T]]:
    """The ascent before the first pass, of factors with leading axis R."""
    return ascent.begin(Visit(factors, factors), max_iter)


def step_of(visit: Callable[[T], tuple[Array, T]], rounding: Array) -> Step[Visit[T]]:
    """The step of R restarts, from the pass of one: factors to their objective and their update."""

    def step(point: Visit[T]) -> Iterate[Visit[T]]:
        objective, update = jax.vmap(visit)(point.update)
        return Iterate(Visit(point.update, update), objective, rounding)

    return step


def rounding_error(base: Array, total: Array, alpha: Array | float = 1.0) -> Array:
    """The rounding of an objective: a sum of n terms whose coefficients are rounded, and log-gammas of n.

    Args:
        base: The sum of log h.
        total: The sum of the weights n.
        alpha: Power on the likelihood; below 1 the log-gammas of n are left.
    """
    size = jnp.abs(base) + total * (1.0 + jnp.log1p(total))
    return 32.0 * jnp.finfo(total.dtype).eps * jnp.maximum(1.0, alpha) * size
