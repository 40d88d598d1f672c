"""Sources of rows: what the drivers ask of them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from numpyro_tempered.core import Array, Ascent
from numpyro_tempered.mixtures.ascent import (
    Algorithm,
    Limits,
    PassState,
    Summary,
    pass_sums,
    read_all,
)
from numpyro_tempered.mixtures.factors import Factors
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.starts import Start

T = TypeVar("T")
P = TypeVar("P")
# Splits of the components of a smaller mixture that a larger one starts from.
NUM_SPLITS = 4


class Splits(NamedTuple):
    """Factors with fewer components, which ``NUM_SPLITS`` starts split.

    Attributes:
        parent: The factors, filled up.
        num_components: Their number; 0 where there are no such factors.
    """

    parent: Factors
    num_components: Any


class Starts(NamedTuple):
    """Which starts an ascent has.

    Attributes:
        num_components: K.
        start: First responsibilities.
        num_restarts: How many of them.
        splits: A smaller mixture whose splits follow; or None.
        warm: Factors of other fits, in the place of the first restarts.
        padded: Those of fits with fewer components, filled up by empty ones: starts behind all others.
    """

    num_components: int
    start: Start
    num_restarts: int
    splits: Splits | None = None
    warm: Sequence[Any] = ()
    padded: Sequence[Any] = ()

    @property
    def num_starts(self) -> int:
        """Restarts and splits."""
        return self.num_restarts + (
            NUM_SPLITS if self.splits is not None and self.splits.num_components else 0
        )

    def with_given(self, states: T) -> T:
        """States with leading axis R, those of other fits first, and padded ones at the end."""
        size = len(self.warm)

        def joined(leaf: np.ndarray, *others: Array) -> np.ndarray:
            rows = [np.asarray(each)[None] for each in others]
            return np.concatenate([*rows[:size], leaf[size:], *rows[size:]])

        return (
            jax.tree.map(joined, states, *self.warm, *self.padded)
            if self.warm or self.padded
            else states
        )


class Setting(NamedTuple):
    """What all starts of a fit share.

    Attributes:
        problem: Without what it needs of all rows.
        start: The arrays of the start.
        active: Which components there are, ``(K,)``.
        splits: A smaller mixture whose splits some starts are; or None.
    """

    problem: Any
    start: Any
    active: Array | np.ndarray
    splits: Splits | None


class NextSteps(NamedTuple):
    """What follows the first states of a fit: an ascent, and a summary in double precision.

    Attributes:
        limits: When it ends.
        summary: The summary.
        arguments: Its arguments, of the right shapes.
    """

    limits: Limits
    summary: Summary
    arguments: tuple[Any, ...]


@lru_cache
def pass_of(algorithm: Algorithm) -> Summary:
    """The sums of a pass of an algorithm, of ``problem, states``; one object for each, by which JAX finds it."""
    return Summary(
        read=lambda component, problem, states: (
            problem,
            read_all(algorithm, component, problem, states),
        ),
        sums=lambda component, blocks, read: pass_sums(
            algorithm, component, read[0], blocks, read[1]
        ),
        finish=lambda component, sums, read, problem, states: sums,
    )


class Source(Protocol):
    """Rows as the drivers use them: an array on one or several devices, or chunks."""

    @property
    def data(self) -> MixtureData:
        """Component, prior and centre, and the rows that starts see."""

    @property
    def is_large(self) -> bool:
        """Whether a pass takes longer than what is compiled for it may cost."""

    def capacity(self, num_components: int) -> int:
        """Components of the arrays of a mixture of K: those beyond K fill up."""

    def reduce(self, summary: Summary, *arguments: Any) -> Any:
        """What a summary makes of all rows, compiled."""

    def begin(
        self,
        rng_key: Array,
        algorithm: Algorithm,
        problem: P,
        starts: Starts,
        next_steps: Callable[[P, Any], NextSteps] | None = None,
    ) -> tuple[P, Any]:
        """The problem with what it needs of all rows, and the states of all starts, with leading axis R."""

    def ascend(
        self, algorithm: Algorithm, problem: Any, states: T, limits: Limits
    ) -> Ascent[PassState[T]]:
        """All starts to their ends, from states with leading axis R; arrays of the host."""
