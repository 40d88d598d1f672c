"""Streams longer than the memory: an iterable of chunks, in one compilation."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    blocks,
    check_choice,
    held_array,
    is_list,
    spans_processes,
    to_host,
)
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import Data, Losses, OnlineState, Rule, refuse_model
from numpyro_tempered.online.drivers import check_data, check_parts
from numpyro_tempered.online.stream import Rounds, compiled_loop
from numpyro_tempered.online.streams.diagnose import diagnose
from numpyro_tempered.online.streams.processes import (
    ADVICE,
    Placement,
    automatic_meshes,
    check_same,
    check_start,
    on_all_processes,
    replicate,
)

T = TypeVar("T")
P = ParamSpec("P")


def _rule_first(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse an ``OnlineVI`` as the first argument, of which Python would say that the chunks are missing."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for value in args[:1]:
            refuse_model(value)
        return function(*args, **kwargs)

    return checked


@_rule_first
def run_chunks(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    chunks: Iterable[Data],
    *,
    rng_key: Array | None = None,
    size: int = 16384,
    skip: int = 0,
    keep: str = "rounds",
    progress_bar: bool = False,
    total: int | None = None,
) -> tuple[OnlineState, Losses | None]:
    """One pass over a stream that comes in chunks; each row is a round.

    The numbers are those of :func:`run` on all rows at once, to the last bit, however the rows are cut. Memory
    is that of a few chunks and blocks, whatever the number of rows. The end of the pass warns of posteriors that
    have collapsed and of the other findings of :func:`diagnose`.

    A second pass counts the data a second time: an accumulating posterior then holds them twice. To go over
    the data k times and hold them once, divide the step size by k.

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier pass.
        chunks: Tuples of arrays as :func:`run` takes them, such as ``(x, y)``, with any number of rows each;
            one tuple of whole arrays in a list will do. ``nt.online`` makes them from pandas, CSV and Parquet.
        rng_key: For expectations that draw.
        size: Rows in a block, the unit that is compiled; at least 2.
        skip: Rows to leave out at the start. A run that was saved goes on with
            ``skip=int(state.count + state.rejected)``.
        keep: What of the losses is returned: those of all ``"rounds"``, the averages of ``"blocks"`` over the
            rounds whose losses are finite, or ``"nothing"``. ``state.cumulative`` has the sums in any case.
        progress_bar: Whether to show rows and rows per second, by tqdm.
        total: Number of rows, where known, for the bar.

    Returns:
        The state, and :class:`Losses` of NumPy arrays, shape ``(T,)`` for rounds or one entry for each block, or
        None for nothing.

    Raises:
        ValueError: If there is no chunk (an iterator is used up by a pass), a chunk does not look like the
            first, or shapes or labels do not fit the loss.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = np.eye(2), np.array([1.0, -1.0])
        >>> chunks = [(x, y), (x[:1], y[:1])]
        >>> state, losses = nt.online.run_chunks(rule, nt.expectations.squared(), state, chunks)
        >>> int(state.count), losses.at_mean.shape
        (3, (3,))
    """
    check_choice(keep, "keep", ("rounds", "blocks", "nothing"))
    history: list[list[np.ndarray]] = []

    def collect(losses: Losses) -> None:
        on_host = [to_host(loss) for loss in losses]
        if keep != "nothing":
            history.append(
                on_host if keep == "rounds" else [_average(loss) for loss in on_host]
            )
        if bar is not None:
            bar.update(len(on_host[0]))

    bar = None
    if progress_bar:
        from tqdm.auto import tqdm

        bar = tqdm(total=total, unit=" rows", unit_scale=True, mininterval=0.5)
    iterator = iter(chunks)
    first = list(itertools.islice(iterator, 1))
    stream = itertools.chain(first, iterator)
    pending: list[Losses] = []
    with contextlib.nullcontext() if bar is None else bar:
        passes = iterate_chunks(
            rule, expectation, state, stream, rng_key=rng_key, size=size, skip=skip
        )
        for after, losses in passes:
            state = after
            pending.append(losses)
            # This waits for the losses of a block while the next one is under way.
            if len(pending) > 1:
                collect(pending.pop(0))
        for losses in pending:
            collect(losses)
    if isinstance(state, OnlineState):
        diagnose(rule, state, _features(first, size))
    if keep == "nothing":
        return state, None
    columns = [np.concatenate(column) for column in zip(*history, strict=True)] or [
        np.empty(0)
    ] * 2
    return state, Losses(*columns)  # type: ignore[arg-type]


@_rule_first
def iterate_chunks(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    chunks: Iterable[Data],
    *,
    rng_key: Array | None = None,
    size: int = 16384,
    skip: int = 0,
) -> Iterator[tuple[OnlineState, Losses]]:
    """:func:`run_chunks` as an iterator over blocks, for work in between, such as :func:`save`.

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
        entry for each round. They may still be under way: JAX waits for them where they are read.

    Raises:
        ValueError: As :func:`run_chunks`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> chunks = [(np.ones((5, 1)), np.ones(5))]
        >>> for state, losses in nt.online.iterate_chunks(rule, loss, state, chunks, size=2):
        ...     print(int(state.count))
        2
        4
        5
    """
    check_parts(rule, expectation, state)
    before: Losses | None = None
    state, chunks = automatic_meshes(state), iter(chunks)
    first = list(itertools.islice(chunks, 1))
    placement = Placement.of(first[0]) if first else Placement()
    if placement.shardings:
        check_start(state, rng_key)
    local = map(placement.take, itertools.chain(first, chunks))
    for block, num_rounds in blocks(local, size, skip):
        check = functools.partial(
            check_data,
            expectation,
            jax.tree.map(lambda leaf, n=num_rounds: leaf[:n], block),
        )
        on_all_processes(check) if placement.shardings else check()
        if spans_processes(state) and not placement.shardings:
            check_same(block, "the data", ADVICE)
        # Without a name of its own the block on the device is freed before the next one is made.
        after, losses = compiled_loop(
            rule,
            expectation,
            state,
            Rounds(placement.put(block), None, num_rounds),
            rng_key,
        )
        state, losses = (
            (replicate(after, state), replicate(losses))
            if placement.shardings
            else (after, losses)
        )
        # A reader faster than the rule would fill the memory with blocks that wait.
        jax.block_until_ready(before)
        before = losses
        yield (
            state,
            losses
            if num_rounds == size
            else jax.tree.map(lambda leaf, n=num_rounds: leaf[:n], losses),
        )


def _average(loss: np.ndarray) -> np.ndarray:
    finite = loss[np.isfinite(loss)].astype(float)
    return np.asarray([finite.mean() if finite.size else np.nan])


def _features(chunks: list[Data], size: int) -> np.ndarray | None:
    """The first rows of the first array, where that is a matrix of features."""
    leaves = [
        leaf
        for chunk in chunks
        for leaf in jax.tree.leaves(tuple(chunk), is_leaf=is_list)
    ]
    if not leaves or np.ndim(leaves[0]) < 2:
        return None
    x = to_host(held_array(automatic_meshes(leaves[0])[:size], "the features"))
    return (
        np.reshape(x, (-1, x.shape[-1])) if np.issubdtype(x.dtype, np.number) else None
    )
