"""Aggregation over windows, for targets that drift at an unknown speed."""

import math
from collections.abc import Callable, Sequence

from numpyro_tempered.core import check_numbers, check_positive
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.grid import grid
from numpyro_tempered.online.rules.forgetting import random_walk
from numpyro_tempered.online.rules.rvga import rvga

WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, math.inf)


def aggregate_windows(
    windows: Sequence[float] = WINDOWS,
    *,
    factory: Callable[..., rules.Rule] = rvga,
    step_size: float = 1.0,
    scale: float = 1.0,
    share: float = 0.001,
) -> rules.Rule:
    r"""The default for a target that may drift: :func:`rvga` over windows in powers of two, aggregated.

    Expert k takes the parameters to move by N(0, (scale/w_k)²) between two rounds, ``random_walk(scale / w_k)``;
    with unit information in a datum and parameters of unit size its posterior holds about w_k data. An infinite
    window is for a target that stands still. Fixed shares let the aggregate follow a best window that changes:
    a long one while the target rests, a short one after a jump.

    The experts take implicit steps, of quadratic losses too. A short window makes a wide posterior, on which the
    explicit step of a mean-field family overshoots: on a loss of curvature c in the predictor it multiplies the
    residual of its own datum by :math:`1 - \sum_j s_j`, :math:`s_j = cx_j^2/(\tau_j + cx_j^2)` with τ the
    precisions, and diverges where the sum exceeds 2. The implicit step multiplies it by
    :math:`1/(1 + c\sum_j x_j^2/\tau_j)`, whatever the size of the features.

    A random walk and not :func:`power`: where a coordinate gets no data, its variance grows in proportion to
    time, not exponentially.

    Args:
        windows: Windows w, positive, possibly infinite.
        factory: A function of a step size and ``forget=`` that returns a rule, such as :func:`rvga` or
            ``functools.partial(ngvi, curvature="fisher")``.
        step_size: That of the rules.
        scale: Size of the parameters, the unit of their moves.
        share: Part of the weight shared out in each round, :func:`aggregate`.

    Returns:
        An online :class:`Rule`; :func:`detect_changes` reads changes of the stream from its weights.

    Raises:
        ValueError: If a window or the scale is not positive, or an argument is not one that the factory takes.

    References:
        LBB22 for the step.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.aggregate_windows()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((400, 1)), jnp.repeat(jnp.array([1.0, -1.0]), 200)
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.1f}")
        -1.0
    """
    check_numbers(windows, "windows", "(0, inf]")
    check_positive(scale=scale)

    def with_window(window: float) -> rules.Rule:
        return factory(step_size, forget=random_walk(scale / window))

    return aggregate(
        grid(with_window, window=[float(window) for window in windows]), share=share
    )
