r"""Bounds of the theory as numbers: regret, divergences and certificates.

A bound here is the right side of a theorem, evaluated by NumPy in double precision when a run is over. Each
function cites its theorem and returns its assumptions, and how to check them.

Regret, as a :class:`Bound`; its constants L, D and γ are :func:`lipschitz`, :func:`diameter` and
:func:`strong_convexity`. The decision of a round is θ_t, the posterior mean before it. With q_μ any
Gaussian and the losses convex,

.. math:: \sum_{t\le T}\ell_t(\theta_t) \le \sum_{t\le T} E_{q_t}\ell_t
          \le \sum_{t\le T} E_{q_\mu}\ell_t + \text{regret}

Distance of a tempered posterior from the truth, as a :class:`Certificate`: computable from the data, an ELBO and
an upper bound on log p0(X), which is a :class:`LogTrueDensity`. The divergences and what they imply are beside.

Risk of a posterior on new data under a bounded loss, as a :class:`RiskCertificate`: :func:`pac_bayes`.
"""

from numpyro_tempered.theory import hindsight
from numpyro_tempered.theory.bounds.base import (
    Bound,
    online_to_batch,
    online_to_batch_risk,
)
from numpyro_tempered.theory.bounds.certificate import (
    Certificate,
    LogTrueDensity,
    empirical_entropy,
    known_density,
    maximum_likelihood,
    selection_certificate,
    tempered_certificate,
)
from numpyro_tempered.theory.bounds.constants import (
    diameter,
    lipschitz,
    lipschitz_squared,
    strong_convexity,
)
from numpyro_tempered.theory.bounds.inequalities import (
    change_order,
    hellinger_bound,
    total_variation_bound,
)
from numpyro_tempered.theory.bounds.ledger import regret_ledger
from numpyro_tempered.theory.bounds.pac_bayes import RiskCertificate, pac_bayes
from numpyro_tempered.theory.bounds.points import ewa_point, sva_point
from numpyro_tempered.theory.bounds.regret import (
    doubling,
    ewa,
    hedge,
    sva,
    svb,
    svb_strongly_convex,
)
from numpyro_tempered.theory.bounds.renyi import (
    renyi_discrete,
    renyi_exponential_family,
    renyi_gaussian,
    renyi_normal,
    renyi_quadrature,
)

__all__ = [
    "Bound",
    "Certificate",
    "LogTrueDensity",
    "RiskCertificate",
    "change_order",
    "diameter",
    "doubling",
    "empirical_entropy",
    "ewa",
    "ewa_point",
    "hedge",
    "hellinger_bound",
    "hindsight",
    "known_density",
    "lipschitz",
    "lipschitz_squared",
    "maximum_likelihood",
    "online_to_batch",
    "online_to_batch_risk",
    "pac_bayes",
    "regret_ledger",
    "renyi_discrete",
    "renyi_exponential_family",
    "renyi_gaussian",
    "renyi_normal",
    "renyi_quadrature",
    "selection_certificate",
    "strong_convexity",
    "sva",
    "sva_point",
    "svb",
    "svb_strongly_convex",
    "tempered_certificate",
    "total_variation_bound",
]
__dir__ = __all__.copy
