"""Fits of one guide at many powers of the likelihood, by SVI inside one compiled program."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import log_density

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Guide, Model
from numpyro_tempered.handlers.effects import base_distribution
from numpyro_tempered.handlers.likelihood import Trace, latent_sites
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.fixed_steps import default_optim, full_size_steps, late_fall
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.alpha.base import STACKLEVEL, Draws, Fits, Query, Summary, Task
from numpyro_tempered.select.alpha.model_data import Method, ModelData

NUM_PARTICLES = 10
Params = dict[str, Array]
# Parameters of the last fit, and of the fit to all data.
Carry = tuple[Params, Params]


class GuideFitter(NamedTuple):
    """A guide and how it is fitted; its methods are pure, and take the model at a power that may be traced.

    Attributes:
        data: The model with its data.
        guide: The guide, set up by :func:`set_up`.
        optim: NumPyro or optax optimiser; None for that of :func:`fit_svi`.
        loss: ELBO to optimise.
    """

    data: ModelData
    guide: Guide
    optim: object
    loss: ELBO

    def svi(self, model: Model, num_steps: int | Array) -> SVI:
        """The SVI of the guide on this model."""
        optim = default_optim(num_steps) if self.optim is None else self.optim
        return SVI(model, self.guide, optim, self.loss)

    def init(self, rng_key: Array, model: Model) -> Params:
        """Starting parameters."""
        svi = self.svi(model, 1)
        return svi.get_params(svi.init(rng_key, *self.data.args, **self.data.kwargs))

    def fit(
        self, rng_key: Array, model: Model, num_steps: int | Array, *, init: Params | None = None, length: int
    ) -> tuple[Params, Array]:
        """Fitted parameters and the losses ``(length,)``, NaN after ``num_steps``."""
        args, kwargs = self.data.args, self.data.kwargs
        svi = self.svi(model, num_steps)
        state = svi.init(rng_key, *args, init_params=init, **kwargs)

        def step(i: Array, carry: tuple) -> tuple:
            state, losses = carry
            state, loss = svi.update(state, *args, **kwargs)
            return state, losses.at[i].set(loss)

        state, losses = jax.lax.fori_loop(0, num_steps, step, (state, jnp.full(length, jnp.nan)))
        return svi.get_params(state), losses

    def draw(self, rng_key: Array, params: Params) -> tuple[dict[str, Array], Array]:
        """One draw of the latents, and its log-density under the guide."""
        at = handlers.substitute(handlers.seed(self.guide, rng_key), data=params)
        log_q, trace = log_density(at, self.data.args, self.data.kwargs, {})
        return {name: trace[name]["value"] for name in self.data.latents}, log_q


def set_up(rng_keys: tuple[Array, Array], data: ModelData, guide: Guide) -> None:
    """Set a guide up outside of jit, where it may keep its Python state.

    Raises:
        ValueError: If the guide is built on another model, runs its model, lacks a latent site, or is a point.
    """

    def run(key: Array) -> Trace:
        return handlers.trace(handlers.seed(guide, key)).get_trace(*data.args, **data.kwargs)

    before = data.runs
    run(rng_keys[0])
    if isinstance(guide, AutoGuide) and data.runs == before:
        raise ValueError("method builds its guide on another model than the tempered one that it gets.")
    before = data.runs
    one, two = (run(key) for key in rng_keys)
    if data.runs > before:
        raise ValueError(
            f"{name_of(guide)} runs the model it was built on, which has one alpha: fit it alpha by alpha by "
            "fit_svi, or take AutoNormal."
        )
    missing = sorted(set(data.latents) - set(one))
    if missing:
        raise ValueError(f"the guide has no sites {missing}, which are latent in the model.")
    for name, site in latent_sites(one).items():
        point = isinstance(base_distribution(site["fn"]), dist.Delta)
        if point and jnp.array_equal(site["value"], two[name]["value"]):
            raise ValueError(
                f"{name_of(guide)} has a point mass at {name!r}, and an ELBO of -inf: take AutoNormal."
            )


def check_fits(
    alphas: np.ndarray,
    losses: np.ndarray,
    num_steps: np.ndarray,
    *,
    optim: object,
    stacklevel: int,
    finite: np.ndarray | bool = True,
) -> None:
    """Raise for a fit that is not finite at its end, and warn for a loss that still falls.

    Args:
        alphas: Powers, ``(A,)``.
        losses: Of each fit at each step, ``(A, P, length)``.
        num_steps: Steps of each fit, ``(P,)``.
        optim: The optimiser; None for the default one.
        stacklevel: Of the warning, from the caller.
        finite: Whether all draws of the fits are finite, ``(A,)``.

    Raises:
        ValueError: If a fit ended in a loss that is not finite, or has such draws.
    """
    last = np.take_along_axis(losses, num_steps[None, :, None] - 1, axis=2)[..., 0]
    finite = finite & np.all(np.isfinite(last), axis=1)
    if not np.all(finite):
        raise ValueError(
            f"the fits at alpha = {alphas[~finite]} ended in values that are not finite: look for NaN in the "
            "data, or take a smaller step size."
        )
    falling = [
        alpha
        for alpha, rows in zip(alphas, losses, strict=True)
        if any(late_fall(full_size_steps(row[:n], optim)) for row, n in zip(rows, num_steps, strict=True))
    ]
    if falling:
        warnings.warn(
            f"the loss of a fit still fell at alpha = {np.round(falling, 6)}: take more num_steps (for "
            "the refits of select_alpha num_refit_steps) or another optimiser.",
            stacklevel=stacklevel + 1,
        )


class SVIOptions(NamedTuple):
    """The options of :func:`select_alpha` for guides."""

    num_steps: int
    num_refit_steps: int
    num_samples: int
    num_refit_samples: int
    optim: object
    loss: ELBO | None


def fit_all(rng_key: Array, task: Task, factory: Method, guide: Guide, query: Query, options: SVIOptions) -> Fits:
    """Fit every alpha under one ``vmap``: to the data, then to the reweighted data of the plans in turn.

    One compiled loop serves all fits. Each starts at the parameters of the fit before, with a new optimiser.
    """
    if isinstance(options.loss, TraceEnum_ELBO):
        raise ValueError(
            "TraceEnum_ELBO sums the likelihood before the weights of single data can be applied: sum discrete "
            "latents out by nt.marginalize, and take Trace_ELBO."
        )
    # The refits to few data need gradients with little noise more than they need speed.
    loss = Trace_ELBO(num_particles=NUM_PARTICLES) if options.loss is None else options.loss
    fitter = GuideFitter(task, guide, options.optim, loss)
    set_up_key, point_key, key, fit_key = jax.random.split(rng_key, 4)
    set_up((set_up_key, point_key), task, guide)
    alphas, plans, pointwise = query
    weights = query.weights(task.num_data)
    num_steps = np.full(len(weights), options.num_refit_steps)
    num_steps[0] = options.num_steps
    length = int(num_steps.max())

    def draws(key: Array, params: Params, number: int) -> Draws:
        values = map_batches(lambda k: fitter.draw(k, params)[0], jax.random.split(key, number), 64)
        return task.draws(values, _mean(task, guide, params))

    def run(key: Array, alpha: Array) -> tuple[Params, Array, list[Summary], Array, Array | None]:
        init_key, chain_key, draw_key = jax.random.split(key, 3)

        def refit(carry: Carry, inputs: tuple[Array, ...]) -> tuple[Carry, tuple[Array, list[Summary]]]:
            params, full = carry
            key, weights, steps, first = inputs
            run_key, draw_key = jax.random.split(key)
            model = task.reweighted(alpha, weights)
            params, losses = fitter.fit(run_key, model, steps, init=params, length=length)
            full = jax.tree.map(lambda new, old: jnp.where(first, new, old), params, full)
            refit_draws = draws(draw_key, params, options.num_refit_samples)
            return (params, full), (losses, [plan.reduce(refit_draws) for plan in plans])

        start = fitter.init(init_key, task.reweighted(alpha, jnp.ones(task.num_data)))
        first = np.arange(len(weights)) == 0
        keys = jax.random.split(chain_key, len(weights))
        inputs = keys, jnp.asarray(weights, jnp.result_type(float)), jnp.asarray(num_steps), jnp.asarray(first)
        (_, full), (losses, summaries) = jax.lax.scan(refit, (start, start), inputs)
        log_lik = draws(draw_key, full, options.num_samples).log_lik
        return full, losses, summaries, jnp.sum(log_lik, axis=1), log_lik if pointwise else None

    # One key for all: what is compared along the grid then shares its Monte Carlo noise.
    program = jax.jit(jax.vmap(run, in_axes=(None, 0)))
    powers = jnp.asarray(alphas, jnp.result_type(float))
    params, losses, summaries, log_lik, each = jax.device_get(program(key, powers))
    check_fits(alphas, losses, num_steps, optim=options.optim, stacklevel=STACKLEVEL)

    def fit_at(k: int) -> tuple[TemperedFit, tuple, dict]:
        tempered = temper(task.original, alpha=float(alphas[k]))
        instance = factory(tempered)
        elbo_key, later_key, setup_key = jax.random.split(jax.random.fold_in(fit_key, k), 3)
        handlers.seed(instance, setup_key)(*task.args, **task.kwargs)
        fit = finish(
            (elbo_key, later_key),
            tempered,
            instance,
            jax.tree.map(lambda leaf: jnp.asarray(leaf[k]), params),
            jnp.asarray(losses[k, 0, : options.num_steps]),
            task.args,
            kwargs=task.kwargs,
            num_particles=options.num_samples,
        )
        return fit, (), {}

    each = each[:, None] if pointwise else None
    return Fits(query.split(summaries), log_lik[:, None, :], each, fit_at)


def _mean(task: Task, guide: Guide, params: Params) -> Params | None:
    """The mean of a Gaussian guide on the unconstrained scale, which is where its median comes from."""
    if task.discrete or not isinstance(guide, AutoGuide):
        return None
    try:
        return task.unconstrain(guide.median(params))
    except NotImplementedError:
        return None
