"""Aggregation over windows, for targets that drift at an unknown speed."""

import math
from collections.abc import Sequence

from numpyro_tempered.core.checks import check_numbers, check_positive
from numpyro_tempered.online.base import Rule
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.grid import grid
from numpyro_tempered.online.rules.forgetting import random_walk
from numpyro_tempered.online.rules.ngvi import ngvi

WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, math.inf)


def aggregate_windows(
    windows: Sequence[float] = WINDOWS,
    *,
    step_size: float = 1.0,
    curvature: str = "hessian",
    scale: float = 1.0,
    share: float = 0.001,
) -> Rule:
    r"""The default for a target that may drift: :func:`ngvi` over windows in powers of two, aggregated.

    Expert k takes the parameters to move by N(0, (scale/w_k)²) between two rounds, ``random_walk(scale / w_k)``;
    with unit information in a datum and parameters of unit size its posterior holds about w_k data. An infinite
    window is for a target that stands still. Fixed shares let the aggregate follow a best window that changes:
    a long one while the target rests, a short one after a jump.

    A random walk and not :func:`power`: where a coordinate gets no data, its variance grows in proportion to
    time, not exponentially.

    Args:
        windows: Windows w, positive, possibly infinite.
        step_size: That of NGVI.
        curvature: That of NGVI.
        scale: Size of the parameters, the unit of their moves.
        share: Part of the weight shared out in each round, :func:`aggregate`.

    Returns:
        An online :class:`Rule`.

    Raises:
        ValueError: If a window or the scale is not positive, or an argument is not one that NGVI takes.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate_windows()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((400, 1)), jnp.repeat(jnp.array([1.0, -1.0]), 200)
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.1f}")
        -1.0
    """
    check_numbers(windows, "windows", "(0, inf]")
    check_positive(scale=scale)

    def with_window(window: float) -> Rule:
        return ngvi(step_size, curvature=curvature, forget=random_walk(scale / window))

    return aggregate(grid(with_window, window=[float(window) for window in windows]), share=share)
