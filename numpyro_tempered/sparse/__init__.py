"""Sparse linear and logistic regression by tempered coordinate ascent."""

from numpyro_tempered.infer.distributions import SpikeAndSlab
from numpyro_tempered.infer.fit_support import fit_support
from numpyro_tempered.infer.round_gates import round_and_refit
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
    as_tempered_fit,
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
    "SpikeAndSlab",
    "as_tempered_fit",
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
