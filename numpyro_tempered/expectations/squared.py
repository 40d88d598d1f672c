"""Squared loss of a linear predictor, in closed form."""

from typing import Any

import jax.numpy as jnp

from numpyro_tempered._typing import Array
from numpyro_tempered.expectations.base import (
    Evaluation,
    Expectation,
    as_rows,
    predictor_moments,
    pull_back,
)
from numpyro_tempered.families.mean_field import MeanField


def squared() -> Expectation:
    r"""Expected squared loss :math:`E_q[(y - x^\top\theta)^2] = (y - m\cdot x)^2 + \sum\sigma_j^2x_j^2`.

    It is the negative log-likelihood of Gaussian noise of variance 1/2, up to a constant. Fisher
    curvature is 4 E[(y - u)²] x².

    Data are ``x`` of shape ``(d,)`` or ``(n, d)`` and ``y``, scalar or ``(n,)``; the losses of a
    batch are summed.

    Returns:
        An :class:`Expectation`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> value = nt.expectations.squared().evaluate(q, jnp.array([3.0, 4.0]), 1.0)
        >>> float(value.at_mean), float(value.expected)
        (1.0, 26.0)
    """
    return Expectation(_evaluate)


def _evaluate(
    q: MeanField, x: Any, y: Any, rng_key: Array | None = None, curvature: str = "hessian"
) -> Evaluation:
    x, y = as_rows(q, x, y)
    mean, variance = predictor_moments(q, x)
    residual = y - mean
    at_mean = jnp.square(residual)
    expected = at_mean + variance
    second = 4.0 * expected if curvature == "fisher" else jnp.full_like(mean, 2.0)
    return Evaluation(jnp.sum(at_mean), jnp.sum(expected), *pull_back(x, -2.0 * residual, second))
