"""A model with its data, as both methods of a tempered path need it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.initialization import init_to_feasible
from numpyro.infer.util import unconstrain_fn

from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.effects import LOCAL, PRIOR_FACTOR, base_distribution
from numpyro_tempered.handlers.likelihood import (
    Trace,
    get_trace,
    is_masked,
    latent_sites,
    likelihood_sites,
    observed_values,
    subsamples,
    untempered_log_prob,
    weight,
)
from numpyro_tempered.report.arviz import Dims


class Path(NamedTuple):
    """What a method finds along a path; axes ``(chain, draw, alpha, ...)``, or ``(alpha, ...)``.

    Attributes:
        columns: The table, ``(alpha,)`` each.
        values: Draws by latent site.
        stats: Of each draw: ``log_lik``, and ``diverging`` where the kernel knows.
        variational: Losses ``(alpha, step)`` of SVI; empty for MCMC.
    """

    columns: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    variational: dict[str, np.ndarray]


class Problem:
    """A model with its data: what both methods need of it.

    ``model`` counts its runs, so that a guide or kernel on another model is found out.
    """

    def __init__(self, model: Model, rng_key: Array, args: tuple, kwargs: dict) -> None:
        self.runs = 0
        self.original = model
        self.args, self.kwargs = args, kwargs
        self.rng_key = rng_key

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            return model(*args, **kwargs)

        self.model = counted
        self.trace, sampled = self._first_trace()
        # Scaled or masked priors, and those with terms of their own, are not what their sites sample.
        self.prior_is_exact = (
            sampled
            and not any(site.get(PRIOR_FACTOR) for site in self.trace.values())
            and not any(
                site["scale"] is not None or is_masked(site["fn"]) for site in latent_sites(self.trace).values()
            )
        )
        self.latents = list(latent_sites(self.trace))
        self.observed = observed_values(self.trace)

    def _first_trace(self) -> tuple[Trace, bool]:
        seeded = handlers.seed(self.model, self.rng_key)
        try:
            return get_trace(seeded, self.args, self.kwargs), True
        except NotImplementedError:
            feasible = handlers.substitute(seeded, substitute_fn=init_to_feasible)
            return get_trace(feasible, self.args, self.kwargs), False

    def check(self, dims: Dims | None) -> None:
        """Raise for a model that has no path."""
        if not likelihood_sites(self.trace):
            raise ValueError("the model has no observed site: pass the data that it conditions on.")
        if not self.latents:
            raise ValueError("the model has no latent site, so there is no posterior to follow.")
        params = [name for name, site in self.trace.items() if site["type"] == "param"]
        if params:
            raise ValueError(
                f"the model has params {params}, and would be another model at each alpha: give them a prior."
            )
        if subsamples(self.trace):
            raise ValueError("a plate of the model subsamples: the path needs the log-likelihood of all data.")
        for name, site in latent_sites(self.trace).items():
            if isinstance(base_distribution(site["fn"]), dist.ImproperUniform):
                raise ValueError(
                    f"the prior of {name!r} is improper, so the path has no start: give it a proper one."
                )
            if LOCAL in site:
                raise ValueError(
                    f"temper scales {name!r} by its local_plates, and the path has the likelihood given all "
                    "latents: pass the model without local_plates."
                )
            if name in ("alpha", "chain", "draw"):
                raise ValueError(f"latent site {name!r} has the name of a dimension of the result: rename it.")
        unknown = sorted(set(dims or {}) - {*self.latents, *self.observed})
        if unknown:
            raise ValueError(f"dims names {unknown}, which are not among the sites {self.latents}.")

    def log_lik(self, values: dict[str, Array]) -> Array:
        """Log-likelihood of all data at the values of the latents, as the model weighs it."""
        at = handlers.substitute(handlers.seed(self.model, self.rng_key), data=values)
        return total(get_trace(at, self.args, self.kwargs))

    def draw_prior(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Latents from the prior, and their log-likelihood."""
        trace = get_trace(handlers.seed(self.model, rng_key), self.args, self.kwargs)
        return {name: trace[name]["value"] for name in self.latents}, total(trace)

    def unconstrain(self, values: dict[str, Array]) -> dict[str, Array]:
        """The values on the unconstrained scale."""
        return unconstrain_fn(handlers.seed(self.model, self.rng_key), self.args, self.kwargs, values)


def total(trace: Trace) -> Array:
    """The log-likelihood of a trace, powers and scales included."""
    terms = []
    for site in likelihood_sites(trace).values():
        power = jnp.asarray(weight(site))
        # A power of 0 leaves a likelihood of 0 out.
        terms.append(jnp.sum(jnp.where(power > 0, power * untempered_log_prob(site), 0.0)))
    return jnp.sum(jnp.stack(terms))


def check_finite(grid: np.ndarray, log_lik: np.ndarray, at_zero: bool) -> None:
    """Refuse a log-likelihood that is not finite, save draws of likelihood 0 at alpha = 0 where allowed."""
    allowed = np.isneginf(log_lik) & (grid == 0) & at_zero
    bad = np.mean(~np.isfinite(log_lik) & ~allowed, axis=(0, 1))
    if np.any(bad):
        first = int(np.argmax(bad > 0))
        raise ValueError(
            f"the log-likelihood is not finite at {bad[first]:.2%} of the draws at alpha = {grid[first]:.3g}: "
            "look for NaN in the data, and for an overflow or a likelihood of 0 where prior or guide have mass. "
            "Restrict or narrow the prior, or use float64."
        )
    if np.any(np.all(np.isneginf(log_lik[..., 0]), axis=1)):
        raise ValueError(
            "the likelihood is 0 at every draw from the prior: look for NaN in the data, which are else "
            "impossible there, or overflow because the prior is too wide."
        )


def name_of(value: Any) -> str:
    """The name of a function or of an object's class."""
    return getattr(value, "__name__", type(value).__name__)
