"""What a bound is, and the assumptions that the theorems share."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_tempered.core.typing import ArrayLike

CONVEX = "every loss is convex in θ (hinge, absolute, pinball, logistic, squared are)"
LIPSCHITZ = "L bounds the gradient of every expected loss in (m, C): compute it by lipschitz or lipschitz_squared"
ROUNDS_TAKEN = (
    "every posterior came from the rule with this step size, and T counts the rounds taken: a rejected one "
    "counts for nobody"
)


class Bound(NamedTuple):
    """The right side of a theorem, and its terms; scalars, or one number a round.

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
    divergence: np.ndarray,
    assumptions: tuple[str, ...],
    source: str,
) -> Bound:
    """The bound with its value, the sum of the terms."""
    # By numpy alone: a bound of 10^7 rounds needs more digits than jax keeps by default.
    own = None if comparator is None else np.asarray(comparator, np.float64)
    value = stability + divergence if own is None else own + stability + divergence
    return Bound(value, own, np.asarray(stability), np.asarray(divergence), assumptions, source)


def as_rounds(num_rounds: ArrayLike) -> np.ndarray:
    """Numbers of rounds in double precision.

    Raises:
        ValueError: If one is not positive.
    """
    rounds = np.asarray(num_rounds, np.float64)
    if rounds.size == 0 or not np.all(np.isfinite(rounds) & (rounds > 0)):
        raise ValueError(f"num_rounds must be positive, got {num_rounds!r}.")
    return rounds


def check_constants(**constants: float) -> None:
    """Raise ValueError unless every constant is positive and finite."""
    for name, value in constants.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the theorem needs {name} positive and finite, got {value!r}.")


def finite_kl(kl: float) -> float:
    """The divergence, which must be finite."""
    if not (math.isfinite(kl) and kl >= 0):
        raise ValueError(
            f"the theorem needs a comparator with finite KL from the prior, got {kl!r}: a point has none under a "
            "Gaussian prior."
        )
    return float(kl)
