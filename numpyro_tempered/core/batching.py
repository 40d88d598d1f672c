"""Rows of a pytree: some of them, and a function of one over all, batch by batch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core.programs import compile_once
from numpyro_tempered.core.typing import ArrayLike

# A pytree of rows, and of their values.
Rows = TypeVar("Rows")
Values = TypeVar("Values")


def at_index(tree: Values, index: ArrayLike) -> Values:
    """The arrays of a pytree at one index, or several, of their leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def map_batches(
    function: Callable[[Rows], Values], rows: Rows, batch_size: int
) -> Values:
    """As ``jax.lax.map(function, rows, batch_size=batch_size)``, in batches of one size.

    ``lax.map`` compiles the function once for the batches and again for the remainder. Here the first rows fill
    up the last batch.

    Args:
        function: A function of one row.
        rows: A pytree of arrays ``(S, ...)``.
        batch_size: Limit of the rows in a batch.

    Returns:
        The values of the function, with a leading axis of S.

    Raises:
        ValueError: If the leading axes differ.
    """
    lengths = sorted({leaf.shape[0] for leaf in jax.tree.leaves(rows)})
    if len(lengths) != 1:
        raise ValueError(
            f"rows must have one common leading axis, got axes of {lengths}."
        )
    (num_rows,) = lengths
    num_batches = max(1, -(-num_rows // batch_size))
    each = max(1, -(-num_rows // num_batches))
    short = num_batches * each - num_rows
    if num_rows and short:
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:short]]), rows)
    mapped = jax.lax.map(function, rows, batch_size=each)
    return (
        jax.tree.map(lambda leaf: leaf[:num_rows], mapped)
        if num_rows and short
        else mapped
    )


def compiled_map(
    function: Callable[[Rows], Values], rows: Rows, batch_size: int
) -> Values:
    """:func:`map_batches` as one program, outside of transformations: see :func:`compile_once`."""
    return compile_once(lambda rows: map_batches(function, rows, batch_size), rows)(
        rows
    )
