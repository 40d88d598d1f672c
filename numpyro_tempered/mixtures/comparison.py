"""The comparison of numbers of components, as arrays and as a Dataset."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from numpyro_tempered.core import Columns
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.arviz import dataset
from numpyro_tempered.select.ranking import rank_models

if TYPE_CHECKING:
    import xarray as xr

# K, or the name of a family and K.
Model: TypeAlias = int | tuple[str, int]


def label_term(fitted: MixtureFit) -> float:
    """log(K! / (K - K₊)!) for K₊ occupied components of K."""
    k = fitted.num_components
    return math.lgamma(k + 1) - math.lgamma(k - fitted.num_occupied + 1)


def criterion_columns(
    fits: Mapping[Any, MixtureFit], log_weights: np.ndarray, label_multiplicity: bool
) -> Columns:
    """The comparison by model, without baselines."""
    bounds = [fitted.bound for fitted in fits.values() if fitted.bound is not None]
    if len(bounds) < len(fits):
        raise ValueError(
            "num_draws=0 leaves out E1, which the number of components is selected by."
        )
    elbo = np.array([bound.value for bound in bounds])
    labels = np.array(
        [label_term(fitted) if label_multiplicity else 0.0 for fitted in fits.values()]
    )
    spread = np.array([fitted.spread for fitted in fits.values()])
    se = np.array([bound.se for bound in bounds])
    kl = np.array([fitted.kl for fitted in fits.values()])
    num_best = np.array([fitted.num_best for fitted in fits.values()])
    ranking = rank_models(
        elbo + labels, log_weights, error=np.where(num_best < 2, spread, 0.0) + 2.0 * se
    )
    return {
        "elbo": elbo,
        "se": se,
        "objective": np.array([fitted.objective for fitted in fits.values()]),
        "log_prior": log_weights,
        **({"log_labels": labels} if label_multiplicity else {}),
        "criterion": ranking.criterion,
        "rank": ranking.rank,
        "weight": ranking.weight,
        "expected_log_lik": (elbo + kl)
        / np.array([fitted.alpha for fitted in fits.values()]),
        "kl": kl,
        "num_occupied": np.array([fitted.num_occupied for fitted in fits.values()]),
        "num_best": num_best,
        "spread": spread,
        "uncertain": ranking.uncertain,
        "converged": np.array([fitted.converged for fitted in fits.values()]),
    }


def comparison_dataset(
    columns: Mapping[str, np.ndarray],
    models: Sequence[Model],
    attrs: Mapping[str, object],
) -> "xr.Dataset":
    """The comparison by K, or by family and K: NaN where a family has not this K."""
    pairs = [model for model in models if isinstance(model, tuple)]
    if not pairs:
        dims, coords = ["num_components"], {"num_components": list(models)}
        return dataset(
            columns, coords=coords, dims=dict.fromkeys(columns, dims), attrs=attrs
        )
    names, orders = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    places = tuple(
        np.array([[names.index(name), orders.index(k)] for name, k in pairs]).T
    )
    is_full = len(pairs) == len(names) * len(orders)

    def spread(values: np.ndarray) -> np.ndarray:
        shape = len(names), len(orders)
        table = np.zeros(shape, values.dtype) if is_full else np.full(shape, np.nan)
        table[places] = values
        return table

    data = dataset(
        {key: spread(values) for key, values in columns.items()},
        # Not "component", which numbers the components of a mixture in the other groups.
        coords={"family": names, "num_components": orders},
        dims={key: ["family", "num_components"] for key in columns},
        attrs=attrs,
    )
    for key, values in columns.items():
        # What NaN turned into floating numbers.
        data[key].attrs["kind"] = values.dtype.name
    return data
