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

    Raises:
        ValueError: If the leading axes differ.
    """
    lengths = sorted({leaf.shape[0] for leaf in jax.tree.leaves(rows)})
    if len(lengths) != 1:
        raise ValueError(f"rows must have one common leading axis, got axes of {lengths}.")
    (num_rows,) = lengths
    num_batches = max(1, -(-num_rows // batch_size))
    each = max(1, -(-num_rows // num_batches))
    short = num_batches * each - num_rows
    if num_rows and short:
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:short]]), rows)
    mapped = jax.lax.map(function, rows, batch_size=each)
    return jax.tree.map(lambda leaf: leaf[:num_rows], mapped) if num_rows and short else mapped


def compiled_map(function: Callable[[Any], Any], rows: Any, batch_size: int) -> Any:
    """:func:`map_batches` as one program, outside of transformations.

    What the function closes over, such as the data of a model, is an operand of the program: compilation does not
    look at its values, and a compilation cache finds the program again for other data of the same shapes.
    """
    program, operands, shapes = operand_program(function, rows, batch_size)
    return jax.tree.unflatten(jax.tree.structure(shapes), program(*operands))


def operand_program(function: Callable[[Any], Any], rows: Any, batch_size: int) -> tuple[Any, tuple, Any]:
    """The program, what it is called with, and the shapes of the values."""

    def mapped(rows: Any) -> Any:
        return map_batches(function, rows, batch_size)

    closed, shapes = jax.make_jaxpr(mapped, return_shape=True)(rows)

    @jax.jit
    def mapped_rows(consts: list[Any], leaves: list[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

    return mapped_rows, (closed.consts, jax.tree.leaves(rows)), shapes
