r"""Regret bounds of the online rules, and what they say of new data.

A bound here is the right side of a theorem, evaluated: numbers in double precision by numpy, computed once a run
is over. Each function cites its theorem and returns a :class:`Bound` that names its assumptions, and how to check
them. The constants L, D and γ come from :mod:`numpyro_tempered.online`: ``lipschitz``, ``diameter``,
``strong_convexity``.

The decision of a round is θ_t, the posterior mean before it. With q_μ any Gaussian and the losses convex,

.. math:: \sum_{t\le T}\ell_t(\theta_t) \le \sum_{t\le T} E_{q_t}\ell_t
          \le \sum_{t\le T} E_{q_\mu}\ell_t + \text{regret}
"""

from numpyro_tempered.bounds.base import Bound
from numpyro_tempered.bounds.batch import online_to_batch, online_to_batch_risk
from numpyro_tempered.bounds.regret import doubling, ewa, hedge, sva, svb, svb_strongly_convex

__all__ = [
    "Bound",
    "doubling",
    "ewa",
    "hedge",
    "online_to_batch",
    "online_to_batch_risk",
    "sva",
    "svb",
    "svb_strongly_convex",
]
