"""Posteriors of a grid of alphas on reweighted data, by SVI."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import Trace_ELBO, TraceEnum_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Guide
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.select.alpha.base import STACKLEVEL, Draws, Fits, Query, Summary, Task
from numpyro_tempered.select.grid.model_data import Method
from numpyro_tempered.select.grid.svi import GuideFitter, check_fits, set_up

NUM_PARTICLES = 10
Params = dict[str, Array]
# Parameters of the last fit, and of the fit to all data.
Carry = tuple[Params, Params]


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
            params, losses = fitter.fit(run_key, model, steps, init_params=params, length=length)
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

    def fit_at(k: int) -> TemperedFit:
        tempered = temper(task.original, alpha=float(alphas[k]))
        instance = factory(tempered)
        elbo_key, later_key, setup_key = jax.random.split(jax.random.fold_in(fit_key, k), 3)
        handlers.seed(instance, setup_key)(*task.args, **task.kwargs)
        return finish(
            (elbo_key, later_key),
            tempered,
            instance,
            jax.tree.map(lambda leaf: jnp.asarray(leaf[k]), params),
            jnp.asarray(losses[k, 0, : options.num_steps]),
            task.args,
            kwargs=task.kwargs,
            num_particles=options.num_samples,
        )

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
