"""The plots of mixtures."""

import numpy as np

from numpyro_tempered.core import ArrayLike
from numpyro_tempered.mixtures.predict import log_predictive, predict, predictive_parts
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.plots.axes import Axes, TwoAxes, one_axes, two_axes
from numpyro_tempered.report.arviz import ArviZData, group, group_names


def plot_mixture(
    fit: MixtureFit,
    x: ArrayLike,
    columns: tuple[int, int] = (0, 1),
    ax: "Axes | None" = None,
) -> "Axes":
    """The data and a fitted mixture of them.

    One column: a histogram, the predictive density (Student's t for Gaussian components) and the parts of the
    occupied components; for counts, masses at whole numbers. Two columns: the rows by
    component, with contours of the predictive density at a half, a tenth and a hundredth of its peak. More:
    the rows by component in two of the columns.

    Args:
        fit: The result of :func:`numpyro_tempered.mixtures.fit`.
        x: Data, rows ``(n, d)`` or ``(n,)``.
        columns: Which two columns to draw, where there are more than one.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes.

    Raises:
        ValueError: If the rows are not data of the family, or the columns not two of them.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> nt.plots.plot_mixture(fit, x).get_ylabel()
        'predictive density'
    """
    rows = np.asarray(fit.component.check(np.asarray(x)))
    ax = one_axes(ax)
    if rows.shape[1] == 1:
        _plot_one_column(fit, rows[:, 0], ax)
    else:
        _plot_two_columns(fit, rows, columns, ax)
    return ax


def _may_move(fit: MixtureFit) -> bool:
    """Whether all columns may be moved, as real numbers without a bound may."""
    return fit.component.location is not None and fit.component.location.columns is None


def _plot_one_column(fit: MixtureFit, x: np.ndarray, ax: "Axes") -> None:
    x = x[~np.isnan(x)]
    are_integers = not _may_move(fit) and bool(np.all(x == np.round(x)))
    if are_integers:
        grid = np.arange(x.min(), x.max() + 1)
        mass = np.array([np.mean(x == value) for value in grid])
        ax.bar(grid, mass, color="0.85", label="data")
    else:
        margin = 0.08 * np.ptp(x) or 1.0
        # Data without translations may have a bound, such as 0.
        lower = x.min() - margin if _may_move(fit) else x.min()
        grid = np.linspace(lower, x.max() + margin, 500)
        # The interquartile range that the rule goes by spans the modes: twice as many bins.
        bins = 2 * (len(np.histogram_bin_edges(x, "fd")) - 1) if len(x) > 1 else 1
        ax.hist(x, bins=bins, density=True, color="0.85", label="data")
    marker = "o-" if are_integers else "-"
    ax.plot(
        grid,
        np.exp(log_predictive(fit, grid)),
        marker,
        color="C0",
        linewidth=1.8,
        label="predictive",
    )
    parts = np.exp(predictive_parts(fit, grid))
    for j in np.argsort(-fit.counts)[: fit.num_occupied]:
        ax.plot(grid, parts[:, j], color="C1", linestyle="--", linewidth=1.0)
    ax.plot([], [], color="C1", linestyle="--", linewidth=1.0, label="components")
    ax.set(
        xlabel="x", ylabel="predictive mass" if are_integers else "predictive density"
    )
    ax.legend(frameon=False)


def _plot_two_columns(
    fit: MixtureFit, rows: np.ndarray, columns: tuple[int, int], ax: "Axes"
) -> None:
    i, j = columns
    if i == j or not all(0 <= c < rows.shape[1] for c in columns):
        raise ValueError(
            f"columns must be two different ones of 0 ... {rows.shape[1] - 1}, got {columns}."
        )
    labels = np.asarray(predict(fit, rows))
    for rank, k in enumerate(np.argsort(-fit.counts)):
        members = rows[labels == k]
        if len(members):
            ax.scatter(
                members[:, i], members[:, j], s=10, alpha=0.7, color=f"C{rank % 10}"
            )
    if rows.shape[1] == 2 and _may_move(fit):
        low, high = np.nanmin(rows, axis=0), np.nanmax(rows, axis=0)
        margin = np.where(high > low, 0.1 * (high - low), 1.0)
        one, two = (
            np.linspace(low[c] - margin[c], high[c] + margin[c], 120) for c in (i, j)
        )
        across, up = np.meshgrid(one, two)
        points = np.stack([across, up] if i == 0 else [up, across], axis=-1).reshape(
            -1, 2
        )
        density = np.exp(np.asarray(log_predictive(fit, points))).reshape(across.shape)
        levels = np.array([0.01, 0.1, 0.5]) * density.max()
        ax.contour(across, up, density, levels=levels, colors="0.3", linewidths=0.8)
    ax.set(xlabel=f"column {i}", ylabel=f"column {j}")


def plot_num_components_path(
    data: ArviZData, axes: "TwoAxes | None" = None
) -> "TwoAxes":
    """The number of components against alpha, and the criterion behind it.

    Args:
        data: The result of :func:`numpyro_tempered.mixtures.num_components_path`.
        axes: Two Matplotlib axes; a new figure by default.

    Returns:
        The two axes: the selected and the occupied components by alpha; for each alpha the criterion by K, less
        its maximum and divided by alpha.

    Raises:
        ValueError: If ``data`` has no such path, or ``axes`` are not two.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> path = nt.mixtures.num_components_path(
        ...     jax.random.key(0), x, component, num_components=[1, 2], num_restarts=8
        ... )
        >>> left, right = nt.plots.plot_num_components_path(path)
        >>> left.get_xlabel()
        'alpha'
    """
    from matplotlib.cm import viridis

    if "num_components_path" not in group_names(data):
        raise ValueError(
            f"plot_num_components_path needs the result of num_components_path, got groups {group_names(data)}."
        )
    path = group(data, "num_components_path")
    left, right = two_axes(axes, "plot_num_components_path")
    alpha, orders = path["alpha"].to_numpy(), path["num_components"].to_numpy()
    left.step(alpha, path["selected"], where="mid", color="0.6", linewidth=1.0)
    left.plot(alpha, path["selected"], "o", label="selected")
    occupied = path["num_occupied"].sel(num_components=path["selected"])
    left.plot(alpha, occupied, "x", color="C1", label="of these occupied")
    left.set(
        xlabel="alpha", ylabel="number of components", ylim=(0.5, orders.max() + 0.5)
    )
    left.locator_params(axis="y", integer=True)
    left.legend(frameon=False)
    for row, value in enumerate(alpha):
        criterion = path["criterion"].to_numpy()[row]
        curve, color = (
            (criterion - criterion.max()) / value,
            viridis(0.2 + 0.7 * row / max(len(alpha) - 1, 1)),
        )
        right.plot(orders, curve, "o-", markersize=3.5, label=f"{value:g}", color=color)
    right.set(
        xlabel="number of components K",
        ylabel="(criterion - its maximum) / alpha, nats",
    )
    # Far below the best, all curves look the same.
    right.set_ylim(-60.0, 3.0)
    right.locator_params(axis="x", integer=True)
    right.legend(frameon=False, title="alpha")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return left, right
