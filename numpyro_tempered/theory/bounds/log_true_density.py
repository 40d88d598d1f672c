"""Upper bounds on log p0(X), the log density of the data under the truth: what a certificate has to assume."""

from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import ArrayLike, check_number


class LogTrueDensity(NamedTuple):
    """An upper bound on log p0(X), in nats, and what makes it one.

    Made by :func:`known_density`, :func:`empirical_entropy` or :func:`maximum_likelihood`.

    Attributes:
        value: The bound, of all data together, under the measure that the model's likelihood is a density of.
        source: Where it comes from.
        valid_only_if: The condition under which it is an upper bound, whatever the model.
        well_specified_only: Whether that condition is about the model: if so, the certificate says nothing of a
            misspecified one.
        assumptions: What must hold, in words, and how to check it.
    """

    value: float
    source: str
    valid_only_if: str
    well_specified_only: bool
    assumptions: tuple[str, ...]


def known_density(value: float) -> LogTrueDensity:
    """A known bound: the truth's own log density in a simulation, or a number from the domain.

    Args:
        value: At least log p0(X), in nats.

    Returns:
        A :class:`LogTrueDensity`.

    Raises:
        ValueError: If the value is not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.known_density(-31.5).valid_only_if
        'the value given is at least log p0(X)'
    """
    condition = "the value given is at least log p0(X)"
    return LogTrueDensity(
        float(check_number(value, "value")),
        source="known density",
        valid_only_if=condition,
        well_specified_only=False,
        assumptions=(
            f"{condition}, under the measure that the model's likelihood is a density of",
        ),
    )


def empirical_entropy(
    data: ArrayLike | None = None, *, counts: ArrayLike | None = None
) -> LogTrueDensity:
    r"""The maximum over all distributions, :math:`n\sum_k \hat p_k\log\hat p_k`, for discrete data.

    No truth gives the data a larger probability. For k values that are all frequent it exceeds log p0(X) by about
    (k - 1)/2 on average; where most values occur once it is too large to be of use.

    Args:
        data: Discrete values, ``(n,)``, or rows of them, ``(n, d)``. Numbers must be whole; others are counted
            first and come as ``counts``.
        counts: How often each value occurs, in place of ``data``.

    Returns:
        A :class:`LogTrueDensity`.

    Raises:
        TypeError: If both or neither of ``data`` and ``counts`` are passed.
        ValueError: If there are no data, numbers are not whole, or counts are negative.

    Example:
        >>> import numpyro_tempered as nt
        >>> print(f"{nt.bounds.empirical_entropy([0, 1, 1, 0]).value:.4f}")  # 4 log(1/2)
        -2.7726
    """
    if (data is None) == (counts is None):
        raise TypeError(
            "empirical_entropy takes the data, or the counts of their values: one of the two."
        )
    if counts is None:
        if isinstance(data, np.ma.MaskedArray):
            raise ValueError(
                "the data are a masked array: pass its entries that are not masked."
            )
        values = np.asarray(data)
        if values.ndim not in (1, 2) or values.size == 0:
            raise ValueError(
                f"the data must have shape (n,) or (n, d), and not be empty, got {values.shape}."
            )
        if np.issubdtype(values.dtype, np.inexact) and not np.all(
            values == np.round(values)
        ):
            raise ValueError(
                "the data are not whole numbers, and a density can exceed every sum of log frequencies: pass "
                "counts if they are discrete all the same."
            )
        counts = np.unique(values, axis=0, return_counts=True)[1]
    number = np.asarray(counts, np.float64).ravel()
    if (
        not np.all(np.isfinite(number) & (number >= 0) & (number == np.round(number)))
        or not number.sum() > 0
    ):
        raise ValueError(
            f"counts must be whole numbers, none negative and not all 0, got {counts!r}."
        )
    number = number[number > 0]
    return LogTrueDensity(
        float(np.sum(number * np.log(number / number.sum()))),
        source="empirical entropy",
        valid_only_if="the data are discrete, independent and identically distributed",
        well_specified_only=False,
        assumptions=(
            "the data are independent and identically distributed: not responses given covariates, whose groups "
            "of equal covariates would have to be added up",
            "the data are discrete and the likelihood is their probability: it sums to 1 over the values, as a "
            "density of rounded numbers does not",
        ),
    )


def maximum_likelihood(value: float) -> LogTrueDensity:
    """The maximum of the model's log-likelihood: a bound ONLY if the model is well specified.

    Under a misspecified model the certificate from it is invalid, and for large n always false: it falls to 0
    while the divergence of the best P_θ from P0 stays.

    Args:
        value: The maximum over θ of log L(θ), untempered, in nats; of several models the largest, if one of them
            is well specified.

    Returns:
        A :class:`LogTrueDensity`.

    Raises:
        ValueError: If the value is not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.bounds.maximum_likelihood(-30.1).well_specified_only
        True
    """
    return LogTrueDensity(
        float(check_number(value, "value")),
        source="maximum likelihood",
        valid_only_if="the model is well specified: P0 is one of its P_θ",
        well_specified_only=True,
        assumptions=(
            "the model is well specified: P0 is one of its P_θ. No data can show this; posterior predictive "
            "checks can refute it",
            "the value is the global maximum of the log-likelihood: a lower one, of an optimiser that stopped "
            "early, bounds nothing",
        ),
    )
