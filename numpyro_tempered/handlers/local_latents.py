"""Local continuous latents: scaled by alpha in model and guide (YPB)."""

import warnings
from typing import Any

from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_tempered.core.typing import Guide
from numpyro_tempered.handlers.effects import LOCAL, Message, caller, is_reading, plates_of
from numpyro_tempered.handlers.powers import is_power, scale


class scale_local(Messenger):
    """Scale a guide's latents in the local plates; see :meth:`temper.guide`."""

    def __init__(self, fn: Guide, alpha: Any, local_plates: frozenset[str]) -> None:
        self.alpha = alpha
        self.local_plates = local_plates
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        """Scale a latent of the local plates."""
        if msg["type"] == "sample" and not msg["is_observed"]:
            scale_if_local(msg, self.alpha, self.local_plates)


def scale_if_local(msg: Message, alpha: Any, local_plates: frozenset[str]) -> None:
    """Multiply the log-probability of a latent by ``alpha`` where it is in a local plate."""
    if not local_plates & plates_of(msg):
        return
    msg[LOCAL] = alpha * msg[LOCAL] if LOCAL in msg else alpha
    if not is_reading() and not is_power(alpha, 1.0):
        scale(msg, alpha)


def check_guide(msg: Message) -> None:
    """Refuse a guide that scales this latent in another way than the model; warn where there is no guide."""
    name, here = msg["name"], msg.get(LOCAL, 1.0)
    for handler in _PYRO_STACK:
        if not (isinstance(handler, handlers.replay) and name in handler.trace):
            continue
        there = handler.trace[name].get(LOCAL, 1.0)
        if is_power(there, 1.0) and not is_power(here, 1.0):
            raise ValueError(
                f"the guide does not scale the local latent {name!r} by alpha: pass tempered.guide(guide) to "
                f"SVI, and give {name!r} the plates {sorted(plates_of(msg))} in the guide (AutoNormal does; a "
                "guide that holds all latents in one flat vector cannot)."
            )
        # Of two traced powers nobody knows whether they are equal.
        floats = isinstance(here, float), isinstance(there, float)
        if any(floats) and (not all(floats) or here != there):
            raise ValueError(
                f"the guide scales the local latent {name!r} by {there} and the model by {here}: wrap the guide "
                "by the model that SVI is given, which names the local_plates."
            )
    if not is_power(here, 1.0) and caller(MCMC.run) is not None:
        warnings.warn(
            f"MCMC samples the local latent {name!r} from a joint density to the power alpha, whose marginal "
            "is not the tempered marginal likelihood times the prior: integrate the local latents out of "
            "the model, or fit it by SVI.",
            stacklevel=2,
        )
