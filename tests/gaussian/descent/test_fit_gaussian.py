"""Batch Gaussian variational inference on NumPyro models."""

import functools
import warnings
from types import SimpleNamespace

import gaussian_vi_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64, tiered
from numpyro import handlers
from numpyro.infer import SVI, init_to_median, init_to_value
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.reparam import TransformReparam
from scipy.special import expit
from scipy.stats import multivariate_normal

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.infer.elbo import evaluate_elbo
from numpyro_tempered.infer.free_energy import model_objective
from numpyro_tempered.infer.gaussian import (
    read_guide,
    warn_of_mismatch,
    warn_unless_converged,
)
from numpyro_tempered.infer.priors import Latents
from numpyro_tempered.infer.svi import finish

KEY = jax.random.key(20260)
RNG = np.random.default_rng(11)
X = RNG.normal(size=(60, 3)) * np.array([1.0, 2.0, 0.5])
SIGNS = np.where(
    RNG.uniform(size=60) < 1.0 / (1.0 + np.exp(-X @ np.array([1.0, -0.5, 0.3]))),
    1.0,
    -1.0,
)
Y = (SIGNS > 0).astype(int)
ETA = nt.expectations.gauss_hermite(predictor="eta", num_nodes=40)
GUIDES = {
    "full": AutoMultivariateNormal,
    "diagonal": AutoDiagonalNormal,
    "by site": AutoNormal,
}


def coefficients(loc):
    """Of three features, in two sites of different kinds."""
    w = numpyro.sample("w", dist.Normal(loc, 2.0).expand([2]).to_event(1))
    with numpyro.plate("one", 1):
        v = numpyro.sample("v", dist.Normal(loc, 2.0))
    return jnp.concatenate([w, v])


def logistic(x, y=None):
    eta = numpyro.deterministic("eta", x @ coefficients(0.0))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def moments(fit):
    """Mean and covariance on the flat unconstrained scale."""
    q = fit.convergence.posterior
    return np.asarray(q.loc), np.diag(np.square(q.scale)) if hasattr(
        q, "scale"
    ) else q.factor @ q.factor.T


@pytest.fixture(params=["double", pytest.param("single", marks=pytest.mark.full)])
def precision(request):
    if request.param == "double":
        request.getfixturevalue("x64")


TARGET = X @ np.array([1.0, 2.0, 3.0]) + 1.0


def regression(x, y=None):
    """``linear`` with its coefficients in the sites of ``logistic``."""
    eta = numpyro.deterministic("eta", x @ coefficients(0.5))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.8), obs=y)


@functools.cache
def fitted(model, name):
    with enable_x64():
        y, alpha = (Y, 0.5) if model is logistic else (TARGET, 0.3)
        return nt.fit_gaussian(
            KEY, model, GUIDES[name], X, y, alpha=alpha, expectation=ETA, tolerance=1e-9
        )


def objective_of(model, shapes, q, *args, alpha=1.0, expectation=None, num_draws=64):
    """What ``fit_gaussian`` minimises for latents of these shapes, and whether it is linearised."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    stops = np.cumsum(sizes)

    def unpack(flat):
        return {
            name: flat[stop - size : stop].reshape(shape)
            for (name, shape), size, stop in zip(
                shapes.items(), sizes, stops, strict=True
            )
        }

    latents, tempered = Latents(tuple(shapes), unpack), nt.temper(model, alpha)
    q = jax.tree.map(jnp.asarray, q)
    return model_objective(
        tempered, latents, q, args, {}, expectation=expectation, num_draws=num_draws
    )[:2]


def optimum_of(model, name):
    if model is logistic:
        return oracle.logistic_optimum(X, SIGNS, 0.5, 2.0, diagonal=name != "full")
    # The tempered evidence: the density of the data, their noise of a variance 1 / alpha times as large.
    loc, covariance = linear_posterior()
    spread = 4.0 * X @ X.T + 0.8**2 / 0.3 * np.eye(len(X))
    of_data = multivariate_normal.logpdf(TARGET, X @ np.full(3, 0.5), spread)
    evidence = of_data + 0.5 * len(X) * (
        0.7 * np.log(2.0 * np.pi * 0.8**2) - np.log(0.3)
    )
    best = (
        covariance
        if name == "full"
        else np.diag(1.0 / np.diag(np.linalg.inv(covariance)))
    )
    return loc, best, evidence - oracle.kl(loc, best, loc, covariance)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in (regression, logistic) for name in GUIDES],
)
def test_the_optimum_is_that_of_the_oracle(model, name, x64):
    fit = fitted(model, name)
    loc, covariance, best = optimum_of(model, name)
    assert bool(fit.convergence.converged)
    assert int(fit.convergence.num_evaluations) < 60
    # The flat guides have an order of their own.
    places = {"w": [0, 1], "v": [2]}
    sites = ["w", "v"] if name == "by site" else fit.guide._unpack_latent(jnp.zeros(3))
    order = np.concatenate([places[site] for site in sites])
    found, spread = moments(fit)
    np.testing.assert_allclose(found, loc[order], atol=1e-4)
    np.testing.assert_allclose(spread, covariance[np.ix_(order, order)], atol=1e-4)
    assert abs(float(fit.convergence.elbo) - best) < 1e-6
    assert abs(fit.elbo.value - best) < 5.0 * fit.elbo.se + 1e-6
    assert float(fit.convergence.gap_bound) < 1e-5
    # The guide's own methods see the same Gaussian.
    median = fit.guide.median(fit.params)
    np.testing.assert_allclose(
        np.concatenate([median["w"], median["v"]]), loc, atol=1e-4
    )
    assert fit.losses.shape == (int(np.sum(fit.convergence.trace.accepted)),)
    np.testing.assert_allclose(fit.losses[-1], -fit.convergence.elbo)


def test_the_objective_is_stationary_at_the_optimum_of_the_oracle(x64):
    loc, covariance, best = oracle.logistic_optimum(X, SIGNS, 0.5, 2.0)
    q = FullRank(loc, np.linalg.cholesky(covariance))
    objective, linearised = objective_of(
        logistic, {"w": (2,), "v": (1,)}, q, X, Y, alpha=0.5, expectation=ETA
    )
    assert not linearised
    assert not objective.needs_key
    at = jax.jit(lambda q: objective(q, None))(q)
    root = np.asarray(q.factor)
    np.testing.assert_allclose(root.T @ at.grad, 0.0, atol=1e-4)
    np.testing.assert_allclose(root.T @ at.hessian @ root, np.eye(3), atol=1e-4)
    entropy = 0.5 * 3 * np.log(2.0 * np.pi * np.e) + np.sum(np.log(np.diag(root)))
    assert abs(entropy - float(at.value) - best) < 1e-6


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_read_as_a_gaussian(name, x64):
    guide = GUIDES[name](regression)
    start, latents, to_params = read_guide(KEY, guide, (X, TARGET), {})
    trace = handlers.trace(handlers.seed(guide, KEY)).get_trace(X, TARGET)
    params = {k: site["value"] for k, site in trace.items() if site["type"] == "param"}
    assert isinstance(start, FullRank if name == "full" else MeanField)
    assert start.loc.shape == (3,)
    assert set(latents.names) == {"w", "v"}
    found = to_params(start)
    assert set(found) == set(params)
    for param, value in params.items():
        np.testing.assert_array_equal(found[param], value)
    # The places of the flat vector are those of the guide's own methods.
    median = guide.median(params)
    for site, value in latents.unpack(start.loc).items():
        np.testing.assert_allclose(value, median[site])


@pytest.mark.full
def test_draws_without_an_expectation_come_near(key):
    exact = nt.fit_gaussian(
        key, logistic, AutoMultivariateNormal, X, Y, alpha=0.5, expectation=ETA
    )
    loc, covariance = moments(exact)
    for expectation in (
        None,
        nt.expectations.monte_carlo(
            predictor="eta", num_particles=400, antithetic=True
        ),
    ):
        fit = nt.fit_gaussian(
            key,
            logistic,
            AutoMultivariateNormal,
            X,
            Y,
            alpha=0.5,
            expectation=expectation,
            num_draws=400,
        )
        assert bool(fit.convergence.converged)
        found, spread = moments(fit)
        sds = np.sqrt(np.diag(covariance))
        assert np.all(np.abs(found - loc) < 5.0 * sds / np.sqrt(400))
        np.testing.assert_allclose(np.diag(spread), np.diag(covariance), rtol=0.1)
        assert fit.elbo.value < exact.elbo.value + 5.0 * (fit.elbo.se + exact.elbo.se)


ROUTES = (
    ETA,
    None,
    nt.expectations.monte_carlo(predictor="eta", num_particles=2, antithetic=True),
)


def linear(x, y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Normal(eta, 0.8).to_event(0), obs=y)


def linear_posterior():
    loc, covariance = oracle.posterior(X, TARGET - X @ np.full(3, 0.5), 0.3, 2.0, 0.8)
    return loc + 0.5, covariance


def test_a_conjugate_model_has_exact_derivatives_by_draws(x64):
    loc, covariance = linear_posterior()
    precision = np.linalg.inv(covariance)
    q = FullRank(np.array([0.3, -0.1, 0.2]), np.linalg.cholesky(0.5 * np.eye(3) + 0.2))
    objectives = [
        objective_of(
            regression,
            {"w": (2,), "v": (1,)},
            q,
            X,
            TARGET,
            alpha=0.3,
            expectation=route,
            num_draws=2,
        )[0]
        for route in ROUTES[1:]
    ]
    for at in jax.jit(lambda q, key: [objective(q, key) for objective in objectives])(
        q, KEY
    ):
        np.testing.assert_allclose(at.grad, precision @ (q.loc - loc), rtol=1e-10)
        np.testing.assert_allclose(at.hessian, precision, rtol=1e-10)


@pytest.mark.full
def test_a_conjugate_model_is_solved_in_one_step_by_any_route(key, x64):
    loc, covariance = linear_posterior()
    for expectation in ROUTES:
        fit = nt.fit_gaussian(
            key,
            linear,
            AutoMultivariateNormal,
            X,
            TARGET,
            alpha=0.3,
            expectation=expectation,
            num_draws=2,
            method=nt.gaussian.descent.natural_gradient(1.0),
            tolerance=1e-12,
            max_evaluations=2,
        )
        found, spread = moments(fit)
        np.testing.assert_allclose(found, loc, rtol=1e-10)
        np.testing.assert_allclose(spread, covariance, rtol=1e-10)


def scale_model(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)


@pytest.mark.full
def test_a_constrained_latent_has_its_jacobian_once_and_untempered(key, x64):
    y, alpha = np.array([0.5, -1.2, 0.3, 0.8]), 0.5
    grid = np.linspace(-8.0, 6.0, 200_001)

    def log_density(z):
        s = np.exp(z)
        log_lik = -4 * np.log(s) - 2.0 * np.log(2.0 * np.pi) - 0.5 * np.sum(y**2) / s**2
        return alpha * log_lik + 0.5 * np.log(2.0 / np.pi) - 0.5 * s**2 + z

    loc, scale, best = oracle.best_normal_1d(log_density, grid, None)
    fit = nt.fit_gaussian(
        key,
        scale_model,
        AutoNormal,
        y,
        alpha=alpha,
        num_draws=40_000,
        tolerance=1e-8,
        num_particles=4000,
    )
    assert bool(fit.convergence.converged)
    assert abs(fit.params["s_auto_loc"] - loc) < 5.0 * scale / 200
    assert abs(fit.params["s_auto_scale"] / scale - 1.0) < 5.0 / 200
    assert abs(fit.elbo.value - best) < 5.0 * fit.elbo.se + 1e-3
    assert np.isinf(float(fit.convergence.gap_bound))


@pytest.mark.full
def test_priors_that_are_gaussian_are_integrated_exactly(key, x64):
    """The prior of a latent multivariate Normal gives the same as its whitened form, and no draw is taken."""
    root = np.array([[1.0, 0.0], [0.8, 0.5]])

    def correlated(x, y):
        theta = numpyro.sample(
            "theta", dist.MultivariateNormal(jnp.ones(2), scale_tril=root)
        )
        eta = numpyro.deterministic("eta", x @ theta)
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    def whitened(x, y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        eta = numpyro.deterministic("eta", x @ (1.0 + root @ z))
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    fits = [
        nt.fit_gaussian(
            key,
            m,
            AutoMultivariateNormal,
            X[:, :2],
            Y,
            expectation=ETA,
            tolerance=1e-12,
        )
        for m in (correlated, whitened)
    ]
    np.testing.assert_allclose(
        fits[0].convergence.elbo, fits[1].convergence.elbo, rtol=1e-10
    )
    loc, covariance = moments(fits[1])
    np.testing.assert_allclose(moments(fits[0])[0], 1.0 + root @ loc, rtol=1e-5)
    np.testing.assert_allclose(
        moments(fits[0])[1], root @ covariance @ root.T, rtol=1e-5
    )
    assert np.isfinite(float(fits[0].convergence.gap_bound))


SCHOOLS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SIGMA = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


@pytest.mark.full
def test_a_hierarchical_model_with_heavy_tails_and_a_reparameterisation(key):
    def decentred(y):
        mu = numpyro.sample("mu", dist.Cauchy(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        with numpyro.plate("J", 8):
            with handlers.reparam(config={"theta": TransformReparam()}):
                theta = numpyro.sample(
                    "theta",
                    dist.TransformedDistribution(
                        dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau)
                    ),
                )
            numpyro.sample("obs", dist.Normal(theta, SIGMA), obs=y)

    fit = nt.fit_gaussian(key, decentred, AutoMultivariateNormal, SCHOOLS, alpha=0.5)
    assert bool(fit.convergence.converged)
    assert int(fit.convergence.num_evaluations) < 100
    reference = nt.fit_svi(key, decentred, AutoMultivariateNormal, SCHOOLS, alpha=0.5)
    # A better bound than that of thousands of stochastic steps, up to their errors and those of the draws.
    assert fit.elbo.value > reference.elbo.value - 5.0 * (
        fit.elbo.se + reference.elbo.se
    )
    assert set(fit.guide.median(fit.params)) >= {"mu", "tau"}


@pytest.mark.full
def test_prior_factors_count_once(key, x64):
    """CircularReparam and its like emit prior terms as factors."""

    def plain(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    def by_factor(y):
        theta = numpyro.sample(
            "theta", dist.ImproperUniform(dist.constraints.real, (), ())
        )
        numpyro.factor("prior", dist.Normal(0.0, 1.0).log_prob(theta))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    one = nt.fit_gaussian(key, plain, AutoNormal, 2.0, alpha=0.5, tolerance=1e-14)
    tempered = nt.temper(by_factor, alpha=0.5, factors=False)
    other = nt.fit_gaussian(key, tempered, AutoNormal, 2.0, tolerance=1e-14)
    for name, value in one.params.items():
        np.testing.assert_allclose(other.params[name], value, rtol=1e-6)


@pytest.mark.full
def test_powers_by_site_and_powers_that_multiply(key, x64):
    def two(a, b):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        eta = numpyro.deterministic("eta", theta * jnp.ones(1))
        numpyro.sample("a", dist.Normal(eta, 1.0), obs=a)
        numpyro.sample("b", dist.Normal(eta, 1.0), obs=b)

    a, b = jnp.array([1.0]), jnp.array([-3.0])
    fit = nt.fit_gaussian(
        key,
        two,
        AutoNormal,
        a,
        b,
        alpha={"a": 0.5, "b": 0.25},
        expectation=ETA,
        tolerance=1e-14,
    )
    np.testing.assert_allclose(
        fit.params["theta_auto_loc"], (0.5 - 0.75) / 1.75, rtol=1e-6
    )
    np.testing.assert_allclose(fit.params["theta_auto_scale"], 1.75**-0.5, rtol=1e-6)
    assert fit.alpha == {"a": 0.5, "b": 0.25}
    again = nt.fit_gaussian(
        key, nt.temper(two, 0.5), AutoNormal, a, b, alpha=0.5, expectation=ETA
    )
    np.testing.assert_allclose(again.params["theta_auto_scale"], 1.5**-0.5, rtol=1e-3)
    prior = nt.fit_gaussian(key, two, AutoNormal, a, b, alpha=0.0, expectation=ETA)
    np.testing.assert_allclose(prior.params["theta_auto_scale"], 1.0, rtol=1e-3)


@pytest.mark.full
def test_the_start_is_the_guides_own(key):
    factory = lambda model: AutoMultivariateNormal(  # noqa: E731
        model,
        init_loc_fn=init_to_value(
            values={"w": jnp.array([3.0, -3.0]), "v": jnp.ones(1)}
        ),
        init_scale=0.5,
    )
    with pytest.warns(UserWarning, match="used up"):
        fit = nt.fit_gaussian(
            key, logistic, factory, X, Y, expectation=ETA, max_evaluations=1
        )
    values = fit.guide._unpack_latent(fit.convergence.posterior.loc)
    np.testing.assert_allclose(values["w"], [3.0, -3.0])
    np.testing.assert_allclose(fit.convergence.posterior.factor, 0.5 * np.eye(3))


@pytest.mark.full
def test_online_guides_start_at_the_prior(key):
    fit = nt.fit_gaussian(
        key, logistic, nt.guides.AutoOnlineMultivariateNormal, X, Y, expectation=ETA
    )
    loc = oracle.logistic_optimum(X, SIGNS, 1.0, 2.0)[0]
    assert bool(fit.convergence.converged)
    np.testing.assert_allclose(np.sort(moments(fit)[0]), np.sort(loc), atol=5e-3)
    np.testing.assert_allclose(fit.convergence.trace.size[1], 0.5)


def test_a_fit_reports(x64):
    fit = fitted(regression, "by site")
    report = nt.to_inference_data(fit, num_samples=10)
    assert report.attrs["alpha"] == 0.3
    assert report.attrs["algorithm"] == "gaussian_vi"
    assert report.attrs["converged"] == 1
    assert report.attrs["num_evaluations"] == int(fit.convergence.num_evaluations)


@pytest.mark.full
def test_fits_compare_and_report(key):
    fits = {
        name: nt.fit_gaussian(
            key, logistic, guide, X, Y, alpha=0.5, expectation=ETA, num_particles=4000
        )
        for name, guide in (
            ("full", AutoMultivariateNormal),
            ("mean field", AutoNormal),
        )
    }
    data = nt.compare(fits)
    table = nt.table(data)
    assert list(table.index) == ["full", "mean field"]
    report = nt.to_inference_data(fits["full"])
    assert report.attrs["alpha"] == 0.5
    assert report.attrs["algorithm"] == "gaussian_vi"
    assert report.attrs["converged"] == 1
    assert report.attrs["num_evaluations"] == int(
        fits["full"].convergence.num_evaluations
    )
    svi = nt.fit_svi(key, logistic, AutoMultivariateNormal, X, Y, alpha=0.5)
    assert svi.converged is True
    assert (
        abs(svi.elbo.value - fits["full"].elbo.value)
        < 5.0 * (svi.elbo.se + fits["full"].elbo.se) + 0.05
    )


@pytest.mark.full
def test_many_rows_are_probed_for_dependence(key):
    def apart(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        eta = numpyro.deterministic("eta", x * theta)
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    def together(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        eta = numpyro.deterministic("eta", x * theta)
        # The mean of a datum is the predictor of the one before.
        numpyro.sample("y", dist.Normal(jnp.roll(eta, 1), 1.0), obs=y)

    x = RNG.normal(size=1500)
    nt.fit_gaussian(key, apart, AutoNormal, x, 2.0 * x, expectation=ETA)
    for rows in (20, 1500):
        with pytest.raises(ValueError, match="predictor of another"):
            nt.fit_gaussian(
                key, together, AutoNormal, x[:rows], x[:rows], expectation=ETA
            )


REFUSED_MODELS = {
    "params": r"^the model.*has params.*or fit them by",
    "subsample": "subsamples",
    "local plate": r"local plate.*with AutoNormal",
    "no data": r"^the model has.*no observed site.*that it conditions on",
}


def refused_models():
    """Model, shapes of its latents, arguments."""

    def with_param(y):
        numpyro.sample(
            "y",
            dist.Normal(numpyro.sample("t", dist.Normal()), numpyro.param("s", 1.0)),
            obs=y,
        )

    def subsampled(y):
        t = numpyro.sample("t", dist.Normal())
        with numpyro.plate("n", 10, subsample_size=5) as i:
            numpyro.sample("y", dist.Normal(t, 1.0), obs=y[i])

    def local(y):
        with numpyro.plate("n", 5):
            numpyro.sample(
                "y", dist.Normal(numpyro.sample("z", dist.Normal()), 1.0), obs=y
            )

    def nothing():
        numpyro.sample("t", dist.Normal())

    y = jnp.ones(10)
    return {
        "params": (with_param, {"t": ()}, 1.0),
        "subsample": (subsampled, {"t": ()}, y),
        "local plate": (nt.temper(local, 0.5, local_plates=["n"]), {"z": (5,)}, y[:5]),
        "no data": (nothing, {"t": ()}),
    }


class TestRefusals:
    def test_guides_that_are_not_gaussian_or_not_full_or_diagonal(self, key):
        for guide in (
            AutoDelta,
            AutoLaplaceApproximation,
            AutoLowRankMultivariateNormal,
        ):
            with pytest.raises(
                TypeError,
                match=r"fit_gaussian takes AutoMultivariateNormal.*for other guides",
            ):
                nt.fit_gaussian(key, logistic, guide, X, Y)

    def test_a_guide_built_on_another_model(self, key):
        with pytest.raises(
            ValueError, match=r"^this AutoNormal is.*built already.*from model to guide"
        ):
            nt.fit_gaussian(key, logistic, AutoNormal(logistic), X, Y, alpha=0.5)

    def test_an_expectation_of_a_bare_loss(self, key, precision):
        with pytest.raises(
            TypeError, match=r"^this expectation is of.*bare loss.*minimise for a loss"
        ):
            nt.fit_gaussian(
                key,
                regression,
                AutoNormal,
                X,
                TARGET,
                expectation=nt.expectations.squared(),
            )

    @pytest.mark.parametrize(("name", "match"), REFUSED_MODELS.items())
    def test_params_subsampling_local_plates_and_no_data(self, name, match, x64):
        model, shapes, *args = refused_models()[name]
        size = sum(int(np.prod(shape)) for shape in shapes.values())
        with pytest.raises(ValueError, match=match):
            objective_of(model, shapes, MeanField(np.zeros(size), np.ones(size)), *args)

    @pytest.mark.full
    @pytest.mark.parametrize(("name", "match"), REFUSED_MODELS.items())
    def test_models_that_no_fit_takes(self, name, match, key):
        model, _, *args = refused_models()[name]
        with pytest.raises(ValueError, match=match):
            nt.fit_gaussian(key, model, AutoNormal, *args)

    @pytest.mark.filterwarnings("ignore:Out-of-support")
    @pytest.mark.parametrize("model", tiered([regression, logistic], unit=[regression]))
    def test_data_that_are_not_finite(self, key, precision, model):
        x = X.copy()
        x[3, 1] = np.nan
        for expectation in (ETA, None):
            with pytest.raises(
                ValueError,
                match=r"argument .x. of the model has 1 of 180 values that are NaN",
            ):
                nt.fit_gaussian(key, model, AutoNormal, x, Y, expectation=expectation)
        # Where NumPyro's own validation is silent, of data that are no arguments:
        y = jnp.array([1.0, jnp.inf])
        with (
            pytest.raises(ValueError, match=r"valid initial.*the guide an"),
            numpyro.validation_enabled(False),
        ):
            nt.fit_gaussian(key, lambda: scale_model(y), AutoNormal)

    def test_arguments_out_of_range(self, key, precision):
        for options, match in (
            ({"num_draws": 3}, "num_draws"),
            ({"num_particles": 1}, "num_particles"),
            ({"alpha": -0.1}, "alpha"),
            ({"tolerance": -1.0}, "tolerance"),
        ):
            with pytest.raises(ValueError, match=match):
                nt.fit_gaussian(
                    key, regression, AutoNormal, X, TARGET, expectation=ETA, **options
                )

    def test_antithetic_draws_come_in_pairs(self):
        with pytest.raises(ValueError, match=r"^antithetic draws come in.*even"):
            nt.expectations.monte_carlo(num_particles=3, antithetic=True)

    def test_what_did_not_converge_warns(self, x64):
        found = fitted(regression, "by site").convergence
        warn_unless_converged(found, 1e-9, by_draws=True)
        message = (
            "^the fit ended after 3 evaluations with a stationarity of .* nats, above the tolerance 1e-09: .*"
            "evaluations were used up. Take more num_draws, more max_evaluations, a larger tolerance .*start"
        )
        with pytest.warns(UserWarning, match=message):
            warn_unless_converged(
                found._replace(converged=False, status=0, num_evaluations=3),
                1e-9,
                by_draws=True,
            )

    @pytest.mark.full
    def test_a_run_that_does_not_converge_warns(self, key):
        with pytest.warns(UserWarning, match="evaluations were used up"):
            fit = nt.fit_gaussian(
                key, logistic, AutoNormal, X, Y, expectation=ETA, max_evaluations=3
            )
        assert not bool(fit.convergence.converged)
        assert np.isfinite(fit.elbo.value)


def plain(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Bernoulli(logits=eta).to_event(0), obs=y)


class TestOptimisers:
    @pytest.mark.full
    def test_a_step_of_svi_from_the_prior_of_a_conjugate_model(self, key, x64):
        built = nt.guides.AutoOnlineMultivariateNormal(nt.temper(regression, alpha=0.3))
        svi = SVI(
            built.model,
            built,
            nt.optim.NaturalGradient(built),
            nt.optim.ExpectedNLL(ETA),
        )
        start, latents, _ = read_guide(key, built, (X, TARGET), {})
        np.testing.assert_array_equal(start.loc, np.full(3, 0.5))
        np.testing.assert_array_equal(start.factor, 2.0 * np.eye(3))
        found = jax.jit(
            lambda: svi.get_params(svi.update(svi.init(key, X, TARGET), X, TARGET)[0])
        )()
        # Half of the way to the posterior, in natural parameters.
        places = {"w": [0, 1], "v": [2]}
        order = np.concatenate([places[name] for name in latents.names])
        loc, covariance = linear_posterior()
        posterior = np.linalg.inv(covariance)[np.ix_(order, order)]
        precision = 0.5 * np.eye(3) / 4.0 + 0.5 * posterior
        root = np.asarray(found["auto_scale_tril"])
        np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-6)
        mean = np.linalg.solve(
            precision, 0.5 * np.full(3, 0.5) / 4.0 + 0.5 * posterior @ loc[order]
        )
        np.testing.assert_allclose(found["auto_loc"], mean, rtol=1e-6)

    @pytest.mark.full
    def test_a_step_of_svi_from_the_prior_is_that_of_natural_gradients(self, key, x64):
        built = nt.guides.AutoOnlineMultivariateNormal(nt.temper(plain, alpha=0.5))
        svi = SVI(
            built.model,
            built,
            nt.optim.NaturalGradient(built),
            nt.optim.ExpectedNLL(ETA),
        )
        x = 0.1 * X  # so that quadratures of 40 and 64 nodes agree
        start, *_ = read_guide(key, built, (x, Y), {})
        np.testing.assert_array_equal(start.loc, np.zeros(3))
        np.testing.assert_array_equal(start.factor, 2.0 * np.eye(3))
        # Derivatives of the loss at N(0, 4) by quadrature, and a step of damping .5.
        sd = 2.0 * np.linalg.norm(x, axis=1)
        u = sd[:, None] * oracle.NODES
        at = expit(-SIGNS[:, None] * u)
        grad = -0.5 * x.T @ (SIGNS * (at @ oracle.WEIGHTS))
        hessian = (
            0.5 * x.T @ (((at * (1.0 - at)) @ oracle.WEIGHTS)[:, None] * x)
            + np.eye(3) / 4.0
        )
        precision = 0.5 * np.eye(3) / 4.0 + 0.5 * hessian
        found = jax.jit(
            lambda: svi.get_params(svi.update(svi.init(key, x, Y), x, Y)[0])
        )()
        root = np.asarray(found["auto_scale_tril"])
        np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-6)
        np.testing.assert_allclose(
            found["auto_loc"], -0.5 * np.linalg.solve(precision, grad), rtol=1e-6
        )

    @pytest.mark.full
    @pytest.mark.parametrize(
        "guide",
        [nt.guides.AutoOnlineDiagonalNormal, nt.guides.AutoOnlineMultivariateNormal],
    )
    @pytest.mark.parametrize(
        ("make", "method"),
        [
            (
                nt.optim.NaturalGradient,
                nt.gaussian.descent.natural_gradient(backtrack=False, dense=False),
            ),
            (
                nt.optim.ForwardBackward,
                nt.gaussian.descent.forward_backward(backtrack=False),
            ),
        ],
    )
    def test_svi_takes_the_steps_of_the_method(self, guide, make, method, key, x64):
        model = nt.temper(logistic, alpha=0.5)
        built = guide(model)
        svi = SVI(model, built, make(built), nt.optim.ExpectedNLL(ETA))
        result = svi.run(key, 6, X, Y, progress_bar=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = nt.fit_gaussian(
                key,
                logistic,
                guide,
                X,
                Y,
                alpha=0.5,
                expectation=ETA,
                method=method,
                max_evaluations=7,
                tolerance=1e-30,
            )
        for name, value in fit.params.items():
            np.testing.assert_allclose(
                result.params[name], value, rtol=1e-6, atol=1e-8, err_msg=name
            )

    @pytest.mark.parametrize(
        "outer",
        [jax.jit, pytest.param(lambda f: f, marks=pytest.mark.full)],
        ids=["jit", "eager"],
    )
    @pytest.mark.parametrize(
        "model", tiered([regression, plain, logistic], unit=[regression])
    )
    def test_a_step_above_the_limit_is_rejected_and_counted(
        self, model, outer, key, precision
    ):
        built = nt.guides.AutoOnlineDiagonalNormal(model)
        svi = SVI(
            model,
            built,
            nt.optim.ForwardBackward(built, step_size=50.0, whiten=False),
            nt.optim.ExpectedNLL(ETA),
        )
        state = svi.init(key, X, Y)
        before = svi.get_params(state)
        state, _ = outer(svi.update)(state, X, Y)
        after = svi.get_params(state)
        np.testing.assert_array_equal(before["auto_loc"], after["auto_loc"])
        assert int(state.optim_state[1].rejected) == 1

    def test_other_guides_are_refused(self):
        with pytest.raises(
            TypeError,
            match=r"^an online.*AutoOnlineDiagonalNormal.*for other online guides",
        ):
            nt.optim.NaturalGradient(AutoNormal(logistic))


@pytest.mark.full
def test_a_start_at_the_median(key):
    fit = nt.fit_gaussian(
        key,
        scale_model,
        lambda m: AutoDiagonalNormal(m, init_loc_fn=init_to_median),
        np.array([0.5, -1.0]),
    )
    assert bool(fit.convergence.converged)


def network(x, y):
    hidden = numpyro.sample("hidden", dist.Normal(0.0, 1.0).expand([1, 6]).to_event(2))
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
    out = numpyro.sample("out", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
    eta = numpyro.deterministic("eta", jnp.tanh(x @ hidden + shift) @ out)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 0.2), obs=y)


@pytest.mark.filterwarnings("ignore:the fit ended")
@pytest.mark.full
def test_a_linearisation_that_misleads_is_told(key):
    x = np.linspace(-2.0, 2.0, 30)[:, None]
    with pytest.warns(UserWarning, match="by fresh draws"):
        fit = nt.fit_gaussian(
            key,
            network,
            AutoMultivariateNormal,
            x,
            np.sin(2.0 * x[:, 0]),
            expectation=ETA,
        )
    # What is reported is by draws.
    assert fit.elbo.value < float(fit.convergence.elbo) - 10.0


def test_a_model_without_latents(key, precision):
    def known(y):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    for guide in (AutoNormal, AutoMultivariateNormal):
        with pytest.raises(ValueError, match="latent"):
            nt.fit_gaussian(key, known, guide, 1.0)


def depends_elsewhere(y):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, jnp.where(z > 0.5, 10.0, 0.1)))
    numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


def bent(x, y):
    """Of the shapes of ``regression``."""
    weights = coefficients(0.5)
    eta = numpyro.deterministic("eta", weights[2] * (x @ weights))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.8), obs=y)


def nonlinear(x, y):
    t = numpyro.sample("t", dist.LogNormal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", t * jnp.exp(x @ w))
    numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


NONLINEAR_DATA = (
    np.array([[1.0, 2.0], [-2.0, 1.0], [2.0, 2.0], [0.5, -1.0]]),
    np.array([0.3, 0.0, 2.0, 0.1]),
)


def scaled_prior(y):
    with handlers.scale(scale=3.0):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


SCALED_DATA = np.array([0.5, 1.5])


def scaled_evidence():
    """Of the power .5 on the likelihood: precision 3 + .5 * 2, and the constants of π^3 L^.5."""
    precision, linear = 4.0, 0.5 * 2.0
    constant = (
        -1.5 * np.log(2 * np.pi)
        - 0.5 * np.log(2 * np.pi)
        - 0.25 * np.sum(SCALED_DATA**2)
    )
    return constant + 0.5 * np.log(2 * np.pi / precision) + 0.5 * linear**2 / precision


def broadcasting(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def masked(y, mask):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", 4):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y, obs_mask=mask)


MASKED_DATA = np.ones(4), np.array([True, False, True, True])


class TestPremisesAreChecked:
    """What is integrated exactly, and what is certified, is so."""

    def test_a_prior_that_depends_on_a_latent_only_elsewhere_is_drawn(self, x64):
        q = MeanField(np.zeros(2), np.full(2, 0.1))
        objective, _ = objective_of(depends_elsewhere, {"z": (), "w": ()}, q, 2.0)
        _, term, _ = objective.data
        np.testing.assert_array_equal(term.precision, [1.0, 0.0])
        assert objective.needs_key
        assert objective.precision is None

    @pytest.mark.full
    def test_a_prior_that_depends_on_a_latent_only_elsewhere(self, key):
        start = lambda m: AutoDiagonalNormal(  # noqa: E731
            m, init_loc_fn=init_to_value(values={"z": 0.0, "w": 0.0})
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = nt.fit_gaussian(key, depends_elsewhere, start, 2.0, num_draws=256)
        assert np.isinf(float(fit.convergence.gap_bound))
        # By draws of z the scale of w is a mixture; taken as 0.1 for good, E[w] would be 2 / 101.
        assert fit.elbo.value > -10.0

    @pytest.mark.parametrize(
        ("likelihood", "is_convex"),
        [
            (lambda eta: dist.StudentT(4.0, eta, 1.0), False),
            (lambda eta: dist.Normal(jnp.tanh(eta), 1.0), False),
            (lambda eta: dist.Laplace(eta, 1.0), True),
        ],
        ids=["heavy tails", "a bounded mean", "a kink"],
    )
    def test_losses_are_convex_at_every_predictor_or_have_no_bound(
        self, x64, likelihood, is_convex
    ):
        def model(x, y):
            theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
            eta = numpyro.deterministic("eta", theta * x)
            with numpyro.plate("n", len(y)):
                numpyro.sample("y", likelihood(eta), obs=y)

        q = MeanField(np.zeros(1), np.ones(1))
        data = np.ones(4), np.array([-4.0, -4.2, 5.0, 5.1])
        objective, _ = objective_of(model, {"theta": ()}, q, *data, expectation=ETA)
        assert (objective.precision is not None) == is_convex

    @pytest.mark.full
    def test_no_gap_bound_without_exact_derivatives_or_convexity(self, key):
        def heavy(x, y):
            theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
            eta = numpyro.deterministic("eta", theta * x)
            numpyro.sample("y", dist.StudentT(1.0, eta, 1.0), obs=y)

        y = jnp.array([-4.0, -4.2, 5.0, 5.1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_quadrature = nt.fit_gaussian(
                key, heavy, AutoNormal, jnp.ones(4), y, expectation=ETA
            )
        by_draws = nt.fit_gaussian(key, logistic, AutoNormal, X, Y)
        assert np.isinf(float(by_quadrature.convergence.gap_bound))
        assert np.isinf(float(by_draws.convergence.gap_bound))

    def test_a_predictor_that_is_not_affine_is_known(self, x64):
        q = MeanField(np.zeros(3), np.ones(3))
        _, linearised = objective_of(
            bent, {"w": (2,), "v": (1,)}, q, X, TARGET, expectation=ETA
        )
        assert linearised

    @pytest.mark.full
    def test_a_nonlinear_predictor_beside_a_prior_that_is_not_normal_is_known(
        self, x64
    ):
        shapes, q = {"t": (), "w": (2,)}, MeanField(np.zeros(3), np.ones(3))
        _, linearised = objective_of(
            nonlinear, shapes, q, *NONLINEAR_DATA, expectation=ETA
        )
        assert linearised

    def test_a_maximised_elbo_that_is_not_that_of_fresh_draws_is_told(self):
        def told(elbo, value, se, num_draws, linearised):
            fit = SimpleNamespace(elbo=SimpleNamespace(value=value, se=se))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warn_of_mismatch(elbo, fit, num_draws, linearised)
            assert all("by fresh draws" in str(w.message) for w in caught)
            return len(caught) == 1

        assert told(0.0, -5.0, 0.1, None, True)
        assert told(-5.0, -5.0, 0.6, None, True)
        assert told(0.0, -5.0, 0.1, 64, False)
        assert not told(-5.2, -5.0, 0.1, None, True)
        assert not told(-4.0, -5.0, 0.1, 64, False)

    @pytest.mark.full
    def test_a_nonlinear_predictor_beside_a_prior_that_is_not_normal_is_told(self, key):
        with pytest.warns(UserWarning, match="by fresh draws"):
            nt.fit_gaussian(
                key, nonlinear, AutoMultivariateNormal, *NONLINEAR_DATA, expectation=ETA
            )

    def test_a_scaled_prior_is_scaled_in_objective_and_elbo(self, x64):
        best = MeanField(np.array([0.25]), np.array([0.5]))
        objective, _ = objective_of(
            scaled_prior, {"theta": ()}, best, SCALED_DATA, alpha=0.5, num_draws=2000
        )
        at = jax.jit(lambda q: objective(q, KEY))(best)
        np.testing.assert_allclose(at.grad, [0.0], atol=1e-10)
        np.testing.assert_allclose(at.hessian, [4.0], rtol=1e-10)
        entropy = 0.5 * np.log(2.0 * np.pi * np.e * 0.25)
        # 2 (θ - .25)² of 1000 pairs of draws.
        assert abs(entropy - float(at.value) - scaled_evidence()) < 5.0 * np.sqrt(
            0.5 / 1000
        )

        def guide(y):
            numpyro.sample("theta", dist.Normal(0.25, 0.5))

        tempered = nt.temper(scaled_prior, 0.5)
        elbo = evaluate_elbo(
            KEY, tempered, guide, {}, (SCALED_DATA,), {}, num_particles=1000
        )
        assert abs(elbo.value - scaled_evidence()) < 5.0 * elbo.se + 1e-6

    @pytest.mark.full
    def test_a_scaled_prior_is_scaled_in_the_elbo(self, key, x64):
        exact = scaled_evidence()
        fit = nt.fit_gaussian(
            key, scaled_prior, AutoNormal, SCALED_DATA, alpha=0.5, tolerance=1e-12
        )
        np.testing.assert_allclose(fit.params["theta_auto_loc"], 0.25, rtol=1e-5)
        assert abs(fit.elbo.value - exact) < 5.0 * fit.elbo.se + 1e-6
        # A bound, up to rounding: the start at the mode is the optimum.
        svi = nt.fit_svi(key, scaled_prior, AutoNormal, SCALED_DATA, alpha=0.5)
        assert exact - 0.1 < svi.elbo.value < exact + 5.0 * svi.elbo.se + 1e-9

    def test_values_that_broadcast_are_refused(self, x64):
        shapes, q = {"w": (3,)}, MeanField(np.zeros(3), np.ones(3))
        with pytest.raises(
            ValueError, match=r"^observed site.*broadcast.*Give them one shape"
        ):
            objective_of(broadcasting, shapes, q, X, X[:, :1])

        def guide(x, y):
            numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

        tempered = nt.temper(broadcasting, 1.0)
        with pytest.raises(
            ValueError, match=r"^observed site.*broadcast.*Give them one shape"
        ):
            finish(
                (KEY, KEY),
                tempered,
                guide,
                {},
                np.zeros(1),
                (X, X[:, :1]),
                kwargs={},
                num_particles=2,
            )

    @pytest.mark.full
    def test_no_fit_takes_values_that_broadcast(self, key):
        for fit in (nt.fit_gaussian, nt.fit_svi):
            with pytest.raises(
                ValueError, match=r"^observed site.*broadcast.*Give them one shape"
            ):
                fit(
                    key,
                    broadcasting,
                    AutoNormal,
                    X,
                    X[:, :1],
                    **(
                        {"num_steps": 20, "optim": numpyro.optim.Adam(0.05)}
                        if fit is nt.fit_svi
                        else {}
                    ),
                )

    @pytest.mark.filterwarnings("ignore")
    def test_obs_mask_is_refused(self, x64):
        shapes, q = (
            {"theta": (), "y_unobserved": (4,)},
            MeanField(np.zeros(5), np.ones(5)),
        )
        with pytest.raises(
            ValueError, match=r"obs_mask.*the likelihood by handlers.mask"
        ):
            objective_of(masked, shapes, q, *MASKED_DATA)

    @pytest.mark.full
    @pytest.mark.filterwarnings("ignore")
    def test_no_fit_takes_obs_mask(self, key):
        with pytest.raises(
            ValueError, match=r"obs_mask.*the likelihood by handlers.mask"
        ):
            nt.fit_gaussian(key, masked, AutoNormal, *MASKED_DATA)

    @pytest.mark.full
    def test_many_rows_take_memory_for_their_derivatives_alone(self, key):
        def wide(x, y):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            eta = numpyro.deterministic("eta", x @ w)
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

        x = RNG.normal(size=(100_000, 2)).astype(
            np.float32
        )  # a square matrix of these would take 40 GB
        fit = nt.fit_gaussian(
            key,
            wide,
            AutoNormal,
            x,
            (x[:, 0] > 0).astype(int),
            expectation=ETA,
            num_particles=10,
        )
        assert np.isfinite(float(fit.convergence.elbo))
