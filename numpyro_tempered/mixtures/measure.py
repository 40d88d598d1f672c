"""What the densities of a family are taken with respect to, and how large the likelihood can be."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core import ArrayLike, doubles
from numpyro_tempered.mixtures.components.base import (
    Component,
    Rows,
    broadcast_prior,
    check_is_component,
    missing_form,
)
from numpyro_tempered.mixtures.components.multinomial import CountsGivenTotal
from numpyro_tempered.mixtures.components.product import ColumnsOf
from numpyro_tempered.mixtures.prepare import check_rows, weight_of

LENGTH, MASS, MASS_GIVEN_TOTAL = (
    "a density on the line",
    "a probability",
    "a probability given the row's total",
)


def measures_of(component: Component) -> tuple[str, ...]:
    """What the density of a datum is in each column, from NumPyro's distribution of it."""
    measures: list[str] = []

    def trace() -> None:
        prior, key = broadcast_prior(component.prior, 1), jax.random.key(0)
        parameters = component.draw(lambda _, fn: fn.sample(key), prior)
        measures.extend(_measures(component.distribution(parameters)))

    with numpyro.validation_enabled(False):
        jax.eval_shape(trace)
    return tuple(measures)


def _measures(fn: dist.Distribution) -> list[str]:
    if isinstance(fn, ColumnsOf):
        pairs = [
            pair
            for part, columns in zip(fn.parts, fn.columns, strict=True)
            for pair in zip(columns, _measures(part), strict=True)
        ]
        return [measure for _, measure in sorted(pairs)]
    given_total = isinstance(fn, CountsGivenTotal)
    measure = MASS_GIVEN_TOTAL if given_total else MASS if fn.is_discrete else LENGTH
    return [measure] * fn.event_shape[-1]


def check_families(
    components: Mapping[Any, Component], x: ArrayLike, *, named: bool
) -> dict[Any, Rows]:
    """Data as rows of each family, by name, or of one that has none.

    Raises:
        TypeError: If there is a name that is not a string, or a value that is not a component.
        ValueError: If there is no component, data are not of a family, or two families take densities of a column
            with respect to different measures.
    """
    if not components:
        raise ValueError(
            "component is an empty mapping: give at least one component, by its name."
        )
    rows = {}
    for name, component in components.items():
        if named and not isinstance(name, str):
            raise TypeError(f"the names of components are strings, got {name!r}.")
        check_is_component(component, f"component {name!r}" if named else "component")
        try:
            rows[name] = check_rows(x, component)
            missing_form(component, rows[name])
        except (TypeError, ValueError) as error:
            if not named:
                raise
            raise type(error)(f"component {name!r}: {error}") from error
    check_comparable(components)
    return rows


def check_comparable(components: Mapping[Any, Component]) -> None:
    """Refuse families whose likelihoods of the same data are in different units.

    Raises:
        ValueError: If two take densities of a column with respect to different measures.
    """
    measures = {name: measures_of(component) for name, component in components.items()}
    (first, of_first), *others = measures.items()
    for name, of_this in others:
        for column, (ours, theirs) in enumerate(zip(of_first, of_this, strict=True)):
            if ours != theirs:
                raise ValueError(
                    f"the likelihoods of components {first!r} and {name!r} cannot be compared: of column "
                    f"{column} the one is {ours}, the other {theirs}. Compare families of one kind, in a call of "
                    "their own."
                )


def largest_log_likelihood(
    component: Component, rows: Rows, sample_weight: ArrayLike | None
) -> float:
    r"""An upper bound of log L over all mixtures of a family, whatever K; infinite where densities have none.

    For probabilities :math:`\sum_i w_i \log P(x_i) \le \sum_i w_i \log \hat P(x_i)`, with the shares
    :math:`\hat P` of the distinct rows among those with the same entries observed (Gibbs' inequality); given
    totals it is 0, and where rows are those of several processes.
    """
    kinds = set(measures_of(component))
    if LENGTH in kinds:
        return math.inf
    if MASS_GIVEN_TOTAL in kinds or not getattr(rows, "is_fully_addressable", True):
        return 0.0
    weight = doubles(weight_of(sample_weight, rows))
    rows = np.asarray(rows)
    is_missing = np.isnan(rows)
    _, pattern = np.unique(is_missing, axis=0, return_inverse=True)
    entries = np.concatenate([is_missing, np.where(is_missing, 0.0, rows)], axis=1)
    _, kind = np.unique(entries, axis=0, return_inverse=True)
    pattern, kind = pattern.ravel(), kind.ravel()
    # A row without an observed entry has the probability 1.
    weight = np.where(is_missing.all(axis=1), 0.0, weight)
    of_pattern, of_kind = (
        np.bincount(pattern, weight)[pattern],
        np.bincount(kind, weight)[kind],
    )
    counts = weight > 0
    return float(np.sum(weight[counts] * np.log(of_kind[counts] / of_pattern[counts])))
