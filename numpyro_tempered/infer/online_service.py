"""Rounds and predictions of a NumPyro model, one at a time."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.expectations.base import Expectation, Predictors
from numpyro_tempered.infer.online_checks import observed_arguments
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online.predictions import PredictorsOf, require_predictors
from numpyro_tempered.online.service import Parts, Service

if TYPE_CHECKING:
    from numpyro_tempered.infer.online import OnlineVI


def service_of(
    online: "OnlineVI",
    state: OnlineVIState,
    args: tuple,
    *,
    labels: Sequence[float] | None = None,
    **kwargs: object,
) -> Service:
    """Rounds and predictions of a NumPyro model one at a time, at a few microseconds each.

    ``service.learn`` takes the arrays among the arguments, in their order, with or without the leading axis of 1;
    predictions, of the named predictor, take those that no site observes. ``service.state`` is an
    :class:`.OnlineVIState`.

    Args:
        online: The OnlineVI.
        state: From its ``init``, or of a run.
        args: Arguments of the model, a batch of the size of every round, such as 1. Shapes matter; strings, None,
            booleans and integers are compiled in.
        labels: All values of an outcome, as of :class:`Service`; without them ``service.class_probabilities`` are
            those of 0 and 1.
        **kwargs: Keyword arguments of the model, likewise.

    Raises:
        ValueError: As :meth:`OnlineVI.update`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     eta = numpyro.deterministic("eta", x @ theta)
        ...     numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
        >>> logits = nt.expectations.gauss_hermite(predictor="eta")
        >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineMultivariateNormal, expectation=logits)
        >>> x, y = jnp.ones((1, 2)), jnp.ones(1)
        >>> service = online.service(online.init(jax.random.key(0), x, y), x, y)
        >>> losses = service.learn([1.0, -2.0], 1)
        >>> print(f"{service.class_probabilities([1.0, -2.0])[1]:.3f}")
        0.719
    """
    arrays, structure, expectation = online.prepare_round(None, args, kwargs)
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)
    outcomes = {
        site.argument for site in observed_arguments(online.model, shapes, structure)
    }
    inputs = tuple(number for number in range(len(arrays)) if number not in outcomes)
    parts = Parts(
        online.rule,
        expectation,
        inputs,
        functools.partial(_predictors_of, expectation, shapes, inputs),
        lambda rule_state, rng_key: state._replace(
            rule_state=rule_state,
            rng_key=rng_key,  # type: ignore[arg-type]
        ),
        (0.0, 1.0),
    )
    return Service.of_parts(parts, state.rule_state, arrays, state.rng_key, labels)


def _predictors_of(
    expectation: Expectation,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    inputs: tuple[int, ...],
) -> PredictorsOf:
    """The predictors of a model: outcomes, which they do not depend on, are filled in."""
    predictors = require_predictors(expectation)
    rows = [number for number in inputs if shapes[number].ndim]

    def at(
        theta: Array, values: tuple[Array, ...], label: Array | None
    ) -> tuple[Predictors, bool]:
        if label is not None and len(inputs) == len(shapes):
            raise TypeError(
                "class_probabilities needs a model that observes one of its arguments as it is: obs=y."
            )
        by_number = dict(zip(inputs, values, strict=True))
        is_one = any(by_number[number].ndim < shapes[number].ndim for number in rows)
        if is_one:
            by_number |= {number: by_number[number][None] for number in rows}
        num_rows = by_number[rows[0]].shape[0] if rows else 1

        def array_of(number: int, like: jax.ShapeDtypeStruct) -> Array:
            if number in by_number:
                return by_number[number]
            outcome = (
                jnp.zeros((), like.dtype) if label is None else label.astype(like.dtype)
            )
            return jnp.broadcast_to(outcome, (num_rows, *like.shape[1:]))

        return predictors(
            theta, *(array_of(number, like) for number, like in enumerate(shapes))
        ), is_one

    return at
