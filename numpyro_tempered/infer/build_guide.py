"""The guide of a tempered model."""

from collections.abc import Callable

from numpyro_tempered.core import Guide, Model, check_count, describe
from numpyro_tempered.handlers.effects import handler_chain, is_same
from numpyro_tempered.handlers.powers import Powers, is_power
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guide_laws import is_auto


def build_guide(
    guide: Callable[[Model], Guide] | Guide,
    model: Model,
    tempered: temper,
    alpha: Powers,
) -> Guide:
    """The guide that a factory builds on the tempered model; a guide instance of the model is returned unchanged.

    Raises:
        ValueError: If the guide is built on another model.
        TypeError: If the factory does not return a guide.
    """
    if is_auto(guide):
        if not is_power(alpha, 1.0):
            raise ValueError(
                f"this {type(guide).__name__} is built already, on a model without alpha = {alpha}, and "
                "guides may keep their model. Pass the guide's class, or a callable from model to guide."
            )
        if not _wraps(guide.model, model):
            raise ValueError(
                f"this {type(guide).__name__} is built on another model than the one to fit, and guides may "
                "keep their model. Build it on the same model, or pass the guide's class."
            )
        return guide
    if not callable(guide):
        raise TypeError(
            f"guide must be a callable from model to guide, got {describe(guide)}."
        )
    advice = "for a hand-written guide pass `lambda model: my_guide`."
    try:
        result = guide(tempered)
    except Exception as error:
        raise TypeError(f"the guide factory failed on the model: {advice}") from error
    if not callable(result):
        raise TypeError(
            f"the guide factory returned {type(result).__name__}, not a guide: {advice}"
        )
    inner = getattr(result, "model", None)
    if inner is not None and not is_power(alpha, 1.0) and not _wraps(inner, tempered):
        raise ValueError(
            f"the guide factory returned a {type(result).__name__} built on another model than the "
            f"tempered one it was given, so alpha = {alpha} would be lost. Build it on its argument."
        )
    return result


def check_restarts(guide: object, num_restarts: int) -> None:
    """Refuse a number of restarts that is none, and a guide that could not start elsewhere.

    Raises:
        ValueError: If it is one of these.
    """
    if check_count(num_restarts, "num_restarts", 1) > 1 and is_auto(guide):
        raise ValueError(
            f"num_restarts needs a new guide for each start, and this {type(guide).__name__} is built already: "
            "pass its class, or a callable from model to guide."
        )


def _wraps(model: object, inner: Model) -> bool:
    """Whether ``model`` is ``inner`` or a chain of handlers around it."""
    return any(is_same(layer, inner) for layer in handler_chain(model))
