"""Results as pandas tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpyro.infer import MCMC

from numpyro_tempered.core import number_names
from numpyro_tempered.report.arviz import ArviZData, group, group_names
from numpyro_tempered.report.draws import bind

if TYPE_CHECKING:
    import pandas as pd

# What makes each group, and the column that puts its best row first; None where rows have an order of their own.
GROUPS = {
    "model_comparison": ("compare, select_num_components, select_num_factors", "rank"),
    "alpha_selection": ("select_alpha", None),
    "calibrated_powers": ("select_alpha", None),
    "coverage": ("alpha.check_coverage or select_alpha", None),
    "tempered_path": ("temper_path", None),
    "num_components_path": ("num_components_path", None),
    "regret": ("regret_ledger", "average"),
    "check": ("check_fit", None),
    "sandwich": ("sandwich", None),
    "sandwich_unconstrained": ("sandwich", None),
    "calibration": ("check_calibration", None),
}


class HoldsData(Protocol):
    """A result that holds ArviZ data."""

    @property
    def data(self) -> ArviZData:
        """The data."""
        ...


def table(data: "ArviZData | HoldsData", name: str | None = None) -> "pd.DataFrame":
    """The comparison in a result as a pandas table; of a posterior the means and standard deviations.

    ===================== ================================= ======================================================
    group                 made by                           rows
    ===================== ================================= ======================================================
    model_comparison      ``compare``                       models, best first
    model_comparison      ``select_num_components``         numbers of components, in order; of several families
                                                            pairs of family and number, best first
    model_comparison      ``ppca.select_num_factors``       numbers of factors, in order
    alpha_selection       ``select_alpha``                  alphas, in order
    calibrated_powers     ``select_alpha``                  parameters, where asked for by ``name``
    coverage              ``alpha.check_coverage``,         numbers and levels; of ``select_alpha`` where asked
                          ``select_alpha``                  for by ``name``
    tempered_path         ``temper_path``                   alphas, in order
    num_components_path   ``num_components_path``           alphas and numbers of components, in order
    regret                ``regret_ledger``                 rules at the last round, least average loss first
    check                 ``check_fit``                     numbers, in order
    sandwich              ``sandwich``                      numbers, in order; ``sandwich_unconstrained`` has the
                                                            coordinates
    calibration           ``check_calibration``             parameters and quantities, in order
    ===================== ================================= ======================================================

    The table of a ledger has the column ``guarantee`` too, where there are averages. Of families and numbers of
    components ``table(choice)["criterion"].unstack("family")`` is the table of mclust, K by shape.

    Of a posterior, such as a fit, a stream's or an MCMC, there is a row for each number of each latent site, with
    columns ``mean`` and ``sd``.

    Args:
        data: ArviZ data made by one of these functions, a result that holds such data, such as an
            ``AlphaChoice``, or a posterior.
        name: The group; by default the one that the data have.

    Returns:
        A ``pandas.DataFrame`` with a column for each variable.

    Raises:
        TypeError: If ``data`` are not ArviZ data.
        ValueError: If they have no such group.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> losses = nt.online.Losses(np.array([1.0, 0.5]), np.array([1.2, 0.6]))
        >>> nt.table(nt.bounds.regret_ledger({"sva": losses}))["cumulative_at_mean"].item()
        1.5
    """
    # A group of ArviZ data may be called data.
    groups: Any = data
    if not isinstance(data, Mapping):
        if isinstance(data, MCMC) or (hasattr(data, "mean") and hasattr(data, "sd")):
            return _moments(bind(data) if isinstance(data, MCMC) else data)
        groups = (
            data.comparison
            if hasattr(data, "comparison")
            else getattr(data, "data", data)
        )
    present = group_names(groups)
    names = [key for key in GROUPS if name in (None, key) and key in present]
    if not names:
        makers = [maker for key, (maker, _) in GROUPS.items() if name in (None, key)]
        raise ValueError(
            f"the data have no group {name or ' or '.join(GROUPS)}, only {present}: pass the result of "
            f"{', '.join(makers)}."
        )
    rows = group(groups, names[0])
    if "round" in rows.dims:
        rows = rows.isel(round=-1).drop_vars("round")
    frame = rows.to_dataframe()
    if "online_to_batch" in present:
        frame = frame.join(group(groups, "online_to_batch")["guarantee"].to_dataframe())
    order = GROUPS[names[0]][1]
    # Numbers of components and of factors stay in their order; not of every family there are all.
    if order not in rows or (
        "num_components" in rows.dims and "family" not in rows.dims
    ):
        return frame
    kinds = {
        key: values.attrs["kind"]
        for key, values in rows.data_vars.items()
        if "kind" in values.attrs
    }
    return frame.dropna(subset=[order]).astype(kinds).sort_values(order, kind="stable")


def _moments(posterior: Any) -> "pd.DataFrame":
    """The means and standard deviations of a posterior, a row for each number."""
    import pandas as pd

    mean, sd = posterior.mean, posterior.sd
    names, rows = [], []
    for site in mean:
        names += number_names(site, map(range, np.shape(mean[site])))
        rows.append(np.stack([np.ravel(mean[site]), np.ravel(sd[site])], axis=1))
    index = pd.Index(names, name="number")
    return pd.DataFrame(np.concatenate(rows), index=index, columns=["mean", "sd"])
