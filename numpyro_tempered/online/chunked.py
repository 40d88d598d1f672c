"""Streams longer than the memory: an iterable of chunks, in one compilation."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import Losses, OnlineState, Rule
from numpyro_tempered.online.stream import check_data, compiled_loop
from numpyro_tempered.online.streams.diagnose import diagnose
from numpyro_tempered.online.streams.padding import grow

KEEP = ("rounds", "blocks", "nothing")


def run_chunks(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    chunks: Iterable[Any],
    *,
    rng_key: Array | None = None,
    size: int = 16384,
    skip: int = 0,
    keep: str = "rounds",
    progress_bar: bool = False,
    total: int | None = None,
) -> tuple[OnlineState, Losses | None]:
    """One pass over a stream that comes in chunks, each row a round.

    The numbers are those of :func:`run` on all rows at once, to the last bit, however the rows are cut. Memory
    is that of a few chunks and blocks, whatever the number of rows. Posteriors that have collapsed and the
    other findings of :func:`diagnose` are warned of at the end of the pass.

    A second pass counts the data a second time: an accumulating posterior then holds them twice. To go over
    the data k times and hold them once, divide the step size by k.

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier pass.
        chunks: Tuples of arrays as :func:`run` takes them, such as ``(x, y)``, with any number of rows each;
            one tuple of whole arrays in a list will do. ``nt.tables`` makes them from pandas and Parquet.
        rng_key: For expectations that draw.
        size: Rows in a block, the unit that is compiled; at least 2.
        skip: Rows to leave out at the start. A run that was saved goes on with
            ``skip=int(state.count + state.rejected)``.
        keep: What of the losses is returned: those of all ``"rounds"``, the averages of ``"blocks"`` over the
            rounds whose losses are finite, or ``"nothing"``. ``state.cumulative`` has the sums in any case.
        progress_bar: Whether to show rows and rows per second, by tqdm.
        total: Number of rows, where known, for the bar.

    Returns:
        The state, and :class:`Losses` of NumPy arrays, shape ``(T,)`` for rounds or one a block, or None for
        nothing.

    Raises:
        ValueError: If there is no chunk (an iterator is used up by a pass), a chunk does not look like the
            first, or shapes or labels do not fit the loss.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = np.eye(2), np.array([1.0, -1.0])
        >>> chunks = [(x, y), (x[:1], y[:1])]
        >>> state, losses = nt.online.run_chunks(rule, nt.expectations.squared(), state, chunks)
        >>> int(state.count), losses.at_mean.shape
        (3, (3,))
    """
    if keep not in KEEP:
        raise ValueError(f"keep must be one of {KEEP}, got {keep!r}.")
    kept: list[Any] = []

    def keep_losses(losses: Losses) -> int:
        # Waits for the block to be computed, while the next one is under way.
        on_host = [np.asarray(loss) for loss in losses]
        if keep == "rounds":
            kept.append(on_host)
        elif keep == "blocks":
            kept.append([_average(loss) for loss in on_host])
        return len(on_host[0])

    iterator = iter(chunks)
    first = next(iterator, None)
    stream = iterator if first is None else itertools.chain([first], iterator)
    waiting: Losses | None = None
    with _bar(total) if progress_bar else contextlib.nullcontext() as bar:
        passes = iterate_chunks(rule, expectation, state, stream, rng_key=rng_key, size=size, skip=skip)
        for after, losses in passes:
            state = after
            done = 0 if waiting is None else keep_losses(waiting)
            waiting = losses
            if bar is not None:
                bar.update(done)
        done = 0 if waiting is None else keep_losses(waiting)
        if bar is not None:
            bar.update(done)
    if isinstance(state, OnlineState):
        diagnose(rule, state, _features(first, size))
    if keep == "nothing":
        return state, None
    columns: list[Any] = [np.concatenate(column) for column in zip(*kept, strict=True)] or [np.empty(0)] * 2
    return state, Losses(*columns)


def iterate_chunks(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    chunks: Iterable[Any],
    *,
    rng_key: Array | None = None,
    size: int = 16384,
    skip: int = 0,
) -> Iterator[tuple[OnlineState, Losses]]:
    """:func:`run_chunks` as an iterator over blocks, for what is to be done in between, such as :func:`save`.

    Args:
        rule: An online rule.
        expectation: E_q of a bare loss.
        state: From ``rule.init(prior)`` or an earlier round.
        chunks: As in :func:`run_chunks`.
        rng_key: For expectations that draw.
        size: Rows in a block, at least 2.
        skip: Rows to leave out at the start.

    Yields:
        The state after each block of ``size`` rows (the last may have fewer), and its :class:`Losses`, one
        entry a round. They may still be under way: JAX waits for them where they are read.

    Raises:
        ValueError: As :func:`run_chunks`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> chunks = [(np.ones((5, 1)), np.ones(5))]
        >>> for state, losses in nt.online.iterate_chunks(rule, loss, state, chunks, size=2):
        ...     print(int(state.count))
        2
        4
        5
    """
    before: Losses | None = None
    for block, num_rounds in blocks(chunks, size, skip):
        check_data(expectation, jax.tree.map(lambda leaf, n=num_rounds: leaf[:n], block))
        state, losses = compiled_loop(
            rule, expectation, state, jax.tree.map(jnp.asarray, block), rng_key, num_rounds, None
        )
        # A reader that is faster than the rule would fill the memory with blocks that wait.
        jax.block_until_ready(before)
        before = losses
        yield state, losses if num_rounds == size else jax.tree.map(lambda leaf, n=num_rounds: leaf[:n], losses)


def blocks(chunks: Iterable[Any], size: int, skip: int = 0) -> Iterator[tuple[Any, int]]:
    """The rows of the chunks in blocks of exactly ``size`` rows, the last one padded, and their number.

    Raises:
        ValueError: If ``size`` is less than 2, there is no chunk, or a chunk does not look like the first.
    """
    if size < 2:
        # A loop over a single row is compiled to other arithmetic.
        raise ValueError(f"size must be at least 2, got {size}.")
    first: Any = None
    parts: list[Any] = []
    held = 0
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, tuple | list):
            raise ValueError(f"a chunk must be a tuple of arrays, such as (x, y), got {type(chunk).__name__}.")
        chunk = jax.tree.map(np.asarray, tuple(chunk))
        shapes = [leaf.shape for leaf in jax.tree.leaves(chunk)]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            raise ValueError(f"chunk {number} needs arrays with one common leading axis, got shapes {shapes}.")
        if first is None:
            first = jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), chunk)
        chunk = like_first(chunk, first, number)
        num_rows = shapes[0][0]
        start = min(skip, num_rows)
        skip -= start
        while start < num_rows:
            stop = min(num_rows, start + size - held)
            parts.append(jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], chunk))
            held += stop - start
            start = stop
            if held == size:
                yield _join(parts), size
                parts, held = [], 0
    if first is None:
        raise ValueError(
            "the stream has no chunk. An iterator is used up by one pass: make it anew for each, or give a list."
        )
    if held:
        yield jax.tree.map(lambda leaf: grow(leaf, size), _join(parts)), held


def like_first(chunk: Any, first: Any, number: int) -> Any:
    """The chunk with the dtypes of the first.

    Raises:
        ValueError: If the structure or the shape of a row differ, or a dtype does not fit.
    """

    def row(part: Any) -> list[tuple[Any, ...]]:
        return [leaf.shape[1:] for leaf in jax.tree.leaves(part)]

    structures: list[Any] = [jax.tree.structure(part) for part in (chunk, first)]
    if structures[0] != structures[1] or row(chunk) != row(first):
        raise ValueError(
            f"chunk {number} has rows of shapes {row(chunk)}, the first chunk of {row(first)}: all must agree."
        )

    def cast(leaf: np.ndarray, model: np.ndarray) -> np.ndarray:
        if not np.can_cast(leaf.dtype, model.dtype, "same_kind"):
            raise ValueError(
                f"chunk {number} holds {leaf.dtype} where the first chunk holds {model.dtype}: give one dtype to "
                "all, such as float."
            )
        return leaf.astype(model.dtype, copy=False)

    return jax.tree.map(cast, chunk, first)


def _join(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _average(loss: Any) -> np.ndarray:
    finite = loss[np.isfinite(loss)].astype(float)
    return np.asarray([finite.mean() if finite.size else np.nan])


def _features(chunk: Any, size: int) -> np.ndarray | None:
    """The first rows of a chunk's first array, where that is a matrix of features."""
    leaves = jax.tree.leaves(chunk)
    if not leaves or np.ndim(leaves[0]) < 2:
        return None
    x = np.asarray(leaves[0][:size])
    return np.reshape(x, (-1, x.shape[-1])) if np.issubdtype(x.dtype, np.number) else None


def _bar(total: int | None) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=" rows", unit_scale=True, mininterval=0.5)
