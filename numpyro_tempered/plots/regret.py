"""The plot of the losses and the regret of online rules."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_tempered.core import ArrayLike, doubles
from numpyro_tempered.plots.axes import Axes, one_axes
from numpyro_tempered.report.arviz import group, group_names

if TYPE_CHECKING:
    import xarray as xr


def plot_regret(
    losses: Mapping[str, Any], hindsight: float | None = None, ax: "Axes | None" = None
) -> "Axes":
    """The losses or the regret of online rules, against the number of rounds.

    Losses are drawn as running averages; a ledger as its regret on logarithmic axes, on which √t is a line of
    slope 1/2: bands are two standard errors, dashed lines the bounds of theory. A regret that is not positive
    is left out. A ledger without a best parameter in hindsight is drawn as losses are.

    Args:
        losses: Losses per round by rule, shape ``(T,)`` each, in which rounds that were rejected (NaN) count
            as absent; or the result of :func:`.regret_ledger`.
        hindsight: Average loss of the best fixed parameter in hindsight, drawn as a line with the losses.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes.

    Raises:
        ValueError: If there is no loss to draw, or a regret is to be drawn and ``hindsight`` is given too.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import numpyro_tempered as nt
        >>> ax = nt.plots.plot_regret({"sva": [1.0, 0.5, 0.25]}, hindsight=0.2)
        >>> ax.get_xlabel()
        'round t'
    """
    # InferenceData of ArviZ 0.x is a Mapping too, as DataTree is.
    ledger = _ledger_group(losses)
    if ledger is None and not losses:
        raise ValueError("plot_regret needs the losses of at least one rule.")
    if ledger is not None and "regret" in ledger and hindsight is not None:
        raise ValueError(
            "the ledger has its own best parameter in hindsight: leave hindsight out."
        )
    ax = one_axes(ax)
    # Rules can coincide: styles that alternate keep both visible.
    styles = itertools.cycle(["-", "--", "-.", ":"])
    if ledger is not None and "regret" in ledger:
        _plot_ledger(ledger, ax)
    else:
        if ledger is None:
            curves = {name: _running_average(values) for name, values in losses.items()}
        else:
            rounds = ledger["round"].to_numpy()
            curves = {
                str(row["rule"].item()): (rounds, row.to_numpy())
                for row in ledger["average"]
            }
        for (name, (rounds, average)), style in zip(
            curves.items(), styles, strict=False
        ):
            ax.plot(rounds, average, label=name, linestyle=style, linewidth=1.6)
        ax.set(xscale="log", ylabel="average cumulative loss")
    if hindsight is not None:
        ax.axhline(hindsight, color="0.3", linewidth=1.0, label="best in hindsight")
    ax.set_xlabel("round t")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def _running_average(losses: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and the average loss of the finite ones so far."""
    values = doubles(losses)
    finite = np.isfinite(values)
    average = np.cumsum(np.where(finite, values, 0.0)) / np.maximum(
        np.cumsum(finite), 1
    )
    return np.arange(1, len(values) + 1), average


def _ledger_group(data: Mapping[str, Any]) -> "xr.Dataset | None":
    """The group ``regret`` of ArviZ data as a Dataset; None for a mapping of losses."""
    if not (hasattr(data, "children") or callable(getattr(data, "groups", None))):
        return None
    if "regret" not in group_names(data):
        raise ValueError(
            f"plot_regret needs the result of nt.bounds.regret_ledger, got groups {group_names(data)}."
        )
    return group(data, "regret")


def _plot_ledger(ledger: "xr.Dataset", ax: "Axes") -> None:
    """Regret with its bands and bounds; values that a logarithmic axis cannot show are left out."""
    t = ledger["round"].to_numpy()
    # Rules can coincide: styles that alternate keep both visible. Dashes are for bounds.
    styles = itertools.cycle(["-", ":", "-."])
    for i, name in enumerate(ledger["rule"].to_numpy()):
        row = ledger.isel(rule=i)
        color = f"C{i % 10}"
        regret, se = row["regret"].to_numpy(), row["regret_se"].to_numpy()
        curve = np.where(regret > 0, regret, np.nan)
        ax.plot(
            t,
            curve,
            color=color,
            linestyle=next(styles),
            linewidth=1.6,
            label=str(name),
        )
        # A band that reaches 0 ends at a tenth of the regret, below what the axis needs to show.
        lower = np.maximum(curve - 2.0 * se, 0.1 * curve)
        ax.fill_between(
            t, lower, curve + 2.0 * se, color=color, alpha=0.2, linewidth=0.0
        )
        bound = row["bound"].to_numpy()
        if np.any(np.isfinite(bound)):
            marker = "_" if np.sum(np.isfinite(bound)) == 1 else ""
            ax.plot(
                t,
                bound,
                color=color,
                linestyle="--",
                marker=marker,
                label=f"{name}, bound",
            )
    ax.set(xscale="log", yscale="log", ylabel="regret")
