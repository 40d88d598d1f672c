"""A tempered posterior: a model at its data, read once."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.initialization import init_to_feasible
from numpyro.infer.util import (
    constrain_fn,
    log_density,
    potential_energy,
    transform_fn,
    unconstrain_fn,
)

from numpyro_tempered.core import Array, DataSummary, Model, Params, summarise_observed
from numpyro_tempered.gaussian.expectations.differentiate import which_depend
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import ALPHA, MADE_INSIDE, PRIOR_FACTOR
from numpyro_tempered.handlers.likelihood import Layout, Site, Trace
from numpyro_tempered.handlers.observed import LATENT_POWER
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.robust import divergences
from numpyro_tempered.handlers.rows import all_rows
from numpyro_tempered.handlers.temper import temper

Values = TypeVar("Values")
_FIXED_SUPPORTS = (
    constraints.real,
    constraints.positive,
    constraints.unit_interval,
    constraints.real_vector,
    constraints.simplex,
    constraints.corr_cholesky,
    constraints.lower_cholesky,
)


class Target:
    """A model at its data, whose posterior is wanted.

    Values of latents are dictionaries by site in the units of the model; z is the flat vector of all latents on
    the unconstrained scale, ``(d,)``, in the order of the sites' names.

    Args:
        model: The model, tempered or not, with fitted params substituted.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        rng_key: For what the model draws besides its latents; None where it draws nothing.
        values: Values of its latents, for their shapes and supports; by default draws of the prior, or feasible
            values where it cannot be drawn.

    Attributes:
        trace: The untempered trace at these values, with powers and prior factors written on its sites.
        prior_is_exact: Whether draws of the latent sites are draws of the prior.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        ...     numpyro.sample("y", dist.Normal(0.0, scale), obs=y)
        >>> target = nt.results.Target(nt.temper(model, alpha=0.5), (jnp.ones(3),), {}, jax.random.key(0))
        >>> list(target.latents), target.constrain(jnp.zeros(1))
        (['scale'], {'scale': Array(1., dtype=float32)})
    """

    def __init__(
        self,
        model: Any,
        args: tuple,
        kwargs: dict,
        rng_key: Array | None = None,
        values: Params | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.rng_key, is_drawn = rng_key, values is None
        try:
            self.trace = self.trace_at({} if values is None else values)
        except NotImplementedError:
            feasible = handlers.substitute(self.seeded, substitute_fn=init_to_feasible)
            self.trace, is_drawn = likelihood.get_trace(feasible, args, kwargs), False
        # Scaled or masked priors, and those with terms of their own, are not what their sites sample.
        terms = any(site.get(PRIOR_FACTOR) for site in self.trace.values())
        plain = all(
            site["scale"] is None and not likelihood.is_masked(site["fn"])
            for site in self.latents.values()
        )
        self.prior_is_exact = is_drawn and plain and not terms

    @property
    def seeded(self) -> Model:
        """The model with its key."""
        return (
            self.model
            if self.rng_key is None
            else handlers.seed(self.model, self.rng_key)
        )

    @property
    def latents(self) -> dict[str, Site]:
        """The latent sites by name, in the order of the model."""
        return likelihood.latent_sites(self.trace)

    @property
    def coordinates(self) -> dict[str, Site]:
        """The same in the order of z."""
        return dict(sorted(self.latents.items()))

    @property
    def values(self) -> Params:
        """Values of the latents: those of the trace."""
        return {name: site["value"] for name, site in self.latents.items()}

    @property
    def observed(self) -> Params:
        """Observed values by site."""
        return likelihood.observed_values(self.trace)

    def summarise_data(self, observed: Params) -> DataSummary:
        """What :func:`compare` knows of observed values: where a plate draws a part of them, of the whole."""
        trace = self.trace
        subsampled = all_rows(trace, (self.args, self.kwargs))
        counts = likelihood.counts_of_data(trace)
        return summarise_observed({**observed, **subsampled})._replace(
            divergences=divergences(trace),
            counts={k: v for k, v in counts.items() if k not in subsampled},
        )

    @property
    def layout(self) -> Layout:
        """Names and shapes of the sites in z."""
        return Layout(
            tuple(
                (
                    name,
                    biject_to(site["fn"].support).inverse_shape(
                        jnp.shape(site["value"])
                    ),
                )
                for name, site in self.coordinates.items()
            )
        )

    @property
    def discrete(self) -> list[str]:
        """Names of the discrete latents."""
        latents = self.latents.items()
        return [name for name, site in latents if site["fn"].support.is_discrete]

    def trace_at(self, values: Params) -> Trace:
        """The untempered trace at values of the latents."""
        model = handlers.substitute(self.seeded, data=values)
        return likelihood.get_trace(model, self.args, self.kwargs)

    def log_lik(self, values: Params) -> Array:
        """Log-likelihood of all data, as the model weighs it: powers and scales included."""
        self._check_values(values)
        return _weighted_log_lik(self.trace_at(values))

    def log_joint(self, values: Params) -> Array:
        """The log of the joint density at values of the latents, every constant included."""
        self._check_values(values)
        return log_density(self.seeded, self.args, self.kwargs, values)[0]

    def potential(self, z: Array) -> Array:
        """Minus the log of the joint density of z, whose density has the volume of the change of coordinates."""
        at = self.layout.split(z)
        return potential_energy(self.seeded, self.args, self.kwargs, at)

    def prior_potential(self, z: Array) -> Array:
        """Minus the log-density of the prior of z, prior factors included."""
        at, model = self.layout.split(z), temper(self.seeded, 0.0)
        return potential_energy(model, self.args, self.kwargs, at)

    def _check_values(self, values: Params) -> None:
        """Refuse to draw what is missing."""
        if missing := sorted(set(self.latents) - set(values)):
            raise ValueError(
                f"values of the latents {sorted(self.latents)} are needed, and {missing} are missing."
            )

    @functools.cached_property
    def moving(self) -> list[str]:
        """The latents whose support depends on others."""
        return moving_supports(self.latents, self.trace_at, self.values)

    @property
    def _transforms(self) -> dict[str, Any]:
        """From the unconstrained scale to the support, by latent site."""
        return {
            name: biject_to(site["fn"].support)
            for name, site in self.latents.items()
            if not site["fn"].support.is_discrete
        }

    def constrain(self, z: Array) -> Params:
        """Values of the latents at z."""
        return self.constrain_sites(self.layout.split(z))

    def constrain_sites(self, unconstrained: Params) -> Params:
        """Values of the latents at unconstrained values by site."""
        if self.moving:
            return constrain_fn(self.seeded, self.args, self.kwargs, unconstrained)
        return transform_fn(self._transforms, unconstrained)

    def unconstrain(self, values: Params) -> Params:
        """The values on the unconstrained scale, by site."""
        if self.moving:
            return unconstrain_fn(self.seeded, self.args, self.kwargs, values)
        return transform_fn(self._transforms, values, invert=True)

    def flatten(self, values: Params) -> Array:
        """Z at values of the latents."""
        return ravel_pytree(self.unconstrain(values))[0]

    def draw_prior(self, rng_key: Array) -> tuple[Params, Array]:
        """Values of the latents drawn from the prior, and their log-likelihood."""
        model = handlers.seed(self.model, rng_key)
        trace = likelihood.get_trace(model, self.args, self.kwargs)
        values = {name: trace[name]["value"] for name in self.latents}
        return values, _weighted_log_lik(trace)


def moving_supports(
    latents: Trace, trace_at: Callable[[Values], Trace], at: Values
) -> list[str]:
    """The latents whose support depends on values of others, or of params, by the traced program.

    Args:
        latents: The latent sites of the model.
        trace_at: Its trace at values.
        at: Such values.
    """
    # The support of most distributions is one object, whatever their parameters.
    varying = [
        name
        for name, site in latents.items()
        if not (site["fn"].is_discrete or site["fn"].support in _FIXED_SUPPORTS)
    ]

    def supports(at: Values) -> Params:
        of_site = likelihood.latent_sites(trace_at(at))
        return {
            name: biject_to(of_site[name]["fn"].support)(_origin(latents[name]))
            for name in varying
        }

    if not varying:
        return []
    return [name for name, flag in which_depend(supports, at).items() if flag]


def _origin(site: likelihood.Site) -> Array:
    """The origin of the unconstrained scale of a site."""
    value = jnp.asarray(site["value"], float)
    return jnp.zeros_like(biject_to(site["fn"].support).inv(value))


def check_supports(
    trace: Trace, trace_at: Callable[[Values], Trace], at: Values
) -> None:
    """Refuse latents with :func:`moving_supports`, since NumPyro's guides keep the support of their set-up.

    Refuse a power that is computed from latents or params too.

    Raises:
        ValueError: With the sites, and how to write them.
    """
    inside = [name for name, site in trace.items() if site.get(MADE_INSIDE)]

    def powers(at: Values) -> Params:
        trace = trace_at(at)
        return {name: jnp.asarray(trace[name][ALPHA], float) for name in inside}

    if inside and any(which_depend(powers, at).values()):
        raise ValueError(LATENT_POWER.format("latents or params"))
    if moving := moving_supports(likelihood.latent_sites(trace), trace_at, at):
        raise ValueError(
            f"the support of latent {moving[0]!r} depends on other latents or params, and the guide would keep "
            "that of its set-up: sample it on a fixed scale, such as a share u of the unit interval, and compute "
            "it from u, low + (high - low) * u; or run NUTS."
        )


def refuse_moving_supports(
    model: Model, trace: Trace, args: tuple, kwargs: dict
) -> None:
    """:func:`check_supports` of a model whose latents have no flat vector, with its trace."""
    values = {
        name: biject_to(site["fn"].support).inv(site["value"])
        for name, site in likelihood.latent_sites(trace).items()
        if not site["fn"].is_discrete
    }
    params: Params = {
        name: jnp.asarray(site["value"])
        for name, site in trace.items()
        if site["type"] == "param" and isinstance(site["value"], jax.Array | float)
    }

    def trace_at(at: tuple[Params, Params]) -> Trace:
        with handlers.block(), handlers.seed(rng_seed=0):
            at_params = handlers.substitute(model, data=at[1])
            return trace_unconstrained(at_params, at[0], args, kwargs)

    check_supports(trace, trace_at, (values, params))


def trace_unconstrained(
    model: Model, values: Params, args: tuple, kwargs: dict
) -> Trace:
    """A trace of the model at unconstrained values of its latent sites."""

    def constrain(site: Site) -> Array | None:
        if site["type"] != "sample" or site["name"] not in values:
            return None
        # The site's own support, which may depend on other latents.
        return biject_to(site["fn"].support)(values[site["name"]])

    return likelihood.get_trace(
        handlers.substitute(model, substitute_fn=constrain), args, kwargs
    )


def _weighted_log_lik(trace: Trace) -> Array:
    terms = []
    for site in likelihood.likelihood_sites(trace).values():
        power = jnp.asarray(likelihood.weight(site))
        value = power * likelihood.untempered_log_prob(site)
        # A power of 0 leaves a likelihood of 0 out.
        terms.append(jnp.sum(jnp.where(power > 0, value, 0.0)))
    return jnp.sum(jnp.stack(terms))


_DENSITY = {
    "plates": ", and weights need all data: leave subsample_size out in the call, or make the model without it.",
    "support": "",
    "continuous": "",
    "global": ": there is no joint density that the weights could compare with.",
}


def check_density(
    target: Target, values: Params | None = None, *, smooth: bool = False
) -> None:
    """Refuse a model without one joint density of its latents.

    Args:
        target: The model at its data.
        values: A draw of the latents, whose sites and shapes must be the model's.
        smooth: Whether the density has a curvature, and so no atoms.

    Raises:
        ValueError: With the site, and what to do.
    """
    latents = target.latents
    if values is not None and set(values) != set(latents):
        raise ValueError(
            f"the latent sites of the model are {sorted(latents)}, got draws of {sorted(values)}."
        )
    require(target.trace, _DENSITY | ({"no atoms": ""} if smooth else {}))
    for name, site in latents.items():
        shape = np.shape(site["value"])
        if site["fn"].shape() != shape:
            raise ValueError(
                f"a draw of {name!r} has shape {site['fn'].shape()} in the model, got draws of {shape}."
            )
