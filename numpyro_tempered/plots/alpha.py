"""A choice of alpha, drawn."""

from typing import Any

import numpy as np


def plot_alpha(choice: Any, axes: Any = None) -> Any:
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
    import matplotlib.pyplot as plt

    from numpyro_tempered.select.alpha.report import alpha_table

    table = alpha_table(choice)
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    if np.size(axes) != 2:
        raise ValueError(f"plot_alpha draws on two axes, got {np.size(axes)}.")
    left, right = np.ravel(axes)
    alpha, chosen = table.index.to_numpy(), table["selected"].to_numpy()
    if "criterion" in table:
        shown = table["criterion"].notna().to_numpy()
        height, error = table["criterion"] - table["criterion"].min(), table.get("criterion_se")
        left.set_ylabel("criterion above its least")
    else:
        shown = np.full(len(table), True)
        height, error = table["expected_log_lik"] - table["expected_log_lik"].max(), table["expected_log_lik_se"]
        left.set_ylabel("expected log-likelihood below its largest (nats)")
    bars = None if error is None else error[shown]
    left.errorbar(alpha[shown], height[shown], yerr=bars, fmt="o-", markersize=4, capsize=3)
    left.axvline(
        alpha[chosen][0], color="0.3", linestyle="--", linewidth=1.0, label=f"chosen: {alpha[chosen][0]:.3g}"
    )
    left.set_xscale("log")
    left.set_xlabel("alpha")
    left.legend(frameon=False)
    right.plot(
        table["effective_parameters"], table["expected_log_lik"], "o-", markersize=5, markerfacecolor="white"
    )
    right.plot(table["effective_parameters"][chosen], table["expected_log_lik"][chosen], "o", color="C0")
    for k in {0, int(np.flatnonzero(chosen)[0]), len(table) - 1}:
        right.annotate(
            f"{alpha[k]:.3g}",
            (table["effective_parameters"].iloc[k], table["expected_log_lik"].iloc[k]),
            xytext=(6, -10),
            textcoords="offset points",
        )
    right.set_xlabel("effective parameters")
    right.set_ylabel("expected log-likelihood (nats)")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return left, right
