"""What a message of NumPyro's effect stack is: data, a prior term, or neither."""

import itertools
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    overload,
)

import numpyro.distributions as dist
from numpyro.contrib.control_flow.cond import cond_wrapper
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.primitives import Messenger

from numpyro_tempered.core import Model, Shape
from numpyro_tempered.handlers.numpyro_private import STACK

# Parameters and result of a model, and of another.
P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")
# A decorated model of unknown parameters: no model takes None alone.
Unknown = TypeVar("Unknown", bound="DecoratedModel[[None], Any]")
if TYPE_CHECKING:

    class Handler:
        """NumPyro's Messenger; a base whose types are unknown would match every overload."""

        __init__: Callable
        __enter__: Callable
        __exit__: Callable
        __call__: Callable

else:
    Handler = Messenger
Message: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Message]

# Keys that the handlers of this package leave on a message for those who read the trace afterwards.
ALPHA = "_temper_alpha"
IS_HIDDEN = "_marginalize_hidden"
LOCAL = "_temper_local"
DATA_NAME = "_marginalize_data_name"
PRIOR_FACTOR = "_temper_prior_factor"
PLACES = "_temper_places"
# That the model itself made the handler, so that the power may be one that it has drawn.
MADE_INSIDE = "_temper_made_inside"
SUM_PARTS = "_marginalize_sum_parts"


def base_distribution(fn: dist.Distribution) -> dist.Distribution:
    """The distribution under masks, expansions and reinterpreted batches."""
    while isinstance(
        fn, dist.MaskedDistribution | dist.ExpandedDistribution | dist.Independent
    ):
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


def is_inside_a_handler() -> bool:
    """Whether a message is sent by a handler as it handles another, to be asked from ``process_message``.

    Only the call stack tells: a model may send the very messages that a handler around it sends, in the same
    order and under the same handlers. Outwards from here comes the ``apply_stack`` of this message, then that of
    the message being handled. The body of a ``scan`` or ``cond`` runs in ``default_process_message``, which is
    the model again. Functions are known by module and name, so that wrappers around them change nothing.

    Raises:
        RuntimeError: If NumPyro's functions are not on the call stack, as where they have been compiled.
    """
    steps = (
        frame.f_code.co_name
        for frame, _ in traceback.walk_stack(sys._getframe())
        if frame.f_globals.get("__name__") == "numpyro.primitives"
        and frame.f_code.co_name in ("apply_stack", "default_process_message")
    )
    innermost = list(itertools.islice(steps, 2))
    if innermost[:1] != ["apply_stack"]:
        raise RuntimeError(
            "the call stack shows no apply_stack of numpyro.primitives, without which a Jacobian cannot be told "
            "from a likelihood factor: this NumPyro is compiled, or newer than numpyro_tempered knows."
        )
    return innermost[1:] == ["apply_stack"]


def plates_of(msg: Message) -> set[str]:
    """Names of the plates that a site is in."""
    return {frame.name for frame in msg["cond_indep_stack"]}


def layers(outermost: object, attribute: str) -> list[Any]:
    """An object, the one that an attribute of it holds, and so on."""
    chain = [outermost]
    while (inner := getattr(chain[-1], attribute, None)) is not None:
        chain.append(inner)
    return chain


def handler_chain(model: object) -> list[Any]:
    """A model and the callables under its handlers, outermost first."""
    return layers(model, "fn")


def draw_shape(msg: Message) -> Shape:
    """The shape of the values that a sample site draws."""
    return msg["fn"].shape(msg["kwargs"].get("sample_shape", ()))


def is_same(model: object, other: object) -> bool:
    """Whether two models are one, or the same method of one instance, which is made anew at each access."""
    return model is other or (hasattr(model, "__func__") and model == other)


class DecoratedModel(Generic[P, R]):
    """A decorated model: as a method it binds, and it is pickled by the name of its function."""

    fn: Callable
    __name__: str
    __call__: Callable[P, R]

    @abstractmethod
    def _copy(self, fn: Callable) -> "DecoratedModel":
        """The same handler of another function."""

    def _decorate(self, args: tuple, kwargs: dict) -> "DecoratedModel":
        """Make the first call of a handler without a model decorate one."""
        if len(args) != 1 or kwargs or not callable(args[0]):
            name = type(self).__name__
            raise TypeError(f"{name}(...) without a model decorates one callable.")
        return self._copy(args[0])

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Unknown, instance: object, owner: type | None = None
    ) -> Unknown: ...
    @overload
    def __get__(
        self: "DecoratedModel[Concatenate[Any, Q], S]",
        instance: object,
        owner: type | None = None,
    ) -> "DecoratedModel[Q, S]": ...
    def __get__(self, instance: object, owner: type | None = None) -> "DecoratedModel":
        """Return the model of an instance, as a function of a class does."""
        if instance is None or not hasattr(handler_chain(self.fn)[-1], "__get__"):
            return self
        # NumPyro's handlers bind nothing.
        bind = getattr(self.fn, "__get__", lambda to: MethodType(self.fn, to))
        bound = self._copy(bind(instance))
        vars(bound).update(__func__=self, __self__=instance)
        return bound

    def _origin(self) -> tuple[int, int]:
        return id(getattr(self, "__func__", self)), id(getattr(self, "__self__", None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoratedModel) and self._origin() == other._origin()

    def __hash__(self) -> int:
        return hash(self._origin())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        """The name of a decorated module-level model, or of a method and its instance."""
        if hasattr(self, "__self__"):
            return getattr, (self.__self__, self.__name__)
        function = handler_chain(self)[-1]
        name = getattr(function, "__qualname__", None)
        if name is not None and getattr(function, "__globals__", {}).get(name) is self:
            return name
        return super().__reduce_ex__(protocol)


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
    bodies = {scan_wrapper: (0,), cond_wrapper: (1, 2)}.get(
        msg["fn"], range(len(msg["args"]))
    )
    msg["args"] = tuple(
        handler(arg) if i in bodies and callable(arg) else arg
        for i, arg in enumerate(msg["args"])
    )


def is_cond(msg: Message) -> bool:
    """Whether the control flow of a message is a ``cond``."""
    return msg["fn"] is cond_wrapper


def is_reading() -> bool:
    """Whether powers are written and not applied."""
    return any(isinstance(handler, read_powers) for handler in STACK)
