"""A guide fitted to several models of one form side by side, each until its ELBO has settled."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.optim import Adam

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    PyTree,
    compile_once,
    progress_within,
    run_program,
)
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.infer.antithetic import with_order
from numpyro_tempered.infer.averaged_adam import descend, is_worth_its_steps, select
from numpyro_tempered.infer.coordinates import frame_of
from numpyro_tempered.infer.descent_programs import Descent, compile_descent
from numpyro_tempered.infer.settle import (
    STEP_SIZE,
    Convergence,
    default_loss,
    evidence_of,
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


class Settler(NamedTuple):
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


def settler(
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
) -> Settler:
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

    return Settler(
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
