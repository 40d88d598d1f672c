"""Alpha by the magnitude adjustment of composite likelihoods, which does not depend on units."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve

from numpyro_tempered.core import Array
from numpyro_tempered.select.alpha.base import Criterion, Decision, Task
from numpyro_tempered.select.alpha.sandwich import coverage_decision, estimate_of


def magnitude() -> Criterion:
    r"""Alpha at which the likelihood ratio has the mean of its limit: cheap, and the same in all units.

    **Aim: coverage**, of the exact posterior's sets for all latents near its mode. With J the mean Hessian and I
    the mean outer product of the scores of the untempered losses at the minimiser of the total loss,

    .. math:: \alpha = \frac{d}{\mathrm{tr}(J^{-1} I)}.

    Twice the log-likelihood ratio of minimiser and truth has the mean :math:`\mathrm{tr}(J^{-1} I)` where it
    should be d. The eigenvalues of this matrix are the same in all coordinates, so α depends neither on the units
    of covariates nor on the parameters of the model, as that of :func:`lyddon` does: it is the harmonic mean of
    the powers that single directions ask for.

    With few data for each dimension the residuals at the minimiser are smaller than errors, and α is larger: of
    a regression with right noise by about :math:`n / (n - d)`. The standard error is over samples of the data, as
    in :func:`lyddon`; both take the rows for independent.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`, which refuses what :func:`lyddon` refuses.

    References:
        F. Pauli, W. Racugno, L. Ventura, *Bayesian composite marginal likelihoods*, Statistica Sinica 2011; M.
        Ribatet, D. Cooley, A. Davison, *Bayesian inference from composite likelihoods, with an application to
        spatial extremes*, Statistica Sinica 2012.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.base import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> key = jax.random.key(0)
        >>> decision = magnitude().decide(key, Task(model, key, (y,), {}), jnp.ones(1), None)
        >>> round(decision.alpha, 5)
        0.25
    """

    def decide(rng_key: Array, task: Task, grid: np.ndarray, summary: None) -> Decision:
        estimate = estimate_of(task)
        alpha, se = map(
            float, estimate.evaluate(lambda _, j, i: magnitude_adjustment(j, i))
        )
        return coverage_decision(
            "magnitude()", alpha, se, "the exact posterior's sets", estimate
        )

    return Criterion("magnitude", "coverage", None, decide)


def magnitude_adjustment(curvature: Array, variance: Array) -> Array:
    """The dimension d / tr(J^-1 I)."""
    factor = jnp.linalg.cholesky(curvature)
    return len(curvature) / jnp.trace(cho_solve((factor, True), variance))
