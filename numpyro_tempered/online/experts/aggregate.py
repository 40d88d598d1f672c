"""Exponentially weighted aggregation of online rules (AdaHedge, de Rooij et al. 2014)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered.core.precision import CompensatedSum
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.mean_field import MeanField
from numpyro_tempered.online.base import (
    CumulativeLosses,
    Losses,
    OnlineState,
    Rule,
    StepSize,
    as_schedule,
    check_prior,
    start,
)
from numpyro_tempered.online.experts.hedge import exponential_weights, mix_loss
from numpyro_tempered.online.experts.state import Mixture, joined, match
from numpyro_tempered.online.experts.sweep import Sweep, init_members, tempered
from numpyro_tempered.online.stream import round_key, step


def aggregate(*sweeps: Sweep, learning_rate: StepSize | None = None, share: float = 0.0) -> Rule:
    r"""Many rules side by side, combined by exponential weights: no learning rate to guess.

    Each of the K members takes each datum from its own state. The decision of round t is
    :math:`\bar m_t = \sum_k w_{t,k} m_{t,k}` with :math:`w_{t,k} \propto \exp(-\lambda_t L_{t-1,k})`, L the
    cumulative losses of the members at their means, and it is this decision that suffers the loss:
    ``at_mean`` is :math:`\ell_t(\bar m_t)`, for a convex loss at most the mean loss of the members.
    ``expected`` is that of the mixture of the members' posteriors, :math:`\sum_k w_{t,k} E_{q_{t,k}}\ell_t`. The
    posterior in the state is the Gaussian with the mean and the (co)variances of that mixture;
    :func:`predictive_mixture` is the mixture itself.

    λ is AdaHedge's: log K over the gap so far. The gap of a round is what the decision suffers above the
    mix loss :math:`-\lambda^{-1}\log\sum_k w_k\exp(-\lambda\ell_k)`, if anything; no range of the losses and no
    horizon is needed. (The published gap has the mean loss of the experts for the decision's, which for a
    convex loss is larger: where averaging helps, λ stays higher here.) With S the largest range of the
    members' losses in a round,

    .. math:: \sum_t \ell_t(\bar m_t) - \min_k L_{T,k} \le 2\,\mathrm{gap}_T
              \le S\sqrt{T\log K} + S(\tfrac43\log K + 2)

    where the first holds for every loss and can be read off the state, :func:`regret_bound`, and the second for
    convex ones.

    A fixed ``learning_rate`` λ is Hedge. For a loss with exp(-λ l) concave in the parameters, such as the squared
    loss with \|y - u\| <= B and λ = 1/(2B²), the gap is 0 and the regret at most log(K)/λ. With λ = 1 and a
    log-loss the weights are Bayes' on the plug-in densities, and the mixture Σ w_k p(y \| m_k) has a regret of at
    most log K.

    ``share`` > 0 (fixed share) hands that part of the weight to all members alike after each round, so that the
    aggregate follows a best member that changes. Each member then has a weight of at least share/K in every
    decision: it is for members that stay bounded.

    Where the expectation draws, all members see the same random numbers. A member is left out for good once its
    cumulative loss is not finite, or beyond the square root of the largest number; ``memory.alive`` tells. A
    round that all members reject is rejected.

    Args:
        *sweeps: Grids of rules, from :func:`sweep`, at least one.
        learning_rate: λ for Hedge, positive, or a callable of the count that does not increase; None for
            AdaHedge.
        share: In [0, 1).

    Returns:
        An online :class:`Rule` for ``MeanField`` and ``FullRank`` priors; its memory is a :class:`Mixture`.

    Raises:
        ValueError: If there is no sweep, or an argument is out of range.
        TypeError: If an argument is no sweep.

    References:
        S. de Rooij, T. van Erven, P. Grünwald, W. Koolen, *Follow the leader if you can, hedge if you must*,
        JMLR 15, 2014, section 2. M. Herbster, M. Warmuth, *Tracking the best expert*, Machine Learning 32, 1998.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(
        ...     nt.online.sweep(nt.online.ngvi, step_size=[0.25, 1.0], prior_scale=[0.5, 2.0]),
        ...     nt.online.sweep(nt.online.svb, step_size=[0.01, 0.1, 1.0]),
        ... )
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = np.tile(np.eye(2), (20, 1)), np.tile([1.0, -1.0], 20)
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> nt.online.weights(state).shape
        (7,)
        >>> bool(nt.online.regret(state) <= nt.online.regret_bound(state))
        True
    """
    if not sweeps:
        raise ValueError("aggregate needs at least one grid of rules, from sweep(...).")
    for grid in sweeps:
        if not isinstance(grid, Sweep):
            raise TypeError(f"aggregate takes grids of rules, from sweep(...), got {type(grid).__name__}.")
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be in [0, 1), got {share!r}.")
    size = sum(len(grid.labels) for grid in sweeps)
    fixed = None if learning_rate is None else as_schedule(learning_rate, "learning_rate")
    # With one member any rate will do. Switching costs log(K/share) a time.
    complexity = math.log(max(size, 2)) + (math.log(1.0 / share) if share else 0.0)

    def rate_after(count: Array, gap: Array, q: Any) -> Array:
        if fixed is not None:
            return jnp.asarray(fixed(count + 1, q), q.loc.dtype)
        return jnp.where(gap > 0, complexity / jnp.where(gap > 0, gap, 1.0), jnp.inf)

    def init(prior: Any) -> OnlineState:
        prior = check_prior(prior)
        if not isinstance(prior, MeanField | FullRank):
            raise TypeError(f"aggregate works on MeanField and FullRank, got {type(prior).__name__}.")
        members = tuple(init_members(grid, prior) for grid in sweeps)
        dtype = prior.loc.dtype
        weights = jnp.full((size,), 1.0 / size, dtype)
        zero = jnp.zeros((), dtype)
        memory = Mixture(
            members=members,
            weights=weights,
            losses=CompensatedSum.start(jnp.zeros((size,), dtype)),
            potential=CompensatedSum.start(jnp.zeros((size,), dtype)),
            gap=CompensatedSum.start(zero),
            rate=rate_after(jnp.zeros((), jnp.int32), zero, prior),
            share=jnp.full((), share, dtype),
            alive=jnp.ones((size,), bool),
        )
        return start(prior, match(weights, joined(members)), memory)

    def whole_round(
        expectation: Expectation, state: OnlineState, data: Any, rng_key: Array | None, mask: Array | None
    ) -> tuple[OnlineState, Losses]:
        before, q = state.memory, state.posterior
        key = round_key(rng_key, state.count + state.rejected) if expectation.needs_key else None
        options = {} if mask is None else {"mask": mask}
        at_mean = expectation.evaluate(q, *data, rng_key=key, curvature="none", **options).at_mean
        steps = [
            step_members(grid, expectation, members, data, key, mask)
            for grid, members in zip(sweeps, before.members, strict=True)
        ]
        members = tuple(after for after, _ in steps)
        suffered, expected = (
            jnp.concatenate(leaves) for leaves in zip(*(losses for _, losses in steps), strict=True)
        )

        sums = before.losses.add(suffered)
        # Far from overflow, so that all arithmetic on live members is finite.
        largest = jnp.sqrt(jnp.finfo(at_mean.dtype).max)
        alive = before.alive & (jnp.abs(sums.value) < largest)
        some = jnp.any(alive)
        # Of data that are bad for all it is not the members' fault.
        alive = jnp.where(some, alive, before.alive)
        potential = jnp.where(alive, before.potential.value, jnp.inf)
        weights = exponential_weights(potential, before.rate)
        losses = Losses(at_mean, jnp.sum(jnp.where(weights > 0, weights * expected, 0.0)))
        gap = before.gap.add(jnp.maximum(at_mean - mix_loss(potential, suffered, before.rate), 0.0))
        rate = rate_after(state.count + 1, gap.value, q)
        ahead = before.potential.add(jnp.where(alive, suffered - at_mean, 0.0))
        if share:
            ahead = shared(ahead, rate, alive, share)
        moved = [jnp.any(new.count > old.count) for new, old in zip(members, before.members, strict=True)]
        accept = some & jnp.any(jnp.stack(moved)) & jnp.isfinite(losses.at_mean) & jnp.isfinite(losses.expected)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)

        memory = Mixture(
            # Each member has kept its own state where it rejected the round.
            members=members,
            weights=weights,
            losses=choose(jax.tree.map(lambda leaf: jnp.where(alive, leaf, jnp.inf), sums), before.losses),
            potential=choose(ahead, before.potential),
            gap=choose(gap, before.gap),
            rate=choose(rate, before.rate),
            share=before.share,
            alive=alive,
        )
        weights = exponential_weights(jnp.where(alive, memory.potential.value, jnp.inf), memory.rate)
        cumulative = CumulativeLosses(*(c.add(loss) for c, loss in zip(state.cumulative, losses, strict=True)))
        floored = [jnp.any(new.floored > old.floored) for new, old in zip(members, before.members, strict=True)]
        after = state._replace(
            posterior=match(weights, joined(memory.members)),
            memory=memory._replace(weights=weights),
            count=state.count + accept.astype(state.count.dtype),
            rejected=state.rejected + (~accept).astype(state.rejected.dtype),
            cumulative=choose(cumulative, state.cumulative),
            floored=state.floored + (accept & jnp.any(jnp.stack(floored))).astype(state.floored.dtype),
        )
        return after, losses

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError("an aggregate evaluates each member itself: run it by nt.online.run, update or OnlineVI.")

    rules = [grid.rule({name: values[0].item() for name, values in grid.swept.items()}) for grid in sweeps]
    return Rule(
        init,
        update,
        curvature="none",
        name="aggregate",
        step=whole_round,
        quadratic=any(rule.quadratic for rule in rules),
    )


def step_members(
    grid: Sweep,
    expectation: Expectation,
    members: OnlineState,
    data: Any,
    rng_key: Array | None,
    mask: Array | None,
) -> tuple[OnlineState, Losses]:
    """One round of every member of a grid; losses ``(K,)``, those of rejected rounds as they came out."""

    def one(values: dict[str, Array], member: OnlineState) -> tuple[OnlineState, Losses]:
        # Rejections are counted, so that all members draw by one and the same key.
        return step(grid.rule(values), tempered(expectation, values["alpha"]), member, data, rng_key, mask)

    return jax.vmap(one)(grid.values(members.posterior.loc.dtype), members)


def shared(potential: CompensatedSum, rate: Array, alive: Array, share: float) -> CompensatedSum:
    """The potential whose weights are those of this one after a part is shared out among the live members."""
    weights = exponential_weights(jnp.where(alive, potential.value, jnp.inf), rate)
    even = jnp.where(alive, 1.0 / jnp.maximum(jnp.sum(alive), 1), 0.0).astype(weights.dtype)
    weights = (1.0 - share) * weights + share * even
    finite = jnp.isfinite(rate)
    moved = -jnp.log(jnp.where(alive, weights, 1.0)) / jnp.where(finite, rate, 1.0)
    # While the rate is infinite the mix loss is that of the best member of each round: it may change for free.
    return CompensatedSum.start(jnp.where(finite, moved, jnp.zeros_like(moved)))
