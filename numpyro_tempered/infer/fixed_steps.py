"""Adam of a fixed number of steps, for what has no stopping rule, and what losses tell of a run's end."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries.optimizers import adam
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.optim import Adam

from numpyro_tempered.core import Array, Params, run_program, spans_processes
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.infer.settle import Convergence

# Share of the steps that the default optimiser takes at its full step size.
CONSTANT = 0.6


def default_optim(num_steps: int | Array) -> Adam:
    """Adam with a constant step size that finds the optimum, and a falling one that settles in it."""

    def step_size(step: Array) -> Array:
        falling = jnp.maximum(step / num_steps - CONSTANT, 0.0) / (1.0 - CONSTANT)
        return 0.05 * 0.01**falling

    return Adam(step_size)


def adam_in_units(step_size: Callable[[Array], Array], units: Params) -> NumPyroOptim:
    """Adam with steps in units of the parameters, by name; of others the unit is 1."""
    init, update, get = adam(step_size)

    def scaled(tree: Params) -> Params:
        return {name: value * units.get(name, 1.0) for name, value in tree.items()}

    return NumPyroOptim(
        lambda: (
            lambda params: init(
                {name: value / units.get(name, 1.0) for name, value in params.items()}
            ),
            lambda step, grads, state: update(step, scaled(grads), state),
            lambda state: scaled(get(state)),
        )
    )


def run_steps(
    svi: SVI,
    rng_key: Array,
    num_steps: int,
    args: tuple,
    kwargs: dict,
    progress_bar: bool,
) -> tuple[Params, np.ndarray]:
    """Parameters after the steps of an SVI, and its losses."""
    if not spans_processes(args, kwargs):
        result = svi.run(rng_key, num_steps, *args, progress_bar=progress_bar, **kwargs)
        return result.params, np.asarray(result.losses)
    # NumPyro's own loop holds the data as constants.
    state = svi.init(rng_key, *args, **kwargs)

    def steps(state: SVIState) -> tuple[SVIState, Array]:
        return jax.lax.scan(
            lambda state, _: svi.update(state, *args, **kwargs), state, length=num_steps
        )

    state, losses = run_program(steps, state)
    return svi.get_params(state), np.asarray(losses)


def full_size_steps(losses: np.ndarray, optim: object) -> np.ndarray:
    """The losses at the full step size; ``optim`` is None for the default optimiser.

    The default step size falls to nothing, which stops any descent: convergence is judged before.
    """
    return losses[: int(CONSTANT * len(losses)) if optim is None else None].astype(
        np.float64
    )


def late_fall(losses: np.ndarray) -> float:
    """By how many nats the last tenth of the losses lies below the tenth before it; 0 where it may be noise."""
    tenth = len(losses) // 10
    if tenth < 2:
        return 0.0
    before, after = losses[-2 * tenth : -tenth], losses[-tenth:]
    fall = before.mean() - after.mean()
    noise = np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / tenth)
    return float(fall) if fall > 5.0 * noise and fall > 0.5 else 0.0


def judge_losses(losses: np.ndarray, optim: object) -> Convergence:
    """What the losses of a run tell; ``optim`` is None for the default optimiser."""
    fall = late_fall(full_size_steps(losses, optim))
    nan, rejected = math.nan, int(np.sum(~np.isfinite(losses)))
    return Convergence(
        False if fall > 0.0 else None, nan, nan, nan, fall, nan, len(losses), rejected
    )
