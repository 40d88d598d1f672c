"""Mixtures by tempered coordinate ascent."""

from numpyro_tempered.mixtures.bridges.from_sklearn import from_sklearn
from numpyro_tempered.mixtures.bridges.model import numpyro_guide, numpyro_model
from numpyro_tempered.mixtures.bridges.polish import polish
from numpyro_tempered.mixtures.components.base import Component, Location
from numpyro_tempered.mixtures.components.bernoulli import bernoulli
from numpyro_tempered.mixtures.components.categorical import categorical
from numpyro_tempered.mixtures.components.checking import check_component
from numpyro_tempered.mixtures.components.columnwise import Column, columnwise
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.exponential import exponential
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.multinomial import multinomial
from numpyro_tempered.mixtures.components.poisson import poisson
from numpyro_tempered.mixtures.components.product import product
from numpyro_tempered.mixtures.components.scaling import scaled_to
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixtures.criteria import aic, bic, icl
from numpyro_tempered.mixtures.em import MixtureEM, em
from numpyro_tempered.mixtures.evidence import BoundEstimate
from numpyro_tempered.mixtures.fit import fit, fit_chunks
from numpyro_tempered.mixtures.fit_stochastic import fit_stochastic
from numpyro_tempered.mixtures.path import num_components_path
from numpyro_tempered.mixtures.predict import log_predictive, predict, responsibilities, sample, sample_parameters
from numpyro_tempered.mixtures.prepare import shard_rows
from numpyro_tempered.mixtures.result import MixtureFit, as_tempered_fit, relabel
from numpyro_tempered.mixtures.select import ComponentSelection, select_num_components
from numpyro_tempered.mixtures.starts import (
    Start,
    given_responsibilities,
    kmeans_plus_plus,
    random_responsibilities,
)
from numpyro_tempered.mixtures.stochastic import (
    RobbinsMonro,
    StochasticRule,
    StochasticState,
    robbins_monro,
    stochastic,
)

__all__ = [
    "BoundEstimate",
    "Column",
    "Component",
    "ComponentSelection",
    "Location",
    "MixtureEM",
    "MixtureFit",
    "RobbinsMonro",
    "Start",
    "StochasticRule",
    "StochasticState",
    "aic",
    "as_tempered_fit",
    "bernoulli",
    "bic",
    "categorical",
    "check_component",
    "columnwise",
    "diagonal_gaussian",
    "em",
    "exponential",
    "fit",
    "fit_chunks",
    "fit_stochastic",
    "from_sklearn",
    "gaussian",
    "given_responsibilities",
    "icl",
    "kmeans_plus_plus",
    "known_variance",
    "log_predictive",
    "multinomial",
    "num_components_path",
    "numpyro_guide",
    "numpyro_model",
    "poisson",
    "polish",
    "predict",
    "product",
    "random_responsibilities",
    "relabel",
    "responsibilities",
    "robbins_monro",
    "sample",
    "sample_parameters",
    "scaled_to",
    "select_num_components",
    "shard_rows",
    "spherical_gaussian",
    "stochastic",
    "tied_gaussian",
]
