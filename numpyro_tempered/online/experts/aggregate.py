"""Exponentially weighted aggregation of online rules (AdaHedge, de Rooij et al. 2014)."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum, Params, check_number
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, require
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.base import Losses, OnlineState
from numpyro_tempered.online.experts.grid import Grid, init_experts, scale_gradients
from numpyro_tempered.online.experts.state import Experts, all_posteriors, match
from numpyro_tempered.online.stream import round_key
from numpyro_tempered.online.stream import step as one_round


def aggregate(
    *grids: Grid, learning_rate: rules.StepSize | None = None, share: float = 0.0
) -> rules.Rule:
    r"""Many rules side by side, combined by exponential weights: no learning rate to guess.

    Each of the K experts takes each datum from its own state. The decision of round t is
    :math:`\bar m_t = \sum_k w_{t,k} m_{t,k}` with :math:`w_{t,k} \propto \exp(-\lambda_t L_{t-1,k})`, L the
    cumulative losses of the experts at their means, and it is this decision that suffers the loss:
    ``at_mean`` is :math:`\ell_t(\bar m_t)`, for a convex loss at most the mean loss of the experts.
    ``expected`` is that of the mixture of the experts' posteriors, :math:`\sum_k w_{t,k} E_{q_{t,k}}\ell_t`. The
    posterior in the state is the Gaussian with the mean and the (co)variances of that mixture;
    :func:`weighted_posteriors` is the mixture itself.

    λ is AdaHedge's: log K over the gap so far. The gap of a round is what the decision suffers above the
    mix loss :math:`-\lambda^{-1}\log\sum_k w_k\exp(-\lambda\ell_k)`, if anything; no range of the losses and no
    horizon is needed. (The published gap takes the mean loss of the experts for the decision's, which for a
    convex loss is larger: where averaging helps, λ stays higher here.) With S the largest range of the
    experts' losses in a round,

    .. math:: \sum_t \ell_t(\bar m_t) - \min_k L_{T,k} \le 2\,\mathrm{gap}_T
              \le S\sqrt{T\log K} + S(\tfrac43\log K + 2)

    where the first holds for every loss and can be read off the state, :func:`regret_bound`, and the second for
    convex ones.

    A fixed ``learning_rate`` λ is Hedge. For a loss with exp(-λ l) concave in the parameters, such as the squared
    loss with \|y - u\| <= B and λ = 1/(2B²), the gap is 0 and the regret at most log(K)/λ. With λ = 1 and a
    log-loss the weights are Bayes' on the plug-in densities, and the mixture Σ w_k p(y \| m_k) has a regret of at
    most log K.

    ``share`` > 0 (fixed share) hands that part of the weight to all experts alike after each round, so that the
    aggregate follows a best expert that changes. Each expert then has a weight of at least share/K in every
    decision: it is for experts that stay bounded.

    Where the expectation draws, all experts see the same random numbers. An expert whose cumulative loss is not
    finite, or exceeds the square root of the largest number, is left out for good: ``memory.active`` is False. A
    round that all experts reject is rejected.

    Args:
        *grids: Grids of rules, from :func:`grid`, at least one.
        learning_rate: λ for Hedge, positive, or a callable of the count that does not increase; None for
            AdaHedge.
        share: In [0, 1).

    Returns:
        An online :class:`Rule` for ``MeanField`` and ``FullRank`` priors; its memory is :class:`Experts`.

    Raises:
        ValueError: If there is no grid, or an argument is out of range.
        TypeError: If an argument is no grid.

    References:
        S. de Rooij, T. van Erven, P. Grünwald, W. Koolen, *Follow the leader if you can, hedge if you must*,
        JMLR 15, 2014, section 2. M. Herbster, M. Warmuth, *Tracking the best expert*, Machine Learning 32, 1998.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(
        ...     nt.online.grid(nt.online.ngvi, step_size=[0.25, 1.0], prior_scale=[0.5, 2.0]),
        ...     nt.online.grid(nt.online.svb, step_size=[0.01, 0.1, 1.0]),
        ... )
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = np.tile(np.eye(2), (20, 1)), np.tile([1.0, -1.0], 20)
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> nt.online.weights(state).shape
        (7,)
        >>> bool(nt.online.regret(state) <= nt.online.regret_bound(state))
        True
    """
    if not grids:
        raise ValueError("aggregate needs at least one grid of rules, from grid(...).")
    for each in grids:
        if not isinstance(each, Grid):
            raise TypeError(
                f"aggregate takes grids of rules, from grid(...), got {type(each).__name__}."
            )
    check_number(share, "share", "[0, 1)")
    size = sum(len(grid.labels) for grid in grids)
    schedule = (
        None
        if learning_rate is None
        else rules.as_schedule(learning_rate, "learning_rate")
    )
    # With one expert any rate will do. Each switch costs log(K/share).
    complexity = math.log(max(size, 2)) + (math.log(1.0 / share) if share else 0.0)

    def rate_after(count: Array, q: Gaussian, gap: Array) -> Array:
        if schedule is not None:
            return jnp.asarray(schedule(count + 1, q), q.loc.dtype)
        return jnp.where(gap > 0, complexity / jnp.where(gap > 0, gap, 1.0), jnp.inf)

    def init(prior: Gaussian) -> OnlineState:
        prior = rules.check_prior(prior)
        require(prior, "from_root", "aggregate")
        states = tuple(init_experts(grid, prior) for grid in grids)
        dtype = prior.loc.dtype
        weights = jnp.full((size,), 1.0 / size, dtype)
        zero = jnp.zeros((), dtype)
        memory = Experts(
            states=states,
            weights=weights,
            losses=CompensatedSum.start(jnp.zeros((size,), dtype)),
            potential=CompensatedSum.start(jnp.zeros((size,), dtype)),
            gap=CompensatedSum.start(zero),
            rate=rate_after(jnp.zeros((), jnp.int32), prior, zero),
            share=jnp.full((), share, dtype),
            active=jnp.ones((size,), bool),
        )
        return rules.start(prior, match(weights, all_posteriors(states)), memory)

    def step(
        expectation: Expectation,
        state: OnlineState,
        data: rules.Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        before, q = state.memory, state.posterior
        key = round_key(expectation, state, rng_key)
        at_mean = expectation.evaluate(
            q, *data, rng_key=key, curvature="none", mask=mask
        ).at_mean

        def step_grid(grid: Grid, states: OnlineState) -> tuple[OnlineState, Losses]:
            def one(values: Params, state: OnlineState) -> tuple[OnlineState, Losses]:
                # The key counts rejected rounds too, so that all experts draw the same numbers.
                tempered = scale_gradients(expectation, values["alpha"])
                return one_round(grid.rule(values), tempered, state, data, key, mask)

            return jax.vmap(one)(grid.arrays(q.loc.dtype), states)

        states, by_grid = zip(*map(step_grid, grids, before.states), strict=True)
        # Losses of the experts, those of rejected rounds as they came out.
        suffered, expected = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), *by_grid
        )
        rate_of = partial(rate_after, state.count + 1, q)
        experts, some = reweigh(
            before._replace(states=states), suffered, at_mean, rate_of, share
        )
        weights = experts.weights
        losses = Losses(
            at_mean, jnp.sum(jnp.where(weights > 0, weights * expected, 0.0))
        )
        some = some & any_increase("count", experts, before)
        accept = some & jnp.isfinite(losses.at_mean) & jnp.isfinite(losses.expected)
        return commit(state, experts, losses, accept), losses

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError(
            "an aggregate evaluates each expert itself: run it by nt.online.run, update or OnlineVI."
        )

    quadratic = any(grid.rule(grid.values(0)).quadratic for grid in grids)
    return rules.Rule(
        init, update, curvature="none", name="aggregate", step=step, quadratic=quadratic
    )


def reweigh(
    experts: Experts,
    suffered: Array,
    at_mean: Array,
    rate_of: Callable[[Array], Array],
    share: float,
) -> tuple[Experts, Array]:
    """The experts after a round, their weights still those of its decision, and whether one is active.

    Args:
        experts: The states after the round, all else before it.
        suffered: The experts' losses in the round, shape ``(K,)``.
        at_mean: The loss of the decision.
        rate_of: From the sum of the gaps to λ.
        share: Part of the weight that is shared out.
    """
    losses = experts.losses.add(suffered)
    # Far from overflow, so that all arithmetic on active experts is finite.
    largest = jnp.sqrt(jnp.finfo(at_mean.dtype).max)
    active = experts.active & (jnp.abs(losses.value) < largest)
    some = jnp.any(active)
    # Where no expert is left, the data are to blame.
    active = jnp.where(some, active, experts.active)
    potential = jnp.where(active, experts.potential.value, jnp.inf)
    weights = exponential_weights(potential, experts.rate)
    gap = experts.gap.add(
        jnp.maximum(at_mean - mix_loss(potential, suffered, experts.rate), 0.0)
    )
    rate = rate_of(gap.value)
    ahead = experts.potential.add(jnp.where(active, suffered - at_mean, 0.0))
    if share:
        ahead = share_out(ahead, rate, active, share)
    after = experts._replace(
        weights=weights,
        losses=losses,
        potential=ahead,
        gap=gap,
        rate=rate,
        active=active,
    )
    return after, some


def commit(
    state: OnlineState, experts: Experts, losses: Losses, accept: Array
) -> OnlineState:
    """The state after a round: each expert has accepted or rejected it for itself."""
    before, active = state.memory, experts.active
    sums = jax.tree.map(lambda leaf: jnp.where(active, leaf, jnp.inf), experts.losses)
    memory = rules.choose(accept, experts._replace(losses=sums), before)
    weights = exponential_weights(
        jnp.where(active, memory.potential.value, jnp.inf), memory.rate
    )
    floored = accept & any_increase("floored", experts, before)
    return rules.close_round(state, losses, accept)._replace(
        posterior=match(weights, all_posteriors(experts.states)),
        memory=memory._replace(states=experts.states, weights=weights, active=active),
        count=state.count + accept.astype(state.count.dtype),
        floored=state.floored + floored.astype(state.floored.dtype),
    )


def any_increase(counter: str, after: Experts, before: Experts) -> Array:
    """Whether a counter of some expert has increased."""
    pairs = zip(after.states, before.states, strict=True)
    return jnp.any(
        jnp.stack(
            [
                jnp.any(getattr(new, counter) > getattr(old, counter))
                for new, old in pairs
            ]
        )
    )


def share_out(
    potential: CompensatedSum, rate: Array, active: Array, share: float
) -> CompensatedSum:
    """The potential whose weights are those of this one after a part is shared out among the active experts."""
    weights = exponential_weights(jnp.where(active, potential.value, jnp.inf), rate)
    even = jnp.where(active, 1.0 / jnp.maximum(jnp.sum(active), 1), 0.0).astype(
        weights.dtype
    )
    weights = (1.0 - share) * weights + share * even
    finite = jnp.isfinite(rate)
    value = -jnp.log(jnp.where(active, weights, 1.0)) / jnp.where(finite, rate, 1.0)
    # At an infinite rate the mix loss is that of the best expert in each round: switches are free.
    return CompensatedSum.start(jnp.where(finite, value, jnp.zeros_like(value)))


def exponential_weights(losses: Array, rate: Array) -> Array:
    r"""The weights :math:`w_k \propto \exp(-\lambda L_k)`.

    Args:
        losses: Cumulative losses L, shape ``(K,)``, up to a common constant; infinite for an expert that is out.
            One at least is finite.
        rate: λ, at least 0. Infinite, it shares the weight among the leaders.

    Returns:
        Weights of shape ``(K,)`` that sum to 1.
    """
    behind = losses - jnp.min(losses)
    finite = jnp.isfinite(rate)
    # 0 times infinity, for a leader or for a rate of 0, would be NaN.
    exponent = jnp.where(
        behind > 0,
        jnp.where(finite, rate, 1.0) * jnp.where(behind > 0, behind, 1.0),
        0.0,
    )
    out = jnp.isinf(behind) | (~finite & (behind > 0))
    weights = jnp.where(out, jnp.zeros((), losses.dtype), jnp.exp(-exponent))
    return weights / jnp.sum(weights)


def mix_loss(before: Array, losses: Array, rate: Array) -> Array:
    r"""The mix loss of one round, :math:`-\lambda^{-1}\log\sum_k w_k \exp(-\lambda\ell_k)`.

    w are the exponential weights of the cumulative losses before the round; for an infinite rate it is the change
    of the least cumulative loss. Its sum over rounds exceeds the cumulative loss of no expert by more than
    log(K)/λ, whatever the losses, so long as the rate does not increase.

    Args:
        before: Cumulative losses before the round, shape ``(K,)``; infinite for an expert that is out.
        losses: Losses in the round, shape ``(K,)``; of an expert that is out they may be anything.
        rate: λ, positive, possibly infinite.

    Returns:
        A scalar.
    """
    present = jnp.isfinite(before)
    behind = jnp.where(present, before - jnp.min(before), jnp.inf)
    losses = jnp.where(present, losses, 0.0)
    after = behind + losses
    # Before the round, the weight of the expert that is best after it may have been rounded to 0.
    least = jnp.min(after)
    finite = jnp.isfinite(rate)
    safe = jnp.where(finite, rate, 1.0)
    total = jnp.sum(jnp.exp(-safe * (after - least)))
    normaliser = jnp.sum(jnp.exp(-safe * behind))
    return least + jnp.where(finite, (jnp.log(normaliser) - jnp.log(total)) / safe, 0.0)
