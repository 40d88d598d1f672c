"""Value and gradients of E_q[loss]: closed forms, quadrature, Monte Carlo, linearisation."""

from numpyro_tempered.expectations.absolute import absolute
from numpyro_tempered.expectations.base import Evaluation, Expectation
from numpyro_tempered.expectations.gauss_hermite import gauss_hermite
from numpyro_tempered.expectations.hinge import hinge
from numpyro_tempered.expectations.linearised import linearised
from numpyro_tempered.expectations.monte_carlo import monte_carlo
from numpyro_tempered.expectations.pinball import pinball
from numpyro_tempered.expectations.poisson import poisson
from numpyro_tempered.expectations.predictor_monte_carlo import predictor_monte_carlo
from numpyro_tempered.expectations.probit import probit
from numpyro_tempered.expectations.softmax import softmax
from numpyro_tempered.expectations.squared import squared

__all__ = [
    "Evaluation",
    "Expectation",
    "absolute",
    "gauss_hermite",
    "hinge",
    "linearised",
    "monte_carlo",
    "pinball",
    "poisson",
    "predictor_monte_carlo",
    "probit",
    "softmax",
    "squared",
]
