r"""The noise of a linear model: known, estimated, or with a conjugate prior.

Each function takes the expected squared error :math:`S = E_q|y - X\theta|^2` and gives E[1/v] with the terms of
the tempered ELBO that hold it, :math:`\alpha E\log N(y; X\theta, v) - \mathrm{KL}(q(v), \pi)`, at the best q(v).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import gammaln

from numpyro_tempered.core.typing import Array

LOG_2PI = 1.8378770664093453


class Noise(NamedTuple):
    """What is known of the noise.

    Attributes:
        precision: E[1/v].
        bound: Its terms of the ELBO.
    """

    precision: Array
    bound: Array


class Known(NamedTuple):
    """Noise of a given standard deviation.

    Attributes:
        scale: In units of y.
    """

    scale: Array


class Estimated(NamedTuple):
    """The v that maximises the ELBO, S/n: alpha cancels.

    Attributes:
        floor: Smallest v: an exact fit would send it to 0.
    """

    floor: Array


class Gamma(NamedTuple):
    """Prior Ga(shape, rate) of 1/v.

    Attributes:
        shape: Its shape.
        rate: Its rate, in squared units of y.
    """

    shape: Array
    rate: Array


def gamma_posterior(prior: Gamma, error: Array, num_rows: int, alpha: Array) -> Gamma:
    """The best q(1/v): Ga(a + αn/2, b + αS/2)."""
    return Gamma(prior.shape + 0.5 * alpha * num_rows, prior.rate + 0.5 * alpha * error)


def update_noise(model: Known | Estimated | Gamma, error: Array, num_rows: int, alpha: Array) -> Noise:
    """The best q(v) given the expected squared error."""
    if isinstance(model, Gamma):
        q = gamma_posterior(model, error, num_rows, alpha)
        # The digammas in E log v and in the KL cancel.
        gain = gammaln(q.shape) - gammaln(model.shape) + model.shape * jnp.log(model.rate / q.rate)
        half = 0.5 * alpha * num_rows
        return Noise(q.shape / q.rate, gain - half * (LOG_2PI + jnp.log(q.rate)))
    best = error / num_rows
    variance = jnp.square(model.scale) if isinstance(model, Known) else jnp.maximum(best, model.floor)
    bound = -0.5 * alpha * (num_rows * (LOG_2PI + jnp.log(variance)) + error / variance)
    return Noise(1.0 / variance, bound)
