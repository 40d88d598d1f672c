"""One round, and a loop over many, as pure functions."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, at_index, first_row, share_trace
from numpyro_tempered.gaussian.expectations.base import (
    Evaluation,
    Expectation,
    Predictors,
    PredictorsAt,
)
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.online.base import (
    JUMP,
    Data,
    Datum,
    Gaussian,
    Losses,
    OnlineState,
    Rule,
    choose,
    close_round,
    move_of,
    unit_of,
)


def step(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    data: Data,
    rng_key: Array | None,
    mask: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One round: evaluate, update, and leave q as it was where anything is not finite.

    A pure function; :func:`update` and :func:`run` compile it. With a ``mask`` ``(n,)`` the data are a batch,
    whose rows that are off count nothing; one of shape () turns the whole round on or off. A round without a
    row leaves the state as it is, and its losses are 0.

    Raises:
        TypeError: If the rule is exact on quadratic losses alone, and this is another.
        ValueError: If the expectation draws, and there is no key.
    """
    if rule.quadratic and not expectation.quadratic:
        raise TypeError(
            f"{rule.name} is exact on losses that are quadratic in the parameters, such as "
            "nt.expectations.squared(); for this one take ngvi."
        )
    rows = None if mask is None or jnp.ndim(mask) == 0 else mask
    if rows is not None:
        data = fill_rows(data, rows)
    if rule.step is not None:
        after, losses = rule.step(expectation, state, data, rng_key, rows)
    else:
        key = round_key(expectation, state, rng_key)
        options = {} if rows is None else {"mask": rows}

        def evaluate(q: Gaussian) -> Evaluation:
            return expectation.evaluate(
                q, *data, rng_key=key, curvature=rule.curvature, **options
            )

        predictors = None
        if expectation.predictors is not None:
            predictors = partial(_predictors, expectation.predictors, data, key, rows)
        evaluation = evaluate(state.posterior)
        gradients = evaluation
        if rule.refine is not None:
            datum = Datum(
                evaluate, predictors, expectation.needs_key, expectation.quadratic, rows
            )
            gradients = rule.refine(datum, evaluation, state)
        after = accept_finite(
            state, rule.update(gradients, state), gradients, data, unit_of(rule, state)
        )
        losses = Losses(evaluation.at_mean, evaluation.expected)
    if mask is None:
        return after, losses
    some = jnp.any(mask)
    return choose(some, after, state), choose(
        some, losses, jax.tree.map(jnp.zeros_like, losses)
    )


def _predictors(
    at: PredictorsAt,
    data: Data,
    rng_key: Array | None,
    rows: Array | None,
    theta: Array,
) -> Predictors:
    return at(theta, *data, rng_key=rng_key, mask=rows)


def round_key(
    expectation: Expectation, state: OnlineState, rng_key: Array | None
) -> Array | None:
    """The key of one round, for an expectation that draws; the key of the stream for others.

    Raises:
        ValueError: If the expectation draws, and there is no key.
    """
    if not expectation.needs_key:
        return rng_key
    if rng_key is None:
        raise ValueError("this expectation draws random numbers: pass rng_key=.")
    return jax.random.fold_in(rng_key, state.count + state.rejected)


def fill_rows(data: Data, mask: Array) -> Data:
    """The data with a copy of the first row that is on in place of each that is off: no NaN reaches the sums."""
    first = jnp.argmax(mask)

    def fill(leaf: Array) -> Array:
        if jnp.ndim(leaf) == 0 or leaf.shape[0] != mask.shape[0]:
            return leaf
        on = jnp.reshape(mask, (-1,) + (1,) * (leaf.ndim - 1))
        return jnp.where(on, leaf, jax.lax.dynamic_index_in_dim(leaf, first))

    return jax.tree.map(fill, data)


def accept_finite(
    state: OnlineState,
    proposal: OnlineState,
    evaluation: Evaluation,
    data: Data = (),
    unit: Gaussian | None = None,
) -> OnlineState:
    """The proposal, or the old state with one more rejection where anything is not finite.

    Moves are in standard deviations of the ``unit``, by default those of the posterior before the round.
    """
    # Sums propagate every NaN and infinity. The last leaf of rows is their weights: the data are checked below.
    q, curvature = proposal.posterior, jax.tree.leaves(evaluation.grad_var)[-1]
    terms = evaluation.grad_loc + family_of(q).witness(q)
    rest = jnp.zeros((), terms.dtype)
    if curvature.shape == terms.shape:
        terms = terms + curvature
    else:
        rest = jnp.sum(curvature)
    # A product with ones, which is vectorised where a sum over the last axis is not.
    witness = jnp.dot(terms, jnp.ones_like(terms)) + rest
    accept = jnp.isfinite(evaluation.at_mean + evaluation.expected + witness)
    for leaf in jax.tree.leaves(data):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            accept = accept & jnp.all(jnp.isfinite(leaf))
    books = close_round(state, Losses(evaluation.at_mean, evaluation.expected), accept)
    after = choose(accept, proposal, state)
    before = state.posterior
    length = move_of(before, after.posterior, before if unit is None else unit)
    return after._replace(
        prior=state.prior,
        rejected=books.rejected,
        cumulative=books.cumulative,
        jumps=state.jumps + (length > JUMP).astype(state.jumps.dtype),
        max_move=jnp.maximum(state.max_move, length),
    )


class Rounds(NamedTuple):
    """The rounds of a compiled loop: the first rows of its data.

    Attributes:
        data: The data, a row for each round.
        mask: Which rounds, or rows of their batches, are on; None for all.
        number: How many of the rows to take.
    """

    data: Data
    mask: Array | None
    number: Array | int


class Step(NamedTuple):
    """:func:`step` of a rule and an expectation, as a function of state, data, key and mask."""

    rule: Rule
    expectation: Expectation

    def __call__(
        self, state: OnlineState, data: Data, rng_key: Array | None, mask: Array | None
    ) -> tuple[OnlineState, Losses]:
        """One round."""
        return step(self.rule, self.expectation, state, data, rng_key, mask)


def as_floating(
    step: Step, state: OnlineState, data: Data, rng_key: Array | None
) -> Data:
    """Return an example of the data in the dtype of the posterior, so that rows that follow keep their fractions.

    Arrays stay integers where the round needs them so, as indices and the outcomes of classes, and floats that
    are wider stay as they are.
    """
    dtype, (leaves, tree) = state.posterior.loc.dtype, jax.tree.flatten(data)
    narrow = [
        number
        for number, leaf in enumerate(leaves)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        or leaf.dtype.itemsize < dtype.itemsize
    ]
    # One trace of the round tells of all of them, almost always.
    for numbers in [narrow, *([number] for number in narrow)] if narrow else ():
        try:
            trial = [
                leaf.astype(dtype) if n in numbers else leaf
                for n, leaf in enumerate(leaves)
            ]
            with warnings.catch_warnings():
                # jax.nn.one_hot warns of floats.
                warnings.simplefilter("error")
                examples = state, jax.tree.unflatten(tree, trial), rng_key, None
                # Traced and remembered, for the round itself, or else traced alone.
                shared: object = share_trace(step, *examples)  # type: ignore[arg-type]
                if shared is step:
                    jax.eval_shape(step.__call__, *examples)
        except Exception:  # the round needs integers, or fails with them too
            continue
        leaves = trial
        if numbers == narrow:
            break
    return jax.tree.unflatten(tree, leaves)


RoundStep: TypeAlias = Callable[
    [OnlineState, Data, Array | None, Array | None], tuple[OnlineState, Losses]
]


def loop(
    one_round: RoundStep, state: OnlineState, rounds: Rounds, rng_key: Array | None
) -> tuple[OnlineState, Losses]:
    """Rounds one after the other, as one loop to trace.

    The trip count is an argument of the compiled program and the data have at least two rows, so that
    the compiler builds one and the same body for one round and for many: ``update`` and ``run`` agree
    to the last bit.
    """
    rows = (rounds.data, rounds.mask)

    def one(state: OnlineState, i: Array | int) -> tuple[OnlineState, Losses]:
        row, on = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), rows
        )
        return one_round(state, row, rng_key, on)

    length = jax.tree.leaves(rounds.data)[0].shape[0]
    _, shapes = jax.eval_shape(one, state, 0)
    # A zero of the state's own, so that buffers of mapped states are sharded as the states are.
    zero = state.count - state.count
    losses = jax.tree.map(
        lambda leaf: jnp.broadcast_to(zero.astype(leaf.dtype), (length, *leaf.shape)),
        shapes,
    )

    def body(i: Array, carry: tuple[OnlineState, Losses]) -> tuple[OnlineState, Losses]:
        state, loss = one(carry[0], i)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return state, jax.tree.map(put, carry[1], loss)

    return jax.lax.fori_loop(0, rounds.number, body, (state, losses))


def single(
    one_round: RoundStep, state: OnlineState, rounds: Rounds, rng_key: Array | None
) -> tuple[OnlineState, Losses]:
    """One round by :func:`loop`, on data and a mask without an axis of rounds."""
    twice = jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf]), (rounds.data, rounds.mask)
    )
    # The barrier keeps the compiler from seeing that both rows are one.
    data, mask = jax.lax.optimization_barrier(twice)
    state, losses = loop(one_round, state, Rounds(data, mask, rounds.number), rng_key)
    return state, at_index(losses, 0)


_loop, _single = (jax.jit(f, static_argnums=0) for f in (loop, single))


def compiled_loop(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    rounds: Rounds,
    rng_key: Array | None,
) -> tuple[OnlineState, Losses]:
    """:func:`loop`, compiled once for all rules and expectations whose rounds are the same computation."""
    row, on = first_row((rounds.data, rounds.mask))
    one_round: RoundStep = share_trace(Step(rule, expectation), state, row, rng_key, on)  # type: ignore[arg-type]
    return _loop(one_round, state, rounds, rng_key)


def compiled_single(
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    rounds: Rounds,
    rng_key: Array | None,
) -> tuple[OnlineState, Losses]:
    """:func:`single`, compiled as :func:`compiled_loop` is."""
    traced = Step(rule, expectation)
    one_round: RoundStep = share_trace(traced, state, rounds.data, rng_key, rounds.mask)  # type: ignore[arg-type]
    return _single(one_round, state, rounds, rng_key)
