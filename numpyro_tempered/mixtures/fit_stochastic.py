"""A mixture fitted by stochastic variational inference, data in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures import ascent, stochastic
from numpyro_tempered.mixtures.chunks import SAMPLE, Chunks, chunk_source
from numpyro_tempered.mixtures.climb import Found
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.draws import generator_of
from numpyro_tempered.mixtures.evidence import evaluate
from numpyro_tempered.mixtures.factors import TEMPERED_CAVI, MixtureProblem, objective, problem_of
from numpyro_tempered.mixtures.prepare import check_counts, check_settings
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.source import Beginning, pass_of
from numpyro_tempered.mixtures.starts import Start, start_or_default
from numpyro_tempered.mixtures.sweep import block_size, make_blocks
from numpyro_tempered.mixtures.weights import Concentration

DEFAULT_STEPS = stochastic.RobbinsMonro(kappa=0.7, tau=1.0)


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
    start: Start | None = None,
    num_restarts: int = 8,
    num_samples: int = 100,
    num_start_rows: int = 65536,
    size: int = 65536,
    progress_bar: bool = False,
) -> MixtureFit:
    r"""Fit a mixture by stochastic variational inference, where even one pass over the data is expensive.

    Steps of :func:`stochastic`, one for each batch, for the number of data that the chunks hold. The data are
    read twice to check them and sum what is constant, ``num_passes`` times for the steps, and twice for the
    objectives.
    To reach an optimum, continue with :func:`fit_chunks`, ``warm_start`` and ``num_restarts=1``.

    Args:
        rng_key: Key of the starts, of the order of the rows, and of the draws for E1.
        chunks: As for :func:`fit_chunks`. Rows are shuffled within ``size`` of them: data that are sorted must be
            shuffled before.
        component: The family and its prior.
        num_components: K >= 1.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``; or :func:`stick_breaking`.
        step_size: In (0, 1], or a function of the step's number (1, 2, ...), :func:`robbins_monro` by default.
        batch_size: Rows of a batch.
        num_passes: Passes over the data.
        num_inner: Repetitions of each step; see :func:`stochastic`.
        start: First responsibilities of the rows that starts see, :func:`kmeans_plus_plus` by default.
        num_restarts: Starts, side by side; the one with the largest F at the end is returned.
        num_samples: Draws for E1.
        num_start_rows: Rows, drawn at random, that starts see.
        size: Rows that are moved to the device and shuffled together.
        progress_bar: Whether to show blocks of rows, by tqdm.

    Returns:
        A :class:`MixtureFit` with F and E1 over all data. ``converged`` is False, since steps that shrink end
        without a test; ``trace`` holds F at the end alone, and ``num_iter`` the passes.

    Raises:
        TypeError: As :func:`fit_chunks`.
        ValueError: As :func:`fit_chunks`.
        FloatingPointError: If batches were rejected, or no restart has a finite objective.

    References:
        Hoffman, Blei, Wang, Paisley, *Stochastic variational inference*, JMLR 2013, figure 4.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.concatenate([np.linspace(-1.0, 1.0, 50), np.linspace(9.0, 11.0, 50)])
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit_stochastic(
        ...     jax.random.key(0), [x], component, num_components=2, batch_size=20, num_passes=4
        ... )
        >>> sorted(round(float(m)) for m in fit.posterior.loc[:, 0])
        [0, 10]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_restarts, num_passes, num_inner, batch_size = check_counts(
        num_restarts=num_restarts, num_passes=num_passes, num_inner=num_inner, batch_size=batch_size
    )
    num_samples = check_count(num_samples, "num_samples", 2)
    stochastic.check_step_size(step_size)
    if step_size is None:
        raise TypeError("step_size is None, which is for streams: expected a number in (0, 1] or a function.")
    source = chunk_source(
        rng_key,
        chunks,
        component,
        num_start_rows=num_start_rows,
        size=size,
        num_together=settings.num_components * num_restarts,
        multiple_of=batch_size,
    )
    batch_size = min(batch_size, source.num_rows)
    component, problem = source.data.component, problem_of(source.data, settings, settings.num_components)
    total = jnp.asarray(source.data.total, source.data.rows.dtype)
    totals = jnp.full(num_restarts, total)
    beginning = Beginning(settings.num_components, start_or_default(start), num_restarts)
    algorithm = TEMPERED_CAVI._replace(begin=stochastic.start_state)
    problem, states = source.begin(rng_key, algorithm, problem, beginning)
    generator = generator_of(rng_key, SAMPLE + 1)
    num_blocks = num_passes * -(-source.num_rows // source.size)
    with ascent.progress(num_blocks, "blocks", progress_bar) as bar:
        for _ in range(num_passes):
            for rows, weight in source.read():
                order = generator.permutation(source.size).reshape(-1, batch_size)
                jax.block_until_ready(states)
                batches = jnp.asarray(rows[order]), jnp.asarray(weight[order])
                states = _steps(
                    states, problem, batches, total, component=component, step_size=step_size, num_inner=num_inner
                )
                bar.update()
    factors = ascent.for_restarts(stochastic.factors_at, component, problem, states, totals)
    sums = source.reduce(pass_of(TEMPERED_CAVI), problem, factors)
    values = np.asarray(ascent.for_restarts(objective, component, problem, factors, sums), np.float64)
    objectives = np.where(np.isfinite(values), values, -np.inf)
    check_end(np.asarray(states.rejected), objectives)
    best = int(np.argmax(objectives))
    trace, num_best = objectives[best : best + 1].astype(total.dtype), ascent.count_best(objectives, num_restarts)
    spread = float(objectives[best] - np.median(objectives))
    history = ascent.History(trace, objectives, num_best, spread, False, num_passes)
    factors = jax.tree.map(np.asarray, ascent.restart(factors, best))
    return evaluate(rng_key, source, problem, settings, Found(factors, history), num_samples)


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
        stochastic.stochastic_step, component, problem, step_size=step_size, total=total, num_inner=num_inner
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
