"""Moves out of a local optimum: merge or death of one component, and birth by the split of another."""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.blocks import Blocks, in_blocks, out_of_blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import Factors, Problem, coefficients, update
from numpyro_tempered.mixtures.starts import draw_row, squared_distance
from numpyro_tempered.mixtures.sweep import Coefficients, accumulate, contract, log_joint, over_blocks


def affinities(component: Component, mixture: Coefficients, blocks: Blocks) -> Array:
    """Σ_i w_i omega_ij omega_ik, ``(K, K)``: how much two components share."""

    def block_sums(columns: Array, weight: Array) -> Any:
        omega = jax.nn.softmax(log_joint(component, mixture, columns), axis=0)
        return contract(omega * weight, omega)

    return over_blocks(block_sums, blocks)  # type: ignore[return-value]


def propose(
    rng_key: Array,
    component: Component,
    problem: Problem,
    factors: Factors,
    rows: Array,
    weight: Array,
    blocks: Blocks,
) -> Factors:
    """Factors after one move at random, to be ascended from.

    One component gives up its data, half of the times to one that shares data with it (merge) and half to all
    by their responsibilities (death). It takes over a part of another that is drawn by its weight, on the side
    of one of two rows seeded as by k-means++ (birth, or split). The number of components stays.

    Args:
        rng_key: Key of the move.
        component: The family.
        problem: The problem.
        factors: Those at a local optimum.
        rows: Data ``(n, d)``.
        weight: Of the rows, ``(n,)``.
        blocks: The same data in blocks.

    Returns:
        The factors that the moved responsibilities give.

    References:
        Ueda, Nakano, Ghahramani, Hinton, *SMEM algorithm for mixture models*, 2000; Hughes, Sudderth, *Memoized
        online variational inference for Dirichlet process mixture models*, 2013.
    """
    num_components = problem.concentration.shape[0]
    numbers = jnp.arange(num_components)
    mixture = coefficients(component, factors)
    kind_key, gone_key, into_key, split_key, first_key, second_key = jax.random.split(rng_key, 6)
    shared = affinities(component, mixture, blocks)
    counts = jnp.sum(shared, axis=1)
    merges = jax.random.bernoulli(kind_key)
    gone = jax.random.randint(gone_key, (), 0, num_components)
    # Components far apart share nothing: then any other will do.
    likely = jnp.where(numbers == gone, 0.0, shared[gone] + 1e-3 * jnp.mean(counts))
    into = jax.random.categorical(into_key, jnp.log(likely))
    split = jax.random.categorical(split_key, jnp.log(jnp.where(numbers == gone, 0.0, counts)))

    def without_gone(columns: Array) -> Array:
        """Responsibilities ``(K, b)`` after merge or death."""
        joint = log_joint(component, mixture, columns)
        omega = jax.nn.softmax(joint, axis=0)
        merged = jnp.where((numbers == into)[:, None], omega + omega[gone], omega)
        others = jax.nn.softmax(jnp.where((numbers == gone)[:, None], -jnp.inf, joint), axis=0)
        return jnp.where(merges, jnp.where((numbers == gone)[:, None], 0.0, merged), others)

    points = component.coordinates(rows)
    mine = weight * out_of_blocks(
        _each_block(lambda columns: without_gone(columns)[split], blocks), rows.shape[0]
    )
    first = squared_distance(points, points[draw_row(first_key, mine)])
    second = squared_distance(points, points[draw_row(second_key, mine * first)])
    shards, _, size = blocks.weight.shape
    far = in_blocks(second < first, size, shards)

    def moved(columns: Array, far: Array) -> Array:
        omega = without_gone(columns)
        taken = jnp.where(far, omega[split], 0.0)
        given = jnp.where((numbers == gone)[:, None], taken, 0.0) - jnp.where(
            (numbers == split)[:, None], taken, 0.0
        )
        return omega + given

    after = jax.vmap(jax.vmap(moved))(blocks.columns, far)
    return update(component, problem, accumulate(component, after, blocks))


def _each_block(fn: Any, blocks: Blocks) -> Array:
    return jax.vmap(lambda shard: jax.lax.map(fn, shard))(blocks.columns)
