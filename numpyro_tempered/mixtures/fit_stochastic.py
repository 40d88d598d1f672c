"""A mixture fitted by stochastic variational inference, data in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ProgressBar,
    at_index,
    check_count,
    key_first,
    progress,
)
from numpyro_tempered.mixtures import ascent, stochastic
from numpyro_tempered.mixtures.ascent import History, Limits, finite_or_least
from numpyro_tempered.mixtures.chunks import SAMPLE, Chunks, ChunkSource, chunk_source
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.draws import generator_of
from numpyro_tempered.mixtures.factors import (
    TEMPERED_CAVI,
    MixtureProblem,
    Outcome,
    objective,
)
from numpyro_tempered.mixtures.prepare import check_counts, check_settings
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.search import run
from numpyro_tempered.mixtures.source import pass_of
from numpyro_tempered.mixtures.starts import Start
from numpyro_tempered.mixtures.sweep import block_size, make_blocks
from numpyro_tempered.mixtures.weights import Concentration

DEFAULT_STEPS = stochastic.RobbinsMonro(kappa=0.7, tau=1.0)
STOCHASTIC = TEMPERED_CAVI._replace(begin=stochastic.start_state)


@key_first
def fit_stochastic(
    rng_key: Array,
    chunks: Chunks,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: Concentration = 1.0,
    step_size: stochastic.StepSize = DEFAULT_STEPS,
    batch_size: int = 1024,
    num_passes: int = 1,
    num_inner: int = 1,
    init: Start | None = None,
    num_restarts: int = 8,
    num_draws: int = 100,
    num_start_rows: int = 65536,
    size: int = 65536,
    progress_bar: ProgressBar = None,
) -> MixtureFit:
    r"""Fit a mixture by stochastic variational inference, where even one pass over the data is expensive.

    Steps of :func:`stochastic`, one for each batch, for the number of data that the chunks hold. The data are
    read twice to check them and sum what is constant, ``num_passes`` times for the steps, and twice for the
    objectives.
    To reach an optimum, continue with :func:`fit`, this fit as ``init`` and ``num_restarts=1``.

    Args:
        rng_key: Key of the starts, of the order of the rows, and of the draws for E1.
        chunks: As for :func:`fit`. Rows are shuffled within ``size`` of them: data that are sorted must be
            shuffled before.
        component: The family and its prior.
        num_components: K >= 1.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``; or :func:`stick_breaking`.
        step_size: In (0, 1], or a function of the step's number (1, 2, ...), :func:`robbins_monro` by default.
        batch_size: Rows of a batch.
        num_passes: Passes over the data.
        num_inner: Repetitions of each step; see :func:`stochastic`.
        init: First responsibilities of the rows that starts see, :func:`kmeans_plus_plus` by default.
        num_restarts: Starts, side by side; the one with the largest F at the end is returned.
        num_draws: Draws for E1.
        num_start_rows: Rows, drawn at random, that starts see.
        size: Rows that are moved to the device and shuffled together.
        progress_bar: Whether to show blocks of rows, by tqdm; None: where the fit takes some seconds.

    Returns:
        A :class:`MixtureFit` with F and E1 over all data. ``converged`` is False, since steps that shrink end
        without a test; ``trace`` holds F at the end alone, and ``num_iter`` the passes.

    Raises:
        TypeError: As :func:`fit`.
        ValueError: As :func:`fit`.
        FloatingPointError: If batches were rejected, or no restart has a finite objective.

    References:
        Hoffman, Blei, Wang, Paisley, *Stochastic variational inference*, JMLR 2013, figure 4.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.concatenate([np.linspace(-1.0, 1.0, 50), np.linspace(9.0, 11.0, 50)])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit_stochastic(
        ...     jax.random.key(0), [x], component, num_components=2, batch_size=20, num_passes=4
        ... )
        >>> sorted(round(float(m)) for m in fit.posterior.loc[:, 0])
        [0, 10]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_restarts, num_passes, num_inner, batch_size = check_counts(
        num_restarts=num_restarts,
        num_passes=num_passes,
        num_inner=num_inner,
        batch_size=batch_size,
    )
    num_draws = check_count(num_draws, "num_draws", 2)
    stochastic.check_step_size(step_size)
    if step_size is None:
        raise TypeError(
            "step_size is None, which is for streams: expected a number in (0, 1] or a function."
        )
    source = chunk_source(
        rng_key,
        chunks,
        component,
        num_start_rows=num_start_rows,
        size=size,
        num_together=settings.num_components * num_restarts,
        multiple_of=batch_size,
    )
    limits = Limits(num_restarts, num_passes, None, progress_bar)
    steps = partial(
        step_through,
        step_size=step_size,
        batch_size=min(batch_size, source.num_rows),
        num_inner=num_inner,
    )
    return run(
        rng_key,
        source,
        settings,
        limits,
        init,
        optimise=steps,
        num_draws=num_draws,
        algorithm=STOCHASTIC,
    )


def step_through(
    rng_key: Array,
    source: ChunkSource,
    problem: MixtureProblem,
    states: stochastic.StochasticState,
    limits: Limits,
    *,
    step_size: stochastic.StepSize,
    batch_size: int,
    num_inner: int,
) -> Outcome:
    """A step for each batch of each pass, and the best of the restarts at the end."""
    component, generator = source.data.component, generator_of(rng_key, SAMPLE + 1)
    total = jnp.asarray(source.data.total, source.data.rows.dtype)
    num_blocks = limits.max_iter * -(-source.num_rows // source.size)
    with progress(num_blocks, "blocks", limits.progress_bar) as bar:
        for _ in range(limits.max_iter):
            for rows, weight in source.read():
                order = generator.permutation(source.size).reshape(-1, batch_size)
                jax.block_until_ready(states)
                batches = jnp.asarray(rows[order]), jnp.asarray(weight[order])
                states = _steps(
                    states,
                    problem,
                    batches,
                    total,
                    component=component,
                    step_size=step_size,
                    num_inner=num_inner,
                )
                bar.update()
    totals = jnp.full(limits.num_restarts, total)
    factors = ascent.for_restarts(
        stochastic.factors_at, component, problem, states, totals
    )
    sums = source.reduce(pass_of(TEMPERED_CAVI), problem, factors)
    values = ascent.for_restarts(objective, component, problem, factors, sums)
    objectives = finite_or_least(values)
    check_end(np.asarray(states.rejected), objectives)
    best = int(np.argmax(objectives))
    trace = np.asarray(values)[best : best + 1]
    history = History.at(trace, objectives, limits.num_restarts, False, limits.max_iter)
    return Outcome(jax.tree.map(np.asarray, at_index(factors, best)), history)


@partial(jax.jit, static_argnames=("component", "step_size", "num_inner"))
def _steps(
    states: stochastic.StochasticState,
    problem: MixtureProblem,
    batches: tuple[Array, Array],
    total: Array,
    *,
    component: Component,
    step_size: stochastic.StepSize,
    num_inner: int,
) -> stochastic.StochasticState:
    """All batches of a block, on the first axis of rows and weights, for states with leading axis R."""
    size = block_size(batches[0].shape[1], states.counts.size)
    step = partial(
        stochastic.stochastic_step,
        component,
        problem,
        step_size=step_size,
        total=total,
        num_inner=num_inner,
    )

    def body(
        states: stochastic.StochasticState, batch: tuple[Array, Array]
    ) -> tuple[stochastic.StochasticState, None]:
        blocks = make_blocks(*batch, size)
        return jax.vmap(lambda state: step(state, blocks)[0])(states), None

    return jax.lax.scan(body, states, batches)[0]


def check_end(rejected: np.ndarray, objectives: np.ndarray) -> None:
    """Raise where batches were rejected, or no objective is finite.

    Raises:
        FloatingPointError: If so.
    """
    if not np.any(np.isfinite(objectives)):
        raise FloatingPointError(
            "no restart has a finite objective: standardise the columns, or widen the prior."
        )
    if np.any(rejected):
        raise FloatingPointError(
            f"{int(rejected.max())} batches were rejected: their statistics were not finite, or step_size gave a "
            "number outside of (0, 1]."
        )
