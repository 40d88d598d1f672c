"""The losses of a model at their minimiser: curvature, variance of the scores, and what forbids using them."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_tempered.core import (
    Array,
    PyTree,
    doubles,
    jacobian,
    run_program,
    trace_once,
)
from numpyro_tempered.select.alpha.base import Decision, Task
from numpyro_tempered.select.alpha.dependence import (
    Dependence,
    bandwidth,
    describe,
    num_units,
    sum_of_dependent,
)
from numpyro_tempered.select.alpha.minimise import Minimum, minimise

# Deviation of alpha from 1 that does not matter: widths go as the square root of the power.
NEGLIGIBLE = 0.05
# The inverse of a mean of n outer products of Gaussian vectors is too large by n / (n - d - 2), a quarter at
# n = 5 (d + 2); that of scores by more, as they are taken at the minimiser.
DATA_PER_DIMENSION = 5

LossFunction = Callable[[Array], Array]
# Of the minimiser, J and I.
Functional = Callable[[Array, Array, Array], Array]
Values = TypeVar("Values")


class Sandwich(NamedTuple):
    """The losses of n data at the minimiser of their sum.

    Attributes:
        minimum: The minimiser of the total loss.
        curvature: J, the mean of the Hessians, ``(d, d)``.
        variance: I, the covariance of the sum of the scores over n, ``(d, d)``: of independent data the mean of
            the outer products of the scores.
        powers: Inverse eigenvalues of I relative to J, ``(d,)``, ascending: the power that each direction asks
            for. All are 1 in the limit where the model is right.
        lags: The largest lag at which data of a series depend on each other; 0 where there is none.
    """

    minimum: Minimum
    curvature: Array
    variance: Array
    powers: Array
    lags: Array


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


class Estimate(NamedTuple):
    """The sandwich of a task, on the host and checked.

    Attributes:
        flat: The task on the flat unconstrained scale.
        dependence: Of its data.
        sandwich: The sandwich.
        influence: Of each datum on the minimiser, ``(n, d)``: the inverse of J times its score.
    """

    flat: Flat
    dependence: Dependence
    sandwich: Sandwich
    influence: np.ndarray

    @property
    def lags(self) -> int:
        """The largest lag at which data of a series depend on each other."""
        return int(self.sandwich.lags)

    @property
    def num_units(self) -> int:
        """Number of independent data, groups or blocks."""
        return num_units(self.dependence, self.lags)

    @property
    def few(self) -> bool:
        """Whether independent units are too few for the inverse of I."""
        return self.num_units < least_data(len(self.sandwich.curvature))

    def evaluate(self, functional: Functional) -> tuple[np.ndarray, np.ndarray]:
        """A functional of the minimiser, J and I, with its standard error over samples of the data."""

        def compute(sandwich: Sandwich) -> tuple[Array, Array]:
            value = functional(
                sandwich.minimum.point, sandwich.curvature, sandwich.variance
            )
            return value, sampling_se(
                self.flat.losses, sandwich, functional, self.dependence
            )

        value, se = jax.device_get(run_differentiated(compute, self.sandwich))
        return doubles(value), doubles(se)


def least_data(dim: int) -> int:
    """The least number of independent data for d latent dimensions."""
    return DATA_PER_DIMENSION * (dim + 2)


def flat_task(task: Task) -> Flat:
    """A task on the flat unconstrained scale, its model traced once.

    Raises:
        ValueError: If a latent is discrete, or the data are few for their number.
    """
    start, unravel = task.flat()
    least = least_data(len(start))
    if task.num_data < least:
        raise ValueError(
            f"{task.num_data} data are too few for {len(start)} latent dimensions, as the inverse variance of "
            f"the scores is biased: take safe_bayes(), or the power 1/2. At least {least}, 5 (d + 2), are needed."
        )
    return Flat(
        start,
        trace_once(lambda theta: task.losses(unravel(theta)), start),
        trace_once(lambda theta: task.log_prior(unravel(theta)), start),
    )


def run_differentiated(
    function: Callable[..., Values],
    *args: PyTree,
    instead: str = "Take safe_bayes(), or",
) -> Values:
    """:func:`run_program` for a function that differentiates a log-likelihood, two times or more.

    ``instead`` begins what to do where that cannot be.

    Raises:
        ValueError: If JAX cannot.
    """
    try:
        return run_program(function, *args)
    except TypeError as error:
        raise ValueError(
            f"JAX cannot differentiate the log-likelihood as often as this needs ({error}). {instead} "
            "solve differential equations by a method that has derivatives in forward mode."
        ) from error


def variance_of_scores(
    scores: Array, counts: Array, dependence: Dependence, lags: Array
) -> Array:
    """I of data that occur ``counts`` ``(n,)`` times, from their scores ``(n, d)``."""
    product = (counts[:, None] * scores).T @ sum_of_dependent(dependence, scores, lags)
    return (product + product.T) / (2 * len(counts))


def centred(scores: Array, counts: Array) -> Array:
    """The scores ``(n, d)`` less their mean, of data that occur ``counts`` ``(n,)`` times."""
    return scores - counts @ scores / jnp.sum(counts)


def sandwich(
    losses: LossFunction,
    start: Array,
    dependence: Dependence | None = None,
    *,
    penalty: LossFunction | None = None,
) -> Sandwich:
    """Minimum, J and I of the losses, of independent data by default; pure, without checks.

    A ``penalty``, such as minus the log-density of a prior, from ``(d,)`` to a number, is part of the sum that is
    minimised, and of J. It is the same in all samples, so that the scores are those of the losses about their
    mean, which is not 0 there.
    """
    terms = (
        losses
        if penalty is None
        else lambda theta: jnp.append(losses(theta), penalty(theta))
    )
    minimum = minimise(terms, start)
    num_data = jax.eval_shape(losses, start).shape[0]
    dependence = Dependence(num_data) if dependence is None else dependence
    curvature = minimum.hessian / num_data
    factor = jnp.linalg.cholesky(curvature)
    scores, counts = jacobian(losses, minimum.point), jnp.ones(num_data, start.dtype)
    if penalty is not None:
        scores = centred(scores, counts)
    lags = bandwidth(dependence, solve_triangular(factor, scores.T, lower=True).T)
    variance = variance_of_scores(scores, counts, dependence, lags)
    half = solve_triangular(factor, variance, lower=True)
    relative = solve_triangular(factor, half.T, lower=True)
    return Sandwich(
        minimum, curvature, variance, 1.0 / jnp.linalg.eigvalsh(relative)[::-1], lags
    )


def sampling_se(
    losses: LossFunction,
    estimate: Sandwich,
    functional: Functional,
    dependence: Dependence | None = None,
    *,
    penalty: LossFunction | None = None,
) -> Array:
    """Standard error over samples of the data of a functional of the minimiser, J and I, in its shape.

    The infinitesimal jackknife: the norm of the derivatives by the counts of single data, which move J and I
    themselves and through the minimiser, summed over data that depend on each other. The functional must not
    change where all counts are doubled, nearly so where a ``penalty`` is not.
    """
    point = estimate.minimum.point
    num_data = jax.eval_shape(losses, point).shape[0]
    dependence = Dependence(num_data) if dependence is None else dependence

    def value(counts: Array, theta: Array) -> Array:
        def total(theta: Array) -> Array:
            return counts @ losses(theta) + (0.0 if penalty is None else penalty(theta))

        scores = jacobian(losses, theta)
        scores = scores if penalty is None else centred(scores, counts)
        variance = variance_of_scores(scores, counts, dependence, estimate.lags)
        return functional(theta, jacobian(jax.grad(total), theta) / num_data, variance)

    at, pull = jax.vjp(value, jnp.ones(num_data, point.dtype), point)
    factor, scores = (
        jnp.linalg.cholesky(estimate.minimum.hessian),
        jacobian(losses, point),
    )

    def standard_error(cotangent: Array) -> Array:
        by_count, by_theta = pull(cotangent)
        # d theta / d count_i = - (sum of Hessians)^-1 score_i.
        shift = cho_solve((factor, True), by_theta)
        influence = by_count - scores @ shift
        variance = jnp.sum(
            influence * sum_of_dependent(dependence, influence, estimate.lags)
        )
        return jnp.sqrt(jnp.maximum(variance, 0.0))

    cotangents = jnp.eye(at.size, dtype=at.dtype).reshape(-1, *at.shape)
    return jax.lax.map(standard_error, cotangents).reshape(at.shape)


def estimate_of(task: Task) -> Estimate:
    """The sandwich of a task, computed once for all criteria.

    Raises:
        ValueError: If the data or their groups are few, the total loss has no minimiser inside, or J or I are
            ill-conditioned.
    """
    if task.estimate is None:
        task.estimate = _estimate(flat_task(task), task.dependence)
    return task.estimate


def _estimate(flat: Flat, dependence: Dependence) -> Estimate:
    def compute(start: Array) -> tuple[Array, Sandwich, Array]:
        # A draw from a wide prior may be far out, where exponentials overflow: the origin may be better.
        points = jnp.stack([start, jnp.zeros_like(start)])
        totals = jax.vmap(lambda theta: jnp.sum(flat.losses(theta)))(points)
        totals = jnp.where(jnp.isfinite(totals), totals, jnp.inf)
        of_losses = sandwich(flat.losses, points[jnp.argmin(totals)], dependence)
        scores = jacobian(flat.losses, of_losses.minimum.point)
        influence = cho_solve(
            (jnp.linalg.cholesky(of_losses.curvature), True), scores.T
        ).T
        return jnp.min(totals), of_losses, influence

    least, of_losses, influence = jax.device_get(
        run_differentiated(compute, flat.start)
    )
    if not np.isfinite(least):
        raise ValueError(
            "the log-likelihood is finite neither at a draw from the prior nor at the unconstrained origin: look "
            "for data that the model thinks impossible."
        )
    estimate = Estimate(flat, dependence, of_losses, influence)
    dim = len(flat.start)
    if estimate.num_units < dim + 2:
        what = (
            "groups"
            if dependence.labels is not None
            else f"blocks of {estimate.lags + 1} data"
        )
        raise ValueError(
            f"{estimate.num_units} {what} do not tell how {dim} latent dimensions vary: at least {dim + 2}, "
            "d + 2, are needed. Take safe_bayes()."
        )
    check_sandwich(of_losses)
    return estimate


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
    powers = doubles(estimate.powers)
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


def coverage_decision(
    name: str, alpha: float, se: float, what: str, estimate: Estimate, **attrs: object
) -> Decision:
    """The decision of a criterion that aims at the coverage of ``what``, with the sandwich in its attributes."""
    powers = doubles(estimate.sandwich.powers)
    attrs |= {
        "alpha_se": se,
        "condition_hessian": float(estimate.sandwich.minimum.condition),
        "condition_scores": float(powers[-1] / powers[0]),
        "power_least": float(powers[0]),
        "power_largest": float(powers[-1]),
        "num_independent": estimate.num_units,
    }
    return Decision(alpha, {}, attrs, advise(name, alpha, se, what, estimate))


def advise(name: str, alpha: float, se: float, what: str, estimate: Estimate) -> str:
    """One sentence on an alpha that aims at coverage."""
    what += describe(estimate.dependence, estimate.lags)
    head = f"alpha = {alpha:.3g} (standard error {se:.2g}) by {name}, which aims at the coverage of {what}: "
    if abs(alpha - 1.0) <= 2.0 * se:
        advice = "within two standard errors of 1, so there is no need to temper"
    elif abs(alpha - 1.0) <= NEGLIGIBLE:
        advice = f"it would change widths by less than {NEGLIGIBLE / 2:.1%}, so there is no need to temper"
    elif alpha < 1.0:
        advice = "the untempered posterior is too narrow for these data, so temper"
    else:
        advice = "the untempered posterior is too wide for these data, and a power above 1 narrows it"
    powers = estimate.sandwich.powers
    if len(powers) > 1:
        advice += f"; single directions of the latents ask for {powers[0]:.2g} to {powers[-1]:.2g}"
    if estimate.few:
        advice += f"; only {estimate.num_units} units are independent, so the power is a rough one"
    return f"{head}{advice}."
