"""The selected number of components along alpha."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from numpyro_tempered.core import Array, ArrayLike, key_first
from numpyro_tempered.mixtures.comparison import criterion_columns
from numpyro_tempered.mixtures.components.base import Component, check_is_component
from numpyro_tempered.mixtures.orders import (
    check_options,
    check_orders,
    fit_orders,
    fold_in,
)
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.arviz import assemble, dataset, versions
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, dyadic


@key_first
def num_components_path(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    *,
    alphas: Sequence[float] | float = (0.1, 0.25, 0.5, 0.75, 1.0),
    num_components: Iterable[int] = range(1, 9),
    log_prior: LogPrior = dyadic,
    label_multiplicity: bool = False,
    num_restarts: int = 16,
    **options: Any,
) -> Any:
    r"""The selected number of components along alpha, K̂(alpha).

    Under a wrong component family alpha = 1 asks for ever more components as data come in; the path shows which
    are robust to that. For each K the fit at one alpha is a start of the next smaller alpha, and at each alpha
    the fit of one K is a start of the next larger K, as in :func:`select_num_components`.

    Args:
        rng_key: Key of all fits.
        x: Data, as for :func:`fit`.
        component: The family and its prior.
        alphas: Powers on the likelihood.
        num_components: The K to compare.
        log_prior: As for :func:`select_num_components`.
        label_multiplicity: As for :func:`select_num_components`.
        num_restarts: Starts for each K and alpha.
        **options: Further arguments of :func:`fit`.

    Returns:
        ArviZ data with the group ``num_components_path``: ``selected`` by ``alpha``, and the columns of
        :func:`select_num_components` by ``alpha`` and ``num_components``.

    Raises:
        ValueError: As :func:`select_num_components`; if there is no alpha, or one twice.

    References:
        C19; for tempering against misspecification, MD19.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> path = nt.mixtures.num_components_path(
        ...     jax.random.key(0), x, component, alphas=[0.5, 1.0], num_components=[1, 2], num_restarts=8
        ... )
        >>> path["num_components_path"]["selected"].values.tolist()
        [2, 2]
    """
    check_is_component(component)
    orders = check_orders(num_components)
    log_weights = check_log_prior(orders, log_prior)
    check_options(options, label_multiplicity)
    alphas = [alphas] if isinstance(alphas, int | float) else list(alphas)
    grid = sorted((float(a) for a in alphas), reverse=True)
    if not grid or len(set(grid)) < len(grid):
        raise ValueError(
            f"alphas must be different numbers, at least one, got {alphas}."
        )
    fits: dict[int, MixtureFit] = {}
    tables = []
    options["num_restarts"] = num_restarts
    for i, alpha in enumerate(grid):
        key = fold_in(rng_key, i)
        fits, _ = fit_orders(
            key, x, component, orders, others=fits, alpha=alpha, **options
        )
        tables.append(criterion_columns(fits, log_weights, label_multiplicity))
    tables.reverse()
    columns = {name: np.stack([table[name] for table in tables]) for name in tables[0]}
    dims = {name: ["alpha", "num_components"] for name in columns}
    columns["selected"] = np.array(
        [orders[int(np.argmin(rank))] for rank in columns["rank"]]
    )
    path = dataset(
        columns,
        coords={"alpha": grid[::-1], "num_components": orders},
        dims=dims | {"selected": ["alpha"]},
    )
    attrs = {
        "component": component.name,
        "prior_weights": np.exp(log_weights).tolist(),
        **versions(),
    }
    return assemble({"num_components_path": path}, attrs)
