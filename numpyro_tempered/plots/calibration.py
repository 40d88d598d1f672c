"""The plot of ranks in simulated data: their distribution function less that of uniform ranks."""

from collections.abc import Mapping

import numpy as np

from numpyro_tempered.plots.axes import Axes, one_axes
from numpyro_tempered.report.arviz import ArviZData, ecdf_band, group
from numpyro_tempered.report.table import HoldsData, table

# Lines that have colours and names; of more, those without a sign of error are grey.
MOST_NAMED = 8


def plot_calibration(
    data: "HoldsData | ArviZData", ax: "Axes | None" = None, *, level: float = 0.95
) -> "Axes":
    """How the ranks of each scalar differ from uniform ones, with a simultaneous band.

    The line of a scalar is the share of simulations whose rank, as a number in (0, 1), is at most u, less u.
    A line of uniform ranks is within the band, everywhere at once, with the probability ``level``. A line that is
    first above and then below the axis is of posteriors that are too narrow; first below, too wide; above it
    alone, too high; below it alone, too low. The dashed line, at alpha other than 1, is that of exact tempered
    posteriors of many data: those of fewer data lie between it and the axis.

    Args:
        data: The result of :func:`numpyro_tempered.check_calibration`, or its ArviZ data.
        ax: Matplotlib axes; a new figure by default.
        level: Of the band, for each scalar.

    Returns:
        The axes.

    References:
        Säilynoja, Bürkner and Vehtari 2022.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> check = nt.check_calibration(jax.random.key(0), model, AutoNormal, jnp.zeros(6), num_simulations=20)
        >>> nt.plots.plot_calibration(check).get_xlabel()
        'rank of the truth among draws, from 0 to 1'
    """
    from scipy.special import ndtr, ndtri

    rows = table(data, "calibration")
    # A group of ArviZ data may be called data.
    groups = data if isinstance(data, Mapping) else data.data
    pit = group(groups, "calibration_pit")["pit"].to_numpy()
    alpha = float(group(groups, "calibration").attrs["alpha"])
    points, lower, upper = ecdf_band(pit.shape[1], level)
    ax = one_axes(ax)
    ends = np.concatenate([[0.0], points, [1.0]])
    below, above = (
        np.concatenate([[0.0], edge - points, [0.0]]) for edge in (lower, upper)
    )
    ax.fill_between(
        ends, below, above, color="0.85", linewidth=0.0, label=f"{level:.0%} band"
    )
    is_bad = (rows["p_value"] <= 0.05).to_numpy()
    for name, values, bad in zip(rows.index, pit, is_bad, strict=True):
        curve = (
            np.searchsorted(np.sort(values), ends, side="right") / len(values) - ends
        )
        if len(rows) <= MOST_NAMED or (bad and np.sum(is_bad) <= MOST_NAMED):
            ax.plot(ends, curve, drawstyle="steps-post", linewidth=1.6, label=str(name))
        else:
            ax.plot(ends, curve, drawstyle="steps-post", linewidth=0.8, color="0.5")
    if alpha != 1.0:
        exact = ndtr(ndtri(ends) / np.sqrt(alpha)) - ends
        ax.plot(
            ends,
            exact,
            "--",
            color="0.3",
            linewidth=1.2,
            label=f"exact, many data, alpha = {alpha:g}",
        )
    ax.axhline(0.0, color="0.3", linewidth=0.8)
    ax.set(
        xlabel="rank of the truth among draws, from 0 to 1",
        ylabel="share of ranks below, less uniform",
    )
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax
