"""Data drawn anew at posterior draws."""

from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.likelihood import get_trace, is_factor, likelihood_sites


def replicate(
    rng_key: Array, model: Model, samples: dict[str, Array], args: tuple, kwargs: dict
) -> dict[str, Array]:
    """Draw each observed site anew from its untempered distribution, once for each posterior draw.

    Sites that depend on observed ones see the data, not their replicates.

    Args:
        rng_key: For the replicates.
        model: NumPyro model with its data, tempered or not.
        samples: Latent values with one leading axis of S draws.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.

    Returns:
        Arrays of shape ``(S, *shape of the data)`` by site; ``numpyro.factor`` sites are left out.

    Raises:
        ValueError: If the distribution of a site has no sampler.
    """

    def one(inputs: tuple[Array, dict[str, Array]]) -> dict[str, Array]:
        key, values = inputs
        trace = get_trace(handlers.substitute(model, data=values), args, kwargs)
        sites = {name: site for name, site in likelihood_sites(trace).items() if not is_factor(site)}
        keys = jax.random.split(key, max(1, len(sites)))
        return {name: _draw(key, name, site) for key, (name, site) in zip(keys, sites.items(), strict=False)}

    keys = jax.random.split(rng_key, len(next(iter(samples.values()))))
    drawn: dict[str, Array] = compiled_map(one, (keys, samples), 64)
    return drawn


def _draw(rng_key: Array, name: str, site: dict[str, Any]) -> Array:
    fn, shape = site["fn"], jnp.shape(site["value"])
    # Data outside of a plate may have more rows than the distribution that they broadcast against.
    batch = jnp.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
    try:
        return (fn if batch == fn.batch_shape else fn.expand(batch)).sample(rng_key)
    except NotImplementedError as error:
        raise ValueError(
            f"posterior_predictive needs to sample from the distribution of site {name!r}, {type(fn).__name__}, "
            f"which cannot be done{f': {error}' if str(error) else '.'}"
        ) from error
