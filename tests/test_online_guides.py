"""Guides of every family, and the runs of models with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.families import FullRank, LowRank, MeanField, family_of
from numpyro_tempered.guides import (
    NUM_PRIOR_DRAWS,
    AutoOnlineDiagonalNormal,
    AutoOnlineLowRankNormal,
    AutoOnlineMultivariateNormal,
)

KEY = jax.random.key(3)
ETA = nt.expectations.gauss_hermite(predictor="eta", num_nodes=8)
GUIDES = {
    "diagonal": AutoOnlineDiagonalNormal,
    "full": AutoOnlineMultivariateNormal,
    "low rank": lambda model: AutoOnlineLowRankNormal(model, rank=3),
}
D = 3


@nt.temper(alpha=0.5)
def linear(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.array([0.5, -1.0]), 2.0).to_event(1))
    a = numpyro.sample("a", dist.Normal(1.0, 0.5))
    eta = numpyro.deterministic("eta", a + x @ b)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, 1.5), obs=y)


def data(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]])
    return jnp.asarray(x), jnp.asarray(x @ [1.0, 2.0] + 0.3 + rng.normal(size=n))


def exact(x, y, alpha=0.5):
    """Mean and covariance of (a, b1, b2) by ridge regression."""
    design = np.column_stack([np.ones(len(x)), x])
    m0, p0 = np.array([1.0, 0.5, -1.0]), np.diag([4.0, 0.25, 0.25])
    precision = p0 + alpha * design.T @ design / 2.25
    return np.linalg.solve(precision, p0 @ m0 + alpha * design.T @ y / 2.25), np.linalg.inv(precision)


def by_name(guide, q):
    """Mean and covariance of q in the order (a, b1, b2)."""
    places = guide.layout.split(jnp.arange(q.loc.shape[0]))
    order = np.concatenate([np.ravel(places[k]) for k in ("a", "b")])
    if isinstance(q, LowRank):
        covariance = np.linalg.inv(
            np.diag(q.precision_diag) + np.asarray(q.precision_factor @ q.precision_factor.T)
        )
    else:
        covariance = np.asarray(q.factor @ q.factor.T)
    return np.asarray(q.loc)[order], covariance[np.ix_(order, order)]


@pytest.mark.parametrize("name", ["full", "low rank"])
def test_a_conjugate_stream_ends_at_the_tempered_posterior(x64, name):
    x, y = data()
    online = nt.OnlineVI(linear, GUIDES[name](linear), nt.online.ngvi(), ETA)
    state, _ = online.run(KEY, x, y)
    mean, covariance = exact(np.asarray(x), np.asarray(y))
    found = by_name(online.guide, state.posterior)
    np.testing.assert_allclose(found[0], mean, rtol=1e-8)
    np.testing.assert_allclose(found[1], covariance, rtol=1e-7, atol=1e-10)
    posterior = online.get_posterior(state)
    np.testing.assert_allclose(posterior.mean, state.posterior.loc)
    np.testing.assert_allclose(np.sort(posterior.variance), np.sort(np.diag(covariance)), rtol=1e-7)


@pytest.mark.parametrize("name", ["full", "low rank"])
def test_batches_and_monte_carlo_reach_the_same_posterior(x64, name):
    """On a quadratic loss one draw gives the exact curvature; low rank takes it as rows of the predictor."""
    x, y = data()
    expectation = nt.expectations.monte_carlo(predictor="eta") if name == "low rank" else None
    online = nt.OnlineVI(linear, GUIDES[name](linear), nt.online.ngvi(), expectation)
    state = online.init(KEY, x[:10], y[:10])
    for i in range(0, 40, 10):
        state, _ = online.update(state, x[i : i + 10], y[i : i + 10])
    _, covariance = exact(np.asarray(x), np.asarray(y))
    np.testing.assert_allclose(by_name(online.guide, state.posterior)[1], covariance, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", GUIDES)
def test_the_methods_of_the_guide(x64, name):
    x, y = data()
    online = nt.OnlineVI(linear, GUIDES[name](linear), nt.online.ngvi(), ETA)
    state, _ = online.run(KEY, x, y)
    guide, params, q = online.guide, online.get_params(state), state.posterior
    scale = guide._unpack_latent(family_of(q).marginal_scale(q))
    np.testing.assert_allclose(guide.median(params)["a"], guide._unpack_latent(q.loc)["a"])
    quantiles = guide.quantiles(params, jnp.asarray([0.025, 0.975]))["b"]
    np.testing.assert_allclose(np.diff(quantiles, axis=0)[0], 2 * 1.959963984540054 * scale["b"], rtol=1e-8)
    draws = guide.sample_posterior(KEY, params, sample_shape=(4000,))
    assert draws["b"].shape == (4000, 2)
    np.testing.assert_allclose(np.std(draws["a"]), scale["a"], rtol=5 / np.sqrt(2 * 4000))
    predictive = Predictive(linear, guide=guide, params=params, num_samples=5)(KEY, x)
    assert predictive["y"].shape == (5, 40)
    shown = nt.to_inference_data(online, state, x, y, num_samples=50)
    assert shown["posterior"]["b"].shape == (1, 50, 2)
    back = guide.from_params(params)
    assert isinstance(back, type(q))
    np.testing.assert_allclose(family_of(q).kl(back, q), 0.0, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["low rank", *(pytest.param(n, marks=pytest.mark.slow) for n in ("diagonal", "full"))]
)
def test_guides_work_under_plain_svi(x64, name):
    """Stock NumPyro optimises the ELBO of the guide to the exact posterior."""
    x, y = data(10)
    guide = GUIDES[name](linear)
    svi = SVI(linear, guide, numpyro.optim.Adam(0.02), Trace_ELBO(num_particles=20))
    result = svi.run(KEY, 1500, x, y, progress_bar=False)
    mean, covariance = exact(np.asarray(x), np.asarray(y))
    found = guide.median(result.params)
    error = np.concatenate([np.ravel(found["a"]), found["b"]]) - mean
    # The last steps of Adam wander by a fraction of a standard deviation.
    np.testing.assert_array_less(np.abs(error), 0.35 * np.sqrt(np.diag(covariance)))


@pytest.mark.parametrize(
    "optim",
    [lambda g: nt.optim.SVA(g, 0.05), lambda g: nt.optim.SVB(g, 0.05), nt.optim.NGVI],
    ids=["SVA", "SVB", "NGVI"],
)
def test_the_svi_route_is_online_vi_on_a_full_covariance(x64, optim):
    x, y = data(12)
    expectation = ETA
    guide = AutoOnlineMultivariateNormal(linear)
    svi = SVI(linear, guide, optim(guide), nt.ExpectedNLL(expectation))
    update = jax.jit(svi.update)
    state = svi.init(KEY, x[:1], y[:1])
    rules = {"SVA": nt.online.sva(0.05), "SVB": nt.online.svb(0.05), "NGVI": nt.online.ngvi()}
    rule = rules[type(svi.optim).__name__]
    online = nt.OnlineVI(linear, AutoOnlineMultivariateNormal(linear), rule, expectation)
    ours = online.init(KEY, x[:1], y[:1])
    for t in range(12):
        state, value = update(state, x[t : t + 1], y[t : t + 1])
        ours, losses = online.update(ours, x[t : t + 1], y[t : t + 1])
        np.testing.assert_allclose(value, losses.expected, rtol=1e-8)
    found = guide.from_params(svi.get_params(state))
    for a, b in zip(by_name(guide, found), by_name(online.guide, ours.posterior), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-10)


def test_low_rank_has_no_svi_route():
    with pytest.raises(TypeError, match="use OnlineVI"):
        nt.optim.NGVI(AutoOnlineLowRankNormal(linear))


# The start


def scales(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("k", 2):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(theta.sum(), 1.0), obs=y)


@pytest.mark.full
def test_a_full_guide_matches_the_covariance_of_a_hierarchical_prior():
    guide = AutoOnlineMultivariateNormal(scales)
    with pytest.warns(UserWarning, match=r"tau.*theta.*mean and covariance"):
        handlers.seed(guide, KEY)(0.3)
    assert set(guide.moment_matched) == {"tau", "theta"}
    places = guide.layout.split(jnp.arange(4))
    covariance = np.asarray(guide.prior.factor @ guide.prior.factor.T)
    one, two = np.asarray(places["theta"])
    # Var theta = 4 + E tau² = 5 and Cov(theta_1, theta_2) = Var mu = 4, by moments of tau ~ HalfNormal(1).
    error = 5 * np.sqrt(2 / NUM_PRIOR_DRAWS) * 5
    np.testing.assert_allclose(covariance[one, two], 4.0, atol=error)
    np.testing.assert_allclose(covariance[one, one], 5.0, atol=2 * error)
    assert covariance[int(places["mu"]), int(places["mu"])] == 4.0


def test_rank_is_checked():
    with pytest.raises(ValueError, match="at least 1"):
        AutoOnlineLowRankNormal(linear, rank=0)
    guide = AutoOnlineLowRankNormal(linear, rank=7)
    with pytest.raises(ValueError, match="at most the number of coordinates, 3"):
        handlers.seed(guide, KEY)(*data(1))


# A posterior as the next prior, from any family to any other


@functools.cache
def twenty_rounds(name):
    before = nt.OnlineVI(linear, GUIDES[name](linear), nt.online.ngvi(), ETA)
    return before, before.run(KEY, *data(20))[0]


@pytest.mark.parametrize("second", GUIDES)
@pytest.mark.parametrize("first", GUIDES)
def test_a_state_is_a_prior_in_every_family(x64, first, second):
    x, y = data(20)
    before, state = twenty_rounds(first)

    def other_order(x, y=None):
        a = numpyro.sample("a", dist.Normal(1.0, 0.5))
        b = numpyro.sample("b", dist.Normal(jnp.array([0.5, -1.0]), 2.0).to_event(1))
        eta = numpyro.deterministic("eta", a + x @ b)
        numpyro.sample("y", dist.Normal(eta, 1.5), obs=y)

    online = nt.OnlineVI(other_order, GUIDES[second](other_order), nt.online.ngvi(), ETA)
    after = online.init(KEY, x[:1], y[:1], prior=state)
    median, expected = (o.guide.median(o.get_params(s)) for o, s in ((online, after), (before, state)))
    for name in ("a", "b"):
        np.testing.assert_allclose(median[name], expected[name], rtol=1e-10)
    scale, wanted = (
        o.guide._unpack_latent(family_of(s.posterior).marginal_scale(s.posterior))
        for o, s in ((online, after), (before, state))
    )
    for name in ("a", "b"):
        np.testing.assert_allclose(scale[name], wanted[name], rtol=1e-7)
    if "diagonal" not in (first, second):
        for ours, theirs in zip(
            by_name(online.guide, after.posterior), by_name(before.guide, state.posterior), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("second", ["full", pytest.param("diagonal", marks=pytest.mark.slow)])
def test_a_fit_is_a_prior_with_its_covariance(x64, second):
    x, y = data(20)
    fit = nt.fit_svi(KEY, linear, AutoMultivariateNormal, x, y, num_steps=100)
    online = nt.OnlineVI(linear, GUIDES[second](linear), nt.online.ngvi(), ETA)
    state = online.init(KEY, x[:1], y[:1], prior=fit)
    q = fit.guide.get_posterior(fit.params)
    covariance = np.asarray(q.covariance_matrix)
    # The order of sites is that of the model in both guides.
    np.testing.assert_allclose(state.posterior.loc, q.loc)
    found = (
        np.square(state.posterior.scale)
        if second == "diagonal"
        else state.posterior.factor @ state.posterior.factor.T
    )
    np.testing.assert_allclose(found, np.diag(covariance) if second == "diagonal" else covariance, rtol=1e-7)
    normal = nt.fit_svi(KEY, linear, AutoNormal, x, y, num_steps=50)
    state = online.init(KEY, x[:1], y[:1], prior=normal)
    np.testing.assert_allclose(online.guide._unpack_latent(state.posterior.loc)["a"], normal.params["a_auto_loc"])


def test_a_bare_gaussian_as_prior_is_converted(x64):
    x, y = data(1)
    factor = jnp.asarray([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.2, -0.3, 2.0]])
    q = FullRank(jnp.arange(3.0), factor)
    covariance = factor @ factor.T
    for name, expected in (("diagonal", MeanField), ("full", FullRank), ("low rank", LowRank)):
        online = nt.OnlineVI(linear, GUIDES[name](linear), nt.online.ngvi(), ETA)
        start = online.init(KEY, x, y, prior=q).posterior
        assert isinstance(start, expected)
        np.testing.assert_allclose(
            family_of(start).marginal_scale(start), np.sqrt(np.diag(covariance)), rtol=1e-8
        )
    with pytest.raises(ValueError, match=r"prior has \(2,\) coordinates"):
        online.init(KEY, x, y, prior=MeanField(jnp.zeros(2), jnp.ones(2)))


# What the start leaves out of the prior


def gamma_rate(y):
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", pytest.param("diagonal", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:the priors of")
def test_the_residual_of_the_prior_is_added_once(x64, name):
    """Without data the corrected Gaussian is the best one for the prior itself, by an independent search."""
    from scipy import optimize

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def negative_elbo(v):
        # log Gamma(3, 1) of exp(u) with its Jacobian: 3 u - exp(u), for u = m + s z.
        u = v[0] + np.exp(v[1]) * nodes
        return -(weights @ (3 * u - np.exp(u))) - v[1]

    m, log_s = optimize.minimize(negative_elbo, [0.0, 0.0], tol=1e-12).x
    online = nt.OnlineVI(gamma_rate, GUIDES[name](gamma_rate), nt.online.ngvi())
    state = online.init(KEY, jnp.ones(1))
    start = family_of(state.posterior).marginal_scale(state.posterior)[0]
    corrected = online.with_prior(state, jnp.ones(1), num_particles=2000)
    q = corrected.posterior
    scale = float(family_of(q).marginal_scale(q)[0])
    assert abs(float(start) / np.exp(log_s) - 1) > 0.01
    # Monte Carlo error of the mean and of the curvature, E exp(u), from 2000 draws.
    np.testing.assert_allclose(q.loc[0], m, atol=5 * np.exp(log_s) / np.sqrt(2000))
    np.testing.assert_allclose(scale, np.exp(log_s), rtol=5 * 0.5 * np.exp(log_s) / np.sqrt(2000))
    assert int(corrected.count) == int(state.count)


@pytest.mark.filterwarnings("ignore:the priors of")
def test_a_run_from_a_posterior_has_its_prior_already(x64):
    online = nt.OnlineVI(gamma_rate, AutoOnlineDiagonalNormal, nt.online.ngvi())
    first = online.init(KEY, jnp.ones(1))
    second = online.init(KEY, jnp.ones(1), prior=MeanField(jnp.ones(1), jnp.ones(1)))
    assert online.with_prior(first, jnp.ones(1)).count == 0
    with pytest.raises(ValueError, match="counted twice"):
        online.with_prior(second, jnp.ones(1))


def test_the_residual_needs_evidence_and_a_matched_prior(x64):
    x, y = data(1)
    online = nt.OnlineVI(linear, AutoOnlineDiagonalNormal(linear), nt.online.ngvi(), ETA)
    state = online.init(KEY, x, y)
    assert online.with_prior(state, x, y) is state
    sva = nt.OnlineVI(gamma_rate, AutoOnlineDiagonalNormal, nt.online.sva(0.1))
    with pytest.warns(UserWarning, match="rate"):
        state = sva.init(KEY, jnp.ones(1))
    with pytest.raises(TypeError, match="got sva on MeanField"):
        sva.with_prior(state, jnp.ones(1))
