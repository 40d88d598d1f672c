"""Double precision for a block of code."""

from contextlib import AbstractContextManager

import jax


def double_precision() -> AbstractContextManager[None]:
    """Arrays of 64 bits within, in this thread alone; under old and new jax.

    An objective of 10^6 terms is off by a nat in float32, from the rounding of its coefficients alone.
    """
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax import experimental

    return experimental.enable_x64(True)  # type: ignore[attr-defined]
