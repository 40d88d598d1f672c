"""The plot of a comparison of models."""

import numpy as np

from numpyro_tempered.plots.axes import Axes, one_axes
from numpyro_tempered.report.arviz import ArviZData
from numpyro_tempered.report.table import table


def plot_comparison(data: ArviZData, ax: "Axes | None" = None) -> "Axes":
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
    ax.set_xlabel("penalised ELBO minus the best (nats, ± 2 Monte Carlo standard errors)")
    ax.grid(axis="x", alpha=0.3)
    return ax
