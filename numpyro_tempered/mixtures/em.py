"""Maximum likelihood of a mixture by EM, the baseline of coordinate ascent."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    add_repr,
    at_index,
    check_count,
    check_number,
    double_precision,
    key_first,
)
from numpyro_tempered.mixtures import ascent
from numpyro_tempered.mixtures.chunks import Chunks, source_of
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import Component, check_is_component
from numpyro_tempered.mixtures.criteria import aic, bic, icl
from numpyro_tempered.mixtures.likelihood import (
    EXPECTATION_MAXIMISATION,
    FINAL,
    EMProblem,
    Point,
    check_em,
    rounding_loss,
)
from numpyro_tempered.mixtures.rounding import check_resolution
from numpyro_tempered.mixtures.source import NextSteps, Starts
from numpyro_tempered.mixtures.starts import Start, start_or_default


@add_repr
class MixtureEM(NamedTuple):
    """A mixture of maximum likelihood.

    Attributes:
        component: The family, without its prior.
        weights: p_j, ``(K,)``.
        parameters: Of the components by name, K first, in the data's own coordinates.
        point: The same for data less ``centre`` and the centres of the components.
        centre: What is subtracted from the data, ``(d,)``, or None.
        log_likelihood: log L at the parameters, in double precision.
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        entropy: The weighted sum of the entropies of the responsibilities, in nats.
        num_parameters: Free parameters, K - 1 weights included.
        pseudo_data: s, as given.
        trace: The objective at every pass of the best restart, in the precision of the data: log L, and the
            share of the pseudo-data.
        restart_objectives: That of every restart, ``(R,)``; -inf for one that collapsed.
        num_best: Restarts that reach within 0.1 nat of the best.
        spread: That of the best restart less the median's, in nats.
        converged: Whether the best restart ended by the tolerance.
        num_iter: Passes over the data of the best restart.
        total: The sum of the weights of the data.
    """

    component: Component
    weights: np.ndarray
    parameters: Columns
    point: Point
    centre: np.ndarray | None
    log_likelihood: float
    counts: np.ndarray
    entropy: float
    num_parameters: int
    pseudo_data: float
    trace: np.ndarray
    restart_objectives: np.ndarray
    num_best: int
    spread: float
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
    x: ArrayLike | Chunks,
    component: Component,
    *,
    num_components: int,
    sample_weight: ArrayLike | None = None,
    init: Start | None = None,
    num_restarts: int = 8,
    pseudo_data: float = 0.0,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_start_rows: int = 65536,
    size: int = 65536,
) -> MixtureEM:
    r"""Fit a mixture by maximum likelihood, with the EM algorithm.

    Responsibilities :math:`\omega_{ij} \propto p_j q_{\theta_j}(x_i)`, then the parameters of maximum likelihood
    under them: no step lowers :math:`\log L = \sum_i \log \sum_j p_j q_{\theta_j}(x_i)`. Of the component's prior
    only what is known counts, such as a variance.

    The likelihood of a mixture of Gaussians has no maximum: it grows without bound as a component closes in on
    one point. A restart whose component becomes so narrow that the rounding of the data takes more than 0.001 nat
    from a log density has collapsed, and does not count. ``pseudo_data`` bounds the likelihood: each component is
    given that number of data, spread as the data as a whole are, which is a penalty
    :math:`s \sum_j \frac{1}{n} \sum_i \log q_{\theta_j}(x_i)` on the parameters (not on the weights). Without it
    each component is given a rounding error of a datum, or its square where data may be moved, so that an empty
    component has the parameters of the data as a whole and no probability is 0.

    Args:
        rng_key: Key of the starts.
        x: Data, rows ``(n, d)``. NaN are missing entries and are marginalised where the family allows this. Or
            chunks of rows, as for :func:`fit`: a list of arrays ``(n, d)``, or a function that makes a new
            iterable of them for each pass.
        component: The family, such as ``nt.mixtures.components.gaussian(dim)``.
        num_components: K >= 1.
        sample_weight: How often each row counts, ``(n,)``, not negative.
        init: First responsibilities, :func:`kmeans_plus_plus` by default. Where they leave a component
            collapsed, all are given one pseudo-datum in the first step.
        num_restarts: Starts, ascended side by side; the best that has not collapsed is returned.
        pseudo_data: s >= 0; 0 is maximum likelihood. scikit-learn's ``reg_covar`` adds to variances in the units
            of the data instead.
        tolerance: A restart has converged when a pass raises the objective by no more than this times the sum
            of the weights; 1e-8 in double precision by default, and 1e-6 in single.
        max_iter: Upper limit of passes over the data.
        num_start_rows: Rows of chunks, drawn at random, that starts see.
        size: Rows of chunks in a block, the unit that is compiled and moved to the device.

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
        >>> fit = nt.mixtures.em(jax.random.key(0), x, nt.mixtures.components.known_variance(1), num_components=2)
        >>> print(np.sort(fit.parameters["loc"][:, 0]).round(2), fit.num_parameters)
        [0.05 9.05] 3
    """
    num_components = check_count(num_components, "num_components")
    limits = ascent.check_limits(num_restarts, max_iter, tolerance)
    pseudo_data = float(check_number(pseudo_data, "pseudo_data", "[0, inf)"))
    check_is_component(component)
    if component.maximum_likelihood is None:
        raise ValueError(
            f"{component.name} has no maximum_likelihood: take nt.mixtures.fit."
        )
    source = source_of(
        rng_key,
        x,
        component,
        sample_weight,
        num_components,
        limits,
        num_start_rows=num_start_rows,
        size=size,
    )
    data, dtype = source.data, source.data.rows.dtype
    active: Any = np.arange(source.capacity(num_components)) < num_components
    numbers: Any = (np.asarray(each, dtype) for each in (pseudo_data, data.total))
    starts = Starts(num_components, start_or_default(init), limits.num_restarts)
    algorithm = EXPECTATION_MAXIMISATION
    in_double = partial(jax.tree.map, partial(np.asarray, dtype=np.float64))
    extra = data.centre, np.asarray(data.spacings), in_double(data.prior)

    def next_steps(problem: EMProblem, points: Point) -> NextSteps:
        return NextSteps(limits, FINAL, (in_double(at_index(points, 0)), extra))

    problem, points = source.begin(
        rng_key, algorithm, EMProblem(data.prior, active, *numbers), starts, next_steps
    )
    if not bool(problem.is_resolved):
        raise FloatingPointError(
            f"the data as a whole have no maximum likelihood of {component.name!r}: a column is constant, "
            "without an observed entry or determined by the others, or a category never comes. Leave it out."
        )
    state = source.ascend(algorithm, problem, points, limits)
    objectives = np.asarray(state.objective)
    best = int(np.argmax(objectives))
    rounding = np.zeros_like(objectives)
    if np.any(state.fall > 0):
        losses = ascent.for_restarts(
            rounding_loss, data.component, problem, state.point.factors
        )
        rounding = np.asarray(losses) * data.total
    check_em(state, best, objectives, rounding)
    point = at_index(state.point.factors, best)
    point64 = in_double(point)
    with double_precision():
        values = jax.tree.map(np.asarray, source.reduce(FINAL, point64, extra))
    check_resolution(data.component, values.spacing, values.losses, values.counts)
    # Without what fills up.
    parameters, log_weights, counts, point = jax.tree.map(
        lambda leaf: leaf[:num_components],
        (values.parameters, point64.log_weights, values.counts, point),
    )
    weights = np.exp(log_weights)
    return MixtureEM(
        component=data.component,
        weights=weights / weights.sum(),
        parameters=parameters,
        point=point,
        centre=data.centre,
        log_likelihood=float(values.log_likelihood),
        counts=counts,
        entropy=float(values.entropy),
        num_parameters=num_components
        - 1
        + derived.num_parameters(data.component, data.prior, num_components),
        pseudo_data=pseudo_data,
        total=data.total,
        **ascent.History.of(state, best, objectives, limits.num_restarts)._asdict(),
    )
