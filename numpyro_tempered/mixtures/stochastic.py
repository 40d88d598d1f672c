"""Stochastic and streaming variational Bayes for mixtures: natural-gradient steps."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    CompensatedSum,
    check_count,
    check_number,
    doubles,
    is_traced,
)
from numpyro_tempered.mixtures import sweep
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    Component,
    as_dtype,
    translate,
    translate_on_host,
)
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    coefficients,
    first_sums,
    in_order,
    update,
)
from numpyro_tempered.mixtures.prepare import (
    automatic_row_mesh,
    check_settings,
    move,
    weight_of,
)
from numpyro_tempered.mixtures.starts import Start, start_data, start_or_default
from numpyro_tempered.mixtures.weights import Concentration


class Schedule(Protocol):
    """A step size that depends on the step."""

    def __call__(self, count: Array, /) -> ArrayLike:
        """The step size of step ``count`` (1, 2, ...)."""


StepSize: TypeAlias = float | Schedule


class StochasticState(NamedTuple):
    """The state of a stochastic ascent; arrays, so that it scans, maps and pickles.

    Attributes:
        counts: Responsibilities, averaged over the data, ``(K,)``.
        statistics: omega_j T(x - c_j), averaged over the data, ``(K, F)``.
        total_weight: The sum of the weights of the data so far.
        num_steps: Batches that counted, shape ().
        rejected: Batches left out, as they or their step size were not finite or out of range, shape ().
        centres: c_j, where the components were under the first responsibilities, ``(K, d)``; None where the data
            may not be moved.
    """

    counts: Array
    statistics: Array
    total_weight: CompensatedSum
    num_steps: Array
    rejected: Array
    centres: Array | None = None


class Init(Protocol):
    """See :class:`StochasticRule`."""

    def __call__(
        self, rng_key: Array, x: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> StochasticState:
        """The state before the first batch."""


class Update(Protocol):
    """See :class:`StochasticRule`."""

    def __call__(
        self,
        state: StochasticState,
        x: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> tuple[StochasticState, Array]:
        """The state after a batch, and the batch's log density."""


class LogDensity(Protocol):
    """See :class:`StochasticRule`."""

    def __call__(
        self,
        state: StochasticState,
        x: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> Array:
        """The average log density of rows."""


class StochasticRule(NamedTuple):
    """Stochastic variational Bayes as pure functions, made by :func:`stochastic`.

    Attributes:
        init: The state before the first batch.
        update: The state after a batch, and the batch's log density under the factors before it.
        factors: A state to the factors of the weights and the components, in the data's own coordinates; with
            ``centre`` and outside of ``jit`` in double precision, which holds a location far from 0.
        log_density: The average of log Σ_j exp(l_ij), shape (): a lower bound on the expected log density of a
            datum, untempered.
    """

    init: Init
    update: Update
    factors: Callable[[StochasticState], Factors]
    log_density: LogDensity


class RobbinsMonro(NamedTuple):
    """The step size (t + tau)^-kappa; made by :func:`robbins_monro`.

    Attributes:
        kappa: How fast steps fall.
        tau: How much the first steps are damped.
    """

    kappa: float
    tau: float

    def __call__(self, count: Array) -> Array:
        """The step size of step ``count`` (1, 2, ...)."""
        return (count + self.tau) ** (-self.kappa)


def robbins_monro(kappa: float = 0.7, tau: float = 1.0) -> RobbinsMonro:
    r"""Step sizes :math:`(t + \tau)^{-\kappa}`, whose sum diverges and whose squares' sum does not.

    Args:
        kappa: In (1/2, 1]; the larger, the less later batches count against early ones.
        tau: At least 0; the larger, the smaller the first steps. With 0 the first step forgets the start.

    Raises:
        ValueError: If one is out of its range.

    References:
        Hoffman, Blei, Wang, Paisley, *Stochastic variational inference*, JMLR 2013, equation 26.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.robbins_monro(kappa=1.0, tau=0.0)(4)
        0.25
    """
    check_number(kappa, "kappa", "(0.5, 1]"), check_number(tau, "tau", "[0, inf)")
    return RobbinsMonro(float(kappa), float(tau))


def stochastic(
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: Concentration = 1.0,
    step_size: StepSize | None = None,
    total: float | None = None,
    num_inner: int = 1,
    centre: ArrayLike | None = None,
    missing: bool = False,
    init: Start | None = None,
) -> StochasticRule:
    r"""Natural-gradient steps on the global factors, one for each batch, for data that stream.

    Under conjugacy the natural parameters are the prior's plus alpha times sums of statistics, so that a
    natural-gradient step is an average of sums. With :math:`s_t` the average statistics of batch t under its
    responsibilities,

    .. math:: \bar s \leftarrow (1 - \rho_t) \bar s + \rho_t s_t, \qquad
              \lambda = \lambda_0 + \alpha \, n \, \bar s .

    - ``total`` and ``step_size`` given: stochastic variational inference for n = ``total`` data. With step 1
      and all data in a batch it is an iteration of :func:`fit`.
    - Neither given: streaming. :math:`\rho_t` is the batch's share of the data so far and n their number, so
      that the posterior of the data so far is the prior of the next batch. For K = 1 this is exact.
    - ``step_size`` without ``total``: the latest data weigh as much as all so far, for streams that drift.

    Args:
        component: The family and its prior.
        num_components: K >= 1.
        alpha: Power on the likelihood, positive.
        concentration: Prior of the weights, as for :func:`fit`.
        step_size: In (0, 1], or a function of the step's number (1, 2, ...) such as :func:`robbins_monro`.
        total: n, the sum of the weights of the data that the posterior is for.
        num_inner: How often the responsibilities and the step of a batch are computed, each time from the state
            before the batch.
        centre: Subtracted from the data before they are rounded to jax's precision, ``(d,)``, such as the mean of
            the first batch; results are in the data's own coordinates. Sums are taken about the place of each
            component under the first responsibilities: one that moves from there by thousands of its standard
            deviations loses the digits of its variance in float32.
        missing: Whether entries may be missing (NaN). Those of full covariance are completed by the factors
            before the batch: without ``step_size`` the posterior then depends on the order of the batches.
        init: First responsibilities, :func:`kmeans_plus_plus` by default.

    Returns:
        A NamedTuple of functions: ``init(rng_key, x, sample_weight=None)`` to the state before the first batch,
        whose rows serve the first responsibilities alone; ``update(state, x, sample_weight=None)`` to the next
        state and the batch's log density before it; ``factors(state)``; and ``log_density(state, x,
        sample_weight=None)``, for held-out data. Inside of ``jit`` a batch with values that are not data of the
        family is rejected as a whole; outside of it an error names them.

    Raises:
        TypeError: If an argument is of another kind than above.
        ValueError: If one is out of its range, or the family does not allow what is asked of it.

    References:
        Hoffman, Blei, Wang, Paisley, *Stochastic variational inference*, JMLR 2013, figure 4; Broderick, Boyd,
        Wibisono, Wilson, Jordan, *Streaming variational Bayes*, NIPS 2013, for the posterior as prior.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> rule = nt.mixtures.stochastic(component, num_components=2)
        >>> batches = np.tile([[0.0], [9.0], [0.2], [8.8]], (5, 1, 1))
        >>> state = jax.jit(rule.init)(jax.random.key(0), batches[0])
        >>> state, log_density = jax.lax.scan(rule.update, state, batches)
        >>> factors = jax.jit(rule.factors)(state)
        >>> print(float(state.total_weight.value), np.sort(factors.posterior.loc[:, 0]).round(1))
        20.0 [0.1 8.9]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_inner = check_count(num_inner, "num_inner")
    check_step_size(step_size)
    if total is not None:
        check_number(total, "total", "(0, inf)")
    if missing and component.with_missing is None:
        raise ValueError(f"{component.name} does not marginalise missing entries.")
    if centre is not None and component.location is None:
        raise ValueError(
            f"{component.name}: data of this family may not be moved; leave out centre."
        )
    form = (
        component.with_missing() if missing and component.with_missing else component
    )._replace(prior=None)
    shift = None if centre is None else doubles(centre)
    prior = translate_on_host(
        component, component.prior, None if shift is None else -shift
    )
    start = start_or_default(init)

    def batch(
        x: ArrayLike, sample_weight: ArrayLike | None
    ) -> tuple[Array, Array, sweep.Blocks]:
        """Rows less the centre, their weights, and both in blocks."""
        rows = move(component.check(automatic_row_mesh(x)), shift)
        if not is_traced(rows) and not missing and bool(jnp.any(jnp.isnan(rows))):
            raise ValueError(
                f"{component.name}: the batch has missing entries (NaN): stochastic(missing=True)."
            )
        weight = jnp.where(
            jnp.all(jnp.isnan(rows), axis=1), 0.0, weight_of(sample_weight, rows)
        )
        return (
            rows,
            weight,
            sweep.make_blocks(
                rows, weight, sweep.block_size(rows.shape[0], num_components)
            ),
        )

    def problem(dtype: np.dtype) -> MixtureProblem:
        numbers = (
            jnp.asarray(value, dtype)
            for value in (settings.concentration, settings.alpha, 0.0)
        )
        return MixtureProblem(as_dtype(prior, dtype), *numbers)

    def first_state(
        rng_key: Array, x: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> StochasticState:
        rows, weight, blocks = batch(x, sample_weight)
        active = jnp.ones(num_components, bool)
        layout = {"capacity": num_components, "shards": 1, "size": rows.shape[0]}
        stored = start_data(start, rows.shape[0], num_components, **layout)
        labels = start.assign(
            rng_key, stored, derived.coordinates(form, rows), weight, active
        )
        if labels.ndim == 1:
            labels = jax.nn.one_hot(labels, num_components)
        omega = sweep.in_blocks(labels.astype(rows.dtype), blocks.weight.shape[-1])
        return start_state(form, problem(rows.dtype), omega, blocks)

    def step(
        state: StochasticState, x: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> tuple[StochasticState, Array]:
        rows, _, blocks = batch(x, sample_weight)
        return stochastic_step(
            form,
            problem(rows.dtype),
            state,
            blocks,
            step_size=step_size,
            total=total,
            num_inner=num_inner,
        )

    def factors(state: StochasticState) -> Factors:
        result = factors_at(form, problem(state.counts.dtype), state, total)
        back = translate if is_traced(result) else translate_on_host
        return result._replace(posterior=back(form, result.posterior, shift))

    def log_density(
        state: StochasticState, x: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Array:
        rows, weight, blocks = batch(x, sample_weight)
        mixture = coefficients(
            form, factors_at(form, problem(rows.dtype), state, total), state.centres
        )
        return (
            sweep.sweep(form, mixture, blocks).log_sum + sweep.base_sum(form, blocks)
        ) / jnp.sum(weight)

    return StochasticRule(first_state, step, factors, log_density)


def start_state(
    component: Component,
    problem: MixtureProblem,
    responsibilities: Array,
    blocks: sweep.Blocks,
) -> StochasticState:
    """The state before the first batch, of first responsibilities ``(P, B, K, b)``."""
    zero, total = jnp.zeros((), jnp.int32), jnp.sum(blocks.weight)
    nothing = CompensatedSum.start(jnp.zeros_like(total))
    centres, sums = first_sums(component, problem, responsibilities, blocks)
    return StochasticState(
        sums.counts / total, sums.statistics / total, nothing, zero, zero, centres
    )


def factors_at(
    component: Component,
    problem: MixtureProblem,
    state: StochasticState,
    total: ArrayLike | None,
) -> Factors:
    """The factors of a state, for ``total`` data or, without it, for those so far."""
    n = (
        state.total_weight.value
        if total is None
        else jnp.asarray(total, state.counts.dtype)
    )
    sums = sweep.Sums(problem.base, n * state.counts, n * state.statistics)
    return update(component, problem, sums, state.centres)


def stochastic_step(
    component: Component,
    problem: MixtureProblem,
    state: StochasticState,
    blocks: sweep.Blocks,
    *,
    step_size: StepSize | None,
    total: ArrayLike | None,
    num_inner: int,
) -> tuple[StochasticState, Array]:
    """One batch; see :func:`stochastic`.

    Returns:
        The state, and the batch's log density per datum at the factors before it.
    """
    dtype = state.counts.dtype
    weight = jnp.sum(blocks.weight)
    total_weight = state.total_weight.add(weight)
    if step_size is None:
        rate = weight / total_weight.value
    else:
        rate = jnp.asarray(
            step_size(state.num_steps + 1) if callable(step_size) else step_size, dtype
        )
    before = state
    if total is None:
        # Before the first batch the factors are the prior's, which all components share.
        n = jnp.where(state.total_weight.value > 0, state.total_weight.value, weight)
        before = state._replace(total_weight=CompensatedSum.start(n))

    def sums_at(at: StochasticState) -> sweep.Sums:
        mixture = coefficients(
            component, factors_at(component, problem, at, total), at.centres
        )
        return sweep.sweep(component, mixture, blocks)

    def towards(sums: sweep.Sums) -> StochasticState:
        def average(old: Array, new: Array) -> Array:
            return (1.0 - rate) * old + rate * (new / weight)

        counts, statistics = (
            average(state.counts, sums.counts),
            average(state.statistics, sums.statistics),
        )
        return StochasticState(
            counts,
            statistics,
            total_weight,
            state.num_steps + 1,
            state.rejected,
            state.centres,
        )

    sums = sums_at(before)
    log_density = (sums.log_sum + sweep.base_sum(component, blocks)) / weight
    after = towards(sums)
    if num_inner > 1:
        after = jax.lax.fori_loop(
            1, num_inner, lambda _, at: towards(sums_at(at)), after
        )
    n = after.total_weight.value if total is None else jnp.asarray(total, dtype)
    averages = sums._replace(counts=after.counts, statistics=after.statistics)
    # Labels change after the averages, which are of one labelling.
    ordered, centres = in_order(
        problem._replace(alpha=problem.alpha * n), averages, after.centres
    )
    after = after._replace(
        counts=ordered.counts, statistics=ordered.statistics, centres=centres
    )
    is_valid = jnp.isfinite(log_density) & (rate > 0) & (rate <= 1)
    is_valid = (
        is_valid
        & jnp.all(jnp.isfinite(after.counts))
        & jnp.all(jnp.isfinite(after.statistics))
    )
    # A batch without a row leaves the state as it is.
    unchanged = state._replace(rejected=state.rejected + jnp.where(weight != 0, 1, 0))
    return jax.tree.map(
        lambda new, old: jnp.where(is_valid, new, old), after, unchanged
    ), log_density


def check_step_size(step_size: StepSize | None) -> None:
    """Raise where a step size is neither a number in (0, 1], a function nor None.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If a number is not in (0, 1].
    """
    if step_size is not None and not callable(step_size):
        hint = "Give a number in (0, 1], a function of the step, or None."
        check_number(step_size, "step_size", "(0, 1]", hint=hint)
