"""fit_gaussian in the units that data come in, in single precision, and what its certificates leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer import init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(1)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 2))
NOISE = 0.7 * RNG.normal(size=40)
ETA = nt.expectations.gauss_hermite(predictor="eta")


def data(unit):
    return jnp.asarray(X, jnp.float32), jnp.asarray(
        unit * (X @ np.array([1.0, -0.5]) + NOISE), jnp.float32
    )


def known_noise(x, y, unit):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0 * unit).expand([2]).to_event(1))
    numpyro.sample(
        "y", dist.Normal(numpyro.deterministic("eta", x @ b), 0.7 * unit), obs=y
    )


def latent_noise(x, y, unit):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0 * unit).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(unit))
    numpyro.sample("y", dist.Normal(numpyro.deterministic("eta", x @ b), s), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("unit", [1.0, 1e-5, 1e-7, 1e5])
def test_the_evidence_has_no_unit(unit):
    """Against the closed form."""
    x, y = data(unit)
    fit = nt.fit_gaussian(
        KEY, known_noise, AutoMultivariateNormal, x, y, unit, expectation=ETA
    )
    covariance = 0.49 * np.eye(40) + 4.0 * X @ X.T
    outcome = np.asarray(y, float) / unit
    log_evidence = -0.5 * (
        outcome @ np.linalg.solve(covariance, outcome)
        + np.linalg.slogdet(2.0 * np.pi * covariance)[1]
    )
    assert fit.elbo.value + 40 * np.log(unit) == pytest.approx(log_evidence, abs=2e-3)
    assert fit.converged


@pytest.fixture(scope="module")
def in_unit_one():
    return nt.fit_gaussian(
        KEY, latent_noise, AutoMultivariateNormal, *data(1.0), 1.0, expectation=ETA
    )


@pytest.mark.full
@pytest.mark.parametrize("unit", [1e-4, 1e5])
def test_a_scale_beside_a_predictor_has_no_unit(in_unit_one, unit):
    """Curvatures in the predictor and in the logarithm of the scale differ by the square of the unit."""
    fit = nt.fit_gaussian(
        KEY, latent_noise, AutoMultivariateNormal, *data(unit), unit, expectation=ETA
    )
    assert fit.elbo.value + 40 * np.log(unit) == pytest.approx(
        in_unit_one.elbo.value, abs=2e-3
    )
    scales = [
        np.sqrt(np.sum(np.square(f.params["auto_scale_tril"]), axis=1))
        for f in (in_unit_one, fit)
    ]
    np.testing.assert_allclose(scales[1] / [unit, unit, 1.0], scales[0], rtol=2e-3)


def location(y):
    loc = numpyro.sample("loc", dist.Normal(1000.0, 30.0))
    eta = numpyro.deterministic("eta", loc + jnp.zeros(len(y)))
    numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def with_tails(y):
    loc = numpyro.sample("loc", dist.Normal(1000.0, 30.0))
    eta = numpyro.deterministic("eta", loc + jnp.zeros(len(y)))
    numpyro.sample("y", dist.StudentT(2.0, eta, 1.0), obs=y)


TWO = (
    1000.0
    + np.random.default_rng(0).normal(size=46)
    + np.where(np.arange(46) < 20, -10.0, 10.0)
)


@pytest.mark.parametrize("name", tiered(["robust", "student"], unit=[]))
def test_a_loss_with_shoulders_has_no_certificate(name):
    """It has two optima here, and the lower one is no more certain for being stationary."""
    model = nt.robust(location, 0.5, unit=1.0) if name == "robust" else with_tails

    def started(at):
        return lambda q: AutoNormal(
            q, init_loc_fn=init_to_value(values={"loc": jnp.array(at)})
        )

    low, high = (
        nt.fit_gaussian(KEY, model, started(at), jnp.asarray(TWO), expectation=ETA)
        for at in (990.0, 1010.0)
    )
    assert high.elbo.value > low.elbo.value + 5.0
    assert np.isinf(low.convergence.gap_bound)
    assert low.elbo.se > 0.0
    certain = nt.fit_gaussian(
        KEY, location, AutoNormal, jnp.asarray(TWO), expectation=ETA
    )
    assert np.isfinite(certain.convergence.gap_bound)
    assert certain.elbo.se == 0.0


def test_nodes_too_few_for_a_wide_start_are_told():
    """Nodes between two clusters see neither: the ELBO that they maximise is not the one of draws."""
    model = nt.robust(location, 0.5, unit=1.0)

    def wide(q):
        return AutoNormal(
            q,
            init_loc_fn=init_to_value(values={"loc": jnp.array(990.0)}),
            init_scale=10.0,
        )

    few = nt.expectations.gauss_hermite(predictor="eta", num_nodes=6)
    with pytest.warns(
        nt.warnings.ConvergenceWarning,
        match=r"^the ELBO.*by fresh draws. Take more num_nodes of gauss_hermite",
    ):
        fit = nt.fit_gaussian(
            KEY, model, wide, jnp.asarray(TWO), expectation=few, tolerance=1e9
        )
    # Stationary, but not of the ELBO.
    assert float(fit.convergence.stationarity) < 1e9
    assert not fit.converged


def shares(y):
    a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
    b = numpyro.sample("b", dist.Uniform(a, 2.0))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def fixed_bounds(y):
    a = numpyro.sample("a", dist.Uniform(0.0, 2.0))
    b = numpyro.sample("b", dist.TruncatedNormal(a, 1.0, low=jnp.array([0.0, 1.0])))
    numpyro.sample("y", dist.Normal(jnp.sum(b), 1.0), obs=y)


@pytest.mark.parametrize("fit", [nt.fit_gaussian, nt.fit_svi, nt.temper_path])
def test_a_support_that_moves_is_refused(fit):
    """NumPyro's guides keep the support of their set-up, and draw impossible values."""
    y = jnp.asarray(RNG.normal(1.0, 1.0, size=30))
    with pytest.raises(
        ValueError,
        match=r"the support of latent 'b' depends on other latents.*or run NUTS",
    ):
        fit(KEY, shares, AutoMultivariateNormal, y)


@pytest.mark.full
def test_bounds_that_are_numbers_are_no_obstacle():
    y = jnp.asarray(RNG.normal(2.0, 1.0, size=30))
    fits = [
        fit(KEY, fixed_bounds, AutoMultivariateNormal, y)
        for fit in (nt.fit_gaussian, nt.fit_svi)
    ]
    assert fits[0].elbo.value == pytest.approx(fits[1].elbo.value, abs=0.2)
