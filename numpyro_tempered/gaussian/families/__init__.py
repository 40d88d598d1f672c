"""Variational families: NamedTuples of parameters and pure functions on them."""

from numpyro_tempered.gaussian.families.base import (
    Family,
    Gain,
    Rows,
    family_of,
    register,
)
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture
from numpyro_tempered.gaussian.families.low_rank import LowRank
from numpyro_tempered.gaussian.families.mean_field import MeanField
from numpyro_tempered.gaussian.families.spike_slab import SpikeSlab

__all__ = [
    "Family",
    "FullRank",
    "Gain",
    "GaussianMixture",
    "LowRank",
    "MeanField",
    "Rows",
    "SpikeSlab",
    "family_of",
    "register",
]
__dir__ = __all__.copy
