"""The pictures that ArviZ has not; matplotlib is imported when one is drawn."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_tempered._typing import ArrayLike


def plot_regret(losses: Mapping[str, ArrayLike] | Any, hindsight: float | None = None, ax: Any = None) -> Any:
    """What online rules lost, against the number of rounds.

    Of losses, their running average. Of a ledger, the regret on logarithmic axes, on which √t is a line of slope
    1/2: bands are two standard errors, dashed lines the bounds of theory; a regret that is not positive is not
    drawn. A ledger without a best parameter in hindsight is drawn as losses are.

    Args:
        losses: Losses per round by rule, shape ``(T,)`` each, in which rounds that were rejected (NaN) count
            as absent; or the result of :func:`numpyro_tempered.regret_ledger`.
        hindsight: Average loss of the best fixed parameter in hindsight, drawn as a line beside losses.
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
    import matplotlib.pyplot as plt

    # InferenceData of ArviZ 0.x is a Mapping too, as DataTree is.
    ledger = _ledger_group(losses)
    if ledger is None and not losses:
        raise ValueError("plot_regret needs the losses of at least one rule.")
    if ledger is not None and "regret" in ledger and hindsight is not None:
        raise ValueError("the ledger has its own best parameter in hindsight: leave hindsight out.")
    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    # Rules can coincide: styles that alternate keep both visible.
    styles = itertools.cycle(["-", "--", "-.", ":"])
    if ledger is not None and "regret" in ledger:
        _plot_ledger(ledger, ax)
    elif ledger is not None:
        for row, style in zip(ledger["average"], styles, strict=False):
            label = str(row["rule"].item())
            ax.plot(ledger["round"], row, label=label, linestyle=style, linewidth=1.6)
        ax.set(xscale="log", ylabel="average cumulative loss")
    else:
        for (name, values), style in zip(losses.items(), styles, strict=False):
            array = np.asarray(values, dtype=np.float64)
            taken = np.isfinite(array)
            average = np.cumsum(np.where(taken, array, 0.0)) / np.maximum(np.cumsum(taken), 1)
            ax.plot(np.arange(1, len(array) + 1), average, label=name, linestyle=style, linewidth=1.6)
        ax.set(xscale="log", ylabel="average cumulative loss")
    if hindsight is not None:
        ax.axhline(hindsight, color="0.3", linewidth=1.0, label="best in hindsight")
    ax.set_xlabel("round t")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def _ledger_group(data: Any) -> Any:
    """The group ``regret`` of ArviZ data as a Dataset; None for a mapping of losses."""
    from numpyro_tempered.arviz_data import group, group_names

    if not (hasattr(data, "children") or callable(getattr(data, "groups", None))):
        return None
    if "regret" not in group_names(data):
        raise ValueError(f"plot_regret needs the result of regret_ledger, got groups {group_names(data)}.")
    return group(data, "regret")


def _plot_ledger(ledger: Any, ax: Any) -> None:
    """Regret with its bands and bounds; values that a logarithmic axis cannot show are left out."""
    t = ledger["round"].to_numpy()
    # Rules can coincide: styles that alternate keep both visible. Dashes are for bounds.
    styles = itertools.cycle(["-", ":", "-."])
    for i, name in enumerate(ledger["rule"].to_numpy()):
        row = ledger.isel(rule=i)
        color = f"C{i % 10}"
        regret, se = row["regret"].to_numpy(), row["regret_se"].to_numpy()
        shown = np.where(regret > 0, regret, np.nan)
        ax.plot(t, shown, color=color, linestyle=next(styles), linewidth=1.6, label=str(name))
        # A band that reaches 0 ends at a tenth of the regret, below what the axis needs to show.
        lower = np.maximum(shown - 2.0 * se, 0.1 * shown)
        ax.fill_between(t, lower, shown + 2.0 * se, color=color, alpha=0.2, linewidth=0.0)
        bound = row["bound"].to_numpy()
        if np.any(np.isfinite(bound)):
            marker = "_" if np.sum(np.isfinite(bound)) == 1 else ""
            ax.plot(t, bound, color=color, linestyle="--", marker=marker, label=f"{name}, bound")
    ax.set(xscale="log", yscale="log", ylabel="regret")


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


def plot_path(data: Any, axes: Any = None) -> Any:
    r"""The expected log-likelihood and the evidence (or the ELBO) along a path of tempered posteriors.

    Alpha is drawn on the scale of its fifth root, on which the default grid is even. Bars are two Monte Carlo
    standard errors. The first panel has the height of the alphas above a thousandth of the largest: below them
    the log-likelihood can fall without bound. The band in the second panel holds the integral between its
    Riemann sums. That panel is no guide to alpha: its slope is the first panel, whose sign depends on the
    units of the data.

    Args:
        data: The result of :func:`numpyro_tempered.temper_path`.
        axes: Two Matplotlib axes; a new figure by default.

    Returns:
        The two axes.

    Raises:
        ValueError: If ``data`` has no path, or ``axes`` are not two.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> path = nt.temper_path(jax.random.key(0), model, AutoNormal, 1.0, alphas=[0.1, 1.0], num_steps=500)
        >>> left, right = nt.plots.plot_path(path)
        >>> right.get_ylabel()
        'ELBO (nats)'
    """
    import matplotlib.pyplot as plt

    from numpyro_tempered.path import path_table

    table = path_table(data)
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    if np.size(axes) != 2:
        raise ValueError(f"plot_path draws on two axes, got {np.size(axes)}.")
    left, right = np.ravel(axes)
    sampled = "log_z" in table
    alpha = table.index.to_numpy()
    mean = table["expected_log_lik"].where(np.isfinite(table["expected_log_lik"]))
    bar = 2.0 * table["expected_log_lik_se"]
    shown = alpha > 1e-3 * alpha.max()
    left.errorbar(alpha, mean, yerr=bar.where(shown), fmt="o-", markersize=4, capsize=3)
    bottom, top = (mean - bar)[shown].min(), (mean + bar)[shown].max()
    left.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    left.set_ylabel("expected log-likelihood (nats)")
    rule, check, label, check_label = (
        ("log_z", "log_z_stones", "by integration", "by stepping stones")
        if sampled
        else ("elbo", "elbo_integral", "by draws", "by integration")
    )
    right.errorbar(
        alpha, table[rule], yerr=2.0 * table[f"{rule}_se"], fmt="o-", markersize=4, capsize=3, label=label
    )
    right.errorbar(alpha, table[check], yerr=2.0 * table[f"{check}_se"], fmt="x--", capsize=3, label=check_label)
    name = "log_z" if sampled else "elbo"
    lower, upper = table[f"{name}_left"], table[f"{name}_right"]
    right.fill_between(alpha, lower, upper, where=np.isfinite(lower), alpha=0.2, label="Riemann sums")
    right.set_ylabel("log evidence (nats)" if sampled else "ELBO (nats)")
    right.set_title("not to be maximised over alpha", fontsize="medium")
    right.legend(frameon=False)
    ticks = [a for a in (0.0, 1e-4, 1e-2, 0.1, 0.3, 1.0) if a <= alpha.max()]
    for ax in (left, right):
        ax.set_xscale("function", functions=(_fifth_root, _fifth_power))
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        # Margins of the scale itself: a fifth root is steep at 0.
        ax.set_xlim(*_fifth_power(np.array([-0.03, 1.03]) * _fifth_root(alpha.max())))
        ax.set_xlabel("alpha")
        ax.grid(alpha=0.3)
    return left, right


def _fifth_root(alpha: np.ndarray) -> np.ndarray:
    return np.sign(alpha) * np.abs(alpha) ** 0.2


def _fifth_power(root: np.ndarray) -> np.ndarray:
    return np.asarray(root) ** 5
