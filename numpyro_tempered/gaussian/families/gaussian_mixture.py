"""Mixtures of Gaussians as variational posteriors, of several modes or of other forms than one Gaussian has."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, Shape, add_repr, matmul
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    as_floating,
    covariance,
    family_of,
    log_density,
)


@add_repr
class GaussianMixture(NamedTuple):
    r"""The density Σ_k w_k N(m_k, S_k S_kᵀ).

    No :class:`Family`: the online rules and the methods of one Gaussian do not take it.

    Attributes:
        logits: Logarithms of the weights w, shape ``(K,)``; the weights sum to 1.
        loc: Means, shape ``(K, d)``.
        root: Square roots S of the covariances, ``(K, d, d)``, or standard deviations ``(K, d)``.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logits, loc = jnp.log(jnp.array([0.5, 0.5])), jnp.array([[-1.0], [1.0]])
        >>> q = nt.gaussian.families.GaussianMixture(logits, loc, jnp.ones((2, 1)))
        >>> print(q.mean, q.covariance)
        [0.] [[2.]]
    """

    logits: Array
    loc: Array
    root: Array

    @property
    def mean(self) -> Array:
        """Means of the coordinates, ``(d,)``."""
        return matmul(jnp.exp(self.logits), self.loc)

    @property
    def sd(self) -> Array:
        """Standard deviations of the coordinates, ``(d,)``."""
        return jnp.sqrt(jnp.diagonal(self.covariance))

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)``."""
        weights, shift = jnp.exp(self.logits), self.loc - self.mean
        within = jax.vmap(covariance)(self.root)
        return jnp.einsum("k,kab->ab", weights, within) + matmul(
            shift.T * weights, shift
        )

    def log_prob(self, theta: Array) -> Array:
        """The log-density at ``theta``, ``(..., d)``; gives ``(...)``."""
        return jax.nn.logsumexp(self.logits + component_log_prob(self, theta), axis=-1)

    def sample(self, rng_key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""
        which_key, noise_key = jax.random.split(rng_key)
        which = jax.random.categorical(which_key, self.logits, shape=sample_shape)
        noise = jax.random.normal(
            noise_key, (*sample_shape, self.loc.shape[1]), self.loc.dtype
        )
        root = self.root[which]
        spread = (
            root * noise
            if self.root.ndim == 2
            else jnp.einsum("...ab,...b->...a", root, noise)
        )
        return self.loc[which] + spread


def check(q: GaussianMixture, name: str) -> GaussianMixture:
    """The argument of that name as floating arrays of one dtype.

    Raises:
        TypeError: If it is no mixture.
        ValueError: If shapes disagree.
    """
    if not isinstance(q, GaussianMixture):
        raise TypeError(f"{name} must be a GaussianMixture, got {type(q).__name__}.")
    shapes = tuple(jnp.shape(leaf) for leaf in q)
    is_fitting = (
        len(shapes[1]) == 2 and shapes[0] == shapes[1][:1] and 0 not in shapes[1]
    )
    if not is_fitting or shapes[2] not in (shapes[1], (*shapes[1], shapes[1][1])):
        raise ValueError(
            f"{name} must have logits (K,), loc (K, d) and root (K, d) or (K, d, d), got "
            f"{', '.join(map(str, shapes))}."
        )
    return GaussianMixture(*as_floating(*q))


def draw(rng_key: Array, q: Gaussian | GaussianMixture, num_samples: int) -> Array:
    """Draws ``(num_samples, d)`` of a Gaussian of any family, or of a mixture."""
    if isinstance(q, GaussianMixture):
        return q.sample(rng_key, (num_samples,))
    return family_of(q).sample(rng_key, q, (num_samples,))


def component_log_prob(q: GaussianMixture, theta: Array) -> Array:
    """The log-density of each component at ``theta``, ``(..., d)``; gives ``(..., K)``."""
    return jax.vmap(log_density, in_axes=(0, 0, None), out_axes=-1)(
        q.loc, q.root, theta
    )


def triangular(q: GaussianMixture) -> GaussianMixture:
    """The same mixture with lower triangular roots, of positive diagonal; deviations as they are."""

    def one(root: Array) -> Array:
        upper = jnp.linalg.qr(root.T, mode="r")
        signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(upper.dtype)
        return jnp.tril(upper.T * signs[None, :])

    return q if q.root.ndim == 2 else q._replace(root=jax.vmap(one)(q.root))
