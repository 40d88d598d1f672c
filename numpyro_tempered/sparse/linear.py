"""Sparse linear regression."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.gaussian.families.spike_slab import kl
from numpyro_tempered.sparse.arguments import (
    Problem,
    as_data,
    as_problem,
    check_count,
    check_end,
    check_tolerance,
    is_traced,
    positive,
)
from numpyro_tempered.sparse.ascent import Ascent, Best, ascend, best_start, unblock, without_intercept
from numpyro_tempered.sparse.base import LinearFit, NoisePosterior, Prior, split
from numpyro_tempered.sparse.noise import Estimated, Gamma, Known, gamma_posterior, update_noise
from numpyro_tempered.sparse.starts import Start, lasso_path, make_starts
from numpyro_tempered.sparse.sweep import block_design, block_prior, blocks, fitted, sweep


def fit_linear(
    rng_key: Array,
    x: Any,
    y: Any,
    *,
    inclusion_prob: ArrayLike,
    slab_scale: ArrayLike,
    noise_scale: ArrayLike | None = None,
    noise_prior: tuple[ArrayLike, ArrayLike] | None = None,
    intercept_scale: ArrayLike | None = None,
    alpha: ArrayLike = 1.0,
    num_restarts: int = 1,
    init: ArrayLike | None = None,
    num_sweeps: int = 1000,
    tolerance: float = 1e-6,
) -> LinearFit:
    r"""Tempered linear regression with a spike-and-slab prior, by coordinate ascent.

    .. math::
        y_i = b + x_i'\theta + \varepsilon_i,\quad \varepsilon_i\sim N(0, v),\quad
        \theta_j\sim\lambda N(0, s^2) + (1 - \lambda)\delta_0

    maximises :math:`\alpha E_q\log L - \mathrm{KL}(q, \pi)` over independent
    :math:`q_j = \varphi_jN(m_j, \sigma_j^2) + (1 - \varphi_j)\delta_0`, each step in closed form. No constant is
    left out. What the ELBO is depends on the noise:

    - ``noise_scale``: a bound on the log of the tempered evidence :math:`\int L^\alpha d\pi` at that noise;
    - ``noise_prior``: the precision 1/v is Gamma (shape, rate), q has a Gamma factor for it, and the ELBO bounds
      the log evidence with v integrated out;
    - neither: v maximises the ELBO (alpha cancels in its update), which bounds the log evidence at this v, and so
      the largest one over v; not any integrated evidence.

    The optima are many where columns are correlated, and where the noise is not known: one start is at a point
    of an approximate lasso path, with the coefficients by decreasing size there, in units of their columns;
    further ones are at other points, then at these in random orders. Take ten.

    Args:
        rng_key: Key of the random orders; the first nine starts need none of it.
        x: Design, shape ``(n, d)``; d may exceed n.
        y: Target, shape ``(n,)``.
        inclusion_prob: λ, a number or one a column, in (0, 1]; 1 keeps a variable in.
        slab_scale: s, in units of y per unit of x, a number or one a column.
        noise_scale: Standard deviation of the noise in units of y.
        noise_prior: Shape and rate (in squared units of y) of the Gamma prior of 1/v, instead of ``noise_scale``.
        intercept_scale: Prior standard deviation of b, which is the value at the means of the columns, in
            units of y. None, the default, has no intercept: centre y and the columns of x, or mean none.
        alpha: Power on the likelihood, positive.
        num_restarts: Starts, of which the largest ELBO is taken; more never give less.
        init: Coefficients to start from, ``(d,)``, as a start before the others.
        num_sweeps: Most sweeps of a start.
        tolerance: A start has converged once a sweep gains no more than this for each row, in nats.

    Returns:
        A :class:`LinearFit`. A constant column, where there is an intercept, keeps its prior. Works under ``jit``
        and ``vmap`` of any argument but the structural ones; values are not checked there.

    Raises:
        ValueError: If an argument is out of range, not finite or of a wrong shape; or y is constant and its noise
            is to be estimated.
        TypeError: If an argument is not of real numbers.

    References:
        CA-DNN and Bai20 for the family.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5, alpha=0.5
        ... )
        >>> print(fit.posterior.mean.round(1), fit.inclusion_probs.round(1))
        [0. 2. 0.] [0.1 1.  0.1]
    """
    x, y = as_data(x, y)
    prior = Prior(inclusion_prob, slab_scale, intercept_scale)
    problem = as_problem(x, y, prior, init)
    alpha = positive(alpha, "alpha")
    num_restarts, num_sweeps = check_count(num_restarts, "num_restarts"), check_count(num_sweeps, "num_sweeps")
    tolerance = check_tolerance(tolerance)
    noise = _noise_model(y, noise_scale, noise_prior, intercept_scale is not None)
    dtype = problem.x.dtype
    numbers = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (alpha, noise, tolerance * x.shape[0]))
    with jax.default_matmul_precision("highest"):
        path = lasso_path(problem.x, problem.y, problem.prior.probs == 1.0)
        starts = make_starts(rng_key, problem.x, path, problem.prior, problem.init, num_restarts)
        best = _fit(problem._replace(init=None), starts, *numbers, num_sweeps=num_sweeps)
    ascent = best.ascent
    check_end(ascent.objective, ascent.converged, num_sweeps, dtype)
    posterior, intercept = split(unblock(ascent.state.q, best.order), intercept_scale is not None)
    of_noise = None
    if isinstance(noise, Gamma):
        of_noise = NoisePosterior(*gamma_posterior(numbers[1], ascent.state.error, x.shape[0], numbers[0]))
    return LinearFit(
        posterior,
        intercept,
        problem.centre,
        1.0 / jnp.sqrt(ascent.state.precision),
        of_noise,
        ascent.objective,
        ascent.trace if is_traced(ascent.trace) else ascent.trace[: int(ascent.num_sweeps)],
        ascent.converged,
        ascent.num_sweeps,
        best.objectives,
        without_intercept(best.order, x.shape[1]),
        prior,
        alpha,
    )


class State(NamedTuple):
    """Where a linear ascent is.

    Attributes:
        q: Factors, ``(K, B)``.
        residual: y - X E[θ], shape ``(n,)``.
        error: E|y - Xθ|².
        precision: E[1/v].
    """

    q: SpikeSlab
    residual: Array
    error: Array
    precision: Array


@partial(jax.jit, static_argnames="num_sweeps")
def _fit(
    problem: Problem,
    starts: Start,
    alpha: Array,
    noise: Known | Estimated | Gamma,
    tolerance: Array,
    *,
    num_sweeps: int,
) -> Best:
    def ascend_from(start: Start) -> Ascent:
        step, begin = linear_ascent(problem.x, problem.y, problem.prior, alpha, noise, start)
        return ascend(step, begin, num_sweeps, tolerance)

    return best_start(ascend_from, starts)


def linear_ascent(
    x: Array, y: Array, prior: SpikeSlab, alpha: Array, noise: Known | Estimated | Gamma, start: Start
) -> tuple[Any, State]:
    """The step of an ascent, and where it starts."""
    n, order = y.shape[0], start.order
    design = block_design(blocks(x.T[order]))
    blocked = block_prior(SpikeSlab(*(part[order] for part in prior)))

    def step(state: State) -> tuple[State, Array]:
        q = sweep(design, blocked, alpha * state.precision, state.residual, state.q.mean)
        # Made afresh: what a sweep adds up step by step drifts.
        residual = y - fitted(design.columns, q.mean)
        error = jnp.sum(jnp.square(residual)) + jnp.sum(design.norms * q.variance)
        found = update_noise(noise, error, n, alpha)
        return State(q, residual, error, found.precision), found.bound - jnp.sum(kl(q, blocked))

    mean = blocks(start.mean[order])
    residual = y - fitted(design.columns, mean)
    error = jnp.sum(jnp.square(residual))
    q = SpikeSlab(jnp.ones_like(mean), mean, blocked.scale)
    return step, State(q, residual, error, update_noise(noise, error, n, alpha).precision)


def _noise_model(y: Any, noise_scale: Any, noise_prior: Any, with_intercept: bool) -> Known | Estimated | Gamma:
    """The noise that the arguments ask for.

    Raises:
        ValueError: If both are given, one is out of range, or y leaves no noise to estimate.
    """
    if noise_scale is not None and noise_prior is not None:
        raise ValueError("noise_scale and noise_prior are both given: a known noise has no prior.")
    if noise_scale is not None:
        return Known(positive(noise_scale, "noise_scale"))
    if noise_prior is not None:
        if not isinstance(noise_prior, tuple | list) or len(noise_prior) != 2:
            raise ValueError(f"noise_prior must be a pair (shape, rate), got {noise_prior!r}.")
        return Gamma(positive(noise_prior[0], "noise_prior shape"), positive(noise_prior[1], "noise_prior rate"))
    xp: Any = jnp if is_traced(y) else np
    square = xp.mean(xp.square(y - xp.mean(y) if with_intercept else y))
    if not is_traced(square) and not square > 0.0:
        raise ValueError(f"y is {y[0]} in all rows, so its noise cannot be estimated: pass noise_scale.")
    return Estimated(xp.finfo(jnp.result_type(float)).eps * square)
