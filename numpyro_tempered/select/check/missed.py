"""Modes of a posterior that no draw of a fit comes near, of which importance weights say nothing."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_tempered.core import (
    Array,
    Params,
    compile_once,
    doubles,
    map_batches,
    run_program,
)
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.mode import NEAR
from numpyro_tempered.infer.modes import (
    Modes,
    distinct_modes,
    prior_draw,
    starting_points,
)
from numpyro_tempered.select.check.reference import curvatures
from numpyro_tempered.select.check.target import BATCH, Draws

# Points from which modes are looked for, and draws of each that is far from all draws of the fit.
_NUM_POINTS, _NUM_DRAWS = 24, 512
# The search starts at every second.
_EVERY = 2
# Steps of a search, ends that are one, in standard deviations, and a value where the density has none.
_MAX_ITERATIONS, _SAME, _NOWHERE = 200, 0.1, 1e30
# Eigenvalues of a scaled Hessian above minus this for each coordinate are rounding.
_FLAT = 1e-4
# Slopes on the way from one point to another, the share of it to the nearest, and what rounding makes of a rise.
_NUM_SLOPES, _NEAREST, _FALL = 16, 1e-5, 1e-3
# How far a point may be from a Gaussian's mean, in its standard deviations, beyond the root of the dimension.
_BEYOND = 4.0
# From a point to the potential there and its gradient.
Slopes: TypeAlias = Callable[[Array], tuple[Array, Array]]
# The least share of the posterior's mass that counts.
LEAST_SHARE = 0.01


class Missed(NamedTuple):
    """Modes that draws do not reach.

    Attributes:
        num_modes: How many there are with a hundredth of the mass.
        share: Their share of the posterior's mass, by importance sampling at each; an estimate from below.
        values: The numbers of all latents at the heaviest, ``(k,)``.
    """

    num_modes: int
    share: float
    values: np.ndarray


def missed_modes(
    rng_key: Array, draws: Draws, log_evidence: float, target: Target
) -> Missed | None:
    """The modes that a search reaches from draws of the prior and around 0, and draws of a fit do not.

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

    def flatten(values: Params) -> Array:
        return ravel_pytree({name: values[name] for name in target.coordinates})[0]

    draw = prior_draw(target.model, target.args, target.kwargs, flatten)
    points = starting_points(points_key, draw, start, _NUM_POINTS)
    # One program for all: in a first check compilation is most of the time.
    slopes = compile_once(jax.value_and_grad(target.potential), start)
    # A cheap look first: most posteriors are log-concave, or all but.
    if bends_upwards(target, slopes, points):
        return None
    modes = find_modes(
        target, slopes, points[::_EVERY], np.linalg.cholesky(_covariance(flat))
    )
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
    numbers = np.concatenate([np.ravel(values[name]) for name in target.coordinates])
    num_modes = int(
        np.sum(np.exp(log_masses - np.logaddexp(total, log_evidence)) >= LEAST_SHARE)
    )
    return Missed(max(num_modes, 1), share, numbers)


def bends_upwards(target: Target, slopes: Slopes, points: np.ndarray) -> bool:
    """Whether minus the log-density bends upwards at many points, and its slope rises from the first to each.

    Between two modes it does not. It may bend downwards in a narrow place, but beyond it the slope has fallen.
    """
    # Modes may be nearer to the first point than the others by any factor.
    shares = np.geomspace(_NEAREST, 1.0, _NUM_SLOPES)

    def slope(way: np.ndarray, share: float) -> float:
        _, grad = slopes(jnp.asarray((points[0] + share * way).astype(points.dtype)))
        return float(doubles(grad) @ way)

    ways = points[1:].astype(np.float64) - points[0]
    along = np.array([[slope(way, share) for share in shares] for way in ways])
    before, after = along[:, :-1], along[:, 1:]
    if not np.all(after - before >= -_FALL * np.maximum(np.abs(before), np.abs(after))):
        return False
    for hessian in curvatures(target, jnp.asarray(points)):
        scale = np.sqrt(np.maximum(np.abs(np.diag(hessian)), np.finfo(float).tiny))
        scaled = hessian / scale / scale[:, None]
        if not np.all(np.isfinite(scaled)) or np.linalg.eigvalsh(scaled)[
            0
        ] < -_FLAT * len(scale):
            return False
    return True


def find_modes(
    target: Target, slopes: Slopes, points: np.ndarray, root: np.ndarray
) -> Modes:
    """The modes that a quasi-Newton method reaches from points, in coordinates with this root of a covariance."""
    from scipy.linalg import solve_triangular
    from scipy.optimize import minimize

    first = points[0].astype(np.float64)

    def f(u: np.ndarray) -> tuple[float, np.ndarray]:
        pair = slopes(jnp.asarray((first + root @ u).astype(points.dtype)))
        value, grad = float(pair[0]), doubles(pair[1])
        if not (math.isfinite(value) and np.all(np.isfinite(grad))):
            return _NOWHERE, np.zeros(len(u))
        return value, np.asarray(root.T @ grad)

    starts = np.linalg.solve(root, (points - first).T).T
    ends: list[np.ndarray] = []
    for start in starts:
        end = minimize(
            f, start, jac=True, method="L-BFGS-B", options={"maxiter": _MAX_ITERATIONS}
        ).x
        if all(np.linalg.norm(end - other) > _SAME for other in ends):
            ends.append(end)
    loc = np.array([first + root @ end for end in ends])
    at = [f(end) for end in ends]
    roots, is_mode = (
        np.tile(np.eye(len(first)), (len(ends), 1, 1)),
        np.zeros(len(ends), bool),
    )
    for i, hessian in enumerate(
        curvatures(target, jnp.asarray(loc.astype(points.dtype)))
    ):
        if not np.all(np.isfinite(hessian)) or np.linalg.eigvalsh(hessian)[0] <= 0.0:
            continue
        roots[i] = solve_triangular(
            np.linalg.cholesky(hessian), np.eye(len(first)), lower=True
        ).T
        step = roots[i].T @ np.linalg.solve(root.T, at[i][1])
        # A Newton step takes what is left of the way.
        is_mode[i], loc[i] = 0.5 * step @ step <= NEAR, loc[i] - roots[i] @ step
    return distinct_modes(loc, roots, np.array([value for value, _ in at]), is_mode)


def _covariance(flat: np.ndarray) -> np.ndarray:
    cov = np.atleast_2d(np.cov(flat.T))
    return np.asarray(cov + 1e-12 * np.diag(np.diag(cov)))


def _is_far(modes: Modes, j: int, flat: np.ndarray) -> bool:
    """Whether no draw is where a Gaussian at the mode has its own."""
    shift = np.linalg.solve(modes.root[j].astype(np.float64), (flat - modes.loc[j]).T)
    return bool(
        np.sqrt(np.min(np.sum(np.square(shift), axis=0)))
        > math.sqrt(len(shift)) + _BEYOND
    )


def _log_mass(
    rng_key: Array, modes: Modes, j: int, flat: np.ndarray, target: Target
) -> float:
    """The log of the mass about a mode, without what draws of the fit are about: by importance sampling."""
    loc, root = jnp.asarray(modes.loc[j]), jnp.asarray(modes.root[j])

    def one(noise: Array) -> tuple[Array, Array]:
        z = loc + root @ noise
        return -target.potential(z) + 0.5 * jnp.sum(jnp.square(noise)), z

    def weigh(key: Array) -> tuple[Array, Array]:
        return map_batches(
            one, jax.random.normal(key, (_NUM_DRAWS, len(loc)), loc.dtype), BATCH
        )

    log_ratios, z = map(doubles, run_program(weigh, rng_key))
    mean = flat.mean(axis=0)
    shift = np.linalg.solve(np.linalg.cholesky(_covariance(flat)), (z - mean).T)
    inside = np.sqrt(np.sum(np.square(shift), axis=0)) <= math.sqrt(len(mean)) + _BEYOND
    log_ratios = np.where(inside | np.isnan(log_ratios), -np.inf, log_ratios)
    volume = np.linalg.slogdet(modes.root[j].astype(np.float64))[1] + 0.5 * len(
        mean
    ) * math.log(2.0 * math.pi)
    return float(np.logaddexp.reduce(log_ratios) - math.log(_NUM_DRAWS) + volume)
