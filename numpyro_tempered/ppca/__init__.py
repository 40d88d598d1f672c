"""Probabilistic PCA by tempered variational Bayes, and its number of factors."""

from numpyro_tempered.ppca.base import Posterior, Prior, Scores, prior
from numpyro_tempered.ppca.driver import fit
from numpyro_tempered.ppca.model import Draws
from numpyro_tempered.ppca.predict import (
    Axes,
    Imputed,
    LogDensity,
    impute,
    log_density,
    principal_axes,
    reconstruct,
    sample,
    sample_posterior,
    transform,
)
from numpyro_tempered.ppca.rank import FactorSelection, num_occupied, select_num_factors
from numpyro_tempered.ppca.result import PPCAFit

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
    "log_density",
    "num_occupied",
    "principal_axes",
    "prior",
    "reconstruct",
    "sample",
    "sample_posterior",
    "select_num_factors",
    "transform",
]
