"""Weights of single data in the likelihood of a model, and the bootstrap's, which are counts."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from numpyro.primitives import Messenger

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import ALPHA, Message, plates_of

T = TypeVar("T")
# Most numbers in a batch of data sets: 256 MiB in float32.
_BATCH = 2**26


class weigh_data(Messenger):
    """Multiply the log-likelihood of each datum by a weight, 0 to leave it out; around a tempered model.

    Outside of :class:`temper`, whose mark tells likelihood from prior factors.
    """

    def __init__(self, fn: Model, weights: Array, dim: int) -> None:
        self.weights = jnp.reshape(weights, (*jnp.shape(weights), *(1,) * (-1 - dim)))
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        """Scale a site of the likelihood."""
        if msg["type"] != "sample" or not msg["is_observed"] or ALPHA not in msg:
            return
        # What is left out may be impossible, and 0 times minus infinity is NaN.
        msg["fn"] = msg["fn"].mask(self.weights != 0)
        weights = self.weights
        msg["scale"] = weights if msg["scale"] is None else weights * msg["scale"]


def find_data(trace: likelihood.Trace, plate: str | None) -> tuple[int, int]:
    """The number of data of a model, and the batch dimension along which they lie.

    Raises:
        ValueError: If the observed sites have no plate in common and are not vectors of one length, have several
            and none is named, lie in a scan, or latents lie in the plate.
    """
    sites = likelihood.likelihood_sites(trace)
    shapes = {}
    for name, site in sites.items():
        shapes[name] = jax.eval_shape(partial(likelihood.log_prob_of_each, site)).shape
        if site.get("_control_flow_done"):
            raise ValueError(
                f"observed site {name!r} is in a scan, whose data are not independent rows: none can be left "
                "out. Take alpha = 1/2, the value of theory_default()."
            )
    common = set.intersection(*(plates_of(site) for site in sites.values()))
    if plate is not None and plate not in common:
        raise ValueError(
            f"plate {plate!r} does not hold all observed sites {list(sites)}; plates that do: {sorted(common)}."
        )
    if plate is None and len(common) > 1:
        raise ValueError(
            f"the data lie in several plates, {sorted(common)}: name that of the data by plate=."
        )
    if not common:
        shape, *others = set(shapes.values())
        if others or len(shape) != 1:
            raise ValueError(
                f"the observed sites have log-probabilities of shapes {shapes} and no plate in common: put all "
                "in one plate of rows. nt.temper(model, 1.0, factors=False) makes factors terms of the prior."
            )
        return shape[0], -1
    name = plate or common.pop()
    frames = {
        (f.size, f.dim)
        for site in sites.values()
        for f in site["cond_indep_stack"]
        if f.name == name
    }
    if len(frames) > 1:
        raise ValueError(
            f"plate {name!r} has several sizes and dimensions, {sorted(frames)}: give it one dim=."
        )
    ((size, dim),) = frames
    local = [
        latent
        for latent, site in likelihood.latent_sites(trace).items()
        if name in plates_of(site)
    ]
    if local:
        raise ValueError(
            f"latent sites {local} have a value for each row of plate {name!r}, which a row left out cannot "
            "tell: integrate them out (discrete ones by nt.marginalize), or name another plate."
        )
    return size, dim


def log_lik_of_each(trace: likelihood.Trace, num_data: int, dim: int) -> Array:
    """The log-likelihood of each datum, ``(num_data,)``, summed over the other dimensions and the sites."""
    terms = []
    for site in likelihood.likelihood_sites(trace).values():
        value = likelihood.untempered_log_prob(site)
        shape = jnp.broadcast_shapes(value.shape, (num_data, *(1,) * (-1 - dim)))
        if likelihood.is_factor(site) or value.ndim >= -dim:
            value = jnp.broadcast_to(value, shape)
        value = jnp.moveaxis(value, dim, 0)
        terms.append(jnp.sum(jnp.reshape(value, (num_data, -1)), axis=1))
    return sum(terms[1:], start=terms[0])


@partial(jax.jit, static_argnums=(1, 2))
def resamples(rng_key: Array, num_bootstrap: int, num_data: int) -> Array:
    """How often each datum is in each of B multinomial resamples of n data, ``(B, n)``."""

    def count(key: Array) -> Array:
        rows = jax.random.randint(key, (num_data,), 0, num_data)
        return jnp.zeros(num_data).at[rows].add(1.0)

    return jax.vmap(count)(jax.random.split(rng_key, num_bootstrap))


def over_resamples(function: Callable[[Array], T], counts: Array, dim: int) -> T:
    """A function of the counts ``(n,)`` of each resample, in batches that fit into memory."""
    num, n = counts.shape
    batch = max(1, _BATCH // (n * (dim + 1)))
    return (
        jax.vmap(function)(counts)
        if batch >= num
        else map_batches(function, counts, batch)
    )
