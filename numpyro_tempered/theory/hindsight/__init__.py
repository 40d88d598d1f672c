r"""The best fixed parameter in hindsight, over a box or without one, with a certificate.

Each function returns a :class:`Hindsight`: θ, its cumulative loss, and a lower bound below which no parameter of
the box can come. The bound is computed from the answer by convexity, in double precision, so that it holds
whether or not the solver did what it should:

- losses with kinks (hinge, absolute, pinball): slopes s_t between those on both sides of the kink c_t give
  :math:`\sum_t\ell_t(\theta) \ge \sum_t s_t(x_t^\top\theta - c_t)`, and the right side has its least value over
  a box in closed form: the dual of the linear program;
- smooth losses: :math:`F(\theta') \ge F(\theta) + \nabla F(\theta)\cdot(\theta'-\theta)`, likewise.
"""

from numpyro_tempered.theory.hindsight.base import Hindsight
from numpyro_tempered.theory.hindsight.gaussian import GaussianComparator, gaussian
from numpyro_tempered.theory.hindsight.kinks import absolute, hinge, pinball
from numpyro_tempered.theory.hindsight.sequential import SequentialFit, sequential
from numpyro_tempered.theory.hindsight.smooth import convex, squared

__all__ = [
    "GaussianComparator",
    "Hindsight",
    "SequentialFit",
    "absolute",
    "convex",
    "gaussian",
    "hinge",
    "pinball",
    "sequential",
    "squared",
]
__dir__ = __all__.copy
