"""A sparse regression as a tempered fit of a NumPyro model."""

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_tempered.core.result import TemperedELBO
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.sparse.arguments import as_data
from numpyro_tempered.sparse.base import LinearFit, LogisticFit
from numpyro_tempered.sparse.model import regression_model


def sparse_as_tempered_fit(
    rng_key: Array, fit: LinearFit | LogisticFit, x: ArrayLike, y: ArrayLike, *, num_particles: int = 1000
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
        raise TypeError(f"sparse_as_tempered_fit takes a LinearFit or LogisticFit, got {type(fit).__name__}.")
    if isinstance(fit, LinearFit) and fit.noise_posterior is not None:
        raise ValueError(
            "the noise of this LinearFit has a prior, which the model of sparse_as_tempered_fit has not: fit "
            "with noise_scale, or with an estimated one."
        )
    x, y = as_data(x, y)
    setup_key, *keys = jax.random.split(rng_key, 3)
    alpha = float(jnp.asarray(fit.alpha))
    noise_scale = fit.noise_scale if isinstance(fit, LinearFit) else None
    tempered = temper(regression_model(fit.prior, fit.centre, noise_scale), alpha=alpha)
    guide = AutoSpikeAndSlab(tempered)
    args = (jnp.asarray(x, fit.posterior.loc.dtype), jnp.asarray(y))
    handlers.seed(guide, setup_key)(*args)
    params = {f"coef_auto_{field}": value for field, value in fit.posterior._asdict().items()}
    if fit.intercept is not None:
        params |= {f"intercept_auto_{field}": value for field, value in fit.intercept._asdict().items()}
    result = finish(
        (keys[0], keys[1]), tempered, guide, params, jnp.zeros(0), args, kwargs={}, num_particles=num_particles
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
    return result._replace(elbo=TemperedELBO(value, 0.0, (value + kl) / alpha, kl))
