"""Alpha by matching information, LHW."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array
from numpyro_tempered.select.alpha.base import Criterion, Decision, Task
from numpyro_tempered.select.alpha.sandwich import coverage_decision, estimate_of


def lyddon() -> Criterion:
    r"""Alpha by matching the information of posterior and bootstrap (Lyddon, Holmes and Walker).

    **Aim: coverage**, of the exact posterior's intervals for the latents near its mode. It does not aim at
    prediction, as :func:`safe_bayes` does; the two differ by design.

    The tempered posterior has the curvature :math:`\alpha n J`, the loss-likelihood bootstrap
    :math:`n J I^{-1} J`. Their traces are equal at

    .. math:: \alpha = \frac{\mathrm{tr}(J I^{-1} J)}{\mathrm{tr}(J)},

    with J the mean Hessian and I the covariance of the sum of the scores of the untempered losses over n, at the
    minimiser of the total loss: of independent data the mean outer product of the scores; of data in ``groups``
    that of the sums within groups; of a series with ``block`` the estimate of Newey and West. Both are taken on
    the flat unconstrained scale, and with several latents α depends on their units: it is a mean of the powers
    that single directions ask for, whose range is reported as ``power_least`` and ``power_largest``. Where they
    are far apart no single α gives all latents their coverage.

    With few data for each dimension α is too large, because residuals are smaller than errors and their inverse
    moments larger. On well-specified regressions with d = 10 its mean was 1.8 at n = 6 d, 1.4 at 10 d, 1.2 at 20
    d and 1.1 at 50 d; :func:`gpc` and :func:`bootstrap_fisher` are off by less.

    The standard error is over samples of the data (the infinitesimal jackknife); at n = 10 d it was a seventh to
    a quarter below the spread over data sets. The minimiser is a local one, found from a draw of the prior or the
    origin, and the prior plays no other part.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`, which refuses with ValueError

        - discrete latents, which have no scores;
        - less than 5 (d + 2) data for d dimensions: the inverse of I, and α with it, is far too large there;
        - a total loss that has no minimiser inside: separable classes, hierarchical models;
        - a Hessian, scaled to a unit diagonal, or I relative to J with a condition number over that at which half
          of the digits are lost: 3e3 in float32, 7e7 in float64.

    References:
        LHW; NW.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.base import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> key = jax.random.key(0)
        >>> decision = lyddon().decide(key, Task(model, key, (y,), {}), jnp.ones(1), None)
        >>> round(decision.alpha, 5)
        0.25
    """

    def decide(rng_key: Array, task: Task, grid: np.ndarray, summary: None) -> Decision:
        estimate = estimate_of(task)
        alpha, se = map(float, estimate.evaluate(lambda _, j, i: matched_power(j, i)))
        return coverage_decision(
            "lyddon()", alpha, se, "the exact posterior's intervals", estimate
        )

    return Criterion("lyddon", "coverage", None, decide)


def matched_power(curvature: Array, variance: Array) -> Array:
    """tr(J I^-1 J) / tr(J)."""
    half = solve_triangular(jnp.linalg.cholesky(variance), curvature, lower=True)
    return jnp.sum(jnp.square(half)) / jnp.trace(curvature)
