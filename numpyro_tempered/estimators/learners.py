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
from numpyro_tempered.estimators.scales import Scales, move
from numpyro_tempered.gaussian import families
from numpyro_tempered.gaussian.expectations import gauss_hermite, squared
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, family_of, square_root
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
        moves: Whether scales are fixed and the posterior follows them, not those of the last row; for the default
            rule, whose posterior is its evidence and a prior.
    """

    rule: Rule
    is_full: bool
    scale: float
    moves: bool

    def start(self, size: int) -> OnlineState:
        """The state before any datum, of an intercept and ``size - 1`` coefficients, on the host."""
        scale = self._prior(size)
        return self._at(np.zeros(size), np.diag(scale) if self.is_full else scale)

    def move(self, state: OnlineState, old: Scales, new: Scales) -> tuple[Gaussian, PyTree, float]:
        """Posterior and memory of the rule on new scales, and the gain of energy."""
        q = jax.tree.map(jnp.asarray, state.posterior)
        root = np.asarray(square_root(q) if self.is_full else family_of(q).marginal_scale(q))
        on_new = move(np.asarray(q.loc), root, self._prior(len(q.loc)), old, new)
        after = self._at(on_new.loc, on_new.root)
        return after.posterior, after.memory.memory, on_new.energy

    def _prior(self, size: int) -> np.ndarray:
        scale = np.full(size, self.scale)
        scale[0] *= INTERCEPT
        return scale

    def _at(self, loc: np.ndarray, root: np.ndarray) -> OnlineState:
        family = families.FullRank if self.is_full else families.MeanField
        with double_precision():
            return on_host(self.rule.init(family(jnp.asarray(loc), jnp.asarray(root))))

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

    def __init__(
        self, form: Form, expectation: Expectation, states: Sequence[OnlineState], scales: Scales
    ) -> None:
        self.form, self.expectation, self.scales = form, expectation, scales
        # What a regression's noise gains where scales change.
        self.energy = 0.0
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

    def run(self, rows: np.ndarray, outcomes: np.ndarray, *, is_table: bool = False) -> Losses:
        """Learn rows ``(n, d)`` in their order, with outcomes ``(n, L)``; the first learner's losses ``(n,)``.

        With ``is_table`` on the scales of all of them.
        """
        losses, start, num_rows = [], 0, len(rows)
        # A program for each power of two. Where rows end is an argument, so that rounds are those of a service.
        size = 1 << max(num_rows - 1, 1).bit_length()
        if is_table:
            self.fix_scales(rows)
        while start < num_rows:
            stop = num_rows if is_table else start + self._advance(rows[start:])
            losses.append(self._run(rows[start:stop], outcomes[start:stop], size))
            start = stop
        return jax.tree.map(lambda *parts: np.concatenate(parts), *losses)

    def _run(self, rows: np.ndarray, outcomes: np.ndarray, size: int) -> Losses:
        states, losses = [], []
        padding = (0, size - len(rows)), (0, 0)
        with double_precision():
            x, number = jnp.asarray(np.pad(rows, padding)), jnp.asarray(len(rows), jnp.int32)
            for state, outcome in zip(self.states, np.pad(outcomes, padding).T, strict=True):
                rounds = Rounds((x, jnp.asarray(outcome)), None, number)
                after, loss = compiled_loop(
                    self.form.rule, self.expectation, jax.tree.map(jnp.asarray, state), rounds, None
                )
                states.append(on_host(after))
                losses.append(jax.tree.map(lambda leaf: np.asarray(leaf)[: len(rows)], loss))
        self.load(states)
        return losses[0]

    def fix_scales(self, rows: np.ndarray) -> None:
        """Begin on the scales of these rows."""
        self.scales = self.scales.add(rows).fix()
        self._move(Scales.start(rows.shape[1]))

    @property
    def can_widen(self) -> bool:
        """Whether a column may come later: not where another rule has the scales of a table."""
        return self.form.moves or int(self.states[0].memory.moments.count) < FIXED

    def widen(self, size: int) -> None:
        """More columns, which have been 0 so far."""
        self.scales = self.scales.widen(size)
        self.load([self.form.widen(state, size) for state in self.states])

    def _advance(self, rows: np.ndarray) -> int:
        """How many of the rows can be learned on the present scales, after a change of them where it is due."""
        before = self.scales
        self.scales, number = before.advance(rows)
        if self.scales.fixed != before.fixed and self.form.moves:
            self._move(before)
        return number if self.form.moves else len(rows)

    def _move(self, before: Scales) -> None:
        states, scales = self.states, self.scales
        with double_precision():
            sums = [CompensatedSum.start(jnp.asarray(v)) for v in (scales.loc, FIXED * np.square(scales.scale))]
            moments = on_host(Moments(jnp.asarray(FIXED, states[0].count.dtype), *sums))
            after = []
            for number, state in enumerate(states):
                memory = state.memory._replace(moments=moments)
                if before.count:
                    posterior, inner, energy = self.form.move(state, before, scales)
                    state, memory = state._replace(posterior=posterior), memory._replace(memory=inner)
                    self.energy += energy if number == 0 else 0.0
                after.append(state._replace(memory=memory))
        self.load(after)

    def learn(self, row: np.ndarray, outcomes: Sequence[float]) -> list[Losses]:
        """Learn one row ``(d,)``, with an outcome for each learner."""
        if np.isfinite(row).all():
            self._advance(row[None])
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
