"""Tempered variational Bayes for mixtures of conjugate components."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.blocks import Blocks, block_size, make_blocks, num_shards
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.evidence import Bound, bound_gap, draw_many
from numpyro_tempered.mixtures.factors import Factors, Problem, coefficients, objective
from numpyro_tempered.mixtures.loops import (
    ascend,
    check_ascent,
    default_tolerance,
    objectives_of,
    proposals,
    starts,
)
from numpyro_tempered.mixtures.prepare import (
    Prepared,
    as_dtype,
    check_alpha,
    check_concentration,
    check_count,
    prepare,
)
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.sweep import Coefficients, base_sum, sweep

__all__ = ["MixtureFit", "evaluate", "fit"]


def fit(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: ArrayLike = 1.0,
    sample_weight: ArrayLike | None = None,
    start: Start | None = None,
    warm_start: MixtureFit | None = None,
    num_restarts: int = 8,
    num_moves: int = 0,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_samples: int = 100,
    progress_bar: bool = False,
) -> MixtureFit:
    r"""Fit a mixture by tempered coordinate ascent.

    The model is :math:`\sum_j p_j q_{\theta_j}`, with p ~ Dirichlet and independent :math:`\theta_j`. With
    responsibilities :math:`\omega_{ij} \propto \exp(l_{ij})`, :math:`l_{ij} = E \log p_j + E \log
    q_{\theta_j}(x_i)`, which carry no alpha, and factors that are the priors updated by alpha times the weighted
    statistics, every half-step raises

    .. math:: F = \alpha \sum_{ij} \omega_{ij} (l_{ij} - \log \omega_{ij}) - \mathrm{KL}(\rho, \pi)
              \le \alpha E_\rho[\log L] - \mathrm{KL}(\rho, \pi) = E_1 .

    Args:
        rng_key: Key of the starts, and of the draws for E1.
        x: Data, rows ``(n, d)``. NaN are missing entries and are marginalised where the family allows this; a
            row without an observed entry counts nothing.
        component: The family and its prior, such as ``nt.mixtures.gaussian(dim)``.
        num_components: K >= 1. Components may end empty, at their prior.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``.
        sample_weight: How often each row counts, ``(n,)``, not negative.
        start: First responsibilities, :func:`kmeans_plus_plus` by default.
        warm_start: A fit of the same family and K, whose factors the first restart starts from.
        num_restarts: Starts, ascended side by side; the one with the largest F is returned.
        num_moves: Rounds of moves from the best restart: each proposes as many merges, deaths and splits as there
            are restarts, ascends from all, and keeps the best if its F is larger.
        tolerance: A restart has converged when a pass raises F by no more than this times the sum of the
            weights; 1e-8 in double precision by default, and 1e-6 in single.
        max_iter: Most passes over the data.
        num_samples: Draws for E1, each a pass over the data; with 0 E1 is left out.
        progress_bar: Whether to show passes and objective, by tqdm.

    Returns:
        A :class:`MixtureFit`. A warning says when its restart has not converged.

    Raises:
        TypeError: If an argument is of another kind than above, or the data are traced.
        ValueError: If the data are not of the family, or an argument is out of its range.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding, which is an error of the component's functions.

    References:
        CA18, Algorithm 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]
    """
    num_components = check_count(num_components, "num_components")
    num_restarts, max_iter = check_count(num_restarts, "num_restarts"), check_count(max_iter, "max_iter")
    num_samples, num_moves = check_count(num_samples, "num_samples", 0), check_count(num_moves, "num_moves", 0)
    alpha = check_alpha(alpha)
    prior_weights = check_concentration(concentration, num_components)
    data = prepare(x, component, sample_weight)
    dtype = data.rows.dtype
    shards = num_shards(data.rows)
    size = block_size(data.rows.shape[0] // shards, num_components * num_restarts)
    blocks = make_blocks(data.rows, data.weight, size, shards)
    problem = Problem(
        as_dtype(data.prior, dtype),
        jnp.asarray(prior_weights, dtype),
        jnp.asarray(alpha, dtype),
        _base_sum(data.component, blocks),
    )
    start_key, move_key, draw_key = jax.random.split(rng_key, 3)
    factors = starts(
        start_key,
        data,
        blocks,
        problem,
        start_or_default(start),
        num_restarts,
        shards,
        size,
    )
    if warm_start is not None:
        factors = put_first(factors, as_dtype(moved_factors(warm_start, data, num_components), dtype))
    allowed = default_tolerance(tolerance, dtype)
    state = ascend(data, blocks, problem, factors, allowed, max_iter, progress_bar)
    objectives = objectives_of(state)
    best = int(np.argmax(objectives))
    check_ascent(state, objectives, data.component)
    accepted = 0
    for key in jax.random.split(move_key, num_moves) if num_components > 1 else []:
        factors = jax.tree.map(lambda leaf, best=best: leaf[best], state.factors)
        keys = jax.random.split(key, num_restarts)
        moved = proposals(keys, data.component, problem, factors, data.rows, data.weight, blocks)
        moved_state = ascend(data, blocks, problem, moved, allowed, max_iter, progress_bar)
        values = objectives_of(moved_state)
        if values.max() > float(state.objective[best]) + allowed * data.total:
            state, best, accepted = moved_state, int(np.argmax(values)), accepted + 1
    if not bool(state.converged[best]):
        warnings.warn(
            f"the best restart has not converged in max_iter={max_iter} passes: raise max_iter or the tolerance.",
            stacklevel=2,
        )
    factors = jax.tree.map(lambda leaf: leaf[best], state.factors)
    value, counts, bound = evaluate(draw_key, data.component, problem, factors, blocks, num_samples)
    num_iter = int(state.num_iter[best])
    return MixtureFit(
        component=data.component,
        alpha=alpha,
        factors=factors,
        problem=problem,
        centre=data.centre,
        objective=value,
        bound=bound,
        counts=counts,
        trace=np.asarray(state.trace[:num_iter, best]),
        objectives=objectives,
        converged=bool(state.converged[best]),
        num_iter=num_iter,
        num_moves=accepted,
        total=data.total,
    )


def evaluate(
    rng_key: Array, component: Component, problem: Problem, factors: Factors, blocks: Blocks, num_samples: int
) -> tuple[float, np.ndarray, Bound | None]:
    """F, the counts and E1 at given factors, in double precision; without draws no E1."""
    with double_precision():
        wide = as_dtype((problem, factors), jnp.float64)
        draws = draw_many(rng_key, component, wide[1], num_samples) if num_samples else None
        value, counts, gaps = _evaluate(component, *wide, draws, blocks)
        value = float(value)
        bound = Bound.of(value, np.asarray(gaps)) if num_samples else None
        return value, np.asarray(counts), bound


@partial(jax.jit, static_argnames="component")
def _evaluate(
    component: Component, problem: Problem, factors: Factors, draws: Coefficients | None, blocks: Blocks
) -> tuple[Array, Array, Array]:
    blocks = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), blocks)
    problem = problem._replace(base=base_sum(component, blocks))
    sums = sweep(component, coefficients(component, factors), blocks)
    gaps = jnp.zeros(0) if draws is None else bound_gap(component, problem, factors, draws, sums, blocks)
    return objective(component, problem, factors, sums), sums.counts, gaps


def put_first(factors: Factors, warm: Factors) -> Factors:
    """The factors of all restarts, those of the first replaced."""
    return jax.tree.map(lambda all_, one: all_.at[0].set(one), factors, warm)


def moved_factors(warm_start: MixtureFit, data: Prepared, num_components: int) -> Factors:
    """The factors of another fit, of data with this fit's centre taken off.

    Raises:
        TypeError: If ``warm_start`` is not a fit.
        ValueError: If it is of another family or another K.
    """
    if not isinstance(warm_start, MixtureFit):
        raise TypeError(f"warm_start is a {type(warm_start).__name__}; expected the result of fit.")
    if warm_start.component != data.component or warm_start.num_components != num_components:
        raise ValueError(
            f"warm_start has {warm_start.num_components} components of {warm_start.component.name}; expected "
            f"{num_components} of {data.component.name}, both with missing entries or both without."
        )
    if data.centre is None:
        return warm_start.factors
    shift = jnp.asarray(warm_start.centre - data.centre, warm_start.factors.concentration.dtype)
    posterior = data.component.translate(warm_start.factors.posterior, shift)  # type: ignore[misc]
    return warm_start.factors._replace(posterior=posterior)


@partial(jax.jit, static_argnames="component")
def _base_sum(component: Component, blocks: Blocks) -> Array:
    return base_sum(component, blocks)
