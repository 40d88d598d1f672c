"""Uses of a sparse regression: predictions, posterior draws, and a tempered fit of its NumPyro model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.result import TemperedELBO
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.set_up import first_call
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.sparse.arguments import as_data, real_array
from numpyro_tempered.sparse.base import (
    Draws,
    LinearFit,
    LogisticFit,
    SparseFit,
    draw_factors,
    tempered_model,
)


class Moments(NamedTuple):
    """Mean and standard deviation of a quantity of each row.

    Attributes:
        mean: Shape ``(n,)``.
        scale: Standard deviations, ``(n,)``.
    """

    mean: Array
    scale: Array


def linear_predictor(fit: SparseFit, x: ArrayLike) -> Moments:
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
    rows = _rows(fit, x)
    zero = jnp.zeros((), rows.dtype)
    loc, scale = (zero, zero) if fit.intercept is None else fit.intercept
    with jax.default_matmul_precision("highest"):
        mean = loc + rows @ fit.posterior.mean
        variance = jnp.square(scale) + jnp.square(rows) @ fit.posterior.variance
    return Moments(mean, jnp.sqrt(variance))


def predict(fit: LinearFit, x: ArrayLike) -> Moments:
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
    if not isinstance(fit, LinearFit):
        raise TypeError(
            f"predict takes a LinearFit, got a {type(fit).__name__}: use predict_proba for classes."
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
def sample_posterior(rng_key: Array, fit: SparseFit, num_samples: int = 1000) -> Draws:
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
    rng_key: Array, fit: LogisticFit, x: ArrayLike, num_draws: int = 1000
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
    if not isinstance(fit, LogisticFit):
        raise TypeError(
            f"predict_proba takes a LogisticFit, got a {type(fit).__name__}: use predict."
        )
    rows = _rows(fit, x)
    draws = draw_factors(rng_key, fit.factors(), check_count(num_draws, "num_draws"))
    intercept = jnp.reshape(draws.get("intercept", 0.0), (-1, 1))
    with jax.default_matmul_precision("highest"):
        probabilities = jax.nn.sigmoid(intercept + draws["coef"] @ rows.T)
    return Moments(jnp.mean(probabilities, axis=0), jnp.std(probabilities, axis=0))


@key_first
def sparse_as_tempered_fit(
    rng_key: Array,
    fit: SparseFit,
    x: ArrayLike,
    y: ArrayLike,
    *,
    num_particles: int = 1000,
) -> TemperedFit:
    """A sparse regression as a result of SVI, for ``compare``, ``to_inference_data`` and ``round_and_refit``.

    The model has the sites ``coef``, with its :class:`~numpyro_tempered.distributions.SpikeAndSlab` prior,
    ``intercept`` where there is one, at the means of the columns, and ``y``. The guide is an
    :class:`~numpyro_tempered.guides.AutoSpikeAndSlab` with exact gates at the fitted factors.

    Args:
        rng_key: Key of the draws for the ELBO.
        fit: Result of ``nt.sparse.fit_linear``, with known or estimated noise, or ``nt.sparse.fit_logistic``.
        x: The design that it was fitted to, ``(n, d)``.
        y: Its target, ``(n,)``.
        num_particles: Draws for the ELBO of a logistic regression.

    Returns:
        A :class:`TemperedFit` with ``losses`` of shape ``(0,)``. Its ``elbo`` is that of a linear fit, exactly;
        of a logistic one it is evaluated by draws, and above the fit's objective, which bounds it. With
        estimated noise it bounds the evidence at that noise alone.

    Raises:
        TypeError: If ``fit`` is of another type.
        ValueError: If the noise has a prior, which is not a part of this model, or the ELBO on ``x`` and ``y`` is
            not that of the fit.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> y = 2.0 * x[:, 1]
        >>> prior = {"inclusion_prob": 0.3, "slab_scale": 1.0}
        >>> fit = nt.sparse.fit_linear(jax.random.key(0), x, y, noise_scale=0.5, **prior)
        >>> tempered = nt.sparse_as_tempered_fit(jax.random.key(1), fit, x, y)
        >>> nt.compare({"all": tempered})["posterior"]["coef"].shape
        (1, 1000, 3)
    """
    if not isinstance(fit, LinearFit | LogisticFit):
        raise TypeError(
            f"sparse_as_tempered_fit takes a LinearFit or LogisticFit, got {type(fit).__name__}."
        )
    if isinstance(fit, LinearFit) and fit.noise_posterior is not None:
        raise ValueError(
            "the noise of this LinearFit has a prior, which the model of sparse_as_tempered_fit has not: fit "
            "with noise_scale, or with an estimated one."
        )
    x, y = as_data(x, y)
    setup_key, *keys = jax.random.split(rng_key, 3)
    tempered = tempered_model(fit)
    guide = AutoSpikeAndSlab(tempered)
    args = (jnp.asarray(x, fit.posterior.loc.dtype), jnp.asarray(y))
    first_call(lambda: handlers.seed(guide, setup_key)(*args), guide)
    params = {
        f"coef_auto_{field}": value for field, value in fit.posterior._asdict().items()
    }
    if fit.intercept is not None:
        params |= {
            f"intercept_auto_{field}": value
            for field, value in fit.intercept._asdict().items()
        }
    result = finish(
        (keys[0], keys[1]),
        tempered,
        guide,
        params,
        jnp.zeros(0),
        args,
        kwargs={},
        num_particles=num_particles,
    )
    value, kl = fit.as_elbo().value, result.elbo.kl
    off = result.elbo.value - value
    slack = 0.5 + 6.0 * result.elbo.se + 1e-4 * abs(value)
    # The objective of a logistic fit is below its ELBO; that of a linear one is its ELBO.
    if off < -slack or (isinstance(fit, LinearFit) and off > slack):
        raise ValueError(
            f"the ELBO on these data is {result.elbo.value:.4g} ± {result.elbo.se:.2g}, the fit's {value:.4g}: "
            "give the x and y that it was fitted to."
        )
    if isinstance(fit, LogisticFit):
        return result
    return result._replace(
        elbo=TemperedELBO(value, 0.0, (value + kl) / float(np.asarray(fit.alpha)), kl)
    )


def _rows(fit: SparseFit, x: ArrayLike) -> Array:
    """Rows less the centre, in the precision of the fit.

    Raises:
        ValueError: If their shape is not that of rows of the fit.
    """
    values = real_array(x, "x")
    d = fit.centre.shape[0]
    if values.ndim != 2 or values.shape[1] != d:
        raise ValueError(
            f"x must have shape (n, {d}), as the rows of the fit, got {values.shape}."
        )
    return jnp.asarray(values - fit.centre, fit.posterior.loc.dtype)
