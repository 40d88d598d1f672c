"""The integral of a power of a density."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from conftest import tiered
from scipy import integrate, stats

from numpyro_tempered.handlers.power_integral import (
    NoIntegral,
    log_power_integral,
    log_prob_of_counts,
    num_measured,
)

BETA = 0.3
REAL, POSITIVE = (-np.inf, 0.3, np.inf), (0.0, 0.3, np.inf)
# Made in the precision of the test, with the ends of the support and a point between, where a kink may be.
DENSITIES = {
    "normal": (lambda: dist.Normal(0.3, 2.0), REAL),
    "student_t": (lambda: dist.StudentT(3.0, 0.3, 2.0), REAL),
    "cauchy": (lambda: dist.Cauchy(0.3, 2.0), REAL),
    "log_normal": (lambda: dist.LogNormal(0.5, 1.2), POSITIVE),
    "half_normal": (lambda: dist.HalfNormal(2.0), POSITIVE),
    "laplace": (lambda: dist.Laplace(0.3, 2.0), REAL),
    "asymmetric_laplace": (lambda: dist.AsymmetricLaplace(0.3, 1.0, 2.0), REAL),
    "asymmetric_laplace_quantile": (
        lambda: dist.AsymmetricLaplaceQuantile(0.3, 1.0, 0.2),
        REAL,
    ),
    "logistic": (lambda: dist.Logistic(0.3, 0.4), REAL),
    "exponential": (lambda: dist.Exponential(3.0), POSITIVE),
    "gamma": (lambda: dist.Gamma(2.5, 3.0), POSITIVE),
    "gamma with a pole": (lambda: dist.Gamma(0.7, 3.0), POSITIVE),
    "chi2": (lambda: dist.Chi2(3.0), POSITIVE),
    "inverse_gamma": (lambda: dist.InverseGamma(3.0, 2.0), POSITIVE),
    "weibull": (lambda: dist.Weibull(2.0, 1.5), POSITIVE),
    "beta": (lambda: dist.Beta(2.0, 1.5), (0.0, 0.3, 1.0)),
    "uniform": (lambda: dist.Uniform(-1.0, 3.0), (-1.0, 0.3, 3.0)),
    # By quantiles:
    "gumbel": (lambda: dist.Gumbel(0.3, 2.0), REAL),
    "half_cauchy": (lambda: dist.HalfCauchy(2.0), POSITIVE),
    "truncated_normal": (
        lambda: dist.TruncatedNormal(0.0, 1.0, low=-0.5, high=2.0),
        (-0.5, 0.3, 2.0),
    ),
    "soft_laplace": (lambda: dist.SoftLaplace(0.3, 1.0), REAL),
}


@pytest.mark.parametrize(
    "name",
    tiered(
        DENSITIES,
        unit=[n for n in DENSITIES if n not in ("gumbel", "truncated_normal")],
    ),
)
def test_of_a_density_it_is_the_integral(name, x64):
    make, ends = DENSITIES[name]
    fn = make()

    def power(y):
        return float(jnp.exp((1.0 + BETA) * fn.log_prob(y)))

    pieces = [
        integrate.quad(power, low, high, limit=300)[0]
        for low, high in itertools.pairwise(ends)
    ]
    assert float(log_power_integral(fn, BETA)) == pytest.approx(
        np.log(sum(pieces)), abs=1e-8
    )


@jax.jit
@jax.value_and_grad
def of_poisson(rate):
    return log_power_integral(dist.Poisson(rate), BETA)


@pytest.mark.parametrize("rate", [399.0, 1e3, 1e5, 1e7])
def test_of_large_counts_in_single_precision(rate):
    """The terms of their log-probabilities lose all digits; the integral is that of a normal density."""
    want = -0.5 * BETA * np.log(2.0 * np.pi * rate) - 0.5 * np.log1p(BETA)
    value, slope = of_poisson(rate)
    assert float(value) == pytest.approx(want, abs=3e-4)
    assert float(slope) * rate == pytest.approx(-0.5 * BETA, rel=2e-2)


slope_of_counts = jax.jit(
    jax.grad(lambda rate, count: log_prob_of_counts(dist.Poisson(rate), count))
)
COUNTS = [
    (1e7, 1e7),
    (1e7, 1.001e7),
    (1e7, 2e7),
    (1e5, 9.9e4),
    (150.0, 101.0),
    (150.0, 300.0),
    (50.0, 60.0),
]


@pytest.mark.parametrize(("rate", "count"), COUNTS)
def test_a_large_count_in_single_precision(rate, count):
    fn, count = dist.Poisson(jnp.float32(rate)), jnp.float32(count)
    want = stats.poisson.logpmf(float(count), rate)
    assert float(log_prob_of_counts(fn, count)) == pytest.approx(
        want, rel=3e-6, abs=2e-5
    )
    slope = slope_of_counts(jnp.float32(rate), count)
    assert float(slope) == pytest.approx(float(count) / rate - 1.0, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rate", [1e-3, 3.0, 63.9, 64.1, 1e3, 1e5])
def test_of_counts_it_is_the_sum(rate, x64):
    low, high = (
        max(0, int(rate - 40 * np.sqrt(rate))),
        int(rate + 40 * np.sqrt(rate) + 100),
    )
    log_probs = stats.poisson.logpmf(np.arange(low, high), rate)
    want = np.log(np.sum(np.exp((1.0 + BETA) * log_probs)))
    value, slope = of_poisson(rate)
    assert float(value) == pytest.approx(want, abs=1e-9)
    # d log f = (k / rate - 1) d rate.
    k = np.arange(low, high)
    weights = np.exp((1.0 + BETA) * log_probs - want)
    assert float(slope) == pytest.approx(
        (1.0 + BETA) * np.sum(weights * (k / rate - 1.0)), abs=1e-9
    )


@pytest.mark.parametrize(
    ("total", "prob"),
    [(1, 0.3), (10, 0.99), (1000, 0.001), (1000, 0.5), (100_000, 0.2)],
)
def test_of_binomial_counts_it_is_the_sum(total, prob, x64):
    k = np.arange(total + 1)
    want = np.log(np.sum(np.exp((1.0 + BETA) * stats.binom.logpmf(k, total, prob))))
    logits = np.log(prob / (1.0 - prob))
    for fn in (dist.Binomial(total, probs=prob), dist.Binomial(total, logits=logits)):
        assert float(log_power_integral(fn, BETA)) == pytest.approx(want, abs=1e-9)
    different = log_power_integral(dist.Binomial(jnp.array([total, 3]), prob), BETA)
    assert float(different[0]) == pytest.approx(want, abs=1e-9)


def test_of_classes_it_is_the_sum(x64):
    probs = np.array([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]])
    want = np.log(np.sum(probs ** (1.0 + BETA), axis=1))
    np.testing.assert_allclose(
        log_power_integral(dist.Categorical(probs=probs), BETA), want, atol=1e-12
    )
    both = np.log(np.sum(np.array([0.2, 0.8]) ** (1.0 + BETA)))
    for fn in (dist.Bernoulli(probs=0.2), dist.Bernoulli(logits=np.log(0.25))):
        assert float(log_power_integral(fn, BETA)) == pytest.approx(both)


SPDS = [[[1.0, 0.5], [0.5, 1.0]], [[2.0, 0.0], [0.0, 3.0]]]
BATCHED = {
    "half_cauchy": (dist.HalfCauchy, [0.5, 2.0]),
    "soft_laplace": (lambda scale: dist.SoftLaplace(0.0, scale), [0.5, 2.0]),
    "binomial": (lambda probs: dist.Binomial(7, probs), [0.2, 0.6]),
    "poisson": (dist.Poisson, [0.5, 2.0]),
    "categorical": (
        lambda probs: dist.Categorical(probs=probs),
        [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]],
    ),
    "gamma": (lambda shape: dist.Gamma(shape, 1.5), [2.0, 3.0]),
    "multivariate_normal": (
        lambda cov: dist.MultivariateNormal(jnp.zeros(2), cov),
        SPDS,
    ),
}


@pytest.mark.parametrize("name", BATCHED)
def test_each_of_a_batch_has_its_own(name):
    make, parameters = BATCHED[name][0], jnp.asarray(BATCHED[name][1])
    of = jax.jit(lambda parameter: log_power_integral(make(parameter), BETA))
    whole = of(parameters)
    assert whole.shape == (2,)
    np.testing.assert_allclose(
        whole, [float(of(parameter)) for parameter in parameters], rtol=1e-5
    )
    assert whole[0] != whole[1]


def test_independent_elements_multiply_and_masked_ones_count_for_nothing(x64):
    scales = jnp.array([1.0, 2.0, 3.0])
    each = log_power_integral(dist.Normal(0.0, scales), BETA)
    whole = dist.Normal(0.0, scales).to_event(1)
    joint = dist.MultivariateNormal(jnp.zeros(3), scale_tril=jnp.diag(scales))
    for fn in (whole, joint):
        assert float(log_power_integral(fn, BETA)) == pytest.approx(float(each.sum()))
        assert float(num_measured(fn)) == 3.0
    masked = dist.Normal(0.0, scales).mask(jnp.array([True, False, True])).to_event(1)
    assert float(log_power_integral(masked, BETA)) == pytest.approx(
        float(each[0] + each[2])
    )
    assert float(num_measured(masked)) == 2.0
    assert float(num_measured(dist.Poisson(2.0))) == 0.0
    np.testing.assert_allclose(
        log_power_integral(dist.Normal(0.0, 2.0).expand([2, 3]), BETA), each[1]
    )
    np.testing.assert_array_equal(log_power_integral(whole.mask(False), BETA), 0.0)
    covariance = np.array([[2.0, 0.7], [0.7, 1.0]])
    correlated = dist.MultivariateNormal(jnp.zeros(2), covariance)
    want = -0.5 * BETA * np.log(np.linalg.det(2.0 * np.pi * covariance)) - np.log(
        1.0 + BETA
    )
    assert float(log_power_integral(correlated, BETA)) == pytest.approx(want)


def test_a_power_without_an_integral_is_infinite():
    for fn in (dist.Gamma(0.2, 1.0), dist.Beta(2.0, 0.1), dist.Weibull(1.0, 0.2)):
        assert log_power_integral(fn, BETA) == np.inf


@pytest.mark.parametrize(
    "fn",
    [
        dist.NegativeBinomial2(3.0, 2.0),
        dist.MixtureSameFamily(
            dist.Categorical(jnp.array([0.5, 0.5])),
            dist.Normal(jnp.array([0.0, 1.0]), 1.0),
        ),
        dist.Dirichlet(jnp.ones(3)),
        dist.ZeroInflatedPoisson(0.5, 2.0),
        dist.TwoSidedTruncatedDistribution(dist.Laplace(0.0, 1.0)),
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), dist.transforms.ExpTransform()
        ),
        dist.Delta(1.0),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_what_has_neither_formula_nor_quadrature_is_refused(fn):
    with pytest.raises(NoIntegral, match=type(fn).__name__):
        log_power_integral(fn, BETA)


def test_a_distribution_of_the_users_own_is_not_taken_for_its_parent():
    class Wider(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(0.5 * value) - jnp.log(2.0)

        def icdf(self, q):
            return 2.0 * super().icdf(q)

    assert float(log_power_integral(Wider(0.0, 1.0), BETA)) == pytest.approx(
        float(log_power_integral(dist.Normal(0.0, 2.0), BETA)), abs=1e-5
    )
