"""The plots of a comparison of models, of a path of tempered posteriors, and of a choice of alpha."""

import numpy as np

from numpyro_tempered.plots.axes import Axes, TwoAxes, one_axes, two_axes
from numpyro_tempered.report.arviz import ArviZData
from numpyro_tempered.report.table import HoldsData, table


def plot_comparison(data: "ArviZData | HoldsData", ax: "Axes | None" = None) -> "Axes":
    """The penalised ELBO of each model, with its Monte Carlo error.

    Args:
        data: The result of :func:`numpyro_tempered.compare`, or of
            :func:`numpyro_tempered.mixtures.select_num_components`.
        ax: Matplotlib axes; a new figure by default.

    Returns:
        The axes; the best model is on top, the distance to it on the horizontal axis, in nats.

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
        >>> ax = nt.plots.plot_comparison(nt.compare({"one": fit}))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['one']
    """
    rows = table(data, "model_comparison")
    ax = one_axes(ax, 1.2 + 0.45 * len(rows))
    position = np.arange(len(rows))
    gap = rows["criterion"] - rows["criterion"].max()
    ax.errorbar(gap, position, xerr=2.0 * rows["se"], fmt="o", capsize=3)
    ax.axvline(0.0, color="0.3", linestyle="--", linewidth=1.0)
    ax.set_yticks(position, [str(name) for name in rows.index])
    ax.invert_yaxis()
    ax.set_xlabel("penalised ELBO less the best, nats (± 2 s.e.)")
    ax.grid(axis="x", alpha=0.3)
    return ax


def plot_path(data: ArviZData, axes: "TwoAxes | None" = None) -> "TwoAxes":
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
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> path = nt.temper_path(jax.random.key(0), model, AutoNormal, jnp.ones(6), alphas=[0.0, 0.5, 1.0])
        >>> left, right = nt.plots.plot_path(path)
        >>> right.get_ylabel()
        'ELBO (nats)'
    """
    rows = table(data, "tempered_path")
    left, right = two_axes(axes, "plot_path")
    alpha = rows.index.to_numpy()
    mean = rows["expected_log_lik"].where(np.isfinite(rows["expected_log_lik"]))
    bar = 2.0 * rows["expected_log_lik_se"]
    visible = alpha > 1e-3 * alpha.max()
    left.errorbar(
        alpha, mean, yerr=bar.where(visible), fmt="o-", markersize=4, capsize=3
    )
    bottom, top = (mean - bar)[visible].min(), (mean + bar)[visible].max()
    left.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    left.set_ylabel("expected log-likelihood (nats)")
    if "log_z" in rows:
        name, label, quantity = "log_z", "by stepping stones", "log evidence (nats)"
        check, check_label = "log_z_integral", "by integration"
    else:
        name, label, quantity = "elbo", "by draws", "ELBO (nats)"
        check, check_label = "elbo_integral", "by integration"
    bars, check_bars = 2.0 * rows[f"{name}_se"], 2.0 * rows[f"{check}_se"]
    right.errorbar(
        alpha, rows[name], yerr=bars, fmt="o-", markersize=4, capsize=3, label=label
    )
    right.errorbar(
        alpha, rows[check], yerr=check_bars, fmt="x--", capsize=3, label=check_label
    )
    lower, upper = rows[f"{name}_left"], rows[f"{name}_right"]
    right.fill_between(
        alpha, lower, upper, where=np.isfinite(lower), alpha=0.2, label="Riemann sums"
    )
    right.set_ylabel(quantity)
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


def plot_alpha(
    choice: "HoldsData | ArviZData", axes: "TwoAxes | None" = None
) -> "TwoAxes":
    r"""The criterion along the grid of alphas, and fit against complexity.

    Left, the criterion less its least value, with its standard errors where it has them; without a criterion
    along the grid, as of :func:`numpyro_tempered.alpha.lyddon`, the expected log-likelihood of the data less its
    largest value. Right, the calibration curve: the expected log-likelihood against the effective number of
    parameters, from the smallest alpha to the largest. The dashed line and the filled point are at the chosen
    alpha.

    Args:
        choice: An :class:`~numpyro_tempered.alpha.AlphaChoice`, or its ArviZ data.
        axes: Two Matplotlib axes; a new figure by default.

    Returns:
        The two axes.

    Raises:
        ValueError: If there is no choice of alpha in the data, or ``axes`` are not two.

    References:
        MD19 for the calibration curve.

    Example:
        >>> import matplotlib; matplotlib.use("agg")
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> choice = nt.select_alpha(
        ...     jax.random.key(0), model, AutoNormal, y, criterion=nt.alpha.lyddon()
        ... )
        >>> left, right = nt.plots.plot_alpha(choice)
        >>> right.get_xlabel()
        'effective parameters'
    """
    rows = table(choice, "alpha_selection")
    left, right = two_axes(axes, "plot_alpha")
    alpha, selected = rows.index.to_numpy(), rows["selected"].to_numpy()
    if "criterion" in rows:
        visible = rows["criterion"].notna().to_numpy()
        height, error = (
            rows["criterion"] - rows["criterion"].min(),
            rows.get("criterion_se"),
        )
        left.set_ylabel("criterion above its least")
    else:
        visible = np.full(len(rows), True)
        height, error = (
            rows["expected_log_lik"] - rows["expected_log_lik"].max(),
            rows["expected_log_lik_se"],
        )
        left.set_ylabel("expected log-likelihood below its largest (nats)")
    bars = None if error is None else error[visible]
    left.errorbar(
        alpha[visible], height[visible], yerr=bars, fmt="o-", markersize=4, capsize=3
    )
    choice_label = f"chosen: {alpha[selected][0]:.3g}"
    left.axvline(
        alpha[selected][0],
        color="0.3",
        linestyle="--",
        linewidth=1.0,
        label=choice_label,
    )
    left.set(xscale="log", xlabel="alpha")
    left.legend(frameon=False)
    complexity, log_lik = (
        rows["effective_parameters"].to_numpy(),
        rows["expected_log_lik"].to_numpy(),
    )
    right.plot(complexity, log_lik, "o-", markersize=5, markerfacecolor="white")
    right.plot(complexity[selected], log_lik[selected], "o", color="C0")
    for k in {0, int(np.flatnonzero(selected)[0]), len(rows) - 1}:
        place = (complexity[k], log_lik[k])
        right.annotate(
            f"{alpha[k]:.3g}", place, xytext=(6, -10), textcoords="offset points"
        )
    right.set(xlabel="effective parameters", ylabel="expected log-likelihood (nats)")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return left, right
