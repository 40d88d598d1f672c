"""Windows of many lengths, and changes of a stream from their weights: the test of Page and Hinkley."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    check_count,
    check_known,
    check_number,
    check_numbers,
    check_positive,
    doubles,
)
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


def detect_changes(
    history: ArrayLike,
    windows: Sequence[float] = WINDOWS,
    *,
    max_window: float = 256.0,
    slack: float = 1.0,
    limit: float = 50.0,
    warm_up: int = 1024,
    stride: int = 1,
) -> np.ndarray:
    r"""Rounds in which the weights of :func:`aggregate_windows` show that the stream has changed.

    While a target rests the weight moves to long windows, and after a change to short ones. With the logarithm of
    the window under the weights, in octaves, and its mean since the last flag

    .. math:: h_t = \sum_k w_{t,k} \log_2 \min(\omega_k, \omega_{\max}), \qquad
              S_t = \max(0,\; S_{t-1} + \bar h_t - h_t - \delta)

    a change is flagged, and the test starts anew, where S exceeds the limit: by default when the weight is on
    windows 2 + n octaves shorter than before for 50/(1 + n) rounds. Windows beyond ω_max count as ω_max, since
    which of the long ones leads says nothing of a change. The test begins after ``warm_up`` rounds: at first the
    rate of the weights is large, and they follow small differences between the experts.

    It flags jumps, and slow drifts once per slow-down of the windows; it does not name the round of the change,
    which is earlier. It does not know of changes that leave the best window as it is. Windows are in rounds for
    unit information in a datum (:func:`random_walk`): with features of another size than one all are shorter or
    longer than their names, and changes can be missed; standardise the features.

    Args:
        history: Weights (:func:`weights`) after rounds in order, shape ``(n, K)``.
        windows: Those of the aggregate, K of them.
        max_window: ω_max, in rounds.
        slack: δ, in octaves: how much shorter windows may become without a flag.
        limit: Of S, in octaves times rounds. Larger, it flags later and less often by mistake.
        warm_up: Rounds before the test begins. Rows up to the last flag may be dropped with a warm-up of 0.
        stride: Rounds from one row of the history to the next.

    Returns:
        Rows of the history in which a change is flagged, increasing integers of shape ``(num_changes,)``. Further
        rows add to them and alter none.

    Raises:
        ValueError: If the shape is not ``(n, K)``, a row is not made of weights that sum to 1, or an argument is
            out of range.
        TypeError: If the history is traced.

    References:
        E. S. Page, *Continuous inspection schemes*, Biometrika 41, 1954. D. V. Hinkley, *Inference about the
        change-point from cumulative sum tests*, Biometrika 58, 1971.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> history = np.zeros((2000, 3))
        >>> history[:1500, 2] = 1.0  # the window that never forgets
        >>> history[1500:, 0] = 1.0  # 16 rounds
        >>> nt.online.detect_changes(history, [16, 128, np.inf])
        array([1517])
    """
    check_known("detect_changes reads weights that are known", history)
    check_numbers(windows, "windows", "(0, inf]")
    check_number(max_window, "max_window", "(0, inf)")
    check_number(slack, "slack", "[0, inf)")
    check_number(limit, "limit", "(0, inf)")
    check_count(warm_up, "warm_up", least=0)
    check_count(stride, "stride")
    rows = doubles(history)
    if rows.ndim != 2 or rows.shape[1] != len(windows):
        raise ValueError(
            f"history must have shape (n, {len(windows)}), one weight a window, got {rows.shape}."
        )
    valid = np.all(rows >= 0, axis=1) & (np.abs(rows.sum(axis=1) - 1.0) < 1e-3)
    if not valid.all():
        worst = int(np.argmin(valid))
        raise ValueError(
            f"history must hold weights that sum to 1, got {rows[worst]} in row {worst}."
        )
    octaves = rows @ np.log2(np.minimum(doubles(windows), max_window))
    flags, count, mean, excess = [], 0, 0.0, 0.0
    for row in range(math.ceil(warm_up / stride), len(octaves)):
        count += 1
        mean += (octaves[row] - mean) / count
        excess = max(0.0, excess + stride * (mean - octaves[row] - slack))
        if excess > limit:
            flags.append(row)
            count, mean, excess = 0, 0.0, 0.0
    return np.array(flags, int)
