"""Modes of a posterior that no draw of a fit comes near, of which importance weights say nothing."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.programs import run_program
from numpyro_tempered.core.typing import Array
from numpyro_tempered.infer.modes import Modes, find_modes, prior_draw, starting_points
from numpyro_tempered.select.check.reference import curvatures
from numpyro_tempered.select.check.target import BATCH, Draws, Target

# Points from which modes are looked for, and draws of each that is far from all draws of the fit.
_NUM_POINTS, _NUM_DRAWS = 24, 512
# Newton's method starts at every second: each takes many Hessians.
_EVERY = 2
# Eigenvalues of a scaled Hessian above minus this for each coordinate are rounding.
_FLAT = 1e-4
# Slopes on the way from one point to another, the share of it to the nearest, and what rounding makes of a rise.
_NUM_SLOPES, _NEAREST, _FALL = 32, 1e-5, 1e-3
# How far a point may be from a Gaussian's mean, in its standard deviations, beyond the root of the dimension.
_BEYOND = 4.0
# The least share of the posterior's mass that counts.
LEAST_SHARE = 0.01


class Missed(NamedTuple):
    """Modes that draws do not reach.

    Attributes:
        num_modes: How many there are.
        share: Their share of the posterior's mass, by importance sampling at each; an estimate from below.
        values: The numbers of all latents at the heaviest, ``(k,)``.
    """

    num_modes: int
    share: float
    values: np.ndarray


def missed_modes(rng_key: Array, draws: Draws, log_evidence: float, target: Target) -> Missed | None:
    """The modes that Newton's method reaches from draws of the prior and around 0, and draws of a fit do not.

    Args:
        rng_key: Of the points.
        draws: Of the fit, or of what covers it.
        log_evidence: The log of the mass that these draws know of.
        target: The posterior.

    Returns:
        None where they have less than a hundredth of the mass.
    """
    points_key, draws_key = jax.random.split(rng_key)
    flat = draws.flat
    start = jnp.asarray(flat.mean(axis=0))
    draw = prior_draw(target.model, target.args, target.kwargs, target.flatten_unconstrained)
    points = starting_points(points_key, draw, start, _NUM_POINTS)
    # A cheap look first: most posteriors are log-concave, or all but.
    if bends_upwards(target, points):
        return None
    modes = find_modes(lambda z, _: target.potential(z), points[::_EVERY], ())
    far = [j for j in range(len(modes.mass)) if _is_far(modes, j, flat)]
    if not far:
        return None
    log_masses = np.array(
        [
            _log_mass(key, modes, j, flat, target)
            for key, j in zip(jax.random.split(draws_key, len(far)), far, strict=True)
        ]
    )
    total = float(np.logaddexp.reduce(log_masses))
    share = math.exp(total - float(np.logaddexp(total, log_evidence)))
    if not share >= LEAST_SHARE:
        return None
    heaviest = jnp.asarray(modes.loc[far[int(np.argmax(log_masses))]])
    values = target.constrain(heaviest)
    numbers = np.concatenate([np.ravel(values[name]) for name in target.names])
    return Missed(len(far), share, numbers)


def bends_upwards(target: Target, points: np.ndarray) -> bool:
    """Whether minus the log-density bends upwards at many points, and its slope rises from the first to each.

    Between two modes it does not. It may bend downwards in a narrow place, but beyond it the slope has fallen.
    """
    # Modes may be nearer to the first point than the others by any factor.
    shares = np.geomspace(_NEAREST, 1.0, _NUM_SLOPES).astype(points.dtype)

    def slopes_to(way: Array, first: Array) -> Array:
        return jax.lax.map(lambda t: jnp.sum(jax.grad(target.potential)(first + t * way) * way), shares)

    def all_of_them(points: Array) -> Array:
        return jax.lax.map(lambda point: slopes_to(point - points[0], points[0]), points)

    slopes = np.asarray(run_program(all_of_them, points), np.float64)
    before, after = slopes[:, :-1], slopes[:, 1:]
    if not np.all(after - before >= -_FALL * np.maximum(np.abs(before), np.abs(after))):
        return False
    for hessian in curvatures(target, jnp.asarray(points)):
        scale = np.sqrt(np.maximum(np.abs(np.diag(hessian)), np.finfo(float).tiny))
        scaled = hessian / scale / scale[:, None]
        if not np.all(np.isfinite(scaled)) or np.linalg.eigvalsh(scaled)[0] < -_FLAT * len(scale):
            return False
    return True


def _is_far(modes: Modes, j: int, flat: np.ndarray) -> bool:
    """Whether no draw is where a Gaussian at the mode has its own."""
    shift = np.linalg.solve(modes.root[j].astype(np.float64), (flat - modes.loc[j]).T)
    return bool(np.sqrt(np.min(np.sum(np.square(shift), axis=0))) > math.sqrt(len(shift)) + _BEYOND)


def _log_mass(rng_key: Array, modes: Modes, j: int, flat: np.ndarray, target: Target) -> float:
    """The log of the mass about a mode, without what draws of the fit are about: by importance sampling."""
    loc, root = jnp.asarray(modes.loc[j]), jnp.asarray(modes.root[j])

    def one(noise: Array) -> tuple[Array, Array]:
        z = loc + root @ noise
        return -target.potential(z) + 0.5 * jnp.sum(jnp.square(noise)), z

    def weigh(key: Array) -> tuple[Array, Array]:
        return map_batches(one, jax.random.normal(key, (_NUM_DRAWS, len(loc)), loc.dtype), BATCH)

    log_ratios, z = (np.asarray(part, np.float64) for part in run_program(weigh, rng_key))
    mean, cov = flat.mean(axis=0), np.atleast_2d(np.cov(flat.T))
    shift = np.linalg.solve(np.linalg.cholesky(cov + 1e-12 * np.diag(np.diag(cov))), (z - mean).T)
    inside = np.sqrt(np.sum(np.square(shift), axis=0)) <= math.sqrt(len(mean)) + _BEYOND
    log_ratios = np.where(inside | np.isnan(log_ratios), -np.inf, log_ratios)
    volume = np.linalg.slogdet(modes.root[j].astype(np.float64))[1] + 0.5 * len(mean) * math.log(2.0 * math.pi)
    return float(np.logaddexp.reduce(log_ratios) - math.log(_NUM_DRAWS) + volume)
