"""From regret to the risk on new data: online-to-batch conversion."""

import math

import numpy as np

from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.typing import ArrayLike
from numpyro_tempered.theory.bounds.base import CONVEX, Bound, as_rounds, make


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
    excess = np.asarray(regret, np.float64) / rounds
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
        np.asarray(cumulative, np.float64) / rounds,
        stability=deviation,
        assumptions=(
            "the data are independent and identically distributed, and T was chosen before they were seen",
            CONVEX,
            "every loss that the decisions can suffer lies in one interval of length B",
            "no round was rejected",
        ),
        source="Cesa-Bianchi, Conconi and Gentile 2004, Proposition 1",
    )
