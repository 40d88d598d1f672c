"""A model with its data, as the criteria for alpha need it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.likelihood import Site, get_trace, latent_sites
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.select.alpha.base import Draws
from numpyro_tempered.select.alpha.data_weights import find_data, log_lik_of_each
from numpyro_tempered.select.path.problem import Problem


class Task(Problem):
    """A model with its data.

    On the flat unconstrained scale are the functions that criteria by the curvature at the minimum need; there
    the prior density has the Jacobian of the change of variables in it.

    Attributes:
        num_data: n.
        dim: Batch dimension along which the data lie.
    """

    def __init__(self, model: Model, rng_key: Array, args: tuple, kwargs: dict, plate: str | None = None) -> None:
        super().__init__(model, rng_key, args, kwargs)
        self.plate = plate
        self.check(None)
        for name, value in self.observed.items():
            if jnp.issubdtype(jnp.result_type(value), jnp.inexact) and not np.all(np.isfinite(value)):
                raise ValueError(
                    f"observed site {name!r} has {int(np.sum(~np.isfinite(value)))} values that are NaN or "
                    "infinite: leave such data out."
                )
        self.num_data, self.dim = find_data(self.trace, plate)

    def log_lik_of_each(self, values: dict[str, Array]) -> Array:
        """Log-likelihood of each datum, ``(n,)``, at the values of the latents."""
        at = handlers.substitute(handlers.seed(self.model, self.rng_key), data=values)
        return log_lik_of_each(get_trace(at, self.args, self.kwargs), self.num_data, self.dim)

    @property
    def discrete(self) -> list[str]:
        """Names of the discrete latents."""
        return [name for name, site in latent_sites(self.trace).items() if site["fn"].support.is_discrete]

    def flat(self) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
        """A feasible point on the flat unconstrained scale, ``(d,)``, and the way back to values by site there.

        Raises:
            ValueError: If a latent is discrete.
        """
        if self.discrete:
            raise ValueError(
                f"latent sites {self.discrete} are discrete, and have no gradient: sum them out by "
                "nt.marginalize."
            )
        values = {name: site["value"] for name, site in latent_sites(self.trace).items()}
        return ravel_pytree(self.unconstrain(values))

    def losses(self, unconstrained: dict[str, Array]) -> Array:
        """Negative log-likelihood of each datum, ``(n,)``, at unconstrained values of the latents."""

        def constrain(site: Site) -> Array | None:
            if site["type"] != "sample" or site["name"] not in unconstrained:
                return None
            # The site's own support, which may depend on other latents.
            return biject_to(site["fn"].support)(unconstrained[site["name"]])

        at = handlers.substitute(handlers.seed(self.model, self.rng_key), substitute_fn=constrain)
        return -log_lik_of_each(get_trace(at, self.args, self.kwargs), self.num_data, self.dim)

    def log_prior(self, unconstrained: dict[str, Array]) -> Array:
        """Log-density of the prior on the unconstrained scale, prior factors included."""
        prior = temper(handlers.seed(self.model, self.rng_key), 0.0)
        return -potential_energy(prior, self.args, self.kwargs, unconstrained)

    def flat_draws(self, values: dict[str, Array]) -> Array:
        """Draws of the latents, ``(S, ...)`` each, on the flat unconstrained scale, ``(S, d)``."""
        if self.discrete:
            return jnp.zeros((len(next(iter(values.values()))), 0))
        return jax.vmap(lambda draw: ravel_pytree(self.unconstrain(draw))[0])(values)

    def draws(self, values: dict[str, Array], mean: dict[str, Array] | None = None) -> Draws:
        """Draws of the latents, ``(S, ...)`` each, with their log-likelihoods.

        Args:
            values: The draws.
            mean: The posterior mean on the unconstrained scale where it is known; else that of the draws.
        """
        log_lik = map_batches(self.log_lik_of_each, values, 64)
        flat = self.flat_draws(values)
        if self.discrete:
            # No mean, and no number that could be taken for one.
            return Draws(values, log_lik, jnp.full(self.num_data, jnp.nan), flat)
        at = self.flat()[1](jnp.mean(flat, axis=0)) if mean is None else mean
        return Draws(values, log_lik, -self.losses(at), flat)
