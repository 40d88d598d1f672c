"""Where a fit starts: from first responsibilities, and from the factors of other fits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.components.base import broadcast_prior, translate_on_host
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.result import MixtureFit, check_fit
from numpyro_tempered.mixtures.source import Splits, Starts

WarmStart: TypeAlias = MixtureFit | Sequence[MixtureFit]


def with_warm(
    starts: Starts,
    data: MixtureData,
    problem: MixtureProblem,
    warm_start: WarmStart | None,
) -> Starts:
    """The starts, and those from the factors of other fits. Of those with fewer components the largest is taken.

    Raises:
        TypeError: If one is not a fit.
        ValueError: If one is of another family, or has more components.
    """
    if warm_start is None:
        return starts
    num_components = starts.num_components
    fits = [warm_start] if isinstance(warm_start, MixtureFit) else list(warm_start)
    for fit in fits:
        check_warm(data, fit, num_components)
    nothing: Any = np.zeros_like(problem.concentration)
    cast = partial(np.asarray, dtype=problem.alpha.dtype)
    triples: list[tuple[int, Factors, Array]] = [
        (
            fit.num_components,
            jax.tree.map(cast, factors_for(data, fit)),
            fit.problem.concentration,
        )
        for fit in (with_weights_of(problem, fit) for fit in fits)
    ]
    warm = [
        fill_up(problem, nothing, each)
        for size, each, _ in triples
        if size == num_components
    ]
    smaller = [triple for triple in triples if triple[0] < num_components]
    if not smaller:
        # One program for mixtures with and without a smaller one.
        nobody = Factors(nothing, broadcast_prior(problem.prior, len(nothing)))
        return starts._replace(splits=Splits(nobody, np.int32(0)), warm=warm)
    size, parent, concentration = max(smaller, key=lambda triple: triple[0])
    splits = Splits(fill_up(problem, nothing, parent), np.int32(size))
    return starts._replace(
        splits=splits, warm=warm, padded=[pad(problem, parent, concentration)]
    )


def pad(problem: MixtureProblem, factors: Factors, concentration: Array) -> Factors:
    """Factors with components added that are empty, at their prior.

    Args:
        problem: Of all components.
        factors: Of the first components.
        concentration: The prior that their weights were updated from.
    """
    pair = np.asarray(factors.concentration), np.asarray(concentration)
    counts = weights.counts_of(*pair)  # type: ignore[arg-type]
    first = weights.update(np.asarray(problem.concentration)[: len(counts)], counts)  # type: ignore[arg-type]
    return fill_up(
        problem, problem.concentration, factors._replace(concentration=first)
    )


def fill_up(problem: MixtureProblem, concentration: Array, factors: Factors) -> Factors:
    """Factors with components at their prior behind them, whose weights have this factor, leading axis K."""
    size = len(factors.concentration)
    others = broadcast_prior(problem.prior, len(concentration) - size)
    posterior = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), factors.posterior, others
    )
    joined: Any = np.concatenate([factors.concentration, concentration[size:]])
    return Factors(joined, posterior)


def with_weights_of(problem: MixtureProblem, fit: MixtureFit) -> MixtureFit:
    """The fit with weights of the problem's form; where it had a Dirichlet or sticks, from its counts."""
    target, concentration, prior = (
        np.asarray(each)
        for each in (
            problem.concentration,
            fit.factors.concentration,
            fit.problem.concentration,
        )
    )
    if concentration.ndim == target.ndim:
        return fit
    first: Any = weights.first(target, fit.num_components)
    updated = weights.update(first, weights.counts_of(concentration, prior))  # type: ignore[arg-type]
    return fit._replace(
        factors=fit.factors._replace(concentration=updated),
        problem=fit.problem._replace(concentration=first),
    )


def check_warm(data: MixtureData, warm_start: MixtureFit, num_components: int) -> None:
    """Refuse what this fit cannot start from.

    Raises:
        TypeError: If ``warm_start`` is not a fit.
        ValueError: If it is of another family, or has more components.
    """
    check_fit(warm_start, "warm_start")
    if (
        warm_start.component != data.component
        or warm_start.num_components > num_components
    ):
        raise ValueError(
            f"warm_start has {warm_start.num_components} components of {warm_start.component.name}; expected at "
            f"most {num_components} of {data.component.name}, both with missing entries or both without."
        )


def factors_for(data: MixtureData, warm_start: MixtureFit) -> Factors:
    """The factors of another fit, for data less this fit's centre."""
    factors = warm_start.factors
    if warm_start.centre is None or data.centre is None:
        return factors
    shift = warm_start.centre - data.centre
    return factors._replace(
        posterior=translate_on_host(data.component, factors.posterior, shift)
    )
