"""AutoGuides that start at the prior for the online rules, and others for what else posteriors look like."""

from numpyro_tempered.infer.guides.any_family import (
    AutoOnlineGuide,
    AutoOnlineLowRankNormal,
    LowRankPrecisionNormal,
)
from numpyro_tempered.infer.guides.gaussian_mixture import AutoGaussianMixture
from numpyro_tempered.infer.guides.network import AutoNetworkNormal, init_by_fan_in
from numpyro_tempered.infer.guides.online import (
    AutoOnlineDiagonalNormal,
    AutoOnlineMultivariateNormal,
)
from numpyro_tempered.infer.guides.prior import NUM_PRIOR_DRAWS
from numpyro_tempered.infer.guides.relu_network import start_relu_network
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.guides.student_t import (
    AutoDiagonalStudentT,
    AutoMultivariateStudentT,
)

__all__ = [
    "NUM_PRIOR_DRAWS",
    "AutoDiagonalStudentT",
    "AutoGaussianMixture",
    "AutoMultivariateStudentT",
    "AutoNetworkNormal",
    "AutoOnlineDiagonalNormal",
    "AutoOnlineGuide",
    "AutoOnlineLowRankNormal",
    "AutoOnlineMultivariateNormal",
    "AutoSpikeAndSlab",
    "LowRankPrecisionNormal",
    "init_by_fan_in",
    "start_relu_network",
]
__dir__ = __all__.copy
