"""What a site observes, and who made it observed: a model, NumPyro's algorithms, or a handler in between."""

import math

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_tempered.handlers.effects import Message
from numpyro_tempered.handlers.numpyro_private import STACK, is_enumerating

LATENT_POWER = (
    "the power of the likelihood depends on {}: the tempered likelihood has a normalising constant that depends "
    "on the power, and without it the posterior of the power is wrong, most often near 0. Give a number, as of "
    "nt.select_alpha, or compare fits at several."
)


def is_fixed_by_gibbs(msg: Message) -> bool:
    """Whether a Gibbs kernel fixes a latent: by ``condition`` and ``substitute`` with the same values."""
    fixed = [
        handler.data
        for handler in STACK
        if isinstance(handler, handlers.substitute) and handler.data
    ]
    return any(
        isinstance(handler, handlers.condition)
        and msg["name"] in (handler.data or ())
        and any(handler.data is data for data in fixed)
        for handler in STACK
    )


def draws_discrete() -> bool:
    """Whether ``Predictive(infer_discrete=True)`` runs the model: it conditions it under a mask of True."""
    return any(
        isinstance(handler, handlers.condition)
        and isinstance(handler.fn, handlers.mask)
        and handler.fn.mask is True
        for handler in STACK
    )


def is_fixed_latent(msg: Message) -> bool:
    """Whether NumPyro itself fixes this latent, by making it observed."""
    # DCC and SDVI condition the latents that choose a branch of the model.
    is_branch = (msg.get("infer") or {}).get("branching")
    return bool(is_branch or is_fixed_by_gibbs(msg) or draws_discrete())


def check_observer(msg: Message, name: str) -> None:
    """Refuse what a handler outside has observed, unless NumPyro itself does so to a latent.

    Args:
        msg: Of the observed site, after the handlers outside.
        name: The site's name in the model.
    """
    if not is_fixed_latent(msg):
        raise ValueError(
            f"site {name!r} is observed by a handler outside of temper, which leaves it untempered: write "
            "temper(condition(model, data), ...), or pass the data to the model. To fix a latent at a value "
            "take handlers.substitute, or strict=False, which lets all of this pass."
        )


def check_shape(site: Message) -> None:
    """Refuse values that broadcast against their distribution to more data than were observed.

    Raises:
        ValueError: With both shapes.
    """
    fn, shape = site["fn"], jnp.shape(site["value"])
    if not shape or math.prod(shape) == 0 or is_enumerating():
        return
    batch = jnp.broadcast_shapes(
        tuple(fn.batch_shape), shape[: len(shape) - fn.event_dim]
    )
    if math.prod(batch) > math.prod(shape) // max(1, math.prod(fn.event_shape)):
        raise ValueError(
            f"observed site {site['name']!r} has values of shape {shape} but log-probabilities of shape {batch}: "
            "they broadcast against each other. Give them one shape."
        )


def refuse_drawn_power(alpha: object) -> None:
    """Refuse a power that is the value of a latent of the model that runs."""
    latents = {
        id(site["value"]): name
        for handler in STACK
        if isinstance(handler, handlers.trace)
        for name, site in handler.trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    for power in jax.tree.leaves(alpha):
        if isinstance(power, jax.Array) and id(power) in latents:
            raise ValueError(LATENT_POWER.format(f"latent {latents[id(power)]!r}"))


def refuse_enumerated(name: str) -> None:
    """Refuse an enumerated latent of a plate or a scan: the power would be inside of the sum over its values."""
    raise ValueError(
        f"temper met the enumerated local latent {name!r}: the power belongs outside of the sum over "
        "its values. Write temper(marginalize(model), alpha), with numpyro_tempered.marginalize. If it is "
        "a parameter, as an indicator of variable selection, sample it by "
        "DiscreteHMCGibbs(NUTS(temper(model, alpha))); or, where each of its elements has data of its "
        f"own, declare it: temper(..., discrete_parameters=[{name!r}])."
    )
