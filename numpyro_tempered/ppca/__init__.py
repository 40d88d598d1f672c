"""Probabilistic PCA by tempered variational Bayes, and its number of factors."""

from numpyro_tempered.ppca.base import Posterior, Prior, Scores, prior
from numpyro_tempered.ppca.driver import fit
from numpyro_tempered.ppca.model import Draws, PPCAFit, sample_posterior
from numpyro_tempered.ppca.predict import (
    Imputed,
    LogDensity,
    impute,
    log_predictive,
    reconstruct,
    sample,
    transform,
)
from numpyro_tempered.ppca.rank import (
    Axes,
    FactorSelection,
    principal_axes,
    select_num_factors,
)

__all__ = [
    "Axes",
    "Draws",
    "FactorSelection",
    "Imputed",
    "LogDensity",
    "PPCAFit",
    "Posterior",
    "Prior",
    "Scores",
    "fit",
    "impute",
    "log_predictive",
    "principal_axes",
    "prior",
    "reconstruct",
    "sample",
    "sample_posterior",
    "select_num_factors",
    "transform",
]
__dir__ = __all__.copy
