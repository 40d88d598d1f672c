"""A guide fitted until its ELBO has settled, and the evidence that it has."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import numpyro
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.optim import Adam

from numpyro_tempered.core import (
    Array,
    Guide,
    Params,
    ProgressBar,
    PyTree,
    add_repr,
    progress,
    run_program,
    warn_caller,
)
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.antithetic import Antithetic
from numpyro_tempered.infer.averaged_adam import (
    Settled,
    descend,
    is_worth_its_steps,
    select,
)
from numpyro_tempered.infer.coordinates import Coordinates, at_the_mode
from numpyro_tempered.infer.descent_programs import Descent, compile_descent
from numpyro_tempered.infer.set_up import first_call

# The first step size: in posterior standard deviations where the mode is known.
STEP_SIZE = 0.05
# Parameters to one pair of draws, and the most pairs.
PARAMS_A_PAIR, MAX_PAIRS = 500, 8
# Optima whose ELBOs differ by more than this many tolerances are two.
APART = 4.0


class ConvergenceWarning(UserWarning):
    """A fit has not reached the optimum of its family, or nothing shows that it has.

    Example:
        >>> import numpyro_tempered as nt
        >>> issubclass(nt.warnings.ConvergenceWarning, UserWarning)  # for warnings.filterwarnings
        True
    """


@add_repr
class Convergence(NamedTuple):
    """How near :func:`fit_svi` came to the optimum of its family.

    Attributes:
        converged: Whether ``gap`` is at most the tolerance. None of a fit by an optimiser of one's own, or of
            ``AutoSpikeAndSlab``, whose loss fell no more: that proves nothing.
        gap: Estimate of the nats by which the ELBO misses the optimum: ``noise`` plus ``bias``; infinite where it
            has none.
        noise: The part of the noise of the averaged iterates.
        bias: The part of the step size: a third of what halving it changed.
        fall: By how many nats the loss still fell at the end.
        step_size: The last step size; in posterior standard deviations where ``starts_at_mode``. NaN of an
            optimiser of one's own.
        num_steps: Steps taken.
        rejected: How many of them had a gradient that was not finite, and moved nothing.
        starts_at_mode: Whether the run started at the mode, in coordinates scaled by the curvature there.
        optima: The ELBOs of the distinct optima that the restarts found, the best first: by common draws, so that
            they compare among each other to more digits than the fit's ``elbo``.
    """

    converged: bool | None
    gap: float
    noise: float
    bias: float
    fall: float
    step_size: float
    num_steps: int
    rejected: int = 0
    starts_at_mode: bool = False
    optima: tuple[float, ...] = ()


class Start(NamedTuple):
    """A guide with where and in which coordinates its fit starts.

    Attributes:
        guide: The guide.
        coordinates: Its coordinates.
        at_mode: Whether they are those of the mode.
    """

    guide: Guide
    coordinates: Coordinates
    at_mode: bool


def start_of(
    rng_key: Array,
    model: temper,
    guide: Guide,
    args: tuple,
    kwargs: dict,
    *,
    loss: ELBO | None = None,
    at_mode: bool = True,
) -> Start | None:
    """Where a fit of a guide starts; None where model or guide keep a state, such as that of a network."""
    coordinates = at_the_mode(rng_key, model, guide, args, kwargs) if at_mode else None
    if coordinates is not None:
        return Start(guide, coordinates, at_mode=True)
    svi = SVI(
        model,
        model.guide(guide),
        Adam(STEP_SIZE),
        Antithetic() if loss is None else loss,
    )
    with numpyro.validation_enabled(False):
        state = first_call(lambda: svi.init(rng_key, *args, **kwargs), guide)
    if state.mutable_state is not None:
        return None
    return Start(
        guide,
        Coordinates(svi.optim.get_params(state.optim_state), svi.constrain_fn),
        at_mode=False,
    )


def settle(
    rng_key: Array,
    model: temper,
    build: Callable[[], Guide],
    args: tuple,
    kwargs: dict,
    *,
    loss: ELBO | None,
    num_steps: int,
    num_restarts: int,
    tolerance: float,
    progress_bar: ProgressBar,
) -> tuple[Guide, Params, np.ndarray, Convergence] | None:
    """Fit guides from several starts; the best with its parameters, losses and evidence.

    Args:
        rng_key: Key of the fits.
        model: The tempered model.
        build: A new guide on it.
        args: Positional arguments of the model.
        kwargs: Its keyword arguments.
        loss: ELBO to optimise; by default by antithetic draws, the more the more parameters.
        num_steps: The most steps of each fit.
        num_restarts: Number of fits.
        tolerance: On the gap to the optimum.
        progress_bar: Whether to show one; None where a fit takes some seconds.

    Returns:
        None where model or guide keep a state.

    Raises:
        ValueError: If no step of the best fit had a finite gradient.
    """
    # One key for the values of all: they compare.
    *keys, value_key = jax.random.split(rng_key, num_restarts + 1)
    runs: list[tuple[Start, Settled]] = []
    for key in keys:
        start_key, run_key = jax.random.split(key)
        start = start_of(start_key, model, build(), args, kwargs, loss=loss)
        if start is None:
            return None
        descent, starts = _descent(
            run_key, model, start, args, kwargs, loss=loss, num_steps=num_steps
        )
        if start.at_mode and not is_worth_its_steps(descent, starts, (), value_key)[0]:
            # Where a density falls to a plateau, Newton's method ends on it, and curvature says nothing there.
            start = start_of(
                start_key, model, start.guide, args, kwargs, loss=loss, at_mode=False
            )
            if start is None:
                return None
            descent, starts = _descent(
                run_key, model, start, args, kwargs, loss=loss, num_steps=num_steps
            )
        with progress(num_steps, "steps", progress_bar) as bar:
            run = descend(
                descent,
                starts,
                (),
                run_key,
                value_key=value_key,
                step_size=STEP_SIZE,
                num_steps=num_steps,
                tolerance=tolerance,
                report=bar.update,
            )
        runs.append((start, select(run, 0)))
    return _best_of(runs, tolerance)


def _descent(
    rng_key: Array,
    model: temper,
    start: Start,
    args: tuple,
    kwargs: dict,
    *,
    loss: ELBO | None,
    num_steps: int,
) -> tuple[Descent, PyTree]:
    """The programs of one fit, and its start with a leading axis of 1."""
    guide, (coordinates, to_params) = model.guide(start.guide), start.coordinates
    elbo = default_loss(coordinates) if loss is None else loss

    def objective(z: PyTree, key: Array, inputs: PyTree) -> Array:
        return elbo.loss(key, to_params(z), model, guide, *args, **kwargs)

    starts = jax.tree.map(lambda leaf: np.asarray(leaf)[None], coordinates)
    return compile_descent(objective, starts, (), rng_key, num_steps), starts


def default_loss(coordinates: PyTree) -> Antithetic:
    """The ELBO by antithetic draws, the more the more parameters."""
    num_params = sum(leaf.size for leaf in jax.tree.leaves(coordinates))
    return Antithetic(min(MAX_PAIRS, max(1, num_params // PARAMS_A_PAIR)))


def _best_of(
    runs: list[tuple[Start, Settled]], tolerance: float
) -> tuple[Guide, Params, np.ndarray, Convergence]:
    start, run = min(runs, key=lambda pair: np.nan_to_num(pair[1].value, nan=np.inf))
    rejected = int(np.sum(np.isnan(run.losses)))
    if rejected == len(run.losses):
        raise ValueError(
            "the loss or its gradient is not finite at any step: check the data for NaN and the scales of the "
            "priors, or give the guide an init_loc_fn."
        )
    optima = distinct([-float(each.value) for _, each in runs], APART * tolerance)
    evidence = evidence_of(run, at_mode=start.at_mode, optima=optima)
    return (
        start.guide,
        run_program(start.coordinates.to_params, run.z),
        run.losses,
        evidence,
    )


def evidence_of(
    run: Settled, *, at_mode: bool, optima: tuple[float, ...] = ()
) -> Convergence:
    """What a run tells of its end."""
    return Convergence(
        bool(run.converged),
        float(run.noise + run.bias),
        float(run.noise),
        float(run.bias),
        float(run.fall),
        float(run.step_size),
        len(run.losses),
        int(np.sum(np.isnan(run.losses))),
        at_mode,
        optima,
    )


def distinct(elbos: list[float], gap: float) -> tuple[float, ...]:
    """The ELBOs of the optima that differ by more than ``gap``, the best first."""
    optima: list[float] = []
    for value in sorted(filter(np.isfinite, elbos), reverse=True):
        if not optima or optima[-1] - value > gap:
            optima.append(value)
    return tuple(optima)


def warn_unless_settled(evidence: Convergence, tolerance: float) -> None:
    """Warn of a fit that has not converged, with the reason."""
    if evidence.converged or evidence.converged is None:
        return
    if np.isnan(evidence.step_size):
        reason = f"the loss still fell by {evidence.fall:.2g} nats over the last tenth at full step size"
    elif not np.isfinite(evidence.fall):
        reason = "which are too few to judge it"
    elif np.isfinite(evidence.bias):
        reason = (
            f"and by estimate misses its optimum by {evidence.gap:.2g} nats, "
            f"above the tolerance {tolerance:.2g}"
        )
    else:
        reason = f"and its last stage still fell by {evidence.fall:.2g} nats"
    rejected = (
        f" The gradient was not finite in {evidence.rejected} of them."
        if evidence.rejected
        else ""
    )
    warn_caller(
        f"the fit has not converged: it took {evidence.num_steps} steps, {reason}.{rejected} Take a larger "
        "num_steps, another parameterisation of the model, or for a Gaussian guide fit_gaussian, before "
        "comparing its ELBO.",
        ConvergenceWarning,
    )
