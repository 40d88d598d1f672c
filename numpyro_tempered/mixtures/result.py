"""A fitted mixture, also as a fit of a guide and as draws with their model."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_tempered.core import (
    COLUMNS,
    Array,
    ArrayLike,
    DataSummary,
    Description,
    Evidence,
    Numbers,
    Params,
    Shape,
    TemperedELBO,
    add_repr,
    at_index,
    check_count,
    fit_attrs,
    map_batches,
    run_program,
    take_data,
    to_host,
    warn_if_unresolved,
)
from numpyro_tempered.handlers.numpyro_private import IndependentConstraint
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.tempered_fit import TemperedFit, without_data
from numpyro_tempered.mixtures.bridges.sites import (
    COMPONENTS,
    DATA,
    mixture_guide,
    mixture_model,
    rows_of_draw,
)
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    namespace,
    translate_on_host,
)
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
from numpyro_tempered.mixtures.prepare import (
    check_rows,
    column_means,
    weights_and_total,
)
from numpyro_tempered.mixtures.weights import STICKS, WEIGHTS, are_sticks

# A component of less than one datum is empty.
OCCUPIED = 1.0


class BoundEstimate(NamedTuple):
    """A Monte Carlo estimate of E1 = alpha E[log L] - KL(rho, prior).

    Attributes:
        value: The estimate, F plus the mean of gaps that are never negative.
        se: Its standard error.
    """

    value: float
    se: float

    @classmethod
    def of(cls, objective: float, gaps: np.ndarray) -> "BoundEstimate":
        """From F and the gaps of independent draws."""
        # One draw has no standard error.
        se = (
            float(np.std(gaps, ddof=1) / np.sqrt(len(gaps)))
            if len(gaps) > 1
            else float("inf")
        )
        return cls(objective + float(np.mean(gaps)), se)


@add_repr
class MixtureFit(NamedTuple):
    r"""A mixture fitted by tempered coordinate ascent.

    Attributes:
        component: The family, without its prior.
        alpha: Power on the likelihood.
        factors: Of the weights and the components, of data less ``centre``.
        problem: Prior, prior of the weights, alpha and the sum of log h, of the same data.
        centre: What is subtracted from the data, ``(d,)``, or None.
        objective: F, in double precision: the bound that the ascent maximises. F <= ``bound.value``.
        kl: KL(rho, prior), in double precision.
        bound: E1 = alpha E[log L] - KL(rho, prior), which ranks models, by Monte Carlo with its standard error;
            None without draws.
        counts: N_j, the weighted sums of the responsibilities, ``(K,)``.
        trace: F at every pass of the best restart, in the precision of the data.
        restart_objectives: F of every start, ``(R,)``, in the precision of the data; -inf for one that failed.
            Behind the restarts are those from a fit of fewer components in ``init``.
        num_best: Starts that reach within 0.1 nat of the best, moves included; those from fewer components count
            as one. An optimum that one start alone reaches is not to be trusted.
        spread: F of the best start less the median of the restarts, in nats; 0 for one start.
        converged: Whether the best restart ended by the tolerance.
        num_iter: Passes over the data of the best restart; after a move, since it.
        num_moves: Moves that were accepted.
        total: The sum of the weights of the data.
        column_names: Names of the columns, where x was a table whose names are all strings; else None.
    """

    component: Component
    alpha: float
    factors: Factors
    problem: MixtureProblem
    centre: np.ndarray | None
    objective: float
    kl: float
    bound: BoundEstimate | None
    counts: np.ndarray
    trace: np.ndarray
    restart_objectives: np.ndarray
    num_best: int
    spread: float
    converged: bool
    num_iter: int
    num_moves: int
    total: float
    column_names: tuple[str, ...] | None = None

    @property
    def num_components(self) -> int:
        """K, empty components included."""
        return self.factors.concentration.shape[0]

    @property
    def is_symmetric(self) -> bool:
        """Whether other modes of the posterior are this one with its components in another order."""
        return True

    @property
    def num_occupied(self) -> int:
        """Components that hold at least one datum's weight."""
        return int(np.sum(self.counts >= OCCUPIED))

    @property
    def posterior(self) -> Hyperparameters:
        """Hyperparameters of the components ``(K, ...)``, in the data's own coordinates.

        Where data are moved to their mean, NumPy arrays in double precision, which hold a location far from 0.
        """
        return translate_on_host(self.component, self.factors.posterior, self.centre)

    @property
    def prior(self) -> Hyperparameters:
        """Hyperparameters of one component, in the data's own coordinates."""
        return translate_on_host(self.component, self.problem.prior, self.centre)

    @property
    def elbo(self) -> TemperedELBO | None:
        """E1, which ranks models; None without draws for it, of ``num_draws=0``."""
        if self.bound is None:
            return None
        bound, kl = self.bound, self.kl
        return TemperedELBO(bound.value, bound.se, (bound.value + kl) / self.alpha, kl)

    @property
    def evidence(self) -> Evidence:
        """Passes over the data, and F of every start."""
        return Evidence(
            math.nan, self.num_iter, tuple(map(float, self.restart_objectives))
        )

    @property
    def mean(self) -> Params:
        """Posterior means of weights and parameters, over 4,000 draws of the same key each time."""
        return self._fit.mean

    @property
    def sd(self) -> Params:
        """Posterior standard deviations of weights and parameters, likewise."""
        return self._fit.sd

    @property
    def _sites(self) -> tuple[Component, Hyperparameters, Array, Hyperparameters]:
        """What makes the sites of the guide."""
        prior, concentration = self.problem.prior, self.factors.concentration
        return self.component, prior, concentration, self.posterior

    @property
    def _fit(self) -> TemperedFit:
        """The mixture with its guide and its tempered model of NumPyro, without data."""
        model = mixture_model(self.component, self.prior, self.problem.concentration)
        return without_data(
            self, temper(model, self.alpha), mixture_guide(*self._sites)
        )

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws of weights and parameters, ``(*sample_shape, ...)`` each."""
        return self._fit.sample_posterior(rng_key, sample_shape)

    def log_prob(self, values: Params) -> Array:
        """Log-density of the factors at values of weights and parameters."""
        return self._fit.log_prob(values)

    def predict(
        self, rng_key: Array, num_rows: int = 1, *, num_samples: int = 1000
    ) -> Params:
        """Draws of new rows, ``x`` of shape ``(num_samples, num_rows, d)``.

        Each draw has its own weights and parameters; :func:`numpyro_tempered.mixtures.sample` has one row each.
        """
        check_count(num_rows, "num_rows")
        draw_key, key = jax.random.split(rng_key)
        draws = self.sample_posterior(
            draw_key, (check_count(num_samples, "num_samples"),)
        )
        rows = rows_of_draw(*self._sites)

        def of_draws(keys: Array, draws: Params) -> Array:
            return map_batches(lambda part: rows(*part, num_rows), (keys, draws), 64)

        return {DATA: run_program(of_draws, jax.random.split(key, num_samples), draws)}

    def on(
        self,
        *data: ArrayLike,
        rng_key: Array | None = None,
        sample_weight: ArrayLike | None = None,
        order: ArrayLike | None = None,
    ) -> TemperedFit:
        """The posterior at the data that it was fitted to, for every verb that takes a posterior.

        Args:
            *data: The data ``x``.
            rng_key: Of what is drawn from it afterwards.
            sample_weight: Their weights, as in the fit.
            order: The old number of each component; by default from the largest to the smallest count.

        Returns:
            A :class:`.TemperedFit` of the tempered :func:`numpyro_model` with
            :func:`numpyro_guide`, whose ``elbo`` is E1.

        Raises:
            ValueError: If the data are missing, not of the family, or not those of the fit by their total
                weight and means.
        """
        (x,) = take_data(self, data, "x")
        x = check_rows(x, self.component)
        if self.centre is not None:
            warn_if_unresolved(x, self.centre, self.factors.concentration.dtype)
        self._check_data(x, sample_weight)
        fit = relabel(self, order)._fit
        args = (x,) if sample_weight is None else (x, sample_weight)
        fit = fit._replace(args=args, rng_key=rng_key)
        return fit._replace(observed=fit.target.observed)

    def _check_data(self, rows: Numbers, sample_weight: ArrayLike | None) -> None:
        """Refuse rows and weights whose total and means are not those of the fit's."""
        weight, total = weights_and_total(rows, sample_weight)
        advice = "pass the x, and the sample_weight, that it was fitted to."
        if not math.isclose(total, self.total, rel_tol=1e-4):
            raise ValueError(
                f"x has rows of total weight {total:g}, those of the fit {self.total:g}: {advice}"
            )
        if self.centre is None or self.component.location is None:
            return
        # Of others than these there is no centre.
        columns = self.component.location.columns
        at = slice(None) if columns is None else list(columns)
        means, centre = column_means(rows, weight)[at], self.centre[at]
        spread = to_host(namespace(rows).nanstd(rows, axis=0))[at]
        if np.any(np.abs(means - centre) > 1e-3 * spread + 1e-4 * np.abs(means)):
            raise ValueError(
                f"x has column means {means}, the rows of the fit {centre}: {advice}"
            )

    def summarise_data(self) -> DataSummary:
        """The sum of the weights and the means of the columns, for :func:`compare`."""
        means = {} if self.centre is None else {COLUMNS: self.centre}
        return DataSummary(numbers={"sum of the weights": self.total, **means})

    def describe(self) -> Description:
        """The progress of the ascent, and the names of dimensions."""
        concentration = np.asarray(self.factors.concentration)
        variational = {
            "objective_trace": (["iteration"], self.trace),
            "objective_by_restart": (["restart"], self.restart_objectives),
            "count": (["component"], self.counts),
            # Of a stick what it takes, and what it leaves.
            "concentration": (
                ["component", "side"][: concentration.ndim],
                concentration,
            ),
        }
        attrs = {
            "algorithm": "cavi",
            "component": self.component.name,
            "num_components": self.num_components,
            "num_occupied": self.num_occupied,
            "objective": self.objective,
            "num_iter": self.num_iter,
            **fit_attrs(self),
        }
        groups = {name: values for name, (_, values) in variational.items()}
        dims = {name: dims for name, (dims, _) in variational.items()}
        return Description({"variational": groups}, attrs, dims | _dims(self))


def check_fit(fit: object, name: str = "fit") -> None:
    """Raise TypeError where this is not a fitted mixture; ``name`` is that of the argument."""
    if not isinstance(fit, MixtureFit):
        raise TypeError(
            f"{name} is a {type(fit).__name__}; expected the result of nt.mixtures.fit."
        )


def relabel(fit: MixtureFit, order: ArrayLike | None = None) -> MixtureFit:
    """The same fit with its components in another order.

    A mixture's components have no order of their own, and two restarts end in two orders.

    Args:
        fit: A fitted mixture.
        order: The old number of each component, a permutation of 0 ... K-1; by default from the largest to
            the smallest count. Sticks keep their order, which their prior depends on.

    Returns:
        The fit, relabelled.

    Raises:
        ValueError: If ``order`` is not a permutation, or another one than that of sticks.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [9.0], [9.1], [9.2]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.relabel(nt.mixtures.fit(jax.random.key(0), x, component, num_components=2))
        >>> fit.counts.round(1).tolist()
        [3.0, 1.0]
    """
    keeps, numbers = (
        are_sticks(fit.factors.concentration),
        np.arange(fit.num_components),
    )
    falling = numbers if keeps else np.argsort(-fit.counts, kind="stable")
    indices = falling if order is None else np.asarray(order)
    are_integers = np.issubdtype(indices.dtype, np.integer)
    if not are_integers or sorted(indices.tolist()) != list(range(fit.num_components)):
        raise ValueError(
            f"order must be a permutation of 0 ... {fit.num_components - 1}, got {order}."
        )
    if keeps and np.any(indices != numbers):
        raise ValueError(
            f"order is {order}, but sticks in another order are another prior and another factor: leave order "
            "out, and relabel the draws where another order is needed."
        )
    return fit._replace(
        factors=at_index(fit.factors, indices),
        problem=fit.problem._replace(concentration=fit.problem.concentration[indices]),
        counts=fit.counts[indices],
    )


def _dims(fit: MixtureFit) -> dict[str, list[str]]:
    """Names of the dimensions of the model's sites."""
    key = jax.random.key(0)
    trace = handlers.trace(handlers.seed(mixture_guide(*fit._sites), key)).get_trace()
    rows = rows_of_draw(*fit._sites)
    sizes = {
        "component": fit.num_components,
        "feature": jax.eval_shape(lambda key: rows(key, {}, 1), key).shape[1],
    }
    names = {WEIGHTS: ["component"], DATA: ["row", "feature"]}
    if STICKS in trace:
        names[STICKS] = ["stick"]
    for name, site in trace.items():
        if site["type"] != "sample" or name in names:
            continue
        shape = jnp.shape(site["value"])
        dims = (
            ["component"]
            if any(frame.name == COMPONENTS for frame in site["cond_indep_stack"])
            else []
        )
        support = site["fn"].support
        while isinstance(support, IndependentConstraint):
            support = support.base_constraint
        is_matrix = support is constraints.positive_definite
        dims += ["feature", "other_feature" if is_matrix else "level"][
            : len(shape) - len(dims)
        ]
        # Two sites may have different columns, or different levels.
        names[name] = [
            dim if sizes.setdefault(dim, size) == size else f"{name}_{dim}"
            for dim, size in zip(dims, shape, strict=True)
        ]
    return names
