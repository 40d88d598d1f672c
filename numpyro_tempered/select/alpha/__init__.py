"""Criteria for the power alpha of the likelihood, for :func:`numpyro_tempered.select_alpha`."""

from numpyro_tempered.select.alpha.base import (
    AlphaChoice,
    Criterion,
    Decision,
    Draws,
    Plan,
)
from numpyro_tempered.select.alpha.bootstrap_fisher import bootstrap_fisher
from numpyro_tempered.select.alpha.coverage import check_coverage
from numpyro_tempered.select.alpha.coverage_report import CoverageCheck
from numpyro_tempered.select.alpha.diagnostics import held_out, loo
from numpyro_tempered.select.alpha.gpc import gpc
from numpyro_tempered.select.alpha.independence import DependenceWarning
from numpyro_tempered.select.alpha.lyddon import lyddon
from numpyro_tempered.select.alpha.magnitude import magnitude
from numpyro_tempered.select.alpha.powers import calibrated_powers
from numpyro_tempered.select.alpha.prescribed import coarsening, theory_default
from numpyro_tempered.select.alpha.safe_bayes import safe_bayes

__all__ = [
    "AlphaChoice",
    "CoverageCheck",
    "Criterion",
    "Decision",
    "DependenceWarning",
    "Draws",
    "Plan",
    "bootstrap_fisher",
    "calibrated_powers",
    "check_coverage",
    "coarsening",
    "gpc",
    "held_out",
    "loo",
    "lyddon",
    "magnitude",
    "safe_bayes",
    "theory_default",
]
__dir__ = __all__.copy
