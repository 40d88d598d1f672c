"""Predictions of a fitted mixture."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    at_index,
    check_count,
    check_names,
    doubles,
    is_traced,
    key_first,
)
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    Component,
    Parameters,
    as_dtype,
    missing_form,
    move_parameters,
)
from numpyro_tempered.mixtures.factors import Factors, coefficients
from numpyro_tempered.mixtures.prepare import move, on_host
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.sweep import FEW_ROWS, log_joint, next_power


def responsibilities(fit: MixtureFit, x: ArrayLike) -> Array:
    r"""The factor of the labels, :math:`\omega_{ij} \propto \exp(E \log p_j + E \log q_{\theta_j}(x_i))`.

    Args:
        fit: A fitted mixture.
        x: Rows ``(n, d)``; NaN are missing where the family allows this.

    Returns:
        Shape ``(n, K)``; rows sum to 1.

    Raises:
        ValueError: If the rows are not data of the family.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> nt.mixtures.responsibilities(fit, x).round(2).max(axis=1).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    return _at_rows(_responsibilities, fit, x)


def predict(fit: MixtureFit, x: ArrayLike) -> Array:
    """The component of the largest responsibility, ``(n,)``; see :func:`responsibilities`.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> label = nt.mixtures.predict(fit, x)
        >>> bool(label[0] == label[1] != label[2])
        True
    """
    return jnp.argmax(responsibilities(fit, x), axis=1)


def log_predictive(fit: MixtureFit, x: ArrayLike) -> Array:
    r"""The log predictive density :math:`\log \int \sum_j p_j q_{\theta_j}(x) \, d\rho`.

    The parameters are integrated out: Student's t for Gaussian components, not the exponential of an expected
    logarithm, which is no density.

    Args:
        fit: A fitted mixture.
        x: Rows ``(n, d)``, fresh data; NaN are missing where the family allows this.

    Returns:
        Shape ``(n,)``, in nats.

    Raises:
        ValueError: If the rows are not data of the family.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> grid = np.linspace(-15.0, 25.0, 2001)
        >>> round(float(np.exp(nt.mixtures.log_predictive(fit, grid)).sum() * 0.02), 3)
        1.0
    """
    return _at_rows(_log_predictive, fit, x)


def predictive_parts(fit: MixtureFit, x: ArrayLike) -> Array:
    """The parts of the predictive density by component, as logarithms ``(n, K)``; see :func:`log_predictive`."""
    return _at_rows(_predictive_parts, fit, x)


@key_first
def sample(rng_key: Array, fit: MixtureFit, num_rows: int) -> tuple[Array, Array]:
    """Data from the predictive distribution.

    Args:
        rng_key: Key.
        fit: A fitted mixture.
        num_rows: How many rows, each with parameters of its own from rho.

    Returns:
        Rows ``(num_rows, d)`` and their components ``(num_rows,)``.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> rows, labels = nt.mixtures.sample(jax.random.key(1), fit, 5)
        >>> rows.shape, labels.shape
        ((5, 1), (5,))
    """
    check_count(num_rows, "num_rows")
    rows, labels = _sample(
        jax.random.split(rng_key, num_rows), fit.component, factors_of(fit)
    )
    return (rows if fit.centre is None else doubles(rows) + fit.centre), labels


@key_first
def sample_posterior(rng_key: Array, fit: MixtureFit, num_samples: int) -> Parameters:
    """Draws of the parameters from rho, in the data's own coordinates.

    Args:
        rng_key: Key.
        fit: A fitted mixture; its labels are those of the draws.
        num_samples: S.

    Returns:
        ``weights`` ``(S, K)``, and the component's parameters by name, ``(S, K, ...)``.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> nt.mixtures.sample_posterior(jax.random.key(1), fit, 7)["loc"].shape
        (7, 2, 1)
    """
    check_count(num_samples, "num_samples")
    parameters = _sample_posterior(
        jax.random.split(rng_key, num_samples), fit.component, factors_of(fit)
    )
    if fit.centre is None:
        return parameters
    of_weights = parameters.pop("weights")
    shift = np.broadcast_to(fit.centre, (fit.num_components, len(fit.centre)))
    return {"weights": of_weights} | move_parameters(
        fit.component, fit.problem.prior, parameters, shift
    )


def factors_of(fit: MixtureFit) -> Factors:
    """The factors in a precision that JAX has now: a fit may be of a session with 64 bits."""
    return as_dtype(
        fit.factors, jax.dtypes.canonicalize_dtype(fit.factors.concentration.dtype)
    )


def _at_rows(
    function: Callable[[Component, Factors, Array], Array],
    fit: MixtureFit,
    x: ArrayLike,
) -> Array:
    """A function of a component, factors and rows, with rows first in its result, at the rows of the user."""
    check_names(fit, x)
    rows, factors = (
        fit.component.check(x if is_traced(x) else on_host(x)),
        factors_of(fit),
    )
    dtype = factors.concentration.dtype
    if is_traced(rows):
        return function(fit.component, factors, move(rows, fit.centre).astype(dtype))
    component = missing_form(fit.component, rows)
    if not isinstance(rows, np.ndarray) or len(rows) > FEW_ROWS:
        return function(component, factors, move(rows, fit.centre).astype(dtype))
    # Another number of rows is the same program.
    padded = np.pad(
        rows, [(0, next_power(len(rows), 128) - len(rows)), (0, 0)], mode="edge"
    )
    deviations = (padded if fit.centre is None else padded - fit.centre).astype(dtype)
    return jnp.asarray(
        np.asarray(function(component, factors, deviations))[: len(rows)]
    )


@partial(jax.jit, static_argnames="component")
def _responsibilities(component: Component, factors: Factors, rows: Array) -> Array:
    return jax.nn.softmax(
        log_joint(component, coefficients(component, factors), rows.T), axis=0
    ).T


@partial(jax.jit, static_argnames="component")
def _log_predictive(component: Component, factors: Factors, rows: Array) -> Array:
    return logsumexp(_predictive_parts(component, factors, rows), axis=1)


@partial(jax.jit, static_argnames="component")
def _predictive_parts(component: Component, factors: Factors, rows: Array) -> Array:
    log_weights = weights.log_mean(factors.concentration)
    return (
        log_weights[:, None]
        + derived.log_predictive(component, factors.posterior, rows.T)
    ).T


@partial(jax.jit, static_argnames="component")
def _sample(keys: Array, component: Component, factors: Factors) -> tuple[Array, Array]:
    def one(key: Array) -> tuple[Array, Array]:
        key_parameters, key_label, key_row = jax.random.split(key, 3)
        log_weights, parameters = draw_parameters(key_parameters, component, factors)
        label = jax.random.categorical(key_label, log_weights)
        parameters = at_index(parameters, label)
        return component.distribution(parameters).sample(key_row), label

    return jax.vmap(one)(keys)


@partial(jax.jit, static_argnames="component")
def _sample_posterior(
    keys: Array, component: Component, factors: Factors
) -> Parameters:
    def one(key: Array) -> Parameters:
        log_weights, parameters = draw_parameters(key, component, factors)
        return {"weights": jnp.exp(log_weights), **parameters}

    return jax.vmap(one)(keys)


def draw_parameters(
    rng_key: Array, component: Component, factors: Factors
) -> tuple[Array, Parameters]:
    """One draw from rho: log weights ``(K,)``, and the components' parameters by name, K first."""
    key, *rest = jax.random.split(rng_key, 17)
    keys = iter(rest)
    # Gammas of small concentrations underflow, their logarithms do not.
    shape = jnp.where(factors.concentration > 0, factors.concentration, 1.0)
    log_weights = weights.log_weights(
        jax.random.loggamma(key, shape), factors.concentration
    )
    return log_weights, component.draw(
        lambda name, fn: fn.sample(next(keys)), factors.posterior
    )
