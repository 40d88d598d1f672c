"""What a message of NumPyro's effect stack is: data, a prior term, or neither."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpyro.distributions as dist
from numpyro.contrib.control_flow.cond import cond_wrapper
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.primitives import Messenger

from numpyro_tempered.core.typing import Model
from numpyro_tempered.handlers.call_stack import is_inside_a_handler
from numpyro_tempered.handlers.numpyro_private import STACK

Message: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Message]

# Keys that the handlers of this package leave on a message for those who read the trace afterwards.
ALPHA = "_temper_alpha"
IS_HIDDEN = "_marginalize_hidden"
LOCAL = "_temper_local"
DATA_NAME = "_marginalize_data_name"
PRIOR_FACTOR = "_temper_prior_factor"
PLACES = "_temper_places"
SUM_PARTS = "_marginalize_sum_parts"


def base_distribution(fn: dist.Distribution) -> dist.Distribution:
    """The distribution under masks, expansions and reinterpreted batches."""
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def is_unit(msg: Message) -> bool:
    """Whether an observed site is a ``numpyro.factor``, of the model or of a handler."""
    return isinstance(base_distribution(msg["fn"]), dist.Unit)


def is_prior_factor(msg: Message) -> bool:
    """Whether an observed ``Unit`` site is a prior term that a handler emitted, not the model.

    NumPyro's Jacobians of unconstrained parameters and the terms of its reparameterisers are
    ``numpyro.factor`` sites; names cannot tell them from the user's. They are sent from inside another
    handler's ``process_message``. Must be called from a handler's ``process_message``.
    """
    if PRIOR_FACTOR in msg:
        return msg[PRIOR_FACTOR]
    return not msg.get("_control_flow_done") and is_inside_a_handler()


def plates_of(msg: Message) -> set[str]:
    """Names of the plates that a site is in."""
    return {frame.name for frame in msg["cond_indep_stack"]}


def handler_chain(model: object) -> list[Any]:
    """A model and the callables under its handlers, outermost first."""
    chain = [model]
    while (model := getattr(model, "fn", None)) is not None:
        chain.append(model)
    return chain


def reduce_by_name(model: object) -> str | None:
    """The name that pickles a decorated module-level model, whose function's name is the model's."""
    function = handler_chain(model)[-1]
    name = getattr(function, "__qualname__", None)
    return name if name is not None and getattr(function, "__globals__", {}).get(name) is model else None


def mark(msg: Message) -> None:
    """Write on an observed ``Unit`` site whether it is a prior term; the mark survives a scan."""
    if msg["type"] == "sample" and msg["is_observed"] and is_unit(msg):
        msg[PRIOR_FACTOR] = is_prior_factor(msg)


class mark_prior_factors(Messenger):
    """Mark each site, also in the bodies of control flow."""

    def process_message(self, msg: Message) -> None:
        """Mark the message."""
        mark(msg)
        if msg["type"] == "control_flow":
            wrap_bodies(msg, mark_prior_factors)


class read_powers(mark_prior_factors):
    """Run a model with its powers written on the sites but not applied to scales and distributions."""


def wrap_bodies(msg: Message, handler: Callable[[Model], Model]) -> None:
    """Put a handler around the bodies of a ``scan`` or ``cond``: outer handlers see their sites afterwards."""
    # A carry or an operand may be callable too.
    bodies = {scan_wrapper: (0,), cond_wrapper: (1, 2)}.get(msg["fn"], range(len(msg["args"])))
    msg["args"] = tuple(
        handler(arg) if i in bodies and callable(arg) else arg for i, arg in enumerate(msg["args"])
    )


def is_reading() -> bool:
    """Whether powers are written and not applied."""
    return any(isinstance(handler, read_powers) for handler in STACK)
