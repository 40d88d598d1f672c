"""AutoGuides that start at the prior, for the online rules, one for sparse priors, and two with heavy tails."""

from numpyro_tempered.infer.guides.any_family import AutoOnlineGuide, AutoOnlineLowRankNormal
from numpyro_tempered.infer.guides.gaussian_mixture import AutoGaussianMixture
from numpyro_tempered.infer.guides.low_rank_normal import LowRankPrecisionNormal
from numpyro_tempered.infer.guides.online import AutoOnlineDiagonalNormal, AutoOnlineMultivariateNormal
from numpyro_tempered.infer.guides.prior import NUM_PRIOR_DRAWS
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.guides.student_t import AutoDiagonalStudentT, AutoMultivariateStudentT

__all__ = [
    "NUM_PRIOR_DRAWS",
    "AutoDiagonalStudentT",
    "AutoGaussianMixture",
    "AutoMultivariateStudentT",
    "AutoOnlineDiagonalNormal",
    "AutoOnlineGuide",
    "AutoOnlineLowRankNormal",
    "AutoOnlineMultivariateNormal",
    "AutoSpikeAndSlab",
    "LowRankPrecisionNormal",
]
