"""The steps of EM: responsibilities, and the parameters of maximum likelihood under them."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from numpyro_tempered.core.ascent import Step
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.ascent import Visit
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Parameters,
    as_dtype,
    change_of,
    loc_of,
)
from numpyro_tempered.mixtures.sweep import RESOLUTION, Blocks, Coefficients, Sums


class Point(NamedTuple):
    """Parameters of a mixture.

    Attributes:
        log_weights: log p_j, ``(K,)``; -inf for a component without data.
        parameters: Of the components by name, K first, for data less the centres.
        centres: Where the components are, ``(K, d)``; None where the data may not be moved.
    """

    log_weights: Array
    parameters: Parameters
    centres: Array | None


class EMProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component, for what is known of its parameters.
        pseudo_data: Data that each component is given, spread as all data are.
        total: The sum of the weights of the data.
        change: What rounding changes T(x) by, ``(F,)``.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    pseudo_data: Array
    total: Array
    change: Array
    base: Array


def coefficients(component: Component, point: Point) -> Coefficients:
    """Log p_j and log q_j, as a function linear in the statistics."""
    return Coefficients(point.log_weights, *component.coefficients_at(point.parameters), point.centres)


def maximise(component: Component, problem: EMProblem, sums: Sums, centres: Array | None) -> Point:
    """The M step, from counts and from sums about the centres that include the pseudo-data."""
    counts = sums.counts + problem.pseudo_data
    parameters = component.maximum_likelihood(problem.prior, counts, sums.statistics)  # type: ignore[misc]
    log_weights = jnp.log(sums.counts) - jnp.log(jnp.sum(sums.counts))
    if centres is None:
        return Point(log_weights, parameters, None)
    shift = loc_of(component, problem.prior, parameters, centres.shape)
    change = change_of(component, problem.prior, -shift)
    return Point(log_weights, jax.tree.map(jnp.add, parameters, change), centres + shift)


def rounding_loss(component: Component, problem: EMProblem, point: Point) -> Array:
    """What rounding takes from the log density of a datum, in the worst component, in nats; may be NaN."""
    weights = coefficients(component, point).weights
    return jnp.max(jnp.sum(jnp.abs(weights) * problem.change, axis=-1))


def expectation_maximisation(
    component: Component, problem: EMProblem, blocks: Blocks, total: Array
) -> Step[Visit[Point]]:
    """EM for :func:`numpyro_tempered.core.ascent.advance`; the objective of collapsed components is NaN."""

    def visit(point: Point) -> tuple[Array, Array, Point]:
        mixture = coefficients(component, point)
        density = mixture._replace(log_weights=jnp.zeros_like(point.log_weights))

        def block_sums(columns: Array, weight: Array) -> tuple[Sums, Array]:
            log_density = sweep.log_joint(component, density, columns)
            omega, log_sum = sweep.normalise(log_density + point.log_weights[:, None], weight)
            share = problem.pseudo_data / total * weight
            statistics = sweep.weighted_statistics(component, omega + share, columns, point.centres)
            return Sums(log_sum, jnp.sum(omega, axis=1), statistics), jnp.sum(share * log_density)

        sums, penalty = sweep.over_blocks(block_sums, blocks)
        value = sums.log_sum + problem.base + penalty
        objective = jnp.where(rounding_loss(component, problem, point) <= RESOLUTION, value, jnp.nan)
        rounding = ascent.rounding_error(total, sums.log_sum, problem.base, penalty)
        return objective, rounding, maximise(component, problem, sums, point.centres)

    return ascent.step_of(visit)


@partial(jax.jit, static_argnames="component")
def em_problem(
    component: Component, blocks: Blocks, prior: Hyperparameters, pseudo_data: Array, total: Array
) -> tuple[EMProblem, Array]:
    """The problem, and whether the data as a whole have a maximum."""
    spacing = jnp.finfo(total.dtype).eps

    def block_sums(columns: Array, weight: Array) -> tuple[Array, Array]:
        observed = jnp.where(jnp.isnan(columns), 0.0, columns)
        statistics = component.statistics(columns)
        return jnp.sum(weight * jnp.square(observed), axis=1), jnp.sum(weight * jnp.abs(statistics), axis=1)

    squares, sizes = (each / total for each in sweep.over_blocks(block_sums, blocks))
    if component.location is None:
        change = spacing * sizes
    else:
        columns = component.location.columns
        moves = np.isin(np.arange(squares.shape[0]), np.arange(squares.shape[0]) if columns is None else columns)
        # Of the largest numbers, at some standard deviations.
        step = jnp.where(moves, 4.0 * spacing * jnp.sqrt(squares), 0.0)[:, None]
        change = jnp.abs(component.statistics(step) - component.statistics(jnp.zeros_like(step)))[:, 0]
    base = sweep.base_sum(component, blocks)
    least = spacing if component.location is None else spacing**2
    problem = EMProblem(prior, jnp.maximum(pseudo_data, least), total, change, base)
    point = from_responsibilities(component, problem, jnp.ones_like(blocks.weight)[:, :, None], blocks)
    is_finite = jnp.all(jnp.isfinite(coefficients(component, point).constant))
    return problem, (rounding_loss(component, problem, point) <= RESOLUTION) & is_finite


def final_sums(component: Component, blocks: Blocks, point: Point) -> tuple[Array, Array, Array]:
    """Log L, the counts and the entropy of the responsibilities, in double precision."""
    blocks = as_dtype(blocks, jnp.float64)
    mixture = coefficients(component, point)
    sums = sweep.sweep(component, mixture, blocks)
    # A component without data has weight 0 and log weight -inf.
    complete = jnp.sum(xlogy(sums.counts, jnp.exp(mixture.log_weights)) + sums.counts * mixture.constant)
    entropy = sums.log_sum - complete - jnp.sum(sums.statistics * mixture.weights)
    return sums.log_sum + sweep.base_sum(component, blocks), sums.counts, jnp.maximum(entropy, 0.0)


def from_responsibilities(
    component: Component, problem: EMProblem, responsibilities: Array, blocks: Blocks
) -> Point:
    """The M step under responsibilities ``(P, B, K, b)``: one pass finds the centres, another sums about them."""
    share = problem.pseudo_data / problem.total
    counts = sweep.accumulate(component, responsibilities, blocks).counts

    def sums_about(centres: Array | None) -> Sums:
        sums = sweep.accumulate(component, responsibilities + share, blocks, centres)
        return sums._replace(counts=counts)

    point = maximise(component, problem, sums_about(None), None)
    if component.location is None:
        return point
    shape = counts.shape[0], blocks.columns.shape[2]
    centres = loc_of(component, problem.prior, point.parameters, shape)
    return maximise(component, problem, sums_about(centres), centres)


def first_point(component: Component, problem: EMProblem, responsibilities: Array, blocks: Blocks) -> Point:
    """The first point of a restart, with one pseudo-datum where it would collapse."""

    def with_pseudo_data(pseudo_data: Array) -> Point:
        more = problem._replace(pseudo_data=pseudo_data)
        return from_responsibilities(component, more, responsibilities, blocks)

    amounts = jnp.stack([problem.pseudo_data, jnp.maximum(problem.pseudo_data, 1.0)])
    points = jax.lax.map(with_pseudo_data, amounts)
    point, smooth_point = (ascent.restart(points, i) for i in (0, 1))
    resolved = rounding_loss(component, problem, point) <= RESOLUTION
    return jax.tree.map(lambda a, b: jnp.where(resolved, a, b), point, smooth_point)
