"""What every result knows of itself: its draws, its ELBO, its convergence and its data.

:func:`numpyro_tempered.to_inference_data` takes every :class:`Result`, and :func:`numpyro_tempered.compare` every
:class:`Fit`. Both know these protocols and no algorithm.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.labels import Labels
from numpyro_tempered.core.processes import to_host
from numpyro_tempered.core.typing import Array, ArrayLike, Model

EMPTY: Mapping[str, object] = MappingProxyType({})


class TemperedELBO(NamedTuple):
    """An evaluated ELBO, in nats, every constant included.

    Attributes:
        value: alpha E_q[log L] - KL(q, prior), or a lower bound on it; minus infinity for a guide with a point
            mass, such as ``AutoDelta``.
        se: Monte Carlo standard error of ``value``; 0 where it is exact.
        expected_log_lik: Untempered E_q[log L].
        kl: KL(q, prior), analytic where there is a formula, else by draws.
        improper: Latent sites without a prior that integrates to 1: the value has an arbitrary constant, and says
            nothing about the model.
    """

    value: float
    se: float
    expected_log_lik: float
    kl: float
    improper: tuple[str, ...] = ()


@add_repr
class Run(NamedTuple):
    """Draws of a model on its data: what every result comes down to.

    Attributes:
        model: The tempered model; None where the result is of a density without data.
        samples: Draws ``(chain, draw, ...)`` of all latent sites, and of others to be shown.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.
        rng_key: Key of what is drawn for the result.
        groups: Further groups, such as ``variational``: arrays by group and name.
        attrs: Further attributes: numbers and strings.
        dims: Names of dimensions by variable, beside chain and draw.
        coords: Labels by dimension, of those that have its length.
    """

    model: Model | None
    samples: Mapping[str, Array]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = EMPTY
    rng_key: Array | None = None
    groups: Mapping[str, Mapping[str, ArrayLike]] = MappingProxyType({})
    attrs: Mapping[str, object] = EMPTY
    dims: Mapping[str, Sequence[str]] = MappingProxyType({})
    coords: Labels = MappingProxyType({})


class DataSummary(NamedTuple):
    """What a fit knows of its data: fits of the same data agree in all that both know.

    Attributes:
        observed: Observed values by site; None where the fit does not hold its data.
        numbers: Counts, means and the like, by what they are called in an error.
        divergences: By site, for losses that are no log-likelihood, what they are.
    """

    observed: Mapping[str, Array] | None = None
    numbers: Mapping[str, ArrayLike] = MappingProxyType({})
    divergences: Mapping[str, object] = EMPTY


class Result(Protocol):
    """A result that knows its draws."""

    def as_run(
        self, *data: Any, num_samples: int = 1000, rng_key: Array | None = None
    ) -> Run:
        """Draws with what made them.

        Args:
            *data: What the result was fitted to, where it does not hold it.
            num_samples: Number of draws.
            rng_key: Key of the draws, where the result brings none or another is wanted.
        """
        ...


class Fit(Result, Protocol):
    """A result that knows its ELBO."""

    @property
    def alpha(self) -> ArrayLike | Mapping[str, float]:
        """Power on the likelihood; by site where sites differ."""
        ...

    @property
    def converged(self) -> bool | Array | None:
        """Whether the fit has converged; None where the algorithm has no such notion."""
        ...

    def as_elbo(self) -> TemperedELBO:
        """The ELBO with its standard error and its two parts."""
        ...

    def summarise_data(self) -> DataSummary:
        """What the fit knows of its data."""
        ...


def fit_attrs(fit: Fit) -> dict[str, object]:
    """What a fit knows of itself, as attributes of ArviZ data."""
    elbo = fit.as_elbo()
    attrs: dict[str, object] = {"elbo": elbo.value, "elbo_se": elbo.se}
    # Files of netCDF know no booleans.
    return attrs if fit.converged is None else attrs | {"converged": int(fit.converged)}


def check_run_arguments(
    result: object, data: tuple[object, ...], rng_key: Array | None, *names: str
) -> Array:
    """The key, where the data and a key have come that a result does not hold.

    Raises:
        ValueError: If they have not.
    """
    if len(data) != len(names) or rng_key is None:
        call = ", ".join(["fit", *names, "rng_key=key"])
        raise ValueError(
            f"a {type(result).__name__} is to_inference_data({call}): "
            f"{'the data that it was fitted to, and a key' if names else 'a key alone'}."
        )
    return rng_key


def refuse_data(
    result: object, data: tuple[object, ...], options: Mapping[str, object]
) -> None:
    """Refuse data, and options that there are not, for a result that holds its data.

    Raises:
        ValueError: If there are some.
    """
    if data or options:
        strange = " and ".join(
            [f"{len(data)} further values"] * bool(data)
            + [f"{name!r}" for name in options]
        )
        raise ValueError(
            f"a {type(result).__name__} holds its data: pass it alone, got {strange}. Options of "
            "to_inference_data are coords, dims, log_lik, num_samples, posterior_predictive and rng_key."
        )


VALUES = "number of observed values"
MOMENTS = "mean and root mean square of the observed values"
COLUMNS = "column means"


def summarise_observed(observed: Mapping[str, Array]) -> DataSummary:
    """The summary of data that a fit holds."""
    if len(observed) != 1:
        return DataSummary(observed)
    values = np.asarray(to_host(next(iter(observed.values()))), np.float64)
    present = ~np.isnan(values)
    filled, count = np.where(present, values, 0.0), present.sum()
    moments = np.array([filled.sum(), np.square(filled).sum()]) / max(count, 1)
    numbers = {VALUES: count, MOMENTS: np.array([moments[0], np.sqrt(moments[1])])}
    if values.ndim == 2:
        numbers[COLUMNS] = filled.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    return DataSummary(observed, numbers)
