"""Moves out of a local optimum: merge or death of one component, and birth by the split of another."""

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures import sweep, weights
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    coefficients,
    first_factors,
)
from numpyro_tempered.mixtures.starts import draw_row, row_of, squared_distance
from numpyro_tempered.mixtures.sweep import Blocks


def propose(
    rng_key: Array,
    component: Component,
    problem: MixtureProblem,
    factors: Factors,
    blocks: Blocks,
) -> Factors:
    """Factors after one random move, from which to ascend.

    One component gives up its data: with probability 1/2 to another that shares data with it (merge), otherwise
    to all others by their responsibilities (death). It takes over a part of a third, drawn by its weight: the
    rows nearer to the second of two seeds drawn as in k-means++ (birth, or split). The number of components
    stays.

    Args:
        rng_key: Key of the move.
        component: The family.
        problem: The problem.
        factors: Those at a local optimum.
        blocks: Rows and weights.

    Returns:
        The factors that the new responsibilities give.

    References:
        Ueda, Nakano, Ghahramani, Hinton, *SMEM algorithm for mixture models*, 2000; Hughes, Sudderth, *Memoized
        online variational inference for Dirichlet process mixture models*, 2013.
    """
    exists = weights.active(problem.concentration)
    num_components = jnp.sum(exists)
    numbers = jnp.arange(exists.shape[0])
    mixture = coefficients(component, factors)
    kind_key, donor_key, heir_key, parent_key, first_key, second_key = jax.random.split(
        rng_key, 6
    )
    overlap = affinities(component, mixture, blocks)
    counts = jnp.sum(overlap, axis=1)
    is_merge = jax.random.bernoulli(kind_key)
    donor = jax.random.randint(donor_key, (), 0, num_components)
    is_donor = (numbers == donor)[:, None]
    # Distant components share nothing: then any other one will do.
    odds = jnp.where(
        exists & (numbers != donor),
        overlap[donor] + 1e-3 * jnp.sum(counts) / num_components,
        0.0,
    )
    heir = jax.random.categorical(heir_key, jnp.log(odds))
    parent = jax.random.categorical(
        parent_key, jnp.log(jnp.where(numbers == donor, 0.0, counts))
    )

    def without_donor(columns: Array) -> Array:
        """Responsibilities ``(K, b)`` after merge or death."""
        joint = sweep.log_joint(component, mixture, columns)
        omega = jax.nn.softmax(joint, axis=0)
        merged = jnp.where((numbers == heir)[:, None], omega + omega[donor], omega)
        others = jax.nn.softmax(jnp.where(is_donor, -jnp.inf, joint), axis=0)
        return jnp.where(is_merge, jnp.where(is_donor, 0.0, merged), others)

    points = sweep.points_of(component, blocks)
    of_parent = jax.vmap(
        lambda shard: jax.lax.map(lambda columns: without_donor(columns)[parent], shard)
    )
    mass = sweep.out_of_blocks(blocks.weight * of_parent(blocks.columns))
    first = squared_distance(points, row_of(points, draw_row(first_key, mass)))
    second = squared_distance(
        points, row_of(points, draw_row(second_key, mass * first))
    )

    def after_split(columns: Array, near_second: Array) -> Array:
        omega = without_donor(columns)
        part = jnp.where(near_second, omega[parent], 0.0)
        change = jnp.where(is_donor, part, 0.0) - jnp.where(
            (numbers == parent)[:, None], part, 0.0
        )
        return omega + change

    omega = jax.vmap(jax.vmap(after_split))(
        blocks.columns, sweep.into_blocks(second < first, blocks)
    )
    return first_factors(component, problem, omega, blocks)


def affinities(
    component: Component, mixture: sweep.Coefficients, blocks: Blocks
) -> Array:
    """Σ_i w_i omega_ij omega_ik, ``(K, K)``: how much two components share."""

    def block_sums(columns: Array, weight: Array) -> Array:
        omega = jax.nn.softmax(sweep.log_joint(component, mixture, columns), axis=0)
        return sweep.contract(omega * weight, omega)

    return sweep.over_blocks(block_sums, blocks)
