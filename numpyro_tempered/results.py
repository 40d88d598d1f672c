"""Records that the functions of this package return."""

from numpyro_tempered.core import DataSummary, Description, Evidence, TemperedELBO
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.online_posterior import StreamPosterior
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.infer.settle import Convergence
from numpyro_tempered.infer.tempered_fit import LinearResponse, TemperedFit
from numpyro_tempered.mixtures import ComponentSelection, MixtureEM, MixtureFit
from numpyro_tempered.online import (
    Finding,
    LoadedUpdate,
    Losses,
    OnlineState,
    PartitionedRun,
    Prediction,
    WeightedPosteriors,
)
from numpyro_tempered.ppca import FactorSelection, Imputed, LogDensity, PPCAFit
from numpyro_tempered.report.draws import SampledPosterior
from numpyro_tempered.select.alpha import AlphaChoice, CoverageCheck
from numpyro_tempered.select.check.calibration import Calibration
from numpyro_tempered.select.check.result import FitCheck
from numpyro_tempered.select.sandwich import SandwichErrors
from numpyro_tempered.sparse import RegressionFit
from numpyro_tempered.theory.bounds import (
    Bound,
    Certificate,
    LogTrueDensity,
    RiskCertificate,
)
from numpyro_tempered.theory.hindsight import (
    GaussianComparator,
    Hindsight,
    SequentialFit,
)

__all__ = [
    "AlphaChoice",
    "Bound",
    "Calibration",
    "Certificate",
    "ComponentSelection",
    "Convergence",
    "CoverageCheck",
    "DataSummary",
    "Description",
    "Evidence",
    "FactorSelection",
    "Finding",
    "FitCheck",
    "GaussianComparator",
    "Hindsight",
    "Imputed",
    "LinearResponse",
    "LoadedUpdate",
    "LogDensity",
    "LogTrueDensity",
    "Losses",
    "MixtureEM",
    "MixtureFit",
    "OnlineState",
    "OnlineVIState",
    "PPCAFit",
    "PartitionedRun",
    "Prediction",
    "RegressionFit",
    "RiskCertificate",
    "SampledPosterior",
    "SandwichErrors",
    "SequentialFit",
    "StreamPosterior",
    "Target",
    "TemperedELBO",
    "TemperedFit",
    "WeightedPosteriors",
]
__dir__ = __all__.copy
