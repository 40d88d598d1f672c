"""A fitted mixture, also as a fit of a guide and as draws with their model."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_tempered.core.checks import key_first
from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.result import (
    COLUMNS,
    DataSummary,
    Run,
    TemperedELBO,
    check_run_arguments,
)
from numpyro_tempered.core.rows import warn_if_unresolved
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.handlers.likelihood import get_trace, observed_values
from numpyro_tempered.handlers.numpyro_private import IndependentConstraint
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.svi import TemperedFit
from numpyro_tempered.mixtures.bridges.sites import (
    COMPONENTS,
    DATA,
    mixture_guide,
    mixture_model,
)
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    translate_on_host,
)
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
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

    @property
    def num_components(self) -> int:
        """K, empty components included."""
        return self.factors.concentration.shape[0]

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

    def as_run(
        self,
        *data: Any,
        num_samples: int = 1000,
        rng_key: Array | None = None,
        **kwargs: Any,
    ) -> Run:
        """Draws of the factors with their NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If the data or the key are missing.
        """
        key = check_run_arguments(self, data, rng_key, "x")
        return from_mixture(key, self, data[0], num_samples=num_samples, **kwargs)

    def as_tempered_fit(
        self, rng_key: Array, x: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> TemperedFit:
        """The mixture with a model and a guide of NumPyro: :func:`as_tempered_fit`, for :func:`check_fit`."""
        return as_tempered_fit(rng_key, self, x, sample_weight=sample_weight)

    def as_elbo(self) -> TemperedELBO:
        """E1, which ranks models, for :func:`compare`.

        Raises:
            ValueError: If the fit has none.
        """
        if self.bound is None:
            raise ValueError(
                "this fit has no E1: fit with num_draws >= 2, draws for it."
            )
        bound, kl = self.bound, self.kl
        return TemperedELBO(bound.value, bound.se, (bound.value + kl) / self.alpha, kl)

    def summarise_data(self) -> DataSummary:
        """The sum of the weights and the means of the columns, for :func:`compare`."""
        means = {} if self.centre is None else {COLUMNS: self.centre}
        return DataSummary(numbers={"sum of the weights": self.total, **means})


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
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
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
        factors=jax.tree.map(lambda leaf: leaf[indices], fit.factors),
        problem=fit.problem._replace(concentration=fit.problem.concentration[indices]),
        counts=fit.counts[indices],
    )


@key_first
def as_tempered_fit(
    rng_key: Array,
    fit: MixtureFit,
    x: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
) -> TemperedFit:
    """A fitted mixture in the form of :func:`fit_svi`'s results, without any fitting.

    With it :func:`compare` compares mixtures with other models of the same data.

    Args:
        rng_key: Key for what is drawn from the result afterwards.
        fit: A fitted mixture.
        x: The data that it was fitted to.
        sample_weight: Their weights, as in the fit.

    Returns:
        The tempered :func:`numpyro_model` with :func:`numpyro_guide`. Its ``elbo`` is E1 of the fit, its
        ``losses`` are minus F.

    Raises:
        TypeError: If ``fit`` is not a fit.
        ValueError: If the data are not of the family, or the fit has no E1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> tempered = nt.mixtures.as_tempered_fit(jax.random.key(1), fit, x)
        >>> tempered.elbo.value == fit.bound.value
        True
    """
    check_fit(fit)
    return _tempered_fit(rng_key, fit, x, sample_weight, fit.as_elbo())


def _tempered_fit(
    rng_key: Array,
    fit: MixtureFit,
    x: ArrayLike,
    sample_weight: ArrayLike | None,
    elbo: TemperedELBO,
) -> TemperedFit:
    if fit.centre is not None:
        warn_if_unresolved(x, fit.centre, fit.factors.concentration.dtype)
    prior, concentration = fit.problem.prior, fit.factors.concentration
    guide = mixture_guide(
        fit.component, prior, concentration, fit.posterior, lambda name, fn: fn
    )
    model = temper(
        mixture_model(fit.component, fit.prior, fit.problem.concentration), fit.alpha
    )
    args = (x,) if sample_weight is None else (x, sample_weight)
    return TemperedFit(
        model=model,
        guide=guide,
        params={},
        alpha=fit.alpha,
        losses=jnp.asarray(-fit.trace),
        elbo=elbo,
        observed=observed_values(get_trace(handlers.seed(model, rng_key), args, {})),
        args=args,
        kwargs={},
        rng_key=rng_key,
    )


def from_mixture(
    rng_key: Array,
    fit: MixtureFit,
    x: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    num_samples: int = 1000,
    order: ArrayLike | None = None,
) -> Run:
    """Draws of the factors with their model.

    Args:
        rng_key: Key of the draws.
        fit: A fitted mixture.
        x: The data that it was fitted to.
        sample_weight: Their weights, as in the fit.
        num_samples: S.
        order: The old number of each component; by default from the largest to the smallest count.
    """
    check_fit(fit)
    ordered = relabel(fit, order)
    no_elbo = TemperedELBO(math.nan, math.nan, math.nan, math.nan)
    tempered = _tempered_fit(rng_key, ordered, x, sample_weight, no_elbo)
    run = tempered.as_run(num_samples=num_samples)
    variational = {
        "objective_trace": ("iteration", ordered.trace),
        "objective_by_restart": ("restart", ordered.restart_objectives),
        "count": ("component", ordered.counts),
    }
    attrs = {
        "algorithm": "cavi",
        "component": ordered.component.name,
        "num_components": ordered.num_components,
        "num_occupied": ordered.num_occupied,
        "objective": ordered.objective,
        **(
            {}
            if ordered.bound is None
            else {"elbo": ordered.bound.value, "elbo_se": ordered.bound.se}
        ),
        # Files of netCDF know no booleans.
        "converged": int(ordered.converged),
        "num_iter": ordered.num_iter,
    }
    groups = {
        "variational": {name: values for name, (_, values) in variational.items()}
    }
    dims = {name: [dim] for name, (dim, _) in variational.items()} | _dims(tempered)
    concentration = np.asarray(ordered.factors.concentration)
    groups["variational"]["concentration"] = concentration
    # Of a stick what it takes, and what it leaves.
    dims["concentration"] = ["component", "side"][: concentration.ndim]
    return run._replace(groups=groups, attrs=attrs, dims=dims)


def _dims(fit: TemperedFit) -> dict[str, list[str]]:
    """Names of the dimensions of the model's sites."""
    trace = get_trace(handlers.seed(fit.model, fit.rng_key), fit.args, fit.kwargs)
    sizes = {
        "component": trace[WEIGHTS]["value"].shape[0],
        "feature": trace[DATA]["value"].shape[1],
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
