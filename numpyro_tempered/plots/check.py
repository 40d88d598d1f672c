"""The plot of the error bars of a fit."""

import numpy as np

from numpyro_tempered.plots.axes import Axes, one_axes
from numpyro_tempered.report.arviz import ArviZData, group
from numpyro_tempered.report.table import table
from numpyro_tempered.select.check.result import FitCheck

# More rows than fit on a page.
MOST_ROWS = 30


def plot_check(
    check: FitCheck, data: "ArviZData | None" = None, ax: "Axes | None" = None
) -> "Axes":
    """Intervals of a fit beside what is known of their errors.

    Each number is drawn in standard deviations of the fit, from its mean: the interval of two standard deviations
    of the fit, with a band of the bound on the error of its mean, and below it the corrected interval, and that
    of ``data``. Of more than thirty numbers those are drawn whose means are off the most.

    Args:
        check: Result of :func:`numpyro_tempered.select.check_fit`.
        data: ArviZ data with a posterior of the same model, as of NUTS.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes.

    Raises:
        ValueError: If ``data`` have no posterior of the same numbers.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> ax = nt.plots.plot_check(nt.check_fit(jax.random.key(1), fit))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['theta']
    """
    rows = table(check)
    others = None if data is None else _moments_of(data, rows.index)
    order = np.arange(len(rows))
    if len(rows) > MOST_ROWS:
        off = np.abs(rows["corrected_mean"] - rows["mean"]) / rows["sd"]
        order = np.sort(
            np.argsort(-off.fillna(0.0).to_numpy(), kind="stable")[:MOST_ROWS]
        )
    rows, position = rows.iloc[order], np.arange(len(order))
    ax = one_axes(ax, 1.4 + 0.5 * len(rows))
    sd = rows["sd"].where(rows["sd"] > 0).to_numpy()
    bound = rows["mean_bound"].to_numpy() / sd
    if np.any(np.isfinite(bound)):
        label = "bound on the error of its mean"
        ax.barh(
            position - 0.2,
            2 * bound,
            left=-bound,
            height=0.25,
            color="C0",
            alpha=0.25,
            label=label,
        )
    intervals = {"fit": (rows["mean"].to_numpy(), rows["sd"].to_numpy())}
    intervals["corrected"] = (
        rows["corrected_mean"].to_numpy(),
        rows["corrected_sd"].to_numpy(),
    )
    if others is not None:
        intervals["draws"] = others[0][order], others[1][order]
    for k, (label, (mean, width)) in enumerate(intervals.items()):
        off = (mean - rows["mean"].to_numpy()) / sd
        if np.any(np.isfinite(off)):
            at = position + 0.2 * (k - 1)
            ax.errorbar(
                off,
                at,
                xerr=2 * width / sd,
                fmt="o",
                capsize=3,
                color=f"C{k}",
                label=label,
            )
    ax.set_yticks(position, list(rows.index))
    ax.invert_yaxis()
    ax.set_xlabel("standard deviations of the fit, from its mean (± 2 sd)")
    ax.grid(visible=False, axis="y")
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return ax


def _moments_of(data: ArviZData, names: "np.ndarray") -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the numbers of a check by draws."""
    posterior = group(data, "posterior")
    sites = dict.fromkeys(str(name).split("[")[0] for name in names)
    if missing := [site for site in sites if site not in posterior]:
        raise ValueError(
            f"the draws have no {missing}, which the check has, only {sorted(map(str, posterior.data_vars))}."
        )
    num_draws = posterior.sizes["chain"] * posterior.sizes["draw"]
    values = np.concatenate(
        [posterior[site].values.reshape(num_draws, -1) for site in sites], axis=1
    )
    if values.shape[1] != len(names):
        raise ValueError(
            f"the draws have {values.shape[1]} numbers, the check {len(names)}: models differ."
        )
    return values.mean(axis=0), values.std(axis=0)
