"""The sampling standard deviations of a fit, by the sandwich of curvature and scores."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Params,
    check_count,
    doubles,
    jacobian,
    key_first,
    map_batches,
    run_program,
    runs_models,
    trace_once,
    warn_caller,
)
from numpyro_tempered.gaussian.descent.mixture_energy import normal_nodes
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.rows import find_data, log_lik_of_each
from numpyro_tempered.handlers.target import Target, check_density
from numpyro_tempered.infer.elbo import gaussian_of_laplace, has_point_mass
from numpyro_tempered.infer.guide_laws import location_scale_of
from numpyro_tempered.infer.moments import LocationScale, Moments, moments_of
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.report.arviz import Coords, Dims
from numpyro_tempered.report.draws import SampledPosterior, bind
from numpyro_tempered.select.alpha.dependence import Block, num_units, read_dependence
from numpyro_tempered.select.alpha.independence import Rows, warn_of_dependence
from numpyro_tempered.select.alpha.powers import MOST_SCORES, power_of
from numpyro_tempered.select.alpha.sandwich import (
    Sandwich,
    run_differentiated,
    sampling_se,
)
from numpyro_tempered.select.alpha.sandwich import sandwich as sandwich_of
from numpyro_tempered.select.check.numbers import number_labels
from numpyro_tempered.select.check.target import BATCH
from numpyro_tempered.select.sandwich_report import (
    MOST_PRIOR,
    SandwichErrors,
    advise,
    columns_of,
    coordinate_names,
    describe_prior,
    prior_share,
    to_arviz,
)

# In standard deviations of the posterior: further away it is no Gaussian, or the fit not at its optimum.
MAX_DISTANCE = 1.0
# Points that stand for the Gaussian of a fit.
NUM_NODES = 128
_ESTIMATED = ", which are estimated too, and have no posterior: give them priors."
_NEEDS = {
    "params": _ESTIMATED,
    "states": _ESTIMATED,
    "no scales": ", and the sandwich does not know whether such weights count copies or are those of a survey: "
    "pass rows without weights.",
}
_SMOOTH = {
    "smooth": ", where no derivative sees the curvature: take nt.alpha.check_coverage, which resamples the rows, "
    "or a StudentT."
}


class FittedRows(NamedTuple):
    """The rows of a fit.

    Attributes:
        alpha: Power on the likelihood; by site where sites or data differ.
        losses: Tempered negative log-likelihood of each row, from flat unconstrained latents ``(d,)`` to
            ``(n,)``.
        penalty: Minus the log-density of the prior there.
        rows: The data.
    """

    alpha: float | Mapping[str, object]
    losses: Callable[[Array], Array]
    penalty: Callable[[Array], Array]
    rows: Rows


def read_rows(
    target: Target, plate: str | None, groups: ArrayLike | None, block: Block
) -> FittedRows:
    """The rows of a fit, with their dependence.

    Raises:
        ValueError: If it has none whose scores could be summed.
    """
    trace = target.trace
    require(trace, _NEEDS)
    alpha = likelihood.common_alpha(trace)
    if not np.any([np.any(power) for power in jax.tree.leaves(alpha)]):
        raise ValueError(
            "at alpha = 0 the fit is one to the prior, which no sample of data moves."
        )
    require(likelihood.likelihood_sites(trace), _SMOOTH)
    places = find_data(trace, plate)
    dependence = read_dependence(groups, block, places)

    def losses(theta: Array) -> Array:
        trace = target.trace_at(target.constrain(theta))
        return -log_lik_of_each(trace, places, powers=True)

    start = target.flatten(target.values)
    data = target.args, target.kwargs
    rows = Rows(trace, target.observed, data, places, dependence)
    return FittedRows(
        alpha,
        trace_once(losses, start),
        trace_once(target.prior_potential, start),
        rows,
    )


def check_units(rows: FittedRows, num_latents: int, lags: int) -> int:
    """The number of independent rows, groups or blocks.

    Raises:
        ValueError: If they are too few, or the scores too many.
    """
    dependence = rows.rows.dependence
    units = num_units(dependence, lags)
    if units < num_latents + 2:
        what = "rows" if dependence.labels is None and lags == 0 else "groups"
        what = f"blocks of {lags + 1} rows" if lags else what
        raise ValueError(
            f"{units} {what} do not tell how {num_latents} latent dimensions vary over samples: their scores "
            f"span fewer, and the sandwich would be too small. At least {num_latents + 2}, d + 2, are needed; "
            "latents of which there are more with more data are to be integrated out."
        )
    if num_latents * dependence.num_data > MOST_SCORES:
        raise ValueError(
            f"{num_latents} latents and {dependence.num_data} rows have too many scores for one matrix: take a "
            "random part of the rows; the sandwich falls as one over their number."
        )
    return units


def check_estimate(estimate: Sandwich) -> None:
    """Refuse a posterior without a mode, or whose curvature is lost to rounding.

    Raises:
        ValueError: With what to do.
    """
    minimum, dtype = estimate.minimum, estimate.minimum.point.dtype
    # Half of the digits are left.
    limit = float(np.finfo(dtype).eps) ** -0.5
    if not (minimum.converged and np.all(np.isfinite(minimum.hessian))):
        raise ValueError(
            "the tempered posterior has no mode that Newton's method finds from the centre of the fit (last "
            f"step: {minimum.step:.2g} standard deviations), as in a hierarchy whose scale may fall to 0, or at "
            "a kink of a Laplace prior: there is no estimate whose sampling distribution a Gaussian could be. "
            "Take nt.alpha.check_coverage, which resamples the rows."
        )
    if not minimum.condition <= limit:
        raise ValueError(
            f"the Hessian at the mode has condition number {minimum.condition:.2g} where {dtype} allows "
            f"{limit:.2g}: enable jax_enable_x64, scale or leave out collinear features."
        )


def average_over(rows: FittedRows, cov: np.ndarray) -> FittedRows:
    """The rows with losses averaged over a Gaussian about the latents, in place of those at the latents."""
    values, axes = np.linalg.eigh(cov)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    nodes = normal_nodes(0, NUM_NODES, len(cov)) @ root.T
    nodes = jnp.asarray(nodes, jnp.result_type(float))

    def average(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda theta: jnp.mean(
            jax.lax.map(lambda node: fn(theta + node), nodes), axis=0
        )

    return rows._replace(losses=average(rows.losses), penalty=average(rows.penalty))


def check_centre(distance: float, is_gaussian: bool) -> None:
    """Refuse a fit whose centre is not where its loss is least.

    Raises:
        ValueError: With the distance.
    """
    if not (distance <= MAX_DISTANCE or is_gaussian):
        raise ValueError(
            f"the mean of the draws is {distance:.2g} standard deviations from the mode of the posterior, which "
            "is skewed or has several modes: the sandwich at the mode would not be that of the mean. Take a "
            "Gaussian fit, as of AutoMultivariateNormal, or nt.alpha.check_coverage."
        )
    if not distance <= MAX_DISTANCE:
        raise ValueError(
            f"the centre of the fit is {distance:.2g} standard deviations from the least loss, at a point "
            "and as a mean over the fit: the sandwich would not be that of the fit. Fit again until it has "
            "converged, or take nt.alpha.check_coverage, which needs no Gaussian posterior."
        )


class Parts(NamedTuple):
    """What is computed at the mode of the tempered posterior, for K numbers.

    Attributes:
        estimate: The sandwich, with the prior in its curvature, in coordinates z of the latents start + root z.
        root: ``(d, d)``.
        influence: Of each datum on the mode, ``(n, d)``.
        prior_curvature: Of minus the log-density of the prior, ``(d, d)``, in z.
        slopes: Of the numbers in z, ``(K, d)``.
        power_se: Standard errors of the inverse squared ratios of sandwich and inverse curvature, ``(K,)``.
        power: These themselves.
    """

    estimate: Sandwich
    root: Array
    influence: Array
    prior_curvature: Array
    slopes: Array
    power_se: Array
    power: Array


@key_first
@runs_models
def sandwich(
    rng_key: Array,
    fit: object,
    *data: object,
    groups: ArrayLike | None = None,
    block: Block = None,
    plate: str | None = None,
    num_draws: int = 4000,
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: object,
) -> SandwichErrors:
    r"""The standard deviations that the centre of a fit has over samples of the data, beside the fit's.

    The standard deviations of a posterior are those of its centre over samples of the data where the model is
    right, and others where it is wrong: counts that vary more than Poisson's, noise that is not the same for all
    rows, rows that come in groups. A power cannot mend that for all latents at once. With the losses
    :math:`\ell_i = -\log p(y_i \mid \theta)` of n independent rows, the scores :math:`s_i = \nabla \ell_i`, and

    .. math:: \hat\theta = \arg\min_\theta\; \alpha \sum_i \ell_i - \log \pi, \qquad
              \Sigma = H^{-1} J H^{-1}, \qquad
              H = \alpha \sum_i \nabla^2 \ell_i - \nabla^2 \log \pi, \qquad
              J = \alpha^2 \sum_i (s_i - \bar s)(s_i - \bar s)^\top,

    all at :math:`\hat\theta` on the unconstrained scale, Σ is the covariance of :math:`\hat\theta`, **the mode of
    the tempered posterior**, over samples of rows from their true distribution, whatever that is. It is about the
    parameters that this distribution asks for, those nearest to it in Kullback-Leibler divergence. The mean of a
    Gaussian fit is that mode but for terms of the order 1/n, so that Σ is its covariance too: of a mean-field fit
    as well, whose means are mostly good. Where the centre is more than a standard deviation from the mode, as of
    a skewed posterior, the losses of a Gaussian fit are averaged over it about θ: its centre is where that mean
    is least, and Σ is its covariance given the width of the fit.

    Powers by site or datum are weights of the losses, in H and in J.

    **The prior** is the same in all samples: it is part of H, and no part of J. So Σ is the variance of an
    estimate that the prior pulls, and has nothing of its bias. Where the prior supplies most of what is known
    about a number (``prior_share`` above 1/2) the sandwich is no error bar, and a warning says so. Without a
    prior α cancels: the sandwich of a tempered fit is that of the untempered one.

    **Assumed** are rows that are independent of each other, or in independent ``groups``, or in a series with
    ``block``; many of them for the d latents; a density with two derivatives; and a posterior near Gaussian.
    There is no correction for few rows: for linear regression without a prior, Σ is White's HC0, with groups the
    cluster-robust CR0, which are too small by about a factor of :math:`(1 - d/n)^{1/2}` in standard deviations.

    Constrained numbers, such as a scale, have the moments of that Gaussian through their transformation, as those
    of the fit.

    Args:
        rng_key: For draws, which numbers need that are functions of several coordinates, such as proportions.
        fit: A posterior of continuous latents, at any power: a fit of any kind, a selection, a stream, an MCMC.
        *data: The data that it was fitted to, where it does not hold them, as for :func:`to_inference_data`.
        groups: Of rows that depend on each other, a label for each, as for ``select_alpha``: scores are summed
            within groups.
        block: Of a series, as for ``select_alpha``: J is that of Newey and West.
        plate: Name of the plate whose rows are the data, where there are several.
        num_draws: Draws of the fit and of the Gaussian with covariance Σ, at least 100.
        coords: Labels by dimension, for the names of the numbers.
        dims: Names of the dimensions by site.
        **kwargs: Keyword arguments that belong to the data.

    Returns:
        A :class:`.SandwichErrors`. Its table has a row for each number of each latent site, in its own units,
        with

        - ``mean``, ``sd``: of the fit;
        - ``curvature_sd``: the standard deviation of the tempered posterior by its curvature at the mode: where
          it is far above ``sd``, the guide is narrower than the posterior, as mean-field ones are;
        - ``sandwich_sd``: the standard deviation of its centre over samples of the data;
        - ``ratio``: the second over the first, with ``ratio_se``, its standard error over samples by the
          infinitesimal jackknife. It is 1 where the intervals of the fit cover what they say;
        - ``prior_share``: the part of the information about the number that is the prior's.

        ``nt.table(errors, "sandwich_unconstrained")`` has the same for the unconstrained coordinates.

    Raises:
        TypeError: If ``fit`` is none of these.
        ValueError: If there are fewer than d + 2 independent rows or groups; the data are not rows of one plate
            or vectors, are a subsample, or have weights; latents are local, discrete or points;
            the model has params, or likelihoods with kinks; the tempered posterior has no mode near the fit.

    Warns:
        DependenceWarning: If rows repeat others exactly or the scores of successive rows are correlated, and
            neither ``groups`` nor ``block`` is given.
        UserWarning: If the prior decides on a number.

    References:
        H. White, *Maximum likelihood estimation of misspecified models*, Econometrica 1982; B. Kleijn and A. van
        der Vaart, *The Bernstein-von-Mises theorem under misspecification*, Electronic Journal of Statistics
        2012; U. Müller, *Risk of Bayesian inference in misspecified models, and the sandwich covariance matrix*,
        Econometrica 2013; T. Westling and T. McCormick, *Beyond prediction: a framework for inference with
        variational approximations in mixture models*, Journal of Computational and Graphical Statistics
        2019. NW for series.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)  # standard deviation 2, where the model has 1
        >>> fit = nt.fit_gaussian(jax.random.key(0), model, AutoNormal, y)
        >>> errors = nt.sandwich(jax.random.key(1), fit)
        >>> nt.table(errors)[["sd", "sandwich_sd", "ratio"]].round(2)
                  sd  sandwich_sd  ratio
        number
        theta   0.22         0.45    2.0
    """
    check_count(num_draws, "num_draws", 100)
    fit_key, draw_key = jax.random.split(rng_key)
    bound = bind(fit, data, kwargs, rng_key=fit_key)
    target = bound.target
    check_density(target, smooth=True)
    rows = read_rows(target, plate, groups, block)
    gaussian, moments, is_gaussian = _moments_of_fit(fit_key, bound, target, num_draws)
    centre = gaussian.loc
    labels = {
        **(getattr(bound, "coords", None) or {}),
        **{dim: np.asarray(values) for dim, values in (coords or {}).items()},
    }
    names = number_labels(target.trace, labels, dims or {})
    check_units(rows, len(centre), 0)
    parts = _compute(rows, target, centre)
    covariance, inverse, distance = _describe(parts, rows, centre)
    if distance > MAX_DISTANCE and is_gaussian:
        # Skewed: the centre is where the mean of the slopes over the Gaussian of the fit is 0, not the slope.
        rows = average_over(rows, gaussian.cov)
        parts = _compute(rows, target, centre)
        covariance, inverse, distance = _describe(parts, rows, centre)
    check_centre(distance, is_gaussian)
    units = check_units(rows, len(centre), int(parts.estimate.lags))
    otherwise = "The sandwich takes the rows for independent, and is too small where they are not."
    warn_of_dependence(rows.rows, np.asarray(parts.influence), otherwise=otherwise)
    q = LocationScale(centre, covariance)
    of_sandwich = moments_of(
        q, target.coordinates, _draws(draw_key, q, target, num_draws), target.moving
    )
    slopes, prior, power, power_se = (
        doubles(part)
        for part in (parts.slopes, parts.prior_curvature, parts.power, parts.power_se)
    )
    hessian = doubles(parts.estimate.minimum.hessian)
    inner = np.linalg.solve(hessian, np.eye(len(centre)))
    curvature_sd = np.sqrt(np.sum(slopes @ inner * slopes, axis=1))
    share = prior_share(slopes, inner, prior)
    numbers = columns_of(moments.mean, moments.sd, curvature_sd, of_sandwich.sd, share)
    numbers["ratio_se"] = numbers["ratio"] * 0.5 * power_se / power
    numbers["prior_share"] = numbers.pop("prior_share")
    of_guide, by_curvature, by_sandwich = (
        np.sqrt(np.diag(cov)) for cov in (gaussian.cov, inverse, covariance)
    )
    share = prior_share(doubles(parts.root), inner, prior)
    coordinates = columns_of(centre, of_guide, by_curvature, by_sandwich, share)
    if decided := [
        name
        for name, part in zip(names, numbers["prior_share"], strict=True)
        if part > MOST_PRIOR
    ]:
        warn_caller(describe_prior(decided))
    advice = advise(names, numbers, units, len(centre), decided)
    table = to_arviz(
        (numbers, names),
        (coordinates, coordinate_names(target, names)),
        rows.alpha,
        units,
        advice,
    )
    ratios = numbers["ratio"][np.isfinite(numbers["ratio"])]
    return SandwichErrors(
        advice,
        rows.alpha,
        units,
        (float(ratios.min()), float(ratios.max())),
        covariance,
        table,
    )


def _moments_of_fit(
    rng_key: Array, fit: TemperedFit | SampledPosterior, target: Target, num_draws: int
) -> tuple[LocationScale, Moments, bool]:
    """The Gaussian of a posterior in unconstrained coordinates, the moments of its numbers, whether it is one.

    Raises:
        ValueError: If a latent is a point.
    """
    gaussian = None
    if isinstance(fit, TemperedFit):
        where = target.args, target.kwargs
        guide, params = gaussian_of_laplace(
            fit.guide, fit.model, fit.params, rng_key, *where
        )
        if has_point_mass(rng_key, guide, params, *where):
            raise ValueError(
                f"the guide {type(fit.guide).__name__} has a latent that is a point, without a standard "
                "deviation: fit a guide with a scale."
            )
        gaussian = location_scale_of(guide, params)
    values = fit.sample_posterior(rng_key, (num_draws,))
    values = {name: values[name] for name in target.coordinates}

    def flatten(values: Params) -> tuple[Array, Array]:
        return map_batches(
            lambda draw: (target.flatten(draw), ravel_pytree(draw)[0]), values, BATCH
        )

    flat, numbers = map(doubles, run_program(flatten, values))
    moments = moments_of(gaussian, target.coordinates, numbers, target.moving)
    if gaussian is None:
        of_draws = LocationScale(flat.mean(axis=0), np.atleast_2d(np.cov(flat.T)))
        return of_draws, moments, False
    return gaussian, moments, True


def _compute(rows: FittedRows, target: Target, centre: np.ndarray) -> Parts:
    """The sandwich at the mode that Newton's method reaches from the centre of the fit, with its derivatives.

    In coordinates in which the curvature at the centre is the identity, as single precision has no digits left
    for raw units and collinear columns otherwise.
    """
    instead = "Leave such sites out, or"

    def hessian(theta: Array) -> Array:
        return jacobian(
            jax.grad(lambda theta: jnp.sum(rows.losses(theta)) + rows.penalty(theta)),
            theta,
        )

    def compute(start: Array, root: Array) -> Parts:
        def losses(z: Array) -> Array:
            return rows.losses(start + root @ z)

        def penalty(z: Array) -> Array:
            return rows.penalty(start + root @ z)

        def numbers(z: Array) -> Array:
            return ravel_pytree(target.constrain(start + root @ z))[0]

        estimate = sandwich_of(
            losses, jnp.zeros_like(start), rows.rows.dependence, penalty=penalty
        )
        point = estimate.minimum.point
        scores = jacobian(losses, point)
        functional = power_of(numbers)
        return Parts(
            estimate,
            root,
            jnp.linalg.solve(
                estimate.curvature, (scores - jnp.mean(scores, axis=0)).T
            ).T
            @ root.T,
            jacobian(jax.grad(penalty), point),
            jacobian(numbers, point),
            sampling_se(
                losses, estimate, functional, rows.rows.dependence, penalty=penalty
            ),
            functional(point, estimate.curvature, estimate.variance),
        )

    start = jnp.asarray(centre, jnp.result_type(float))
    at_centre = doubles(run_differentiated(hessian, start, instead=instead))
    root = jnp.asarray(_root(at_centre, float(jnp.finfo(start.dtype).eps)), start.dtype)
    return jax.device_get(run_differentiated(compute, start, root, instead=instead))


def _root(hessian: np.ndarray, eps: float) -> np.ndarray:
    """Coordinates in which a Hessian is the identity; scaled to its diagonal where it is not definite."""
    size = np.abs(np.diag(hessian))
    scale = np.sqrt(np.where(np.isfinite(size) & (size > 0), size, 1.0))
    scaled = hessian / np.outer(scale, scale)
    if (
        not np.all(np.isfinite(scaled))
        or np.linalg.eigvalsh(scaled)[0] <= len(scale) * eps
    ):
        return np.diag(1.0 / scale)
    return (
        np.linalg.solve(np.linalg.cholesky(scaled).T, np.eye(len(scale)))
        / scale[:, None]
    )


def _describe(
    parts: Parts, rows: FittedRows, centre: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """The sandwich covariance, the inverse of the Hessian, and the largest distance of mode and centre in sd."""
    check_estimate(parts.estimate)
    covariance, inverse = _covariances(parts, rows.rows.dependence.num_data)
    offset = doubles(parts.root @ parts.estimate.minimum.point)
    distance = np.max(np.abs(offset) / np.sqrt(np.diag(inverse)))
    return covariance, inverse, float(distance)


def _covariances(parts: Parts, num_data: int) -> tuple[np.ndarray, np.ndarray]:
    """The sandwich covariance and the inverse of the Hessian, ``(d, d)`` each, in double precision."""
    hessian, variance, root = (
        doubles(part)
        for part in (
            parts.estimate.minimum.hessian,
            parts.estimate.variance,
            parts.root,
        )
    )
    half = np.linalg.solve(hessian, root.T).T
    inverse = half @ root.T
    return half @ (num_data * variance) @ half.T, 0.5 * (inverse + inverse.T)


def _draws(
    rng_key: Array, q: LocationScale, target: Target, num_draws: int
) -> np.ndarray:
    """Numbers at draws of a Gaussian whose covariance may be singular, ``(num_draws, K)``."""
    values, axes = np.linalg.eigh(q.cov)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    noise = doubles(jax.random.normal(rng_key, (num_draws, len(q.loc))))
    z = jnp.asarray(q.loc + noise @ root.T, jnp.result_type(float))
    numbers = run_program(
        lambda z: map_batches(
            lambda one: ravel_pytree(target.constrain(one))[0], z, BATCH
        ),
        z,
    )
    return doubles(numbers)
