"""The plot of a path of tempered posteriors."""

import numpy as np

from numpyro_tempered.plots.axes import TwoAxes, two_axes
from numpyro_tempered.report.arviz import ArviZData
from numpyro_tempered.report.table import table


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
    sampled = "log_z" in rows
    alpha = rows.index.to_numpy()
    mean = rows["expected_log_lik"].where(np.isfinite(rows["expected_log_lik"]))
    bar = 2.0 * rows["expected_log_lik_se"]
    visible = alpha > 1e-3 * alpha.max()
    left.errorbar(alpha, mean, yerr=bar.where(visible), fmt="o-", markersize=4, capsize=3)
    bottom, top = (mean - bar)[visible].min(), (mean + bar)[visible].max()
    left.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    left.set_ylabel("expected log-likelihood (nats)")
    rule, check, label, check_label = (
        ("log_z", "log_z_stones", "by integration", "by stepping stones")
        if sampled
        else ("elbo", "elbo_integral", "by draws", "by integration")
    )
    right.errorbar(
        alpha, rows[rule], yerr=2.0 * rows[f"{rule}_se"], fmt="o-", markersize=4, capsize=3, label=label
    )
    right.errorbar(alpha, rows[check], yerr=2.0 * rows[f"{check}_se"], fmt="x--", capsize=3, label=check_label)
    name = "log_z" if sampled else "elbo"
    lower, upper = rows[f"{name}_left"], rows[f"{name}_right"]
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
