"""Draws of distributions with their importance ratios to a tempered posterior."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree

from numpyro_tempered.core import (
    Array,
    Params,
    compiled_map,
    doubles,
    map_batches,
    run_program,
)
from numpyro_tempered.gaussian.families import GaussianMixture
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.antithetic import OrderedELBO
from numpyro_tempered.infer.elbo import gaussian_of_laplace, has_point_mass, trace_guide
from numpyro_tempered.infer.guide_laws import location_scale_of, mixture_of
from numpyro_tempered.infer.moments import LocationScale, Moments, moments_of, of_draws
from numpyro_tempered.infer.tempered_fit import TemperedFit

BATCH = 64
_NEEDS = {
    "plates": ", and weights need all data: leave subsample_size out in the call, or make the model without it.",
    "support": "",
    "continuous": "",
    "global": ": there is no joint density that the weights could compare with.",
}


class Draws(NamedTuple):
    """S draws of a distribution q with what the posterior thinks of them.

    Attributes:
        log_ratios: log joint - log q, shape ``(S,)``.
        flat: The draws in unconstrained coordinates, ``(S, d)``.
        values: The numbers of all latents side by side, ``(S, k)``.
        moments: Of those numbers under q, exact where that is known.
        law: q where it is a Gaussian or a Student's t in unconstrained coordinates.
        mixture: q where it is a mixture of Gaussians there.
    """

    log_ratios: np.ndarray
    flat: np.ndarray
    values: np.ndarray
    moments: Moments
    law: LocationScale | None
    mixture: GaussianMixture | None = None


def draws_of_fit(
    rng_key: Array, fit: TemperedFit, target: Target, num_draws: int
) -> Draws:
    """Draws of a fitted guide, weighed by the posterior ``target``, which may be that of another fit.

    Raises:
        ValueError: If the guide is a point, or a ratio is NaN.
    """
    args, kwargs = target.args, target.kwargs
    guide, params = gaussian_of_laplace(
        fit.guide, fit.model, fit.params, rng_key, fit.args, fit.kwargs
    )
    if has_point_mass(rng_key, guide, params, args, kwargs):
        raise ValueError(
            f"the guide {type(fit.guide).__name__} has a latent that is a point, which has no density: there is "
            "nothing to weigh. Fit a guide with a scale."
        )
    loss = OrderedELBO()

    def one(key: Array, params: Params) -> tuple[Array, Array, Array]:
        # The same split of the key as in NumPyro's losses, so the same draw.
        _, guide_key = jax.random.split(key)
        sites = trace_guide(guide_key, guide, params, args, kwargs)
        values = {name: sites[name]["value"] for name in target.coordinates}
        log_ratio = -loss.loss(key, params, target.model, guide, *args, **kwargs)
        return log_ratio, target.flatten(values), ravel_pytree(values)[0]

    def all_of_them(key: Array, params: Params) -> tuple[Array, Array, Array]:
        return map_batches(
            lambda k: one(k, params), jax.random.split(key, num_draws), BATCH
        )

    log_ratios, flat, values = _as_double(run_program(all_of_them, rng_key, params))
    law = location_scale_of(guide, params)
    if law is not None:
        _check_resolution(law, flat)
    moments = moments_of(law, target.coordinates, values, target.moving)
    return Draws(
        _checked(log_ratios), flat, values, moments, law, mixture_of(guide, params)
    )


def require_latents(fit: TemperedFit, target: Target) -> None:
    """Refuse a reference whose model has other latents.

    Raises:
        ValueError: If it has.
    """
    other = fit.target.coordinates
    shapes, expected = (
        {name: np.shape(site["value"]) for name, site in sorted(sites.items())}
        for sites in (other, target.coordinates)
    )
    if shapes != expected:
        raise ValueError(
            f"the reference has latents of {shapes}, the fit of {expected}: fit the same model."
        )


def _check_resolution(law: LocationScale, flat: np.ndarray) -> None:
    """Refuse a distribution whose draws the precision rounds away.

    Raises:
        ValueError: If some coordinate is so far from 0.
    """
    dtype = jnp.result_type(float)
    rounding = float(np.finfo(dtype).eps) * np.abs(law.loc) / np.sqrt(np.diag(law.cov))
    if rounding.max() > 0.02:
        raise ValueError(
            f"the mean of a latent is {np.abs(law.loc)[rounding.argmax()]:.3g}, which {dtype} keeps to "
            f"{rounding.max():.1g} of its standard deviation: draws would be rounded. Subtract a constant in the "
            "model, or let jax have 64 bits."
        )


def draws_of_values(values: Params, log_densities: np.ndarray, target: Target) -> Draws:
    """Draws of any distribution, ``(S, ...)`` by site, with the log of its density at each, ``(S,)``."""

    def one(draw: Params) -> tuple[Array, Array, Array]:
        return target.log_joint(draw), target.flatten(draw), ravel_pytree(draw)[0]

    log_joint, flat, numbers = _as_double(compiled_map(one, values, BATCH))
    return Draws(
        _checked(log_joint - log_densities), flat, numbers, of_draws(numbers), None
    )


def draws_of_distribution(
    rng_key: Array,
    q: dist.Distribution,
    law: LocationScale | None,
    target: Target,
    num_draws: int,
) -> Draws:
    """Draws of a distribution of the flat unconstrained coordinates."""

    def one(z: Array, log_density: Array) -> tuple[Array, Array]:
        return -target.potential(z) - log_density, ravel_pytree(target.constrain(z))[0]

    def all_of_them(key: Array) -> tuple[Array, Array, Array]:
        z = q.sample(key, (num_draws,))
        log_ratios, values = map_batches(
            lambda pair: one(*pair), (z, q.log_prob(z)), BATCH
        )
        return log_ratios, z, values

    log_ratios, flat, values = _as_double(run_program(all_of_them, rng_key))
    return Draws(
        _checked(log_ratios),
        flat,
        values,
        moments_of(law, target.coordinates, values, target.moving),
        law,
    )


def _as_double(arrays: tuple[Array, ...]) -> list[np.ndarray]:
    return [doubles(array) for array in arrays]


def _checked(log_ratios: np.ndarray) -> np.ndarray:
    """The ratios, of which none may be NaN or infinite, and some must not be 0.

    Raises:
        ValueError: If they are.
    """
    if (
        bad := int(np.sum(np.isnan(log_ratios) | (log_ratios == np.inf)))
    ) or not np.isfinite(log_ratios).any():
        raise ValueError(
            f"at {bad or log_ratios.size} of {log_ratios.size} draws the joint density of the model is NaN, "
            "infinite or 0: check the data for NaN, and the fit for parameters at the edge of their support."
        )
    return log_ratios
