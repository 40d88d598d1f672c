"""The beta-divergence in the place of a log-likelihood."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import config_enumerate, enum
from numpyro.contrib.funsor import log_density as density_with_enumeration
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal
from numpyro.infer.util import log_density, potential_energy
from scipy import integrate, stats

import numpyro_tempered as nt
from numpyro_tempered.handlers.power_integral import log_power_integral
from numpyro_tempered.handlers.robust import BetaLikelihood
from numpyro_tempered.report.arviz import group
from numpyro_tempered.select.alpha.base import Task

KEY, BETA = jax.random.key(0), 0.3
Y = np.array([-1.2, 0.4, 0.9, -0.3, 0.1, 0.6, -0.5, 1.4, 0.2, -0.8, 30.0])


def model(y, sd=1.0):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(loc, sd), obs=y)


def minus_losses(loc, y, sd=1.0, unit=1.0, beta=BETA):
    """By the formula, with the integral by scipy, in data measured in the unit."""
    density = stats.norm(loc / unit, sd / unit)
    size = integrate.quad(
        lambda t: density.pdf(t) ** (1.0 + beta), *density.interval(1 - 1e-13)
    )[0]
    return (density.pdf(y / unit) ** beta - 1.0) / beta - (size - 1.0) / (1.0 + beta)


def density_of(tempered, loc, *args):
    return float(log_density(tempered, args, {}, {"loc": jnp.asarray(loc)})[0])


def prior(loc):
    return stats.norm.logpdf(loc, 0.0, 10.0)


@pytest.mark.parametrize("unit", [1.0, 0.1, 20.0])
def test_the_density_is_that_of_the_formula(unit, x64):
    want = prior(0.4) + np.sum(minus_losses(0.4, Y, 2.0, unit))
    assert density_of(nt.robust(model, BETA, unit=unit), 0.4, Y, 2.0) == pytest.approx(
        want, rel=1e-10
    )


def test_data_in_other_units_have_the_same_loss(x64):
    def in_units(c):
        def scaled(y):
            loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
            numpyro.sample("y", dist.Normal(c * loc, c), obs=y)

        return density_of(nt.robust(scaled, BETA, unit=0.8 * c), 0.4, c * Y)

    assert in_units(1e4) == pytest.approx(in_units(1.0), rel=1e-10)


def test_a_small_power_is_the_likelihood(x64):
    want = density_of(model, 0.4, Y[:-1])
    assert density_of(nt.robust(model, 1e-7, unit=3.0), 0.4, Y[:-1]) - 10 * np.log(
        3.0
    ) == pytest.approx(want, abs=1e-4)
    assert density_of(nt.robust(model, {"y": 0.0}), 0.4, Y[:-1]) == want


def test_a_power_of_the_loss(x64):
    powers = np.linspace(0.1, 1.0, len(Y))
    for alpha in (0.25, powers):
        want = prior(0.4) + np.sum(alpha * minus_losses(0.4, Y))
        for tempered in (
            nt.temper(nt.robust(model, BETA, unit=1.0), alpha=alpha),
            nt.robust(nt.temper(model, alpha=alpha), BETA, unit=1.0),
        ):
            assert density_of(tempered, 0.4, Y) == pytest.approx(want, rel=1e-10)


@functools.partial(jax.jit, static_argnums=0)
def at_zero(tempered, y):
    """The potential at 0 and its slope."""
    return jax.value_and_grad(
        lambda loc: potential_energy(tempered, (y,), {}, {"loc": loc})
    )(jnp.float32(0.0))


def test_an_outlier_has_no_pull_and_no_nan():
    tempered = nt.robust(model, BETA, unit=1.0)
    y = np.array([0.1, -0.2, 1e6], np.float32)
    value, grad = at_zero(tempered, y)
    assert np.isfinite(value)
    _, clean = at_zero(tempered, y[:2])
    assert float(grad) == pytest.approx(float(clean))


def test_masks_scales_and_scans(x64):
    there = np.arange(len(Y)) < 8

    def masked(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        with handlers.mask(mask=there), handlers.scale(scale=2.0):
            numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    want = prior(0.4) + 2.0 * np.sum(minus_losses(0.4, Y)[there])
    assert density_of(nt.robust(masked, BETA, unit=1.0), 0.4, Y) == pytest.approx(
        want, rel=1e-10
    )

    def in_scan(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))

        def step(carry, value):
            numpyro.sample("y", dist.Normal(loc, 1.0), obs=value)
            return carry, None

        scan(step, 0.0, y)

    want = prior(0.4) + np.sum(minus_losses(0.4, Y))
    assert density_of(
        nt.robust(in_scan, BETA, unit=1.0), 0.4, jnp.asarray(Y)
    ) == pytest.approx(want, rel=1e-10)


def test_jacobians_stay_as_they_are(x64):
    def with_scale(y):
        sd = numpyro.sample("sd", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, sd), obs=y)

    found = potential_energy(
        nt.robust(with_scale, BETA, unit=1.0), (Y,), {}, {"sd": jnp.asarray(0.3)}
    )
    want = stats.norm.logpdf(0.3) + np.sum(minus_losses(0.0, Y, np.exp(0.3)))
    assert float(found) == pytest.approx(-want, rel=1e-10)


@pytest.mark.full
def test_a_grid_of_powers_under_vmap(x64):
    betas = jnp.array([0.1, 0.3, 0.5])
    found = jax.vmap(
        lambda b: log_density(
            nt.robust(model, b, unit=1.0), (Y,), {}, {"loc": jnp.asarray(0.4)}
        )[0]
    )(betas)
    want = [prior(0.4) + np.sum(minus_losses(0.4, Y, beta=float(b))) for b in betas]
    np.testing.assert_allclose(found, want, rtol=1e-10)


def moments_by_grid(alpha=1.0):
    grid = np.linspace(-3.0, 3.0, 2001)
    log_weights = np.array(
        [prior(loc) + alpha * np.sum(minus_losses(loc, Y)) for loc in grid]
    )
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = np.sum(weights * grid)
    return mean, np.sqrt(np.sum(weights * (grid - mean) ** 2))


@pytest.mark.full
@pytest.mark.parametrize("way", [nt.fit_gaussian, nt.fit_svi])
def test_fits_find_the_posterior(way):
    mean, sd = moments_by_grid()
    fit = way(KEY, nt.robust(model, BETA, unit=1.0), AutoNormal, Y)
    assert fit.converged
    assert fit.params["loc_auto_loc"] == pytest.approx(mean, abs=0.05 * sd)
    assert fit.params["loc_auto_scale"] == pytest.approx(sd, rel=0.05)
    # The mean of all is 2.8.
    assert abs(mean) < 0.2


@pytest.mark.full
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_nuts_samples_the_posterior(alpha):
    mean, sd = moments_by_grid(alpha)
    mcmc = MCMC(
        NUTS(nt.temper(nt.robust(model, BETA, unit=1.0), alpha)),
        num_warmup=300,
        num_samples=3000,
        progress_bar=False,
    )
    mcmc.run(KEY, Y)
    draws = mcmc.get_samples()["loc"]
    assert np.mean(draws) == pytest.approx(mean, abs=0.1 * sd)
    assert np.std(draws) == pytest.approx(sd, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("prior_sd", [10.0, 1.0])
def test_a_stream_leaves_an_outlier_out(prior_sd):
    def sequence(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, prior_sd))
        eta = numpyro.deterministic("eta", jnp.full(len(y), 1.0) * loc)
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    online = nt.OnlineVI(
        nt.robust(sequence, BETA, unit=1.0),
        nt.guides.AutoOnlineDiagonalNormal,
        nt.online.rvga(),
        expectation=nt.expectations.gauss_hermite(predictor="eta"),
    )
    posterior = online.run(KEY, np.tile(Y, 20))[0].posterior
    mean, _ = moments_by_grid(20.0)
    assert float(posterior.loc[0]) == pytest.approx(mean, abs=0.03)
    # Of the data without the outlier; the mean of all is 2.8.
    assert abs(mean - np.mean(Y[:-1])) < 0.02


@pytest.mark.full
@pytest.mark.parametrize("likelihood", ["poisson", "bernoulli", "binomial"])
def test_counts_need_no_unit(likelihood):
    rng, x = np.random.default_rng(0), np.linspace(-1.0, 1.0, 200)
    kinds = {
        "poisson": lambda eta: dist.Poisson(jnp.exp(eta)),
        "bernoulli": lambda eta: dist.Bernoulli(logits=eta),
        "binomial": lambda eta: dist.Binomial(20, logits=eta),
    }

    def regression(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
        numpyro.sample("y", kinds[likelihood](beta[0] + beta[1] * x), obs=y)

    truth = {"beta": jnp.array([0.5, 6.0 if likelihood == "bernoulli" else 2.0])}
    y = np.array(
        Predictive(handlers.condition(regression, data=truth), num_samples=1)(KEY, x)[
            "y"
        ][0]
    )
    wrong = rng.choice(200, 20, replace=False)
    y[wrong] = {"poisson": 200, "bernoulli": 1 - y[wrong], "binomial": 20 - y[wrong]}[
        likelihood
    ]
    # A label is never far from what a model expects: it takes a larger power.
    tempered = nt.robust(regression, 1.0 if likelihood == "bernoulli" else 0.4)
    fits = [nt.fit_gaussian(KEY, m, AutoNormal, x, y) for m in (regression, tempered)]
    errors = [
        np.linalg.norm(fit.params["beta_auto_loc"] - truth["beta"]) for fit in fits
    ]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.full
def test_results_have_the_density_and_its_draws():
    tempered = nt.robust(model, BETA, unit=1.0)
    fit = nt.fit_svi(KEY, tempered, AutoNormal, Y, num_particles=50)
    data = nt.to_inference_data(fit, num_samples=30, posterior_predictive=True)
    loc = np.asarray(group(data, "posterior")["loc"])[0]
    log_lik = np.asarray(group(data, "untempered_log_likelihood")["y"])[0]
    np.testing.assert_allclose(log_lik, stats.norm.logpdf(Y, loc[:, None]), rtol=2e-5)
    assert group(data, "posterior_predictive")["y"].shape == (1, 30, len(Y))
    assert data.attrs["divergence"] == '{"y": {"beta": 0.3, "unit": 1.0}}'
    with pytest.raises(ValueError, match="has a divergence"):
        nt.loo(data)
    pickle.loads(pickle.dumps(fit.divergences))
    other = nt.fit_svi(KEY, model, AutoNormal, Y, num_particles=50)
    assert other.divergences is None
    with pytest.raises(ValueError, match="ELBOs compare for one loss"):
        nt.compare({"robust": fit, "plain": other})
    half = nt.fit_svi(KEY, tempered, AutoNormal, Y, alpha=0.5, num_particles=50)
    with pytest.raises(ValueError, match="divergences at"):
        nt.compare({"robust": half}, log_p0=nt.bounds.known_density(-30.0))


@nt.robust(beta=BETA, unit=1.0)
def decorated(y):
    numpyro.sample(
        "y", dist.Normal(numpyro.sample("loc", dist.Normal(0.0, 10.0)), 1.0), obs=y
    )


@pytest.mark.full
def test_a_decorated_model_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert density_of(decorated, 0.4, Y) == pytest.approx(
        density_of(nt.robust(model, BETA, unit=1.0), 0.4, Y)
    )


def factor(y):
    numpyro.factor("f", -(numpyro.sample("loc", dist.Normal(0.0, 1.0)) ** 2))


def mixture(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(loc * z, 1.0), obs=y)


def overdispersed(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    numpyro.sample(
        "y", dist.NegativeBinomial2(jnp.exp(loc), 2.0), obs=jnp.abs(jnp.round(y))
    )


def unobserved(y):
    model(y)
    numpyro.sample("later", dist.Normal(0.0, 1.0))


UNIT = {"beta": BETA, "unit": 1.0}
REFUSED = {
    "no unit": (
        lambda: nt.robust(model),
        r"continuous data, whose density has a unit: pass unit=.*the data",
    ),
    "a factor": (
        lambda: nt.robust(factor, **UNIT),
        r"factor 'f' is no density.*factors as they are",
    ),
    "another site": (
        lambda: nt.robust(model, {"y": 0.3, "x": 0.1}, unit=1.0),
        r"no sites \['x'\]",
    ),
    "a unit of another site": (
        lambda: nt.robust(model, 0.3, unit={"y": 1.0, "x": 0.1}),
        r"no sites \['x'\]",
    ),
    "a site without beta": (
        lambda: nt.robust(model, {"loc": 0.3}, unit=1.0),
        r"'y' has no beta.*it alone",
    ),
    "no quadrature": (
        lambda: nt.robust(overdispersed),
        "'y' is NegativeBinomial2, whose power has neither",
    ),
    "observed outside": (
        lambda: handlers.condition(nt.robust(unobserved, **UNIT), data={"later": 0.0}),
        r"'later' is observed by a handler outside of robust.*data to the model",
    ),
    "summed out": (
        lambda: nt.robust(nt.marginalize(mixture), **UNIT),
        "latents are summed out",
    ),
    "sums of losses": (
        lambda: nt.marginalize(nt.robust(mixture, **UNIT)),
        "sums over losses",
    ),
    "twice": (
        lambda: nt.robust(nt.temper(nt.robust(model, **UNIT)), **UNIT),
        r"robust already.*one mapping",
    ),
    "zero": (
        lambda: nt.robust(model, 0.0, unit=1.0),
        "beta must be positive and finite",
    ),
    "negative": (
        lambda: nt.robust(model, {"y": -0.1}, unit=1.0),
        r"beta\['y'\] must be at least 0",
    ),
    "unit zero": (
        lambda: nt.robust(model, 0.1, unit=0.0),
        r"unit must be positive.*and finite, got",
    ),
    "NaN": (
        lambda: nt.robust(model, np.nan, unit=1.0),
        r"beta must be positive.*and finite, got",
    ),
    "empty": (
        lambda: nt.robust(model, {}, unit=1.0),
        r"^beta as.*must go from site names.*to numbers, got",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        potential_energy(make(), (Y,), {}, {"loc": jnp.asarray(0.4)})


def test_enumerated_latents_are_refused():
    enumerated = enum(
        config_enumerate(nt.robust(mixture, **UNIT)), first_available_dim=-2
    )
    with pytest.raises(
        ValueError,
        match=r"enumerated local latent 'z'.*distributions without such latents",
    ):
        density_with_enumeration(enumerated, (Y,), {}, {"loc": jnp.asarray(0.4)})


def test_a_guide_that_keeps_another_model_is_refused():
    tempered = nt.robust(model, **UNIT)
    SVI(
        tempered,
        AutoLaplaceApproximation(tempered),
        numpyro.optim.Adam(0.1),
        Trace_ELBO(),
    ).init(KEY, Y)
    svi = SVI(
        tempered, AutoLaplaceApproximation(model), numpyro.optim.Adam(0.1), Trace_ELBO()
    )
    with pytest.raises(
        ValueError,
        match=r"AutoLaplaceApproximation keeps a model without beta = 0\.3.*is given",
    ):
        svi.run(KEY, 2, Y, progress_bar=False)


def test_no_model_and_no_number_are_refused():
    with pytest.raises(TypeError, match=r"^robust takes a model,.*pass beta by name"):
        nt.robust(0.3)
    with pytest.raises(TypeError, match="beta must be a number"):
        nt.robust(model, "much")
    with pytest.raises(TypeError, match="decorates one callable"):
        nt.robust(beta=0.3)(Y)


def test_factors_stay_where_sites_are_named(x64):
    def both(y):
        model(y)
        numpyro.factor("f", -3.0)

    want = prior(0.4) + np.sum(minus_losses(0.4, Y)) - 3.0
    assert density_of(nt.robust(both, {"y": BETA}, unit=1.0), 0.4, Y) == pytest.approx(
        want, rel=1e-10
    )


def gumbel(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Gumbel(loc, 1.0), obs=y)


def test_a_datum_that_is_far_out_has_no_slope():
    """Its density to the power is 0, and 0 times an infinite slope is none."""
    robust = nt.robust(gumbel, BETA, unit=1.0)
    y = np.random.default_rng(0).gumbel(size=40).astype(np.float32)

    @jax.jit
    def slope(outlier):
        data = jnp.append(y, outlier)
        return jax.grad(
            lambda loc: potential_energy(robust, (data,), {}, {"loc": loc})
        )(jnp.array(0.0))

    near = float(slope(-20.0))
    assert np.isfinite(near)
    for outlier in (-100.0, -1e6, 1e20, 3e38):
        assert float(slope(outlier)) == pytest.approx(near, rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dist.Normal(0.0, 1.0),
        lambda: dist.Cauchy(0.0, 1.0),
        lambda: dist.LogNormal(0.0, 0.1),
        lambda: dist.Weibull(2.0, 5.0),
        lambda: dist.Gamma(20.0, 20.0),
        lambda: dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
        lambda: dist.Normal(jnp.zeros(2), 1.0).to_event(1),
    ],
)
def test_the_value_far_out_is_the_limit(make):
    fn = make()
    robust = BetaLikelihood(fn, BETA, jnp.log(1.0))
    far = jnp.full(fn.event_shape, 1e8)
    limit = -1.0 / BETA - jnp.expm1(log_power_integral(fn, BETA)) / (1.0 + BETA)
    assert float(robust.log_prob(far)) == pytest.approx(float(limit), rel=2e-2)
    assert np.all(np.isfinite(jax.grad(lambda y: jnp.sum(robust.log_prob(y)))(far)))


def test_a_far_vector_of_a_batch_leaves_the_others_as_they_are(x64):
    fn = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)).expand([3])
    value = np.array([[0.3, -1.0], [1e8, 0.0], [2.0, 0.5]])

    @jax.jit
    def at(value):
        log_prob = BetaLikelihood(fn, BETA, jnp.log(1.0)).log_prob
        return (
            log_prob(value),
            jax.grad(lambda y: jnp.sum(log_prob(y)))(value),
            fn.log_prob(value),
        )

    found, slope, log_prob = at(value)
    density = np.exp(log_prob)
    # The integral of a power of a normal density in two dimensions.
    size = (2 * np.pi) ** -BETA / (1.0 + BETA)
    np.testing.assert_allclose(
        found, (density**BETA - 1.0) / BETA - (size - 1.0) / (1.0 + BETA), rtol=1e-10
    )
    np.testing.assert_allclose(
        slope, -np.where(value > 1e7, 0.0, value) * density[:, None] ** BETA, atol=1e-12
    )


def test_rows_that_are_one_event_are_refused():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(b * x, 1.0).to_event(1), obs=y)

    with pytest.raises(
        ValueError,
        match=r"a datum of site 'y' has 100 coordinates.*put them in a plate",
    ):
        handlers.seed(nt.robust(model, BETA, unit=1.0), KEY)(np.ones(100), np.ones(100))


def test_a_scope_around_renames_and_hides_nothing():
    def inner(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    scoped = handlers.scope(nt.robust(inner, BETA, unit=1.0), prefix="a")
    got = float(log_density(scoped, (Y,), {}, {"a/loc": jnp.asarray(0.4)})[0])
    assert got == pytest.approx(prior(0.4) + np.sum(minus_losses(0.4, Y)), rel=1e-5)


@pytest.mark.full
def test_a_kink_is_where_that_of_the_density_is():
    """Quadrature knows the jump of the slope, as draws and their Hessians do not: the optimum is SVI's."""

    def laplace(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        numpyro.sample(
            "y", dist.Laplace(numpyro.deterministic("eta", x @ b), 0.7), obs=y
        )

    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 2)).astype(np.float32)
    y = (x @ np.array([1.0, -0.5]) + 0.7 * rng.laplace(size=40)).astype(np.float32)
    robust, eta = (
        nt.robust(laplace, BETA, unit=1.0),
        nt.expectations.gauss_hermite(predictor="eta"),
    )
    fit = nt.fit_gaussian(KEY, robust, AutoNormal, x, y, expectation=eta)
    by_steps = nt.fit_svi(KEY, robust, AutoNormal, x, y)
    assert fit.converged
    assert fit.elbo.value == pytest.approx(by_steps.elbo.value, abs=0.1)
    np.testing.assert_allclose(
        fit.params["b_auto_scale"], by_steps.params["b_auto_scale"], rtol=0.1
    )


@pytest.mark.parametrize("diagnostic", [nt.alpha.held_out(2), nt.alpha.loo()])
def test_predictive_densities_of_a_loss_are_refused(diagnostic):
    task = Task(nt.robust(model, BETA, unit=1.0), KEY, (Y,), {})
    with pytest.raises(
        ValueError, match=r"the model has divergences at \['y'\].*the losses of"
    ):
        diagnostic.plan(KEY, task) if diagnostic.plan else diagnostic.decide(
            KEY, task, np.ones(1), None
        )
