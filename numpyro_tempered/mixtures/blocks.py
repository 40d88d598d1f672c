"""Data in blocks that fit the cache, as columns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array

# Rows of a block times components times restarts: an array of this many numbers stays in the cache.
BLOCK = 2**15


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


def num_shards(x: Any) -> int:
    """How many pieces the rows of an array are in, one a device; 1 while traced."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
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
    """Values ``(P, B, ..., b)`` a block as rows ``(n, ...)``; the inverse of :func:`in_blocks`."""
    values = jnp.moveaxis(values, -1, 2)
    shards = values.shape[0]
    rows = jnp.reshape(values, (shards, -1, *values.shape[3:]))[:, : num_rows // shards]
    return jnp.reshape(rows, (num_rows, *rows.shape[2:]))


def host_mean(rows: Any, weight: Any) -> np.ndarray:
    """Weighted mean of each column ``(d,)`` in double precision, missing entries left out; 0 for an empty one."""
    x, w = np.asarray(rows, np.float64), np.asarray(weight, np.float64)[:, None]
    observed = ~np.isnan(x)
    total = np.sum(np.where(observed, w, 0.0), axis=0)
    return np.sum(np.where(observed, x * w, 0.0), axis=0) / np.where(total > 0, total, 1.0)
