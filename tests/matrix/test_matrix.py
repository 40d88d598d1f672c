"""The algorithm matrix: its diagonal by default, all of it when slow.

In the diagonal the power is concrete; the matrix has one program for all powers of a cell, so the power is
traced there.
"""

import itertools

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from conftest import tiered
from matrix import algorithms
from matrix.algorithms import CHECKS, Gibbs, by_condition, check, expected, plain, vsbc
from matrix.models import ALPHAS, MODELS
from numpyro import handlers
from scipy import integrate, special, stats

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("x64")

DIAGONAL = [
    ("NUTS", "gamma_poisson", 0.5),
    ("HMC", "half_normal_scale", 0.1),
    ("BarkerMH", "beta_bernoulli", 0.1),
    ("SA", "normal", 1.0),
    ("DiscreteHMCGibbs", "which_shift", 0.5),
    ("MixedHMC", "how_many_sources", 0.1),
    ("AIES", "gamma_exponential", 0.5),
    ("ESS", "beta_negative_binomial", 0.1),
    ("SVI, AutoNormal", "normal_inverse_gamma", 0.5),
    ("SVI, AutoDiagonalNormal", "linear", 0.1),
    ("SVI, AutoMultivariateNormal", "linear", 0.5),
    ("SVI, AutoLowRankMultivariateNormal", "dirichlet_categorical", 0.1),
    ("SVI, AutoLaplaceApproximation", "linear_unknown_variance", 0.1),
    ("SVI, AutoIAFNormal", "linear", 0.5),
    ("SVI, AutoDAIS", "normal", 0.1),
    ("SVI, AutoGuideList", "normal_inverse_gamma", 0.1),
    ("SteinVI", "normal", 0.5),
    ("Predictive", "linear", 0.5),
    ("log_likelihood", "normal_inverse_wishart", 0.1),
    ("psis_diagnostic", "normal", 0.1),
    ("vsbc_diagnostic", "normal", 0.5),
    ("vsbc_diagnostic, by condition", "normal", 0.5),
    ("HMCECS", "linear", 0.5),
    *(
        (
            ("Gibbs, DiscreteGibbs", "which_shift", 0.1),
            ("Gibbs, CustomGibbs", "how_many_sources", 0.5),
        )
        if Gibbs is not None
        else ()
    ),
    # What NumPyro itself refuses.
    ("MixedHMC", "normal", 0.5),
    ("SVI, AutoIAFNormal", "normal", 0.5),
    # Shares its programs with the check that fails.
    ("log_likelihood", "normal", 0.1),
]


@pytest.fixture
def old_key():
    # vsbc_diagnostic reshapes its keys, which the new type does not allow.
    return jax.random.PRNGKey(20260)


def test_the_diagonal_meets_every_algorithm_model_and_power():
    names, model_names, alphas = (set(column) for column in zip(*DIAGONAL, strict=True))
    assert (names, model_names, alphas) == (set(CHECKS), set(MODELS), set(ALPHAS))


# One of each verdict that is quick to compile; "exact" and "equal" are left to the full tier.
UNIT = {
    ("log_likelihood", "normal", 0.1),
    ("HMCECS", "linear", 0.5),
    ("MixedHMC", "normal", 0.5),
}


def tier(i, cell):
    if cell in UNIT:
        return cell
    # The others run with the whole matrix, and in tests/benchmarks/algorithm_matrix.py.
    return pytest.param(*cell, marks=pytest.mark.slow if i % 4 else pytest.mark.full)


@pytest.mark.parametrize(
    ("name", "model_name", "alpha"), [tier(*item) for item in enumerate(DIAGONAL)]
)
def test_diagonal(name, model_name, alpha, old_key):
    (cell,) = check(name, model_name, (alpha,), old_key)
    assert cell.verdict == expected(name, model_name, alpha), cell


@pytest.mark.slow
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", CHECKS)
def test_matrix(name, model_name, old_key):
    for alpha, cell in zip(
        ALPHAS, check(name, model_name, ALPHAS, old_key), strict=True
    ):
        assert cell.verdict == expected(name, model_name, alpha), (alpha, cell)


class _tempers_jacobians(handlers.scale):
    """Scales whatever is observed, as one would write it."""

    def __init__(self, fn, alpha):
        super().__init__(fn, scale=alpha)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            super().process_message(msg)


def _wider(fn, alpha):
    """Tempers in the distribution itself, whose log-probability is then another."""
    return plain(
        MODELS["normal"]._replace(
            likelihood=lambda mu: dist.Normal(mu, 1.5 / alpha**0.5)
        )
    )


@pytest.mark.parametrize(
    ("name", "model_name", "wrong"),
    [
        pytest.param(
            "HMC", "half_normal_scale", _tempers_jacobians, marks=pytest.mark.full
        ),
        pytest.param(
            "SVI, AutoNormal", "normal", lambda fn, alpha: fn, marks=pytest.mark.full
        ),
        ("log_likelihood", "normal", _wider),
    ],
)
def test_the_checks_can_fail(name, model_name, wrong, old_key, monkeypatch):
    monkeypatch.setattr(
        algorithms, "tempered", lambda model, alpha: wrong(plain(model), alpha)
    )
    (cell,) = check(name, model_name, (0.1,), old_key)
    assert cell.verdict == "WRONG"


@pytest.mark.slow
def test_vsbc_that_leaves_its_data_to_condition_is_untempered(old_key):
    model = plain(MODELS["normal"])
    tempered, bayes = (
        vsbc(m, old_key, simulated_data_to_args=by_condition)
        for m in (nt.temper(model, alpha=0.1, strict=False), model)
    )
    np.testing.assert_array_equal(tempered["mu"], bayes["mu"])


# The closed forms, once more by quadrature over one parameter.

ONE_PARAMETER = {
    "normal": (
        stats.norm(0.5, 2.0),
        lambda mu, y: stats.norm.logpdf(y, mu, 1.5),
        (-12.0, 12.0),
    ),
    "beta_bernoulli": (
        stats.beta(2.0, 3.0),
        lambda p, y: stats.bernoulli.logpmf(y, p),
        (0.0, 1.0),
    ),
    "gamma_poisson": (
        stats.gamma(3.0),
        lambda rate, y: stats.poisson.logpmf(y, rate),
        (0.0, 40.0),
    ),
    "gamma_exponential": (
        stats.gamma(4.0, scale=0.5),
        lambda rate, y: stats.expon.logpdf(y, scale=1 / rate),
        (0.0, 30.0),
    ),
    "beta_negative_binomial": (
        stats.beta(3.0, 4.0),
        lambda p, y: (
            special.gammaln(y + 2.5)
            - special.gammaln(y + 1)
            + y * np.log(p)
            + 2.5 * np.log1p(-p)
        ),
        (0.0, 1.0),
    ),
}


@pytest.mark.parametrize(
    ("model_name", "alpha"),
    tiered(
        itertools.product(ONE_PARAMETER, ALPHAS),
        unit=zip(ONE_PARAMETER, itertools.cycle(ALPHAS)),
    ),
)
def test_closed_forms_by_quadrature(model_name, alpha):
    model = MODELS[model_name]
    prior, log_prob, (low, high) = ONE_PARAMETER[model_name]
    ((first, second),) = model.moments(alpha).values()
    # At its greatest the integrand is about 1.
    top = alpha * log_prob(first, model.y).sum()

    def density(theta, power):
        return (
            theta**power
            * prior.pdf(theta)
            * np.exp(alpha * log_prob(theta, model.y).sum() - top)
        )

    mass, *moments = (
        integrate.quad(
            density,
            low,
            high,
            args=(k,),
            points=[first],
            epsabs=0.0,
            epsrel=1e-12,
            limit=200,
        )[0]
        for k in range(3)
    )
    np.testing.assert_allclose(np.array(moments) / mass, [first, second], rtol=1e-9)
