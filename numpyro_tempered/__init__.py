"""Tempered, online and model-selecting variational Bayes for any NumPyro model."""

from numpyro_tempered import estimators, mixtures, online, plots, ppca, sparse
from numpyro_tempered.core import shared_rows as processes
from numpyro_tempered.core import tables
from numpyro_tempered.core.compilation import CompilationWarning
from numpyro_tempered.core.result import DataSummary, TemperedELBO
from numpyro_tempered.gaussian import descent, expectations, families
from numpyro_tempered.handlers.marginalize import marginalize
from numpyro_tempered.handlers.robust import robust
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer import distributions, guides, optim
from numpyro_tempered.infer.bare_loss import BareLoss, bare_loss
from numpyro_tempered.infer.elbo import ExpectedNLL
from numpyro_tempered.infer.evidence import LinearResponse
from numpyro_tempered.infer.fit_support import fit_support
from numpyro_tempered.infer.gaussian import fit_gaussian
from numpyro_tempered.infer.linear_response import linear_response
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.infer.round_gates import round_and_refit
from numpyro_tempered.infer.settle import Convergence, ConvergenceWarning
from numpyro_tempered.infer.svi import fit_svi
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.mixtures import components
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.report.table import table
from numpyro_tempered.select import alpha
from numpyro_tempered.select.alpha.driver import select_alpha
from numpyro_tempered.select.check.calibration import Calibration, check_calibration
from numpyro_tempered.select.check.check_fit import check_fit
from numpyro_tempered.select.check.result import FitCheck
from numpyro_tempered.select.check.risk import certify_risk
from numpyro_tempered.select.compare import compare
from numpyro_tempered.select.loo import loo
from numpyro_tempered.select.path import temper_path
from numpyro_tempered.select.ranking import dyadic
from numpyro_tempered.select.sandwich import SandwichErrors, sandwich
from numpyro_tempered.theory import bounds, hindsight
from numpyro_tempered.theory.ledger import regret_ledger

__all__ = [
    "BareLoss",
    "Calibration",
    "CompilationWarning",
    "Convergence",
    "ConvergenceWarning",
    "DataSummary",
    "ExpectedNLL",
    "FitCheck",
    "LinearResponse",
    "OnlineVI",
    "OnlineVIState",
    "SandwichErrors",
    "TemperedELBO",
    "TemperedFit",
    "alpha",
    "bare_loss",
    "bounds",
    "certify_risk",
    "check_calibration",
    "check_fit",
    "compare",
    "components",
    "descent",
    "distributions",
    "dyadic",
    "estimators",
    "expectations",
    "families",
    "fit_gaussian",
    "fit_support",
    "fit_svi",
    "guides",
    "hindsight",
    "linear_response",
    "loo",
    "marginalize",
    "mixtures",
    "online",
    "optim",
    "plots",
    "ppca",
    "processes",
    "regret_ledger",
    "robust",
    "round_and_refit",
    "sandwich",
    "select_alpha",
    "sparse",
    "table",
    "tables",
    "temper",
    "temper_path",
    "to_inference_data",
]
