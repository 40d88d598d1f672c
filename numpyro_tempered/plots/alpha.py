"""The plot of a choice of alpha."""

import numpy as np

from numpyro_tempered.plots.axes import TwoAxes, two_axes
from numpyro_tempered.report.arviz import ArviZData
from numpyro_tempered.report.table import HoldsData, table


def plot_alpha(choice: "HoldsData | ArviZData", axes: "TwoAxes | None" = None) -> "TwoAxes":
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
        ...     jax.random.key(0), model, AutoNormal, y, criterion=nt.alpha.lyddon(), num_steps=500
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
        height, error = rows["criterion"] - rows["criterion"].min(), rows.get("criterion_se")
        left.set_ylabel("criterion above its least")
    else:
        visible = np.full(len(rows), True)
        height, error = rows["expected_log_lik"] - rows["expected_log_lik"].max(), rows["expected_log_lik_se"]
        left.set_ylabel("expected log-likelihood below its largest (nats)")
    bars = None if error is None else error[visible]
    left.errorbar(alpha[visible], height[visible], yerr=bars, fmt="o-", markersize=4, capsize=3)
    left.axvline(
        alpha[selected][0], color="0.3", linestyle="--", linewidth=1.0, label=f"chosen: {alpha[selected][0]:.3g}"
    )
    left.set_xscale("log")
    left.set_xlabel("alpha")
    left.legend(frameon=False)
    right.plot(
        rows["effective_parameters"], rows["expected_log_lik"], "o-", markersize=5, markerfacecolor="white"
    )
    right.plot(rows["effective_parameters"][selected], rows["expected_log_lik"][selected], "o", color="C0")
    for k in {0, int(np.flatnonzero(selected)[0]), len(rows) - 1}:
        right.annotate(
            f"{alpha[k]:.3g}",
            (rows["effective_parameters"].iloc[k], rows["expected_log_lik"].iloc[k]),
            xytext=(6, -10),
            textcoords="offset points",
        )
    right.set_xlabel("effective parameters")
    right.set_ylabel("expected log-likelihood (nats)")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return left, right
