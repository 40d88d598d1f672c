"""Pytrees in few flat arrays, for programs that are called so often that each argument counts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.rows import as_array
from numpyro_tempered.core.typing import Array, PyTree, Shape

# Larger leaves stay as they are: to copy them would cost more than an argument does.
MAX_SIZE = 4096
# What NumPy reads in a microsecond, and as numbers, unless the dtype says otherwise.
_QUICK = {np.ndarray, list, tuple, float, int, np.float64, np.float32}


class Slot(NamedTuple):
    """Where a leaf is: the number of its array, its first entry there, its shape, the kind of a random key."""

    array: int
    start: int
    shape: Shape
    impl: str | None = None


class Packing(NamedTuple):
    """How the leaves of a pytree lie in flat arrays; hashable.

    Attributes:
        tree: The structure.
        slots: One for each leaf.
        kinds: Shape and dtype of each array.
    """

    tree: jax.tree_util.PyTreeDef
    slots: tuple[Slot, ...]
    kinds: tuple[tuple[Shape, np.dtype], ...]


def packing_of(tree: PyTree, max_size: float = MAX_SIZE) -> Packing:
    """The packing of arrays or their shapes: one array for all small leaves of a dtype, one for each large."""
    leaves, structure = jax.tree.flatten(tree)
    sizes: dict[object, int] = {}
    slots: list[tuple[object, int, Shape, str | None]] = []
    for number, leaf in enumerate(leaves):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
        impl = str(jax.random.key_impl(leaf)) if is_key else None
        size, dtype = math.prod(data.shape), np.dtype(data.dtype)
        # A number for large leaves.
        where: object = dtype if size <= max_size else (number, data.shape, dtype)
        slots.append((where, sizes.get(where, 0), data.shape, impl))
        sizes[where] = sizes.get(where, 0) + size
    order = {where: position for position, where in enumerate(sizes)}
    kinds = tuple(
        (where[1], where[2]) if isinstance(where, tuple) else ((size,), where)
        for where, size in sizes.items()
    )
    numbered = [Slot(order[where], *rest) for where, *rest in slots]  # type: ignore[arg-type]
    return Packing(structure, tuple(numbered), kinds)  # type: ignore[arg-type]


def pack(packing: Packing, tree: PyTree) -> tuple[Array, ...]:
    """The flat arrays of a tree of this packing."""
    parts: list[list[Array]] = [[] for _ in packing.kinds]
    for slot, leaf in zip(packing.slots, jax.tree.leaves(tree), strict=True):
        shape, dtype = packing.kinds[slot.array]
        data = jnp.asarray(
            leaf if slot.impl is None else jax.random.key_data(leaf), dtype
        )
        parts[slot.array].append(data if len(shape) != 1 else jnp.ravel(data))
    return tuple(part[0] if len(part) == 1 else jnp.concatenate(part) for part in parts)


def unpack(packing: Packing, arrays: tuple[Array, ...]) -> PyTree:
    """The tree of flat arrays."""

    def leaf(slot: Slot) -> Array:
        data = arrays[slot.array]
        if data.shape != slot.shape:
            data = data[slot.start : slot.start + math.prod(slot.shape)].reshape(
                slot.shape
            )
        return (
            data
            if slot.impl is None
            else jax.random.wrap_key_data(data, impl=slot.impl)
        )

    return jax.tree.unflatten(packing.tree, [leaf(slot) for slot in packing.slots])


class Inputs:
    """Buffers of NumPy's that take the arrays of a call, one for each dtype; ``arrays`` are views of them."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.buffers = tuple(np.zeros(shape, dtype) for shape, dtype in packing.kinds)
        self.arrays = tuple(
            self.buffers[slot.array]
            .reshape(-1)[slot.start : slot.start + math.prod(slot.shape)]
            .reshape(slot.shape)
            for slot in packing.slots
        )

    def fill(self, values: tuple[object, ...]) -> tuple[np.ndarray, ...]:
        """The buffers with these values.

        Raises:
            TypeError: If there are more or fewer, or one is not real numbers.
            ValueError: If one is of another shape (a first axis of 1 may be left out), or the place of integers
                does not hold it.
        """
        if len(values) != len(self.arrays):
            raise TypeError(
                f"the call takes {len(self.arrays)} arrays, as at the start, got {len(values)}."
            )
        for number, (value, place) in enumerate(zip(values, self.arrays, strict=True)):
            array = read_numbers(value, number)
            if array.shape != place.shape and (1, *array.shape) != place.shape:
                raise ValueError(
                    f"array {number} must have shape {place.shape}, as at the start, got {array.shape}."
                )
            if place.dtype.kind in "biu" and array.dtype != place.dtype:
                _check_held(array, place.dtype, number)
            place[...] = array
        return self.buffers


def read_numbers(value: object, number: int) -> np.ndarray:
    """Read an argument of a call as an array of real numbers, quickly where it is NumPy's or Python's.

    Raises:
        TypeError: As :func:`~numpyro_tempered.core.rows.as_array`.
    """
    if type(value) in _QUICK:
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.empty(0, object)
        if array.dtype.kind in "fiub":
            return array
    return np.asarray(as_array(value, f"array {number}"))


def _check_held(array: np.ndarray, dtype: np.dtype, number: int) -> None:
    """Raise ValueError where integers or booleans would change numbers."""
    with np.errstate(invalid="ignore"):
        changed = array.astype(dtype) != array
    if np.any(changed):
        raise ValueError(
            f"array {number} must hold numbers of dtype {dtype}, as at the start and as the loss needs them, got "
            f"{array[changed].flat[0]}."
        )
