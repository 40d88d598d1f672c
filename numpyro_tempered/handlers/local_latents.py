"""Local continuous latents: scaled by alpha in model and guide (YPB)."""

import warnings

from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core.typing import Guide
from numpyro_tempered.handlers.effects import LOCAL, Message, is_reading, plates_of
from numpyro_tempered.handlers.numpyro_private import STACK, unconstrain_reparam
from numpyro_tempered.handlers.powers import Powers, is_power, scale


class scale_local(Messenger):
    """Scale a guide's latents in the local plates; see :meth:`temper.guide`."""

    def __init__(self, fn: Guide, alpha: Powers, local_plates: frozenset[str]) -> None:
        self.alpha = alpha
        self.local_plates = local_plates
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        """Scale a latent of the local plates."""
        if msg["type"] == "sample" and not msg["is_observed"]:
            scale_if_local(msg, self.alpha, self.local_plates)


def scale_if_local(msg: Message, alpha: Powers, local_plates: frozenset[str]) -> None:
    """Multiply the log-probability of a latent by ``alpha`` where it is in a local plate."""
    if isinstance(alpha, dict) or not local_plates & plates_of(msg):
        return
    msg[LOCAL] = alpha * msg[LOCAL] if LOCAL in msg else alpha
    if not is_reading() and not is_power(alpha, 1.0):
        scale(msg, alpha)


def check_guide(msg: Message) -> None:
    """Refuse a guide that does not scale this latent as the model does; warn where MCMC samples it."""
    name, power = msg["name"], msg.get(LOCAL, 1.0)
    for handler in STACK:
        if not (isinstance(handler, handlers.replay) and name in handler.trace):
            continue
        guide_power = handler.trace[name].get(LOCAL, 1.0)
        if is_power(guide_power, 1.0) and not is_power(power, 1.0):
            raise ValueError(
                f"the guide does not scale the local latent {name!r} by alpha: pass tempered.guide(guide) to "
                f"SVI, and give {name!r} the plates {sorted(plates_of(msg))} in the guide (AutoNormal does; a "
                "guide that holds all latents in one flat vector cannot)."
            )
        # Whether two traced powers are equal is not known.
        floats = isinstance(power, float), isinstance(guide_power, float)
        if any(floats) and (not all(floats) or power != guide_power):
            raise ValueError(
                f"the guide scales the local latent {name!r} by {guide_power} and the model by {power}: wrap the "
                "guide by the model that SVI is given, which names the local_plates."
            )
    if not is_power(power, 1.0) and _is_target_of_mcmc():
        warnings.warn(
            f"MCMC samples the local latent {name!r} from a joint density to the power alpha, whose marginal "
            "is not the tempered marginal likelihood times the prior: integrate the local latents out of "
            "the model, or fit it by SVI.",
            stacklevel=2,
        )


def _is_target_of_mcmc() -> bool:
    """Whether the model runs for its potential energy, and not to set a guide up, which hides its handlers."""
    for handler in STACK:
        if isinstance(handler, handlers.block):
            return False
        if getattr(getattr(handler, "substitute_fn", None), "func", None) is unconstrain_reparam:
            return True
    return False
