"""A model with its data, for posteriors at many powers of the likelihood."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.initialization import init_to_feasible
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn

from numpyro_tempered.core.checks import check_numbers
from numpyro_tempered.core.typing import Array, ArrayLike, Guide, Model
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import PRIOR_FACTOR
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.report.arviz import Dims

# From model to guide, MCMC kernel or OnlineVI.
Method: TypeAlias = Callable[[Model], Any]
_NEEDS = {
    "data": "",
    "support": "",
    "latents": ", so there is no posterior to follow.",
    "params": ", which would differ by alpha: give them a prior.",
    "plates": ", and each alpha needs the log-likelihood of all data: leave subsample_size out.",
    "proper": ", and alpha = 0 has no posterior: change it.",
    "global": ", but the likelihood here is conditional on all latents: pass the model without local_plates.",
    "chain and draw": "",
    "alpha": "",
}


class ModelData:
    """A model with its data and a key.

    ``model`` counts its runs, so that a guide or kernel that is built on another model is noticed.
    """

    def __init__(self, model: Model, rng_key: Array, args: tuple, kwargs: dict) -> None:
        self.runs = 0
        self.original = model
        self.args, self.kwargs = args, kwargs
        self.rng_key = rng_key

        def counted(*args: object, **kwargs: object) -> object:
            self.runs += 1
            return model(*args, **kwargs)

        self.model = counted
        try:
            self.trace, sampled = likelihood.get_trace(self.seeded, args, kwargs), True
        except NotImplementedError:
            feasible = handlers.substitute(self.seeded, substitute_fn=init_to_feasible)
            self.trace, sampled = likelihood.get_trace(feasible, args, kwargs), False
        latents = likelihood.latent_sites(self.trace)
        # Scaled or masked priors, and those with terms of their own, are not what their sites sample.
        terms = any(site.get(PRIOR_FACTOR) for site in self.trace.values())
        plain = all(
            site["scale"] is None and not likelihood.is_masked(site["fn"])
            for site in latents.values()
        )
        self.prior_is_exact = sampled and plain and not terms
        self.latents = list(latents)
        self.observed = likelihood.observed_values(self.trace)

    @property
    def discrete(self) -> list[str]:
        """Names of the discrete latents."""
        return [
            name
            for name, site in likelihood.latent_sites(self.trace).items()
            if site["fn"].support.is_discrete
        ]

    def check(self, dims: Dims | None = None) -> None:
        """Raise for a model whose posterior does not exist at every power."""
        require(self.trace, _NEEDS)
        unknown = sorted(set(dims or {}) - {*self.latents, *self.observed})
        if unknown:
            raise ValueError(
                f"dims names {unknown}, which are not among the sites {self.latents}."
            )

    @property
    def seeded(self) -> Model:
        """The model with the key of this object."""
        return handlers.seed(self.model, self.rng_key)

    def log_lik(self, values: dict[str, Array]) -> Array:
        """Log-likelihood of all data at the values of the latents, as the model weighs it."""
        return _total(
            likelihood.get_trace(
                handlers.substitute(self.seeded, data=values), self.args, self.kwargs
            )
        )

    def draw_prior(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Latents from the prior, and their log-likelihood."""
        trace = likelihood.get_trace(
            handlers.seed(self.model, rng_key), self.args, self.kwargs
        )
        return {name: trace[name]["value"] for name in self.latents}, _total(trace)

    def unconstrain(self, values: dict[str, Array]) -> dict[str, Array]:
        """The values on the unconstrained scale."""
        return unconstrain_fn(self.seeded, self.args, self.kwargs, values)


def _total(trace: likelihood.Trace) -> Array:
    """The log-likelihood of a trace, powers and scales included."""
    terms = []
    for site in likelihood.likelihood_sites(trace).values():
        power = jnp.asarray(likelihood.weight(site))
        # A power of 0 leaves a likelihood of 0 out.
        terms.append(
            jnp.sum(
                jnp.where(power > 0, power * likelihood.untempered_log_prob(site), 0.0)
            )
        )
    return jnp.sum(jnp.stack(terms))


def build_method(
    method: Method, model: Model, *, online: bool = False
) -> Guide | MCMCKernel:
    """The guide or kernel that a method makes of a model, or the :class:`OnlineVI` if ``online``.

    Raises:
        TypeError: If ``method`` is built already, is not callable, fails, or returns none of these.
    """
    expected = "guide, kernel or OnlineVI" if online else "guide or kernel"
    advice = f"Pass a class, or a callable from model to {expected} such as `lambda model: NUTS(model)`."
    if isinstance(method, AutoGuide | MCMCKernel | OnlineVI):
        raise TypeError(
            f"this {type(method).__name__} is built already, for one alpha. {advice}"
        )
    if not callable(method):
        raise TypeError(
            f"method must be a callable from model to {expected}, got {method!r}. {advice}"
        )
    try:
        algorithm = method(model)
    except Exception as error:
        raise TypeError(f"method failed on the model. {advice}") from error
    if not callable(algorithm) and not isinstance(
        algorithm, (MCMCKernel, OnlineVI) if online else MCMCKernel
    ):
        raise TypeError(
            f"method returned {type(algorithm).__name__}, not a {expected}. {advice}"
        )
    return algorithm


def check_alphas(
    alphas: ArrayLike | Sequence[float], least: int, interval: str
) -> np.ndarray:
    """Increasing powers in an interval, as floats ``(A,)``.

    Raises:
        ValueError: If there are less than ``least``, one is outside of the interval, or they do not increase.
    """
    grid = np.asarray(check_numbers(alphas, "alphas", interval), dtype=np.float64)
    if grid.ndim != 1 or len(grid) < least:
        raise ValueError(
            f"alphas must be a list of powers, {least} or more, got {alphas!r}."
        )
    if np.any(np.diff(grid) <= 0):
        raise ValueError(f"alphas must increase from each to the next, got {grid}.")
    return grid
