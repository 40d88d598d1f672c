"""Gaussian families, expected losses under them, and descent on their parameters."""

from numpyro_tempered.gaussian import descent, families

__all__ = ["descent", "families"]
__dir__ = __all__.copy
