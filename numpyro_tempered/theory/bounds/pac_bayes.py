r"""PAC-Bayes bounds: certificates of the risk of a posterior under a bounded loss."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    add_repr,
    check_choice,
    check_count,
    check_number,
    check_numbers,
    doubles,
)

ROWS = "the rows are independent and identically distributed, and new data too; num_data counts independent ones"
PRIOR = (
    "the prior was fixed before the data were seen: not empirical Bayes, not scaled or standardised by them, and "
    "no posterior of them"
)
THEOREMS = {
    "kl": "Maurer 2004, Theorem 5, inverted",
    "catoni": "Catoni 2007, at fixed inverse temperatures",
}


@add_repr
class RiskCertificate(NamedTuple):
    r"""An upper bound on the risk :math:`R(Q) = E_{\theta\sim Q} E_{z\sim P_0}\,\ell(\theta, z)` of new data.

    Scalars, or arrays where the arguments were. Q is the Gibbs predictor, which draws a θ for each prediction.

    Attributes:
        value: The bound, in units of the loss: it holds with probability at least 1 - ``delta``. At most
            ``upper``.
        empirical_risk: The average loss of the n data, over Q or over draws of Q.
        empirical_bound: Upper bound on its expectation over Q; ``empirical_risk`` itself if that is exact.
        kl: KL(Q, prior), in nats.
        complexity: What is paid per datum, in nats: (KL + log(2√n/δ) + log(1/b))/n of ``"kl"``, and
            (KL + log(m/δ) + log(1/b))/n of ``"catoni"``.
        inverse_temperature: λ of the bound reported; None of ``"kl"``.
        lower: Lower end of the interval of the loss.
        upper: Upper end.
        delta: Probability of failure, that of the draws included.
        is_vacuous: Whether the bound says no more than that the loss is at most ``upper``.
        estimate: Whether KL is an estimate by draws. Then ``value`` is an estimate too, and certifies nothing.
        assumptions: What must hold, in words, and how to check it.
        theorem: The theorem.
    """

    value: np.ndarray
    empirical_risk: np.ndarray
    empirical_bound: np.ndarray
    kl: np.ndarray
    complexity: np.ndarray
    inverse_temperature: np.ndarray | None
    lower: float
    upper: float
    delta: float
    is_vacuous: np.ndarray
    estimate: bool
    assumptions: tuple[str, ...]
    theorem: str


def pac_bayes(
    empirical_risk: ArrayLike,
    kl: ArrayLike,
    num_data: int,
    *,
    lower: float = 0.0,
    upper: float = 1.0,
    delta: float = 0.05,
    method: str = "kl",
    inverse_temperature: ArrayLike | None = None,
    num_draws: int | None = None,
    delta_draws: float = 0.01,
    grid_size: int = 1,
    log_prior: ArrayLike = 0.0,
    estimate: bool = False,
) -> RiskCertificate:
    r"""An upper bound on the risk of a posterior Q on new data, for a loss in [lower, upper].

    Nothing is assumed of the model, of α or of how Q was fitted: with probability at least 1 - δ, for all Q at
    once, and for losses in [0, 1] (others are scaled to it),

    .. math:: \mathrm{kl}(r_n(Q)\,\|\,R(Q)) \le \frac{\mathrm{KL}(Q, \pi) + \log(2\sqrt n/\delta)}{n},
        \qquad
        R(Q) \le \frac{1 - \exp\big(-\frac\lambda n r_n(Q) - \frac{\mathrm{KL}(Q, \pi) + \log(m/\delta)}{n}\big)}
        {1 - e^{-\lambda/n}}

    The first is solved for R(Q), by bisection from above; it is the tighter one unless λ was well guessed. The
    second is for each of m values of λ that were fixed before the data, and its smallest is reported. The Q that
    minimises it at one λ is :math:`\propto e^{-\lambda r_n}\pi`: the tempered posterior with λ = αn, if the loss
    is the negative log-likelihood.

    Args:
        empirical_risk: r_n(Q), the loss averaged over the n data and over Q. Arrays broadcast.
        kl: KL(Q, prior) in nats, exact or an upper bound.
        num_data: n, the number of independent rows.
        lower: Lower end of an interval that holds every loss that can occur.
        upper: Its upper end.
        delta: δ, in (0, 1).
        method: ``"kl"`` or ``"catoni"``.
        inverse_temperature: Of ``"catoni"``, λ > 0 or a grid of them ``(m,)``, fixed before the data were seen.
        num_draws: If ``empirical_risk`` is an average over so many independent draws of Q. Its expectation over Q
            is then bounded by kl(average, expectation) <= log(2/δ')/``num_draws``.
        delta_draws: δ', the probability that the draws fail; it adds to ``delta``.
        grid_size: Number of posteriors, such as those of a grid of alphas, from which the data chose. ``"kl"``
            holds for all at once, and only the draws are charged, with δ'/``grid_size``. ``"catoni"`` is charged
            the logarithm too, as λ = αn goes along with α.
        log_prior: log b, if the data chose among priors: the logarithm of the weight of this one, fixed before
            the data, with a sum of at most 1 over all of them.
        estimate: Whether ``kl`` is an estimate, such as an average over draws.

    Returns:
        A :class:`RiskCertificate`.

    Raises:
        ValueError: If an argument is out of range, a risk outside of [lower, upper], or λ missing or superfluous.

    References:
        Maurer, *A note on the PAC Bayesian theorem*, 2004, Theorem 5; Catoni, *PAC-Bayesian supervised
        classification*, 2007; Langford, Caruana, *(Not) bounding the true error*, NIPS 2001, Theorem 2.5, for the
        draws; Alquier, *User-friendly introduction to PAC-Bayes bounds*, 2024.

    Example:
        >>> import numpyro_tempered as nt
        >>> certificate = nt.bounds.pac_bayes(0.05, kl=12.0, num_data=569)
        >>> print(f"at most {certificate.value:.3f} of new rows are misclassified")
        at most 0.126 of new rows are misclassified
    """
    start, width = _check_interval(lower, upper)
    temperatures = _check_temperatures(method, inverse_temperature)
    _check_draws(num_draws, delta_draws, grid_size)
    check_count(num_data, "num_data")
    check_number(delta, "delta", "(0, 1)", hint="It is a probability of failure.")
    risk = doubles(
        check_numbers(empirical_risk, "empirical_risk", f"[{lower}, {upper}]")
    )
    hint = "That of a point is infinite: fit a guide with a scale."
    kls = doubles(check_numbers(kl, "kl", "[0, inf)", hint=hint))
    hint = "It is the logarithm of a weight."
    weights = doubles(check_numbers(log_prior, "log_prior", "(-inf, 0]", hint=hint))
    share = np.clip((risk - start) / width, 0.0, 1.0)
    assumptions = [
        ROWS,
        PRIOR,
        f"every loss that can occur lies in [{lower:g}, {upper:g}], of new data too",
    ]
    total = delta
    expected = share
    if num_draws is not None:
        expected = invert_kl(share, math.log(2.0 * grid_size / delta_draws) / num_draws)
        total += delta_draws
        check_number(
            total,
            "delta + delta_draws",
            "(0, 1)",
            hint="It is the probability that either fails.",
        )
        assumptions.append(
            f"the {num_draws} draws are independent, of this Q, and were looked at once: no key was chosen"
        )
    if grid_size > 1:
        assumptions.append(
            f"the data chose among {grid_size} posteriors of this one prior, and no more"
        )
    if np.any(weights < 0.0):
        assumptions.append(
            "the weights of the priors were fixed before the data, and sum to at most 1"
        )
    if estimate:
        assumptions.append(
            "KL is an average over draws: this is an estimate, and certifies nothing"
        )
    best: np.ndarray | None = None
    if temperatures is None:
        complexity = (
            kls - weights + math.log(2.0 * math.sqrt(num_data) / delta)
        ) / num_data
        bound = invert_kl(expected, complexity)
    else:
        number = max(temperatures.size, grid_size)
        assumptions.append(
            f"the inverse temperature is one of {number} values that were fixed before the data were seen"
        )
        complexity = (kls - weights + math.log(number / delta)) / num_data
        rates = temperatures / num_data
        exponents = (
            rates * np.asarray(expected)[..., None] + np.asarray(complexity)[..., None]
        )
        bounds = np.expm1(-exponents) / np.expm1(-rates)
        bound, best = bounds.min(axis=-1), temperatures[bounds.argmin(axis=-1)]
    value = np.minimum(start + width * bound, upper)
    return RiskCertificate(
        value=value,
        empirical_risk=risk,
        empirical_bound=risk if num_draws is None else start + width * expected,
        kl=kls,
        complexity=complexity,
        inverse_temperature=best,
        lower=start,
        upper=float(upper),
        delta=float(total),
        is_vacuous=np.asarray(value >= upper),
        estimate=bool(estimate),
        assumptions=tuple(assumptions),
        theorem=THEOREMS[method],
    )


def invert_kl(share: ArrayLike, budget: ArrayLike) -> np.ndarray:
    r"""The largest q in [p, 1] with kl(p, q) <= c, from above: the binary relative entropy, inverted.

    Args:
        share: p, in [0, 1].
        budget: c >= 0, in nats.

    Returns:
        q, rounded up by at most :math:`10^{-15}`.
    """
    p, c = np.broadcast_arrays(doubles(share), doubles(budget))
    low, high = p.copy(), np.ones_like(p)
    # By Pinsker's inequality the answer is no further; a bracket that is short where c is.
    high = np.minimum(high, p + np.sqrt(c / 2.0) + 1e-15)
    for _ in range(64):
        middle = 0.5 * (low + high)
        inside = _binary_kl(p, middle) <= c
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return high


def _binary_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """kl(p, q) of two coins, with 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = np.where(p > 0.0, p * np.log(p / q), 0.0)
        tails = np.where(p < 1.0, (1.0 - p) * (np.log1p(-p) - np.log1p(-q)), 0.0)
    return heads + tails


def _check_interval(lower: float, upper: float) -> tuple[float, float]:
    """The lower end and the width of the interval of the loss.

    Raises:
        ValueError: If it is empty or not bounded.
    """
    check_number(lower, "lower")
    check_number(
        upper, "upper", f"({lower}, inf)", hint="The theorem is about bounded losses."
    )
    return float(lower), float(upper) - float(lower)


def _check_draws(num_draws: int | None, delta_draws: float, grid_size: int) -> None:
    """What the draws cost.

    Raises:
        ValueError: If a number is out of range.
    """
    check_count(
        grid_size, "grid_size", hint="It counts the posteriors that were tried."
    )
    if num_draws is not None:
        check_count(num_draws, "num_draws")
        check_number(
            delta_draws, "delta_draws", "(0, 1)", hint="It is a probability of failure."
        )


def _check_temperatures(
    method: str, inverse_temperature: ArrayLike | None
) -> np.ndarray | None:
    """The grid of inverse temperatures, ``(m,)``; None of the method that has none.

    Raises:
        ValueError: If there is one too many or missing, or one is not positive.
    """
    check_choice(method, "method", tuple(THEOREMS))
    if (method == "catoni") != (inverse_temperature is not None):
        raise ValueError(
            'inverse_temperature is the λ of method="catoni", which needs it, such as alpha * num_data with an '
            f'alpha fixed before the data; method="kl" has none. Got method={method!r} and '
            f"inverse_temperature={inverse_temperature!r}."
        )
    if inverse_temperature is None:
        return None
    check_numbers(inverse_temperature, "inverse_temperature", "(0, inf)")
    grid = np.atleast_1d(doubles(inverse_temperature))
    if grid.ndim != 1 or grid.size == 0:
        raise ValueError(
            f"inverse_temperature must be a number or a grid (m,), got shape {grid.shape}."
        )
    return grid
