"""Draws from the factors: random numbers of the host, transformed on the device.

Samplers of gammas take seconds to compile; those of NumPy take nothing.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core import Array
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Parameters,
)
from numpyro_tempered.mixtures.factors import Factors


class Noise(NamedTuple):
    """Random numbers of one site.

    Attributes:
        log_gamma: Logarithms of standard gammas, an array; None where the site has none.
        normal: Standard normals; None where it has none.
        key: For a distribution that is neither of these; None otherwise.
    """

    log_gamma: Any = None
    normal: Any = None
    key: Any = None


Noises: TypeAlias = dict[str, Noise]


def seed_of(rng_key: Array) -> list[int]:
    """The numbers of a key of JAX."""
    data = (
        jax.random.key_data(rng_key)
        if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
        else rng_key
    )
    return np.asarray(data).ravel().tolist()


def generator_of(rng_key: Array, number: int) -> np.random.Generator:
    """NumPy's generator from a key of JAX, and the number of its use."""
    return np.random.default_rng([*seed_of(rng_key), number])


def draw_noise(
    rng_key: Array, component: Component, factors: Factors, num_samples: int
) -> tuple[Any, Noises]:
    """Random numbers for S draws of the factors: log weights ``(S, K)``, and those of each site, S first.

    Those of the first components do not depend on how many there are.
    """
    seed = seed_of(rng_key)
    needs, others = (
        _needs(component, factors.posterior, np.float64(value)) for value in (1.0, 2.0)
    )

    def of_site(number: int, name: str) -> Noise:
        # A gamma takes as many random numbers as it needs: what comes behind has a generator of its own.
        of_gammas, of_others = (
            np.random.default_rng([*seed, number + 1, part]) for part in (0, 1)
        )
        log_gamma, normal, key = needs[name]
        if log_gamma is not None and not np.array_equal(
            log_gamma, others[name].log_gamma
        ):
            # It depends on what another site draws: that is known on the device alone.
            log_gamma, normal, key = None, None, np.zeros(2)
        return Noise(
            None
            if log_gamma is None
            else draw_log_gamma(of_gammas, np.asarray(log_gamma), num_samples),
            None
            if normal is None
            else np.moveaxis(
                of_others.standard_normal((*normal.shape, num_samples)), -1, 0
            ),
            None
            if key is None
            else of_others.integers(2**32, size=(num_samples, 2), dtype=np.uint32),
        )

    concentration = np.asarray(factors.concentration)
    # Gammas of small concentrations underflow, their logarithms do not.
    shape = np.where(concentration > 0, concentration, 1.0)
    log_gamma = draw_log_gamma(np.random.default_rng([*seed, 0]), shape, num_samples)
    return weights.log_weights(log_gamma, concentration), {
        name: of_site(number, name) for number, name in enumerate(sorted(needs))
    }


def draw_log_gamma(
    rng: np.random.Generator, shape: np.ndarray, num_samples: int
) -> np.ndarray:
    """Logarithms of S standard gammas of each shape parameter: G(a) is distributed as G(a + 1) U^(1/a)."""
    size, a = (*shape.shape, num_samples), shape[..., None]
    gammas = rng.standard_gamma(a + 1.0, size)
    powers = rng.spawn(1)[0].standard_exponential(size) / a
    return np.moveaxis(np.log(gammas) - powers, -1, 0)


@partial(jax.jit, static_argnames="component")
def _needs(component: Component, posterior: Hyperparameters, value: Array) -> Noises:
    """For each site the shape parameters of its gammas, and arrays of the shape of its normals or keys.

    Args:
        component: The family.
        posterior: Hyperparameters ``(K, ...)``.
        value: What is drawn, or a multiple of the identity.
    """
    needs: Noises = {}

    def record(name: str, fn: dist.Distribution) -> Array:
        normal = jnp.zeros((*fn.batch_shape, *fn.event_shape))
        if isinstance(fn, dist.Normal | dist.MultivariateNormal):
            needs[name] = Noise(normal=normal)
        elif isinstance(fn, dist.Gamma | dist.Dirichlet):
            needs[name] = Noise(jnp.broadcast_to(fn.concentration, normal.shape))
        elif isinstance(fn, dist.Beta):
            pair = fn.concentration1, fn.concentration0
            needs[name] = Noise(
                jnp.stack(
                    [jnp.broadcast_to(each, normal.shape) for each in pair], axis=-1
                )
            )
        elif isinstance(fn, dist.Wishart):
            halves = 0.5 * (
                fn.concentration[..., None] - jnp.arange(fn.event_shape[-1])
            )
            needs[name] = Noise(jnp.broadcast_to(halves, normal.shape[:-1]), normal)
        else:
            needs[name] = Noise(key=jnp.zeros(2, jnp.uint32))
        return value * jnp.broadcast_to(
            jnp.eye(*fn.event_shape) if len(fn.event_shape) > 1 else 1.0, normal.shape
        )

    # NumPyro's checks would compile their parts that do not depend on the arguments, one by one.
    with numpyro.validation_enabled(False):
        component.draw(record, posterior)
    return needs


def parameters_at(
    component: Component, posterior: Hyperparameters, noises: Noises
) -> Parameters:
    """The parameters of one draw, K first, from the random numbers of its sites."""

    def sample(name: str, fn: dist.Distribution) -> Array:
        log_gamma, normal, key = noises[name]
        if key is not None:
            return fn.sample(jax.random.wrap_key_data(key, impl="threefry2x32"))
        if isinstance(fn, dist.Normal):
            return fn.loc + fn.scale * normal
        if isinstance(fn, dist.MultivariateNormal):
            return fn.loc + jnp.einsum(
                "...ij,...j->...i", fn.scale_tril, normal, precision="highest"
            )
        if isinstance(fn, dist.Gamma):
            return jnp.exp(log_gamma) / fn.rate
        if isinstance(fn, dist.Dirichlet):
            return jax.nn.softmax(log_gamma, axis=-1)
        if isinstance(fn, dist.Beta):
            return jax.nn.softmax(log_gamma, axis=-1)[..., 0]
        # Bartlett's decomposition of a Wishart.
        root = jnp.sqrt(2.0 * jnp.exp(log_gamma))[..., None] * jnp.eye(
            fn.event_shape[-1]
        )
        root = jnp.matmul(
            fn.scale_tril, jnp.tril(normal, -1) + root, precision="highest"
        )
        return jnp.matmul(root, jnp.swapaxes(root, -1, -2), precision="highest")

    with numpyro.validation_enabled(False):
        return component.draw(sample, posterior)
