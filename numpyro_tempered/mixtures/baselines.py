"""Maximum likelihood beside the fits of a selection."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_tempered.core import Array, ArrayLike
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.orders import fold_in
from numpyro_tempered.mixtures.result import MixtureFit


def baseline_columns(
    rng_key: Array,
    x: ArrayLike,
    components: Mapping[str | None, Component],
    fits: Mapping[str | None, Mapping[int, MixtureFit]],
    options: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Log-likelihood, BIC and ICL of maximum likelihood by family and K."""
    settings = {
        "num_restarts": options["num_restarts"],
        "sample_weight": options.get("sample_weight"),
    }

    def baseline(component: Component, k: int) -> tuple[float, float, float]:
        if component.maximum_likelihood is None:
            return math.nan, math.nan, math.nan
        try:
            result = em(fold_in(rng_key, k), x, component, num_components=k, **settings)
        except FloatingPointError:
            return math.nan, math.nan, math.nan
        return result.log_likelihood, result.bic, result.icl

    rows = [baseline(components[name], k) for name, each in fits.items() for k in each]
    return dict(zip(("log_lik", "bic", "icl"), np.array(rows).T, strict=True))
