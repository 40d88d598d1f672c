"""The pictures that ArviZ has not; matplotlib is imported when one is drawn."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_tempered._typing import ArrayLike


def plot_regret(losses: Mapping[str, ArrayLike], hindsight: float | None = None, ax: Any = None) -> Any:
    """Average cumulative loss of online rules against the number of rounds.

    Args:
        losses: Losses per round by rule, shape ``(T,)`` each; rounds that were rejected (NaN) count
            as absent.
        hindsight: Average loss of the best fixed parameter in hindsight, drawn as a line.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there is no loss to draw.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import numpyro_tempered as nt
        >>> ax = nt.plots.plot_regret({"sva": [1.0, 0.5, 0.25]}, hindsight=0.2)
        >>> ax.get_xlabel()
        'round t'
    """
    import matplotlib.pyplot as plt

    if not losses:
        raise ValueError("plot_regret needs the losses of at least one rule.")
    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, values in losses.items():
        array = np.asarray(values, dtype=np.float64)
        taken = np.isfinite(array)
        average = np.cumsum(np.where(taken, array, 0.0)) / np.maximum(np.cumsum(taken), 1)
        ax.plot(np.arange(1, len(array) + 1), average, label=name, linewidth=1.6)
    if hindsight is not None:
        ax.axhline(hindsight, color="0.3", linestyle="--", label="best in hindsight")
    ax.set(xscale="log", xlabel="round t", ylabel="average cumulative loss")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax
