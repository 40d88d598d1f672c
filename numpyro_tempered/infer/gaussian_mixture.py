"""A mixture of Gaussians fitted to a tempered NumPyro model: from its modes, by Bures-Wasserstein steps."""

import math
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import potential_energy

from numpyro_tempered.core import (
    Array,
    Guide,
    Params,
    PyTree,
    check_count,
    doubles,
    join,
    separate,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.gaussian.descent.minimise_mixture import minimise_mixture
from numpyro_tempered.gaussian.descent.mixture_energy import normal_nodes, reweigh
from numpyro_tempered.gaussian.families.base import dense
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.handlers.requirements import full_plates
from numpyro_tempered.handlers.target import check_supports, trace_unconstrained
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.coordinates import MAX_LATENTS
from numpyro_tempered.infer.flat_gaussian import latents_of, read_start
from numpyro_tempered.infer.guide_laws import Reading, law_of
from numpyro_tempered.infer.guides.gaussian_mixture import AutoGaussianMixture
from numpyro_tempered.infer.modes import (
    Modes,
    find_modes,
    mixture_at,
    prior_draw,
    starting_points,
)
from numpyro_tempered.infer.priors import Latents, check_trace

# Points from which modes are looked for: this many, and as many again for each component.
_NUM_POINTS, _POINTS_EACH = 16, 4


# A mode of at least this mass should have a component.
_HEAVY = 0.01


# Points for a component where there is no number of them, and for each latent of a full covariance; the fewest.
NUM_NODES, _NODES_EACH, _LEAST_EACH = 256, 8, 4


# Points for a component that the weights are taken from in the end.
_NUM_WEIGHING = 2048


def fit_mixture(
    rng_key: Array,
    model: temper,
    guide: tuple[Array, Guide],
    data: tuple[tuple, dict],
    num_components: int,
    *,
    tolerance: float,
    max_evaluations: int,
    num_draws: int | None,
) -> tuple[Result, AutoGaussianMixture, Params]:
    """Fit a mixture of Gaussians of the form of a guide.

    Args:
        rng_key: Of the points.
        model: The tempered model.
        guide: The key of its start, and the guide that decides the form of the components.
        data: Arguments of the model.
        num_components: K.
        tolerance: On the stationarity, in nats.
        max_evaluations: Of the free energy.
        num_draws: Points for each component, or None.

    Returns:
        The run, the guide of the mixture, and its parameters.

    Raises:
        TypeError: If the guide is no Gaussian.
        ValueError: If the model is none that one flat density holds, or ``num_draws`` are too few.
    """
    (args, kwargs), (guide_key, form) = data, guide
    mixture = _guide_like(form, num_components)
    start = cast(Reading, read_start(guide_key, mixture, args, kwargs))
    latents = latents_of(start)
    # All components start alike.
    single = jax.tree.map(lambda leaf: leaf[:1], start.q)
    (d,), diagonal = single.loc.shape[1:], mixture.diagonal
    if d > MAX_LATENTS:
        raise ValueError(
            f"a mixture of Gaussians takes up to {MAX_LATENTS} latents, got {d}: use fit_svi."
        )
    _check_model(model, latents, single.loc[0], args, kwargs)
    num = _check_draws(num_draws, d, diagonal=diagonal)
    arrays, structure = separate(args, kwargs)

    def potential(theta: Array, arrays: PyTree) -> Array:
        args, kwargs = join(arrays, structure)
        return potential_energy(model, args, kwargs, latents.unpack(theta)).astype(
            theta.dtype
        )

    seed = int(
        np.random.default_rng(
            np.asarray(jax.random.key_data(rng_key)).ravel()
        ).integers(2**31)
    )
    run = partial(
        minimise_mixture,
        potential,
        data=arrays,
        tolerance=tolerance,
        max_evaluations=max_evaluations,
    )
    noise = normal_nodes(seed, num, d, diagonal=diagonal)
    num_points = _NUM_POINTS + _POINTS_EACH * num_components

    def flatten(values: Params) -> Array:
        return jnp.concatenate([jnp.ravel(values[name]) for name in latents.names])

    points = starting_points(
        rng_key, prior_draw(model, args, kwargs, flatten), single.loc[0], num_points
    )
    with numpyro.validation_enabled(False):
        modes = find_modes(potential, points, arrays)
        if not len(modes.mass):
            modes = _as_modes(_mixture(run(single, noise)))
        result = run(mixture_at(modes, num_components, seed, diagonal=diagonal), noise)
        more = normal_nodes(seed + 1, max(_NUM_WEIGHING, num), d, diagonal=diagonal)
        result = result._replace(
            posterior=reweigh(potential, _mixture(result), more, arrays)
        )
    _warn_of_modes(modes, num_components)
    return result, mixture, start.to_params(result.posterior)


def _mixture(result: Result) -> GaussianMixture:
    return cast(GaussianMixture, result.posterior)


def _guide_like(form: AutoGuide, num_components: int) -> AutoGaussianMixture:
    """The guide of a mixture whose components have the form of a Gaussian guide.

    Raises:
        TypeError: If it is no Gaussian.
    """
    law = law_of(form)
    if not law.is_gaussian or law.has_covariance is None:
        raise TypeError(
            "fit_gaussian with num_components takes AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal "
            f"(the class, or a callable from model to one) for the form of components, got {type(form).__name__}."
        )
    return AutoGaussianMixture(
        form.model,
        num_components=num_components,
        diagonal=not law.has_covariance,
        prefix=form.prefix,
        init_loc_fn=form.init_loc_fn,
    )


def _check_model(
    model: temper, latents: Latents, at: Array, args: tuple, kwargs: dict
) -> None:
    def trace_at(flat: Array) -> Trace:
        with handlers.block(), full_plates():
            return trace_unconstrained(model, latents.unpack(flat), args, kwargs)

    with numpyro.validation_enabled(False):
        trace = trace_at(at)
        check_trace(trace, latents)
        check_supports(trace, trace_at, at)


def _check_draws(num_draws: int | None, d: int, *, diagonal: bool) -> int:
    """The points for a component."""
    least = 2 if diagonal else _LEAST_EACH * d
    if num_draws is None:
        return (
            NUM_NODES
            if diagonal
            else max(NUM_NODES, 1 << (_NODES_EACH * d - 1).bit_length())
        )
    if check_count(num_draws, "num_draws", 2) % 2 or num_draws < least:
        raise ValueError(
            f"num_draws must be even and at least {least} for components of {d} latents, got {num_draws}: fewer "
            "points do not tell a covariance."
        )
    return num_draws


def _as_modes(q: GaussianMixture) -> Modes:
    """Components in the place of modes, where the density has none, as in centred hierarchies."""
    roots = jax.vmap(dense)(q.root)
    return Modes(
        np.asarray(q.loc), np.asarray(roots), np.exp(doubles(q.logits)), math.nan
    )


def _warn_of_modes(modes: Modes, num_components: int) -> None:
    if (heavy := int(np.sum(modes.mass >= _HEAVY))) > num_components:
        share = float(np.sum(modes.mass[:num_components]))
        warn_caller(
            f"the posterior has at least {heavy} modes of a mass of {_HEAVY:.0%} or more, and {num_components} "
            f"components start at the heaviest, with {share:.0%} of the mass by Laplace's approximation: the "
            f"rest is left out where they do not reach it. Take num_components={heavy} or more.",
            UserWarning,
        )
