"""Mixtures by tempered coordinate ascent."""

from numpyro_tempered.cavi.checking import check_component
from numpyro_tempered.cavi.chunks import fit_chunks
from numpyro_tempered.cavi.em import MixtureEM, em
from numpyro_tempered.cavi.evidence import Bound
from numpyro_tempered.cavi.fit_stochastic import fit_stochastic
from numpyro_tempered.cavi.information_criteria import aic, bic, icl
from numpyro_tempered.cavi.mixture import fit
from numpyro_tempered.cavi.predictions import (
    log_predictive,
    predict,
    relabel,
    responsibilities,
    sample,
    sample_parameters,
)
from numpyro_tempered.cavi.result import MixtureFit
from numpyro_tempered.cavi.sharding import shard_rows
from numpyro_tempered.cavi.starts import Start, given_responsibilities, kmeans_plus_plus, random_responsibilities
from numpyro_tempered.cavi.stochastic import (
    RobbinsMonro,
    StochasticRule,
    StochasticState,
    robbins_monro,
    stochastic,
)
from numpyro_tempered.components.base import Component
from numpyro_tempered.components.bernoulli import bernoulli
from numpyro_tempered.components.categorical import categorical
from numpyro_tempered.components.columnwise import Column, columnwise
from numpyro_tempered.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.components.exponential import exponential
from numpyro_tempered.components.gaussian import gaussian
from numpyro_tempered.components.known_variance import known_variance
from numpyro_tempered.components.multinomial import multinomial
from numpyro_tempered.components.poisson import poisson
from numpyro_tempered.components.product import product
from numpyro_tempered.components.scaling import scaled_to
from numpyro_tempered.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixture_bridges import as_tempered_fit, numpyro_guide, numpyro_model, polish
from numpyro_tempered.mixtures.from_sklearn import from_sklearn
from numpyro_tempered.mixtures.selection import (
    ComponentSelection,
    num_components_path,
    select_num_components,
    selection_table,
)

__all__ = [
    "Bound",
    "Column",
    "Component",
    "ComponentSelection",
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
    "selection_table",
    "shard_rows",
    "spherical_gaussian",
    "stochastic",
    "tied_gaussian",
]
