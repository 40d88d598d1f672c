"""The state of an online run of a NumPyro model."""

from typing import NamedTuple

from numpyro_tempered.core import Array, Params, table, text
from numpyro_tempered.gaussian.families.base import Gaussian
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

    def totals(self, losses: Losses | None = None) -> Params:
        """Counts of the rounds and sums of their losses, by name, and the losses of each round if passed."""
        by_round = (
            {}
            if losses is None
            else {f"loss_{k}": v for k, v in losses._asdict().items()}
        )
        return {
            "count": self.count,
            "rejected": self.rejected,
            "cumulative_loss_at_mean": self.cumulative.at_mean,
            "cumulative_loss_expected": self.cumulative.expected,
            **by_round,
        }

    @property
    def posterior(self) -> Gaussian:
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

    def __repr__(self) -> str:
        """Show a line for each field."""
        return text(self._with_words())

    def _repr_html_(self) -> str:
        return table(self._with_words())

    def _with_words(self) -> "OnlineVIState":
        """Return the state with the names and shapes of its sites in words."""
        words = ", ".join(f"{name} {shape}" for name, shape in self.layout.sites)
        return self._replace(layout=words)  # type: ignore[arg-type]
