"""How many components: the penalised ELBO over K, and its path over alpha."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.result import Run
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.fit import fit
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.arviz import assemble, dataset, versions, with_group
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, dyadic, rank_models


class ComponentSelection(NamedTuple):
    """The number of components that the penalised ELBO selects.

    Attributes:
        num_components: K̂.
        fit: Its fit.
        fits: All fits by K.
        data: ArviZ data; group ``model_comparison`` has dim ``num_components``, the other groups are those of
            the selected fit. :func:`numpyro_tempered.table` turns the comparison into pandas.
        uncertain: Whether the error of the ELBO of the selected K or of the runner-up exceeds the margin between
            the two: two Monte Carlo standard errors, and the spread of the starts where fewer than two of them
            reach within 0.1 nat of the best. Raise ``num_restarts``, or ``num_samples``.
    """

    num_components: int
    fit: MixtureFit
    fits: dict[int, MixtureFit]
    data: Any
    uncertain: bool

    def as_run(self, *data: Any, **options: Any) -> Run:
        """Draws of the selected fit, for :func:`to_inference_data`."""
        return self.fit.as_run(*data, **options)


@key_first
def select_num_components(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    *,
    num_components: Iterable[int] = range(1, 9),
    alpha: float = 1.0,
    log_prior: LogPrior = dyadic,
    label_multiplicity: bool = False,
    num_restarts: int = 16,
    baselines: bool = True,
    num_draws: int = 1000,
    **options: Any,
) -> ComponentSelection:
    r"""Select the number of components by the penalised ELBO.

    .. math:: \hat K = \arg\max_K \big\{E_1(K) - \log(1/b_K)\big\}, \quad
              E_1 = \alpha E_\rho[\log L] - \mathrm{KL}(\rho, \pi)

    No constant is dropped, so that the ELBOs of different K are comparable; the prior of a component must be the
    same for all K. Each K also starts from the fit of the next smaller, with empty components, at their prior,
    and with parts of its components split off. Therefore F(K) is not below
    F(K - 1) + log((K - 1) / (K - 1 + alpha n)) for a concentration of 1; for others see the theory of mixtures.
    Columns of the comparison, by K:

    - ``elbo`` (E1) with its Monte Carlo standard error ``se``, and ``objective`` (F, exact, below E1),
    - ``log_prior`` (log b_K), ``criterion`` their sum, ``rank`` (0 is selected), ``weight`` its softmax,
    - ``expected_log_lik``, untempered, and ``kl``,
    - ``num_occupied``; ``num_best``, the starts whose F is within 0.1 nat of the best, where those from the next
      smaller K count as one; ``spread``, the best start's F less the median's; ``uncertain``, whether two
      standard errors, plus the spread where ``num_best`` is below 2, exceed the distance of the criterion to the
      selected K (of the selected to the runner-up); ``converged``,
    - with ``baselines``, of maximum likelihood by EM: ``log_lik``, ``bic`` and ``icl``, on the scale of -2 log L;
      NaN where the likelihood has no maximum.

    Args:
        rng_key: Key of all fits.
        x: Data, as for :func:`fit`.
        component: The family and its prior.
        num_components: The K to compare.
        alpha: Power on the likelihood.
        log_prior: log b_K by K, or a callable from the K to that; :func:`numpyro_tempered.dyadic` by default.
        label_multiplicity: Whether to add log(K! / (K - K₊)!), K₊ the occupied components: the labels'
            symmetry, which a bound around one labelling misses.
        num_restarts: Random starts for each K, of the ascent and of EM.
        baselines: Whether to run EM.
        num_draws: Draws of the selected posterior.
        **options: Further arguments of :func:`fit`, such as ``num_moves`` or ``concentration``.

    Returns:
        A :class:`ComponentSelection`.

    Raises:
        ValueError: If there is no K, one is below 1 or twice, or the weights b_K are not positive with a sum of
            at most 1; and as :func:`fit`.

    References:
        C19, Theorem 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> choice = nt.mixtures.select_num_components(
        ...     jax.random.key(0), x, component, num_components=[1, 2], num_restarts=8, baselines=False
        ... )
        >>> choice.num_components
        2
    """
    orders = check_orders(num_components)
    log_weights = check_log_prior(orders, log_prior)
    num_draws = check_count(num_draws, "num_draws")
    check_options(options)
    keys = jax.random.split(rng_key, 2 * len(orders) + 1)
    options = {"alpha": alpha, "num_restarts": num_restarts} | options
    fits = fit_orders(keys[: len(orders)], x, component, orders, {}, **options)
    columns = criterion_columns(fits, log_weights, label_multiplicity)
    if baselines:
        columns |= baseline_columns(keys[len(orders) : -1], x, component, orders, num_restarts, options)
    selected = orders[int(np.argmin(columns["rank"]))]
    best = to_inference_data(
        fits[selected], x, rng_key=keys[-1], sample_weight=options.get("sample_weight"), num_samples=num_draws
    )
    uncertain = bool(np.any(columns["uncertain"][columns["rank"] < 2]))
    attrs = {
        "selected": selected,
        "prior_weights": np.exp(log_weights).tolist(),
        "label_multiplicity": int(label_multiplicity),
        "uncertain": int(uncertain),
    }
    comparison = dataset(
        columns,
        coords={"num_components": orders},
        dims={name: ["num_components"] for name in columns},
        attrs={"alpha": fits[selected].alpha, "selected": selected},
    )
    data = with_group(best, "model_comparison", comparison, attrs)
    return ComponentSelection(selected, fits[selected], fits, data, uncertain)


def fit_orders(
    keys: Array,
    x: ArrayLike,
    component: Component,
    orders: Sequence[int],
    others: dict[int, MixtureFit],
    **options: Any,
) -> dict[int, MixtureFit]:
    """Fits by K, from the smallest up: each also starts from the next smaller, and from another of its own K."""
    fits: dict[int, MixtureFit] = {}
    for i in np.argsort(orders):
        k = orders[i]
        warm = [*list(fits.values())[-1:], *([others[k]] if k in others else [])]
        fits[k] = fit(keys[i], x, component, num_components=k, warm_start=warm, **options)
    return {k: fits[k] for k in orders}


def check_options(options: dict[str, Any]) -> None:
    """Refuse a ``warm_start``: the fits of other K are that.

    Raises:
        ValueError: If it is among the options.
    """
    if "warm_start" in options:
        raise ValueError(
            "each fit starts from that of the next smaller K, or larger alpha: leave warm_start out."
        )


def check_orders(num_components: Iterable[int]) -> list[int]:
    """The K to compare.

    Raises:
        ValueError: If there is none, one is not a positive integer, or one comes twice.
    """
    orders = [num_components] if isinstance(num_components, int | np.integer) else list(num_components)
    if not orders or any(isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1 for k in orders):
        raise ValueError(f"num_components must be positive integers, at least one, got {orders}.")
    if len(set(orders)) < len(orders):
        raise ValueError(f"num_components has a number twice: {orders}.")
    return [int(k) for k in orders]


def label_term(fitted: MixtureFit) -> float:
    """log(K! / (K - K₊)!) for K₊ occupied components of K."""
    k = fitted.num_components
    return math.lgamma(k + 1) - math.lgamma(k - fitted.num_occupied + 1)


def criterion_columns(
    fits: dict[int, MixtureFit], log_weights: np.ndarray, label_multiplicity: bool
) -> dict[str, np.ndarray]:
    """The comparison by K, without baselines."""
    bounds = [fitted.bound for fitted in fits.values() if fitted.bound is not None]
    if len(bounds) < len(fits):
        raise ValueError("num_samples=0 leaves out E1, which the number of components is selected by.")
    elbo = np.array([bound.value for bound in bounds])
    labels = np.array([label_term(fitted) if label_multiplicity else 0.0 for fitted in fits.values()])
    spread = np.array([fitted.spread for fitted in fits.values()])
    se = np.array([bound.se for bound in bounds])
    kl = np.array([fitted.kl for fitted in fits.values()])
    num_best = np.array([fitted.num_best for fitted in fits.values()])
    ranking = rank_models(elbo + labels, log_weights, error=np.where(num_best < 2, spread, 0.0) + 2.0 * se)
    return {
        "elbo": elbo,
        "se": se,
        "objective": np.array([fitted.objective for fitted in fits.values()]),
        "log_prior": log_weights,
        **({"log_labels": labels} if label_multiplicity else {}),
        "criterion": ranking.criterion,
        "rank": ranking.rank,
        "weight": ranking.weight,
        "expected_log_lik": (elbo + kl) / np.array([fitted.alpha for fitted in fits.values()]),
        "kl": kl,
        "num_occupied": np.array([fitted.num_occupied for fitted in fits.values()]),
        "num_best": num_best,
        "spread": spread,
        "uncertain": ranking.uncertain,
        "converged": np.array([fitted.converged for fitted in fits.values()]),
    }


def baseline_columns(
    keys: Array,
    x: ArrayLike,
    component: Component,
    orders: Sequence[int],
    num_restarts: int,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Log-likelihood, BIC and ICL of maximum likelihood by K."""
    weight = options.get("sample_weight")

    def baseline(key: Array, k: int) -> tuple[float, float, float]:
        if component.maximum_likelihood is None:
            return math.nan, math.nan, math.nan
        try:
            result = em(key, x, component, num_components=k, num_restarts=num_restarts, sample_weight=weight)
        except FloatingPointError:
            return math.nan, math.nan, math.nan
        return result.log_likelihood, result.bic, result.icl

    rows = [baseline(key, k) for key, k in zip(keys, orders, strict=True)]
    return dict(zip(("log_lik", "bic", "icl"), np.array(rows).T, strict=True))


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
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> path = nt.mixtures.num_components_path(
        ...     jax.random.key(0), x, component, alphas=[0.5, 1.0], num_components=[1, 2], num_restarts=8
        ... )
        >>> path["num_components_path"]["selected"].values.tolist()
        [2, 2]
    """
    orders = check_orders(num_components)
    log_weights = check_log_prior(orders, log_prior)
    check_options(options)
    alphas = [alphas] if isinstance(alphas, int | float) else list(alphas)
    grid = sorted((float(a) for a in alphas), reverse=True)
    if not grid or len(set(grid)) < len(grid):
        raise ValueError(f"alphas must be different numbers, at least one, got {alphas}.")
    fits: dict[int, MixtureFit] = {}
    tables = []
    options["num_restarts"] = num_restarts
    for key, alpha in zip(jax.random.split(rng_key, len(grid)), grid, strict=True):
        keys = jax.random.split(key, len(orders))
        fits = fit_orders(keys, x, component, orders, fits, alpha=alpha, **options)
        tables.append(criterion_columns(fits, log_weights, label_multiplicity))
    tables.reverse()
    columns = {name: np.stack([table[name] for table in tables]) for name in tables[0]}
    dims = {name: ["alpha", "num_components"] for name in columns}
    columns["selected"] = np.array([orders[int(np.argmin(rank))] for rank in columns["rank"]])
    path = dataset(
        columns, coords={"alpha": grid[::-1], "num_components": orders}, dims=dims | {"selected": ["alpha"]}
    )
    attrs = {"component": component.name, "prior_weights": np.exp(log_weights).tolist(), **versions()}
    return assemble({"num_components_path": path}, attrs)
