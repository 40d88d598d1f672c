"""Tempered, online and model-selecting variational Bayes for any NumPyro model."""

from numpyro_tempered import (
    alpha,
    bounds,
    distributions,
    expectations,
    families,
    gaussian_vi,
    guides,
    hindsight,
    mixtures,
    online,
    optim,
    plots,
    ppca,
    sparse,
    tables,
)
from numpyro_tempered.alpha.driver import select_alpha
from numpyro_tempered.alpha.report import alpha_table
from numpyro_tempered.elbo import ExpectedNLL
from numpyro_tempered.fit import TemperedFit, fit_svi
from numpyro_tempered.fit_gaussian import fit_gaussian
from numpyro_tempered.handlers import temper
from numpyro_tempered.infer import OnlineVI
from numpyro_tempered.inference_data import to_inference_data
from numpyro_tempered.ledger import regret_ledger, regret_table
from numpyro_tempered.loo import loo
from numpyro_tempered.marginalize import marginalize
from numpyro_tempered.online_state import OnlineVIState
from numpyro_tempered.path import path_table, temper_path
from numpyro_tempered.round_and_refit import round_and_refit
from numpyro_tempered.selection import compare, comparison_table, dyadic
from numpyro_tempered.sparse_bridge import sparse_as_tempered_fit

__all__ = [
    "ExpectedNLL",
    "OnlineVI",
    "OnlineVIState",
    "TemperedFit",
    "alpha",
    "alpha_table",
    "bounds",
    "compare",
    "comparison_table",
    "distributions",
    "dyadic",
    "expectations",
    "families",
    "fit_gaussian",
    "fit_svi",
    "gaussian_vi",
    "guides",
    "hindsight",
    "loo",
    "marginalize",
    "mixtures",
    "online",
    "optim",
    "path_table",
    "plots",
    "ppca",
    "regret_ledger",
    "regret_table",
    "round_and_refit",
    "select_alpha",
    "sparse",
    "sparse_as_tempered_fit",
    "tables",
    "temper",
    "temper_path",
    "to_inference_data",
]
