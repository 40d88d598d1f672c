"""Fits of one guide at many powers of the likelihood, each to its optimum."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import TraceEnum_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import log_density

from numpyro_tempered.core import (
    Array,
    Guide,
    Params,
    check_count,
    check_number,
    compile_once,
    map_batches,
)
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.handlers.likelihood import Trace
from numpyro_tempered.handlers.powers import as_operands
from numpyro_tempered.handlers.target import Target, refuse_moving_supports
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.elbo import find_points, trace_guide
from numpyro_tempered.infer.gaussian_many import (
    GaussianBatchFitter,
    gaussian_batch_fitter,
)
from numpyro_tempered.infer.guide_laws import has_gates, is_auto, law_of
from numpyro_tempered.infer.set_up import first_call
from numpyro_tempered.infer.settle import (
    GRID,
    Batch,
    BatchFitter,
    Convergence,
    Fitted,
    ModelOf,
    batch_fitter,
)
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.alpha.base import Draws, Fits, Request, Summary, Task
from numpyro_tempered.select.alpha.model_data import Method

# A full covariance has so many parameters that averages of stochastic steps take tens of thousands to settle; its
# natural gradients need the Hessian, which costs as many products as there are latents.
MAX_LATENTS = 200
# Alphas that a message lists.
MOST_LISTED = 4


class GuideOptions(NamedTuple):
    """How :func:`select_alpha` and :func:`temper_path` fit guides.

    Attributes:
        num_steps: The most steps of each fit.
        tolerance: In nats, on the estimated distance of each ELBO from its optimum.
        loss: ELBO to optimise; None for that of antithetic draws.
        expectation: Of the likelihood, for fits as of :func:`fit_gaussian`; None for those of :func:`fit_svi`, or
            by draws for a full covariance.
    """

    num_steps: int
    tolerance: float
    loss: ELBO | None
    expectation: Expectation | None


def check_guide_options(options: GuideOptions) -> GuideOptions:
    """Refuse numbers that are out of range."""
    check_count(options.num_steps, "num_steps")
    check_number(options.tolerance, "tolerance", "(0, inf)")
    return options


class Sizes(NamedTuple):
    """Numbers of draws: of each posterior on all data, and on a part of them."""

    num_samples: int
    num_refit_samples: int


def check_sizes(sizes: Sizes) -> Sizes:
    """Refuse fewer draws than have a variance."""
    for name, size in sizes._asdict().items():
        check_count(size, name, 4)
    return sizes


def draw(
    rng_key: Array, data: Target, guide: Guide, params: Params
) -> tuple[Params, Array]:
    """One draw of the latents from a guide, and its log-density."""
    at = handlers.substitute(handlers.seed(guide, rng_key), data=params)
    log_q, trace = log_density(at, data.args, data.kwargs, {})
    return {name: trace[name]["value"] for name in data.latents}, log_q


def set_up(
    rng_keys: tuple[Array, Array], data: Target, guide: Guide, noun: str = "alpha"
) -> None:
    """Set a guide up outside of jit, where it may keep its Python state.

    Raises:
        ValueError: If the guide is built on another model, runs its model, lacks a latent site, or is a point.
    """

    def run(key: Array) -> Trace:
        return trace_guide(key, guide, {}, data.args, data.kwargs)

    if has_gates(guide):
        raise ValueError(
            f"AutoSpikeAndSlab has a schedule of its own: fit it {noun} by {noun} by fit_svi."
        )
    before = data.model.runs
    first_call(lambda: run(rng_keys[0]), guide)
    if is_auto(guide) and data.model.runs == before:
        raise ValueError(
            "method builds its guide on another model than the tempered one that it gets."
        )
    before = data.model.runs
    one, two = (run(key) for key in rng_keys)
    if data.model.runs > before:
        raise ValueError(
            f"{name_of(guide)} runs the model it was built on, which has one {noun}: fit it {noun} by {noun} by "
            "fit_svi, or take AutoNormal."
        )
    missing = sorted(set(data.latents) - set(one))
    if missing:
        raise ValueError(
            f"the guide has no sites {missing}, which are latent in the model."
        )
    for name, is_point in find_points(one, two).items():
        if is_point:
            raise ValueError(
                f"{name_of(guide)} has a point mass at {name!r}, and an ELBO of -inf: take AutoNormal."
            )


def build_fitter(
    rng_key: Array,
    data: Target,
    guide: AutoGuide,
    model_of: ModelOf,
    inputs: tuple,
    options: GuideOptions,
    *,
    batch: Batch = GRID,
) -> BatchFitter | GaussianBatchFitter:
    """Set a guide up, and compile what fits it at all powers, or to all data sets, at once.

    Args:
        rng_key: Of its start.
        data: The model with its data.
        guide: Built on the model at the largest power.
        model_of: From the inputs of one fit to its model.
        inputs: Arrays ``(A, ...)``.
        options: Of the fits.
        batch: How the models belong together.

    Raises:
        TypeError: If an expectation comes with a guide that is no Gaussian.
        ValueError: If the guide cannot be fitted at several powers.
    """
    if isinstance(options.loss, TraceEnum_ELBO):
        raise ValueError(
            "TraceEnum_ELBO sums the likelihood before the weights of single data can be applied: sum discrete "
            "latents out by nt.marginalize, and take Trace_ELBO."
        )
    one, two, key = jax.random.split(rng_key, 3)
    set_up((one, two), data, guide, batch.noun)
    if is_auto(guide):
        refuse_moving_supports(data.model, data.trace, data.args, data.kwargs)
    where = key, model_of, guide, data.args, data.kwargs, inputs
    law = law_of(guide)
    is_full = law.is_gaussian and law.has_covariance and guide.latent_dim <= MAX_LATENTS
    if options.expectation is not None or (is_full and options.loss is None):
        return gaussian_batch_fitter(
            *where,
            expectation=options.expectation,
            tolerance=options.tolerance,
            batch=batch,
        )
    return batch_fitter(
        *where,
        loss=options.loss,
        num_steps=options.num_steps,
        tolerance=options.tolerance,
        batch=batch,
    )


def unconverged(evidence: Sequence[Convergence | Result]) -> np.ndarray:
    """Which fits have not converged."""
    return np.array([not each.converged for each in evidence])


def shortfall(evidence: Convergence | Result) -> str:
    """By how much a fit misses its optimum, as far as it tells."""
    if isinstance(evidence, Result):
        number, gap = int(evidence.num_evaluations), float(evidence.stationarity)
        return f"{number} evaluations, {gap:.2g} nats by estimate, {evidence.reason}"
    if np.isfinite(evidence.gap):
        return f"{evidence.num_steps} steps, {evidence.gap:.2g} nats by estimate"
    if 0.0 < evidence.fall < np.inf:
        return f"{evidence.num_steps} steps, and the loss still fell by {evidence.fall:.2g} nats"
    return f"{evidence.num_steps} steps, too few to judge"


def list_alphas(alphas: np.ndarray) -> str:
    """Some alphas in words."""
    first = ", ".join(f"{alpha:.3g}" for alpha in alphas[:MOST_LISTED])
    return (
        first
        if len(alphas) <= MOST_LISTED
        else f"{first} and {len(alphas) - MOST_LISTED} others"
    )


def check_converged(
    alphas: np.ndarray, fitted: Fitted, what: str, options: GuideOptions
) -> None:
    """Refuse fits that have not converged: what is compared along a grid would be their distance to the optimum.

    Raises:
        ValueError: If one has not.
    """
    bad = unconverged(fitted.evidence)
    if not np.any(bad):
        return
    worst = shortfall(fitted.evidence[int(np.flatnonzero(bad)[0])])
    raise ValueError(
        f"the fits to {what} at alpha = {list_alphas(alphas[bad])} have not converged within "
        f"{options.tolerance:.2g} nats of their optimum ({worst}), and alphas would be compared by how far they "
        "came. Take a larger num_steps, another parameterisation, AutoNormal for a guide with many parameters, "
        "expectation= where the model names its predictor, or a larger tolerance."
    )


class Recipe(NamedTuple):
    """A method with the guide that it builds on the tempered model."""

    method: Method
    guide: Guide


def fit_all(
    rng_key: Array,
    task: Task,
    recipe: Recipe,
    request: Request,
    options: GuideOptions,
    sizes: Sizes,
) -> Fits:
    """Fit every alpha: to the data, then to the reweighted data of the plans in turn.

    The alphas are fitted side by side, by programs that serve all plans.

    Raises:
        ValueError: If a fit has not converged.
    """
    (alphas, plans, pointwise), guide = request, recipe.guide
    start_key, key, fit_key = jax.random.split(rng_key, 3)
    powers = jax.device_put(np.asarray(alphas, float))
    rows = [np.asarray(row, powers.dtype) for row in request.weights(task.num_data)]
    inputs = [
        (powers, jax.device_put(np.broadcast_to(row, (len(powers), len(row)))))
        for row in rows
    ]
    fitter = build_fitter(start_key, task, guide, task.reweighted, inputs[0], options)

    def draws(key: Array, params: Params, number: int) -> Draws:
        values = map_batches(
            lambda k: draw(k, task, guide, params)[0], jax.random.split(key, number), 64
        )
        return task.draws(values, _mean(task, guide, params))

    def reduce(key: Array, params: Params) -> list[Summary]:
        def one(params: Params) -> list[Summary]:
            of_refit = draws(key, params, sizes.num_refit_samples)
            return [plan.reduce(of_refit) for plan in plans]

        return jax.lax.map(one, params)

    def log_lik(key: Array, params: Params) -> Array:
        def one(params: Params) -> Array:
            each = draws(key, params, sizes.num_samples).log_lik
            return each if pointwise else jnp.sum(each, axis=1)

        return jax.lax.map(one, params)

    (run_key, draw_key), *refit_keys = map(
        jax.random.split, jax.random.split(key, len(rows))
    )
    on_all = fitter.fit(run_key, inputs[0])
    check_converged(alphas, on_all, "all data", options)
    summaries, ends = [], on_all.ends
    program = compile_once(reduce, draw_key, on_all.params) if plans else None
    if program is not None:
        summaries.append(jax.device_get(program(draw_key, on_all.params)))
        for number, (run_key, draw_key) in enumerate(refit_keys, 1):
            fitted = fitter.fit(run_key, inputs[number], ends)
            check_converged(
                alphas,
                fitted,
                f"part {number} of {len(refit_keys)} of the data",
                options,
            )
            ends = fitted.ends
            summaries.append(jax.device_get(program(draw_key, fitted.params)))
    each = jax.device_get(compile_once(log_lik, key, on_all.params)(key, on_all.params))

    def fit_at(k: int) -> tuple[TemperedFit, tuple, dict]:
        tempered = temper(task.model.fn, alpha=as_operands(float(alphas[k])))
        instance = recipe.method(tempered)
        elbo_key, later_key, setup_key = jax.random.split(
            jax.random.fold_in(fit_key, k), 3
        )
        first_call(
            lambda: handlers.seed(instance, setup_key)(*task.args, **task.kwargs),
            instance,
        )
        losses = on_all.losses[k]
        fit = finish(
            (elbo_key, later_key),
            tempered,
            instance,
            jax.device_put(
                jax.tree.map(lambda leaf: np.asarray(leaf)[k], on_all.params)
            ),
            losses if options.expectation is None else losses[np.isfinite(losses)],
            task.args,
            kwargs=task.kwargs,
            num_particles=sizes.num_samples,
        )
        return fit._replace(convergence=on_all.evidence[k]), (), {}

    stacked = (
        jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *summaries)
        if plans
        else []
    )
    total = each.sum(axis=2) if pointwise else each
    return Fits(
        request.split(stacked),
        total[:, None, :],
        each[:, None] if pointwise else None,
        fit_at,
    )


def _mean(task: Task, guide: Guide, params: Params) -> Params | None:
    """The mean of a Gaussian guide on the unconstrained scale, which is where its median comes from."""
    if task.discrete or not is_auto(guide):
        return None
    try:
        return task.unconstrain(guide.median(params))
    except NotImplementedError:
        return None
