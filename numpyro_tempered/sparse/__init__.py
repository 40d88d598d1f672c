"""Sparse linear and logistic regression by tempered coordinate ascent."""

from numpyro_tempered.sparse.base import (
    Draws,
    LinearFit,
    LogisticFit,
    NoisePosterior,
    Prior,
    selected,
)
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
    "LinearFit",
    "LogisticFit",
    "Moments",
    "NoisePosterior",
    "Prior",
    "fit_linear",
    "fit_logistic",
    "linear_predictor",
    "predict",
    "predict_proba",
    "sample_posterior",
    "selected",
]
