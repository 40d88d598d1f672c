"""Derivatives of losses and predictors by automatic differentiation."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, PyTree, forward_else_reverse
from numpyro_tempered.core.jax_private import dce_jaxpr

# An array, or a pytree of them.
A = TypeVar("A")
# Losses (S, n) of predictors (n,) or (n, K), and their weights.
LossesOfPredictors: TypeAlias = Callable[[Array], tuple[Array, Array]]


def slopes(losses: LossesOfPredictors, u: Array) -> tuple[Array, Array, Array]:
    """Losses ``(S, n)`` of predictors u, ``(n,)`` or ``(n, K)``, their slopes ``(S, *u.shape)`` and weights."""
    values, pull, scale = jax.vjp(losses, u, has_aux=True)
    # A site's loss of datum i depends only on the predictor of datum i, so one vector-Jacobian
    # product for each site gives all its slopes.
    sites = jnp.eye(values.shape[0], dtype=values.dtype)
    (first,) = jax.vmap(pull)(
        jnp.broadcast_to(sites[:, :, None], (values.shape[0], *values.shape))
    )
    return values, first, jnp.broadcast_to(scale, values.shape)


def depends_on(fn: Callable[[Array], PyTree], argument: Array) -> bool:
    """Whether ``fn`` uses its argument at all, read from the traced program."""
    return any(jax.tree.leaves(which_depend(fn, argument)))


def which_depend(fn: Callable[[A], PyTree], argument: A) -> PyTree:
    """For each output of ``fn`` whether it uses the argument, a pytree, read from the traced program."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(argument)
    count = len(program.jaxpr.outvars)
    flags = [
        any(dce_jaxpr(program.jaxpr, [i == j for j in range(count)])[1])
        for i in range(count)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), flags)


def with_jacobian(
    predict: Callable[[Array], Array], theta: Array
) -> tuple[Array, Array]:
    """Predictors u, and their derivatives ``(*u.shape, d)``, without intermediate matrices."""
    (d,) = theta.shape
    u, pull = jax.vjp(predict, theta)

    def by_columns() -> Array:
        units = jnp.eye(d, dtype=theta.dtype)
        return jax.vmap(
            lambda unit: jax.jvp(predict, (theta,), (unit,))[1], out_axes=-1
        )(units)

    def by_rows() -> Array:
        (rows,) = jax.vmap(pull)(
            jnp.reshape(jnp.eye(u.size, dtype=u.dtype), (-1, *u.shape))
        )
        return jnp.reshape(rows, (*u.shape, d))

    return u, (forward_else_reverse(by_columns, by_rows) if u.size > d else by_rows())


def hessian_products(losses: LossesOfPredictors, u: Array) -> Callable[[Array], Array]:
    """The product of a vector with the second derivatives of the weighted losses."""

    def total(v: Array) -> Array:
        values, weights = losses(v)
        return jnp.sum(weights * values)

    return lambda tangent: jax.jvp(jax.grad(total), (u,), (tangent,))[1]


def hessians(losses: LossesOfPredictors, u: Array) -> Array:
    """Second derivatives of the weighted losses, datum by datum: ``(n,)``, or ``(n, K, K)`` for u in R^K."""
    product = hessian_products(losses, u)
    # The loss of datum i depends only on the predictors of datum i: K products give all blocks.
    if u.ndim == 1:
        return product(jnp.ones_like(u))
    units = jnp.eye(u.shape[-1], dtype=u.dtype)
    columns = jax.vmap(lambda unit: product(jnp.broadcast_to(unit[None, :], u.shape)))(
        units
    )
    return jnp.moveaxis(columns, 0, -1)
