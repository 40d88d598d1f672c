"""Streams in pieces: chunks cut into blocks of one size, batches padded to one."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.processes import to_host
from numpyro_tempered.core.rows import held_arrays

T = TypeVar("T")
Chunk = TypeVar("Chunk", bound=tuple[object, ...])
# Shapes that a message shows.
MOST_SHAPES = 4


def blocks(
    chunks: Iterable[Chunk], size: int, skip: int = 0
) -> Iterator[tuple[Chunk, int]]:
    """The rows of the chunks in blocks of exactly ``size`` rows, the last one padded, and their number.

    Args:
        chunks: Tuples of arrays with any number of rows each.
        size: Rows in a block, at least 2: a loop over a single row is compiled to other arithmetic.
        skip: Rows to leave out at the start.

    Raises:
        TypeError: If a chunk does not hold real numbers.
        ValueError: If ``size`` is less than 2, there is no chunk, or a chunk does not look like the first.
    """
    check_count(size, "size", least=2)
    # No rows, with the shapes and dtypes of what came so far.
    model: Chunk | None = None
    parts: list[Chunk] = []
    num_rows = 0
    for number, chunk in enumerate(chunks):
        chunk = read_chunk(chunk, number)
        chunk_rows = len(jax.tree.leaves(chunk)[0])
        none = jax.tree.map(lambda leaf: leaf[:0], chunk)
        model = none if model is None else _joint(none, model, number)
        chunk = jax.tree.map(
            lambda leaf, like: leaf.astype(like.dtype, copy=False), chunk, model
        )
        start = min(skip, chunk_rows)
        skip -= start
        while start < chunk_rows:
            stop = min(chunk_rows, start + size - num_rows)
            parts.append(jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], chunk))
            num_rows += stop - start
            start = stop
            if num_rows == size:
                yield join(parts), size
                parts, num_rows = [], 0
    if model is None:
        raise ValueError(
            "the stream has no chunk. An iterator is used up by one pass: give a list, or a new one."
        )
    if num_rows:
        yield jax.tree.map(lambda leaf: grow(leaf, size), join(parts)), num_rows


def read_chunk(chunk: Chunk, number: int) -> Chunk:
    """Read a chunk as arrays of the host.

    Raises:
        TypeError: If it does not hold real numbers.
        ValueError: If it is no tuple of arrays with one common leading axis.
    """
    if not isinstance(chunk, tuple | list):
        raise ValueError(
            f"a chunk must be a tuple of arrays, such as (x, y), got {type(chunk).__name__}."
        )
    arrays = jax.tree.map(to_host, held_arrays(tuple(chunk), f"chunk {number}"))
    common_rows(arrays, f"chunk {number}")
    return arrays


def _joint(none: Chunk, model: Chunk, number: int) -> Chunk:
    """Return the model with dtypes that hold a further chunk too: integers of the first do not decide.

    Raises:
        ValueError: If the structure or the shape of a row differ.
    """
    shapes, expected = (
        [leaf.shape[1:] for leaf in jax.tree.leaves(part)] for part in (none, model)
    )
    if shapes != expected or jax.tree.structure(none) != jax.tree.structure(model):  # type: ignore[operator]
        raise ValueError(
            f"chunk {number} has rows of shapes {few(shapes)}, the first of {few(expected)}: all must agree."
        )
    return jax.tree.map(lambda *parts: np.concatenate(parts), none, model)


def few(shapes: Sequence[object]) -> str:
    """Name the first shapes, and how many more there are."""
    rest = f" and {len(shapes) - MOST_SHAPES} more" if len(shapes) > MOST_SHAPES else ""
    return f"{list(shapes[:MOST_SHAPES])}{rest}"


def join(parts: Sequence[T]) -> T:
    """Chunks of one structure as one, their rows in order."""
    return (
        parts[0]
        if len(parts) == 1
        else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    )


def pad_batch(
    *data: object, size: int | None = None
) -> tuple[tuple[object, ...], np.ndarray]:
    """A batch of n rows with more rows to reach ``size``, and the mask of those that are data.

    On the host, in NumPy: a padding by JAX would itself be compiled for each n.

    Args:
        *data: Arrays with one common leading axis of n rows, n >= 0.
        size: Number of rows to reach; by default the next power of two, so that batches of 1 to N rows have
            at most 1 + log2(N) shapes.

    Returns:
        The arrays with ``size`` rows, those added being copies of the last (zeros where there is none), and the
        mask ``(size,)`` for :func:`update`.

    Raises:
        ValueError: If there is no array, the leading axes differ, or there are more than ``size`` rows.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> (x, y), mask = nt.online.pad_batch(np.ones((3, 2)), np.array([1.0, 2.0, 3.0]))
        >>> y, mask
        (array([1., 2., 3., 3.]), array([ True,  True,  True, False]))
    """
    arrays = jax.tree.map(np.asarray, held_arrays(data, "the data of a batch"))
    num_rows = common_rows(arrays, "pad_batch")
    size = 1 << max(num_rows - 1, 0).bit_length() if size is None else size
    if not num_rows <= size or size < 1:
        raise ValueError(f"a batch of {num_rows} rows does not fit size = {size}.")
    return jax.tree.map(lambda leaf: grow(leaf, size), arrays), np.arange(
        size
    ) < num_rows


def common_rows(arrays: object, name: str, least: int = 0, *, hint: str = "") -> int:
    """The common number of rows of arrays.

    Raises:
        ValueError: If there is no array, an array has no axis or fewer rows than ``least``, or they disagree.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths or shapes[0][0] < least:
        rows = f" of at least {least}" if least else ""
        hint += (
            " Join lists of arrays by numpy.stack." if len(shapes) > MOST_SHAPES else ""
        )
        raise ValueError(
            f"{name} needs arrays with one common leading axis{rows}, got shapes {few(shapes)}.{hint}"
        )
    return shapes[0][0]


def grow(leaf: np.ndarray, size: int) -> np.ndarray:
    """The array with ``size`` rows: copies of its last, or zeros where it has none."""
    missing = size - leaf.shape[0]
    if missing == 0:
        return leaf
    last = leaf[-1:] if len(leaf) else np.zeros((1, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(last, missing, axis=0)])
