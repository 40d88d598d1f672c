"""The guide that starts at the prior."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.initialization import init_to_median
from scipy import integrate, special, stats

import numpyro_tempered as nt
from numpyro_tempered.infer.guides import NUM_PRIOR_DRAWS, AutoOnlineDiagonalNormal
from numpyro_tempered.infer.guides.network import _start_scale


def several(y=None):
    a = numpyro.sample("a", dist.Normal(1.0, 2.0))
    numpyro.sample("b", dist.Normal(jnp.arange(2.0), 0.5).to_event(1))
    numpyro.sample("c", dist.Normal(0.0, 3.0).expand([2]))
    with numpyro.plate("p", 2):
        numpyro.sample("d", dist.Normal(-1.0, jnp.array([0.1, 0.2])))
    numpyro.sample("e", dist.Normal(0.25, 4.0).expand([2, 2]).to_event(2))
    numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


PRIORS = {
    "a": (1.0, 2.0),
    "b": ([0.0, 1.0], [0.5, 0.5]),
    "c": ([0.0, 0.0], [3.0, 3.0]),
    "d": ([-1.0, -1.0], [0.1, 0.2]),
    "e": (np.full((2, 2), 0.25), np.full((2, 2), 4.0)),
}


def set_up(model, *args):
    guide = AutoOnlineDiagonalNormal(model)
    handlers.seed(guide, jax.random.key(1))(*args)
    return guide


@pytest.mark.full
def test_the_start_is_exact_for_normal_priors():
    guide = set_up(several, 0.5)
    locs, scales = (guide._unpack_latent(leaf) for leaf in guide.prior)
    assert set(locs) == set(PRIORS)
    for name, (loc, scale) in PRIORS.items():
        np.testing.assert_array_equal(locs[name], np.asarray(loc, locs[name].dtype))
        np.testing.assert_array_equal(scales[name], np.asarray(scale, locs[name].dtype))
    assert guide.moment_matched == ()
    assert guide.latent_dim == 1 + 2 + 2 + 2 + 4


@pytest.mark.full
def test_pack_inverts_unpack():
    guide = set_up(several, 0.5)
    flat = jnp.arange(float(guide.latent_dim))
    np.testing.assert_array_equal(guide.pack(guide._unpack_latent(flat)), flat)


def test_a_full_covariance_starts_at_that_of_the_prior():
    def model(y=None):
        s = numpyro.sample("s", dist.Gamma(3.0, 2.0))
        numpyro.sample("b", dist.Normal(jnp.log(s), 0.5))
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)

    guide = nt.guides.AutoOnlineMultivariateNormal(model)
    with pytest.warns(
        UserWarning,
        match=r"^the priors of \['b', 's'\] are not Normal.* mean and covariance, from ",
    ):
        handlers.seed(guide, jax.random.key(1))(0.5)
    mean, variance = special.digamma(3.0) - np.log(2.0), special.polygamma(1, 3.0)
    covariance = np.array([[variance, variance], [variance, variance + 0.25]])
    error = 5.0 / np.sqrt(NUM_PRIOR_DRAWS)
    np.testing.assert_allclose(guide.prior.loc, [mean, mean], atol=error)
    np.testing.assert_allclose(
        guide.prior.factor @ guide.prior.factor.T, covariance, atol=error
    )


GUIDES = [
    getattr(nt.guides, name) for name in nt.guides.__all__ if name.startswith("Auto")
]


@pytest.mark.parametrize("guide", GUIDES)
def test_the_options_of_every_guide_reach_it(guide):
    instance = guide(several, prefix="q", init_loc_fn=init_to_median)
    assert (instance.prefix, instance.init_loc_fn) == ("q", init_to_median)
    options = inspect.signature(guide).parameters
    if "init_scale" in options:
        kept = vars(guide(several, init_scale=0.07))
        assert 0.07 in (kept.get("init_scale"), kept.get("_init_scale"))
    if "create_plates" in options:
        assert guide(several, create_plates=several).create_plates is several


@pytest.mark.full
def test_the_parameters_of_svi_start_at_the_prior():
    guide = AutoOnlineDiagonalNormal(several, prefix="q")
    svi = SVI(several, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), 0.5))
    assert set(params) == {"q_loc", "q_scale"}
    np.testing.assert_array_equal(params["q_loc"], guide.prior.loc)
    # The scale goes through softplus and back.
    np.testing.assert_allclose(params["q_scale"], guide.prior.scale, rtol=1e-5)


@pytest.mark.parametrize(
    ("y", "alpha"),
    tiered(
        itertools.product([np.inf, 1e30, -3.0, np.nan], [None, 0.3]),
        unit=[(np.inf, None), (-3.0, 0.3)],
    ),
)
def test_the_start_does_not_depend_on_the_data(y, alpha):
    model = several if alpha is None else nt.temper(several, alpha=alpha)
    reference = set_up(several, 0.5).prior
    for got, want in zip(set_up(model, jnp.array(y)).prior, reference, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_prior_is_unknown_before_set_up():
    with pytest.raises(
        ValueError, match=r"^the guide has not.*set up.*it, or OnlineVI.init, first"
    ):
        _ = AutoOnlineDiagonalNormal(several).prior


def moments_of_log(density):
    """Mean, standard deviation and fourth central moment of log s by quadrature in u = log s."""

    def moment(k, center=0.0):
        return integrate.quad(
            lambda u: (u - center) ** k * density(np.exp(u)) * np.exp(u), -40.0, 5.0
        )[0]

    mean = moment(1)
    return mean, np.sqrt(moment(2, mean)), moment(4, mean)


def positive_and_hierarchical(y=None):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    mu = numpyro.sample("mu", dist.Normal(1.0, 2.0))
    x = numpyro.sample("x", dist.Normal(mu, 1.0))
    numpyro.sample("y", dist.Normal(x, s), obs=y)


@pytest.fixture(scope="module")
def matched_guide():
    with pytest.warns(
        UserWarning,
        match=r"^the priors.*\['s', 'x'\].*not Normal.*and standard deviation, from",
    ):
        return set_up(positive_and_hierarchical, 0.5)


def test_other_priors_are_matched_in_moments(matched_guide):
    assert matched_guide.moment_matched == ("s", "x")
    locs, scales = (matched_guide._unpack_latent(leaf) for leaf in matched_guide.prior)
    assert (float(locs["mu"]), float(scales["mu"])) == (1.0, 2.0)
    log_moments = moments_of_log(stats.halfnorm.pdf)
    marginal = (1.0, np.sqrt(5.0), 3.0 * 25.0)
    for name, (mean, sd, fourth) in {"s": log_moments, "x": marginal}.items():
        se_of_mean = sd / np.sqrt(NUM_PRIOR_DRAWS)
        se_of_sd = np.sqrt((fourth - sd**4) / NUM_PRIOR_DRAWS) / (2.0 * sd)
        assert abs(float(locs[name]) - mean) < 5 * se_of_mean
        assert abs(float(scales[name]) - sd) < 5 * se_of_sd


def test_the_quadrature_of_log_moments():
    # log|Z|: mean -(gamma + log 2)/2, variance pi²/8.
    mean, sd, _ = moments_of_log(stats.halfnorm.pdf)
    assert mean == pytest.approx(-(np.euler_gamma + np.log(2.0)) / 2.0, rel=1e-7)
    assert sd == pytest.approx(np.pi / np.sqrt(8.0), rel=1e-7)


def test_a_normal_scale_that_is_latent_is_matched():
    def model(y=None):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.25))
        x = numpyro.sample("x", dist.Normal(0.0, tau))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.warns(
        UserWarning, match=r"^the priors of.*not Normal.*and standard deviation, from"
    ):
        assert "x" in set_up(model, 0.5).moment_matched


def improper(y=None):
    x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


def cauchy(y=None):
    x = numpyro.sample("x", dist.Cauchy(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "match"), [(improper, "improper"), (cauchy, "'x', Cauchy.*variance")]
)
def test_a_prior_without_two_moments_is_refused(model, match):
    with pytest.raises(ValueError, match=match):
        set_up(model, 0.5)


def test_a_failed_set_up_leaves_the_model_alone():
    guide = AutoOnlineDiagonalNormal(cauchy)
    with pytest.raises(
        ValueError, match=r"^the prior of.*variance.*prior with two moments"
    ):
        handlers.seed(guide, 0)(0.5)
    assert guide.model is cauchy


@pytest.mark.full
def test_it_is_a_stock_guide_otherwise(matched_guide):
    """SVI on ``s ~ HalfNormal`` and friends, then every method that users call."""
    model, guide = positive_and_hierarchical, matched_guide
    svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(0), 300, 0.5, progress_bar=False)
    losses = np.asarray(result.losses)
    assert np.isfinite(losses).all()
    assert losses[-50:].mean() < losses[:50].mean()

    params = {
        "auto_loc": guide.pack(
            {"s": jnp.array(0.3), "mu": jnp.array(1.0), "x": jnp.array(-2.0)}
        ),
        "auto_scale": guide.pack(
            {"s": jnp.array(0.1), "mu": jnp.array(0.5), "x": jnp.array(2.0)}
        ),
    }
    median = guide.median(params)
    assert float(median["s"]) == pytest.approx(np.exp(0.3), rel=1e-6)
    assert float(median["x"]) == -2.0
    quantiles = guide.quantiles(params, [0.1, 0.9])
    want = stats.norm.ppf([0.1, 0.9])
    np.testing.assert_allclose(quantiles["x"], -2.0 + 2.0 * want, rtol=1e-5)
    np.testing.assert_allclose(quantiles["s"], np.exp(0.3 + 0.1 * want), rtol=1e-5)

    n = 4000
    draws = guide.sample_posterior(jax.random.key(1), params, sample_shape=(n,))
    assert set(draws) == {"s", "mu", "x"}
    assert (draws["s"] > 0).all()
    predictive = Predictive(guide, params=params, num_samples=n)(jax.random.key(2), 0.5)
    for sample in (draws, predictive):
        assert abs(float(sample["x"].mean()) + 2.0) < 5 * 2.0 / np.sqrt(n)
        assert abs(float(jnp.log(sample["s"]).mean()) - 0.3) < 5 * 0.1 / np.sqrt(n)


def test_integer_parameters_of_a_prior_give_floating_parameters(key):
    def model(y=None):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(theta, 1), obs=y)

    guide = nt.guides.AutoOnlineDiagonalNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    state = svi.init(key, 0.5)
    params = jax.eval_shape(
        lambda state: svi.get_params(svi.update(state, 0.5)[0]), state
    )
    for found in (params, svi.get_params(state)):
        assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in found.values())


def test_a_masked_prior_is_no_start(key):
    def model(y=None):
        with handlers.mask(mask=False):
            theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"^the prior of.*is masked.*cannot start at it"
    ):
        handlers.seed(AutoOnlineDiagonalNormal(model), key)(0.5)


@pytest.mark.parametrize(
    ("prior", "scale"),
    [
        (lambda: dist.Normal(jnp.full((2, 3, 5), 4.0), 10.0), 6**-0.5),
        (lambda: dist.Normal(jnp.zeros(9), 10.0), 1 / 3),
        (lambda: dist.Normal(0.0, 10.0), 1.0),
        (lambda: dist.Normal(jnp.zeros((2, 3, 5)), 0.1), 0.1),
        (lambda: dist.Normal(jnp.zeros((4, 5)), 10.0).to_event(2), 0.5),
        (lambda: dist.Cauchy(jnp.zeros((4, 5)), 1.0), 0.5),
        (lambda: dist.Gamma(jnp.ones(3), 1.0), None),
    ],
)
def test_weights_start_in_the_size_that_their_inputs_ask_for(prior, scale):
    found = _start_scale({"fn": prior()})
    assert (found is None) == (scale is None)
    if scale is not None:
        np.testing.assert_allclose(found, np.full(np.shape(found), scale), rtol=1e-6)
