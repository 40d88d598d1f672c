r"""Certificates: upper bounds on the divergence of a fitted model from the unknown truth, and their ground."""

from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    add_repr,
    check_count,
    check_number,
    check_numbers,
    doubles,
)


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
    number = doubles(counts).ravel()
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


@add_repr
class Certificate(NamedTuple):
    r"""An upper bound on :math:`\int D_\alpha(P_\theta, P_0)\,\rho(d\theta)`, in nats per datum, and its terms.

    Scalars, or arrays where the arguments were. A negative value says that log p0(X) was under-stated, or that
    the event of probability ``delta`` occurred.

    Attributes:
        value: The bound: the sum of the four terms. It holds with probability at least 1 - ``delta`` over the
            data, for all ρ at once, and all models and alphas that ``log_prior`` and ``grid_size`` allow for.
        fit: (α log p0(X) - ELBO_α(ρ)) / (n(1-α)).
        selection: log(1/b_K) / (n(1-α)), the price of having several models.
        confidence: log(m/δ) / (n(1-α)), the price of the probability and of m alphas.
        monte_carlo: What is added for the Monte Carlo error of the ELBO; 0 for an exact one.
        se: Monte Carlo standard error of ``fit``.
        alpha: Power on the likelihood, and the order of the divergence.
        delta: Probability of failure.
        selected: Position of the selected model, by :func:`selection_certificate`; None otherwise.
        source: Where the bound on log p0(X) comes from.
        valid_only_if: The condition under which that is a bound.
        well_specified_only: Whether the certificate is valid for a well-specified model alone.
        assumptions: What must hold, in words, and how to check it.
        theorem: The theorem.
    """

    value: np.ndarray
    fit: np.ndarray
    selection: np.ndarray
    confidence: np.ndarray
    monte_carlo: np.ndarray
    se: np.ndarray
    alpha: float | np.ndarray
    delta: float
    selected: int | None
    source: str
    valid_only_if: str
    well_specified_only: bool
    assumptions: tuple[str, ...]
    theorem: str


def tempered_certificate(
    elbo: ArrayLike,
    log_p0: LogTrueDensity,
    num_data: int,
    *,
    alpha: ArrayLike,
    delta: float = 0.05,
    elbo_se: ArrayLike = 0.0,
    log_prior: ArrayLike = 0.0,
    grid_size: int | None = None,
    num_se: float = 3.0,
) -> Certificate:
    r"""How far a tempered posterior is from the truth, at most.

    With probability at least 1 - δ over the data, for all ρ at once,

    .. math:: \int D_\alpha(P_\theta, P_0)\,\rho(d\theta) \le
              \frac{\alpha\log p_0(X) - \mathrm{ELBO}_\alpha(\rho) + \log(1/\delta)}{n(1-\alpha)}

    P0 is the distribution of a datum; of data that differ in distribution, such as responses given covariates,
    the divergence is the average over the n data. Nothing is assumed of the model: for a misspecified one the
    bound is above the divergence that no θ can avoid.

    Args:
        elbo: ELBO_α(ρ) = α E_ρ[log L] - KL(ρ, prior), in nats and with every constant, or a lower bound on it:
            ``fit.elbo.value``, or the objective of a mixture. An array takes part in broadcasting.
        log_p0: An upper bound on log p0(X) by :func:`known_density`, :func:`empirical_entropy` or
            :func:`maximum_likelihood`.
        num_data: n, the number of independent data.
        alpha: α in (0, 1); an array for a grid.
        delta: δ, in (0, 1).
        elbo_se: Monte Carlo standard error of ``elbo``; 0 if it is exact.
        log_prior: log b_K of each model, if ``elbo`` has one entry for each: weights fixed before the data were
            seen, with a sum of at most 1.
        grid_size: Number of alphas that were tried, if the one of interest was chosen after seeing the data;
            by default as many as ``alpha`` has.
        num_se: How many standard errors are taken off an ELBO by Monte Carlo. The theorem is about the exact one,
            and an estimate exceeds it by more than three standard errors about once in 740 times: a probability
            that adds to ``delta``, and rests on the number of draws, not on n.

    Returns:
        A :class:`Certificate`.

    Raises:
        TypeError: If ``log_p0`` is a bare number: the certificate rests on where it comes from.
        ValueError: If an argument is not finite or out of range. At α = 1 nothing is bounded: n(1-α) D_α = 0.

    References:
        AR: its inequality that holds with probability 1 - δ, rearranged.

    Example:
        >>> import numpyro_tempered as nt
        >>> certificate = nt.bounds.tempered_certificate(-160.0, nt.bounds.known_density(-300.0), 200, alpha=0.5)
        >>> print(f"{certificate.value:.4f} = {certificate.fit:.4f} + {certificate.confidence:.4f}")
        0.1300 = 0.1000 + 0.0300
    """
    if not isinstance(log_p0, LogTrueDensity):
        raise TypeError(
            f"log_p0 must say where it comes from, got {type(log_p0).__name__}: pass known_density(value), "
            "empirical_entropy(data) or maximum_likelihood(value) of nt.bounds."
        )
    alphas = doubles(alpha)
    if alphas.size == 0 or not np.all((alphas > 0) & (alphas < 1)):
        raise ValueError(
            f"a certificate needs alpha in (0, 1), got {alpha!r}: what it bounds is n(1 - alpha) D_alpha, which "
            "is nothing at 1. Fit with alpha below 1."
        )
    check_count(num_data, "num_data")
    check_number(delta, "delta", "(0, 1)", hint="It is a probability of failure.")
    grid = alphas.size if grid_size is None else grid_size
    check_count(
        grid,
        "grid_size",
        least=alphas.size,
        hint="It counts the alphas that were tried.",
    )
    elbos, weights, errors = map(doubles, (elbo, log_prior, elbo_se))
    check_numbers(elbos, "elbo", hint="A guide that is a point has an ELBO of -inf.")
    if weights.ndim == 1 and not np.exp(weights).sum() <= 1.0 + 1e-6:
        raise ValueError(
            f"the prior weights b_K = exp(log_prior) sum to {np.exp(weights).sum():.6g}, more than 1: pass "
            "logarithms of weights that sum to at most 1."
        )
    check_numbers(
        weights,
        "log_prior",
        "(-inf, 1e-6]",
        hint="It holds logarithms of weights in (0, 1].",
    )
    check_numbers(errors, "elbo_se", "[0, inf)")
    check_number(num_se, "num_se", "[0, inf)")
    scale = num_data * (1.0 - alphas)
    fit = (alphas * log_p0.value - elbos) / scale
    selection, confidence, se = (
        -weights / scale,
        np.log(grid / delta) / scale,
        errors / scale,
    )
    monte_carlo = num_se * se
    assumptions = [
        *log_p0.assumptions,
        "the data are independent, and given the covariates if there are any; num_data counts them",
        "the prior was chosen before the data were seen, and the ELBO is of this prior with every constant",
    ]
    if np.any(weights != 0.0):
        assumptions.append(
            "the weights b_K were fixed before the data were seen, and sum to at most 1"
        )
    assumptions.append(
        f"alpha is one of {grid:g} values that were fixed before the data were seen"
        if grid > 1
        else "alpha was fixed before the data were seen: one that select_alpha chose on them needs grid_size"
    )
    if np.any(errors > 0):
        assumptions.append(
            f"the exact ELBO is at most {num_se:g} standard errors below its Monte Carlo estimate: check that "
            "more draws do not move it by more; the probability that it is not adds to delta"
        )
    return Certificate(
        value=fit + selection + confidence + monte_carlo,
        fit=fit,
        selection=selection,
        confidence=confidence,
        monte_carlo=monte_carlo,
        se=se,
        alpha=float(alphas) if alphas.ndim == 0 else alphas,
        delta=float(delta),
        selected=None,
        source=log_p0.source,
        valid_only_if=log_p0.valid_only_if,
        well_specified_only=log_p0.well_specified_only,
        assumptions=tuple(assumptions),
        theorem="AR, rearranged",
    )


def selection_certificate(
    elbos: ArrayLike,
    log_prior: ArrayLike,
    log_p0: LogTrueDensity,
    num_data: int,
    *,
    alpha: float,
    delta: float = 0.05,
    elbo_se: ArrayLike = 0.0,
    grid_size: int = 1,
    num_se: float = 3.0,
) -> Certificate:
    r"""The certificate of the model that the penalised ELBO selects.

    .. math:: \int D_\alpha(P_\theta, P_0)\,\rho_{\hat K}(d\theta) \le
              \frac{\alpha\log p_0(X) - \max_K(\mathrm{ELBO}_\alpha(K) + \log b_K) + \log(1/\delta)}{n(1-\alpha)}

    It is the tempered certificate of the prior that mixes the models' priors with weights b_K. Without the
    weights, the best of many models' certificates fails far more often than δ.

    Args:
        elbos: The ELBO of each model, ``(K,)``, all with one alpha.
        log_prior: log b_K, ``(K,)``, of weights that sum to at most 1, such as those of
            :func:`numpyro_tempered.dyadic`.
        log_p0: An upper bound on log p0(X); of maximum likelihood the largest over the models.
        num_data: n.
        alpha: α in (0, 1).
        delta: δ, in (0, 1).
        elbo_se: Monte Carlo standard errors of ``elbos``, ``(K,)`` or one for all.
        grid_size: As for :func:`tempered_certificate`.
        num_se: As for :func:`tempered_certificate`.

    Returns:
        A :class:`Certificate` of the selected model, with its position ``selected``.

    Raises:
        TypeError: As :func:`tempered_certificate`.
        ValueError: As there, or if the weights do not fit the ELBOs or sum to more than 1.

    References:
        C19, Theorem 1, with probability 1 - δ in place of its expectation; AR.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> certificate = nt.bounds.selection_certificate(
        ...     [-170.0, -160.0], np.log([0.5, 0.25]), nt.bounds.known_density(-300.0), 200, alpha=0.5
        ... )
        >>> print(f"{certificate.selected} {certificate.value:.4f}")
        1 0.1438
    """
    values, weights = doubles(elbos), doubles(log_prior)
    if values.ndim != 1 or values.size == 0 or weights.shape != values.shape:
        raise ValueError(
            f"elbos and log_prior must have one entry for each model, got {values.shape} and {weights.shape}."
        )
    if np.ndim(alpha) != 0:
        raise ValueError(
            "all models share one alpha: call once for each alpha of a grid, with its grid_size."
        )
    all_models = tempered_certificate(
        values,
        log_p0,
        num_data,
        alpha=alpha,
        delta=delta,
        elbo_se=np.broadcast_to(doubles(elbo_se), values.shape),
        log_prior=weights,
        grid_size=grid_size,
        num_se=num_se,
    )
    best = int(np.argmax(values + weights))
    parts = {
        name: getattr(all_models, name)[best]
        for name in ("value", "fit", "selection", "monte_carlo", "se")
    }
    return all_models._replace(
        **parts, selected=best, theorem="C19, Theorem 1, with probability 1 - delta"
    )
