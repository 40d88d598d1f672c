"""The steps of EM for a mixture, and what keeps it from a likelihood without bound."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Steps
from numpyro_tempered.mixtures.blocks import Blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.sweep import Coefficients, Sums, base_sum, over_blocks, sweep

# Nats that rounding may take from the log density of a datum before a component counts as collapsed.
RESOLUTION = 0.1


class Point(NamedTuple):
    """Parameters of a mixture.

    Attributes:
        log_weights: log p_j, ``(K,)``; -inf for a component without data.
        parameters: Of the components by name, K first.
    """

    log_weights: Array
    parameters: dict[str, Array]


class EMProblem(NamedTuple):
    """What the objective depends on beside the data; all arrays.

    Attributes:
        prior: Of one component, for what is known of its parameters.
        pseudo_data: Data that each component is given.
        statistics: The mean of T(x), ``(F,)``, theirs.
        sizes: The mean of |T(x)|, ``(F,)``.
        base: The weighted sum of log h(x_i).
    """

    prior: Any
    pseudo_data: Array
    statistics: Array
    sizes: Array
    base: Array


def coefficients(component: Component, point: Point) -> Coefficients:
    """Log p_j and log q_j, as a function linear in the statistics."""
    return Coefficients(point.log_weights, *component.coefficients_at(point.parameters))


def maximise(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The M step."""
    counts = sums.counts + problem.pseudo_data
    statistics = sums.statistics + problem.pseudo_data * problem.statistics
    parameters = component.maximum_likelihood(problem.prior, counts, statistics)  # type: ignore[misc]
    return Point(jnp.log(sums.counts) - jnp.log(jnp.sum(sums.counts)), parameters)


def lost(problem: EMProblem, mixture: Coefficients) -> Array:
    """What rounding takes from the log density of a datum, of the worst component, in nats; may be NaN."""
    size = jnp.max(jnp.sum(jnp.abs(mixture.weights) * problem.sizes, axis=-1))
    return jnp.finfo(size.dtype).eps * size


def expectation_maximisation(component: Component, problem: EMProblem, blocks: Blocks) -> Steps:
    """EM for :func:`numpyro_tempered.mixtures.ascent.advance`; the objective of collapsed components is NaN."""

    def objective(point: Point, sums: Sums) -> Array:
        mixture = coefficients(component, point)
        penalty = jnp.sum(mixture.constant + jnp.sum(mixture.weights * problem.statistics, axis=-1))
        value = sums.log_sum + problem.base + problem.pseudo_data * penalty
        return jnp.where(lost(problem, mixture) <= RESOLUTION, value, jnp.nan)

    return Steps(
        coefficients=lambda point: coefficients(component, point),
        sweep=lambda mixture: sweep(component, mixture, blocks),
        objective=objective,
        update=lambda sums: maximise(component, problem, sums),
    )


@partial(jax.jit, static_argnames="component")
def survey(component: Component, prior: Any, blocks: Blocks, pseudo_data: Array, total: Array) -> EMProblem:
    """The problem, by one pass over the data."""

    def block_sums(columns: Array, weight: Array) -> tuple[Array, Array]:
        statistics = component.statistics(columns)
        return jnp.sum(weight * statistics, axis=1), jnp.sum(weight * jnp.abs(statistics), axis=1)

    mean, sizes = (each / total for each in over_blocks(block_sums, blocks))  # type: ignore[arg-type]
    least = jnp.finfo(total.dtype).eps
    return EMProblem(prior, jnp.maximum(pseudo_data, least), mean, sizes, base_sum(component, blocks))


@partial(jax.jit, static_argnames="component")
def is_resolved(component: Component, problem: EMProblem) -> Array:
    """Whether all data together have a maximum."""
    one = jnp.ones(1, problem.statistics.dtype)
    together = maximise(component, problem, Sums(one[0], one, problem.statistics[None]))
    mixture = coefficients(component, together)
    return (lost(problem, mixture) <= RESOLUTION) & jnp.all(jnp.isfinite(mixture.constant))


@partial(jax.jit, static_argnames="component")
def first_points(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The first M step of each restart, with one pseudo-datum where it would collapse."""

    def one(sums: Sums) -> Point:
        plain = maximise(component, problem, sums)
        smooth = maximise(component, problem._replace(pseudo_data=jnp.maximum(problem.pseudo_data, 1.0)), sums)
        good = lost(problem, coefficients(component, plain)) <= RESOLUTION
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), plain, smooth)

    return jax.vmap(one)(sums)
