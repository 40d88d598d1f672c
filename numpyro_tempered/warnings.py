"""Warnings of this package, for ``warnings.filterwarnings``."""

from numpyro_tempered.core import CompilationWarning
from numpyro_tempered.infer.settle import ConvergenceWarning
from numpyro_tempered.online.streams.findings import StreamWarning
from numpyro_tempered.select.alpha.independence import DependenceWarning

__all__ = [
    "CompilationWarning",
    "ConvergenceWarning",
    "DependenceWarning",
    "StreamWarning",
]
__dir__ = __all__.copy
