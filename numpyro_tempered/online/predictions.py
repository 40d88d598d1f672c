"""What a posterior says of new data: predictors, probabilities of labels, and predictors at a draw."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    add_repr,
    at_index,
    check_count,
    check_record,
    describe,
    key_first,
    stream_arrays,
)
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Predictors,
    PredictorsAt,
    predictor_covariance,
    root,
    standard_deviation,
)
from numpyro_tempered.gaussian.families.base import Gaussian, family_of
from numpyro_tempered.online.base import OnlineState, refuse_model
from numpyro_tempered.online.streams.standardise import features_of

# The trapezoidal rule: a step in the predictor is off by half a spacing times the density, .008 at most, and a
# logistic function of a predictor of standard deviation 25 by less than 1e-6.
POINTS = np.linspace(-8.0, 8.0, 401)
MASSES = np.exp(-0.5 * POINTS**2) / np.sum(np.exp(-0.5 * POINTS**2))
NUM_DRAWS = 1024

# A state, or its posterior.
Posterior: TypeAlias = OnlineState | Gaussian
# From parameters, inputs and a label, or None for any, to predictors, and whether they are of one datum.
PredictorsOf: TypeAlias = Callable[
    [Array, tuple[Array, ...], Array | None], tuple[Predictors, bool]
]


@add_repr
class Prediction(NamedTuple):
    """The Gaussian of predictors under a posterior.

    Attributes:
        mean: Their means: scalar for one datum, ``(n,)`` for n; with a last axis of K for K outputs.
        variance: Their variances, without the noise of outcomes, of the shape of ``mean``; covariances
            ``(..., K, K)`` for K outputs.
    """

    mean: Array
    variance: Array


def predict(
    expectation: Expectation, state: Posterior, *inputs: ArrayLike
) -> Prediction:
    r"""Mean and variance of the predictor of new data.

    For a linear predictor :math:`m^\top x` and :math:`x^\top \Sigma x`; another is linearised at the mean.
    Features of a rule by :func:`standardise` are in their own units, as in its rounds.

    Args:
        expectation: That of the stream.
        state: A state, or a Gaussian.
        *inputs: The data without their outcomes: for the closed forms ``x`` of shape ``(d,)`` or ``(n, d)``.

    Returns:
        The :class:`Prediction`.

    Raises:
        TypeError: If the expectation has no predictor.
        ValueError: If the inputs do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.array([1.0, 2.0]), jnp.array([0.5, 1.0]))
        >>> prediction = nt.online.predict(nt.expectations.squared(), q, jnp.array([2.0, 1.0]))
        >>> print(prediction.mean, prediction.variance)
        4.0 2.0
    """
    arrays = _checked(expectation, state, inputs)
    return prediction_of(predictors_of(expectation), state, *arrays)


def class_probabilities(
    expectation: Expectation,
    state: Posterior,
    *inputs: ArrayLike,
    labels: Sequence[float] = (-1.0, 1.0),
) -> Array:
    r"""Predictive probabilities of the labels of new data.

    The average over the posterior of :math:`e^{-\ell(u, y)} / \sum_{y'} e^{-\ell(u, y')}`, the likelihood itself
    for the losses that are minus the logarithm of one, and its usual replacement for others, such as the hinge.
    One predictor is averaged by the trapezoidal rule on 401 points, K of them on 1024 fixed draws.

    Args:
        expectation: That of the stream.
        state: A state, or a Gaussian.
        *inputs: The data without their labels, as for :func:`predict`.
        labels: All the values of a label.

    Returns:
        Probabilities, ``(..., L)`` for L labels, in their order.

    Raises:
        TypeError: If the expectation has no predictor.
        ValueError: If the inputs do not fit, there are fewer than two labels, or the loss does not admit one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.logistic()
        >>> q = nt.gaussian.families.MeanField(jnp.array([1.0]), jnp.array([3.0]))
        >>> negative, positive = nt.online.class_probabilities(logistic, q, jnp.ones(1))
        >>> print(f"{negative:.3f} {positive:.3f}")
        0.387 0.613
    """
    arrays, values = _checked(expectation, state, inputs), as_labels(labels)
    if expectation.check is not None:
        expectation.check(np.zeros(1), np.asarray(values))
    return probabilities_of(predictors_of(expectation), values, state, *arrays)


@key_first
def sample_predictor(
    rng_key: Array,
    expectation: Expectation,
    state: Posterior,
    *inputs: ArrayLike,
    num_samples: int | None = None,
) -> Array:
    """Predictors of new data at a draw of the parameters, the same draw for all rows: Thompson sampling.

    Args:
        rng_key: Key of the draw.
        expectation: That of the stream.
        state: A state, or a Gaussian.
        *inputs: The data without their outcomes, as for :func:`predict`: a row for each action.
        num_samples: Number of draws, as a leading axis; None for one without.

    Returns:
        Predictors: scalar or ``(n,)``, with a last axis of K for K outputs.

    Raises:
        TypeError: If the expectation has no predictor.
        ValueError: If the inputs do not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> draw = nt.online.sample_predictor(jax.random.key(0), nt.expectations.squared(), q, jnp.eye(2))
        >>> best_action = int(jnp.argmax(draw))
    """
    arrays, at = _checked(expectation, state, inputs), predictors_of(expectation)
    if num_samples is None:
        return draw_of(at, rng_key, state, *arrays)
    keys = jax.random.split(rng_key, check_count(num_samples, "num_samples"))
    return jax.vmap(lambda key: draw_of(at, key, state, *arrays))(keys)


def prediction_of(
    at: PredictorsOf, state: Posterior, *inputs: Array, features: int | None = 0
) -> Prediction:
    """:func:`predict`, as a pure function; ``features`` is which of the inputs a rule standardises."""
    q, inputs = _posterior(state, inputs, features)
    predictors, is_one = at(q.loc, inputs, None)
    prediction = Prediction(
        predictors.mean, predictor_covariance(q, predictors.jacobian)
    )
    return at_index(prediction, 0) if is_one else prediction


def probabilities_of(
    at: PredictorsOf,
    labels: tuple[float, ...],
    state: Posterior,
    *inputs: Array,
    features: int | None = 0,
) -> Array:
    """:func:`class_probabilities`, as a pure function."""
    q, inputs = _posterior(state, inputs, features)
    predictors, is_one = at(q.loc, inputs, None)
    mean, spread = predictors.mean, predictor_covariance(q, predictors.jacobian)
    if mean.ndim == 1:
        deviation, positive = standard_deviation(spread)
        u = mean + jnp.asarray(POINTS, mean.dtype)[:, None] * jnp.where(
            positive, deviation, 0.0
        )
        masses = jnp.asarray(MASSES, mean.dtype)
    else:
        half = jax.random.normal(
            jax.random.key(0), (NUM_DRAWS // 2, mean.shape[-1]), mean.dtype
        )
        u = mean + jnp.einsum(
            "nij,sj->sni", root(spread), jnp.concatenate([half, -half])
        )
        masses = jnp.full(NUM_DRAWS, 1.0 / NUM_DRAWS, mean.dtype)

    def losses(label: float) -> Array:
        of_label = at(q.loc, inputs, jnp.asarray(label, mean.dtype))[0].losses
        if of_label is None:
            raise TypeError(
                "the losses depend on more than a predictor: draw by sample_posterior instead."
            )
        return jax.vmap(of_label)(u)

    logits = jnp.stack([-losses(label) for label in labels], axis=-1)
    probabilities = jnp.einsum("s,sny->ny", masses, jax.nn.softmax(logits, axis=-1))
    return probabilities[0] if is_one else probabilities


def draw_of(
    at: PredictorsOf,
    rng_key: Array,
    state: Posterior,
    *inputs: Array,
    features: int | None = 0,
) -> Array:
    """:func:`sample_predictor`, as a pure function."""
    q, inputs = _posterior(state, inputs, features)
    predictors, is_one = at(family_of(q).sample(rng_key, q, ()), inputs, None)
    return predictors.mean[0] if is_one else predictors.mean


class Answer(NamedTuple):
    """What a posterior says of inputs, as a pure function of a state, a key and the inputs."""

    kind: str
    at: PredictorsOf
    labels: tuple[float, ...]
    features: int | None

    def __call__(
        self, state: Posterior, rng_key: Array | None, *inputs: Array
    ) -> Prediction | Array:
        """The answer."""
        if self.kind == "predict":
            return prediction_of(self.at, state, *inputs, features=self.features)
        if self.kind == "class_probabilities":
            return probabilities_of(
                self.at, self.labels, state, *inputs, features=self.features
            )
        return draw_of(self.at, rng_key, state, *inputs, features=self.features)  # type: ignore[arg-type]


def predictors_of(expectation: Expectation) -> PredictorsOf:
    """The predictors of inputs, which have features on their last axis, for a bare loss.

    Raises:
        TypeError: If the expectation has no predictor.
    """
    predictors = require_predictors(expectation)

    def at(
        theta: Array, inputs: tuple[Array, ...], label: Array | None
    ) -> tuple[Predictors, bool]:
        lead = jnp.shape(inputs[0])[:-1]
        outcome = jnp.broadcast_to(
            jnp.zeros((), theta.dtype) if label is None else label, lead
        )
        return predictors(theta, *inputs, outcome), not lead

    return at


def require_predictors(expectation: Expectation) -> PredictorsAt:
    """The predictors of an expectation.

    Raises:
        TypeError: If it has none.
    """
    if expectation.bind is not None:
        raise TypeError(
            "this expectation is of a model's likelihood: OnlineVI.service(state, *args).predict(x) predicts, or "
            "OnlineVI.bare_loss makes a loss of the model."
        )
    if expectation.predictors is None:
        raise TypeError(
            "only a loss of a predictor predicts, such as nt.expectations.squared(), gauss_hermite(loss), or "
            "gauss_hermite(predictor=...) of an OnlineVI; this one is of the parameters: sample_posterior draws "
            "them."
        )
    return expectation.predictors


def as_labels(labels: Sequence[float]) -> tuple[float, ...]:
    """The labels as numbers.

    Raises:
        ValueError: If there are fewer than two, or two agree.
    """
    values = tuple(float(label) for label in labels)
    if len(set(values)) < max(2, len(values)):
        raise ValueError(
            f"labels must be two or more different numbers, got {labels!r}."
        )
    return values


def _posterior(
    state: Posterior, inputs: tuple[Array, ...], features: int | None
) -> tuple[Gaussian, tuple[Array, ...]]:
    """The Gaussian of a state, and the inputs on its scale."""
    # An OnlineVI's, with the expectation of a bare loss.
    state = getattr(state, "rule_state", state)
    if not hasattr(state, "posterior"):
        return state, inputs
    if features is not None:
        inputs = (
            *inputs[:features],
            features_of(state, inputs[features]),
            *inputs[features + 1 :],
        )
    return state.posterior, inputs  # type: ignore[union-attr]


def _checked(
    expectation: Expectation, state: Posterior, inputs: tuple[ArrayLike, ...]
) -> tuple[Array, ...]:
    """The inputs as arrays."""
    refuse_model(expectation)
    check_record(expectation, "expectation", Expectation, "nt.expectations.squared()")
    if not hasattr(getattr(state, "posterior", state), "loc"):
        raise TypeError(
            f"state must be that of a run, or a Gaussian, got {describe(state)}."
        )
    if not inputs:
        raise TypeError("no inputs: the call is predict(expectation, state, x).")
    return stream_arrays(inputs)
