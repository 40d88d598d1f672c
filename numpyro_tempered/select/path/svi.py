"""A tempered path by SVI."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import log_density

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Guide
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.elbo import has_point_mass
from numpyro_tempered.infer.svi import CONSTANT, default_optim, late_fall
from numpyro_tempered.select.path.evidence import integrate, mean_se
from numpyro_tempered.select.path.problem import Path, Problem, check_finite, name_of


def fit_path(
    rng_key: Array,
    problem: Problem,
    guide: Guide,
    grid: np.ndarray,
    num_samples: int,
    num_steps: int,
    *,
    optim: Any,
    loss: ELBO | None,
) -> Path:
    """Fit the guide at every alpha in one ``vmap``, and draw from each fit."""
    args, kwargs = problem.args, problem.kwargs
    set_up_key, point_key, key = jax.random.split(rng_key, 3)
    set_up(set_up_key, problem, guide)
    if has_point_mass(point_key, guide, {}, args, kwargs):
        raise ValueError(
            f"the guide {name_of(guide)} is a point, so its ELBO is minus infinity: take AutoNormal, say."
        )

    def fit(key: Array, alpha: Array) -> Any:
        init_key, draw_key = jax.random.split(key)
        svi = SVI(
            temper(problem.model, alpha),
            guide,
            default_optim(num_steps) if optim is None else optim,
            Trace_ELBO() if loss is None else loss,
        )
        state = svi.init(init_key, *args, **kwargs)
        state, losses = jax.lax.scan(lambda state, _: svi.update(state, *args, **kwargs), state, length=num_steps)
        params = svi.get_params(state)

        def draw(key: Array) -> tuple[dict[str, Array], Array, Array]:
            at = handlers.substitute(handlers.seed(guide, key), data=params)
            log_q, guide_trace = log_density(at, args, kwargs, {})
            values = {name: guide_trace[name]["value"] for name in problem.latents}
            prior = temper(handlers.seed(problem.model, problem.rng_key), 0.0)
            return values, problem.log_lik(values), log_density(prior, args, kwargs, values)[0] - log_q

        return losses, *map_batches(draw, jax.random.split(draw_key, num_samples), 64)

    keys = jax.random.split(key, len(grid))
    losses, values, log_lik, log_ratio = jax.device_get(jax.jit(jax.vmap(fit))(keys, jnp.asarray(grid)))
    broken = ~np.isfinite(losses[:, -1]) | ~np.all(np.isfinite(log_ratio), axis=1)
    if np.any(broken):
        raise ValueError(
            f"the fits at alpha = {grid[broken]} ended in values that are not finite: check the data for NaN, or "
            "take a smaller step size."
        )
    # A step size that falls to nothing stops any descent: look before it does.
    watched = int(CONSTANT * num_steps) if optim is None else num_steps
    falling = [
        alpha for alpha, row in zip(grid, losses, strict=True) if late_fall(row[:watched].astype(np.float64))
    ]
    if falling:
        warnings.warn(
            f"the loss still fell at alpha = {np.round(falling, 6)}: take more num_steps or another optimiser.",
            stacklevel=3,
        )
    # From (alpha, draw, ...) to (chain, draw, alpha, ...).
    values = {name: np.swapaxes(value, 0, 1)[None] for name, value in values.items()}
    log_lik, log_ratio = (np.asarray(part, np.float64).T[None] for part in (log_lik, log_ratio))
    check_finite(grid, log_lik, at_zero=False)

    def se(draws: np.ndarray, k: int) -> float:
        # The integral starts at the ELBO of alpha = 0.
        at_start = log_ratio[..., 0] if k == 0 else 0.0
        return mean_se(draws + at_start, True)[1]

    integral = integrate(grid, log_lik, False, se)
    elbos = grid * log_lik + log_ratio
    start = np.mean(log_ratio[..., 0])

    def standard_error(draws: np.ndarray) -> np.ndarray:
        return np.std(draws, axis=(0, 1), ddof=1) / math.sqrt(num_samples)

    columns = {
        "elbo": np.mean(elbos, axis=(0, 1)),
        "elbo_se": standard_error(elbos),
        "elbo_integral": start + integral.value,
        "elbo_integral_se": integral.se,
        "elbo_left": start + integral.left,
        "elbo_right": start + integral.right,
        "expected_log_lik": np.mean(log_lik, axis=(0, 1)),
        "expected_log_lik_se": standard_error(log_lik),
        "var_log_lik": np.var(log_lik, axis=(0, 1), ddof=1),
        "kl": -np.mean(log_ratio, axis=(0, 1)),
    }
    return Path(columns, values, {"log_lik": log_lik}, {"loss": losses})


def set_up(rng_key: Array, problem: Problem, guide: Guide) -> None:
    """Set a guide up outside of jit, where its Python state may be kept, and refuse one that runs its model."""
    before = problem.runs
    handlers.seed(guide, rng_key)(*problem.args, **problem.kwargs)
    if isinstance(guide, AutoGuide) and problem.runs == before:
        raise ValueError("method builds its guide on another model than the tempered one it is given.")
    before = problem.runs
    trace = handlers.trace(handlers.seed(guide, rng_key)).get_trace(*problem.args, **problem.kwargs)
    if problem.runs > before:
        raise ValueError(
            f"{name_of(guide)} runs the model it was built on, which has one alpha: fit it alpha by alpha, by "
            "fit_svi, or take a guide that does not, such as AutoNormal."
        )
    missing = sorted(set(problem.latents) - set(trace))
    if missing:
        raise ValueError(f"the guide has no sites {missing}, which are latent in the model.")
