"""Fitted mixtures in NumPyro: as model, guide, start of SVI, and draws."""

from numpyro_tempered.mixtures.bridges.model import numpyro_guide, numpyro_model
from numpyro_tempered.mixtures.bridges.polish import polish
from numpyro_tempered.mixtures.bridges.results import as_tempered_fit, from_mixture

__all__ = ["as_tempered_fit", "from_mixture", "numpyro_guide", "numpyro_model", "polish"]
