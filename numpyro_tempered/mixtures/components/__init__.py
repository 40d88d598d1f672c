"""Components of mixtures: families with conjugate priors."""

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

__all__ = [
    "Column",
    "Component",
    "Location",
    "bernoulli",
    "categorical",
    "check_component",
    "columnwise",
    "diagonal_gaussian",
    "exponential",
    "gaussian",
    "known_variance",
    "multinomial",
    "poisson",
    "product",
    "scaled_to",
    "spherical_gaussian",
    "tied_gaussian",
]
__dir__ = __all__.copy
