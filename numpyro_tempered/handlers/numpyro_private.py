"""The private names of NumPyro that this package needs: a new release may drop them without notice.

No other module uses one, but for subclasses of its guides, which override private methods as NumPyro's own do. A
test names the one that is missing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpyro import handlers
from numpyro.distributions import MaskedDistribution
from numpyro.distributions.constraints import (
    _IndependentConstraint as IndependentConstraint,
)
from numpyro.distributions.distribution import COERCIONS
from numpyro.infer import MCMC
from numpyro.infer.autoguide import AutoContinuous, AutoGuide
from numpyro.infer.hmc_gibbs import estimate_likelihood
from numpyro.infer.util import _guess_max_plate_nesting as guess_max_plate_nesting
from numpyro.infer.util import _unconstrain_reparam as unconstrain_reparam
from numpyro.optim import _NumPyroOptim as NumPyroOptim
from numpyro.primitives import _PYRO_STACK as STACK

from numpyro_tempered.core import RUNNING, Array, ArrayLike, Params

__all__ = [
    "COERCIONS",  # what is called for each new distribution, those of guides and of handlers.collapse too
    "STACK",  # the handlers around the site that is being handled
    "IndependentConstraint",  # the type of a support with event dimensions, whose constructor is a function
    "NumPyroOptim",  # the base class of optimisers that SVI takes
    "estimate_likelihood",  # the handler that HMCECS puts around its model
    "guess_max_plate_nesting",  # how many dimensions the plates of a trace take
    "unconstrain_reparam",  # what a potential energy substitutes for its latents
]


class Unpacks(Protocol):
    """An automatic guide over one flat vector, set up, or what unpacks as one."""

    def _unpack_latent(self, flat: Array, /) -> Params: ...


def unpacker(guide: Unpacks) -> Callable[[Array], Params]:
    """From a guide's flat vector to the unconstrained latents, whose order is the guide's alone."""
    return guide._unpack_latent


def initial_latent(guide: AutoContinuous) -> Array:
    """The flat vector at which a guide that is set up starts."""
    return guide._init_latent


def start_and_potential(guide: AutoGuide) -> tuple[Params, Callable[[Params], Array]]:
    """The unconstrained start of a guide that is set up, and minus the log-density of its model."""
    return guide._init_locs, guide._potential_fn


def is_reverse(guide: AutoGuide) -> bool:
    """Whether a guide's set-up differentiates backwards, as it does by default."""
    return not guide._forward_mode_differentiation


def unpack_and_constrain(
    guide: AutoContinuous, flat: Array, params: Mapping[str, ArrayLike]
) -> Params:
    """The latents in draws of a guide's flat vector, on the scale of the model."""
    with RUNNING:
        return guide._unpack_and_constrain(flat, params)


def mask_of(masked: MaskedDistribution) -> ArrayLike:
    """The mask of a ``MaskedDistribution``, which has no property for it."""
    return masked._mask


def arguments(mcmc: MCMC) -> tuple[tuple, dict]:
    """The arguments that ``MCMC.run`` gave to the model: the data of the posterior."""
    return mcmc._args, mcmc._kwargs


def is_enumerating() -> bool:
    """Whether funsor enumerates the discrete latents of the model that runs, with dimensions of its own."""
    return any(
        type(handler).__module__ == "numpyro.contrib.funsor.enum_messenger"
        for handler in STACK
    )


def is_potential() -> bool:
    """Whether the model runs for a potential energy, which substitutes unconstrained values."""
    return any(
        isinstance(handler, handlers.substitute)
        and getattr(handler.substitute_fn, "func", None) is unconstrain_reparam
        for handler in STACK
    )


def indices_of(plate: Any) -> Array:
    """Which of its elements a plate that is entered holds."""
    return plate._indices


def dim_stack() -> Any:
    """Funsor's names for the dimensions of arrays in NumPyro's enumeration, loaded with funsor."""
    from numpyro.contrib.funsor.enum_messenger import _DIM_STACK

    return _DIM_STACK
