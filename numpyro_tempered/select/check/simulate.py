"""Data sets from a model itself: parameters from the prior, and data at them in the place of the observed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Model,
    Params,
    map_batches,
    run_program,
)
from numpyro_tempered.handlers.effects import Message
from numpyro_tempered.handlers.imputation import sites_with_latents
from numpyro_tempered.handlers.likelihood import (
    Site,
    get_trace,
    untempered_log_prob,
    with_shape_of_data,
)
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper

# Simulations that are drawn at a time.
BATCH = 64
# No draw of a discrete distribution has so small a log-probability.
IMPOSSIBLE = -1000.0
_ALL = ", and simulation-based calibration draws all parameters and data: "
_WEIGHT = f"{_ALL}pass the model without it, and alpha=."
_NEEDS = {
    "data": ": pass data, of the shape that is to be simulated.",
    "latents": ", so there is no posterior to check.",
    "params": f"{_ALL}give them a prior.",
    "states": f"{_ALL}take a network without.",
    "plates": f"{_ALL}leave subsample_size out.",
    "proper": f"{_ALL}give it a proper prior.",
    "chain and draw": "",
    "continuous": " and have no ranks: sum them out by nt.marginalize.",
    "plain priors": f"{_ALL}leave that out.",
    "no prior terms": f", from which nothing can be drawn{_ALL}leave them out.",
    "no factors": f"{_ALL}observe a distribution.",
    "densities": _WEIGHT,
    "no masks": f"{_ALL}observe those that are there.",
    "no weights": _WEIGHT,
    "no scan": ", where its data cannot be replaced: write it as one site.",
    "samplers": f"{_ALL}take another, which has one.",
}


class Simulations(NamedTuple):
    """K draws of parameters and data from a model.

    Attributes:
        truths: Parameters by latent site, ``(K, ...)`` each.
        data: Data by observed site, likewise.
        log_lik: Log-likelihood of the data at the parameters, ``(K,)``.
    """

    truths: Params
    data: Params
    log_lik: Array


class redraw(Messenger):
    """A model whose observed sites take draws from their distributions for their values."""

    def __init__(self, fn: Model, rng_key: Array, names: list[str]) -> None:
        self.rng_key, self.names = rng_key, names
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        """Draw a site."""
        if msg["type"] == "sample" and msg["is_observed"] and msg["name"] in self.names:
            self.rng_key, key = jax.random.split(self.rng_key)
            msg["value"] = with_shape_of_data(msg).sample(key)


def check_model(data: Target) -> None:
    """Refuse a model that cannot simulate its parameters or its data.

    Raises:
        ValueError: With the name of the site, and what to do.
    """
    require(data.trace, _NEEDS)
    if names := sites_with_latents(lambda: data.seeded(*data.args, **data.kwargs)):
        raise ValueError(
            f"the values of the observed sites {names} depend on latents, as where missing data are imputed: "
            "simulation-based calibration draws them, so observe only the data that are there, obs=x[there]."
        )


def with_data(model: Model, values: Params) -> Model:
    """The model with these data in the place of the observed; all that its arguments hold besides stays."""
    return handlers.substitute(model, data=values)


def tempered_with_data(data: Target, values: Params, alpha: ArrayLike) -> temper:
    """The tempered model with simulated data."""
    return temper(with_data(data.model, values), alpha)


def simulate(rng_key: Array, data: Target, num_simulations: int) -> Simulations:
    """Draw parameters from the prior and data at them.

    Raises:
        ValueError: If some of them are not finite.
    """
    names = list(data.observed)

    def one(key: Array) -> Simulations:
        prior_key, data_key = jax.random.split(key)
        model = handlers.seed(redraw(data.model, data_key, names), prior_key)
        trace = get_trace(model, data.args, data.kwargs)
        truths = {name: trace[name]["value"] for name in data.latents}
        values = {name: trace[name]["value"] for name in names}
        log_lik = data.log_lik({**truths, **values})
        possible = [_is_possible(trace[name]) for name in names]
        return Simulations(
            truths, values, jnp.where(jnp.all(jnp.stack(possible)), log_lik, jnp.nan)
        )

    keys = jax.random.split(rng_key, num_simulations)
    simulations = run_program(lambda keys: map_batches(one, keys, BATCH), keys)
    _check_finite(simulations)
    return simulations


def _is_possible(site: Site) -> Array:
    """Whether counts are what their distribution draws: samplers end at the largest integer, and say nothing."""
    value = site["value"]
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.array(True)
    return jnp.all(value < jnp.iinfo(value.dtype).max) & jnp.all(
        untempered_log_prob(site) > IMPOSSIBLE
    )


def _check_finite(simulations: Simulations) -> None:
    parts = {**simulations.truths, **simulations.data, "log_lik": simulations.log_lik}
    for name, value in parts.items():
        rows = np.reshape(np.asarray(value), (len(value), -1))
        bad = int(np.sum(~np.all(np.isfinite(rows), axis=1)))
        if bad:
            what = "the log-likelihood" if name == "log_lik" else f"site {name!r}"
            raise ValueError(
                f"in {bad} of {len(value)} simulations from the prior {what} is not finite, or counts have no "
                "probability that numbers can hold: the prior reaches values without data, as exp of a wide "
                "Normal does. Give it a prior from which data could come."
            )
