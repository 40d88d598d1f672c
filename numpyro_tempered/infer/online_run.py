"""Draws of an online posterior with its data, for reports."""

from typing import Any

from numpyro_tempered.core.result import Run
from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online import Losses
from numpyro_tempered.report.draws import (
    name_of,
    one_chain,
    plain_params,
    trace_at_first_draw,
)


def run_of(
    online: Any,
    *data: object,
    num_samples: int = 1000,
    rng_key: Array | None = None,
    losses: Losses | None = None,
    **kwargs: object,
) -> Run:
    """Draws of an :class:`~numpyro_tempered.OnlineVI`.

    Args:
        online: The OnlineVI.
        *data: The state, then the data of the run.
        num_samples: Number of draws.
        rng_key: Key of the draws; by default that of the run.
        losses: Those of each round, to report.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: If state or data are missing, or the model observes nothing on these data.
    """
    if not data or not isinstance(data[0], OnlineVIState) or not (data[1:] or kwargs):
        raise ValueError(
            "an online run is to_inference_data(online, state, *data): the state, then the data."
        )
    state, (args, kwargs) = data[0], plain_arrays((data[1:], kwargs))
    online.require_set_up()
    key = state.rng_key if rng_key is None else rng_key
    samples = one_chain(online.sample_posterior(key, state, num_samples))
    variational = plain_params(online.get_params(state)) | state.totals(losses)
    attrs = {
        "algorithm": "online",
        "rule": online.rule.name,
        "guide": name_of(online.guide),
    }
    run = Run(
        online.model, samples, args, kwargs, key, {"variational": variational}, attrs
    )
    require(
        trace_at_first_draw(run), {"data": " on these data: pass those of the run."}
    )
    return run
