"""Coverage of tempered intervals, checked by the bootstrap."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core import (
    CLOCK,
    Array,
    ArrayLike,
    Guide,
    Labels,
    Model,
    Params,
    ProgressBar,
    advise_cache,
    axis_labels,
    check_count,
    check_number,
    check_numbers,
    doubles,
    map_batches,
    progress_bars,
    run_program,
    runs_models,
)
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guide_laws import is_auto
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.settle import DATA_SETS
from numpyro_tempered.infer.svi import NUM_STEPS
from numpyro_tempered.report.arviz import Coords, Dims
from numpyro_tempered.select.alpha.base import Draws, Plan, Request, Task
from numpyro_tempered.select.alpha.coverage_report import CoverageCheck, Refits, report
from numpyro_tempered.select.alpha.data_sets import fit_data_sets, pick, width_of
from numpyro_tempered.select.alpha.dependence import Block, num_units, resample_counts
from numpyro_tempered.select.alpha.guides import (
    GuideOptions,
    build_fitter,
    check_guide_options,
    draw,
)
from numpyro_tempered.select.alpha.independence import warn_of_dependence
from numpyro_tempered.select.alpha.mcmc import MCMCOptions, sample_all
from numpyro_tempered.select.alpha.model_data import Method, build_method
from numpyro_tempered.select.alpha.sandwich import Estimate, estimate_of
from numpyro_tempered.select.check.numbers import number_labels

LEVELS = (0.5, 0.8, 0.9, 0.95)
NUM_BOOTSTRAP = 200
NUM_DRAWS = 1000
STREAMS = "resamples weigh the data, which a stream cannot: take a guide or a kernel."


class Design(NamedTuple):
    """What is checked.

    Attributes:
        alpha: Power of the likelihood.
        levels: Of the intervals, increasing, ``(L,)``.
        num_bootstrap: B.
        num_draws: Draws of each posterior.
        guides: Options of the fits of a guide.
        mcmc: Options of chains.
    """

    alpha: float
    levels: np.ndarray
    num_bootstrap: int
    num_draws: int
    guides: GuideOptions
    mcmc: MCMCOptions


@runs_models
def check_coverage(
    rng_key: Array,
    model: Model,
    method: Method,
    *data: object,
    alpha: float = 1.0,
    levels: Sequence[float] = LEVELS,
    num_bootstrap: int = NUM_BOOTSTRAP,
    num_draws: int = NUM_DRAWS,
    plate: str | None = None,
    groups: ArrayLike | None = None,
    block: Block = None,
    num_steps: int = NUM_STEPS,
    tolerance: float = 0.05,
    loss: ELBO | None = None,
    expectation: Expectation | None = None,
    num_warmup: int = 500,
    coords: Coords | None = None,
    dims: Dims | None = None,
    progress_bar: ProgressBar = None,
    **kwargs: object,
) -> CoverageCheck:
    r"""Whether the intervals of a tempered posterior cover what they say, by resamples of the rows.

    The rows are resampled B times, whole ``groups`` or blocks of a series where these are given, the posterior at
    the power is fitted to each resample as ``method`` fits it, and for each number of each latent the share of
    resamples is counted in which the central interval of a level contains **the centre of the fit to all data**:
    the median of a guide that knows it, else that of its draws. That is the coverage of Syring and Martin, whose
    :func:`gpc` chooses the power by it, with two differences: intervals of single numbers stand in the place of
    one set for all, and the centre of the fit in that of the minimiser, so that what the prior pulls is pulled
    alike in all resamples, and its bias is not seen.

    Nothing is assumed of the shape of the posterior or the truth of the model; only that the rows, groups or
    blocks are independent and many. With few, resamples vary less than samples do: standard deviations by about
    :math:`(1 - d/n)^{1/2}`.

    Fits of a guide to all resamples run side by side as one program, which serves all powers; chains run one
    after the other. This costs as much as :func:`numpyro_tempered.check_calibration` with B simulations.

    Args:
        rng_key: Key of the resamples, fits and draws.
        model: NumPyro model, as for :func:`numpyro_tempered.select_alpha`.
        method: From tempered model to guide or kernel, as for ``select_alpha``: ``AutoNormal``, ``NUTS``.
        *data: Arguments of the model.
        alpha: Power on the likelihood.
        levels: Of the central intervals, in (0, 1), increasing.
        num_bootstrap: B, at least 20. The standard error of a coverage of .9 is .02 with 200.
        num_draws: Draws of each posterior, whose quantiles are the intervals.
        plate: Name of the plate whose rows are the data, where there are several.
        groups: Of rows that depend on each other, as for ``select_alpha``.
        block: Of a series, as for ``select_alpha``.
        num_steps: Guides: the most steps of each fit.
        tolerance: Guides: in nats, on the estimated distance of each ELBO from its optimum.
        loss: Guides: ELBO of NumPyro to optimise; by default that of :func:`fit_svi`.
        expectation: Guides: of the likelihood, for fits as of :func:`fit_gaussian`.
        num_warmup: MCMC: steps of adaptation for each resample.
        coords: Labels by dimension, for the names of the numbers.
        dims: Names of the dimensions by site.
        progress_bar: Whether to show steps, by tqdm; None: where they take some seconds.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`CoverageCheck`. Its table has a row for each number and level, with

        - ``coverage``, the share of resamples whose interval holds the centre of the fit to all data, and
          ``coverage_se``, its binomial standard error;
        - ``width``, the average width of the intervals;

        and for each number

        - ``centre``, of the fit to all data;
        - ``sd``, the standard deviation that the fits to resamples say, as the root of its mean square;
        - ``bootstrap_sd``, that of their centres, and ``ratio``, the second over the first: above 1 where
          intervals are too narrow;
        - ``power``, alpha over the squared ratio: the power at which they would be equal where widths go as
          :math:`1/\sqrt\alpha`, as they do with many data and a weak prior.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or makes none.
        ValueError: If a number is out of range, the model cannot be taken apart by rows or has powers already, a
            method learns a stream, or draws of a fit are not finite.

    Warns:
        DependenceWarning: If rows repeat others exactly or the scores of successive rows are correlated, and
            neither ``groups`` nor ``block`` is given.

    References:
        SM19; B. Efron and R. Tibshirani, *An introduction to the bootstrap*, 1993.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)  # standard deviation 2, where the model has 1
        >>> check = nt.alpha.check_coverage(jax.random.key(0), model, AutoNormal, y, levels=[0.9])
        >>> bool(nt.table(check)["coverage"].item() < 0.75)  # 2 Phi(1.64 / 2) - 1 = .59
        True
    """
    began = CLOCK.read()
    design = check_design(
        Design(
            alpha,
            np.asarray(levels),
            num_bootstrap,
            num_draws,
            check_guide_options(GuideOptions(num_steps, tolerance, loss, expectation)),
            MCMCOptions(
                check_count(num_warmup, "num_warmup", 0), num_draws, 1, "sequential"
            ),
        )
    )
    labels = axis_labels((data, kwargs))
    data, kwargs = check_call(
        check_coverage, rng_key, model, method, data, kwargs, groups=groups
    )
    model_key, check_key = jax.random.split(rng_key)
    task = Task(model, model_key, data, kwargs, plate, groups=groups, block=block)
    if isinstance(build_method(method, task.model, online=True), OnlineVI):
        raise ValueError(STREAMS)
    otherwise = "Resamples take the rows for independent, and vary too little where they are not."
    estimate = _estimate_if_any(task)
    influence = None if estimate is None else estimate.influence
    warn_of_dependence(task.rows, influence, otherwise=otherwise)
    with progress_bars(progress_bar):
        check = coverage_of(
            check_key, task, method, design, labels, coords or {}, dims=dims or {}
        )
    advise_cache("check_coverage", began)
    return check


def check_design(design: Design) -> Design:
    """Refuse numbers that are out of range."""
    check_number(design.alpha, "alpha", "(0, inf)")
    levels = doubles(check_numbers(design.levels, "levels", "(0, 1)"))
    if levels.ndim != 1 or not len(levels) or np.any(np.diff(levels) <= 0):
        raise ValueError(
            f"levels must be a list of increasing probabilities, got {design.levels!r}."
        )
    check_count(design.num_bootstrap, "num_bootstrap", 20)
    check_count(design.num_draws, "num_draws", 100)
    return design._replace(alpha=float(design.alpha), levels=levels)


def _estimate_if_any(task: Task) -> Estimate | None:
    """The sandwich of a task, which shows signs of dependence, where it has one."""
    try:
        return estimate_of(task)
    except ValueError:
        return None


def coverage_of(
    rng_key: Array,
    task: Task,
    method: Method,
    design: Design,
    labels: Labels,
    coords: Coords,
    *,
    dims: Dims,
) -> CoverageCheck:
    """The coverage of the intervals of a task at one power."""
    resample_key, fit_key = jax.random.split(rng_key)
    names = number_labels(
        task.trace,
        {**labels, **{dim: np.asarray(values) for dim, values in coords.items()}},
        {name: value for name, value in dims.items() if name not in task.observed},
    )
    # An estimated block needs the scores, and says where there are none.
    lags = (
        estimate_of(task).lags
        if task.dependence.block == "auto"
        else (task.dependence.block or 1) - 1
    )
    counts = resample_counts(resample_key, design.num_bootstrap, task.dependence, lags)
    weights = np.concatenate([np.ones((1, task.num_data)), np.asarray(counts)])
    # The power is an input of the fits: what a guide looks at to set itself up is one program for all powers.
    algorithm = build_method(method, temper(task.model, 1.0), online=True)
    refit = _sample if isinstance(algorithm, MCMCKernel) else _fit
    refits, converged = refit(fit_key, task, method, algorithm, design, weights=weights)
    units = num_units(task.dependence, lags)
    return report(
        refits, converged, design.alpha, design.levels, names, num_independent=units
    )


def summarise(
    values: Mapping[str, Array], centre: Array | None, levels: np.ndarray
) -> Refits:
    """The intervals of one posterior from its draws ``(S, ...)`` by site; by default about their median."""
    flat = jax.vmap(lambda draw: ravel_pytree(draw)[0])(dict(values))
    tails = 0.5 * (1.0 - levels)
    quantiles = jnp.quantile(
        flat,
        jnp.asarray(np.concatenate([tails, 1.0 - tails, [0.5]]), flat.dtype),
        axis=0,
    )
    ends = jnp.stack([quantiles[: len(levels)], quantiles[len(levels) : -1]])
    return Refits(
        quantiles[-1] if centre is None else centre, jnp.std(flat, axis=0, ddof=1), ends
    )


def _fit(
    rng_key: Array,
    task: Task,
    method: Method,
    guide: Guide,
    design: Design,
    *,
    weights: np.ndarray,
) -> tuple[Refits, np.ndarray]:
    """The intervals of fits of a guide to all data and to the resamples, and which fits have converged."""
    start_key, run_key, draw_key = jax.random.split(rng_key, 3)
    dtype = jnp.result_type(float)
    powers = np.full(len(weights), design.alpha, dtype)
    inputs = np.arange(len(weights), dtype=np.int32), weights.astype(dtype), powers

    def model_of(_: Array, weights: Array, alpha: Array) -> Model:
        return task.reweighted(alpha, weights)

    first = pick(inputs, np.arange(width_of(inputs)))
    fitter = build_fitter(
        start_key, task, guide, model_of, first, design.guides, batch=DATA_SETS
    )
    params, converged = fit_data_sets(run_key, fitter, inputs)

    def intervals(keys: Array, params: Params) -> Refits:
        def one(part: tuple[Array, Params]) -> Refits:
            key, params = part
            keys = jax.random.split(key, design.num_draws)
            values = map_batches(lambda k: draw(k, task, guide, params)[0], keys, 64)
            return summarise(values, _median(task, guide, params), design.levels)

        return jax.lax.map(one, (keys, params))

    keys = jax.random.split(draw_key, len(weights))
    return jax.device_get(run_program(intervals, keys, params)), converged


def _median(task: Task, guide: Guide, params: Params) -> Array | None:
    """The centre of a guide that knows it, as numbers in the order of the sites."""
    if not is_auto(guide):
        return None
    try:
        values = guide.median(params)
    except NotImplementedError:
        return None
    return ravel_pytree({name: values[name] for name in task.latents})[0]


def _sample(
    rng_key: Array,
    task: Task,
    method: Method,
    kernel: MCMCKernel,
    design: Design,
    *,
    weights: np.ndarray,
) -> tuple[Refits, np.ndarray]:
    """The same of chains, by one compiled program; they have no evidence of convergence but on all data."""

    def reduce(draws: Draws) -> Refits:
        return summarise(draws.values, None, design.levels)

    request = Request(
        np.array([design.alpha]), (Plan(weights, reduce),), pointwise=False
    )
    (summary,) = sample_all(
        rng_key, task, method, kernel, request, design.mcmc
    ).summaries
    return jax.tree.map(lambda leaf: leaf[:, 0], summary), np.ones(len(weights), bool)
