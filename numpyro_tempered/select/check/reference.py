"""Distributions that cover a posterior, for fits whose importance weights have no second moment."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tempered.core import Array, compile_once, doubles
from numpyro_tempered.gaussian.families.base import dense
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.guides.heavy_tails import MultivariateStudentT
from numpyro_tempered.infer.guides.student_t import DF
from numpyro_tempered.infer.moments import LocationScale, forget_untamed
from numpyro_tempered.select.check.divergence import Divergences, divergences
from numpyro_tempered.select.check.target import Draws, draws_of_distribution

# The most latent numbers: a Hessian and a covariance of as many rows.
MAX_DIM = 200
# Above it E w^2 is infinite; and above this bound on D_2 a distribution nearer by is worth its draws.
MAX_PARETO_K = 0.5
NEAR = 0.1


class Reference(NamedTuple):
    """A distribution r that covers the posterior p, with its draws.

    Attributes:
        name: What it is.
        draws: Its draws.
        divergences: Of p from it.
        weights: Smoothed importance weights of the draws.
        is_mixture: Whether it is a mixture of Student's t.
    """

    name: str
    draws: Draws
    divergences: Divergences
    weights: np.ndarray
    is_mixture: bool = False

    @property
    def is_heavy(self) -> bool:
        """Whether it has polynomial tails, under which an exponential has no moments."""
        return self.is_mixture or (
            self.draws.law is not None and self.draws.law.is_heavy
        )


def curvature(target: Target, at: np.ndarray) -> np.ndarray:
    """The Hessian of the potential, ``(d, d)``."""
    (matrix,) = curvatures(target, jnp.asarray(at)[None])
    return matrix


def curvatures(target: Target, points: Array) -> np.ndarray:
    """The Hessians at several points ``(S, d)``, ``(S, d, d)``, by the program for one."""
    program = compile_once(jax.hessian(target.potential), points[0])
    return np.stack([doubles(program(point)) for point in points])


def has_chi_square(hessian: np.ndarray, q: LocationScale) -> bool:
    r"""Whether :math:`E_q w^2` is finite for a posterior of this Hessian: :math:`2 H - V^{-1} \succ 0`."""
    if not np.all(np.isfinite(hessian)):
        return False
    root = np.linalg.cholesky(q.cov)
    return bool(np.linalg.eigvalsh(2.0 * root.T @ hessian @ root)[0] > 1.0)


def cover(
    rng_key: Array, start: Draws, target: Target, hessian: np.ndarray | None
) -> Reference | None:
    """The nearest of some distributions that cover the posterior; None where none does.

    The first is the Gaussian of the curvature at the mean of the fit, somewhat wider. The others have the moments
    that the weighted draws of the one before give the posterior: another Gaussian, and Student's t with 7 degrees
    of freedom. Of a mixture of Gaussians it is the mixture of such Student's t.

    Args:
        rng_key: For the draws, as many as ``start`` has.
        start: Draws of the fit.
        target: The posterior.
        hessian: Of its potential at the mean of the fit; None where it is not known.
    """
    if start.mixture is not None:
        # One Gaussian would leave out the modes that the mixture has, or what is between them.
        return _heavy_mixture(rng_key, start.mixture, target, len(start.flat))
    loc, cov = _moments_of(start.flat, np.full(len(start.flat), 1.0 / len(start.flat)))
    if start.law is not None:
        loc, cov = start.law.loc, start.law.cov
    if hessian is not None and np.all(np.isfinite(hessian)):
        curvatures, axes = np.linalg.eigh(hessian)
        if curvatures[0] > 0:
            cov = (axes / curvatures) @ axes.T
    best: Reference | None = None
    for key, is_heavy in zip(
        jax.random.split(rng_key, 3), (False, False, True), strict=True
    ):
        candidate = _candidate(
            key, loc, cov, target, len(start.flat), is_heavy=is_heavy
        )
        if candidate is None:
            continue
        if best is None or _distance(candidate) < _distance(best):
            best = candidate
        if is_near(best):
            break
        # Fewer draws that count than numbers in a covariance would make it singular.
        if 1.0 / np.sum(np.square(candidate.weights)) > 5.0 * len(loc):
            loc, cov = _moments_of(candidate.draws.flat, candidate.weights)
    return best


def is_near(reference: Reference) -> bool:
    """Whether nothing nearer by is looked for."""
    return _distance(reference) <= (False, NEAR)


def of_draws(name: str, draws: Draws) -> Reference:
    """The draws of another fit as a reference."""
    return Reference(name, draws, *divergences(draws.log_ratios))


def _candidate(
    rng_key: Array,
    loc: np.ndarray,
    cov: np.ndarray,
    target: Target,
    num_draws: int,
    *,
    is_heavy: bool,
) -> Reference | None:
    dim = len(loc)
    # Wider by what adds a fortieth to the chi-square of a Gaussian posterior of the same covariance.
    wide = cov if is_heavy else cov * (1.0 + math.sqrt(0.05 / dim))
    mean, tril = jnp.asarray(loc), jnp.asarray(np.linalg.cholesky(wide))
    if is_heavy:
        name = "student_t"
        # Its scale is the root of the covariance of the weighted draws, so that it is the wider of the two.
        law = LocationScale(
            loc, wide * DF / (DF - 2.0), np.full(dim, DF), is_joint=True
        )
        q: dist.Distribution = MultivariateStudentT(DF, mean, tril)
    else:
        name, law = "gaussian", LocationScale(loc, wide)
        q = dist.MultivariateNormal(mean, scale_tril=tril)
    try:
        draws = draws_of_distribution(rng_key, q, law, target, num_draws)
    except ValueError:
        # Too wide: somewhere the joint density overflows.
        return None
    return Reference(name, draws, *divergences(draws.log_ratios))


def _heavy_mixture(
    rng_key: Array, mixture: GaussianMixture, target: Target, num_draws: int
) -> Reference | None:
    """The mixture with Student's t in the place of its Gaussians."""
    components = MultivariateStudentT(DF, mixture.loc, jax.vmap(dense)(mixture.root))
    q = dist.MixtureSameFamily(dist.Categorical(logits=mixture.logits), components)
    try:
        draws = draws_of_distribution(rng_key, q, None, target, num_draws)
    except ValueError:
        return None
    forget_untamed(draws.moments)
    return Reference(
        "student_t", draws, *divergences(draws.log_ratios), is_mixture=True
    )


def _distance(reference: Reference) -> tuple[bool, float]:
    return reference.divergences.pareto_k > MAX_PARETO_K, reference.divergences.d2_bound


def _moments_of(flat: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    loc = weights @ flat
    return loc, (flat - loc).T @ (weights[:, None] * (flat - loc))
