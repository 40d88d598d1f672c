"""Starts of the ascents and their orders of the coefficients: points of a lasso path."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.sparse.sweep import block_design, blocks, combine, gauss_seidel, products

# Penalties of the path, in units of the smallest one that keeps all coefficients at 0.
PENALTIES = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03)
# Points of the path by start. The first has many variables in and little noise: superfluous variables leave more
# easily than missing ones come in. Each next point is far from those before.
SEQUENCE = (7, 2, 4, 8, 0, 5, 3, 6, 1)
# A start need not solve the lasso to many digits.
SWEEPS = 5


class Start(NamedTuple):
    """Starts on a leading axis.

    Attributes:
        mean: Means of the coefficients, ``(R, d)``.
        order: The coefficients in the order of the sweeps, ``(R, d)``.
    """

    mean: Array
    order: Array


class Path(NamedTuple):
    """Points of a lasso path on a leading axis.

    Attributes:
        mean: Coefficients, ``(P, d)``.
        size: The value before the threshold, in units of y, ``(P, d)``: above the penalty it grows with the
            coefficient, below it says which coefficient would come in next.
    """

    mean: Array
    size: Array


@jax.jit
def lasso_path(x: Array, y: Array, always: Array) -> Path:
    """Approximate solutions of the lasso on unit columns, each from the one before.

    Args:
        x: Columns, shape ``(n, d)``.
        y: Target, ``(n,)``.
        always: Which coefficients are not penalised, ``(d,)``.
    """
    d = x.shape[1]
    design = block_design(blocks(x.T))
    square = design.norms
    penalised = blocks(jnp.where(always, 0.0, 1.0).astype(x.dtype))
    # A column of 0 keeps a coefficient of 0.
    norm = jnp.sqrt(jnp.where(square > 0.0, square, 1.0))

    def soft(parameters: tuple[Array, Array], product: Array) -> Array:
        norm, threshold = parameters
        size = product / norm
        return jnp.sign(size) * jnp.maximum(jnp.abs(size) - threshold, 0.0) / norm

    def at(state: tuple[Array, Array], fraction: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        mean, largest = state

        def body(_index: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            mean, _sizes = state
            residual = y - combine(design.columns, mean)
            mean, partial = gauss_seidel(design, residual, mean, soft, (norm, fraction * largest * penalised))
            return mean, partial / norm

        mean, size = jax.lax.fori_loop(0, SWEEPS, body, (mean, jnp.zeros_like(mean)))
        # At the first point only the unpenalised coefficients are in; its residual gives the largest penalty.
        rest = products(design.columns, y - combine(design.columns, mean))
        penalty = jnp.max(penalised * jnp.abs(rest) / norm)
        return (mean, jnp.where(fraction > 1.0, penalty, largest)), (mean, size)

    huge = jnp.full((), jnp.finfo(x.dtype).max, x.dtype)
    fractions = jnp.concatenate([huge[None], jnp.asarray(PENALTIES, x.dtype)])
    _, points = jax.lax.scan(at, (jnp.zeros_like(square), jnp.ones_like(huge)), fractions)
    means, sizes = (part[1:] for part in points)
    flat = (len(PENALTIES), -1)
    return Path(jnp.reshape(means, flat)[:, :d], jnp.abs(jnp.reshape(sizes, flat)[:, :d]))


@partial(jax.jit, static_argnames="num_restarts")
def make_starts(
    rng_key: Array, x: Array, path: Path, prior: SpikeSlab, init: Array | None, num_restarts: int
) -> Start:
    """The first starts of a fixed sequence.

    First ``init``, if there is one, then the points of the path, with the coefficients by decreasing size; then
    the same points with the coefficients in random orders. Variables that are always in come first.
    """
    always = prior.probs == 1.0
    mean = path.mean[jnp.asarray(SEQUENCE)]
    size = path.size[jnp.asarray(SEQUENCE)]
    if init is not None:
        mean = jnp.concatenate([init[None], mean])
        size = jnp.concatenate([(jnp.abs(init) * jnp.linalg.norm(x, axis=0))[None], size])
    point = jnp.arange(num_restarts) % mean.shape[0]

    def priority(start: Array, point: Array) -> Array:
        random = jax.random.uniform(jax.random.fold_in(rng_key, start), size.shape[1:], size.dtype)
        value = jnp.where(start < mean.shape[0], size[point], random)
        return jnp.where(always, jnp.inf, value)

    priorities = jax.vmap(priority)(jnp.arange(num_restarts), point)
    return Start(mean[point], jnp.argsort(-priorities, axis=1))
