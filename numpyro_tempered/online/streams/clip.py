"""Steps of bounded length: a datum that would move the posterior too far counts less."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, check_number
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.online.base import (
    Data,
    Losses,
    OnlineState,
    Rule,
    choose,
    layers,
    move,
)
from numpyro_tempered.online.experts.grid import scale_gradients
from numpyro_tempered.online.experts.state import Experts
from numpyro_tempered.online.stream import step as one_round

# Halvings of a datum, down to the 18th decimal.
MAX_TRIALS = 60


class Clipping(NamedTuple):
    """Memory of :func:`clip`.

    Attributes:
        memory: What the rule inside accumulates.
        shortened: Number of rounds whose datum counted less, a scalar integer.
    """

    memory: object
    shortened: Array


def clip(rule: Rule, max_move: float = 3.0) -> Rule:
    r"""A rule whose rounds move no mean by more than ``max_move`` of its posterior standard deviations.

    The move of a round is :math:`\max_j |m_{t+1,j} - m_{t,j}| / \sigma_{t,j}`, coordinate by coordinate, with the
    marginal σ of q_t. For rules whose scales do not measure uncertainty (oga, oga_el, sva, svb) it is that of the
    prior. Where it would be longer the loss of
    the round is multiplied by a weight w < 1, and the round taken anew: w falls by the ratio of ``max_move`` to
    the move, and at least to its half, until the move is short enough. Mean, scales and memory are then those of
    a datum of that weight. A round that is still too long after 60 trials, because the rule moves without data,
    is rejected and counted in ``state.rejected``.

    A round of bounded length costs one evaluation, as without the bound; a trial costs one more. Losses are
    reported as they are, unweighted.

    Args:
        rule: An online rule.
        max_move: The bound, positive, in standard deviations.

    Returns:
        An online :class:`Rule`, whose memory is a :class:`Clipping` with the number of shortened rounds.

    Raises:
        ValueError: If the bound is not positive and finite.
        TypeError: At ``init``, if the rule is an :func:`aggregate`, which moves as its weights do.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.clip(nt.online.ngvi(step_size=0.5), max_move=2.0)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((2, 1)), jnp.array([1000.0, 1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> int(state.memory.shortened), bool(state.max_move <= 2.0)
        (1, True)
    """
    check_number(max_move, "max_move", "(0, inf)")

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(prior)
        if any(isinstance(memory, Experts) for memory in layers(state)):
            raise TypeError(
                "an aggregate moves as its weights do: clip the rules of its grids instead."
            )
        return state._replace(
            memory=Clipping(state.memory, jnp.zeros_like(state.count))
        )

    def step(
        expectation: Expectation,
        state: OnlineState,
        data: Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        before = state._replace(memory=state.memory.memory)

        def attempt(weight: Array) -> tuple[OnlineState, Losses, Array]:
            weighed = scale_gradients(expectation, weight)
            after, losses = one_round(rule, weighed, before, data, rng_key, mask)
            return after, losses, move(rule, before, after)

        def too_long(trial: tuple) -> Array:
            number, _, (_, _, length) = trial
            return (number < MAX_TRIALS) & (length > max_move)

        def shorten(trial: tuple) -> tuple:
            number, weight, (_, _, length) = trial
            weight = jnp.where(
                number < 0, weight, weight * jnp.minimum(0.99 * max_move / length, 0.5)
            )
            return number + 1, weight, attempt(weight)

        # The first trial, of weight 1, is one of the loop: the round is compiled once.
        one = jnp.ones((), state.posterior.loc.dtype)
        shapes = jax.eval_shape(attempt, one)
        zero = state.count - state.count
        none = jax.tree.map(
            lambda leaf: jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape),
            shapes[1],
        )
        begin = (
            zero - 1,
            one + zero.astype(one.dtype),
            (before, none, zero.astype(one.dtype) + jnp.inf),
        )
        _, weight, (after, losses, length) = jax.lax.while_loop(
            too_long, shorten, begin
        )
        fits = length <= max_move
        after = choose(fits, after, before._replace(rejected=before.rejected + 1))
        shortened = fits & (weight < 1.0) & (after.count > state.count)
        memory = Clipping(
            after.memory, state.memory.shortened + shortened.astype(state.count.dtype)
        )
        return after._replace(memory=memory), losses

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError(
            "a clipped rule evaluates a round until it is short enough: use run or update."
        )

    return rule._replace(
        init=init,
        update=update,
        step=step,
        name=f"{rule.name}, clipped",
        holds_evidence=False,
    )
