"""Posteriors of several modes: fit_gaussian with num_components, its guide, and the modes that a fit misses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Predictive, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from scipy import integrate, optimize, stats

import numpyro_tempered as nt


def two_modes(y):
    """The square of a latent is observed: its sign is known from the prior alone."""
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)


def truth(y, alpha=1.0):
    """Log evidence, the mass above 0, mean and sd of the tempered posterior, by quadrature."""

    def density(theta):
        return (
            stats.norm(0.5, 2.0).pdf(theta) * stats.norm(theta**2, 1.0).pdf(y) ** alpha
        )

    def integral(function, low=-15.0):
        points = [p for p in (-np.sqrt(y), 0.0, np.sqrt(y)) if p > low]
        return integrate.quad(function, low, 15.0, points=points, limit=500)[0]

    evidence = integral(density)
    mean = integral(lambda t: t * density(t)) / evidence
    square = integral(lambda t: t * t * density(t)) / evidence
    return (
        np.log(evidence),
        integral(density, 0.0) / evidence,
        mean,
        np.sqrt(square - mean**2),
    )


def mass_above_zero(fit):
    q = fit.convergence.posterior
    scale = np.asarray(q.root).reshape(-1)
    return float(
        np.sum(np.exp(q.logits) * stats.norm.cdf(np.asarray(q.loc)[:, 0] / scale))
    )


@pytest.fixture(scope="module")
def fit():
    return nt.fit_gaussian(
        jax.random.key(0), two_modes, AutoNormal, jnp.asarray(4.0), num_components=2
    )


def test_both_modes_have_their_masses(fit):
    log_evidence, mass, mean, sd = truth(4.0)
    assert fit.converged
    assert mass_above_zero(fit) == pytest.approx(mass, abs=0.02)
    assert fit.elbo.value == pytest.approx(log_evidence, abs=0.03)
    q = fit.convergence.posterior
    assert float(q.mean[0]) == pytest.approx(mean, abs=0.04)
    assert float(q.covariance[0, 0]) ** 0.5 == pytest.approx(sd, abs=0.02)


@pytest.mark.full
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize(
    ("y", "alpha", "num_components"), [(9.0, 1.0, 2), (4.0, 0.5, 4), (1.0, 1.0, 6)]
)
def test_masses_and_elbos_of_other_targets(guide, y, alpha, num_components):
    log_evidence, mass, mean, sd = truth(y, alpha)
    fit = nt.fit_gaussian(
        jax.random.key(1),
        two_modes,
        guide,
        jnp.asarray(y),
        alpha=alpha,
        num_components=num_components,
    )
    assert mass_above_zero(fit) == pytest.approx(mass, abs=0.02)
    assert fit.elbo.value == pytest.approx(log_evidence, abs=0.03 + 3 * fit.elbo.se)
    assert float(fit.convergence.posterior.mean[0]) == pytest.approx(mean, abs=0.05)
    assert float(fit.convergence.posterior.covariance[0, 0]) ** 0.5 == pytest.approx(
        sd, abs=0.03
    )


def test_the_guide_has_what_guides_of_numpyro_have(fit):
    params, q = fit.params, fit.convergence.posterior
    weights, loc, scale = (
        np.asarray(part, float).reshape(-1)
        for part in (np.exp(q.logits), q.loc, q.root)
    )

    def cdf(theta):
        return float(np.sum(weights * stats.norm.cdf((theta - loc) / scale)))

    quantiles = fit.guide.quantiles(params, [0.05, 0.5, 0.95])["theta"]
    expected = [
        optimize.brentq(lambda t, level=level: cdf(t) - level, -10, 10)
        for level in (0.05, 0.5, 0.95)
    ]
    np.testing.assert_allclose(quantiles, expected, atol=1e-4)
    assert float(fit.guide.median(params)["theta"]) == pytest.approx(
        expected[1], abs=1e-4
    )
    log_prob = fit.guide.get_posterior(params).log_prob(jnp.array([[1.5]]))
    density = float(np.sum(weights * stats.norm(loc, scale).pdf(1.5)))
    assert float(log_prob[0]) == pytest.approx(np.log(density), abs=1e-4)


@pytest.mark.full
def test_what_takes_a_fit_takes_this_one(fit):
    draws = nt.to_inference_data(fit, num_samples=4000).posterior["theta"].values
    assert np.mean(draws > 0) == pytest.approx(mass_above_zero(fit), abs=0.03)
    single = nt.fit_gaussian(jax.random.key(0), two_modes, AutoNormal, jnp.asarray(4.0))
    assert nt.compare({"one": single, "two": fit}).attrs["selected"] == "two"
    new = Predictive(fit.guide, params=fit.params, num_samples=3)(
        jax.random.key(0), jnp.asarray(4.0)
    )
    assert new["theta"].shape == (3,)
    draws = fit.convergence.sample_posterior(jax.random.key(0), (1000,))
    assert draws["theta"].shape == (1000, 1)


@pytest.mark.full
def test_a_check_says_which_fit_misses_a_mode(fit):
    single = nt.fit_gaussian(jax.random.key(0), two_modes, AutoNormal, jnp.asarray(4.0))
    check = nt.check_fit(jax.random.key(1), single)
    assert check.status == "unreliable"
    missed = 100 * (1 - truth(4.0)[1])
    assert "a mode that no draw comes near" in check.advice
    share = float(check.advice.split("% of the mass")[0].split()[-1])
    assert share == pytest.approx(missed, abs=3)
    assert nt.check_fit(jax.random.key(1), fit).status != "unreliable"


@pytest.mark.full
def test_modes_with_heavy_tails_are_covered_by_heavy_components():
    """One Student's t over both modes, six standard deviations off, is far from the posterior."""

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.0, 20.0).expand([2]).to_event(1))
        components = dist.MultivariateStudentT(
            6.0, jnp.array([[-6.0, 0.0], [6.0, 0.0]]), jnp.eye(2)
        )
        modes = dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.array([0.6, 0.4])), components
        )
        numpyro.factor("modes", modes.log_prob(theta))

    heavy = nt.fit_gaussian(
        jax.random.key(0), model, AutoMultivariateNormal, num_components=2
    )
    check = nt.check_fit(jax.random.key(1), heavy)
    assert check.divergences.pareto_k > 0.7
    assert check.status == "bounded"
    assert check.reference_divergences.d2_bound < 0.1


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "sd", "wide"), [(3.0, 0.5, 100.0), (30.0, 1.0, 100.0), (3e-4, 1e-5, 0.01)]
)
def test_modes_far_apart_with_little_between_them_are_missed_in_words(mode, sd, wide):
    """They bend downwards in a narrow place alone, which no point hits."""

    def model(mode, sd, wide, y):
        x = numpyro.sample("x", dist.Normal(0.0, wide).expand([2]).to_event(1))
        shift = jnp.sum(
            jnp.square((x - mode * jnp.array([[-1.0], [1.0]])) / sd), axis=1
        )
        density = jax.nn.logsumexp(-0.5 * shift, b=jnp.array([0.97, 0.03]))
        numpyro.sample("y", dist.Delta(y, log_density=density), obs=y)

    def guide(model):
        return AutoMultivariateNormal(
            model,
            init_loc_fn=init_to_value(values={"x": jnp.full(2, -mode)}),
            init_scale=sd,
        )

    fit = nt.fit_gaussian(jax.random.key(0), model, guide, mode, sd, wide, 0.0)
    check = nt.check_fit(jax.random.key(1), fit)
    assert check.status == "unreliable"
    assert "with 3% of the mass" in check.advice


class Unsampled(dist.Distribution):
    """A flat density of one's own, whose sampler is somebody else's."""

    support = dist.constraints.real

    def __init__(self):
        super().__init__((), ())

    def log_prob(self, value):
        return -0.5 * jnp.square(value / 3.0)

    def sample(self, key, sample_shape=()):
        raise ValueError("no sampler")


@pytest.mark.full
def test_a_prior_that_cannot_be_sampled_is_searched_in_a_box():
    def model(y):
        z = numpyro.sample("z", Unsampled())
        numpyro.sample("y", dist.Normal(z**2, 1.0), obs=y)

    def guide(model):
        return AutoNormal(
            model, init_loc_fn=init_to_value(values={"z": jnp.array(2.0)})
        )

    single = nt.fit_gaussian(jax.random.key(0), model, guide, jnp.asarray(4.0))
    assert (
        "a mode that no draw comes near"
        in nt.check_fit(jax.random.key(1), single).advice
    )
    both = nt.fit_gaussian(
        jax.random.key(0), model, guide, jnp.asarray(4.0), num_components=2
    )
    assert mass_above_zero(both) == pytest.approx(0.5, abs=0.02)


@pytest.mark.full
def test_more_modes_than_components_warn():
    def four_modes(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([2]))
        numpyro.sample("y", dist.Normal(theta**2, 1.0).to_event(1), obs=y)

    y = jnp.array([9.0, 9.0])
    with pytest.warns(
        UserWarning, match=r"at least 4 modes.*with 50% of the mass.*num_components=4"
    ):
        nt.fit_gaussian(jax.random.key(0), four_modes, AutoNormal, y, num_components=2)
    fit = nt.fit_gaussian(
        jax.random.key(0), four_modes, AutoMultivariateNormal, y, num_components=4
    )
    np.testing.assert_allclose(
        np.exp(fit.convergence.posterior.logits), 0.25, atol=0.01
    )


@pytest.mark.full
def test_a_density_without_a_mode_has_a_mixture_too():
    """The centred eight schools: the mixture is nearer to the funnel than one Gaussian is."""
    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sd = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def schools(y, sd):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        with numpyro.plate("school", len(y)):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sd), obs=y)

    def elbo(num_components):
        key = jax.random.key(0)
        return nt.fit_gaussian(
            key, schools, AutoMultivariateNormal, y, sd, num_components=num_components
        ).elbo

    two, six = elbo(2), elbo(6)
    assert six.value - two.value > 3 * (two.se + six.se)


@pytest.mark.full
def test_improper_and_kinked_priors():
    def model(y):
        scale = numpyro.sample("scale", dist.Laplace(0.0, 1.0))
        shift = numpyro.sample(
            "shift", dist.ImproperUniform(dist.constraints.real, (), ())
        )
        numpyro.sample(
            "y", dist.Normal(shift + scale, 1.0).expand([3]).to_event(1), obs=y
        )
        numpyro.sample("z", dist.Normal(shift - scale, 1.0), obs=jnp.asarray(0.0))

    fit = nt.fit_gaussian(
        jax.random.key(0), model, AutoMultivariateNormal, jnp.ones(3), num_components=2
    )

    # shift is near 1 - scale by three rows, and near scale by one: a normal integral.
    def density(scale):
        apart = 3 / 4 * (1 - 2 * scale) ** 2
        return (2 * np.pi) ** -1.5 / 2 * np.exp(-apart / 2) * 0.5 * np.exp(-abs(scale))

    evidence = integrate.quad(density, -10, 10, points=[0.0])[0]
    assert fit.elbo.value == pytest.approx(np.log(evidence), abs=0.05)


def test_what_is_refused(fit):
    call = functools.partial(nt.fit_gaussian, jax.random.key(0), two_modes)
    y = jnp.asarray(4.0)
    with pytest.raises(
        ValueError, match=r"num_components must be.*integer of at least"
    ):
        call(AutoNormal, y, num_components=0)
    with pytest.raises(
        ValueError,
        match=r"method is of a single Gaussian, got num_components = 2.*Leave it out",
    ):
        call(
            AutoNormal,
            y,
            num_components=2,
            method=nt.gaussian.descent.natural_gradient(),
        )
    with pytest.raises(
        ValueError, match=r"expectation is of a single Gaussian.*draws. Leave it out"
    ):
        call(AutoNormal, y, num_components=2, expectation=nt.expectations.monte_carlo())
    with pytest.raises(
        ValueError, match="num_components must be an integer of at least 1, got 0"
    ):
        nt.guides.AutoGaussianMixture(two_modes, num_components=0)
    with pytest.raises(TypeError, match="AutoLowRankMultivariateNormal"):
        call(AutoLowRankMultivariateNormal, y, num_components=2)
    with pytest.raises(
        ValueError,
        match=r"num_draws must be even and at least 4.*not tell a covariance",
    ):
        call(AutoMultivariateNormal, y, num_components=2, num_draws=2)
    with pytest.raises(
        ValueError, match=r"^observed site.*NaN.*mask them, by numpyro.handlers.mask"
    ):
        call(AutoNormal, jnp.asarray(jnp.nan), num_components=2)
    with pytest.raises(
        ValueError, match=r"^draws of AutoGaussianMixture have.*take fit_gaussian"
    ):
        nt.fit_svi(jax.random.key(0), two_modes, nt.guides.AutoGaussianMixture, y)
    with pytest.raises(ValueError, match=r"init_scale.*must be positive, got"):
        nt.guides.AutoGaussianMixture(two_modes, init_scale=0.0)


@pytest.mark.full
def test_svi_of_numpyro_fails_loudly():
    svi = SVI(
        two_modes,
        nt.guides.AutoGaussianMixture(two_modes),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(),
    )
    result = svi.run(jax.random.key(0), 3, jnp.asarray(4.0), progress_bar=False)
    assert np.isnan(result.losses[-1])
