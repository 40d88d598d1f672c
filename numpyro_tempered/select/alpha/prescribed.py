"""Alphas that do not depend on the values of the data: by coarsening, MD19, and by the theory's bounds."""

import numpy as np

from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Criterion, Task, Verdict


def coarsening(a: float) -> Criterion:
    r"""Alpha of a posterior given that the data are only near a sample of the model (Miller and Dunson).

    **Aim: robustness** to a departure of known size, neither risk nor coverage. The posterior is conditioned on
    the event that the observed data lie within a relative entropy R of data from the model, with R exponential of
    mean 1/a. For relative entropy this is, nearly, the posterior with the power

    .. math:: \alpha = \frac{1}{1 + n / a}.

    So the data never count for more than a: the power times n rises to a. ``a`` is the number of
    data at which the model's departure from the truth begins to show, and 1/a the departure in relative entropy
    (nats per datum) that you accept. Where it is known, for instance from an instrument's error or from
    earlier data sets, take 1/a of that size. Where it is not, read the **calibration curve**: call
    ``select_alpha`` with a grid of ``alphas`` and plot its expected log-likelihood against its effective
    parameters. As alpha rises from 0 the fit rises steeply while useful parameters enter, then bends: beyond
    the bend a further parameter adds little. Take the alpha of the bend, and a = n α / (1 - α).

    n counts the rows of the data, and the rows that the model masks too: leave these out.

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
        >>> from numpyro_tempered.select.alpha.base import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> key = jax.random.key(0)
        >>> coarsening(30.0).decide(key, Task(model, key, (jnp.ones(90),), {}), jnp.ones(1), None).alpha
        0.25
    """
    check_number(a, "a", "(0, inf)", hint="It is the number of data at which the departure shows.")

    def decide(rng_key: Array, task: Task, grid: np.ndarray, summary: None) -> Verdict:
        n = task.num_data
        alpha = float(1.0 / (1.0 + n / a))
        return Verdict(
            alpha,
            {},
            {"coarsening_a": float(a), "effective_num_data": alpha * n},
            f"alpha = {alpha:.3g} by coarsening(a={a:g}), which aims at robustness to departures of about "
            f"{1.0 / a:.2g} nats a datum: the {n} data count as {alpha * n:.3g}. Whether there is a need to "
            "temper depends on a, not on the data.",
        )

    return Criterion("coarsening", "robustness", None, decide)


def theory_default() -> Criterion:
    r"""The power 1/2, whatever the data.

    **Aim: a guarantee on risk** in the worst case, for an unknown departure of the model from the truth. The
    tempered posterior concentrates for every α < 1 under a condition on the prior mass alone; with the rate
    :math:`r_n`,

    .. math:: E \int D_\alpha(P_\theta, P_0)\, d\tilde\pi_{n,\alpha} \le \frac{1 + \alpha}{1 - \alpha}\, r_n.

    As :math:`D_{1/2} \le D_\alpha` for α >= 1/2 and :math:`D_{1/2} \le \frac{1 - \alpha}{\alpha} D_\alpha` below,
    the bound on :math:`D_{1/2}` that follows, :math:`3 r_n`, is least at α = 1/2, for every rate. With H the
    Hellinger distance, :math:`D_{1/2} = -2\log(1 - H^2/2) \ge H^2`.

    Use it as a default before the data arrive, for a model that other criteria refuse (discrete latents, few
    data, no rows), and for statements that need the theorem. Do not use it for intervals: on a well-specified
    model those at 1/2 are too wide by a factor of :math:`\sqrt 2`.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`.

    References:
        AR; vEH, Theorem 16.

    Example:
        >>> theory_default().decide(None, None, None, None).alpha
        0.5
    """

    def decide(rng_key: Array, task: Task, grid: np.ndarray, summary: None) -> Verdict:
        return Verdict(
            0.5,
            {},
            {},
            "alpha = 0.5 by theory_default(), which aims at the least bound on the risk in Rényi divergence of "
            "order 1/2 and has not looked at the data: whether there is a need to temper is not said.",
        )

    return Criterion("theory_default", "risk", None, decide)
