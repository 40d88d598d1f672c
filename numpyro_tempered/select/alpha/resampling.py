"""Bootstrap data sets, as counts of the data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array

# Numbers that all data sets of a batch may hold at once: 256 MiB in float32.
_BATCH = 2**26


@partial(jax.jit, static_argnums=(1, 2))
def resamples(rng_key: Array, num_bootstrap: int, num_data: int) -> Array:
    """How often each datum is in each of B multinomial resamples of n data, ``(B, n)``."""

    def count(key: Array) -> Array:
        rows = jax.random.randint(key, (num_data,), 0, num_data)
        return jnp.zeros(num_data).at[rows].add(1.0)

    return jax.vmap(count)(jax.random.split(rng_key, num_bootstrap))


def over_resamples(function: Callable[[Array], Any], counts: Array, dim: int) -> Any:
    """A function of the counts ``(n,)`` of each resample; of so many at once as memory is likely to hold."""
    num, n = counts.shape
    batch = max(1, _BATCH // (n * (dim + 1)))
    return jax.vmap(function)(counts) if batch >= num else map_batches(function, counts, batch)


def check_num_bootstrap(num_bootstrap: int, least: int) -> None:
    """Raise for a number of resamples that is none, or too small."""
    if (
        isinstance(num_bootstrap, bool)
        or not isinstance(num_bootstrap, int | np.integer)
        or num_bootstrap < least
    ):
        raise ValueError(f"num_bootstrap must be an integer of at least {least}, got {num_bootstrap!r}.")
