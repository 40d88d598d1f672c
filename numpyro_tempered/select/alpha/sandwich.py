"""The losses of a model at their minimiser: curvature, variance of the scores, and what forbids using them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Task, Verdict
from numpyro_tempered.select.alpha.minimise import Minimum, minimise

# Deviation of alpha from 1 that does not matter: widths go as the square root of the power.
NEGLIGIBLE = 0.05
# The inverse of a mean of n outer products of Gaussian vectors is too large by n / (n - d - 2), a quarter at
# n = 5 (d + 2); that of scores by more, as they are taken at the minimiser.
DATA_PER_DIMENSION = 5

LossFunction = Callable[[Array], Array]
# Of the minimiser, J and I.
Functional = Callable[[Array, Array, Array], Array]


class Sandwich(NamedTuple):
    """The losses of n data at the minimiser of their sum.

    Attributes:
        minimum: The minimiser of the total loss.
        curvature: J, the mean of the Hessians, ``(d, d)``.
        variance: I, the mean of the outer products of the scores, ``(d, d)``.
        powers: Inverse eigenvalues of I relative to J, ``(d,)``, ascending: the power that each direction asks
            for. All are 1 in the limit where the model is right.
    """

    minimum: Minimum
    curvature: Array
    variance: Array
    powers: Array


class Flat(NamedTuple):
    """A task on the flat unconstrained scale.

    Attributes:
        start: A feasible point, ``(d,)``.
        losses: Of each datum, from ``(d,)`` to ``(n,)``.
        log_prior: The log-density of the prior there, from ``(d,)`` to a number.
    """

    start: Array
    losses: LossFunction
    log_prior: LossFunction


def flat_task(task: Task) -> Flat:
    """A task on the flat unconstrained scale, its model traced once.

    Raises:
        ValueError: If a latent is discrete, or the data are few for their number.
    """
    start, unravel = task.flat()
    least = DATA_PER_DIMENSION * (len(start) + 2)
    if task.num_data < least:
        raise ValueError(
            f"{task.num_data} data are too few for {len(start)} latent dimensions, as the inverse variance of "
            f"the scores is biased: take safe_bayes() or theory_default(). At least {least}, 5 (d + 2), are "
            "needed."
        )
    return Flat(
        start,
        jax.jit(lambda theta: task.losses(unravel(theta))),
        jax.jit(lambda theta: task.log_prior(unravel(theta))),
    )


def variance_of_scores(losses: LossFunction, theta: Array, counts: Array) -> Array:
    """I of data that occur ``counts`` ``(n,)`` times."""
    scores = jax.jacfwd(losses)(theta)
    return (counts[:, None] * scores).T @ scores / len(counts)


def sandwich(losses: LossFunction, start: Array) -> Sandwich:
    """Minimum, J and I of the losses; pure, without checks."""
    minimum = minimise(losses, start)
    num_data = jax.eval_shape(losses, start).shape[0]
    curvature = minimum.hessian / num_data
    variance = variance_of_scores(losses, minimum.point, jnp.ones(num_data, start.dtype))
    factor = jnp.linalg.cholesky(curvature)
    half = solve_triangular(factor, variance, lower=True)
    relative = solve_triangular(factor, half.T, lower=True)
    return Sandwich(minimum, curvature, variance, 1.0 / jnp.linalg.eigvalsh(relative)[::-1])


def sampling_se(losses: LossFunction, estimate: Sandwich, functional: Functional) -> Array:
    """Standard error over samples of the data of a functional of the minimiser, J and I.

    The infinitesimal jackknife: the norm of the derivatives by the counts of single data, which move J and I
    themselves and through the minimiser. The functional must not change where all counts are doubled.
    """
    point = estimate.minimum.point
    num_data = jax.eval_shape(losses, point).shape[0]

    def value(counts: Array, theta: Array) -> Array:
        curvature = jax.jacfwd(jax.grad(lambda t: counts @ losses(t)))(theta) / num_data
        return functional(theta, curvature, variance_of_scores(losses, theta, counts))

    by_count, by_theta = jax.grad(value, argnums=(0, 1))(jnp.ones(num_data, point.dtype), point)
    # d theta / d count_i = - (sum of Hessians)^-1 score_i.
    shift = cho_solve((jnp.linalg.cholesky(estimate.minimum.hessian), True), by_theta)
    return jnp.linalg.norm(by_count - jax.jvp(losses, (point,), (shift,))[1])


def checked_sandwich(flat: Flat, functional: Functional) -> tuple[Sandwich, float, float]:
    """The sandwich on the host, the functional, and its sampling standard error.

    Raises:
        ValueError: If the data are few, the total loss has no minimiser inside, or J or I are ill-conditioned.
    """

    @jax.jit
    def compute(start: Array) -> tuple[Array, Sandwich, Array, Array]:
        # A draw from a wide prior may be far out, where exponentials overflow: the origin may be better.
        points = jnp.stack([start, jnp.zeros_like(start)])
        totals = jax.vmap(lambda theta: jnp.sum(flat.losses(theta)))(points)
        totals = jnp.where(jnp.isfinite(totals), totals, jnp.inf)
        estimate = sandwich(flat.losses, points[jnp.argmin(totals)])
        value = functional(estimate.minimum.point, estimate.curvature, estimate.variance)
        return jnp.min(totals), estimate, value, sampling_se(flat.losses, estimate, functional)

    least, estimate, value, se = jax.device_get(compute(flat.start))
    if not np.isfinite(least):
        raise ValueError(
            "the log-likelihood is finite neither at a draw from the prior nor at the unconstrained origin: look "
            "for data that the model thinks impossible."
        )
    check_sandwich(estimate)
    return estimate, float(value), float(se)


def check_sandwich(estimate: Sandwich) -> None:
    """Raise where a sandwich cannot be used."""
    minimum, dtype = estimate.minimum, estimate.minimum.point.dtype
    # Half of the digits are left.
    limit = float(np.finfo(dtype).eps) ** -0.5
    if not minimum.condition <= limit:
        raise ValueError(
            f"the Hessian of the total loss has condition number {minimum.condition:.2g} where {dtype} allows "
            f"{limit:.2g}: the likelihood alone does not identify the latents, as in a hierarchical model, for "
            "collinear features or separable classes. Use float64, scale features, or take safe_bayes()."
        )
    if not minimum.converged:
        raise ValueError(
            f"the total loss has no minimiser that Newton's method finds (last step: {minimum.step:.2g} standard "
            "deviations): separable classes, a scale that falls to 0, or a flat likelihood. Look at the maximum "
            "likelihood fit, use float64 for large or badly scaled data, or take safe_bayes()."
        )
    powers = np.asarray(estimate.powers, np.float64)
    # Scores that are rounding errors have squares of the size of the resolution's.
    if not (np.all(powers > 0) and powers[-1] <= limit**2):
        raise ValueError(
            "the scores of the data vanish at the minimiser in some direction, where the model fits data exactly "
            "or one datum decides on a latent: leave such latents out, or take safe_bayes()."
        )
    if powers[-1] > limit * powers[0]:
        raise ValueError(
            f"the variance of the scores has condition number {powers[-1] / powers[0]:.2g} relative to the "
            f"Hessian, where {dtype} allows {limit:.2g}: some direction has next to no noise, as where one datum "
            "decides on a latent. Leave such latents out, or take safe_bayes()."
        )


def coverage_verdict(
    name: str, alpha: float, se: float, what: str, estimate: Sandwich, **attrs: object
) -> Verdict:
    """The verdict of a criterion that aims at the coverage of ``what``, with the sandwich in its attributes."""
    powers = np.asarray(estimate.powers, np.float64)
    attrs |= {
        "alpha_se": se,
        "condition_hessian": float(estimate.minimum.condition),
        "condition_scores": float(powers[-1] / powers[0]),
        "power_least": float(powers[0]),
        "power_largest": float(powers[-1]),
    }
    return Verdict(alpha, {}, attrs, advise(name, alpha, se, what, estimate))


def advise(name: str, alpha: float, se: float, what: str, estimate: Sandwich) -> str:
    """One sentence on an alpha that aims at coverage."""
    head = f"alpha = {alpha:.3g} (standard error {se:.2g}) by {name}, which aims at the coverage of {what}: "
    if abs(alpha - 1.0) <= 2.0 * se:
        advice = "within two standard errors of 1, so there is no need to temper"
    elif abs(alpha - 1.0) <= NEGLIGIBLE:
        advice = f"it would change widths by less than {NEGLIGIBLE / 2:.1%}, so there is no need to temper"
    elif alpha < 1.0:
        advice = "the untempered posterior is too narrow for these data, so temper"
    else:
        advice = "the untempered posterior is too wide for these data, and a power above 1 narrows it"
    powers = estimate.powers
    if len(powers) > 1:
        advice += f"; single directions of the latents ask for {powers[0]:.2g} to {powers[-1]:.2g}"
    return f"{head}{advice}."
