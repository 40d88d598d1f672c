"""A function over many rows, some at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_batches(function: Callable[[Any], Any], rows: Any, batch_size: int) -> Any:
    """As ``jax.lax.map(function, rows, batch_size=batch_size)``, in batches of one size.

    ``lax.map`` compiles the function once for the batches and again for what is left over. Here the first rows
    fill the last batch up.

    Args:
        function: Of one row.
        rows: A pytree of arrays ``(S, ...)``.
        batch_size: Of so many rows at once, at most.

    Returns:
        The values of the function, with a leading axis of S.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    num_batches = max(1, -(-num_rows // batch_size))
    each = max(1, -(-num_rows // num_batches))
    short = num_batches * each - num_rows
    if num_rows and short:
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:short]]), rows)
    mapped = jax.lax.map(function, rows, batch_size=each)
    return jax.tree.map(lambda leaf: leaf[:num_rows], mapped) if num_rows and short else mapped
