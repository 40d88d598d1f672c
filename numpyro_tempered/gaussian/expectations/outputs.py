"""Losses of a predictor u in R^K: averages over nodes of a product rule, or over draws."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, check_count
from numpyro_tempered.gaussian.expectations import differentiate
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Loss,
    Moments,
    Options,
    require_key,
    root,
)
from numpyro_tempered.gaussian.expectations.integrals import of_integral

# The most nodes of a product rule; beyond, draws do as well.
MAX_PRODUCT = 10_000


class Nodes(NamedTuple):
    """Points z and weights that stand for N(0, I) in R^K.

    Attributes:
        at: ``(rng_key, n, dtype) -> (z, weights)`` for n data: ``(M, n, K)`` or ``(M, 1, K)``, and ``(M,)``.
        needs_key: Whether they are drawn.
    """

    at: Callable[[Array | None, int, jnp.dtype], tuple[Array, Array]]
    needs_key: bool


def product_rule(num_nodes: int, dimension: int, instead: str) -> Nodes:
    """Gauss-Hermite nodes in each of the dimensions.

    Raises:
        ValueError: If there are too many, naming what to do ``instead``.
    """
    if num_nodes < 2 or num_nodes**dimension > MAX_PRODUCT:
        raise ValueError(
            f"{num_nodes} nodes in each of {dimension} dimensions are {num_nodes**dimension}: num_nodes must be "
            f"at least 2, with no more than {MAX_PRODUCT} in all. Take fewer, or {instead}."
        )
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    z = np.stack(np.meshgrid(*[nodes] * dimension, indexing="ij"), axis=-1).reshape(
        -1, 1, dimension
    )
    product = np.stack(
        np.meshgrid(*[weights / weights.sum()] * dimension, indexing="ij"), axis=-1
    )
    total = product.reshape(-1, dimension).prod(axis=-1)
    return Nodes(
        lambda rng_key, n, dtype: (jnp.asarray(z, dtype), jnp.asarray(total, dtype)),
        needs_key=False,
    )


def draws(num_draws: int, dimension: int, expectation: str) -> Nodes:
    """Independent draws for each datum.

    Raises:
        ValueError: If ``num_draws`` < 1.
    """
    check_count(num_draws, "num_draws")

    def at(rng_key: Array | None, n: int, dtype: jnp.dtype) -> tuple[Array, Array]:
        z = jax.random.normal(
            require_key(expectation, rng_key), (num_draws, n, dimension), dtype
        )
        return z, jnp.full((num_draws,), 1.0 / num_draws, dtype)

    return Nodes(at, needs_key=True)


def average(
    nodes: Nodes,
    losses: differentiate.LossesOfPredictors,
    mean: Array,
    covariance: Array,
    options: Options,
) -> Moments:
    """The moments of losses of predictors mean + R z over the nodes z, R a root of the covariance.

    ``losses`` maps predictors ``(n, K)`` to losses ``(S, n)`` and their weights, which gradients carry. The
    Hessian is the average of those at the nodes: positive semidefinite for a convex loss, and without a
    division by a covariance that may be singular.
    """
    z, weights = nodes.at(options.rng_key, mean.shape[0], mean.dtype)
    factor = root(covariance)
    if options.curvature == "hessian" and not differentiate.depends_on(
        differentiate.hessian_products(losses, mean), mean
    ):
        raise ValueError(
            'the loss is piecewise linear in its predictors, without curvature: use ngvi(curvature="fisher").'
        )

    def at(node: Array) -> tuple[Array, ...]:
        u = mean + jnp.sum(factor * node[:, None, :], axis=-1)
        values, first, scale = differentiate.slopes(losses, u)
        weighted = scale[:, :, None] * first
        if options.curvature == "none":
            second = jnp.zeros((*u.shape, u.shape[-1]), u.dtype)
        elif options.curvature == "fisher":
            second = jnp.sum(weighted[:, :, :, None] * first[:, :, None, :], axis=0)
        else:
            second = differentiate.hessians(losses, u)
        return (
            jnp.sum(values, axis=0),
            jnp.sum(weighted, axis=0),
            second,
            jnp.sum(scale * values, axis=0),
        )

    return Moments(
        jnp.sum(losses(mean)[0], axis=0),
        *(jnp.tensordot(weights, leaf, 1) for leaf in jax.vmap(at)(z)),
    )


def predictor_monte_carlo(
    loss: Loss | None = None,
    *,
    num_outputs: int,
    predictor: str | None = None,
    num_draws: int = 64,
) -> Expectation:
    r"""Expected loss of K predictors by draws of them, where a product rule has too many nodes.

    The predictors of a datum are u ~ N(ū, C) with K outputs; their draws cost no pass over the parameters
    and vary far less than draws of θ. By the identities of Bonnet and Price the gradient in ū is the average
    of ∇l(u), that in C of ∇²l(u)/2, both unbiased at any number of draws; they come back to θ by J.

    Args:
        loss: ``(u, y) -> loss`` of one datum with u of shape ``(K,)``, twice differentiable by JAX.
        num_outputs: K.
        predictor: Name of a model's deterministic site of shape ``(n, K)``, in place of a loss; as in
            :func:`gauss_hermite`.
        num_draws: Draws of the predictors of each datum.

    Returns:
        An :class:`Expectation` that needs an ``rng_key``, on the data of ``gauss_hermite(num_outputs=K)``.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given, or a number is less than 1. When
            traced: if the loss is piecewise linear and the rule takes Hessian curvature.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> loss = nt.expectations.predictor_monte_carlo(
        ...     lambda u, y: jax.nn.logsumexp(u) - y * u[0], num_outputs=6
        ... )
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(12), jnp.zeros(12))
        >>> value = jax.jit(loss.evaluate)(q, jnp.ones(2), 1.0, rng_key=jax.random.key(0))
        >>> print(f"{value.expected:.3f}")
        1.792
    """
    check_count(num_outputs, "num_outputs")
    name = "predictor_monte_carlo"
    integral = partial(average, draws(num_draws, num_outputs, name))
    return of_integral(
        name,
        integral,
        loss,
        predictor=predictor,
        num_outputs=num_outputs,
        needs_key=True,
    )
