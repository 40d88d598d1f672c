"""Powers of the likelihood: their validation, their place on a message, and algorithms that would lose them."""

from collections.abc import Mapping
from typing import Any, TypeAlias, overload

from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDAIS, AutoGuide, AutoGuideList, AutoLaplaceApproximation, AutoSemiDAIS
from numpyro.primitives import Messenger

from numpyro_tempered.core.checks import check_number, is_traced
from numpyro_tempered.core.typing import ArrayLike, Guide
from numpyro_tempered.handlers.call_stack import running
from numpyro_tempered.handlers.effects import Message, handler_chain, plates_of
from numpyro_tempered.handlers.numpyro_private import STACK, estimate_likelihood, parts

# Or a tracer of one.
Power: TypeAlias = float
Powers: TypeAlias = Power | dict[str, Power]

# Guides whose objective is a density of the model that they keep, not of the model that SVI is given.
_USE_THEIR_MODEL = (AutoDAIS, AutoLaplaceApproximation, AutoSemiDAIS)


@overload
def check_alpha(alpha: ArrayLike) -> Power: ...
@overload
def check_alpha(alpha: Mapping[str, ArrayLike]) -> dict[str, Power]: ...
def check_alpha(alpha: ArrayLike | Mapping[str, ArrayLike]) -> Powers:
    """A concrete ``alpha`` as a float, a traced one as it is, a mapping as a dict of these.

    Raises:
        ValueError: If it is not one number, negative, or not finite.
    """
    if not isinstance(alpha, Mapping):
        return _check_power(alpha, "alpha")
    if not alpha or not all(isinstance(name, str) for name in alpha):
        raise ValueError(f"alpha as a mapping must go from site names to powers, got {alpha!r}.")
    return {name: _check_power(power, f"alpha[{name!r}]") for name, power in alpha.items()}


def _check_power(alpha: Any, name: str) -> Power:
    try:
        check_number(alpha, name, "[0, inf)")
    except TypeError as error:
        raise ValueError(str(error)) from error
    return alpha if is_traced(alpha) else float(alpha)


def is_power(alpha: Powers, value: float) -> bool:
    """Whether a power, or each of a mapping, is this concrete value."""
    if isinstance(alpha, dict):
        return all(is_power(part, value) for part in alpha.values())
    return isinstance(alpha, float) and alpha == value


def scale(msg: Message, alpha: Power) -> None:
    """Multiply the scale of a site, in the two places where NumPyro keeps it."""
    msg["scale"] = alpha if msg.get("scale") is None else alpha * msg["scale"]
    plates = msg.setdefault("plate_to_scale", {})
    plates[None] = alpha if plates.get(None) is None else alpha * plates[None]


def check_algorithm(handler: Messenger, msg: Message, alpha: Power) -> None:
    """Refuse HMCECS, and a guide of SVI that would not know of ``alpha``, for it runs another model than SVI's.

    Raises:
        ValueError: If one of them runs the model.
    """
    if any(_is_ecs(other, msg) for other in STACK):
        raise ValueError(
            f"HMCECS ignores the scale of site {msg['name']!r}, so alpha = {alpha} would be lost: it samples "
            "the untempered posterior. Use NUTS or HMC."
        )
    svi = running(SVI)
    if svi is None or handler not in handler_chain(svi.model):
        return
    for guide in _auto_guides(svi.guide):
        if isinstance(guide, _USE_THEIR_MODEL) and handler not in handler_chain(guide.model):
            raise ValueError(
                f"this {type(guide).__name__} keeps a model without alpha = {alpha} and would ignore it: "
                "build the guide on the tempered model that SVI is given."
            )


def _is_ecs(handler: Messenger, msg: Message) -> bool:
    """Whether HMCECS put this handler around its model: an estimator, or a condition on the rows of a plate."""
    if isinstance(handler, handlers.condition):
        return not plates_of(msg).isdisjoint(handler.data or ())
    return isinstance(handler, estimate_likelihood)


def _auto_guides(guide: Guide) -> list[AutoGuide]:
    """The automatic guides in a guide."""
    guides = [layer for layer in handler_chain(guide) if isinstance(layer, AutoGuide)]
    lists = [layer for layer in guides if isinstance(layer, AutoGuideList)]
    return guides + [inner for layer in lists for part in parts(layer) for inner in _auto_guides(part)]
