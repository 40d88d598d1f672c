"""Results as a model, a guide and its parameters."""

import math
from collections.abc import Mapping

import numpy as np

from numpyro_tempered.core.result import EMPTY, TemperedELBO
from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.infer.svi import TemperedFit

_NO_ELBO = TemperedELBO(math.nan, math.nan, math.nan, math.nan)


def fit_of(
    rng_key: Array, result: object, data: tuple, kwargs: Mapping[str, object] = EMPTY
) -> TemperedFit:
    """A result in the form of :func:`fit_svi`'s.

    Args:
        rng_key: For what is drawn from it.
        result: A result.
        data: What follows it, as in :func:`to_inference_data`.
        kwargs: Keyword arguments likewise.

    Raises:
        TypeError: If it has no guide.
        ValueError: If its data are missing.
    """
    if isinstance(result, TemperedFit):
        if data or kwargs:
            raise ValueError(
                "a TemperedFit holds its data: check_fit(key, fit), without further values or options."
            )
        return result
    if isinstance(result, OnlineVIState) and data and isinstance(data[0], OnlineVI):
        result, data = data[0], (result, *data[1:])
    if isinstance(result, OnlineVI):
        return _of_stream(rng_key, result, data, kwargs)
    if hasattr(result, "as_tempered_fit"):
        if len(data) != 1:
            raise ValueError(
                f"a {type(result).__name__} is check_fit(key, fit, x): the data that it was fitted to, got "
                f"{len(data)} values."
            )
        return result.as_tempered_fit(rng_key, data[0], **kwargs)
    if hasattr(result, "fit"):
        # A choice among fits.
        return fit_of(rng_key, result.fit, data, kwargs)
    raise TypeError(
        "check_fit takes a TemperedFit, an OnlineVI with its state and data, a MixtureFit or ComponentSelection "
        "with its data, an AlphaChoice, or a dictionary of draws with model, arguments and log_density=; got "
        f"{type(result).__name__}, which has no guide with a density."
    )


def has_labels(result: object) -> bool:
    """Whether a result is of a mixture, whose posterior has a mode for each order of its components' labels."""
    return hasattr(result, "as_tempered_fit") or hasattr(
        getattr(result, "fit", None), "as_tempered_fit"
    )


def _of_stream(
    rng_key: Array, online: OnlineVI, data: tuple, kwargs: Mapping[str, object]
) -> TemperedFit:
    if not data or not isinstance(data[0], OnlineVIState) or not (data[1:] or kwargs):
        raise ValueError(
            "an online run is check_fit(key, online, state, *data): the state, then the data."
        )
    online.require_set_up()
    state, (args, kwargs) = data[0], plain_arrays((data[1:], dict(kwargs)))
    return TemperedFit(
        online.model,
        online.guide,
        online.get_params(state),
        math.nan,
        np.empty(0),
        _NO_ELBO,
        {},
        args,
        kwargs,
        rng_key,
    )
