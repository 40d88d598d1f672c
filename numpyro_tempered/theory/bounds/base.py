"""What a bound is, and the assumptions that the theorems share."""

from typing import NamedTuple

import numpy as np

from numpyro_tempered.core.checks import check_number, check_numbers, check_positive
from numpyro_tempered.core.typing import ArrayLike

CONVEX = "every loss is convex in θ (hinge, absolute, pinball, logistic, squared are)"
LIPSCHITZ = "L bounds the gradient of every expected loss in (m, C): compute it by lipschitz or lipschitz_squared"
ROUNDS_TAKEN = (
    "every posterior came from the rule with this step size, and T counts the accepted rounds: a rejected one "
    "counts neither for the rule nor for the comparator"
)


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
    divergence = np.array(np.broadcast_to(np.asarray(divergence, np.float64), np.shape(stability)))
    losses = None if comparator is None else np.asarray(comparator, np.float64)
    value = stability + divergence if losses is None else losses + stability + divergence
    return Bound(value, losses, np.asarray(stability), divergence, assumptions, source)


def as_rounds(num_rounds: ArrayLike, **constants: float) -> np.ndarray:
    """Numbers of rounds in double precision; the constants of the theorem are checked with them.

    Raises:
        ValueError: If one is not positive.
    """
    check_positive(**constants)
    rounds = np.asarray(check_numbers(num_rounds, "num_rounds", "(0, inf)"), np.float64)
    if rounds.size == 0:
        raise ValueError(f"num_rounds must be positive numbers, got none: {num_rounds!r}.")
    return rounds


def finite_kl(kl: float) -> float:
    """The divergence of the comparator from the prior, which must be finite."""
    hint = "No bound holds for a comparator that the prior excludes, such as a point under a Gaussian prior."
    return float(check_number(kl, "kl", "[0, inf)", hint=hint))
