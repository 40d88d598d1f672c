"""The Gaussian that an online guide starts at: the prior on the unconstrained scale."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core import Array, Model, Params, check_numbers, run_program
from numpyro_tempered.core.jax_private import dce_jaxpr
from numpyro_tempered.gaussian.families.mean_field import MeanField
from numpyro_tempered.handlers.effects import base_distribution
from numpyro_tempered.handlers.likelihood import Site, latent_sites

NUM_PRIOR_DRAWS = 10_000


class PriorMoments(NamedTuple):
    """Moments of a model's prior on the unconstrained scale.

    Attributes:
        sites: Mean and standard deviation by latent site.
        draws: Draws ``(S, ...)`` of the sites whose prior is not Normal with fixed parameters.
        parents: Names of the other sites that each of these depends on.
        parent_draws: Draws of those.
    """

    sites: dict[str, MeanField]
    draws: Params
    parents: dict[str, list[str]]
    parent_draws: Params


def prior_moments(
    rng_key: Array, model: Model, args: tuple, kwargs: dict
) -> PriorMoments:
    """Moments of each latent's prior on the unconstrained scale.

    Args:
        rng_key: For draws from priors without a closed form.
        model: NumPyro model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: If a prior is improper, masked, or has no variance.
    """

    def draw(key: Array) -> dict[str, _Description]:
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        sites = latent_sites(trace)
        kinds.update(
            {
                name: type(base_distribution(site["fn"])).__name__
                for name, site in sites.items()
            }
        )
        return {name: _describe(site) for name, site in sites.items()}

    kinds: dict[str, str] = {}

    try:
        two = run_program(lambda key: jax.vmap(draw)(jax.random.split(key, 2)), rng_key)
    except NotImplementedError as error:
        raise ValueError(
            "a prior cannot be sampled (is it improper?): the online rules start at the prior."
        ) from error
    for name, (_, _, variance) in two.items():
        one, other = np.asarray(variance)
        # What depends on other latents is matched by draws.
        if not np.all(np.isfinite(one)) and np.array_equal(one, other, equal_nan=True):
            raise ValueError(
                f"the prior of {name!r}, {kinds[name]}, has no finite variance: the online rules start at a "
                "Gaussian. Give it a prior with two moments."
            )
    moments = {
        name: jax.tree.map(lambda leaf: np.asarray(leaf)[0], pair)
        for name, (_, pair, _) in two.items()
        if _is_constant(pair)
    }
    matched = [name for name in two if name not in moments]
    draws: Params = {}
    parents: dict[str, list[str]] = {}
    if matched:
        exact = {name: two[name].value[0] for name in two if name in moments}
        parents = _parents(rng_key, model, args, kwargs, matched, exact)
        needed = {*matched, *(name for names in parents.values() for name in names)}
        keys = jax.random.split(rng_key, NUM_PRIOR_DRAWS)

        def values(key: Array) -> Params:
            return {
                name: value for name, (value, *_) in draw(key).items() if name in needed
            }

        draws = jax.jit(lambda keys: jax.lax.map(values, keys, batch_size=1000))(keys)
        for name in matched:
            moments[name] = MeanField(jnp.mean(draws[name], 0), jnp.std(draws[name], 0))
            check_numbers(
                moments[name].scale,
                f"the standard deviation of the prior of {name!r} on the unconstrained scale",
                "(0, inf)",
                hint="The online rules start at the prior.",
            )
    parent_draws = {name: draws.pop(name) for name in set(draws) - set(matched)}
    return PriorMoments(moments, draws, parents, parent_draws)


def _parents(
    rng_key: Array,
    model: Model,
    args: tuple,
    kwargs: dict,
    children: list[str],
    others: Params,
) -> dict[str, list[str]]:
    """Which of the ``others`` each of the children depends on, by the traced program."""

    def values(others: Params) -> Params:
        substituted = handlers.substitute(handlers.seed(model, rng_key), data=others)
        trace = handlers.trace(substituted).get_trace(*args, **kwargs)
        return {name: trace[name]["value"] for name in children}

    program = jax.make_jaxpr(values)(others)
    places = range(len(children))
    used = [dce_jaxpr(program.jaxpr, [i == j for j in places])[1] for i in places]
    return {
        child: list(itertools.compress(sorted(others), flags))
        for child, flags in zip(sorted(children), used, strict=True)
    }


class _Description(NamedTuple):
    value: Array
    moments: MeanField
    variance: Array


def _describe(site: Site) -> _Description:
    """A draw on the unconstrained scale, the Normal parameters, NaN of another distribution, and the variance."""
    fn, value = site["fn"], site["value"]
    base = base_distribution(fn)
    variance = (
        _variance_of(base) if base.support is dist.constraints.real else jnp.ones(())
    )
    if isinstance(unindexed(fn), dist.MaskedDistribution):
        raise ValueError(
            f"the prior of {site['name']!r} is masked: a guide cannot start at it."
        )
    unconstrained = dist.biject_to(fn.support).inv(value)
    if not isinstance(base, dist.Normal):
        nan = jnp.full_like(unconstrained, jnp.nan)
        return _Description(unconstrained, MeanField(nan, nan), variance)
    # Normal(0, 1) has integer parameters and floating draws.
    loc, scale = (
        jnp.broadcast_to(p, value.shape).astype(value.dtype)
        for p in (base.loc, base.scale)
    )
    return _Description(unconstrained, MeanField(loc, scale), variance)


def unindexed(fn: dist.Distribution) -> dist.Distribution:
    """The distribution under expansions and reinterpreted batches."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def _variance_of(fn: dist.Distribution) -> Array:
    """The variance of a distribution, 1 where it does not tell."""
    try:
        return jnp.asarray(fn.variance)
    except NotImplementedError:
        return jnp.ones(())


def _is_constant(pair: MeanField) -> bool:
    """Whether the parameters agree at two draws, so that they do not depend on other latents."""
    return all(np.array_equal(*np.asarray(leaf)) for leaf in pair)
