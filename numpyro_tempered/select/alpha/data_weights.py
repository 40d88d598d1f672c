"""Weights of single data in the likelihood of a model, and the bootstrap's, which are counts."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from numpyro.primitives import Messenger

from numpyro_tempered.core import Array, Model, map_batches
from numpyro_tempered.handlers.effects import ALPHA, Message
from numpyro_tempered.handlers.rows import DataRows

T = TypeVar("T")
# Most numbers in a batch of data sets: 256 MiB in float32.
_BATCH = 2**26


class weigh_data(Messenger):
    """Multiply the log-likelihood of each datum by a weight, 0 to leave it out; around a tempered model.

    Outside of :class:`temper`, whose mark tells likelihood from prior factors.
    """

    def __init__(self, fn: Model, weights: Array, rows: DataRows) -> None:
        weights = rows.spread(weights)
        self.weights = jnp.reshape(weights, (*weights.shape, *(1,) * (-1 - rows.dim)))
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        """Scale a site of the likelihood."""
        if msg["type"] != "sample" or not msg["is_observed"] or ALPHA not in msg:
            return
        # What is left out may be impossible, and 0 times minus infinity is NaN.
        msg["fn"] = msg["fn"].mask(self.weights != 0)
        weights = self.weights
        msg["scale"] = weights if msg["scale"] is None else weights * msg["scale"]


@partial(jax.jit, static_argnums=(1, 2))
def resamples(rng_key: Array, num_bootstrap: int, num_data: int) -> Array:
    """How often each datum is in each of B multinomial resamples of n data, ``(B, n)``."""

    def count(key: Array) -> Array:
        rows = jax.random.randint(key, (num_data,), 0, num_data)
        return jnp.zeros(num_data).at[rows].add(1.0)

    return jax.vmap(count)(jax.random.split(rng_key, num_bootstrap))


def over_resamples(function: Callable[[Array], T], counts: Array, dim: int) -> T:
    """A function of the counts ``(n,)`` of each resample, in batches that fit into memory."""
    num, n = counts.shape
    batch = max(1, _BATCH // (n * (dim + 1)))
    return (
        jax.vmap(function)(counts)
        if batch >= num
        else map_batches(function, counts, batch)
    )
