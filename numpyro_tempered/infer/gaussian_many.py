"""A Gaussian guide fitted to several models of one form side by side, each to a stated stationarity."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, Guide, PyTree, run_program
from numpyro_tempered.gaussian.descent import Objective, Result, minimise
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.flat_gaussian import read_guide
from numpyro_tempered.infer.free_energy import model_objective
from numpyro_tempered.infer.settle import GRID, Batch, Fitted, ModelOf, ParamsOf

NUM_DRAWS = 64
# What a run aims at, of the tolerance: near the optimum each evaluation gains a factor.
AIM = 0.01


class GaussianBatchFitter(NamedTuple):
    """A free energy of K models at a time.

    Attributes:
        start: A Gaussian to start from.
        objective: The free energy; the first arrays of its data are the inputs.
        params_of: From Gaussians to parameters of the guide, ``(K, ...)`` each.
        tolerance: On the stationarity.
        max_evaluations: Of the derivatives.
        batch: How the models belong together.
    """

    start: Gaussian
    objective: Objective
    params_of: ParamsOf
    tolerance: float
    max_evaluations: int
    batch: Batch

    def fit(self, rng_key: Array, inputs: tuple, ends: PyTree | None = None) -> Fitted:
        """Fit all, from ``ends`` of earlier fits where there are some."""
        arrays, *rest = self.objective.data
        num = len(jax.tree.leaves(inputs))
        starts = ends
        if starts is None:
            size = len(inputs[0])
            starts = jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), self.start
            )

        def fit_one(inputs: tuple, start: Gaussian, key: Array) -> Result:
            data = (tuple(jax.tree.leaves(inputs)) + tuple(arrays[num:]), *rest)
            return minimise(
                self.objective._replace(data=data),
                start,
                tolerance=AIM * self.tolerance,
                max_evaluations=self.max_evaluations,
                rng_key=key,
            )

        keys, axis = rng_key, None
        if self.batch.is_numbered:
            keys, axis = (
                jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng_key, inputs[0]),
                0,
            )
        results = run_program(
            jax.vmap(fit_one, in_axes=(0, 0, axis)), inputs, starts, keys
        )
        results = jax.tree.map(np.asarray, results)
        results = results._replace(converged=results.stationarity <= self.tolerance)
        evidence = [
            _cut(jax.tree.map(lambda leaf, k=k: leaf[k], results))
            for k in range(len(inputs[0]))
        ]
        losses = np.where(results.trace.accepted, -results.trace.elbo, np.nan).astype(
            np.float64
        )
        params = self.params_of((), results.posterior)
        return Fitted(params, losses, evidence, results.posterior)


def gaussian_batch_fitter(
    rng_key: Array,
    model_of: ModelOf,
    guide: Guide,
    args: tuple,
    kwargs: dict,
    inputs: tuple,
    *,
    expectation: Expectation | None,
    tolerance: float,
    max_evaluations: int = 200,
    batch: Batch = GRID,
) -> GaussianBatchFitter:
    """What fits a Gaussian guide to K models at a time, by an expectation of their likelihood.

    Args:
        rng_key: Of the guide's start.
        model_of: The models.
        guide: A guide that has been set up.
        args: Positional arguments of the models.
        kwargs: Their keyword arguments.
        inputs: In what they differ, arrays ``(K, ...)``.
        expectation: Of the likelihood, as for :func:`fit_gaussian`; by draws if None.
        tolerance: On the stationarity, in nats.
        max_evaluations: Of the derivatives.
        batch: How the models belong together.

    Raises:
        TypeError: If the guide is no Gaussian.
        ValueError: If the model is none that :func:`fit_gaussian` takes.
    """
    q, latents, to_params = read_guide(rng_key, guide, args, kwargs)

    def model(inputs: tuple, *args: object, **kwargs: object) -> object:
        return model_of(*inputs)(*args, **kwargs)

    data = (jax.tree.map(lambda part: part[-1], inputs), *args)
    tempered = temper(model, 1.0)
    energy = model_objective(
        tempered, latents, q, data, kwargs, expectation=expectation, num_draws=NUM_DRAWS
    )

    def params_of(axes: PyTree, posteriors: Gaussian) -> dict:
        return run_program(jax.vmap(to_params), posteriors)

    return GaussianBatchFitter(
        q, energy.objective, params_of, tolerance, max_evaluations, batch
    )


def _cut(result: Result) -> Result:
    """A result with the evaluations that were made."""
    used = int(result.num_evaluations)
    return result._replace(
        trace=jax.tree.map(lambda column: column[:used], result.trace)
    )
