"""Exponential weights on experts, and the loss that they mix (de Rooij et al. 2014)."""

import jax.numpy as jnp

from numpyro_tempered.core.typing import Array


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
    exponent = jnp.where(behind > 0, jnp.where(finite, rate, 1.0) * jnp.where(behind > 0, behind, 1.0), 0.0)
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
