"""Tempered, online and model-selecting variational Bayes for any NumPyro model."""

from numpyro_tempered import expectations, families, guides, online, optim, plots
from numpyro_tempered.elbo import ExpectedNLL
from numpyro_tempered.fit import TemperedFit, fit_svi
from numpyro_tempered.handlers import temper
from numpyro_tempered.infer import OnlineVI, OnlineVIState
from numpyro_tempered.inference_data import to_inference_data
from numpyro_tempered.loo import loo
from numpyro_tempered.marginalize import marginalize
from numpyro_tempered.path import path_table, temper_path
from numpyro_tempered.selection import compare, comparison_table, dyadic

__all__ = [
    "ExpectedNLL",
    "OnlineVI",
    "OnlineVIState",
    "TemperedFit",
    "compare",
    "comparison_table",
    "dyadic",
    "expectations",
    "families",
    "fit_svi",
    "guides",
    "loo",
    "marginalize",
    "online",
    "optim",
    "path_table",
    "plots",
    "temper",
    "temper_path",
    "to_inference_data",
]
