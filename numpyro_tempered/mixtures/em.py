"""Maximum likelihood of a mixture by EM, the baseline of coordinate ascent."""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

from numpyro_tempered.core.ascent import Ascent, Step
from numpyro_tempered.core.checks import check_count, check_number, key_first
from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures import ascent, sweep
from numpyro_tempered.mixtures.ascent import Visit
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components.base import Component, Hyperparameters, Parameters, as_dtype
from numpyro_tempered.mixtures.evidence import aic, bic, icl
from numpyro_tempered.mixtures.prepare import prepare
from numpyro_tempered.mixtures.source import array_source, ascend
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.sweep import Blocks, Coefficients, Sums

# Nats that rounding may take from the log density of a datum before a component counts as collapsed.
RESOLUTION = 0.1


class Point(NamedTuple):
    """Parameters of a mixture.

    Attributes:
        log_weights: log p_j, ``(K,)``; -inf for a component without data.
        parameters: Of the components by name, K first.
    """

    log_weights: Array
    parameters: Parameters


class EMProblem(NamedTuple):
    """What the objective depends on apart from the responsibilities; all arrays.

    Attributes:
        prior: Of one component, for what is known of its parameters.
        pseudo_data: Data that each component is given.
        statistics: The mean of T(x), ``(F,)``: theirs.
        sizes: The mean of |T(x)|, ``(F,)``.
        base: The weighted sum of log h(x_i).
    """

    prior: Hyperparameters
    pseudo_data: Array
    statistics: Array
    sizes: Array
    base: Array


class MixtureEM(NamedTuple):
    """A mixture of maximum likelihood.

    Attributes:
        component: The family, without its prior.
        weights: p_j, ``(K,)``.
        parameters: Of the components by name, K first, in the data's own coordinates.
        point: The same for data less ``centre``.
        centre: What is subtracted from the data, ``(d,)``, or None.
        log_likelihood: log L at the parameters, in double precision.
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        entropy: The weighted sum of the entropies of the responsibilities, in nats.
        num_parameters: Free parameters, K - 1 weights included.
        pseudo_data: s, as given.
        trace: The objective at every pass of the best restart, in the precision of the data: log L, and the
            share of the pseudo-data.
        objectives: That of every restart, ``(R,)``; -inf for one that collapsed.
        converged: Whether the best restart ended by the tolerance.
        num_iter: Passes over the data of the best restart.
        total: The sum of the weights of the data.
    """

    component: Component
    weights: np.ndarray
    parameters: dict[str, np.ndarray]
    point: Point
    centre: np.ndarray | None
    log_likelihood: float
    counts: np.ndarray
    entropy: float
    num_parameters: int
    pseudo_data: float
    trace: np.ndarray
    objectives: np.ndarray
    converged: bool
    num_iter: int
    total: float

    @property
    def num_components(self) -> int:
        """K, empty components included."""
        return self.weights.shape[0]

    @property
    def aic(self) -> float:
        """-2 log L + 2 p; the smallest is the best."""
        return aic(self.log_likelihood, self.num_parameters)

    @property
    def bic(self) -> float:
        """-2 log L + p log n, n the sum of the weights; the smallest is the best."""
        return bic(self.log_likelihood, self.num_parameters, self.total)

    @property
    def icl(self) -> float:
        """BIC plus twice the entropy of the responsibilities; the smallest is the best."""
        return icl(self.log_likelihood, self.num_parameters, self.total, self.entropy)


@key_first
def em(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    *,
    num_components: int,
    sample_weight: ArrayLike | None = None,
    start: Start | None = None,
    num_restarts: int = 8,
    pseudo_data: float = 0.0,
    tolerance: float | None = None,
    max_iter: int = 1000,
) -> MixtureEM:
    r"""Fit a mixture by maximum likelihood, with the EM algorithm.

    Responsibilities :math:`\omega_{ij} \propto p_j q_{\theta_j}(x_i)`, then the parameters of maximum likelihood
    under them: no step lowers :math:`\log L = \sum_i \log \sum_j p_j q_{\theta_j}(x_i)`. Of the component's prior
    only what is known counts, such as a variance.

    The likelihood of a mixture of Gaussians has no maximum: it grows without bound as a component closes in on
    one point. A restart whose component becomes so narrow that rounding takes more than 0.1 nat from a log
    density has collapsed, and does not count. ``pseudo_data`` bounds the likelihood: each component is given
    that number of data, spread as the data as a whole are, which is a penalty
    :math:`s \sum_j \frac{1}{n} \sum_i \log q_{\theta_j}(x_i)` on the parameters (not on the weights). Without it
    each component is given a rounding error of a datum, 2e-16 in double precision, so that an empty component has
    the parameters of the data as a whole and no probability is 0.

    Args:
        rng_key: Key of the starts.
        x: Data, rows ``(n, d)``. NaN are missing entries and are marginalised where the family allows this.
        component: The family, such as ``nt.mixtures.gaussian(dim)``.
        num_components: K >= 1.
        sample_weight: How often each row counts, ``(n,)``, not negative.
        start: First responsibilities, :func:`kmeans_plus_plus` by default. Where they leave a component
            collapsed, all are given one pseudo-datum in the first step.
        num_restarts: Starts, ascended side by side; the best that has not collapsed is returned.
        pseudo_data: s >= 0; 0 is maximum likelihood. scikit-learn's ``reg_covar`` adds to variances in the units
            of the data instead.
        tolerance: A restart has converged when a pass raises the objective by no more than this times the sum
            of the weights; 1e-8 in double precision by default, and 1e-6 in single.
        max_iter: Upper limit of passes over the data.

    Returns:
        A :class:`MixtureEM`. A warning says when its restart has not converged.

    Raises:
        TypeError: If an argument is of another kind than above, or the data are traced.
        ValueError: If the data are not of the family, an argument is out of its range, or the family has no
            maximum likelihood.
        FloatingPointError: If the data as a whole have no finite maximum (a constant column, a category that
            never comes), or every restart collapsed.
        RuntimeError: If the objective falls by more than rounding: an error of the component's functions.

    References:
        Dempster, Laird, Rubin, *Maximum likelihood from incomplete data via the EM algorithm*, JRSS B 1977; the
        penalty: Chen, Tan, Zhang, *Inference for normal mixtures in mean and variance*, Statistica Sinica 2008.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> fit = nt.mixtures.em(jax.random.key(0), x, nt.mixtures.known_variance(1), num_components=2)
        >>> print(np.sort(fit.parameters["loc"][:, 0]).round(2), fit.num_parameters)
        [0.05 9.05] 3
    """
    num_components = check_count(num_components, "num_components")
    limits = ascent.check_limits(num_restarts, max_iter, tolerance)
    pseudo_data = float(check_number(pseudo_data, "pseudo_data", "[0, inf)"))
    data = prepare(x, component, sample_weight)
    if data.component.maximum_likelihood is None:
        raise ValueError(f"{component.name} has no maximum_likelihood: take nt.mixtures.fit.")
    source = array_source(data, num_components * limits.num_restarts)
    dtype = data.rows.dtype
    share, total = jnp.asarray(pseudo_data, dtype), jnp.asarray(data.total, dtype)
    problem = source.sum_over(em_problem, data.prior, share, total)
    if not bool(is_resolved(data.component, problem)):
        raise FloatingPointError(
            f"the data as a whole have no maximum likelihood of {component.name!r}: a column is constant, "
            "without an observed entry or determined by the others, or a category never comes. Leave it out."
        )
    sums = source.first_sums(rng_key, num_components, start_or_default(start), limits.num_restarts)
    points = ascent.for_restarts(first_point, data.component, problem, sums)
    state = ascend(source, problem, points, limits, expectation_maximisation)
    objectives = ascent.finite_or_least(state.objective)
    best = int(np.argmax(objectives))
    losses = ascent.for_restarts(rounding_loss, data.component, problem, state.point.factors)
    check_em(state, best, objectives, np.asarray(losses) * data.total)
    point = ascent.restart(state.point.factors, best)
    with double_precision():
        point64 = as_dtype(point, jnp.float64)
        log_likelihood, counts, entropy = source.sum_over(final_sums, point64)
        parameters = move_parameters(data.component, data.prior, point64.parameters, data.centre)
        weights = np.exp(np.asarray(point64.log_weights))
    return MixtureEM(
        component=data.component,
        weights=weights / weights.sum(),
        parameters=parameters,
        point=point,
        centre=data.centre,
        log_likelihood=float(log_likelihood),
        counts=np.asarray(counts),
        entropy=float(entropy),
        num_parameters=num_components - 1 + data.component.num_parameters(num_components),
        pseudo_data=pseudo_data,
        total=data.total,
        **ascent.History.of(state, best, objectives)._asdict(),
    )


def coefficients(component: Component, point: Point) -> Coefficients:
    """Log p_j and log q_j, as a function linear in the statistics."""
    return Coefficients(point.log_weights, *component.coefficients_at(point.parameters))


def maximise(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The M step."""
    counts = sums.counts + problem.pseudo_data
    statistics = sums.statistics + problem.pseudo_data * problem.statistics
    parameters = component.maximum_likelihood(problem.prior, counts, statistics)  # type: ignore[misc]
    return Point(jnp.log(sums.counts) - jnp.log(jnp.sum(sums.counts)), parameters)


def rounding_loss(component: Component, problem: EMProblem, point: Point) -> Array:
    """What rounding takes from the log density of a datum, in the worst component, in nats; may be NaN."""
    mixture = coefficients(component, point)
    size = jnp.max(jnp.sum(jnp.abs(mixture.weights) * problem.sizes, axis=-1))
    return jnp.finfo(size.dtype).eps * size


def expectation_maximisation(
    component: Component, problem: EMProblem, blocks: Blocks, total: Array
) -> Step[Visit[Point]]:
    """EM for :func:`numpyro_tempered.core.ascent.advance`; the objective of collapsed components is NaN."""

    def visit(point: Point) -> tuple[Array, Point]:
        mixture = coefficients(component, point)
        sums = sweep.sweep(component, mixture, blocks)
        penalty = jnp.sum(mixture.constant + jnp.sum(mixture.weights * problem.statistics, axis=-1))
        value = sums.log_sum + problem.base + problem.pseudo_data * penalty
        objective = jnp.where(rounding_loss(component, problem, point) <= RESOLUTION, value, jnp.nan)
        return objective, maximise(component, problem, sums)

    return ascent.step_of(visit, ascent.rounding_error(problem.base, total))


def em_problem(
    component: Component, blocks: Blocks, prior: Hyperparameters, pseudo_data: Array, total: Array
) -> EMProblem:
    """The problem, by one pass over the data."""

    def block_sums(columns: Array, weight: Array) -> tuple[Array, Array]:
        statistics = component.statistics(columns)
        return jnp.sum(weight * statistics, axis=1), jnp.sum(weight * jnp.abs(statistics), axis=1)

    mean, sizes = (each / total for each in sweep.over_blocks(block_sums, blocks))
    least = jnp.finfo(total.dtype).eps
    return EMProblem(prior, jnp.maximum(pseudo_data, least), mean, sizes, sweep.base_sum(component, blocks))


def final_sums(component: Component, blocks: Blocks, point: Point) -> tuple[Array, Array, Array]:
    """Log L, the counts and the entropy of the responsibilities, in double precision."""
    blocks = as_dtype(blocks, jnp.float64)
    mixture = coefficients(component, point)
    sums = sweep.sweep(component, mixture, blocks)
    # A component without data has weight 0 and log weight -inf.
    complete = jnp.sum(xlogy(sums.counts, jnp.exp(mixture.log_weights)) + sums.counts * mixture.constant)
    entropy = sums.log_sum - complete - jnp.sum(sums.statistics * mixture.weights)
    return sums.log_sum + sweep.base_sum(component, blocks), sums.counts, jnp.maximum(entropy, 0.0)


@partial(jax.jit, static_argnames="component")
def is_resolved(component: Component, problem: EMProblem) -> Array:
    """Whether the data as a whole have a maximum."""
    one = jnp.ones(1, problem.statistics.dtype)
    point = maximise(component, problem, Sums(one[0], one, problem.statistics[None]))
    is_finite = jnp.all(jnp.isfinite(coefficients(component, point).constant))
    return (rounding_loss(component, problem, point) <= RESOLUTION) & is_finite


def first_point(component: Component, problem: EMProblem, sums: Sums) -> Point:
    """The first M step of a restart, with one pseudo-datum where it would collapse."""
    point = maximise(component, problem, sums)
    smooth_problem = problem._replace(pseudo_data=jnp.maximum(problem.pseudo_data, 1.0))
    smooth_point = maximise(component, smooth_problem, sums)
    resolved = rounding_loss(component, problem, point) <= RESOLUTION
    return jax.tree.map(lambda a, b: jnp.where(resolved, a, b), point, smooth_point)


def move_parameters(
    component: Component, prior: Hyperparameters, parameters: Parameters, centre: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Parameters of data with the centre added.

    The family says how its hyperparameters move, and how parameters are drawn under them: the means of such draws
    move as the parameters do.
    """
    if centre is not None:
        num_components = jax.tree.leaves(parameters)[0].shape[0]
        priors = components.broadcast_prior(as_dtype(prior, jnp.float64), num_components)
        translated = components.translate_by(component, priors, jnp.asarray(centre))
        before, after = (component.draw(lambda _, fn: fn.mean, q) for q in (priors, translated))
        parameters = {name: value + (after[name] - before[name]) for name, value in parameters.items()}
    return {name: np.asarray(value) for name, value in parameters.items()}


def check_em(state: Ascent[Visit[Point]], best: int, objectives: np.ndarray, rounding: np.ndarray) -> None:
    """Raise where EM went wrong, warn where it is unfinished.

    Raises:
        FloatingPointError: If every restart collapsed.
        RuntimeError: If the objective of one that did not fell by more than ``rounding``.
    """
    if not np.any(np.isfinite(objectives)):
        raise FloatingPointError(
            f"every restart of EM collapsed ({len(objectives)} of them, in {state.objective.dtype}): a component "
            "closed in on equal rows, where the likelihood is unbounded. Take fewer components, or "
            "pseudo_data=1.0."
        )
    fall = np.where(np.isfinite(objectives), np.asarray(state.fall), 0.0)
    if np.any(fall > rounding):
        raise RuntimeError(
            f"the likelihood fell by {fall.max():.3g} nats, which EM cannot do: maximum_likelihood and "
            "coefficients_at of the component do not belong together."
        )
    if not bool(state.converged[best]):
        warnings.warn(
            f"EM has not converged in {int(state.num_iter[best])} passes: raise max_iter or the tolerance.",
            stacklevel=4,
        )
