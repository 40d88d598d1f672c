"""The guide of a tempered model, and its first call, which sets it up, by few programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    check_count,
    compile_once,
    describe,
)
from numpyro_tempered.handlers.effects import Message, handler_chain, is_same
from numpyro_tempered.handlers.likelihood import subsamples
from numpyro_tempered.handlers.numpyro_private import (
    initial_latent,
    is_enumerating,
    is_potential,
    is_reverse,
    start_and_potential,
)
from numpyro_tempered.handlers.powers import Powers, is_power
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guide_laws import is_auto, law_of

T = TypeVar("T")


class without_density(Messenger):
    """A model that is not run where the set-up of its guide asks for its density."""

    def __init__(self, fn: Model, guide: AutoGuide) -> None:
        self.guide: AutoGuide | None = guide
        super().__init__(fn)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model, or nothing."""
        is_set_up = self.guide is None or self.guide.prototype_trace is not None
        if is_set_up or not is_potential() or is_enumerating():
            return super().__call__(*args, **kwargs)
        return None


def is_light(guide: AutoGuide) -> bool:
    """Whether the first call of a guide can be had by few programs, and is yet to come."""
    # Of others, such as AutoDelta and AutoGuideList, what they keep is not where the density was looked at.
    if law_of(guide).form is None:
        return False
    is_inside = isinstance(guide.model, without_density)
    return guide.prototype_trace is None and is_reverse(guide) and not is_inside


@contextmanager
def no_density(guide: AutoGuide) -> Iterator[None]:
    """Set a guide up within without its density at the start, which :func:`starts_validly` looks at.

    NumPyro evaluates it with its gradient, each operation a program of its own.
    """
    model: Model = guide.model
    light = without_density(model, guide)
    guide.model = light
    try:
        yield
    finally:
        # The guide keeps what it has made of the model, which is the model from here on.
        guide.model, light.guide = model, None


def starts_validly(guide: AutoGuide) -> bool:
    """Whether the log-density at the start of a guide is finite, with its gradient, as NumPyro asks."""
    if subsamples(guide.prototype_trace):
        # The start is of all data, and the density of a part.
        return False
    start, potential = start_and_potential(guide)

    def is_finite(start: Params) -> Array:
        with handlers.block(), numpyro.validation_enabled(False):
            value, slopes = jax.value_and_grad(potential)(start)
        return jnp.all(
            jnp.stack(
                [
                    jnp.all(jnp.isfinite(leaf))
                    for leaf in jax.tree.leaves((value, slopes))
                ]
            )
        )

    return bool(compile_once(is_finite, start)(start))


def first_call(
    call: Callable[[], T],
    guide: Any,
    shows_start: Callable[[T], bool] = lambda _: False,
) -> T:
    """A call that sets a guide up, with the same start as by NumPyro alone.

    Where the first start that it draws is none, NumPyro sets the guide up in its own way: it looks for
    another, or raises.

    Args:
        call: The call.
        guide: The guide.
        shows_start: Of what the call returns, whether it shows that the density is finite at the start.
    """
    if not is_light(guide):
        return call()
    with no_density(guide):
        result = call()
    if guide.prototype_trace is None or shows_start(result) or starts_validly(guide):
        return result
    guide.prototype_trace = None
    return call()


def at_start(guide: AutoGuide) -> Model:
    """The guide at its start, for its parameters: its own draws compile programs."""

    def value_of(site: Message) -> Array | None:
        if (
            site["type"] != "sample"
            or site["is_observed"]
            or guide.prototype_trace is None
        ):
            return None
        if site["name"] in guide.prototype_trace:
            return guide.prototype_trace[site["name"]]["value"]
        return initial_latent(guide) if law_of(guide).form == "flat" else None

    # Masked, as the guide computes no log-density then.
    return handlers.mask(handlers.substitute(guide, substitute_fn=value_of), mask=False)


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
