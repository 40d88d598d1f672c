"""The state of an online run of a NumPyro model."""

from typing import Any, NamedTuple

from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.online.base import Losses, OnlineState


class OnlineVIState(NamedTuple):
    """State of an :class:`OnlineVI`: a pytree of arrays.

    Attributes:
        rule_state: State of the rule, on the flat unconstrained scale.
        rng_key: Key of the run; each round derives its own from it.
        layout: Names and shapes of the sites in the flat vector; holds no array.
    """

    rule_state: OnlineState
    rng_key: Array
    layout: Layout

    @property
    def posterior(self) -> Any:
        """The Gaussian q_t on the flat unconstrained scale."""
        return self.rule_state.posterior

    @property
    def count(self) -> Array:  # type: ignore[override]
        """Rounds taken."""
        return self.rule_state.count

    @property
    def rejected(self) -> Array:
        """Rounds refused because data, loss or update were not finite."""
        return self.rule_state.rejected

    @property
    def cumulative(self) -> Losses:
        """Sums of the untempered losses over the rounds taken."""
        return Losses(*(total.value for total in self.rule_state.cumulative))
