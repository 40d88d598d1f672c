"""Sparse linear and logistic regression by tempered coordinate ascent."""

from numpyro_tempered.infer.distributions import SpikeAndSlab
from numpyro_tempered.infer.fit_support import fit_support
from numpyro_tempered.infer.round_gates import round_and_refit
from numpyro_tempered.sparse.arguments import Prior
from numpyro_tempered.sparse.base import Draws, NoisePosterior, RegressionFit, selected
from numpyro_tempered.sparse.linear import fit_linear
from numpyro_tempered.sparse.logistic import fit_logistic
from numpyro_tempered.sparse.predict import (
    Moments,
    linear_predictor,
    predict,
    predict_proba,
    sample_posterior,
)

__all__ = [
    "Draws",
    "Moments",
    "NoisePosterior",
    "Prior",
    "RegressionFit",
    "SpikeAndSlab",
    "fit_linear",
    "fit_logistic",
    "fit_support",
    "linear_predictor",
    "predict",
    "predict_proba",
    "round_and_refit",
    "sample_posterior",
    "selected",
]
__dir__ = __all__.copy
