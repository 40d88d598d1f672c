"""What the online estimators run: states of one rule, learned in batches or one datum at a time."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import CompensatedSum, double_precision
from numpyro_tempered.core.programs import one_for_equal
from numpyro_tempered.core.typing import Array, Numbers, PyTree
from numpyro_tempered.estimators.base import on_host
from numpyro_tempered.gaussian import families
from numpyro_tempered.gaussian.expectations import gauss_hermite, squared
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.online.base import Losses, OnlineState, Rule
from numpyro_tempered.online.predictions import Prediction, class_probabilities, predict
from numpyro_tempered.online.service import Service
from numpyro_tempered.online.stream import Rounds, compiled_loop
from numpyro_tempered.online.streams.standardise import Moments, location_and_scale, standardise

# The most columns with a full covariance by default.
MAX_FULL = 200
# The prior of an intercept is as much wider than that of coefficients: classes may be rare.
INTERCEPT = 5.0
# Rows that the statistics of a table stand for, so that no row moves them.
FIXED = 10**9
# Rows that are predicted at once, a bound on the memory.
BLOCK = 4096

# One object each, by which all estimators share their programs.
LOGISTIC = gauss_hermite(lambda u, y: jax.nn.softplus(-y * u))
GAUSSIAN = squared(1.0)
standardised = one_for_equal(partial(standardise, intercept=0))


class Form(NamedTuple):
    """The form of states.

    Attributes:
        rule: A rule that standardises, with the intercept first.
        is_full: Whether the covariance is full.
        scale: The prior standard deviation of a coefficient.
    """

    rule: Rule
    is_full: bool
    scale: float

    def start(self, size: int) -> OnlineState:
        """The state before any datum, of an intercept and ``size - 1`` coefficients, on the host."""
        scale = np.full(size, self.scale)
        scale[0] *= INTERCEPT
        with double_precision():
            loc, spread = jnp.zeros(size), jnp.asarray(scale)
            prior = families.FullRank(loc, jnp.diag(spread)) if self.is_full else families.MeanField(loc, spread)
            return on_host(self.rule.init(prior))

    def widen(self, state: OnlineState, size: int) -> OnlineState:
        """The state with more coefficients, as if their columns had been 0 so far."""
        if len(state.posterior.loc) == size:
            return state

        def place(leaf: np.ndarray, old: np.ndarray) -> np.ndarray:
            leaf = np.array(leaf)
            leaf[tuple(slice(length) for length in old.shape)] = old
            return leaf

        return jax.tree.map(place, self.start(size), state)

    def narrow(self, state: OnlineState, size: int) -> OnlineState:
        """The state with the first coefficients alone."""
        if len(state.posterior.loc) == size:
            return state
        return jax.tree.map(lambda like, leaf: leaf[tuple(map(slice, like.shape))], self.start(size), state)


class Learners:
    """States of one rule and loss that see the same rows, with an outcome each; on the device while served.

    Pickled and copied as NumPy arrays, without the rule, which estimators make anew.
    """

    def __init__(self, form: Form, expectation: Expectation, states: Sequence[OnlineState]) -> None:
        self.form, self.expectation = form, expectation
        self._states: list[OnlineState] | None = list(states)
        self._services: list[Service] = []

    @property
    def states(self) -> list[OnlineState]:
        """Copies on the host."""
        if self._states is None:
            with double_precision():
                return [on_host(service.state) for service in self._services]
        return list(self._states)

    def load(self, states: Sequence[OnlineState]) -> None:
        """Go on from these states, also more of them or of another size."""
        self._states, self._services = list(states), []

    def run(self, rows: np.ndarray, outcomes: np.ndarray) -> list[Losses]:
        """Learn rows ``(n, d)`` in their order, with outcomes ``(n, L)``; losses ``(n,)`` of each learner."""
        states, losses, num_rows = [], [], len(rows)
        # A program for each power of two. Where rows end is an argument, so that rounds are those of a service.
        missing = (1 << max(num_rows - 1, 1).bit_length()) - num_rows
        rows, outcomes = (np.pad(a, ((0, missing), (0, 0))) for a in (rows, outcomes))
        with double_precision():
            for state, outcome in zip(self.states, outcomes.T, strict=True):
                data = jnp.asarray(rows), jnp.asarray(outcome)
                rounds = Rounds(data, None, jnp.asarray(num_rows, jnp.int32))
                after, loss = compiled_loop(
                    self.form.rule, self.expectation, jax.tree.map(jnp.asarray, state), rounds, None
                )
                states.append(on_host(after))
                losses.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], loss))
        self.load(states)
        return losses

    def fix_scales(self, rows: np.ndarray) -> None:
        """Standardise by the statistics of these rows from now on."""
        mean = rows.mean(axis=0)
        variance = np.mean(np.square(rows - mean), axis=0)
        # Rounding leaves a constant column a spread.
        is_constant = np.sqrt(variance) <= 16.0 * np.finfo(np.float64).eps * np.abs(mean)
        values = mean, FIXED * np.where(is_constant, 1.0, variance)
        states = self.states
        with double_precision():
            sums = [CompensatedSum.start(jnp.asarray(value)) for value in values]
            moments = on_host(Moments(jnp.asarray(FIXED, states[0].count.dtype), *sums))
        self.load([state._replace(memory=state.memory._replace(moments=moments)) for state in states])

    def learn(self, row: np.ndarray, outcomes: Sequence[float]) -> list[Losses]:
        """Learn one row ``(d,)``, with an outcome for each learner."""
        with double_precision():
            return [
                service.learn(row, outcome) for service, outcome in zip(self._serve(row), outcomes, strict=True)
            ]

    def predict_one(self, row: np.ndarray) -> list[Prediction]:
        """Mean and variance of the predictor, of each learner."""
        with double_precision():
            return [service.predict(row) for service in self._serve(row)]

    def probability_one(self, row: np.ndarray, which: slice) -> list[float]:
        """The probability of +1 by some of the learners."""
        with double_precision():
            return [service.class_probabilities(row).item(1) for service in self._serve(row)[which]]

    def predict(self, rows: np.ndarray) -> list[np.ndarray]:
        """Mean and variance of the predictors of rows, ``(n, 2)`` for each learner."""
        return self._in_blocks(_predict, rows)

    def probabilities(self, rows: np.ndarray) -> list[np.ndarray]:
        """Probabilities of -1 and +1 of rows, ``(n, 2)`` for each learner."""
        return self._in_blocks(_probabilities, rows)

    def coefficients(self) -> np.ndarray:
        """Means of intercept and coefficients ``(L, d)`` in the units of the data, by the statistics so far."""
        with double_precision():
            return np.stack([np.asarray(_original(state)) for state in self.states])

    def _in_blocks(self, answer: PyTree, rows: np.ndarray) -> list[np.ndarray]:
        size = min(BLOCK, 1 << max(len(rows) - 1, 0).bit_length())
        padded = np.pad(rows, ((0, -len(rows) % size), (0, 0)))
        with double_precision():
            blocks = [jnp.asarray(block) for block in np.split(padded, len(padded) // size)]
            answers = []
            for state in self.states:
                state = jax.tree.map(jnp.asarray, state)
                parts = [np.asarray(answer(self.expectation, state, block)) for block in blocks]
                answers.append(np.concatenate(parts)[: len(rows)])
        return answers

    def _serve(self, row: np.ndarray) -> list[Service]:
        if self._states is not None:
            rule, expectation = self.form.rule, self.expectation
            self._services = [
                Service(rule, expectation, jax.tree.map(jnp.asarray, state), row, 1.0) for state in self._states
            ]
            self._states = None
        return self._services


@partial(jax.jit, static_argnums=0)
def _predict(expectation: Expectation, state: OnlineState, rows: Array) -> Array:
    return jnp.stack(predict(expectation, state, rows), axis=1)


@partial(jax.jit, static_argnums=0)
def _probabilities(expectation: Expectation, state: OnlineState, rows: Array) -> Array:
    return class_probabilities(expectation, state, rows)


def _original(state: OnlineState) -> Numbers:
    # The mean of original_scale, whose covariance is not needed.
    shift, scale = map(np.asarray, location_and_scale(jax.tree.map(jnp.asarray, state.memory)))
    slopes = state.posterior.loc / scale
    slopes[0] -= np.sum(slopes[1:] * shift[1:])
    return slopes
