"""A guide fitted until its ELBO has settled, to one model or to several side by side, and the evidence."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.optim import Adam

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    ProgressBar,
    PyTree,
    add_repr,
    compile_once,
    progress,
    progress_within,
    run_program,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.antithetic import Antithetic, with_order
from numpyro_tempered.infer.averaged_adam import (
    Settled,
    descend,
    is_worth_its_steps,
    select,
)
from numpyro_tempered.infer.coordinates import Coordinates, at_the_mode, frame_of
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


# From the inputs of one problem to its model: the same sites and shapes for all.
ModelOf: TypeAlias = Callable[..., Model]
# From axes and points in them to parameters of the guide, ``(K, ...)`` each.
ParamsOf: TypeAlias = Callable[[PyTree, PyTree], Params]


class Batch(NamedTuple):
    """How models that are fitted side by side belong together.

    Attributes:
        noun: In what they differ, for errors.
        is_numbered: Whether the first of the inputs is the number of a fit, by which its draws are independent of
            those of the others; else all fits share their draws, and so their noise, which cancels along a grid.
        quorum: The share of the fits that must converge before all end.
    """

    noun: str
    is_numbered: bool
    quorum: float


GRID = Batch("alpha", is_numbered=False, quorum=1.0)
# Of hundreds of fits a few look unsettled at every stage by chance, and a common noise would look like a bias.
DATA_SETS = Batch("data set", is_numbered=True, quorum=0.9)


class Fitted(NamedTuple):
    """K fits.

    Attributes:
        params: Of the guide, ``(K, ...)`` each.
        losses: At every step, ``(K, steps)``.
        evidence: How near each came to its optimum.
        ends: The coordinates and the point in them at which each ended, for fits that start there.
    """

    params: Params
    losses: np.ndarray
    evidence: list[Convergence] | list[Result]
    ends: PyTree


class BatchFitter(NamedTuple):
    """What is compiled to fit a guide to K models at a time.

    Attributes:
        starts: Where they start, in their coordinates ``(K, ...)``.
        without_mode: Gives axes and starts of problems of which none has a mode, ``(K, ...)`` each.
        axes_of: From the inputs to the axes of the coordinates and whether they are those of a mode, ``(K, ...)``
            each; None where coordinates are the guide's own.
        params_of: From axes and points in them to parameters.
        descent: The programs of the steps.
        num_steps: The most steps.
        tolerance: On the gaps to the optima.
        quorum: The share of the fits that must converge before all end.
    """

    starts: PyTree
    without_mode: Callable[[], tuple[PyTree, PyTree]]
    axes_of: Callable[[tuple], tuple[PyTree, Array]] | None
    params_of: ParamsOf
    descent: Descent
    num_steps: int
    tolerance: float
    quorum: float = 1.0

    def fit(self, rng_key: Array, inputs: tuple, ends: PyTree | None = None) -> Fitted:
        """Fit all, from their modes; those that have none, or whose guide has no frame, from earlier ``ends``.

        Args:
            rng_key: Of the draws.
            inputs: Arrays ``(K, ...)``.
            ends: Of earlier fits to like models.
        """
        run_key, value_key = jax.random.split(rng_key)
        is_mode = np.zeros(len(inputs[0]), bool)
        axes = starts = None
        if self.axes_of is not None:
            new, flags = self.axes_of(inputs)
            keyed = self.descent, self.starts, (inputs, new), value_key
            is_mode = np.asarray(flags) & is_worth_its_steps(*keyed)
            # Any axes are coordinates: those of an earlier fit, or of the nearest that has a mode.
            if ends is None and np.any(is_mode):
                nearest = _nearest(is_mode)
                axes = jax.device_put(
                    jax.tree.map(lambda leaf: np.asarray(leaf)[nearest], new)
                )
                starts = self.starts
            else:
                axes, starts = _where(
                    is_mode,
                    (new, self.starts),
                    self.without_mode() if ends is None else ends,
                )
        else:
            axes, starts = self.without_mode() if ends is None else ends
        with progress_within(self.num_steps, "steps") as bar:
            run = descend(
                self.descent,
                starts,
                (inputs, axes),
                run_key,
                value_key=value_key,
                step_size=STEP_SIZE,
                num_steps=self.num_steps,
                tolerance=self.tolerance,
                quorum=self.quorum,
                report=bar.update,
            )
        evidence = [
            evidence_of(select(run, k), at_mode=bool(mode))
            for k, mode in enumerate(is_mode)
        ]
        return Fitted(self.params_of(axes, run.z), run.losses, evidence, (axes, run.z))


def batch_fitter(
    rng_key: Array,
    model_of: ModelOf,
    guide: Guide,
    args: tuple,
    kwargs: dict,
    inputs: tuple,
    *,
    loss: ELBO | None,
    num_steps: int,
    tolerance: float,
    batch: Batch = GRID,
) -> BatchFitter:
    """What fits a guide to K models at a time.

    Args:
        rng_key: Of the guide's start.
        model_of: The models.
        guide: A guide that has been set up; it must not run its model.
        args: Positional arguments of the models.
        kwargs: Their keyword arguments.
        inputs: In what they differ, arrays ``(K, ...)``: those of the first fits.
        loss: ELBO to optimise; by default by antithetic draws.
        num_steps: The most steps.
        tolerance: In nats, on the estimated distance of each ELBO from its optimum.
        batch: How the models belong together.

    Raises:
        ValueError: If model or guide keep a state.
    """
    # On the host, here and below, as each operation would be a program.
    last = model_of(*jax.device_put([np.asarray(part)[-1] for part in inputs]))
    frame = frame_of(rng_key, last, guide, args, kwargs)
    axes_of = None
    if frame is not None:

        def of_one(inputs: tuple) -> tuple[PyTree, Array]:
            mode = frame.find_mode(model_of(*inputs), args, kwargs)
            return frame.axes(mode), mode.is_mode

        axes_of = compile_once(jax.vmap(of_one), inputs)
        axes, flags = axes_of(inputs)
        start, to_params = frame.start, frame.to_params
        axes_of = axes_of if np.any(np.asarray(flags)) else None
    if axes_of is None:
        svi = SVI(
            last, guide, Adam(STEP_SIZE), default_loss({}) if loss is None else loss
        )
        state = svi.init(rng_key, *args, **kwargs)
        if state.mutable_state is not None:
            raise ValueError(
                f"the model or its guide keeps a state, as of a network, that would differ by {batch.noun}: fit "
                f"{batch.noun} by {batch.noun} by fit_svi."
            )
        axes, start = (), svi.optim.get_params(state.optim_state)

        def to_params(axes: PyTree, z: PyTree) -> Params:
            return svi.constrain_fn(z)

    elbo = default_loss(start) if loss is None else with_order(loss)

    def objective(z: PyTree, key: Array, inputs: PyTree) -> Array:
        differing, axes = inputs
        key = jax.random.fold_in(key, differing[0]) if batch.is_numbered else key
        return elbo.loss(
            key, to_params(axes, z), model_of(*differing), guide, *args, **kwargs
        )

    def for_each(tree: PyTree) -> PyTree:
        """The same for each problem."""
        tree = jax.tree.map(
            lambda leaf: np.broadcast_to(leaf, (len(inputs[0]), *leaf.shape)), tree
        )
        return jax.device_put(tree)

    def without_mode() -> tuple[PyTree, PyTree]:
        return for_each(
            ((), start) if axes_of is None or frame is None else frame.without_mode()
        )

    starts = for_each(start)
    descent = compile_descent(objective, starts, (inputs, axes), rng_key, num_steps)

    def params_of(axes: PyTree, z: PyTree) -> Params:
        return run_program(jax.vmap(to_params), axes, z)

    return BatchFitter(
        starts,
        without_mode,
        axes_of,
        params_of,
        descent,
        num_steps,
        tolerance,
        batch.quorum,
    )


def _nearest(is_mode: np.ndarray) -> np.ndarray:
    """Of each problem the nearest that has a mode."""
    modes = np.flatnonzero(is_mode)
    distance = np.abs(np.arange(len(is_mode))[:, None] - modes[None, :])
    return modes[np.argmin(distance, axis=1)]


def _where(flags: np.ndarray, one: PyTree, other: PyTree) -> PyTree:
    """Of each problem the leaves of one tree or of the other."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(jnp.reshape(flags, (-1, *(1,) * (jnp.ndim(a) - 1))), a, b)

    return jax.tree.map(pick, one, other)
