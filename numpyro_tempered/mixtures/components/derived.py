"""What follows from the seven functions that a component must have; what it has itself comes first."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to

from numpyro_tempered.core import Array, double_precision, doubles
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Parameters,
    Rows,
    as_dtype,
    broadcast_prior,
    standardised,
)

# A step makes exact the sums that the posterior depends on by one degree more; few families have three.
NUM_STEPS = 8
# Rows that derivatives are checked on, and how far they may be off.
NUM_CHECKED, TOLERANCE = 16, 1e-6


def coefficients(component: Component, q: Hyperparameters) -> tuple[Array, Array]:
    """E[c] ``(K,)`` and E[w] ``(K, F)``: the gradient of the log evidence of no more data."""
    if component.coefficients is not None:
        return component.coefficients(q)
    nothing = no_data(component, q)

    def of_one(q: Hyperparameters) -> tuple[Array, Array]:
        constant, weights = jax.grad(component.log_evidence, (1, 2))(q, *nothing)
        return constant[0], weights[0]

    return jax.vmap(of_one)(q)


def kl(component: Component, q: Hyperparameters, p: Hyperparameters) -> Array:
    """The KL divergence, summed over components.

    It is the expected log likelihood of the data that lead from p to q, less their log evidence.

    Args:
        component: The family.
        q: With leading axis K.
        p: Of one component.
    """
    if component.kl is not None:
        return component.kl(q, p)
    constant, weights = coefficients(component, q)
    nothing = no_data(component, q)

    def of_one(q: Hyperparameters, constant: Array, weights: Array) -> Array:
        counts, sums = data_between(component, p, q, nothing)
        expected = counts[0] * constant + jnp.sum(sums[0] * weights)
        return expected - component.log_evidence(p, counts, sums)

    return jnp.sum(jax.vmap(of_one)(q, constant, weights))


def log_predictive(component: Component, q: Hyperparameters, columns: Array) -> Array:
    """The log density ``(K, n)`` of each datum: the log evidence of that datum alone."""
    if component.log_predictive is not None:
        return component.log_predictive(q, columns)
    statistics = component.statistics(columns)
    one = jnp.ones(1, statistics.dtype)

    def of_one(q: Hyperparameters) -> Array:
        return jax.vmap(lambda datum: component.log_evidence(q, one, datum[None]))(
            statistics.T
        )

    return jax.vmap(of_one)(q) + component.log_base(columns)


def coefficients_at(
    component: Component, q: Hyperparameters, parameters: Parameters
) -> tuple[Array, Array]:
    """The constant c ``(K,)`` and the weights w ``(K, F)`` at parameters.

    A posterior is the prior times exp(N c + ⟨S, w⟩) over the evidence: c and w are a gradient in N and S.

    Args:
        component: The family.
        q: Any hyperparameters, with leading axis K.
        parameters: By name, K first.
    """
    if component.coefficients_at is not None:
        return component.coefficients_at(parameters)
    nothing = no_data(component, q)

    def of_one(q: Hyperparameters, parameters: Parameters) -> tuple[Array, Array]:
        def log_ratio(counts: Array, sums: Array) -> Array:
            posterior = component.update(q, counts, sums)
            return log_density(
                component, posterior, parameters
            ) + component.log_evidence(q, counts, sums)

        constant, weights = jax.grad(log_ratio, (0, 1))(*nothing)
        return constant[0], weights[0]

    return jax.vmap(of_one)(q, parameters)


def num_parameters(
    component: Component, prior: Hyperparameters, num_components: int
) -> int:
    """The number of free parameters, of the unconstrained coordinates of what is drawn."""
    if component.num_parameters is not None:
        return component.num_parameters(num_components)
    sizes = []

    def record(name: str, fn: dist.Distribution) -> Array:
        sizes.append(int(np.prod(biject_to(fn.support).inverse_shape(fn.shape()))))
        return jnp.zeros(fn.shape())

    jax.eval_shape(
        lambda prior: component.draw(record, broadcast_prior(prior, num_components)),
        prior,
    )
    return sum(sizes)


def coordinates(component: Component, rows: Array) -> Array:
    """Points ``(n, p)`` whose distance separates the components: standardised columns."""
    return (
        standardised(rows)
        if component.coordinates is None
        else component.coordinates(rows)
    )


def check_derivatives(component: Component, prior: Hyperparameters, rows: Rows) -> None:
    """Refuse a family whose log evidence has no derivatives where there are no data: those of a mean have none.

    Args:
        component: The family, without its prior.
        prior: Its prior.
        rows: Some data ``(n, d)``.

    Raises:
        ValueError: If they are not those that data have.
    """
    if component.coefficients is not None and component.coefficients_at is not None:
        return
    some = doubles(rows[:NUM_CHECKED])
    with double_precision():
        pairs = jax.tree.map(
            np.asarray,
            _both_slopes(as_dtype(prior, jnp.float64), some.T, component=component),
        )
    for ours, expected in zip(*pairs, strict=True):
        error = np.max(np.abs(ours - expected)) / (1.0 + np.max(np.abs(expected)))
        # NaN is no small number.
        if not error <= TOLERANCE:
            raise ValueError(
                f"{component.name}: log_evidence has no derivatives at counts and sums of 0, from which "
                "coefficients and coefficients_at are derived: there a mean of the data is 0 / 0. Write update "
                "and log_evidence without it, or give both."
            )


@partial(jax.jit, static_argnames="component")
def _both_slopes(
    prior: Hyperparameters, columns: Array, *, component: Component
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """E[c] and E[w] of the posterior of all columns: by no more data, and by the data."""
    statistics = component.statistics(columns)
    data = (
        jnp.full(1, columns.shape[1], columns.dtype),
        jnp.sum(statistics, axis=1)[None],
    )
    bare = component._replace(coefficients=None)
    return coefficients(bare, component.update(prior, *data)), jax.grad(
        component.log_evidence, (1, 2)
    )(prior, *data)


def no_data(component: Component, q: Hyperparameters) -> tuple[Array, Array]:
    """Counts ``(1,)`` and sums ``(1, F)`` that are 0, in the precision of q, which has the leading axis K."""
    dtype = jnp.result_type(*jax.tree.leaves(q))

    def one_row(q: Hyperparameters) -> Any:
        parameters = component.draw(lambda name, fn: jnp.zeros(fn.shape(), dtype), q)
        (dim,) = component.distribution(parameters).event_shape
        return component.statistics(jnp.zeros((dim, 1), dtype))

    size = jax.eval_shape(one_row, q).shape[0]
    return jnp.zeros(1, dtype), jnp.zeros((1, size), dtype)


def data_between(
    component: Component,
    p: Hyperparameters,
    q: Hyperparameters,
    nothing: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Counts ``(1,)`` and sums ``(1, F)`` that lead from p to q, both of one component, by Newton's method."""

    def flat(tree: Hyperparameters) -> Array:
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    size = nothing[1].shape[1]

    def posterior(data: Array) -> Array:
        return flat(component.update(p, data[:1], data[None, 1:]))

    def step(data: Array, _: None) -> tuple[Array, None]:
        slopes = jax.jacfwd(posterior)(data)
        # Sums are in different units.
        scale = jnp.linalg.norm(slopes, axis=0)
        scale = jnp.where(scale > 0, scale, 1.0)
        change = jnp.linalg.lstsq(slopes / scale, flat(q) - posterior(data))[0]
        return data + change / scale, None

    # One datum, where a mean over the data is defined.
    start = jnp.zeros(1 + size, nothing[1].dtype).at[0].set(1.0)
    data, _ = jax.lax.scan(step, start, None, length=NUM_STEPS)
    return data[:1], data[None, 1:]


def log_density(
    component: Component, q: Hyperparameters, parameters: Parameters
) -> Array:
    """The log density of parameters, K first as those of q, at what ``draw`` draws."""
    terms: list[Array] = []

    def score(name: str, fn: dist.Distribution) -> Array:
        if name not in parameters:
            raise ValueError(
                f"{component.name}: draw has the site {name!r}, the parameters are {sorted(parameters)}: give "
                "them the same names, or give coefficients_at."
            )
        value = jnp.reshape(parameters[name], fn.shape())
        terms.append(jnp.sum(fn.log_prob(value)))
        return value

    component.draw(score, q)
    return sum(terms, start=jnp.zeros(()))
