"""The numbers of components to compare, and their fits."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.comparison import criterion_columns
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.fit import fit
from numpyro_tempered.mixtures.measure import largest_log_likelihood
from numpyro_tempered.mixtures.prepare import check_rows
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.weights import StickBreaking

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


def check_orders(num_components: Iterable[int] | None) -> list[int]:
    """The K to compare.

    Raises:
        ValueError: If there is none, one is not a positive integer, or one comes twice.
    """
    if num_components is None:
        raise ValueError("num_components=None, all K, is for select_num_components alone: give range(1, 9), say.")
    if isinstance(num_components, itertools.count):
        raise ValueError(f"num_components is {num_components}, without an end: give None for all K from 1 up.")
    orders = [num_components] if isinstance(num_components, int | np.integer) else list(num_components)
    if not orders or any(isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1 for k in orders):
        raise ValueError(f"num_components must be positive integers, at least one, got {orders}.")
    if len(set(orders)) < len(orders):
        raise ValueError(f"num_components has a number twice: {orders}.")
    return [int(k) for k in orders]


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


def largest_order(x: ArrayLike, component: Component) -> int:
    """Where K ends that grows: a component for each row, or ``MOST``."""
    return min(MOST, check_rows(x, component).shape[0])


def grow(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    log_weights: np.ndarray,
    *,
    label_multiplicity: bool,
    **options: Any,
) -> tuple[dict[int, MixtureFit], str]:
    r"""Fits of K = 1, 2, ... and the reason that K grew no further.

    Each fit is that of :func:`fit_orders`. With an upper bound U of log L over all mixtures,
    :math:`E_1(K) - \log(1/b_K) \le \alpha U + \log b_K` for every K, and :math:`b_K` of a larger K is at most
    what the weights up to K leave of 1. Where the best of F - log(1/b_K), below its criterion, is no less, no
    larger K can win.

    Args:
        rng_key: Key of all fits.
        x: Data.
        component: The family and its prior.
        log_weights: log b_K of K = 1, 2, ..., as far as K may grow.
        label_multiplicity: Whether the criterion counts labels, which has no upper bound.
        **options: Further arguments of :func:`fit`.
    """
    largest = largest_log_likelihood(component, x, options.get("sample_weight"))
    ceiling = math.inf if label_multiplicity else options["alpha"] * largest
    fits: dict[int, MixtureFit] = {}
    for k in range(1, len(log_weights) + 1):
        smaller = list(fits.values())[-1:]
        fits[k] = fit(fold_in(rng_key, k), x, component, num_components=k, warm_start=smaller, **options)
        columns = criterion_columns(fits, log_weights[:k], label_multiplicity)
        if np.max(columns["objective"] + log_weights[:k]) >= ceiling + log_rest(log_weights[:k]):
            return fits, "certain: no larger K can win"
        if k - 1 - int(np.argmax(columns["criterion"])) >= PATIENCE:
            return fits, f"none of the last {PATIENCE} K improved the criterion"
    return fits, f"K = {len(log_weights)} is the largest that is tried, a component for each row or {MOST}"


def log_rest(log_weights: np.ndarray) -> float:
    """The log of what weights leave of 1, no less than their rounding."""
    rest = 1.0 - math.fsum(np.exp(log_weights))
    return math.log(max(rest, 0.0) + len(log_weights) * float(np.finfo(np.float64).eps))


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
