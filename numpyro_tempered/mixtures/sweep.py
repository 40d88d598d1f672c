"""One pass over the data: blocks of rows, responsibilities, and the sums that follow from them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.precision import CompensatedSum, matmul
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component

T = TypeVar("T")
# Rows of a block times components times restarts: an array of this many numbers stays in the cache.
BLOCK = 2**15
# Nats that rounding of the data may take from the log density of a datum.
RESOLUTION = 1e-3


class Blocks(NamedTuple):
    """Rows in blocks, features first: what a pass over the data reads.

    Attributes:
        columns: Shape ``(P, B, d, b)``: P shards on their devices, B blocks of b rows each.
        weight: Shape ``(P, B, b)``, 0 where a row is padding.
    """

    columns: Array
    weight: Array


def block_size(num_rows: int, num_components: int) -> int:
    """Rows of a block, a multiple of 128 unless there are fewer."""
    size = min(max(BLOCK // num_components // 128 * 128, 128), 1024)
    return min(size, num_rows)


def num_shards(x: ArrayLike) -> int:
    """The number of pieces that the rows of an array are in, one on each device; 1 while traced."""
    if is_traced(x) or not isinstance(x, jax.Array):
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
    return Blocks(in_blocks(rows, size, shards), jnp.reshape(weights, (shards, -1, size)))


def out_of_blocks(values: Array, num_rows: int) -> Array:
    """Values in blocks ``(P, B, ..., b)`` as rows ``(n, ...)``; the inverse of :func:`in_blocks`."""
    values = jnp.moveaxis(values, -1, 2)
    shards = values.shape[0]
    rows = jnp.reshape(values, (shards, -1, *values.shape[3:]))[:, : num_rows // shards]
    return jnp.reshape(rows, (num_rows, *rows.shape[2:]))


class Coefficients(NamedTuple):
    r"""A mixture as a linear function of statistics.

    It is l_ij = log_weights_j + constant_j + ⟨weights_j, T(x_i - c_j)⟩.

    Attributes:
        log_weights: E log p_j, ``(K,)``.
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
    if mixture.centres is None:
        linear = matmul(mixture.weights, component.statistics(columns))
    else:
        linear = component.location.linear(mixture.weights, columns - mixture.centres[..., None])  # type: ignore[union-attr]
    return linear + (mixture.log_weights + mixture.constant)[:, None]


def weighted_statistics(component: Component, omega: Array, columns: Array, centres: Array | None) -> Array:
    """Σ_i omega_ji T(x_i - c_j), ``(K, F)``, of responsibilities ``(K, n)`` and columns ``(d, n)``."""
    if centres is None:
        return contract(omega, component.statistics(columns))
    return component.location.sums(omega, columns - centres[..., None])  # type: ignore[union-attr]


def rounding_losses(component: Component, mixture: Coefficients, spacing: Array) -> Array:
    """What data that are off by ``spacing`` ``(K, d)`` take from a log density, ``(K,)``, in nats."""
    change = component.statistics(spacing.T) - component.statistics(jnp.zeros_like(spacing.T))
    return jnp.sum(jnp.abs(mixture.weights * change.T), axis=-1)


def normalise(joint: Array, weight: Array) -> tuple[Array, Array]:
    """Responsibilities omega_ij ∝ exp(l_ij) times the weights, ``(K, n)``, and the sum of logsumexp_j l_ij."""
    # A maximum has no part in derivatives, but its own derivative would cost.
    peak = jax.lax.stop_gradient(jnp.max(joint, axis=0))
    unnormalised = jnp.exp(joint - peak)
    total = jnp.sum(unnormalised, axis=0)
    return unnormalised * (weight / total), jnp.sum(weight * (peak + jnp.log(total)))


def responsibilities(component: Component, mixture: Coefficients, blocks: Blocks) -> Array:
    """Responsibilities in blocks, ``(P, B, K, b)``."""

    def of_block(columns: Array) -> Array:
        return jax.nn.softmax(log_joint(component, mixture, columns), axis=0)

    return jax.vmap(partial(jax.lax.map, of_block))(blocks.columns)


def sweep(component: Component, mixture: Coefficients, blocks: Blocks) -> Sums:
    """Responsibilities, and the sums under them about the mixture's centres (CA18, Algorithm 1)."""

    def block_sums(columns: Array, weight: Array) -> Sums:
        omega, log_sum = normalise(log_joint(component, mixture, columns), weight)
        statistics = weighted_statistics(component, omega, columns, mixture.centres)
        return Sums(log_sum, jnp.sum(omega, axis=1), statistics)

    return over_blocks(block_sums, blocks)


def accumulate(
    component: Component, responsibilities: Array, blocks: Blocks, centres: Array | None = None
) -> Sums:
    """The sums under given responsibilities ``(P, B, K, b)``; their ``log_sum`` is 0."""

    def block_sums(columns: Array, weight: Array, omega: Array) -> Sums:
        weighted = omega * weight
        statistics = weighted_statistics(component, weighted, columns, centres)
        return Sums(jnp.zeros((), weight.dtype), jnp.sum(weighted, axis=1), statistics)

    return over_blocks(block_sums, blocks, responsibilities)


def contract(omega: Array, statistics: Array) -> Array:
    """Σ_i omega_ji T_k(x_i), of ``(K, b)`` and ``(F, b)``."""
    return jax.lax.dot_general(omega, statistics, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def over_blocks(block_sums: Callable[..., T], blocks: Blocks, *more: Array) -> T:
    """Sums over all blocks, compensated from block to block, and over shards by the compiler."""

    def scan_shard(columns: Array, weight: Array, *rest: Array) -> T:
        if columns.shape[0] == 1:
            return block_sums(columns[0], weight[0], *(each[0] for each in rest))

        def body(running: T, block: tuple[Array, ...]) -> tuple[T, None]:
            return add_terms(running, block_sums(*block)), None

        first = jax.eval_shape(block_sums, columns[0], weight[0], *(each[0] for each in rest))
        start = jax.tree.map(lambda leaf: CompensatedSum.start(jnp.zeros(leaf.shape, leaf.dtype)), first)
        running, _ = jax.lax.scan(body, start, (columns, weight, *rest))
        return total_of(running)

    arrays = (blocks.columns, blocks.weight, *more)
    if blocks.columns.shape[0] == 1:
        return scan_shard(*(each[0] for each in arrays))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(scan_shard)(*arrays))


def base_sum(component: Component, blocks: Blocks) -> Array:
    """The weighted sum of log h."""
    return over_blocks(lambda columns, weight: jnp.sum(weight * component.log_base(columns)), blocks)


def add_terms(running: T, terms: T) -> T:
    """A tree of compensated sums with one more term each."""
    return jax.tree.map(CompensatedSum.add, running, terms, is_leaf=_is_sum)


def total_of(running: T) -> T:
    """The values of a tree of compensated sums."""
    return jax.tree.map(lambda total: total.value + total.error, running, is_leaf=_is_sum)


def _is_sum(value: object) -> bool:
    return isinstance(value, CompensatedSum)
