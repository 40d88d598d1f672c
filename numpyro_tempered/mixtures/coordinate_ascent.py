"""Tempered variational Bayes for mixtures of conjugate components, with all rows in each pass."""

from functools import partial

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Ascent,
    ProgressBar,
    at_index,
    key_first,
    warn_caller,
)
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.ascent import (
    History,
    Limits,
    PassState,
    check_finite,
    check_limits,
    for_keys,
    for_restarts,
)
from numpyro_tempered.mixtures.chunks import Chunks, is_chunks, source_of
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import (
    COMMON_CAVI,
    TEMPERED_CAVI,
    Factors,
    MixtureProblem,
    Outcome,
    common_sizes,
)
from numpyro_tempered.mixtures.moves import propose
from numpyro_tempered.mixtures.prepare import check_counts, check_settings
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.search import run
from numpyro_tempered.mixtures.source import Source
from numpyro_tempered.mixtures.warm import Init
from numpyro_tempered.mixtures.weights import Concentration


@key_first
def fit(
    rng_key: Array,
    x: ArrayLike | Chunks,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: Concentration = 1.0,
    sample_weight: ArrayLike | None = None,
    init: Init | None = None,
    num_restarts: int = 8,
    num_moves: int = 0,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_draws: int = 100,
    num_start_rows: int = 65536,
    size: int = 65536,
    progress_bar: ProgressBar = None,
) -> MixtureFit:
    r"""Fit a mixture by tempered coordinate ascent.

    The model is :math:`\sum_j p_j q_{\theta_j}`, with p ~ Dirichlet, or :func:`stick_breaking`, and independent
    :math:`\theta_j`. With responsibilities :math:`\omega_{ij} \propto \exp(l_{ij})`, :math:`l_{ij} = E \log p_j +
    E \log q_{\theta_j}(x_i)`, which carry no alpha, and factors that are the priors updated by alpha times the
    weighted statistics, every half-step raises

    .. math:: F = \alpha \sum_{ij} \omega_{ij} (l_{ij} - \log \omega_{ij}) - \mathrm{KL}(\rho, \pi)
              \le \alpha E_\rho[\log L] - \mathrm{KL}(\rho, \pi) = E_1 .

    Data in chunks give the same fit to the last few bits, whatever the cut: the sums of an iteration are those of
    the chunks, added with their rounding errors. They are read twice to check them and sum what is constant, once
    an iteration, and once for the objectives. Memory is that of a chunk, of ``size`` rows and of
    ``num_start_rows`` rows.

    Args:
        rng_key: Key of the starts, and of the draws for E1.
        x: Data, rows ``(n, d)``. NaN are missing entries and are marginalised where the family allows this; a
            row without an observed entry counts nothing. Or chunks of rows, of any sizes, or of tuples
            ``(rows, sample_weight)``: a list, or a function without arguments that makes a new iterable of them
            for each pass, such as one that reads the row groups of a Parquet file.
        component: The family and its prior, such as ``nt.mixtures.components.gaussian(dim)``.
        num_components: K >= 1. Components may end empty, at their prior.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``; or :func:`stick_breaking`.
        sample_weight: How often each row counts, ``(n,)``, not negative.
        init: First responsibilities, of ``nt.mixtures.starts``, :func:`kmeans_plus_plus` by default; or a fit of
            the same family; or a list of fits, and of first responsibilities for other restarts. The first
            restart starts from the factors of a fit of K components. Of those of fewer the largest is a start
            beside the restarts: with empty components, at their prior, and with parts of its components split
            off.
        num_restarts: Starts, ascended side by side; the one with the largest F is returned.
        num_moves: Rounds of moves from the best restart: each proposes as many merges, deaths and splits as there
            are restarts, ascends from all, and keeps the best if its F is larger. Chunks take none.
        tolerance: A restart has converged when a pass raises F by no more than this times the sum of the
            weights; 1e-8 in double precision by default, and 1e-6 in single.
        max_iter: Upper limit of passes over the data.
        num_draws: Draws for E1, each a pass over the data; with 0 E1 is left out.
        num_start_rows: Rows of chunks, drawn at random, that starts see; where all data are no more, starts are
            those of rows in memory. Their sums are scaled to all data.
        size: Rows of chunks in a block, the unit that is compiled and moved to the device.
        progress_bar: Whether to show passes and objective, by tqdm; None: where the fit takes some seconds.

    Returns:
        A :class:`MixtureFit`. A warning says when its restart has not converged.

    Raises:
        TypeError: If an argument is of another kind than above, the data are traced, or chunks are an iterator,
            which is used up by one pass.
        ValueError: If the data are not of the family, or an argument is out of its range; if chunks hold no row,
            differ in their columns, or give other rows in a later pass.
        FloatingPointError: If no restart keeps a finite objective, or the precision does not hold the prior of
            the weights.
        RuntimeError: If F falls by more than rounding, which is an error of the component's functions.

    References:
        CA18, Algorithm 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]

        In chunks:

        >>> def chunks():
        ...     for centre in (0.0, 9.0):
        ...         yield np.array([[centre], [centre + 0.1]])
        >>> fit = nt.mixtures.fit(jax.random.key(0), chunks, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_draws, num_moves = check_counts(0, num_draws=num_draws, num_moves=num_moves)
    limits = check_limits(num_restarts, max_iter, tolerance, progress_bar)
    if num_moves and is_chunks(x):
        raise ValueError(
            f"num_moves={num_moves}, and moves need all rows in memory: leave it out for chunks."
        )
    source = source_of(
        rng_key,
        x,
        component,
        sample_weight,
        settings.num_components,
        limits,
        num_start_rows=num_start_rows,
        size=size,
    )
    moving = partial(
        coordinate_ascent, num_moves=num_moves if settings.num_components > 1 else 0
    )
    return run(
        rng_key, source, settings, limits, init, optimise=moving, num_draws=num_draws
    )


# Nats that rounding may take from the log density of a datum where components share their statistics.
COMMON_ROUNDING = 1e-4
# The keys of moves, behind those of the starts.
MOVES = 2**20


def coordinate_ascent(
    rng_key: Array,
    source: Source,
    problem: MixtureProblem,
    factors: Factors,
    limits: Limits,
    *,
    num_moves: int = 0,
) -> Outcome:
    """All starts to their ends, and rounds of moves from the best; with a warning where it has not converged.

    Raises:
        FloatingPointError: If no restart has a finite objective.
    """
    data = source.data
    state = ascend(source, problem, factors, limits)
    objectives = np.asarray(state.objective)
    check_finite(state, data.component)
    best, num_accepted = int(np.argmax(objectives)), 0
    tolerance = limits.tolerance_at(data.rows.dtype) * data.total
    if isinstance(source, ArraySource):
        for number in range(num_moves):
            keys = jax.random.split(
                jax.random.fold_in(rng_key, MOVES + number), limits.num_restarts
            )
            parent = at_index(state.point.factors, best)
            proposals = for_keys(
                propose, data.component, keys, problem, parent, source.blocks
            )
            after = ascend(source, problem, proposals, limits)
            if np.max(after.objective) > state.objective[best] + tolerance:
                state, best, num_accepted = (
                    after,
                    int(np.argmax(after.objective)),
                    num_accepted + 1,
                )
    history = History.of(state, best, objectives, limits.num_restarts)
    if not history.converged:
        warn_caller(
            f"the best restart has not converged in max_iter={limits.max_iter} passes: raise max_iter or the "
            "tolerance."
        )
    worst = int(np.argmax(state.fall))
    factors, fallen = (
        at_index(state.point.factors, best),
        (worst, at_index(state.point, worst)),
    )
    return Outcome(
        factors, history, num_accepted, tolerance, float(state.fall[worst]), fallen
    )


def ascend(
    source: Source, problem: MixtureProblem, factors: Factors, limits: Limits
) -> Ascent[PassState[Factors]]:
    """All starts to their ends; with sums about 0 where rows are many and these keep their digits."""
    location, component = source.data.component.location, source.data.component
    # Where missing entries depend on others, no statistics are common: each component completes rows in its way.
    if location is not None and location.completed is None and source.is_large:
        state = source.ascend(COMMON_CAVI, problem, factors, limits)
        sizes = np.asarray(
            for_restarts(common_sizes, component, problem, state.point.update)
        )
        rounding = 0.5 * float(np.finfo(sizes.dtype).eps) * sizes.max()
        # What is not finite compares as False.
        if (
            np.isfinite(state.objective).all()
            and rounding <= COMMON_ROUNDING
            and not np.any(state.fall > 0)
        ):
            return state
    return source.ascend(TEMPERED_CAVI, problem, factors, limits)
