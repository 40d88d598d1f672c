"""Drivers: one round, and a compiled loop over many."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered._typing import Array
from numpyro_tempered.expectations.base import Evaluation, Expectation
from numpyro_tempered.online.base import CumulativeLosses, Losses, OnlineState, Rule


def step(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    data: tuple[Any, ...],
    rng_key: Array | None,
) -> tuple[OnlineState, Losses]:
    """One round: evaluate, update, and keep the old q where anything is not finite.

    A pure function; :func:`update` and :func:`run` compile it.
    """
    if expectation.needs_key:
        if rng_key is None:
            raise ValueError("this expectation draws random numbers: pass rng_key=.")
        rng_key = jax.random.fold_in(rng_key, state.count + state.rejected)
    evaluation = expectation.evaluate(state.posterior, *data, rng_key=rng_key, curvature=rule.curvature)
    state = accept_finite(state, rule.update(evaluation, state), evaluation, data)
    return state, Losses(evaluation.at_mean, evaluation.expected)


def accept_finite(
    state: OnlineState, proposal: OnlineState, evaluation: Evaluation, data: Any = ()
) -> OnlineState:
    """The proposal, or the old state with one more rejection where anything is not finite."""
    losses = Losses(evaluation.at_mean, evaluation.expected)
    # Sums propagate every NaN and infinity, at the price of one reduction.
    q = proposal.posterior
    witness = jnp.sum(evaluation.grad_loc + evaluation.grad_var + q.loc + q.scale)
    accept = jnp.isfinite(losses.at_mean + losses.expected + witness)
    for leaf in jax.tree.leaves(data):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            accept = accept & jnp.all(jnp.isfinite(leaf))

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(accept, new, old)

    cumulative = CumulativeLosses(*(c.add(loss) for c, loss in zip(state.cumulative, losses, strict=True)))
    return OnlineState(
        posterior=jax.tree.map(choose, proposal.posterior, state.posterior),
        prior=state.prior,
        memory=jax.tree.map(choose, proposal.memory, state.memory),
        count=choose(proposal.count, state.count),
        rejected=state.rejected + (~accept).astype(state.rejected.dtype),
        cumulative=jax.tree.map(choose, cumulative, state.cumulative),
    )


def loop(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    data: tuple[Any, ...],
    rng_key: Array | None,
    num_rounds: Array | int,
) -> tuple[OnlineState, Losses]:
    """The first ``num_rounds`` rows of ``data``, one after the other, as one loop to trace.

    The trip count is an argument of the compiled program and ``data`` has at least two rows, so that
    the compiler builds one and the same body for one round and for many: ``update`` and ``run`` agree
    to the last bit.
    """

    def row(i: Array | int) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), data)

    length = jax.tree.leaves(data)[0].shape[0]
    shapes = jax.eval_shape(lambda s: step(rule, expectation, s, row(0), rng_key)[1], state)
    # A zero of the state's own, so that buffers of mapped states are sharded as the states are.
    zero = state.count - state.count
    losses = jax.tree.map(lambda leaf: jnp.broadcast_to(zero.astype(leaf.dtype), (length, *leaf.shape)), shapes)

    def body(carry: tuple[Array, OnlineState, Losses]) -> tuple[Array, OnlineState, Losses]:
        i, state, losses = carry
        state, loss = step(rule, expectation, state, row(i), rng_key)
        losses = jax.tree.map(
            lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0), losses, loss
        )
        return i + 1, state, losses

    carry = (jnp.zeros((), jnp.int32), state, losses)
    _, state, losses = jax.lax.while_loop(lambda c: c[0] < num_rounds, body, carry)
    return state, losses


def single(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    data: tuple[Any, ...],
    rng_key: Array | None,
    num_rounds: Array | int,
) -> tuple[OnlineState, Losses]:
    """One round by :func:`loop`, on the only row of ``data``."""
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), data)
    # The barrier keeps the compiler from seeing that both rows are one.
    twice = jax.lax.optimization_barrier(twice)
    state, losses = loop(rule, expectation, state, twice, rng_key, num_rounds)
    return state, jax.tree.map(lambda leaf: leaf[0], losses)


_compiled_loop = partial(jax.jit, static_argnums=(0, 1))(loop)
_compiled_single = partial(jax.jit, static_argnums=(0, 1))(single)


def _check(expectation: Expectation, data: tuple[Any, ...]) -> None:
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(data))
    if expectation.check is not None and not traced:
        expectation.check(*data)


def update(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    *data: Any,
    rng_key: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One round on one datum or one batch (losses summed).

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier round.
        *data: The datum, as the loss takes it; for the closed forms ``x`` of shape ``(d,)`` or
            ``(n, d)`` and ``y`` scalar or ``(n,)``.
        rng_key: For expectations that draw; the round's own key is derived from it and the number
            of rounds, so one key serves a whole stream.

    Returns:
        The state and the :class:`Losses` before the update. A round whose data, loss or update are
        not finite leaves the posterior and the count as they were and adds one to ``rejected``.

    Raises:
        ValueError: If shapes or labels do not fit the loss.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ngvi(), nt.expectations.squared()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> state, losses = nt.online.update(rule, loss, state, jnp.ones(2), jnp.nan)
        >>> int(state.count), int(state.rejected)
        (0, 1)
    """
    data = jax.tree.map(jnp.asarray, data)
    _check(expectation, data)
    return _compiled_single(rule, expectation, state, data, rng_key, 1)


def run(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    *data: Any,
    rng_key: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One pass over a stream: each row is a round, in one compiled loop.

    The numbers are those of :func:`update` called row by row.

    Args:
        rule: An online rule, such as :func:`ngvi`.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        state: From ``rule.init(prior)`` or an earlier run.
        *data: Arrays with one leading axis of T rounds; for the closed forms ``x`` of shape
            ``(T, d)`` and ``y`` of shape ``(T,)``.
        rng_key: For expectations that draw.

    Returns:
        The state, and :class:`Losses` of shape ``(T,)`` each, before every update; the loss of a
        rejected round is reported as it came out.

    Raises:
        ValueError: If the leading axes differ or T is 0, or shapes or labels do not fit the loss.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = jnp.eye(2), jnp.array([1.0, -1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> losses.at_mean
        Array([1., 1.], dtype=float32)
    """
    data = jax.tree.map(jnp.asarray, data)
    num_rounds = check_rows(jax.tree.leaves(data))
    _check(expectation, data)
    if num_rounds == 1:
        state, losses = update(rule, expectation, state, *(leaf[0] for leaf in data), rng_key=rng_key)
        return state, jax.tree.map(lambda leaf: leaf[None], losses)
    return _compiled_loop(rule, expectation, state, data, rng_key, num_rounds)


def check_rows(arrays: list[Array]) -> int:
    """The common number of rows T of a stream's arrays.

    Raises:
        ValueError: If there is no array, no leading axis, no row, or they disagree.
    """
    shapes = [array.shape for array in arrays]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths or lengths == {0}:
        raise ValueError(
            f"run needs arrays with one common leading axis of at least one round, got shapes "
            f"{shapes}; constants belong inside the model or the loss."
        )
    return shapes[0][0]
