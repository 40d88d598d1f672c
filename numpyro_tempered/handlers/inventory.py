"""What a model has, as one run under ``temper`` shows it."""

from collections.abc import Set
from typing import Any

from numpyro import handlers

from numpyro_tempered.handlers.numpyro_private import STACK


class Inventory:
    """What the model has, as one run shows it."""

    def __init__(self) -> None:
        self.sites: set[str] = set()
        self.plates: set[str] = set()
        self.factors: set[str] = set()
        # Of the discrete_parameters.
        self.enumerated: set[str] = set()
        self.has_data = False
        # Of observed sites that are tempered, where they may be computed by the model.
        self.values: list[Any] = []
        self.collapses: set[handlers.collapse] = set()

    def note_collapse(self, *_: object) -> None:
        """List the ``handlers.collapse`` around a new distribution: the messages of its sites end there."""
        self.collapses |= {
            handler for handler in STACK if isinstance(handler, handlers.collapse)
        }

    def is_collapsed(self, factor: str) -> bool:
        """Whether a factor has the name of a site in a ``handlers.collapse`` that is over."""
        over = self.collapses.difference(STACK)
        return any(factor.endswith(name) for handler in over for name in handler.trace)

    def check_names(
        self,
        alphas: Set[str],
        factors: Set[str],
        plates: Set[str],
        parameters: Set[str],
    ) -> None:
        """Refuse names that the model does not have.

        Args:
            alphas: Sites that ``alpha`` names.
            factors: Factors that ``factors`` names.
            plates: Plates that ``local_plates`` names.
            parameters: Sites that ``discrete_parameters`` names.
        """
        if missing := sorted(plates - self.plates):
            raise ValueError(
                f"the model has no plates {missing}, which local_plates names."
            )
        if missing := sorted(parameters - self.sites):
            raise ValueError(
                f"the model has no sites {missing}, which discrete_parameters names."
            )
        # Without data the model may leave observed sites out.
        if (missing := sorted((alphas - self.sites) | (factors - self.factors))) and (
            self.has_data or self.factors
        ):
            raise ValueError(
                f"the model has no sites {missing}, which alpha or factors names. It has "
                f"{sorted(self.sites)}, of which {sorted(self.factors)} are factors."
            )
