"""The oracle of expectation propagation, and the package's own approximations beside it."""

import itertools

import ep_oracle as ep
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoMultivariateNormal
from numpyro.infer.util import log_density

import numpyro_tempered as nt

# Temperature at the joint (Fahrenheit) and distress of an O-ring in 23 launches of the space shuttle
# (Dalal, Fowlkes and Hoadley 1989).
TEMPERATURE = np.array(
    [
        66,
        70,
        69,
        68,
        67,
        72,
        73,
        70,
        57,
        63,
        70,
        78,
        67,
        53,
        67,
        75,
        70,
        81,
        76,
        79,
        75,
        76,
        58,
    ],
    float,
)
DISTRESS = np.array(
    [0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1], float
)


def launches(alpha=0.5, prior_sd=5.0):
    x = np.column_stack([np.ones(23), (TEMPERATURE - 70) / 5])
    return ep.Problem(
        x, DISTRESS, ep.LOGISTIC, np.zeros(2), prior_sd**2 * np.eye(2), alpha
    )


def simulated(seed, likelihood, alpha=1.0, n=25):
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(n), rng.normal(size=n)])
    u = x @ np.array([0.3, 0.7])
    y = {
        ep.LOGISTIC: lambda: (rng.random(n) < 1 / (1 + np.exp(-u))).astype(float),
        ep.POISSON: lambda: rng.poisson(np.exp(u)).astype(float),
        ep.NORMAL: lambda: u + rng.normal(size=n),
    }[likelihood]()
    return ep.Problem(
        x,
        y,
        likelihood,
        np.array([0.5, -0.2]),
        np.array([[9.0, 1.0], [1.0, 4.0]]),
        alpha,
    )


def location(y, alpha=1.0):
    """Cauchy data with an unknown location, prior N(0, 10²)."""
    y = np.asarray(y, float)
    return ep.Problem(
        np.ones((len(y), 1)), y, ep.CAUCHY, np.zeros(1), 100.0 * np.eye(1), alpha
    )


def exact_location(problem):
    """Log evidence, mean and sd of a location by quadrature over the prior."""
    log_mass, mean, variance = ep.tilted_moments(
        lambda u: (
            problem.alpha * problem.likelihood.value(u, problem.y[:, None]).sum(0)
        ),
        0.0,
        100.0,
    )
    return log_mass, mean, np.sqrt(variance)


# The pieces.


def test_tilted_moments_of_a_normal_factor():
    log_mass, mean, variance = ep.tilted_moments(
        lambda u: ep.NORMAL.value(u, 1.7), -0.4, 2.5
    )
    assert log_mass == pytest.approx(
        -0.5 * 2.1**2 / 3.5 - 0.5 * np.log(2 * np.pi * 3.5), abs=1e-12
    )
    assert mean == pytest.approx((1.7 * 2.5 - 0.4) / 3.5, abs=1e-12)
    assert variance == pytest.approx(2.5 / 3.5, abs=1e-12)


def test_tilted_moments_of_a_probit_factor():
    # E Phi(u) under N(m, v) is Phi(m / sqrt(1 + v)).
    from scipy.stats import norm

    log_mass, mean, _ = ep.tilted_moments(norm.logcdf, 0.8, 60.0)
    z = 0.8 / np.sqrt(61.0)
    assert log_mass == pytest.approx(norm.logcdf(z), abs=1e-12)
    assert mean == pytest.approx(
        0.8 + 60.0 * norm.pdf(z) / (norm.cdf(z) * np.sqrt(61.0)), abs=1e-10
    )


def test_the_launches_are_those_of_the_literature():
    problem = launches(alpha=1.0)._replace(
        x=np.column_stack([np.ones(23), TEMPERATURE]), prior_cov=1e9 * np.eye(2)
    )
    np.testing.assert_allclose(ep.laplace(problem).mean, [15.0429, -0.2322], rtol=1e-3)


@pytest.mark.parametrize("likelihood", [ep.LOGISTIC, ep.POISSON, ep.CAUCHY])
def test_derivatives_of_the_likelihoods(likelihood):
    u, y, h = np.linspace(-2, 2, 9), 1.0, 1e-5
    slope = (likelihood.value(u + h, y) - likelihood.value(u - h, y)) / (2 * h)
    curvature = (likelihood.slope(u + h, y) - likelihood.slope(u - h, y)) / (2 * h)
    np.testing.assert_allclose(likelihood.slope(u, y), slope, atol=1e-8)
    np.testing.assert_allclose(likelihood.curvature(u, y), curvature, atol=1e-8)


PROBLEMS = {
    "logistic": lambda alpha=1.0, seed=0: launches(alpha),
    "Poisson": lambda alpha=1.0, seed=0: simulated(seed, ep.POISSON, alpha),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "alpha"), [("logistic", 0.25), ("Poisson", 0.5)])
def test_two_grids_agree(name, alpha):
    problem = PROBLEMS[name](alpha)
    one, other = (
        ep.exact_moments(problem),
        ep.exact_moments(problem, points=601, width=22.0),
    )
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-6)
    np.testing.assert_allclose(one.cov, other.cov, atol=1e-5)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-6)


# Where EP is exact.


@pytest.mark.parametrize(
    ("alpha", "power"), list(itertools.product([0.3, 1.0, 1.7], [0.1, 0.5, 1.0]))
)
def test_conjugate_model_at_every_alpha_and_power(alpha, power):
    problem = simulated(3, ep.NORMAL, alpha)
    x, y, prior = problem.x, problem.y, np.linalg.inv(problem.prior_cov)
    cov = np.linalg.inv(prior + alpha * x.T @ x)
    mean = cov @ (prior @ problem.prior_mean + alpha * x.T @ y)
    # A normal density to the power alpha is one of variance 1 / alpha, times a constant.
    marginal = np.eye(25) / alpha + x @ problem.prior_cov @ x.T
    offset = y - x @ problem.prior_mean
    evidence = -0.5 * (
        offset @ np.linalg.solve(marginal, offset)
        + np.linalg.slogdet(2 * np.pi * marginal)[1]
    )
    evidence += 0.5 * 25 * ((1 - alpha) * np.log(2 * np.pi) - np.log(alpha))
    found = ep.power_ep(problem, power)
    np.testing.assert_allclose(found.mean, mean, atol=1e-10)
    np.testing.assert_allclose(found.cov, cov, atol=1e-10)
    assert found.log_evidence == pytest.approx(evidence, abs=1e-8)


def test_one_datum_is_exact_at_power_one_alone():
    whole = launches()
    problem = whole._replace(x=whole.x[13:14], y=whole.y[13:14])
    exact = ep.exact_moments(problem, points=601)
    found, half = ep.power_ep(problem), ep.power_ep(problem, 0.5)
    np.testing.assert_allclose(found.mean, exact.mean, atol=1e-7)
    np.testing.assert_allclose(found.cov, exact.cov, atol=1e-6)
    assert found.log_evidence == pytest.approx(exact.log_evidence, abs=1e-8)
    assert np.abs(half.cov - exact.cov).max() > 1e-2


# Where it is not: the fixed point.


@pytest.mark.parametrize(
    ("name", "power"),
    tiered(
        list(itertools.product(PROBLEMS, [0.3, 1.0])),
        unit=[("logistic", 0.3), ("Poisson", 1.0)],
    ),
)
def test_the_fixed_point_matches_moments_of_all_parameters(name, power):
    """The tilted distribution of each site, over the plane and not over u_i, has the moments of q."""
    problem = PROBLEMS[name](0.5, seed=1)
    q = ep.power_ep(problem, power)
    z = np.linspace(-11, 11, 301)
    theta = (
        q.mean
        + np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2)
        @ np.linalg.cholesky(q.cov).T
    )
    offset = theta - q.mean
    log_q = -0.5 * np.einsum("ij,jk,ik->i", offset, np.linalg.inv(q.cov), offset)
    for row, outcome, (k, r) in zip(problem.x, problem.y, q.sites, strict=True):
        u = theta @ row
        tilted = log_q + power * (
            problem.alpha * problem.likelihood.value(u, outcome)
            - r * u
            + 0.5 * k * u**2
        )
        weights = np.exp(tilted - tilted.max())
        weights /= weights.sum()
        mean = weights @ theta
        np.testing.assert_allclose(mean, q.mean, atol=1e-7)
        np.testing.assert_allclose(
            (theta - mean).T @ ((theta - mean) * weights[:, None]), q.cov, atol=1e-6
        )


@pytest.mark.parametrize("damping", tiered([1.0, 0.4], unit=[1.0]))
def test_the_order_of_the_sites_and_damping_do_not_matter_for_log_concave_factors(
    damping,
):
    problem, order = launches(), np.random.default_rng(0).permutation(23)
    one = ep.power_ep(problem)
    if damping == 1.0:
        problem = problem._replace(x=problem.x[order], y=problem.y[order])
    other = ep.power_ep(problem, damping=damping)
    np.testing.assert_allclose(other.mean, one.mean, atol=1e-8)
    np.testing.assert_allclose(other.cov, one.cov, atol=1e-8)
    assert other.log_evidence == pytest.approx(one.log_evidence, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "alpha"),
    tiered([("logistic", 0.5), ("Poisson", 1.0)], unit=[("logistic", 0.5)]),
)
def test_power_to_zero_is_variational_bayes(name, alpha):
    problem = PROBLEMS[name](alpha, seed=2)
    best = ep.gaussian_vi(problem)
    assert best.residual < 1e-6

    def numbers(q):
        return np.concatenate([q.mean, q.cov.ravel(), [q.log_evidence]])

    tenth, hundredth, thousandth = (
        numbers(ep.power_ep(problem, power)) for power in (0.1, 0.01, 0.001)
    )
    # Of first order in the power, in each of the numbers. The optimum has errors of its own, of the size of its
    # residual, which the differences between powers do not see.
    np.testing.assert_allclose(
        (tenth - numbers(best)) / (hundredth - numbers(best)), 10.0, rtol=0.1
    )
    np.testing.assert_allclose(
        (tenth - hundredth) / (hundredth - thousandth), 10.0, rtol=0.1
    )
    np.testing.assert_allclose(thousandth, numbers(best), atol=1e-3, rtol=0)
    np.testing.assert_allclose(
        (10.0 * thousandth - hundredth) / 9.0, numbers(best), atol=1e-6, rtol=0
    )


# Its errors, and those of the others.


@pytest.mark.parametrize("seed", tiered(range(5), unit=[0]))
def test_errors_on_25_data_with_a_wide_prior(seed):
    problem = simulated(seed, ep.LOGISTIC)
    exact = ep.exact_moments(problem)
    found = {
        name: f(problem)
        for name, f in (
            ("ep", ep.power_ep),
            ("vi", ep.gaussian_vi),
            ("laplace", ep.laplace),
        )
    }
    ratio = {name: q.sd / exact.sd for name, q in found.items()}
    shift = {
        name: (np.abs(q.mean - exact.mean) / exact.sd).max()
        for name, q in found.items()
    }
    assert ((ratio["vi"] < ratio["ep"]) & (ratio["ep"] < 1)).all()
    assert ratio["ep"].min() > 0.93
    assert ratio["vi"].min() > 0.9
    assert 0.8 < ratio["laplace"].min() < ratio["laplace"].max() < 1.02
    assert shift["ep"] < shift["vi"] < 0.02 < shift["laplace"]


def test_the_elbo_bounds_the_evidence_and_the_evidence_of_ep_does_not():
    low, high = location([-10, -9, 10, 11]), location([-3, 3])
    assert ep.power_ep(low, damping=0.3).log_evidence < exact_location(low)[0] - 0.5
    assert ep.power_ep(high, damping=0.3).log_evidence > exact_location(high)[0] + 0.3
    for problem in (low, high):
        # The ELBO of any normal distribution, with expectations by quadrature.
        for mean, sd in itertools.product([-9.5, 0.0, 3.0], [0.7, 3.0, 9.0]):
            u = mean + sd * ep.NODES
            expected = problem.alpha * problem.likelihood.value(
                u, problem.y[:, None]
            ).sum(0)
            kl = np.log(10 / sd) + (sd**2 + mean**2) / 200 - 0.5
            assert np.exp(ep.LOG_WEIGHTS) @ expected - kl < exact_location(problem)[0]


def test_ep_may_fail_and_its_answer_may_depend_on_the_order():
    with pytest.raises(FloatingPointError, match=r"cavity of site.*has precision"):
        ep.power_ep(location([-3, 3]))
    forth = ep.power_ep(location([-10, -9, 10, 11]))
    back = ep.power_ep(location([11, 10, -9, -10]))
    assert forth.residual < 1e-8
    assert back.residual < 1e-8
    assert forth.mean[0] < -9
    assert back.mean[0] > 9


def test_a_quarter_of_the_power_doubles_the_width():
    found = [ep.power_ep(launches(alpha)).sd for alpha in (0.25, 1.0)]
    assert (found[0] / found[1] > 1.8).all()
    assert (np.abs(found[0] / ep.power_ep(launches(0.25), 0.5).sd - 1) < 0.03).all()


@pytest.mark.full
def test_the_two_powers():
    by_power = np.array(
        [ep.power_ep(launches(0.5), power).sd for power in (0.01, 0.5, 1.0)]
    )
    by_alpha = np.array([ep.power_ep(launches(alpha)).sd for alpha in (0.25, 0.5, 1.0)])
    exact = np.array(
        [ep.exact_moments(launches(alpha)).sd for alpha in (0.25, 0.5, 1.0)]
    )
    assert (by_power.max(0) / by_power.min(0) < 1.03).all()
    # Twice for four times the data, or more on a skewed posterior; less where the prior has a say.
    assert (by_alpha[0] / by_alpha[2] > 1.8).all()
    assert (np.abs(by_alpha / exact - 1) < 0.15).all()


# The package and NumPyro.


def logistic(x, y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_the_tempered_model_has_the_density_of_the_oracle(alpha):
    problem = launches(alpha)
    theta = np.random.default_rng(0).normal(size=(6, 2))

    @jax.jit
    @jax.vmap
    def ours(theta):
        return log_density(
            nt.temper(logistic, alpha), (problem.x, problem.y), {}, {"theta": theta}
        )[0]

    expected = alpha * problem.likelihood.value(theta @ problem.x.T, problem.y).sum(
        axis=1
    )
    expected = (
        expected - 0.5 * np.sum(theta**2, axis=1) / 25.0 - np.log(2 * np.pi * 25.0)
    )
    np.testing.assert_allclose(ours(theta), expected, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_gaussian_fit_of_the_package_is_the_optimum(x64, alpha):
    problem = launches(alpha)
    fit = nt.fit_gaussian(
        jax.random.key(0),
        logistic,
        AutoMultivariateNormal,
        jnp.asarray(problem.x),
        jnp.asarray(problem.y),
        alpha=alpha,
        expectation=nt.expectations.gauss_hermite(predictor="eta", num_nodes=60),
        tolerance=1e-12,
    )
    posterior = fit.guide.get_posterior(fit.params)
    best, limit = ep.gaussian_vi(problem), ep.power_ep(problem, 1e-4, tolerance=1e-8)
    for other, tolerance in ((best, 1e-4), (limit, 1e-4)):
        np.testing.assert_allclose(posterior.mean, other.mean, atol=tolerance)
        np.testing.assert_allclose(
            posterior.covariance_matrix, other.cov, atol=tolerance
        )
    assert float(fit.convergence.trace.elbo[-1]) == pytest.approx(
        best.log_evidence, abs=1e-4
    )


@pytest.mark.full
def test_laplace_on_the_tempered_model(x64):
    problem = launches(alpha := 0.25)
    fit = nt.fit_svi(
        jax.random.key(0),
        logistic,
        AutoLaplaceApproximation,
        problem.x,
        problem.y,
        alpha=alpha,
    )
    posterior = fit.guide.get_posterior(fit.params)
    expected = ep.laplace(problem)
    np.testing.assert_allclose(posterior.mean, expected.mean, atol=2e-3)
    np.testing.assert_allclose(posterior.covariance_matrix, expected.cov, rtol=5e-3)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_nuts_on_the_tempered_model(alpha):
    problem = launches(alpha)
    mcmc = MCMC(
        NUTS(nt.temper(logistic, alpha)),
        num_warmup=500,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), jnp.asarray(problem.x), jnp.asarray(problem.y))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], float)
    exact, found = ep.exact_moments(problem), ep.power_ep(problem)
    centred = draws - exact.mean
    se = draws.std((0, 1)) / np.sqrt(effective_sample_size(draws))
    se_square = (centred**2).std((0, 1)) / np.sqrt(effective_sample_size(centred**2))
    assert (np.abs(draws.mean((0, 1)) - exact.mean) < 5 * se).all()
    assert (np.abs((centred**2).mean((0, 1)) - exact.sd**2) < 5 * se_square).all()
    # EP's own error: means to a twentieth of an sd, sds between .85 and 1 of the truth.
    assert (np.abs(draws.mean((0, 1)) - found.mean) < 0.05 * exact.sd + 5 * se).all()
    variance = (centred**2).mean((0, 1))
    assert (found.sd**2 < variance + 5 * se_square).all()
    assert (found.sd**2 > 0.85**2 * variance - 5 * se_square).all()
