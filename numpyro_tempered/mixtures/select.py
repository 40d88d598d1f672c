"""How many components: the penalised ELBO over K, and its path over alpha."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.compilation import CLOCK, advise_cache
from numpyro_tempered.core.result import Run
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.fit import fit
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.weights import StickBreaking
from numpyro_tempered.report.arviz import OnDemand, assemble, dataset, versions, with_group
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, dyadic, rank_models

# What is drawn beside the fits, whose keys have the numbers of their K.
BASELINES, DRAWS = 2**30, 2**30 + 1


# By itself it compiles two programs.
_fold_in = jax.jit(jax.random.fold_in)


def fold_in(rng_key: Array, number: int) -> Array:
    """The key of one use of a key."""
    return _fold_in(rng_key, np.uint32(number))


class ComponentSelection(NamedTuple):
    """The number of components that the penalised ELBO selects.

    Attributes:
        num_components: K̂.
        fit: Its fit.
        fits: All fits by K.
        columns: The comparison, arrays by K; see :func:`select_num_components`.
        attrs: Attributes of the comparison.
        report: Makes ``data``.
        uncertain: Whether the error of the ELBO of the selected K or of the runner-up exceeds the margin between
            the two: two Monte Carlo standard errors, and the spread of the starts where fewer than two of them
            reach within 0.1 nat of the best. Raise ``num_restarts``, or ``num_samples``.
    """

    num_components: int
    fit: MixtureFit
    fits: dict[int, MixtureFit]
    columns: dict[str, np.ndarray]
    attrs: dict[str, Any]
    report: OnDemand
    uncertain: bool

    @property
    def comparison(self) -> Any:
        """The comparison as ArviZ data, group ``model_comparison`` with dim ``num_components``.

        :func:`numpyro_tempered.table` turns it into pandas.
        """
        return assemble({"model_comparison": comparison_of(self)}, {**self.attrs, **versions()})

    @property
    def data(self) -> Any:
        """The same with the groups of the selected fit, whose draws are made when they are first asked for."""
        return self.report.data

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
            symmetry, which a bound around one labelling misses. Sticks have none.
        num_restarts: Random starts for each K, of the ascent and of EM.
        baselines: Whether to run EM.
        num_draws: Draws of the selected posterior in ``data``.
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
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
        >>> choice = nt.mixtures.select_num_components(
        ...     jax.random.key(0), x, component, num_components=[1, 2], num_restarts=8, baselines=False
        ... )
        >>> choice.num_components
        2
    """
    began, orders = CLOCK.read(), check_orders(num_components)
    log_weights = check_log_prior(orders, log_prior)
    num_draws = check_count(num_draws, "num_draws")
    check_options(options, label_multiplicity)
    options = {"alpha": alpha, "num_restarts": num_restarts} | options
    fits = fit_orders(rng_key, x, component, orders, {}, **options)
    columns = criterion_columns(fits, log_weights, label_multiplicity)
    if baselines:
        key = fold_in(rng_key, BASELINES)
        columns |= baseline_columns(key, x, component, orders, num_restarts, options)
    selected = orders[int(np.argmin(columns["rank"]))]
    uncertain = bool(np.any(columns["uncertain"][columns["rank"] < 2]))
    attrs = {
        "selected": selected,
        "prior_weights": np.exp(log_weights).tolist(),
        "label_multiplicity": int(label_multiplicity),
        "uncertain": int(uncertain),
    }

    def make() -> Any:
        key, weight = fold_in(rng_key, DRAWS), options.get("sample_weight")
        data = to_inference_data(fits[selected], x, rng_key=key, num_samples=num_draws, sample_weight=weight)
        return with_group(data, "model_comparison", comparison_of(choice), attrs)

    choice = ComponentSelection(selected, fits[selected], fits, columns, attrs, OnDemand(make), uncertain)
    # Behind the check of the key.
    advise_cache("select_num_components", began, stacklevel=4)
    return choice


def comparison_of(choice: ComponentSelection) -> Any:
    """The comparison as a Dataset."""
    return dataset(
        choice.columns,
        coords={"num_components": list(choice.fits)},
        dims={name: ["num_components"] for name in choice.columns},
        attrs={"alpha": choice.fit.alpha, "selected": choice.num_components},
    )


def fit_orders(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    orders: Sequence[int],
    others: dict[int, MixtureFit],
    **options: Any,
) -> dict[int, MixtureFit]:
    """Fits by K, from the smallest up: each also starts from the next smaller, and from another of its own K."""
    fits: dict[int, MixtureFit] = {}
    for k in sorted(orders):
        warm = [*list(fits.values())[-1:], *([others[k]] if k in others else [])]
        fits[k] = fit(fold_in(rng_key, k), x, component, num_components=k, warm_start=warm, **options)
    return {k: fits[k] for k in orders}


def check_options(options: dict[str, Any], label_multiplicity: bool) -> None:
    """Refuse a ``warm_start``, since the fits of other K are that, and the symmetry of labels of sticks.

    Raises:
        ValueError: If it is among the options, or labels of sticks are counted.
    """
    if label_multiplicity and isinstance(options.get("concentration"), StickBreaking):
        raise ValueError(
            "stick_breaking has an order of its components, so that another labelling is another model: leave "
            "label_multiplicity out."
        )
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
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    orders: Sequence[int],
    num_restarts: int,
    options: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Log-likelihood, BIC and ICL of maximum likelihood by K."""
    weight = options.get("sample_weight")

    def baseline(k: int) -> tuple[float, float, float]:
        if component.maximum_likelihood is None:
            return math.nan, math.nan, math.nan
        key = fold_in(rng_key, k)
        try:
            result = em(key, x, component, num_components=k, num_restarts=num_restarts, sample_weight=weight)
        except FloatingPointError:
            return math.nan, math.nan, math.nan
        return result.log_likelihood, result.bic, result.icl

    rows = [baseline(k) for k in orders]
    return dict(zip(("log_lik", "bic", "icl"), np.array(rows).T, strict=True))
