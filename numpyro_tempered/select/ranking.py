"""The penalised ELBO: prior weights of models, and the ranking of models by ELBO plus log prior."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

LogPrior: TypeAlias = (
    Mapping[Any, float] | Callable[[Sequence[Hashable]], Mapping[Any, float]] | None
)


class Ranking(NamedTuple):
    """Models ranked by a criterion, arrays of shape ``(K,)``.

    Attributes:
        criterion: ELBO plus log prior.
        rank: 0 is the best; of equal criteria the first comes first.
        weight: The softmax of ``criterion``.
        margin: Distance of the criterion to the best one; of the best to the runner-up, infinite without one.
        uncertain: Whether the error of the ELBO exceeds ``margin``.
        best: Index of the best model.
    """

    criterion: np.ndarray
    rank: np.ndarray
    weight: np.ndarray
    margin: np.ndarray
    uncertain: np.ndarray
    best: int


def rank_models(
    elbo: np.ndarray, log_prior: np.ndarray, *, error: np.ndarray | float = 0.0
) -> Ranking:
    r"""Rank models by :math:`\mathrm{ELBO}(K) - \log(1/b_K)`.

    Args:
        elbo: ELBO of each model, every constant included, shape ``(K,)``.
        log_prior: Log prior weights log b_K, shape ``(K,)``.
        error: Error of each ELBO, such as two standard errors.

    Returns:
        A :class:`Ranking`.

    References:
        C19, Theorem 1 (the guarantee for alpha < 1).

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.select.ranking import rank_models
        >>> ranking = rank_models(np.array([-12.0, -10.0]), np.log([0.5, 0.25]))
        >>> ranking.rank.tolist(), ranking.best
        ([1, 0], 1)
    """
    criterion = elbo + log_prior
    order = np.argsort(-criterion, kind="stable")
    rank = np.empty(len(order), dtype=int)
    rank[order] = np.arange(len(order))
    margin = criterion.max() - criterion
    margin[order[0]] = margin[order[1]] if len(order) > 1 else np.inf
    unnormalised = np.exp(criterion - criterion.max())
    return Ranking(
        criterion,
        rank,
        unnormalised / unnormalised.sum(),
        margin,
        np.asarray(error) > margin,
        int(order[0]),
    )


def dyadic(names: Sequence[Hashable]) -> dict[Hashable, float]:
    """The prior weights b_K = 2^-K of nested models, as logarithms.

    Args:
        names: Model names. Positive integers are taken for K; otherwise K is the position, from 1.

    Returns:
        Log weights by name.

    Example:
        >>> import numpyro_tempered as nt
        >>> [round(value, 3) for value in nt.dyadic(["line", "parabola"]).values()]
        [-0.693, -1.386]
    """
    integers = [
        k
        for k in names
        if isinstance(k, int | np.integer) and not isinstance(k, bool) and k > 0
    ]
    orders = integers if len(integers) == len(names) else range(1, len(names) + 1)
    return {name: -k * math.log(2.0) for name, k in zip(names, orders, strict=True)}


def check_log_prior(names: Sequence[Hashable], log_prior: LogPrior) -> np.ndarray:
    """The logarithms of the prior weights b_K of models, uniform by default.

    Raises:
        ValueError: If a model has none, one is not positive, or they sum to more than 1.
    """
    if log_prior is None:
        return np.full(len(names), -math.log(len(names)))
    weights = log_prior(names) if callable(log_prior) else log_prior
    if set(weights) != set(names):
        theirs, ours = sorted(map(str, weights)), sorted(map(str, names))
        raise ValueError(f"log_prior has models {theirs}, the fits are {ours}.")
    values = np.array([float(weights[name]) for name in names])
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"log_prior must be finite, the logarithms of positive weights, got {values}."
        )
    total = float(np.exp(values).sum())
    if total > 1.0 + 1e-6:
        raise ValueError(
            f"the prior weights exp(log_prior) sum to {total:.6g}, more than 1: pass logarithms."
        )
    return values


def check_pair_prior(
    names: Sequence[str], numbers: Sequence[int], log_prior: LogPrior
) -> np.ndarray:
    """The logarithms of the prior weights of pairs of a name and a number, ``(names, numbers)``.

    Args:
        names: Of families.
        numbers: Of each family's models.
        log_prior: By pair; or as for :func:`check_log_prior` by number, whose weights are shared evenly between
            the names.

    Raises:
        ValueError: As :func:`check_log_prior`.
    """
    if isinstance(log_prior, Mapping) and any(
        isinstance(key, tuple) for key in log_prior
    ):
        pairs = [(name, number) for name in names for number in numbers]
        return check_log_prior(pairs, log_prior).reshape(len(names), len(numbers))
    each = check_log_prior(numbers, log_prior) - math.log(len(names))
    return np.broadcast_to(each, (len(names), len(numbers)))


def check_countable_prior(largest: int, log_prior: LogPrior) -> np.ndarray:
    """The logarithms of prior weights of all positive integers, from 1 as far as ``largest``.

    That their sum is at most 1 can be checked only as far.

    Raises:
        ValueError: If they are not given by a callable, their sum is more than 1, or one depends on how many
            there are.
    """
    if not callable(log_prior):
        raise ValueError(
            "for all K from 1 up log_prior must be a callable from a list of K to their log b_K, whose sum over "
            f"all K is at most 1, such as nt.dyadic; got {log_prior!r}."
        )
    values = check_log_prior(range(1, largest + 1), log_prior)
    first = check_log_prior([1], log_prior)
    if not np.isclose(first[0], values[0], rtol=1e-6):
        raise ValueError(
            f"log_prior gives K = 1 the logarithm {first[0]:.6g} by itself and {values[0]:.6g} among {largest} "
            "K: a prior over all K may not depend on how many are asked for."
        )
    return values
