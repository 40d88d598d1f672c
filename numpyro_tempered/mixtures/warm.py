"""Where a fit starts: from first responsibilities, and from the factors of other fits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.components.base import broadcast_prior, translate_on_host
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.source import Splits, Starts
from numpyro_tempered.mixtures.starts import Start, start_or_default

Init: TypeAlias = Start | MixtureFit | Sequence[Start | MixtureFit]


def read_init(init: Init | None) -> tuple[Start, list[MixtureFit] | None]:
    """First responsibilities, and the fits; None where there are only the former.

    Raises:
        TypeError: If one is neither.
        ValueError: If there are several first responsibilities.
    """
    # Both are tuples.
    is_list = isinstance(init, list) or type(init) is tuple
    each: list[Any] = list(init) if is_list else [init]  # type: ignore[arg-type]
    fits = [part for part in each if isinstance(part, MixtureFit)]
    others = [part for part in each if not isinstance(part, MixtureFit)]
    starts = [start_or_default(part) for part in others]
    if len(starts) > 1:
        raise ValueError(
            f"init has {len(starts)} first responsibilities; expected at most one, for all restarts."
        )
    start = starts[0] if starts else start_or_default(None)
    return start, fits if fits or is_list else None


def with_fits(
    starts: Starts,
    data: MixtureData,
    problem: MixtureProblem,
    fits: Sequence[MixtureFit] | None,
) -> Starts:
    """The starts, and those from the factors of other fits. Of those with fewer components the largest is taken.

    Raises:
        ValueError: If one is of another family, or has more components.
    """
    if fits is None:
        return starts
    num_components = starts.num_components
    for fit in fits:
        if fit.component != data.component or fit.num_components > num_components:
            raise ValueError(
                f"init has {fit.num_components} components of {fit.component.name}; expected at most "
                f"{num_components} of {data.component.name}, both with missing entries or both without."
            )
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


def factors_for(data: MixtureData, fit: MixtureFit) -> Factors:
    """The factors of another fit, for data less this fit's centre."""
    factors = fit.factors
    if fit.centre is None or data.centre is None:
        return factors
    shift = fit.centre - data.centre
    return factors._replace(
        posterior=translate_on_host(data.component, factors.posterior, shift)
    )
