"""Labels that come late: what a prediction was made from waits for its outcome."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.typing import Array, ArrayLike


class Pending(NamedTuple):
    """Data that wait for their outcomes: a pytree of arrays, which jits, vmaps and saves like a state.

    Attributes:
        ids: Their identifiers, shape ``(capacity,)``.
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
        *datum: What to remember of one datum, for its shapes and dtypes, such as ``x`` of shape ``(d,)``.

    Returns:
        A :class:`Pending`.

    Raises:
        ValueError: If ``capacity`` < 1.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
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
    data = jax.tree.map(lambda leaf: jnp.zeros((capacity, *jnp.shape(leaf)), jnp.result_type(leaf)), datum)
    ids, order = (jnp.zeros((capacity,), jnp.int32) for _ in range(2))
    written, dropped = (jnp.zeros((), jnp.int32) for _ in range(2))
    return Pending(ids, jnp.zeros((capacity,), bool), order, data, written, dropped)


def remember(store: Pending, ids: ArrayLike, *data: object) -> Pending:
    """The store with n more data in it; a pure function.

    Args:
        store: From :func:`pending`.
        ids: Integers that identify them, shape ``(n,)``, n at most the capacity. Where one is waiting already,
            the later datum takes its place.
        *data: Arrays ``(n, ...)``, as the data of :func:`pending` with a leading axis.

    Returns:
        The store.

    Raises:
        ValueError: If shapes do not fit.

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
    ids = jnp.asarray(ids, jnp.int32)
    arrays = jax.tree.map(jnp.asarray, data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    needed = [(*ids.shape, *leaf.shape[1:]) for leaf in jax.tree.leaves(store.data)]
    if ids.ndim != 1 or ids.shape[0] > capacity or shapes != needed:
        raise ValueError(
            f"expected ids of shape (n,), n <= {capacity}, and data of shapes {needed}, got ids of shape "
            f"{ids.shape} and {shapes}."
        )
    (count,) = ids.shape
    waiting = store.waiting & ~jnp.any(store.ids[:, None] == ids[None, :], axis=1)
    # Free places first, then those of the oldest.
    places = jnp.argsort(jnp.where(waiting, store.order, -1))[:count]
    # Of repeated ids the last one counts.
    later = jnp.triu(ids[:, None] == ids[None, :], 1)
    return Pending(
        ids=store.ids.at[places].set(ids),
        waiting=waiting.at[places].set(~jnp.any(later, axis=1)),
        order=store.order.at[places].set(store.written + jnp.arange(count, dtype=jnp.int32)),
        data=jax.tree.map(lambda old, new: old.at[places].set(new.astype(old.dtype)), store.data, arrays),
        written=store.written + count,
        dropped=store.dropped + jnp.sum(waiting[places], dtype=jnp.int32),
    )


def recall(store: Pending, ids: ArrayLike) -> tuple[tuple[object, ...], Array, Pending]:
    """Take data out of the store, by their identifiers; a pure function.

    Args:
        store: From :func:`remember`.
        ids: Shape ``(n,)``, without repetition.

    Returns:
        The data, arrays ``(n, ...)``; which of them were there, boolean ``(n,)``, the ``mask`` for
        :func:`update`; and the store without them.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> store = nt.online.pending(3, jnp.zeros(()))
        >>> store = nt.online.remember(store, np.array([1, 2]), np.array([10.0, 20.0]))
        >>> (value,), present, store = nt.online.recall(store, np.array([2, 5]))
        >>> float(value[0]), present.tolist(), store.waiting.tolist()
        (20.0, [True, False], [True, False, False])
    """
    ids = jnp.asarray(ids, jnp.int32)
    match = store.waiting[:, None] & (store.ids[:, None] == ids[None, :])
    places = jnp.argmax(match, axis=0)
    data = jax.tree.map(lambda leaf: leaf[places], store.data)
    return data, jnp.any(match, axis=0), store._replace(waiting=store.waiting & ~jnp.any(match, axis=1))
