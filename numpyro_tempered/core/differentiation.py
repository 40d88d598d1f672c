"""Derivatives of functions of which some have a rule for one mode of differentiation only."""

from collections.abc import Callable
from typing import TypeVar

import jax

from numpyro_tempered.core.typing import Array

Value = TypeVar("Value")


def forward_else_reverse(
    forward: Callable[[], Value], reverse: Callable[[], Value]
) -> Value:
    """The value of ``forward``, or of ``reverse`` where a function has no rule for forward mode.

    Such functions are those of ``jax.custom_vjp``: the solutions of differential equations by
    ``jax.experimental.ode.odeint``, or implicit minimisers.
    """
    try:
        return forward()
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        return reverse()


def hessian_product(
    gradient: Callable[[Array], Array], point: Array, vector: Array
) -> Array:
    """The product of a vector with the derivative of a gradient, which is symmetric, so either mode gives it."""
    return forward_else_reverse(
        lambda: jax.jvp(gradient, (point,), (vector,))[1],
        lambda: jax.vjp(gradient, point)[1](vector)[0],
    )


def jacobian(function: Callable[[Array], Array], point: Array) -> Array:
    """The derivatives of a function of few arguments, ``(*out, d)``."""
    return forward_else_reverse(
        lambda: jax.jacfwd(function)(point), lambda: jax.jacrev(function)(point)
    )
