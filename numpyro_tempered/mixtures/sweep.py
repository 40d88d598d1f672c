"""One pass over the data: blocks of rows, responsibilities, and the sums that follow from them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, CompensatedSum, matmul
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import Component

T = TypeVar("T")
# Rows of a block times components times restarts: an array of this many numbers stays in the cache.
BLOCK = 2**15
LARGEST_BLOCK = 1024


# With no more rows than this, arrays are padded to sizes that many problems share: compiling costs more.
FEW_ROWS = 2**13
# Data of more numbers than this are not padded to another number of blocks, for their memory.
MANY_NUMBERS = 2**22


class Blocks(NamedTuple):
    """Rows in blocks, features first: what a pass over the data reads.

    Attributes:
        columns: Shape ``(P, B, d, b)``: P shards on their devices, B blocks of b rows each.
        weight: Shape ``(P, B, b)``, 0 where a row is padding.
        num_rows: Rows of a shard, without padding, shape (); a pass ends with the block of the last of them.
    """

    columns: Array
    weight: Array
    num_rows: Any


def block_size(num_rows: int, num_components: int) -> int:
    """Rows of a block, a multiple of 128 unless there are fewer."""
    size = min(max(BLOCK // num_components // 128 * 128, 128), LARGEST_BLOCK)
    return min(size, num_rows)


def next_power(number: int, least: int = 1) -> int:
    """The least power of two that is no smaller than the two numbers."""
    return 1 << (max(number, least) - 1).bit_length()


def num_shards(x: ArrayLike) -> int:
    """The number of pieces that the rows of an array are in, one on each device."""
    if not isinstance(x, jax.Array):
        return 1
    return x.shape[0] // x.sharding.shard_shape(x.shape)[0]


def in_blocks(rows: Array, size: int, shards: int = 1) -> Array:
    """Rows ``(n, ...)`` as ``(P, B, ..., b)``; the last block is filled with copies of the last row."""
    n = rows.shape[0] // shards
    rows = jnp.reshape(rows, (shards, n, *rows.shape[1:]))
    filling = [(0, 0), (0, -n % size)] + [(0, 0)] * (rows.ndim - 2)
    rows = jnp.pad(rows, filling, mode="edge")
    return jnp.moveaxis(jnp.reshape(rows, (shards, -1, size, *rows.shape[2:])), 2, -1)


def make_blocks(rows: Array, weight: Array, size: int, shards: int = 1) -> Blocks:
    """Rows ``(n, d)`` and their weights ``(n,)`` in blocks; padding has weight 0."""
    n = rows.shape[0] // shards
    weights = jnp.pad(jnp.reshape(weight, (shards, n)), [(0, 0), (0, -n % size)])
    return Blocks(
        in_blocks(rows, size, shards),
        jnp.reshape(weights, (shards, -1, size)),
        np.int32(n),
    )


def blocks_on_host(rows: np.ndarray, weight: np.ndarray, size: int) -> Blocks:
    """The same of arrays on the host; the number of blocks is a power of two, as is that of the rows of one.

    Where they would take much memory, there are no more blocks than are needed.
    """
    n, dim = rows.shape
    size = next_power(n, 128) if n < size else size
    number = -(-n // size)
    number = next_power(number) if rows.size <= MANY_NUMBERS else number
    padding = number * size - n
    rows = np.pad(rows, [(0, padding), (0, 0)], mode="edge")
    columns = np.ascontiguousarray(
        np.moveaxis(rows.reshape(1, number, size, dim), 2, 3)
    )
    weights = np.pad(weight, (0, padding)).reshape(1, number, size)
    return Blocks(jax.device_put(columns), jax.device_put(weights), np.int32(n))


def in_double(blocks: Blocks) -> Blocks:
    """The same numbers in double precision."""
    return blocks._replace(
        columns=blocks.columns.astype(jnp.float64),
        weight=blocks.weight.astype(jnp.float64),
    )


def out_of_blocks(values: Array) -> Array:
    """Values in blocks ``(P, B, ..., b)`` as rows ``(m, ...)``, padding included."""
    values = jnp.moveaxis(values, -1, 2)
    return jnp.reshape(values, (-1, *values.shape[3:]))


def into_blocks(values: Array, blocks: Blocks) -> Array:
    """The inverse of :func:`out_of_blocks`."""
    values = jnp.reshape(values, (*blocks.weight.shape, *values.shape[1:]))
    return jnp.moveaxis(values, 2, -1)


def points_of(component: Component, blocks: Blocks) -> Array:
    """The rows of blocks in coordinates whose distances separate the components, ``(m, p)``; 0 for padding."""
    shards, number, size = blocks.weight.shape
    is_row = jnp.tile(jnp.arange(number * size) < blocks.num_rows, shards)[:, None]
    # Means of columns leave NaN out, and so what fills up.
    points = derived.coordinates(
        component, jnp.where(is_row, out_of_blocks(blocks.columns), jnp.nan)
    )
    return jnp.where(is_row, points, 0.0)


class Coefficients(NamedTuple):
    r"""A mixture as a linear function of statistics.

    It is l_ij = log_weights_j + constant_j + ⟨weights_j, T(x_i - c_j)⟩.

    Attributes:
        log_weights: E log p_j, ``(K,)``; -inf for one that has no part in it.
        constant: ``(K,)``.
        weights: ``(K, F)``.
        centres: c_j, ``(K, d)``; None for 0.
    """

    log_weights: Array
    constant: Array
    weights: Array
    centres: Array | None = None


class Sums(NamedTuple):
    """What a pass over the data leaves; sums of two passes about the same centres add.

    Attributes:
        log_sum: The weighted sum of logsumexp_j l_ij, without log h, shape ().
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        statistics: The weighted sums of omega_ij T(x_i - c_j), ``(K, F)``.
    """

    log_sum: Array
    counts: Array
    statistics: Array


def log_joint(component: Component, mixture: Coefficients, columns: Array) -> Array:
    """l_ij without log h, for columns ``(d, n)``: shape ``(K, n)``."""
    deviations = deviations_from(component, columns, mixture.centres, mixture.weights)
    if deviations is None:
        linear = matmul(mixture.weights, component.statistics(columns))
    else:
        linear = component.location.linear(mixture.weights, deviations)  # type: ignore[union-attr]
    # A component of weight 0 may be anything, also what is not finite.
    constant = (mixture.log_weights + mixture.constant)[:, None]
    return jnp.where(
        mixture.log_weights[:, None] > -jnp.inf, linear + constant, -jnp.inf
    )


def weighted_statistics(
    component: Component,
    omega: Array,
    columns: Array,
    centres: Array | None,
    weights: Array | None = None,
) -> Array:
    """Σ_i omega_ji T(x_i - c_j), ``(K, F)``, of responsibilities ``(K, n)`` and columns ``(d, n)``.

    With the weights ``(K, F)`` of a mixture, missing entries that depend on others are completed by it.
    """
    location, deviations = (
        component.location,
        deviations_from(component, columns, centres, weights),
    )
    if deviations is None or location is None:
        return contract(omega, component.statistics(columns))
    if weights is None or location.completed is None:
        return location.sums(omega, deviations)
    return location.completed(weights, omega, deviations)


def deviations_from(
    component: Component, columns: Array, centres: Array | None, weights: Array | None
) -> Array | None:
    """The columns ``(d, n)`` less the centres, ``(K, d, n)``; None where all components share their statistics.

    They do not where a mixture, whose weights are given, completes rows.
    """
    if centres is not None:
        return columns - centres[..., None]
    if (
        weights is None
        or component.location is None
        or component.location.completed is None
    ):
        return None
    return jnp.broadcast_to(columns, (weights.shape[0], *columns.shape))


def rounding_losses(
    component: Component, mixture: Coefficients, spacing: Array
) -> Array:
    """What data that are off by ``spacing`` ``(K, d)`` take from a log density, ``(K,)``, in nats."""
    change = component.statistics(spacing.T) - component.statistics(
        jnp.zeros_like(spacing.T)
    )
    return jnp.sum(jnp.abs(mixture.weights * change.T), axis=-1)


def normalise(joint: Array, weight: Array) -> tuple[Array, Array]:
    """Responsibilities omega_ij ∝ exp(l_ij) times the weights, ``(K, n)``, and the sum of logsumexp_j l_ij."""
    # A maximum has no part in derivatives, but its own derivative would cost.
    peak = jax.lax.stop_gradient(jnp.max(joint, axis=0))
    unnormalised = jnp.exp(joint - peak)
    total = jnp.sum(unnormalised, axis=0)
    return unnormalised * (weight / total), jnp.sum(weight * (peak + jnp.log(total)))


def responsibilities(
    component: Component, mixture: Coefficients, blocks: Blocks
) -> Array:
    """Responsibilities in blocks, ``(P, B, K, b)``."""

    def of_block(columns: Array) -> Array:
        return jax.nn.softmax(log_joint(component, mixture, columns), axis=0)

    return jax.vmap(partial(jax.lax.map, of_block))(blocks.columns)


def block_sums(
    component: Component, mixture: Coefficients, columns: Array, weight: Array
) -> Sums:
    """The sums of one block, columns ``(d, b)``, about the mixture's centres."""
    omega, log_sum = normalise(log_joint(component, mixture, columns), weight)
    statistics = weighted_statistics(
        component, omega, columns, mixture.centres, mixture.weights
    )
    return Sums(log_sum, jnp.sum(omega, axis=1), statistics)


def sweep(component: Component, mixture: Coefficients, blocks: Blocks) -> Sums:
    """Responsibilities, and the sums under them about the mixture's centres (CA18, Algorithm 1)."""
    return over_blocks(partial(block_sums, component, mixture), blocks)


def accumulate(
    component: Component,
    responsibilities: Array,
    blocks: Blocks,
    centres: Array | None = None,
) -> Sums:
    """The sums under given responsibilities ``(P, B, K, b)``; their ``log_sum`` is 0."""

    def terms(columns: Array, weight: Array, omega: Array) -> Sums:
        weighted = omega * weight
        statistics = weighted_statistics(component, weighted, columns, centres)
        return Sums(jnp.zeros((), weight.dtype), jnp.sum(weighted, axis=1), statistics)

    return over_blocks(terms, blocks, responsibilities)


def contract(omega: Array, statistics: Array) -> Array:
    """Σ_i omega_ji T_k(x_i), of ``(K, b)`` and ``(F, b)``."""
    return jax.lax.dot_general(
        omega, statistics, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )


def over_blocks(terms: Callable[..., T], blocks: Blocks, *more: Array) -> T:
    """Sums of the terms of all blocks, compensated from block to block, and over shards by the compiler."""

    def of_shard(*arrays: Array) -> T:
        if blocks.weight.shape[1] == 1:
            return terms(*(each[0] for each in arrays))

        def add(i: Array, running: T) -> T:
            return add_terms(
                running,
                terms(
                    *(
                        jax.lax.dynamic_index_in_dim(a, i, keepdims=False)
                        for a in arrays
                    )
                ),
            )

        first = jax.eval_shape(terms, *(each[0] for each in arrays))
        start = jax.tree.map(
            lambda leaf: CompensatedSum.start(jnp.zeros(leaf.shape, leaf.dtype)), first
        )
        # As an operand, so that another number of blocks is the same program.
        number = (blocks.num_rows + blocks.weight.shape[2] - 1) // blocks.weight.shape[
            2
        ]
        return total_of(jax.lax.fori_loop(0, number, add, start))

    arrays = (blocks.columns, blocks.weight, *more)
    if blocks.weight.shape[0] == 1:
        return of_shard(*(each[0] for each in arrays))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(of_shard)(*arrays))


def base_sum(component: Component, blocks: Blocks) -> Array:
    """The weighted sum of log h."""
    return over_blocks(
        lambda columns, weight: jnp.sum(weight * component.log_base(columns)), blocks
    )


def add_terms(running: T, terms: T) -> T:
    """A tree of compensated sums with one more term each."""
    return jax.tree.map(CompensatedSum.add, running, terms, is_leaf=_is_sum)


def total_of(running: T) -> T:
    """The values of a tree of compensated sums."""
    return jax.tree.map(
        lambda total: total.value + total.error, running, is_leaf=_is_sum
    )


def _is_sum(value: object) -> bool:
    return isinstance(value, CompensatedSum)
