"""How many components: the penalised ELBO over K and families, over powers, beside maximum likelihood."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numpyro_tempered.core import (
    CLOCK,
    Array,
    ArrayLike,
    Columns,
    add_repr,
    advise_cache,
    check_count,
    key_first,
    warn_caller,
)
from numpyro_tempered.mixtures.comparison import (
    Model,
    comparison_dataset,
    criterion_columns,
)
from numpyro_tempered.mixtures.components.base import Component, check_is_component
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.measure import check_families
from numpyro_tempered.mixtures.orders import (
    check_options,
    check_orders,
    fit_models,
    fit_orders,
    fold_in,
)
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.arviz import (
    OnDemand,
    as_attr,
    assemble,
    dataset,
    versions,
    with_group,
)
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, dyadic

# What is drawn beside the fits, whose keys have the numbers of their K.
BASELINES, DRAWS = 2**30, 2**30 + 1
# A default whose end says nothing about the data.
ORDERS = range(1, 9)


@add_repr
class ComponentSelection(NamedTuple):
    """The number of components that the penalised ELBO selects, and their family where there were several.

    Attributes:
        selected: K̂; of several families the name and K̂, as in ``fits["full", 3]``.
        fits: All fits, by K, or by name and K.
        columns: The comparison, arrays in the order of ``fits``; see :func:`select_num_components`.
        attrs: Attributes of the comparison.
        report: Makes ``data``.
        uncertain: Whether the error of the ELBO of the selected model or of the runner-up exceeds the margin
            between the two: two Monte Carlo standard errors, and the spread of the starts where fewer than two of
            them reach within 0.1 nat of the best. Raise ``num_restarts``, or ``num_draws``.
        at_end: Whether K̂ is the largest of several K, so that a larger one may be better.
        stopped: Why K grew no further, with ``num_components=None``; of several families by name.
    """

    selected: Model
    fits: dict[Any, MixtureFit]
    columns: Columns
    attrs: dict[str, Any]
    report: OnDemand
    uncertain: bool
    at_end: bool = False
    stopped: str | dict[str, str] | None = None

    @property
    def fit(self) -> MixtureFit:
        """The selected fit."""
        return self.fits[self.selected]

    @property
    def comparison(self) -> Any:
        """The comparison as ArviZ data, group ``model_comparison`` with dim ``num_components``.

        Of several families the dims are ``family`` and ``num_components``, with NaN where K grew further for
        another family. :func:`numpyro_tempered.table` turns it into pandas.
        """
        return assemble(
            {"model_comparison": comparison_of(self.columns, self.fits, self.attrs)},
            {**self.attrs, **versions()},
        )

    @property
    def data(self) -> Any:
        """The same with the groups of the selected fit, whose draws are made when they are first asked for."""
        return self.report.data


@key_first
def select_num_components(
    rng_key: Array,
    x: ArrayLike,
    component: Component | Mapping[str, Component],
    *,
    num_components: Iterable[int] | None = ORDERS,
    alpha: float = 1.0,
    log_prior: LogPrior = dyadic,
    label_multiplicity: bool = False,
    num_restarts: int = 16,
    baselines: bool = True,
    num_samples: int = 1000,
    **options: Any,
) -> ComponentSelection:
    r"""Select the number of components by the penalised ELBO, and their family where several are given.

    .. math:: \hat K = \arg\max_K \big\{E_1(K) - \log(1/b_K)\big\}, \quad
              E_1 = \alpha E_\rho[\log L] - \mathrm{KL}(\rho, \pi)

    No constant is dropped, so that the ELBOs of different K are comparable; the prior of a component must be the
    same for all K. Each K also starts from the fit of the next smaller, with empty components, at their prior,
    and with parts of its components split off. Therefore F(K) is not below
    F(K - 1) + log((K - 1) / (K - 1 + alpha n)) for a concentration of 1; for others see the theory of mixtures.

    **Several families.** A mapping, such as of the shapes of a Gaussian covariance, compares all pairs of a
    family and K. The weight of a pair is b_K over the number of families, a probability over pairs, and ``rank``,
    ``weight`` and ``uncertain`` are those among all pairs. The fits of a family are those of a call of its own
    with the same key. A likelihood that is a probability (of counts, of categories) is not comparable with one
    that is a density, nor that of a multinomial, given the total of a row, with one that is not: such columns
    raise.

    **All K.** With ``num_components=None`` K grows from 1, for each family by itself, until

    - no larger K can win. This is certain only where likelihoods are probabilities: log L is at most U, that of
      the shares of the distinct rows; hence the criterion of a larger K is at most
      alpha U + log(1 - b_1 - ... - b_K), and the best of F - log(1/b_K) so far is no less;
    - or none of the last 6 K improved the criterion. That is no proof: a gain that takes seven more components at
      once is missed, which a ``range`` finds;
    - or there is a component for each row, or K is 1024.

    ``stopped`` says which.

    Columns of the comparison, by K, or by family and K:

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
        component: The family and its prior, or several by their names.
        num_components: The K to compare; None for all from 1 up.
        alpha: Power on the likelihood.
        log_prior: log b_K by K, or a callable from the K to that; :func:`numpyro_tempered.dyadic` by default. For
            several families also by (name, K). For all K a callable whose b_K, a sum of at most 1 over all K, do
            not depend on how many it is asked for; that they sum to at most 1 is checked as far as K may grow.
        label_multiplicity: Whether to add log(K! / (K - K₊)!), K₊ the occupied components: the labels'
            symmetry, which a bound around one labelling misses. Sticks have none.
        num_restarts: Random starts for each K, of the ascent and of EM.
        baselines: Whether to run EM.
        num_samples: Draws of the selected posterior in ``data``.
        **options: Further arguments of :func:`fit`, such as ``num_draws`` or ``concentration``.

    Returns:
        A :class:`ComponentSelection`. A warning says where the default ends at the selected K; other ranges have
        it in ``at_end``.

    Raises:
        TypeError: If ``component`` is neither a component nor a mapping of strings to components.
        ValueError: If there is no K, one is below 1 or twice, or the weights b_K are not positive with a sum of
            at most 1; if families are not comparable; and as :func:`fit`.

    References:
        C19, Theorem 1; the table of shapes and K: Fraley, Raftery, *Model-based clustering, discriminant
        analysis, and density estimation*, JASA 2002.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> choice = nt.mixtures.select_num_components(
        ...     jax.random.key(0), x, component, num_components=[1, 2], num_restarts=8, baselines=False
        ... )
        >>> choice.selected
        2

        Of families and all K:

        >>> wide = nt.mixtures.components.known_variance(1, prior_scale=10.0, scale=9.0)
        >>> families = {"narrow": component, "wide": wide}
        >>> choice = nt.mixtures.select_num_components(
        ...     jax.random.key(0), x, families, num_components=None, num_restarts=8, baselines=False
        ... )
        >>> choice.selected, choice.stopped["narrow"]
        (('narrow', 2), 'K = 4 is the largest that is tried, a component for each row or 1024')
    """
    began, several = CLOCK.read(), isinstance(component, Mapping)
    components: Mapping[Any, Component] = (
        component if isinstance(component, Mapping) else {None: component}
    )
    num_samples = check_count(num_samples, "num_samples")
    check_options(options, label_multiplicity)
    options = {"alpha": alpha, "num_restarts": num_restarts} | options
    rows = (
        check_families(components, x, named=several)
        if several or num_components is None
        else {}
    )
    by_name, weights, stopped = fit_models(
        rng_key,
        x,
        components,
        rows,
        num_components,
        log_prior,
        label_multiplicity=label_multiplicity,
        **options,
    )
    fits: dict[Model, MixtureFit] = {
        (name, k) if several else k: each
        for name, theirs in by_name.items()
        for k, each in theirs.items()
    }
    columns = criterion_columns(fits, weights, label_multiplicity)
    if baselines:
        columns |= baseline_columns(
            fold_in(rng_key, BASELINES), x, components, by_name, options
        )
    selected = list(fits)[int(np.argmin(columns["rank"]))]
    name, number = selected if isinstance(selected, tuple) else (None, selected)
    orders, reason = (
        list(by_name[name]),
        (stopped if several else stopped.get(None)) or None,
    )
    uncertain = bool(np.any(columns["uncertain"][columns["rank"] < 2]))
    at_end = len(orders) > 1 and number == max(orders)
    attrs = {
        "selected": number,
        **({} if name is None else {"selected_family": name}),
        "prior_weights": np.exp(weights).tolist(),
        "label_multiplicity": int(label_multiplicity),
        "uncertain": int(uncertain),
        "at_end": int(at_end),
        **({} if reason is None else {"stopped": as_attr(reason)}),
    }
    table, weight = (
        partial(comparison_of, columns, fits, attrs),
        options.get("sample_weight"),
    )
    draws = {"num_samples": num_samples, "sample_weight": weight}
    choice = ComponentSelection(
        selected,
        fits,
        columns,
        attrs,
        OnDemand(
            partial(
                report_of,
                fold_in(rng_key, DRAWS),
                x,
                fits[selected],
                table,
                attrs,
                **draws,
            )
        ),
        uncertain,
        at_end=at_end,
        stopped=reason,
    )
    if at_end and num_components is ORDERS:
        warn_caller(
            f"K = {number}, the largest that was compared, is selected: a larger one may be better. Compare "
            "more, such as num_components=range(1, 17), or all K by num_components=None."
        )
    # Behind the check of the key.
    advise_cache("select_num_components", began)
    return choice


def comparison_of(
    columns: Columns, fits: dict[Any, MixtureFit], attrs: dict[str, Any]
) -> Any:
    """The comparison as a Dataset."""
    names = ("selected", "selected_family")
    selection: dict[str, object] = {
        name: attrs[name] for name in names if name in attrs
    }
    return comparison_dataset(
        columns, list(fits), {"alpha": next(iter(fits.values())).alpha, **selection}
    )


def report_of(
    rng_key: Array,
    x: ArrayLike,
    fit: MixtureFit,
    table: Callable[[], Any],
    attrs: dict[str, Any],
    **options: Any,
) -> Any:
    """Draws of the selected fit with the comparison, as ArviZ data."""
    data = to_inference_data(fit, x, rng_key=rng_key, **options)
    return with_group(data, "model_comparison", table(), attrs)


def baseline_columns(
    rng_key: Array,
    x: ArrayLike,
    components: Mapping[str | None, Component],
    fits: Mapping[str | None, Mapping[int, MixtureFit]],
    options: Mapping[str, Any],
) -> Columns:
    """Log-likelihood, BIC and ICL of maximum likelihood by family and K."""
    settings = {
        "num_restarts": options["num_restarts"],
        "sample_weight": options.get("sample_weight"),
    }

    def baseline(component: Component, k: int) -> tuple[float, float, float]:
        if component.maximum_likelihood is None:
            return math.nan, math.nan, math.nan
        try:
            result = em(fold_in(rng_key, k), x, component, num_components=k, **settings)
        except FloatingPointError:
            return math.nan, math.nan, math.nan
        return result.log_likelihood, result.bic, result.icl

    rows = [baseline(components[name], k) for name, each in fits.items() for k in each]
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
