r"""The running average of the decisions, for online-to-batch conversion (CA19, section 3)."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from numpyro_tempered.core.precision import CompensatedSum
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.online.base import Losses, OnlineState, Rule


class Averaged(NamedTuple):
    """Memory of :func:`averaged`.

    Attributes:
        memory: What the rule inside accumulates.
        total: Sum of the posterior means before each round taken, shape ``(d,)``, compensated.
        count: Number of rounds in the sum.
    """

    memory: Any
    total: CompensatedSum
    count: Array  # type: ignore[assignment]


def averaged(rule: Rule) -> Rule:
    r"""A rule that also keeps :math:`\bar\theta_T = T^{-1}\sum_{t\le T}\theta_t`, θ_t the mean before round t.

    For data that are independent and identically distributed and a convex loss, the expected risk of θ̄_T
    exceeds the least by at most the regret bound over T (:func:`numpyro_tempered.bounds.online_to_batch`); of the
    last θ the theorems say nothing. Rounds that are rejected do not count. The decisions of the rule are
    unchanged.

    Args:
        rule: An online rule.

    Returns:
        An online :class:`Rule`, whose memory is an :class:`Averaged`; read it by :func:`average`.

    References:
        N. Cesa-Bianchi, A. Conconi, C. Gentile, *On the generalization ability of on-line learning algorithms*,
        IEEE TIT 2004.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.averaged(nt.online.oga(0.5))
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 1.0, 1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> nt.online.average(state)
        Array([0.5], dtype=float32)
    """

    def init(prior: Any) -> OnlineState:
        state = rule.init(prior)
        zero = jnp.zeros_like(state.posterior.loc)
        return state._replace(
            memory=Averaged(state.memory, CompensatedSum.start(zero), jnp.zeros_like(state.count))
        )

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        kept = state.memory
        after = rule.update(evaluation, state._replace(memory=kept.memory))
        return after._replace(memory=Averaged(after.memory, kept.total.add(state.posterior.loc), kept.count + 1))

    def step(
        expectation: Any, state: OnlineState, data: Any, rng_key: Array | None, mask: Array | None
    ) -> tuple[OnlineState, Losses]:
        kept = state.memory
        inner = state._replace(memory=kept.memory)
        after, losses = rule.step(expectation, inner, data, rng_key, mask)  # type: ignore[misc]
        # Such a rule accepts or rejects its round itself.
        taken = after.count - state.count
        term = jnp.where(taken > 0, state.posterior.loc, jnp.zeros_like(state.posterior.loc))
        return after._replace(memory=Averaged(after.memory, kept.total.add(term), kept.count + taken)), losses

    own_step = None if rule.step is None else step
    return rule._replace(init=init, update=update, step=own_step, name=f"{rule.name}, averaged")


def average(state: OnlineState) -> Array:
    """The average of the posterior means before each round, of a run of an :func:`averaged` rule.

    Args:
        state: Its state.

    Returns:
        θ̄, shape ``(d,)``; the present mean where no round was taken.

    Raises:
        TypeError: If the rule was not averaged.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.averaged(nt.online.ngvi())
        >>> nt.online.average(rule.init(nt.families.MeanField(jnp.ones(2), jnp.ones(2))))
        Array([1., 1.], dtype=float32)
    """
    kept = state.memory
    if not isinstance(kept, Averaged):
        raise TypeError(
            "average needs the state of a rule made by averaged(rule), got one whose memory is "
            f"{type(kept).__name__}."
        )
    total = kept.total.value + kept.total.error
    return jnp.where(kept.count > 0, total / jnp.maximum(kept.count, 1).astype(total.dtype), state.posterior.loc)
