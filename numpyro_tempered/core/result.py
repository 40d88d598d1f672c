"""What every tempered posterior is: the protocol that each result meets and each verb takes."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.labels import Labels, check_names
from numpyro_tempered.core.precision import doubles
from numpyro_tempered.core.processes import to_host
from numpyro_tempered.core.typing import Array, ArrayLike, Numbers, Params, Shape

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
class Evidence(NamedTuple):
    """What a posterior knows of the optimum of its family.

    Attributes:
        gap: Estimate of the nats by which the ELBO misses the optimum; NaN where nothing shows it.
        num_iter: Steps, sweeps, evaluations or rounds that were taken; draws of a sampler.
        restart_elbos: The ELBOs of the starts, or of the distinct optima that they found; empty of one start.
    """

    gap: float = math.nan
    num_iter: int = 0
    restart_elbos: tuple[float, ...] = ()


@add_repr
class Description(NamedTuple):
    """What a posterior adds to its ArviZ data.

    Attributes:
        groups: Further groups, such as ``variational``: arrays by group and name.
        attrs: Further attributes: numbers and strings.
        dims: Names of dimensions by variable, beside chain and draw.
        coords: Labels by dimension, of those that have its length.
    """

    groups: Mapping[str, Mapping[str, ArrayLike]] = MappingProxyType({})
    attrs: Mapping[str, object] = EMPTY
    dims: Mapping[str, Sequence[str]] = MappingProxyType({})
    coords: Labels = MappingProxyType({})


class DataSummary(NamedTuple):
    """What a fit knows of its data: fits of the same data agree in all that both know.

    Attributes:
        observed: Observed values by site; None where the fit does not hold its data.
        counts: By site what each of them counts: its scale beside the power, 0 where it is masked.
        numbers: Counts, means and the like, by what they are called in an error.
        divergences: By site, for losses that are no log-likelihood, what they are.
    """

    observed: Mapping[str, Array] | None = None
    numbers: Mapping[str, ArrayLike] = MappingProxyType({})
    divergences: Mapping[str, object] = EMPTY
    counts: Mapping[str, np.ndarray] = MappingProxyType({})


class Posterior(Protocol):
    """A tempered posterior.

    Values are dictionaries by latent site, in the units of the model.
    """

    @property
    def alpha(self) -> ArrayLike | Mapping[str, float]:
        """Power on the likelihood; by site where sites differ."""
        ...

    @property
    def elbo(self) -> TemperedELBO | None:
        """The ELBO with its standard error and its two parts; None where nothing knows it, as of draws."""
        ...

    @property
    def converged(self) -> bool | Array | None:
        """Whether it has converged; None where nothing shows it."""
        ...

    @property
    def evidence(self) -> Evidence:
        """What is known of the optimum."""
        ...

    @property
    def mean(self) -> Mapping[str, Numbers]:
        """Means of the latents."""
        ...

    @property
    def sd(self) -> Mapping[str, Numbers]:
        """Their standard deviations."""
        ...

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws of the latents, ``(*sample_shape, ...)`` each."""
        ...

    def log_prob(self, values: Params) -> Array:
        """Log-density at values of the latents."""
        ...

    @property
    def predict(self) -> Callable[..., Params]:
        """``predict(rng_key, *args, **kwargs)``: draws of what is observed, at arguments of the model."""
        ...

    @property
    def on(self) -> Callable[..., Any]:
        """``on(*data, rng_key=None)``: itself at its data, whose ``target`` is the model at these."""
        ...

    def summarise_data(self) -> DataSummary:
        """What it knows of its data."""
        ...


def fit_attrs(fit: Posterior) -> dict[str, object]:
    """What a fit knows of itself, as attributes of ArviZ data."""
    attrs: dict[str, object] = {}
    if fit.elbo is not None:
        attrs = {"elbo": fit.elbo.value, "elbo_se": fit.elbo.se}
    # Files of netCDF know no booleans.
    return attrs if fit.converged is None else attrs | {"converged": int(fit.converged)}


def take_data(result: Any, data: tuple, *names: str) -> tuple:
    """The data that a result was fitted to, of these names, the first of them rows.

    Raises:
        ValueError: If some are missing, or have other columns than the result's.
    """
    if len(data) != len(names):
        raise ValueError(
            f"a {type(result).__name__} is followed by the data that it was fitted to, {' and '.join(names)}: "
            f"got {len(data)} values."
        )
    check_names(result, data[0])
    return data


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
            f"a {type(result).__name__} holds its data: pass it alone, got {strange}, neither data nor an option."
        )


VALUES = "number of observed values"
MOMENTS = "mean and root mean square of the observed values"
COLUMNS = "column means"


def summarise_observed(observed: Mapping[str, Array]) -> DataSummary:
    """The summary of data that a fit holds."""
    if len(observed) != 1:
        return DataSummary(observed)
    values = doubles(to_host(next(iter(observed.values()))))
    present = ~np.isnan(values)
    filled, count = np.where(present, values, 0.0), present.sum()
    moments = np.array([filled.sum(), np.square(filled).sum()]) / max(count, 1)
    numbers = {VALUES: count, MOMENTS: np.array([moments[0], np.sqrt(moments[1])])}
    if values.ndim == 2:
        numbers[COLUMNS] = filled.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    return DataSummary(observed, numbers)
