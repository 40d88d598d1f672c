"""Data sets from a model itself: parameters from the prior, and data at them in the place of the observed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.programs import run_program
from numpyro_tempered.core.typing import Array, ArrayLike, Model
from numpyro_tempered.handlers.effects import (
    LOCAL,
    PRIOR_FACTOR,
    Message,
    base_distribution,
)
from numpyro_tempered.handlers.imputation import sites_with_latents
from numpyro_tempered.handlers.likelihood import (
    Site,
    get_trace,
    is_factor,
    is_masked,
    latent_sites,
    likelihood_sites,
    subsamples,
    untempered_log_prob,
    weight,
)
from numpyro_tempered.handlers.robust import BetaLikelihood
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper

# Simulations that are drawn at a time.
BATCH = 64
# No draw of a discrete distribution has so small a log-probability.
IMPOSSIBLE = -1000.0


class Simulations(NamedTuple):
    """K draws of parameters and data from a model.

    Attributes:
        truths: Parameters by latent site, ``(K, ...)`` each.
        data: Data by observed site, likewise.
        log_lik: Log-likelihood of the data at the parameters, ``(K,)``.
    """

    truths: dict[str, Array]
    data: dict[str, Array]
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
            msg["value"] = _with_shape_of_data(msg).sample(key)


def _with_shape_of_data(site: Site) -> dist.Distribution:
    """The distribution of a site, for as many data as it has: outside of a plate they may broadcast."""
    fn, shape = site["fn"], jnp.shape(site["value"])
    batch = jnp.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
    return fn if batch == fn.batch_shape else fn.expand(batch)


def check_model(data: Target) -> None:
    """Refuse a model that cannot simulate its parameters or its data.

    Raises:
        ValueError: With the name of the site, and what to do.
    """
    trace, subject = data.trace, "simulation-based calibration draws"
    if not (observed := likelihood_sites(trace)):
        raise ValueError(
            "the model has no observed site: pass data, of the shape that is to be simulated."
        )
    if not (latents := latent_sites(trace)):
        raise ValueError(
            "the model has no latent site, so there is no posterior to check."
        )
    if params := [
        name for name, site in trace.items() if site["type"] in ("param", "mutable")
    ]:
        raise ValueError(
            f"{subject} all parameters from the prior, and {params} have none: give them one."
        )
    if subsamples(trace):
        raise ValueError(
            f"a plate of the model subsamples, and {subject} whole data sets: leave that out."
        )
    for name, site in latents.items():
        _check_latent(name, site, subject)
    if factors := [name for name, site in trace.items() if site.get(PRIOR_FACTOR)]:
        raise ValueError(
            f"sites {factors} are terms of the prior from which nothing can be drawn: {subject} all."
        )
    for name, site in observed.items():
        _check_observed(name, site, subject)
    if names := sites_with_latents(lambda: data.seeded(*data.args, **data.kwargs)):
        raise ValueError(
            f"the values of the observed sites {names} depend on latents, as where missing data are imputed: "
            f"{subject} them, so observe only the data that are there, obs=x[there]."
        )


def _check_latent(name: str, site: Site, subject: str) -> None:
    """Refuse a latent site whose prior is not what it samples."""
    if isinstance(base_distribution(site["fn"]), dist.ImproperUniform):
        raise ValueError(
            f"the prior of {name!r} is improper, and {subject} from it: give it a proper prior."
        )
    if name in ("chain", "draw"):
        raise ValueError(
            f"latent site {name!r} has the name of a dimension of the result: rename it."
        )
    if site["fn"].support.is_discrete:
        raise ValueError(
            f"latent site {name!r} is discrete and has no ranks: sum it out by nt.marginalize."
        )
    if LOCAL in site or site["scale"] is not None or is_masked(site["fn"]):
        raise ValueError(
            f"the prior of {name!r} is scaled or masked, and {subject} from it as it is: leave that out."
        )
    _check_sampler(name, site["fn"], subject)


def _check_observed(name: str, site: Site, subject: str) -> None:
    """Refuse an observed site whose likelihood is not the density of what it samples."""
    if is_factor(site):
        raise ValueError(
            f"{name!r} is a factor, from which no data can be drawn: observe a distribution."
        )
    if isinstance(base_distribution(site["fn"]), BetaLikelihood):
        raise ValueError(
            f"robust puts a divergence in the place of the likelihood of {name!r}, and {subject} the data from "
            "the likelihood: pass the model without it."
        )
    if is_masked(site["fn"]):
        raise ValueError(
            f"site {name!r} is masked, and {subject} all of its data: observe those that are there."
        )
    if not np.all(np.asarray(weight(site)) == 1.0):
        raise ValueError(
            f"the likelihood of {name!r} has a power or a scale, and {subject} data of weight 1: pass the model "
            "without it, and alpha=."
        )
    if site.get("_control_flow_done"):
        raise ValueError(
            f"site {name!r} is observed in a scan or cond, where its data cannot be replaced: write it as one "
            "site."
        )
    _check_sampler(name, _with_shape_of_data(site), subject)


def _check_sampler(name: str, fn: dist.Distribution, subject: str) -> None:
    try:
        jax.eval_shape(fn.sample, jax.random.key(0))
    except NotImplementedError:
        kind = type(base_distribution(fn)).__name__
        raise ValueError(
            f"{subject} {name!r}, and its distribution {kind} has no sampler."
        ) from None


def with_data(model: Model, values: dict[str, Array]) -> Model:
    """The model with these data in the place of the observed; all that its arguments hold besides stays."""
    return handlers.substitute(model, data=values)


def tempered_with_data(
    data: Target, values: dict[str, Array], alpha: ArrayLike
) -> temper:
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
