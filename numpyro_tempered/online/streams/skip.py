"""Rounds that are left out, because their loss or their step is too large."""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum, check_count, check_number
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.online.base import Data, Losses, OnlineState, Rule, choose, move
from numpyro_tempered.online.stream import step as one_round


class Skipping(NamedTuple):
    """Memory of :func:`skip`.

    Attributes:
        memory: What the rule inside accumulates.
        skipped: Number of rounds left out, a scalar integer; they are among ``state.rejected``.
        mean: Mean of the expected losses of the rounds taken, of those that are finite, compensated.
        squares: Sum of their squared deviations from it (Welford), compensated.
    """

    memory: object
    skipped: Array
    mean: CompensatedSum
    squares: CompensatedSum


def skip(
    rule: Rule,
    *,
    max_loss: float | None = None,
    max_deviations: float | None = None,
    max_move: float | None = None,
    warm_up: int = 100,
) -> Rule:
    r"""A rule that leaves out rounds whose loss or step is beyond a threshold.

    A round is skipped where one of the thresholds that are given is exceeded:

    - ``max_loss`` by the expected loss before the update, untempered;
    - ``max_deviations``, k, by the same loss less its running mean, in running standard deviations, both over the
      rounds taken so far: :math:`\ell > \bar\ell_t + k s_t`. It applies after ``warm_up`` rounds;
    - ``max_move`` by the move of a mean in its standard deviations, as in :func:`clip`.

    A round that is skipped leaves everything as it was, the key of its draws excepted, and adds one to
    ``state.rejected``. After a change of the target for the worse ``max_deviations`` may skip all that follows:
    the end of the run says how many rounds it was.

    Args:
        rule: An online rule.
        max_loss: Largest expected loss of a round; of a batch the average over its rows that are on, if it has a
            mask, else the sum.
        max_deviations: k, positive.
        max_move: Positive.
        warm_up: Rounds to take before ``max_deviations`` applies, at least 2.

    Returns:
        An online :class:`Rule`, whose memory is a :class:`Skipping`.

    Raises:
        ValueError: If no threshold is given, or one is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.skip(nt.online.ngvi(), max_loss=100.0)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> state, losses = nt.online.update(rule, nt.expectations.squared(), state, jnp.ones(1), 1e3)
        >>> int(state.count), int(state.rejected), int(state.memory.skipped)
        (0, 1, 1)
    """
    if max_loss is None and max_deviations is None and max_move is None:
        raise ValueError(
            "skip needs a threshold: max_loss, max_deviations or max_move."
        )
    if max_loss is not None:
        check_number(max_loss, "max_loss")
    for name, value in (("max_deviations", max_deviations), ("max_move", max_move)):
        if value is not None:
            check_number(value, name, "(0, inf)")
    check_count(warm_up, "warm_up", 2)

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(prior)
        mean, squares = (
            CompensatedSum.start(jnp.zeros((), state.prior.loc.dtype)) for _ in range(2)
        )
        return state._replace(
            memory=Skipping(state.memory, jnp.zeros_like(state.count), mean, squares)
        )

    def step(
        expectation: Expectation,
        state: OnlineState,
        data: Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        memory, before = state.memory, state._replace(memory=state.memory.memory)
        after, losses = one_round(rule, expectation, before, data, rng_key, mask)
        loss = losses.expected
        if mask is not None:
            loss = loss / jnp.maximum(jnp.sum(mask), 1).astype(loss.dtype)
        excess = loss - memory.mean.value
        bad = jnp.zeros((), bool)
        if max_loss is not None:
            bad |= loss > max_loss
        if max_deviations is not None:
            count = jnp.maximum(state.count, 1).astype(loss.dtype)
            deviation = jnp.sqrt(jnp.maximum(memory.squares.value, 0.0) / count)
            bad |= (state.count >= warm_up) & (excess > max_deviations * deviation)
        if max_move is not None:
            bad |= move(rule, before, after) > max_move
        bad &= after.count > state.count
        after = choose(bad, before._replace(rejected=before.rejected + 1), after)
        # A round may be taken whose expected loss is beyond any number: one such mean would end all skipping.
        is_on = (after.count > state.count) & jnp.isfinite(excess)
        shift = jnp.where(
            is_on, excess / jnp.maximum(after.count, 1).astype(loss.dtype), 0.0
        )
        spread = jnp.where(is_on, excess * (excess - shift), 0.0)
        skipped = memory.skipped + bad.astype(memory.skipped.dtype)
        memory = Skipping(
            after.memory, skipped, memory.mean.add(shift), memory.squares.add(spread)
        )
        return after._replace(memory=memory), losses

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError(
            "a rule that skips rounds looks at their losses: use run or update."
        )

    return rule._replace(
        init=init, update=update, step=step, name=f"{rule.name}, skipping"
    )
