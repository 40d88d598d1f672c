"""Ragged batches, padded so that one compilation serves many sizes."""

from typing import Any

import jax
import numpy as np


def pad_batch(*data: Any, size: int | None = None) -> tuple[tuple[Any, ...], np.ndarray]:
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
    data = jax.tree.map(np.asarray, data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(data)]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(f"pad_batch needs arrays with one common leading axis, got shapes {shapes}.")
    num_rows: int = shapes[0][0]
    size = 1 << max(num_rows - 1, 0).bit_length() if size is None else size
    if not num_rows <= size or size < 1:
        raise ValueError(f"a batch of {num_rows} rows does not fit size = {size}.")
    return jax.tree.map(lambda leaf: grow(leaf, size), data), np.arange(size) < num_rows


def grow(leaf: np.ndarray, size: int) -> np.ndarray:
    """The array with ``size`` rows: copies of its last, or zeros where it has none."""
    missing = size - leaf.shape[0]
    if missing == 0:
        return leaf
    last = leaf[-1:] if len(leaf) else np.zeros((1, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(last, missing, axis=0)])
