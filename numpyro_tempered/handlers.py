"""Effect handlers: ``temper`` raises the likelihood of a NumPyro model to a power."""

import math
import sys
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack, default_process_message

from numpyro_tempered._typing import ArrayLike

# Keys that temper leaves on a message for those who read the trace afterwards.
ALPHA = "_temper_alpha"
_SEEN = "_temper_seen"
PRIOR_FACTOR = "_temper_prior_factor"


class temper(Messenger):
    r"""Raise the likelihood to the power ``alpha`` and leave the prior alone.

    The decorated model targets the tempered (fractional) posterior

    .. math:: \pi_{n,\alpha}(\theta) \propto L_n(\theta)^\alpha\, \pi(\theta)

    under every NumPyro algorithm that honours scales (all but HMCECS). Each observed site's
    log-probability is multiplied by ``alpha``; latent sites, and the Jacobian and reparameterisation
    factors that NumPyro itself emits as observed sites, are not. Works as function, decorator and context
    manager, composes with subsampling plates and other scales, and multiplies when nested.

    ``alpha`` below 1 tempers, 1 is Bayes, 0 is the prior, above 1 is a cold posterior that counts the
    data more than once.

    Apply it outside of what makes data observed: ``temper(condition(model, data))``, since a handler sees
    only what happened inside it. Build guides on the tempered model, because several keep it.

    Args:
        fn: Model to temper; None for a decorator or a context manager.
        alpha: Power on the likelihood, a scalar >= 0; may be traced, so that a grid of alphas compiles
            once under ``vmap``. A traced 0 gives the prior's density; where the likelihood is 0 because of
            the parameters its gradient is NaN, so take a concrete 0 for the prior alone.
        factors: What a ``numpyro.factor`` of the model is: part of the likelihood (True, the default), of
            the prior (False), or the names of those that are part of the likelihood.

    Raises:
        ValueError: If ``alpha`` is not a scalar, negative or not finite (where it is concrete), if
            ``handlers.collapse`` has merged likelihood and prior, or if a
            discrete latent of a plate or of a scan is being enumerated: raising its observed sites to a power
            inside the sum is another target.

    References:
        AR; BPY.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> @nt.temper(alpha=0.5)
        ... def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(1.0)
        >>> print(trace["theta"]["scale"], trace["y"]["scale"])
        None 0.5
    """

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        alpha: ArrayLike = 1.0,
        *,
        factors: bool | Collection[str] = True,
    ) -> None:
        self.alpha = check_alpha(alpha)
        if isinstance(factors, str):
            raise TypeError(f"factors must be a bool or a collection of names, got {factors!r}.")
        self.factors = factors
        super().__init__(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the tempered model, or decorate one."""
        if self.fn is not None:
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs or not callable(args[0]):
            raise TypeError("temper(alpha=...) without a model decorates one callable.")
        return temper(args[0], self.alpha, factors=self.factors)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Scale observed sites; see the class."""
        if msg["type"] == "control_flow":
            _mark_bodies(msg)
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        # `do` sends a copy of the message through the stack a second time.
        seen = msg.get(_SEEN, ())
        if id(self) in seen:
            return
        if not self._is_likelihood(msg):
            msg[PRIOR_FACTOR] = True
            return
        msg[_SEEN] = (*seen, id(self))
        msg[ALPHA] = self.alpha * msg.get(ALPHA, 1.0)
        if any(isinstance(handler, read_powers) for handler in _PYRO_STACK):
            return
        if isinstance(self.alpha, float):
            if self.alpha == 0.0:
                msg["fn"] = msg["fn"].mask(False)
                return
        else:
            # A traced 0 times a log-probability of -inf would be NaN.
            msg["fn"] = msg["fn"].mask(self.alpha > 0)
        msg["scale"] = self.alpha if msg.get("scale") is None else self.alpha * msg["scale"]
        plates = msg.setdefault("plate_to_scale", {})
        plates[None] = self.alpha if plates.get(None) is None else self.alpha * plates[None]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Refuse enumerated local latents, known only once outer handlers have spoken."""
        if (
            msg["type"] == "sample"
            and not msg["is_observed"]
            and msg["infer"].get("enumerate") == "parallel"
            and (msg["cond_indep_stack"] or msg.get("_control_flow_done"))
            and not (isinstance(self.alpha, float) and self.alpha == 1.0)
        ):
            raise ValueError(
                f"temper met the enumerated local latent {msg['name']!r}: the power belongs outside of "
                "the sum over its values. Sum it out in the model, for instance with "
                "numpyro.distributions.MixtureSameFamily, and temper the result."
            )

    def _is_likelihood(self, msg: dict[str, Any]) -> bool:
        if not isinstance(base_distribution(msg["fn"]), dist.Unit):
            return True
        if is_prior_factor(msg):
            return False
        bayes = isinstance(self.alpha, float) and self.alpha == 1.0
        if not bayes and _called_from(handlers.collapse.__exit__):
            raise ValueError(
                f"temper met the factor {msg['name']!r} of handlers.collapse, which holds prior and likelihood "
                "in one: a power of it is another target. Leave the latents in the model."
            )
        if isinstance(self.factors, bool):
            return self.factors
        return msg["name"] in self.factors


def check_alpha(alpha: Any) -> Any:
    """A concrete ``alpha`` as a float, a traced one as it is.

    Raises:
        ValueError: If it is not a real scalar, negative or not finite.
    """
    if isinstance(alpha, jax.core.Tracer):
        if alpha.shape != ():
            raise ValueError(f"alpha must be a scalar, got shape {alpha.shape}.")
        return alpha
    try:
        if np.shape(alpha) != ():
            raise TypeError
        value = float(alpha)
    except (TypeError, ValueError) as error:
        raise ValueError(f"alpha must be one real number, got {alpha!r}.") from error
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"alpha must be finite and at least 0, got {value}.")
    return value


def is_prior_factor(msg: dict[str, Any]) -> bool:
    """Whether an observed ``Unit`` site is a prior term that a handler emitted, not the model.

    NumPyro's Jacobians of unconstrained parameters and the terms of its reparameterisers are
    ``numpyro.factor`` sites; names cannot tell them from the user's. They come from inside another
    handler's ``process_message``: walking the Python frames outwards from here, one meets the
    ``apply_stack`` of this message, then that of the message being handled. The body of a ``scan``
    or ``cond`` runs in ``default_process_message``, which is the model again. Must be called from a
    handler's ``process_message``.
    """
    if PRIOR_FACTOR in msg:
        return msg[PRIOR_FACTOR]
    if msg.get("_control_flow_done"):
        return False
    stacks = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is apply_stack.__code__:
            stacks += 1
            if stacks == 2:
                return True
        elif frame.f_code is default_process_message.__code__:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _called_from(function: Callable[..., Any]) -> bool:
    """Whether ``function`` is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def innermost(model: Any) -> Any:
    """The callable under a chain of handlers."""
    while getattr(model, "fn", None) is not None:
        model = model.fn
    return model


class mark_prior_factors(Messenger):
    """Write on each observed ``Unit`` site whether it is a prior term; the mark survives a scan."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Mark the message."""
        if msg["type"] == "control_flow":
            _mark_bodies(msg)
        elif (
            msg["type"] == "sample" and msg["is_observed"] and isinstance(base_distribution(msg["fn"]), dist.Unit)
        ):
            msg[PRIOR_FACTOR] = is_prior_factor(msg)


class read_powers(mark_prior_factors):
    """Run a model with its powers written on the sites but not applied to scales and distributions."""


def _mark_bodies(msg: dict[str, Any]) -> None:
    """Mark inside the bodies of a ``scan`` or ``cond``: their sites return without their frames."""
    if msg.get(_SEEN):
        return
    msg[_SEEN] = ("bodies",)
    msg["args"] = tuple(mark_prior_factors(arg) if callable(arg) else arg for arg in msg["args"])


def base_distribution(fn: Any) -> Any:
    """The distribution under masks, expansions and reinterpreted batches."""
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn
