"""Mixtures by tempered coordinate ascent."""

from numpyro_tempered.mixtures import components, starts
from numpyro_tempered.mixtures.bridges.from_sklearn import from_sklearn
from numpyro_tempered.mixtures.bridges.polish import (
    numpyro_guide,
    numpyro_model,
    polish,
)
from numpyro_tempered.mixtures.coordinate_ascent import fit
from numpyro_tempered.mixtures.em import MixtureEM, em
from numpyro_tempered.mixtures.fit_stochastic import fit_stochastic
from numpyro_tempered.mixtures.predict import (
    log_predictive,
    predict,
    responsibilities,
    sample,
    sample_posterior,
)
from numpyro_tempered.mixtures.prepare import shard_rows
from numpyro_tempered.mixtures.result import MixtureFit, relabel
from numpyro_tempered.mixtures.select import (
    ComponentSelection,
    num_components_path,
    select_num_components,
)
from numpyro_tempered.mixtures.stochastic import robbins_monro, stochastic
from numpyro_tempered.mixtures.weights import stick_breaking

__all__ = [
    "ComponentSelection",
    "MixtureEM",
    "MixtureFit",
    "components",
    "em",
    "fit",
    "fit_stochastic",
    "from_sklearn",
    "log_predictive",
    "num_components_path",
    "numpyro_guide",
    "numpyro_model",
    "polish",
    "predict",
    "relabel",
    "responsibilities",
    "robbins_monro",
    "sample",
    "sample_posterior",
    "select_num_components",
    "shard_rows",
    "starts",
    "stick_breaking",
    "stochastic",
]
__dir__ = __all__.copy
