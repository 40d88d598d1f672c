"""A model whose data are rows, and what a criterion for alpha is."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    Model,
    Params,
    add_repr,
    map_batches,
)
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.rows import find_data, log_lik_of_each
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online_posterior import StreamPosterior
from numpyro_tempered.infer.svi import TemperedFit
from numpyro_tempered.online.base import Losses
from numpyro_tempered.select.alpha.coverage_report import CoverageCheck
from numpyro_tempered.select.alpha.data_weights import weigh_data
from numpyro_tempered.select.alpha.dependence import Block, Dependence, read_dependence
from numpyro_tempered.select.alpha.independence import Rows
from numpyro_tempered.select.alpha.model_data import CountsRuns, check_powers

# A pytree of arrays, or None.
Summary: TypeAlias = Any


class Draws(NamedTuple):
    """Draws from one posterior, with what a criterion may need of them.

    Attributes:
        values: By latent site, ``(S, ...)`` each.
        log_lik: Log-likelihood of each datum, of the whole data, ``(S, n)``.
        log_lik_at_mean: The same at the posterior mean, taken on the unconstrained scale, ``(n,)``.
        flat: The draws on the flat unconstrained scale, ``(S, d)``; no columns where a latent is discrete.
    """

    values: Params
    log_lik: Array
    log_lik_at_mean: Array
    flat: Array


class Task(Target):
    """A model whose data are rows.

    On the flat unconstrained scale are the functions that criteria by the curvature at the minimum need; there
    the prior density has the Jacobian of the change of variables in it.

    Attributes:
        num_data: n.
        data_rows: Where they lie.
        dependence: Which data depend on each other.
    """

    def __init__(
        self,
        model: Model,
        rng_key: Array,
        args: tuple,
        kwargs: dict,
        plate: str | None = None,
        *,
        groups: ArrayLike | None = None,
        block: Block = None,
    ) -> None:
        super().__init__(CountsRuns(model), args, kwargs, rng_key)
        self.plate = plate
        check_powers(self)
        require(self.trace, {"finite": "", "no weights": ""})
        self.data_rows = find_data(self.trace, plate)
        self.num_data = self.data_rows.num_data
        self.dependence = read_dependence(groups, block, self.data_rows)
        # Of sandwich.estimate_of, for all criteria.
        self.estimate: Any = None

    @property
    def dim_latent(self) -> int:
        """Number of elements of all latents."""
        return sum(int(np.size(value)) for value in self.values.values())

    @property
    def rows(self) -> Rows:
        """The data, to be looked at for signs of dependence."""
        return Rows(
            self.trace,
            self.observed,
            (self.args, self.kwargs),
            self.data_rows,
            self.dependence,
        )

    def reweighted(self, alpha: ArrayLike, weights: Array) -> Model:
        """The model at a power, with a weight ``(n,)`` for each datum."""
        return weigh_data(temper(self.model, alpha), weights, self.data_rows)

    def log_lik_of_each(self, values: Params) -> Array:
        """Log-likelihood of each datum, ``(n,)``, at the values of the latents."""
        return log_lik_of_each(self.trace_at(values), self.data_rows)

    def flat(self) -> tuple[Array, Callable[[Array], Params]]:
        """A feasible point on the flat unconstrained scale, ``(d,)``, and the way back to values by site there.

        Raises:
            ValueError: If a latent is discrete.
        """
        require(self.trace, {"continuous": ""})
        return ravel_pytree(self.unconstrain(self.values))

    def losses(self, unconstrained: Params) -> Array:
        """Negative log-likelihood of each datum, ``(n,)``, at unconstrained values of the latents."""
        return -self.log_lik_of_each(self.constrain_sites(unconstrained))

    def log_prior(self, unconstrained: Params) -> Array:
        """Log-density of the prior on the unconstrained scale, prior factors included."""
        return -potential_energy(
            temper(self.seeded, 0.0), self.args, self.kwargs, unconstrained
        )

    def draws(self, values: Params, mean: Params | None = None) -> Draws:
        """Draws of the latents, ``(S, ...)`` each, with their log-likelihoods.

        Args:
            values: The draws.
            mean: The posterior mean on the unconstrained scale where it is known; else that of the draws.
        """
        log_lik = map_batches(self.log_lik_of_each, values, 64)
        if self.discrete:
            # Discrete latents have neither a mean nor an unconstrained scale.
            return Draws(
                values,
                log_lik,
                jnp.full(self.num_data, jnp.nan),
                jnp.zeros((len(log_lik), 0)),
            )
        flat = jax.vmap(self.flatten)(values)
        at = self.flat()[1](jnp.mean(flat, axis=0)) if mean is None else mean
        return Draws(values, log_lik, -self.losses(at), flat)


class Plan(NamedTuple):
    """The posteriors that a criterion needs at each alpha, and how it reduces their draws.

    Attributes:
        weights: Of each datum in each posterior, ``(P, n)``: 0 leaves a datum out, 2 counts it twice.
        reduce: From :class:`Draws` to a pytree of arrays; compiled with the fits.
    """

    weights: np.ndarray
    reduce: Callable[[Draws], Summary]


class Request(NamedTuple):
    """The posteriors that criteria need together.

    Attributes:
        alphas: The grid, ``(A,)``.
        plans: Of the criteria. At each alpha there is one posterior of all data, then those of the plans in turn.
        pointwise: Whether to keep the log-likelihood of each datum.
    """

    alphas: np.ndarray
    plans: tuple[Plan, ...]
    pointwise: bool

    def weights(self, num_data: int) -> np.ndarray:
        """Weights of the data in all P posteriors at one alpha, ``(P, n)``."""
        return np.concatenate(
            [np.ones((1, num_data)), *(plan.weights for plan in self.plans)]
        )

    def split(self, summaries: list[Summary]) -> list[Summary]:
        """Each plan's summaries of its own posteriors, with axes ``(P, A)``, from those of all, ``(A, P)``."""
        ends = np.cumsum([1, *(len(plan.weights) for plan in self.plans)])
        return [
            jax.tree.map(lambda leaf, a=a, b=b: np.swapaxes(leaf, 0, 1)[a:b], part)
            for part, (a, b) in zip(summaries, itertools.pairwise(ends), strict=True)
        ]


class Decision(NamedTuple):
    """The decision of a criterion.

    Attributes:
        alpha: The chosen power.
        columns: Values along the grid of alphas, ``(A,)`` each: ``criterion``, which is least where the criterion
            is best, and ``criterion_se`` where it has one.
        attrs: Numbers and words beside it, for the attributes of the result.
        advice: A sentence for the user.
    """

    alpha: float
    columns: Columns
    attrs: Mapping[str, object]
    advice: str


class Criterion(NamedTuple):
    """A rule that chooses alpha, or a diagnostic along the grid.

    Attributes:
        name: Its name, for the report.
        aim: Its aim: risk, coverage, ...
        plan: From a key and the task to the :class:`Plan`; None where it needs no posterior.
        decide: From a key, the task, the grid of alphas ``(A,)`` and the plan's reduced draws, with axes
            ``(P, A)`` in front (None without a plan), to the :class:`Decision`.
        refusal: Why it must not choose alpha, of a mere diagnostic; else None.
        pointwise: Whether ``decide`` gets, instead of reduced draws, the log-likelihood of each datum at the
            draws of each posterior, ``(A, C, S, n)`` for C chains.
        stream: For online rules: from a key, the grid, the dependence of the rounds, and a function from an order
            of them to the losses of a pass in that order, ``(A, T)``, to the decision. None where the criterion
            needs posteriors that a stream does not have.
    """

    name: str
    aim: str
    plan: Callable[[Array, Task], Plan] | None
    decide: Callable[[Array, Task, np.ndarray, Summary], Decision]
    refusal: str | None = None
    pointwise: bool = False
    stream: (
        Callable[
            [Array, np.ndarray, Dependence, Callable[[np.ndarray], Losses]], Decision
        ]
        | None
    ) = None


Fit: TypeAlias = TemperedFit | MCMC | StreamPosterior


@add_repr
class AlphaChoice(NamedTuple):
    """The result of :func:`numpyro_tempered.select_alpha`.

    Attributes:
        alpha: The chosen power.
        fit: The posterior at it: a :class:`.TemperedFit`, a NumPyro ``MCMC`` that has run, or
            the posterior at the end of the stream, whose ``state`` goes on.
        data: ArviZ data of that posterior, with the groups ``alpha_selection`` along the grid and
            ``calibrated_powers`` by parameter.
        advice: A sentence: the choice, its aim, and whether there is a need to temper.
        coverage: What intervals at it cover in resamples, by :func:`numpyro_tempered.alpha.check_coverage`; None
            unless ``select_alpha`` was called with ``coverage=True``.
    """

    alpha: float
    fit: Fit
    data: Any
    advice: str
    coverage: CoverageCheck | None = None

    @property
    def selected(self) -> float:
        """The chosen power, ``alpha``, by the name that selections share."""
        return self.alpha


class Fits(NamedTuple):
    """The posteriors of a grid of A alphas.

    Attributes:
        summaries: What each plan reduced the draws to, with axes ``(P, A)`` in front.
        log_lik: Log-likelihood of all data at each draw of the posteriors given them, ``(A, C, S)`` for C chains.
        pointwise: The same for each datum, ``(A, C, S, n)``; None unless asked for.
        fit_at: From the number of an alpha in the grid to the fit for the user, with the further positional and
            keyword arguments of :func:`to_inference_data`.
    """

    summaries: list[Summary]
    log_lik: np.ndarray
    pointwise: np.ndarray | None
    fit_at: Callable[[int], tuple[Fit, tuple, dict]]
