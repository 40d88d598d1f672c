"""The steps of EM: responsibilities, and the parameters of maximum likelihood under them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from numpyro_tempered.core import Array, Ascent, at_index, warn_caller
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.ascent import Algorithm, PassState, Summary
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    RESOLUTION,
    Component,
    Hyperparameters,
    Parameters,
    broadcast_prior,
    change_of,
    loc_of,
)
from numpyro_tempered.mixtures.rounding import losses_of
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums


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
        active: Which components there are, ``(K,)``; others fill up to a size that is compiled.
        pseudo_data: Data that each component is given, spread as all data are.
        total: The sum of the weights of the data.
        change: What rounding changes T(x) by, ``(F,)``.
        base: The weighted sum of log h(x_i).
        is_resolved: Whether the data as a whole have a maximum.
    """

    prior: Hyperparameters
    active: Array
    pseudo_data: Array
    total: Array
    change: Array = np.zeros(())  # type: ignore[assignment]
    base: Array = np.zeros(())  # type: ignore[assignment]
    is_resolved: Array = np.zeros((), bool)  # type: ignore[assignment]

    def shares(self, least: float) -> Array:
        """The pseudo-data of each component ``(K,)``, at least so many: one that is none must stay finite."""
        return jnp.where(self.active, jnp.maximum(self.pseudo_data, least), least)


def coefficients(
    component: Component, prior: Hyperparameters, point: Point
) -> Coefficients:
    """Log p_j and log q_j, as a function linear in the statistics."""
    priors = broadcast_prior(prior, point.log_weights.shape[0])
    of_parameters = derived.coefficients_at(component, priors, point.parameters)
    return Coefficients(point.log_weights, *of_parameters, point.centres)


def least_share(component: Component, dtype: np.dtype) -> float:
    """The pseudo-data that a component without data needs: a rounding error, or its square."""
    spacing = float(jnp.finfo(dtype).eps)
    return spacing if component.location is None else spacing**2


def maximise(
    component: Component, problem: EMProblem, sums: Sums, centres: Array | None
) -> Point:
    """The M step, from counts and from sums about the centres that include the pseudo-data."""
    counts = sums.counts + problem.shares(least_share(component, sums.counts.dtype))
    parameters = component.maximum_likelihood(problem.prior, counts, sums.statistics)  # type: ignore[misc]
    log_weights = jnp.log(sums.counts) - jnp.log(jnp.sum(sums.counts))
    if centres is None:
        return Point(log_weights, parameters, None)
    shift = loc_of(component, problem.prior, parameters, centres.shape)
    change = change_of(component, problem.prior, -shift)
    return Point(
        log_weights, jax.tree.map(jnp.add, parameters, change), centres + shift
    )


def rounding_loss(component: Component, problem: EMProblem, point: Point) -> Array:
    """What rounding takes from the log density of a datum, in the worst component, in nats; may be NaN."""
    losses = jnp.sum(
        jnp.abs(coefficients(component, problem.prior, point).weights) * problem.change,
        axis=-1,
    )
    return jnp.max(jnp.where(problem.active, losses, 0.0))


def em_terms(
    component: Component,
    problem: EMProblem,
    mixture: Coefficients,
    columns: Array,
    weight: Array,
) -> tuple[Sums, Array]:
    """The sums of a block with the pseudo-data, and the pseudo-data's part of the objective."""
    density = mixture._replace(log_weights=jnp.zeros_like(mixture.log_weights))
    log_density = sweep.log_joint(component, density, columns)
    joint = jnp.where(
        mixture.log_weights[:, None] > -jnp.inf,
        log_density + mixture.log_weights[:, None],
        -jnp.inf,
    )
    omega, log_sum = sweep.normalise(joint, weight)
    shares = problem.shares(least_share(component, weight.dtype))[:, None] * (
        weight / problem.total
    )
    statistics = sweep.weighted_statistics(
        component, omega + shares, columns, mixture.centres, mixture.weights
    )
    penalty = jnp.sum(jnp.where(problem.active[:, None], shares * log_density, 0.0))
    return Sums(log_sum, jnp.sum(omega, axis=1), statistics), penalty


def em_follow(
    component: Component,
    problem: EMProblem,
    point: Point,
    sums: tuple[Sums, Array],
    total: Array,
) -> tuple[Array, Array, Point]:
    """The objective, NaN where a component has collapsed, its rounding error, and the M step."""
    of_data, penalty = sums
    value = of_data.log_sum + problem.base + penalty
    objective = jnp.where(
        rounding_loss(component, problem, point) <= RESOLUTION, value, jnp.nan
    )
    rounding = ascent.rounding_error(total, of_data.log_sum, problem.base, penalty)
    return objective, rounding, maximise(component, problem, of_data, point.centres)


class Totals(NamedTuple):
    """Sums over all rows that a problem needs.

    Attributes:
        base: Of log h.
        squares: Of squared entries, ``(d,)``.
        sizes: Of |T(x)|, ``(F,)``.
        statistics: Of T(x), ``(F,)``.
    """

    base: Array
    squares: Array
    sizes: Array
    statistics: Array


def totals(component: Component, blocks: Blocks, read: object) -> Totals:
    """The sums of some rows."""

    def terms(columns: Array, weight: Array) -> Totals:
        statistics = component.statistics(columns)
        squares = jnp.square(jnp.where(jnp.isnan(columns), 0.0, columns))
        of_rows = Totals(
            component.log_base(columns), squares, jnp.abs(statistics), statistics
        )
        return jax.tree.map(lambda values: jnp.sum(weight * values, axis=-1), of_rows)

    return sweep.over_blocks(terms, blocks)


def em_problem(
    component: Component, sums: Totals, read: object, problem: EMProblem
) -> EMProblem:
    """The problem with what it needs of all rows."""
    total = problem.total
    spacing = jnp.finfo(total.dtype).eps
    squares = sums.squares / total
    if component.location is None:
        change = spacing * sums.sizes / total
    else:
        columns = component.location.columns
        moves = np.isin(
            np.arange(squares.shape[0]),
            np.arange(squares.shape[0]) if columns is None else columns,
        )
        # Of the largest numbers, at some standard deviations.
        step = jnp.where(moves, 4.0 * spacing * jnp.sqrt(squares), 0.0)[:, None]
        change = jnp.abs(
            component.statistics(step) - component.statistics(jnp.zeros_like(step))
        )[:, 0]
    problem = problem._replace(change=change, base=sums.base)
    # All data as one component; where they may be moved they are, to their mean.
    of_one = problem._replace(active=jnp.ones(1, bool))
    share = of_one.shares(least_share(component, total.dtype)) / total
    of_data = Sums(
        jnp.zeros_like(total), total[None], (1.0 + share) * sums.statistics[None]
    )
    point = maximise(component, of_one, of_data, None)
    is_finite = jnp.all(
        jnp.isfinite(coefficients(component, problem.prior, point).constant)
    )
    return problem._replace(
        is_resolved=(rounding_loss(component, of_one, point) <= RESOLUTION) & is_finite
    )


def final_sums(
    component: Component, blocks: Blocks, mixture: Coefficients
) -> tuple[Sums, Array]:
    """The sums and those of log h, in double precision."""
    blocks = sweep.in_double(blocks)
    return sweep.sweep(component, mixture, blocks), sweep.base_sum(component, blocks)


class FinalValues(NamedTuple):
    """What follows from the last pass; see :class:`MixtureEM`, and for the rest :func:`check_resolution`."""

    log_likelihood: Array
    counts: Array
    entropy: Array
    spacing: Array
    losses: Array
    parameters: Parameters


def final_values(
    component: Component,
    final: tuple[Sums, Array],
    mixture: Coefficients,
    point: Point,
    extra: tuple[np.ndarray | None, Array, Hyperparameters],
) -> FinalValues:
    """Log L, the entropy of the responsibilities, what rounding takes, and parameters of the data's own.

    Args:
        component: The family.
        final: The sums.
        mixture: What they were taken at.
        point: The parameters.
        extra: The centre of the data, or None; their spacings as given and as held; the prior.
    """
    (sums, base), (centre, spacings, prior) = final, extra
    # A component without data has weight 0 and log weight -inf.
    constant = (
        xlogy(sums.counts, jnp.exp(mixture.log_weights))
        + sums.counts * mixture.constant
    )
    complete = jnp.sum(jnp.where(sums.counts > 0, constant, 0.0)) + jnp.sum(
        sums.statistics * mixture.weights
    )
    entropy = jnp.maximum(sums.log_sum - complete, 0.0)
    spacing, losses = losses_of(component, mixture, centre, spacings)
    parameters = point.parameters
    if centre is not None and point.centres is not None:
        parameters = jax.tree.map(
            jnp.add, parameters, change_of(component, prior, point.centres + centre)
        )
    return FinalValues(
        sums.log_sum + base, sums.counts, entropy, spacing, losses, parameters
    )


FINAL = Summary(
    lambda component, point, extra: coefficients(component, extra[2], point),
    final_sums,
    final_values,
)


def from_responsibilities(
    component: Component, problem: EMProblem, responsibilities: Array, blocks: Blocks
) -> Point:
    """The M step under responsibilities ``(P, B, K, b)``: one pass finds the centres, another sums about them."""
    shares = (
        problem.shares(least_share(component, blocks.weight.dtype))[:, None]
        / problem.total
    )
    counts = sweep.accumulate(component, responsibilities, blocks).counts

    def sums_about(centres: Array | None) -> Sums:
        sums = sweep.accumulate(component, responsibilities + shares, blocks, centres)
        return sums._replace(counts=counts)

    point = maximise(component, problem, sums_about(None), None)
    if component.location is None:
        return point
    shape = counts.shape[0], blocks.columns.shape[2]
    centres = loc_of(component, problem.prior, point.parameters, shape)
    return maximise(component, problem, sums_about(centres), centres)


def first_point(
    component: Component, problem: EMProblem, responsibilities: Array, blocks: Blocks
) -> Point:
    """The first point of a restart, with one pseudo-datum where it would collapse."""

    def with_pseudo_data(pseudo_data: Array) -> Point:
        more = problem._replace(pseudo_data=pseudo_data)
        return from_responsibilities(component, more, responsibilities, blocks)

    amounts = jnp.stack([problem.pseudo_data, jnp.maximum(problem.pseudo_data, 1.0)])
    points = jax.lax.map(with_pseudo_data, amounts)
    point, smooth_point = (at_index(points, i) for i in (0, 1))
    resolved = rounding_loss(component, problem, point) <= RESOLUTION
    return jax.tree.map(lambda a, b: jnp.where(resolved, a, b), point, smooth_point)


# Dempster, Laird, Rubin 1977.
EXPECTATION_MAXIMISATION = Algorithm(
    pose=Summary(lambda component, problem: None, totals, em_problem),
    begin=first_point,
    read=lambda component, problem, point: coefficients(
        component, problem.prior, point
    ),
    terms=em_terms,
    follow=em_follow,
)


def check_em(
    state: Ascent[PassState[Point]],
    best: int,
    objectives: np.ndarray,
    rounding: np.ndarray,
) -> None:
    """Raise where EM went wrong, warn where it is unfinished.

    Raises:
        FloatingPointError: If every restart collapsed.
        RuntimeError: If the objective of the best fell by more than ``rounding``.
    """
    if not np.any(np.isfinite(objectives)):
        raise FloatingPointError(
            f"every restart of EM collapsed ({len(objectives)} of them, in {state.trace.dtype}): a component "
            "closed in on equal rows, where the likelihood is unbounded. Take fewer components, or "
            "pseudo_data=1.0."
        )
    # In single precision a component that closes in on two or three rows may fall; others are not returned.
    fall = float(state.fall[best])
    if fall > rounding[best]:
        raise RuntimeError(
            f"the likelihood fell by {fall:.3g} nats, which EM cannot do: maximum_likelihood and "
            "coefficients_at of the component do not belong together."
        )
    if not bool(state.converged[best]):
        warn_caller(
            f"EM has not converged in {int(state.num_iter[best])} passes: raise max_iter or the tolerance."
        )
