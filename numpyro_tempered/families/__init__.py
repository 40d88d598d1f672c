"""Variational families: NamedTuples of parameters and pure functions on them."""

from numpyro_tempered.families.mean_field import MeanField

__all__ = ["MeanField"]
