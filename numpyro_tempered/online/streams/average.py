r"""The running average of the decisions, for online-to-batch conversion (CA19, section 3)."""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.online.base import (
    Data,
    Gaussian,
    Losses,
    OnlineState,
    Rule,
    memory_of,
)


class RunningAverage(NamedTuple):
    """Memory of :func:`with_average`.

    Attributes:
        memory: What the rule inside accumulates.
        total: Sum of the posterior means before each round taken, shape ``(d,)``, compensated.
        count: Number of rounds in the sum.
    """

    memory: object
    total: CompensatedSum
    count: Array  # type: ignore[assignment]


def with_average(rule: Rule) -> Rule:
    r"""A rule that also keeps :math:`\bar\theta_T = T^{-1}\sum_{t\le T}\theta_t`, θ_t the mean before round t.

    For data that are independent and identically distributed and a convex loss, the expected risk of θ̄_T
    exceeds the least by at most the regret bound over T (:func:`numpyro_tempered.bounds.online_to_batch`); the
    theorems say nothing of the last θ. Rounds that are rejected do not count. The decisions of the rule are
    unchanged.

    Args:
        rule: An online rule.

    Returns:
        An online :class:`Rule`, whose memory is a :class:`RunningAverage`; read it by :func:`average`.

    References:
        N. Cesa-Bianchi, A. Conconi, C. Gentile, *On the generalization ability of on-line learning algorithms*,
        IEEE TIT 2004.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.with_average(nt.online.oga(0.5))
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 1.0, 1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> nt.online.average(state)
        Array([0.5], dtype=float32)
    """

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(prior)
        zero = jnp.zeros_like(state.posterior.loc)
        average = RunningAverage(
            state.memory, CompensatedSum.start(zero), jnp.zeros_like(state.count)
        )
        return state._replace(memory=average)

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        average = state.memory
        after = rule.update(evaluation, state._replace(memory=average.memory))
        total = average.total.add(state.posterior.loc)
        return after._replace(
            memory=RunningAverage(after.memory, total, average.count + 1)
        )

    def step(
        expectation: Expectation,
        state: OnlineState,
        data: Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        average = state.memory
        inner = state._replace(memory=average.memory)
        after, losses = rule.step(expectation, inner, data, rng_key, mask)  # type: ignore[misc]
        # Such a rule accepts or rejects its round itself.
        increase = after.count - state.count
        term = jnp.where(
            increase > 0, state.posterior.loc, jnp.zeros_like(state.posterior.loc)
        )
        average = RunningAverage(
            after.memory, average.total.add(term), average.count + increase
        )
        return after._replace(memory=average), losses

    whole_round = None if rule.step is None else step
    return rule._replace(
        init=init, update=update, step=whole_round, name=f"{rule.name}, averaged"
    )


def average(state: OnlineState) -> Array:
    """The average of the posterior means before each round, of a run of a rule :func:`with_average`.

    Args:
        state: Its state.

    Returns:
        θ̄, shape ``(d,)``; the present mean where no round was taken.

    Raises:
        TypeError: If the rule keeps no average.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.with_average(nt.online.ngvi())
        >>> nt.online.average(rule.init(nt.gaussian.families.MeanField(jnp.ones(2), jnp.ones(2))))
        Array([1., 1.], dtype=float32)
    """
    memory = memory_of(state, RunningAverage, "with_average(rule)")
    total, count = memory.total.value + memory.total.error, memory.count
    return jnp.where(
        count > 0,
        total / jnp.maximum(count, 1).astype(total.dtype),
        state.posterior.loc,
    )
