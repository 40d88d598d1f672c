"""Value and gradients of E_q[loss]: closed forms, quadrature, Monte Carlo."""

from numpyro_tempered.expectations.base import Evaluation, Expectation
from numpyro_tempered.expectations.gauss_hermite import gauss_hermite
from numpyro_tempered.expectations.hinge import hinge
from numpyro_tempered.expectations.monte_carlo import monte_carlo
from numpyro_tempered.expectations.squared import squared

__all__ = ["Evaluation", "Expectation", "gauss_hermite", "hinge", "monte_carlo", "squared"]
