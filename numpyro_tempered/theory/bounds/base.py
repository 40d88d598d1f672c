"""What a bound is, what the theorems share, and the step from regret to risk on new data."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core import (
    ArrayLike,
    add_repr,
    check_number,
    check_numbers,
    check_positive,
    doubles,
)

CONVEX = "every loss is convex in θ (hinge, absolute, pinball, logistic, squared are)"
LIPSCHITZ = "L bounds the gradient of every expected loss in (m, C): compute it by lipschitz or lipschitz_squared"
ROUNDS_TAKEN = (
    "every posterior came from the rule with this step size, and T counts the accepted rounds: a rejected one "
    "counts neither for the rule nor for the comparator"
)


@add_repr
class Bound(NamedTuple):
    """The right side of a theorem, and its terms; scalars, or one number for each round.

    Attributes:
        value: Upper bound on the cumulative loss, or on the regret where ``comparator`` is None; the sum of the
            other terms.
        comparator: Cumulative (expected) loss of the comparator, or None.
        stability: What the moves of the rule may cost, which grows with the step size.
        divergence: What the distance of the comparator costs, which falls with the step size.
        assumptions: What must hold, in words, and how to check it.
        source: The theorem.
    """

    value: np.ndarray
    comparator: np.ndarray | None
    stability: np.ndarray
    divergence: np.ndarray
    assumptions: tuple[str, ...]
    source: str

    @property
    def regret(self) -> np.ndarray:
        """Upper bound on the cumulative loss minus the comparator's."""
        return self.stability + self.divergence


def make(
    comparator: ArrayLike | None,
    stability: np.ndarray,
    assumptions: tuple[str, ...],
    source: str,
    divergence: ArrayLike = 0.0,
) -> Bound:
    """The bound with its value, the sum of the terms."""
    # By numpy alone: a bound of 10^7 rounds needs more digits than jax keeps by default.
    divergence = np.array(np.broadcast_to(doubles(divergence), np.shape(stability)))
    losses = None if comparator is None else doubles(comparator)
    value = (
        stability + divergence if losses is None else losses + stability + divergence
    )
    return Bound(value, losses, np.asarray(stability), divergence, assumptions, source)


def as_rounds(num_rounds: ArrayLike, **constants: float) -> np.ndarray:
    """Numbers of rounds in double precision; the constants of the theorem are checked with them.

    Raises:
        ValueError: If one is not positive.
    """
    check_positive(**constants)
    rounds = doubles(check_numbers(num_rounds, "num_rounds", "(0, inf)"))
    if rounds.size == 0:
        raise ValueError(
            f"num_rounds must be positive numbers, got none: {num_rounds!r}."
        )
    return rounds


def finite_kl(kl: float) -> float:
    """The divergence of the comparator from the prior, which must be finite."""
    hint = "No bound holds for a comparator that the prior excludes, such as a point under a Gaussian prior."
    return float(check_number(kl, "kl", "[0, inf)", hint=hint))


def online_to_batch(num_rounds: ArrayLike, regret: ArrayLike) -> Bound:
    r"""Excess risk of the average decision, :math:`E R(\bar\theta_T) - \inf_\theta R(\theta)`: regret / T.

    The infimum is over the θ that the regret bound compares with; the expectation is over the T data.

    Args:
        num_rounds: T, a number or an array of them.
        regret: A bound on the regret, valid for every stream: ``Bound.regret`` of :func:`svb`, for instance.
            For :func:`sva` the comparator's risk is its expected one.

    Returns:
        A :class:`Bound` on the excess risk. The average is :func:`numpyro_tempered.online.average`.

    Raises:
        ValueError: If ``num_rounds`` is not positive.

    References:
        CA19, section 3; N. Cesa-Bianchi, A. Conconi, C. Gentile, *On the generalization ability of on-line
        learning algorithms*, IEEE TIT 2004.

    Example:
        >>> import numpyro_tempered as nt
        >>> float(nt.bounds.online_to_batch(200, nt.bounds.svb(200, lipschitz=2.0, diameter=3.0).regret).value)
        0.6
    """
    rounds = as_rounds(num_rounds)
    excess = doubles(regret) / rounds
    return make(
        None,
        stability=excess,
        assumptions=(
            "the data are independent and identically distributed, and new data too: shuffle a fixed data set, "
            "and pass over it once",
            CONVEX,
            "the regret bound held with constants fixed before the data were seen",
        ),
        source="CA19, section 3",
    )


def online_to_batch_risk(
    num_rounds: ArrayLike, cumulative: ArrayLike, *, loss_range: float, delta: float
) -> Bound:
    r"""Risk of the average of the decisions: :math:`T^{-1}\sum_t\ell_t(\theta_t) + B\sqrt{\log(1/\delta)/(2T)}`.

    With probability at least 1 - δ over the data, for one T chosen beforehand.

    Args:
        num_rounds: T, the rounds taken.
        cumulative: The cumulative loss of the run at the means.
        loss_range: B, the length of an interval that holds every loss that the decisions can suffer.
        delta: δ, in (0, 1).

    Returns:
        A :class:`Bound` on the risk R(θ̄), whose ``comparator`` is the average loss of the run.

    Raises:
        ValueError: If a constant is not positive and finite, or ``delta`` not below 1.

    References:
        Cesa-Bianchi, Conconi, Gentile 2004, Proposition 1, with the constant of the Hoeffding-Azuma inequality
        for differences in an interval of length B.

    Example:
        >>> import numpyro_tempered as nt
        >>> bound = nt.bounds.online_to_batch_risk(1000, 300.0, loss_range=1.0, delta=0.05)
        >>> print(f"{float(bound.value):.3f}")
        0.339
    """
    rounds = as_rounds(num_rounds, loss_range=loss_range)
    check_number(delta, "delta", "(0, 1)", hint="It is a probability of failure.")
    deviation = loss_range * np.sqrt(math.log(1.0 / delta) / (2.0 * rounds))
    return make(
        doubles(cumulative) / rounds,
        stability=deviation,
        assumptions=(
            "the data are independent and identically distributed, and T was chosen before they were seen",
            CONVEX,
            "every loss that the decisions can suffer lies in one interval of length B",
            "no round was rejected",
        ),
        source="Cesa-Bianchi, Conconi and Gentile 2004, Proposition 1",
    )
