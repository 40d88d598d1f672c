"""One datum at a time, for services: a compiled round with a state that stays on the device."""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    PyTree,
    Shape,
    check_known,
    describe,
    share_trace,
    stream_arrays,
)
from numpyro_tempered.core.packing import (
    Inputs,
    Packing,
    pack,
    packing_of,
    read_numbers,
    unpack,
)
from numpyro_tempered.gaussian.expectations.base import Expectation, check_outcomes
from numpyro_tempered.online.base import Losses, OnlineState, Rule
from numpyro_tempered.online.drivers import check_data, check_parts
from numpyro_tempered.online.predictions import (
    Answer,
    Prediction,
    PredictorsOf,
    as_labels,
    predictors_of,
)
from numpyro_tempered.online.stream import Rounds, RoundStep, Step, as_floating, single

# The number of rounds in a call, an argument as in :func:`update`, so that the compiler builds the same loop.
ONE = np.int32(1)
# Outcomes that have been checked are remembered, up to as many.
MAX_CHECKED = 1000
# The number of the first draw, so that no draw has the key of a round.
FIRST_DRAW = 2**30

Buffers: TypeAlias = tuple[Array, ...]


class Parts(NamedTuple):
    """What a :class:`Service` runs.

    Attributes:
        rule: The rule.
        expectation: The expectation of a round's arrays.
        inputs: Which of the arrays are known before the outcome.
        predictors: Those of inputs, made at the first prediction.
        wrap: From a state of the rule and the key to what is saved.
        labels: The values of an outcome, where the caller gives none.
    """

    rule: Rule
    expectation: Expectation
    inputs: Shape
    predictors: Callable[[], PredictorsOf]
    wrap: Callable[[OnlineState, Array | None], PyTree]
    labels: tuple[float, ...] = (-1.0, 1.0)


class Service:
    r"""Rounds and predictions one at a time, at a few microseconds each.

    A compiled program each for learning and for each kind of prediction, whose state is a few flat arrays that
    stay on the device and are updated in place: between calls nothing but the new data move. Numbers are those
    of :func:`update`, to units in the last place. Data may be NumPy's arrays, lists, numbers or tables, of the
    shapes at the start. They are read in the dtype of the posterior, whatever that of the datum at the start;
    where the loss needs integers, as for indices, other numbers raise. An outcome that the loss does not admit
    raises; what is not finite rejects the round, and is counted. Several threads may share a service: calls take
    turns.

    Args:
        rule: An online rule.
        expectation: E_q of a bare loss; for a NumPyro model see :meth:`OnlineVI.service`.
        state: From ``rule.init(prior)`` or an earlier run. It is copied.
        *data: A datum, for its shapes: ``x`` of shape ``(d,)`` and a number ``y``, or a batch.
        rng_key: For expectations and predictions that draw.
        labels: All values of an outcome: :meth:`learn` refuses others. Without them any outcome of the loss is
            learned, and :meth:`class_probabilities` are those of -1 and 1.

    Raises:
        TypeError: If a part is of another kind, or traced.
        ValueError: If shapes do not fit the loss.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.logistic()
        >>> rule = nt.online.rvga()
        >>> state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2)))
        >>> service = nt.online.Service(rule, logistic, state, [0.0, 0.0], 1.0)
        >>> losses = service.learn([1.0, -2.0], 1.0)
        >>> print(f"{losses.at_mean:.3f} {service.class_probabilities([1.0, -2.0])[1]:.3f}")
        0.693 0.719
        >>> int(service.state.count)
        1
    """

    def __init__(
        self,
        rule: Rule,
        expectation: Expectation,
        state: OnlineState,
        *data: object,
        rng_key: Array | None = None,
        labels: Sequence[float] | None = None,
    ) -> None:
        check_parts(rule, expectation, state)
        arrays, at = stream_arrays(data), functools.partial(predictors_of, expectation)
        parts = Parts(
            rule, expectation, tuple(range(len(arrays) - 1)), at, lambda state, _: state
        )
        self._start(parts, state, arrays, rng_key, labels)

    @classmethod
    def of_parts(
        cls,
        parts: Parts,
        state: OnlineState,
        arrays: tuple[Array, ...],
        rng_key: Array | None,
        labels: Sequence[float] | None,
    ) -> "Service":
        """The service of a rule whose rounds have other arrays than inputs and one outcome."""
        service = cls.__new__(cls)
        service._start(parts, state, arrays, rng_key, labels)
        return service

    def _start(
        self,
        parts: Parts,
        state: OnlineState,
        arrays: tuple[Array, ...],
        rng_key: Array | None,
        labels: Sequence[float] | None,
    ) -> None:
        check_known(
            "a service holds a state outside of programs", state, arrays, rng_key
        )
        step = Step(parts.rule, parts.expectation)
        arrays = as_floating(step, state, arrays, rng_key)
        check_data(parts.expectation, arrays)
        self._parts, self._labels, self._arrays = (
            parts,
            as_labels(parts.labels if labels is None else labels),
            arrays,
        )
        self._refuses, self._is_checked = (
            labels is not None,
            labels is not None or parts.expectation.check is not None,
        )
        self._outcomes = [n for n in range(len(arrays)) if n not in parts.inputs]
        self._lock, self._checked, self._draws = (
            threading.Lock(),
            set[float](),
            itertools.count(FIRST_DRAW),
        )
        self._packing = packing_of((state, rng_key))
        self._buffers = _pack(self._packing, (state, rng_key))
        self._inputs = Inputs(packing_of(arrays, math.inf))
        one_round: RoundStep = share_trace(step, state, arrays, rng_key, None)  # type: ignore[arg-type]
        self._learn = _learner(
            one_round, self._packing, self._inputs.packing, state.posterior.loc.dtype
        )
        self._answers: dict[object, tuple[Callable[..., Array], Inputs, PyTree]] = {}

    @property
    def state(self) -> PyTree:
        """A copy of the state, to save, to report or to go on from."""
        with self._lock:
            state, rng_key = _unpack(self._packing, self._buffers)
        return self._parts.wrap(state, rng_key)

    def load(self, state: PyTree) -> None:
        """Go on from another state of the same form, such as an earlier one.

        Raises:
            ValueError: If it is of another structure or other shapes.
        """
        rule_state = getattr(state, "rule_state", state)
        with self._lock:
            _, rng_key = _unpack(self._packing, self._buffers)
            rng_key = getattr(state, "rng_key", rng_key)
            if packing_of((rule_state, rng_key)) != self._packing:
                raise ValueError(
                    f"state is not of the service's rule, family and sizes: {describe(state)}."
                )
            self._buffers = _pack(self._packing, (rule_state, rng_key))

    def learn(self, *data: ArrayLike) -> Losses:
        """One round.

        Args:
            *data: A datum, as at the start.

        Returns:
            The :class:`Losses` before the update, as floats.

        Raises:
            TypeError: If there are more or fewer arrays than at the start, or one is not real numbers.
            ValueError: If a shape is another, the loss does not admit the outcome, it is none of the ``labels``,
                or an array that the loss needs as integers holds other numbers; the state stays as it was.
        """
        with self._lock:
            inputs = self._inputs.fill(data)
            if self._is_checked:
                self._check()
            self._buffers, losses = self._learn(self._buffers, inputs, ONE)
            # Waits for the program, which reads the inputs where they are.
            at_mean, expected = np.asarray(losses).tolist()
        return Losses(at_mean, expected)

    def predict(self, *inputs: ArrayLike) -> Prediction:
        """Mean and variance of the predictor, as :func:`predict`.

        Args:
            *inputs: A datum without its outcome, or n of them with a leading axis. Each n compiles once.

        Returns:
            The :class:`Prediction`, of floats for one datum and NumPy's arrays for several.
        """
        return self._answer("predict", inputs)

    def class_probabilities(self, *inputs: ArrayLike) -> np.ndarray:
        """Probabilities of the labels, as :func:`class_probabilities`.

        Args:
            *inputs: As for :meth:`predict`.

        Returns:
            Shape ``(L,)`` or ``(n, L)``.
        """
        return self._answer("class_probabilities", inputs)

    def draw(self, *inputs: ArrayLike) -> PyTree:
        """Predictors at a new draw of the parameters, the same for all rows, as :func:`sample_predictor`.

        Args:
            *inputs: As for :meth:`predict`.

        Returns:
            A float, or an array.

        Raises:
            ValueError: If the service started without a key.
        """
        return self._answer("draw", inputs, np.int32(next(self._draws)))

    def _answer(
        self, kind: str, inputs: tuple[ArrayLike, ...], *options: np.generic
    ) -> PyTree:
        arrays = tuple(
            [read_numbers(value, number) for number, value in enumerate(inputs)]
        )
        shapes = kind, *[array.shape for array in arrays]
        with self._lock:
            if shapes not in self._answers:
                self._answers[shapes] = self._prepare(kind, arrays, options)
            program, buffers, rebuild = self._answers[shapes]
            return rebuild(
                np.asarray(program(self._buffers, buffers.fill(arrays), ONE, *options))
            )

    def _prepare(
        self, kind: str, inputs: tuple[np.ndarray, ...], options: tuple[np.generic, ...]
    ) -> tuple[Callable[..., Array], Inputs, PyTree]:
        """A program for inputs of these shapes, the buffers that it reads, and a function of its numbers."""
        at, examples = (
            self._parts.predictors(),
            [self._arrays[n] for n in self._parts.inputs],
        )
        if len(inputs) != len(examples):
            raise TypeError(
                f"the service predicts from {len(examples)} arrays, got {len(inputs)}."
            )
        arrays = tuple(
            jnp.asarray(value, e.dtype)
            for value, e in zip(inputs, examples, strict=True)
        )
        state, rng_key = _unpack(self._packing, self._buffers)
        number = self._parts.rule.features
        features = (
            self._parts.inputs.index(number) if number in self._parts.inputs else None
        )
        if kind == "class_probabilities":
            for label in self._labels:
                outcomes = {
                    n: np.full(self._arrays[n].shape, label) for n in self._outcomes
                }
                check_data(
                    self._parts.expectation,
                    tuple(outcomes.get(n, a) for n, a in enumerate(self._arrays)),
                )
        if kind == "draw" and rng_key is None:
            raise ValueError(
                "a service that draws needs a key: start it with rng_key=."
            )
        # Equal for equal services, so that one that is made anew is not traced anew.
        traced = Answer(kind, at, self._labels, features)
        answer: Callable[..., PyTree] = share_trace(traced, state, rng_key, *arrays)  # type: ignore[arg-type]
        shapes = jax.eval_shape(answer, state, rng_key, *arrays)
        buffers = Inputs(packing_of(arrays, math.inf))
        return (
            _answerer(answer, self._packing, buffers.packing),
            buffers,
            _rebuild(shapes),
        )

    def _check(self) -> None:
        """Raise ValueError where the loss does not admit an outcome; numbers are looked at once each."""
        arrays = self._inputs.arrays
        values = [arrays[n].item() for n in self._outcomes if arrays[n].size == 1]
        if len(values) == len(self._outcomes) and self._checked.issuperset(values):
            return
        check_data(self._parts.expectation, arrays)
        labels, need = (
            np.asarray(self._labels, np.float32),
            f"outcomes must be one of labels = {self._labels}",
        )
        for n in self._outcomes if self._refuses else ():
            # Rows and labels may be of different precisions.
            check_outcomes(arrays[n], lambda y: np.isin(np.float32(y), labels), need)
        if len(self._checked) < MAX_CHECKED:
            self._checked.update(value for value in values if math.isfinite(value))


def _rebuild(shapes: PyTree) -> Callable[[np.ndarray], PyTree]:
    """From the flat numbers of an answer to its parts, floats where they are scalars."""
    leaves, tree = jax.tree.flatten(shapes)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves]).tolist()
    places = [
        (end - math.prod(leaf.shape), end, leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]

    def rebuild(values: np.ndarray) -> PyTree:
        parts = [
            values[a:b].reshape(shape) if shape else values.item(a)
            for a, b, shape in places
        ]
        return jax.tree.unflatten(tree, parts)

    return rebuild


@functools.partial(jax.jit, static_argnums=0)
def _pack(packing: Packing, tree: PyTree) -> Buffers:
    return pack(packing, tree)


@functools.partial(jax.jit, static_argnums=0)
def _unpack(packing: Packing, buffers: Buffers) -> PyTree:
    return unpack(packing, buffers)


@functools.lru_cache(maxsize=64)
def _learner(
    one_round: RoundStep, packing: Packing, form: Packing, dtype: np.dtype
) -> Callable[..., tuple[Buffers, Array]]:
    """A round on buffers, one program for equal rules. JAX finds it by its function alone, the quickest way."""

    def learn(
        buffers: Buffers, inputs: Buffers, number: Array
    ) -> tuple[Buffers, Array]:
        def body(_: Array, carry: tuple[Buffers, Array]) -> tuple[Buffers, Array]:
            (state, rng_key), data = unpack(packing, carry[0]), unpack(form, inputs)
            after, losses = single(
                one_round, state, Rounds(data, None, number), rng_key
            )
            return pack(packing, (after, rng_key)), jnp.stack(
                [losses.at_mean, losses.expected]
            )

        # A loop of one round around the round's own, in which the buffers are taken apart: outside of loops XLA
        # runs the copies on several threads, which takes longer than the round.
        return jax.lax.fori_loop(0, number, body, (buffers, jnp.zeros(2, dtype)))

    return jax.jit(learn, donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _answerer(
    answer: Callable[..., PyTree], packing: Packing, form: Packing
) -> Callable[..., Array]:
    """What a posterior says of inputs, as flat numbers."""

    def flat(buffers: Buffers, inputs: Buffers, *draw: Array) -> Array:
        state, rng_key = unpack(packing, buffers)
        key = jax.random.fold_in(rng_key, draw[0]) if draw else rng_key
        values = answer(state, key, *unpack(form, inputs))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(values)])

    def run(buffers: Buffers, inputs: Buffers, number: Array, *draw: Array) -> Array:
        # In a loop as the rounds are.
        like = jax.eval_shape(flat, buffers, inputs, *draw)
        return jax.lax.fori_loop(
            0, number, lambda *_: flat(buffers, inputs, *draw), jnp.zeros_like(like)
        )

    return jax.jit(run)
