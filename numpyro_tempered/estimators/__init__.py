"""Mixtures, probabilistic PCA and online learners as estimators of scikit-learn; the last of river too.

scikit-learn is an extra, and imported when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpyro_tempered.estimators.classifier import OnlineClassifier
    from numpyro_tempered.estimators.mixture import TemperedMixture
    from numpyro_tempered.estimators.pca import TemperedPCA
    from numpyro_tempered.estimators.regressor import OnlineRegressor

__all__ = ["OnlineClassifier", "OnlineRegressor", "TemperedMixture", "TemperedPCA"]
__dir__ = __all__.copy
_MODULES = {
    "OnlineClassifier": "classifier",
    "OnlineRegressor": "regressor",
    "TemperedMixture": "mixture",
    "TemperedPCA": "pca",
}


def __getattr__(name: str) -> type:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("sklearn")
    except ImportError as error:
        raise ImportError(
            f"nt.estimators.{name} needs scikit-learn: pip install 'numpyro_tempered[sklearn]'."
        ) from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
