"""Posteriors of many simulated data sets side by side, and the ranks of the truth among their draws."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, Guide, Model, Params, map_batches, run_program
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.settle import DATA_SETS
from numpyro_tempered.select.alpha.data_sets import fit_data_sets, pick, width_of
from numpyro_tempered.select.alpha.guides import GuideOptions, build_fitter, draw
from numpyro_tempered.select.alpha.mcmc import LARGEST_R_HAT, ChainSampler, MCMCOptions
from numpyro_tempered.select.alpha.model_data import Method
from numpyro_tempered.select.check.simulate import (
    BATCH,
    Simulations,
    tempered_with_data,
)

Values: TypeAlias = dict[str, Array]
# From latents and data to all that is ranked, by name.
Quantities: TypeAlias = Callable[[Values, Values], Values]

# Chains that run side by side wait for the longest of their trajectories.
CHAINS = 50
# The share of divergent transitions above which a chain has not converged.
MOST_DIVERGENT = 0.01


class Counts(NamedTuple):
    """Of K data sets, by quantity ``(K, ...)``.

    Attributes:
        less: Number of draws below the truth.
        equal: Number of draws that equal it.
        is_finite: Whether all draws are finite, ``(K,)``.
    """

    less: Values
    equal: Values
    is_finite: Array


def count(draws: Values, truth: Values) -> Counts:
    """Count the draws below the truth: draws ``(L, ...)``, truth ``(...)``."""
    finite = [jnp.all(jnp.isfinite(value)) for value in draws.values()]
    return Counts(
        {name: jnp.sum(draws[name] < truth[name], axis=0) for name in draws},
        {name: jnp.sum(draws[name] == truth[name], axis=0) for name in draws},
        jnp.all(jnp.stack(finite)),
    )


class Design(NamedTuple):
    """What all posteriors share.

    Attributes:
        data: The model.
        alpha: Power of the likelihood.
        quantities: What is ranked.
        num_draws: Draws from each posterior.
    """

    data: Target
    alpha: float
    quantities: Quantities
    num_draws: int


def fit_guides(
    rng_key: Array,
    design: Design,
    guide: Guide,
    simulations: Simulations,
    options: GuideOptions,
) -> tuple[Counts, np.ndarray]:
    """Fit a guide to all data sets side by side, and rank the truths among draws of the fits.

    Returns:
        The counts, and which fits have converged, ``(K,)``.
    """
    data, names = design.data, list(simulations.data)
    start_key, run_key, draw_key = jax.random.split(rng_key, 3)
    size = len(simulations.log_lik)
    inputs = (
        np.arange(size, dtype=np.int32),
        *(np.asarray(simulations.data[name]) for name in names),
    )

    def model_of(_: Array, *values: Array) -> Model:
        return tempered_with_data(
            data, dict(zip(names, values, strict=True)), design.alpha
        )

    first = pick(inputs, np.arange(width_of(inputs)))
    fitter = build_fitter(
        start_key, data, guide, model_of, first, options, batch=DATA_SETS
    )
    params, converged = fit_data_sets(run_key, fitter, inputs)

    def ranks(keys: Array, params: Params, simulations: Simulations) -> Counts:
        def one(part: tuple[Array, Params, Simulations]) -> Counts:
            key, params, (truth, values, _) = part

            def of_key(key: Array) -> Values:
                return design.quantities(draw(key, data, guide, params)[0], values)

            draws = map_batches(of_key, jax.random.split(key, design.num_draws), BATCH)
            return count(draws, design.quantities(truth, values))

        return jax.lax.map(one, (keys, params, simulations))

    keys = jax.random.split(draw_key, size)
    counts = jax.device_get(run_program(ranks, keys, params, simulations))
    return counts, converged


def sample_chains(
    rng_key: Array,
    design: Design,
    sampler: ChainSampler,
    fields: tuple[str, ...],
    simulations: Simulations,
    thinning: int,
) -> tuple[Counts, np.ndarray]:
    """Sample the posteriors of all data sets, and rank the truths among draws of the chains.

    Args:
        rng_key: Key of the chains.
        design: What all share.
        sampler: Of ``num_draws * thinning`` draws of a chain.
        fields: Extra fields of the kernel.
        simulations: The data sets.
        thinning: One draw of this many is ranked.

    Returns:
        The counts, and which chains have mixed, ``(K,)``.
    """

    def one(part: tuple[Array, Simulations]) -> tuple[Counts, Array, Array]:
        key, (truth, values, _) = part
        chains = sampler.run(
            key, tempered_with_data(design.data, values, design.alpha), None, fields
        )
        latents = {
            name: value[0, thinning - 1 :: thinning]
            for name, value in chains.values.items()
        }
        draws = map_batches(
            lambda draw: design.quantities(draw, values), latents, BATCH
        )
        divergent = jnp.mean(
            jnp.stack(
                [jnp.asarray(field, float) for field in chains.fields.values()] or [0.0]
            )
        )
        return (
            count(draws, design.quantities(truth, values)),
            split_r_hat(chains.values),
            divergent,
        )

    keys = jax.random.split(rng_key, len(simulations.log_lik))
    parts = keys, simulations
    counts, r_hat, divergent = jax.device_get(
        run_program(lambda parts: map_batches(one, parts, CHAINS), parts)
    )
    return counts, (r_hat <= LARGEST_R_HAT) & (divergent <= MOST_DIVERGENT)


def split_r_hat(values: Values) -> Array:
    """The largest R-hat of the halves of one chain, ``(1, S, ...)`` each; constants have none."""
    largest = [jnp.ones(())]
    for value in values.values():
        half = value.shape[1] // 2
        halves = jnp.reshape(value[0, : 2 * half], (2, half, -1))
        within = jnp.mean(jnp.var(halves, axis=1, ddof=1), axis=0)
        between = jnp.var(jnp.mean(halves, axis=1), axis=0, ddof=1)
        # Halves that are stuck apart have an infinite one, and constants none.
        ratio = between / within
        r_hat = jnp.sqrt((half - 1) / half + jnp.where(between > 0, ratio, 0.0))
        largest.append(jnp.max(jnp.where((within > 0) | (between > 0), r_hat, 1.0)))
    return jnp.max(jnp.stack(largest))


def chain_sampler(
    design: Design, factory: Method, num_warmup: int, thinning: int
) -> ChainSampler:
    """One chain for each data set."""
    options = MCMCOptions(num_warmup, design.num_draws * thinning, 1, "sequential")
    return ChainSampler(design.data, factory, options)
