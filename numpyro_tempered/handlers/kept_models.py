"""Guides that keep a model and use it."""

from typing import Any

from numpyro.infer import SVI
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)
from numpyro.primitives import Messenger

from numpyro_tempered.handlers.effects import caller, handler_chain

# Guides whose objective is a density of the model that they keep, not of the model that SVI is given.
_USE_THEIR_MODEL = (AutoDAIS, AutoLaplaceApproximation, AutoSemiDAIS)


def check_kept_model(handler: Messenger, alpha: Any) -> None:
    """Refuse a guide of SVI that would not know of ``alpha``, for it runs another model than SVI's.

    Raises:
        ValueError: If there is such a guide.
    """
    frame = caller(SVI.init)
    svi = None if frame is None else frame.f_locals.get("self")
    if svi is None or handler not in handler_chain(svi.model):
        return
    for part in _auto_guides(svi.guide):
        if isinstance(part, _USE_THEIR_MODEL) and handler not in handler_chain(part.model):
            raise ValueError(
                f"this {type(part).__name__} keeps a model without alpha = {alpha} and would ignore it: "
                "build the guide on the tempered model that SVI is given."
            )


def _auto_guides(guide: Any) -> list[AutoGuide]:
    """The automatic guides in a guide."""
    found = [part for part in handler_chain(guide) if isinstance(part, AutoGuide)]
    lists = [part for part in found if isinstance(part, AutoGuideList)]
    return found + [inner for part in lists for each in part._guides for inner in _auto_guides(each)]
