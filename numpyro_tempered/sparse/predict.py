"""Uses of a sparse regression: predictions and posterior draws."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, ArrayLike, check_count, key_first
from numpyro_tempered.sparse.base import (
    Draws,
    RegressionFit,
    centred_rows,
    draw_factors,
)


class Moments(NamedTuple):
    """Mean and standard deviation of a quantity of each row.

    Attributes:
        mean: Shape ``(n,)``.
        scale: Standard deviations, ``(n,)``.
    """

    mean: Array
    scale: Array


def linear_predictor(fit: RegressionFit, x: ArrayLike) -> Moments:
    """Posterior mean and standard deviation of b + x'θ, exact for the fitted q.

    Args:
        fit: The fit.
        x: Rows, shape ``(n, d)``, in the units of the rows of the fit.

    Returns:
        Its :class:`Moments`: log-odds for a logistic regression; for a linear one without the noise.

    Raises:
        ValueError: If ``x`` has another number of columns, or is not finite.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2.0 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5
        ... )
        >>> nt.sparse.linear_predictor(fit, [[0.0, 1.0, 0.0]]).mean.round(1)
        Array([2.], dtype=float32)
    """
    rows = centred_rows(fit, x)
    zero = jnp.zeros((), rows.dtype)
    loc, scale = (zero, zero) if fit.intercept is None else fit.intercept
    with jax.default_matmul_precision("highest"):
        mean = loc + rows @ fit.posterior.mean
        variance = jnp.square(scale) + jnp.square(rows) @ fit.posterior.variance
    return Moments(mean, jnp.sqrt(variance))


def predict(fit: RegressionFit, x: ArrayLike) -> Moments:
    """Mean and standard deviation of y at new rows, with coefficients and noise integrated out.

    Under a ``noise_prior`` the noise has variance rate / (shape - 1), infinite for a shape of at most 1.
    Tempering widens the coefficients' part; the noise is that of the model.

    Args:
        fit: A linear fit.
        x: Rows, shape ``(n, d)``.

    Returns:
        Its :class:`Moments`, in units of y.

    Raises:
        TypeError: If the fit is not linear.
        ValueError: As :func:`linear_predictor`.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2.0 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5
        ... )
        >>> nt.sparse.predict(fit, [[0.0, 1.0, 0.0]]).scale.round(1)
        Array([0.5], dtype=float32)
    """
    if fit.noise_scale is None:
        raise TypeError(
            "predict takes a linear regression, got a logistic one: use predict_proba for classes."
        )
    moments = linear_predictor(fit, x)
    noise = jnp.square(fit.noise_scale)
    if fit.noise_posterior is not None:
        shape, rate = fit.noise_posterior
        noise = jnp.where(
            shape > 1.0, rate / jnp.where(shape > 1.0, shape - 1.0, 1.0), jnp.inf
        )
    return Moments(moments.mean, jnp.sqrt(jnp.square(moments.scale) + noise))


@key_first
def sample_posterior(
    rng_key: Array, fit: RegressionFit, num_samples: int = 1000
) -> Draws:
    """Draws of the coefficients and the intercept from the posterior.

    Args:
        rng_key: Key.
        fit: The fit.
        num_samples: S.

    Returns:
        :class:`Draws`. Its intercept is that of the rows themselves, without ``fit.centre`` subtracted.

    Raises:
        ValueError: If ``num_samples`` is not a positive integer.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2.0 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5
        ... )
        >>> nt.sparse.sample_posterior(jax.random.key(1), fit, 500).coefficients.shape
        (500, 3)
    """
    draws = draw_factors(
        rng_key, fit.factors(), check_count(num_samples, "num_samples")
    )
    coefficients = draws["coef"]
    with jax.default_matmul_precision("highest"):
        return Draws(
            coefficients, draws.get("intercept", 0.0) - coefficients @ fit.centre
        )


@key_first
def predict_proba(
    rng_key: Array, fit: RegressionFit, x: ArrayLike, num_draws: int = 1000
) -> Moments:
    """Probabilities of class 1 at new rows, averaged over draws of the posterior.

    Under a spike-and-slab posterior the predictor is a mixture of Gaussians: its mean and variance do not
    determine the probability.

    Args:
        rng_key: Key of the draws, common to all rows.
        fit: A logistic fit.
        x: Rows, shape ``(n, d)``.
        num_draws: Draws; the Monte Carlo standard error is ``scale / sqrt(num_draws)``.

    Returns:
        :class:`Moments` of the probability over the posterior; the mean is the predictive probability.

    Raises:
        TypeError: If the fit is not logistic.
        ValueError: As :func:`linear_predictor`, and if ``num_draws`` is not a positive integer.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(80), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_logistic(jax.random.key(0), x, x[:, 1] > 0.1, inclusion_prob=0.3, slab_scale=3.0)
        >>> nt.sparse.predict_proba(jax.random.key(1), fit, [[0.0, 1.0, 0.0]]).mean > 0.9
        Array([ True], dtype=bool)
    """
    if fit.noise_scale is not None:
        raise TypeError(
            "predict_proba takes a logistic regression, got a linear one: use predict."
        )
    rows = centred_rows(fit, x)
    draws = draw_factors(rng_key, fit.factors(), check_count(num_draws, "num_draws"))
    intercept = jnp.reshape(draws.get("intercept", 0.0), (-1, 1))
    with jax.default_matmul_precision("highest"):
        probabilities = jax.nn.sigmoid(intercept + draws["coef"] @ rows.T)
    return Moments(jnp.mean(probabilities, axis=0), jnp.std(probabilities, axis=0))
