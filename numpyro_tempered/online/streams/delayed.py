"""Labels that come late: what a prediction was made from waits for its outcome."""

import datetime
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Numbers,
    at_index,
    check_count,
    is_traced,
    stream_arrays,
)

_EXPECTED = "ids must be whole numbers of up to 64 bits"


class Pending(NamedTuple):
    """Data that wait for their outcomes: a pytree of arrays, which jits, vmaps and saves like a state.

    Attributes:
        ids: Their identifiers as words, shape ``(capacity, 2)``; see :func:`id_words`.
        waiting: Which places are in use, shape ``(capacity,)``.
        order: Their place in the order of arrival, shape ``(capacity,)``.
        data: The data, a tuple of arrays ``(capacity, ...)``.
        written: Number of data remembered so far, a scalar integer.
        dropped: Number of data pushed out before their outcome came, a scalar integer.
    """

    ids: Array
    waiting: Array
    order: Array
    data: tuple[object, ...]
    written: Array
    dropped: Array


def pending(capacity: int, *datum: object) -> Pending:
    """An empty store for data whose outcomes come later.

    Predict by the present posterior, :func:`remember` the features, and when outcomes come :func:`recall` them
    for :func:`update`. That update takes its gradient at the posterior of that moment, not at the one that
    predicted, so its losses are not those of the predictions. For these, remember the prediction too.

    Args:
        capacity: How many may wait; beyond it the oldest are pushed out and counted in ``dropped``.
        *datum: What to remember of one datum, for its shapes and dtypes, such as ``x`` of shape ``(d,)``. A store
            of integers takes integers alone.

    Returns:
        A :class:`Pending`.

    Raises:
        ValueError: If ``capacity`` < 1.
        TypeError: If the datum is not numbers.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> store = nt.online.pending(100, jnp.zeros(2))
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> store = nt.online.remember(store, np.array([7, 8]), x)
        >>> predictions = x @ state.posterior.loc
        >>> (x,), present, store = nt.online.recall(store, np.array([8]))  # the outcome of 8 has come
        >>> state, losses = nt.online.update(rule, loss, state, x, np.array([3.0]), mask=present)
        >>> int(state.count), int(store.waiting.sum())
        (1, 1)
    """
    check_count(capacity, "capacity")

    def room(leaf: Array) -> Array:
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return jnp.zeros(
            (capacity, *leaf.shape), jnp.float32 if is_narrow else leaf.dtype
        )

    data = jax.tree.map(room, stream_arrays(datum))
    written, dropped = (jnp.zeros((), jnp.int32) for _ in range(2))
    return Pending(
        jnp.zeros((capacity, 2), jnp.uint32),
        jnp.zeros((capacity,), bool),
        jnp.zeros((capacity,), jnp.int32),
        data,
        written,
        dropped,
    )


def remember(store: Pending, ids: object, *data: object) -> Pending:
    """The store with n more data in it; a pure function.

    Args:
        store: From :func:`pending`.
        ids: Whole numbers that identify them, of up to 64 bits, shape ``(n,)``, n at most the capacity; or their
            :func:`id_words`. Where one is waiting already, the later datum takes its place.
        *data: Arrays ``(n, ...)``, as the data of :func:`pending` with a leading axis.

    Returns:
        The store.

    Raises:
        ValueError: If shapes do not fit, or an identifier is not a whole number of up to 64 bits.
        TypeError: If identifiers are dates, text or booleans, or integers would be made of other data.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> store = nt.online.pending(1, jnp.zeros(()))
        >>> store = nt.online.remember(store, np.array([1]), np.array([10.0]))
        >>> store = nt.online.remember(store, np.array([2]), np.array([20.0]))
        >>> int(store.dropped)
        1
    """
    capacity = store.ids.shape[0]
    words = jnp.asarray(id_words(ids))
    arrays = stream_arrays(data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    count = words.shape[0]
    needed = [(count, *leaf.shape[1:]) for leaf in jax.tree.leaves(store.data)]
    if count > capacity or shapes != needed:
        raise ValueError(
            f"expected ids of shape (n,), n <= {capacity}, and data of shapes {needed}, got ids of shape "
            f"{(count,)} and {shapes}."
        )
    waiting = store.waiting & ~jnp.any(_equal(store.ids, words), axis=1)
    # Free places first, then those of the oldest.
    places = jnp.argsort(jnp.where(waiting, store.order, -1))[:count]
    # Of repeated ids the last one counts.
    later = jnp.triu(_equal(words, words), 1)
    return Pending(
        ids=store.ids.at[places].set(words),
        waiting=waiting.at[places].set(~jnp.any(later, axis=1)),
        order=store.order.at[places].set(
            store.written + jnp.arange(count, dtype=jnp.int32)
        ),
        data=jax.tree.map(
            lambda old, new: old.at[places].set(_as_stored(new, old.dtype)),
            store.data,
            arrays,
        ),
        written=store.written + count,
        dropped=store.dropped + jnp.sum(waiting[places], dtype=jnp.int32),
    )


def recall(store: Pending, ids: object) -> tuple[tuple[object, ...], Array, Pending]:
    """Take data out of the store, by their identifiers; a pure function.

    Args:
        store: From :func:`remember`.
        ids: As for :func:`remember`, without repetition.

    Returns:
        The data, arrays ``(n, ...)``; which of them were there, boolean ``(n,)``, the ``mask`` for
        :func:`update`; and the store without them.

    Raises:
        ValueError: If an identifier is not a whole number of up to 64 bits.
        TypeError: If identifiers are dates, text or booleans.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> store = nt.online.pending(3, jnp.zeros(()))
        >>> store = nt.online.remember(store, np.array([1, 2]), np.array([10.0, 20.0]))
        >>> (value,), present, store = nt.online.recall(store, np.array([2, 5]))
        >>> float(value[0]), present.tolist(), store.waiting.tolist()
        (20.0, [True, False], [True, False, False])
    """
    match = store.waiting[:, None] & _equal(store.ids, jnp.asarray(id_words(ids)))
    places = jnp.argmax(match, axis=0)
    data = at_index(store.data, places)
    return (
        data,
        jnp.any(match, axis=0),
        store._replace(waiting=store.waiting & ~jnp.any(match, axis=1)),
    )


def id_words(ids: object) -> Numbers:
    """Write identifiers of up to 64 bits as two words of 32.

    :func:`remember` and :func:`recall` take them in place of the identifiers. Without double precision JAX cuts
    64-bit integers of NumPy's to 32 bits on their way into a function under ``jax.jit``: pass words to it.

    Args:
        ids: Integers from -2^63 to 2^64 - 1, shape ``(n,)``; two that differ by 2^64 have the same words. Floats
            that are whole will do, as far as their dtype holds every integer.

    Returns:
        Unsigned integers of 32 bits, ``(n, 2)``, the low word first: NumPy's, unless ``ids`` are traced.

    Raises:
        ValueError: If one is not a whole number, or has more than 64 bits, or their shape is another.
        TypeError: If they are dates, text or booleans.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.id_words([7, 2**40 + 7, -1])
        array([[         7,          0],
               [         7,        256],
               [4294967295, 4294967295]], dtype=uint32)
    """
    if not isinstance(ids, jax.Array):
        value = ids.to_numpy() if hasattr(ids, "to_numpy") else ids
        # NumPy makes floats of some lists of integers.
        ids = np.asarray(value, object if isinstance(value, list | tuple) else None)
    if ids.dtype == np.uint32 and ids.ndim == 2 and ids.shape[1] == 2:
        return ids
    if ids.ndim != 1:
        raise ValueError(f"ids must have shape (n,), got {ids.shape}.")
    if is_traced(ids) and jnp.issubdtype(ids.dtype, jnp.integer):
        high = ids >> 32 if ids.dtype.itemsize == 8 else jnp.where(ids < 0, -1, 0)
        return jnp.stack([ids.astype(jnp.uint32), high.astype(jnp.uint32)], axis=-1)
    if is_traced(ids):
        raise TypeError(f"{_EXPECTED}, got {ids.dtype}.")
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        array = np.array([_as_uint64(entry) for entry in array], np.uint64)
    return array.astype("<u8")[..., None].view("<u4")


def _as_uint64(entry: object) -> int:
    """Return an entry that is a whole number, modulo 2^64."""
    advice = ""
    if isinstance(entry, float | np.floating):
        if not float(entry).is_integer():
            raise ValueError(f"{_EXPECTED}, got {entry}.")
        # Beyond, several integers have one floating number.
        if abs(entry) <= 2 ** (np.finfo(type(entry)).nmant + 1):
            return int(entry) % 2**64
        raise ValueError(
            f"{_EXPECTED}, got {entry}, a float that does not tell integers apart: pass integers."
        )
    if isinstance(
        entry, datetime.date | datetime.timedelta | np.datetime64 | np.timedelta64
    ):
        advice = (
            " Pass numbers, such as np.asarray(ids, 'datetime64[us]').astype(np.int64)."
        )
    elif isinstance(entry, str | bytes):
        advice = " Pass 64 bits of a hash, such as int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])."
    elif not isinstance(entry, bool | np.bool_) and hasattr(entry, "__index__"):
        number = operator.index(entry)
        if -(2**63) <= number < 2**64:
            return number % 2**64
        raise ValueError(
            f"{_EXPECTED}, got {number}. Pass 64 bits of it, such as number >> 64."
        )
    raise TypeError(
        f"{_EXPECTED}, got the {type(entry).__name__} {str(entry)!r:.40}.{advice}"
    )


def _equal(a: Array, b: Array) -> Array:
    """Compare words ``(m, 2)`` and ``(n, 2)``, all with all, ``(m, n)``."""
    return jnp.all(a[:, None] == b[None, :], axis=-1)


def _as_stored(new: Array, dtype: np.dtype) -> Array:
    """Return data in the dtype of the store.

    Raises:
        TypeError: If integers would be made of other numbers.
    """
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not (is_floating or np.can_cast(new.dtype, dtype, "safe")):
        with np.errstate(invalid="ignore"):
            is_kept = not is_traced(new) and np.array_equal(
                np.asarray(new).astype(dtype), new
            )
        if not is_kept:
            raise TypeError(
                f"the store holds {dtype}, as its datum in pending, and would change {new.dtype}: give pending a "
                "datum of floats, or of wider integers."
            )
    return new.astype(dtype)
