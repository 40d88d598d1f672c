"""Value and gradients of E_q[loss]: closed forms, quadrature, Monte Carlo, linearisation."""

from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.expectations.gauss_hermite import gauss_hermite
from numpyro_tempered.gaussian.expectations.hinge import hinge
from numpyro_tempered.gaussian.expectations.linearised import linearised
from numpyro_tempered.gaussian.expectations.location_scale import location_scale
from numpyro_tempered.gaussian.expectations.logistic import logistic
from numpyro_tempered.gaussian.expectations.monte_carlo import monte_carlo
from numpyro_tempered.gaussian.expectations.outputs import predictor_monte_carlo
from numpyro_tempered.gaussian.expectations.pinball import absolute, pinball
from numpyro_tempered.gaussian.expectations.poisson import poisson
from numpyro_tempered.gaussian.expectations.probit import probit
from numpyro_tempered.gaussian.expectations.softmax import softmax
from numpyro_tempered.gaussian.expectations.squared import squared

__all__ = [
    "Evaluation",
    "Expectation",
    "absolute",
    "gauss_hermite",
    "hinge",
    "linearised",
    "location_scale",
    "logistic",
    "monte_carlo",
    "pinball",
    "poisson",
    "predictor_monte_carlo",
    "probit",
    "softmax",
    "squared",
]
__dir__ = __all__.copy
