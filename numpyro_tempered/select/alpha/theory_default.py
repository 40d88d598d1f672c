"""The alpha of the theory's bounds."""

import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Criterion, Verdict
from numpyro_tempered.select.alpha.task import Task


def theory_default() -> Criterion:
    r"""The power 1/2, whatever the data.

    **Aim: a guarantee on risk** in the worst case, where nothing is known of the model's departure. The tempered
    posterior concentrates for every α < 1 under a condition on the prior mass alone; with the rate :math:`r_n`,

    .. math:: E \int D_\alpha(P_\theta, P_0)\, d\tilde\pi_{n,\alpha} \le \frac{1 + \alpha}{1 - \alpha}\, r_n.

    As :math:`D_{1/2} \le D_\alpha` for α >= 1/2 and :math:`D_{1/2} \le \frac{1 - \alpha}{\alpha} D_\alpha` below,
    the bound on :math:`D_{1/2}` that follows, :math:`3 r_n`, is least at α = 1/2, for every rate. With H the
    Hellinger distance, :math:`D_{1/2} = -2\log(1 - H^2/2) \ge H^2`.

    Meant for: a default before the data are seen, a model with no other criterion (discrete latents, few data, no
    rows), and statements that need the theorem. Not meant for intervals: on a well-specified model those at 1/2
    are too wide by a factor of :math:`\sqrt 2`.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`.

    References:
        AR; vEH, Theorem 16.

    Example:
        >>> theory_default().decide(None, None, None, None).alpha
        0.5
    """

    def decide(rng_key: Array, task: Task, grid: np.ndarray, reduced: None) -> Verdict:
        return Verdict(
            0.5,
            {},
            {},
            "alpha = 0.5 by theory_default(), which aims at the least bound on the risk in Rényi divergence of "
            "order 1/2 and has not looked at the data: whether there is a need to temper is not said.",
        )

    return Criterion("theory_default", "risk", None, decide)
