"""The steps of EM for a mixture, and what keeps it from a likelihood without bound."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.ascent import Step
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.ascent import Visit, step_of
from numpyro_tempered.mixtures.components.base import Component, Hyperparameters, Parameters
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums, base_sum, over_blocks, sweep

# Nats that rounding may take from the log density of a datum before a component counts as collapsed.
RESOLUTION = 0.1


class Point(NamedTuple):
    """Parameters of a mixture.

    Attributes:
        log_weights: log p_j, ``(K,)``; -inf for a component without data.
        parameters: Of the components by name, K first.
    """

    log_weights: Array
    parameters: Parameters


class EMProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component, for what is known of its parameters.
        pseudo_data: Data that each component is given.
        statistics: The mean of T(x), ``(F,)``: theirs.
        sizes: The mean of |T(x)|, ``(F,)``.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    pseudo_data: Array
    statistics: Array
    sizes: Array
    base: Array

    @property
    def alpha(self) -> float:
        """The power on the likelihood: none."""
        return 1.0


def coefficients(component: Component, point: Point) -> Coefficients:
    """Log p_j and log q_j, as a function linear in the statistics."""
    return Coefficients(point.log_weights, *component.coefficients_at(point.parameters))


def maximise(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The M step."""
    counts = sums.counts + problem.pseudo_data
    statistics = sums.statistics + problem.pseudo_data * problem.statistics
    parameters = component.maximum_likelihood(problem.prior, counts, statistics)  # type: ignore[misc]
    return Point(jnp.log(sums.counts) - jnp.log(jnp.sum(sums.counts)), parameters)


def rounding_loss(problem: EMProblem, mixture: Coefficients) -> Array:
    """What rounding takes from the log density of a datum, in the worst component, in nats; may be NaN."""
    size = jnp.max(jnp.sum(jnp.abs(mixture.weights) * problem.sizes, axis=-1))
    return jnp.finfo(size.dtype).eps * size


def expectation_maximisation(
    component: Component, problem: EMProblem, blocks: Blocks, rounding: Array
) -> Step[Visit[Point]]:
    """EM for :func:`numpyro_tempered.core.ascent.advance`; the objective of collapsed components is NaN."""

    def visit(point: Point) -> tuple[Array, Point]:
        mixture = coefficients(component, point)
        sums = sweep(component, mixture, blocks)
        penalty = jnp.sum(mixture.constant + jnp.sum(mixture.weights * problem.statistics, axis=-1))
        value = sums.log_sum + problem.base + problem.pseudo_data * penalty
        objective = jnp.where(rounding_loss(problem, mixture) <= RESOLUTION, value, jnp.nan)
        return objective, maximise(component, problem, sums)

    return step_of(visit, rounding)


@partial(jax.jit, static_argnames="component")
def em_problem(
    component: Component, prior: Hyperparameters, blocks: Blocks, pseudo_data: Array, total: Array
) -> EMProblem:
    """The problem, by one pass over the data."""

    def block_sums(columns: Array, weight: Array) -> tuple[Array, Array]:
        statistics = component.statistics(columns)
        return jnp.sum(weight * statistics, axis=1), jnp.sum(weight * jnp.abs(statistics), axis=1)

    mean, sizes = (each / total for each in over_blocks(block_sums, blocks))
    least = jnp.finfo(total.dtype).eps
    return EMProblem(prior, jnp.maximum(pseudo_data, least), mean, sizes, base_sum(component, blocks))


@partial(jax.jit, static_argnames="component")
def is_resolved(component: Component, problem: EMProblem) -> Array:
    """Whether the data as a whole have a maximum."""
    one = jnp.ones(1, problem.statistics.dtype)
    mixture = coefficients(component, maximise(component, problem, Sums(one[0], one, problem.statistics[None])))
    return (rounding_loss(problem, mixture) <= RESOLUTION) & jnp.all(jnp.isfinite(mixture.constant))


@partial(jax.jit, static_argnames="component")
def first_points(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The first M step of each restart, with one pseudo-datum where it would collapse."""

    def one(sums: Sums) -> Point:
        point = maximise(component, problem, sums)
        smoothed_point = maximise(
            component, problem._replace(pseudo_data=jnp.maximum(problem.pseudo_data, 1.0)), sums
        )
        resolved = rounding_loss(problem, coefficients(component, point)) <= RESOLUTION
        return jax.tree.map(lambda a, b: jnp.where(resolved, a, b), point, smoothed_point)

    return jax.vmap(one)(sums)
