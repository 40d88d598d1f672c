"""Reading the likelihood of a model: its sites, their powers, and its loss as a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core import (
    RUNNING,
    Array,
    Model,
    Params,
    Shape,
    compiled_map,
    in_precision,
    is_traced,
    to_host,
)
from numpyro_tempered.handlers.effects import (
    ALPHA,
    PRIOR_FACTOR,
    Message,
    Trace,
    layers,
    read_powers,
)
from numpyro_tempered.handlers.numpyro_private import mask_of
from numpyro_tempered.handlers.observed import check_shape
from numpyro_tempered.handlers.powers import as_factor

Site = Message
T = TypeVar("T")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layout:
    """Names and shapes of the latent sites in a flat vector, in order; a pytree without leaves."""

    sites: tuple[tuple[str, Shape], ...]

    @classmethod
    def of(cls, values: Params) -> "Layout":
        """The layout of values by site, in their order."""
        return cls(tuple((name, jnp.shape(value)) for name, value in values.items()))

    @classmethod
    def of_parts(cls, unpack: Callable[[Array], Params], size: int) -> "Layout":
        """The layout of what a function makes of a flat vector, in its order; nothing is computed."""
        layouts: list[Layout] = []
        # A tree that JAX returns has its names sorted.
        flat = jax.ShapeDtypeStruct((size,), jax.dtypes.canonicalize_dtype(float))
        jax.eval_shape(lambda flat: layouts.append(cls.of(unpack(flat))), flat)
        return layouts[0]

    def split(self, flat: Array) -> Params:
        """The flat vector as values by site."""
        ends = np.cumsum([math.prod(shape) for _, shape in self.sites])
        parts = jnp.split(flat, ends[:-1])
        return {
            name: jnp.reshape(part, shape)
            for (name, shape), part in zip(self.sites, parts, strict=True)
        }


def get_trace(model: Model, args: tuple, kwargs: dict) -> Trace:
    """The untempered trace of ``model``, with powers and prior factors written on its sites."""
    with RUNNING:
        return handlers.trace(read_powers(model)).get_trace(*args, **kwargs)


def likelihood_sites(trace: Trace) -> Trace:
    """The observed sites that are part of the likelihood, of a trace by :func:`get_trace`."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample"
        and site["is_observed"]
        and not site.get(PRIOR_FACTOR)
    }


def observed_sites(trace: Trace) -> Trace:
    """The sites of the likelihood with an observed value, which ``numpyro.factor`` sites have not."""
    return {
        name: site
        for name, site in likelihood_sites(trace).items()
        if not is_factor(site)
    }


def latent_sites(trace: Trace) -> Trace:
    """The latent sample sites of a trace."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def untempered_log_prob(site: Site) -> Array:
    """Log-probability of an observed site without tempering and without scales."""
    return site["fn"].log_prob(site["value"])


def weight(site: Site) -> float:
    """The factor of a site's log-probability: its power times its other scales."""
    return as_factor(site.get(ALPHA, 1.0)) * other_scale(site)


def other_scale(site: Site) -> float:
    """The site's scales without its power, such as N/B of a subsampling plate."""
    return 1.0 if site["scale"] is None else site["scale"]


def power_of(site: Site) -> Any:
    """The power of a site, a float, or in lists where its data have their own."""
    return np.asarray(to_host(site.get(ALPHA, 1.0)), float).tolist()


def common_alpha(trace: Trace) -> float | dict[str, Any]:
    """The power of all likelihood sites; by name where they differ, in lists where data have their own."""
    sites = likelihood_sites(trace)
    alphas = {name: power_of(site) for name, site in sites.items()}
    first = next(iter(alphas.values()), 1.0)
    return (
        first
        if isinstance(first, float) and all(a == first for a in alphas.values())
        else alphas
    )


def scales_beside_alpha(trace: Trace) -> dict[str, float | None]:
    """Scales of likelihood sites beside alpha, where they are not 1; None where they differ within a site."""
    scales = {
        name: np.unique(to_host(other_scale(site)))
        for name, site in likelihood_sites(trace).items()
    }
    return {
        name: float(scale[0]) if len(scale) == 1 else None
        for name, scale in scales.items()
        if not np.array_equal(scale, [1.0])
    }


# Distributions whose log-density has a kink at their location, where no derivative finds the curvature.
KINKED = dist.Laplace | dist.AsymmetricLaplace | dist.AsymmetricLaplaceQuantile


def is_made_of(fn: dist.Distribution, kinds: type | UnionType) -> bool:
    """Whether a distribution is of these kinds or made of one: masked, transformed, truncated, a mixture."""
    parts = [
        getattr(fn, name, None) for name in ("base_dist", "component_distribution")
    ]
    parts += getattr(fn, "component_distributions", ())
    return isinstance(fn, kinds) or any(
        is_made_of(part, kinds) for part in parts if part is not None
    )


def has_kink(fn: dist.Distribution) -> bool:
    """Whether a distribution is one of Laplace's or made of one."""
    return is_made_of(fn, KINKED)


def log_prob_of_each(site: Site) -> Array:
    """The untempered log-probabilities of a site, one for each of its data.

    Raises:
        ValueError: If values and distribution broadcast against each other to more.
    """
    check_shape(site)
    return untempered_log_prob(site)


def check_values(site: Site) -> None:
    """Refuse values that do not fit the distribution of a site, without computing anything.

    Raises:
        ValueError: If they broadcast against each other to more, or not at all.
    """
    check_shape(site)
    jax.eval_shape(lambda: untempered_log_prob(site))


def replicate(
    rng_key: Array, model: Model, samples: Params, args: tuple, kwargs: dict
) -> Params:
    """Draw replicates of each observed site from its untempered distribution, one for each posterior draw.

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

    def one(inputs: tuple[Array, Params]) -> Params:
        key, values = inputs
        trace = get_trace(handlers.substitute(model, data=values), args, kwargs)
        sites = observed_sites(trace)
        keys = jax.random.split(key, max(1, len(sites)))
        return {
            name: _draw(key, name, site)
            for key, (name, site) in zip(keys, sites.items(), strict=False)
        }

    keys = jax.random.split(rng_key, len(next(iter(samples.values()))))
    return compiled_map(one, (keys, samples), 64)


def _draw(rng_key: Array, name: str, site: Site) -> Array:
    try:
        return with_shape_of_data(site).sample(rng_key)
    except NotImplementedError as error:
        raise ValueError(
            f"posterior_predictive needs to sample from the distribution of site {name!r}, "
            f"{type(site['fn']).__name__}, which cannot be done{f': {error}' if str(error) else '.'}"
        ) from error


def with_shape_of_data(site: Site) -> dist.Distribution:
    """The distribution of a site, for as many data as it has: outside of a plate they may broadcast."""
    fn, shape = site["fn"], jnp.shape(site["value"])
    batch = jnp.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
    return fn if batch == fn.batch_shape else fn.expand(batch)


def is_factor(site: Site) -> bool:
    """Whether a site is a ``numpyro.factor``, which has no observed value."""
    return site["value"] is not None and jnp.size(site["value"]) == 0


def is_masked(fn: dist.Distribution) -> bool:
    """Whether a distribution is masked, perhaps under others."""
    return any(
        isinstance(layer, dist.MaskedDistribution) for layer in layers(fn, "base_dist")
    )


def mask_of_data(fn: dist.Distribution) -> np.ndarray:
    """Which log-probabilities of a distribution count, over its batch shape; all where jax traces the mask."""
    mask: Any = np.array(True)
    for layer in reversed(layers(fn, "base_dist")):
        if isinstance(layer, dist.Independent):
            inner = np.broadcast_to(mask, layer.base_dist.batch_shape)
            events = layer.reinterpreted_batch_ndims
            mask = inner.any(axis=tuple(range(-events, 0)))
        elif isinstance(layer, dist.MaskedDistribution) and not is_traced(
            mask_of(layer)
        ):
            mask = np.logical_and(mask, to_host(mask_of(layer)))
    return mask


def counts_of_data(trace: Trace) -> dict[str, np.ndarray]:
    """What each datum of a site counts, over its batch shape: its scale beside the power, 0 under a mask."""
    counts = {}
    for name, site in likelihood_sites(trace).items():
        each = np.where(mask_of_data(site["fn"]), to_host(other_scale(site)), 0.0)
        counts[name] = np.broadcast_to(each, site["fn"].batch_shape)
    return counts


def observed_values(trace: Trace) -> Params:
    """The observed values of a trace by site, factors left out."""
    return {name: site["value"] for name, site in observed_sites(trace).items()}


def subsamples(trace: Trace) -> bool:
    """Whether a plate of the trace holds a part of its data."""
    return any(map(is_subsampled, trace.values()))


def is_subsampled(site: Site) -> bool:
    """Whether a site is a plate that holds a part of its data."""
    return site["type"] == "plate" and site["args"][1] not in (None, site["args"][0])


def plain_arrays(tree: T) -> T:
    """The arguments of a model with tables as arrays, and integers that JAX would wrap around as floats."""

    def plain(leaf: Any) -> Any:
        leaf = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
        return (
            in_precision(leaf, "an argument of the model")
            if isinstance(leaf, np.ndarray)
            else leaf
        )

    return jax.tree.map(plain, tree)
