"""The state of an aggregate: experts, their weights and posteriors, and the regret that it certifies."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum, add_repr, check_count
from numpyro_tempered.gaussian.families.base import Gaussian, Q, family_of
from numpyro_tempered.online.base import OnlineState, memory_of


@add_repr
class Experts(NamedTuple):
    """Memory of :func:`aggregate`, of K experts in all.

    Attributes:
        states: The states of the experts: one stacked :class:`OnlineState` for each grid.
        weights: Weights of the experts in the next decision, shape ``(K,)``.
        losses: Cumulative losses of the experts at their means, shape ``(K,)``, compensated.
        potential: What the weights are exponential in: the losses less those of the decision, shape ``(K,)``,
            with shares taken into account; compensated.
        gap: Sum over rounds of the decision's loss above the mix loss, a scalar, compensated.
        rate: λ of the weights.
        share: Part of the weight that all experts share in each round.
        active: Whether an expert's losses have all been finite, shape ``(K,)``.
    """

    states: tuple[OnlineState, ...]
    weights: Array
    losses: CompensatedSum
    potential: CompensatedSum
    gap: CompensatedSum
    rate: Array
    share: Array
    active: Array


class WeightedPosteriors(NamedTuple):
    """The posteriors of experts, with the weights at which they mix.

    Attributes:
        weights: Shape ``(K,)``, summing to 1.
        posteriors: The Gaussians, of one family, stacked along a leading axis of K.
    """

    weights: Array
    posteriors: Gaussian


def all_posteriors(states: tuple[OnlineState, ...]) -> Gaussian:
    """The posteriors of all experts, stacked."""
    return jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), *(state.posterior for state in states)
    )


def match(weights: Array, posteriors: Q) -> Q:
    """The Gaussian with the mean and the variances of a mixture; the covariance unless the family is diagonal."""
    some = weights > 0
    loc = jnp.sum(
        jnp.where(some[:, None], weights[:, None] * posteriors.loc, 0.0), axis=0
    )
    # The square of an expert without weight could overflow.
    root = jnp.sqrt(weights)[:, None]
    offset = jnp.where(some[:, None], root * (posteriors.loc - loc[None, :]), 0.0)
    family = family_of(posteriors)
    roots = jax.vmap(family.root)(posteriors)
    if family.diagonal_only:
        spread = jnp.where(some[:, None], root * roots, 0.0)
        return family.with_root(
            loc, jnp.sqrt(jnp.sum(jnp.square(spread) + jnp.square(offset), axis=0))
        )
    factors = jnp.where(some[:, None, None], root[:, :, None] * roots, 0.0)
    columns = jnp.concatenate(
        [jnp.swapaxes(factors, 1, 2).reshape(-1, loc.shape[0]), offset]
    )
    covariance = jnp.matmul(columns.T, columns)
    largest = jnp.max(jnp.diagonal(covariance))
    # Points have no spread, and few of them a covariance of low rank.
    jitter = loc.shape[0] * jnp.finfo(loc.dtype).eps * largest
    eye = jnp.eye(loc.shape[0], dtype=loc.dtype)
    covariance = covariance + jitter * eye
    factor = jnp.linalg.cholesky(
        jnp.where(largest > 0, covariance, eye), symmetrize_input=False
    )
    return family.with_root(loc, jnp.where(largest > 0, factor, 0.0))


def weights(state: OnlineState) -> Array:
    """The weights of the experts of an aggregate in its next decision.

    Args:
        state: State of an :func:`aggregate`.

    Returns:
        Shape ``(K,)``, in the order of the grids and their labels.

    Raises:
        TypeError: If the state is of another rule.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(nt.online.grid(nt.online.svb, step_size=[0.1, 1.0]))
        >>> nt.online.weights(rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))))
        Array([0.5, 0.5], dtype=float32)
    """
    return _memory(state).weights


def expert_states(state: OnlineState) -> tuple[OnlineState, ...]:
    """The states of the experts of an aggregate.

    Args:
        state: State of an :func:`aggregate`.

    Returns:
        One stacked :class:`OnlineState` for each grid; its expert k is
        ``jax.tree.map(lambda leaf: leaf[k], ...)``.

    Raises:
        TypeError: If the state is of another rule.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(nt.online.grid(nt.online.svb, step_size=[0.1, 1.0]))
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(3), jnp.ones(3)))
        >>> [experts.posterior.loc.shape for experts in nt.online.expert_states(state)]
        [(2, 3)]
    """
    return _memory(state).states


def weighted_posteriors(state: OnlineState) -> WeightedPosteriors:
    """The mixture of the experts' posteriors, for predictive densities Σ w_k ∫ p(y | θ) q_k(dθ).

    Args:
        state: State of an :func:`aggregate`.

    Returns:
        :class:`WeightedPosteriors`: weights ``(K,)`` and posteriors stacked along a leading axis of K.

    Raises:
        TypeError: If the state is of another rule.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(nt.online.grid(nt.online.ngvi, prior_scale=[1.0, 2.0]))
        >>> nt.online.weighted_posteriors(rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))))
        WeightedPosteriors(weights=Array([0.5, 0.5], dtype=float32), posteriors=MeanField(loc=Array([[0.],
           [0.]], dtype=float32), scale=Array([[1.],
           [2.]], dtype=float32)))
    """
    memory = _memory(state)
    return WeightedPosteriors(memory.weights, all_posteriors(memory.states))


def regret(state: OnlineState) -> Array:
    """The cumulative loss of the decisions less that of the best expert.

    Args:
        state: State of an :func:`aggregate`.

    Returns:
        A scalar, negative where the aggregate did better than all its experts.

    Raises:
        TypeError: If the state is of another rule.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(nt.online.grid(nt.online.svb, step_size=[0.1, 1.0]))
        >>> float(nt.online.regret(rule.init(nt.gaussian.families.MeanField(jnp.zeros(3), jnp.ones(3)))))
        0.0
    """
    memory, total = _memory(state), state.cumulative.at_mean
    # Both are large: their values cancel, and the rest is of the size of their errors.
    ahead = (total.value - memory.losses.value) + (total.error - memory.losses.error)
    return jnp.max(jnp.where(memory.active, ahead, -jnp.inf))


def regret_bound(state: OnlineState, num_switches: int = 0) -> Array:
    r"""A bound on the regret of an aggregate, from what its own run has shown.

    Against every sequence of active experts that switches m times, with the gap G, the rate λ and the share α of
    the state,

    .. math:: \mathrm{regret} \le G + \frac1\lambda\Big[\log K + m \log\frac K\alpha
              + (T - 1 - m)\log\frac1{1-\alpha}\Big]

    which under AdaHedge, with m and the share 0, is 2G. It holds for every loss and all data; convexity makes it
    small (:func:`aggregate`).

    Args:
        state: State of an :func:`aggregate`.
        num_switches: m.

    Returns:
        A scalar; for m = 0 not below :func:`regret`. Infinite where m > 0 and the share is 0.

    Raises:
        TypeError: If the state is of another rule.
        ValueError: If ``num_switches`` is negative.

    References:
        de Rooij et al. 2014, Lemma 2 and Theorem 6; the shares by the argument of Herbster and Warmuth 1998 with
        rates that fall.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate(nt.online.grid(nt.online.svb, step_size=[0.1, 1.0]))
        >>> float(nt.online.regret_bound(rule.init(nt.gaussian.families.MeanField(jnp.zeros(3), jnp.ones(3)))))
        0.0
    """
    check_count(num_switches, "num_switches", least=0)
    memory = _memory(state)
    share = memory.share
    log_size = math.log(max(memory.weights.shape[-1], 2))
    stays = jnp.maximum(state.count - 1 - num_switches, 0).astype(share.dtype)
    cost = log_size - stays * jnp.log1p(-share)
    if num_switches:
        cost = cost + num_switches * (log_size - jnp.log(share))
    # An infinite rate costs nothing: the mix loss was that of the best expert in every round.
    return memory.gap.value + jnp.where(
        jnp.isfinite(memory.rate), cost / memory.rate, 0.0
    )


def _memory(state: OnlineState) -> Experts:
    return memory_of(state, Experts, "aggregate(...)")
