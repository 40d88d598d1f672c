"""The numbers of components to compare, and their fits."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.comparison import criterion_columns
from numpyro_tempered.mixtures.components.base import Component, Rows
from numpyro_tempered.mixtures.coordinate_ascent import fit
from numpyro_tempered.mixtures.measure import largest_log_likelihood
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.warm import read_init
from numpyro_tempered.mixtures.weights import StickBreaking
from numpyro_tempered.select.ranking import (
    LogPrior,
    check_countable_prior,
    check_log_prior,
    check_pair_prior,
)

# How many K in succession may fall short of the best before K grows no further: so many components may have to be
# added before they pay. Clusters on a grid of 4 x 4 at the edge of being told apart took up to six.
PATIENCE = 6
# Where K ends that grows.
MOST = 1024

# By itself it compiles two programs.
_fold_in = jax.jit(jax.random.fold_in)


def fold_in(rng_key: Array, number: int) -> Array:
    """The key of one use of a key."""
    return _fold_in(rng_key, np.uint32(number))


def check_options(options: dict[str, Any], label_multiplicity: bool) -> None:
    """Refuse fits in ``init``, since those of other K are there, and the symmetry of labels of sticks.

    Raises:
        ValueError: If there is one, or labels of sticks are counted.
    """
    if label_multiplicity and isinstance(options.get("concentration"), StickBreaking):
        raise ValueError(
            "stick_breaking has an order of its components, so that another labelling is another model: leave "
            "label_multiplicity out."
        )
    if read_init(options.get("init"))[1] is not None:
        raise ValueError(
            "each fit starts from that of the next smaller K, or larger alpha: leave fits out of init."
        )


def check_orders(num_components: Iterable[int] | None) -> list[int]:
    """The K to compare.

    Raises:
        ValueError: If there is none, one is not a positive integer, or one comes twice.
    """
    if num_components is None:
        raise ValueError(
            "num_components=None, all K, is for select_num_components alone: give range(1, 9), say."
        )
    if isinstance(num_components, itertools.count):
        raise ValueError(
            f"num_components is {num_components}, without an end: give None for all K from 1 up."
        )
    orders = (
        [num_components]
        if isinstance(num_components, int | np.integer)
        else list(num_components)
    )
    if not orders or any(
        isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1
        for k in orders
    ):
        raise ValueError(
            f"num_components must be positive integers, at least one, got {orders}."
        )
    if len(set(orders)) < len(orders):
        raise ValueError(f"num_components has a number twice: {orders}.")
    return [int(k) for k in orders]


def fit_models(
    rng_key: Array,
    x: ArrayLike,
    components: Mapping[Any, Component],
    rows: Mapping[Any, Rows],
    num_components: Iterable[int] | None,
    log_prior: LogPrior,
    *,
    label_multiplicity: bool,
    **options: Any,
) -> tuple[dict[Any, dict[int, MixtureFit]], np.ndarray, dict[Any, str]]:
    """Fits by family and K, the log prior weights of all, and where K grew, why it stopped.

    Each family has the same keys. One by itself has the name None, and models by K instead of pairs.

    Args:
        rng_key: Key of all fits.
        x: Data.
        components: The families.
        rows: The data as rows of each, where K grows.
        num_components: The K; None for all.
        log_prior: Of the K, or of pairs.
        label_multiplicity: Whether the criterion counts labels.
        **options: Further arguments of :func:`fit`.
    """
    names, stops = list(components), {}
    if num_components is None:
        weight, most = (
            options.get("sample_weight"),
            min(MOST, *(each.shape[0] for each in rows.values())),
        )
        by_order, orders = (
            check_countable_prior(most, log_prior),
            list(range(1, most + 1)),
        )
        for name, component in components.items():
            ceiling = options["alpha"] * largest_log_likelihood(
                component, rows[name], weight
            )
            stops[name] = partial(
                reason_to_stop,
                log_weights=by_order,
                ceiling=math.inf if label_multiplicity else ceiling,
                label_multiplicity=label_multiplicity,
            )
    else:
        orders = check_orders(num_components)
        of_one = None in components
        weights = (
            check_log_prior(orders, log_prior)
            if of_one
            else check_pair_prior(names, orders, log_prior)
        )
    results = {
        name: fit_orders(rng_key, x, component, orders, stop=stops.get(name), **options)
        for name, component in components.items()
    }
    fits = {name: each for name, (each, _) in results.items()}
    if num_components is None:
        weights = np.concatenate(
            [by_order[: len(each)] for each in fits.values()]
        ) - math.log(len(names))
    return (
        fits,
        weights.ravel(),
        {name: reason for name, (_, reason) in results.items() if reason is not None},
    )


def fit_orders(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    orders: Sequence[int],
    *,
    others: Mapping[int, MixtureFit] = MappingProxyType({}),
    stop: Callable[[Mapping[int, MixtureFit]], str | None] | None = None,
    init: Start | None = None,
    **options: Any,
) -> tuple[dict[int, MixtureFit], str | None]:
    """Fits by K, from the smallest up: each also starts from the next smaller, and from another of its own K.

    Args:
        rng_key: Key of all fits.
        x: Data.
        component: The family and its prior.
        orders: The K.
        others: Other fits, by K.
        stop: The fits so far to a reason to make no more of them, or None.
        init: First responsibilities.
        **options: Further arguments of :func:`fit`.

    Returns:
        The fits, in the order of ``orders``, and the reason to stop.
    """
    fits: dict[int, MixtureFit] = {}
    reason = None
    for k in sorted(orders):
        warm = [*list(fits.values())[-1:], *([others[k]] if k in others else [])]
        fits[k] = fit(
            fold_in(rng_key, k),
            x,
            component,
            num_components=k,
            init=[*warm, start_or_default(init)],
            **options,
        )
        reason = None if stop is None else stop(fits)
        if reason is not None:
            break
    return {k: fits[k] for k in orders if k in fits}, reason


def reason_to_stop(
    fits: Mapping[int, MixtureFit],
    *,
    log_weights: np.ndarray,
    ceiling: float,
    label_multiplicity: bool,
) -> str | None:
    r"""Why K = 1, 2, ... grows no further, or None.

    With an upper bound U of log L over all mixtures, :math:`E_1(K) - \log(1/b_K) \le \alpha U + \log b_K` for
    every K, and :math:`b_K` of a larger K is at most what the weights up to K leave of 1. Where the best of
    F - log(1/b_K), below its criterion, is no less, no larger K can win.

    Args:
        fits: Of the K so far.
        log_weights: log b_K of K = 1, 2, ..., as far as K may grow.
        ceiling: alpha U; infinite where labels are counted, which has no upper bound.
        label_multiplicity: Whether the criterion counts labels.
    """
    k = len(fits)
    columns = criterion_columns(fits, log_weights[:k], label_multiplicity)
    if np.max(columns["objective"] + log_weights[:k]) >= ceiling + log_rest(
        log_weights[:k]
    ):
        return "certain: no larger K can win"
    if k - 1 - int(np.argmax(columns["criterion"])) >= PATIENCE:
        return f"none of the last {PATIENCE} K improved the criterion"
    if k == len(log_weights):
        return (
            f"K = {k} is the largest that is tried, a component for each row or {MOST}"
        )
    return None


def log_rest(log_weights: np.ndarray) -> float:
    """The log of what weights leave of 1, no less than their rounding."""
    rest = 1.0 - math.fsum(np.exp(log_weights))
    return math.log(max(rest, 0.0) + len(log_weights) * float(np.finfo(np.float64).eps))
