"""Tempered, online and model-selecting variational Bayes for any NumPyro model.

Models: ``temper`` raises the likelihood of a model to a power, ``robust`` puts a divergence in its place, and
``marginalize`` sums its local discrete latents out. Each takes a model, or decorates a function or a method.

Fits: ``fit_svi`` takes any guide, ``fit_gaussian`` fits a Gaussian without a learning rate, and ``OnlineVI``
learns a stream, one batch after the other. ``select_alpha`` chooses the power, ``temper_path`` follows it.

Checks: ``check_fit``, ``check_calibration``, ``sandwich``, ``linear_response`` and ``certify_risk``.

Comparison: ``compare`` and ``loo`` rank models, with ``dyadic`` for their prior weights. ``to_inference_data``
and ``table`` hand results to ArviZ and pandas.

Namespaces:
    alpha: Criteria for the power.
    mixtures, ppca, sparse: Mixtures, probabilistic PCA and sparse regression by coordinate ascent.
    online: Rules for streams, what runs and saves them, and chunks of tables.
    guides, optim: Guides and optimisers for NumPyro's ``SVI``.
    expectations, gaussian: Expected losses, Gaussian families, and descent on them.
    bounds: The right sides of the theorems, comparators in hindsight, and ledgers of regret.
    estimators, plots: The same for scikit-learn and river, and by matplotlib.
    results, warnings: What functions return, and what they warn by.
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

from numpyro_tempered import gaussian, mixtures, online, ppca
from numpyro_tempered.gaussian import expectations
from numpyro_tempered.handlers.marginalize import marginalize
from numpyro_tempered.handlers.robust import robust
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer import guides, optim
from numpyro_tempered.infer.gaussian import fit_gaussian
from numpyro_tempered.infer.linear_response import linear_response
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.svi import fit_svi
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.report.table import table
from numpyro_tempered.select import alpha
from numpyro_tempered.select.alpha.driver import select_alpha
from numpyro_tempered.select.check.calibration import check_calibration
from numpyro_tempered.select.check.check_fit import check_fit
from numpyro_tempered.select.check.risk import certify_risk
from numpyro_tempered.select.compare import compare
from numpyro_tempered.select.loo import loo
from numpyro_tempered.select.path import temper_path
from numpyro_tempered.select.ranking import dyadic
from numpyro_tempered.select.sandwich import sandwich
from numpyro_tempered.theory import bounds

if TYPE_CHECKING:
    from numpyro_tempered import estimators, plots, results, sparse, warnings

__all__ = [
    "OnlineVI",
    "alpha",
    "bounds",
    "certify_risk",
    "check_calibration",
    "check_fit",
    "compare",
    "dyadic",
    "estimators",
    "expectations",
    "fit_gaussian",
    "fit_svi",
    "gaussian",
    "guides",
    "linear_response",
    "loo",
    "marginalize",
    "mixtures",
    "online",
    "optim",
    "plots",
    "ppca",
    "results",
    "robust",
    "sandwich",
    "select_alpha",
    "sparse",
    "table",
    "temper",
    "temper_path",
    "to_inference_data",
    "warnings",
]
__dir__ = __all__.copy
__version__ = version("numpyro_tempered")
# Imported when they are first used.
_LAZY = {"estimators", "plots", "results", "sparse", "warnings"}


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}.")
