"""One pass over the data: responsibilities, and the sums that follow from them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.precision import CompensatedSum, matmul
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.blocks import Blocks
from numpyro_tempered.mixtures.components.base import Component


class Coefficients(NamedTuple):
    r"""A mixture as a linear function of the statistics, l_ij = log_weights_j + constant_j + ⟨weights_j, T(x_i)⟩.

    Attributes:
        log_weights: E log p_j, ``(K,)``.
        constant: ``(K,)``.
        weights: ``(K, F)``.
    """

    log_weights: Array
    constant: Array
    weights: Array


class Sums(NamedTuple):
    """What a pass over the data leaves; sums of two passes add.

    Attributes:
        log_sum: The weighted sum of logsumexp_j l_ij, without log h, shape ().
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        statistics: The weighted sums of omega_ij T(x_i), ``(K, F)``.
    """

    log_sum: Array
    counts: Array
    statistics: Array


def log_joint(component: Component, mixture: Coefficients, columns: Array) -> Array:
    """l_ij without log h, for columns ``(d, n)``: shape ``(K, n)``."""
    linear = matmul(mixture.weights, component.statistics(columns))
    return linear + (mixture.log_weights + mixture.constant)[:, None]


def sweep(component: Component, mixture: Coefficients, blocks: Blocks) -> Sums:
    """Responsibilities omega_ij ∝ exp(l_ij), and the sums under them (CA18, Algorithm 1)."""

    def block_sums(columns: Array, weight: Array) -> Sums:
        joint = log_joint(component, mixture, columns)
        # A maximum has no part in derivatives, but its own derivative would cost.
        peak = jax.lax.stop_gradient(jnp.max(joint, axis=0))
        unnormalised = jnp.exp(joint - peak)
        total = jnp.sum(unnormalised, axis=0)
        omega = unnormalised * (weight / total)
        return Sums(
            jnp.sum(weight * (peak + jnp.log(total))),
            jnp.sum(omega, axis=1),
            contract(omega, component.statistics(columns)),
        )

    return over_blocks(block_sums, blocks)


def accumulate(component: Component, responsibilities: Array, blocks: Blocks) -> Sums:
    """The sums under given responsibilities ``(P, B, K, b)``; their ``log_sum`` is 0."""

    def block_sums(columns: Array, weight: Array, omega: Array) -> Sums:
        weighted = omega * weight
        statistics = contract(weighted, component.statistics(columns))
        return Sums(jnp.zeros((), weight.dtype), jnp.sum(weighted, axis=1), statistics)

    return over_blocks(block_sums, blocks, responsibilities)


def contract(omega: Array, statistics: Array) -> Array:
    """Σ_i omega_ji T_k(x_i), of ``(K, b)`` and ``(F, b)``."""
    return jax.lax.dot_general(omega, statistics, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def over_blocks(block_sums: Callable[..., Sums], blocks: Blocks, *more: Array) -> Sums:
    """Sums over all blocks, compensated from block to block, and over shards by the compiler."""

    def scan_shard(columns: Array, weight: Array, *rest: Array) -> Sums:
        if columns.shape[0] == 1:
            return block_sums(columns[0], weight[0], *(each[0] for each in rest))

        def body(carry: Sums, block: tuple[Array, ...]) -> tuple[Sums, None]:
            return jax.tree.map(CompensatedSum.add, carry, block_sums(*block), is_leaf=_is_sum), None

        first = jax.eval_shape(block_sums, columns[0], weight[0], *(each[0] for each in rest))
        start = jax.tree.map(lambda leaf: CompensatedSum.start(jnp.zeros(leaf.shape, leaf.dtype)), first)
        carry, _ = jax.lax.scan(body, start, (columns, weight, *rest))
        return jax.tree.map(lambda total: total.value + total.error, carry, is_leaf=_is_sum)

    arrays = (blocks.columns, blocks.weight, *more)
    if blocks.columns.shape[0] == 1:
        return scan_shard(*(each[0] for each in arrays))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(scan_shard)(*arrays))


def base_sum(component: Component, blocks: Blocks) -> Array:
    """The weighted sum of log h."""

    def block_sums(columns: Array, weight: Array) -> Array:
        return jnp.sum(weight * component.log_base(columns))

    return over_blocks(block_sums, blocks)  # type: ignore[arg-type,return-value]


def _is_sum(value: Any) -> bool:
    return isinstance(value, CompensatedSum)
