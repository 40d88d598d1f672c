"""Compared models, drawn."""

from typing import Any

import numpy as np


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
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> ax = nt.plots.plot_comparison(nt.compare({"one": fit}))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['one']
    """
    import matplotlib.pyplot as plt

    from numpyro_tempered.select.compare import comparison_table

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
