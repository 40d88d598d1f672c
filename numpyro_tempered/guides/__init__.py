"""AutoGuides that start at the prior, for the online rules."""

from numpyro_tempered.guides.low_rank_normal import LowRankPrecisionNormal
from numpyro_tempered.guides.online import (
    AutoOnlineDiagonalNormal,
    AutoOnlineLowRankNormal,
    AutoOnlineMultivariateNormal,
)
from numpyro_tempered.guides.prior import NUM_PRIOR_DRAWS

__all__ = [
    "NUM_PRIOR_DRAWS",
    "AutoOnlineDiagonalNormal",
    "AutoOnlineLowRankNormal",
    "AutoOnlineMultivariateNormal",
    "LowRankPrecisionNormal",
]
