"""The free energy of a mixture of Gaussians by points of each, its derivatives, and a step of it."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Numbers,
    PyTree,
    map_batches,
    matmul,
    run_program,
)
from numpyro_tempered.gaussian.descent.base import Derivatives
from numpyro_tempered.gaussian.families.gaussian_mixture import (
    GaussianMixture,
    component_log_prob,
)

# Weights are at least this: a component that holds nothing keeps its derivatives.
MIN_WEIGHT = 1e-6
# Steps of the weights alone, each of which is little work.
_NUM_WEIGHINGS = 200
# Points whose derivatives are taken side by side.
BATCH = 64

# (theta, data) -> f(theta), minus a log-density.
Potential: TypeAlias = Callable[[Array, PyTree], Array]


class Point(NamedTuple):
    """A mixture, its free energy, and the derivatives there."""

    q: GaussianMixture
    energy: Array
    in_weight: Array  # derivatives in the weights, less their mean, (K,)
    at: Derivatives  # in coordinates in which each component is standard
    residual: Array


def normal_nodes(seed: int, num: int, d: int, *, diagonal: bool = False) -> np.ndarray:
    """Quasi-random standard normal points ``(num, d)``, in antithetic pairs.

    Scrambled Sobol points, whose first two moments are those of the normal distribution exactly, so that averages
    of quadratics are: of each coordinate, and of all pairs too if there are enough points and not ``diagonal``.
    """
    from scipy.special import ndtri
    from scipy.stats import qmc

    half = num // 2
    uniform = qmc.Sobol(d, rng=np.random.default_rng(seed)).random_base2(
        max(0, math.ceil(math.log2(half)))
    )[:half]
    tiny = np.finfo(float).tiny
    z = ndtri(np.clip(uniform, tiny, 1.0 - np.finfo(float).epsneg))
    second = z.T @ z / half
    if diagonal or half < 2 * d:
        z = z / np.sqrt(np.diag(second))
    else:
        z = np.linalg.solve(np.linalg.cholesky(second), z.T).T
    return np.concatenate([z, -z])


def floored(logits: Array) -> Array:
    """Logarithms of weights that sum to 1, of which none is all but 0."""
    return jax.nn.log_softmax(
        jnp.maximum(jax.nn.log_softmax(logits), math.log(MIN_WEIGHT))
    )


def color(root: Array, noise: Array) -> Array:
    """Noise ``(S, d)`` with the covariance of that root."""
    return noise * root if root.ndim == 1 else matmul(noise, root.T)


def evaluate(
    potential: Potential, q: GaussianMixture, noise: Array, data: PyTree
) -> Point:
    """The free energy and its derivatives, by the same points for all components."""
    (num, d), weights = q.loc.shape, jnp.exp(q.logits)

    def place(loc: Array, root: Array) -> Array:
        return loc[:, None, :] + jax.vmap(color, in_axes=(0, None))(root, noise)

    slopes = jax.value_and_grad(
        lambda theta: potential(theta, data).astype(theta.dtype)
    )
    values, grads = map_batches(slopes, place(q.loc, q.root).reshape(-1, d), BATCH)
    f, grads = jnp.mean(values.reshape(num, -1), axis=1), grads.reshape(num, -1, d)

    def mixing(q: GaussianMixture) -> tuple[Array, Array]:
        """Averages of log q - log N_k under each component, and their sum by the weights."""
        log_probs = component_log_prob(q, place(q.loc, q.root).reshape(-1, d)).reshape(
            num, -1, num
        )
        of_component = jnp.diagonal(log_probs, axis1=0, axis2=2).T
        each = jnp.mean(
            jax.nn.logsumexp(q.logits + log_probs, axis=2) - of_component, axis=1
        )
        return jnp.sum(jnp.exp(q.logits) * each), each

    (_, each), slopes_of_mixing = jax.value_and_grad(mixing, has_aux=True)(q)
    # By the weight of the component: those of the weights, and of the component.
    in_weight, in_loc, in_root = (
        part / jnp.expand_dims(weights, range(1, part.ndim))
        for part in slopes_of_mixing
    )

    def standardise(
        root: Array, grads: Array, in_loc: Array, in_root: Array
    ) -> tuple[Array, Array]:
        """Gradient and Hessian in coordinates in which a component is standard."""
        grad = jnp.mean(grads, axis=0) + in_loc
        if root.ndim == 1:
            return root * grad, root * (jnp.mean(grads * noise, axis=0) + in_root)
        product = matmul(root.T, matmul(grads.T, noise) / len(noise) + in_root)
        return matmul(root.T, grad), 0.5 * (product + product.T)

    grad, hessian = jax.vmap(standardise)(q.root, grads, in_loc, in_root)
    volume = (
        jnp.sum(jnp.log(q.root), axis=1)
        if q.root.ndim == 2
        else jnp.linalg.slogdet(q.root)[1]
    )
    rest = f - volume - 0.5 * d * math.log(2.0 * math.pi * math.e)
    energy = jnp.sum(weights * (each + rest))
    in_weight = in_weight + rest
    in_weight = in_weight - jnp.sum(weights * in_weight)
    identity = 1.0 if hessian.ndim == 2 else jnp.eye(d, dtype=hessian.dtype)
    distance = 0.25 * jnp.sum(jnp.square(hessian - identity).reshape(num, -1), axis=1)
    distance += 0.5 * jnp.sum(jnp.square(grad), axis=1) + 0.5 * jnp.square(in_weight)
    residual = jnp.sum(weights * distance)
    finite = jnp.isfinite(energy + residual)
    return Point(
        q,
        jnp.where(finite, energy, jnp.inf),
        in_weight,
        Derivatives(f + each, grad, hessian),
        jnp.where(finite, residual, jnp.inf),
    )


def step(point: Point, share: Array) -> tuple[GaussianMixture, Array]:
    """A step of each component, ``share`` of its longest, and of the weights; and how far they should lower F."""

    def one(
        loc: Array, root: Array, grad: Array, hessian: Array
    ) -> tuple[Array, Array, Array]:
        values, vectors = (
            (hessian, None) if hessian.ndim == 1 else jnp.linalg.eigh(hessian)
        )
        largest = jnp.max(values)
        size = share * jnp.where(
            largest > 1.0, 1.0 / jnp.where(largest > 1.0, largest, 1.0), 1.0
        )
        reach = jnp.abs(1.0 - size * values)
        scale = 0.5 * (reach + jnp.sqrt(jnp.square(reach) + 4.0 * size))
        promise = size * jnp.sum(jnp.square(grad)) + jnp.sum(
            (values - 1.0) * (1.0 - scale)
        )
        if vectors is None:
            return loc - size * root * grad, root * scale, promise
        # By a symmetric matrix, so that the points move along the straight lines of optimal transport.
        return (
            loc - size * matmul(root, grad),
            matmul(root, matmul(vectors * scale, vectors.T)),
            promise,
        )

    q = point.q
    loc, root, promises = jax.vmap(one)(q.loc, q.root, point.at.grad, point.at.hessian)
    logits = floored(q.logits - share * point.in_weight)
    promises -= point.in_weight * (logits - q.logits)
    return GaussianMixture(logits, loc, root), jnp.sum(jnp.exp(q.logits) * promises)


def reweigh(
    potential: Potential, q: GaussianMixture, noise: Numbers, data: PyTree = ()
) -> GaussianMixture:
    """The mixture with the best weights for its components, by points ``(S, d)`` for each.

    The steps of the weights in :func:`minimise_mixture`, until they stand: each point costs one density.
    """

    def best(q: GaussianMixture, noise: Array, data: PyTree) -> Array:
        num, d = q.loc.shape
        theta = q.loc[:, None, :] + jax.vmap(color, in_axes=(0, None))(q.root, noise)
        flat = theta.reshape(-1, d)
        f = map_batches(lambda theta: potential(theta, data), flat, BATCH).reshape(
            num, -1
        )
        log_probs = component_log_prob(q, flat).reshape(num, -1, num)

        def advance(_: int, logits: Array) -> Array:
            log_q = jax.nn.logsumexp(logits + log_probs, axis=2)
            return floored(logits - jnp.mean(f + log_q, axis=1))

        return jax.lax.fori_loop(0, _NUM_WEIGHINGS, advance, q.logits)

    logits = run_program(best, q, jnp.asarray(noise, q.loc.dtype), data)
    return q._replace(logits=jnp.where(jnp.all(jnp.isfinite(logits)), logits, q.logits))
