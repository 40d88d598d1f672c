"""Posteriors of a grid of alphas on reweighted data, by SVI."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import log_density

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Guide
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.elbo import has_point_mass
from numpyro_tempered.infer.svi import CONSTANT, TemperedFit, default_optim, finish, late_fall
from numpyro_tempered.select.alpha.base import Draws, Fits, Plan
from numpyro_tempered.select.alpha.data_weights import weigh_data
from numpyro_tempered.select.alpha.task import Task
from numpyro_tempered.select.path.problem import name_of
from numpyro_tempered.select.path.svi import set_up

NUM_PARTICLES = 10


def fit_all(
    rng_key: Array,
    task: Task,
    factory: Callable[[Any], Guide],
    guide: Guide,
    alphas: np.ndarray,
    plans: Sequence[Plan],
    *,
    pointwise: bool,
    num_steps: int,
    num_refit_steps: int,
    num_samples: int,
    num_refit_samples: int,
    optim: Any,
    loss: ELBO | None,
) -> Fits:
    """Fit every alpha under one ``vmap``: to the data, then to the reweighted data of the plans in turn.

    One compiled loop serves all fits. Each starts at the parameters of the one before, its optimiser anew.
    """
    if isinstance(loss, TraceEnum_ELBO):
        raise ValueError(
            "TraceEnum_ELBO sums the likelihood before the weights of single data can be applied: sum discrete "
            "latents out by nt.marginalize, and take Trace_ELBO."
        )
    args, kwargs = task.args, task.kwargs
    set_up_key, point_key, key, fit_key = jax.random.split(rng_key, 4)
    set_up(set_up_key, task, guide)
    if has_point_mass(point_key, guide, {}, args, kwargs):
        raise ValueError(
            f"the guide {name_of(guide)} is a point, whose expected losses are those of the point: take "
            "AutoNormal, say."
        )
    weights = np.concatenate([np.ones((1, task.num_data)), *(plan.weights for plan in plans)])
    steps = np.full(len(weights), num_refit_steps)
    steps[0] = num_steps
    longest = int(steps.max())

    def run(key: Array, alpha: Array) -> Any:
        init_key, chain_key, draw_key = jax.random.split(key, 3)
        # The refits to few data need gradients with little noise more than they need speed.
        elbo = Trace_ELBO(num_particles=NUM_PARTICLES) if loss is None else loss

        def svi(weights: Array, steps: Array) -> SVI:
            model = weigh_data(temper(task.model, alpha), weights, task.dim)
            return SVI(model, guide, default_optim(steps) if optim is None else optim, elbo)

        def draw(key: Array, params: dict[str, Array]) -> dict[str, Array]:
            at = handlers.substitute(handlers.seed(guide, key), data=params)
            trace = log_density(at, args, kwargs, {})[1]
            return {name: trace[name]["value"] for name in task.latents}

        def draws(key: Array, params: dict[str, Array], number: int) -> Draws:
            keys = jax.random.split(key, number)
            values = map_batches(lambda k: draw(k, params), keys, 64)
            return task.draws(values, _mean(task, guide, params))

        def stage(carry: Any, inputs: Any) -> Any:
            params, full = carry
            key, weights, steps, first = inputs
            run_key, draw_key = jax.random.split(key)
            fitter = svi(weights, steps)
            state = fitter.init(run_key, *args, init_params=params, **kwargs)

            def step(i: Array, carry: Any) -> Any:
                state, losses = carry
                state, value = fitter.update(state, *args, **kwargs)
                return state, losses.at[i].set(value)

            trace = jnp.full(longest, jnp.nan)
            state, trace = jax.lax.fori_loop(0, steps, step, (state, trace))
            params = fitter.get_params(state)
            full = jax.tree.map(lambda new, old: jnp.where(first, new, old), params, full)
            found = draws(draw_key, params, num_refit_samples)
            return (params, full), (trace, [plan.reduce(found) for plan in plans])

        one = svi(jnp.ones(task.num_data), jnp.asarray(num_steps))
        start = one.get_params(one.init(init_key, *args, **kwargs))
        first = np.arange(len(weights)) == 0
        keys = jax.random.split(chain_key, len(weights))
        inputs = (keys, jnp.asarray(weights, jnp.result_type(float)), jnp.asarray(steps), jnp.asarray(first))
        (_, full), (traces, reduced) = jax.lax.scan(stage, (start, start), inputs)
        at_full = draws(draw_key, full, num_samples)
        kept = at_full.log_lik if pointwise else None
        return full, traces, reduced, jnp.sum(at_full.log_lik, axis=1), kept

    # One key for all: what is compared along the grid then shares its Monte Carlo noise.
    program = jax.jit(jax.vmap(run, in_axes=(None, 0)))
    params, traces, reduced, log_lik, kept = jax.device_get(
        program(key, jnp.asarray(alphas, jnp.result_type(float)))
    )
    _check(alphas, steps, traces, optim)

    def fit_at(k: int) -> TemperedFit:
        alpha = float(alphas[k])
        tempered = temper(task.original, alpha=alpha)
        built = factory(tempered)
        elbo_key, later_key, setup_key = jax.random.split(jax.random.fold_in(fit_key, k), 3)
        handlers.seed(built, setup_key)(*args, **kwargs)
        own = jax.tree.map(lambda leaf: jnp.asarray(leaf[k]), params)
        losses = jnp.asarray(traces[k, 0, :num_steps])
        return finish(
            (elbo_key, later_key), tempered, built, own, losses, args, kwargs, num_particles=num_samples
        )

    # From (alpha, stage, ...) to (stage, alpha, ...), and each plan its own stages.
    ends = np.cumsum([1, *(len(plan.weights) for plan in plans)])
    own = [
        jax.tree.map(lambda leaf, a=a, b=b: np.swapaxes(leaf, 0, 1)[a:b], part)
        for part, a, b in zip(reduced, ends[:-1], ends[1:], strict=True)
    ]
    return Fits(own, log_lik[:, None, :], None if kept is None else kept[:, None], fit_at)


def _mean(task: Task, guide: Guide, params: dict[str, Array]) -> dict[str, Array] | None:
    """The mean of a Gaussian guide on the unconstrained scale, which is where its median comes from."""
    if task.discrete or not isinstance(guide, AutoGuide):
        return None
    try:
        return task.unconstrain(guide.median(params))
    except NotImplementedError:
        return None


def _check(alphas: np.ndarray, steps: np.ndarray, traces: np.ndarray, optim: Any) -> None:
    """Raise for a loss that is not finite at the end, and warn for one that still falls."""
    last = np.take_along_axis(traces, steps[None, :, None] - 1, axis=2)[..., 0]
    broken = ~np.all(np.isfinite(last), axis=1)
    if np.any(broken):
        raise ValueError(
            f"the fits at alpha = {alphas[broken]} ended in values that are not finite: check the data for NaN, "
            "or take a smaller step size."
        )
    falling = sorted(
        {
            float(alphas[a])
            for a in range(len(alphas))
            for s in range(len(steps))
            # A step size that falls to nothing stops any descent: look before it does.
            if late_fall(traces[a, s, : int((CONSTANT if optim is None else 1.0) * steps[s])].astype(np.float64))
        }
    )
    if falling:
        warnings.warn(
            f"the loss of a fit still fell at alpha = {np.round(falling, 6)}: take more num_steps and "
            "num_refit_steps, or another optimiser.",
            stacklevel=4,
        )
