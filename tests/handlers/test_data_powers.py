"""A power for each datum: survey weights, or a power prior that discounts older data."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    log_likelihood,
)
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from scipy import stats
from scipy.special import logsumexp
from tempered_models import (
    Y,
    density,
    normal,
    normal_density,
    positive,
    potential,
    trace_of,
)

import numpyro_tempered as nt

WEIGHTS = np.array([0.5, 1.7, 0.0, 1.2])
LOG_LIK = stats.norm.logpdf(Y, 0.7, 1.5)


def posterior():
    """Mean and standard deviation of ``normal``'s weighted posterior, which is conjugate."""
    precision = 1 / 2.0**2 + WEIGHTS.sum() / 1.5**2
    return (0.5 / 2.0**2 + WEIGHTS @ Y / 1.5**2) / precision, precision**-0.5


@pytest.mark.parametrize("alpha", [WEIGHTS, {"y": WEIGHTS}], ids=["array", "mapping"])
def test_each_datum_has_its_power(alpha, x64):
    want = stats.norm.logpdf(0.7, 0.5, 2.0) + WEIGHTS @ LOG_LIK
    model = nt.temper(normal, alpha)
    assert density(model, {"theta": 0.7}) == pytest.approx(want, rel=1e-13)
    assert potential(model, {"theta": 0.7}) == pytest.approx(-want, rel=1e-13)
    # Equal powers are one power.
    assert density(nt.temper(normal, np.full(4, 0.3)), {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3), rel=1e-13
    )


def test_the_density_is_the_conjugate_one(x64):
    theta = np.array([-2.0, 0.1, 3.0])
    got = jax.jit(
        jax.vmap(lambda t: density(nt.temper(normal, WEIGHTS), {"theta": t}))
    )(theta)
    np.testing.assert_allclose(
        np.diff(got), np.diff(stats.norm.logpdf(theta, *posterior())), rtol=1e-12
    )


def test_powers_may_be_traced_and_nest(x64):
    def value(alpha):
        return density(
            nt.temper(nt.temper(normal, alpha=0.5), alpha=alpha), {"theta": 0.7}
        )

    got, slope = jax.jit(jax.value_and_grad(value))(WEIGHTS)
    assert got == pytest.approx(
        stats.norm.logpdf(0.7, 0.5, 2.0) + 0.5 * WEIGHTS @ LOG_LIK, rel=1e-13
    )
    np.testing.assert_allclose(
        slope, np.where(WEIGHTS > 0, 0.5 * LOG_LIK, 0.0), rtol=1e-12
    )


def test_a_datum_of_power_zero_may_be_impossible(x64):
    y = np.where(WEIGHTS > 0, Y, 1e200)
    for alpha in (WEIGHTS, {"y": WEIGHTS}):
        got, slope = jax.value_and_grad(
            lambda t: density(nt.temper(normal, alpha), {"theta": t}, y)  # noqa: B023
        )(0.7)
        assert got == pytest.approx(
            stats.norm.logpdf(0.7, 0.5, 2.0) + WEIGHTS @ LOG_LIK, rel=1e-13
        )
        assert np.isfinite(slope)


def test_a_subsample_has_its_own_powers(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        with (
            numpyro.plate("rows", 2, dim=-2),
            numpyro.plate("n", 6, subsample_size=3) as i,
        ):
            numpyro.sample(
                "y", dist.Normal(theta, 1.5), obs=jnp.arange(12.0).reshape(2, 6)[:, i]
            )

    alpha = np.arange(12.0).reshape(2, 6) / 7.0
    trace = trace_of(nt.temper(model, alpha))
    np.testing.assert_allclose(
        trace["y"]["scale"], 2.0 * alpha[:, trace["n"]["value"]], rtol=1e-12
    )
    # Powers of the subsample are taken as they are.
    np.testing.assert_allclose(
        trace_of(nt.temper(model, alpha[:, :3]))["y"]["scale"], 2.0 * alpha[:, :3]
    )
    # Inside of the plates their indices are not known to it.
    with pytest.raises(
        ValueError,
        match=r"alpha has shape \(2, 6\), and site 'y' has data of shape \(2, 3\)",
    ):
        trace_of(lambda: inside_plates(alpha))
    assert trace_of(lambda: inside_plates(alpha[:, :3]))["y"]["scale"].shape == (2, 3)


def inside_plates(alpha):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with (
        numpyro.plate("rows", 2, dim=-2),
        numpyro.plate("n", 6, subsample_size=3),
        nt.temper(alpha=alpha),
    ):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=jnp.zeros((2, 3)))


def test_rows_of_several_columns_and_steps_of_a_scan(x64):
    rows = np.arange(8.0).reshape(4, 2) / 5.0

    def model():
        numpyro.sample("rows", dist.Normal(0.2, 1.0).expand([2]).to_event(1), obs=rows)
        scan(
            lambda c, y: (c, numpyro.sample("step", dist.Normal(0.2, 1.0), obs=y)),
            0.0,
            jnp.asarray(Y),
        )

    got = density(nt.temper(model, WEIGHTS), {})
    assert got == pytest.approx(
        WEIGHTS @ (stats.norm.logpdf(rows, 0.2).sum(1) + stats.norm.logpdf(Y, 0.2)),
        rel=1e-12,
    )


def test_sums_over_local_latents(x64):
    pytest.importorskip("funsor")

    def mixture(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("n", len(y)):
            z = numpyro.sample("z", dist.Categorical(jnp.array([0.4, 0.6])))
            numpyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)

    loc = np.array([0.0, 2.0])
    log_lik = np.log(stats.norm.pdf(Y[:, None], loc) @ [0.4, 0.6])
    got = density(
        nt.temper(nt.marginalize(mixture), WEIGHTS), {"loc": loc}, jnp.asarray(Y)
    )
    assert got == pytest.approx(
        stats.norm.logpdf(loc, 0.0, 3.0).sum() + WEIGHTS @ log_lik, rel=1e-6
    )


def switch(y):
    k = numpyro.sample(
        "k", dist.Categorical(jnp.array([0.4, 0.6])), infer={"enumerate": "parallel"}
    )
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta + 2.0 * k, 1.0), obs=y)


def test_enumerated_parameters(x64):
    pytest.importorskip("funsor")
    y = jnp.asarray(Y)

    @jax.jit
    def run(theta):
        tempered = nt.temper(switch, WEIGHTS)
        info = numpyro.infer.util.initialize_model(
            jax.random.key(0), tempered, model_args=(y,)
        )
        return info.potential_fn({"theta": theta})

    log_lik = [WEIGHTS @ stats.norm.logpdf(Y, 0.3 + 2.0 * k) for k in (0, 1)]
    want = stats.norm.logpdf(0.3) + logsumexp(np.log([0.4, 0.6]) + log_lik)
    with warnings.catch_warnings():
        # Of NumPyro, on enumeration.
        warnings.simplefilter("ignore")
        assert float(run(0.3)) == pytest.approx(-want, rel=1e-12)
    guide = AutoNormal(handlers.block(handlers.seed(switch, 0), hide=["k"]))
    svi = SVI(
        nt.temper(switch, WEIGHTS), guide, numpyro.optim.Adam(0.1), TraceEnum_ELBO()
    )
    with pytest.raises(
        ValueError,
        match=r"TraceEnum_ELBO takes one scale for all data.*NUTS.*for local latents",
    ):
        svi.evaluate(svi.init(jax.random.key(0), y), y)


@pytest.mark.parametrize(
    "alpha",
    [WEIGHTS[:3], WEIGHTS[:, None], np.ones((1, 4))],
    ids=lambda a: str(a.shape),
)
def test_the_shape_is_that_of_the_data(alpha):
    with pytest.raises(
        ValueError,
        match=r"alpha has shape .*site 'y' has data of shape \(4,\).*by a mapping",
    ):
        trace_of(nt.temper(normal, alpha))
    with pytest.raises(ValueError, match=r"alpha has shape.*sites by a mapping"):
        trace_of(nt.temper(positive, {"y": alpha}), 0.4)


def test_what_has_no_datum_is_refused():
    def with_factor():
        normal()
        numpyro.factor("bonus", 0.3)

    with pytest.raises(
        ValueError,
        match=r"alpha has shape .4,., and factor 'bonus' ...*factors=False.*terms of the prior",
    ):
        trace_of(nt.temper(with_factor, WEIGHTS))

    def with_terms():
        numpyro.factor("bonus", jnp.asarray(Y))
        normal()

    site = trace_of(nt.temper(with_terms, WEIGHTS))["bonus"]
    np.testing.assert_allclose(site["scale"], WEIGHTS)
    assert (
        trace_of(nt.temper(with_factor, WEIGHTS, factors=False))["bonus"]["scale"]
        is None
    )
    with pytest.raises(
        ValueError, match=r"local_plates need one alpha.*mapping or an array"
    ):
        nt.temper(normal, WEIGHTS, local_plates=["n"])


def test_svi_has_the_weighted_joint_for_its_target(x64):
    model = nt.temper(normal, WEIGHTS)
    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0))
    theta = float(svi.get_params(state)["theta_auto_loc"])
    want = stats.norm.logpdf(theta, 0.5, 2.0) + WEIGHTS @ stats.norm.logpdf(
        Y, theta, 1.5
    )
    assert float(svi.evaluate(state)) == pytest.approx(-want, rel=1e-12)


@pytest.mark.full
def test_fits_have_the_weighted_posterior(key):
    mean, sd = posterior()
    fit = nt.fit_gaussian(
        key, normal, AutoMultivariateNormal, jnp.asarray(Y), alpha=WEIGHTS
    )
    got = fit.guide.get_posterior(fit.params)
    np.testing.assert_allclose(
        [got.mean[0], got.covariance_matrix[0, 0] ** 0.5], [mean, sd], atol=0.01 * sd
    )
    assert fit.alpha == {"y": WEIGHTS.tolist()}
    with pytest.raises(
        ValueError, match="differ from datum to datum, and loo takes one power"
    ):
        nt.loo(nt.to_inference_data(fit))
    with pytest.raises(ValueError, match="loo takes one power"):
        nt.loo(nt.to_inference_data(fit), alpha=WEIGHTS)
    mcmc = MCMC(
        NUTS(nt.temper(normal, {"y": WEIGHTS})),
        num_warmup=500,
        num_samples=8000,
        progress_bar=False,
    )
    mcmc.run(key)
    theta = np.asarray(mcmc.get_samples()["theta"])
    assert abs(theta.mean() - mean) < 5.0 * sd / 40.0
    assert theta.std() == pytest.approx(sd, rel=0.1)


def test_predictions_and_pointwise_likelihoods_are_untempered(key):
    draws = {"theta": jnp.array([0.7])}
    got = log_likelihood(nt.temper(normal, np.maximum(WEIGHTS, 0.1)), draws)["y"][0]
    np.testing.assert_allclose(got, LOG_LIK, rtol=1e-5)
    unobserved = handlers.uncondition(normal)
    want = Predictive(unobserved, draws)(key)["y"]
    np.testing.assert_array_equal(
        Predictive(nt.temper(unobserved, WEIGHTS), draws)(key)["y"], want
    )
