"""A power for each site: historical data beside current data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from oracles import tempered_normal_posterior
from scipy import stats
from tempered_models import density, naive_temper, potential, trace_of

import numpyro_tempered as nt

OLD, NOW = np.array([1.0, 2.0, 0.5]), np.array([-0.3, 0.4])


def two_studies():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("historical", dist.Normal(theta, 1.5), obs=OLD)
    numpyro.sample("current", dist.Normal(theta, 0.7), obs=NOW)


def two_studies_density(theta, old, now):
    prior = stats.norm.logpdf(theta, 0.5, 2.0)
    return (
        prior
        + old * stats.norm.logpdf(OLD, theta, 1.5).sum()
        + now * stats.norm.logpdf(NOW, theta, 0.7).sum()
    )


@pytest.mark.parametrize(
    "powers",
    [(0.3, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 2.0), (0.0, 0.0)],
    ids=str,
)
def test_power_prior(powers, x64):
    alpha = dict(zip(("historical", "current"), powers, strict=True))
    for model in (nt.temper(two_studies, alpha), nt.temper(alpha=alpha)(two_studies)):
        assert density(model, {"theta": 0.7}) == pytest.approx(
            two_studies_density(0.7, *powers), rel=1e-13
        )
        assert potential(model, {"theta": 0.7}) == pytest.approx(
            -two_studies_density(0.7, *powers), rel=1e-13
        )
    if powers[0] != powers[1]:
        for power in powers:
            naive = density(naive_temper(two_studies, power), {"theta": 0.7})
            assert abs(naive - two_studies_density(0.7, *powers)) > 0.3


def test_power_prior_is_the_conjugate_one(x64):
    """Its density differs from the Gaussian posterior of the weighted data by a constant."""
    mean, sd = tempered_normal_posterior(OLD, 0.3, 0.5, 2.0, 1.5)
    mean, sd = tempered_normal_posterior(NOW, 1.0, mean, sd, 0.7)
    theta = np.array([-2.0, 0.1, 3.0])
    model = nt.temper(two_studies, {"historical": 0.3, "current": 1.0})
    got = jax.jit(jax.vmap(lambda t: density(model, {"theta": t})))(theta)
    np.testing.assert_allclose(
        np.diff(got), np.diff(stats.norm.logpdf(theta, mean, sd)), rtol=1e-12
    )


def test_the_mapping_is_copied():
    alpha = {"historical": 0.3, "current": 1.0}
    model = nt.temper(two_studies, alpha)
    alpha["historical"] = 0.9
    assert trace_of(model)["historical"]["scale"] == 0.3


def test_traced_powers(x64):
    def value(old, now):
        return density(
            nt.temper(two_studies, {"historical": old, "current": now}), {"theta": 0.7}
        )

    old, now = np.array([0.0, 0.3, 2.0]), np.array([1.0, 0.0, 0.5])
    got = jax.jit(jax.vmap(value))(old, now)
    np.testing.assert_allclose(
        got, [two_studies_density(0.7, a, b) for a, b in zip(old, now, strict=True)]
    )
    # One power traced, the other concrete.
    mixed = jax.jit(lambda a: value(a, 1.0))(0.3)
    assert mixed == pytest.approx(two_studies_density(0.7, 0.3, 1.0), rel=1e-13)
    slope = jax.jit(jax.grad(value, argnums=(0, 1)))(0.3, 0.5)
    want = (
        stats.norm.logpdf(OLD, 0.7, 1.5).sum(),
        stats.norm.logpdf(NOW, 0.7, 0.7).sum(),
    )
    np.testing.assert_allclose(slope, want, rtol=1e-12)


def test_nesting_multiplies_by_site(x64):
    inner = nt.temper(two_studies, {"historical": 0.3, "current": 1.0})
    assert density(nt.temper(inner, 0.5), {"theta": 0.7}) == pytest.approx(
        two_studies_density(0.7, 0.15, 0.5)
    )
    outer = nt.temper(inner, {"historical": 2.0, "current": 0.25})
    assert density(outer, {"theta": 0.7}) == pytest.approx(
        two_studies_density(0.7, 0.6, 0.25), rel=1e-13
    )


def test_every_likelihood_site_must_be_named():
    model = nt.temper(two_studies, {"historical": 0.3})
    with pytest.raises(
        ValueError,
        match=r"observed site 'current' has no alpha.*\['historical'\].*1\.0",
    ):
        trace_of(model)
    # The names are those seen from the handler.
    with pytest.raises(
        ValueError,
        match=r"^observed site.*'a/historical' has no alpha.*that are not tempered",
    ):
        trace_of(
            nt.temper(
                handlers.scope(two_studies, prefix="a"),
                {"historical": 0.3, "current": 1.0},
            )
        )
    outside = handlers.scope(
        nt.temper(two_studies, {"historical": 0.3, "current": 1.0}), prefix="a"
    )
    assert trace_of(outside)["a/historical"]["scale"] == 0.3


def test_a_name_that_the_model_does_not_have_is_refused():
    model = nt.temper(two_studies, {"historical": 0.3, "current": 1.0, "historic": 0.5})
    with pytest.raises(
        ValueError, match=r"^the model has.*no sites \['historic'\].*are factors"
    ):
        trace_of(model)


def with_factor():
    theta = numpyro.sample("theta", dist.HalfNormal())
    numpyro.factor("bonus", 2.0 * theta)
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=0.3)


def test_a_likelihood_factor_must_be_named_and_a_prior_factor_need_not(x64):
    with pytest.raises(ValueError, match=r"factor 'bonus' has no alpha.*factors=False"):
        trace_of(nt.temper(with_factor, {"y": 0.3}))
    u = 0.4
    theta = np.exp(u)
    prior, log_lik = stats.halfnorm.logpdf(theta) + u, stats.norm.logpdf(0.3, theta)
    # Neither does the Jacobian of the potential.
    for model, bonus in (
        (nt.temper(with_factor, {"y": 0.3}, factors=False), 1.0),
        (nt.temper(with_factor, {"y": 0.3, "bonus": 0.5}), 0.5),
        (nt.temper(with_factor, {"y": 0.3, "bonus": 0.0}), 0.0),
        (nt.temper(with_factor, {"y": 0.3}, factors=()), 1.0),
    ):
        want = prior + 0.3 * log_lik + bonus * 2.0 * theta
        assert potential(model, {"theta": u}) == pytest.approx(-want, rel=1e-12)


@pytest.mark.parametrize(
    "alpha",
    [
        {"y": -0.1},
        {"y": np.nan},
        {"y": None},
        {"y": np.array([1.0, -1.0])},
        {1: 0.5},
        {},
        {"y": 0.5, "z": "a"},
    ],
    ids=repr,
)
def test_each_power_must_be_finite_and_real(alpha):
    with pytest.raises(ValueError, match="alpha"):
        nt.temper(two_studies, alpha)


def test_a_mapping_goes_with_one_alpha_only_where_that_is_meant():
    with pytest.raises(ValueError, match=r"local_plates.*mapping or an array"):
        nt.temper(two_studies, {"historical": 0.3, "current": 1.0}, local_plates=["n"])


def test_a_named_site_that_is_observed_outside_is_refused():
    def model():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        numpyro.sample("historical", dist.Normal(theta, 1.5))
        numpyro.sample("current", dist.Normal(theta, 0.7), obs=0.1)

    tempered = nt.temper(model, {"historical": 0.3, "current": 1.0})
    with pytest.raises(
        ValueError,
        match=r"'historical' is observed by a handler outside.*temper\(condition",
    ):
        trace_of(handlers.condition(tempered, data={"historical": 1.0}))
    # Under another name as well.
    with pytest.raises(
        ValueError, match=r"observed by a handler outside.*all of this pass"
    ):
        trace_of(
            handlers.condition(
                handlers.scope(tempered, prefix="a"), data={"a/historical": 1.0}
            )
        )
    # Nothing is lost where its power is 1, nor where a latent is conditioned on, as Gibbs kernels do.
    one = nt.temper(model, {"historical": 1.0, "current": 0.3})
    assert trace_of(handlers.condition(one, data={"historical": 1.0}))["historical"][
        "is_observed"
    ]
    assert trace_of(handlers.condition(tempered, data={"theta": 1.0}))["theta"][
        "is_observed"
    ]


def test_powers_by_site_in_a_scan(x64):
    def model():
        theta = numpyro.sample("theta", dist.HalfNormal())

        def body(carry, row):
            numpyro.sample("a", dist.Normal(theta, 1.0), obs=row[0])
            numpyro.sample("b", dist.Normal(theta, 2.0), obs=row[1])
            return carry, None

        scan(body, 0.0, jnp.array([[0.1, 0.2], [0.3, -0.4], [1.0, 0.5]]))

    u = 0.4
    a, b = stats.norm(np.exp(u), 1.0), stats.norm(np.exp(u), 2.0)
    log_lik = (
        0.3 * a.logpdf([0.1, 0.3, 1.0]).sum() + 0.8 * b.logpdf([0.2, -0.4, 0.5]).sum()
    )
    want = stats.halfnorm.logpdf(np.exp(u)) + u + log_lik
    assert potential(
        nt.temper(model, {"a": 0.3, "b": 0.8}), {"theta": u}
    ) == pytest.approx(-want, rel=1e-12)


def test_obs_mask_names_the_observed_part(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        numpyro.sample(
            "y",
            dist.Normal(theta, 1.5),
            obs=OLD,
            obs_mask=np.array([True, False, True]),
        )

    with pytest.raises(
        ValueError,
        match=r"^observed site.*'y_observed' has no alpha.*that are not tempered",
    ):
        trace_of(nt.temper(model, {"y": 0.3}))
    assert trace_of(nt.temper(model, {"y_observed": 0.3}))["y_observed"]["scale"] == 0.3


@pytest.mark.full
def test_svi_has_the_power_prior_for_its_target(x64):
    model = nt.temper(two_studies, {"historical": 0.3, "current": 1.0})
    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.1), Trace_ELBO())

    @jax.jit
    def run():
        state = svi.init(jax.random.key(0))
        return svi.get_params(state)["theta_auto_loc"], svi.evaluate(state)

    theta, loss = map(float, run())
    assert loss == pytest.approx(-two_studies_density(theta, 0.3, 1.0), rel=1e-12)
