"""The pictures that ArviZ has not; matplotlib is imported when one is drawn."""

import itertools
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
    # Rules can coincide: styles that alternate keep both visible.
    styles = itertools.cycle(["-", "--", "-.", ":"])
    for (name, values), style in zip(losses.items(), styles, strict=False):
        array = np.asarray(values, dtype=np.float64)
        taken = np.isfinite(array)
        average = np.cumsum(np.where(taken, array, 0.0)) / np.maximum(np.cumsum(taken), 1)
        ax.plot(np.arange(1, len(array) + 1), average, label=name, linestyle=style, linewidth=1.6)
    if hindsight is not None:
        ax.axhline(hindsight, color="0.3", linewidth=1.0, label="best in hindsight")
    ax.set(xscale="log", xlabel="round t", ylabel="average cumulative loss")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def plot_comparison(data: Any, ax: Any = None) -> Any:
    """The penalised ELBO of each model, with its Monte Carlo error.

    Args:
        data: The result of :func:`numpyro_tempered.compare`.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes; the best model is on top, the distance to it on the horizontal axis, in nats.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, 1.0, num_steps=100)
        >>> ax = nt.plots.plot_comparison(nt.compare({"one": fit}))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['one']
    """
    import matplotlib.pyplot as plt

    from numpyro_tempered.selection import comparison_table

    table = comparison_table(data)
    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 1.2 + 0.45 * len(table)), layout="constrained")
    position = np.arange(len(table))
    gap = table["criterion"] - table["criterion"].max()
    ax.errorbar(gap, position, xerr=2.0 * table["se"], fmt="o", capsize=3)
    ax.axvline(0.0, color="0.3", linestyle="--", linewidth=1.0)
    ax.set_yticks(position, [str(name) for name in table.index])
    ax.invert_yaxis()
    ax.set_xlabel("penalised ELBO minus the best (nats, ± 2 Monte Carlo standard errors)")
    ax.grid(axis="x", alpha=0.3)
    return ax
