"""Derivatives of functions that have a rule for reverse mode alone, as solutions of differential equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core.differentiation import (
    forward_else_reverse,
    hessian_product,
    jacobian,
)
from numpyro_tempered.infer.mode import find_mode
from numpyro_tempered.select.alpha.minimise import minimise

TIMES = jnp.linspace(0.0, 2.0, 12)


def decay(theta):
    return theta[0] * jnp.exp(-theta[1] * TIMES)


reverse_only = jax.custom_vjp(decay)
reverse_only.defvjp(
    lambda theta: (decay(theta), theta),
    lambda theta, slope: jax.vjp(decay, theta)[1](slope),
)

THETA = jnp.array([1.5, 0.7])
Y = decay(jnp.array([2.0, 0.5])) + 0.05 * jnp.cos(7.0 * TIMES)


def losses_of(curve):
    return lambda theta: 50.0 * jnp.square(Y - curve(theta))


def test_either_mode_has_the_same_derivatives():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(reverse_only)(THETA)
    np.testing.assert_allclose(
        jacobian(reverse_only, THETA), jax.jacfwd(decay)(THETA), rtol=1e-6
    )
    vector = jnp.array([0.3, -1.1])
    one, two = (
        hessian_product(
            jax.grad(lambda theta, f=f: jnp.sum(losses_of(f)(theta))), THETA, vector
        )
        for f in (reverse_only, decay)
    )
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_modes_are_those_of_the_same_function_in_forward_mode():
    def potential(curve):
        return lambda theta: (
            jnp.sum(losses_of(curve)(theta)) + 0.5 * jnp.sum(jnp.square(theta))
        )

    one, two = (
        jax.jit(lambda start, f=f: find_mode(potential(f), start))(THETA)
        for f in (reverse_only, decay)
    )
    assert bool(one.is_mode)
    np.testing.assert_allclose(one.loc, two.loc, rtol=1e-5)
    np.testing.assert_allclose(one.scale, two.scale, rtol=1e-5)


@pytest.mark.full
def test_minimisers_are_those_of_the_same_function_in_forward_mode():
    one, two = (
        jax.jit(lambda start, f=f: minimise(losses_of(f), start))(THETA)
        for f in (reverse_only, decay)
    )
    assert bool(one.converged)
    np.testing.assert_allclose(one.point, two.point, rtol=1e-5)
    np.testing.assert_allclose(one.hessian, two.hessian, rtol=1e-4)


def test_other_errors_are_raised():
    def fails():
        raise TypeError("unsupported operand")

    with pytest.raises(TypeError, match="unsupported operand"):
        forward_else_reverse(fails, lambda: 1.0)
