"""The two questions that only the call stack answers.

A model may emit the very messages that a handler inside of it emits, in the same order: no message, trace or
program tells whose a factor is. And SVI shows the handlers of its model the trace of the guide, not the guide.
Functions are known by module and name, and objects by their type, so that wrappers around NumPyro's functions
change nothing.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def is_inside_a_handler() -> bool:
    """Whether a message is sent by a handler as it handles another, to be asked from ``process_message``.

    Outwards from here one meets the ``apply_stack`` of this message, then that of the message being handled.
    The body of a ``scan`` or ``cond`` runs in ``default_process_message``, which is the model again.

    Raises:
        RuntimeError: If NumPyro's functions are not on the call stack, as where they have been compiled.
    """
    depth = 0
    for frame in _frames():
        if frame.f_globals.get("__name__") != "numpyro.primitives":
            continue
        if frame.f_code.co_name == "apply_stack":
            depth += 1
            if depth == 2:
                return True
        elif frame.f_code.co_name == "default_process_message":
            break
    if depth == 0:
        raise RuntimeError(
            "the call stack shows no apply_stack of numpyro.primitives, without which a Jacobian cannot be told "
            "from a likelihood factor: this NumPyro is compiled, or newer than numpyro_tempered knows."
        )
    return False


def running(kind: type[T]) -> T | None:
    """The innermost object of this type, one of whose methods runs."""
    for frame in _frames():
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(self := frame.f_locals.get("self"), kind):
            return self
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
