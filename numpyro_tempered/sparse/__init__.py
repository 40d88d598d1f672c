"""Sparse linear and logistic regression by tempered coordinate ascent."""

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
    "fit_linear",
    "fit_logistic",
    "linear_predictor",
    "predict",
    "predict_proba",
    "sample_posterior",
    "selected",
]
