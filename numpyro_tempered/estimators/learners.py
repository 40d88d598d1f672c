"""What the online estimators run: states of one rule, learned in batches or one datum at a time."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, PyTree, double_precision, matmul, warn_caller
from numpyro_tempered.estimators.base import on_host
from numpyro_tempered.estimators.scales import FAR, LARGEST, LOST, WARM, Scales, move
from numpyro_tempered.gaussian import families
from numpyro_tempered.gaussian.expectations import logistic, squared
from numpyro_tempered.gaussian.expectations.base import (
    Data,
    Expectation,
    Moments,
    Options,
    PredictorLoss,
    Predictors,
    as_rows,
    of_predictors,
)
from numpyro_tempered.gaussian.families.base import family_of, square_root
from numpyro_tempered.online.base import Losses, OnlineState, Rule
from numpyro_tempered.online.predictions import Prediction, class_probabilities, predict
from numpyro_tempered.online.service import Service
from numpyro_tempered.online.stream import Rounds, compiled_loop
from numpyro_tempered.online.streams.findings import StreamWarning
from numpyro_tempered.online.streams.standardise import location_and_scale, standardise

# The most columns with a full covariance by default.
MAX_FULL = 200
# The prior of an intercept is as much wider than that of coefficients: classes may be rare.
INTERCEPT = 5.0
# Rows that are predicted at once, a bound on the memory.
BLOCK = 4096

# One object each, by which all estimators share their programs.
LOGISTIC = logistic()
# Of weight 1/2 that of Gaussian noise, without its constant, beside which small residuals have no digits.
GAUSSIAN = squared()
running = partial(standardise, intercept=0)


def weighted(expectation: Expectation) -> Expectation:
    """Return the expectation on data ``(x, weight, y)``: the weight of a row is a power on its likelihood."""
    of_u: PredictorLoss = expectation.of_predictor  # type: ignore[assignment]

    def at(theta: Array, data: Data, options: Options) -> Predictors:
        x, y = as_rows(theta, data[0], data[2])
        weight = jnp.reshape(data[1], y.shape).astype(x.dtype)

        def moments(mean: Array, variance: Array) -> Moments:
            of_row = of_u.moments(mean, variance, y, options)
            first, second, tempered = (
                weight * each
                for each in (of_row.first, of_row.second, of_row.objective)
            )
            return Moments(of_row.at_mean, of_row.expected, first, second, tempered)

        return Predictors(matmul(x, theta), x, moments, lambda u: of_u.loss(u, y))

    return of_predictors(at, quadratic=expectation.quadratic)


class Form(NamedTuple):
    """The form of states.

    Attributes:
        rule: A rule; the intercept is the first column.
        is_full: Whether the covariance is full.
        scale: The prior standard deviation of a coefficient.
        moves: Whether scales are fixed anew and the posterior follows them; for the default rule, whose posterior
            is its evidence and a prior.
        runs: Whether the rule itself standardises, by the rows so far.
    """

    rule: Rule
    is_full: bool
    scale: float
    moves: bool
    runs: bool

    def start(self, size: int) -> OnlineState:
        """Return the state before any datum, of an intercept and ``size - 1`` coefficients, on the host."""
        scale = self.prior(size)
        return self.at(np.zeros(size), np.diag(scale) if self.is_full else scale)

    def prior(self, size: int) -> np.ndarray:
        """Return the prior standard deviations."""
        scale = np.full(size, self.scale)
        scale[0] *= INTERCEPT
        return scale

    def at(self, loc: np.ndarray, root: np.ndarray) -> OnlineState:
        """Return a state at this Gaussian, on the host."""
        family = families.FullRank if self.is_full else families.MeanField
        with double_precision():
            return on_host(self.rule.init(family(jnp.asarray(loc), jnp.asarray(root))))

    def root_of(self, state: OnlineState) -> np.ndarray:
        """Return the root of the covariance ``(d, d)``, lower triangular, or standard deviations ``(d,)``."""
        with double_precision():
            q = jax.tree.map(jnp.asarray, state.posterior)
            root = np.asarray(
                square_root(q) if self.is_full else family_of(q).marginal_scale(q)
            )
        if not self.is_full:
            return root
        # That of a rule's state is not triangular.
        upper = np.linalg.qr(root.T, mode="r")
        return np.transpose(upper * np.where(np.diag(upper) < 0.0, -1.0, 1.0)[:, None])

    def widen(self, state: OnlineState, size: int) -> OnlineState:
        """Return the state with more coefficients, as if their columns had been 0 so far."""
        if len(state.posterior.loc) == size:
            return state

        def place(leaf: np.ndarray, old: np.ndarray) -> np.ndarray:
            leaf = np.array(leaf)
            leaf[tuple(slice(length) for length in old.shape)] = old
            return leaf

        return jax.tree.map(place, self.start(size), state)

    def narrow(self, state: OnlineState, size: int) -> OnlineState:
        """Return the state with the first coefficients alone."""
        if len(state.posterior.loc) == size:
            return state
        return jax.tree.map(
            lambda like, leaf: leaf[tuple(map(slice, like.shape))],
            self.start(size),
            state,
        )


class Learners:
    """States of one rule and loss that see the same rows, with an outcome each; on the device while served.

    Pickled and copied as NumPy arrays, without the rule, which estimators make anew.
    """

    def __init__(
        self,
        form: Form,
        expectation: Expectation,
        states: Sequence[OnlineState],
        scales: Scales,
    ) -> None:
        self.form, self.expectation, self.scales = form, expectation, scales
        # What a regression's noise gains where scales change.
        self.energy = 0.0
        # Whether the next row is the first that counts; a far one would be all that is known.
        self.is_blank = False
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

    def run(
        self,
        rows: np.ndarray,
        weight: np.ndarray,
        outcomes: np.ndarray,
        *,
        is_table: bool,
    ) -> Losses:
        """Learn rows ``(n, d)`` in their order, with outcomes ``(n, L)``; return the first learner's losses.

        With ``is_table`` on the scales of all of them.
        """
        losses, start, num_rows = [], 0, len(rows)
        # A program for each power of two. Where rows end is an argument, so that rounds are those of a service.
        size = 1 << max(num_rows - 1, 1).bit_length()
        if is_table and not self.form.runs:
            self.scales = Scales.of_table(rows, weight)
            if not self.expectation.quadratic:
                # Far rows come last: to a posterior that knows nothing they are all there is.
                order = np.argsort(
                    np.any(np.abs(self.scales.of_rows(rows)) > LOST, axis=1),
                    kind="stable",
                )
                rows, weight, outcomes = rows[order], weight[order], outcomes[order]
        while start < num_rows:
            stop = num_rows if is_table else start + self._advance(rows[start:])
            some = slice(start, stop)
            if self.is_blank:
                rows, weight, self.is_blank = rows.copy(), weight.copy(), False
                rows[start], weight[start] = self._forget(rows[start], weight[start])
            losses.append(self._run(rows[some], weight[some], outcomes[some], size))
            start = stop
        return jax.tree.map(lambda *parts: np.concatenate(parts), *losses)

    def _run(
        self, rows: np.ndarray, weight: np.ndarray, outcomes: np.ndarray, size: int
    ) -> Losses:
        states, losses = [], []
        missing = size - len(rows)
        with double_precision():
            x, w, number = (
                self._on_scales(rows),
                np.pad(weight, (0, missing)),
                jnp.asarray(len(rows), jnp.int32),
            )
            data = jnp.asarray(np.pad(x, ((0, missing), (0, 0)))), jnp.asarray(w)
            for state, outcome in zip(
                self.states, np.pad(outcomes, ((0, missing), (0, 0))).T, strict=True
            ):
                rounds = Rounds((*data, jnp.asarray(outcome)), None, number)
                after, loss = compiled_loop(
                    self.form.rule,
                    self.expectation,
                    jax.tree.map(jnp.asarray, state),
                    rounds,
                    None,
                )
                states.append(on_host(after))
                losses.append(
                    jax.tree.map(lambda leaf: np.asarray(leaf)[: len(rows)], loss)
                )
        self.load(states)
        return losses[0]

    def _on_scales(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.form.runs else self.scales.of_rows(rows)

    def widen(self, size: int) -> None:
        """Add columns, which have been 0 so far."""
        self.scales = self.scales.widen(size)
        self.load([self.form.widen(state, size) for state in self.states])

    def _advance(self, rows: np.ndarray) -> int:
        """Count how many of the rows can be learned on the present scales, after a change of them that is due."""
        if not self.form.moves:
            return len(rows)
        before = self.scales
        self.scales, number = before.advance(rows)
        if self.scales.fixed == before.fixed or not before.count:
            return number
        is_lost = (
            before.count < WARM <= self.scales.count
            and self.scales.farthest() * FAR > LOST
        )
        if is_lost and not self.expectation.quadratic:
            fresh, self.is_blank = self.form.start(rows.shape[1]), True
            self.load(
                [
                    s._replace(posterior=fresh.posterior, memory=fresh.memory)
                    for s in self.states
                ]
            )
            warn_caller(
                f"a feature of the first {WARM} rows is more than {LOST:g} standard deviations away from the "
                "others: what was learned from these rows is forgotten.",
                StreamWarning,
            )
        else:
            self.move(self.form, before)
        return number

    def _forget(self, row: np.ndarray, weight: float) -> tuple[np.ndarray, float]:
        """Return the row by which the others were forgotten, without weight if it is the far one."""
        near = self.scales.near(row)
        return near, weight if np.array_equal(near, row) else 0.0

    def move(self, form: Form, before: Scales) -> None:
        """Go on in another form or on other scales, with the same evidence."""
        after = []
        for number, state in enumerate(self.states):
            q, root, size = (
                state.posterior,
                self.form.root_of(state),
                len(state.posterior.loc),
            )
            if root.ndim == 2 and not form.is_full:
                # The diagonal of the precision.
                root = (
                    np.sum(np.square(np.linalg.solve(root, np.eye(size))), axis=0)
                    ** -0.5
                )
            on_new = move(
                np.asarray(q.loc),
                root,
                self.form.prior(size),
                form.prior(size),
                before,
                self.scales,
            )
            fresh = form.at(on_new.loc, on_new.root)
            prior = form.start(size).posterior
            after.append(
                state._replace(
                    posterior=fresh.posterior, prior=prior, memory=fresh.memory
                )
            )
            self.energy += on_new.energy if number == 0 else 0.0
        self.form = form
        self.load(after)

    def rescale(self, ratio: float) -> None:
        """Go on with outcomes in another unit, and a noise of one such unit."""
        after = []
        for state in self.states:
            fresh = self.form.at(
                ratio * np.asarray(state.posterior.loc), self.form.root_of(state)
            )
            after.append(state._replace(posterior=fresh.posterior, memory=fresh.memory))
        self.load(after)

    def learn(
        self, row: np.ndarray, weight: float, outcomes: Sequence[float]
    ) -> list[Losses]:
        """Learn one row ``(d,)``, with an outcome for each learner."""
        is_row = bool(np.abs(row).max() <= LARGEST)
        if is_row:
            self._advance(row[None])
        if self.is_blank:
            self.is_blank = False
            row, weight = self._forget(row, weight)
        z = self._on_scales(row if is_row else np.full_like(row, np.nan))
        with double_precision():
            services = self._serve(z)
            return [
                service.learn(z, weight, outcome)
                for service, outcome in zip(services, outcomes, strict=True)
            ]

    def predict_one(self, row: np.ndarray) -> list[Prediction]:
        """Return mean and variance of the predictor, of each learner."""
        z = self._on_scales(row)
        with double_precision():
            return [service.predict(z, 1.0) for service in self._serve(z)]

    def probability_one(self, row: np.ndarray, which: slice) -> list[float]:
        """Return the probability of +1 by some of the learners."""
        z = self._on_scales(row)
        with double_precision():
            return [
                service.class_probabilities(z, 1.0).item(1)
                for service in self._serve(z)[which]
            ]

    def predict(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return mean and variance of the predictors of rows, ``(n, 2)`` for each learner."""
        return self._in_blocks(_predict, rows)

    def probabilities(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return probabilities of -1 and +1 of rows, ``(n, 2)`` for each learner."""
        return self._in_blocks(_probabilities, rows)

    def coefficients(self) -> np.ndarray:
        """Return means of intercept and coefficients ``(L, d)`` in the units of the data."""
        coefficients = []
        for state in self.states:
            shift, scale = self.scales.loc, self.scales.scale
            if self.form.runs:
                with double_precision():
                    shift, scale = map(
                        np.asarray,
                        location_and_scale(jax.tree.map(jnp.asarray, state.memory)),
                    )
            slopes = state.posterior.loc / scale
            slopes[0] -= np.sum(slopes[1:] * shift[1:])
            coefficients.append(slopes)
        return np.stack(coefficients)

    def _in_blocks(self, answer: PyTree, rows: np.ndarray) -> list[np.ndarray]:
        size = min(BLOCK, 1 << max(len(rows) - 1, 0).bit_length())
        padded = np.pad(self._on_scales(rows), ((0, -len(rows) % size), (0, 0)))
        with double_precision():
            blocks = [
                jnp.asarray(block) for block in np.split(padded, len(padded) // size)
            ]
            answers = []
            for state in self.states:
                state = jax.tree.map(jnp.asarray, state)
                parts = [
                    np.asarray(answer(self.expectation, state, block))
                    for block in blocks
                ]
                answers.append(np.concatenate(parts)[: len(rows)])
        return answers

    def _serve(self, row: np.ndarray) -> list[Service]:
        if self._states is not None:
            rule, expectation = self.form.rule, self.expectation
            example = row, 1.0, 1.0
            self._services = [
                Service(rule, expectation, jax.tree.map(jnp.asarray, state), *example)
                for state in self._states
            ]
            self._states = None
        return self._services


@partial(jax.jit, static_argnums=0)
def _predict(expectation: Expectation, state: OnlineState, rows: Array) -> Array:
    return jnp.stack(predict(expectation, state, rows, jnp.ones(len(rows))), axis=1)


@partial(jax.jit, static_argnums=0)
def _probabilities(expectation: Expectation, state: OnlineState, rows: Array) -> Array:
    return class_probabilities(expectation, state, rows, jnp.ones(len(rows)))
