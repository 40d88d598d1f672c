"""Fits of one guide to a model at many powers of the likelihood, inside one compiled program."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO
from numpyro.infer.util import log_density

from numpyro_tempered.core.typing import Array, Guide, Model
from numpyro_tempered.infer.elbo import has_point_mass
from numpyro_tempered.infer.svi import default_optim, full_size_steps, late_fall
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.grid.model_data import ModelData


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

    def init(self, rng_key: Array, model: Model) -> dict[str, Array]:
        """Starting parameters."""
        svi = self.svi(model, 1)
        return svi.get_params(svi.init(rng_key, *self.data.args, **self.data.kwargs))

    def fit(
        self,
        rng_key: Array,
        model: Model,
        num_steps: int | Array,
        *,
        init_params: dict[str, Array] | None = None,
        length: int,
    ) -> tuple[dict[str, Array], Array]:
        """Fitted parameters and the losses ``(length,)``, NaN after ``num_steps``."""
        args, kwargs = self.data.args, self.data.kwargs
        svi = self.svi(model, num_steps)
        state = svi.init(rng_key, *args, init_params=init_params, **kwargs)

        def step(i: Array, carry: tuple) -> tuple:
            state, losses = carry
            state, loss = svi.update(state, *args, **kwargs)
            return state, losses.at[i].set(loss)

        state, losses = jax.lax.fori_loop(0, num_steps, step, (state, jnp.full(length, jnp.nan)))
        return svi.get_params(state), losses

    def draw(self, rng_key: Array, params: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        """One draw of the latents, and its log-density under the guide."""
        at = handlers.substitute(handlers.seed(self.guide, rng_key), data=params)
        log_q, trace = log_density(at, self.data.args, self.data.kwargs, {})
        return {name: trace[name]["value"] for name in self.data.latents}, log_q


def set_up(rng_keys: tuple[Array, Array], data: ModelData, guide: Guide) -> None:
    """Set a guide up outside of jit, where it may keep its Python state.

    Raises:
        ValueError: If the guide is built on another model, runs its model, lacks a latent site, or is a point.
    """
    set_up_key, point_key = rng_keys
    before = data.runs
    handlers.seed(guide, set_up_key)(*data.args, **data.kwargs)
    if isinstance(guide, AutoGuide) and data.runs == before:
        raise ValueError("method builds its guide on another model than the tempered one that it gets.")
    before = data.runs
    trace = handlers.trace(handlers.seed(guide, set_up_key)).get_trace(*data.args, **data.kwargs)
    if data.runs > before:
        raise ValueError(
            f"{name_of(guide)} runs the model it was built on, which has one alpha: fit it alpha by alpha, by "
            "fit_svi, or take a guide that does not, such as AutoNormal."
        )
    missing = sorted(set(data.latents) - set(trace))
    if missing:
        raise ValueError(f"the guide has no sites {missing}, which are latent in the model.")
    if has_point_mass(point_key, guide, {}, data.args, data.kwargs):
        raise ValueError(
            f"the guide {name_of(guide)} is a point, so its ELBO is minus infinity: take AutoNormal, say."
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
            f"the fits at alpha = {alphas[~finite]} ended in values that are not finite: check the data for NaN, "
            "or take a smaller step size."
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
