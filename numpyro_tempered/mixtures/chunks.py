"""Coordinate ascent over data that do not fit the memory."""

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.ascent import begin
from numpyro_tempered.mixtures.blocks import block_size, make_blocks
from numpyro_tempered.mixtures.chunk_passes import (
    add_base,
    add_sums,
    after_pass,
    all_coefficients,
    evaluate_chunks,
    sum_over,
)
from numpyro_tempered.mixtures.chunk_reading import Chunks, Survey, read_blocks, survey
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.factors import Problem
from numpyro_tempered.mixtures.fit import moved_factors, put_first
from numpyro_tempered.mixtures.loops import check_ascent, default_tolerance, first_sums, objectives_of, updates
from numpyro_tempered.mixtures.prepare import as_dtype, check_alpha, check_concentration, check_count
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.sweep import Sums


def fit_chunks(
    rng_key: Array,
    chunks: Chunks,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: ArrayLike = 1.0,
    start: Start | None = None,
    warm_start: MixtureFit | None = None,
    num_restarts: int = 8,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_samples: int = 100,
    num_start_rows: int = 65536,
    size: int = 65536,
    progress_bar: bool = False,
) -> MixtureFit:
    r"""Fit a mixture by tempered coordinate ascent, data in chunks.

    :func:`fit` to the last few bits, whatever the cut: the sums of an iteration are those of the chunks, added
    with their rounding errors. The data are read twice to check them and sum what is constant, once an iteration,
    and once for the objectives. Memory is that of a chunk, of ``size`` rows and of ``num_start_rows`` rows.

    Args:
        rng_key: Key of the starts, and of the draws for E1.
        chunks: Arrays of rows ``(n, d)`` with any number of rows each, or tuples ``(x, sample_weight)``: a list,
            or a function without arguments that makes an iterable of them anew for each pass, such as one that
            reads the row groups of a Parquet file.
        component: The family and its prior.
        num_components: K >= 1.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``.
        start: First responsibilities of the rows that starts see, :func:`kmeans_plus_plus` by default.
        warm_start: A fit of the same family and K, whose factors the first restart starts from.
        num_restarts: Starts, ascended in the same passes; the one with the largest F is returned.
        tolerance: As for :func:`fit`.
        max_iter: Most iterations.
        num_samples: Draws for E1.
        num_start_rows: Rows, drawn at random, that starts see; where all data are no more, starts are those of
            :func:`fit`. Their sums are scaled to all data.
        size: Rows in a block, the unit that is compiled and moved to the device.
        progress_bar: Whether to show iterations, by tqdm.

    Returns:
        A :class:`MixtureFit`. A warning says when its restart has not converged.

    Raises:
        TypeError: If ``chunks`` is an array, or an iterator, which is used up by one pass; or as :func:`fit`.
        ValueError: If the chunks hold no row, differ in their columns, or give other rows in a later pass; or as
            :func:`fit`, with the number of the chunk.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.

    References:
        CA18, Algorithm 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> def chunks():
        ...     for centre in (0.0, 9.0):
        ...         yield np.array([[centre], [centre + 0.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit_chunks(jax.random.key(0), chunks, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]
    """
    num_components = check_count(num_components, "num_components")
    num_restarts, max_iter = check_count(num_restarts, "num_restarts"), check_count(max_iter, "max_iter")
    num_samples = check_count(num_samples, "num_samples", 2)
    start_key, sample_key, draw_key = jax.random.split(rng_key, 3)
    problem, found = survey_problem(
        sample_key, chunks, component, num_components, alpha, concentration, num_start_rows
    )
    sample, dtype = found.sample, found.sample.rows.dtype
    size, inner = block_sizes(found, size, num_components * num_restarts)

    def read() -> Any:
        return read_blocks(chunks, component, found, size)

    problem = problem._replace(base=sum_over(add_base, read(), sample.component, inner))
    first = start_sums(start_key, found, num_components, start_or_default(start), num_restarts)
    factors = updates(sample.component, problem, first)
    if warm_start is not None:
        factors = put_first(factors, as_dtype(moved_factors(warm_start, sample, num_components), dtype))
    allowed = jnp.asarray(default_tolerance(tolerance, dtype), dtype)
    total = jnp.asarray(found.total, dtype)
    state = begin(factors, max_iter)
    with _bar(max_iter) if progress_bar else contextlib.nullcontext() as bar:
        for _ in range(max_iter):
            mixtures = all_coefficients(sample.component, state.following)
            sums = sum_over(add_sums, read(), sample.component, inner, mixtures)
            state = after_pass(sample.component, problem, state, sums, allowed, total)
            if bar is not None:
                bar.update()
            if not bool(jnp.any(state.active)):
                break
    objectives = objectives_of(state)
    best = int(np.argmax(objectives))
    check_ascent(state, objectives, sample.component)
    if not bool(state.converged[best]):
        warnings.warn(
            f"the best restart has not converged in max_iter={max_iter} passes: raise max_iter or the tolerance.",
            stacklevel=2,
        )
    factors = jax.tree.map(lambda leaf: leaf[best], state.factors)
    value, counts, bound = evaluate_chunks(draw_key, sample.component, problem, factors, read, inner, num_samples)
    num_iter = int(state.num_iter[best])
    return MixtureFit(
        component=sample.component,
        alpha=float(alpha),
        factors=factors,
        problem=problem,
        centre=sample.centre,
        objective=value,
        bound=bound,
        counts=counts,
        trace=np.asarray(state.trace[:num_iter, best]),
        objectives=objectives,
        converged=bool(state.converged[best]),
        num_iter=num_iter,
        num_moves=0,
        total=found.total,
    )


def survey_problem(
    rng_key: Array,
    chunks: Chunks,
    component: Component,
    num_components: int,
    alpha: float,
    concentration: ArrayLike,
    num_start_rows: int,
) -> tuple[Problem, Survey]:
    """The first pass over the chunks, and the problem without its sum of log h.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If one is out of its range.
    """
    if not isinstance(component, Component):
        raise TypeError(
            f"component is a {type(component).__name__}; expected a component such as nt.mixtures.gaussian(dim)."
        )
    alpha = check_alpha(alpha)
    weights = check_concentration(concentration, num_components)
    found = survey(rng_key, chunks, component, check_count(num_start_rows, "num_start_rows"))
    dtype = found.sample.rows.dtype
    numbers = as_dtype((found.sample.prior, weights, alpha, 0.0), dtype)
    return Problem(*numbers), found


def block_sizes(found: Survey, size: int, num_together: int) -> tuple[int, int]:
    """Rows of a block, and of the smaller blocks within it that fit the cache."""
    size = max(min(check_count(size, "size", 2), found.num_rows), 2)
    return size, block_size(size, num_together)


def start_sums(rng_key: Array, found: Survey, num_components: int, start: Start, num_restarts: int) -> Sums:
    """The sums under first responsibilities of the sample, scaled to all data, with leading axis R."""
    sample = found.sample
    inner = block_size(sample.rows.shape[0], num_components * num_restarts)
    blocks = make_blocks(sample.rows, sample.weight, inner)
    sums = first_sums(rng_key, sample, blocks, num_components, start, num_restarts, 1, inner)
    scale = found.total / sample.total
    return jax.tree.map(lambda leaf: scale * leaf, sums)


def _bar(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=" passes")
