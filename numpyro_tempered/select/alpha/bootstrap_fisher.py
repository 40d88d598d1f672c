"""Alpha by the Fisher divergence to the bootstrap, Mat."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, check_count, doubles, jacobian
from numpyro_tempered.select.alpha.base import Criterion, Decision, Task
from numpyro_tempered.select.alpha.data_weights import over_resamples
from numpyro_tempered.select.alpha.dependence import resample_counts
from numpyro_tempered.select.alpha.minimise import minimise
from numpyro_tempered.select.alpha.sandwich import (
    Flat,
    coverage_decision,
    estimate_of,
    run_differentiated,
)


class FisherParts(NamedTuple):
    """Of each resample, ``(B,)`` each.

    Attributes:
        numerator: The gradients of log-prior and total loss multiplied, plus the Laplacian of the total loss.
        denominator: The squared gradient of the total loss.
        converged: Whether the resample has a minimiser.
    """

    numerator: Array
    denominator: Array
    converged: Array


def bootstrap_fisher(*, num_bootstrap: int = 500) -> Criterion:
    r"""Alpha by the least Fisher divergence from the bootstrap minimisers (Matsubara et al.).

    **Aim: coverage**, of the exact posterior's intervals for the latents: the tempered posterior is brought as
    close as one power can to the sampling distribution of the minimiser, whose draws are the bootstrap's. It does
    not aim at prediction, as :func:`safe_bayes` does; the two differ by design.

    With D the total untempered loss of the data, π the prior density and :math:`\theta_b` the minimisers of the
    total losses of B resamples of the data, of whole ``groups`` or of blocks of a series, the score-matching
    objective of :math:`\pi e^{-\alpha D}` is a parabola in α with its minimum at

    .. math:: \alpha = \frac{\sum_b \nabla\log\pi(\theta_b)^\top\nabla D(\theta_b) + \Delta D(\theta_b)}
        {\sum_b \|\nabla D(\theta_b)\|^2}.

    Without prior and with many data this is :math:`\mathrm{tr}(J) / \mathrm{tr}(I)`, J the mean Hessian and I the
    mean outer product of the scores. All derivatives are on the flat unconstrained scale, where the prior density
    has the Jacobian in it; with several latents α depends on their units.

    The standard error adds that over samples of the data, of the limit :math:`\mathrm{tr}(J) / \mathrm{tr}(I)` by
    the infinitesimal jackknife, to that of the resampling, ``alpha_se_resampling``, which falls with
    ``num_bootstrap``.

    Args:
        num_bootstrap: B, at least 20.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`, which refuses what :func:`lyddon` does,
        and a resample without minimiser (of a classification that is nearly separable).

    Raises:
        ValueError: If ``num_bootstrap`` is not an integer of at least 20.

    References:
        Mat.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.base import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> key = jax.random.key(0)
        >>> decision = bootstrap_fisher().decide(key, Task(model, key, (y,), {}), jnp.ones(1), None)
        >>> 0.15 < decision.alpha < 0.35
        True
    """
    check_count(num_bootstrap, "num_bootstrap", 20)

    def decide(rng_key: Array, task: Task, grid: np.ndarray, summary: None) -> Decision:
        estimate = estimate_of(task)
        # The limit of many data, whose relative sampling error is that of alpha.
        limit, sampling = estimate.evaluate(lambda _, j, i: jnp.trace(j) / jnp.trace(i))
        counts = resample_counts(rng_key, num_bootstrap, task.dependence, estimate.lags)

        def compute(point: Array, counts: Array) -> FisherParts:
            return fisher_parts(estimate.flat, point, counts)

        parts = jax.device_get(
            run_differentiated(compute, estimate.sandwich.minimum.point, counts)
        )
        check_converged(parts.converged)
        numerator, denominator = (doubles(part) for part in parts[:2])
        alpha = float(numerator.sum() / denominator.sum())
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(
                f"the Fisher divergence is least at alpha = {alpha:.3g}, which is no power: the prior is too "
                "strong against the data. Look at the prior, or take gpc()."
            )
        resampling = float(
            np.linalg.norm(numerator - alpha * denominator) / denominator.sum()
        )
        se = math.hypot(alpha * float(sampling / limit), resampling)
        what = "the exact posterior's intervals"
        return coverage_decision(
            "bootstrap_fisher()",
            alpha,
            se,
            what,
            estimate,
            alpha_se_resampling=resampling,
        )

    return Criterion("bootstrap_fisher", "coverage", None, decide)


def fisher_parts(flat: Flat, point: Array, counts: Array) -> FisherParts:
    """The parts of the ratio at the bootstrap minimisers; the search starts at the minimiser of all data."""
    slope_of = jax.grad(lambda theta: jnp.sum(flat.losses(theta)))

    def of_resample(counts: Array) -> FisherParts:
        minimum = minimise(lambda theta: counts * flat.losses(theta), point)
        slope, laplacian = (
            slope_of(minimum.point),
            jnp.trace(jacobian(slope_of, minimum.point)),
        )
        pull = jax.grad(flat.log_prior)(minimum.point)
        return FisherParts(pull @ slope + laplacian, slope @ slope, minimum.converged)

    return over_resamples(of_resample, counts.astype(point.dtype), len(point))


def check_converged(converged: np.ndarray) -> None:
    """Raise where a resample has no minimiser: alpha would be too large if such resamples were left out."""
    if not np.all(converged):
        raise ValueError(
            f"the total loss has no minimiser that Newton's method finds in {np.sum(~converged)} of "
            f"{len(converged)} resamples: classes are nearly separable, or a level of a factor is rare. Take "
            "lyddon() or safe_bayes(), or float64 if the data are badly scaled."
        )
