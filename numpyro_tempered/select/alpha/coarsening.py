"""Alpha by coarsening, MD19."""

import math

import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Criterion, Verdict
from numpyro_tempered.select.alpha.task import Task


def coarsening(a: float) -> Criterion:
    r"""Alpha of a posterior given that the data are only near a sample of the model (Miller and Dunson).

    **Aim: robustness** to a departure of known size, neither risk nor coverage. The posterior is conditioned on
    the event that the observed data lie within a relative entropy R of data from the model, with R exponential of
    mean 1/a. For relative entropy this is, nearly, the posterior with the power

    .. math:: \alpha = \frac{1}{1 + n / a}.

    So no amount of data counts for more than a: the power times n rises to a, never above. ``a`` is the number of
    data at which the model's departure from the truth begins to show, and 1/a the departure in relative entropy
    (nats per datum) that one is willing to pass over. Where it is known, as from an instrument's error or a
    population of earlier data sets, take 1/a of that size. Where it is not, read the **calibration curve**: call
    ``select_alpha`` with a grid of alphas and plot its expected log-likelihood against its effective
    parameters. As alpha rises from 0 the fit rises steeply while parameters of use come in, then bends: beyond
    the bend a further parameter buys little fit. Take the alpha of the bend, and a = n α / (1 - α).

    n counts the rows of the data; rows that the model masks count too, so leave them out.

    Args:
        a: A positive number, in data.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`.

    Raises:
        ValueError: If ``a`` is not positive and finite.

    References:
        MD19.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.task import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> key = jax.random.key(0)
        >>> coarsening(30.0).decide(key, Task(model, key, (jnp.ones(90),), {}), jnp.ones(1), None).alpha
        0.25
    """
    if isinstance(a, bool) or not (a > 0 and math.isfinite(a)):
        raise ValueError(
            f"a must be positive and finite, got {a!r}: the number of data at which the departure shows."
        )

    def decide(rng_key: Array, task: Task, grid: np.ndarray, reduced: None) -> Verdict:
        n = task.num_data
        alpha = float(1.0 / (1.0 + n / a))
        return Verdict(
            alpha,
            {},
            {"coarsening_a": float(a), "effective_num_data": alpha * n},
            f"alpha = {alpha:.3g} by coarsening(a={a:g}), which aims at robustness to departures of about "
            f"{1.0 / a:.2g} nats a datum: the {n} data count as {alpha * n:.3g}. Whether there is a need to "
            "temper is said by a, not by the data.",
        )

    return Criterion("coarsening", "robustness", None, decide)
