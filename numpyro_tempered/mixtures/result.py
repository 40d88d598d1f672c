"""A fitted mixture."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.evidence import Bound
from numpyro_tempered.mixtures.factors import Factors, Problem, penalty
from numpyro_tempered.mixtures.prepare import as_dtype
from numpyro_tempered.report.run import Run

# A component of less than one datum is empty.
OCCUPIED = 1.0


class MixtureFit(NamedTuple):
    r"""A mixture fitted by tempered coordinate ascent.

    Attributes:
        component: The family, without its prior.
        alpha: Power on the likelihood.
        factors: The Dirichlet and the posteriors of the components, of data with ``centre`` taken off.
        problem: Prior, Dirichlet prior, alpha and the sum of log h, of the same data.
        centre: What is taken off the data, ``(d,)``, or None.
        objective: F, in double precision: the bound that the ascent maximises. F <= ``bound.value``.
        bound: E1 = alpha E[log L] - KL(rho, prior), which model selection is about, by Monte Carlo with its
            standard error; None where no draws were asked for.
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        trace: F at every pass of the best restart, in the precision of the data.
        objectives: F of every restart, ``(R,)``, in the precision of the data; -inf for one that failed.
        converged: Whether the best restart ended by the tolerance.
        num_iter: Passes over the data of the best restart; after a move, since it.
        num_moves: Moves that were accepted.
        total: The sum of the weights of the data.
    """

    component: Component
    alpha: float
    factors: Factors
    problem: Problem
    centre: np.ndarray | None
    objective: float
    bound: Bound | None
    counts: np.ndarray
    trace: np.ndarray
    objectives: np.ndarray
    converged: bool
    num_iter: int
    num_moves: int
    total: float

    @property
    def num_components(self) -> int:
        """K, empty components included."""
        return self.factors.concentration.shape[0]

    @property
    def num_occupied(self) -> int:
        """Components that hold at least one datum's weight."""
        return int(np.sum(self.counts >= OCCUPIED))

    @property
    def spread(self) -> float:
        """The best restart's F less the median's, in nats; 0 for one restart."""
        return float(self.objectives.max() - np.median(self.objectives))

    @property
    def kl(self) -> float:
        """KL(rho, prior), in double precision."""
        with double_precision():
            problem, factors = as_dtype((self.problem, self.factors), jnp.float64)
            return float(_penalty(self.component, problem, factors))

    @property
    def posterior(self) -> Any:
        """Hyperparameters of the components ``(K, ...)``, in the data's own coordinates."""
        if self.centre is None:
            return self.factors.posterior
        shift = jnp.asarray(self.centre, self.factors.concentration.dtype)
        return self.component.translate(self.factors.posterior, shift)  # type: ignore[misc]

    def as_run(self, *data: Any, num_samples: int = 1000, rng_key: Array | None = None, **kwargs: Any) -> Run:
        """Draws of the factors with their NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If the data or the key are missing.
        """
        from numpyro_tempered.mixtures.bridges.results import from_mixture

        if len(data) != 1 or rng_key is None:
            raise ValueError(
                "a mixture is to_inference_data(fit, x, rng_key=key): the data that it was fitted to, and a key."
            )
        return from_mixture(rng_key, self, data[0], num_samples=num_samples, **kwargs)


@partial(jax.jit, static_argnames="component")
def _penalty(component: Component, problem: Problem, factors: Factors) -> Array:
    return penalty(component, problem, factors)
