"""Drivers: one round, one pass over a stream, and streams longer than the memory, in chunks."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    at_index,
    blocks,
    check_choice,
    check_record,
    common_rows,
    describe,
    held_array,
    is_list,
    is_traced,
    spans_processes,
    stream_arrays,
    to_host,
)
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import Data, Losses, OnlineState, Rule, refuse_model
from numpyro_tempered.online.stream import Rounds, compiled_loop, compiled_single
from numpyro_tempered.online.streams.diagnose import diagnose
from numpyro_tempered.online.streams.findings import Pass, conclude
from numpyro_tempered.online.streams.processes import (
    ADVICE,
    Placement,
    automatic_meshes,
    check_pieces,
    check_same,
    check_start,
    on_all_processes,
    prepare,
    replicate,
)


def check_data(expectation: Expectation, data: Data, mask: Array | None = None) -> None:
    """Raise ValueError where the loss does not admit concrete data in rows that are on."""
    if expectation.check is None or is_traced(data, mask):
        return
    admits = expectation.check

    def check(data: Data, mask: ArrayLike | None) -> None:
        if mask is not None:
            on = np.asarray(mask)
            data = jax.tree.map(
                lambda a: np.asarray(a)[on] if a.shape[: on.ndim] == on.shape else a,
                data,
            )
        admits(*data)

    if spans_processes(data, mask):
        check_pieces(check, data, mask)
    else:
        check(data, mask)


def check_parts(rule: Rule, expectation: Expectation, state: OnlineState) -> None:
    """Raise TypeError where a rule or an expectation was not made, or the state was left out or is a model's."""
    for part in (rule, expectation, state):
        refuse_model(part)
    check_record(rule, "rule", Rule, "nt.online.ngvi()")
    check_record(expectation, "expectation", Expectation, "nt.expectations.squared()")
    if not hasattr(state, "posterior"):
        raise TypeError(
            f"state must be that of a run, such as rule.init(prior), got {describe(state)}: the call is "
            "run(rule, expectation, state, *data)."
        )


def check_mask(mask: ArrayLike | None, data: Data, num_axes: int) -> Array | None:
    """The mask as an array of at most ``num_axes`` axes, the leading ones of the data.

    Raises:
        TypeError: If it is not boolean.
        ValueError: If its shape is not that of the data's leading axes.
    """
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean, True where there is a datum, got dtype {mask.dtype}."
        )
    shapes = [leaf.shape for leaf in jax.tree.leaves(data)]
    if mask.ndim > num_axes or not any(
        shape[: mask.ndim] == mask.shape for shape in shapes
    ):
        raise ValueError(
            f"mask must have the shape of the data's leading axis (at most {num_axes}), got {mask.shape} for "
            f"data of shapes {shapes}."
        )
    return mask


def update(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    *data: object,
    mask: ArrayLike | None = None,
    rng_key: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One round on one datum or one batch (losses summed).

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier round.
        *data: The datum, as the loss takes it; for the closed forms ``x`` of shape ``(d,)`` or
            ``(n, d)`` and ``y`` scalar or ``(n,)``.
        mask: Optional, boolean, shape ``(n,)``: rows of the batch that are off count nothing, whatever they
            hold, so that batches of every size share one compilation (:func:`pad_batch`). Shape () turns the
            round on or off as a whole. A round without a row leaves the state as it is.
        rng_key: For expectations that draw; the round's own key is derived from it and the number
            of rounds, so one key serves a whole stream.

    Returns:
        The state and the :class:`Losses` before the update. A round whose data, loss or update are
        not finite leaves the posterior and the count as they were and adds one to ``rejected``.

    Raises:
        ValueError: If shapes or labels do not fit the loss, or the mask the data.
        TypeError: If the mask is not boolean.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> state, losses = nt.online.update(rule, loss, state, jnp.ones(2), jnp.nan)
        >>> int(state.count), int(state.rejected)
        (0, 1)
    """
    check_parts(rule, expectation, state)
    arrays = stream_arrays(data)
    rows = check_mask(mask, arrays, num_axes=1)
    before, arrays, rows = prepare(state, arrays, rows, rng_key)
    check_data(expectation, arrays, rows)
    after, losses = compiled_single(
        rule, expectation, before, Rounds(arrays, rows, 1), rng_key
    )
    return (
        (replicate(after, before), replicate(losses))
        if spans_processes(arrays)
        else (after, losses)
    )


def run(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    *data: object,
    mask: ArrayLike | None = None,
    rng_key: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One pass over a stream: each row is a round, in one compiled loop.

    The numbers are those of :func:`update` called row by row. Outside of transformations the end of the run
    issues one :class:`StreamWarning` where rounds were rejected, a round moved a mean by more than 10 of its
    standard deviations, or the losses are above those of the prior: see :func:`diagnose`. The last takes one more
    evaluation of the loss for each row, all at once.

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier run.
        *data: Arrays with one leading axis of T rounds; for the closed forms ``x`` of shape
            ``(T, d)`` and ``y`` of shape ``(T,)``.
        mask: Optional, boolean, shape ``(T,)``: rounds that are off do not take place and have loss 0, so that
            streams of different lengths run side by side under ``jax.vmap``. Shape ``(T, n)`` where each
            round is a batch of n rows.
        rng_key: For expectations that draw.

    Returns:
        The state, and :class:`Losses` of shape ``(T,)`` each, before every update; the loss of a
        rejected round is reported as it came out.

    Raises:
        ValueError: If the leading axes differ or T is 0, or shapes or labels do not fit the loss, or the mask
            the data; or if an array holds nothing finite in any of the rounds.
        TypeError: If the mask is not boolean.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = jnp.eye(2), jnp.array([1.0, -1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> losses.at_mean
        Array([1., 1.], dtype=float32)
    """
    return run_rounds(rule, expectation, state, data, rng_key, mask)


def run_rounds(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    data: Data,
    rng_key: Array | None,
    mask: ArrayLike | None = None,
) -> tuple[OnlineState, Losses]:
    """:func:`run`, whose warning points at the caller of the caller."""
    check_parts(rule, expectation, state)
    arrays = stream_arrays(data)
    num_rounds = check_rows(jax.tree.leaves(arrays))
    rows = check_mask(mask, arrays, num_axes=2)
    if rows is not None and rows.ndim == 0:
        raise ValueError(
            f"mask must have shape ({num_rounds},), or ({num_rounds}, n) for batches, got ()."
        )
    state, arrays, rows = prepare(state, arrays, rows, rng_key)
    check_data(expectation, arrays, rows)
    if num_rounds == 1:
        row, on = at_index((arrays, rows), 0)
        after, losses = compiled_single(
            rule, expectation, state, Rounds(row, on, 1), rng_key
        )
        losses = jax.tree.map(lambda leaf: leaf[None], losses)
    else:
        check_some_finite(arrays, rows)
        after, losses = compiled_loop(
            rule, expectation, state, Rounds(arrays, rows, num_rounds), rng_key
        )
    if spans_processes(arrays):
        after, losses = replicate(after, state), replicate(losses)
    conclude(state, after, Pass(expectation, arrays, losses, rows))
    return after, losses


def check_some_finite(data: Data, mask: Array | None) -> None:
    """Raise ValueError where an array has nothing finite in any round that is on: all would be rejected."""
    if is_traced(data, mask):
        return
    for number, leaf in enumerate(jax.tree.leaves(data)):
        # One entry for each round is read at once; of others a look at the first round tells almost always.
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if spans_processes(leaf):
            if bool(_any_finite(leaf, mask)):
                continue
        elif leaf.size > leaf.shape[0]:
            # Data may be constants of a program that is traced now.
            with jax.ensure_compile_time_eval():
                first = np.asarray(leaf[0])
            if np.any(np.isfinite(first)):
                continue
        values = to_host(leaf)
        if mask is not None:
            values = (
                values[to_host(mask)]
                if values.shape[: mask.ndim] == mask.shape
                else values
            )
        if values.size and not np.any(np.isfinite(values)):
            raise ValueError(
                f"data array {number} of shape {leaf.shape} holds no finite value, got {values.flat[0]} "
                "throughout: every round would be rejected. Look at how the data were read."
            )


@jax.jit
def _any_finite(leaf: Array, mask: Array | None) -> Array:
    """Whether anything in rows that are on is finite."""
    finite = jnp.isfinite(leaf)
    if mask is not None and leaf.shape[: mask.ndim] == mask.shape:
        finite &= jnp.reshape(mask, mask.shape + (1,) * (leaf.ndim - mask.ndim))
    return jnp.any(finite)


def check_rows(arrays: list[Array]) -> int:
    """The common number of rows T of a stream's arrays.

    Raises:
        ValueError: If there is no array, no leading axis, no row, or they disagree.
    """
    return common_rows(
        arrays, "run", 1, hint=" Constants belong inside the model or the loss."
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
