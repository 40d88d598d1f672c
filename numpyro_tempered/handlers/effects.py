"""What a message of NumPyro's effect stack is: data, a prior term, or neither."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpyro.distributions as dist
from numpyro.contrib.control_flow.cond import cond_wrapper
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack, default_process_message

Message = dict[str, Any]

# Keys that the handlers of this package leave on a message for those who read the trace afterwards.
ALPHA = "_temper_alpha"
HIDDEN = "_marginalize_hidden"
LOCAL = "_temper_local"
OUTSIDE = "_marginalize_outside"
PRIOR_FACTOR = "_temper_prior_factor"
SEEN = "_temper_seen"
SUMMED = "_marginalize_summed"


def base_distribution(fn: Any) -> Any:
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
    ``numpyro.factor`` sites; names cannot tell them from the user's. They come from inside another
    handler's ``process_message``: walking the Python frames outwards from here, one meets the
    ``apply_stack`` of this message, then that of the message being handled. The body of a ``scan``
    or ``cond`` runs in ``default_process_message``, which is the model again. Must be called from a
    handler's ``process_message``.
    """
    if PRIOR_FACTOR in msg:
        return msg[PRIOR_FACTOR]
    if msg.get("_control_flow_done"):
        return False
    stacks = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is apply_stack.__code__:
            stacks += 1
            if stacks == 2:
                return True
        elif frame.f_code is default_process_message.__code__:
            return False
        frame = frame.f_back
    return False


def caller(function: Callable[..., Any]) -> FrameType | None:
    """The innermost frame of ``function`` on the call stack."""
    code: CodeType = function.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def plates_of(msg: Message) -> set[str]:
    """Names of the plates that a site is in."""
    return {frame.name for frame in msg["cond_indep_stack"]}


def handler_chain(model: Any) -> list[Any]:
    """A model and the callables under its handlers, outermost first."""
    chain = []
    while model is not None:
        chain.append(model)
        model = getattr(model, "fn", None)
    return chain


def reduce_by_name(model: Any) -> str | None:
    """The name that pickles a decorated module-level model, whose function's name is the model's."""
    function = handler_chain(model)[-1]
    name = getattr(function, "__qualname__", None)
    return name if name is not None and getattr(function, "__globals__", {}).get(name) is model else None


class mark_prior_factors(Messenger):
    """Write on each observed ``Unit`` site whether it is a prior term; the mark survives a scan."""

    def process_message(self, msg: Message) -> None:
        """Mark the message."""
        if msg["type"] == "control_flow":
            wrap_bodies(msg, mark_prior_factors)
        elif msg["type"] == "sample" and msg["is_observed"] and is_unit(msg):
            msg[PRIOR_FACTOR] = is_prior_factor(msg)


class read_powers(mark_prior_factors):
    """Run a model with its powers written on the sites but not applied to scales and distributions."""


def wrap_bodies(msg: Message, handler: Callable[[Any], Any]) -> None:
    """Put a handler around the bodies of a ``scan`` or ``cond``, whose sites return without frames."""
    # A carry or an operand may be callable too.
    bodies = {scan_wrapper: (0,), cond_wrapper: (1, 2)}.get(msg["fn"], range(len(msg["args"])))
    msg["args"] = tuple(
        handler(arg) if i in bodies and callable(arg) else arg for i, arg in enumerate(msg["args"])
    )


def is_reading() -> bool:
    """Whether powers are written and not applied."""
    return any(isinstance(handler, read_powers) for handler in _PYRO_STACK)
