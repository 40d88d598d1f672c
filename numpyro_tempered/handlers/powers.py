"""Powers on the sites of a model: their validation, their place on a message, and what would lose them."""

from collections.abc import Mapping
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import MaskedDistribution
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)
from numpyro.primitives import Messenger

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Guide,
    as_array,
    check_number,
    check_numbers,
    is_traced,
    to_host,
    warn_caller,
)
from numpyro_tempered.handlers import numpyro_private
from numpyro_tempered.handlers.effects import (
    LOCAL,
    Message,
    handler_chain,
    is_reading,
    is_unit,
    plates_of,
)
from numpyro_tempered.handlers.numpyro_private import STACK

# Or a tracer of one, or an array with one for each datum.
Power: TypeAlias = float
Powers: TypeAlias = Power | dict[str, Power]


class Operand(float):
    """A power that compiled programs take as an argument, so that one program serves them all.

    Attributes:
        array: The same number as an array. It is made outside of traces, of which it would be a constant.
    """

    array: Array

    def __new__(cls, value: float) -> "Operand":
        """Return the number with its array."""
        power = super().__new__(cls, value)
        power.array = jax.device_put(float(value))
        return power

    def __reduce__(self) -> tuple:
        """Pickle the number alone."""
        return type(self), (float(self),)


def as_factor(alpha: Any) -> Any:
    """Return what a log-probability is multiplied by for a power: the array of an operand."""
    return alpha.array if isinstance(alpha, Operand) else alpha


# Guides whose objective is a density of the model that they keep, not of the model that SVI is given.
_USE_THEIR_MODEL = (AutoDAIS, AutoLaplaceApproximation, AutoSemiDAIS)
# The attribute of a guide's trace that lists those of them which ran.
_GUIDES = "_temper_guides"


@overload
def check_alpha(alpha: ArrayLike) -> Power: ...
@overload
def check_alpha(alpha: Mapping[str, ArrayLike]) -> dict[str, Power]: ...
def check_alpha(alpha: ArrayLike | Mapping[str, ArrayLike]) -> Powers:
    """A concrete ``alpha`` as a float, an array or a traced one as it is, a mapping as a dict of these.

    Raises:
        ValueError: If it is neither a number nor an array of them, negative, or not finite.
    """
    if not isinstance(alpha, Mapping):
        return _check_power(alpha, "alpha")
    if not alpha or not all(isinstance(name, str) for name in alpha):
        raise ValueError(
            f"alpha as a mapping must go from site names to powers, got {alpha!r}."
        )
    return {
        name: _check_power(power, f"alpha[{name!r}]") for name, power in alpha.items()
    }


def as_operands(alpha: ArrayLike | Mapping[str, ArrayLike]) -> Powers:
    """Check powers, and make their numbers operands of compiled programs, as arrays are anyway.

    Of 0 and 1 programs make use, which leave the likelihood out or the scales alone: they stay as they are.
    """
    return jax.tree.map(
        lambda power: (
            power
            if not isinstance(power, float) or power in (0.0, 1.0)
            else Operand(power)
        ),
        check_alpha(alpha),
    )


def _check_power(alpha: Any, name: str) -> Any:
    try:
        if isinstance(alpha, list | tuple) or hasattr(alpha, "to_numpy"):
            alpha = as_array(alpha, name)
        if isinstance(alpha, np.ndarray | jax.Array) and jnp.ndim(alpha):
            check_numbers(alpha, name, "[0, inf)")
            return alpha if is_traced(alpha) else to_host(alpha)
        check_number(alpha, name, "[0, inf)")
    except TypeError as error:
        raise ValueError(str(error)) from error
    return alpha if is_traced(alpha) or isinstance(alpha, Operand) else float(alpha)


def is_power(alpha: Powers, value: float) -> bool:
    """Whether a power, or each of a mapping, is this concrete value."""
    if isinstance(alpha, dict):
        return all(is_power(part, value) for part in alpha.values())
    return isinstance(alpha, float) and alpha == value


def at_data(alpha: Any, msg: Message) -> Any:
    """A power at the data of a site: one for each datum where it is an array, those of the subsample in a plate.

    Raises:
        ValueError: If an array has another shape than the data or the terms of a factor.
    """
    if not jnp.ndim(alpha):
        return alpha
    if numpyro_private.is_enumerating() and any(
        isinstance(handler, handlers.replay) for handler in STACK
    ):
        raise ValueError(
            "TraceEnum_ELBO takes one scale for all data, and alpha has one for each datum of site "
            f"{msg['name']!r}: take NUTS, or Trace_ELBO on temper(marginalize(model), alpha) for local latents."
        )
    dims = {frame.name: frame.dim for frame in msg["cond_indep_stack"]}
    for plate in STACK:
        if (
            isinstance(plate, numpyro.plate)
            and plate.subsample_size < plate.size
            and plate.name in dims
        ):
            dim = dims[plate.name]
            if jnp.ndim(alpha) >= -dim and jnp.shape(alpha)[dim] == plate.size:
                alpha = jnp.take(alpha, numpyro_private.indices_of(plate), axis=dim)
    value = jnp.shape(msg["value"])
    shape = value[: len(value) - msg["fn"].event_dim]
    if jnp.shape(alpha) != shape:
        if is_unit(msg):
            raise ValueError(
                f"alpha has shape {jnp.shape(alpha)}, and factor {msg['name']!r} {shape}: give a factor of data "
                "one term for each, or name the powers by a mapping from sites; factors=False is for terms of "
                "the prior."
            )
        raise ValueError(
            f"alpha has shape {jnp.shape(alpha)}, and site {msg['name']!r} has data of shape {shape}: an array "
            "has one power for each datum (or, in the plates of a model that subsamples, for each of all data). "
            "Name the powers of several sites by a mapping."
        )
    return alpha


def scale(msg: Message, alpha: Power) -> None:
    """Multiply the scale of a site, in the two places where NumPyro keeps it."""
    alpha = as_factor(alpha)
    msg["scale"] = alpha if msg.get("scale") is None else alpha * msg["scale"]
    plates = msg.setdefault("plate_to_scale", {})
    plates[None] = alpha if plates.get(None) is None else alpha * plates[None]


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


def check_algorithm(handler: Messenger, msg: Message, alpha: Power) -> None:
    """Refuse HMCECS, and a guide that would not know of ``alpha``, for it uses another model than the ELBO.

    Raises:
        ValueError: If one of them runs the model.
    """
    for other in STACK:
        if _is_ecs(other, msg):
            raise ValueError(
                f"HMCECS ignores the scale of site {msg['name']!r}, so alpha = {alpha} would be lost: it samples "
                "the untempered posterior. Use NUTS or HMC."
            )
    check_kept_model(handler, f"alpha = {alpha}")


def check_kept_model(handler: Messenger, what: str) -> None:
    """Refuse a guide that uses a model of its own without this handler.

    Raises:
        ValueError: If SVI replays the model against such a guide.
    """
    for other in STACK:
        if isinstance(other, handlers.replay) and handler in handler_chain(other):
            for guide in getattr(other.trace, _GUIDES, ()):
                if handler not in handler_chain(guide.model):
                    raise ValueError(
                        f"this {type(guide).__name__} keeps a model without {what} and would ignore it: build "
                        "the guide on the very model that SVI is given."
                    )


def _is_ecs(handler: Messenger, msg: Message) -> bool:
    """Whether HMCECS put this handler around its model: an estimator, or a condition on the rows of a plate."""
    if isinstance(handler, handlers.condition):
        return not plates_of(msg).isdisjoint(handler.data or ())
    return isinstance(handler, numpyro_private.estimate_likelihood)


def _note_guides(*_: object) -> None:
    """Write on the trace of a guide which of the automatic guides in it use their own model.

    The model is replayed against this trace, when the guide's handlers have left the stack. NumPyro calls this
    for each new distribution, and every automatic guide makes one.
    """
    for handler in STACK:
        guides = isinstance(handler, handlers.trace) and _with_own_model(handler.fn)
        if guides:
            setattr(handler.trace, _GUIDES, guides)


# First, as `handlers.collapse` takes the last one away.
numpyro_private.COERCIONS.insert(0, _note_guides)


def _with_own_model(guide: Guide | None) -> list[AutoGuide]:
    """Return the guides in a guide that use their own model."""
    guides: list[AutoGuide] = []
    for layer in handler_chain(guide):
        if isinstance(layer, AutoGuideList):
            guides += [inner for part in layer for inner in _with_own_model(part)]
        elif isinstance(layer, _USE_THEIR_MODEL):
            guides.append(layer)
    return guides


def check_guide(msg: Message) -> None:
    """Refuse a guide that does not scale this latent as the model does; warn where MCMC samples it."""
    name, power = msg["name"], msg.get(LOCAL, 1.0)
    for handler in STACK:
        if not (isinstance(handler, handlers.replay) and name in handler.trace):
            continue
        if name.endswith("_unobserved") and isinstance(msg["fn"], MaskedDistribution):
            warn_caller(
                f"{name!r}, made by obs_mask, has entries without a density where the data are there: the ELBO "
                "grows with their scale in the guide and has no maximum. Sample the missing entries alone, "
                "and observe the others, obs=x[there]."
            )
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
        warn_caller(
            f"MCMC samples the local latent {name!r} from a joint density to the power alpha, whose marginal "
            "is not the tempered marginal likelihood times the prior: integrate the local latents out of "
            "the model, or fit it by SVI."
        )


def _is_target_of_mcmc() -> bool:
    """Whether the model runs for its potential energy, and not to set a guide up, which hides its handlers."""
    for handler in STACK:
        if isinstance(handler, handlers.block):
            return False
        if (
            getattr(getattr(handler, "substitute_fn", None), "func", None)
            is numpyro_private.unconstrain_reparam
        ):
            return True
    return False
