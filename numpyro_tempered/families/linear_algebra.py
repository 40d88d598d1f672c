"""Products in full precision: accelerators multiply float32 in fewer bits unless told otherwise."""

from functools import partial

import jax
import jax.numpy as jnp

matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
